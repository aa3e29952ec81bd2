"""What a layer is given and what it returns: trees of tensors, some of which have a place for each token of the batch."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


def mapped(function, value, name="", anew=False):
    """``value`` with function(name, leaf) in place of each of its leaves; itself where they all stay, unless ``anew``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    elif isinstance(value, Mapping):
        before = dict(value)
    elif isinstance(value, tuple | list):
        before = dict(enumerate(value))
    else:
        return function(name, value)
    parts = {key: mapped(function, each, key, anew) for key, each in before.items()}
    return value if not anew and all(parts[key] is before[key] for key in before) else _made_of(parts, value)


def _made_of(parts, value):
    """As ``value``, of other parts."""
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **parts)
    if isinstance(value, Mapping):
        made = copy.copy(value)
        made.update(parts)
        return made
    return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())


def leaves(value) -> list:
    found = []
    mapped(lambda _, leaf: found.append(leaf) or leaf, value)
    return found


class Layout(NamedTuple):
    """Where a tensor has the tokens of a batch.

    fits: whether a shape has them there. tokens: the tensor as ``[batch, seqlen, ...]``. back: and back again.
    of_rows: whether rows are apart in it.
    """

    fits: Callable
    tokens: Callable
    back: Callable
    of_rows: bool = True


ROWS = Layout(
    lambda shape, b, t: shape[0] in (1, b) and shape[1] == t,
    lambda x, b, t: x.expand(b, *x.shape[1:]),
    lambda x: x,
)
_FLAT = Layout(
    lambda shape, b, t: shape[0] == b * t,
    lambda x, b, t: x.unflatten(0, (b, t)),
    lambda x: x.flatten(0, 1),
    of_rows=False,
)
_LAYOUTS = (
    ROWS,
    _FLAT,
    Layout(lambda shape, b, t: shape[:2] == (t, b), lambda x, b, t: x.transpose(0, 1), lambda x: x.transpose(0, 1)),
    Layout(
        lambda shape, b, t: len(shape) > 2 and (shape[0], shape[-1]) == (b, t),
        lambda x, b, t: x.movedim(-1, 1),
        lambda x: x.movedim(1, -1),
    ),
)


def layout_of(values, shape) -> Layout | None:
    """Of a layer's arguments, by their hidden states, or else the numbers that it makes them of; None without either."""
    tensors = [each for each in leaves(values) if isinstance(each, torch.Tensor) and each.dim() > 1]
    floats = [each for each in tensors if each.is_floating_point()]
    for of_kind, layouts in ((floats, _LAYOUTS), (tensors, _LAYOUTS[:1])):
        for layout in layouts:
            if any(layout.fits(each.shape, *shape) for each in of_kind):
                return layout
    return None


def of_tokens(leaf, shape, *layouts) -> Layout | None:
    """The first of these layouts that a leaf has, None where it has no place for each token."""
    if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
        return None
    return next((each for each in (*layouts, ROWS) if each.fits(leaf.shape, *shape)), None)


def of_result(leaf, shape, layout) -> Layout | None:
    """As of_tokens: routers return rows of experts for flat tokens, whatever they are given."""
    return of_tokens(leaf, shape, layout, ROWS, _FLAT)


def token_tensors(result, shape, layout) -> list[torch.Tensor]:
    """All tensors of a layer's result that have a place for each token, as ``[batch, seqlen, ...]``."""
    found = [(leaf, of_result(leaf, shape, layout)) for leaf in leaves(result)]
    tensors = [each.tokens(leaf, *shape) for leaf, each in found if each is not None]
    return [torch.view_as_real(each) if each.is_complex() else each for each in tensors]


def with_others(named, shape, layout, where):
    """A layer's arguments with other tokens where the bool ``[batch, seqlen]`` holds: other hidden states, or, of a layer
    that makes them, numbers that are as large at most."""
    places = [leaf for leaf in leaves(named) if of_tokens(leaf, shape, layout) is not None]
    floats = any(each.is_floating_point() for each in places)

    def other(_, leaf):
        found = of_tokens(leaf, shape, layout)
        if found is None or leaf.is_floating_point() != floats or leaf.dtype == torch.bool:
            return leaf
        tokens = found.tokens(leaf, *shape)
        others = 1 - 2 * tokens if floats else tokens.min() + tokens.max() - tokens
        return found.back(torch.where(where.view(*where.shape, *[1] * (tokens.dim() - 2)), others, tokens))

    return mapped(other, named)


def copied(named, shape, layout):
    """A layer's arguments for a trial, which leaves the model's as they are: hidden states that a layer writes into, caches,
    dicts in which layers keep what others read."""

    def copy_of(_, leaf):
        if of_tokens(leaf, shape, layout) is not None:
            return leaf.clone()
        return copy.deepcopy(leaf) if hasattr(leaf, "get_seq_length") else leaf

    return mapped(copy_of, named, anew=True)


def width_of(named, shape, layout) -> int | None:
    """That of the hidden states."""
    places = token_tensors(named, shape, layout)
    return next((each.shape[-1] for each in places if each.is_floating_point() and each.dim() > 2), None)


def differ(first: list, second: list, where, close: float) -> bool | None:
    """Whether a token where the bool ``[batch, seqlen]`` holds has another result, by more than ``close`` of its norm; None
    where there are no results by token."""
    if [each.shape for each in first] != [each.shape for each in second]:
        return None
    pairs = [[each.float().reshape(*where.shape, -1) for each in pair] for pair in zip(first, second, strict=True)]
    return any(_far(*pair, where, close) for pair in pairs) if pairs else None


def _far(first, second, where, close) -> bool:
    norms = first.norm(dim=-1)
    far = (first - second).norm(dim=-1) > close * torch.maximum(norms, 0.01 * norms[where].mean())
    return bool((far & where).any())
