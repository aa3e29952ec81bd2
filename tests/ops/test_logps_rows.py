"""token_logps multiplies rows that have a target: the others are left out, whatever the bound that tells their
number.
"""

import dataclasses

import pytest
import torch
from helpers import assert_same, captured, cu_seqlens_of, lengths_strategy, products_by_pairs
from helpers.logps_case import batch, leaves, results_and_gradients
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data import PackedCollator, PaddingFreeCollator, PaddingFreeDPOCollator
from packing_ops.reference import logps as oracle

ops = torch.ops.packing_ops
TILE = 128  # rows go by whole tiles


def masked(device, share, lengths=(300, 0, 200), dtype=torch.float64):
    hidden, weight, labels, cu_seqlens, bias = batch(device, 61, 7, list(lengths), 3, dtype=dtype)
    labels[torch.rand(labels.shape, device=device) < share] = -100
    return hidden, weight, labels, cu_seqlens, bias, int((po.shift_labels(labels, cu_seqlens) != -100).sum())


def multiplied(monkeypatch, function):
    """Rows of the products of function()."""
    rows, real = [], torch.mm
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", lambda a, b, **given: (rows.append(a.shape[0]), real(a, b, **given))[1])
        function()
    return rows


@given(targets=st.lists(st.integers(-1, 5), max_size=70), more=st.integers(0, 9))
def test_rows_of_targets(device, targets, more):
    wanted = [t for t, target in enumerate(targets) if target >= 0]
    targets = torch.tensor(targets, dtype=torch.int32, device=device)
    rows = ops.logps_rows(targets, len(wanted) + more)
    assert rows.tolist() == wanted + [-1] * more


def test_rows_of_many_targets(device):
    """More than a block has threads; strided."""
    targets = torch.randint(-1, 2, (5000, 2), device=device, dtype=torch.int32)[:, 1]
    wanted = (targets >= 0).nonzero()[:, 0]
    assert_same(ops.logps_rows(targets, len(wanted)), wanted)


@pytest.mark.parametrize(
    ("targets", "size", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), 2, "max_targets: expected at least the 3 slots with a target, got 2"),
        (torch.zeros(3, dtype=torch.int32), -1, "max_targets: expected 0 to .*, got -1"),
        (torch.zeros(3), 3, "targets: expected int32, got float32"),
        (torch.zeros(3, 1, dtype=torch.int32), 3, "targets: expected .*1"),
    ],
)
def test_wrong_rows(targets, size, message):
    from packing_ops._runtime import gate

    with pytest.raises(ValueError, match=message):
        gate.logps_rows(targets, size)


@given(lengths=lengths_strategy, share=st.sampled_from([0.0, 0.5, 0.9, 1.0]), bound=st.sampled_from([None, 0, 5, 1000]))
def test_left_out_at_any_size(device, lengths, share, bound):
    hidden, weight, labels, cu_seqlens, bias, count = masked(device, share, lengths)
    bound = None if bound is None else count + bound
    grads = torch.randn(2, hidden.shape[0], device=device, dtype=torch.float64)

    def ours(h, w, bias):
        return po.token_logps(h, w, labels, cu_seqlens, bias=bias, entropy=True, max_targets=bound)

    expected = results_and_gradients(
        lambda h, w, bias: oracle.token_logps(h, w, labels, cu_seqlens, bias=bias), hidden, weight, bias, grads
    )
    for actual, wanted in zip(results_and_gradients(ours, hidden, weight, bias, grads), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_rows_that_are_multiplied(device, monkeypatch, share):
    hidden, weight, labels, cu_seqlens, _, count = masked(device, share)
    total = hidden.shape[0]
    tiles = count if device == "cpu" else min(-(-count // TILE) * TILE, total)
    metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=total, max_seqlen=300, num_tokens=500)
    calls = {
        count if device == "cpu" else total: lambda: po.token_logps(hidden, weight, labels, metadata),
        tiles: lambda: po.chunked_cross_entropy(hidden, weight, labels, metadata, max_targets=count),
    }
    for rows, call in calls.items():
        assert multiplied(monkeypatch, call) == [rows]
    object.__setattr__(metadata, "num_targets", count)
    assert multiplied(monkeypatch, lambda: po.token_logps(hidden, weight, labels, metadata)) == [tiles]
    (leaf,) = leaves(hidden)
    loss = po.token_logps(leaf, weight, labels, metadata).sum()
    assert multiplied(monkeypatch, loss.backward) == [tiles]


def test_all_rows_are_not_gathered(device, monkeypatch):
    hidden, weight, labels, _, _, _ = masked(device, 0.0)
    from packing_ops.losses import chunks

    monkeypatch.setattr(chunks.gate, "gather_rows", lambda *args: pytest.fail("gathered"))
    targets = torch.zeros_like(labels, dtype=torch.int32)
    for bound in (None, len(targets), len(targets) + 9):
        ops.token_logps(hidden, weight, None, targets, None, 1.0, 0.0, None, bound, 0, False, None)


def test_bits_do_not_depend_on_who_is_left_out(device):
    hidden, weight, labels, cu_seqlens, bias, _ = masked(device, 0.0, dtype=torch.bfloat16)
    fewer = labels.clone()
    fewer[torch.rand(labels.shape, device=device) < 0.6] = -100
    count = int((po.shift_labels(fewer, cu_seqlens) != -100).sum())
    grad = torch.randn(hidden.shape[0], device=device)
    found = []
    with po.invariant():
        for each, bound in ((labels, None), (fewer, None), (fewer, count), (fewer, 10 * count)):
            (leaf,) = leaves(hidden)
            logps = po.token_logps(leaf, weight, each, cu_seqlens, bias=bias, max_targets=bound)
            (logps * grad).sum().backward()
            found.append((logps.detach(), leaf.grad))
    stays = po.shift_labels(fewer, cu_seqlens) != -100
    for logps, gradient in found[1:]:
        assert_same(logps[stays], found[0][0][stays])
        assert_same(gradient[stays], found[0][1][stays])
        assert not gradient[~stays].any()


def test_too_small_a_bound_is_named(device):
    hidden, weight, labels, cu_seqlens, _, count = masked(device, 0.2)

    def calls():
        po.token_logps(hidden, weight, labels, cu_seqlens, max_targets=count - 2 * TILE)
        torch.cuda.synchronize()  # on the GPU a later call tells
        po.token_logps(hidden, weight, labels, cu_seqlens)

    with pytest.raises(ValueError, match="max_targets: expected at least"):
        calls()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_targets_over_the_bound_are_nan(monkeypatch):
    """In a graph, where no call is between the kernel that finds it and the results."""
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    hidden, weight, labels, cu_seqlens, _, _ = masked("cuda", 0.2)
    names = ("logps", "entropy", "top1")
    expected = po.token_logps(hidden, weight, labels, cu_seqlens, outputs=names)
    graph, found = captured(
        lambda: po.token_logps(hidden, weight, labels, cu_seqlens, max_targets=TILE, outputs=names),
        before=lambda: po.token_logps(hidden, weight, labels, cu_seqlens, outputs=names),
    )
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="max_targets: expected at least as many"):
        po.token_logps(hidden, weight, labels, cu_seqlens)
    targets = (po.shift_labels(labels, cu_seqlens) != -100).nonzero()[:, 0]
    for actual, wanted in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(actual[targets[:TILE]], wanted[targets[:TILE]])
        assert_same(actual.isnan().nonzero()[:, 0], targets[TILE:])
    assert (found[2][targets[TILE:]] == -1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_bound_in_a_graph(monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    hidden, weight, labels, cu_seqlens, _, count = masked("cuda", 0.5, dtype=torch.bfloat16)
    graph, found = captured(lambda: po.token_logps(hidden, weight, labels, cu_seqlens, max_targets=count))
    hidden.copy_(hidden.flip(0))
    graph.replay()
    assert_same(found, po.token_logps(hidden, weight, labels, cu_seqlens, max_targets=count))


def test_compiles_with_a_bound_that_changes(device, fresh_compile):
    compiled = torch.compile(po.token_logps, fullgraph=True, dynamic=True, backend="aot_eager")
    for share, lengths in ((0.1, [300, 20]), (0.5, [200, 40]), (0.9, [250])):
        hidden, weight, labels, cu_seqlens, _, count = masked(device, share, lengths)
        found = compiled(hidden, weight, labels, cu_seqlens, max_targets=count)
        torch.testing.assert_close(found, po.token_logps(hidden, weight, labels, cu_seqlens))


# --- who tells the bound ---


def example(length, trained):
    ids = list(range(1, length + 1))
    return {"input_ids": ids, "labels": [-100] * (length - trained) + ids[length - trained :]}


def test_collators_count_targets():
    examples = [example(9, 4), example(5, 5), example(3, 0)]
    batch = PaddingFreeCollator(capacity=30, return_packed_metadata=True)(examples)
    assert batch["num_targets"] == batch["packed_metadata"].num_targets == 8  # the first token of one is no target
    alone = PaddingFreeCollator(return_flash_attn_kwargs=False)(examples)
    assert "num_targets" not in alone
    pair = {"chosen_input_ids": [1, 2, 3], "rejected_input_ids": [1, 2], "rejected_labels": [-100, 2]}
    pair["chosen_labels"] = [-100, -100, 3]
    assert PaddingFreeDPOCollator(concatenated=True)([pair])["num_targets"] == 2
    assert PaddingFreeDPOCollator()([pair])["chosen_num_targets"] == 1
    collator = PackedCollator(12)
    rows = collator([{"input_ids": [1] * 5, "num_actions": 3}, {"input_ids": [2] * 7, "num_actions": 7}])
    assert collator.model_inputs(rows)["num_targets"] == 9
    assert collator.packed_metadata(rows).num_targets is None  # for the log-probabilities of all tokens


def test_count_of_the_metadata_is_that_of_the_labels(device):
    examples = [example(40, 7), example(90, 30)]
    batch = PaddingFreeCollator(return_packed_metadata=True)(examples)
    labels, metadata = batch["labels"].to(device), batch["packed_metadata"]
    hidden, weight = torch.randn(130, 4, device=device), torch.randn(200, 4, device=device)
    cu_seqlens = metadata.cu_seqlens.to(device)
    metadata = dataclasses.replace(metadata, cu_seqlens=cu_seqlens)
    found = po.token_logps(hidden, weight, labels, metadata)
    torch.testing.assert_close(found, po.token_logps(hidden, weight, labels, cu_seqlens))
    if device == "cpu":
        with pytest.raises(ValueError, match="max_targets: expected at least the 128 slots with a target, got 37"):
            po.token_logps(hidden, weight, batch["input_ids"], metadata)
    everything = batch["input_ids"].to(device)
    found = po.token_logps(hidden, weight, everything, metadata, max_targets=130)
    torch.testing.assert_close(found, po.token_logps(hidden, weight, everything, cu_seqlens_of([40, 90], device)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_row(monkeypatch, device, dtype, mode, value):
    """Also where a CPU multiplies by pairs, and the width is odd."""
    products_by_pairs(monkeypatch)
    hidden, weight, labels, cu_seqlens, bias = batch(device, 61, 31, [5, 12], 0, dtype=dtype)
    labels[:], hidden[8, 0] = 1, value
    hidden = hidden.requires_grad_()
    with po.invariant() if mode else torch.enable_grad():
        logps = po.token_logps(hidden, weight, labels, cu_seqlens, bias=bias)
        logps.sum().backward()
    for found in (logps[:, None], hidden.grad):
        assert (~found.isfinite()).any(1).nonzero().flatten().tolist() == [8]
