"""open-instruct's test of padding-free training with Bamba, without mamba_ssm: packed, padded and mixed."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_same
from helpers.hf_images import tiny_image_model

pytest.importorskip("transformers")

from transformers import BambaConfig, BambaForCausalLM, LlamaConfig, LlamaForCausalLM

from packing_ops.contrib.open_instruct import TensorDataCollatorWithFlattening, mixing_warning
from packing_ops.integrations.transformers import apply_packing_ops

VOCABULARY, LENGTHS = 128, [31, 19]
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0, "num_hidden_layers": 2}
MAMBA = {"mamba_n_heads": 16, "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_chunk_size": 16}


def bamba(dtype, device):
    torch.manual_seed(42)
    config = BambaConfig(**SIZES, **MAMBA, attn_layer_indices=[1], attn_rotary_emb=8, use_cache=False)
    return BambaForCausalLM(config).to(device, dtype)


def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def packed_batch(device):
    batch = TensorDataCollatorWithFlattening()([{"input_ids": ids, "labels": ids.clone()} for ids in documents()])
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_packed_bamba_trains_as_a_padded_one(dtype, device):
    padded = bamba(dtype, device)
    apply_packing_ops(padded)
    packed = deepcopy(padded)
    ids = torch.nn.utils.rnn.pad_sequence(documents(), batch_first=True).to(device)
    mask, batch = ids > 0, packed_batch(device)
    theirs = padded(ids, attention_mask=mask.long(), labels=ids.where(mask, -100))
    ours = packed(**batch)
    assert_same(ours.logits[0], theirs.logits[mask])
    assert_same(ours.loss, theirs.loss)
    wrong = padded(batch["input_ids"], attention_mask=torch.ones_like(batch["input_ids"])).logits
    assert (wrong - ours.logits).abs().max() > 0.05
    theirs.loss.backward()
    ours.loss.backward()
    for mine, other in zip(packed.parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_a_model_that_mixes_documents_is_named(device):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device).train()
    batch = packed_batch(device)
    before = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert mixing_warning(model, batch) is None
    assert model.training
    ones = torch.ones_like(batch["input_ids"])
    assert "LlamaForCausalLM mixes the documents of a packed row" in mixing_warning(
        model, {**batch, "attention_mask": ones}
    )
    by_positions = {name: batch[name] for name in ("input_ids", "position_ids")}
    assert mixing_warning(model, by_positions) is None
    for name, value in before.items():
        assert_same(batch[name], value)


def test_layers_with_a_state_are_seen(device):
    model, batch = bamba(torch.bfloat16, device), packed_batch(device)
    without_numbers = {
        name: value for name, value in batch.items() if name != "seq_idx"
    }  # which the stock layers refuse
    assert "BambaForCausalLM mixes" in mixing_warning(model, without_numbers)
    apply_packing_ops(model)
    assert mixing_warning(model, batch) is None


def test_one_document_and_no_documents(device):
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device)
    alone = TensorDataCollatorWithFlattening()([{"input_ids": [5, 6]}])
    assert mixing_warning(model, alone) is None
    with pytest.raises(ValueError, match=r"batch: expected cu_seq_lens_q or position_ids, got \['input_ids'\]"):
        mixing_warning(model, {"input_ids": torch.zeros(1, 4, dtype=torch.int64)})


def test_a_warning_does_not_hang_on_the_tokens(device):
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device)
    for first in ([8], [8, 6, 8], [7, 7, 8]):  # the last token of the row begins and ends a document
        batch = TensorDataCollatorWithFlattening()([{"input_ids": first}, {"input_ids": [7, 8]}])
        batch = {name: batch[name].to(device) for name in ("input_ids", "cu_seq_lens_q", "position_ids")}
        ones = torch.ones_like(batch["input_ids"])
        assert "mixes" in mixing_warning(model, {**batch, "attention_mask": ones})
        empty_last = {
            **batch,
            "cu_seq_lens_q": torch.nn.functional.pad(batch["cu_seq_lens_q"], (0, 1), value=ones.numel()),
        }
        assert "mixes" in mixing_warning(model, {**empty_last, "attention_mask": ones})


def test_a_warning_leaves_frozen_parts_in_evaluation(device):
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).to(device).train()
    model.model.layers[0].eval()
    mixing_warning(model, packed_batch(device))
    assert [module.training for module in (model, model.model.layers[0].mlp, model.model.layers[1].mlp)] == [
        True,
        False,
        True,
    ]


def test_padding_and_infinite_logits_are_no_reason_to_warn():
    class Undefined(torch.nn.Module):
        """A model whose padding has whatever was in memory, and -inf for ids that no token has."""

        def forward(self, input_ids, cu_seq_lens_q, **_):
            logits = torch.nn.functional.one_hot(input_ids, 12).float()
            logits[:, int(cu_seq_lens_q[-1]) :] += torch.randn(1)
            logits[..., 10:] = -torch.inf
            return SimpleNamespace(logits=logits)

    batch = TensorDataCollatorWithFlattening(max_seq_length=9)([{"input_ids": [5, 6]}, {"input_ids": [7, 8]}])
    assert mixing_warning(Undefined(), batch) is None


def test_several_rows_are_no_packed_row():
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "position_ids": torch.zeros(2, 4, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"input_ids: expected a row \[1, total\], got \[2, 4\]"):
        mixing_warning(torch.nn.Identity(), batch)


def test_a_document_that_begins_with_an_image(device):
    """Its first rows are all at time 0: they begin no documents."""
    model = tiny_image_model("qwen2_vl").to(device)
    text = torch.arange(5).expand(3, 5)
    image = torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
    positions = torch.cat([text, text, image], 1)[:, None].to(device)
    batch = {"input_ids": torch.randint(3, 61, (1, 14), device=device), "position_ids": positions}
    assert "mixes" in mixing_warning(model, batch)
    apply_packing_ops(model)
    assert mixing_warning(model, batch) is None
