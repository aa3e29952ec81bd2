"""The same bits, however a row is computed: a mode for a model, and a proof on its layers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import TracebackType
from typing import Any

import torch

from packing_ops._runtime.arguments import dtype_name, refuse_beside
from packing_ops.invariance import mode
from packing_ops.invariance.check import (
    LOGPS,
    Comparison,
    Head,
    Rollout,
    differing_rows,
    longest_of,
    rows_to_compare,
    run_of_transformers,
    split_rollout,
)
from packing_ops.invariance.refusals import is_compiled, reason_of, refusals


class invariant:
    """A mode in which a token's results have the same bits in any pack and in any micro-batch.

    A context manager and a decorator, for the forward and the backward of your model. apply_packing_ops with
    ``invariant=True`` does the same for a transformers model until it is reverted, swaps its RMSNorm on a GPU, and runs
    the check. What the mode sets, for the process:

    - CUDA: products are cuBLASLt's, with a workspace of 1 KiB, so that no sum is split for few rows. A torch without
      ``torch.backends.cuda.cublaslt_workspace_size`` reads the size from the environment at its first product: there
      ``CUBLASLT_WORKSPACE_SIZE=1`` must be set before it, and entering the mode sets it where it is not too late.
    - torch.compile for CUDA: code that is compiled in the mode rounds as eager code does (``emulate_precision_casts``),
      and from torch 2.13 on most sums over a row depend only on its size (``batch_invariant``). A function is compiled
      up to 64 times (``recompile_limit``).
    - CPU: each product of the calling thread has 16 rows and runs in one thread; more rows are several products.
    - token_logps, chunked_cross_entropy and token_kl: sums and products go by 4,096 entries of the vocabulary, whatever
      the chunk; products on CUDA have at least 16 rows, in float32 32.

    The mode is no proof: check_invariance makes one, for this model, on this device. What sums over tokens cannot keep
    its bits: gradients of weights, and losses of a whole batch.

    Example:
        >>> import torch, packing_ops as po
        >>> hidden, weight = torch.randn(40, 24), torch.randn(300, 24)
        >>> labels, one = torch.arange(40), torch.tensor([0, 40], dtype=torch.int32)
        >>> with po.invariant():
        ...     packed = po.token_logps(hidden, weight, labels, torch.tensor([0, 33, 40], dtype=torch.int32))
        ...     alone = po.token_logps(hidden[33:], weight, labels[33:], torch.tensor([0, 7], dtype=torch.int32))
        >>> torch.equal(packed[33:], alone)
        True
    """

    def __init__(self) -> None:
        self._entered: list[mode.ProductsByBlocks] = []

    def __enter__(self) -> "invariant":
        products = mode.ProductsByBlocks()
        mode.hold(products)
        products.__enter__()
        self._entered.append(products)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        products = self._entered.pop()
        products.__exit__(kind, error, trace)
        mode.release(products)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with invariant():
                return function(*args, **kwargs)

        return within


def is_invariant() -> bool:
    """Return whether the mode is on: within ``with invariant():``, or for a model that apply_packing_ops was given.

    Example:
        >>> is_invariant()
        False
        >>> with invariant():
        ...     is_invariant()
        True
    """
    return mode.active()


ROWS = (1, 2, 3, 5, 7, 9, 16, 33, 64, 100, 129, 200)
# torch's reductions sum the elements of fewer than 16 rows in other orders, which few roundings to a half type show.
ROWS_ON_A_GPU = (*range(1, 16), *range(1, 16), *(n for n in ROWS if n > 15), 513, 1000, 2047)


@dataclass(frozen=True)
class LayerInvariance:
    """What check_invariance found of one module.

    name: in the model, ``""`` for the whole; ``token_logps`` and ``gradient of the embeddings`` are the loss's.
    kind: its class.
    rows: rows that were compared. Those for which it was given other bits are left out: the module before it did that.
    packs: how many of them have other bits in another row of documents.
    prefixes: how many have other bits where their document is shorter.
    reason: a sentence where some differ: why, or what to set.
    """

    name: str
    kind: str
    rows: int
    packs: int
    prefixes: int
    reason: str = ""


@dataclass(frozen=True)
class Invariance:
    """What check_invariance found of a model. True as a bool if it may be claimed for packs.

    layers: LayerInvariance of each module, those that ran first first.
    refused: {module: a sentence} for what cannot be claimed whatever its bits are, such as dropout: nothing was run
        then.
    active: whether the mode was on. device, dtype, torch: what this holds for.
    """

    layers: tuple[LayerInvariance, ...]
    refused: dict[str, str]
    active: bool
    device: str
    dtype: str
    torch: str

    @property
    def packs(self) -> bool:
        """Return whether the bits are the same in any pack and micro-batch."""
        return not self.refused and all(layer.packs == 0 for layer in self.layers)

    @property
    def prefixes(self) -> bool:
        """Return whether the bits are also the same where a document ends earlier."""
        return not self.refused and all(layer.packs + layer.prefixes == 0 for layer in self.layers)

    def __bool__(self) -> bool:
        return self.packs

    def why_not(self) -> list[str]:
        """Return a sentence for each layer that differs or was refused."""
        refused = [f"{name or 'the model'}: {reason}" for name, reason in self.refused.items()]
        return refused + [
            f"{layer.name or 'the model'} ({layer.kind}): {layer.packs} rows differ in packs, {layer.prefixes} in "
            f"prefixes, of {layer.rows}: {layer.reason}"
            for layer in self.layers
            if layer.packs or layer.prefixes
        ]


def check_invariance(
    model: torch.nn.Module,
    run: Callable[[torch.Tensor, torch.Tensor], Any] | None = None,
    *,
    documents: Sequence[torch.Tensor] | None = None,
    rows: Sequence[int] | None = None,
    gradients: bool = True,
    rollout: Rollout | None = None,
) -> Invariance:
    """Run a model on the same documents in many rows and compare the bits of every module's output, slot by slot.

    Each document in a row without others, several in other orders and company, and prefixes of the longest. A module
    that was given the same bits and gave others is named. Compiled layers run as they are, as part of the module around
    them. It shows what the model does as it is called here: within packing_ops.invariant() with the mode, elsewhere
    without. Equal bits on these rows are a proof by example, for this device and torch.

    Args:
        model: any module whose layers are modules. It runs without gradients of parameters, in the mode that it is in.
        run: calls the model with a row of documents ``[total, ...]`` and their cu_seqlens int32 ``[num_documents +
            1]``. By default as a language model of transformers is called, with input_ids and position_ids that
            restart.
        documents: of which rows are made, each ``[tokens, ...]``. By default random token ids, by the model's
            embeddings.
        rows: lengths of the default documents, and so the numbers of rows that the layers are tried with. By default 1
            to 200, to 2,047 on a GPU, of which those that the model's ``max_position_embeddings`` allows.
        gradients: compare the gradient of the embeddings too, of a model with get_input_embeddings and
            get_output_embeddings. Gradients of parameters are not touched.
        rollout: instead of documents: (documents, log-probabilities) of an engine, or what
            packing_ops.integrations.vllm.record returns. Documents are token ids, log-probabilities those of each
            document's last tokens. ``token_logps`` then counts those that differ from the model's; with a record the
            first layer whose rows differ in the engine is named.

    Returns:
        Invariance.

    Example:
        >>> import torch, packing_ops as po
        >>> model = torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.ReLU(), torch.nn.Linear(48, 8))
        >>> documents = [torch.randn(n, 24) for n in (1, 5, 7, 40)]
        >>> with po.invariant():
        ...     found = check_invariance(model, lambda row, cu_seqlens: model(row), documents=documents)
        >>> found.packs, found.prefixes, [layer.name for layer in found.layers]
        (True, True, ['', '0', '1', '2'])

    Raises:
        TypeError: model is no module; rollout is none.
        ValueError: rows or documents that are empty, no documents for a model without embeddings of tokens; a rollout
            whose parts do not fit together, with tokens beyond the vocabulary or without log-probabilities; documents
            or rows beside it.

    Determinism: the rows and the default documents are the same in every call.
    Synchronises: often: it compares on the host.
    Memory: that of the model's forward on the longest row, and the bits of every module's rows.
    Gradients: of the embeddings, only to be compared. Those of parameters are not touched.
    """
    if rollout is not None:
        refuse_beside("rollout", documents=documents, rows=rows)
        return _check_rollout(model, run, rollout)
    return check_with_progress(model, run, documents, rows, gradients, lambda amount: None)


def _check_rollout(model: torch.nn.Module, run: Callable[..., Any] | None, rollout: Rollout) -> Invariance:
    known, vocabulary = _known(model), getattr(Head(model).embeddings, "num_embeddings", None)
    documents, logps, layers = split_rollout(rollout, vocabulary, _first_parameter(model).device)
    if refused := refusals(model):
        return Invariance((), refused, *known)
    comparison = Comparison(model, run or run_of_transformers(model), list(documents), False)
    modules, found = dict(model.named_modules()), []
    for name, (rows, differ) in differing_rows(comparison, logps, layers).items():
        kind = type(modules[name]).__name__ if name in modules else "log-probabilities"
        reason = "the engine gives other bits here"
        if name == LOGPS and not layers:
            reason += ": packing_ops.integrations.vllm.record shows from which layer on"
        found.append(LayerInvariance(name, kind, rows, differ, 0, reason if differ else ""))
    return Invariance(tuple(found), {}, *known)


def _known(model: torch.nn.Module) -> tuple[bool, str, str, str]:
    """Return what an Invariance holds for; TypeError for what is no module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    first = _first_parameter(model)
    return is_invariant(), str(first.device), dtype_name(first.dtype), torch.__version__


def _first_parameter(model: torch.nn.Module) -> torch.Tensor:
    return next(model.parameters(), torch.empty(0, device="cpu"))


def check_with_progress(
    model: torch.nn.Module,
    run: Callable[[torch.Tensor, torch.Tensor], Any] | None,
    documents: Sequence[torch.Tensor] | None,
    rows: Sequence[int] | None,
    gradients: bool,
    advance: Callable[[float], None],
) -> Invariance:
    """Run check_invariance, and report how much more of 1 is done."""
    known, first = _known(model), _first_parameter(model)
    if refused := refusals(model):
        return Invariance((), refused, *known)
    documents = _documents_of(model, documents, rows, first.device)
    ways = list(rows_to_compare(list(map(len, documents))))
    limit: AbstractContextManager[None] = nullcontext()
    if any(map(is_compiled, model.modules())):  # past torch's limit layers that have run other rows run eagerly
        limit = torch._dynamo.config.patch(recompile_limit=mode.recompile_limit())
    with limit:
        comparison = Comparison(model, run or run_of_transformers(model), documents, gradients)
        for way, parts in ways:
            comparison.compare(way, parts)
            advance(1 / len(ways))
    modules = dict(model.named_modules())
    layers = []
    for name in comparison.first:
        if found := comparison.found.get(name):
            kind = type(modules[name]).__name__ if name in modules else "log-probabilities"
            reason = reason_of(modules.get(name), first) if found.packs + found.prefixes else ""
            layers.append(LayerInvariance(name, kind, found.tried, found.packs, found.prefixes, reason))
    return Invariance(tuple(layers), {}, *known)


def _documents_of(
    model: torch.nn.Module, documents: Sequence[torch.Tensor] | None, rows: Sequence[int] | None, device: torch.device
) -> list[torch.Tensor]:
    if documents is None:
        if rows is None:
            longest = min(longest_of(host) for host in model.modules())
            rows = [n for n in (ROWS_ON_A_GPU if device.type == "cuda" else ROWS) if n <= longest]
        if not rows or not all(isinstance(n, int) and n > 0 for n in rows):
            raise ValueError(f"rows: expected lengths of documents, above 0, got {list(rows)}")
        vocab = getattr(Head(model).embeddings, "num_embeddings", None)
        if vocab is None:
            raise ValueError("documents: expected some for a model without get_input_embeddings, got None")
        generator = torch.Generator().manual_seed(0)
        documents = [torch.randint(vocab, (n,), generator=generator, device="cpu").to(device) for n in rows]
    if len(documents) == 0 or any(len(document) == 0 for document in documents):
        raise ValueError(f"documents: expected some, none of them empty, got {len(documents)}")
    return list(documents)
