"""Pad, slice and select the rows of a batch. Collators make rows: packed.py.

Input: a dict, or any Mapping whose class can be called with a dict of fields. Fields that have a length and can be
sliced have one entry per row:

- tensors (nested ones too) and NumPy arrays: dim 0;
- lists, ragged or not, and list-likes: ``list_like[start:end]``, and ``type(list_like)(rows)`` where rows are chosen or
  added;
- a dict inside the batch, such as ``metadata``: its fields, under the same rules.

None, numbers, strings, tuples, 0-d tensors and objects that cannot be sliced belong to no row. They are copied
unchanged.

Output: a dict, or ``type(batch)(fields)`` for another class. Attributes that the class does not set itself are copied.
An attribute ``metadata``, a dict or None, is treated like a field of that name.

Boundaries are the exception: (start, end) pairs, contiguous from 0 on, under a name that ends in "boundaries", as
compute_prompt_boundaries and compute_prompt_mini_batch_boundaries return them. They refer to the rows of the batch that
they were computed for, and are copied whole.

A field with as many entries as there are rows is an error where it may be rows or boundaries:

- a list of (start, end) pairs that ends at the last row, under another name;
- boundaries that do not start at 0, have gaps, or are only ends;
- a tuple of tensors or lists.

Every function takes two arguments that overrule these rules:

    row_keys: names, at any depth, of fields with one entry per row; pairs and tuples too.
    batch_keys: names, at any depth, of fields that are copied whole; a dict too.

``order`` of a PackedCollator batch has one entry per document. ``sub_seq_lengths`` says how many documents a row has,
and the entries of ``order`` stay with their row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from packing_ops._runtime.arguments import at_least, integer, plain, wrong_type
from packing_ops.data._batch_fields import Fields, check_names, cut, none_of, rebuilt, taken, with_dummies
from packing_ops.data._examples import OF_IMAGES
from packing_ops.metadata import PackedMetadata

Fill = Mapping[str, float | str | Callable[..., Any]]


def num_rows(batch: Mapping[str, object], *, row_keys: Sequence[str] = (), batch_keys: Sequence[str] = ()) -> int:
    """Count the rows of a batch, checked to be the same in all its fields.

    Args:
        batch, row_keys, batch_keys: see the module's docstring.

    Example:
        >>> num_rows({"ids": torch.tensor([[5], [6]]), "metadata": {"uids": ["a", "b"], "step": 3}})
        2
        >>> num_rows({"ids": torch.tensor([[5], [6]]), "layers": [0.1, 0.2, 0.3]}, batch_keys=("layers",))
        2

    Raises:
        ValueError: fields that differ in their number of rows, or no field with rows; a list that may be boundaries or
            rows; an ``order`` of another number of documents than ``sub_seq_lengths``; a name in row_keys or batch_keys
            that the batch does not have, or that is in both.
        TypeError: a name in row_keys whose field cannot be sliced; a batch that is no Mapping, or of tensordict's
            classes.

    Determinism: the same number in every call.
    Synchronises: never.
    Memory: nothing.
    Gradients: none: an integer.
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
    """Pad a batch to a multiple of rows. The dummy rows, at the end, are copies of row 0 that count in no loss.

    Every model can run a copy of a real row: it has tokens, and ones in its attention mask.

    Args:
        batch, row_keys, batch_keys: see the module's docstring.
        multiple: the rows of the result are a multiple of this (data-parallel size, micro-batch size).
        fill: {field name, at any depth: what its dummy rows hold instead of copies}. A number; a string where rows are
            strings; or a function that gets the copies, ``[dummies, ...]`` or a list, and returns as many rows of the
            same dtype and shape. It may change its argument. Names of fields that are None are ignored. Defaults: 0 for
            names that end in "loss_mask", -100 for names that end in "labels". A batch with neither needs ``fill``,
            which keeps dummy rows out of the loss. Pass ``{}`` if nothing has to.

    Returns:
        A new batch; ``batch`` itself when nothing is added. ``batch`` is not changed.

    Example:
        >>> batch = {"ids": torch.tensor([[5, 6]]), "loss_mask": torch.tensor([[0.0, 1.0]]), "uids": ["a"]}
        >>> padded = pad_batch_to_multiple(batch, 3, fill={"uids": lambda uids: [f"pad{i}" for i in range(len(uids))]})
        >>> padded["ids"].tolist(), padded["loss_mask"].tolist(), padded["uids"]
        ([[5, 6], [5, 6], [5, 6]], [[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]], ['a', 'pad0', 'pad1'])
        >>> routes = {"labels": torch.tensor([[8, 9]]), "experts": torch.tensor([[[3, 1], [2, 3]]])}
        >>> padded = pad_batch_to_multiple(routes, 2, fill={"experts": lambda e: torch.arange(2).expand_as(e)})
        >>> padded["labels"].tolist(), padded["experts"].tolist()
        ([[8, 9], [-100, -100]], [[[3, 1], [2, 3]], [[0, 1], [0, 1]]])

    Raises:
        ValueError: multiple < 1; as num_rows; a name in fill that the batch does not have, or whose field has no rows;
            a value that the field's dtype cannot hold; a function that returns another number of rows, dtype or shape;
            neither a loss mask nor labels nor fill.
        TypeError: a multiple that is no integer, a fill that is no dict.

    Determinism: the same rows in every call, if the functions in ``fill`` are.
    Synchronises: never.
    Memory: a copy of the batch; nothing if no row is added.
    Gradients: of floating tensors, by torch's copies.
    """
    if fill is not None and not isinstance(fill, Mapping):
        raise wrong_type("fill", "a dict of values by name", fill)
    at_least(multiple, "multiple", 1)
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
            f"fill: expected a loss_mask or labels in the batch, got {sorted(map(str, values))}; fill={{name: value}} "
            "says what keeps dummy rows out of the loss, fill={} that nothing has to"
        )
    fills.update(fill or {})
    return fields.map(lambda name, rows: with_dummies(name, rows, missing, fills))


def slice_batch(
    batch: Mapping[str, object], start: int, end: int, *, row_keys: Sequence[str] = (), batch_keys: Sequence[str] = ()
) -> Mapping[str, object]:
    """Return rows ``start`` to ``end`` (exclusive) of every tensor and list, those of a nested ``metadata`` dict too.

    Args:
        batch, row_keys, batch_keys: see the module's docstring.
        start, end: ``0 <= start <= end <= rows``.

    Returns:
        A new batch; its tensors are views, no copies.

    Example:
        >>> slice_batch({"ids": torch.tensor([[5], [6], [7]]), "metadata": {"uids": ["a", "b", "c"]}}, 1, 3)
        {'ids': tensor([[6],
                [7]]), 'metadata': {'uids': ['b', 'c']}}

    Raises:
        ValueError: rows that the batch does not have; as num_rows; a list-like that cannot be sliced.

    Determinism: the same rows in every call.
    Synchronises: never.
    Memory: nothing: views.
    Gradients: of floating tensors, through the views.
    """
    fields = Fields(batch, row_keys, batch_keys)
    rows = fields.count()
    start, end = integer(start, "start"), integer(end, "end")
    if not 0 <= start <= end <= rows:
        raise ValueError(f"start, end: expected 0 <= start <= end <= {rows} rows, got {start} and {end}")
    return fields.map(lambda name, rows: cut(name, rows, start, end))


def select_rows(
    batch: Mapping[str, object], indices: Sequence[int], *, row_keys: Sequence[str] = (), batch_keys: Sequence[str] = ()
) -> Mapping[str, object]:
    """Return the rows at ``indices``, in that order: for example one micro-batch of token_budget_microbatches.

    Args:
        batch, row_keys, batch_keys: see the module's docstring.
        indices: each ``0 <= index < rows``; repeats are allowed.

    Returns:
        A new batch; tensors are copied, entries of lists are the same objects.

    Example:
        >>> select_rows({"ids": torch.tensor([[5], [6], [7]]), "uids": ["a", "b", "c"]}, [2, 0])
        {'ids': tensor([[7],
                [5]]), 'uids': ['c', 'a']}

    Raises:
        ValueError: a row that the batch does not have; as num_rows; a list-like whose class cannot be called with rows.
        TypeError: an index that is no integer; so is a mask: pass ``mask.nonzero()[:, 0]``.

    Determinism: the same rows in every call.
    Synchronises: once for indices on CUDA.
    Memory: a copy of these rows.
    Gradients: of floating tensors, by torch's indexing.
    """
    fields = Fields(batch, row_keys, batch_keys)
    rows = fields.count()
    numbers = plain(indices)
    if not hasattr(numbers, "__iter__"):
        raise wrong_type("indices", "row numbers", indices)
    numbers = list(numbers)
    if (masked := next((each for each in map(plain, numbers) if isinstance(each, bool)), None)) is not None:
        raise wrong_type("indices", "row numbers", masked)  # True is no row 1
    indices = [integer(index, "indices") for index in numbers]
    if wrong := [index for index in indices if not 0 <= index < rows]:
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
    """Return a batch without tokens that has every field of ``batch``: for a rank that has no sequences left in a step.

    The other ranks wait for its forward and backward (FSDP, expert parallel). On such a batch the model's logits are
    empty, masked_loss and the sum of sequence_logps are 0 with a gradient graph, and every parameter gets a gradient of
    zeros. A mean over its tokens would be NaN: divide by the count of the whole step (transformers:
    ``num_items_in_batch``).

    Args:
        batch: see the module's docstring; or packed rows: a dict that has a PackedMetadata, or a field with ``cu_seq``
            in its name, as PaddingFreeCollator and PackedCollator.model_inputs return it.
        tokens: packed rows only: the field whose shape, ``[total]``, ``[1, total]`` or ``[rows, width]``, all fields
            with one value per token share. Other tensors and lists have one value per document.
        padding: packed rows only: number of slots, which belong to no document, for models that cannot run a row of 0
            slots. Those of transformers need 1: their reshapes are ambiguous without an element.
        row_keys, batch_keys: see the module's docstring.

    Returns:
        A new batch with the dtypes and devices of ``batch``. Rows are 0, fields without rows are copied over.
        For packed rows:

        - values per token: ``[padding, ...]`` or ``[1, padding, ...]``, -100 where the name ends in "labels" or
          "targets", else 0;
        - values per document: ``[0, ...]``, and empty lists;
        - cu_seqlens ``[0]``, ``max_length*`` and ``max_seqlen*`` 0, a PackedMetadata of no documents. In transformers'
          ``cu_seq_lens*`` and ``max_length*`` the padding is a document, as in PackedMetadata.to_transformers.

    Example:
        >>> row = {"input_ids": torch.tensor([[5, 6, 7]]), "cu_seq_lens_q": torch.tensor([0, 2, 3]), "max_length_q": 2}
        >>> empty_like_batch(row)
        {'input_ids': tensor([], size=(1, 0), dtype=torch.int64), 'cu_seq_lens_q': tensor([0]), 'max_length_q': 0}
        >>> empty_like_batch(row, padding=1)
        {'input_ids': tensor([[0]]), 'cu_seq_lens_q': tensor([0, 1]), 'max_length_q': 1}
        >>> empty_like_batch({"ids": torch.tensor([[5, 6], [7, 8]]), "uids": ["a", "b"]})
        {'ids': tensor([], size=(0, 2), dtype=torch.int64), 'uids': []}

    Raises:
        ValueError: packed rows without the field ``tokens``; padding below 0, or over 0 for a batch without packed
            rows; as num_rows for such a batch; a list-like that cannot be empty.
        TypeError: a padding that is no integer.
        NotImplementedError: packed rows with images.

    Determinism: the same batch in every call.
    Synchronises: never.
    Memory: the fields without rows are shared, the others empty.
    Gradients: none of the result; a loss of it gives every parameter zeros.
    """
    at_least(padding, "padding", 0, "slots")
    fields = Fields(batch, row_keys, batch_keys)
    if any("cu_seq" in str(name) or isinstance(value, PackedMetadata) for name, value in fields.all):
        like = batch.get(tokens)
        if not isinstance(like, torch.Tensor) or not like.dim():
            got = f"a {type(like).__name__}" if like is not None else f"only {sorted(batch)}"
            raise ValueError(f"{tokens}: expected a tensor [total], [1, total] or [rows, width], got {got}")
        if images := [name for name, value in fields.all if name in OF_IMAGES and value is not None]:
            raise NotImplementedError(
                f"{images[0]}: expected a batch of text, since the towers of models run no empty batch, got images; a "
                "row with images whose labels are all -100 serves too"
            )
        return _without_tokens(fields, tuple(like.shape[:2]), padding)
    if padding:
        raise ValueError(f"padding: expected 0 for a batch without cu_seqlens, got {padding}")
    if fields.rows():
        fields.count()
    return fields.map(none_of)


def _without_tokens(fields: Fields, shape: tuple[int, ...], padding: int) -> Mapping[str, object]:
    """Return empty_like_batch of packed rows. ``shape``: the first dimensions of every value per token."""
    dims, slots = len(shape), (padding,) if len(shape) == 1 else (1, padding)

    def emptied(key: str, value: Any) -> Any:
        name = str(key)
        if isinstance(value, Mapping) and key not in fields.batch_keys:
            return rebuilt(value, emptied)
        if isinstance(value, PackedMetadata):
            return PackedMetadata.from_lengths([], total=padding, device=value.cu_seqlens.device)
        if name.endswith("num_tokens") and isinstance(value, int):
            return 0
        if name.startswith(("max_length", "max_seqlen")):
            longest = padding if name.startswith("max_length") else 0
            return torch.full_like(value, longest) if isinstance(value, torch.Tensor) else longest
        if not fields.has_rows(key, value):
            return value
        if name.endswith("num_tokens"):
            return value.new_zeros(1 if padding else 0)  # of the document that the padding is
        if "cu_seq" in name:
            ends = 2 if padding and "cu_seq_lens" in name else 1
            return torch.arange(ends, dtype=value.dtype, device=value.device) * padding
        if isinstance(value, torch.Tensor):
            # M-RoPE's position_ids are [3, batch, seqlen].
            axes = 1 if name == "position_ids" and tuple(value.shape[1 : dims + 1]) == shape else 0
            if tuple(value.shape[axes : axes + dims]) == shape:
                fill = -100 if name.endswith(("labels", "targets")) else 0
                return value.new_full((*value.shape[:axes], *slots, *value.shape[axes + dims :]), fill)
        return none_of(name, value)

    return rebuilt(fields.batch, emptied)
