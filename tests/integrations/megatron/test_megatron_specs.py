"""use_packing_ops: which part of a spec it changes, and the models that it makes."""

import functools
import importlib.util
import inspect

import pytest
import torch
import torch.nn.functional as F
from helpers import cu_seqlens_of

pytest.importorskip("megatron.core")

from helpers.megatron_case import LENGTHS, SHAPE, VOCABULARY, assert_near, config_of, one_process, thd_params  # noqa: F401
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig

from packing_ops.integrations.megatron import PackingDotProductAttention, use_packing_ops
from packing_ops.reference.attention import varlen_attention as reference

pytestmark = pytest.mark.usefixtures("megatron")


def layers_of(spec):
    return getattr(getattr(spec, "submodules", spec), "layer_specs", None) or [spec]


def core_attentions(spec):
    return [layer.submodules.self_attention.submodules.core_attention for layer in layers_of(spec)]


class TEDotProductAttention(torch.nn.Module):
    """Replaces TransformerEngine's."""

    __module__ = "megatron.core.extensions.transformer_engine"


class TELinear(torch.nn.Module):
    """Replaces its norm and projection in one, which local specs have not."""


class TEProvider(LocalSpecProvider):
    """What megatron-core makes TransformerEngine's specs of, where it is not installed."""

    def core_attention(self):
        return TEDotProductAttention

    def fuse_layernorm_and_linear(self):
        return True

    def column_parallel_layer_norm_linear(self):
        return TELinear


@pytest.fixture
def te_specs(monkeypatch):
    for name, stand_in in (("TESpecProvider", TEProvider), ("TENorm", TELinear)):
        monkeypatch.setattr(gpt_layer_specs, name, stand_in, raising=False)


def unlike_layers(**more):
    config = config_of(num_moe_experts=2, moe_layer_freq=[0, 1], add_bias_linear=False)
    return get_gpt_decoder_block_spec(config, **more)


SPECS = {
    "local layer": get_gpt_layer_local_spec,
    "multi-latent attention": lambda: get_gpt_layer_local_spec(multi_latent_attention=True),
    "local block": lambda: unlike_layers(use_transformer_engine=False),
    "TransformerEngine's layer": get_gpt_layer_with_transformer_engine_spec,
    "TransformerEngine's block": lambda: unlike_layers(use_transformer_engine=True),
}


@pytest.mark.parametrize("name", SPECS)
def test_use_packing_ops_changes_a_copy(name, te_specs):
    spec = SPECS[name]()
    before = core_attentions(spec)
    assert set(before) == {TEDotProductAttention if "Engine" in name else DotProductAttention}
    changed = use_packing_ops(spec)
    assert core_attentions(spec) == before
    assert set(core_attentions(changed)) == {PackingDotProductAttention}
    assert changed != spec
    for layer, stock in zip(layers_of(changed), before, strict=True):
        layer.submodules.self_attention.submodules.core_attention = stock
    assert changed == spec  # norms, projections, experts


def test_a_function_that_makes_a_spec():
    """As Megatron-Bridge's providers hold one, which they look at for its parameters."""

    def layer_spec(config, vp_stage=None):
        return get_gpt_layer_local_spec(multi_latent_attention=config.multi_latent_attention)

    changed = use_packing_ops(layer_spec)
    assert inspect.signature(changed) == inspect.signature(layer_spec)
    config, spec = latent_attention()
    assert changed(config, vp_stage=0) == use_packing_ops(spec)


def test_params_of_a_spec_stay():
    spec = get_gpt_layer_local_spec()
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec(DotProductAttention, {"softmax_scale": 0.5})
    changed = use_packing_ops(spec).submodules.self_attention.submodules.core_attention
    assert changed == ModuleSpec(PackingDotProductAttention, {"softmax_scale": 0.5})
    attention.core_attention = functools.partial(DotProductAttention, softmax_scale=0.5)  # 0.16 takes any builder
    changed = use_packing_ops(spec).submodules.self_attention.submodules.core_attention
    assert (changed.func, changed.keywords) == (PackingDotProductAttention, {"softmax_scale": 0.5})


def test_specs_without_core_attention_are_refused():
    with pytest.raises(ValueError, match="spec: expected a layer or block spec with core_attention"):
        use_packing_ops(get_gpt_layer_local_spec().submodules.mlp)
    with pytest.raises(ValueError, match="spec: expected a layer or block spec with core_attention"):
        use_packing_ops(DotProductAttention)
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = ModuleSpec(MLASelfAttention, submodules=object())
    with pytest.raises(NotImplementedError, match="core_attention: expected one without submodules"):
        use_packing_ops(spec)


class Gemma2DotProductAttention(DotProductAttention):
    """Caps its scores, as Megatron-Bridge's does, which no field of the config says."""

    def forward(self, query, key, value, *args, **kwargs):
        return 2.0 * torch.tanh(super().forward(query / 2.0, key, value, *args, **kwargs))


def built_by_a_function(*args, **kwargs):
    return DotProductAttention(*args, **kwargs)


@pytest.mark.parametrize(
    ("core", "name"),
    {
        "class": (Gemma2DotProductAttention, "Gemma2DotProductAttention"),
        "spec": (ModuleSpec(Gemma2DotProductAttention, {"softmax_scale": 0.5}), "Gemma2DotProductAttention"),
        "partial": (functools.partial(Gemma2DotProductAttention, softmax_scale=0.5), "Gemma2DotProductAttention"),
        "import": (
            ModuleSpec(("somewhere.attention", "DotProductAttention")),
            "somewhere.attention.DotProductAttention",
        ),
        "function": (built_by_a_function, "built_by_a_function"),
        "object": (object(), "<object object"),
    }.values(),
)
def test_core_attention_that_may_compute_more_is_refused(core, name):
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = core
    with pytest.raises(NotImplementedError, match=rf"core_attention: expected DotProductAttention or .*, got .*{name}"):
        use_packing_ops(spec)
    with pytest.raises(NotImplementedError, match="core_attention"):  # in a block of layers, behind one that is served
        use_packing_ops([get_gpt_layer_local_spec(), spec])
    assert spec.submodules.self_attention.submodules.core_attention is core


def test_specs_of_ours_and_of_imports():
    spec = get_gpt_layer_local_spec()
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = ModuleSpec((DotProductAttention.__module__, "DotProductAttention"))
    changed = use_packing_ops(spec)
    assert changed.submodules.self_attention.submodules.core_attention == ModuleSpec(PackingDotProductAttention)
    assert use_packing_ops(changed) == changed


# --- models of other specs than GPT's plain layer ---

LATENT = {"multi_latent_attention": True, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_head_dim": 8,
          "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope", "num_query_groups": 4}  # fmt: skip


def latent_attention():
    return MLATransformerConfig(**{**SHAPE, **LATENT}), get_gpt_layer_local_spec(multi_latent_attention=True)


def mixture_of_experts():
    experts = {"num_moe_experts": 2, "moe_layer_freq": [0, 1], "moe_router_load_balancing_type": "none"}
    config = config_of(**experts, add_bias_linear=False)
    return config, get_gpt_decoder_block_spec(config, use_transformer_engine=False)


def losses_and_gradients(config, spec, batches, device):
    torch.manual_seed(0)
    model = GPTModel(
        config, spec, VOCABULARY, 256, position_embedding_type="rope", share_embeddings_and_output_weights=False
    ).to(device)
    losses = [model(ids, None, mask, labels=ids, packed_seq_params=params).flatten() for ids, mask, params in batches]
    losses = torch.cat(losses)
    losses.sum().backward()
    return [losses.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.fixture
def without_te(monkeypatch):
    """megatron-core 0.16 takes TransformerEngine to be there in these two places, whether it is or not."""
    if importlib.util.find_spec("transformer_engine") is None:
        monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False, raising=False)
        monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)


@pytest.mark.parametrize("parts", [latent_attention, mixture_of_experts])
def test_other_models_in_thd(parts, device, without_te):
    """One packed row as a document at a time in sbhd."""
    config, spec = parts()
    documents = [torch.randint(0, VOCABULARY, (1, length), device=device) for length in LENGTHS]
    masks = [torch.ones(1, 1, *[length] * 2, dtype=torch.bool, device=device).triu(1) for length in LENGTHS]
    alone = [(ids, mask, None) for ids, mask in zip(documents, masks, strict=True)]
    ours = use_packing_ops(spec)
    # megatron-core's core attention cannot be built for latent attention.
    expected = losses_and_gradients(config, ours if config.multi_latent_attention else spec, alone, device)
    row = [(torch.cat(documents, 1), None, thd_params(device=device))]
    for actual, wanted in zip(losses_and_gradients(config, ours, row, device), expected, strict=True):
        assert_near(actual, wanted)


def test_heads_of_multi_latent_attention(device):
    """Heads of 12 for keys and 8 for values in sbhd, built as MLASelfAttention does."""
    config, _ = latent_attention()
    module = PackingDotProductAttention(config, 1, AttnMaskType.causal, "self", None, 0.3, 12, 8).to(device)
    q, k = (torch.randn(6, 2, 4, 12, device=device) for _ in range(2))
    v = torch.randn(6, 2, 4, 8, device=device)
    rows = [t.transpose(0, 1).flatten(0, 1).double() for t in (q, k, F.pad(v, (0, 4)))]
    expected, _ = reference(*rows, cu_seqlens_of([6, 6]), softmax_scale=0.3)
    out = module(q, k, v, None)
    assert_near(out, expected[..., :8].unflatten(0, (2, 6)).transpose(0, 1).flatten(2).to(out))
