"""Checks of values: what contradicts itself is named; on CUDA by a later call, or by this one under
PACKING_OPS_CHECK=1.
"""

import pytest
import torch
from helpers import cu_seqlens_of

import packing_ops
from packing_ops._runtime import gate, plain

ops = torch.ops.packing_ops
OTHERS = "position_ids: expected to restart where cu_seq_lens_q starts a document and only there"


@pytest.fixture(autouse=True)
def _in_the_call_itself(monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "1")


def positions(*lengths):
    return torch.cat([torch.arange(length) for length in lengths])


def check(device, q, positions=None, *, k=None, mask=None, batch=1, dtype=torch.int32):
    """Documents of lengths q (and k) over a batch of as many slots as there are positions or q holds."""
    cu_q = cu_seqlens_of(q, device).to(dtype)
    cu_k = cu_q if k is None else cu_seqlens_of(k, device).to(dtype)
    if positions is not None:
        positions = positions.to(device).view(-1, sum(q) // batch)
    mask = None if mask is None else mask.to(device)
    gate.check_documents(cu_q, cu_k, mask, positions, batch, sum(q) // batch)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("lengths", "given", "batch"),
    [
        ([5, 7], positions(5, 7), 1),
        ([5, 0, 7, 0], positions(5, 7), 1),
        ([12], torch.arange(12), 1),
        ([6, 6], torch.arange(6), 2),  # one row of positions for all rows
        ([3, 3, 2, 4], torch.cat([positions(3, 3), positions(2, 4)]), 2),
        ([5, 7], None, 1),
        ([1] * 5, torch.zeros(5, dtype=torch.int64), 1),
        ([], torch.zeros(0, dtype=torch.int64), 1),
        ([5, 7], torch.cat([positions(5), torch.tensor([0, 0, 0, 0, 1, 2, 3])]), 1),  # 0 fills from the left
        ([4, 3, 5], torch.cat([positions(9)[5:], positions(3), positions(20)[15:]]), 1),  # chunks of longer documents
        ([3, 4], torch.cat([positions(5)[2:], positions(6)[2:]]), 1),  # from 2 on, as RoBERTa's
        ([2, 4, 1], torch.tensor([1, 1, 2, 3, 4, 5, 1]), 1),  # the same, with padding of ones as documents, left
        ([1, 4], torch.tensor([1, 2, 3, 4, 5]), 1),
        ([3, 1, 2], torch.tensor([0, 1, 2, 0, 1, 1]), 1),  # and right
        ([3, 1, 1], torch.tensor([0, 1, 2, 0, 1]), 1),
        ([4, 4], torch.tensor([0, 1, 2, 0, 0, 1, 2, 0]), 1),  # padding of zeros in each document
        ([4, 4], torch.tensor([1, 1, 0, 1, 0, 1, 0, 0]), 1),  # of ones on the left, of zeros on the right
        ([4, 4], torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]), 2),  # the next row starts where the last position was
        ([1, 2, 3, 1], positions(1, 2, 3, 1), 1),
    ],
)
def test_what_agrees_is_left_alone(device, lengths, given, batch, dtype):
    if not lengths:
        gate.check_documents(cu_seqlens_of([], device), cu_seqlens_of([], device), None, None, 1, 0)
    else:
        check(
            device, lengths, given, batch=batch, dtype=dtype, mask=torch.ones(batch, sum(lengths) // batch, dtype=bool)
        )


@pytest.mark.parametrize(
    ("lengths", "given", "options", "message"),
    [
        ([5, 7], torch.arange(12), {}, OTHERS),
        ([3, 3, 2, 4], torch.arange(6), {"batch": 2}, OTHERS),
        ([12], positions(5, 7), {}, OTHERS),
        ([4, 8], positions(5, 7), {}, OTHERS),
        ([10, 4, 14], positions(9, 5, 14), {}, OTHERS),  # a boundary one slot late
        ([8, 6, 14], positions(9, 5, 14), {}, OTHERS),  # one slot early
        ([9, 3, 2, 14], positions(9, 5, 14), {}, OTHERS),  # one too many
        ([9, 5, 1, 13], positions(9, 5, 14), {}, OTHERS),
        ([9, 5, 13, 1], positions(9, 5, 14), {}, OTHERS),
        ([14, 14], positions(9, 5, 14), {}, OTHERS),  # one too few
        ([9, 0, 6, 0, 13], positions(9, 5, 14), {}, OTHERS),  # next to empty documents
        ([3, 2], positions(2, 3), {}, OTHERS),  # short documents
        ([3, 1], positions(2, 2), {}, OTHERS),
        ([2, 4], positions(1, 5), {}, OTHERS),
        ([4, 3], positions(2, 2, 3), {}, OTHERS),
        ([6, 2], positions(5, 3), {}, OTHERS),
        ([4, 2], positions(3, 3), {}, OTHERS),
        ([4, 3], torch.cat([positions(5)[2:], positions(6)[2:]]), {}, OTHERS),  # from 2 on
        ([4, 3], torch.cat([positions(4)[1:], positions(5)[1:]]), {}, OTHERS),  # from 1 on
        ([3, 3, 4, 2], torch.cat([positions(3, 3), positions(3, 3)]), {"batch": 2}, OTHERS),
        ([5, 7], positions(5, 7), {"k": [7, 5]}, "cu_seq_lens_k: expected the documents of cu_seq_lens_q"),
        ([5, 7], None, {"k": [5, 6]}, "cu_seq_lens_k: expected to end at the batch's"),
        (
            [5, 7],
            None,
            {"mask": torch.arange(12)[None] != 3},
            "attention_mask: expected no padding beside cu_seq_lens_q",
        ),
    ],
)
def test_what_contradicts_is_named(device, lengths, given, options, message):
    with pytest.raises(ValueError, match=message):
        check(device, lengths, given, **options)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_one_boundary_that_is_moved_left_out_or_one_too_many_is_found(device, first):
    """Of documents of three tokens and more, whose positions start at first. A document of only a 1 may be padding."""
    numbers = torch.Generator().manual_seed(first)
    for _ in range(20):
        lengths = torch.randint(3, 9, (5,), generator=numbers).tolist()
        right, row = [0, *torch.tensor(lengths).cumsum(0).tolist()], positions(*lengths) + first
        check(device, lengths, row)
        moved = [sorted({*right} - {start} | {start + by}) for start in right[1:-1] for by in (-1, 1)]
        more = [sorted({*right, at}) for at in range(1 + (first == 1), right[-1]) if at not in right]
        fewer = [sorted({*right} - {start}) for start in right[1:-1]]
        for wrong in (*moved, *more, *fewer):
            with pytest.raises(ValueError, match=OTHERS):
                check(device, torch.tensor(wrong).diff().tolist(), row)


def test_the_last_restart_of_a_long_row_is_found(device):
    """Beyond what one block of threads sees at a time."""
    row = positions(5000, 3000)
    check(device, [5000, 3000], row)
    with pytest.raises(ValueError, match=OTHERS):
        check(device, [4999, 3001], row)
    with pytest.raises(ValueError, match=r"expected to end at the batch's"):
        gate.check_documents(*[cu_seqlens_of([5000, 2999], device)] * 2, None, None, 1, 8000)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 2, dtype=torch.int32),) * 2, "cu_seq_lens_q: expected"),
        ((torch.zeros(2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)), "cu_seq_lens_k: expected as many"),
        ((torch.zeros(0, dtype=torch.int32),) * 2, "cu_seq_lens_q: expected"),
        ((torch.zeros(2),) * 2, "cu_seq_lens_q: expected int32"),
    ],
)
def test_shapes_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        gate.check_documents(*arguments, None, None, 1, 0)


VALUES = [
    torch.arange(9),
    torch.arange(24, dtype=torch.float16).view(2, 3, 4)[:, 1:, ::2],
    torch.tensor([True, False, True])[1:],
    torch.zeros(0),
    torch.full((3,), float("nan")),
    torch.arange(5, dtype=torch.uint8)[1:],
]


@pytest.mark.parametrize("values", VALUES, ids=lambda t: f"{t.dtype}{list(t.shape)}")
def test_unchanged_memory_passes_and_one_other_byte_does_not(device, values):
    values = values.to(device)
    ops.check_unchanged(values, values.clone())
    if values.numel():
        other = values.clone()
        other.view(-1)[-1] = 0 if values.is_floating_point() else not bool(values.reshape(-1)[-1])
        with pytest.raises(ValueError, match="values: expected a tensor as it was"):
            gate.check_unchanged(values, other)


@pytest.mark.parametrize("other", [torch.zeros(4), torch.zeros(3, dtype=torch.float64)], ids=["shape", "dtype"])
def test_expected_is_like_values(device, other):
    with pytest.raises(
        ValueError, match=r"^values: expected a tensor as it was .*, got float32 \[3\] on .* where float"
    ):
        gate.check_unchanged(torch.zeros(3, device=device), other.to(device))
    with pytest.raises(ValueError, match="wanted: expected 'as it was', 'depths' or 'segments', got other"):
        gate.check_unchanged(torch.zeros(3, device=device), torch.zeros(3, device=device), "other")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("as it was", "values: expected a tensor as it was when its documents were found"),
        ("depths", "position_ids: expected each row's distance from its root beside segment_parents"),
        ("segments", "parents: expected the paths of the tree that cu_seqlens_q are the segments of"),
    ],
)
def test_a_difference_is_named_by_what_was_wanted(monkeypatch, device, wanted, says):
    monkeypatch.setenv("PACKING_OPS_CHECK", "1")
    for check in (gate.check_unchanged, plain.check_unchanged):
        with pytest.raises(ValueError, match=f"^{says}"):
            check(torch.zeros(3, device=device), torch.ones(3, device=device), wanted)


def test_opcheck(device):
    cu_seqlens = cu_seqlens_of([5, 7], device)
    row = positions(5, 7)[None].to(device)
    torch.library.opcheck(ops.check_documents, (cu_seqlens, cu_seqlens, row >= 0, row, 1, 12))
    torch.library.opcheck(ops.checked_documents, (cu_seqlens, cu_seqlens, row >= 0, row, 1, 12))
    torch.library.opcheck(ops.checked_documents, (cu_seqlens.long(), cu_seqlens.long(), None, None, 1, 12))
    torch.library.opcheck(ops.check_unchanged, (row, row.clone()))


# --- int64 cu_seqlens that int32 does not hold ---

HEADS = torch.randn(12, 2, 8)


def transformers_layout(cu_seqlens):
    layout = pytest.importorskip("packing_ops.integrations.transformers.documents")
    found = layout.find_documents(torch.zeros(1, 2, 12, 8, device=cu_seqlens.device), (cu_seqlens, cu_seqlens))
    ops.position_ids_from_cu_seqlens(found.cu_seqlens, 12)


def megatron_layout(cu_seqlens):
    layout = pytest.importorskip("packing_ops.integrations.megatron.varlen_call")
    documents = layout.DocumentSpans(cu_seqlens, cu_seqlens, cu_seqlens, cu_seqlens)
    ops.position_ids_from_cu_seqlens(layout.varlen_call_of(documents, 12, causal=True)[0], 12)


READERS = {
    "positions": lambda cu_seqlens: packing_ops.position_ids_from_cu_seqlens(cu_seqlens, 12),
    "labels": lambda cu_seqlens: packing_ops.shift_labels(torch.arange(12, device=cu_seqlens.device), cu_seqlens),
    "sums": lambda cu_seqlens: packing_ops.segment_sum(HEADS.to(cu_seqlens.device), cu_seqlens),
    "attention": lambda cu_seqlens: packing_ops.varlen_attention(*[HEADS.to(cu_seqlens.device)] * 3, cu_seqlens),
    "metadata": lambda cu_seqlens: (
        packing_ops.PackedMetadata.from_cu_seqlens(cu_seqlens, total=12, max_seqlen=7, num_tokens=12).position_ids
    ),
    "transformers": transformers_layout,
    "megatron": megatron_layout,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("wrong", [2**32 + 5, 5 - 2**32])  # in int32 5
def test_numbers_past_int32_are_named(reader, wrong, device):
    """Not wrapped: they would tell other documents."""
    with pytest.raises((ValueError, RuntimeError), match=r"cu_seqlens\w*: expected (numbers that fit int32|never|to )"):
        READERS[reader](torch.tensor([0, wrong, 12], device=device))
    READERS[reader](torch.tensor([0, 5, 12], device=device))
