"""Positions of a call: a document gets the angles, the scales and the labels that it has in a separate row."""

import copy
import functools

import pytest
import torch
from helpers import cu_seqlens_of

transformers = pytest.importorskip("transformers")

from helpers.hf_models import tiny_model  # noqa: E402

from packing_ops._runtime import arguments, gate  # noqa: E402
from packing_ops.integrations.transformers import (  # noqa: E402
    apply_packing_ops,
    positions,
    register,
    revert_packing_ops,
    versions,
)

SIZES = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
TRAINED = 8  # positions up to which RoPE does not scale
LONG = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": TRAINED}
KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "longrope": LONG,
    "llama3": {
        **{"factor": 4.0, "original_max_position_embeddings": TRAINED},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def weighted(model, device):
    """Its norms have weights that are not all one, which RoPE in front of them shows."""
    numbers = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3, mean=float(parameter.dim() == 1), generator=numbers)
    return model.eval().to(device)


def scaled(kind, device, family="Llama", **more):
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **KINDS[kind]}
    config = getattr(transformers, f"{family}Config")(
        **{**SIZES, "max_position_embeddings": TRAINED, "rope_parameters": rope, **more}
    )
    return weighted(getattr(transformers, f"{family}ForCausalLM")(config), device)


def documents_of(lengths, device):
    numbers = torch.Generator().manual_seed(1)
    return [torch.randint(3, 60, (1, length), generator=numbers).to(device) for length in lengths]


def ways(lengths, device):
    """Each way to say where documents are."""
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    cu_seqlens = cu_seqlens_of(lengths, device)
    told = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    numbers = torch.arange(1, len(lengths) + 1, device=device).repeat_interleave(torch.tensor(lengths, device=device))
    return [{"position_ids": positions}, told, {"position_ids": positions, **told}, {"attention_mask": numbers[None]}]


@torch.no_grad()
def assert_alone(model, stock, lengths, device, cached=False):
    """stock makes a model without a past: dynamic NTK keeps its longest row."""
    documents = documents_of(lengths, device)
    wanted = torch.cat([stock()(document, use_cache=False).logits for document in documents], 1)
    for given in ways(lengths, device):
        found = model(torch.cat(documents, 1), use_cache=cached, **given).logits
        torch.testing.assert_close(found, wanted, **CLOSE)


# --- RoPE that looks at the length ---


@pytest.mark.parametrize("how", ["named", "applied"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_of_rope_is_that_of_each_document(kind, how, device):
    """Shorter than the training, as long, one longer, and much longer; again after a longer row, which must not
    show.
    """
    register()
    model, stock = scaled(kind, device), scaled(kind, device)
    if how == "named":
        model.set_attn_implementation("packing_ops")
    else:
        apply_packing_ops(model)
    for lengths in ([5, 17, 8, 9, 3], [4, 3], [20, 21], [8, 8]):
        assert_alone(model, lambda: copy.deepcopy(stock), lengths, device)


def phi3(device):
    return scaled("longrope", device, "Phi3", max_position_embeddings=32, original_max_position_embeddings=TRAINED)


def phimoe(device):
    """Scales cos and sin by the length, too."""
    more = {"num_local_experts": 2, "max_position_embeddings": 32, "original_max_position_embeddings": TRAINED}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **LONG, "short_mscale": 1.1, "long_mscale": 1.3}
    return scaled("longrope", device, "Phimoe", rope_parameters=rope, **more)


def gemma3(device):
    """Has a RoPE for each kind of layer."""
    plain, long = {"rope_type": "default", "rope_theta": 1e4}, {"rope_type": "longrope", "rope_theta": 1e4, **LONG}
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
        **{"rope_parameters": {"sliding_attention": plain, "full_attention": long}, "max_position_embeddings": 32},
    )
    return weighted(transformers.Gemma3ForCausalLM(config), device)


@pytest.mark.parametrize("make", [phi3, phimoe, gemma3])
def test_longrope_of_families(make, device):
    model, stock = make(device), make(device)
    apply_packing_ops(model)
    try:
        for _ in range(2):
            stock(torch.ones(1, 17, dtype=torch.long, device=device))
    except UnboundLocalError:
        pytest.skip("this transformers computes longrope of a kind of layers once")
    for lengths in ([5, 17, 8, 9], [3, 4]):
        assert_alone(model, lambda: stock, lengths, device)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_other_attention_and_reverted_models_are_those_of_transformers(kind, device):
    model, stock = scaled(kind, device), scaled(kind, device)
    row, positions = torch.cat(documents_of([5, 17], device), 1), ways([5, 17], device)[0]
    wanted = copy.deepcopy(stock)(row, **positions).logits
    apply_packing_ops(model)
    assert not torch.equal(model(row, **positions).logits, wanted)
    model.set_attn_implementation("sdpa")
    found, _ = model.model.rotary_emb(wanted, **positions)
    assert torch.equal(found.table, stock.model.rotary_emb(wanted, **positions)[0])
    revert_packing_ops(model)
    assert "forward" not in vars(model.model.rotary_emb)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@torch.no_grad()
def test_several_documents_beside_angles_by_length_of_several_axes_are_refused(kind, device):
    lengths = [5, 17, 8]
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "mrope_section": [1, 1, 2], **KINDS[kind]}
    text = {**SIZES, "max_position_embeddings": TRAINED, "rope_parameters": rope}
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": text["hidden_size"], "num_heads": 2, "patch_size": 4}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision)
    model = weighted(transformers.Qwen2VLForConditionalGeneration(config), device)
    documents, stock = documents_of(lengths, device), copy.deepcopy(model)
    apply_packing_ops(model)
    axes = {"position_ids": ways(lengths, device)[0]["position_ids"].expand(3, 1, -1)}
    for way in (*ways(lengths, device), axes):
        with pytest.raises(
            ValueError,
            match="one document in each row, got several, and Qwen2VLRotaryEmbedding scales the angles of all",
        ):
            model(torch.cat(documents, 1), **way)
    torch.testing.assert_close(model(documents[1]).logits, stock(documents[1]).logits, **CLOSE)


def test_longrope_in_a_graph(device, fresh_compile):
    model, stock = (scaled("longrope", device, num_hidden_layers=1) for _ in range(2))
    apply_packing_ops(model)
    compiled = torch.compile(model, backend="aot_eager")
    assert_alone(compiled, lambda: stock, [5, 17, 8], device)


def test_a_batch_of_rows_and_a_step_with_a_cache(device):
    """Rows of one document each: a padded batch has the angles of each row, and generate those of its tokens."""
    model, stock = scaled("longrope", device), scaled("longrope", device)
    apply_packing_ops(model)
    long, short = documents_of([17, 6], device)
    batch, mask = (
        torch.zeros(2, 17, dtype=torch.long, device=device),
        torch.ones(2, 17, dtype=torch.long, device=device),
    )
    batch[0], batch[1, :6], mask[1, 6:] = long, short, 0
    positions = (mask.cumsum(1) - 1) * mask
    found = model(batch, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(found[:1], stock(long).logits, **CLOSE)
    torch.testing.assert_close(found[1:, :6], stock(short).logits, **CLOSE)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(short, **options), stock.generate(short, **options))


# --- attention that depends on positions in other ways ---


def hunyuan(device, layers=2):
    """Has a norm with weights behind RoPE."""
    config = transformers.HunYuanDenseV1Config(**{**SIZES, "num_hidden_layers": layers})
    return weighted(transformers.HunYuanDenseV1ForCausalLM(config), device)


def hunyuan_moe(device):
    more = {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 16}
    return weighted(transformers.HunYuanMoEV1ForCausalLM(transformers.HunYuanMoEV1Config(**SIZES, **more)), device)


def hunyuan_vl(device):
    """The same behind four axes; of its text, which counts along the row."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}
    config = transformers.HunYuanVLTextConfig(**SIZES, rope_parameters=rope)
    return weighted(transformers.AutoModel.from_config(config), device)


def ministral3(device):
    """Scales queries by position."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
    config = transformers.Ministral3Config(**SIZES, max_position_embeddings=64, rope_parameters=rope)
    return weighted(transformers.Ministral3ForCausalLM(config), device)


def llama4(device, floor=4, layers=(1, 0)):
    """Scales queries of layers without RoPE by their place in the row."""
    config = transformers.Llama4TextConfig(
        **{**SIZES, "num_hidden_layers": len(layers), "no_rope_layers": list(layers), "intermediate_size_mlp": 32},
        **{"num_local_experts": 2, "num_experts_per_tok": 1, "floor_scale": floor, "attn_scale": 0.5},
        **{"max_position_embeddings": 128, "attention_chunk_size": 128, "attn_temperature_tuning": True},
    )
    return weighted(transformers.Llama4ForCausalLM(config), device)


@pytest.mark.parametrize("make", [hunyuan, hunyuan_moe, ministral3, llama4])
@pytest.mark.parametrize("cached", [False, True], ids=["", "cache"])
def test_each_document_has_the_positions_that_it_has_alone(make, cached, device):
    model, stock = make(device), make(device)
    apply_packing_ops(model)
    assert_alone(model, lambda: stock, [9, 3, 7, 1], device, cached)


@pytest.mark.parametrize(("make", "layers"), [(hunyuan, 1), (llama4, (0,))])
@torch.no_grad()
def test_numbers_in_a_graph(make, layers, device, fresh_compile):
    """Whether a row has several documents is not known there."""
    model, stock = make(device, layers=layers), make(device, layers=layers)
    apply_packing_ops(model)
    compiled = torch.compile(model, backend="aot_eager")
    assert_alone(compiled, lambda: stock, [9, 7], device)
    row, ones = torch.cat(documents_of([9, 7], device), 1), torch.ones(1, 16, dtype=torch.long, device=device)
    wanted = stock(row, use_cache=False).logits
    torch.testing.assert_close(compiled(row, attention_mask=ones, use_cache=False).logits, wanted, **CLOSE)


def test_a_hole_in_a_row_starts_no_document(device):
    """Where positions start at 2; padding on the left and jumps within a document start none either."""
    rows = [[0, 1, 9, 2, 3], [9, 9, 0, 1, 2], [0, 1, 5, 0, 1], [4, 5, 6, 0, 1]]
    padding = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 1, 1, 1], [1] * 5, [1] * 5], device=device)
    found = positions._raised(torch.tensor(rows, device=device), padding, 2)
    expected = torch.tensor([[2, 3, 0, 4, 5], [0, 0, 2, 3, 4], [2, 3, 7, 2, 3], [4, 5, 6, 2, 3]], device=device)
    assert torch.equal(found.where(padding != 0, 0), expected)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_gradients_of_llama_4(checkpointing, device):
    model, stock = llama4(device).train(), llama4(device).train()
    apply_packing_ops(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    lengths = [9, 3, 7]
    documents = documents_of(lengths, device)
    sum(stock(document, use_cache=False).logits.square().sum() for document in documents).backward()
    model(torch.cat(documents, 1), use_cache=False, **ways(lengths, device)[2]).logits.square().sum().backward()
    for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5 * theirs.grad.abs().max().item())


@torch.no_grad()
def test_several_rows_of_llama_4(device):
    """One document in each: as transformers has it. Several are refused where a scale would be of another slot."""
    model, stock = llama4(device), llama4(device)
    apply_packing_ops(model)
    rows = torch.cat(documents_of([12, 12], device))
    torch.testing.assert_close(model(rows, use_cache=False).logits, stock(rows, use_cache=False).logits, **CLOSE)
    positions = torch.cat([torch.arange(n, device=device) for n in (9, 3, 2, 10)]).view(2, 12)
    with pytest.raises(ValueError, match=r"position_ids: expected one row, or several shorter than 4, got \[2, 12\]"):
        model(rows, position_ids=positions, use_cache=False)
    model, stock = llama4(device, floor=13), llama4(device, floor=13)
    apply_packing_ops(model)
    wanted = [stock(row, use_cache=False).logits for row in rows.view(1, -1).split([9, 3, 2, 10], 1)]
    found = model(rows, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(found.flatten(0, 1), torch.cat(wanted, 1)[0], **CLOSE)


@torch.no_grad()
def test_llama_4_generates_what_it_did(device):
    model, stock = llama4(device), llama4(device)
    apply_packing_ops(model)
    prompt, options = documents_of([7], device)[0], {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(prompt, **options), stock.generate(prompt, **options))


@torch.no_grad()
def test_text_of_a_model_with_axes(device):
    model, stock = hunyuan_vl(device), hunyuan_vl(device)
    apply_packing_ops(model)
    documents = documents_of([9, 3, 7], device)
    wanted = torch.cat([stock(document, use_cache=False)[0] for document in documents], 1)
    for given in ways([9, 3, 7], device):
        torch.testing.assert_close(model(torch.cat(documents, 1), use_cache=False, **given)[0], wanted, **CLOSE)


# --- what costs nothing ---


@torch.no_grad()
def test_rows_of_one_document_get_no_positions_and_no_more_readings(device, monkeypatch):
    """A mask of ones numbers nothing: documents are found once, by what the layers ask for too."""
    register()
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    seen, layouts, find = [], [], gate.unpad_layout
    model.model.register_forward_pre_hook(lambda *call: seen.append(call[2].get("position_ids")), with_kwargs=True)
    monkeypatch.setattr(gate, "unpad_layout", lambda *given: layouts.append(given) or find(*given))
    mask = torch.ones(2, 9, dtype=torch.long, device=device)
    mask[1, 5:] = 0
    model(torch.randint(3, 60, (2, 9), device=device), attention_mask=mask)
    assert seen == [None]
    assert len(layouts) == 1


# --- labels ---


def qwen3(device):
    return weighted(transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)), device).train()


@pytest.mark.parametrize("positions", [False, True], ids=["", "positions"])
@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
@pytest.mark.parametrize("fused", [False, True], ids=["stock", "fused"])
def test_no_target_is_predicted_by_padding(fused, dtype, positions, device):
    """On the left of a row, between its documents, and on the right."""
    model, stock, lengths = qwen3(device), qwen3(device), [4, 3, 5]
    documents = documents_of(lengths, device)
    losses = [stock(document, labels=document).loss * (document.shape[1] - 1) for document in documents]
    apply_packing_ops(model, fused_loss=fused)
    for gaps in ([2, 0, 0, 0], [0, 0, 0, 2], [1, 2, 1, 1], [0, 1, 0, 0]):
        if dtype == torch.bool and not positions:
            continue  # nothing says where a document starts
        row, numbers, where = [], [], []
        for number, (gap, document) in enumerate(zip(gaps, documents, strict=False), 1):
            row += [torch.zeros(1, gap, dtype=torch.long, device=device), document]
            numbers += [0] * gap + [number] * document.shape[1]
            where += [0] * gap + [*range(document.shape[1])]
        row = torch.nn.functional.pad(torch.cat(row, 1), (0, gaps[3]))
        mask = torch.tensor([numbers + [0] * gaps[3]], device=device)
        given = {"position_ids": torch.tensor([where + [0] * gaps[3]], device=device)} if positions else {}
        labels = row.masked_fill(mask == 0, -100)
        loss = model(row, attention_mask=mask.to(dtype), labels=labels, **given).loss
        torch.testing.assert_close(loss, sum(losses) / (sum(lengths) - len(lengths)), **CLOSE)


@pytest.mark.parametrize("how", ["function", "partial"])
def test_a_loss_function_of_the_user_gets_labels_as_they_are(how, device, monkeypatch):
    model, lengths = qwen3(device), [5, 7, 4]
    documents, given = documents_of(lengths, device), []

    def own(logits, labels, vocab_size, **options):
        given.append(labels)
        return torch.nn.functional.cross_entropy(logits[0].float(), labels[0], reduction="sum")

    model.loss_function = own if how == "function" else functools.partial(own, extra=1)
    labels = torch.randint(0, 60, (1, 16), device=device)
    wanted = sum(
        model(document, labels=part).loss for document, part in zip(documents, labels.split(lengths, 1), strict=True)
    )
    apply_packing_ops(model)
    told = []
    monkeypatch.setattr(arguments, "warned", set())
    monkeypatch.setattr(versions.logging.get_logger(versions.__name__), "warning", told.append)
    for way in ways(lengths, device)[:3]:
        torch.testing.assert_close(model(torch.cat(documents, 1), labels=labels, **way).loss, wanted, **CLOSE)
        assert torch.equal(given[-1], labels)
    assert len(told) == 1
    assert "loss_function of Qwen3ForCausalLM is not transformers', and gets labels as they are" in told[0]


@pytest.mark.parametrize("how", ["set", "partial", "wrapped"])
def test_transformers_own_loss_function_that_is_set_again(how, device):
    model, stock, lengths = qwen3(device), qwen3(device), [5, 7, 4]
    loss = versions.ForCausalLMLoss
    model.loss_function = {
        "set": loss,
        "partial": functools.partial(loss, ignore_index=-100),
        "wrapped": functools.wraps(loss)(lambda *given, **options: loss(*given, **options)),
    }[how]
    documents = documents_of(lengths, device)
    wanted = sum(stock(document, labels=document).loss * (document.shape[1] - 1) for document in documents) / 13
    apply_packing_ops(model)
    for way in ways(lengths, device):
        row = torch.cat(documents, 1)
        torch.testing.assert_close(model(row, labels=row, **way).loss, wanted, **CLOSE)
