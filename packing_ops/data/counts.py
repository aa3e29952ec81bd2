"""Counts of tokens, padding and sequences in a batch: for throughput, and as the denominators of logged means."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from packing_ops._runtime.arguments import (
    at_least,
    check_cu_seqlens,
    described,
    index_tensor,
    integer,
    is_set,
    wrong_type,
)
from packing_ops.metadata import PackedMetadata, check_no_tree
from packing_ops.segments import segment_sum, slots_with_tokens


class TokenCounts(NamedTuple):
    """int64 scalars on the device of the batch: ``total += torch.stack(count_tokens(batch))`` does not synchronise.

    Attributes:
        tokens: without padding.
        padding_tokens: of padding. ``tokens + padding_tokens`` is the size of the model's input.
        sequences: documents with at least one token.
    """

    tokens: torch.Tensor
    padding_tokens: torch.Tensor
    sequences: torch.Tensor


def count_tokens(batch: Mapping[str, object], *, tokens: str = "input_ids", pad_token_id: int = 0) -> TokenCounts:
    """Count tokens, padding and sequences of a padded or packed batch.

    Args:
        batch: any mapping with a tensor ``[total]``, ``[1, total]`` or ``[rows, seqlen]`` under ``tokens``; or several,
            under names that end in it: ``chosen_input_ids`` and ``rejected_input_ids``, each with fields of the same
            prefix.
        tokens: the name; "sequences" for the batches of PackedCollator.
        pad_token_id: the padding token of PaddingFreeCollator. In its cu_seq_lens, and in PackedCollator.model_inputs',
            the padding of a row is a document. A document that holds only this token, and no label, counts as padding.

    The first of these fields that the batch has decides what is a token:
        ``sub_seq_lengths``: PackedCollator's lengths of the documents of each row.
        ``num_tokens`` next to ``cu_seq``: the slots before the padding, or the tokens of each document.
        a PackedMetadata, under any name, or the first field with ``cu_seq`` in its name: slots before its end, except
            those where an ``attention_mask`` is 0, and except documents of padding.
        ``attention_mask``: slots where it is not 0; each row with a token is a sequence.
        without these fields every slot is a token, every row a sequence.

    Returns:
        TokenCounts, on the device of the tokens.

    Example:
        >>> ids, mask = torch.tensor([[5, 6, 0], [7, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
        >>> count_tokens({"input_ids": ids, "attention_mask": mask})
        TokenCounts(tokens=tensor(3), padding_tokens=tensor(3), sequences=tensor(2))
        >>> from packing_ops.data import PaddingFreeCollator
        >>> row = PaddingFreeCollator(capacity=8)([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> torch.stack(count_tokens(row)).tolist()
        [5, 3, 2]

    Raises:
        ValueError: no tensor of that name, or one of another rank; a mask of another shape; cu_seqlens of another dtype
            or shape; a prefix tree, which holds several samples in a row of fewer tokens: count ``input_ids[:,
            slot_of_token]`` with ``sample_cu_seqlens`` for cu_seqlens.
        TypeError: a pad_token_id that is no integer.

    open-instruct's get_num_tokens is ``tokens``, its get_num_sequences ``sequences``, its get_num_padded_tokens
    ``tokens + padding_tokens``.

    Determinism: the same integers in every call.
    Synchronises: never.
    Memory: masks with an entry for each slot.
    Gradients: none: integers.
    """
    names = [name for name in batch if str(name).endswith(tokens)]
    if not names:
        raise ValueError(f"{tokens}: expected a tensor [total] or [rows, seqlen], got only {sorted(map(str, batch))}")
    pad_token_id = integer(pad_token_id, "pad_token_id")
    per_name = [_counts_of(batch, name.removesuffix(tokens), name, pad_token_id) for name in names]
    return TokenCounts(*(sum(counts[1:], counts[0]) for counts in zip(*per_name, strict=True)))


def _counts_of(batch: Mapping[str, Any], prefix: str, name: str, pad_token_id: int) -> tuple[torch.Tensor, ...]:
    """Return (tokens, padding, sequences) of one tensor of tokens, ``prefix + tokens``."""
    ids, labels, mask = batch[name], batch.get(prefix + "labels"), batch.get(prefix + "attention_mask")
    if not isinstance(ids, torch.Tensor):
        raise wrong_type(name, "a tensor [total] or [rows, seqlen]", ids)
    if ids.dim() not in (1, 2):
        raise ValueError(f"{name}: expected a tensor [total] or [rows, seqlen], got {described(ids)}")
    if mask is not None and mask.shape != ids.shape:
        raise ValueError(f"{prefix}attention_mask: expected {list(ids.shape)} like {name}, got {list(mask.shape)}")
    lengths, cu_seqlens = batch.get(prefix + "sub_seq_lengths"), _cu_seqlens(batch, prefix)
    # Of PackedMetadata.to_transformers, or the document_tokens of a PackedMetadata
    given = (value.document_tokens for value in batch.values() if isinstance(value, PackedMetadata) and not prefix)
    num_tokens: Any = next((each for each in given if each is not None), batch.get(prefix + "num_tokens"))
    if lengths is not None:
        lengths = [length for row in lengths for length in row]
        # No copy from the host, which would wait for the GPU.
        found = [ids.new_full((), count, dtype=torch.int64) for count in (sum(lengths), sum(map(bool, lengths)))]
    else:
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else is_set(mask, prefix + "attention_mask")
        if cu_seqlens is None:
            per_document = real.sum(-1, dtype=torch.int64)
        elif num_tokens is not None:
            with_tokens = slots_with_tokens(num_tokens, cu_seqlens, ids.numel()).to(ids.device)
            per_document = _sums(real.flatten() & with_tokens, cu_seqlens)
        else:
            no_padding = ids != pad_token_id
            if labels is not None and labels.shape == ids.shape:
                no_padding = no_padding | (labels != -100)
            per_document = _sums(real, cu_seqlens) * (_sums(no_padding, cu_seqlens) > 0 if mask is None else 1)
        found = [per_document.sum(), (per_document > 0).sum()]
    return found[0], ids.numel() - found[0], found[1]


def _cu_seqlens(batch: Mapping[str, Any], prefix: str) -> torch.Tensor | None:
    if batch.get(prefix + "segment_parents") is not None:
        raise ValueError(
            f"{prefix}segment_parents: expected packed documents, got a prefix tree, whose segments are no samples: "
            "count input_ids[:, slot_of_token] with sample_cu_seqlens for cu_seqlens"
        )
    for name, value in batch.items():
        if isinstance(value, PackedMetadata) and not prefix:
            check_no_tree(value, str(name))
            return value.cu_seqlens
        if str(name).startswith(prefix) and "cu_seq" in str(name)[len(prefix) :]:
            check_cu_seqlens(value, str(name))
            return value
    return None


def _sums(slots: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return int64 ``[num_documents]``: number of true slots in each document."""
    return segment_sum(slots.flatten().double(), cu_seqlens.to(slots.device)).long()


def packing_advice(lengths: torch.Tensor | Sequence[int], batch_size: int) -> str:
    """Return a line for the log of a padded run: what share of its slots is padding, and whether packing would pay.

    Args:
        lengths: int32 or int64 ``[num_examples]``, tokens in the order of arrival, or a list of ints.
        batch_size: examples of a padded batch.

    Returns:
        The line. It recommends packing where a tenth of the slots or more is padding.

    Example:
        >>> packing_advice([5, 7, 2, 6], batch_size=2).split(": ")[1]
        'packing is recommended, it leaves 23% out'
        >>> packing_advice([5, 5], batch_size=2)
        'padded to the longest of 2, the first 2 examples fill 100% of the slots: packing would save little'

    Raises:
        ValueError: no lengths, another dtype or shape, a length below 1, batch_size below 1.

    Determinism: the same line for the same lengths.
    Synchronises: once for lengths on CUDA.
    Memory: nothing.
    Gradients: none: a string.
    """
    lengths, rows = index_tensor(lengths, "lengths").cpu(), at_least(batch_size, "batch_size", 1, "example")
    if lengths.dim() != 1 or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths: expected int32 or int64 [num_examples], got {described(lengths)}")
    if not lengths.numel() or int(lengths.min()) < 1:
        raise ValueError(f"lengths: expected at least one, each at least 1, got {lengths.tolist()[:8]}")
    slots = sum(int(batch.max()) * batch.numel() for batch in lengths.split(rows))
    filled = round(100 * int(lengths.sum()) / slots)
    advice = "packing would save little" if filled > 90 else f"packing is recommended, it leaves {100 - filled}% out"
    some = f"the first {lengths.numel()} examples fill {filled}% of the slots"
    return f"padded to the longest of {rows}, {some}: {advice}"
