"""Layers with a state over several ranks: the state of a document that goes on travels on, and its gradient back.

A rank waits for the one before it where a document lies on both: the state before its first slot comes from there.
Not by batch_isend_irecv, of which NCCL reminds: as the first call of a group it would need all of its ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from packing_ops._runtime.batch_cache import kept_with
from packing_ops.parallel.collectives import check_process

Scan = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class RankDocuments(NamedTuple):
    """Where the documents of a row lie in this rank's slots: the parts that are here, without empty ones."""

    cu_seqlens: torch.Tensor  # int32 [parts + 1], counted from the rank's first slot
    from_previous: bool  # the first part goes on with a document of the rank before
    to_next: bool  # the last part's document goes on on the next rank
    group: dist.ProcessGroup

    @torch.compiler.disable(reason="packing_ops: a state is sent to the next rank")
    def scanned(
        self, scan: Scan, inputs: Sequence[torch.Tensor | None], shape: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return out of ``scan(initial_state=..., output_final_state=...)`` of this rank's rows.

        Args:
            scan: causal_conv1d, gated_delta_rule or mamba2_scan with all else given, these cu_seqlens too.
            inputs: its tensors; gradients flow back over the ranks where one of them wants a gradient.
            shape, dtype: of the state of one document.
        """
        check_process(self.group)
        initial = None
        if self.from_previous:
            tensors = [each for each in inputs if each is not None]
            anchor = next((each for each in tensors if each.requires_grad), tensors[0])
            first = _FromPrevious.apply(anchor, torch.Size(shape), dtype, self.group)
            initial = torch.cat([first[None], first.new_zeros(self.cu_seqlens.numel() - 2, *shape)])
        out, final = scan(initial_state=initial, output_final_state=self.to_next)
        return out if final is None else _ToNext.apply(out, final[-1], self.group)


def documents_on_rank(cu_seqlens: torch.Tensor, rows: int, group: dist.ProcessGroup) -> RankDocuments:
    """Return where a row's documents lie in this rank's slots, which are contiguous. cu_seqlens are read once."""
    begin = group.rank() * rows

    def make() -> tuple[torch.Tensor, bool, bool]:
        edges = cu_seqlens.cpu().long()
        total, end = int(edges[-1]), begin + rows
        local = edges.clamp(begin, max(begin, min(end, total))).unique() - begin
        starts = {*edges.tolist()}
        from_previous, to_next = (edge < total and edge not in starts for edge in (begin, end))
        return local.int().to(cu_seqlens.device), from_previous, to_next

    local, from_previous, to_next = kept_with((cu_seqlens,), ("documents on a rank", begin, rows), make)
    return RankDocuments(local, from_previous, to_next, group)


class _FromPrevious(torch.autograd.Function):
    """The state that the rank before has sent."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, shape: torch.Size, dtype: torch.dtype, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.group = group
        return _received(anchor.new_empty(shape, dtype=dtype), group, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dist.send(gradient.contiguous(), group=ctx.group, group_dst=ctx.group.rank() - 1)
        return None, None, None, None


class _ToNext(torch.autograd.Function):
    """Out, when the state is on its way to the next rank."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, state: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.shape, ctx.dtype = group, state.shape, state.dtype
        dist.send(state.contiguous(), group=group, group_dst=group.rank() + 1)
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, _received(gradient.new_empty(ctx.shape, dtype=ctx.dtype), ctx.group, 1), None


def _received(buffer: torch.Tensor, group: dist.ProcessGroup, step: int) -> torch.Tensor:
    dist.recv(buffer, group=group, group_src=group.rank() + step)
    return buffer
