"""The documents of a batch as rows of smaller batches, for layers that carry a state; see stateful.

A layer's arguments and its result are trees of tensors.
"""

import contextlib
import copy
import dataclasses
import enum
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import pad

from packing_ops._runtime.batch_cache import is_captured, kept_with
from packing_ops.boundaries import seq_idx_from_cu_seqlens
from packing_ops.integrations._patching import kept_with_class
from packing_ops.integrations._trial import alike, attempt, numbers, quiet, tensors_of
from packing_ops.integrations._walks import DOCUMENTS
from packing_ops.keys import PrefixPaths

if TYPE_CHECKING:
    from packing_ops.parallel.states import RankDocuments

CACHES = frozenset(("past_key_values", "past_key_value", "cache_params", "cache", "state"))


# --- trees ---


def tree_map(function, value, name=""):
    """Map leaves (tree_map with names): function(name, leaf). Returns ``value`` itself if nothing changed."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    elif isinstance(value, Mapping):
        before = dict(value)
    elif isinstance(value, tuple | list):
        before = dict(enumerate(value))
    else:
        return function(name, value)
    parts = {key: tree_map(function, each, key) for key, each in before.items()}
    if all(parts[key] is before[key] for key in before):
        return value
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **parts)
    if isinstance(value, Mapping):
        made = copy.copy(value)  # keeps what a subclass of dict has besides its items
        made.update(parts)
        return made
    return type(value)(*parts.values()) if hasattr(value, "_fields") else type(value)(parts.values())


def leaves(value) -> list:
    found = []
    tree_map(lambda _, leaf: found.append(leaf) or leaf, value)
    return found


# --- where a tensor has the tokens of a batch ---


class TokenAxes(NamedTuple):
    """Which axes of a tensor are the tokens of a batch."""

    fits: Callable  # whether a shape has them there
    to_rows: Callable  # the tensor as [batch, seqlen, ...]
    from_rows: Callable  # the reverse


ROWS = TokenAxes(
    lambda shape, b, t: shape[0] in (1, b) and shape[1] == t,
    lambda x, b, t: x.expand(b, *x.shape[1:]),
    lambda x: x,
)
_FLAT = TokenAxes(
    lambda shape, b, t: shape[0] == b * t, lambda x, b, t: x.unflatten(0, (b, t)), lambda x: x.flatten(0, 1)
)
_SEQUENCE_FIRST = TokenAxes(
    lambda shape, b, t: shape[:2] == (t, b), lambda x, b, t: x.transpose(0, 1), lambda x: x.transpose(0, 1)
)
_CHANNELS_FIRST = TokenAxes(
    lambda shape, b, t: len(shape) > 2 and (shape[0], shape[-1]) == (b, t),
    lambda x, b, t: x.movedim(-1, 1),
    lambda x: x.movedim(1, -1),
)


def axes_of(arguments, shape) -> TokenAxes | None:
    """Return the axes of a layer's hidden states, or of the integers that it embeds; None without either."""
    tensors = [each for each in leaves(arguments) if isinstance(each, torch.Tensor) and each.dim() > 1]
    floats = [each for each in tensors if each.is_floating_point()]
    for of_kind, known in ((floats, (ROWS, _FLAT, _SEQUENCE_FIRST, _CHANNELS_FIRST)), (tensors, (ROWS,))):
        for axes in known:
            if any(axes.fits(each.shape, *shape) for each in of_kind):
                return axes
    return None


def axes_in(leaf, shape, axes, *more) -> TokenAxes | None:
    """Return the axes of one argument or part of a result: as the hidden states or as rows; None if it has no place
    for each token.
    """
    has_place = isinstance(leaf, torch.Tensor) and leaf.dim() > 1
    return next((each for each in (axes, ROWS, *more) if has_place and each.fits(leaf.shape, *shape)), None)


def result_axes(leaf, shape, axes) -> TokenAxes | None:
    return axes_in(leaf, shape, axes, _FLAT)  # routers return flat tokens, whatever they are given


# --- documents as rows ---


class SplitDocuments:
    """The documents of seq_idx as rows of smaller batches, the longest of each less than twice its shortest.

    Of a prefix tree these are its paths from a root to a leaf. A slot may then be in several, and its result is the one
    of the first.

    several: some row holds more than one document. padded: some slots belong to no document.
    cu_seqlens: int32 ``[documents + 1]``.
    first_two: int64 ``[1, tokens]``, slots of the first two documents of one row, each at most TRIED tokens long; None
        where no row has several. boundary: how many of them are of the first.
    batches: [int64 ``[documents, length]``, slots of the flat batch; after its end a document repeats its last one].
    order: int64 ``[batch * seqlen]``: where each slot is among the tokens of all batches, one after the other; the
        last place, behind them, is for padding.
    """

    TRIED = 64

    def __init__(self, seq_idx, paths=None):
        # Lengths are needed on the host: one copy of seq_idx there, everything else is computed on the CPU.
        device, flat = seq_idx.device, seq_idx.flatten().cpu()
        slots = (flat >= 0).nonzero()[:, 0]
        _, lengths = torch.unique_consecutive(flat[slots], return_counts=True)
        if paths is not None:
            slots, lengths = _paths_to_leaves(paths)
        rows = slots // max(seq_idx.shape[1], 1)
        self.padded = bool((flat < 0).any())
        ends = lengths.cumsum(0)
        self.cu_seqlens = torch.cat([ends.new_zeros(1), ends]).int().to(device)
        starts = ends - lengths
        # Two neighbours in a row, to try a layer on
        self.first_two, self.boundary = None, 0
        in_one_row = rows[ends[:-1] - 1] == rows[ends[:-1]]
        self.several = bool(in_one_row.any())
        if self.several:
            index = int(in_one_row.nonzero()[0, 0])
            end = int(ends[index])
            first = max(end - self.TRIED, int(starts[index]))
            last = min(end + self.TRIED, int(ends[index + 1]))
            self.first_two, self.boundary = slots[None, first:last].to(device), end - first
        # Documents of similar length share a batch: those between two powers of two.
        self.batches, total = [], 0
        sizes = torch.log2(lengths.double()).floor()
        order = torch.full((len(flat),), torch.iinfo(torch.int64).max, device="cpu")
        for size in sizes.unique().tolist():
            chosen = (sizes == size).nonzero()[:, 0]
            longest = int(lengths[chosen].max())
            steps = torch.arange(longest, device="cpu")
            inside = steps < lengths[chosen][:, None]
            tokens = slots[starts[chosen][:, None] + steps.minimum(lengths[chosen][:, None] - 1)]
            self.batches.append(tokens.to(device))
            order.scatter_reduce_(0, tokens[inside], total + inside.flatten().nonzero()[:, 0], "amin")
            total += tokens.numel()
        order[flat < 0] = total
        self.order = order.to(device)


def _paths_to_leaves(paths):
    """Return (rows, lengths) of those of a tree's paths that hold all of its rows: each row's last path."""
    cu_seqlens, rows, key_offsets, keys_of_row = (tensor.cpu().long() for tensor in paths.tensors)
    last = keys_of_row[key_offsets[1:][key_offsets[1:] > key_offsets[:-1]] - 1]
    chosen = torch.searchsorted(cu_seqlens[1:], last, right=True).unique()
    lengths = cu_seqlens.diff()[chosen]
    chosen_rows = torch.zeros(len(cu_seqlens) - 1, dtype=torch.bool, device="cpu").index_fill(0, chosen, True)
    return rows[chosen_rows.repeat_interleave(cu_seqlens.diff())], lengths


class RowDocuments(NamedTuple):
    """Where the documents of a call's rows are."""

    seq_idx: torch.Tensor  # int32 [batch, seqlen], the document of each token, -1 for padding
    cu_seqlens: torch.Tensor  # int32 [documents + 1], of the rows without padding
    indices: torch.Tensor | None  # int64, the slots of these rows; None where no slot is padding
    has_attention: bool  # next to the layers with a state
    several: bool | None  # whether a row has several; None: a graph cannot know
    paths: PrefixPaths | None = None  # of a prefix tree, whose segments all else counts
    ranks: "RankDocuments | None" = None  # of a row on several ranks; all else is of this one's slots

    def split(self, device) -> SplitDocuments:
        """Return the documents as rows. Raise NotImplementedError in the capture of a CUDA graph, whose replays would
        have the lengths of the capture.
        """
        seq_idx = self.seq_idx.to(device)
        if is_captured(seq_idx):
            raise NotImplementedError(
                "cu_seq_lens_q: expected one document in each row in a CUDA graph, got several, and layers that "
                "carry a state need their lengths on the host; call the model outside of the graph"
            )
        tensors = [seq_idx] if self.paths is None else [seq_idx, self.paths.slot_of_key]
        return kept_with(tensors, ("documents of layers with a state",), lambda: SplitDocuments(seq_idx, self.paths))


def by_name(layer, run, args, kwargs):
    """Return (run, its arguments by name), called with the same ones by place; "*0", "*1", ... are those that have
    no name.
    """
    parameters = list(inspect.signature(type(layer).forward).parameters.values())[1:]  # without self
    names = [each.name for each in parameters if each.kind < inspect.Parameter.VAR_POSITIONAL]
    names = [*names, *(f"*{place}" for place in range(len(args)))][: len(args)]
    if twice := sorted({*names} & {*kwargs}):
        raise TypeError(f"{twice[0]}: expected one value for {type(layer).__name__}, got one by place and one by name")

    def run_by_place(**named):
        by_place = [named.pop(name) for name in itertools.takewhile(named.__contains__, names)]
        return run(*by_place, **named)

    return run_by_place, {**dict(zip(names, args, strict=True)), **kwargs}


def run_in_rows(run, named, documents, shape, axes):
    """Return a layer's result for a batch, from calls in which each document is a row."""
    batches = documents.batches
    if axes is _FLAT:  # a call for each document
        batches = [row for batch in batches for row in batch.split(1)]
    results = [run(**rows_of(named, slots, shape, axes)) for slots in batches]
    parts = iter([*zip(*map(leaves, results), strict=True)])  # of all batches, leaf by leaf
    return tree_map(lambda *_: _joined(next(parts), batches, documents, shape, axes), results[0])


def rows_of(named, slots, shape, axes):
    """Return a layer's arguments for these slots: int64 ``[documents, length]``.

    The state of a document starts empty, so that there is no cache, and no mask of the whole row.
    """

    def rows(name, value):
        if name == "use_cache":
            return False
        found = axes_in(value, shape, axes)
        if found is not None:
            tokens = found.to_rows(value, *shape).flatten(0, 1)
            return found.from_rows(tokens.index_select(0, slots.flatten()).unflatten(0, slots.shape))
        if isinstance(value, torch.Tensor):
            is_mask = value.dim() == 4 or (name == "attention_mask" and value.dim() > 2)
        else:  # MaskPattern, BlockMask
            is_mask = type(value).__module__.startswith(("packing_ops.", "torch.nn.attention."))
        return None if is_mask or hasattr(value, "get_seq_length") else value

    left_out = {*CACHES, DOCUMENTS}  # without DOCUMENTS each row is one
    return {name: None if name in left_out else tree_map(rows, value, name) for name, value in named.items()}


def _joined(parts, batches, documents, shape, axes):
    """Join one leaf of the result from each batch's; None for a state, which no later call may go on with."""
    found = [result_axes(each, slots.shape, axes) for each, slots in zip(parts, batches, strict=True)]
    if None in found:
        return None
    tokens = [
        of_part.to_rows(each, *slots.shape).flatten(0, 1)
        for each, slots, of_part in zip(parts, batches, found, strict=True)
    ]
    if documents.padded:
        tokens.append(tokens[0].new_zeros(1, *tokens[0].shape[1:]))
    return found[0].from_rows(torch.cat(tokens).index_select(0, documents.order).unflatten(0, shape))


# --- a recurrence of transformers that no op computes, in a layer that keeps its packed rows ---


@torch.compiler.disable(reason="packing_ops: how long documents are is known when the layer runs")
def in_rows(
    rule: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    cu_seqlens: torch.Tensor, initial_state: torch.Tensor | None = None, output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Return (out, final state or None) of a delta rule ``rule(q, k, v, g, beta, ...)`` of ``[batch, seqlen, ...]``.

    Tensors are packed, ``[total, ...]``; states ``[documents, ...]`` in float32.
    """
    order, batches = kept_with((cu_seqlens,), ("rules in rows", len(q)), functools.partial(_split, cu_seqlens, len(q)))
    outs = []
    final = initial_state
    if output_final_state and final is None:
        final = g.new_zeros(len(cu_seqlens) - 1, v.shape[1], k.shape[2], v.shape[2], dtype=torch.float32)
    for documents, slots, inside in batches:
        rows = [each.index_select(0, slots.flatten()).unflatten(0, slots.shape) for each in (q, k, v, g, beta)]
        # After its end a document forgets and learns nothing.
        rows[3:] = [each.masked_fill(~inside.view(*inside.shape, *[1] * (each.dim() - 2)), 0) for each in rows[3:]]
        initial = None if initial_state is None else initial_state.index_select(0, documents)
        out, state = rule(*rows, initial_state=initial, output_final_state=output_final_state)
        outs.append(out.flatten(0, 1))
        final = final.index_copy(0, documents, state.to(final.dtype)) if output_final_state else None
    out = torch.cat([*outs, torch.zeros_like(v[:1]) if len(v) else v]).index_select(0, order)
    return out, final


def _split(cu_seqlens, total):
    """Return (where each token is among those of all batches, [(documents, their slots, which are no repeats)])."""
    seq_idx = seq_idx_from_cu_seqlens(cu_seqlens, total)
    seq_idx = seq_idx.masked_fill(seq_idx == len(cu_seqlens) - 1, -1)  # padding after the last document
    split = SplitDocuments(seq_idx[None])
    firsts = [pad(slots[:, 1:] != slots[:, :-1], (1, 0), value=True) for slots in split.batches]
    numbered = [seq_idx[slots[:, 0]].long() for slots in split.batches]
    return split.order, [*zip(numbered, split.batches, firsts, strict=True)]


@kept_with_class
@torch.compiler.disable
def keeps_apart(rule: Any) -> bool:
    """Return whether a row that goes on with gates of 0 has the results and the state of where it would have ended."""
    rows = [numbers(2, 70, 2, 8, start=start) for start in range(4)]
    q, k, v, g, beta = *rows[:3], -rows[3].abs(), numbers(2, 70, 2, start=4.0).abs()
    options = {"initial_state": numbers(2, 2, 8, 8, start=5.0), "output_final_state": True}
    options["use_qk_l2norm_in_kernel"] = True
    end = 65
    with quiet():
        wanted = tensors_of(attempt(rule, *(each[:, :end] for each in (q, k, v, g, beta)), **options))
        g[:, end:], beta[:, end:] = 0, 0
        found = tensors_of(attempt(rule, q, k, v, g, beta, **options))
        return alike([found[0][:, :end], *found[1:]] if found else found, wanted, 64)


# --- how a layer keeps documents apart ---

BOUNDARIES = frozenset(("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"))
_CLOSE = 0.05  # of the norm: rounding is far below, what other tokens do is far above
_NOT_RUN = AssertionError, AttributeError, LookupError, RuntimeError, StopIteration, TypeError, ValueError


class StateKind(enum.Enum):
    """What a layer does with the tokens of a row."""

    TOKENWISE = "each token by itself, or attention of ours"
    RECURRENT = "carries a state along the sequence and"
    MIXING = "mixes tokens by code of its own, which"
    UNKNOWN = "nothing says"


class Isolation(enum.Enum):
    """How a layer with a state keeps the documents of a row apart."""

    SPLIT_DOCUMENTS = "it gets them as rows of a batch"
    PASS_BOUNDARIES = "its kernels get seq_idx and cu_seq_lens_q"


@torch.no_grad()
def isolation_of(layer, kind, run, named, documents, shape, axes) -> Isolation | str:
    """Return the isolation of a layer, or why documents cannot be kept apart in it. Found once, on two documents of a
    row.

    No code says whether a kernel with boundaries is there and runs, nor how far a convolution reaches: both are seen
    where other tokens in one document change the results of the other one.
    """
    given, boundary = rows_of(named, documents.first_two, shape, axes), documents.boundary
    size = tuple(documents.first_two.shape)
    before = (torch.arange(size[1], device=documents.first_two.device) < boundary)[None]

    def results(arguments, size, **boundaries):
        with _without_dropout(layer):
            found = [(leaf, result_axes(leaf, size, axes)) for leaf in leaves(run(**arguments, **boundaries))]
            tensors = [each.to_rows(leaf, *size) for leaf, each in found if each is not None]
            return [torch.view_as_real(each) if each.is_complex() else each for each in tensors]

    # Padding follows a document: the layer must not look there.
    try:
        wanted = results(given, size)
        ahead = _differ(wanted, results(_with_other_tokens(given, size, axes, ~before), size), before)
    except torch.OutOfMemoryError:  # which says nothing of the layer
        raise
    except _NOT_RUN as error:
        if kind is StateKind.RECURRENT:
            raise
        return f"{kind.value} cannot run for a part of the row ({type(error).__name__})"
    if not wanted:
        return f"{kind.value} returns nothing for each token"
    if ahead:
        return f"{kind.value} reads tokens ahead"

    # Kernels that get boundaries are trusted if these keep back what else gets through, to the bit.
    others = _with_other_tokens(given, size, axes, before)
    if not _differ(wanted, results(others, size), ~before):
        return Isolation.SPLIT_DOCUMENTS  # nothing gets through yet
    seq_idx = (~before).int()
    boundaries = boundaries_for(layer, seq_idx, seq_idx.new_tensor([0, boundary, size[1]]))
    try:
        found = [results(each, size, **boundaries) for each in (given, others)]
        first, other = ([each[:, boundary:] for each in tensors] for tensors in found)
        second = documents.first_two[:, boundary:]
        alone = results(rows_of(named, second, shape, axes), tuple(second.shape))
        apart = not _differ(first, alone, ~before[:, boundary:]) and all(map(torch.equal, first, other))
    except torch.OutOfMemoryError:
        raise
    except (AssertionError, RuntimeError, TypeError, ValueError):  # it does not take them, or has no kernels that do
        return Isolation.SPLIT_DOCUMENTS
    return Isolation.PASS_BOUNDARIES if apart else Isolation.SPLIT_DOCUMENTS


def boundaries_for(layer, seq_idx, cu_seqlens):
    """Return of these the ones that the layer has names for, or all if it passes on what it is given."""
    cu_seqlens = cu_seqlens.int()
    found = {"seq_idx": seq_idx, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    taken = inspect.signature(type(layer).forward).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    return {name: value for name, value in found.items() if takes_all or name in taken}


def _with_other_tokens(named, shape, axes, where):
    """Return a layer's arguments with other hidden states where the bool ``[batch, seqlen]`` holds. Of a layer that
    makes them: with other integers, which its embedding has too.
    """
    tokens = [leaf for leaf in leaves(named) if axes_in(leaf, shape, axes) is not None]
    floats = any(each.is_floating_point() for each in tokens)

    def other(_, leaf):
        found = axes_in(leaf, shape, axes)
        if found is None or leaf.is_floating_point() != floats or leaf.dtype == torch.bool:
            return leaf
        rows = found.to_rows(leaf, *shape)
        others = 1 - 2 * rows if floats else rows.min() + rows.max() - rows
        return found.from_rows(torch.where(where.view(*where.shape, *[1] * (rows.dim() - 2)), others, rows))

    return tree_map(other, named)


def _differ(first: list, second: list, where) -> bool:
    """Return whether a token where the bool ``[batch, seqlen]`` holds has another result."""
    for one, other in zip(first, second, strict=True):
        one, other = (each.float().reshape(*where.shape, -1) for each in (one, other))
        norms = one.norm(dim=-1)
        far = (one - other).norm(dim=-1) > _CLOSE * torch.maximum(norms, 0.01 * norms[where].mean())
        if bool((far & where).any()):
            return True
    return False


@contextlib.contextmanager
def _without_dropout(layer):
    training = [each for each in layer.modules() if each.training]
    for each in training:
        each.training = False
    try:
        yield
    finally:
        for each in training:
            each.training = True
