"""PackedCollator.model_inputs: rows that a Hugging Face model or varlen_attention takes as they are."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data import PackedCollator, pad_batch_to_multiple, select_rows, slice_batch

EXAMPLES = [
    {"input_ids": list(range(first, first + length)), "num_actions": actions}
    for first, length, actions in ((3, 7, 4), (11, 5, 5), (20, 9, 1), (31, 2, 0), (35, 6, 6))
]


def on(device, batch):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@given(
    lengths=st.lists(st.integers(1, 12), min_size=3, max_size=9),
    sizes=st.sampled_from([{}, {"tp_size": 2}, {"cp_size": 2}, {"fp8": True}]),
    seed=st.integers(0, 99),
)
def test_every_token_has_its_document_and_label(device, lengths, sizes, seed):
    generator, first, examples = torch.Generator().manual_seed(seed), 1, []
    for length in lengths:
        mask = torch.randint(0, 2, (length,), generator=generator).tolist()
        examples.append({"input_ids": list(range(first, first + length)), "num_actions": length, "loss_mask": mask})
        first += length
    collator = PackedCollator(16, pad_token_id=0, **sizes)
    batch = on(device, collator(examples))
    inputs = collator.model_inputs(batch)
    rows, width = batch["sequences"].shape
    assert_same(inputs["input_ids"], batch["sequences"])
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"]
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    ends = inputs["cu_seq_lens_q"].tolist()
    assert ends[-1] == rows * width
    assert all(start < end for start, end in itertools.pairwise(ends)), "no document of no slots"
    assert {row * width for row in range(rows)} <= {*ends}, "no document over two rows"
    assert inputs["max_length_q"] == inputs["max_length_k"] == max(b - a for a, b in itertools.pairwise(ends))
    places = {}
    for t, token in enumerate(inputs["input_ids"].flatten().tolist()):
        places[token] = t
    for example in examples:
        for i, token in enumerate(example["input_ids"]):
            t = places[token]
            assert inputs["position_ids"].flatten()[t] == i
            assert t - i in ends
            weight = example["loss_mask"][i] if i else 0
            assert inputs["labels"].flatten()[t] == (token if weight else -100)
    assert (inputs["labels"][batch["attention_mask"] == 0] == -100).all()
    assert (inputs["labels"] != -100).sum() == (batch["loss_mask"] != 0).sum()


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 4}, {"cp_size": 2}])
def test_a_transformers_model_takes_them(device, sizes):
    """One call, and the loss of documents run one by one."""
    pytest.importorskip("transformers")
    from helpers.hf_models import tiny_model

    from packing_ops.integrations.transformers import apply_packing_ops

    model, collator = tiny_model("llama", device=device), PackedCollator(16, pad_token_id=1, **sizes)
    alone, count = 0.0, 0
    for example in EXAMPLES:
        ids = torch.tensor([example["input_ids"]], device=device)
        kept = min(example["num_actions"], ids.shape[1] - 1)
        logps = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        alone, count = alone - logps[len(logps) - kept :].sum(), count + kept
    assert apply_packing_ops(model)
    batch = on(device, collator(EXAMPLES))
    inputs = collator.model_inputs(batch)
    assert len(inputs["input_ids"]) > 1
    out = model(**inputs)
    torch.testing.assert_close(out.loss, alone / count, rtol=1e-5, atol=1e-5)
    targets = F.pad(batch["sequences"][:, 1:], (0, 1))
    losses = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    torch.testing.assert_close((losses[:, :-1] * batch["loss_mask"]).sum(), alone / count, rtol=1e-5, atol=1e-5)


def test_varlen_attention_takes_them(device):
    collator = PackedCollator(16, tp_size=2)
    batch = on(device, collator(EXAMPLES))
    inputs = collator.model_inputs(batch)
    q = torch.randn(inputs["input_ids"].numel(), 2, 16, device=device)
    out = po.varlen_attention(q, q, q, inputs["cu_seq_lens_q"])
    start = 0
    for row, lengths in enumerate(batch["sub_seq_lengths"]):
        start = row * batch["sequences"].shape[1]
        for length in lengths:
            document = q[start : start + length]
            cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device=device)
            alone = po.varlen_attention(document, document, document, cu_seqlens)
            torch.testing.assert_close(out[start : start + length], alone)
            start += -(-length // 2) * 2


def test_some_rows_and_dummy_rows(device):
    collator = PackedCollator(12)
    batch = on(device, collator(EXAMPLES))
    whole = collator.model_inputs(batch)
    rows = len(batch["sequences"])
    assert rows > 1
    for some, kept in (
        (select_rows(batch, [rows - 1, 0]), [rows - 1, 0]),
        (slice_batch(batch, 1, rows), list(range(1, rows))),
        (slice_batch(batch, 1, 1), []),
    ):
        inputs = collator.model_inputs(some)
        for name in ("input_ids", "position_ids", "labels"):
            assert_same(inputs[name], whole[name][kept])
        assert inputs["cu_seq_lens_q"][-1] == len(kept) * whole["input_ids"].shape[1]
    padded = collator.model_inputs(pad_batch_to_multiple(batch, rows + 1))
    assert (padded["labels"][rows:] == -100).all()
    assert_same(padded["position_ids"][rows:], whole["position_ids"][:1])
    assert (collator.model_inputs(batch, ignore_index=-1)["labels"] == -1).sum() == (whole["labels"] == -100).sum()


def test_rows_of_another_collator_are_named():
    batch = PackedCollator(16)(EXAMPLES)
    with pytest.raises(ValueError, match="sub_seq_lengths: expected documents that leave a multiple of 16"):
        PackedCollator(16, fp8=True).model_inputs(batch)
    with pytest.raises(ValueError, match=r"sub_seq_lengths: expected .* lists, one per row, got 1"):
        PackedCollator(16).model_inputs({**batch, "sub_seq_lengths": [[3]]})
