"""empty_like_batch: a rank without sequences takes part in a step and changes nothing in it."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, cu_seqlens_of, fresh_process
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data import (
    PackedCollator,
    PaddingFreeCollator,
    empty_like_batch,
    masked_loss,
    num_rows,
    select_rows,
    sequence_logps,
    token_budget_microbatches,
)

EXAMPLES = [{"input_ids": [5, 6, 7], "num_actions": 2}, {"input_ids": [8, 9, 4, 3], "num_actions": 3}]


def test_a_row_of_a_collator(device):
    row = PaddingFreeCollator()([{"input_ids": torch.tensor(e["input_ids"], device=device)} for e in EXAMPLES])
    empty = empty_like_batch(row)
    assert empty.keys() == row.keys()
    for name in ("input_ids", "labels", "position_ids", "seq_idx"):
        assert_same(empty[name], row[name].new_empty(1, 0))
    assert_same(empty["cu_seq_lens_q"], cu_seqlens_of([], device))
    assert (empty["max_length_q"], empty["max_length_k"]) == (0, 0)
    assert row["input_ids"].shape == (1, 7), "left as it was"


@given(lengths=st.lists(st.integers(0, 4), max_size=4), batched=st.booleans())
def test_fields_of_every_kind(device, lengths, batched):
    total, documents = sum(lengths), len(lengths)
    tokens = (1, total) if batched else (total,)
    batch = {
        "input_ids": torch.zeros(tokens, dtype=torch.int64, device=device),
        "advantages": torch.zeros(tokens, dtype=torch.bfloat16, device=device),
        "hidden": torch.zeros(*tokens, 3, device=device),
        "position_ids": torch.zeros(3, *tokens, dtype=torch.int32, device=device),
        "rewards": torch.zeros(documents, device=device),
        "pooled": torch.zeros(documents, 5, device=device),
        "uids": [f"p{i}" for i in range(documents)],
        "array": np.zeros(documents),
        "cu_seqlens": cu_seqlens_of(lengths, device),
        "max_seqlen": max(lengths, default=0),
        "layout": po.PackedMetadata.from_lengths(lengths, device=device),
        "nested": {"loss_mask": torch.zeros(tokens, device=device), "step": 3},
        "temperature": 0.5,
        "scale": torch.ones((), device=device),
    }
    empty = empty_like_batch(batch)
    none = (1, 0) if batched else (0,)
    shapes = {name: tuple(value.shape) for name, value in empty.items() if hasattr(value, "shape")}
    assert shapes == {
        "input_ids": none,
        "advantages": none,
        "hidden": (*none, 3),
        "position_ids": (3, *none),
        "rewards": (0,),
        "pooled": (0, 5),
        "array": (0,),
        "cu_seqlens": (1,),
        "scale": (),
    }
    assert empty["cu_seqlens"].tolist() == [0]
    assert (empty["uids"], empty["max_seqlen"], empty["temperature"]) == ([], 0, 0.5)
    assert (empty["layout"].total, empty["layout"].num_documents, empty["layout"].max_seqlen) == (0, 0, 0)
    assert (tuple(empty["nested"]["loss_mask"].shape), empty["nested"]["step"]) == (none, 3)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            assert (empty[name].dtype, empty[name].device) == (value.dtype, value.device)
    assert empty_like_batch(empty).keys() == batch.keys()


def test_slots_of_padding(device):
    batch = {
        "input_ids": torch.ones(1, 7, dtype=torch.int64, device=device),
        "labels": torch.ones(1, 7, dtype=torch.int64, device=device),
        "loss_mask": torch.ones(1, 7, device=device),
        "rewards": torch.ones(2, device=device),
        "cu_seqlens": cu_seqlens_of([3, 4], device),
        "cu_seq_lens_q": cu_seqlens_of([3, 4], device),
        "max_seqlen": 4,
        "max_length_q": 4,
        "layout": po.PackedMetadata.from_lengths([3, 4], device=device),
    }
    empty = empty_like_batch(batch, padding=2)
    assert (empty["input_ids"].tolist(), empty["labels"].tolist()) == ([[0, 0]], [[-100, -100]])
    assert (empty["loss_mask"].tolist(), empty["rewards"].tolist()) == ([[0, 0]], [])
    assert (empty["cu_seqlens"].tolist(), empty["max_seqlen"]) == ([0], 0)
    assert (empty["cu_seq_lens_q"].tolist(), empty["max_length_q"]) == ([0, 2], 2)
    assert (empty["layout"].total, empty["layout"].num_documents) == (2, 0)
    assert empty["layout"].to_transformers()["cu_seq_lens_q"].tolist() == [0, 2]
    with pytest.raises(ValueError, match="padding: expected at least 0 slots, got -1"):
        empty_like_batch(batch, padding=-1)
    with pytest.raises(ValueError, match="padding: expected 0 for a batch without cu_seqlens, got 1"):
        empty_like_batch({"ids": torch.ones(2, 3)}, padding=1)


def test_padded_and_packed_rows():
    batch = PackedCollator(8)(EXAMPLES)
    empty = empty_like_batch(batch)
    assert empty.keys() == batch.keys()
    assert num_rows(empty) == 0
    assert (empty["order"], empty["sub_seq_lengths"], empty["response_length"]) == ([], [], 6)
    inputs = PackedCollator(8).model_inputs(empty)
    assert inputs["input_ids"].shape == inputs["labels"].shape == (0, 7)
    assert inputs["cu_seq_lens_q"].tolist() == [0]
    rows = PackedCollator(4).model_inputs(PackedCollator(4)(EXAMPLES))
    assert rows["input_ids"].shape == (2, 4)
    assert empty_like_batch(rows)["input_ids"].shape == empty_like_batch(rows)["position_ids"].shape == (1, 0)


def test_an_empty_batch_holds_no_memory_of_the_other():
    batch = {"input_ids": torch.zeros(1, 1000), "cu_seqlens": cu_seqlens_of([400, 600]), "rewards": torch.zeros(2)}
    assert all(value.untyped_storage().nbytes() <= 4 for value in empty_like_batch(batch).values())
    assert empty_like_batch({"rows": torch.zeros(9, 1000)})["rows"].untyped_storage().nbytes() == 0


def test_packed_rows_without_their_tokens_are_named():
    with pytest.raises(ValueError, match=r"input_ids: expected a tensor .*, got only \['cu_seqlens', 'ids'\]"):
        empty_like_batch({"ids": torch.zeros(3), "cu_seqlens": cu_seqlens_of([3])})
    assert empty_like_batch({"ids": torch.zeros(3), "cu_seqlens": cu_seqlens_of([3])}, tokens="ids")["ids"].shape == (
        0,
    )


def test_images_in_packed_rows_are_refused():
    """A vision tower of transformers runs no empty batch."""
    row = {"input_ids": torch.zeros(1, 3), "cu_seqlens": cu_seqlens_of([3]), "pixel_values": torch.zeros(4, 3)}
    with pytest.raises(NotImplementedError, match=r"pixel_values: expected a batch of text, .* labels are all -100"):
        empty_like_batch(row)
    assert empty_like_batch({**row, "pixel_values": None})["input_ids"].shape == (1, 0)


# --- a step without tokens ---


def everything(x, cu_seqlens):
    """Every function with a gradient on a packed row ``x`` [total, 4], summed."""
    total = len(x)
    metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=total)
    q = x[:, None].expand(-1, 2, -1)
    q, k = po.apply_rotary_qk(q, q[:, :1], *torch.rand(2, 8, 2, device=x.device), metadata.position_ids)
    out = po.varlen_attention(q, k, k, cu_seqlens)
    labels = torch.arange(total, device=x.device) % 4
    losses = F.cross_entropy(x, po.shift_labels(labels, cu_seqlens), reduction="none")
    mask = po.shift_values(torch.ones(total, device=x.device), cu_seqlens)
    parts = [
        out,
        sequence_logps(x, labels, cu_seqlens),
        *(masked_loss(losses, mask, num_items_in_batch=n, cu_seqlens=cu_seqlens) for n in (0, 7)),
        masked_loss(losses, mask, num_items_in_batch=7, cu_seqlens=cu_seqlens, reduction="sequence_mean"),
        po.segment_sum(losses, cu_seqlens),
        po.segment_broadcast(po.segment_std(losses, cu_seqlens), cu_seqlens, total),
        metadata.unpad(metadata.pad(x)),
    ]
    return sum(part.sum() for part in parts)


@pytest.mark.parametrize("padding", [0, 1, 3])
def test_losses_of_no_tokens_are_zero_with_a_graph(device, padding):
    row = {"input_ids": torch.zeros(7, dtype=torch.int64, device=device), "cu_seqlens": cu_seqlens_of([3, 4], device)}
    row = empty_like_batch(row, padding=padding)
    weight = torch.randn(9, 4, device=device, requires_grad=True)
    loss = everything(F.embedding(row["input_ids"], weight), row["cu_seqlens"])
    assert loss == 0
    loss.backward()
    assert_same(weight.grad, torch.zeros_like(weight))


def test_a_padded_batch_of_no_rows(device):
    """select_rows of token_budget_microbatches' empty list, unpadded as the others are."""
    assert token_budget_microbatches([3], 8, dp_size=2) == [[[0]], [[]]]
    batch = {"input_ids": torch.zeros(2, 5, dtype=torch.int64, device=device)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch = select_rows(batch, [])
    metadata = po.PackedMetadata.from_attention_mask(batch["attention_mask"])
    weight = torch.randn(9, 4, device=device, requires_grad=True)
    x = metadata.unpad(F.embedding(batch["input_ids"], weight))
    assert x.shape == (0, 4)
    padded = metadata.pad(x)
    assert padded.shape == (0, 5, 4)
    (everything(x, metadata.cu_seqlens) + padded.sum()).backward()
    assert_same(weight.grad, torch.zeros_like(weight))


def test_a_transformers_model_runs_it(device):
    pytest.importorskip("transformers")
    from helpers.hf_models import tiny_model

    from packing_ops.integrations.transformers import apply_packing_ops

    model = tiny_model("llama", device=device)
    assert apply_packing_ops(model)
    examples = [{"input_ids": torch.tensor(e["input_ids"], device=device)} for e in EXAMPLES]
    rows = PaddingFreeCollator(return_seq_idx=False)(examples)
    out = model(**empty_like_batch(rows, padding=1), num_items_in_batch=5)
    assert out.loss == 0
    assert out.logits.shape[:2] == (1, 1)
    out.loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


WORKER = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, "examples")
from common.tiny_llama import Config, TinyLlama

import packing_ops as po
from packing_ops.data import empty_like_batch, masked_loss

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = TinyLlama(Config(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1))
metadata = po.PackedMetadata.from_lengths([3, 4])
labels = torch.arange(7)
row = {"input_ids": labels, "cu_seqlens": metadata.cu_seqlens, "position_ids": metadata.position_ids}


def loss_of(model, row, dp_size):
    logits = model(row["input_ids"], row["position_ids"], row["cu_seqlens"])
    targets = po.shift_labels(row["input_ids"], row["cu_seqlens"])
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return masked_loss(losses, targets != -100, num_items_in_batch=5, dp_size=dp_size)


loss_of(model, row, 1).backward()
alone = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
parallel = DistributedDataParallel(model)
loss = loss_of(parallel, row if rank == 0 else empty_like_batch(row), 2)
assert rank == 0 or loss == 0
loss.backward()
for p, wanted in zip(model.parameters(), alone, strict=True):
    torch.testing.assert_close(p.grad, wanted)
print(f"rank {rank} equal")
"""


def test_two_ranks_one_without_sequences(tmp_path):
    printed = fresh_process.run_ranks(2, "-c", WORKER, folder=tmp_path)
    assert printed == ["rank 0 equal\n", "rank 1 equal\n"]
