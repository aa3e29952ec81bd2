"""The options of an attention call in one value."""

from typing import Any, NamedTuple, TypedDict

import torch

from packing_ops._runtime.arguments import check_tensor, described, refuse_gradient, window_sides


class AttentionKeywords(TypedDict, total=False):
    """Names the options of an attention call where overloads take them all. Their defaults are the functions'."""

    causal: bool
    softmax_scale: float | None
    window_size: tuple[int, int]
    softcap: float
    sinks: torch.Tensor | None
    visible_end: torch.Tensor | None


class AttentionOptions(NamedTuple):
    """The options of an attention call, under varlen_attention's names. Inside the package they travel in this one
    value.

    Public functions and hosts make it by checked_options. What is computed from an option is in this module: attend,
    of_heads and the methods, which give the arguments of the ops.
    """

    causal: bool = True
    softmax_scale: float | None = None
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    visible_end: torch.Tensor | None = None

    def arguments(self, plan: torch.Tensor | None) -> tuple[Any, ...]:
        """Return what varlen_attention's op and its backward take, from sinks on; that of pages no visible_end."""
        return self.sinks, self.causal, self.softmax_scale, *self.window_size, self.softcap, plan, self.visible_end

    def arguments_of_tree(self, plan: torch.Tensor | None) -> tuple[Any, ...]:
        """Return what prefix_attention's op and its backward take after the tensors of the tree: a tree is causal."""
        return self.softmax_scale, self.window_size[0], self.softcap, plan


def wide_sinks(sinks: torch.Tensor) -> torch.Tensor:
    """Return sinks as float32, unless float64; a complex one is left for the op to refuse."""
    check_tensor(sinks, "sinks")
    return sinks if sinks.dtype == torch.float64 or sinks.is_complex() else sinks.float()


def checked_options(
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    visible_end: torch.Tensor | None = None,
) -> AttentionOptions:
    """Return AttentionOptions whose window_size is a pair, whose sinks are float32 or float64, and whose scalars want
    no gradient.
    """
    for name, scalar in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if isinstance(scalar, torch.Tensor):
            refuse_gradient(scalar, name, "a number or a tensor")
    if sinks is not None:
        sinks = wide_sinks(sinks)
    return AttentionOptions(causal, softmax_scale, window_sides(window_size), softcap, sinks, visible_end)


def refuse_in_tree(options: AttentionOptions) -> None:
    """Raise ValueError for options that a prefix tree does not have."""
    if not options.causal or options.window_size[1] > 0:
        given = f"causal={options.causal}, window_size={options.window_size}"
        raise ValueError(f"causal, window_size: expected a causal call for a prefix tree, got {given}")
    if options.visible_end is not None:
        came = described(options.visible_end)
        raise ValueError(f"visible_end: expected None beside a prefix tree, which is causal, got {came}")


def of_heads(options: AttentionOptions, heads: slice) -> AttentionOptions:
    """Return the options for some of the query heads."""
    return options if options.sinks is None else options._replace(sinks=options.sinks[heads])
