"""What models get as their masks: overlays, documents that a model does not tell of, models that read masks
themselves.
"""

import re
import threading
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers.gpu_asserts import refused  # noqa: E402
from helpers.hf_models import CACHE  # noqa: E402

import packing_ops  # noqa: E402
from packing_ops._runtime import arguments  # noqa: E402
from packing_ops.integrations.transformers import attention, call, masks, register  # noqa: E402
from packing_ops.integrations.transformers.apply import apply_packing_ops  # noqa: E402
from packing_ops.integrations.transformers.attention import _CALL, HARMLESS, SDPA  # noqa: E402

LENGTHS = [5, 7, 4]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
DISTIL = {"vocab_size": 61, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 64}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register()
    arguments.warned.clear()


@pytest.fixture
def served(monkeypatch):
    """Counts the calls that our attention served, not its fallback."""
    seen, serve = [], attention.attend
    monkeypatch.setattr(attention, "attend", lambda *given, **named: seen.append(1) or serve(*given, **named))
    return seen


def tiny(name, implementation, *, auto=transformers.AutoModel, device="cpu", **sizes):
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    config = getattr(transformers, name)(**sizes)
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=implementation).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(device)


def packed(device, lengths=LENGTHS):
    ids = torch.randint(3, 60, (1, sum(lengths)), device=device)
    return {"input_ids": ids, "position_ids": torch.cat([torch.arange(n, device=device) for n in lengths])[None]}


def alone(model, inputs, lengths=LENGTHS):
    rows = zip(*(tensor.split(lengths, 1) for tensor in inputs.values()), strict=True)
    return torch.cat([model(**dict(zip(inputs, row, strict=True)))[0] for row in rows], 1)


# --- overlays ---


def image_and_text(implementation, device, layers):
    text = {**GROUPED, "vocab_size": 99, "layer_types": layers, "sliding_window": 6}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 8, "patch_size": 2},
        mm_tokens_per_image=4,
        boi_token_index=95,
        eoi_token_index=96,
        image_token_index=97,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.set_attn_implementation(implementation)
    return model.to(device)


@pytest.mark.parametrize("layers", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
@pytest.mark.parametrize("beside", ["nothing", "mask", "cache"])
def test_packed_documents_with_images_of_gemma3(layers, beside, device):
    """Their tokens see each other in both directions, wherever their document is in the row."""
    image = [97, 97, 97, 97]
    documents = [[5, 6, *image, 7, 8], list(range(10, 21)), [9, 4, 6, 5, *image, 3, *image]]
    lengths = [len(document) for document in documents]
    inputs = packed(device, lengths)
    inputs["input_ids"] = torch.tensor([[t for each in documents for t in each]], device=device)
    inputs["token_type_ids"] = (inputs["input_ids"] == 97).long()
    pixels = torch.randn(3, 3, 8, 8, device=device)
    stock = image_and_text("eager", device, layers)
    rows, wanted = zip(*(tensor.split(lengths, 1) for tensor in inputs.values()), strict=True), []
    for row, images in zip(rows, (pixels[:1], None, pixels[1:]), strict=True):
        wanted.append(stock(**dict(zip(inputs, row, strict=True)), pixel_values=images, use_cache=False).logits)
    model = image_and_text("packing_ops", device, layers)
    more = {"use_cache": beside == "cache"}
    if beside == "mask":
        more["attention_mask"] = torch.ones_like(inputs["input_ids"])
    torch.testing.assert_close(model(**inputs, pixel_values=pixels, **more).logits, torch.cat(wanted, 1), **CLOSE)


# --- documents that models tell nobody of ---

ENCODERS = {
    "modernbert": ("ModernBertConfig", {**SIZES, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2}),
    "distilbert": ("DistilBertConfig", DISTIL),
    "esm": ("EsmConfig", {**SIZES, "position_embedding_type": "rotary"}),
    "jina": ("JinaEmbeddingsV3Config", SIZES),
    "gte": ("GteConfig", SIZES),
    "clip": ("CLIPTextConfig", {**SIZES, "eos_token_id": 2}),  # causal
}


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("beside", ["nothing", "a mask"])
def test_encoders_that_keep_position_ids_to_themselves(family, beside, device, served):
    name, sizes = ENCODERS[family]
    inputs = packed(device)
    wanted = alone(tiny(name, "eager", device=device, **sizes), inputs)
    model = tiny(name, "packing_ops", device=device, **sizes)
    more = {} if beside == "nothing" else {"attention_mask": torch.ones_like(inputs["input_ids"])}
    torch.testing.assert_close(model(**inputs, **more)[0], wanted, **CLOSE)
    assert len(served) == 2
    assert (model(inputs["input_ids"])[0] - wanted).abs().max() > 0.01


COMPILED = ["compiled", "compiled forward", "compiled in place"]


@pytest.mark.parametrize("how", ["positional", "checkpointed", *COMPILED])
def test_ways_to_call_an_encoder(how, device, fresh_compile):
    name, sizes = ENCODERS["distilbert"]
    inputs = packed(device)
    wanted = alone(tiny(name, "eager", device=device, **sizes), inputs)
    model = tiny(name, "packing_ops", device=device, **sizes)
    if how == "positional":
        found = model(inputs["input_ids"], None, None, inputs["position_ids"])
    elif how == "compiled":
        found = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)
    elif how == "compiled forward":
        if torch.__version__ < "2.12":
            pytest.skip("this torch.compile cannot guard what a call of the model tells, and says so")
        model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        found = model(**inputs)
    elif how == "compiled in place":
        model.compile(fullgraph=True, backend="aot_eager")
        found = model(**inputs)
    else:
        model.train().gradient_checkpointing_enable()
        for module in model.modules():
            module.p = 0.0  # of dropout
        found = model(**inputs)
        found[0].square().sum().backward()
        gradient = model.embeddings.word_embeddings.weight.grad
        stock = tiny(name, "eager", device=device, **sizes)
        alone(stock, inputs).square().sum().backward()
        torch.testing.assert_close(gradient, stock.embeddings.word_embeddings.weight.grad, **CLOSE)
    torch.testing.assert_close(found[0], wanted, **CLOSE)


@pytest.mark.parametrize("beside", ["nothing", "a mask", "a cache", "padding"])
def test_chunks_of_llama4_are_counted_in_each_document(beside, device):
    sizes = {**GROUPED, "attention_chunk_size": 3, "num_local_experts": 2, "intermediate_size_mlp": 48}
    sizes |= {
        "layer_types": ["chunked_attention", "full_attention"],
        "moe_layers": [],
        "experts_implementation": "eager",
    }
    build = {"auto": transformers.AutoModelForCausalLM, "device": device, **sizes}
    inputs = packed(device)
    wanted = alone(tiny("Llama4TextConfig", "eager", **build), inputs)
    model, more = tiny("Llama4TextConfig", "packing_ops", **build), {"use_cache": beside == "a cache"}
    if beside != "nothing":
        more["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if beside == "padding":  # on the left
        inputs = {key: torch.cat([value[:, :2], value], 1) for key, value in inputs.items()}
        more["attention_mask"] = torch.ones_like(inputs["input_ids"])
        more["attention_mask"][:, :2] = 0
    found = model(**inputs, **more).logits[:, -sum(LENGTHS) :]
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_later_tokens_of_a_cache_go_on_with_its_last_document(cache, device):
    """And a document that starts among them sees nothing of the cache."""
    build = {"auto": transformers.AutoModelForCausalLM, "device": device, **GROUPED}
    inputs, stock = packed(device), tiny("LlamaConfig", "eager", **build)
    model = tiny("LlamaConfig", "packing_ops", **build)
    kind = {"dynamic": transformers.DynamicCache, "static": transformers.StaticCache}[cache]
    kept = kind(config=model.config, **({"max_cache_len": 32} if cache == "static" else {}))
    pieces = [{key: value[:, part] for key, value in inputs.items()} for part in (slice(0, 3), slice(3, None))]
    found = torch.cat([model(**piece, **{CACHE: kept}, use_cache=True).logits for piece in pieces], 1)
    torch.testing.assert_close(found, alone(stock, inputs), **CLOSE)


@pytest.mark.parametrize("family", ["DebertaV2", "LayoutLM", "FNet", "MobileBert"])
@pytest.mark.parametrize("given", ["position_ids", "cu_seq_lens_q"])
def test_documents_that_reach_no_attention_are_refused(family, given, device):
    """A separate attention, a separate mask, no attention, and tokens that see neighbours next to it."""
    model, inputs = tiny(f"{family}Config", "packing_ops", device=device, **SIZES), packed(device)
    one = {"input_ids": inputs["input_ids"], "position_ids": torch.arange(16, device=device)[None]}
    if given == "cu_seq_lens_q":
        layout = packing_ops.PackedMetadata.from_lengths(LENGTHS, device=device).to_transformers()
        inputs = {"input_ids": inputs["input_ids"], **layout}
    error, why = ValueError, f"{given}: expected (one document in each row|a row of its own documents)"
    with pytest.raises(error, match=why):
        model(**inputs)
    model(**one)
    if family != "FNet":  # knows no padding
        padded = {**one, "position_ids": one["position_ids"].sub(4).clamp(min=0)}
        model(**padded, attention_mask=(one["position_ids"] >= 4).long())


def test_padding_between_documents_hides_none_of_them(device):
    """As packed collators align them."""
    model = tiny("DebertaV2Config", "packing_ops", device=device, **SIZES)
    rows = {"position_ids": [[0, 1, 2, 0, 0, 1, 2, 0]], "attention_mask": [[1, 1, 1, 0, 1, 1, 1, 0]]}
    inputs = {name: torch.tensor(values, device=device) for name, values in rows.items()}
    with pytest.raises(ValueError, match="position_ids: expected one document in each row"):
        model(torch.full((1, 8), 5, device=device), **inputs)


@pytest.mark.parametrize("family", ["StableLm", "Nemotron"])
def test_cu_seqlens_that_a_model_keeps_to_itself(family, device):
    """No layer is given them. The mask has positions that are made of them, not those that the model counts for
    itself.
    """
    build = {"auto": transformers.AutoModelForCausalLM, "device": device, **SIZES, "num_key_value_heads": 2}
    model, inputs = tiny(f"{family}Config", "packing_ops", **build), packed(device)
    layout = packing_ops.PackedMetadata.from_lengths(LENGTHS, device=device).to_transformers()
    wanted = alone(tiny(f"{family}Config", "eager", **build), inputs)
    for given in (inputs, {"input_ids": inputs["input_ids"]}):
        torch.testing.assert_close(model(**given, **layout, use_cache=False).logits, wanted, **CLOSE)


def test_a_mask_of_every_query_and_key_tells_all(device):
    inputs = packed(device)
    name, sizes = ENCODERS["distilbert"]
    documents = inputs["position_ids"].eq(0).cumsum(1)
    seen = (documents[:, None, :, None] == documents[:, None, None, :]).expand(1, 1, -1, -1)
    model, wanted = (
        tiny(name, "packing_ops", device=device, **sizes),
        alone(tiny(name, "eager", device=device, **sizes), inputs),
    )
    torch.testing.assert_close(model(**inputs, attention_mask=seen)[0], wanted, **CLOSE)
    ids, position_ids = inputs.values()
    bert = tiny("BertConfig", "packing_ops", device=device, **SIZES)
    by_name = bert(ids, attention_mask=seen, position_ids=position_ids)[0]
    torch.testing.assert_close(bert(ids, seen, position_ids=position_ids)[0], by_name, rtol=0, atol=0)


def test_masked_tokens_that_esm_counts_over_a_row(device):
    """It scales all of a row by them, those of other documents too."""
    name, sizes = ENCODERS["esm"]
    model = tiny(name, "packing_ops", device=device, **sizes, token_dropout=True, mask_token_id=2)
    inputs = packed(device)
    with pytest.raises(ValueError, match=r"position_ids: expected one document in each row.* EsmModel mixes tokens"):
        model(**inputs)
    model(inputs["input_ids"])


@pytest.mark.asserts_on_gpu
@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_compiled_models_that_tell_no_attention_refuse_documents(name, device, fresh_compile, capfd):
    model = torch.compile(tiny("DebertaV2Config", "packing_ops", device=device, **SIZES), backend="aot_eager")
    inputs = packed(device)
    model(inputs["input_ids"], position_ids=torch.arange(16, device=device)[None])
    numbers = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(LENGTHS))[None].to(device)
    documents = {"position_ids": inputs["position_ids"], "attention_mask": numbers}[name]
    with refused(f"{name}: expected one document in each row, got several", capfd):
        model(inputs["input_ids"], **{name: documents})


def test_forward_called_by_itself_is_told_of(device, caplog):
    transformers.utils.logging.enable_propagation()
    name, sizes = ENCODERS["distilbert"]
    tiny(name, "packing_ops", device=device, **sizes).forward(**packed(device))
    assert "whose forward is called by itself" in caplog.text


def test_other_models_are_not_watched(device):
    """Inside a call of ours too; and an error leaves nothing behind."""
    name, sizes = ENCODERS["distilbert"]
    ours, stock = (tiny(name, how, device=device, **sizes) for how in ("packing_ops", "eager"))
    inputs, seen = packed(device), []
    stock.embeddings.register_forward_hook(lambda *_: seen.append(call.current()))
    wanted = stock(**inputs)[0]
    assert seen == [None]
    with pytest.raises(RuntimeError, match="indices"):
        ours(input_ids=inputs["input_ids"].double(), position_ids=inputs["position_ids"])
    assert call.current() is None
    torch.testing.assert_close(stock(**inputs)[0], wanted, rtol=0, atol=0)


def test_calls_of_two_threads(device):
    name, sizes = ENCODERS["distilbert"]
    both, found = threading.Barrier(2), {}

    def meet(*_):
        both.wait(30)

    models = [tiny(name, "packing_ops", device=device, **sizes) for _ in range(2)]
    for model in models:
        model.embeddings.register_forward_hook(meet)
    inputs = [packed(device), packed(device, [3, 3, 10])]
    threads = [threading.Thread(target=lambda i=i: found.update({i: models[i](**inputs[i])[0]})) for i in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    stock = tiny(name, "eager", device=device, **sizes)
    for i, lengths in enumerate([LENGTHS, [3, 3, 10]]):
        torch.testing.assert_close(found[i], alone(stock, inputs[i], lengths), **CLOSE)


# --- models that read masks ---

READERS = {
    "doge": ("DogeConfig", {**GROUPED, "keep_window_size": 8}),
    "bloom": ("BloomConfig", {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "rembert": (
        "RemBertConfig",
        {**SIZES, "input_embedding_size": 32, "output_embedding_size": 32, "is_decoder": True},
    ),
    "megatron": ("MegatronBertConfig", {**SIZES, "is_decoder": True}),
    "codegen": ("CodeGenConfig", {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
}


@pytest.mark.parametrize(
    ("family", "kind"),  # bloom has no position_ids
    [(name, kind) for name in READERS for kind in ("rows", "padded", "packed") if (name, kind) != ("bloom", "packed")],
)
def test_readers_get_a_mask(family, kind, device):
    name, sizes = READERS[family]
    build = {"auto": transformers.AutoModelForCausalLM, "device": device, **sizes}
    model, stock = tiny(name, "packing_ops", **build), tiny(name, "eager", **build)
    inputs = packed(device)
    if kind == "packed":
        return torch.testing.assert_close(model(**inputs, use_cache=False)[0], alone(stock, inputs), **CLOSE)
    inputs = {"input_ids": inputs["input_ids"].view(2, 8), "use_cache": False}
    real = torch.ones_like(inputs["input_ids"])
    if kind == "padded":
        real[1, 5:] = 0
        inputs["attention_mask"] = real
    torch.testing.assert_close(model(**inputs)[0][real > 0], stock(**inputs)[0][real > 0], **CLOSE)


def test_masks_that_an_outer_model_has_made(device, served):
    text = {**GROUPED, "model_type": "gemma"}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"text_config": text, "vision_config": {**vision, "image_size": 8, "patch_size": 4}, "projection_dim": 32}
    build = {"auto": transformers.AutoModelForImageTextToText, "device": device, **sizes}
    inputs = packed(device)
    wanted = alone(tiny("PaliGemmaConfig", "eager", **build), inputs)
    model = tiny("PaliGemmaConfig", "packing_ops", **build)
    torch.testing.assert_close(model(**inputs)[0], wanted, **CLOSE)
    assert len(served) == 2


def test_positions_that_tell_no_documents(device):
    sizes = {"state_dim": 5, "act_dim": 3, "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 1}
    widths = {"states": 5, "actions": 3, "rewards": 1, "returns_to_go": 1}.items()
    inputs = {name: torch.randn(1, 6, width, device=device) for name, width in widths}
    inputs |= {"timesteps": torch.arange(6, device=device)[None], "attention_mask": torch.ones(1, 6, device=device)}
    stock, model = (tiny("DecisionTransformerConfig", how, device=device, **sizes) for how in ("eager", "packing_ops"))
    torch.testing.assert_close(model(**inputs)[0], stock(**inputs)[0], **CLOSE)


def test_a_pattern_has_the_shape_of_its_mask(device):
    """Layers next to attention ask whether they got a mask of two dimensions: LFM2."""
    pattern = masks.packing_ops_mask(2, 8, 8, mask_function=transformers.masking_utils.causal_mask_function)
    assert pattern.shape == pattern.size() == (2, 1, 8, 8)
    assert (pattern.dim(), pattern.ndim, pattern.size(-1)) == (4, 4, 8)
    assert pattern[:, :, :, :] is pattern[:, :, -8:] is pattern
    assert pattern[:, :, -3:, :].shape == (2, 1, 3, 8)


@pytest.mark.parametrize(
    "read",
    [
        lambda mask: mask[:, :, :, :1],
        lambda mask: mask[:, :, :2],
        lambda mask: mask.dtype,
        lambda mask: torch.zeros(2) + mask,
        lambda mask: torch.where(mask, 0, 1),
    ],
    ids=["keys", "first queries", "dtype", "sum", "function"],
)
def test_a_pattern_says_who_may_read_it(read):
    with pytest.raises((AttributeError, TypeError), match="attention_mask: expected to reach attention as it is"):
        read(masks.MaskPattern(True, (-1, -1), 8, None, None))


# --- options of attention ---


def attend(**options):
    rows = [torch.randn(1, heads, 4, 8) for heads in (4, 2, 2)]
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    return attention.packing_ops_attention(module, *rows, options.pop("mask", None), scaling=0.3, **options)[0]


def test_options_that_nobody_knows_are_refused(caplog):
    transformers.utils.logging.enable_propagation()
    for mask in (None, torch.ones(1, 1, 4, 4, dtype=torch.bool)):
        with pytest.raises(NotImplementedError, match="block_indices: expected no option that packing_ops"):
            attend(block_indices=torch.zeros(1), mask=mask)
    assert "SDPA" not in caplog.text
    attend(block_indices=None, head_mask=False, use_cache=True, num_items_in_batch=torch.tensor(3))
    attend(shift_labels=torch.zeros(1), ignore_index=-100)  # what loss functions of transformers read
    assert "SDPA" not in caplog.text
    torch.manual_seed(1)
    plain = attend()
    torch.manual_seed(1)
    biased = attend(position_bias=torch.randn(1, 4, 4, 4))
    assert "position_bias is not supported; this call runs by SDPA" in caplog.text
    assert (plain - biased).abs().max() > 0.01


def test_a_bias_beside_what_sdpa_has_not():
    torch.manual_seed(1)
    wanted = attend(position_bias=torch.full((1, 4, 4, 4), 2.0).tril(-1), softcap=1e4)
    torch.manual_seed(1)
    torch.testing.assert_close(attend(position_bias=torch.full((1, 4, 4, 4), 2.0).tril(-1)), wanted, **CLOSE)


def test_options_of_the_installed_models():
    """One that is new must be looked at: served, harmless or refused."""
    folder, passed = Path(transformers.__file__).parent / "models", {}
    for path in folder.glob("*/modeling_*.py"):
        for found in _CALL.findall(path.read_text()):
            passed |= dict.fromkeys(re.findall(r"^\s*(\w+)=", found, re.M), path.parent.name)
    known = {"attention_mask", "query", "key", "value", "dropout", "scaling", "is_causal", "sliding_window", "softcap"}
    known |= {"s_aux", "cu_seq_lens_q", "cu_seq_lens_k", "position_ids"} | HARMLESS | SDPA
    assert len(passed) > 10
    refused = {"block_indices", "indices", "sinks"}
    assert passed.keys() - known <= refused


def test_attention_with_such_options_is_left_alone():
    sparse = {"index_topk_blocks": 1, "index_local_blocks": 1, "index_block_size": 4, "index_n_heads": 2}
    sizes = {**GROUPED, **sparse, "index_head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 2}
    sizes |= {"layer_types": ["minimax_m3_sparse"] * 2, "mlp_layer_types": ["dense"] * 2}
    model = tiny("MiniMaxM3VLTextConfig", "eager", auto=transformers.AutoModelForCausalLM, **sizes)
    with pytest.warns(UserWarning, match="was not swapped: MiniMaxM3VLAttention has attention with block_indices"):
        assert not apply_packing_ops(model, rope=False, rms_norm=False)
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("packing_ops")
    with pytest.raises(NotImplementedError, match="block_indices"):
        model(torch.randint(3, 60, (1, 16)))
