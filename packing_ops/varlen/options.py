"""The options of an attention call in one value."""

from typing import Any, NamedTuple

import torch

from packing_ops._runtime.arguments import refuse_gradient, wide_sinks, window_sides
from packing_ops.keys import PrefixPaths


class AttentionOptions(NamedTuple):
    """The options of an attention call, under varlen_attention's names. Inside the package they travel in this one value.

    Public functions and hosts make it by checked_options. What is computed from an option is in this module: attend, of_heads
    and the methods, which give the arguments of the ops.
    """

    causal: bool = True
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    visible_end: torch.Tensor | None = None
    paths: PrefixPaths | None = None  # of a prefix tree: cu_seqlens_q are its segments, cu_seqlens_k those of the paths

    def arguments(self, plan: torch.Tensor | None) -> tuple[Any, ...]:
        """From sinks on, what varlen_attention's op and its backward take."""
        return self.sinks, self.causal, self.softmax_scale, *self.window_size, self.softcap, plan, self.visible_end

    def arguments_of_pages(self, plan: torch.Tensor | None) -> tuple[Any, ...]:
        """From sinks on, what paged_attention's op takes."""
        return self.sinks, self.causal, self.softmax_scale, *self.window_size, self.softcap, plan

    def arguments_of_tree(self, plan: torch.Tensor | None) -> tuple[Any, ...]:
        """After the tensors of the tree, what prefix_attention's op and its backward take: a tree is causal."""
        return self.softmax_scale, self.window_size[0], self.softcap, plan


def checked_options(
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    visible_end: torch.Tensor | None = None,
) -> AttentionOptions:
    """AttentionOptions whose window_size is a pair, whose sinks are float32 or float64, and whose scalars want no gradient."""
    for name, scalar in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if isinstance(scalar, torch.Tensor):
            refuse_gradient(scalar, name, "a number or a tensor")
    if sinks is not None:
        sinks = wide_sinks(sinks)
    return AttentionOptions(causal, softmax_scale, window_sides(window_size), softcap, sinks, visible_end)


def of_heads(options: AttentionOptions, heads: slice) -> AttentionOptions:
    """The options for some of the query heads."""
    return options if options.sinks is None else options._replace(sinks=options.sinks[heads])
