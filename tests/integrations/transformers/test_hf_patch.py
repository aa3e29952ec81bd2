"""apply_packing_ops and revert_packing_ops on tiny models of every family."""

import copy
import gc
import pickle

import pytest
import torch
from helpers import assert_same, fresh_process

transformers = pytest.importorskip("transformers")

from helpers.hf_patch_case import (  # noqa: E402, F401
    FAMILIES,
    KNOWN,
    LAYERS,
    LENGTHS,
    MULTIMODAL,
    NAMED,
    SHAPE,
    assert_near,
    calls_of_our_rope,
    gradients,
    models_of_other_tests_are_gone,
    module_of,
    nothing_left_in_modules,
    outputs,
    packed,
    tiny,
)

import packing_ops as po  # noqa: E402
from packing_ops.integrations import _rope_trial  # noqa: E402
from packing_ops.integrations.transformers import attention, rope  # noqa: E402
from packing_ops.integrations.transformers.apply import apply_packing_ops, revert_packing_ops  # noqa: E402


@pytest.fixture
def attended(monkeypatch):
    """Counts the calls that our attention served, not its fallback."""
    seen, serve = [], attention.attend

    def counted(*given, **named):
        seen.append(1)
        return serve(*given, **named)

    monkeypatch.setattr(attention, "attend", counted)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_the_stock_ones(family, device, calls):
    model, inputs = tiny(family, device), packed(device)
    attributes = [dict(vars(module)) for module in model.modules()]
    wanted, wanted_grads = outputs(model, inputs), gradients(model, inputs)
    rms_norm = family not in ("phi", "stablelm")  # they have LayerNorm
    for _ in range(2):  # twice is once
        assert apply_packing_ops(model, attention=False, rms_norm=rms_norm)
    found, grads = outputs(model, inputs), gradients(model, inputs)
    assert len(calls) == 2 * 2
    assert_near(found, wanted)
    assert grads.keys() == wanted_grads.keys()
    for name, grad in grads.items():
        assert_near(grad, wanted_grads[name])
    revert_packing_ops(model)
    assert_same(outputs(model, inputs), wanted)
    assert [dict(vars(module)) for module in model.modules()] == attributes
    assert len(calls) == 2 * 2


@pytest.mark.parametrize("family", MULTIMODAL)
def test_positions_of_images(family, device, calls):
    model, inputs = tiny(family, device), packed(device)
    axes = torch.randint(0, 9, (2, *inputs["position_ids"].shape), device=device)
    three = torch.cat([inputs["position_ids"][None], axes])
    for rows in (three, torch.cat([inputs["position_ids"][None], three])):  # with and without text positions in front
        positions = {**inputs, "position_ids": rows}
        text = outputs(model, inputs)
        wanted, wanted_grads = outputs(model, positions), gradients(model, positions)
        assert (wanted - text).abs().max() > 1e-3  # the axes count
        apply_packing_ops(model, attention=False)
        assert_near(outputs(model, positions), wanted)
        for name, grad in gradients(model, positions).items():
            assert_near(grad, wanted_grads[name])
        revert_packing_ops(model)
    assert len(calls) == 2 * 2 * 2


@pytest.mark.parametrize("family", MULTIMODAL)
@pytest.mark.parametrize("given", ["text positions in front", "cu_seq_lens"])
def test_packed_documents_with_images_stay_apart(family, given, device, attended):
    model, inputs = tiny(family, device), packed(device)
    axes = torch.randint(0, 9, (3, *inputs["position_ids"].shape), device=device)
    four = torch.cat([inputs["position_ids"][None], axes])
    documents = zip(inputs["input_ids"].split(LENGTHS, 1), four.split(LENGTHS, 2), strict=True)
    alone = [outputs(model, {"input_ids": ids, "position_ids": rows, "use_cache": False}) for ids, rows in documents]
    over_the_row = outputs(model, {**inputs, "position_ids": axes})
    if given == "cu_seq_lens":
        layout = po.PackedMetadata.from_lengths(LENGTHS, device=device).to_transformers()
        inputs |= {"position_ids": axes, **layout}
    else:
        inputs["position_ids"] = four
    apply_packing_ops(model, rope=family in KNOWN)
    found = outputs(model, inputs)
    revert_packing_ops(model)
    assert_near(found, torch.cat(alone, 1))
    assert (found - over_the_row).abs().max() > 0.1
    assert len(attended) == 2


@pytest.mark.parametrize("family", MULTIMODAL)
def test_axes_of_images_tell_no_documents(family, device, attended):
    """The slots of an image share a time, the first axis, which tells no documents."""
    model, inputs = tiny(family, device), packed(device)
    time = torch.tensor([0, 1, 2, 3, 3, 3, 3, 3, 3, 7, 8, 9, 10, 11, 12, 13], device=device)[None]
    across = torch.tensor([0, 1, 2, 3, 4, 5, 3, 4, 5, 7, 8, 9, 10, 11, 12, 13], device=device)[None]
    slots = torch.arange(16, device=device)[None]
    wanted = outputs(model, {**inputs, "position_ids": torch.stack([slots, time, time, across])})
    apply_packing_ops(model, rope=family in KNOWN)
    found = outputs(model, {**inputs, "position_ids": torch.stack([time, time, across])})
    revert_packing_ops(model)
    assert_near(found, wanted)
    assert len(attended) == 2


@pytest.mark.parametrize("family", MULTIMODAL)
@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens", "cu_seq_lens and stock RoPE", "both"])
def test_packed_text_of_multimodal_models_stays_apart(family, given, device, attended):
    """As collators give it: positions of one axis, which transformers' Qwen2-VL keeps from its mask."""
    model, inputs = tiny(family, device), packed(device)
    documents = inputs["input_ids"].split(LENGTHS, 1)
    alone = torch.cat([outputs(model, {"input_ids": ids, "use_cache": False}) for ids in documents], 1)
    if given != "position_ids":
        inputs |= po.PackedMetadata.from_lengths(LENGTHS, device=device).to_transformers()
    if given.startswith("cu_seq_lens"):
        del inputs["position_ids"]
    apply_packing_ops(model, rope=family in KNOWN and given != "cu_seq_lens and stock RoPE")
    found = outputs(model, inputs)
    revert_packing_ops(model)
    assert_near(found, alone)
    assert len(attended) == 2


def test_swap_goes_with_the_last_model(device):
    models = {name: tiny("llama", device) for name in "ab"}
    for name in models:
        apply_packing_ops(models[name], attention=False)
    patch = rope.patches_of(module_of("llama").__name__)["apply_rotary_pos_emb"]
    del models["a"]
    gc.collect()
    assert patch.is_applied
    del models["b"]
    gc.collect()
    assert not patch.is_applied


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_another_instance_is_not_touched(family, device, calls):
    model, other, inputs = tiny(family, device), tiny(family, device), packed(device)
    wanted = outputs(other, inputs)
    apply_packing_ops(model, attention=False, rms_norm=True)
    assert_same(outputs(other, inputs), wanted)
    assert not calls
    outputs(model, inputs)
    assert len(calls) == 2
    apply_packing_ops(other, attention=False)
    revert_packing_ops(model)
    assert_same(outputs(model, inputs), wanted)
    assert len(calls) == 2
    outputs(other, inputs)
    assert len(calls) == 4
    revert_packing_ops(other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_the_swap(copied, device, calls):
    model, inputs = tiny("llama", device), packed(device)
    wanted = outputs(model, inputs)
    apply_packing_ops(model, attention=False, rms_norm=True)
    swapped = outputs(model, inputs)
    twin = copied(model)
    revert_packing_ops(model)
    del calls[:]
    assert_same(outputs(twin, inputs), swapped)
    assert len(calls) == 2
    revert_packing_ops(twin)
    assert_same(outputs(twin, inputs), wanted)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_pickled_into_a_fresh_process(how, tmp_path):
    model = tiny("llama")
    apply_packing_ops(model)
    inputs = {key: value for key, value in packed("cpu").items() if key != "use_cache"}
    wanted = outputs(model, inputs)
    case = {"model": model, "inputs": inputs, "wanted": wanted.detach()}
    save, load = (pickle.dumps, "pickle.loads(open({!r}, 'rb').read())")
    if how == "pickle":
        (tmp_path / "case").write_bytes(save(case))
    else:
        torch.save(case, tmp_path / "case")
        load = "torch.load({!r}, weights_only=False)"
    code = f"import pickle, torch; case = {load.format(str(tmp_path / 'case'))}; model = case['model']\n"
    code += (
        "print((model(**case['inputs']).logits - case['wanted']).abs().max().item(), model.config._attn_implementation)"
    )
    difference, name = fresh_process.run("-c", code, folder=tmp_path).split()
    assert float(difference) < 1e-5
    assert name == "packing_ops"


def test_a_function_put_there_by_others_stays(device, monkeypatch, calls):
    module, inputs = module_of("llama"), packed(device)
    model, other = tiny("llama", device), tiny("llama", device)
    stock = module.apply_rotary_pos_emb
    theirs = lambda *args: stock(*args)  # noqa: E731
    apply_packing_ops(model, attention=False)
    with monkeypatch.context() as patch:
        patch.setattr(module, "apply_rotary_pos_emb", theirs)
        assert_near(outputs(model, inputs), outputs(other, inputs))
        assert len(calls) == 2
        revert_packing_ops(model)
        assert module.apply_rotary_pos_emb is theirs
        patch.setattr(module, "apply_rotary_pos_emb", stock)
    module.apply_rotary_pos_emb = stock


# --- attention ---


@pytest.mark.parametrize(
    ("family", "before"), [*((family, "eager") for family in NAMED + MULTIMODAL), ("qwen3", "sdpa")]
)
def test_attention_is_switched_and_reverted(family, before, device, attended):
    model, inputs = tiny(family, device, attn_implementation=before), packed(device)
    documents = inputs["input_ids"].split(LENGTHS, 1)
    alone = torch.cat([outputs(model, {"input_ids": ids, "use_cache": False}) for ids in documents], 1)
    wanted = outputs(model, inputs)  # not all of them keep documents apart
    for _ in range(2):
        assert apply_packing_ops(model, rope=family in KNOWN)
    assert model.config._attn_implementation == "packing_ops"
    assert_near(outputs(model, inputs), alone)
    assert len(attended) == 2
    revert_packing_ops(model)
    assert model.config._attn_implementation == before
    assert_same(outputs(model, inputs), wanted)
    revert_packing_ops(model)
    assert model.config._attn_implementation == before
    assert not [name for name in vars(model) if "packing" in name]


def test_attention_that_was_ours_stays_ours():
    model = tiny("llama")
    attention.register()
    model.set_attn_implementation("packing_ops")
    apply_packing_ops(model)
    revert_packing_ops(model)
    assert model.config._attn_implementation == "packing_ops"


@pytest.fixture
def gemma3_with_vision():
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 16, "patch_size": 8}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**SHAPE, **LAYERS), vision_config=vision, mm_tokens_per_image=4
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    return model


def implementations(model):
    return [each._attn_implementation for each in (model.config, model.config.text_config, model.config.vision_config)]


def test_sub_models_get_their_attention_back(gemma3_with_vision):
    apply_packing_ops(gemma3_with_vision)
    assert implementations(gemma3_with_vision) == ["packing_ops"] * 3
    revert_packing_ops(gemma3_with_vision)
    assert implementations(gemma3_with_vision) == ["sdpa", "eager", "sdpa"]


def test_attention_half_set_is_taken_back(gemma3_with_vision, monkeypatch):
    model = gemma3_with_vision
    with monkeypatch.context() as patch:  # the whole cannot, its parts could
        patch.setattr(type(model), "_can_set_attn_implementation", lambda *self: False)
        with pytest.warns(
            UserWarning, match="attention of Gemma3ForConditionalGeneration was not swapped: .* cannot change"
        ):
            assert apply_packing_ops(model).attention == 0
    revert_packing_ops(model)
    assert implementations(model) == ["sdpa", "eager", "sdpa"]

    def refuse(self, wanted):
        if wanted == "packing_ops":
            raise ValueError("not this part")
        return wanted

    monkeypatch.setattr(type(model.model.vision_tower), "get_correct_attn_implementation", refuse)
    with pytest.raises(ValueError, match="not this part"):
        apply_packing_ops(model)
    assert implementations(model) == ["sdpa", "eager", "sdpa"]
    assert not [name for module in model.modules() for name in vars(module) if "packing" in name]
    assert not model.model.language_model.rotary_emb._forward_hooks


# --- numerics ---


@pytest.mark.parametrize("family", NAMED)
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_once(family, weights, device):
    """The exact value rounded once, in the dtype of the stock module; rms_norm=False leaves it."""
    model = tiny(family, device).to(weights)
    norm = next(module for module in model.modules() if type(module).__name__.endswith("RMSNorm"))
    x = (3 * torch.randn(50, norm.weight.numel(), device=device)).bfloat16()
    stock = norm(x)
    weight = norm.weight.double() + ("Gemma" in type(norm).__name__)
    exact = weight * x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    apply_packing_ops(model, attention=False, rms_norm=False)
    assert_same(norm(x), stock)
    apply_packing_ops(model, attention=False, rms_norm=True)
    found = norm(x)
    assert found.dtype == stock.dtype
    once = torch.finfo(found.dtype).eps / 2 * exact.abs() + 1e-5
    assert ((found.double() - exact).abs() <= once).all()
    if weights is torch.bfloat16:
        assert ((stock.double() - exact).abs() > once).any() == (family in ("llama", "qwen2", "qwen3", "mistral"))
    revert_packing_ops(model)
    assert_same(norm(x), stock)


def test_rms_norm_has_a_class_of_its_own(device):
    """A subclass of the model's with its name, so that whoever looks for that class still finds it."""
    model, x = tiny("llama", device).bfloat16(), (3 * torch.randn(50, 64, device=device)).bfloat16()
    norm = model.model.norm
    stock, expected, attributes = type(norm), norm(x), dict(vars(norm))
    apply_packing_ops(model, attention=False, rms_norm=True)
    fused = norm(x)
    assert not torch.equal(fused, expected)
    assert isinstance(norm, stock)
    assert type(norm) is type(model.model.layers[0].input_layernorm) is not stock
    assert (type(norm).__name__, type(norm).__qualname__) == (stock.__name__, stock.__qualname__)
    assert dict(vars(norm)) == attributes
    for twin in (copy.copy(norm), copy.deepcopy(norm), *(pickle.loads(pickle.dumps(norm, p)) for p in range(6))):
        assert type(twin) is type(norm)
        assert_same(twin(x), fused)
        revert_packing_ops(twin)
        assert type(twin) is stock
        assert_same(twin(x), expected)
    assert_same(norm(x), fused)
    revert_packing_ops(model)
    assert type(norm) is stock


def test_rms_norm_under_a_hook_of_accelerate(device):
    hooks = pytest.importorskip("accelerate.hooks")
    model = tiny("llama", device).bfloat16()
    norm, x = model.model.norm, (3 * torch.randn(50, 64, device=device)).bfloat16()
    stock = norm(x)
    apply_packing_ops(model, attention=False, rms_norm=True)
    fused = norm(x)
    assert not torch.equal(fused, stock)
    hooks.add_hook_to_module(norm, hooks.ModelHook())
    apply_packing_ops(model, attention=False, rms_norm=True)
    assert_same(norm(x), fused)
    revert_packing_ops(model)
    assert_same(norm(x), stock)
    apply_packing_ops(model, attention=False, rms_norm=True)
    assert_same(norm(x), fused)
    hooks.remove_hook_from_module(norm)
    assert_same(norm(x), fused)
    revert_packing_ops(model)
    assert_same(norm(x), stock)


def test_rms_norm_beside_offload(device):
    """Weights that are only there while a hook runs."""
    accelerate = pytest.importorskip("accelerate")
    model, inputs = tiny("llama", device), packed(device)
    wanted = outputs(model, inputs).detach()
    offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device(device))
    assert apply_packing_ops(offloaded, attention=False, rms_norm=True)
    assert_near(outputs(offloaded, inputs).detach(), wanted)
    revert_packing_ops(offloaded)
    assert_same(outputs(offloaded, inputs).detach(), wanted)
    assert apply_packing_ops(offloaded, attention=False, rms_norm=True)
    accelerate.hooks.remove_hook_from_submodules(offloaded)
    offloaded.to(device)
    assert_near(outputs(offloaded, inputs), wanted)
    revert_packing_ops(offloaded)
    assert_same(outputs(offloaded, inputs), wanted)


def test_rms_norm_of_another_library_stays(monkeypatch):
    model = tiny("llama")
    theirs = lambda self, x: x  # noqa: E731
    monkeypatch.setattr(type(model.model.norm), "forward", theirs)
    with pytest.warns(UserWarning, match="rms_norm of LlamaForCausalLM was not swapped: .* no RMSNorm"):
        assert apply_packing_ops(model, attention=False, rms_norm=True).rms_norm == 0
    assert "forward" not in vars(model.model.norm)
    monkeypatch.undo()
    model.model.norm.forward = lambda x: x  # of one module
    assert apply_packing_ops(model, attention=False, rms_norm=True)
    revert_packing_ops(model)
    assert model.model.norm.forward(3) == 3


def test_fp32_cos_sin(device, monkeypatch):
    seen = []
    rotate = _rope_trial.apply_rotary_qk
    monkeypatch.setattr(_rope_trial, "apply_rotary_qk", lambda *a, **k: seen.append(a[2].dtype) or rotate(*a, **k))
    model, inputs = tiny("llama", device).bfloat16(), packed(device)
    for option, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        apply_packing_ops(model, attention=False, fp32_cos_sin=option)
        assert outputs(model, inputs).dtype == torch.bfloat16
        assert seen[-1] == dtype
    revert_packing_ops(model)
