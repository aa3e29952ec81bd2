"""Models of trainers with enable_padding_free, called by themselves: what they leave as it is, layers with a state,
other positions, threads, another attention, accelerate.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("trl")
import transformers
from helpers.hf_models import CACHE, tiny_model
from helpers.trl_case import CLOSE, ROWS, both, reward_model, without_padding

import packing_ops as po
from packing_ops.integrations import trl as integration
from packing_ops.integrations.transformers import apply_packing_ops, info, revert_packing_ops

ROW = po.PackedMetadata.from_lengths([3, 2])
DOCUMENTS = {
    "cu_seq_lens_q": ROW.to_transformers(),
    "cu_seq_lens_k": {"cu_seq_lens_k": ROW.cu_seqlens},
    "seq_idx": {"seq_idx": ROW.seq_idx[None], "position_ids": ROW.position_ids[None]},
    "packed_seq_lengths": {**ROW.to_unsloth(), "position_ids": ROW.position_ids[None]},
}


@pytest.mark.parametrize("given", DOCUMENTS.values(), ids=DOCUMENTS)
@torch.no_grad()
def test_a_row_that_is_packed_already_keeps_its_documents(given):
    """Beside a mask of ones too, which some collators add."""
    models = both(tiny_model("llama", vocab_size=258), "DPOTrainer")
    ids = torch.arange(9, 14)[None]
    alone = [models[0](input_ids=part).logits for part in ids.split([3, 2], 1)]
    found = models[1](input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits
    torch.testing.assert_close(found, torch.cat(alone, 1), **CLOSE)
    with pytest.raises(ValueError, match="attention_mask: expected None beside segment_parents"):
        models[1](input_ids=ids, attention_mask=ids, segment_parents=ROW.cu_seqlens[:2])
    with pytest.raises(
        ValueError, match=r"expected one document in each row, got several, and Llama.* scores one token"
    ):
        both(reward_model("cpu"), "RewardTrainer")[1](input_ids=ids, attention_mask=torch.ones_like(ids), **given)


RESTART = {
    "no padding": ([[0, 1, 2, 0, 1]], [[1] * 5]),
    "beside padding": ([[0, 0, 1, 0, 1], [0, 1, 2, 3, 4]], [[0, 1, 1, 1, 1], [1] * 5]),
    "behind a hole": ([[0, 1, 9, 0, 1]], [[1, 1, 0, 1, 1]]),
    "no growth": ([[0, 1, 2, 2, 3]], [[1] * 5]),
}


@pytest.mark.parametrize("case", RESTART.values(), ids=RESTART)
@pytest.mark.parametrize("kind", ["DPOTrainer", "RewardTrainer"])
@torch.no_grad()
def test_positions_that_restart_beside_a_mask_are_refused(kind, case, device):
    """One row would be made of their documents."""
    model = tiny_model("llama", vocab_size=258) if kind == "DPOTrainer" else reward_model("cpu")
    model, packed = both(model.to(device), kind)
    positions, mask = (torch.tensor(each, device=device) for each in case)
    ids = torch.arange(9, 9 + mask.numel(), device=device).view(mask.shape)
    with pytest.raises(
        ValueError,
        match=r"^position_ids: expected one document in each row, got several, and enable_padding_free makes one of "
        "each row beside an attention_mask; leave attention_mask out",
    ):
        packed(input_ids=ids, attention_mask=mask, position_ids=positions)
    if kind == "DPOTrainer" and mask.all():  # as the error advises
        cut = [len(row) for row in positions[0].tensor_split((positions[0].diff() <= 0).nonzero()[:, 0].cpu() + 1)]
        alone = [model(input_ids=part).logits for part in ids.split(cut, 1)]
        torch.testing.assert_close(packed(input_ids=ids, position_ids=positions).logits, torch.cat(alone, 1), **CLOSE)


@pytest.mark.parametrize(
    ("positions", "got"), [([[0, 1, 0]], "list"), (torch.arange(3), r"\[3\]")], ids=["list", "1-D"]
)
def test_positions_of_another_form_are_named(positions, got):
    _, packed = both(tiny_model("llama"), "DPOTrainer")
    ids = torch.arange(4, 7)[None]
    with pytest.raises(
        ValueError, match=rf"^position_ids: expected a tensor \[1 or batch, seqlen\], or .*, got {got}$"
    ):
        packed(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=positions)


@torch.no_grad()
def test_a_call_with_a_cache_keeps_its_padded_rows():
    """They would not be where the next call's mask says."""
    _, packed = both(tiny_model("llama", vocab_size=258), "DPOTrainer")
    cache = transformers.DynamicCache(config=packed.config)
    packed(input_ids=ROWS * 9, attention_mask=ROWS, **{CACHE: cache})
    assert cache.layers[0].keys.shape[:3] == (3, 2, 7)


@pytest.mark.parametrize(
    "mask", [{"full_attention": None}, [[1] * 4], np.ones((1, 4), int)], ids=["dict", "list", "numpy"]
)
@pytest.mark.parametrize("applied", [False, True])
def test_masks_that_are_no_tensors_are_named(applied, mask):
    model, packed = both(tiny_model("llama"), "DPOTrainer")
    if applied:
        apply_packing_ops(model)
    with pytest.raises(TypeError, match=f"^attention_mask: expected a tensor, got {type(mask).__name__}"):
        (model if applied else packed)(input_ids=torch.arange(4, 8)[None], attention_mask=mask)


@torch.no_grad()
def test_masks_that_are_made_already_stay():
    """Gemma 3 takes one for each kind of layer."""
    model, packed = both(tiny_model("gemma3"), "DPOTrainer")
    ids = torch.arange(4, 16).view(2, 6)
    causal = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    masks = {"full_attention": causal, "sliding_attention": causal.triu(-4)}
    found = packed(input_ids=ids, attention_mask=masks, use_cache=False).logits
    torch.testing.assert_close(found, model(input_ids=ids, use_cache=False).logits, **CLOSE)


@torch.no_grad()
def test_a_packed_row_leaves_no_cache():
    """It would hold one row, and the next call's mask several."""
    _, packed = both(tiny_model("llama", vocab_size=258, use_cache=True), "DPOTrainer")
    assert getattr(packed(input_ids=ROWS * 9, attention_mask=ROWS), CACHE) is None
    assert packed(input_ids=ROWS * 9, attention_mask=ROWS, use_cache=True)[CACHE].layers[0].keys.shape[:3] == (3, 2, 7)


def test_two_threads_get_their_scores(monkeypatch):
    """Both run the head of the same model before either reads what it returned."""
    _, packed = both(reward_model("cpu"), "RewardTrainer")
    batches = [{"input_ids": torch.arange(n, n + 21).view(3, 7), "attention_mask": ROWS} for n in (9, 99)]
    wanted = [packed(**batch).logits for batch in batches]
    barrier, stock = threading.Barrier(2, timeout=60), type(packed).forward

    def forward(*args, **kwargs):
        barrier.wait()
        out = stock(*args, **kwargs)
        barrier.wait()
        return out

    monkeypatch.setattr(type(packed), "forward", forward)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda batch: packed(**batch).logits, batches))
    assert not torch.equal(*wanted)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert not packed.score._forward_hooks


HYBRIDS = {
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_dim": 32, "conv_dim": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 8, "expert_layer_period": 9,
              "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}  # fmt: skip


def hybrid(family, device):
    """A model whose layers carry a state along the row."""
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **sizes | HYBRIDS[family])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(device)


@pytest.mark.filterwarnings("ignore:apply_packing_ops. rope of")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["DPOTrainer", "DistillationTrainer"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_with_a_state(family, kind, checkpointing, device):
    """Distillation calls the model under the LM head. Mamba-2's LM passes no documents on to the model inside."""
    models, mask = both(hybrid(family, device), kind), ROWS.to(device)
    ids, results = torch.arange(9, 30, device=device).view(3, 7), []
    for model in models:
        called = model.base_model if kind == "DistillationTrainer" else model
        if checkpointing:
            model.train().gradient_checkpointing_enable({"use_reentrant": False})
        out = called(input_ids=ids, attention_mask=mask)[0][mask.bool()]
        out.square().mean().backward()
        results.append((out, [parameter.grad for parameter in called.parameters()]))
    (wanted, grads), (found, packed_grads) = results
    torch.testing.assert_close(found, wanted, **CLOSE)
    for ours, theirs in zip(packed_grads, grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:apply_packing_ops. rope of")
@torch.no_grad()
def test_positions_that_start_behind_the_pad_token(device):
    sizes = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.RobertaConfig(**sizes, num_attention_heads=4, is_decoder=True, use_cache=False)
    torch.manual_seed(0)
    models = both(transformers.RobertaForCausalLM(config).to(device), "DPOTrainer")
    mask = ROWS.to(device)
    ids = (torch.arange(9, 30, device=device).view(3, 7) * mask).masked_fill(mask == 0, config.pad_token_id)
    wanted, found = (model(input_ids=ids, attention_mask=mask).logits[mask.bool()] for model in models)
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.filterwarnings("ignore:apply_packing_ops. rope of")
def test_heads_that_score_the_first_token_are_refused(device):
    config = transformers.BertConfig(vocab_size=258, hidden_size=32, num_attention_heads=4, num_hidden_layers=1)
    _, packed = both(transformers.BertForSequenceClassification(config).to(device), "RewardTrainer")
    with pytest.raises(
        ValueError, match=r"expected one document in each row, got several, and Bert.* scores one token"
    ):
        packed(input_ids=ROWS.to(device), attention_mask=ROWS.to(device))


def under_accelerate(model):
    """As Accelerator.prepare_model does in mixed precision."""
    model._original_forward = model.forward
    model.forward = pytest.importorskip("accelerate").utils.convert_outputs_to_fp32(model.forward)
    return model


WITHOUT_ATTENTION = {
    "reverted": revert_packing_ops,
    "reverted under accelerate": lambda model: revert_packing_ops(under_accelerate(model)),
    "eager": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.filterwarnings("ignore:apply_packing_ops. rope of")
@pytest.mark.parametrize("leave", WITHOUT_ATTENTION.values(), ids=WITHOUT_ATTENTION)
@pytest.mark.parametrize("family", [*HYBRIDS, "llama"])
@torch.no_grad()
def test_without_the_attention_rows_are_padded_again(family, leave):
    """Nothing would keep documents apart."""
    model = tiny_model(family, vocab_size=258) if family == "llama" else hybrid(family, "cpu")
    model, packed = both(model, "DPOTrainer")
    called, mask = [], ROWS.flip(1)
    packed.get_decoder().layers[0].register_forward_pre_hook(lambda _, args: called.append(args[0].shape[:2]))
    given = {"input_ids": torch.arange(9, 30).view(3, 7), "attention_mask": mask}
    for _ in range(2):
        packed(**given)
        leave(packed)
        found = packed(**given).logits
        assert (called, "padding:" in info(packed)) == ([(1, 11), (3, 7)], False)
        torch.testing.assert_close(found[mask.bool()], model(**given).logits[mask.bool()], **CLOSE)
        without_padding(type("DPOTrainer", (), {"model": packed, "ref_model": None})())
        called.clear()


def test_a_forward_that_accelerate_wrapped_is_not_wrapped_again(device):
    model = tiny_model("llama", device=device)
    trainer = without_padding(type("DPOTrainer", (), {"model": model})())
    wrapped = under_accelerate(trainer.model).forward
    assert without_padding(trainer).model.forward is wrapped
    integration.revert_padding_free(trainer)
    assert (trainer.model.forward is wrapped, "padding:" in info(trainer.model)) == (True, False)
    rows, mask = [], ROWS.to(device)
    trainer.model.model.register_forward_pre_hook(
        lambda _, __, given: rows.append(len(given["input_ids"])), with_kwargs=True
    )
    for _ in range(2):
        trainer.model(input_ids=mask * 9, attention_mask=mask)
        assert without_padding(trainer).model.forward is wrapped
    assert rows == [3, 1]
