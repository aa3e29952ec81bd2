"""The documents of a batch as rows of smaller batches, for layers that carry a state; see stateful_layers."""

import functools
import inspect

import torch

CACHES = frozenset(("past_key_values", "past_key_value", "cache_params", "cache", "state"))
TRIED = 16  # tokens on each side of a boundary between documents


class Documents:
    """The documents of seq_idx as rows of smaller batches, the longest of each less than twice its shortest.

    several: whether a row has several. padded: whether some slots are in none.
    cu_seqlens: int32 ``[documents + 1]``.
    around, boundary: int64 ``[1, tokens]``, slots around the first boundary inside a row, and the place of it in them.
    batches: [int64 ``[documents, length]``, slots of the flat batch; after its end a document repeats its last one].
    order: int64 ``[batch * seqlen]``: where each slot is among the tokens of all batches, one after the other; the
        last place, behind them, is for padding.
    """

    def __init__(self, seq_idx):
        device, flat = seq_idx.device, seq_idx.flatten().cpu()
        slots = (flat >= 0).nonzero()[:, 0]
        _, lengths = torch.unique_consecutive(flat[slots], return_counts=True)
        rows = slots // max(seq_idx.shape[1], 1)
        self.several = len(lengths) > len(rows.unique())
        self.padded = len(slots) < len(flat)
        ends = lengths.cumsum(0)
        self.cu_seqlens = torch.cat([ends.new_zeros(1), ends]).int().to(device)
        self.around, self.boundary = None, 0
        for end in ends[:-1][rows[ends[:-1] - 1] == rows[ends[:-1]]][:1].tolist():
            first, last = max(end - TRIED, *(ends[ends < end].tolist()[-1:] or [0])), min(end + TRIED, len(slots))
            last = min(last, int(ends[ends > end][0]))
            self.around, self.boundary = slots[None, first:last].to(device), end - first
        starts, self.batches, total = ends - lengths, [], 0
        sizes = torch.log2(lengths.double()).floor()
        order = torch.empty(len(flat) + 1, dtype=torch.int64, device="cpu")
        for size in sizes.unique().tolist():
            chosen = (sizes == size).nonzero()[:, 0]
            longest = int(lengths[chosen].max())
            steps = torch.arange(longest, device="cpu")
            inside = steps < lengths[chosen][:, None]
            tokens = slots[starts[chosen][:, None] + steps.minimum(lengths[chosen][:, None] - 1)]
            self.batches.append(tokens.to(device))
            order[tokens[inside]] = total + inside.flatten().nonzero()[:, 0]
            total += tokens.numel()
        order[:-1][flat < 0] = total
        self.order = order[:-1].to(device)


def by_name(layer, run, args, kwargs):
    """(run, its arguments by name): those that a forward has no names for, as *args, are called by their places."""
    bound = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs)
    parameters, named, order = bound.signature.parameters, {}, []
    star = any(each.kind is each.VAR_POSITIONAL for each in parameters.values()) and len(args) > 0
    for name, value in bound.arguments.items():
        kind = parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            named |= value
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            places = {f"*{place}": each for place, each in enumerate(value) if each is not layer}
            named, order = named | places, [*order, *places]
        elif name != "self" and value is not layer:
            named[name] = value
            if kind is inspect.Parameter.POSITIONAL_ONLY or (star and kind is not inspect.Parameter.KEYWORD_ONLY):
                order.append(name)
    return functools.partial(_in_order, run, order) if order else run, named


def _in_order(run, order, **named):
    places = [named.pop(name) for name in order if name in named]
    return run(*places, **named)


def hidden_of(values):
    """The first of a layer's arguments that may be hidden states."""
    return next((each for each in values if isinstance(each, torch.Tensor) and each.is_floating_point()), None)


def in_rows(run, named, documents, shape):
    results = [
        run(**{name: rows_of(name, value, slots, shape) for name, value in named.items()})
        for slots in documents.batches
    ]
    return _joined(results, documents, shape)


def rows_of(name, value, slots, shape):
    """An argument of a layer for one batch of documents."""
    if name in CACHES:
        return None
    if name == "use_cache":
        return False
    if isinstance(value, tuple | list):
        parts = [rows_of("", each, slots, shape) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not isinstance(value, torch.Tensor):
        return value if _is_plain(value) else None
    if value.dim() < 2 or value.shape[1] != shape[1] or value.shape[0] not in (1, shape[0]):
        return None if name == "attention_mask" else value
    flat = value.expand(shape[0], *value.shape[1:]).flatten(0, 1)
    return flat.index_select(0, slots.flatten()).unflatten(0, slots.shape)


def is_mask(value):
    if isinstance(value, dict):
        return any(map(is_mask, value.values()))
    return not _is_plain(value) or (isinstance(value, torch.Tensor) and value.dim() == 4)


def _is_plain(value):
    """Not a mask of all documents, which the rows do not have."""
    return value is None or isinstance(value, bool | int | float | str | dict | torch.Tensor)


def _joined(results, documents, shape):
    first = results[0]
    if isinstance(first, tuple | list):
        return type(first)(_joined(list(parts), documents, shape) for parts in zip(*results, strict=True))
    batches = documents.batches
    if not isinstance(first, torch.Tensor) or any(
        each.shape[:2] != slots.shape for each, slots in zip(results, batches, strict=True)
    ):
        return None  # a state
    tokens = [each.flatten(0, 1) for each in results]
    if documents.padded:
        tokens.append(tokens[0].new_zeros(1, *tokens[0].shape[1:]))
    return torch.cat(tokens).index_select(0, documents.order).unflatten(0, shape)
