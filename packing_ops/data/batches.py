"""Rows of a batch: dummy rows up to a multiple, a slice, any choice of rows.

What a batch is: a dict, or any other Mapping whose class is made of a dict of fields. Its rows are what has a length and
slices: dim 0 of tensors (nested ones and NumPy arrays too), the entries of lists, which may be ragged, and of list-likes
(``list_like[start:end]``, and ``type(list_like)(rows)`` where rows are chosen or added). A dict inside it, such as
``metadata``, holds more of the same. None, numbers, strings, tuples, 0-d tensors and what has no slices belong to no row
and are carried as they are.

What comes back is a dict, or of the class of the batch: ``type(batch)(fields)``; attributes that the class does not set
itself go with it, and where it has an attribute ``metadata``, a dict or None, that is cut as a field of that name would be.

What is guessed: everything with rows is per row, and of another number of rows an error. Only (start, end) pairs under a
name that ends in "boundaries", one after the other from 0 as compute_prompt_boundaries and
compute_prompt_mini_batch_boundaries give them, are carried whole; they number the rows of the batch that they were made of.
A list of such pairs under another name, as many as the rows and ending with them, is an error. Every function takes both
answers:

    row_keys: names, at any depth, of what is per row: such pairs, or a tuple.
    batch_keys: names, at any depth, of what is carried whole, a dict too.

PackedCollator's ``order`` has an entry per document instead: beside ``sub_seq_lengths``, which says how many a row has, its
entries go where their row goes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from packing_ops._args import integer
from packing_ops.data._rows import Fields, check_names, cut, none_of, rebuilt, taken, with_dummies
from packing_ops.metadata import PackedMetadata

Fill = Mapping[str, float | str | Callable[..., Any]]


def num_rows(batch: Mapping[str, object], *, row_keys: Sequence[str] = (), batch_keys: Sequence[str] = ()) -> int:
    """Rows of a batch, after a look that all of it has as many.

    Args:
        batch, row_keys, batch_keys: as the module says.

    Example:
        >>> num_rows({"ids": torch.tensor([[5], [6]]), "metadata": {"uids": ["a", "b"], "step": 3}})
        2
        >>> num_rows({"ids": torch.tensor([[5], [6]]), "layers": [0.1, 0.2, 0.3]}, batch_keys=("layers",))
        2

    Raises:
        ValueError: fields that differ in their number of rows, or none that has rows; a list that may be boundaries of the
            batch as well as rows; an ``order`` of another number of documents than ``sub_seq_lengths``; a name in row_keys
            or batch_keys that the batch does not have, or that is in both.
        TypeError: a name in row_keys of what has no rows.
    """
    return Fields(batch, row_keys, batch_keys).count()


def pad_batch_to_multiple(
    batch: Mapping[str, object],
    multiple: int,
    *,
    fill: Fill | None = None,
    row_keys: Sequence[str] = (),
    batch_keys: Sequence[str] = (),
) -> Mapping[str, object]:
    """A batch whose number of rows divides: dummy rows at the end are copies of row 0 that count in no loss.

    Copies of a real row, because any model runs them: no row without tokens, no attention mask without a one.

    Args:
        batch, row_keys, batch_keys: as the module says.
        multiple: the rows of the result are a multiple of this (data-parallel size, micro-batch size).
        fill: what dummy rows have in place of the copies, by name, at any depth: a number that fills them (a string where
            rows are strings), or a function that gets the copies, ``[dummies, ...]`` or a list, which are its own, and
            returns as many rows; tensors and arrays of the same dtype and shape. A name whose value is None is passed over.
            Names that end in "loss_mask" have 0 without being told, and those that end in "labels" have -100. A batch with
            neither needs ``fill``: what keeps its dummy rows out of the loss, ``{}`` if nothing has to.

    Returns:
        A new batch; ``batch``, which stays as it was, when there is nothing to do.

    Example:
        >>> batch = {"ids": torch.tensor([[5, 6]]), "loss_mask": torch.tensor([[0.0, 1.0]]), "uids": ["a"]}
        >>> padded = pad_batch_to_multiple(batch, 3, fill={"uids": lambda uids: [f"pad{i}" for i in range(len(uids))]})
        >>> padded["ids"].tolist(), padded["loss_mask"].tolist(), padded["uids"]
        ([[5, 6], [5, 6], [5, 6]], [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]], ['a', 'pad0', 'pad1'])
        >>> routes = {"labels": torch.tensor([[8, 9]]), "experts": torch.tensor([[[3, 1], [2, 3]]])}
        >>> padded = pad_batch_to_multiple(routes, 2, fill={"experts": lambda e: torch.arange(e.shape[-1]).expand_as(e)})
        >>> padded["labels"].tolist(), padded["experts"].tolist()
        ([[8, 9], [-100, -100]], [[[3, 1], [2, 3]], [[0, 1], [0, 1]]])

    Raises:
        ValueError: multiple < 1; what num_rows raises; a name in fill that the batch does not have, or that has no rows; a
            value that its dtype cannot hold, rows of a function that are not as many or of another dtype or shape; neither
            a loss mask nor labels nor fill.
        TypeError: a multiple that is no integer.
    """
    if integer(multiple, "multiple") < 1:
        raise ValueError(f"multiple: expected at least 1, got {multiple}")
    fields = Fields(batch, row_keys, batch_keys)
    missing = -fields.count() % multiple
    values = dict(fields.all)
    check_names(tuple(fill or ()), "fill", set(values))
    if not missing:
        return batch
    with_rows = [name for name, _ in fields.rows()]
    for name in fill or ():
        if name not in with_rows and values[name] is not None:
            raise ValueError(f"fill: expected a name of rows, got {name!r}, {type(values[name]).__name__}")
    fills: dict[str, Any] = {name: 0 for name in with_rows if str(name).endswith("loss_mask")}
    fills |= {name: -100 for name in with_rows if str(name).endswith("labels")}
    if fill is None and not fills:
        raise ValueError(
            f"fill: expected a loss_mask or labels in the batch, got {sorted(map(str, values))}; fill={{name: value}} says "
            "what keeps dummy rows out of the loss, fill={} that nothing has to"
        )
    fills.update(fill or {})
    return fields.map(lambda name, rows: with_dummies(name, rows, missing, fills))


def slice_batch(
    batch: Mapping[str, object], start: int, end: int, *, row_keys: Sequence[str] = (), batch_keys: Sequence[str] = ()
) -> Mapping[str, object]:
    """Rows ``start`` to ``end`` (exclusive), lists and a nested ``metadata`` dict sliced with the tensors.

    Args:
        batch, row_keys, batch_keys: as the module says.
        start, end: ``0 <= start <= end <= rows``.

    Returns:
        A new batch; its tensors are views, no copies.

    Example:
        >>> slice_batch({"ids": torch.tensor([[5], [6], [7]]), "metadata": {"uids": ["a", "b", "c"]}}, 1, 3)
        {'ids': tensor([[6],
                [7]]), 'metadata': {'uids': ['b', 'c']}}

    Raises:
        ValueError: rows that the batch does not have; what num_rows raises; a list-like that has no slices.
    """
    fields = Fields(batch, row_keys, batch_keys)
    rows = fields.count()
    start, end = integer(start, "start"), integer(end, "end")
    if not 0 <= start <= end <= rows:
        raise ValueError(f"start, end: expected 0 <= start <= end <= {rows} rows, got {start} and {end}")
    return fields.map(lambda name, rows: cut(name, rows, start, end))


def select_rows(
    batch: Mapping[str, object],
    indices: Sequence[int],
    *,
    row_keys: Sequence[str] = (),
    batch_keys: Sequence[str] = (),
) -> Mapping[str, object]:
    """The rows named by ``indices``, in that order: one micro-batch of token_budget_microbatches, say.

    Args:
        batch, row_keys, batch_keys: as the module says.
        indices: row numbers, each ``0 <= index < rows``; one may come twice.

    Returns:
        A new batch; tensors are copied, entries of lists are the same objects.

    Example:
        >>> select_rows({"ids": torch.tensor([[5], [6], [7]]), "uids": ["a", "b", "c"]}, [2, 0])
        {'ids': tensor([[7],
                [5]]), 'uids': ['c', 'a']}

    Raises:
        ValueError: a row that the batch does not have; what num_rows raises; a list-like that cannot be made of rows.
        TypeError: an index that is no integer.
    """
    fields = Fields(batch, row_keys, batch_keys)
    rows = fields.count()
    indices = [integer(index, "indices") for index in indices]
    wrong = [index for index in indices if not 0 <= index < rows]
    if wrong:
        raise ValueError(f"indices: expected 0 to {rows - 1} for {rows} rows, got {wrong[0]}")
    return fields.map(lambda name, rows: taken(name, rows, indices))


def empty_like_batch(
    batch: Mapping[str, object],
    *,
    tokens: str = "input_ids",
    padding: int = 0,
    row_keys: Sequence[str] = (),
    batch_keys: Sequence[str] = (),
) -> Mapping[str, object]:
    """A batch of no tokens with every field of ``batch``: the step of a rank that has no sequences left.

    Such a rank runs forward and backward like the others, which wait for it: the model gives logits of no token,
    masked_loss and the sum of sequence_logps are 0 with a gradient graph, and each parameter gets a gradient of zeros. A
    mean over its tokens would be NaN: divide by what the whole step holds (transformers: ``num_items_in_batch``).

    Args:
        batch: as the module says; or packed rows, which are told by a field with ``cu_seq`` in its name, or a
            PackedMetadata: those of PaddingFreeCollator and PackedCollator.model_inputs, or a dict of one's own.
        tokens: of packed rows, the field whose shape, ``[total]``, ``[1, total]`` or ``[rows, width]``, is that of every
            field with a value per token. Other tensors and lists have a value per document.
        padding: of packed rows, slots that belong to no document, for models that run no row of 0 slots. Those of
            transformers need 1: their reshapes are ambiguous without an element.
        row_keys, batch_keys: as the module says.

    Returns:
        A new batch. Of packed rows: values per token ``[padding, ...]`` or ``[1, padding, ...]``, zeros, -100 where a name
        ends in "labels" or "targets"; values per document ``[0, ...]``, no entry in lists; cu_seqlens ``[0]``, longest
        documents (``max_length*``, ``max_seqlen*``) 0, a PackedMetadata likewise; in ``cu_seq_lens*`` and ``max_length*``,
        transformers' own, padding is a document, as in to_transformers. Of any other batch: no rows. Dtypes and devices
        are those of ``batch``, and what belongs to no row is carried as it is.

    Example:
        >>> row = {"input_ids": torch.tensor([[5, 6, 7]]), "cu_seq_lens_q": torch.tensor([0, 2, 3]), "max_length_q": 2}
        >>> empty_like_batch(row)
        {'input_ids': tensor([], size=(1, 0), dtype=torch.int64), 'cu_seq_lens_q': tensor([0]), 'max_length_q': 0}
        >>> empty_like_batch(row, padding=1)
        {'input_ids': tensor([[0]]), 'cu_seq_lens_q': tensor([0, 1]), 'max_length_q': 1}
        >>> empty_like_batch({"ids": torch.tensor([[5, 6], [7, 8]]), "uids": ["a", "b"]})
        {'ids': tensor([], size=(0, 2), dtype=torch.int64), 'uids': []}

    Raises:
        ValueError: packed rows without the field ``tokens``; padding below 0, or of a batch that is no packed rows; what
            num_rows raises of such a batch; a list-like that cannot be empty.
        TypeError: a padding that is no integer.
    """
    if integer(padding, "padding") < 0:
        raise ValueError(f"padding: expected at least 0 slots, got {padding}")
    fields = Fields(batch, row_keys, batch_keys)
    if any("cu_seq" in str(name) or isinstance(value, PackedMetadata) for name, value in fields.all):
        like = batch.get(tokens)
        if not isinstance(like, torch.Tensor) or not like.dim():
            got = f"a {type(like).__name__}" if like is not None else f"only {sorted(batch)}"
            raise ValueError(f"{tokens}: expected a tensor [total], [1, total] or [rows, width], got {got}")
        return _without_tokens(fields, tuple(like.shape[:2]), padding)
    if padding:
        raise ValueError(f"padding: expected 0 for a batch without cu_seqlens, got {padding}")
    if fields.rows():
        fields.count()
    return fields.map(none_of)


def _without_tokens(fields: Fields, shape: tuple[int, ...], padding: int) -> Mapping[str, object]:
    """``shape``: that of the tokens, in front of any others."""
    dims, slots = len(shape), (padding,) if len(shape) == 1 else (1, padding)

    def emptied(name: str, value: Any) -> Any:
        if isinstance(value, Mapping) and name not in fields.batch_keys:
            return rebuilt(value, emptied)
        if isinstance(value, PackedMetadata):
            return PackedMetadata.from_lengths([], total=padding, device=value.cu_seqlens.device)
        if name.startswith(("max_length", "max_seqlen")):
            longest = padding if name.startswith("max_length") else 0
            return torch.full_like(value, longest) if isinstance(value, torch.Tensor) else longest
        if not fields.has_rows(name, value):
            return value
        if "cu_seq" in name:
            ends = 2 if padding and "cu_seq_lens" in name else 1
            return torch.arange(ends, dtype=value.dtype, device=value.device) * padding
        if isinstance(value, torch.Tensor):
            axes = (
                1 if name == "position_ids" and tuple(value.shape[1 : dims + 1]) == shape else 0
            )  # [3, batch, seqlen]
            if tuple(value.shape[axes : axes + dims]) == shape:
                fill = -100 if name.endswith(("labels", "targets")) else 0
                return value.new_full((*value.shape[:axes], *slots, *value.shape[axes + dims :]), fill)
        return none_of(name, value)

    return rebuilt(fields.batch, emptied)
