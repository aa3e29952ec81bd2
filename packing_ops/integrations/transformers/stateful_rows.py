"""The documents of a batch as rows of smaller batches, for layers that carry a state; see stateful_layers."""

import functools
import inspect

import torch

from packing_ops.integrations.transformers.stateful_arguments import leaves, mapped, of_result, of_tokens

CACHES = frozenset(("past_key_values", "past_key_value", "cache_params", "cache", "state"))
TRIED = 64  # tokens on each side of a boundary between documents


class Documents:
    """The documents of seq_idx as rows of smaller batches, the longest of each less than twice its shortest.

    several: whether a row has several. padded: whether some slots are in none.
    cu_seqlens: int32 ``[documents + 1]``.
    in_turn: two bool ``[batch, seqlen]``, of the tokens of every second document, and of the others.
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
        self.in_turn = seq_idx % 2 == 1, (seq_idx >= 0) & (seq_idx % 2 == 0)
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


def in_rows(run, named, documents, shape, layout):
    batches = documents.batches
    if not layout.of_rows:  # one document in each
        batches = [row for batch in batches for row in batch.split(1)]
    results = [run(**rows_of(named, slots, shape, layout)) for slots in batches]
    joined = iter(
        [_joined(parts, batches, documents, shape, layout) for parts in zip(*map(leaves, results), strict=True)]
    )
    return mapped(lambda *_: next(joined), results[0])


def rows_of(named, slots, shape, layout):
    """A layer's arguments for one batch of documents."""

    def rows(name, value):
        if name == "use_cache":
            return False
        found = of_tokens(value, shape, layout)
        if found is None:
            return None if _is_of_all_documents(name, value) else value
        tokens = found.tokens(value, *shape).flatten(0, 1)
        return found.back(tokens.index_select(0, slots.flatten()).unflatten(0, slots.shape))

    return {name: None if name in CACHES else mapped(rows, value, name) for name, value in named.items()}


def has_masks(named) -> bool:
    """Whether it is given masks of all documents, or a cache, which the rows do not have."""
    found = []
    mapped(lambda name, leaf: found.append(_is_of_all_documents(name, leaf)) or leaf, named)
    return any(found)


def _is_of_all_documents(name, value) -> bool:
    """A mask, or a cache."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 4 or (name == "attention_mask" and value.dim() > 2)
    return hasattr(value, "get_seq_length") or type(value).__module__.startswith(
        ("packing_ops.", "torch.nn.attention.")
    )


def _joined(parts, batches, documents, shape, layout):
    layouts = [of_result(each, slots.shape, layout) for each, slots in zip(parts, batches, strict=True)]
    if None in layouts:
        return None  # a state
    tokens = [
        found.tokens(each, *slots.shape).flatten(0, 1)
        for each, slots, found in zip(parts, batches, layouts, strict=True)
    ]
    if documents.padded:
        tokens.append(tokens[0].new_zeros(1, *tokens[0].shape[1:]))
    return layouts[0].back(torch.cat(tokens).index_select(0, documents.order).unflatten(0, shape))
