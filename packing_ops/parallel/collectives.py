"""Collectives of a sequence group: started at once, waited for where the result is needed. In a compiled graph torch's
functional ones, which start and wait by themselves."""

import os
import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from packing_ops._runtime.arguments import wrong_type

# torch 2.13 has new names for these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group = dist.ProcessGroup | DeviceMesh  # a DeviceMesh of one dimension
Received = Callable[[], torch.Tensor]

# Groups of the process that this one is a fork of.
_inherited_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
# Of StepPlan.group_for, the innermost last; for all threads, as backward runs in another one.
planned: list[dist.ProcessGroup] = []


def _after_fork() -> None:
    # torch has no public list of all groups. Without this one a collective of such a group waits, as torch's does.
    _inherited_groups.update(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def check_process(group: dist.ProcessGroup) -> None:
    """Raise in a forked process: threads and connections of a group do not survive a fork, and a collective would
    wait for ever, past its timeout.
    """
    if not torch.compiler.is_compiling() and _inherited_groups and group in _inherited_groups:
        raise RuntimeError(
            "group: expected a process group that this process has made, got one of the process that it is a fork of, "
            "which has no collectives here (shard_packed and shard_indices send nothing)"
        )


def process_group(group: object) -> dist.ProcessGroup:
    """Return a process group: the given one, the one of a DeviceMesh of one dimension, for None the one of all
    processes, or of the plan.
    """
    if group is None and planned:
        return planned[-1]
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("group: expected a process group, got None before torch.distributed.init_process_group")
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            named = f"{group.ndim} dimensions {group.mesh_dim_names or ''}".rstrip()
            raise ValueError(f"group: expected a DeviceMesh of one dimension, as mesh[name] gives it, got {named}")
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: expected a group that this process is in, got one of other processes")
    raise wrong_type("group", "a torch.distributed process group or a DeviceMesh of one dimension", group)


def as_16_byte_elements(rows: torch.Tensor) -> torch.Tensor:
    """Return a view of the same memory in elements of 16 bytes (complex128) if strides allow, else ``rows``: torch
    copies element by element, which with 2 bytes has a third of the speed.
    """
    if torch.compiler.is_compiling() or rows.stride(-1) != 1:
        return rows
    step = 16 // rows.element_size()
    if any(each % step for each in (*rows.stride()[:-1], rows.storage_offset(), rows.shape[-1])):
        return rows
    return rows.view(torch.complex128)


def dense(rows: torch.Tensor) -> torch.Tensor:
    """Return rows.contiguous(), copied 16 bytes at a time if strides allow."""
    return rows if rows.is_contiguous() else as_16_byte_elements(rows).contiguous().view(rows.dtype)


def rows_at(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows.index_select(0, index), copied 16 bytes at a time if strides allow."""
    return as_16_byte_elements(rows).index_select(0, index).view(rows.dtype)


def start_all_to_all(
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    receive: Sequence[int] | None = None,
    send: Sequence[int] | None = None,
) -> Received:
    """Send rows ``[sum(send), ...]`` to the ranks, in their order; equal parts without ``receive`` and ``send``."""
    rows = dense(rows)
    of_ranks, to_ranks = (None if each is None else list(each) for each in (receive, send))
    if torch.compiler.is_compiling():
        return partial(functional.wait_tensor, functional.all_to_all_single(rows, of_ranks, to_ranks, group))
    check_process(group)
    size = rows.shape[0] if receive is None else sum(receive)
    received = rows.new_empty(size, *rows.shape[1:])
    if rows.is_cuda:
        work = _exchange_with_others(received, rows, group, of_ranks, to_ranks)
    else:
        work = dist.all_to_all_single(received, rows, of_ranks, to_ranks, group=group, async_op=True)
    return _finish(work, received)


def _exchange_with_others(
    received: torch.Tensor,
    rows: torch.Tensor,
    group: dist.ProcessGroup,
    receive: list[int] | None,
    send: list[int] | None,
) -> dist.Work:
    """Exchange with the other ranks only: NCCL would send this rank's part to itself, at the speed of a link and in
    the time of the others.
    """
    ranks, own = group.size(), group.rank()
    to, of = (
        list(tensor.tensor_split(ranks) if counts is None else tensor.split(counts))
        for tensor, counts in ((rows, send), (received, receive))
    )
    nothing = rows.new_empty(0)
    of_own, to_own = of[own], to[own]
    of[own] = to[own] = nothing
    work = dist.all_to_all(of, to, group=group, async_op=True)
    of_own.copy_(to_own)  # while the others are under way
    return work


def start_all_gather(rows: torch.Tensor, group: dist.ProcessGroup) -> Received:
    """Gather the rows of all ranks, in their order: ``[ranks * rows, ...]``. This rank's are copied here, not by the
    collective.
    """
    if torch.compiler.is_compiling():
        return partial(functional.wait_tensor, functional.all_gather_tensor(rows.contiguous(), 0, group))
    check_process(group)
    size = rows.shape[0]
    gathered = rows.new_empty(group.size() * size, *rows.shape[1:])
    own = gathered.narrow(0, group.rank() * size, size)
    to, of = as_16_byte_elements(own), as_16_byte_elements(rows)
    to.copy_(of) if to.dtype == of.dtype else own.copy_(rows)
    return _finish(_all_gather(gathered, own, group=group, async_op=True), gathered)


def start_sum_of_parts(rows: torch.Tensor, group: dist.ProcessGroup) -> Received:
    """Sum this rank's part of ``[ranks * rows, ...]`` over the ranks in their order, in float32 inside.

    A reduce-scatter would round to the dtype after each addition, in an order that the library picks.
    """
    received = start_all_to_all(rows, group)

    def total() -> torch.Tensor:
        parts = received()
        return parts.view(group.size(), -1, *parts.shape[1:]).sum(0)

    return total


def no_second_derivative(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Refuse a second derivative through an autograd.Function of collectives: torch cannot differentiate them, and
    would silently take the gradients for constants.

    Args:
        name: of the public function.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def first_alone(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            with torch.no_grad():
                found = backward(ctx, *gradients)
            wanted = [each for each in gradients if each is not None and each.requires_grad]
            if not torch.is_grad_enabled() or not wanted:
                return found
            return tuple(None if each is None else _Refusal.apply(each, wanted[0], name) for each in found)

        return first_alone

    return decorate


class _Refusal(torch.autograd.Function):
    """A gradient that raises when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, _wanted: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError(f"packing_ops.parallel.{ctx.name} has no second derivative")


def _finish(work: dist.Work, received: torch.Tensor) -> Received:
    """Return a function that waits for ``work`` and returns ``received``: the current stream waits, not the host.
    torch holds what is sent and received until then.
    """

    def wait() -> torch.Tensor:
        work.wait()
        return received

    return wait
