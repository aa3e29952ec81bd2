"""Attention by the first backend that supports the call: varlen_attention, torch's varlen_attn, or SDPA with a mask."""

import functools
import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any, Literal, NoReturn, TypedDict, TypeVar, overload

import torch
import torch.nn.functional as F
from typing_extensions import Unpack

from packing_ops._runtime import gate, library
from packing_ops._runtime.arguments import (
    check_cu_seqlens,
    check_tensor,
    described,
    dtype_name,
    first_time,
    int32_cu_seqlens,
    integer,
    number,
    plain,
    sum_dtype,
    wrong_type,
)
from packing_ops.metadata import PackedMetadata
from packing_ops.varlen.attention import DTYPES, attend
from packing_ops.varlen.call import refuse_heads_first, refuse_misplaced, without_metadata
from packing_ops.varlen.masks import visible_keys
from packing_ops.varlen.options import AttentionKeywords, AttentionOptions, checked_options

BACKENDS = ("packing_ops", "torch_varlen", "sdpa")
_SM80 = (8, 0)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class SelectKeywords(TypedDict, total=False):
    """Names what select_attention_backend asks of a call."""

    softcap: float
    sinks: torch.Tensor | None
    return_lse: bool
    v: torch.Tensor | None
    visible_end: torch.Tensor | None


class BackendKeywords(AttentionKeywords, total=False):
    """Adds what only attention takes."""

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    backend: str | None


@overload
def select_attention_backend(
    q: torch.Tensor, k: torch.Tensor | None = None, *, explain: Literal[False] = False,
    **options: Unpack[SelectKeywords],
) -> str: ...  # fmt: skip
@overload
def select_attention_backend(
    q: torch.Tensor, k: torch.Tensor | None = None, *, explain: Literal[True], **options: Unpack[SelectKeywords],
) -> tuple[str, dict[str, str]]: ...  # fmt: skip
def select_attention_backend(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    v: torch.Tensor | None = None,
    visible_end: torch.Tensor | None = None,
    explain: bool = False,
) -> str | tuple[str, dict[str, str]]:
    """Return the name of the first backend that can run a call of ``attention`` on this machine.

    In this order:

    - ``packing_ops``: varlen_attention, on the CPU, and on CUDA from sm_80 on (no float64 there);
    - ``torch_varlen``: torch.nn.attention.varlen, bfloat16 and float16 on CUDA from sm_80 on;
    - ``sdpa``: scaled_dot_product_attention on any device, with a mask of total_q * total_k elements.

    Only packing_ops has softcap, sinks, return_lse and visible_end. Only packing_ops keeps the guarantees of
    varlen_attention: the same bits for a document in any row, and that a NaN stays in its document.

    Args:
        q, k: as in varlen_attention; only shape, dtype and device are used. Without k, as many kv heads as q heads.
        softcap, sinks, return_lse, visible_end: as the call will pass them.
        v: as in varlen_attention; without it, q's head_dim.
        explain: also return the reasons.

    Returns:
        The name; with ``explain=True`` (name, {backend: why it cannot run, or "" if it can}). Where packing_ops can
        run, the dict also has ``"kernels"``: which of its kernels serve the forward and the backward, "cpu", "fp32"
        (float32 on a GPU), "sm80" (half types, mma.sync), "sm90" (half types on Hopper, wgmma) or "sm90 and sm80" (the
        same, short rows or documents by mma.sync). The library decides it from shape, dtype, GPU and
        ``PACKING_OPS_SM90``, by the rule that the call itself follows.

    Example:
        >>> select_attention_backend(torch.zeros(8, 2, 64))
        'packing_ops'
        >>> name, why = select_attention_backend(torch.zeros(8, 2, 64), explain=True)
        >>> why["torch_varlen"], why["kernels"]
        ('needs a CUDA tensor, got cpu', 'forward: cpu, backward: cpu')

    Raises:
        NotImplementedError: no backend can run the call; gives each one's reason.
    """
    check_tensor(q, "q")
    options = AttentionOptions(softcap=softcap, sinks=sinks, visible_end=visible_end)
    name, reasons = _select(q, k, v, options, return_lse)
    if not explain:
        return name
    if reasons["packing_ops"]:
        return name, reasons
    heads = q.shape[1] if q.dim() == 3 else 1
    kv_heads = heads if k is None or k.dim() != 3 else k.shape[1]
    device = (torch.cuda.current_device() if q.device.index is None else q.device.index) if q.is_cuda else -1
    dims = q.shape[-1], q.shape[-1] if v is None else v.shape[-1]
    return name, {**reasons, "kernels": kernels_of(q.dtype != torch.float32, heads, kv_heads, dims[0], device, dims[1])}


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: PackedMetadata | torch.Tensor,
    cu_seqlens_k: PackedMetadata | torch.Tensor | None = None, *misplaced: NoReturn, return_lse: Literal[False] = False,
    **options: Unpack[BackendKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: PackedMetadata | torch.Tensor,
    cu_seqlens_k: PackedMetadata | torch.Tensor | None = None, *misplaced: NoReturn, return_lse: Literal[True],
    **options: Unpack[BackendKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: PackedMetadata | torch.Tensor,
    cu_seqlens_k: PackedMetadata | torch.Tensor | None = None,
    *misplaced: NoReturn,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    backend: str | None = None,
    visible_end: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute varlen_attention, or the same by another backend where packing_ops cannot run: one call for all machines.

    Another backend than packing_ops is announced by a warning with the reason, once per reason.

    Args:
        q, k, v: ``[total, num_heads, head_dim]``, for k and v ``[total_k, num_kv_heads, head_dim]``; v may have another
            head_dim.
        max_seqlen_q, max_seqlen_k: length of the longest document, or an upper bound; used by torch_varlen only.
            Default: the number of tokens of q and of k.
        backend: ``"packing_ops"``, ``"torch_varlen"`` or ``"sdpa"``; by default what select_attention_backend returns.
        Others: as in varlen_attention.

    Returns:
        As varlen_attention. With every backend, tokens past the last document and tokens without a visible key are 0.
        sdpa allocates a mask of total_q * total_k elements. It checks values of cu_seqlens on the CPU and, as
        varlen_attention does, on CUDA from sm_80 on; on other devices they are not checked.

    Example:
        >>> q, k, v = torch.randn(3, 5, 2, 8)  # 5 tokens, 2 heads of 8, of documents of 2 and 3 tokens
        >>> attention(q, k, v, torch.tensor([0, 2, 5], dtype=torch.int32)).shape
        torch.Size([5, 2, 8])

    Raises:
        ValueError: an unknown backend, or as varlen_attention.
        NotImplementedError: the backend cannot run this call; gives the reason.

    Determinism: by packing_ops the same bits in every call; other backends as torch has them.
    Synchronises: never; sdpa on the CPU checks values.
    Memory: by packing_ops as varlen_attention; sdpa makes a mask of total_q * total_k.
    Gradients: of q, k and v; by packing_ops of sinks and through lse too.
    """
    refuse_misplaced(misplaced)
    refuse_heads_first(q)
    check_tensor(k, "k")
    check_tensor(v, "v")
    same_documents = cu_seqlens_k is None or cu_seqlens_k is cu_seqlens_q
    if visible_end is None and same_documents and isinstance(cu_seqlens_q, PackedMetadata):
        visible_end = cu_seqlens_q.visible_end
    options = checked_options(causal, softmax_scale, window_size, softcap, sinks, visible_end)
    tree = isinstance(cu_seqlens_q, PackedMetadata) and cu_seqlens_q.paths is not None
    # Choose.
    if backend is None:
        backend, reasons = _select(q, k, v, options, return_lse, tree)
        if backend != "packing_ops":
            _warn_once(f"packing_ops.attention runs by {backend} here: packing_ops {reasons['packing_ops']}")
    elif backend not in BACKENDS:
        raise ValueError(f"backend: expected {', '.join(BACKENDS[:-1])} or {BACKENDS[-1]}, got {backend!r}")
    else:
        reason = _select(q, k, v, options, return_lse, tree)[1][backend]
        if reason:
            raise NotImplementedError(f"backend: {backend} {reason}")
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if backend == "packing_ops":
        out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
        return (out, lse) if return_lse else out
    options = _checked_call(q, k, v, options)
    lengths = max_seqlen_q or _longest(cu_seqlens_q, q), max_seqlen_k or _longest(cu_seqlens_k, k)
    of_q, of_k = without_metadata(q, k, cu_seqlens_q, cu_seqlens_k)
    documents = _documents(of_q, "cu_seqlens_q", q), _documents(of_k, "cu_seqlens_k", k)
    if of_q.shape != of_k.shape:
        wanted, got = of_q.numel() - 1, of_k.numel() - 1
        raise ValueError(f"cu_seqlens_k: expected as many documents as cu_seqlens_q ({wanted}), got {got}")
    of_q, of_k = int32_cu_seqlens(of_q), int32_cu_seqlens(of_k)
    # Rows past the last document: NaN that they may hold must not spread, and their results are 0.
    in_document_q, in_document_k = ((each < of_q.numel() - 1)[:, None, None] for each in documents)
    q, k, v = q.where(in_document_q, 0), k.where(in_document_k, 0), v.where(in_document_k, 0)
    window, scale, grouped = options.window_size, options.softmax_scale, k.shape[1] != q.shape[1]
    if backend == "sdpa":
        seen = visible_keys(*documents, of_q, of_k, options.causal, window)
        # softmax of a fully masked row is NaN: such a row sees all keys instead, and its result is set to 0.
        empty = ~seen.any(1, keepdim=True)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | empty, scale=scale, enable_gqa=grouped)
        return out[0].transpose(0, 1).masked_fill(empty[..., None], 0.0)
    # It does not write rows past the last document, in out and in the gradients.
    varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    named = {"scale": scale, "window_size": (window[0], 0) if options.causal else window}
    named |= {"enable_gqa": True} if grouped else {}
    out = varlen_attn(q, k, v, of_q, of_k, *lengths, **named)
    return out.where(in_document_q, 0)


# --- what the op checks, for the other backends ---


def _checked_call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> AttentionOptions:
    """Return the options, with a window that int32 can hold. Raises the op's errors for what does not fit."""
    if not q.is_floating_point():
        raise ValueError(f"q: expected a floating dtype, got {described(q)}")
    for name, each in (("k", k), ("v", v)):
        if (each.dtype, each.device) != (q.dtype, q.device):
            wanted = f"{dtype_name(q.dtype)} on {q.device}"
            raise ValueError(f"{name}: expected {wanted} like q, got {described(each)} on {each.device}")
        if each.dim() != 3:
            raise ValueError(f"{name}: expected [total_k, num_kv_heads, head_dim] like q, got {described(each)}")
    if not isinstance(plain(options.causal), int):
        raise wrong_type("causal", "True or False", options.causal)
    scale, largest = options.softmax_scale, torch.finfo(sum_dtype(q.dtype)).max
    left, right = (int(integer(side, "window_size")) for side in options.window_size)
    wrong = {
        f"k: expected head_dim {q.shape[2]} like q, got {described(k)}": k.shape[2] != q.shape[2],
        f"k: expected a number of heads that divides the {q.shape[1]} heads of q, got {described(k)}": (
            k.shape[1] < 1 or q.shape[1] < 1 or q.shape[1] % k.shape[1]
        ),
        f"v: expected the rows and heads of k ({described(k)}), got {described(v)}": v.shape[:2] != k.shape[:2],
        f"softmax_scale: expected a finite number, got {scale}": (
            scale is not None and not abs(number(scale, "softmax_scale")) <= largest
        ),
        f"window_size: expected -1 (open) or the number of keys to each side, got ({left}, {right})": (
            left < -1 or right < -1
        ),
        f"window_size: expected nothing to the right with causal=True, got ({left}, {right})": (
            options.causal and right > 0
        ),
    }
    if message := next((message for message, is_wrong in wrong.items() if is_wrong), None):
        raise ValueError(message)
    most = len(q) + len(k)
    return options._replace(window_size=(min(left, most), min(right, most)))


def _documents(cu_seqlens: torch.Tensor, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Return the document of each row, their number for rows past the last one. Raises ValueError for wrong cu_seqlens
    if an op can see it.
    """
    check_cu_seqlens(cu_seqlens, name)
    has_op = cu_seqlens.device.type in ("cpu", "meta")
    if cu_seqlens.is_cuda and not library.MISSING:
        lacks = "seq_idx_from_cu_seqlens" in library.without_cuda_kernel
        has_op = not lacks and not _why_not_this_gpu(cu_seqlens)
    if not has_op:
        slots = torch.arange(rows.shape[0], device=cu_seqlens.device, dtype=torch.int32)
        return torch.searchsorted(int32_cu_seqlens(cu_seqlens)[1:], slots, right=True)
    try:
        return gate.seq_idx_from_cu_seqlens(cu_seqlens, rows.shape[0])
    except ValueError as error:
        raise ValueError(f"{name}{str(error).removeprefix('cu_seqlens')}") from None


# --- the other backends ---


def _select(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    options: AttentionOptions,
    return_lse: bool,
    tree: bool = False,
) -> tuple[str, dict[str, str]]:
    """Return (name, {backend: why it cannot run})."""
    features = {
        "softcap": number(options.softcap, "softcap") != 0,
        "sinks": options.sinks is not None,
        "lse": return_lse,
    }
    features |= {"visible_end": options.visible_end is not None, "prefix trees": tree}
    extra = " and ".join(name for name, wanted in features.items() if wanted)
    reasons = {
        "packing_ops": _why_not_packing_ops(q, v),
        "torch_varlen": _why_not_torch_varlen(q, k, v, extra),
        "sdpa": f"has no {extra}" if extra else "",
    }
    name = next((name for name in BACKENDS if not reasons[name]), None)
    if name is None:
        why = "; ".join(f"{backend}: {reason}" for backend, reason in reasons.items())
        raise NotImplementedError(f"no attention backend for this call on {q.device}: {why}")
    return name, reasons


def _longest(documents: PackedMetadata | torch.Tensor, rows: torch.Tensor) -> int:
    return documents.max_seqlen if isinstance(documents, PackedMetadata) else rows.shape[0]


def _assume_constant_result(function: _Function) -> _Function:
    """Mark a result as constant: torch.compiler's function imports torch._dynamo, which takes as long as torch
    itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_assume_constant_result
def _warn_once(message: str) -> None:
    if first_time(message):
        warnings.warn(message, stacklevel=3)


@_assume_constant_result
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _why_not_this_gpu(q: torch.Tensor) -> str:
    if q.is_cuda and (capability := _capability(q.device)) < _SM80:
        return f"needs a GPU of sm_80 or later, got sm_{capability[0]}{capability[1]}"
    return ""


@_assume_constant_result
def kernels_of(
    half: bool, num_heads: int, num_kv_heads: int, head_dim: int, device: int, head_dim_v: int | None = None
) -> str:
    """Return which kernels serve a call of varlen_attention; device -1 is the CPU."""
    given = (half, num_heads, num_kv_heads, head_dim, device, head_dim_v)
    forward, _, backward = gate.attention_kernels(*given).partition(", ")
    return f"forward: {forward}, backward: {backward}"


def _why_not_packing_ops(q: torch.Tensor, v: torch.Tensor | None) -> str:
    kind = q.device.type
    if library.MISSING:
        return "has no compiled library here"
    if kind not in DTYPES:
        return f"has no kernel for {kind}"
    if q.is_cuda and "varlen_attention" in library.without_cuda_kernel:
        return "has no CUDA kernel in this library"
    if q.dtype not in DTYPES[kind]:
        return f"has {', '.join(map(dtype_name, DTYPES[kind]))} on {kind}, got {dtype_name(q.dtype)}"
    if reason := _why_not_this_gpu(q):
        return reason
    widths = [q.shape[-1]] if v is None else [q.shape[-1], v.shape[-1]]
    for width in widths:
        if width > 512:
            return f"has head_dim up to 512, got {width}"
        if q.is_cuda and width % 8 and q.dtype != torch.float32:
            return f"has head_dim in multiples of 8 for {dtype_name(q.dtype)} on cuda, got {width}"
    return ""


def _why_not_torch_varlen(q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, extra: str) -> str:
    if not q.is_cuda:
        return f"needs a CUDA tensor, got {q.device.type}"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {dtype_name(q.dtype)}"
    if reason := _why_not_this_gpu(q):
        return reason
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"needs a head_dim up to 256 in multiples of 8, got {q.shape[-1]}"
    if v is not None and v.shape[-1] != q.shape[-1]:
        return f"needs q's head_dim {q.shape[-1]} in v, got {v.shape[-1]}"
    parameters = _torch_varlen_parameters()
    if "window_size" not in parameters:
        return f"is not in torch {torch.__version__} with window_size"
    if k is not None and k.shape[1] != q.shape[1] and "enable_gqa" not in parameters:
        return f"has no grouped heads in torch {torch.__version__}"
    return f"has no {extra}" if extra else ""


@functools.cache
def _torch_varlen_parameters() -> frozenset[str]:
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return frozenset()
    return frozenset(inspect.signature(module.varlen_attn).parameters)
