"""replay_routing in models of megatron-core: tokens go to the experts that were recorded."""

import importlib.util

import pytest
import torch

pytest.importorskip("megatron.core")

from helpers import assert_same
from helpers.megatron_case import (
    RECOMPUTED,
    SHAPE,
    VOCABULARY,
    causal_mask,
    config_of,
    one_process,  # noqa: F401
    parallel,
    spawn,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter

import packing_ops as po
from packing_ops.data import PackedCollator
from packing_ops.integrations.megatron import packed_seq_params, replay_routing, use_packing_ops

EXPERTS, K, LAYERS = 6, 2, SHAPE["num_layers"]
ROUTED = {"num_moe_experts": EXPERTS, "moe_router_topk": K, "moe_aux_loss_coeff": 0.3, "add_bias_linear": False}


@pytest.fixture(autouse=True)
def without_transformer_engine(monkeypatch):
    if importlib.util.find_spec("transformer_engine") is None:  # megatron-core 0.16 takes it to be there
        monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    monkeypatch.setattr(moe_utils, "_MOE_LAYER_WISE_LOGGING_TRACKER", {}, raising=False)


def model_of(device, **more):
    config = config_of(**{**ROUTED, **more})
    spec = use_packing_ops(get_gpt_decoder_block_spec(config, use_transformer_engine=False))
    torch.manual_seed(0)
    return GPTModel(
        config, spec, VOCABULARY, 256, position_embedding_type="rope", share_embeddings_and_output_weights=False
    ).to(device)


def maps_of(model):
    """The routing_map [tokens, experts] of each router's latest call."""
    found = {}
    for name, router in model.named_modules():
        if isinstance(router, TopKRouter):
            router.register_forward_hook(lambda _, args, out, name=name: found.update({name: out[1]}))
    return found


def experts_of(maps):
    """[tokens, layers, k]; ascending."""
    return torch.stack([each.nonzero()[:, 1].view(-1, K) for each in maps.values()], 1)


ROUTERS = [
    {},
    {"moe_router_pre_softmax": True},
    {"moe_router_score_function": "sigmoid", "moe_router_num_groups": 2, "moe_router_group_topk": 1},
]


@pytest.mark.parametrize("more", ROUTERS, ids=lambda more: "-".join(more))
def test_experts_of_a_packed_row(megatron, device, more):
    """The model's choices change nothing; others are gone to, and -1 is left to the router."""
    model = model_of(device, **more).eval()
    maps = maps_of(model)
    metadata = po.PackedMetadata.from_lengths([5, 1, 7], device=device)
    ids = torch.randint(1, VOCABULARY, (1, 13), device=device)

    def run(experts=None):
        given = {"packed_seq_params": packed_seq_params(metadata)}
        if experts is None:
            return model(ids, None, None, **given)
        with replay_routing(model, experts):
            return model(ids, None, None, **given)

    wanted = run()
    own = experts_of(maps)
    torch.testing.assert_close(run(own), wanted)
    assert_same(run(torch.full_like(own, -1)), wanted)
    others = (own + 1) % EXPERTS
    others[3] = -1
    out = run(others.to(torch.int16)[None])
    known = torch.arange(13) != 3
    assert torch.equal(experts_of(maps)[known], others[known].sort(-1).values)
    assert not torch.allclose(out, wanted)
    assert_same(run(), wanted)
    assert not any("routing" in vars(module) for module in model.modules())


@pytest.mark.parametrize("recompute", ["", "full, uniform"])
def test_gradients_of_rows_that_are_not_packed(megatron, device, recompute):
    """Two sequences [2, 6]: megatron-core has their first tokens first. Each trains as without the other."""
    model = model_of(device, **(RECOMPUTED[recompute] if recompute else {}), moe_aux_loss_coeff=0.0)
    ids = torch.randint(1, VOCABULARY, (2, 6), device=device)
    experts = torch.randint(0, EXPERTS // 2, (2, 6, LAYERS, K), device=device)
    experts[..., 1] += EXPERTS // 2  # two different ones

    def gradients(rows):
        model.zero_grad()
        for row in rows:
            with replay_routing(model, experts[row]):
                model(ids[row], None, causal_mask(6, device)).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted = gradients([slice(0, 1), slice(1, 2)])
    found = gradients([slice(0, 2)])
    assert found.keys() == wanted.keys()
    assert any("router" in name and gradient.any() for name, gradient in found.items())
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4 * max(1.0, gradient.abs().max().item()))


def test_rows_of_the_collator(megatron, device):
    model = model_of(device).eval()
    maps = maps_of(model)
    draw = torch.Generator().manual_seed(0)
    examples = [
        {
            "input_ids": [7] * n,
            "num_actions": 1,
            "routed_experts": torch.randn(n, LAYERS, EXPERTS, generator=draw).topk(K)[1],
        }
        for n in (5, 8)
    ]
    collator = PackedCollator(16, tp_size=4, token_fields=["routed_experts"])
    batch = collator(examples)
    batch["sequences"] = batch["sequences"].to(device)
    params = packed_seq_params(collator.packed_metadata(batch))
    with replay_routing(model, batch["routed_experts"]):
        model(batch["sequences"], None, None, packed_seq_params=params)
    is_token = batch["attention_mask"][0].bool()
    assert torch.equal(experts_of(maps).cpu()[is_token], batch["routed_experts"][0, is_token].long().sort(-1).values)


def sequence_parallel_part():
    """The map of the experts that this rank's rows were sent to."""
    if importlib.util.find_spec("transformer_engine") is None:
        moe_utils.te_general_gemm = None
    size = torch.distributed.get_world_size()
    sizes = {"tensor_model_parallel_size": size, "sequence_parallel": size > 1}
    experts = torch.randn(16, LAYERS, EXPERTS, generator=torch.Generator().manual_seed(0)).topk(K)[1]
    with parallel(tensor_model_parallel_size=size):
        torch.manual_seed(1)
        config = config_of(**{**ROUTED, "moe_aux_loss_coeff": 0.0}, **sizes)
        router = TopKRouter(config, pg_collection=moe_utils.get_default_pg_collection())
        router.set_layer_number(2)
        torch.nn.init.normal_(router.weight, std=0.5)
        part = torch.randn(16, 1, SHAPE["hidden_size"]).chunk(size)[torch.distributed.get_rank()]
        with replay_routing(router, experts):
            _, routing_map = router(part)
    return routing_map, experts[:, 1]


def test_rows_of_sequence_parallel_ranks(tmp_path):
    maps, experts = zip(*spawn(sequence_parallel_part, 2, tmp_path), strict=True)
    assert torch.equal(torch.cat(maps).nonzero()[:, 1].view(-1, K), experts[0].sort(-1).values)


def test_what_is_refused(megatron, device):
    model = model_of(device)
    experts = torch.zeros(4, LAYERS, K, dtype=torch.int64, device=device)
    for given, message in (
        (experts[:, :1], f"routed_experts: expected all {LAYERS} layers, got 1"),
        (experts[..., :1], "routed_experts: expected k=2 experts of a token, got 1"),
        (experts.cpu() + EXPERTS, "routed_experts: expected -1 to 5, got"),
        (experts[0], r"routed_experts: expected integers \[1, total, layers, k\]"),
        (experts.float(), "routed_experts: expected integers"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"), replay_routing(model, given):
            pass
    with pytest.raises(ValueError, match=r"^routed_experts: expected 6 tokens as the router has, got 4$"):  # noqa: SIM117
        with replay_routing(model, experts):
            model(torch.ones(1, 6, dtype=torch.int64, device=device), None, causal_mask(6, device))
    assert not any("routing" in vars(module) for module in model.modules())
    with pytest.raises(NotImplementedError, match=r"^model: expected routers of megatron-core, got none in Linear"):  # noqa: SIM117
        with replay_routing(torch.nn.Linear(2, 2), experts):
            pass
    sinkhorn = model_of(device, moe_router_load_balancing_type="sinkhorn", moe_aux_loss_coeff=0.0)
    with (
        pytest.raises(
            NotImplementedError, match=r"^model: expected routers .* got moe_router_load_balancing_type='sinkhorn'"
        ),
        replay_routing(sinkhorn, experts),
    ):
        pass
