"""packing_ops._runtime.plain, which runs without a compiled library: each op against the compiled one."""

import pytest
import torch
from helpers import assert_same, cu_seqlens_of, drawn_mask, lengths_strategy, masks
from hypothesis import given
from hypothesis import strategies as st

from packing_ops._runtime import gate, library, plain

packed = {"lengths": lengths_strategy, "tail": st.integers(0, 5)}


def assert_alike(name, *args):
    """Bit by bit, but for sums, which differ by a rounding."""
    ours, compiled = getattr(plain, name)(*args), getattr(gate, name)(*args)
    if name in ("segment_sum", "gae"):
        torch.testing.assert_close(ours, compiled, rtol=1e-6, atol=1e-6)
    else:
        assert_same(ours, compiled)


def test_every_op_that_data_needs_is_there():
    assert set(plain._OPS) <= set(library.op_names())
    missing = set(library.op_names()) - set(plain._OPS)
    assert {op.partition("_")[0] for op in missing} == {
        *(
            "attention",
            "build",
            "causal",
            "check",
            "checked",
            "gated",
            "kl",
            "logps",
            "mamba2",
            "mm",
            "paged",
            "prefix",
            "rope",
            "router",
            "token",
            "varlen",
        )
    }


@given(**packed)
def test_boundaries(lengths, tail):
    cu_seqlens, total = cu_seqlens_of(lengths), sum(lengths) + tail
    labels = torch.randint(-1, 9, (total,))
    assert_alike("cu_seqlens_from_lengths", torch.tensor(lengths, dtype=torch.int64))
    assert_alike("cu_seqlens_from_position_ids", labels)
    assert_alike("block_causal_mask", cu_seqlens, total, torch.float32, 3)
    for name in ("position_ids_from_cu_seqlens", "seq_idx_from_cu_seqlens"):
        assert_alike(name, cu_seqlens, total)
    for row in (labels, labels.int()[None]):
        for name in ("mask_boundary_labels", "shift_labels", "count_target_tokens"):
            assert_alike(name, row, cu_seqlens.long(), -1)
    shifted = labels.clone(), labels.clone()
    for module, row in zip((plain, gate), shifted, strict=True):
        module.mask_boundary_labels_shifted_(row, cu_seqlens, -100)
    assert_same(*shifted)


@given(runs=st.lists(st.integers(1, 4), max_size=5))
def test_prompts(runs):
    uids = torch.repeat_interleave(torch.arange(len(runs)), torch.tensor(runs, dtype=torch.int64)) * 3
    assert_alike("prompt_end_indices", uids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_segments(dtype, masked):
    lengths = [3, 0, 40, 1]
    cu_seqlens, values = cu_seqlens_of(lengths), torch.randn(46, 2).to(dtype)
    mask = torch.rand(46) > 0.4 if masked else None
    assert_alike("segment_sum", values, cu_seqlens, mask, masked)
    assert_alike("segment_sum", values[:, 0], cu_seqlens, mask, not masked)
    sums = torch.randn(4, 2, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    assert_alike("segment_sum_backward", sums, cu_seqlens, None, False, 46, dtype)
    bootstrap = sums[:, 0] if masked else None
    assert_alike("gae", *values.unbind(1), cu_seqlens, mask, bootstrap, 0.99, 0.95)


@given(drawn=masks, unused=st.booleans(), multiple_of=st.sampled_from([1, 3, 8]))
def test_padding(drawn, unused, multiple_of):
    mask = drawn_mask(drawn, "cpu")
    for side in ("right", "left", "both"):
        assert_alike("trim_padding_range", mask, side, 2, multiple_of)
    unused = (torch.rand(mask.shape) < 0.2) if unused else None
    rows = [torch.randn(*mask.shape, 3), torch.randint(9, mask.shape)]
    for host_totals in (False, True):
        assert_alike("unpad_layout", mask, unused, host_totals)
    assert_alike("unpad_rows", rows, mask, unused)
    indices, *_, totals = gate.unpad_layout(mask, unused, True)
    assert_alike("gather_rows", rows[0], indices, mask.numel())
    gathered = gate.gather_rows_many(rows, indices[: totals[0]], int(totals[0]))
    assert_alike("scatter_rows_many", gathered, indices[: totals[0]], *mask.shape)


@given(
    lengths=st.lists(st.integers(0, 30), max_size=25),
    capacity=st.integers(16, 24),
    strategy=st.sampled_from(plain._STRATEGIES),
    alignment=st.sampled_from([1, 4]),
    most=st.sampled_from([None, 2]),
    overlong=st.sampled_from(["own", "split", "truncate", "drop"]),
    costs=st.sampled_from([(True, 1.0, 0.0), (True, 12.0, 1.0)]),
    ties=st.sampled_from(["first", "last"]),
    seed=st.sampled_from([None, 7]),
)
def test_packing(lengths, capacity, strategy, alignment, most, overlong, costs, ties, seed):
    lengths = torch.tensor(lengths, dtype=torch.int64)
    options = (alignment, most, 1, 1, overlong, *costs, ties, seed)
    assert_alike("pack_sequences", lengths, capacity, strategy, *options)
    assert_alike("pack_ffd", lengths.clamp(max=16), capacity, alignment, ties == "last")


@given(
    pairs=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=25),
    strategy=st.sampled_from(["ffd", "next_fit", "first_fit"]),
    alignment=st.sampled_from([1, 4]),
    most=st.sampled_from([None, 2]),
    overlong=st.sampled_from(["own", "drop"]),
    seed=st.sampled_from([None, 7]),
)
def test_packing_of_pairs(pairs, strategy, alignment, most, overlong, seed):
    lengths = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    options = (alignment, most, 1, 1, overlong, True, 12.0, 1.0, "last", seed)
    assert_alike("pack_sequences", lengths, 22, strategy, *options)
    assert_alike("pack_sequences", lengths[:, :1], 22, strategy, *options)


@given(
    shared=st.lists(st.integers(0, 300), max_size=7),
    own=st.integers(0, 3),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    grouped=st.booleans(),
    capacity=st.sampled_from([None, 303, 500]),
    min_shared=st.sampled_from([1, 128, 200]),
)
def test_prefix_trees(shared, own, dtype, grouped, capacity, min_shared):
    samples = [[*range(length), *[1000 + i] * (own * i % 4)] for i, length in enumerate(shared)]
    tokens = torch.tensor([token for sample in samples for token in sample], dtype=dtype)
    cu_seqlens = cu_seqlens_of(map(len, samples))
    groups = torch.tensor([i % 2 for i in range(len(samples))], dtype=torch.int64) if grouped else None
    assert_alike("pack_prefix_tree", tokens, cu_seqlens, groups, capacity, min_shared)


def test_bins_are_evened_out_as_long_as_by_the_compiled_one():
    """Which stops when it has looked at that many pieces: without that limit the results differ."""
    lengths = torch.randint(1, 400, (1500,))
    assert_alike("pack_sequences", lengths, 800, "balanced", 1, None, 1, 1, "error", True, 1.0, 0.0, "first", None)


LABELS, ROW = torch.arange(5), torch.randn(5)
PACK = (1, None, 1, 1, "error", False, 1.0, 0.0, "first", None)
WRONG = {
    "start": ("shift_labels", LABELS, torch.tensor([1, 5]), -100),
    "order": ("seq_idx_from_cu_seqlens", torch.tensor([0, 4, 3]), 5),
    "past the end": ("mask_boundary_labels", LABELS, torch.tensor([0, 6]), -100),
    "negative length": ("cu_seqlens_from_lengths", torch.tensor([3, -1])),
    "long sum": ("cu_seqlens_from_lengths", torch.tensor([2**31 - 1, 1])),
    "returning uid": ("prompt_end_indices", torch.tensor([7, 8, 7])),
    "gamma": ("gae", ROW, ROW, torch.tensor([0, 5]), None, None, 1.5, 1.0),
    "over the capacity": ("pack_sequences", torch.tensor([3, 9]), 8, "ffd", *PACK),
    "over it when aligned": ("pack_sequences", torch.tensor([3, 7]), 7, "ffd", 2, *PACK[1:]),
    "not to be cut": ("pack_sequences", torch.tensor([3, 9]), 8, "ffd", 16, None, 1, 1, "split", *PACK[5:]),
    "strategy": ("pack_sequences", torch.tensor([3, 9]), 10, "best", *PACK),
    "pair over the capacity": ("pack_sequences", torch.tensor([[3, 9]]), 8, "ffd", *PACK),
    "pair of a negative length": ("pack_sequences", torch.tensor([[3, 1], [3, -1]]), 8, "ffd", *PACK),
    "strategy of pairs": ("pack_sequences", torch.tensor([[3, 9]]), 8, "bfd", *PACK),
    "policy of pairs": ("pack_sequences", torch.tensor([[3, 9]]), 8, "ffd", *PACK[:4], "split", *PACK[5:]),
    "capacity": ("pack_sequences", torch.tensor([3, 9]), 0, "ffd", *PACK),
    "end of a tree": ("pack_prefix_tree", LABELS, torch.tensor([0, 4]), None, None, 128),
    "groups of a tree": ("pack_prefix_tree", LABELS, torch.tensor([0, 5]), torch.tensor([1, 2]), None, 128),
    "capacity of a tree": ("pack_prefix_tree", LABELS, torch.tensor([0, 1, 5]), None, 3, 128),
    "min_shared": ("pack_prefix_tree", LABELS, torch.tensor([0, 5]), None, None, 0),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_have_the_same_words(case):
    name, *args = WRONG[case]
    texts = []
    for module in (plain, gate):
        with pytest.raises(ValueError, match=": expected") as caught:
            getattr(module, name)(*args)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: plain.shift_labels(ROW, torch.tensor([0, 5]), -100), "labels: expected int32 or int64"),
        (lambda: plain.shift_labels(LABELS, ROW, -100), "cu_seqlens: expected int32 or int64"),
        (lambda: plain.segment_sum(LABELS, torch.tensor([0, 5]), None, False), "values: expected floating"),
        (lambda: plain.pack_sequences(torch.tensor([3]), 8, "ffd", 1, None, 2, *PACK[3:]), "min_bins, bins_multiple_of: expected"),
    ],
)  # fmt: skip
def test_other_mistakes_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_an_op_that_is_not_there_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(library, "MISSING", "packing_ops: no compiled library at here")
    with pytest.raises(ImportError, match="no compiled library at here"):
        plain.op_without_library("varlen_attention")(1, 2)
    with pytest.raises(AttributeError):
        plain.op_without_library("__wrapped__")
    plain._warn_once.cache_clear()
    with pytest.warns(
        UserWarning, match=r"no compiled library at here; without it packing_ops.data runs in plain torch"
    ):
        assert plain.op_without_library("shift_labels") is plain.shift_labels
