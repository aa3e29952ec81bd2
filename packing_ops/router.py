"""Balance of a mixture of experts over a packed row: statistics by document, and the loss that is made of them.

The balance losses of training frameworks are means over all rows of a batch: padding counts as tokens, and a document's
loss depends on its neighbours. Both statistics are sums over a document's slots (segment_sum), of the router's
probabilities and of what it has chosen.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import (
    FLOATS,
    check_real,
    check_tensor,
    described,
    integer,
    old_name,
    one_row,
    refuse_gradient,
    sum_dtype,
)
from packing_ops._runtime.autograd import call_below_autograd, implements, register_autograd
from packing_ops.metadata import PackedMetadata, cu_seqlens_of


@old_name("metadata")
def router_statistics(
    probabilities: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
    *,
    top_k: int | None = None,
    routed: torch.Tensor | None = None,
    copies: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count what a router sends to each expert, by document of a packed row. Differentiable in the sums of
    probabilities.

    Args:
        probabilities: float32, float64, bfloat16 or float16 ``[total, experts]``, of one layer: the softmax of the
            router's logits.
        cu_seqlens: PackedMetadata of the row, or its cu_seqlens, int32 or int64 ``[num_documents + 1]``.
        top_k: experts of a token, those with the largest probabilities.
        routed: in place of top_k what the router chose, bool ``[total, experts]`` (Megatron's routing_map).
        copies: ``[total]``, bool, integer or floating: how many tokens a slot counts for, such as a PrefixTree's
            copies; 0 for one that does not count. By default 1.

    Returns:
        (tokens_per_expert, probability_sums, tokens): ``[num_documents, experts]`` twice and ``[num_documents]``,
        float64 for float64, else float32. Slots after the last document are left out, even if they are NaN; an empty
        document has zeros.

    Example:
        >>> probabilities = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [1.0, 0.0]])
        >>> cu_seqlens = torch.tensor([0, 1, 3], dtype=torch.int32)  # the last slot is padding
        >>> routed = torch.tensor([[True, False], [False, True], [False, True], [True, False]])
        >>> tokens_per_expert, probability_sums, tokens = router_statistics(probabilities, cu_seqlens, routed=routed)
        >>> tokens_per_expert.tolist(), probability_sums.tolist(), tokens.tolist()
        ([[1.0, 0.0], [0.0, 2.0]], [[0.75, 0.25], [0.75, 1.25]], [1.0, 2.0])

    Raises:
        ValueError: shapes, dtypes or devices that do not fit, top_k out of range, both or neither of top_k and routed.

    Determinism: the same bits in every call: the order of additions depends only on a document's length.
    Synchronises: never.
    Memory: two copies of probabilities in the dtype of the results.
    Gradients: of probabilities, through probability_sums only; second derivatives too, no forward mode.
    """
    check_tensor(probabilities, "probabilities")
    if probabilities.dim() != 2 or probabilities.dtype not in FLOATS:
        raise ValueError(f"probabilities: expected floating [total, experts], got {described(probabilities)}")
    # Which experts each token goes to
    total, experts = probabilities.shape
    if (top_k is None) == (routed is None):
        raise ValueError("top_k: expected exactly one of top_k and routed")
    if top_k is not None:
        if not 1 <= (top_k := integer(top_k, "top_k")) <= experts:
            raise ValueError(f"top_k: expected 1 to {experts} experts, got {top_k}")
        chosen = probabilities.detach().topk(top_k, dim=-1).indices
        routed = torch.zeros_like(probabilities, dtype=torch.bool).scatter(1, chosen, True)
    else:
        check_tensor(routed, "routed")
        assert routed is not None
        if routed.dtype != torch.bool or routed.shape != probabilities.shape or routed.device != probabilities.device:
            raise ValueError(
                f"routed: expected bool [total={total}, experts={experts}] on {probabilities.device} like "
                f"probabilities, got {described(routed)} on {routed.device}"
            )
    # How many tokens each slot counts for
    if copies is not None:
        check_real(copies, "copies")
        refuse_gradient(copies, "copies")
        copies = one_row(copies, "copies").to(sum_dtype(probabilities.dtype))
        if copies.shape[0] != total or copies.device != probabilities.device:
            raise ValueError(
                f"copies: expected [total={total}] on {probabilities.device} like probabilities, got "
                f"{described(copies)} on {copies.device}"
            )
    # Add up by document
    cu_seqlens = cu_seqlens_of(cu_seqlens, total, like="probabilities")
    return gate.router_sums(probabilities, routed, cu_seqlens, copies)


@old_name("metadata")
def load_balancing_loss(
    probabilities: torch.Tensor | Sequence[torch.Tensor],
    cu_seqlens: PackedMetadata | torch.Tensor,
    *,
    top_k: int | None = None,
    routed: torch.Tensor | Sequence[torch.Tensor] | None = None,
    copies: torch.Tensor | None = None,
    by_document: bool = False,
) -> torch.Tensor:
    """Compute Switch Transformer's balance loss of a packed row: over its documents without padding, or for each
    document.

    With f the tokens that an expert gets per token, and P the mean of its probability: experts * sum of f * P. 1 for
    one expert per token and an even router, top_k for top_k of them, as in transformers; Megatron divides by top_k.

    Args:
        probabilities: as router_statistics, or one such tensor for each layer, over which the means are taken too, as
            transformers does: ``[logits.softmax(-1) for logits in output.router_logits]``.
        routed: as router_statistics; one for each layer where probabilities are.
        cu_seqlens, top_k, copies: as router_statistics. With a prefix tree's copies the loss is the one of its samples,
            one after the other.
        by_document: the loss of each document, as if the row held no other: Megatron's sequence-wise loss is
            their mean.

    Returns:
        A scalar, the loss over the tokens of all documents, or with ``by_document`` ``[num_documents]``. float64 for
        float64, else float32; 0 without tokens. The gradient is of P; f has none.

    Example:
        >>> probabilities = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.25, 0.75], [1.0, 0.0]])
        >>> cu_seqlens = torch.tensor([0, 1, 3], dtype=torch.int32)  # the last slot is padding
        >>> routed = torch.tensor([[True, False], [False, True], [False, True], [True, False]])
        >>> load_balancing_loss(probabilities, cu_seqlens, routed=routed)  # 2 * (1/3 * 1.5/3 + 2/3 * 1.5/3)
        tensor(1.)
        >>> load_balancing_loss(probabilities, cu_seqlens, routed=routed, by_document=True)
        tensor([1.5000, 1.2500])

    Raises:
        ValueError: as router_statistics; no layers, or other numbers of probabilities and routed.

    Source: Fedus et al., Switch Transformers (2021), equations 4 to 6.

    Determinism: the same bits in every call.
    Synchronises: never.
    Memory: as router_statistics, for each layer.
    Gradients: of probabilities, through their means only; second derivatives too, no forward mode.
    """
    layers = (
        [probabilities]
        if isinstance(probabilities, torch.Tensor) or not isinstance(probabilities, Iterable)
        else [*probabilities]
    )
    chosen = (
        [routed] * (len(layers) if routed is None else 1)
        if isinstance(routed, torch.Tensor) or not isinstance(routed, Iterable)
        else [*routed]
    )
    if not layers or len(chosen) != len(layers):
        raise ValueError(
            f"routed: expected one for each of 1 or more layers of probabilities, got {len(chosen)} for {len(layers)}"
        )
    found = [
        router_statistics(layer, cu_seqlens, top_k=top_k, routed=one, copies=copies)
        for layer, one in zip(layers, chosen, strict=True)
    ]
    tokens_per_expert, sums, tokens = (torch.stack(parts).sum(0) for parts in zip(*found, strict=True))
    if not by_document:
        tokens_per_expert, sums, tokens = tokens_per_expert.sum(0), sums.sum(0), tokens.sum(0)
    tokens = torch.where(tokens == 0, 1, tokens).unsqueeze(-1)
    return sums.shape[-1] * ((tokens_per_expert / tokens) * (sums / tokens)).sum(-1)


# --- the op ---


def _times(values: torch.Tensor, copies: torch.Tensor | None) -> torch.Tensor:
    """Multiply by copies. Slots that count for no token add nothing, even if they are NaN."""
    return values if copies is None else torch.where(copies[:, None] == 0, 0, values * copies[:, None])


@implements("router_sums")
def _router_sums(
    probabilities: torch.Tensor, routed: torch.Tensor, cu_seqlens: torch.Tensor, copies: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    dtype = sum_dtype(probabilities.dtype)
    ones = probabilities.new_ones(probabilities.shape[0], 1, dtype=dtype)
    values = _times(torch.cat([routed.to(dtype), probabilities.to(dtype), ones], 1), copies)
    sums = gate.segment_sum(values, cu_seqlens, None, False)
    experts = probabilities.shape[1]
    return sums[:, :experts].clone(), sums[:, experts:-1].clone(), sums[:, -1].clone()


def _router_sums_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    probabilities, _, cu_seqlens, copies = inputs
    tokens_per_expert, _, tokens = output
    ctx.mark_non_differentiable(tokens_per_expert, tokens)
    ctx.save_for_backward(cu_seqlens, copies)
    ctx.total, ctx.dtype = probabilities.shape[0], probabilities.dtype


def _router_sums_gradient(ctx: Any, _: None, grad: torch.Tensor | None, __: None) -> tuple[torch.Tensor | None, ...]:
    if grad is not None:
        cu_seqlens, copies = ctx.saved_tensors
        grad = call_below_autograd(gate.segment_sum_backward, grad, cu_seqlens, None, False, ctx.total, grad.dtype)
        grad = _times(grad, copies).to(ctx.dtype)
    return grad, None, None, None


register_autograd("router_sums", _router_sums_gradient, setup_context=_router_sums_context)
