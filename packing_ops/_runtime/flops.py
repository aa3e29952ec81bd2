"""What torch.utils.flop_counter.FlopCounterMode counts for the ops that multiply, forward and backward.

Only the products, as torch counts its attention: q k^T and p v of 2 * head_dim operations each (v's head_dim in the
second) for each query head and each pair of a query and a key that it sees; in backward q k^T once more, dq and dk, and
dout v^T and dv with v's head_dim. Documents, paths of a prefix tree, keys in pages, causality, the window and
visible_end are counted as they are, from their values, which synchronises on CUDA. Fake tensors have no values: one
document of all rows, which has as many pairs as there can be.

A token of gated_delta_rule has 3 products with the state of each head of v, in backward 2 to make it again and 6 for
gradients. One of mamba2_scan has 2, in backward 1 and 4.
"""

import importlib
import sys
from itertools import chain, pairwise

import torch

from packing_ops._runtime import library
from packing_ops.losses.chunks import rows_at_most

_COUNTER = "torch.utils.flop_counter"


def visible_pairs(num_q: int, num_k: int, left: int, right: int) -> int:
    """Count pairs of a query and a key that it sees, in one document. Sides as in varlen_attention."""
    left, right = (num_q + num_k if side < 0 else side for side in (left, right))
    first = num_k - num_q  # the first query's position
    return _below(num_q, num_k, first + right + 1) - _below(num_q, num_k, first - left)


def _below(num_q, num_k, end):
    """Count pairs of query i and the keys before end + i: the sum of clamp(end + i, 0, num_k), without a branch on a
    size.
    """
    return _up_to(end + num_q - 1, num_k) - _up_to(end - 1, num_k)


def _up_to(last, most):
    """Return 1 + 2 + ... + last, with no term over most."""
    last, over = torch.sym_max(last, 0), torch.sym_max(last - most, 0)
    return (last * (last + 1) - over * (over + 1)) // 2


def _has_values(tensor):
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return not (isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.is_meta)


def _lengths(cu_seqlens, total):
    if not _has_values(cu_seqlens):
        return [total]
    return [end - start for start, end in pairwise(cu_seqlens.tolist())]


def _pairs_before_ends(lengths_q, lengths_k, left, visible_end):
    """Sum visible_pairs over all documents, by the values of visible_end."""
    positions = chain.from_iterable(range(k - q, k) for q, k in zip(lengths_q, lengths_k, strict=True))
    firsts = (max(position - left, 0) if left >= 0 else 0 for position in positions)
    return sum(max(end - first, 0) for first, end in zip(firsts, visible_end.tolist(), strict=False))  # not of padding


def _multiplied(a, lse):
    """Count the operations of a product for each of its columns."""
    (num_heads, total_q), visible_end = lse.shape, getattr(a, "visible_end", None)
    # Queries and keys of each document
    if hasattr(a, "path_cu_seqlens"):
        lengths = _lengths(a.cu_seqlens, total_q), _lengths(a.path_cu_seqlens, a.row_of_key.shape[0])
    elif hasattr(a, "seqused_k"):
        used = a.seqused_k.tolist() if _has_values(a.seqused_k) else [a.block_table.shape[1] * a.k.shape[1]]
        lengths = _lengths(a.cu_seqlens_q, total_q), used
    else:
        lengths = _lengths(a.cu_seqlens_q, total_q), _lengths(a.cu_seqlens_k, a.k.shape[-2 if a.k.dim() == 4 else 0])
    causal = getattr(a, "causal", True)  # a prefix tree is
    left, right = a.window_left, 0 if causal else a.window_right
    if visible_end is None:
        pairs = sum(visible_pairs(*sizes, left, right) for sizes in zip(*lengths, strict=True))
    elif _has_values(visible_end):
        pairs = _pairs_before_ends(*lengths, left, visible_end)
    else:  # as many as there can be
        pairs = sum(visible_pairs(*sizes, left, -1) for sizes in zip(*lengths, strict=True))
    return 2 * num_heads * pairs


def _attention(a, out):
    return (a.q.shape[-1] + a.v.shape[-1]) * _multiplied(a, out[1])


def _attention_backward(a, _):
    return (3 * a.q.shape[-1] + 2 * a.v.shape[-1]) * _multiplied(a, a.lse)


def _product_of_head(a, head=""):
    """Count a product of the rows that have a target; on CUDA of as many as there may be."""
    rows = rows_at_most(a.hidden.shape[0], a.max_targets)
    if a.targets.is_cpu and _has_values(a.targets):
        rows = int((a.targets >= 0).sum())
    return 2 * rows * getattr(a, f"{head}weight").numel()


def _head_backward(a, chunks, columns, teacher=0):
    """Count a product for each gradient, and the logits of all heads once more for what was not kept."""
    product, vocab = _product_of_head(a), a.weight.shape[0]
    again = (product + teacher) * max(vocab - chunks * columns, 0) // vocab
    return product * (a.need_hidden + a.need_weight) + again


# Operations of one product, of the arguments of an op that is made of several.
_PRODUCT = {
    "conv": lambda a: 2 * a.x.numel() * a.weight.shape[1],
    "delta rule": lambda a: 2 * a.v.numel() * a.q.shape[-1],
    "mamba": lambda a: 2 * a.x.numel() * a.B.shape[-1],
}
# Of an op's arguments, by their names, and of its results.
_FORMULAS = {
    "varlen_attention": _attention,
    "prefix_attention": _attention,
    "paged_attention": _attention,
    "varlen_attention_backward": _attention_backward,
    "prefix_attention_backward": _attention_backward,
    "causal_conv1d": lambda a, _: _PRODUCT["conv"](a),
    "causal_conv1d_backward": lambda a, _: (2 + a.silu) * _PRODUCT["conv"](a),  # dx, dweight; the activation's argument
    "gated_delta_rule": lambda a, _: 3 * _PRODUCT["delta rule"](a),
    "gated_delta_rule_backward": lambda a, _: 8 * _PRODUCT["delta rule"](a),
    "mamba2_scan": lambda a, _: 2 * _PRODUCT["mamba"](a),
    "mamba2_scan_backward": lambda a, _: 5 * _PRODUCT["mamba"](a),
    "token_logps": lambda a, _: _product_of_head(a),
    "token_logps_backward": lambda a, _: _head_backward(a, *a.logits.shape[::2]),
    "token_logps_backward_": lambda a, _: _head_backward(a, *a.logits.shape[::2]),
    "token_kl": lambda a, _: _product_of_head(a) + _product_of_head(a, "teacher_"),
    "token_kl_backward": lambda a, _: _head_backward(a, *a.kept_dz.shape[1:], _product_of_head(a, "teacher_")),
}


def _counted(name, formula):
    bind = library.named_arguments(name)
    return lambda *args, out_val: formula(bind(args), out_val)


def register_flop_formulas() -> None:
    """Let torch's FlopCounterMode count attention, convolutions, layers with a state, token_logps and token_kl.

    Attention is counted over documents, prefix trees and keys in pages. A tree counts the pairs of its rows: what the
    samples share counts once as queries, and as keys for each segment that sees it.

    Call it before the counter is used. A program that imports torch.utils.flop_counter before packing_ops need not call
    it. A second call does nothing.

    Example:
        >>> from packing_ops import varlen_attention
        >>> from torch.utils.flop_counter import FlopCounterMode
        >>> register_flop_formulas()
        >>> q = k = v = torch.zeros(3, 1, 8)
        >>> with FlopCounterMode(display=False) as counter:
        ...     out = varlen_attention(q, k, v, torch.tensor([0, 3], dtype=torch.int32))
        >>> counter.get_total_flops()  # 6 visible pairs, 2 products of 2 * 8 operations
        192
    """
    # Not at the top of this file: where triton is installed, this import takes longer than all of packing_ops.
    counter = importlib.import_module(_COUNTER)
    ops = torch.ops.packing_ops
    if library.MISSING or ops.varlen_attention in counter.flop_registry:
        return
    for name, formula in _FORMULAS.items():
        counter.register_flop_formula(getattr(ops, name), get_raw=True)(_counted(name, formula))


if _COUNTER in sys.modules:
    register_flop_formulas()
