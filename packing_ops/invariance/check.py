"""What check_invariance runs: a model on the same documents in several rows, and the bits of every layer compared; or a
rollout beside the model: log-probabilities that differ, and the first layer whose rows do.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from packing_ops._runtime.arguments import FLOATS, as_tensor, described, wrong_type
from packing_ops.boundaries import position_ids_from_cu_seqlens
from packing_ops.invariance.refusals import is_compiled
from packing_ops.losses.logps import token_logps

Run = Callable[[torch.Tensor, torch.Tensor], Any]
LOGPS, GRADIENTS = "token_logps", "gradient of the embeddings"


# --- bits of rows ---


def bits_of_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return int64 ``[rows]``: sums of a row's bits, each times a different odd number. Integers: no order matters."""
    flat = tensor.detach()[:, None].flatten(1)  # also of no rows
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    odd = _odd_numbers(flat.shape[1], flat.device)
    parts = flat.split(max(1, (1 << 24) // max(flat.shape[1], 1)))  # of logits not all at once
    return torch.cat([(part.contiguous().view(integers).long() * odd).sum(1) for part in parts])


@lru_cache(maxsize=64)
def _odd_numbers(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device) * 0x1E3779B97F4A7C15 | 1


def rows_in(value: Any, total: int) -> list[torch.Tensor]:
    """Return the tensors in arguments or an output that have one entry for each slot of the row: [total, ...], [1,
    total, ...].
    """
    if isinstance(value, torch.Tensor):
        if value.dim() > 1 and value.shape[:2] == (1, total):
            return [value[0]]
        return [value] if value.dim() > 0 and value.shape[0] == total else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [rows for item in value for rows in rows_in(item, total)]


def bits_in(value: Any, total: int) -> torch.Tensor | None:
    """Return int64 ``[total, tensors]``, the bits of each tensor's rows."""
    found = [bits_of_rows(rows) for rows in rows_in(value, total)]
    return torch.stack(found, 1).cpu() if found else None


# --- one run ---


@dataclass
class Call:
    """What a module was given and gave: bits by slot."""

    given: torch.Tensor | None
    out: torch.Tensor | None = None


Calls = dict[str, list[Call]]


@contextmanager
def recorded(model: torch.nn.Module, total: int) -> Iterator[Calls]:
    """Record the calls of every module in the block, by its name. Calls in a compiled layer are left out, as its
    graph has no hooks.
    """
    calls: Calls = {}

    def before(name: str, _: torch.nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(name, []).append(Call(bits_in((args, kwargs), total)))

    def after(name: str, _: torch.nn.Module, args: Any, out: Any) -> None:
        calls[name][-1].out = bits_in(out, total)

    within: set[torch.nn.Module] = set()
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if name and is_compiled(module):
                within.update(module.modules())
            if module not in within:
                hooks.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(after, name)))
        yield calls


class Head:
    """The embeddings and the head of a language model, as its methods return them, and what a run shows of them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.embeddings = _module(model, "get_input_embeddings")
        self.head = _module(model, "get_output_embeddings")
        self.embedded: torch.Tensor | None = None
        self.hidden: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor | None:
        weight = getattr(self.head, "weight", None)
        return weight if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None

    @contextmanager
    def watched(self, gradients: bool) -> Iterator[None]:
        def embed(_: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            self.embedded = out.detach().requires_grad_() if gradients else out
            return self.embedded

        def take(_: torch.nn.Module, args: Any) -> None:
            self.hidden = args[0]

        with ExitStack() as hooks:
            if self.embeddings is not None:
                hooks.enter_context(self.embeddings.register_forward_hook(embed))
            if self.head is not None:
                hooks.enter_context(self.head.register_forward_pre_hook(take))
            yield

    def log_probabilities(self, row: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor | None:
        if self.hidden is None or self.weight is None or row.dim() != 1 or row.is_floating_point():
            return None
        hidden = self.hidden.reshape(-1, self.hidden.shape[-1])
        if hidden.shape[0] != row.shape[0] or hidden.dtype != self.weight.dtype:
            return None
        return token_logps(hidden, self.weight, row, cu_seqlens, bias=getattr(self.head, "bias", None))


def _module(model: torch.nn.Module, method: str) -> torch.nn.Module | None:
    for host in model.modules():
        if callable(get := getattr(host, method, None)):
            try:
                found = get()
            except (AttributeError, NotImplementedError):
                return None
            return found if isinstance(found, torch.nn.Module) else None
    return None


def longest_of(host: torch.nn.Module) -> float:
    """Return how long a document of a model of transformers may be."""
    longest = getattr(getattr(host, "config", None), "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else float("inf")


def run_of_transformers(model: torch.nn.Module) -> Run:
    """Call a language model of transformers with a packed row: position_ids that restart with each document."""
    hosts = [host for host in model.modules() if hasattr(host, "config")]
    parameters = inspect.signature((hosts[0] if hosts else model).forward).parameters
    options = {"use_cache": False} if "use_cache" in parameters else {}

    def run(row: torch.Tensor, cu_seqlens: torch.Tensor) -> Any:
        position_ids = position_ids_from_cu_seqlens(cu_seqlens, row.shape[0])
        return model(input_ids=row[None], position_ids=position_ids[None], **options)

    return run


# --- comparing runs ---


@dataclass
class Found:
    """Rows of a module that were compared, and how many of them differ."""

    tried: int = 0
    packs: int = 0
    prefixes: int = 0


class Comparison:
    """The calls of every module for documents in a first row, and what differs in other rows."""

    def __init__(self, model: torch.nn.Module, run: Run, documents: list[torch.Tensor], gradients: bool) -> None:
        self.model, self.run, self.documents = model, run, documents
        self.head = Head(model)
        self.gradients = gradients and self.head.embeddings is not None and self.head.weight is not None
        self.found: dict[str, Found] = {}
        self.starts = [0, *itertools.accumulate(map(len, documents))]
        self.first = self.calls_of([(i, len(document)) for i, document in enumerate(documents)])

    def calls_of(self, parts: list[tuple[int, int]]) -> Calls:
        """Run a row of documents, each given as (its index, how many of its first tokens), and return the recorded
        calls.
        """
        row = torch.cat([self.documents[i][:n] for i, n in parts])
        cu_seqlens = torch.tensor([0, *itertools.accumulate(n for _, n in parts)], dtype=torch.int32, device=row.device)
        total, head = len(row), self.head
        without_sync = getattr(self.model, "no_sync", nullcontext)  # DistributedDataParallel waits for all gradients
        with torch.set_grad_enabled(self.gradients), without_sync():
            with recorded(self.model, total) as calls, head.watched(self.gradients):
                self.run(row, cu_seqlens)
            if (logps := head.log_probabilities(row, cu_seqlens)) is not None:
                calls[LOGPS] = [Call(bits_in(head.hidden, total), bits_in(logps, total))]
                if head.embedded is not None and head.embedded.requires_grad:
                    weights = torch.cat([torch.arange(n, device=row.device) % 7 - 3.0 for _, n in parts])
                    (gradient,) = torch.autograd.grad((logps * weights).sum(), head.embedded)
                    calls[GRADIENTS] = [Call(bits_in(row, total), bits_in(gradient, total))]
        head.embedded = head.hidden = None
        return calls

    def compare(self, way: str, parts: list[tuple[int, int]]) -> None:
        """Compare the rows of two calls. way: "packs" or "prefixes", where differences are counted."""
        calls, start = self.calls_of(parts), 0
        # The children of a module first: what they break is not the module's fault.
        names = sorted(calls, key=lambda name: -name.count(".") - bool(name))
        for document, length in parts:
            blamed: set[str] = set()
            is_prefix = length < len(self.documents[document])
            for name in names:
                if is_prefix and name == GRADIENTS:
                    continue  # keys and values have a gradient from what follows
                rows = length - (is_prefix and name == LOGPS)  # the last slot has no target
                here, there = (slice(first, first + rows) for first in (start, self.starts[document]))
                differ = _rows_that_differ(calls[name], self.first.get(name, []), here, there)
                if differ is None:
                    continue
                found = self.found.setdefault(name, Found())
                found.tried += rows
                if differ and not any(not name or other.startswith(name + ".") for other in blamed):
                    setattr(found, way, getattr(found, way) + differ)
                    blamed.add(name)
            start += length


def _rows_that_differ(calls: list[Call], first: list[Call], here: slice, there: slice) -> int | None:
    """Return the rows that differ. None if nothing can be said: the rows are not slots, or the inputs had other
    bits.
    """
    total, judged = 0, False
    for one, other in zip(calls, first, strict=False):
        if one.out is None or other.out is None or one.given is None or other.given is None:
            continue
        if one.given.shape[1] == other.given.shape[1] and torch.equal(one.given[here], other.given[there]):
            judged = True
            total += int((one.out[here] != other.out[there]).any(1).sum())
    return total if judged else None


def rows_to_compare(lengths: list[int]) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """Yield (way, documents of a row): each in a row with no other, in other orders and company, and prefixes of the
    longest.
    """
    whole = list(enumerate(lengths))
    for part in whole:
        yield "packs", [part]
    yield "packs", whole[::-1]
    yield "packs", [part for step in (0, 1, 2) for part in whole[step::3]]
    longest, length = max(whole, key=lambda part: part[1])
    yield "packs", [(longest, length)] * 2
    for n in sorted({n for n in lengths if n < length}):
        yield "prefixes", [(longest, n)]


# --- a rollout beside the model ---


Layers = Mapping[str, Sequence[torch.Tensor]]
Parts = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Layers]
Rollout = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | Parts


def split_rollout(rollout: Any, vocabulary: int | None, device: torch.device) -> Parts:
    """Return a rollout in three parts, its documents on the device.

    Raises:
        TypeError: something else than a rollout.
        ValueError: parts that do not fit together, tokens beyond the vocabulary, nothing to compare.
    """
    if not isinstance(rollout, (tuple, list)) or len(rollout) not in (2, 3):
        raise wrong_type("rollout", "(documents, log-probabilities), or these and the layers of a record", rollout)
    integers = (torch.int32, torch.int64)
    documents = [each.to(device) for each in _rows(rollout[0], "token ids", integers)]
    logps, layers = _rows(rollout[1], "log-probabilities", FLOATS), rollout[2] if len(rollout) > 2 else {}
    if not isinstance(layers, Mapping) or not all(isinstance(each, (tuple, list)) and each for each in layers.values()):
        raise wrong_type("rollout", "layers by name, a tensor for each document", layers)
    lengths = [(len(document), len(given)) for document, given in zip(documents, logps, strict=False)]
    if len(documents) != len(logps) or any(given >= length for length, given in lengths):
        came = f"{len(documents)} documents and {len(logps)} log-probabilities, (tokens, log-probabilities) {lengths}"
        raise ValueError(f"rollout: expected log-probabilities of the last tokens of each document, got {came}")
    if not any(map(len, logps)) and not (documents and layers):
        raise ValueError("rollout: expected at least one log-probability or layer, got none")
    low, high = (int(each) for each in torch.cat(documents).aminmax())
    if vocabulary is not None and not 0 <= low <= high < vocabulary:  # on a GPU an embedding would end the process
        raise ValueError(f"rollout: expected token ids from 0 to {vocabulary - 1}, got {low} to {high}")
    return documents, logps, layers


def _rows(part: Any, name: str, dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    """Return the tensors of a part of a rollout, one for each document."""
    wanted = f"{name} [tokens] of each document"
    try:
        rows = [as_tensor(each) for each in part]
    except (TypeError, ValueError, RuntimeError):
        raise wrong_type("rollout", wanted, part) from None
    for each in rows:
        if each.dim() != 1 or (each.dtype not in dtypes and len(each)):  # an empty list has no dtype
            raise ValueError(f"rollout: expected {wanted}, got {described(each)}")
    return rows


def differing_rows(comparison: Comparison, logps: Sequence[torch.Tensor], layers: Layers) -> dict[str, tuple[int, int]]:
    """Return {module: (rows, rows that differ)}. Only the first module that differs is charged, and LOGPS.

    Args:
        comparison: of the documents of the rollout.
        logps: of the last tokens of each document.
        layers: {module: bits_of_rows of its output for each document}, as an engine ran them.
    """
    calls, found = comparison.first, {}
    for name in calls:
        out = calls[name][0].out
        if name in layers and out is not None and len(theirs := torch.cat(list(layers[name]))) == len(out):
            found[name] = len(out), int((out[:, 0] != theirs).sum())
    wrong = [name for name, (_, differ) in found.items() if differ]
    # In the order of the calls a module comes before its parts, which are charged in its place.
    first = next((name for name in wrong if not any(other.startswith(f"{name}.") for other in wrong)), None)
    charged = {name: (rows, differ if name == first else 0) for name, (rows, differ) in found.items()}
    mine = calls[LOGPS][0].out if LOGPS in calls else None
    if mine is None:
        raise ValueError("rollout: expected a model with embeddings of tokens and a head, got one without")
    ends = comparison.starts[1:]
    ours = [mine[end - 1 - len(given) : end - 1, 0] for end, given in zip(ends, logps, strict=True)]
    differ = [int((a != bits_of_rows(b.float()).cpu()).sum()) for a, b in zip(ours, logps, strict=True)]
    return {**charged, LOGPS: (sum(map(len, ours)), sum(differ))}
