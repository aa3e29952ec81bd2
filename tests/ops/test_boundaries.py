"""packing_ops.boundaries against packing_ops.reference.boundaries."""

import sys
import types

import pytest
import torch
from helpers import assert_error_within, assert_same, cu_seqlens_of, lengths_strategy, non_contiguous
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import boundaries as oracle

ops = torch.ops.packing_ops
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


# --- conversions ---


def test_worked_values(device):
    cu_seqlens = po.cu_seqlens_from_lengths(torch.tensor([2, 1, 3], device=device))
    assert cu_seqlens.tolist() == [0, 2, 3, 6]
    assert cu_seqlens.dtype == torch.int32
    assert po.position_ids_from_cu_seqlens(cu_seqlens).tolist() == [0, 1, 0, 0, 1, 2]
    assert po.seq_idx_from_cu_seqlens(cu_seqlens, 7).tolist() == [0, 0, 1, 2, 2, 2, 3]
    position_ids = torch.tensor([0, 1, 0, 0, 1, 2], device=device)
    assert po.cu_seqlens_from_position_ids(position_ids).tolist() == [0, 2, 3, 6]


@given(lengths=lengths_strategy, tail=st.integers(0, 9))
def test_conversions_equal_reference(device, lengths, tail):
    cu_seqlens = cu_seqlens_of(lengths, device)
    total = sum(lengths) + tail
    for dtype in (torch.int32, torch.int64):
        assert_same(po.cu_seqlens_from_lengths(torch.tensor(lengths, dtype=dtype, device=device)), cu_seqlens)
    assert_same(
        po.position_ids_from_cu_seqlens(cu_seqlens, total), oracle.position_ids_from_cu_seqlens(cu_seqlens, total)
    )
    assert_same(po.seq_idx_from_cu_seqlens(cu_seqlens, total), oracle.seq_idx_from_cu_seqlens(cu_seqlens, total))


@given(lengths=lengths_strategy, first=st.integers(0, 3))
def test_position_ids_round_trip(device, lengths, first):
    lengths = [length for length in lengths if length > 0]
    cu_seqlens = cu_seqlens_of(lengths, device)
    position_ids = po.position_ids_from_cu_seqlens(cu_seqlens) + first
    assert_same(po.cu_seqlens_from_position_ids(position_ids), cu_seqlens)
    assert_same(po.cu_seqlens_from_position_ids(position_ids.int().reshape(1, -1)), cu_seqlens)
    padded = po.cu_seqlens_from_position_ids(position_ids, padded=True)
    assert padded.numel() == position_ids.numel() + 1
    assert_same(padded[: len(lengths) + 1], cu_seqlens)
    assert (padded[len(lengths) + 1 :] == position_ids.numel()).all()


def test_lengths_non_contiguous(device):
    lengths = non_contiguous(torch.tensor([3, 0, 2], device=device))
    assert po.cu_seqlens_from_lengths(lengths).tolist() == [0, 3, 3, 5]


def test_many_documents(device):
    lengths = torch.randint(0, 5, (100_000,), device=device)
    cu_seqlens = po.cu_seqlens_from_lengths(lengths)
    assert_same(cu_seqlens, oracle.cu_seqlens_from_lengths(lengths))
    assert_same(
        po.position_ids_from_cu_seqlens(cu_seqlens)[cu_seqlens[:-1][lengths > 0].long()].sum(),
        torch.tensor(0, device=device),
    )


INT64 = {
    "position_ids_from_cu_seqlens": lambda cu: po.position_ids_from_cu_seqlens(cu, 7),
    "position_ids_from_cu_seqlens, whole": po.position_ids_from_cu_seqlens,
    "seq_idx_from_cu_seqlens": lambda cu: po.seq_idx_from_cu_seqlens(cu, 7),
    "mask_boundary_labels": lambda cu: po.mask_boundary_labels(torch.arange(7, device=cu.device), cu),
    "mask_boundary_labels_shifted_": lambda cu: po.mask_boundary_labels_shifted_(torch.arange(7, device=cu.device), cu),
    "shift_labels": lambda cu: po.shift_labels(torch.arange(7, device=cu.device), cu),
    "segment_sum": lambda cu: po.segment_sum(torch.arange(7.0, device=cu.device), cu),
    "segment_mean": lambda cu: po.segment_mean(torch.arange(14.0, device=cu.device).view(7, 2), cu),
    "count_target_tokens": lambda cu: po.count_target_tokens(torch.arange(7, device=cu.device), cu),
    "block_causal_mask": lambda cu: po.block_causal_mask(cu, 7),
    "from_cu_seqlens": lambda cu: po.PackedMetadata.from_cu_seqlens(cu, total=7).cu_seqlens,
    "from_cu_seqlens, positions": lambda cu: po.PackedMetadata.from_cu_seqlens(cu).position_ids,
}


@pytest.mark.parametrize("name", INT64)
def test_int64_cu_seqlens_are_taken(device, name):
    cu_seqlens = cu_seqlens_of([2, 0, 3], device)
    wanted = INT64[name](cu_seqlens)
    assert_same(INT64[name](cu_seqlens.long()), wanted)
    assert_same(INT64[name](non_contiguous(cu_seqlens.long())), wanted)


def test_int64_cu_seqlens_past_int32_are_named():
    with pytest.raises(ValueError, match="cu_seqlens: expected numbers that fit int32, got 4294967298 at index 1"):
        po.position_ids_from_cu_seqlens(torch.tensor([0, 2**32 + 2]), 5)


# --- prompts ---


def test_prompts_worked_values():
    assert po.compute_prompt_end_indices(["a", "a", "b", "c", "c"]) == [2, 3, 5]
    assert po.compute_prompt_boundaries(["p0", "p0", "p1", "p1", "p1"]) == [(0, 2), (2, 5)]
    assert po.compute_prompt_end_indices([]) == []
    assert po.compute_prompt_boundaries([]) == []


@given(runs=st.lists(st.integers(1, 4), max_size=9))
def test_prompts_of_codes_equal_strings(device, runs):
    codes = [7 * i for i, run in enumerate(runs) for _ in range(run)]
    uids = torch.tensor(codes, dtype=torch.int64, device=device)
    ends = po.compute_prompt_end_indices([f"p{code}" for code in codes])
    assert po.compute_prompt_end_indices(uids).tolist() == ends
    assert_same(po.compute_prompt_end_indices(uids.int()), oracle.prompt_end_indices(uids))
    assert [tuple(pair) for pair in po.compute_prompt_boundaries(uids).tolist()] == po.compute_prompt_boundaries(codes)


def test_returning_uid_is_named(device):
    with pytest.raises(ValueError, match=r"uids.*'a' comes back at index 2"):
        po.compute_prompt_end_indices(["a", "b", "a"])
    with pytest.raises(ValueError, match=r"uids: .* at index 2"):
        po.compute_prompt_end_indices(torch.tensor([4, 5, 4], device=device))
    assert po.compute_prompt_end_indices(list(torch.tensor([4, 4, 5], device=device))) == [2, 3]
    with pytest.raises(ValueError, match=r"uids: .*4 comes back at index 2"):
        po.compute_prompt_end_indices(list(torch.tensor([4, 5, 4], device=device)))  # equal, of other identity
    for wrong in (list(torch.zeros(2, 2)), [["a"], ["a"]]):
        with pytest.raises(TypeError, match="uids: expected strings or integers, got"):
            po.compute_prompt_end_indices(wrong)


class Uid:
    """Every one has the same hash: only comparison tells two apart."""

    def __init__(self, prompt):
        self.prompt = prompt

    def __hash__(self):
        return 0

    def __eq__(self, other):
        return self.prompt == other.prompt

    def __repr__(self):
        return f"Uid({self.prompt})"


def test_uids_of_one_hash_are_told_apart():
    assert po.compute_prompt_boundaries([Uid(i // 2) for i in range(6)]) == [(0, 2), (2, 4), (4, 6)]
    with pytest.raises(ValueError, match=r"uids: .*Uid\(1\) comes back at index 3"):
        po.compute_prompt_boundaries([Uid(prompt) for prompt in (0, 1, 2, 1)])


@pytest.mark.parametrize("wrong", [None, 5, "p0p0", b"p0"])
def test_what_is_no_sequence_of_uids_is_named(wrong):
    with pytest.raises(TypeError, match="uids: expected a sequence of strings or integers, got"):
        po.compute_prompt_boundaries(wrong)


def test_mini_batch_boundaries():
    assert po.compute_prompt_mini_batch_boundaries([4, 6, 9, 11], 2) == [(0, 6), (6, 11)]
    assert po.compute_prompt_mini_batch_boundaries([4, 6, 9], 2) == [(0, 6), (6, 9)]
    assert po.compute_prompt_mini_batch_boundaries([], 2) == []
    uids = [f"p{i}" for i in range(4) for _ in range(2)]
    assert po.compute_prompt_mini_batch_boundaries(uids, 2, 4, False, 2) == [(0, 4), (4, 8)]
    turns = [5, 5, 3, 2]  # rows per prompt when every turn is a row
    uids = [f"p{i}" for i, n in enumerate(turns) for _ in range(n)]
    assert po.compute_prompt_mini_batch_boundaries(uids, 2, 4, True, 2) == [(0, 10), (10, 15)]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (([4, 6], 0), "mini_batch_size"),
        (([4, 4], 1), "prompt_end_indices"),
        ((["a", "b"], 1, 3, True, 1), "train_batch_size=3"),
        ((["a", "b", "c"], 2, 3, True, 1), "mini_batch_size=2"),
        ((["a", "a", "b"], 1, 2, False, 2), "n_samples_per_prompt=2 rows for every prompt, got 1 for prompt 1"),
    ],
)
def test_mini_batch_errors(arguments, named):
    with pytest.raises(ValueError, match=named):
        po.compute_prompt_mini_batch_boundaries(*arguments)


# --- labels ---


@given(lengths=lengths_strategy, tail=st.integers(0, 5), int32=st.booleans())
def test_labels_equal_reference(device, lengths, tail, int32):
    cu_seqlens = cu_seqlens_of(lengths, device)
    total = sum(lengths) + tail
    labels = torch.randint(-100, 50, (1, total), device=device, dtype=torch.int32 if int32 else torch.int64)
    labels[labels < 0] = -100
    masked = po.mask_boundary_labels(labels, cu_seqlens)
    assert_same(masked, oracle.mask_boundary_labels(labels, cu_seqlens))
    assert_same(po.mask_boundary_labels(masked, cu_seqlens), masked)
    assert_same(po.mask_boundary_labels(labels, lengths=lengths), masked)
    shifted = po.shift_labels(labels, cu_seqlens)
    assert_same(shifted, oracle.shift_labels(labels, cu_seqlens))
    in_place = labels.clone()
    assert po.mask_boundary_labels_shifted_(in_place, cu_seqlens) is in_place
    assert_same(in_place, oracle.mask_boundary_labels_shifted(labels, cu_seqlens))
    count = po.count_target_tokens(labels, cu_seqlens)
    assert_same(count, oracle.count_target_tokens(labels, cu_seqlens).to(torch.int64))
    assert count == (shifted != -100).sum()
    assert_same(po.count_target_tokens(masked, cu_seqlens), count)


def test_count_of_padded_rows(device):
    labels = torch.tensor([[5, 6, -100], [7, -100, 8]], device=device)
    assert po.count_target_tokens(labels) == 2


def test_labels_changed_in_place_are_noticed(device):
    cu_seqlens, logits = cu_seqlens_of([3, 5], device), torch.randn(8, 5, device=device, requires_grad=True)
    labels = torch.arange(8, device=device) % 5
    loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    po.mask_boundary_labels_shifted_(labels, cu_seqlens)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():  # tensors without a version
        labels = torch.arange(8, device=device)
        assert po.mask_boundary_labels_shifted_(labels, cu_seqlens).tolist() == [0, 1, -100, 3, 4, 5, 6, -100]


@pytest.mark.parametrize("ignore_index", [2**31, -(2**31) - 1, 2**40])
def test_ignore_index_that_labels_do_not_hold(device, ignore_index):
    cu_seqlens, labels = cu_seqlens_of([3, 5], device), torch.arange(8, dtype=torch.int32, device=device)
    functions = po.mask_boundary_labels, po.mask_boundary_labels_shifted_, po.shift_labels, po.count_target_tokens
    for function in functions:
        with pytest.raises(ValueError, match=f"ignore_index: expected a number that int32 holds.* got {ignore_index}"):
            function(labels, cu_seqlens, ignore_index=ignore_index)
    assert po.mask_boundary_labels(labels.long(), cu_seqlens, ignore_index=ignore_index)[0] == ignore_index
    assert po.shift_labels(labels, cu_seqlens, ignore_index=2**31 - 1)[-1] == 2**31 - 1


def test_labels_non_contiguous_and_other_ignore_index(device):
    labels = non_contiguous(torch.arange(6, device=device))
    cu_seqlens = cu_seqlens_of([2, 4], device)
    assert po.mask_boundary_labels(labels, cu_seqlens, ignore_index=-1).tolist() == [-1, 1, -1, 3, 4, 5]
    with pytest.raises(ValueError, match="labels: expected contiguous"):
        po.mask_boundary_labels_shifted_(labels, cu_seqlens)


@pytest.mark.parametrize("both", [True, False])
def test_exactly_one_of_cu_seqlens_and_lengths(both):
    cu_seqlens = cu_seqlens_of([2]) if both else None
    with pytest.raises(ValueError, match="exactly one of cu_seqlens and lengths"):
        po.mask_boundary_labels(torch.arange(2), cu_seqlens, lengths=[2] if both else None)


# --- segment_sum ---


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_segment_sum_equals_reference(device, dtype, average, masked):
    cu_seqlens = cu_seqlens_of([0, 1, 300, 5, 0, 2000], device)
    values = torch.randn(2310, device=device).to(dtype)
    mask = torch.rand(2310, device=device) > 0.4 if masked else None
    sums = po.segment_sum(values, cu_seqlens, mask, average)
    assert sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = oracle.segment_sum(values.double(), cu_seqlens, mask, average)
    low = oracle.segment_sum(values.to(sums.dtype), cu_seqlens, mask, average)
    one_rounding = torch.finfo(sums.dtype).eps * exact.abs().max().item()
    assert_error_within(sums, low, exact, floor=one_rounding)


def test_segment_sum_depends_on_the_document_alone(device):
    document = torch.randn(777, device=device)
    alone = po.segment_sum(document, cu_seqlens_of([777], device))
    packed = torch.cat([torch.randn(13, device=device), document, torch.full((5,), float("nan"), device=device)])
    assert_same(po.segment_sum(packed, cu_seqlens_of([13, 777, 5], device))[1:2], alone)


def test_segment_sum_skips_masked_nan_and_keeps_infinity(device):
    values = torch.tensor([float("nan"), 1.0, float("inf"), 2.0], device=device)
    mask = torch.tensor([False, True, True, True], device=device)
    assert po.segment_sum(values, cu_seqlens_of([2, 2], device), mask).tolist() == [1.0, float("inf")]


def test_segment_sum_gradient(device):
    values = torch.randn(9, dtype=torch.float64, device=device, requires_grad=True)
    cu_seqlens = cu_seqlens_of([2, 0, 5], device)
    mask = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool, device=device)
    for average in (False, True):
        assert torch.autograd.gradcheck(lambda v: po.segment_sum(v, cu_seqlens, mask, average), values)  # noqa: B023
        assert torch.autograd.gradcheck(lambda v: po.segment_sum(v, cu_seqlens, None, average), values)  # noqa: B023


# --- block_causal_mask ---


@given(lengths=lengths_strategy, tail=st.integers(0, 5), window=st.one_of(st.none(), st.integers(1, 20)))
def test_block_causal_mask_equals_reference(device, lengths, tail, window):
    lengths = [length % 40 for length in lengths]
    cu_seqlens, total = cu_seqlens_of(lengths, device), sum(lengths) + tail
    for dtype in (torch.bool, *FLOATS):
        actual = po.block_causal_mask(cu_seqlens, total, dtype=dtype, window=window)
        assert_same(actual, oracle.block_causal_mask(cu_seqlens, total, dtype=dtype, window=window))


def test_xformers_bias(monkeypatch):
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha.attn_bias", None)
    with pytest.raises(ImportError, match="xformers_bias needs xformers"):
        po.xformers_bias([2, 3])

    class Bias:  # the two calls of xformers that are made
        from_seqlens = staticmethod(lambda lengths: ("causal", lengths))

    for name in ("xformers", "xformers.ops", "xformers.ops.fmha"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    module = types.ModuleType("xformers.ops.fmha.attn_bias")
    module.BlockDiagonalCausalMask = Bias
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha.attn_bias", module)
    assert po.xformers_bias(iter([2, 3])) == ("causal", [2, 3])


# --- torch.library ---


def op_samples(device):
    cu_seqlens = cu_seqlens_of([2, 0, 3], device)
    labels = torch.arange(6, device=device)
    values = torch.randn(6, device=device, requires_grad=True)
    mask = torch.tensor([1, 0, 1, 1, 1, 0], dtype=torch.bool, device=device)
    return [
        (ops.cu_seqlens_from_lengths, (torch.tensor([2, 0, 3], device=device),)),
        (ops.position_ids_from_cu_seqlens, (cu_seqlens, 6)),
        (ops.seq_idx_from_cu_seqlens, (cu_seqlens, 6)),
        (ops.cu_seqlens_from_position_ids, (torch.tensor([0, 1, 0, 0, 1], device=device),)),
        (ops.prompt_end_indices, (torch.tensor([3, 3, 4], device=device),)),
        (ops.mask_boundary_labels, (non_contiguous(labels), cu_seqlens, -100)),
        (ops.mask_boundary_labels_shifted_, (labels.clone(), cu_seqlens, -100)),
        (ops.shift_labels, (labels, cu_seqlens, -100)),
        (ops.count_target_tokens, (labels, cu_seqlens, -100)),
        (ops.segment_sum, (values, cu_seqlens, None, False)),
        (ops.segment_sum, (non_contiguous(values), cu_seqlens, mask, True)),
        (ops.segment_sum_backward, (torch.randn(3, device=device), cu_seqlens, mask, True, 6, torch.bfloat16)),
        (ops.block_causal_mask, (cu_seqlens, 6, torch.float32, 2)),
    ]


@pytest.mark.parametrize("sample", range(13))
def test_opcheck(device, sample):
    op, arguments = op_samples(device)[sample]
    torch.library.opcheck(op, arguments)


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(labels, values, cu_seqlens):
        position_ids = po.position_ids_from_cu_seqlens(cu_seqlens, labels.numel())
        targets = po.shift_labels(po.mask_boundary_labels(labels, cu_seqlens), cu_seqlens)
        logps = po.segment_sum(values * (position_ids + 1), cu_seqlens, targets != -100, True)
        return logps.sum() / po.count_target_tokens(labels, cu_seqlens)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        cu_seqlens, total = cu_seqlens_of(lengths, device), sum(lengths)
        labels = torch.randint(0, 9, (total,), device=device)
        eager = torch.randn(total, device=device, requires_grad=True)
        traced = eager.detach().clone().requires_grad_()
        step(labels, eager, cu_seqlens).backward()
        compiled(labels, traced, cu_seqlens).backward()
        assert_same(traced.grad, eager.grad)


# --- bad input ---


def bad_calls(device):
    cu_seqlens = cu_seqlens_of([2, 3], device)
    labels, values = torch.arange(5, device=device), torch.randn(5, device=device)
    decreasing = torch.tensor([0, 3, 2], dtype=torch.int32, device=device)
    late = torch.tensor([1, 3], dtype=torch.int32, device=device)
    return {
        "lengths negative": (
            lambda: po.cu_seqlens_from_lengths(torch.tensor([1, -2], device=device)),
            "lengths.*index 1",
        ),
        "lengths too long": (
            lambda: po.cu_seqlens_from_lengths(torch.tensor([2**30] * 3, device=device)),
            "lengths.*int32",
        ),
        "lengths fractional": (
            lambda: po.cu_seqlens_from_lengths(torch.ones(2, device=device)),
            "lengths: .*int64.*float32",
        ),
        "lengths rank": (
            lambda: po.cu_seqlens_from_lengths(torch.ones(2, 2, dtype=torch.int64, device=device)),
            "lengths: .*1 dim",
        ),
        "cu_seqlens dtype": (
            lambda: po.position_ids_from_cu_seqlens(cu_seqlens.float(), 5),
            "cu_seqlens: expected int32 or int64, got float32",
        ),
        "cu_seqlens rank": (lambda: po.seq_idx_from_cu_seqlens(cu_seqlens[None], 5), "cu_seqlens: expected 1 dim"),
        "cu_seqlens nothing": (lambda: po.seq_idx_from_cu_seqlens(cu_seqlens[:0], 5), "cu_seqlens: .*at least one"),
        "cu_seqlens start": (lambda: po.position_ids_from_cu_seqlens(late, 5), "cu_seqlens: expected to start at 0"),
        "cu_seqlens order": (
            lambda: po.seq_idx_from_cu_seqlens(decreasing, 5),
            "cu_seqlens: expected never to decrease.*index 2",
        ),
        "cu_seqlens total": (
            lambda: po.position_ids_from_cu_seqlens(cu_seqlens, 4),
            "cu_seqlens: expected to end at most at total",
        ),
        "cu_seqlens strided": (
            lambda: po.position_ids_from_cu_seqlens(non_contiguous(cu_seqlens), 5),
            "cu_seqlens: expected contiguous",
        ),
        "total negative": (lambda: po.position_ids_from_cu_seqlens(cu_seqlens, -1), "total: expected 0"),
        "labels dtype": (
            lambda: po.shift_labels(labels.float(), cu_seqlens),
            "labels: expected int64 or int32, got float32",
        ),
        "labels short": (lambda: po.mask_boundary_labels(labels[:4], cu_seqlens), "cu_seqlens: .*total"),
        "values dtype": (lambda: po.segment_sum(labels, cu_seqlens), "values: expected float32"),
        "labels of rows": (
            lambda: po.shift_labels(labels.expand(2, 5), cu_seqlens),
            r"labels: expected \[total\] or \[1, total\], got int64 \[2, 5\]",
        ),
        "labels of rows masked": (
            lambda: po.mask_boundary_labels(labels.expand(2, 5), cu_seqlens),
            r"labels: expected \[total\] or \[1, total\], got int64 \[2, 5\]",
        ),
        "shifted labels of rows": (
            lambda: po.mask_boundary_labels_shifted_(labels.repeat(2, 1), cu_seqlens),
            r"labels: expected \[total\] or \[1, total\], got int64 \[2, 5\]",
        ),
        "labels of a batch counted": (
            lambda: po.count_target_tokens(labels.expand(2, 5), cu_seqlens),
            r"labels: expected \[total\] or \[1, total\], got int64 \[2, 5\]",
        ),
        "labels of a row counted": (
            lambda: po.count_target_tokens(labels),
            r"labels: expected \[batch, seqlen\] without cu_seqlens, got int64 \[5\]",
        ),
        "positions of rows": (
            lambda: po.cu_seqlens_from_position_ids(labels.expand(2, 5)),
            r"position_ids: expected \[total\] or \[1, total\], got int64 \[2, 5\]",
        ),
        "mask shape": (
            lambda: po.segment_sum(values, cu_seqlens, labels[:4] > 0),
            r"mask: expected .*\[5\], got bool \[4\]",
        ),
        "mask window": (lambda: po.block_causal_mask(cu_seqlens, 5, window=0), "window: expected at least 1"),
        "mask of ints": (
            lambda: po.block_causal_mask(cu_seqlens, 5, dtype=torch.int32),
            "dtype: expected bool.*, got int32",
        ),
        "mask of complex numbers": (
            lambda: po.block_causal_mask(cu_seqlens, 5, dtype=torch.complex64),
            "dtype: expected bool.*, got complex64",
        ),
        "uids dtype": (
            lambda: po.compute_prompt_end_indices(torch.ones(2, device=device)),
            "uids: expected int32 or int64",
        ),
    }


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_fractional_list_is_named():
    with pytest.raises(TypeError, match=r"lengths: expected integers, got 1\.5"):
        po.cu_seqlens_from_lengths([1, 1.5])


def test_empty_input(device):
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    cu_seqlens = po.cu_seqlens_from_lengths(nothing)
    assert cu_seqlens.tolist() == [0]
    assert po.position_ids_from_cu_seqlens(cu_seqlens).shape == (0,)
    assert po.seq_idx_from_cu_seqlens(cu_seqlens, 0).shape == (0,)
    assert po.cu_seqlens_from_position_ids(nothing).tolist() == [0]
    assert po.compute_prompt_end_indices(nothing).shape == (0,)
    assert po.compute_prompt_boundaries(nothing).shape == (0, 2)
    assert po.mask_boundary_labels(nothing, cu_seqlens).shape == (0,)
    assert po.shift_labels(nothing, cu_seqlens).shape == (0,)
    assert po.count_target_tokens(nothing, cu_seqlens) == 0
    assert po.segment_sum(nothing.float(), cu_seqlens).shape == (0,)
    assert po.block_causal_mask(cu_seqlens, 0).shape == (0, 0)


@pytest.mark.gpu
def test_mixed_devices_are_named():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    with pytest.raises(ValueError, match="cu_seqlens: expected on cuda:0 like labels"):
        po.shift_labels(torch.arange(5, device="cuda"), cu_seqlens_of([2, 3]))
