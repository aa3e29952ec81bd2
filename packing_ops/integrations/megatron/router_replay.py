"""Experts that another program has chosen, in a model of megatron-core: training routes as sampling did."""

import contextlib
from collections.abc import Iterator

import torch
from megatron.core.transformer.moe.router import TopKRouter

from packing_ops._runtime.arguments import check_tensor
from packing_ops.integrations._chosen_experts import Choice, check_experts, of_layer, replaying


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
