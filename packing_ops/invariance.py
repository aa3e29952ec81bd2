"""The same bits, however a row is computed: a mode for one's own model, and a proof on its own layers."""

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any

from packing_ops import _invariant


class invariant:
    """A mode in which a token's results have the same bits alone, in any pack and in any micro-batch.

    A context manager and a decorator, for the forward and the backward of one's own model; apply_packing_ops with
    ``invariant=True`` does the same for a transformers model until it is reverted. What it sets, for the process:

    - CUDA: products are cuBLASLt's, with a workspace of 1 KiB, so that no sum is split for few rows. A torch without
      ``torch.backends.cuda.cublaslt_workspace_size`` reads the size from the environment at its first product: there
      ``CUBLASLT_WORKSPACE_SIZE=1`` must be set before it, and entering the mode sets it where it is not too late.
    - CPU: products of the calling thread take their rows in whole blocks of 16.
    - token_logps and chunked_cross_entropy: sums and products go by 4,096 entries of the vocabulary, whatever the chunk.

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
        self._entered: list[_invariant.WholeBlocks] = []

    def __enter__(self) -> "invariant":
        products = _invariant.WholeBlocks()
        _invariant.hold(products)
        products.__enter__()
        self._entered.append(products)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        products = self._entered.pop()
        products.__exit__(kind, error, trace)
        _invariant.release(products)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def within(*args: Any, **kwargs: Any) -> Any:
            with invariant():
                return function(*args, **kwargs)

        return within


def is_invariant() -> bool:
    """Whether the mode is on: within ``with invariant():``, or for a model that apply_packing_ops was given.

    Example:
        >>> is_invariant()
        False
        >>> with invariant():
        ...     is_invariant()
        True
    """
    return _invariant.active()
