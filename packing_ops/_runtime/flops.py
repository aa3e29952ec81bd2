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
import itertools
import sys

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
    return [end - start for start, end in itertools.pairwise(cu_seqlens.tolist())]


def _pairs_before_ends(lengths_q, lengths_k, left, visible_end):
    """Sum visible_pairs over all documents, by the values of visible_end."""
    pairs = start = 0
    for num_q, num_k in zip(lengths_q, lengths_k, strict=True):
        own = range(num_k - num_q, num_k)
        ends = visible_end[start : start + num_q].tolist()
        firsts = (max(position - left, 0) if left >= 0 else 0 for position in own)
        pairs += sum(max(end - first, 0) for first, end in zip(firsts, ends, strict=True))
        start += num_q
    return pairs


def _lengths_of(given, total_q):
    """Return the number of queries and of keys of each document."""
    k = given["k"]
    if "path_cu_seqlens" in given:
        paths = _lengths(given["path_cu_seqlens"], given["row_of_key"].shape[0])
        return _lengths(given["cu_seqlens"], total_q), paths
    queries = _lengths(given["cu_seqlens_q"], total_q)
    if "seqused_k" not in given:
        return queries, _lengths(given["cu_seqlens_k"], k.shape[-2 if k.dim() == 4 else 0])
    seqused_k, most = given["seqused_k"], given["block_table"].shape[1] * k.shape[1]
    return queries, seqused_k.tolist() if _has_values(seqused_k) else [most]


def _multiplied(given, lse):
    """Count the operations of a product for each of its columns. given: the op's arguments by name."""
    (num_heads, total_q), visible_end = lse.shape, given.get("visible_end")
    lengths = _lengths_of(given, total_q)
    causal = given.get("causal", True)  # a prefix tree is
    left, right = given["window_left"], 0 if causal else given["window_right"]
    if visible_end is None:
        pairs = sum(visible_pairs(*sizes, left, right) for sizes in zip(*lengths, strict=True))
    elif _has_values(visible_end):
        pairs = _pairs_before_ends(*lengths, left, visible_end)
    else:  # as many as there can be
        pairs = sum(visible_pairs(*sizes, left, -1) for sizes in zip(*lengths, strict=True))
    return 2 * num_heads * pairs


def _by_name(op, args):
    names = [argument.name for argument in op.default._schema.arguments]
    return dict(zip(names, args, strict=False))  # without those that have their default


def _forward(op):
    def count(*args, out_val):
        given = _by_name(op, args)
        return (given["q"].shape[-1] + given["v"].shape[-1]) * _multiplied(given, out_val[1])

    return count


def _backward(op):
    def count(*args, out_val):
        given = _by_name(op, args)
        return (3 * given["q"].shape[-1] + 2 * given["v"].shape[-1]) * _multiplied(given, given["lse"])

    return count


def _logps_product(hidden, weight, targets, max_targets):
    """Count a product of the rows that have a target; on CUDA of as many as there may be."""
    rows = rows_at_most(hidden.shape[0], max_targets)
    if targets.is_cpu and _has_values(targets):
        rows = int((targets >= 0).sum())
    return 2 * rows * weight.numel()


def _logps_forward(hidden, weight, bias, targets, temperature, outer, inner, chunk, max_targets, *rest, out_val):
    return _logps_product(hidden, weight, targets, max_targets)


def _logps_backward(
    slopes, hidden, weight, bias, targets, temperature, lse, logits, outer, inner, chunk, max_targets, *rest, out_val
):
    """Count a product for each gradient, and the logits once more unless they were kept."""
    _, need_hidden, need_weight, *_ = rest
    product = _logps_product(hidden, weight, targets, max_targets)
    return product * (need_hidden + need_weight) + _not_kept(product, logits.shape[0] * logits.shape[2], weight)


def _not_kept(product, columns, weight):
    """Return the fraction of a product that is left after the columns that were kept."""
    vocab = weight.shape[0]
    return product * max(vocab - columns, 0) // vocab


def _kl_products(given):
    """Count a product of each head, the student's first."""
    of = given["targets"], given["max_targets"]
    return [_logps_product(given[f"{head}hidden"], given[f"{head}weight"], *of) for head in ("", "teacher_")]


def _kl_forward(*args, out_val):
    return sum(_kl_products(_by_name(torch.ops.packing_ops.token_kl, args)))


def _kl_backward(*args, out_val):
    """Count a product for each gradient, and the logits of both heads once more for what was not kept."""
    given = _by_name(torch.ops.packing_ops.token_kl_backward, args)
    student, teacher = _kl_products(given)
    _, chunks, columns = given["kept_dz"].shape
    again = _not_kept(student + teacher, chunks * columns, given["weight"])
    return student * (given["need_hidden"] + given["need_weight"]) + again


def _conv_product(given):
    return 2 * given["x"].numel() * given["weight"].shape[1]


def _conv_forward(*args, out_val):
    return _conv_product(_by_name(torch.ops.packing_ops.causal_conv1d, args))


def _conv_backward(*args, out_val):
    """Count dx and dweight; with an activation its argument once more."""
    given = _by_name(torch.ops.packing_ops.causal_conv1d_backward, args)
    return (2 + given["silu"]) * _conv_product(given)


def _scan_product(given):
    return 2 * given["v"].numel() * given["q"].shape[-1]


def _scan_forward(*args, out_val):
    return 3 * _scan_product(_by_name(torch.ops.packing_ops.gated_delta_rule, args))


def _scan_backward(*args, out_val):
    return 8 * _scan_product(_by_name(torch.ops.packing_ops.gated_delta_rule_backward, args))


def _mamba_product(given):
    return 2 * given["x"].numel() * given["B"].shape[-1]


def _mamba_forward(*args, out_val):
    return 2 * _mamba_product(_by_name(torch.ops.packing_ops.mamba2_scan, args))


def _mamba_backward(*args, out_val):
    return 5 * _mamba_product(_by_name(torch.ops.packing_ops.mamba2_scan_backward, args))


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
    for op in (ops.varlen_attention, ops.prefix_attention, ops.paged_attention):
        counter.register_flop_formula(op, get_raw=True)(_forward(op))
    for op in (ops.varlen_attention_backward, ops.prefix_attention_backward):
        counter.register_flop_formula(op, get_raw=True)(_backward(op))
    counter.register_flop_formula(ops.causal_conv1d, get_raw=True)(_conv_forward)
    counter.register_flop_formula(ops.causal_conv1d_backward, get_raw=True)(_conv_backward)
    counter.register_flop_formula(ops.gated_delta_rule, get_raw=True)(_scan_forward)
    counter.register_flop_formula(ops.gated_delta_rule_backward, get_raw=True)(_scan_backward)
    counter.register_flop_formula(ops.mamba2_scan, get_raw=True)(_mamba_forward)
    counter.register_flop_formula(ops.mamba2_scan_backward, get_raw=True)(_mamba_backward)
    counter.register_flop_formula(ops.token_logps, get_raw=True)(_logps_forward)
    counter.register_flop_formula(ops.token_logps_backward, get_raw=True)(_logps_backward)
    counter.register_flop_formula(ops.token_logps_backward_, get_raw=True)(_logps_backward)
    counter.register_flop_formula(ops.token_kl, get_raw=True)(_kl_forward)
    counter.register_flop_formula(ops.token_kl_backward, get_raw=True)(_kl_backward)


if _COUNTER in sys.modules:
    register_flop_formulas()
