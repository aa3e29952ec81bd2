"""Attention over documents whose tokens lie on several ranks: the keys and values of all ranks are gathered.

Rank r of n holds chunks r and 2n-1-r of each document's 2n equal chunks (zigzag), so that every rank has the same
causal work. Its queries stay; one varlen call runs over them and the gathered keys (varlen_call.py). Saved for backward are
the rank's rows: backward gathers again, and the gradients of the keys go back by a reduce-scatter.

Bytes and flops, for T tokens in documents of L, H heads over G key heads of dimension D, e bytes an element, B bytes/s
into a rank and F flops/s:
    A rank receives 2*G*D*e*T*(n-1)/n bytes in forward, the same in backward, and there sends as many of gradients.
    It computes 2*H*D*T*L/n flops in forward, 2.5 times that in backward.
    Forward spends (n-1)*(G/H)*e*F / (L*B) as long on the wire as it computes. With H = 4*G, bfloat16, F = 600e12 and
    B = 400e9 (one node) that is (n-1)*750/L: 1% for n = 2 and L = 65,536. With B = 50e9 (between nodes) it is
    (n-1)*6000/L: 64% for n = 8 and the same L.
    A layer holds 2*G*D*e*T bytes of gathered keys and values while it runs, 268 MB for 8 heads of 128 at 65,536 tokens,
    and (2n+1)/(2n) times that of them in document order.
A ring moves the same bytes, one neighbour's keys at a time, each hidden behind the attention over the last ones; it pays
with n calls of the kernel, of 1/n the work each, and with merging their outputs. It pays where the share above is no
longer small (between nodes, short documents on many ranks: at most the share is won) or where the gathered keys do not
fit (rows of millions of tokens). Inside a node it does not.
"""

import torch
import torch.distributed as dist

from packing_ops import _ops
from packing_ops._batch_cache import plan_for
from packing_ops.integrations.megatron.varlen_call import VarlenCall

# torch 2.13 has new names for these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def context_parallel_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    call: VarlenCall,
    group: dist.ProcessGroup,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """varlen_attention over the documents of all ranks of ``group``. Differentiable in q, k, v and sinks.

    Args:
        q: ``[rows, num_heads, head_dim]``, this rank's chunks of each document.
        k, v: ``[rows, num_kv_heads, head_dim]``, of the same tokens.
        call: ``varlen_call_of(documents, rows, causal=causal, cp_rank=group.rank(), cp_size=group.size())``.
        causal, softmax_scale, window_size, sinks: as varlen_attention; a window needs causal.

    Returns:
        out like q, contiguous; padding has 0. The gradient of sinks is of this rank's queries alone, as that of any
        parameter.

    Example:
        One document of 8 tokens on 2 ranks: rank 0 holds tokens 0, 1, 6, 7 and its query documents attend to keys 0..1 and
        0..7; rank 1 holds 2, 3, 4, 5, which attend to 0..3 and 0..5.

        >>> out = context_parallel_attention(q, k, v, layout, group)  # needs two processes # doctest: +SKIP

    Raises:
        NotImplementedError: a window without causal.
        ValueError: as varlen_attention.

    Method: Llama Team, The Llama 3 Herd of Models (2024): gathered keys and values, 2 * cp_size chunks.
    """
    if not causal and tuple(window_size) != (-1, -1):
        raise NotImplementedError(
            f"window_size: expected (-1, -1) without a causal mask under context parallelism, got {window_size}"
        )
    options = (causal, softmax_scale, *window_size, 0.0)
    return _Attention.apply(q, k, v, None if sinks is None else sinks.float(), call, group, options)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sinks, call, group, options):
        keys, values = _gathered(k, v, call, group)
        documents = call.cu_seqlens_q, call.cu_seqlens_k
        ctx.plan = plan_for(q, keys, values, *documents, options[0], *options[2:4])
        out, lse = _ops.varlen_attention(q, keys, values, *documents, sinks, *options, ctx.plan)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call, ctx.group, ctx.options = call, group, options
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, sinks, out, lse = ctx.saved_tensors
        keys, values = _gathered(k, v, ctx.call, ctx.group)
        documents = ctx.call.cu_seqlens_q, ctx.call.cu_seqlens_k
        dq, dkeys, dvalues, dsinks = _ops.varlen_attention_backward(
            dout, None, q, keys, values, out, lse, *documents, sinks, *ctx.options, ctx.plan
        )
        dk, dv = _returned(dkeys, dvalues, ctx.call, ctx.group)
        return dq, dk, dv, None if sinks is None else dsinks, None, None, None


def _gathered(k, v, call, group):
    """The keys and the values of the call, from all ranks."""
    under_way = []
    for local in (k, v):
        rows = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        under_way.append((rows, _all_gather(rows, local.contiguous(), group=group, async_op=True)))
    gathered = []
    for rows, work in under_way:
        work.wait()
        gathered.append(rows.index_select(0, call.key_index))
    return gathered


def _returned(dkeys, dvalues, call, group):
    """Each rank's rows of the gradients, summed over the ranks. A gathered key is in the call once or twice."""
    under_way = []
    for gradient in (dkeys, dvalues):
        rows = gradient.index_select(0, call.key_positions[0])
        for again in call.key_positions[1:]:
            rows += gradient.index_select(0, again)
        local = rows.new_empty(rows.shape[0] // group.size(), *rows.shape[1:])
        under_way.append((local, rows, _reduce_scatter(local, rows, group=group, async_op=True)))
    for _, _, work in under_way:
        work.wait()
    return [local for local, _, _ in under_way]
