"""Swapped models in use: compiled, checkpointed, with adapters, under autocast, in generation, on long contexts."""

import copy
import gc
import threading

import pytest
import torch
from helpers import assert_same, cu_seqlens_of
from torch._dynamo.testing import CompileCounter

transformers = pytest.importorskip("transformers")

from helpers.hf_patch_case import (  # noqa: E402, F401
    LENGTHS,
    NAMED,
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

from packing_ops.integrations import _patching  # noqa: E402
from packing_ops.integrations.transformers import rope  # noqa: E402
from packing_ops.integrations.transformers.apply import apply_packing_ops, revert_packing_ops  # noqa: E402


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "qwen3_vl"])  # the rest: test_hf_support.py
def test_compile_fullgraph(family, device, fresh_compile):
    more = {"experts_implementation": "batched_mm"} if family == "gpt_oss" else {}
    model, inputs = tiny(family, device, **more), packed(device)
    wanted, wanted_grads = outputs(model, inputs), gradients(model, inputs)
    apply_packing_ops(model, attention=False, rms_norm=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_near(outputs(compiled, inputs), wanted)
    for name, grad in gradients(compiled, inputs).items():
        assert_near(grad, wanted_grads[name.removeprefix("_orig_mod.")])
    revert_packing_ops(model)
    assert_same(outputs(model, inputs), wanted)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("attention", [False, True])
def test_layers_share_what_is_compiled(family, attention, device, fresh_compile):
    """More layers than torch.compile's limit of graphs; the documents are found before them."""
    layers = 10
    assert layers > torch._dynamo.config.recompile_limit
    kinds = {"layer_types": ["full_attention"] * layers} if family == "gemma3" else {}
    model, inputs = tiny(family, device, num_hidden_layers=layers, **kinds), packed(device)
    wanted = outputs(model, inputs)
    apply_packing_ops(model, attention=attention, rms_norm=True)
    counter = CompileCounter()
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    assert_near(outputs(model, inputs), wanted)
    assert counter.frame_count == 1
    revert_packing_ops(model)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_gradient_checkpointing(family, reentrant, device, calls):
    model, inputs = tiny(family, device).train(), packed(device)
    wanted = gradients(model, inputs)
    apply_packing_ops(model, attention=False, rms_norm=True)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for name, grad in gradients(model, inputs).items():
        assert_near(grad, wanted[name])
    assert len(calls) == 2 * 2  # each layer forward and again in backward
    revert_packing_ops(model)


def test_lora(device, calls):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model, inputs = peft.get_peft_model(tiny("qwen3", device), config), packed(device)
    wanted, wanted_grads = outputs(model, inputs), gradients(model, inputs)
    assert wanted_grads
    assert apply_packing_ops(model, attention=False, rms_norm=True)
    assert_near(outputs(model, inputs), wanted)
    for name, grad in gradients(model, inputs).items():
        assert_near(grad, wanted_grads[name])
    assert len(calls) == 2 * 2
    revert_packing_ops(model)
    assert_same(outputs(model, inputs), wanted)


@pytest.mark.parametrize("family", NAMED)
def test_bf16_autocast(family, device, calls):
    model, inputs = tiny(family, device), packed(device)
    exact = outputs(model, inputs)
    with torch.autocast(device, torch.bfloat16):
        stock = outputs(model, inputs)
        apply_packing_ops(model, attention=False, rms_norm=True)
        found = outputs(model, inputs)
        revert_packing_ops(model)
    assert found.dtype == stock.dtype
    assert (found - exact).norm() <= 2 * (stock - exact).norm()


@pytest.mark.parametrize("family", NAMED)
def test_generation_with_cache(family, device, calls):
    model = tiny(family, device)
    prompt = packed(device)["input_ids"]
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False}
    wanted = model.generate(prompt, **options)
    apply_packing_ops(model, attention=False, rms_norm=True)
    assert_same(model.generate(prompt, **options), wanted)
    assert calls
    revert_packing_ops(model)


# --- RoPE that scales with the length ---

ORIGINAL = 10
SCALED = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": ORIGINAL,
    },
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def scaled(kind, device):
    length = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
    return tiny("llama", device, rope_parameters=SCALED[kind], max_position_embeddings=length)


def alone(kind, inputs, lengths, device):
    """Each document by itself in a fresh stock model, side by side."""
    documents = inputs["input_ids"].split(lengths, dim=1)
    return [outputs(scaled(kind, device), {"input_ids": each, "use_cache": False}) for each in documents]


def row_counts(kind, inputs, device):
    """The angles that a model takes when it counts along the row, against those of one document."""
    model = scaled(kind, device)
    x = torch.zeros(1, 1, 1, device=device)
    first = torch.arange(4, device=device)[None]
    short, _ = model.model.rotary_emb(x, first)
    row = torch.arange(inputs["input_ids"].shape[1], device=device)[None]
    long, _ = model.model.rotary_emb(x, row)
    return (long[:, :4] - short).abs().max() > 1e-3


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens", "both"])
def test_factor_of_the_longest_document(kind, given, device, calls):
    """The row is longer than the original length and no document is: nothing may be scaled."""
    inputs = packed(device)
    assert sum(LENGTHS) > ORIGINAL > max(LENGTHS)
    assert row_counts(kind, inputs, device)  # counting along the row would show
    wanted = torch.cat(alone(kind, inputs, LENGTHS, device), dim=1)
    cu_seqlens = cu_seqlens_of(LENGTHS, device)
    layout = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 8, "max_length_k": 8}
    if given != "position_ids":
        inputs |= layout
    if given == "cu_seq_lens":
        del inputs["position_ids"]
    model = scaled(kind, device)
    apply_packing_ops(model, attention=False)
    assert_near(outputs(model, inputs), wanted)
    assert len(calls) == 2
    revert_packing_ops(model)


@pytest.mark.parametrize("kind", SCALED)
def test_factor_of_a_long_document(kind, device, calls):
    lengths = [3, 14, 5]  # one beyond the original length: its factor is the row's
    inputs = packed(device, lengths)
    document = alone(kind, inputs, lengths, device)[1]
    model = scaled(kind, device)
    plain = outputs(tiny("llama", device), inputs)[:, 3:17]
    apply_packing_ops(model, attention=False)
    found = outputs(model, inputs)[:, 3:17]
    assert_near(found, document)
    assert (found - plain).abs().max() > 1e-2
    revert_packing_ops(model)


def test_cu_seq_lens_alone_are_enough(device):
    """Positions of documents, so that the mask is theirs too; not for batches, which have no one layout."""
    model, inputs = tiny("qwen2", device), packed(device)
    wanted = outputs(model, inputs)
    cu_seqlens = cu_seqlens_of(LENGTHS, device)
    bare = {"input_ids": inputs["input_ids"], "cu_seq_lens_q": cu_seqlens, "use_cache": False}
    assert (outputs(model, bare) - wanted).abs().max() > 1e-2
    apply_packing_ops(model, attention=False)
    assert_near(outputs(model, bare), wanted)
    embedded = {**bare, "input_ids": None, "inputs_embeds": model.get_input_embeddings()(bare["input_ids"])}
    assert_near(outputs(model, embedded), wanted)
    assert_near(outputs(model, {**bare, "cu_seq_lens_q": cu_seqlens.long()}), wanted)
    twice = {**bare, "input_ids": bare["input_ids"].repeat(2, 1)}
    batch = outputs(model, twice)
    revert_packing_ops(model)
    assert_near(batch, outputs(model, twice))


def test_order_of_compile_and_swap(device, fresh_compile, calls):
    """Compiled first, swapped later: whatever runs is right."""
    model, inputs = tiny("llama", device, num_hidden_layers=1), packed(device)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    wanted = outputs(compiled, inputs)
    for change in (apply_packing_ops, revert_packing_ops):
        change(compiled._orig_mod, **({"attention": False} if change is apply_packing_ops else {}))
        assert_near(outputs(compiled, inputs), wanted)


# --- swapped models that go while something is compiled ---


@pytest.fixture
def garbage():
    """Makes a swapped llama that only the garbage collector ends, which runs where a test says so."""

    def make(device):
        model = tiny("llama", device)
        apply_packing_ops(model, attention=False)
        model.itself = [model]

    gc.disable()
    yield make
    gc.enable()


def stock_rotates():
    return not hasattr(module_of("llama").apply_rotary_pos_emb, "__wrapped__")


def test_a_swapped_model_that_goes_in_a_trace(device, fresh_compile, garbage):
    """Its module stays as the trace has seen it, until a forward that nobody traces."""
    model, inputs = tiny("llama", device, num_hidden_layers=1), packed(device)
    wanted = outputs(model, inputs)
    garbage(device)
    collected = []

    def backend(graph, _):
        collected.append(gc.collect())
        return graph

    assert_near(outputs(torch.compile(model, fullgraph=True, backend=backend), inputs), wanted)
    assert collected
    assert not stock_rotates()
    assert_same(outputs(model, inputs), wanted)
    assert stock_rotates()


@pytest.mark.parametrize("then", ["forward of another family", "apply", "revert", "end of another"])
def test_what_was_left_is_removed_later(then, device, garbage, monkeypatch):
    other = tiny("qwen3", device, num_hidden_layers=1)
    apply_packing_ops(other, attention=False)
    garbage(device)
    with monkeypatch.context() as during:
        during.setattr(_patching, "_something_compiles", lambda: True)
        gc.collect()
        assert not stock_rotates()
    if then == "forward of another family":
        outputs(other, packed(device))
    elif then == "apply":
        apply_packing_ops(other, attention=False)
    elif then == "end of another":
        garbage(device)
        gc.collect()
    else:
        revert_packing_ops(other)
    assert stock_rotates()
    revert_packing_ops(other)


def test_a_swapped_model_that_goes_while_another_thread_compiles(device, garbage):
    held, done = threading.Event(), threading.Event()

    def compile_():
        with torch._dynamo.convert_frame.compile_lock:
            held.set()
            done.wait(30)

    garbage(device)
    thread = threading.Thread(target=compile_)
    thread.start()
    held.wait(30)
    gc.collect()
    assert not stock_rotates()
    done.set()
    thread.join()
    revert_packing_ops(tiny("llama", device))
    assert stock_rotates()


@pytest.mark.parametrize("lengths", [LENGTHS, [3, 14, 5]])
def test_yarn_scales_every_length_alike(lengths, device, calls):
    """It has one factor, so the row's length must not matter; documents on both sides of the original length."""

    def model():
        return tiny("llama", device, rope_parameters=YARN, max_position_embeddings=4 * ORIGINAL)

    inputs, swapped = packed(device, lengths), model()
    documents = [{"input_ids": ids, "use_cache": False} for ids in inputs["input_ids"].split(lengths, 1)]
    wanted = torch.cat([outputs(model(), document) for document in documents], 1)
    assert (wanted - outputs(tiny("llama", device), inputs)).abs().max() > 1e-2  # it scales
    apply_packing_ops(swapped)
    assert_near(outputs(swapped, inputs), wanted)
    revert_packing_ops(swapped)
    assert len(calls) == 2


def test_the_original_dies_in_the_forward_of_its_copy(device):
    """Wherever the garbage collector starts, also between the rotary embedding and the layers."""
    model, inputs = tiny("qwen3", device), packed(device)
    apply_packing_ops(model, attention=False)
    copied, patch = copy.deepcopy(model), rope.patches_of(module_of("qwen3").__name__)["apply_rotary_pos_emb"]
    wanted = outputs(copied, inputs)
    originals = [model]
    del model

    def collect(*_):
        originals.clear()
        gc.collect()

    copied.model.layers[0].register_forward_pre_hook(collect)
    assert_same(outputs(copied, inputs), wanted)
    assert patch.is_applied
    del copied
    gc.collect()
    assert not patch.is_applied
