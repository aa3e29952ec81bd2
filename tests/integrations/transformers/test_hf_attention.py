"""attn_implementation="packing_ops" in real transformers models: packed, padded, cached, compiled, checkpointed."""

import importlib
import json
import sys

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

from helpers.hf_models import FAMILIES, made_mask, tiny_model  # noqa: E402

import packing_ops  # noqa: E402
from packing_ops._runtime import arguments  # noqa: E402
from packing_ops.integrations import transformers as integration  # noqa: E402
from packing_ops.integrations.transformers import documents as batch_documents  # noqa: E402
from packing_ops.integrations.transformers import masks, register, revert_registration, versions  # noqa: E402

LENGTHS = [7, 1, 12, 4]
SLIDING = ["mistral", "gemma2", "gemma3", "gpt_oss"]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

every_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register()
    arguments.warned.clear()


@pytest.fixture
def warnings(monkeypatch):
    """What fell back, in order."""
    told = []
    monkeypatch.setattr(versions, "warn_once", torch.compiler.assume_constant_result(lambda why: told.append(why)))
    return told


@pytest.fixture
def layouts(monkeypatch):
    """Counts the layouts worked out from values."""
    made = []
    build, check = batch_documents._from_values, batch_documents.gate.check_documents
    monkeypatch.setattr(batch_documents, "_from_values", lambda *given: made.append("values") or build(*given))
    monkeypatch.setattr(batch_documents.gate, "check_documents", lambda *given: made.append("kwargs") or check(*given))
    return made


def documents(device, lengths=LENGTHS):
    return [torch.randint(3, 61, (length,), device=device) for length in lengths]


def packed(docs):
    """input_ids and position_ids [1, T]."""
    positions = torch.cat([torch.arange(len(d), device=d.device) for d in docs])
    return {"input_ids": torch.cat(docs)[None], "position_ids": positions[None]}


def explicit(docs):
    metadata = packing_ops.PackedMetadata.from_lengths([len(d) for d in docs], device=docs[0].device)
    return metadata.to_transformers()


def padded(docs, side):
    """input_ids and attention_mask [batch, longest]."""
    longest = max(map(len, docs)) + (3 if side == "holes" else 0)
    mask = torch.zeros(len(docs), longest, dtype=torch.long, device=docs[0].device)
    for row, document in zip(mask, docs, strict=True):
        slots = {
            "right": torch.arange(len(document)),
            "left": torch.arange(longest - len(document), longest),
            "holes": torch.randperm(longest)[: len(document)],
        }[side]
        row[slots.to(row.device)] = 1
    ids = torch.zeros_like(mask).masked_scatter(mask.bool(), torch.cat(docs))
    return {"input_ids": ids, "attention_mask": mask}


def alone(model, docs):
    return torch.cat([model(document[None]).logits[0] for document in docs])


def loss_of(model, inputs, labels, num_targets):
    return model(**inputs, labels=labels, num_items_in_batch=num_targets).loss


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


# --- packed ---


@every_family
@pytest.mark.parametrize("how", ["position_ids", "kwargs"])
def test_packed_equals_each_document_alone(family, how, device, warnings):
    docs = documents(device)
    model = tiny_model(family, attn_implementation="packing_ops", device=device)
    expected = alone(tiny_model(family, device=device), docs)
    inputs = packed(docs) | (explicit(docs) if how == "kwargs" else {})
    torch.testing.assert_close(model(**inputs).logits[0], expected, **CLOSE)
    over_the_row = model(inputs["input_ids"]).logits[0]
    assert (over_the_row - expected).abs().max() > 0.1  # plain causal over the row is something else
    assert not warnings


@every_family
def test_loss_and_every_gradient_equal_the_unpacked_batch(family, device):
    docs = documents(device)
    model = tiny_model(family, attn_implementation="packing_ops", device=device)
    reference = tiny_model(family, device=device)
    num_targets = sum(len(d) - 1 for d in docs)
    inputs = packed(docs) | explicit(docs)
    labels = packing_ops.mask_boundary_labels(inputs["input_ids"][0], inputs["cu_seq_lens_q"])[None]
    loss = loss_of(model, inputs, labels, num_targets)
    loss.backward()
    long_enough = [d for d in docs if len(d) > 1]
    expected = sum(loss_of(reference, {"input_ids": d[None]}, d[None], num_targets) for d in long_enough)
    expected.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    ours, theirs = gradients(model), gradients(reference)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * gradient.abs().max().item() + 1e-6)


@pytest.mark.parametrize("beside", ["nothing", "ones", "padding in front"])
@pytest.mark.parametrize("rows", [[[5, 3], [2, 6]], [[1, 7], [7, 1]], [[1, 1, 6]], [[1] * 4, [1, 3]]], ids=str)
def test_packed_rows_of_a_larger_batch(rows, beside, device):
    """A single token at the start of a row has the position of the next document's first token: 0."""
    docs, pads = documents(device, [n for row in rows for n in row]), 3 if beside == "padding in front" else 0
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    inputs = {name: F.pad(value.view(len(rows), -1), (pads, 0)) for name, value in packed(docs).items()}
    if beside != "nothing":
        inputs["attention_mask"] = F.pad(torch.ones_like(inputs["input_ids"][:, pads:]), (pads, 0))
    torch.testing.assert_close(model(**inputs).logits[:, pads:].flatten(0, 1), alone(model, docs), **CLOSE)


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_beside_a_mask(use_cache, device):
    docs = documents(device)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    inputs = packed(docs)
    ones = torch.ones_like(inputs["input_ids"])
    expected = alone(model, docs)
    logits = model(**inputs, attention_mask=ones, use_cache=use_cache).logits[0]
    torch.testing.assert_close(logits, expected, **CLOSE)
    ones[:, -4:] = 0  # the last document is padding
    logits = model(**inputs, attention_mask=ones, use_cache=use_cache).logits[0, :-4]
    torch.testing.assert_close(logits, expected[:-4], **CLOSE)


# --- padded, cached, encoders ---


@every_family
@pytest.mark.parametrize("use_cache", [False, True])
def test_rows_without_mask_and_positions(family, use_cache, device, warnings):
    ids = torch.randint(3, 61, (2, 11), device=device)
    logits = tiny_model(family, attn_implementation="packing_ops", device=device)(ids, use_cache=use_cache).logits
    torch.testing.assert_close(logits, tiny_model(family, device=device)(ids, use_cache=use_cache).logits, **CLOSE)
    assert not warnings


@every_family
@pytest.mark.parametrize("side", ["left", "right", "holes"])
def test_padded_equals_eager_on_real_tokens(family, side, device, warnings):
    inputs = padded(documents(device), side)
    real = inputs["attention_mask"].bool()
    logits = tiny_model(family, attn_implementation="packing_ops", device=device)(**inputs).logits
    torch.testing.assert_close(logits[real], tiny_model(family, device=device)(**inputs).logits[real], **CLOSE)
    # A window counts slots: padding between real ones needs a mask.
    assert bool(warnings) == (side == "holes" and family in SLIDING)


@every_family
def test_generation_with_cache_equals_stock(family, device, warnings):
    inputs = padded(documents(device, [6, 9]), "left")
    options = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
    expected = tiny_model(family, device=device).eval().generate(**inputs, **options)
    model = tiny_model(family, attn_implementation="packing_ops", device=device).eval()
    assert torch.equal(model.generate(**inputs, **options), expected)
    assert warnings
    assert all(reason.startswith("decoding with a KV cache") for reason in warnings)
    assert torch.equal(model.generate(**inputs, **options, cache_implementation="static"), expected)


@pytest.mark.parametrize("side", ["none", "right", "left"])
def test_encoder_attends_in_full(side, device, warnings):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.BertConfig(vocab_size=61, initializer_range=0.3, **sizes)
    model = transformers.BertModel(config).to(device).eval()
    inputs = padded(documents(device, [6, 6] if side == "none" else [6, 9]), "right" if side == "none" else side)
    real = inputs["attention_mask"].bool()
    model.set_attn_implementation("eager")
    expected = model(**inputs).last_hidden_state[real]
    model.set_attn_implementation("packing_ops")
    if model.config._attn_implementation != "packing_ops":
        pytest.skip(f"no attn_implementation names BERT's attention in transformers {transformers.__version__}")
    torch.testing.assert_close(model(**inputs).last_hidden_state[real], expected, **CLOSE)
    assert not warnings


def test_rows_padded_on_either_side_stay_apart(device):
    """The positions of the second row go on where those of the first end."""
    inputs = {"attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 1]], device=device)}
    inputs["input_ids"] = torch.randint(3, 61, (2, 6), device=device)
    real = inputs["attention_mask"].bool()
    logits = tiny_model("llama", attn_implementation="packing_ops", device=device)(**inputs).logits
    torch.testing.assert_close(logits[real], tiny_model("llama", device=device)(**inputs).logits[real], **CLOSE)


# --- found once ---


@every_family
@pytest.mark.parametrize("kind", ["kwargs", "position_ids", "mask"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_metadata_once_per_forward(family, kind, checkpointing, device, layouts):
    docs = documents(device)
    inputs = padded(docs, "left") if kind == "mask" else packed(docs) | (explicit(docs) if kind == "kwargs" else {})
    model = tiny_model(family, attn_implementation="packing_ops", device=device, num_hidden_layers=4, **_four(family))
    if checkpointing:
        model.gradient_checkpointing_enable()
    model(**inputs).logits.sum().backward()
    # A look at values may wait for the GPU; explicit cu_seqlens are checked, which costs no wait.
    assert layouts == (["kwargs"] if kind == "kwargs" else ["values"])


def _four(family):
    return {"layer_types": ["sliding_attention", "full_attention"] * 2} if "layer_types" in FAMILIES[family][1] else {}


def test_changed_values_are_seen(device, layouts):
    docs = documents(device, [4, 4])
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    inputs = packed(docs)
    torch.testing.assert_close(model(**inputs).logits[0], alone(model, docs), **CLOSE)
    inputs["position_ids"].copy_(torch.arange(8))
    torch.testing.assert_close(model(**inputs).logits[0], model(torch.cat(docs)[None]).logits[0], **CLOSE)


def test_inference_mode_then_training(device):
    inputs = packed(documents(device))
    model = tiny_model("gemma2", attn_implementation="packing_ops", device=device)
    with torch.inference_mode():
        expected = model(**inputs).logits
    logits = model(**inputs).logits
    logits.sum().backward()
    torch.testing.assert_close(logits, expected, **CLOSE)


# --- training around it ---


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["kwargs", "position_ids", "mask"])
def test_gradient_checkpointing(reentrant, kind, device):
    docs = documents(device)
    inputs = padded(docs, "left") if kind == "mask" else packed(docs) | (explicit(docs) if kind == "kwargs" else {})
    found = []
    for checkpointing in (False, True):
        model = tiny_model("gemma2", attn_implementation="packing_ops", device=device)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        logits = model(**inputs).logits
        logits.square().sum().backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


@pytest.mark.parametrize(("family", "kind"), [("gemma2", "kwargs"), ("llama", "position_ids"), ("gemma2", "mask")])
def test_compiled_whole(family, kind, device, fresh_compile):
    docs = documents(device)
    inputs = padded(docs, "left") if kind == "mask" else packed(docs) | (explicit(docs) if kind == "kwargs" else {})
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    layers = {} if family == "gemma2" else {"num_hidden_layers": 1}  # one of each kind
    model = tiny_model(family, attn_implementation="packing_ops", device=device, **layers)
    expected = model(**inputs).logits[real]
    expected.sum().backward()
    eager = gradients(model)
    model.zero_grad()
    logits = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs).logits[real]
    logits.sum().backward()
    torch.testing.assert_close(logits, expected, **CLOSE)
    for name, gradient in eager.items():
        torch.testing.assert_close(gradients(model)[name], gradient, rtol=1e-4, atol=1e-4)


def test_autocast(device):
    docs = documents(device)
    inputs = packed(docs) | explicit(docs)
    model = tiny_model("qwen3", attn_implementation="packing_ops", device=device)
    expected = model(**inputs).logits
    with torch.autocast(device, torch.bfloat16):
        logits = model(**inputs).logits
        stock = tiny_model("qwen3", device=device)(docs[0][None]).logits[0]
    logits.float().sum().backward()
    theirs = (stock - expected[0, : LENGTHS[0]]).abs().max()
    assert (logits - expected)[0, : LENGTHS[0]].abs().max() <= 2 * theirs
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.skipif(transformers.__version__ < "5", reason="does not read an implementation from config.json")
def test_save_and_reload(tmp_path, device):
    docs = documents(device)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"attn_implementation": "packing_ops"}))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).to(device).train()
    assert again.config._attn_implementation == "packing_ops"
    torch.testing.assert_close(again(**packed(docs)).logits, model(**packed(docs)).logits, rtol=0, atol=0)
    again.set_attn_implementation("eager")
    again.set_attn_implementation("packing_ops")
    torch.testing.assert_close(again(**packed(docs)).logits, model(**packed(docs)).logits, rtol=0, atol=0)


# --- what is not served, and what is wrong ---


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_dropout_falls_back_with_the_packed_mask(family, device, warnings):
    docs = documents(device)
    model = tiny_model(family, attn_implementation="packing_ops", device=device, attention_dropout=1e-9)
    logits = model(**packed(docs), **explicit(docs)).logits[0]
    torch.testing.assert_close(logits, alone(tiny_model(family, device=device), docs), **CLOSE)
    assert set(warnings) == {"dropout 1e-09 in attention"}


def test_fallback_warns_once_and_equals_sdpa(device, caplog):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device, head_dim=520)
    stock = tiny_model("llama", attn_implementation="sdpa", device=device, head_dim=520)
    inputs = padded(documents(device), "right")
    real = inputs["attention_mask"].bool()
    transformers.utils.logging.enable_propagation()
    for _ in range(2):
        torch.testing.assert_close(model(**inputs).logits[real], stock(**inputs).logits[real], **CLOSE)
    assert len([r for r in caplog.records if "head_dim 520" in r.message]) == 1


def test_attention_weights_are_announced_as_missing(device, warnings):
    docs = documents(device)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device).eval()
    logits = model(**packed(docs), output_attentions=True).logits[0]
    torch.testing.assert_close(logits, alone(model, docs), **CLOSE)
    assert set(warnings) == {"output_attentions is not supported"}


def test_four_dimensional_mask_is_honoured(device, warnings):
    ids = torch.randint(3, 61, (2, 6), device=device)
    mask = torch.rand(2, 1, 6, 6, device=device) < 0.5
    mask |= torch.eye(6, dtype=torch.bool, device=device)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    stock = tiny_model("llama", attn_implementation="sdpa", device=device)
    expected = stock(ids, attention_mask=mask).logits
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected, **CLOSE)
    assert "neither causal nor full" in warnings[0]


def test_a_function_mixed_into_the_mask_is_honoured(device):
    config = tiny_model("llama", attn_implementation="packing_ops").config
    inputs = {
        "embeds": torch.zeros(1, 4, 32, device=device),
        "position_ids": torch.tensor([[0, 1, 0, 1]], device=device),
    }
    prefix = {"or_mask_function": lambda batch, head, q, k: k < 1}
    mask = made_mask("create_causal_mask", config, **inputs, **prefix)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    sliding = tiny_model("mistral", attn_implementation="packing_ops").config
    even = {"and_mask_function": lambda batch, head, q, k: k % 2 == 0}
    mask = made_mask("create_sliding_window_causal_mask", sliding, **inputs, **even)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]
    plain = made_mask("create_causal_mask", config, **inputs)
    assert isinstance(plain, masks.MaskPattern)
    assert (plain.causal, plain.window) == (True, (-1, -1))


def test_contradictions(device):
    docs = documents(device)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    good, kwargs = packed(docs), explicit(docs)
    short = {name: value - 1 if name.startswith("cu") else value for name, value in kwargs.items()}
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected to end at the batch's"):
        model(**good, **short)
    mask = torch.ones_like(good["input_ids"])
    model(**good, **kwargs, attention_mask=mask)
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="attention_mask: expected no padding beside cu_seq_lens_q"):
        model(**good, **kwargs, attention_mask=mask)
    with pytest.raises(ValueError, match="position_ids: expected to restart where cu_seq_lens_q"):
        model(good["input_ids"], position_ids=torch.arange(24, device=device)[None], **kwargs)
    with pytest.raises(ValueError, match=r"attention_mask: expected \[1, 24\] like the batch, got \[1, 20\]"):
        model(**good, attention_mask=mask[:, :20])
    with pytest.raises(ValueError, match=r"attention_mask: expected \[1, 24\] like the batch, got \[1, 27\]"):
        model(**good, attention_mask=torch.ones(1, 27, device=device))
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected a row of its own documents, got a mask"):
        model(**good, **kwargs, attention_mask=torch.ones(1, 1, 24, 24, dtype=torch.bool, device=device))
    kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"].clone()
    model(**good, **kwargs)
    kwargs["cu_seq_lens_k"][1] += 1
    with pytest.raises(ValueError, match="cu_seq_lens_k: expected the documents of cu_seq_lens_q"):
        model(**good, **kwargs)
    kwargs["cu_seq_lens_k"] = kwargs["cu_seq_lens_k"][1:]
    with pytest.raises(ValueError, match="cu_seq_lens_k: expected as many documents"):
        model(**good, **kwargs)
    kwargs["cu_seq_lens_q"] = kwargs["cu_seq_lens_q"].float()
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected int32"):
        model(**good, **kwargs)
    kwargs["cu_seq_lens_q"] = [0, 12]
    with pytest.raises(ValueError, match=r"cu_seq_lens_q: expected an int32 tensor .* got \[0, 12\]"):
        model(**good, **kwargs)


@pytest.mark.parametrize(
    ("rows", "positions", "lengths", "message"),
    [
        (1, [*range(5), *range(7)], [4, 8], "restart where cu_seq_lens_q starts a document"),
        (1, [*range(5), *range(7)], [12], "restart where cu_seq_lens_q starts a document"),
        (2, [*range(6), *range(6)], [12], "restart where cu_seq_lens_q starts a document"),
        (2, [*range(6), *range(6)], [3, 3, 2, 4], "restart where cu_seq_lens_q starts a document"),
        (2, [*range(6)], [3, 3, 2, 4], "restart where cu_seq_lens_q starts a document"),
    ],
    ids=["elsewhere", "one document", "over two rows", "in two rows", "in two equal rows"],
)
def test_positions_that_contradict_the_kwargs(rows, positions, lengths, message, device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    ids = torch.randint(3, 61, (rows, 12 // rows), device=device)
    positions = torch.tensor(positions, device=device).view(-1, 12 // rows)
    kwargs = packing_ops.PackedMetadata.from_lengths(lengths, device=device).to_transformers()
    with pytest.raises(ValueError, match=f"position_ids: expected to {message}"):
        model(ids, position_ids=positions, **kwargs)


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [
        ([0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 0, 0], [5, 3, 4]),
        ([0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 0, 0], [5, 7]),
        ([0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 0, 0], [4, 8]),
        ([1, 1, 1, 0, 1, 2, 0, 0, 0, 0, 1, 2], [6, 6]),
        ([7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8], [3, 9]),
        ([0, 1, 0, 1, 0, 0, 0, 1, 2, 0, 1, 2], [2, 2, 1, 1, 3, 3]),
    ],
    ids=["row filled", "in the last document", "documents filled", "on the left", "going on", "short documents"],
)
def test_positions_of_padded_rows_do_not_contradict_the_kwargs(positions, lengths, device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    ids, positions = torch.randint(3, 61, (1, 12), device=device), torch.tensor([positions], device=device)
    kwargs = packing_ops.PackedMetadata.from_lengths(lengths, device=device).to_transformers()
    kwargs["cu_seq_lens_q"] = kwargs["cu_seq_lens_q"].long()
    logits = model(ids, position_ids=positions, **kwargs).logits
    pieces = zip(ids.split(lengths, 1), positions.split(lengths, 1), strict=True)
    alone_ = [model(i, position_ids=p, **explicit([i[0]])).logits for i, p in pieces]
    torch.testing.assert_close(logits, torch.cat(alone_, 1), **CLOSE)


# --- registering ---


def test_registering_again_and_under_another_name(device, request):
    request.addfinalizer(lambda: revert_registration("packing_ops_other"))
    prepare = transformers.masking_utils._preprocess_mask_arguments
    register()
    register("packing_ops_other")
    assert transformers.masking_utils._preprocess_mask_arguments is prepare
    docs = documents(device)
    model = tiny_model("llama", attn_implementation="packing_ops_other", device=device)
    torch.testing.assert_close(model(**packed(docs)).logits[0], alone(model, docs), **CLOSE)


@pytest.mark.parametrize("name", ["flash_packing", "my_sdpa", ""])
def test_names_that_transformers_treats_as_its_own(name):
    with pytest.raises(ValueError, match="name: expected"):
        register(name)


@pytest.mark.parametrize("name", ["register", "apply_packing_ops", "revert_packing_ops"])
def test_missing_transformers_names_the_extra(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for module in [module for module in sys.modules if module.startswith(integration.__name__)]:
        monkeypatch.delitem(sys.modules, module)
    again = importlib.import_module(integration.__name__)  # works without
    with pytest.raises(ImportError, match=r"pip install 'transformers>=5.17'"):
        getattr(again, name)


@every_family
def test_other_implementations_stay_as_they_were(family, device):
    docs = documents(device, [5, 6])
    stock = tiny_model(family, device=device)
    assert masks.PATCH.is_applied
    positions = packed(docs)["position_ids"].cpu()
    mask = made_mask("create_causal_mask", stock.config, torch.zeros(1, 11, 32), position_ids=positions)
    assert mask.shape == (1, 1, 11, 11)
