"""``patch_router``: megatron-core's balance losses of a mixture of experts, of a packed row's documents.

To megatron-core a thd row is one sequence and its padding are tokens. Routers receive no packed_seq_params. The
patched TransformerLayer.forward keeps them in a thread-local, which the patched router reads.

``replay_routing``: experts that another program has chosen: training routes as sampling did.
"""

import contextlib
import inspect
import threading
from collections.abc import Iterator
from typing import Any

import megatron.core
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer

from packing_ops._runtime.arguments import check_tensor
from packing_ops._runtime.batch_cache import kept_with
from packing_ops.integrations._chosen_experts import Choice, check_experts, of_layer, replaying
from packing_ops.integrations._patching import Patch
from packing_ops.integrations.megatron.varlen_call import spans_of
from packing_ops.router import router_statistics


def patch_router() -> None:
    """Let megatron-core's balance losses of packed (thd) rows count documents; calling it twice is harmless.

    ``seq_aux_loss`` is the mean over the documents of each document's loss. ``aux_loss``, ``global_aux_loss``, the
    z-loss and expert_bias count real tokens, as with a ``padding_mask`` of the others: not the padding inside
    documents, which ``cu_seqlens_q_padded`` with ``cu_seqlens_q`` and preprocess_packed_seqs show, nor that at the end
    of a row, which ``packed_seq_params(metadata)`` tells. Rows that are not packed run as before. Sequence parallelism
    is served.

    Example:
        >>> patch_router()
        >>> revert_router()

    Raises:
        NotImplementedError: a megatron-core whose routers take no padding_mask; those of 0.16 do.

    In the forward of a training step:
        NotImplementedError: context parallelism; a layer that recomputes only its experts ("moe" or "mlp" of
            recompute_modules), or overlaps their communication: the router then runs outside of its layer.
        ValueError: a prefix tree.
    """
    if "padding_mask" not in inspect.signature(TopKRouter.routing).parameters:
        version = megatron.core.__version__
        raise NotImplementedError(f"megatron-core: expected TopKRouter.routing with padding_mask, got {version}")
    for patch in _PATCHES:
        patch.apply()


def revert_router() -> None:
    """Put megatron-core's functions back."""
    for patch in _PATCHES:
        patch.revert()


class _Now(threading.local):
    """The packed_seq_params of the layer that runs in this thread."""

    params: PackedSeqParams | None = None


_now = _Now()


def _with_documents(stock: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Run megatron-core's TransformerLayer.forward, whose router knows the documents."""
        params, before = kwargs.get("packed_seq_params"), _now.params
        packed = getattr(params, "qkv_format", None) == "thd"
        if packed and self.training and isinstance(getattr(self.mlp, "router", None), TopKRouter):
            # What takes the router out of its layer's forward, or its rows out of their order
            if getattr(self, "recompute_mlp", False) or getattr(self.mlp, "moe_layer_recompute", False):
                raise NotImplementedError(
                    "recompute_modules: expected no 'moe' and 'mlp' under patch_router, got "
                    f"{self.config.recompute_modules} (recompute_granularity='full' is served)"
                )
            for name, least in (("context_parallel_size", 1), ("overlap_moe_expert_parallel_comm", False)):
                if (value := getattr(self.config, name, least)) != least:
                    raise NotImplementedError(f"{name}: expected {least} under patch_router, got {value}")
        _now.params = params if packed else None
        try:
            return stock(self, *args, **kwargs)
        finally:
            _now.params = before

    return forward


def _without_padding(stock: Any) -> Any:
    def routing(self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Any:
        """Run megatron-core's TopKRouter.routing, padding_mask with the padding of a packed row."""
        if _now.params is not None and self.training and torch.is_grad_enabled():
            rows = logits.shape[0]
            padding = _padding_of(_now.params, rows, _first_row(self, rows))
            if padding is not None:
                padding_mask = padding if padding_mask is None else padding_mask | padding
        return stock(self, logits, padding_mask=padding_mask)

    return routing


def _by_document(stock: Any) -> Any:
    def _apply_seq_aux_loss(
        self: Any,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Any:
        """Compute megatron-core's TopKRouter._apply_seq_aux_loss for each document of a packed row."""
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if _now.params is None or coefficient == 0:
            return stock(self, probs, scores_for_aux_loss, routing_map, seq_length, bsz, with_padding_mask)
        # Sums of each document, over all ranks that hold a part of it
        first = _first_row(self, seq_length)
        cu_seqlens = (spans_of(_now.params).q_slots - first).clamp(0, seq_length)
        # Of padding both are 0: the tokens are counted by what they were routed to.
        routed, sums, _ = router_statistics(scores_for_aux_loss, cu_seqlens, routed=routing_map.bool())
        local_tokens = routed.sum() / self.topk
        routed = reduce_from_tensor_model_parallel_region(routed, self.tp_cp_group)
        tokens = routed.sum(-1) / self.topk
        # The loss of a document is as if the row held no other; the row's is their mean
        losses = (sums * routed).sum(-1) / tokens.square().clamp(min=1)
        loss = losses.sum() / (tokens > 0).sum().clamp(min=1) * (routed.shape[1] * coefficient / self.topk)
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, loss, "seq_load_balancing_loss", self.tp_cp_group, valid_token_count=local_tokens
        )

    return _apply_seq_aux_loss


def _first_row(router: Any, rows: int) -> int:
    """Return the place in the packed row of the first of this rank's rows."""
    return router.tp_cp_group.rank() * rows if router.config.sequence_parallel else 0


def _padding_of(params: PackedSeqParams, rows: int, first: int) -> torch.Tensor | None:
    """Return bool ``[rows, 1]``, True at rows without a token; None if every row is one."""
    spans, tokens = spans_of(params), getattr(params, "num_tokens", None)
    lengths = getattr(params, "document_lengths", None)
    if spans.q is spans.q_slots and tokens is None and lengths is None:
        return None
    given = spans.q if lengths is None else lengths

    def make() -> torch.Tensor:
        slots = torch.arange(first, first + rows, device=spans.q_slots.device)
        document = torch.searchsorted(spans.q_slots[1:].contiguous(), slots, right=True)
        document = document.clamp(max=spans.q_slots.shape[0] - 2)
        place = slots - spans.q_slots[document]
        padding = place >= (given.diff() if lengths is None else given)[document]
        return (padding if tokens is None else padding | (slots >= tokens))[:, None]

    return kept_with((spans.q_slots, given), ("padding", rows, first, tokens), make)


_PATCHES = [
    Patch(TransformerLayer, "forward", _with_documents),
    Patch(TopKRouter, "routing", _without_padding),
    Patch(TopKRouter, "_apply_seq_aux_loss", _by_document),
]


# --- experts that another program has chosen ---


@contextlib.contextmanager
def replay_routing(model: torch.nn.Module, routed_experts: torch.Tensor) -> Iterator[None]:
    """Let every router of the model, within the block, send tokens to these experts, with the weights that it gives
    them now.

    It serves what megatron-core's RouterReplay does, and more: -1, rows of sequence-parallel ranks, versions without
    it. Balance losses count the tokens where they were sent.

    Args:
        model: or a part of it, as a pipeline stage has.
        routed_experts: integers ``[batch, total, layers, k]`` or ``[total, layers, k]``, of the tokens that the model
            is given: under context parallelism this rank's, under sequence parallelism those of all its ranks.
            ``layers`` are all decoder layers of the whole model. -1 (padding, or not known) leaves the choice to the
            router.

    The backward belongs inside of the block where activation recompute runs routers again.

    Example:
        >>> with replay_routing(model, batch["routed_experts"]):  # needs a model # doctest: +SKIP
        ...     losses = model(ids, None, None, labels=targets, packed_seq_params=params)

    Raises:
        NotImplementedError: no router; sinkhorn, or a fused router, which choose by no topk of torch; multi-token
            prediction.
        ValueError: another shape, another number of layers or of experts, an expert that the router does not have (read
            where routed_experts are on the CPU), other tokens than the model gets.
    """
    check_tensor(routed_experts, "routed_experts")
    check_experts(routed_experts)
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    if not routers:
        raise NotImplementedError(f"model: expected routers of megatron-core, got none in {type(model).__name__}")
    of_rows = routed_experts[None] if routed_experts.dim() == 3 else routed_experts
    # megatron-core's order: all sequences' first tokens, then their second ones
    by_layer = of_rows.transpose(0, 1).flatten(0, 1).long().unbind(1)
    with contextlib.ExitStack() as stack:
        for router in routers:
            config = router.config
            others = {
                "moe_router_load_balancing_type='sinkhorn'": router.routing_type == "sinkhorn",
                "moe_router_fusion=True": getattr(config, "moe_router_fusion", False),
                "one of multi-token prediction": router.layer_number > config.num_layers,
            }
            if other := next((name for name, found in others.items() if found), None):
                raise NotImplementedError(
                    f"model: expected routers of decoder layers that choose by torch's topk, got {other}"
                )
            if len(by_layer) != config.num_layers:
                raise ValueError(f"routed_experts: expected all {config.num_layers} layers, got {len(by_layer)}")
            choice = Choice(config.num_moe_experts, router.topk, 2)
            experts = of_layer(by_layer[router.layer_number - 1], choice, router.weight.device)
            if config.sequence_parallel:
                ranks = config.tensor_model_parallel_size
                experts = experts.chunk(ranks)[router.tp_cp_group.rank() % ranks]
            stack.enter_context(replaying(router, "routing", experts, choice))
        yield
