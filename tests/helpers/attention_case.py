"""Inputs, calls and results that the tests of attention share."""

import copy
import itertools

import torch
import torch.nn.functional as F

import packing_ops as po
from helpers import cu_seqlens_of
from packing_ops.reference import attention as oracle

INF = float("inf")
OPEN = (-1, -1)


def lse_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


class Case:
    """Inputs, a call and its results: out, lse and every gradient, from ours and from the oracle."""

    def __init__(self, lengths_q, lengths_k=None, *, heads=(2, 1), dim=16, dim_v=None, dtype=torch.float32, device="cpu",
                 tail=0, sinks=False, **options):  # fmt: skip
        lengths_k = lengths_q if lengths_k is None else lengths_k
        self.cu_seqlens = cu_seqlens_of(lengths_q, device), cu_seqlens_of(lengths_k, device)
        total_q, total_k = sum(lengths_q) + tail, sum(lengths_k) + tail
        self.q = torch.randn(total_q, heads[0], dim, dtype=dtype, device=device)
        self.k, self.v = torch.randn(2, total_k, heads[1], dim, dtype=dtype, device=device)
        if dim_v is not None:
            self.v = torch.randn(total_k, heads[1], dim_v, dtype=dtype, device=device)
        self.sinks = torch.randn(heads[0], dtype=lse_dtype(dtype), device=device) if sinks else None
        self.dout = self.q.new_empty(*self.q.shape[:2], self.v.shape[-1]).normal_()
        self.dlse = torch.randn(heads[0], total_q, dtype=lse_dtype(dtype), device=device)
        self.options = options

    def results_of(self, attend, dtype=None, *, backward=True):
        given = [self.q, self.k, self.v] + ([] if self.sinks is None else [self.sinks])
        leaves = [t.detach().to(dtype or t.dtype, copy=True).requires_grad_(backward) for t in given]
        sinks = leaves[3] if self.sinks is not None else None
        out, lse = attend(*leaves[:3], *self.cu_seqlens, sinks=sinks, **self.options)
        if not backward:
            return {"out": out.detach(), "lse": lse.detach()}
        # lse is -inf where nothing is visible: those have no gradient.
        dlse = self.dlse.to(lse.dtype).masked_fill(lse == -INF, 0)
        grads = torch.autograd.grad([out, lse], leaves, [self.dout.to(out.dtype), dlse], allow_unused=True)
        return {
            "out": out.detach(),
            "lse": lse.detach(),
            **dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False)),
        }

    def ours(self):
        return self.results_of(lambda *args, **options: po.varlen_attention(*args, return_lse=True, **options))

    def exact(self, *, backward=True):
        return self.results_of(oracle.varlen_attention, torch.float64, backward=backward)

    def plain_torch(self):
        return self.results_of(oracle.varlen_attention, lse_dtype(self.q.dtype))

    def sdpa(self):
        """torch's fused attention, a document at a time."""
        return self.results_of(sdpa_by_document)


def drawn_ends(lengths_q, lengths_k=None, *, share=0.3, tail=0, device="cpu"):
    """visible_end of documents: about ``share`` of the queries see as far ahead as chance has it."""
    ends = []
    for tokens, keys in zip(lengths_q, lengths_q if lengths_k is None else lengths_k, strict=True):
        own = torch.arange(tokens) + keys - tokens + 1
        ahead = torch.randint(0, keys + 1, (tokens,)).where(torch.rand(tokens) < share, 0)
        ends.append(torch.maximum(own, ahead).cummax(0).values)
    return torch.cat([*ends, torch.full((tail,), -7)]).int().to(device)


def drawn_case(pairs, cross, *, causal, window, **options):
    """A case of (queries, keys) pairs; without ``cross`` the keys are as many. Causal: nothing to the right."""
    lengths_q = [pair[0] for pair in pairs]
    lengths_k = [pair[1] for pair in pairs] if cross else lengths_q
    window = (window[0], min(window[1], 0)) if causal else window
    return Case(lengths_q, lengths_k, causal=causal, window_size=window, **options)


def sdpa_by_document(q, k, v, cu_q, cu_k, sinks=None, causal=True, window_size=OPEN, visible_end=None):
    outs = []
    for (a, b), (c, d) in zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True):
        rows = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
        plain = causal and window_size == OPEN and b - a == d - c and visible_end is None
        ends = None if visible_end is None else visible_end[a:b]
        mask = None if plain else oracle.visible(b - a, d - c, causal, window_size, q.device, visible_end=ends)
        out = F.scaled_dot_product_attention(*rows, attn_mask=mask, is_causal=plain, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    out = torch.cat(outs)
    return out, 0 * out[..., 0].T


def assert_close(actual, expected, tolerance):
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].double(), value, rtol=tolerance, atol=tolerance, msg=lambda m: name + m)  # noqa: B023


def document_results(results, start, end, keys=None):
    """What belongs to the rows of one document; ``keys``: its (start, end) in k and v where that is another."""
    of_keys = slice(start, end) if keys is None else slice(*keys)
    rows = {"out": slice(start, end), "dq": slice(start, end), "dk": of_keys, "dv": of_keys}
    return {"lse": results["lse"][:, start:end], **{name: results[name][here] for name, here in rows.items()}}


def document_alone(case, start, end, keys=None):
    """A case of that one document, in separate copies."""
    alone, of_keys = copy.copy(case), slice(start, end) if keys is None else slice(*keys)
    alone.q, alone.dout = case.q[start:end].clone(), case.dout[start:end].clone()
    alone.k, alone.v = case.k[of_keys].clone(), case.v[of_keys].clone()
    alone.dlse = case.dlse[:, start:end].clone()
    alone.cu_seqlens = tuple(cu_seqlens_of([len(t)], case.q.device) for t in (alone.q, alone.k))
    if "visible_end" in case.options:
        alone.options = {**case.options, "visible_end": case.options["visible_end"][start:end].clone()}
    return alone


def packed_with(case, before, after):
    """The single document of ``case`` between other documents."""
    packed = Case([*before, case.q.shape[0], *after], heads=(case.q.shape[1], case.k.shape[1]), dim=case.q.shape[2],
                  dim_v=case.v.shape[2], dtype=case.q.dtype, device=case.q.device, tail=1, **case.options)  # fmt: skip
    start = sum(before)
    here = slice(start, start + case.q.shape[0])
    for name in ("q", "k", "v", "dout"):
        getattr(packed, name)[here] = getattr(case, name)
    packed.dlse[:, here] = case.dlse
    packed.sinks = case.sinks
    return packed, start
