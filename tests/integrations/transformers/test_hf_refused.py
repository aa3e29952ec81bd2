"""What apply_packing_ops cannot swap: nothing half done, strict changes nothing, and the warning has a remedy that
works.
"""

import functools
import re
import subprocess
import sys
import textwrap
import types
import warnings

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT

transformers = pytest.importorskip("transformers")

from helpers.hf_models import tiny_model  # noqa: E402
from helpers.hf_patch_case import tiny, tiny_gpt2  # noqa: E402
from helpers.hf_towers import tiny_tower_model  # noqa: E402
from transformers.models.llama.modeling_llama import (  # noqa: E402
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    LlamaDecoderLayer,
)

from packing_ops.integrations.transformers import Applied, apply_packing_ops, info, revert_packing_ops  # noqa: E402


@pytest.fixture
def world(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def state(model):
    """Of every module: its class, and all that is in it."""
    attributes = [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()}
        for module in model.modules()
    ]
    return [type(module) for module in model.modules()], attributes


def tower_with_projections_inside():
    """Attention of its vision tower that no trial has a module for."""
    model = tiny_tower_model("qwen2_vl")
    for block in model.model.visual.blocks:
        block.attn.qkv = torch.nn.Sequential(block.attn.qkv)
    return model


@pytest.mark.parametrize("strict", [False, True])
def test_no_sequence_group_where_attention_does_not_take(world, strict, monkeypatch):
    """Each rank would attend only to its slots."""
    model = tiny("llama")
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda self, name: None)
    before = state(model)
    with pytest.raises(ValueError, match=r"sequence_group: expected a model whose attention .* cannot change its attn"):
        apply_packing_ops(model, sequence_group=world, strict=strict)
    assert state(model) == before


def test_strict_refuses_a_vision_tower_that_is_left():
    model = tower_with_projections_inside()
    before, implementation = state(model), model.config._attn_implementation
    with pytest.raises(ValueError, match=r"strict: .* vision: \w+ holds qkv \(or pass attention=False\)"):
        apply_packing_ops(model, strict=True)
    assert state(model) == before
    assert model.config._attn_implementation == implementation


LEFT = {  # part of a model that is left, the model, options of apply_packing_ops
    "attention": (lambda: torch.nn.Linear(1, 1), {"rope": False}),
    "vision": (tower_with_projections_inside, {}),
    "rope": (tiny_gpt2, {}),
    "rms_norm": (lambda: tiny("phi"), {"rms_norm": True}),
    "fused_loss": (lambda: tiny_model("gemma2"), {"fused_loss": True}),
}


@pytest.mark.parametrize("part", LEFT)
def test_the_advice_of_the_warning_silences_it(part):
    make, options = LEFT[part]
    model = make()
    with pytest.warns(UserWarning, match=f"{part} of .* was not swapped: .* to silence this$") as warned:
        applied = apply_packing_ops(model, **options)
    assert list(applied.skipped) == [part]
    (advice,) = re.findall(r"Pass (\w+)=False", str(warned[0].message))
    revert_packing_ops(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert apply_packing_ops(model, **{**options, advice: False}).skipped == {}
    revert_packing_ops(model)


def test_fused_loss_of_one_of_two_models():
    pair = torch.nn.ModuleList([tiny_model("llama"), tiny_model("gemma2")])
    before = state(pair)
    with pytest.raises(ValueError, match="fused_loss: Gemma2ForCausalLM: its forward changes the logits"):
        apply_packing_ops(pair, fused_loss=True, strict=True)
    assert state(pair) == before
    with pytest.warns(UserWarning, match="fused_loss of .* was not swapped: Gemma2ForCausalLM"):
        applied = apply_packing_ops(pair, fused_loss=True)
    assert (applied.fused_loss, list(applied.skipped)) == (1, ["fused_loss"])
    revert_packing_ops(pair)


def test_a_torch_without_distributed_registers_and_applies():
    """As torch is where it was built with USE_DISTRIBUTED=0: the types of its C library are not there."""
    code = """
        import sys

        class WithoutDistributed:
            def find_spec(self, name, path=None, target=None):
                if name == "torch.distributed":
                    for each in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                        if hasattr(sys.modules["torch._C"], each):
                            delattr(sys.modules["torch._C"], each)
                    sys.modules["torch._C._distributed_c10d"] = None

        sys.meta_path.insert(0, WithoutDistributed())
        import torch
        assert not torch.distributed.is_available()
        import transformers
        from packing_ops.integrations.transformers import apply_packing_ops, register
        register()
        sizes = dict(vocab_size=16, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        apply_packing_ops(model, strict=True)
        model(torch.ones(1, 4, dtype=torch.long), position_ids=torch.tensor([[0, 1, 0, 1]]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    found = subprocess.run(
        command, cwd=ROOT, env={"PYTHONPATH": ".", "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr


def test_applied_names_what_was_swapped():
    assert apply_packing_ops(tiny("llama"), strict=True) == Applied(attention=2, rope=2, rms_norm=5)


def causal_attention(self, hidden_states, position_embeddings, attention_mask=None, **_):
    """Attention that looks at no mask, as another library may put into a class of transformers."""
    rows, length, _ = hidden_states.shape
    q, k, v = (
        projection(hidden_states).view(rows, length, -1, self.head_dim).transpose(1, 2)
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(out.transpose(1, 2).reshape(rows, length, -1)), None


@pytest.mark.parametrize("when", ["before", "after", "after a call"])
@pytest.mark.parametrize("where", ["class", "module"])
def test_another_forward_in_the_place_of_attention(where, when, monkeypatch):
    """It sees no documents, so rows of several are an error, and nothing says that ours runs."""
    model = tiny_model("llama", num_hidden_layers=1)
    call = {"input_ids": torch.arange(3, 9)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    if when != "before":
        assert apply_packing_ops(model).attention == 1
    if when == "after a call":
        model(**call)
    (attention,) = (module for module in model.modules() if type(module).__name__ == "LlamaAttention")
    if where == "class":
        monkeypatch.setattr(type(attention), "forward", causal_attention)
    else:
        attention.forward = types.MethodType(causal_attention, attention)
    if when == "before":
        with pytest.warns(UserWarning, match="has an attention of its own, which no attn_implementation of ours"):
            assert apply_packing_ops(model, rope=False).attention == 0
    assert "attention: LlamaForCausalLM has an attention of its own" in info(model)
    with pytest.raises(ValueError, match="position_ids: expected one document in each row, got several"):
        model(**call)
    revert_packing_ops(model)


def test_another_attention_with_the_name_of_the_one_it_replaces(monkeypatch):
    model = tiny_model("llama", num_hidden_layers=1)
    (attention,) = (module for module in model.modules() if type(module).__name__ == "LlamaAttention")
    other = types.FunctionType(causal_attention.__code__, globals())
    other.__qualname__ = type(attention).forward.__qualname__
    monkeypatch.setattr(type(attention), "forward", other)
    with pytest.warns(UserWarning, match="has an attention of its own, which no attn_implementation of ours"):
        assert apply_packing_ops(model, rope=False).attention == 0
    revert_packing_ops(model)


class AttendsByItself(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **_):
        return causal_attention(self, hidden_states, position_embeddings)


class Attends(LlamaAttention):
    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states, *args, **kwargs)


@pytest.mark.parametrize("cls", [AttendsByItself, Attends])
def test_a_subclass_of_an_attention(cls):
    """Its forward may have an attention of its own, or call the one that it inherits."""
    model = tiny_model("llama", num_hidden_layers=1)
    call = {"input_ids": torch.arange(3, 9)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    (layer,) = model.model.layers
    layer.self_attn.__class__ = cls
    if cls is Attends:
        assert apply_packing_ops(model, rope=False).attention == 1
        found = model(**call).logits[:, 3:]
        torch.testing.assert_close(found, model(call["input_ids"][:, 3:]).logits)
    else:
        with pytest.warns(UserWarning, match="has an attention of its own, which no attn_implementation of ours"):
            assert apply_packing_ops(model, rope=False).attention == 0
        with pytest.raises(ValueError, match="position_ids: expected one document in each row, got several"):
            model(**call)
    revert_packing_ops(model)


class Made(LlamaAttention):
    """super() is in its code, and not in its forward."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)

    def forward(self, hidden_states, position_embeddings, attention_mask=None, **_):
        return causal_attention(self, hidden_states, position_embeddings)


class Chooses(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask=None, **options):
        if self.config._attn_implementation == "flash_attention_2":
            return ALL_ATTENTION_FUNCTIONS["flash_attention_2"](self, hidden_states, attention_mask, **options)
        return causal_attention(self, hidden_states, position_embeddings)


class Inside(torch.nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, hidden_states, position_embeddings, **_):
        return causal_attention(self.attention, hidden_states, position_embeddings)


class ByAnotherName(LlamaDecoderLayer):
    def forward(self, hidden_states, position_embeddings=None, **_):
        attention = self.self_attn
        return hidden_states + causal_attention(attention, hidden_states, position_embeddings)[0]


def put_in_place(how, model, monkeypatch):
    if how == "wraps":
        other = types.FunctionType(causal_attention.__code__, globals())
        monkeypatch.setattr(LlamaAttention, "forward", functools.wraps(LlamaAttention.forward)(other))
        return
    for layer in model.model.layers:
        if how is Inside:
            layer.self_attn = Inside(layer.self_attn)
        elif how is ByAnotherName:
            layer.__class__ = ByAnotherName
        else:
            layer.self_attn.__class__ = how


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens_q", "attention_mask"])
@pytest.mark.parametrize(
    "how", [Made, Chooses, Inside, ByAnotherName, "wraps"], ids=lambda how: getattr(how, "__name__", how)
)
def test_layers_whose_code_hides_that_they_attend_by_themselves(how, given, compiled, monkeypatch, fresh_compile):
    """They are seen when no layer has called our attention; a row of one document goes on."""
    model, ids = tiny_model("llama"), torch.arange(3, 9)[None]
    put_in_place(how, model, monkeypatch)
    apply_packing_ops(model, rope=False)
    for layer in model.model.layers if compiled else ():
        layer.compile(backend="eager")
    documents = {
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]]),
        "cu_seq_lens_q": torch.tensor([0, 3, 6], dtype=torch.int32),
        "attention_mask": torch.tensor([[1, 1, 1, 2, 2, 2]]),
    }
    with pytest.raises(ValueError, match="got several, and no layer of LlamaModel calls packing_ops' attention"):
        model(ids, **{given: documents[given]})
    assert model(ids).logits.isfinite().all()
    revert_packing_ops(model)


@pytest.mark.parametrize("by", ["functools.wraps", "accelerate"])
def test_a_wrapper_around_attention_is_no_other_one(by):
    model = tiny_model("llama", num_hidden_layers=1)
    (attention,) = (module for module in model.modules() if type(module).__name__ == "LlamaAttention")
    if by == "accelerate":
        hooks = pytest.importorskip("accelerate.hooks")
        hooks.add_hook_to_module(attention, hooks.ModelHook())
    else:
        forward = attention.forward
        attention.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
    assert apply_packing_ops(model).attention == 1
    assert "attention: packing_ops in 1 module" in info(model)
    revert_packing_ops(model)


def layer_with_attention_inside(self, hidden_states, **_):
    """A decoder layer that reads the weights of its attention, and does not call it."""
    x, sizes = self.input_layernorm(hidden_states), (*hidden_states.shape[:2], -1, self.self_attn.head_dim)
    q, k = self.self_attn.q_proj(x).view(sizes), self.self_attn.k_proj(x).view(sizes)
    heads = (each.transpose(1, 2) for each in (q, k, self.self_attn.v_proj(x).view(sizes)))
    out = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    hidden_states = hidden_states + self.self_attn.o_proj(out.transpose(1, 2).flatten(2))
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def layer_that_calls_attention(self, hidden_states, **kwargs):
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + attended
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def wrapped(layer):
    forward = layer.forward
    return lambda *args, **kwargs: forward(*args, **kwargs)


def wrapped_with_a_look(layer):
    forward = layer.forward

    def look(self, *args, **kwargs):
        assert self.self_attn.layer_idx == 0
        return forward(*args, **kwargs)

    return types.MethodType(look, layer)


LAYERS = {  # whether packed rows are refused, and what is put into a layer
    "another attention": (True, lambda layer: types.MethodType(layer_with_attention_inside, layer)),
    "its attention": (False, lambda layer: types.MethodType(layer_that_calls_attention, layer)),
    "a wrapper": (False, wrapped),
    "a wrapper that reads the attention's number": (False, wrapped_with_a_look),
}


@pytest.mark.parametrize("where", ["class", "module"])
@pytest.mark.parametrize("forward", LAYERS)
def test_another_forward_in_the_place_of_a_layer(forward, where, monkeypatch):
    """One with an attention inside sees no documents. One that calls the layer's attention goes on."""
    refused, make = LAYERS[forward]
    model = tiny_model("llama", num_hidden_layers=1)
    call = {"input_ids": torch.arange(3, 9)[None], "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    apply_packing_ops(model)
    wanted, (layer,) = model(**call).logits, model.model.layers
    if where == "module":
        layer.forward = make(layer)
    elif forward == "a wrapper":
        stock = type(layer).forward
        monkeypatch.setattr(type(layer), "forward", lambda self, *args, **kwargs: stock(self, *args, **kwargs))
    else:
        monkeypatch.setattr(type(layer), "forward", make(layer).__func__)
    if refused:
        with pytest.raises(ValueError, match=r"position_ids: .* nothing says whether LlamaDecoderLayer mixes"):
            model(**call)
        model(call["input_ids"])
    else:
        torch.testing.assert_close(model(**call).logits, wanted)
    revert_packing_ops(model)
