"""The state of the mode packing_ops.invariant(): who holds it, what it sets in torch, products by whole blocks, and sums that
have the same bits in any order."""

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

GRAIN = 4096  # entries of a vocabulary that one product and one sum take in the mode, whatever the chunk
# On the CPU rows of a product go by whole blocks: MKL's float32 sums of 1, 2, 3, 5, 7 or 9 rows have other orders.
ROWS = 16
COLUMNS = 8  # on a GPU columns of a product go by whole sets of 8: cuBLASLt has other kernels for few rows of others
FLOAT32_ROWS = 32  # on a GPU the least of a float32 product: cuBLASLt has other kernels for up to 16
ANY_ORDER = "_packing_ops_any_order"  # of a module whose sums over a row are sum_in_any_order under torch.compile

# Of torch._inductor.config, where it has them. emulate_precision_casts: elementwise code rounds as eager code does, without fused
# multiply-adds, however a graph is cut into kernels. batch_invariant, from torch 2.13 on: most sums over a row go by its size alone.
INDUCTOR = ("emulate_precision_casts", "batch_invariant")
# Of a function, at least. A layer past torch's limit of 8 would run eagerly from then on, with other bits: it is compiled for
# the first layer and the others, with and without gradients, for a size, for any, and for one token.
COMPILATIONS = 64

Before = tuple[Any, int | None, dict[str, Any]] | None  # torch's settings before the mode; None where it sets none
# {holder: (the settings before the mode, what ends it when the holder goes)}
_holders: "weakref.WeakKeyDictionary[object, tuple[Before, Callable[[], object]]]" = weakref.WeakKeyDictionary()


def active() -> bool:
    return len(_holders) > 0


def hold(holder: object) -> None:
    """The mode is on until every holder is released or gone."""
    if holder in _holders:
        return
    other = next(iter(_holders.values()), None)
    before = _set() if other is None else other[0]
    end = weakref.finalize(holder, _restore_if_free, before)
    end.atexit = False
    _holders[holder] = before, end


def release(holder: object) -> None:
    if holder in _holders:
        _, end = _holders.pop(holder)
        end()


def _restore_if_free(before: Before) -> None:
    if before is not None and not active():
        _restore(*before)


class Held:
    """In a model: the mode is on as long as it is there, in a copy too."""

    def __init__(self) -> None:
        hold(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, ()


# --- settings for a GPU: cuBLASLt without a workspace cannot split the sums of few rows ---


def _set() -> Before:
    if not torch.cuda.is_available():
        return None
    cuda = torch.backends.cuda
    size = None
    if has_setter():
        size = cuda.cublaslt_workspace_size()
        cuda.cublaslt_workspace_size(1024)
    else:
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")  # KiB; read at the first product
    library = cuda.preferred_blas_library()
    cuda.preferred_blas_library("cublaslt")
    return library, size, _set_compiler({**dict.fromkeys(INDUCTOR, True), "recompile_limit": recompile_limit()})


def _restore(library: Any, size: int | None, of_compiler: dict[str, Any]) -> None:
    torch.backends.cuda.preferred_blas_library(library)
    if size is not None:
        torch.backends.cuda.cublaslt_workspace_size(size)
    _set_compiler(of_compiler)


def _set_compiler(values: dict[str, Any]) -> dict[str, Any]:
    """The values before, of those that this torch has."""
    from torch._inductor import config

    before = {}
    for name, value in values.items():
        of = config if name in INDUCTOR else torch._dynamo.config
        if hasattr(of, name):
            before[name] = getattr(of, name)
            setattr(of, name, value)
    return before


def recompile_limit() -> int:
    """What torch's own has to be for COMPILATIONS."""
    import torch._dynamo

    return max(COMPILATIONS, torch._dynamo.config.recompile_limit)


def has_setter() -> bool:
    """Newer torch sets the workspace while it runs; older ones read the environment once."""
    return hasattr(torch.backends.cuda, "cublaslt_workspace_size")


# --- sums over a row whose bits do not depend on the order of the terms ---


def sum_in_any_order(x: torch.Tensor) -> torch.Tensor:
    """Sums over the last dimension ``[..., 1]`` of float32 or float64: the largest term, and the sum of all as integers of up
    to 62 bits in units of it. torch.compile picks an order by the number of rows; no order changes either.

    A term is rounded once to the dtype, and by less than ``2**-46`` of the largest in rows of up to 65,536. A sum with a term
    of ``2**120`` or more is infinite.
    """
    bits = 62 - (int(x.shape[-1]) - 1).bit_length()  # a number in a trace of other sizes too
    largest = x.abs().amax(-1, keepdim=True)
    unit = largest.clamp(min=2.0**-100)
    integers = (x * (1 / unit) * 2.0**bits).round().long()
    total = integers.sum(-1, keepdim=True).to(x.dtype) * 2.0**-bits * unit
    return torch.where(largest < 2.0**120, total, largest * torch.inf)


# --- products of few rows: with rows of zeros ---


def rows_of_product(rows: int, like: torch.Tensor) -> int:
    """What ``rows`` of a product are padded to: on the CPU whole blocks of ROWS, in float32 on a GPU at least FLOAT32_ROWS."""
    if like.is_cpu:
        return -(-rows // ROWS) * ROWS
    return torch.sym_max(rows, FLOAT32_ROWS) if like.is_cuda and like.dtype == torch.float32 else rows


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """x ``[..., rows, size]`` with rows of zeros up to rows_of_product; x itself where it has these."""
    missing = rows_of_product(x.shape[-2], x) - x.shape[-2]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


class WholeBlocks(TorchFunctionMode):
    """Products on the CPU take their rows padded to whole blocks, forward and so backward."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _PRODUCTS and len(args) > 1 and _padded(args[0], args[1]):
            return _by_blocks(function, *args, **(kwargs or {}))
        if function in _GROUPED and _padded(args[0], args[1]) and args[1].dim() == 3:
            return _by_groups(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


_PRODUCTS = {
    torch.nn.functional.linear,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.__matmul__,
}
_GROUPED = {getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)} - {None}


def _padded(x: Any, other: Any) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter) and x.is_cpu and x.dim() > 1 and other.dim() > 1


def _by_blocks(function: Any, x: torch.Tensor, other: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    if other.dim() == 2:  # all leading dims are rows
        rows = x.reshape(-1, x.shape[-1])
        out = function(pad_rows(rows), other, *rest, **options)
        return out[: rows.shape[0]].reshape(*x.shape[:-1], out.shape[-1])
    return function(pad_rows(x), other, *rest, **options)[..., : x.shape[-2], :]


def _by_groups(x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, **_: Any) -> torch.Tensor:
    """torch.nn.functional.grouped_mm of rows that lie group by group: a product for each."""
    ends = offs.tolist()
    groups = zip([0, *ends], ends, weights, strict=False)
    out = [_by_blocks(torch.mm, x[start:end], weight) for start, end, weight in groups if end > start]
    return torch.cat([*out, x.new_zeros(x.shape[0] - (ends[-1] if ends else 0), weights.shape[2])])
