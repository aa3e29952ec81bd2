"""The state of the mode packing_ops.invariant(): who holds it, what it sets in torch, products by blocks of rows, and
sums that have the same bits in any order.
"""

import inspect
import operator
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import as_autocast, sum_dtype

GRAIN = 4096  # entries of a vocabulary that one product and one sum take in the mode, whatever the chunk
ROWS = 16  # of every product on the CPU: csrc/ops/logps/logps_mm_by_rows_bind.cpp says why
COLUMNS = 8  # on a GPU columns of a product go by whole sets of 8: cuBLASLt has other kernels for few rows of others
PAIR = 2  # terms that a CPU with AMX multiplies at a time in a half type: widths are a multiple of it (whole_pairs)
# On a GPU the least rows of a product of the losses. cuBLASLt has other kernels for fewer: in float32 for up to 16
# rows, in half types for up to 3, where they sum 4,096 terms or more.
GPU_ROWS = {torch.float32: 32, torch.float16: 16, torch.bfloat16: 16}
NARROW = (
    64  # on a GPU the size of a weight up to which cuBLASLt has other kernels for 1 to 3 rows of some thousand terms
)
ANY_ORDER = "_packing_ops_any_order"  # of a module whose sums over a row are order_invariant_sum under torch.compile

# Of torch._inductor.config, where it has them. emulate_precision_casts: elementwise code rounds as eager code does,
# without fused multiply-adds, however a graph is cut into kernels. batch_invariant, from torch 2.13 on: most sums over
# a row depend only on its size.
INDUCTOR = ("emulate_precision_casts", "batch_invariant")
# Of one function, that torch allows in the mode, at least. Past its limit of 8 a function runs eagerly, with other
# bits. The limit of a layer is compiled for the first layer and the others, each with and without gradients, for one
# size, for dynamic sizes and for one token.
COMPILATIONS = 64

OfCompiler = tuple[dict[str, bool], int]  # of torch._inductor.config, and torch._dynamo.config.recompile_limit
Before = tuple[Any, int | None, OfCompiler] | None  # torch's settings before the mode; None if it sets nothing
# {holder: (the settings before the mode, what ends it when the holder goes)}
_holders: "weakref.WeakKeyDictionary[object, tuple[Before, Callable[[], object]]]" = weakref.WeakKeyDictionary()


def active() -> bool:
    return len(_holders) > 0


def hold(holder: object) -> None:
    """Switch the mode on until every holder is released or gone."""
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
    if before is None or active():
        return
    library, size, of_compiler = before
    torch.backends.cuda.preferred_blas_library(library)
    if size is not None:
        torch.backends.cuda.cublaslt_workspace_size(size)
    _set_compiler(*of_compiler)


class ModeHandle:
    """In a model: the mode is on as long as it is there, in a copy too. unclaimed: why nobody has proven it yet, or
    empty.
    """

    def __init__(self, unclaimed: str = "") -> None:
        self.unclaimed = unclaimed
        hold(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return ModeHandle, (self.unclaimed,)


# --- settings for a GPU: cuBLASLt without a workspace cannot split the sums of few rows ---


def _set() -> Before:
    if not torch.cuda.is_available():
        return None
    cuda, size = torch.backends.cuda, None
    if has_setter():
        size = cuda.cublaslt_workspace_size()
        cuda.cublaslt_workspace_size(1024)
    else:
        os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")  # KiB; read at the first product
    library = cuda.preferred_blas_library()
    cuda.preferred_blas_library("cublaslt")
    return library, size, _set_compiler(dict.fromkeys(INDUCTOR, True), recompile_limit())


def _set_compiler(inductor: dict[str, bool], limit: int) -> OfCompiler:
    """Set the compiler's options that this torch has, and return their values before."""
    import torch._dynamo
    from torch._inductor import config

    before = {name: getattr(config, name) for name in inductor if hasattr(config, name)}
    for name in before:
        setattr(config, name, inductor[name])
    limit_before, torch._dynamo.config.recompile_limit = torch._dynamo.config.recompile_limit, limit
    return before, limit_before


def recompile_limit() -> int:
    """Return torch's recompile_limit, raised to COMPILATIONS where it is lower."""
    import torch._dynamo

    return max(COMPILATIONS, torch._dynamo.config.recompile_limit)


def has_setter() -> bool:
    """Return whether torch sets the workspace while it runs; older versions read the environment once."""
    return hasattr(torch.backends.cuda, "cublaslt_workspace_size")


# --- sums over a row whose bits do not depend on the order of the terms ---


def order_invariant_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension ``[..., 1]`` of float32 or float64 with the same bits in any order: the largest term,
    and the sum of all as integers of up to 62 bits in units of it. torch.compile picks an order by the number of rows.

    A term is rounded once to the dtype, and by less than ``2**-46`` of the largest in rows of up to 65,536. inf, -inf
    and NaN are as in any sum.
    """
    bits = 62 - (int(x.shape[-1]) - 1).bit_length()  # a number in a trace of other sizes too
    highest, lowest = x.amax(-1, keepdim=True), x.amin(-1, keepdim=True)
    largest = torch.maximum(highest, -lowest)
    # Of the largest terms 1 / unit would be subnormal, which some devices take for 0.
    scale = torch.where(largest < torch.finfo(x.dtype).max * 2.0**-8, torch.ones_like(largest), 2.0**-64)
    unit = (largest * scale).clamp(min=2.0**-100)
    integers = (x * scale * (1 / unit) * 2.0**bits).round().long()
    total = integers.sum(-1, keepdim=True).to(x.dtype) * 2.0**-bits * unit / scale
    return torch.where(largest.isfinite(), total, highest + lowest)  # inf, -inf and NaN are among these


def rms_norm_in_any_order(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute torch.nn.functional.rms_norm over the last dimension with the same bits, forward and backward, in any
    order of summation.
    """
    # index: a number, also where a trace has other sizes. torch before 2.13 cannot trace a Function with such a size.
    return _RmsNorm.apply(x.reshape(-1, operator.index(x.shape[-1])), weight, eps).view(x.shape)


class _RmsNorm(torch.autograd.Function):
    """Of ``[rows, size]``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
        values = x.to(sum_dtype(x.dtype))
        rstd = (order_invariant_sum(values * values) / x.shape[-1] + eps).rsqrt()
        ctx.save_for_backward(x, weight, rstd)
        out = values * rstd if weight is None else values * rstd * weight
        # Under torch.compile a result that .to leaves as it is has no gradient with torch 2.11.
        return out if out.dtype == x.dtype else out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        grad, normalised = grad.to(rstd.dtype), x.to(rstd.dtype) * rstd
        of_normalised = grad if weight is None else grad * weight
        along = order_invariant_sum(of_normalised * normalised) / x.shape[-1]
        of_x = ((of_normalised - normalised * along) * rstd).to(x.dtype)
        of_weight = None if weight is None else (grad * normalised).sum(0).to(weight.dtype)
        return of_x, of_weight, None


# --- products: rows of zeros next to few, and on the CPU blocks of rows ---


def rows_of_product(rows: int, like: torch.Tensor) -> int:
    """Return the number that ``rows`` of a product are padded to: on the CPU a multiple of ROWS, on a GPU at least
    GPU_ROWS.
    """
    if like.is_cpu:
        return -(-rows // ROWS) * ROWS
    return torch.sym_max(rows, GPU_ROWS[like.dtype]) if like.is_cuda and like.dtype in GPU_ROWS else rows


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Return x ``[rows, size]`` with rows of zeros up to rows_of_product; x itself if it has as many."""
    missing = rows_of_product(x.shape[0], x) - x.shape[0]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def whole_pairs(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x and weight, with one column of zeros more if they are of a half type and have an odd number of columns.

    On a CPU with AMX torch's product pairs the last term of an odd row with the first of the next row, times 0. A NaN
    or an inf there makes the result of the row before it NaN.
    """
    if x.element_size() > 2 or x.shape[-1] % PAIR == 0:
        return x, weight
    return torch.nn.functional.pad(x, (0, 1)), torch.nn.functional.pad(weight, (0, 1))


class ProductsByBlocks(TorchFunctionMode):
    """On the CPU a product of the calling thread is computed as products of ROWS rows, in forward and backward."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _PRODUCTS or function in _GROUPED:
            named = {name: value for name, value in (kwargs or {}).items() if value is not None}
            given = [*args, *(named.pop(name) for name in ("input", "weight", "other", "mat2") if name in named)]
            if function in _GROUPED and {*named} == {"offs"} and _has_rows(given):
                (x, weights), offs = given, named["offs"]
                count = weights.shape[0] if (x.dim(), weights.dim()) == (2, 3) else 0
                if offs.numel() == count > 0 and int(offs[-1]) <= x.shape[0]:
                    return _by_groups(x, weights, offs)
            if function in _PRODUCTS and _has_rows(given, _DIMS.get(function)) and {*named} <= {"bias", "out"}:
                return _PRODUCTS[function](*given, **named)
        return function(*args, **(kwargs or {}))


def _has_rows(given: list[Any], dims: int | None = None) -> bool:
    """Return whether the operands are those of a product by blocks, and nothing that torch refuses."""
    operands = given[:2]
    for each in operands:
        if type(each) not in (torch.Tensor, torch.nn.Parameter) or not each.is_cpu or each.layout != torch.strided:
            return False
        if each.dim() < 2 or each.dim() != (dims or each.dim()):
            return False
    if len(operands) < 2 or operands[0].shape[-1] == 0:
        return False
    return dims != 3 or operands[0].shape[0] == operands[1].shape[0]


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if bias is not None and bias.dim() > 1:
        return _linear(x, weight) + bias
    bias = None if bias is None else bias.expand(weight.shape[0])
    rows, weight, bias = as_autocast(x.reshape(-1, x.shape[-1]), weight, bias)  # all leading dims are rows
    (count, size), columns = rows.shape, weight.shape[0]
    # MKL has other kernels for some rows of a block with few columns, or an odd number of terms. Columns too: they
    # are the terms of the gradient of x.
    multiple = ROWS if rows.element_size() > 2 else PAIR
    if size % multiple or columns % multiple:
        pad, more, beside = torch.nn.functional.pad, -size % multiple, -columns % multiple
        rows, weight = pad(rows, (0, more)), pad(weight, (0, more, 0, beside))
        bias = None if bias is None else pad(bias, (0, beside))
    out = Product.apply(pad_rows(rows), weight.t(), bias)
    return out[:count, :columns].reshape(*x.shape[:-1], columns)


def _matmul(x: torch.Tensor, other: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    if other.dim() == 2:
        found = _linear(x, other.t())
    else:
        batch = torch.broadcast_shapes(x.shape[:-2], other.shape[:-2])
        pairs = zip(*(t.expand(*batch, *t.shape[-2:]).flatten(0, -3) for t in (x, other)), strict=True)
        products = [_matmul(*pair) for pair in pairs]
        found = torch.stack(products).unflatten(0, batch) if products else torch.matmul(x, other)
    if out is None:
        return found
    if out.dtype != found.dtype:
        return torch.matmul(x, other, out=out)  # torch's error
    return torch.cat([found], out=out)  # which checks and resizes it


def _by_groups(x: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Compute torch.nn.functional.grouped_mm of rows that are ordered by group: a product for each."""
    ends = offs.tolist()
    groups = zip([0, *ends], ends, weights, strict=False)
    out = [_matmul(x[start:end], weight) for start, end, weight in groups if end > start]
    return torch.cat([*out, x.new_zeros(x.shape[0] - ends[-1], weights.shape[2])])


class Product(torch.autograd.Function):
    """x @ other + bias, for a multiple of ROWS rows: it and the gradient of x by blocks, also where that is made
    outside of the mode.
    """

    @staticmethod
    def forward(x: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], other.shape[1]) if bias is None else bias.repeat(x.shape[0], 1)
        gate.mm_by_rows_(out, x, other, bias is not None)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, other), (need_x, need_other, need_bias) = ctx.saved_tensors, ctx.needs_input_grad
        of_x = Product.apply(grad, other.mH, None) if need_x else None
        of_other = None
        if need_other:  # laid out as other is, or it would be copied once more
            of_other = (grad.mH @ x).mH if other.stride(0) == 1 else x.mH @ grad
        return of_x, of_other, grad.sum(0) if need_bias else None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[torch.Tensor, int]:
        several = [
            [each] * info.batch_size if dim is None else each.unbind(dim)
            for each, dim in zip(inputs, in_dims, strict=True)
        ]
        return torch.stack([Product.apply(*each) for each in zip(*several, strict=True)]), 0


# torch asks for it in every call; without it that takes as long as the product of a token.
Product.forward.__signature__ = inspect.signature(Product.forward)  # type: ignore[attr-defined]

_PRODUCTS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.nn.functional.linear: _linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.mm: _matmul,
    torch.Tensor.bmm: _matmul,
    torch.Tensor.__matmul__: _matmul,
}
_DIMS = {torch.mm: 2, torch.Tensor.mm: 2, torch.bmm: 3, torch.Tensor.bmm: 3}
_GROUPED = {getattr(torch.nn.functional, "grouped_mm", None), getattr(torch, "_grouped_mm", None)} - {None}
