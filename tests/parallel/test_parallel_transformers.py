"""A transformers model whose rows are spread over several ranks: loss and gradients of one process, by itself, in DDP
and FSDP2.
"""

import contextlib
import functools
import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import torch.nn.functional as F
import transformers
from helpers.hf_models import tiny_model
from helpers.processes import message_of, spawn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops
from packing_ops.parallel import count_targets, shard_packed, sharded_loss

WORLDS = (2, 4)
LENGTHS = [9, 1, 22, 6]  # 38 slots: padded for 4 ranks
MODELS = ["llama", "gemma3", "gemma2", "gpt_oss"]  # plain; windows; softcap; sinks
ROPE = {  # Llamas whose RoPE is scaled by fixed numbers
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 8},
    "llama3": {
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


def batch_of(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    metadata = po.PackedMetadata.from_lengths(lengths)
    ids = torch.randint(3, 61, (1, sum(lengths)), generator=generator)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100),
        "position_ids": metadata.position_ids[None],
        **metadata.to_transformers(),
    }


def model_of(family, dtype=torch.float64, **options):
    """Key heads enough for every rank of 4 only in llama: the others repeat theirs."""
    heads = {"num_key_value_heads": 4} if family == "llama" else {}
    if family in ROPE:
        heads["rope_parameters"] = {"rope_type": family, "rope_theta": 1e4, **ROPE[family]}
    model = tiny_model("llama" if family in ROPE else family, dtype=dtype, **heads)
    apply_packing_ops(model, **options)
    return model


def loss_of(model, batch, group=None):
    """The whole loss, and in a group this rank's share of it times the ranks, as DDP and FSDP average gradients."""
    inputs = {name: value for name, value in batch.items() if "labels" not in name}
    logits = model(**inputs).logits[0]
    if group is None:
        targets = po.shift_labels(batch["labels"], batch["cu_seq_lens_q"])[0]
        return F.cross_entropy(logits, targets)
    targets = batch["shift_labels"][0]
    losses = F.cross_entropy(logits, targets, reduction="none")
    return sharded_loss(losses, targets, group, dp_size=group.size())


def gradients_of(model):
    return {
        name.removeprefix("module."): p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def difference(found, wanted):
    assert found.keys() == wanted.keys()
    assert len(wanted) > 8
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


def trained(family, *, scheme="contiguous", around="nothing", checkpointing=False):
    """(difference of the loss, of the gradients) from one process."""
    group = dist.group.WORLD
    one = model_of(family)
    expected = loss_of(one, batch_of())
    expected.backward()
    model = model_of(family, sequence_group=group, sequence_scheme=scheme)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if around == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=False)
    elif around == "fsdp2":
        mesh = init_device_mesh("cpu", (group.size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    loss = loss_of(model, shard_packed(batch_of(), group, scheme=scheme), group)
    return from_one_process(model, loss, one, expected, group, averaged=around != "nothing")


def from_one_process(model, loss, one, expected, group, *, averaged):
    """(difference of the loss, of the gradients) of ranks from the model of one process. averaged: gradients, by DDP or
    FSDP2.
    """
    loss.backward()
    gradients = gradients_of(model)
    if not averaged:
        for gradient in gradients.values():
            dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
            gradient /= group.size()
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return (loss / group.size() - expected).abs().item(), difference(gradients, gradients_of(one))


def own_loss(fused):
    """transformers' loss of shift_labels, and the one from hidden states."""
    one, group = model_of("llama", torch.float32), dist.group.WORLD
    batch = batch_of()
    batch["labels"] = po.mask_boundary_labels(batch["labels"], batch["cu_seq_lens_q"])
    expected = one(**batch)
    expected.loss.backward()
    model = model_of("llama", torch.float32, sequence_group=group, fused_loss=fused)
    shard = shard_packed(batch, group)
    output = model(**shard, num_items_in_batch=count_targets(shard["shift_labels"], group))
    assert (output.logits is None) == fused
    output.loss.backward()
    gradients = gradients_of(model)
    loss = output.loss.detach().clone()
    for each in (loss, *gradients.values()):
        dist.all_reduce(each)
    return (loss - expected.loss).abs().item(), difference(gradients, gradients_of(one))


def refusals():
    group, batch = dist.group.WORLD, batch_of()
    model = model_of("llama", sequence_group=group)
    shard = shard_packed(batch, group)
    without = {name: [key for key in shard if key != name] for name in shard}
    unlabelled = {name: value for name, value in shard.items() if "labels" not in name}
    found = {
        name: message_of(lambda name=name: model(**{key: shard[key] for key in without[name]}))
        for name in ("cu_seq_lens_q", "position_ids", "shift_labels")
    }
    found["num_items_in_batch"] = message_of(lambda: model(**shard))
    whole = {name: value for name, value in batch.items() if name != "labels"}
    found["cu_seq_lens_q of a row that is not sharded"] = message_of(lambda: model(**whole))
    own = torch.tensor([0, shard["input_ids"].shape[1]], dtype=torch.int32)
    found["cu_seq_lens_q of the part"] = message_of(lambda: model(**unlabelled | {"cu_seq_lens_q": own}))
    found["attention_mask"] = message_of(
        lambda: model(**unlabelled, attention_mask=torch.ones_like(shard["input_ids"]))
    )
    model.set_attn_implementation("eager")
    found["another attention"] = message_of(lambda: model(**unlabelled))
    found["a row of one rank"] = message_of(lambda: model(batch["input_ids"]))
    revert_packing_ops(model)
    apply_packing_ops(model)
    found["reverted"] = message_of(lambda: model(**batch))
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    scaled = tiny_model("llama", rope_parameters=dynamic)
    found["rope"] = message_of(lambda: apply_packing_ops(scaled, sequence_group=group))
    return found


@contextlib.contextmanager
def another_library_s_ulysses(drops_mask=False):
    """As DeepSpeed and accelerate wrap an attention: it is called with gathered rows of a part of the heads.

    DeepSpeed's UlyssesSPAttentionHF passes no mask on.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE

    stock, rank, ranks = TABLE["packing_ops"], dist.get_rank(), dist.get_world_size()

    def gathered(heads):
        whole = torch.cat(collectives.all_gather(heads.contiguous()), 2)
        count = whole.shape[1] // ranks
        return whole[:, rank * count : (rank + 1) * count]

    def wrapped(module, query, key, value, attention_mask, *args, position_ids=None, **kwargs):
        every = [torch.empty_like(position_ids) for _ in range(ranks)]
        dist.all_gather(every, position_ids.contiguous())
        heads = map(gathered, (query, key, value))
        attention_mask = None if drops_mask else attention_mask
        out, _ = stock(module, *heads, attention_mask, *args, position_ids=torch.cat(every, 1), **kwargs)
        whole = torch.cat(collectives.all_gather(out.contiguous()), 2)
        return whole.chunk(ranks, 1)[rank], None

    TABLE.register("packing_ops", wrapped)
    try:
        yield
    finally:
        TABLE.register("packing_ops", stock)


def numbers_of(position_ids):
    """Documents of at most three tokens, of which none goes on where positions start again."""
    return ((position_ids == 0) | (torch.arange(position_ids.shape[1]) % 3 == 0)).cumsum(1)


def under_another_library(mask=None, *, family="llama", drops_mask=False, cu_seqlens=False):
    ranks = dist.get_world_size()
    batch = batch_of([9, 1, 20, 6])
    model = tiny_model(family, dtype=torch.float64, num_key_value_heads=4)
    apply_packing_ops(model)
    expected = model(**batch).logits.chunk(ranks, 1)[dist.get_rank()]
    own = {name: batch[name].chunk(ranks, 1)[dist.get_rank()] for name in ("input_ids", "position_ids")}
    if mask is not None:
        own["attention_mask"] = mask(own["input_ids"]) if mask != "numbers" else numbers_of(own["position_ids"])
    if cu_seqlens:  # of the rank's part, with whose positions they agree
        own |= po.PackedMetadata.from_position_ids(own["position_ids"]).to_transformers()
    with another_library_s_ulysses(drops_mask):
        return (model(**own).logits - expected).abs().max().item()


def phimoe_under_another_library(sliding_window):
    """It passes its window only to the mask."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 2}
    config = transformers.PhimoeConfig(**sizes, **heads, sliding_window=sliding_window)
    model = transformers.PhimoeForCausalLM(config)
    apply_packing_ops(model)
    with another_library_s_ulysses(drops_mask=True):
        model(torch.arange(9)[None], position_ids=9 * dist.get_rank() + torch.arange(9)[None])


def without_masks():
    """The result of calls whose masks say something, where the other library drops them."""

    def dropped(mask=None, **given):
        return message_of(lambda: under_another_library(mask, drops_mask=True, **given))

    return {
        "window": under_another_library(family="gemma3", drops_mask=True),
        "ones": under_another_library(torch.ones_like, drops_mask=True),
        "padding": dropped(lambda ids: ids.ne(ids[0, 0]).long()),
        "bool padding": dropped(lambda ids: ids.ne(ids[0, 0])),
        "numbers": dropped("numbers"),
        "4-D": dropped(lambda ids: torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool)),
        "cu_seq_lens_q": dropped(cu_seqlens=True),
        "no window": message_of(lambda: phimoe_under_another_library(None)),
        "window of the mask": message_of(lambda: phimoe_under_another_library(5)),
    }


def every_case():
    found = {}
    for family in (*MODELS, *ROPE):
        found[family] = trained(family)
    found["zigzag"] = trained("gemma3", scheme="zigzag")
    found["ddp"] = trained("llama", around="ddp")
    found["fsdp2"] = trained("gpt_oss", around="fsdp2")
    found["checkpointing"] = trained("gemma3", checkpointing=True, around="fsdp2")
    found["own loss"], found["fused loss"] = own_loss(False), own_loss(True)
    found["another library"] = under_another_library()
    found["another library, ones"] = under_another_library(torch.ones_like)
    found["another library, padding"] = message_of(lambda: under_another_library(lambda ids: ids.ne(ids[0, 0]).long()))
    found["refusals"], found["without masks"] = refusals(), without_masks()
    return found


@pytest.fixture(scope="module", params=WORLDS)
def by_rank(request, tmp_path_factory):
    return spawn(every_case, request.param, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", [*MODELS, *ROPE, "zigzag", "ddp", "fsdp2", "checkpointing"])
def test_sharded_rows_train_as_whole_ones(case, by_rank):
    """Loss and the gradient of every parameter, in float64; Gemma's norms are float32 inside."""
    for found in by_rank:
        loss, gradients = found[case]
        assert loss <= 1e-12
        assert gradients <= (1e-6 if case.startswith("gemma") or case in ("zigzag", "checkpointing") else 1e-12)


@pytest.mark.parametrize("case", ["own loss", "fused loss"])
def test_the_model_s_own_loss(case, by_rank):
    for found in by_rank:
        assert max(found[case]) <= 1e-5


def test_attention_under_another_library_s_ulysses(by_rank):
    """The documents of gathered rows are found by their position_ids; padding, which is not gathered, is refused."""
    for found in by_rank:
        assert found["another library"] <= 1e-12
        assert found["another library, ones"] <= 1e-12
        assert "attention_mask: expected None or all ones where rows of" in found["another library, padding"]


def test_masks_that_another_library_drops(by_rank):
    """DeepSpeed's wrapper passes none on: what they say is found by the call of the model, or refused."""
    for found in by_rank:
        told = found["without masks"]
        assert max(told["window"], told["ones"]) <= 1e-12
        assert told["no window"] == "no error"
        for case in ("padding", "bool padding", "numbers", "4-D"):
            assert "attention_mask: expected None or all ones where rows of" in told[case], case
        assert "cu_seq_lens_q: expected None where rows of" in told["cu_seq_lens_q"]
        assert "attention_mask: expected to reach attention" in told["window of the mask"]


WORDS = {
    "cu_seq_lens_q": "cu_seq_lens_q: expected int32 [num_documents + 1] of the whole row",
    "position_ids": "position_ids: expected [1, rows] of this rank's slots",
    "shift_labels": "shift_labels: expected beside labels with a sequence_group",
    "num_items_in_batch": "num_items_in_batch: expected beside labels with a sequence_group, count_targets counts",
    "attention_mask": "attention_mask: expected None with a sequence_group",
    "rope": "sequence_group: expected a model whose attention runs over several ranks, got LlamaForCausalLM scales RoPE",
    "cu_seq_lens_q of a row that is not sharded": "cu_seq_lens_q: expected to end at ",
    "cu_seq_lens_q of the part": "cu_seq_lens_q: expected to end at ",
    "another attention": "cu_seq_lens_q: expected a row of this rank alone, got a sequence_group's",
}


@pytest.mark.parametrize("case", WORDS)
def test_calls_that_would_be_wrong_are_refused(case, by_rank):
    for found in by_rank:
        assert found["refusals"][case].startswith(f"ValueError: {WORDS[case]}")
        assert found["refusals"]["a row of one rank"] == found["refusals"]["reverted"] == "no error"


def tensor_parallel_step(folder):
    """By transformers' plan: the loss of a packed row, the gradient of the first norm, and what was not swapped."""
    os.environ.update({"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": "2"})
    options = {"distributed_config": DistributedConfig(tp_plan="auto"), "device_mesh": init_device_mesh("cpu", (2,))}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).train()
    sharded = model.lm_head.weight.to_local().shape != model.lm_head.weight.shape
    skipped = apply_packing_ops(model, fused_loss=True).skipped
    loss = model(**batch_of(), use_cache=False).loss
    loss.backward()
    return sharded, loss.detach(), model.get_decoder().layers[0].input_layernorm.weight.grad, skipped


def test_tensor_parallel_model(tmp_path):
    whole = tiny_model("llama", vocab_size=64)
    whole.save_pretrained(tmp_path / "model")
    apply_packing_ops(whole, fused_loss=True)
    loss = whole(**batch_of()).loss
    loss.backward()
    for sharded, found, gradient, skipped in spawn(
        functools.partial(tensor_parallel_step, tmp_path / "model"), 2, tmp_path
    ):
        assert sharded
        torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=0)
        wanted = whole.get_decoder().layers[0].input_layernorm.weight.grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)
        assert list(skipped) == ["fused_loss"]


def averaged_gradients(packed, wrapper="fsdp2", adapters=None, **policies):
    """Of a float32 model on two ranks, on a packed row of each rank with ours, or on its documents one by one."""
    model = tiny_model("qwen3")
    layers = model.model.layers
    if adapters is not None:
        import peft

        torch.manual_seed(7)
        model = peft.get_peft_model(model, adapters)
    if packed:
        apply_packing_ops(model, fused_loss=True)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    for module in (*layers, model) if wrapper == "fsdp2" else ():
        fully_shard(module, **policies)
    row = batch_of()
    row["input_ids"] = (row["input_ids"] + dist.get_rank()) % 61
    rows = [row] if packed else [{"input_ids": ids, "labels": ids} for ids in row["input_ids"].split(LENGTHS, 1)]
    for batch in rows:
        batch["labels"] = batch["input_ids"]
        model(**batch, num_items_in_batch=sum(LENGTHS) - len(LENGTHS)).loss.backward()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return torch.cat([gradient.flatten() for gradient in gradients_of(model).values()])


def policies_of_fsdp2():
    """Errors of gradients: of ours with an offload policy; of the stock model and of ours in the mixed precision of
    docs/parallel.md.
    """
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    mixed = {"mp_policy": MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)}
    exact = averaged_gradients(False)

    def error(packed, **policies):
        return float((averaged_gradients(packed, **policies) - exact).norm() / exact.norm())

    offload = error(True, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return offload, error(False, **mixed), error(True, **mixed)


def test_policies_of_fsdp2(tmp_path):
    for offloaded, stock, ours in spawn(policies_of_fsdp2, 2, tmp_path):
        assert offloaded <= 1e-5
        assert 1e-4 <= ours <= 2 * stock


def adapters_around():
    """Errors of the gradients of LoRA's adapters, in DDP and FSDP2."""
    import peft

    adapters, errors = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False), []
    for wrapper in ("ddp", "fsdp2"):
        found, wanted = (averaged_gradients(packed, wrapper, adapters) for packed in (True, False))
        errors.append(float((found - wanted).norm() / wanted.norm()))
    return errors


def test_adapters_in_ddp_and_fsdp2(tmp_path):
    pytest.importorskip("peft")
    assert max(error for rank in spawn(adapters_around, 2, tmp_path) for error in rank) <= 1e-5
