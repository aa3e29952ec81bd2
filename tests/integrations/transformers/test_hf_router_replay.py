"""replay_routing: tokens go to the experts that were recorded, with the weights and gradients of the present model."""

import contextlib
import sys
from typing import ClassVar

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers import hf_families  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402
from transformers.models.aria import modeling_aria  # noqa: E402

from packing_ops.data import PaddingFreeCollator  # noqa: E402
from packing_ops.integrations import _chosen_experts, _router_replay  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops, replay_routing  # noqa: E402
from packing_ops.integrations.transformers.versions import source_of  # noqa: E402

EXPERTS, K, LAYERS, TOKENS = 8, 2, 3, 10
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": K,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES = {  # what is not in SIZES; the first layer of deepseek is dense
    "Mixtral": {"num_local_experts": EXPERTS},
    "Qwen3Moe": {"num_experts": EXPERTS},
    "Olmoe": {"num_experts": EXPERTS},
    "DeepseekV3": {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, **LATENT},
}


def made(family, device="cpu"):
    """A model whose experts differ, and the layers that have some."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES[family]})
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():  # routers and experts begin as zeros, or alike
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.to(device).eval(), LAYERS - 1 if family == "DeepseekV3" else LAYERS


def routers_of(model):
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


@contextlib.contextmanager
def recorded(model):
    """The experts that each router returns."""
    seen: ClassVar[list] = []
    hooks = [each.register_forward_hook(lambda _, args, out: seen.append(out[2])) for each in routers_of(model)]
    yield seen
    for hook in hooks:
        hook.remove()


def own_choice(model, tokens):
    with recorded(model) as seen, torch.no_grad():
        logits = model(tokens).logits
    return logits, torch.stack(seen, 1)  # [tokens, layers, k]


def tokens_on(device):
    return torch.randint(3, 64, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_s_choice_changes_nothing(family, device):
    model, layers = made(family, device)
    tokens = tokens_on(device)
    wanted, experts = own_choice(model, tokens)
    assert experts.shape == (TOKENS, layers, K)
    with replay_routing(model, experts.to(torch.int16)[None]), torch.no_grad():
        assert torch.equal(model(tokens).logits, wanted)
    assert all("forward" not in router.__dict__ for router in routers_of(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_those_given(family, device):
    model, _ = made(family, device)
    tokens = tokens_on(device)
    wanted, experts = own_choice(model, tokens)
    others = (experts + 1) % EXPERTS
    others[3] = -1  # not known: the router's
    with replay_routing(model, others), recorded(model) as seen:
        logits = model(tokens).logits
    found = torch.stack(seen, 1)
    known = torch.arange(TOKENS) != 3
    assert torch.equal(found[known], others[known])
    assert (found[3] >= 0).all()
    assert not torch.equal(logits, wanted)
    logits.sum().backward()
    assert all(router.weight.grad.abs().sum() > 0 for router in routers_of(model))
    after, _ = own_choice(model, tokens)
    assert torch.equal(after, wanted)


def test_weights_are_those_of_the_present_router(device):
    """By hand: softmax over all experts, of the chosen ones, that sum to 1."""
    model, _ = made("Mixtral", device)
    router = routers_of(model)[0]
    rows = torch.randn(TOKENS, SIZES["hidden_size"], device=device)
    given = torch.randint(0, EXPERTS, (TOKENS, LAYERS, K), device=device)
    with replay_routing(model, given):
        _, weights, experts = router(rows)
    shares = (rows @ router.weight.T).softmax(-1).gather(1, given[:, 0])
    torch.testing.assert_close(weights, shares / shares.sum(-1, keepdim=True))
    assert torch.equal(experts, given[:, 0])


def test_layers_may_be_all_of_the_model_s(device):
    model, _ = made("DeepseekV3", device)
    tokens = tokens_on(device)
    wanted, experts = own_choice(model, tokens)
    dense = torch.full_like(experts[:, :1], -1)
    with replay_routing(model, torch.cat([dense, experts], 1)), torch.no_grad():
        assert torch.equal(model(tokens).logits, wanted)


def test_a_packed_row_with_experts_of_its_documents(device):
    model, _ = made("Qwen3Moe", device)
    assert apply_packing_ops(model)
    documents = [torch.randint(3, 64, (length,), device=device) for length in (5, 1, 7)]
    examples, wanted = [], []
    for document in documents:
        _, experts = own_choice(model, document[None])
        examples.append({"input_ids": document, "routed_experts": (experts + 3) % EXPERTS})
        with replay_routing(model, examples[-1]["routed_experts"]), torch.no_grad():
            wanted.append(model(document[None]).logits[0])
    batch = PaddingFreeCollator(token_fields=["routed_experts"], capacity=16)(examples)
    batch.pop("labels")
    with replay_routing(model, batch.pop("routed_experts")), torch.no_grad():
        found = model(**batch).logits[0, :13]
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-4, atol=1e-4)


def test_gradient_checkpointing_routes_the_same_way_again(device):
    gradients = []
    for checkpointed in (False, True):
        model, _ = made("Qwen3Moe", device)
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        tokens = tokens_on(device)
        given = torch.randint(0, EXPERTS, (TOKENS, LAYERS, K), generator=torch.Generator().manual_seed(2)).to(device)
        with replay_routing(model, given):
            model(tokens, labels=tokens).loss.backward()
        gradients.append([router.weight.grad for router in routers_of(model)])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)


# --- every family that transformers has ---

REFUSED = {  # what the error says
    "phimoe": "expected routers that choose experts by one topk, got none in PhimoeForCausalLM",
    "jetmoe": "expected one router in each layer, got JetMoeTopKGating, JetMoeTopKGating in JetMoeForCausalLM",
    # by a token's id
    "deepseek_v4": "expected routers that choose experts by one topk, got none in DeepseekV4ForCausalLM",
}
if not hasattr(modeling_aria, "AriaTextTopKRouter"):  # in transformers 5.17 its experts choose
    REFUSED["aria_text"] = "expected routers that choose experts by one topk, got none in AriaTextForCausalLM"


def families_with_experts():
    classes = hf_families.mappings()["CAUSAL_LM"]
    return [name for name, (_, model) in classes.items() if "Experts" in source_of(sys.modules[model.__module__])]


class Recording(_chosen_experts.Chosen):
    """Keeps the experts that every router went on with."""

    seen: ClassVar[list] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        calls = self.calls
        found = super().__torch_function__(func, types, args, kwargs)
        if self.calls > calls:
            self.seen.append(found.indices.reshape(self.experts.shape))
        return found


def run(model, experts, monkeypatch):
    """Logits, and the experts that routers chose."""
    monkeypatch.setattr(_chosen_experts, "Chosen", Recording)
    monkeypatch.setattr(Recording, "seen", [])
    with replay_routing(model, experts), torch.no_grad():
        Recording.seen.clear()  # of the trial
        logits = model(torch.arange(3, 3 + len(experts))[None], use_cache=False).logits
    return logits, torch.stack(Recording.seen, 1)


@pytest.mark.parametrize("family", families_with_experts())
def test_families(family, monkeypatch):
    model, why = hf_families.made(family, *hf_families.mappings()["CAUSAL_LM"][family])
    if model is None or not any("Experts" in type(each).__name__ for each in model.modules()):
        pytest.skip(f"no recipe makes it with experts: {why}")
    if next(model.parameters()).is_meta:
        pytest.skip("too large to run")
    if family in REFUSED:
        with (
            pytest.raises(NotImplementedError, match=REFUSED[family]),
            replay_routing(model, torch.zeros(7, 2, 2).long()),
        ):
            pass
        return
    choices = [own[0][1] for own in _router_replay._stack(model) if own]
    num_experts, k, _ = choices[0]
    unknown = torch.full((7, len(choices), k), -1)
    with torch.no_grad():
        wanted = model(torch.arange(3, 10)[None], use_cache=False).logits
    logits, own = run(model, unknown, monkeypatch)
    assert torch.equal(logits, wanted)
    assert torch.equal(run(model, own, monkeypatch)[0], wanted)
    others = (own + 1) % num_experts
    logits, found = run(model, others, monkeypatch)
    assert torch.equal(found, others)
    assert not torch.equal(logits, wanted)


def test_experts_on_the_cpu_are_checked_for_routers_of_any_device():
    choice = _chosen_experts.Choice(EXPERTS, K, 2)
    with pytest.raises(ValueError, match=r"^routed_experts: expected -1 to 7, got"):
        _chosen_experts.of_layer(torch.full((TOKENS, K), EXPERTS), choice, "meta")


def test_what_is_refused():
    model, _ = made("Mixtral")
    tokens = tokens_on("cpu")
    _, experts = own_choice(model, tokens)
    for given, message in (
        (experts[:, :2], r"routed_experts: expected 3 layers with a router, or all 3, got 2"),
        (experts[..., :1], r"routed_experts: expected k=2 experts of a token, got 1"),
        (experts + EXPERTS, r"routed_experts: expected -1 to 7, got"),
        (experts[0], r"routed_experts: expected integers \[1, total, layers, k\], got int64 \[3, 2\]"),
        (experts.float(), r"routed_experts: expected integers"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"), replay_routing(model, given):
            pass
    with pytest.raises(ValueError, match=r"^routed_experts: expected 10 tokens as the router has, got 9$"):  # noqa: SIM117
        with replay_routing(model, experts[1:]):
            model(tokens)
    assert all("forward" not in router.__dict__ for router in routers_of(model))
    dense = tiny_model("qwen3")
    with (
        pytest.raises(
            NotImplementedError, match=r"^model: expected routers that choose experts by one topk, got none in Qwen3"
        ),
        replay_routing(dense, experts),
    ):
        pass
