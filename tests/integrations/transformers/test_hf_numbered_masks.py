"""Documents that a 2-D attention_mask numbers (1, 1, 1, 2, 2, 0), and keywords that nearly tell them."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers.gpu_asserts import asserting, refused  # noqa: E402
from helpers.hf_models import CACHE, FAMILIES, tiny_model  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops, register, versions  # noqa: E402

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_CONV = {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]}
POSITIONS = ["none", "row", "documents"]
ROWS = {  # slots of a batch
    "padded on the right": [[1] * 7 + [2] + [3] * 12 + [0] * 4],
    "no padding": [[1] * 3 + [2] * 9],
    "two rows": [[1] * 5 + [2] * 3 + [0] * 2, [0] + [1] * 2 + [2] * 3 + [3] * 4],
    "padding between": [[0, 0, 1, 1, 1, 0, 2, 2, 0, 3, 3, 3, 3]],
    "padding inside": [[1, 1, 0, 1, 2, 0, 0, 2, 2]],
    "any numbers": [[17] * 3 + [5] * 4 + [17] * 2 + [1] * 3],
}


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.fixture(autouse=True)
def warnings(monkeypatch):
    """What fell back, in order."""
    told = []
    monkeypatch.setattr(versions, "warn_once", torch.compiler.assume_constant_result(lambda why: told.append(why)))
    return told


def documents_of(mask):
    """(row, slots) of each document."""
    found = []
    for row, numbers in enumerate(mask.tolist()):
        before = 0
        for slot, number in enumerate(numbers):
            if number and number != before:
                found.append((row, []))
            if number:
                found[-1][1].append(slot)
                before = number
    return found


def batch_of(rows, positions="none", device="cpu", dtype=torch.int64):
    mask = torch.tensor(rows, device=device).to(dtype)
    inputs = {"input_ids": torch.randint(3, 61, mask.shape, device=device), "attention_mask": mask}
    if positions == "row":
        inputs["position_ids"] = torch.arange(mask.shape[1], device=device)[None]
    if positions == "documents":
        inputs["position_ids"] = torch.zeros_like(inputs["input_ids"])
        for row, slots in documents_of(mask):
            inputs["position_ids"][row, slots] = torch.arange(len(slots), device=device)
    return inputs


def assert_each_alone(logits, stock, inputs):
    for row, slots in documents_of(inputs["attention_mask"]):
        expected = stock(inputs["input_ids"][row, slots][None])[0]
        torch.testing.assert_close(logits[row, slots][None], expected, **CLOSE)


# Padding inside a document is a distance there, unless its positions leave it out.
CASES = [(rows, positions) for rows in ROWS for positions in POSITIONS if rows != "padding inside"]
CASES += [("padding inside", "documents")]


@pytest.mark.parametrize(
    ("family", "rows", "positions"),
    [
        *((family, "two rows", positions) for family in FAMILIES for positions in POSITIONS),
        *(("gemma2", *case) for case in CASES if case[0] != "two rows"),
    ],
)
def test_each_document_alone(family, positions, rows, device, warnings):
    inputs = batch_of(ROWS[rows], positions, device)
    model = tiny_model(family, attn_implementation="packing_ops", device=device)
    logits = model(**inputs).logits
    assert_each_alone(logits, tiny_model(family, device=device), inputs)
    plain = {**inputs, "attention_mask": (inputs["attention_mask"] != 0).long()}
    if positions != "documents":
        assert (model(**plain).logits - logits).abs().max() > 0.1  # as one document it is something else
    if rows in ("padded on the right", "no padding"):
        assert not warnings


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float32])
def test_dtypes(dtype, device):
    inputs = batch_of(ROWS["two rows"], "none", device, dtype)
    logits = tiny_model("llama", attn_implementation="packing_ops", device=device)(**inputs).logits
    assert_each_alone(logits, tiny_model("llama", device=device), inputs)


@pytest.mark.parametrize("numbers", [[7, 5, 9], [0.5, 0.25, 0.125], [3.0, 2.0, 1.0]], ids=str)
@pytest.mark.parametrize("family", ["Qwen3Next", "Lfm2"])
def test_layers_that_multiply_by_their_mask_get_ones(family, numbers, device):
    more = {"Qwen3Next": {"num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, **_DELTA}}
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "head_dim": 8, **more.get(family, _CONV)})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().to(device)
    mask = torch.tensor(numbers, device=device).repeat_interleave(torch.tensor([5, 3, 6], device=device))[None]
    inputs = {"input_ids": torch.randint(3, 61, mask.shape, device=device), "attention_mask": mask}
    stock = copy.deepcopy(model)
    apply_packing_ops(model)
    assert_each_alone(model(**inputs).logits, stock, inputs)


@pytest.mark.parametrize("how", ["plain", "masks of 4 dimensions", asserting("compiled")])
@torch.no_grad()
def test_negative_numbers_are_refused(how, device, fresh_compile, capfd):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    if how == "masks of 4 dimensions":
        config = transformers.DogeConfig(**SIZES, head_dim=8)
        model = transformers.DogeForCausalLM._from_config(config, attn_implementation="packing_ops").to(device)
    call = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    mask = torch.tensor([[1, 1, -1, -1, 2, 2]], device=device)
    with refused("attention_mask: expected 0 for padding and numbers above it", capfd):
        call(torch.randint(3, 61, mask.shape, device=device), attention_mask=mask)


@pytest.mark.parametrize("how", ["dropout", "cache", "static cache", "two pieces", "forward", "positional", "LoRA"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("positions", POSITIONS)
def test_ways_to_a_mask(how, family, positions, device, warnings):
    """Our attention, the 4-D mask, SDPA with a mask of ours."""
    inputs, stock = batch_of(ROWS["two rows"], positions, device), tiny_model(family, device=device)
    more = {"attention_dropout": 1e-9} if how == "dropout" else {}
    model = call = tiny_model(family, attn_implementation="packing_ops", device=device, **more)
    if how == "forward":
        call = model.forward
    elif how == "LoRA":
        peft = pytest.importorskip("peft")
        call = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    if how == "positional":
        logits = model(inputs["input_ids"], inputs["attention_mask"], inputs.get("position_ids")).logits
    elif how == "cache":
        logits = model(**inputs, use_cache=True).logits
    elif how in ("static cache", "two pieces"):
        kept = transformers.DynamicCache(config=model.config)
        if how == "static cache":
            kept = transformers.StaticCache(config=model.config, max_cache_len=16)
        pieces = [slice(0, 4), slice(4, None)] if how == "two pieces" else [slice(None)]
        found = []
        for piece in pieces:
            part = {name: tensor[:, piece] for name, tensor in inputs.items()}
            part["attention_mask"] = inputs["attention_mask"][:, : piece.stop]
            found.append(model(**part, **{CACHE: kept}, use_cache=True).logits)
        logits = torch.cat(found, 1)
    else:
        logits = call(**inputs).logits
    assert_each_alone(logits, stock, inputs)
    assert bool(warnings) == (how in ("dropout", "static cache", "two pieces"))


@pytest.mark.parametrize(
    ("how", "positions"),
    [
        ("compiled", "none"),
        ("compiled", "documents"),
        *(("checkpointed", positions) for positions in POSITIONS),
        ("checkpointed reentrant", "row"),
    ],
)
def test_training(how, positions, device, fresh_compile):
    inputs = batch_of(ROWS["two rows"], positions, device)
    # Both masks are made where one layer takes one of them.
    short = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    sizes = short if (how, positions) == ("compiled", "documents") else {}
    model, stock = (
        tiny_model("gemma2", attn_implementation=name, device=device, **sizes) for name in ("packing_ops", "eager")
    )
    call = model
    if how == "compiled":
        call = torch.compile(model, fullgraph=True, backend="aot_eager")
    else:
        model.gradient_checkpointing_enable({"use_reentrant": how.endswith("reentrant")})
        model.enable_input_require_grads()
    logits, wanted = call(**inputs).logits, 0
    assert_each_alone(logits, stock, inputs)
    (logits * (inputs["attention_mask"] != 0)[..., None]).square().sum().backward()
    for row, slots in documents_of(inputs["attention_mask"]):
        wanted += stock(inputs["input_ids"][row, slots][None]).logits.square().sum()
    wanted.backward()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_layers_compiled_one_by_one(device, fresh_compile):
    inputs = batch_of(ROWS["two rows"], "none", device)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    assert_each_alone(model(**inputs).logits, tiny_model("llama", device=device), inputs)


def test_models_that_count_by_their_mask_get_ones(device):
    """A mixture of experts weighs its loss by the mask, OPT takes its positions from it."""
    inputs = batch_of([[1] * 4 + [2] * 6], "documents", device)
    sizes = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, experts_implementation="eager")
    model = transformers.MixtralForCausalLM(config).to(device)
    model.set_attn_implementation("packing_ops")
    plain = {**inputs, "attention_mask": None}  # positions tell the documents
    torch.testing.assert_close(model(**inputs).aux_loss, model(**plain).aux_loss)
    opt = transformers.OPTConfig(**{**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 10})
    model = transformers.OPTForCausalLM(opt).to(device).eval()
    del inputs["position_ids"]
    expected = model(**inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}).logits
    model.set_attn_implementation("packing_ops")
    inputs["attention_mask"] = torch.full_like(inputs["input_ids"], 2)  # one document
    torch.testing.assert_close(model(**inputs).logits, expected, **CLOSE)


@pytest.mark.parametrize("name", ["Doge", "CodeGen"])
def test_models_that_read_their_masks(name, device):
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "keep_window_size": 8}
    if name == "CodeGen":
        sizes = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="packing_ops").to(device).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    inputs = batch_of(ROWS["two rows"], "row", device)
    assert_each_alone(model(**inputs, use_cache=False).logits, stock, inputs)


def test_an_encoder(device, warnings):
    config = transformers.BertConfig(**SIZES, initializer_range=0.3)
    model = transformers.BertModel(config).to(device).eval()
    stock = copy.deepcopy(model)
    model.set_attn_implementation("packing_ops")
    inputs = batch_of(ROWS["two rows"], "documents", device)
    assert_each_alone(model(**inputs).last_hidden_state, stock, inputs)
    assert not warnings


# --- where documents would see each other ---


@pytest.mark.parametrize("name", ["DebertaV2", "MobileBert"])
def test_numbers_that_reach_no_attention_are_refused(name, device):
    config = getattr(transformers, f"{name}Config")(**SIZES)
    model = transformers.AutoModel.from_config(config, attn_implementation="packing_ops").to(device).eval()
    inputs = batch_of([[1] * 4 + [2] * 6], device=device)
    with pytest.raises(ValueError, match="attention_mask: expected one document in each row, got several"):
        model(**inputs)
    model(inputs["input_ids"], attention_mask=inputs["attention_mask"].clamp(max=1))


def test_generation_is_refused(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device).eval()
    inputs = batch_of([[1] * 4 + [2] * 6], device=device)
    with pytest.raises(ValueError, match="attention_mask: expected 0 and 1 beside a KV cache, got the numbers"):
        model.generate(**inputs, max_new_tokens=3, use_cache=True)


def test_another_sequence_is_refused(device):
    config = transformers.T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    model = transformers.T5Model(config).to(device).eval()
    model.set_attn_implementation("packing_ops")
    inputs = batch_of([[1] * 4 + [2] * 6], device=device)
    inputs["decoder_input_ids"] = inputs["input_ids"]
    with pytest.raises(ValueError, match=r"^attention_mask: expected one document in each row, .* decoder of T5Model"):
        model(**inputs)
    if model.decoder.config._attn_implementation == "packing_ops":  # up to 5.17 it is set for the whole model alone
        with pytest.raises(ValueError, match=r"encoder_attention_mask: expected one document in .* of T5Stack"):
            model.forward(**inputs)  # of which no call is known
    inputs["attention_mask"] = inputs["attention_mask"].clamp(max=1)
    model(**inputs)


NEAR = ["cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_lens", "cu_seq_len_q", "cu_seqlens_q_padded", "cu_seqlen"]
NEAR += ["cum_seq_lens", "packed_seq_lengths", "seq_lens", "seqlens", "seq_lengths", "sequence_lengths", "doc_lens"]
NEAR += ["seq_idx"]


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_name_the_right_keyword(name, device):
    model, stock = tiny_model("llama", device=device), tiny_model("llama", device=device)
    assert apply_packing_ops(model)
    ids, lengths = torch.randint(3, 61, (1, 9), device=device), torch.tensor([4, 5])
    documents = po.PackedMetadata.from_lengths(lengths, device=device)
    given = documents.cu_seqlens if name.startswith("cu") else documents.lengths
    given = documents.seq_idx[None] if name == "seq_idx" else given
    compiled = [torch.compile(model, backend="eager")] if name == NEAR[0] else []
    for call in (model, model.model, *compiled):
        with pytest.raises(TypeError, match=rf"^{name}: expected cu_seq_lens_q and cu_seq_lens_k, .* got {name}"):
            call(ids, **{name: given})
    model(ids, **{name: None})
    stock(ids, **{name: given})


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_lists_of_boundaries_are_named(name, device):
    model = tiny_model("llama", device=device)
    apply_packing_ops(model)
    ids = torch.randint(3, 61, (1, 9), device=device)
    with pytest.raises(ValueError, match=rf"^{name}: expected an int32 tensor \[num_documents \+ 1\], got \[0, 4, 9\]"):
        model(ids, **{name: [0, 4, 9]})


def test_keywords_of_collators_beside_positions(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    documents = po.PackedMetadata.from_lengths([4, 5], device=device)
    ids = torch.randint(3, 61, (1, 9), device=device)
    others = {**documents.to_unsloth(), "seq_idx": documents.seq_idx[None]}  # as DataCollatorWithFlattening has it
    found = model(ids, position_ids=documents.position_ids[None], **others).logits
    expected = model(ids, **documents.to_transformers(), position_ids=documents.position_ids[None]).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("given", ["attention_mask", "position_ids"])
def test_a_mask_of_one_query_keeps_no_documents_apart(given, device):
    """VisualBERT makes one, for all queries."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.VisualBertConfig(vocab_size=61, visual_embedding_dim=16, **sizes)
    model = transformers.VisualBertModel._from_config(config, attn_implementation="packing_ops").to(device)
    numbers = torch.tensor([[1, 1, 1, 2, 2]], device=device)
    told = {"attention_mask": numbers, "position_ids": torch.tensor([[0, 1, 2, 0, 1]], device=device)}
    with pytest.raises(
        ValueError, match=f"{given}: expected one document in each row, got several, and VisualBertModel"
    ):
        model(torch.arange(3, 8, device=device)[None], **{given: told[given]})
