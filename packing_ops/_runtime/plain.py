"""The ops that packing_ops.data needs, in plain torch, for use without the compiled library (macOS, a clone without
build).

The results are the same, computed by packing_ops.reference, but slower: pack_sequences checks every bin for every
sequence. Any device; gradients are autograd's. tests/ops/test_plain.py compares each op with its compiled one.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable

import torch

from packing_ops._runtime import library
from packing_ops._runtime.arguments import (
    at_least,
    check_cu_seqlens,
    check_cumulated,
    check_tensor,
    described,
    is_set,
    one_of,
    sum_dtype,
)
from packing_ops.reference import boundaries, packing, padding, prefix_tree, segments

_INT32_MAX = 2**31 - 1
_MOST_SIDES = 8
_STRATEGIES = ("ffd", "bfd", "next_fit", "first_fit", "balanced")
_OVERLONG = ("error", "own", "split", "truncate", "drop")


def op_without_library(name: str) -> Callable:
    """Return ``gate.<name>`` without the library: the function in this file, or one that raises ImportError."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _OPS:
        _warn_once()
        return _OPS[name]

    def missing(*args):
        raise ImportError(library.MISSING)

    return missing


@functools.cache
def _warn_once() -> None:
    message = f"{library.MISSING}; without it packing_ops.data runs in plain torch, slower"
    warnings.warn(message, stacklevel=4)


# --- checks ---


def _index_vector(tensor, name, dims=(1,)):
    check_tensor(tensor, name)
    if tensor.dtype not in (torch.int32, torch.int64) or tensor.dim() not in dims:
        raise ValueError(f"{name}: expected int32 or int64 of {dims[0]} dimension, got {described(tensor)}")
    return tensor


def _checked(cu_seqlens, total):
    check_tensor(cu_seqlens, "cu_seqlens")
    check_cu_seqlens(cu_seqlens)
    check_cumulated(cu_seqlens)
    if cu_seqlens[-1] > total:
        raise ValueError(f"cu_seqlens: expected to end at most at total={total}, got {cu_seqlens[-1]}")
    return cu_seqlens


def _labels(labels):
    _index_vector(labels, "labels", (1, 2))
    if labels.dim() == 2 and labels.shape[0] != 1:
        raise ValueError(f"labels: expected [total] or [1, total], got {described(labels)}")
    return labels


def _floats(values, name):
    check_tensor(values, name)
    if not values.is_floating_point() or values.dim() < 1:
        raise ValueError(f"{name}: expected floating [total, ...], got {described(values)}")
    return values


# --- boundaries ---


def cu_seqlens_from_lengths(lengths):
    total = 0
    for i, length in enumerate(_index_vector(lengths, "lengths").tolist()):
        total += length
        if length < 0:
            raise ValueError(f"lengths: expected no negative length, got {length} at index {i}")
        if total > _INT32_MAX:
            raise ValueError(f"lengths: expected a sum that fits int32, got {total} at index {i}")
    return boundaries.cu_seqlens_from_lengths(lengths)


def _of_slots(op):
    return lambda cu_seqlens, total: op(_checked(cu_seqlens, total), total)


def _of_labels(op):
    return lambda labels, cu_seqlens, ignore_index: op(
        _labels(labels), _checked(cu_seqlens, labels.numel()), ignore_index
    )


position_ids_from_cu_seqlens = _of_slots(boundaries.position_ids_from_cu_seqlens)
seq_idx_from_cu_seqlens = _of_slots(boundaries.seq_idx_from_cu_seqlens)
mask_boundary_labels = _of_labels(boundaries.mask_boundary_labels)
shift_labels = _of_labels(boundaries.shift_labels)
count_target_tokens = _of_labels(lambda *given: boundaries.count_target_tokens(*given).to(torch.int64))


def _padded(found, size, count):
    """Return what the compiled ops return: ``found`` with its last entry repeated up to ``size``, and the count
    ``[1]``.
    """
    return torch.cat([found, found[-1:].expand(size - found.numel())]), found.new_tensor([count], dtype=torch.int64)


def cu_seqlens_from_position_ids(position_ids):
    found = boundaries.cu_seqlens_from_position_ids(_index_vector(position_ids, "position_ids"))
    return _padded(found, position_ids.numel() + 1, found.numel() - 1)


def prompt_end_indices(uids):
    ends = boundaries.prompt_end_indices(_index_vector(uids, "uids"))
    seen, values = set(), uids.tolist()
    for start in [0, *ends.tolist()][:-1] if values else ():
        if values[start] in seen:
            raise ValueError(
                f"uids: expected equal uids next to each other, but {values[start]} comes back at index {start}"
            )
        seen.add(values[start])
    return _padded(ends, uids.numel(), ends.numel())


def mask_boundary_labels_shifted_(labels, cu_seqlens, ignore_index):
    _checked(cu_seqlens, _labels(labels).numel())
    labels.copy_(boundaries.mask_boundary_labels_shifted(labels, cu_seqlens, ignore_index))


def block_causal_mask(cu_seqlens, total, dtype, window):
    return boundaries.block_causal_mask(_checked(cu_seqlens, total), total, dtype=dtype, window=window or None)


_WANTED = {
    "as it was": "values: expected a tensor as it was when its documents were found",
    "depths": "position_ids: expected each row's distance from its root beside segment_parents "
    "(PrefixTree.position_ids)",
    "segments": "parents: expected the paths of the tree that cu_seqlens_q are the segments of",
}


def check_unchanged(values, expected, wanted="as it was"):
    if not torch.equal(values, expected):
        raise ValueError(f"{_WANTED[wanted]}, got other values")


# --- segments ---


def segment_sum(values, cu_seqlens, mask, average):
    _checked(cu_seqlens, _floats(values, "values").shape[0])
    if mask is not None and mask.shape != values.shape[:1]:
        raise ValueError(f"mask: expected [total] like values = [{values.shape[0]}], got {described(mask)}")
    sums = boundaries.segment_sum(values.double(), cu_seqlens, mask, average)
    return sums.to(sum_dtype(values.dtype))


def segment_sum_backward(grad, cu_seqlens, mask, average, total, dtype):
    """Compute it as segment_broadcast calls it: without mask and average."""
    padded = torch.cat([grad, grad.new_zeros(1, *grad.shape[1:])])
    return padded.index_select(0, seq_idx_from_cu_seqlens(cu_seqlens, total)).to(dtype)


def gae(rewards, values, cu_seqlens, mask, bootstrap, gamma, lam):
    _checked(cu_seqlens, _floats(rewards, "rewards").shape[0])
    others = {"values": values, "mask": mask, "bootstrap": bootstrap}
    for name, tensor in others.items():
        wanted = (cu_seqlens.numel() - 1,) if name == "bootstrap" else rewards.shape
        if tensor is not None and tensor.shape != wanted:
            raise ValueError(f"{name}: expected {list(wanted)}, got {described(tensor)}")
    for name, number in {"gamma": gamma, "lam": lam}.items():
        if not 0 <= number <= 1:
            raise ValueError(f"{name}: expected 0 to 1, got {number}")
    found = segments.gae(rewards, values, cu_seqlens, gamma=gamma, lam=lam, mask=mask, bootstrap=bootstrap)
    return tuple(x.to(sum_dtype(rewards.dtype)) for x in found)


# --- padding ---


def unpad_layout(attention_mask, unused_mask, host_totals):
    for name, mask in {"attention_mask": attention_mask, "unused_mask": unused_mask}.items():
        if mask is not None and is_set(mask, name).dim() != 2:
            raise ValueError(f"{name}: expected [batch, seqlen], got {described(mask)}")
    indices, cu_seqlens, seqused, *totals = padding.unpad_layout(attention_mask, unused_mask)
    rest = indices.new_full((attention_mask.numel() - indices.numel(),), -1)
    totals = torch.tensor(totals, dtype=torch.int64, device="cpu" if host_totals else attention_mask.device)
    return torch.cat([indices, rest]), cu_seqlens, seqused, totals


def trim_padding_range(attention_mask, side, min_length, multiple_of):
    if side not in ("right", "left", "both"):
        raise ValueError(f'side: expected "right", "left" or "both", got {side!r}')
    at_least(min_length, "min_length", 0)
    at_least(multiple_of, "multiple_of", 1)
    if is_set(attention_mask, "attention_mask").dim() != 2:
        raise ValueError(f"attention_mask: expected [batch, seqlen], got {described(attention_mask)}")
    width, real = attention_mask.shape[1], attention_mask.any(dim=0).cpu().nonzero()
    # No token at all: an empty range at the end that is not trimmed.
    nothing = width if side == "left" else 0
    first, last = (int(real[0]), int(real[-1]) + 1) if len(real) else (nothing, nothing)
    start, end = 0 if side == "right" else first, width if side == "left" else last
    kept = min(-(-max(end - start, min_length) // multiple_of) * multiple_of, width)
    # Columns that min_length and multiple_of add are kept on the side that is cut; with "both" from the right first.
    end = width if side == "left" else min(start + kept, width)
    return torch.tensor([end - kept, end], dtype=torch.int64, device="cpu")


def unpad_rows(inputs, attention_mask, unused_mask):
    indices, cu_seqlens, seqused, totals = unpad_layout(attention_mask, unused_mask, True)
    total = int(totals[0])
    return gather_rows_many(inputs, indices, total), indices[:total], cu_seqlens, seqused, totals


gather_rows, scatter_rows = padding.gather_rows, padding.scatter_rows


def gather_rows_many(inputs, indices, total):
    return [gather_rows(input, indices, total) for input in inputs]


def scatter_rows_many(packed, indices, batch, seqlen):
    return [scatter_rows(rows, indices, batch, seqlen) for rows in packed]


# --- packing ---


def _check_sides(lengths, strategy, overlong):
    if lengths.dim() == 2 and not 1 <= lengths.shape[1] <= _MOST_SIDES:
        wanted = f"[num_sequences] or [num_sequences, 1 to {_MOST_SIDES} sides]"
        raise ValueError(f"lengths: expected {wanted}, got {described(lengths)}")
    if lengths.dim() == 2 and lengths.shape[1] > 1:
        for name, value, meant in (
            ("strategy", strategy, "'ffd', 'next_fit' or 'first_fit'"),
            ("overlong", overlong, "'error', 'own' or 'drop'"),
        ):
            if repr(value) not in meant:
                raise ValueError(
                    f"{name}: expected {meant} for lengths [num_sequences, {lengths.shape[1]}], got {value!r}"
                )


def _check_overlong(rows, capacity, alignment, overlong):
    most, sides = capacity // alignment * alignment, len(rows[0]) if rows else 1
    flat = [length for row in rows for length in row]
    places = [f"index {i}" if sides == 1 else f"[{i // sides}, {i % sides}]" for i in range(len(flat))]
    for length, place in zip(flat, places, strict=True):
        if length < 0:
            raise ValueError(f"lengths: expected no negative length, got {length} at {place}")
    first = next((i for i, length in enumerate(flat) if length > most), None)
    if first is None:
        return
    if overlong == "error":
        rounded = "" if flat[first] > capacity else f" after rounding up to a multiple of alignment={alignment}"
        policies = "'own', 'split', 'truncate' or 'drop'" if sides == 1 else "'own' or 'drop'"
        raise ValueError(
            f"lengths: expected at most capacity={capacity}{rounded}, got {flat[first]} at {places[first]}, which "
            f"exceeds bin capacity; overlong={policies} accepts it"
        )
    if overlong in ("split", "truncate") and most == 0:
        raise ValueError(
            f"alignment: expected at most capacity={capacity} to cut lengths[{first}]={flat[first]}, got {alignment}"
        )


def pack_sequences(
    lengths, capacity, strategy, alignment, max_sequences_per_bin, min_bins, bins_multiple_of, overlong, balance,
    token_cost, square_cost, ties, seed,
):  # fmt: skip
    _index_vector(lengths, "lengths", (1, 2))
    # Check the arguments as C++ does
    most_pieces = len(lengths) + 1 if max_sequences_per_bin is None else max_sequences_per_bin
    names = "capacity", "alignment", "max_sequences_per_bin", "min_bins", "bins_multiple_of"
    for name, number in zip(names, (capacity, alignment, most_pieces, min_bins, bins_multiple_of), strict=True):
        at_least(number, name, 1)
    one_of(strategy, _STRATEGIES, "strategy")
    one_of(overlong, _OVERLONG, "overlong")
    one_of(ties, ("first", "last"), "ties")
    _check_sides(lengths, strategy, overlong)
    by_side = (lengths[:, None] if lengths.dim() == 1 else lengths).tolist()
    _check_overlong(by_side, capacity, alignment, overlong)
    # Pack
    values = [row[0] if len(row) == 1 else row for row in by_side]
    most_units = capacity // alignment
    try:
        rows = packing.pack_sequences(
            values,
            capacity,
            strategy=strategy,
            alignment=alignment,
            max_sequences_per_bin=max_sequences_per_bin,
            min_bins=min_bins,
            bins_multiple_of=bins_multiple_of,
            overlong=overlong,
            balance=("flops", token_cost, square_cost) if balance else None,
            ties=ties,
            seed=seed,
        )
    except ValueError as error:
        raise ValueError(
            f"min_bins, bins_multiple_of: expected at most as many bins as sequences, got {error}. "
            "Cannot create bins without a sequence"
        ) from None
    # Slots of sequences over the capacity, tokens that are lost
    pieces = packing.make_pieces(values, most_units, alignment, overlong, range(len(values)))
    aligned = [[-(-length // alignment) * alignment for length in row] for row in by_side]
    over = [i for i, row in enumerate(aligned) if max(row) > most_units * alignment]
    own = [aligned[i] for i in over] if overlong == "own" else []
    own_slots = sum(row[0] if len(row) == 1 else sum(max(capacity, slots) for slots in row) for row in own)
    # The pieces as columns
    placed = [piece for row in rows for piece in row]
    items, starts, parts = zip(*placed, strict=True) if placed else ((), (), ())
    tokens = sum(sum(part) if isinstance(part, list) else part for part in parts)
    lost = sum(map(sum, by_side)) - tokens
    counts = tokens, lost, own_slots, packing.lower_bound(pieces, most_units, most_pieces)
    offsets = [0, *itertools.accumulate(map(len, rows))]
    found = [torch.tensor(x, dtype=torch.int64, device="cpu") for x in (offsets, items, starts, parts, over, counts)]
    found[3] = found[3].reshape(len(placed), *lengths.shape[1:])
    return tuple(found)


def pack_ffd(lengths, capacity, alignment, ties_last):
    check_tensor(lengths, "lengths")
    ties = "last" if ties_last else "first"
    offsets, items, *_ = pack_sequences(
        lengths, capacity, "ffd", alignment, None, 1, 1, "error", False, 1.0, 0.0, ties, None
    )
    bins, size = offsets.numel() - 1, lengths.numel()
    offsets = torch.cat([offsets, offsets.new_full((size - bins,), size)])
    return tuple(x.to(lengths.device) for x in (offsets, items, offsets.new_tensor([bins])))


def pack_prefix_tree(tokens, cu_seqlens, groups, capacity, min_shared):
    # Check the arguments as C++ does
    for name, number in {"capacity": capacity, "min_shared": min_shared}.items():
        at_least(1 if number is None else number, name, 1)
    total = _index_vector(tokens, "tokens").numel()
    ends = _checked(cu_seqlens, total).tolist()
    if ends[-1] != total:
        raise ValueError(f"cu_seqlens: expected to end at total={total} like tokens, got {ends[-1]}")
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    if groups is not None and _index_vector(groups, "groups").numel() != len(lengths):
        raise ValueError(
            f"groups: expected [samples] like cu_seqlens = [{len(lengths)}], got {described(groups)} on {groups.device}"
        )
    longest = max(lengths, default=0)
    if capacity is not None and capacity < longest:
        at = lengths.index(longest)
        raise ValueError(f"capacity: expected at least {longest}, the tokens of sample {at}, got {capacity}")
    # Find the tree; its slots become indices into tokens
    values = tokens.tolist()
    samples = [values[start:end] for start, end in itertools.pairwise(ends)]
    numbers = None if groups is None else groups.tolist()
    found = prefix_tree.pack_prefix_tree(samples, numbers, math.inf if capacity is None else capacity, min_shared)
    found["token_of_slot"] = [ends[sample] + depth for sample, depth in found["token_of_slot"]]
    found["repeated"] = [found["repeated_at_forks"], found["repeated_by_cuts"]]
    names = [
        "token_of_slot",
        "cu_seqlens",
        "parents",
        "position_ids",
        "slot_of_token",
        "copies",
        "bin_offsets",
        "sample_bins",
        "repeated",
    ]
    dtypes = {"cu_seqlens": torch.int32, "parents": torch.int32}
    return tuple(torch.tensor(found[name], dtype=dtypes.get(name, torch.int64), device="cpu") for name in names)


_OPS = {name: globals()[name] for name in library.OPS.split() if name in globals()}
