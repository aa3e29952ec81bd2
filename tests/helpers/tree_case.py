"""Prefix trees for the tests of attention: random ones, inputs, results by every way of calling."""

import copy
import random

import torch

import packing_ops as po
from helpers import cu_seqlens_of
from helpers.attention_case import lse_dtype
from packing_ops.keys import prefix_paths
from packing_ops.reference import attention as oracle
from packing_ops.varlen import ops

FORK = 128


def drawn_tree(seed, segments, *, deep=False):
    """(lengths, parents) of a random tree in depth-first order; those with children have multiples of 128 tokens."""
    draw = random.Random(seed)
    parents, open_path = [], []
    for i in range(segments):
        keep = len(open_path) if deep else draw.randint(0, len(open_path))
        open_path = open_path[:keep]
        parents.append(open_path[-1] if open_path else -1)
        open_path.append(i)
    inner = {parent for parent in parents if parent >= 0}
    lengths = [FORK * draw.choice([0, 1, 1, 2]) if i in inner else draw.choice([0, 1, 5, 63, 64, 65, 127, 128, 129]) for i in range(segments)]  # fmt: skip
    return lengths, parents


def reads_of(monkeypatch):
    """Return a list to which each call of a tree's ops adds whether it reads k and v in place."""
    read_in_place, along_paths = [], ops.along_paths

    def spied(k, v, *given):
        rows_k, rows_v, row_of_key = along_paths(k, v, *given)
        assert (rows_k is k) == (rows_v is v) == (row_of_key is not None)
        read_in_place.append(rows_k is k)
        return rows_k, rows_v, row_of_key

    monkeypatch.setattr(ops, "along_paths", spied)
    return read_in_place


class Tree:
    """Inputs of a tree, and results of a call with every gradient."""

    def __init__(self, lengths, parents, *, heads=(2, 1), dim=8, dim_v=None, dtype=torch.float32, device="cpu", tail=0,
                 sinks=False, **options):  # fmt: skip
        self.cu_seqlens = cu_seqlens_of(lengths, device)
        self.parents = torch.tensor(parents, dtype=torch.int32, device=device)
        total = sum(lengths) + tail
        self.q = torch.randn(total, heads[0], dim, dtype=dtype, device=device)
        self.k = torch.randn(total, heads[1], dim, dtype=dtype, device=device)
        self.v = torch.randn(total, heads[1], dim_v or dim, dtype=dtype, device=device)
        self.sinks = torch.randn(heads[0], dtype=lse_dtype(dtype), device=device) if sinks else None
        self.dout = torch.randn(total, heads[0], dim_v or dim, dtype=dtype, device=device)
        self.dlse = torch.randn(heads[0], total, dtype=lse_dtype(dtype), device=device)
        self.options = options

    def results_of(self, attend, dtype=None):
        inputs = [self.q, self.k, self.v] + ([] if self.sinks is None else [self.sinks])
        leaves = [t.detach().to(dtype or t.dtype, copy=True).requires_grad_() for t in inputs]
        sinks = leaves[3] if self.sinks is not None else None
        out, lse = attend(*leaves[:3], sinks, **self.options)
        dlse = self.dlse.to(lse.dtype).masked_fill(lse == -float("inf"), 0)
        grads = torch.autograd.grad([out, lse], leaves, [self.dout.to(out.dtype), dlse])
        return {
            "out": out.detach(),
            "lse": lse.detach(),
            **dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False)),
        }

    def ours(self, **changed):
        def attend(q, k, v, sinks, **options):
            options = {"sinks": sinks, "parents": self.parents, "return_lse": True, **options, **changed}
            return po.varlen_attention(q, k, v, self.cu_seqlens, **options)

        return self.results_of(attend)

    def exact(self, dtype=torch.float64):
        def attend(q, k, v, sinks, **options):
            return oracle.prefix_attention(q, k, v, self.cu_seqlens, self.parents, sinks=sinks, **options)

        return self.results_of(attend, dtype)

    def paths(self):
        paths = prefix_paths(self.cu_seqlens, self.parents, self.q.shape[0])
        return paths.slot_of_key.long().split(paths.cu_seqlens.diff().tolist())

    def alone(self, rows):
        """The results of one path, as a separate document."""
        alone = copy.copy(self)
        for name in ("q", "k", "v", "dout"):
            setattr(alone, name, getattr(self, name)[rows])
        alone.dlse = self.dlse[:, rows]
        cu_seqlens = cu_seqlens_of([len(rows)], rows.device)

        def attend(q, k, v, sinks, **options):
            return po.varlen_attention(q, k, v, cu_seqlens, sinks=sinks, return_lse=True, **options)

        return alone.results_of(attend)
