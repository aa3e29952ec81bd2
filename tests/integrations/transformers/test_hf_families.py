"""Every family of the installed transformers: its RoPE and RMSNorm are swapped and right, or it says why they are
not.
"""

import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers.hf_families import (  # noqa: E402
    KINDS,
    NONE,
    PAGE,
    lines_of_page,
    made,
    mappings,
    page_of,
    row_of,
    row_of_module,
    tiny_config,
)

import packing_ops as po  # noqa: E402
from packing_ops.integrations._patching import stock_of  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops, rms_norm, rope  # noqa: E402

FAMILIES = mappings()
LENGTHS = [9, 4, 14]
# Trained packed, under our attention; Qwen3.5 with layers that carry a state.
PACKED = [
    "apertus", "arcee", "bitnet", "cohere", "cohere2", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone4", "gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "glm4_moe", "glm4_moe_lite",
    "gpt_neox", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "jetmoe", "llama4_text", "longcat_flash", "minicpm3",
    "minimax_m2", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "qwen3_5_moe_text", "qwen3_5_text",
    "seed_oss", "smollm3", "starcoder2", "vaultgemma", "youtu",
]  # fmt: skip

NOT_RUN = {
    "xlstm",  # the recipe's sizes do not fit each other
    "gemma4_unified_assistant",  # drafts from the keys of another model
}
IN_DOUBLE = {"dory"}  # its gradients are a hundred times its weights, and so is what is rounded


def loss_and_gradients(model, batches):
    model.zero_grad()
    total = 0.0
    for batch in batches:
        targets = (batch["labels"][:, 1:] != -100).sum()
        loss = model(**batch).loss * targets
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_training(found, wanted):
    (loss, gradients), (wanted_loss, wanted_gradients) = found, wanted
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        atol = 1e-4 * gradient.abs().max().item() + 1e-6
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=atol, msg=lambda text, n=name: n + text)


def left_in_silence(model, row):
    """Classes of rotary embeddings, rotating attention and RMSNorm that are stock, with no reason in the row."""
    swapped = {id(module) for each in rope.find(model)[0] for module in (each.rotary, *each.attentions)}
    swapped |= {id(module) for module in rms_norm._formulas(model) if rms_norm._is_ours(module.forward)}
    silent = set()
    for module in model.modules():
        cls = stock_of(type(module))
        rotary = ("RotaryEmbedding" in cls.__name__ and "Vision" not in cls.__name__) or rope.functions_called(cls)
        verdict = row.rope if rotary else row.rms_norm if cls.__name__.endswith("RMSNorm") else None
        if cls.__module__.startswith("transformers.") and verdict in ("yes", NONE) and id(module) not in swapped:
            silent.add(cls.__name__)
    return silent


@pytest.mark.parametrize(("kind", "model_type"), [(kind, name) for kind in KINDS for name in FAMILIES[kind]])
def test_swapped_or_told_why(kind, model_type):
    """Where a part is swapped, loss and every gradient are the stock ones, on a batch of two rows."""
    classes = FAMILIES[kind][model_type]
    model, _ = made(model_type, *classes)
    row = row_of_module(classes[1]) if model is None else row_of(model)
    if page := lines_of_page():
        lines = page_of({(kind, model_type): row}).splitlines()
        assert next(each for each in lines if each.startswith(f"| {model_type} |")) in page, "make families"
    assert all(row)  # a reason, where it is no yes
    if model is None:
        return
    assert left_in_silence(model, row) == set()
    swapped = "yes" in (row.rope[:3], row.rms_norm[:3])
    if swapped and model.device.type != "meta" and model_type not in NOT_RUN:
        torch.manual_seed(1)
        ids = torch.randint(3, 60, (2, 11))
        batch = {"input_ids": ids, "labels": ids, **({"use_cache": False} if kind == "CAUSAL_LM" else {})}
        model = model.double() if model_type in IN_DOUBLE else model
        found = loss_and_gradients(model, [batch])
        revert_packing_ops(model)
        assert_same_training(found, loss_and_gradients(model, [batch]))


@pytest.mark.skipif(not lines_of_page(), reason="the page is of another transformers")
def test_the_page_names_no_family_that_is_not_there():
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert {*rows} - {"model_type"} == {name for found in FAMILIES.values() for name in found}


@pytest.mark.parametrize("model_type", [name for name in PACKED if name in FAMILIES["CAUSAL_LM"]])
def test_trains_packed_as_document_by_document(model_type, device):
    model, why = made(model_type, *FAMILIES["CAUSAL_LM"][model_type])
    if model is None:
        pytest.skip(why)
    assert model.device.type != "meta", "too large: it needs sizes in MORE of hf_families.py"
    assert_trains_packed(model, device)


def assert_trains_packed(model, device):
    model = model.to(device)
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # SDPA leaves it out
    torch.manual_seed(1)
    documents = [torch.randint(3, 60, (length,), device=device) for length in LENGTHS]
    alone = [{"input_ids": ids[None], "labels": ids[None], "use_cache": False} for ids in documents]
    wanted = loss_and_gradients(model, alone)
    metadata = po.PackedMetadata.from_lengths(LENGTHS, device=device)
    ids = torch.cat(documents)
    row = {
        "input_ids": ids[None],
        "labels": po.mask_boundary_labels(ids, metadata.cu_seqlens)[None],
        "use_cache": False,
    }
    row["position_ids"] = metadata.position_ids[None]
    applied = apply_packing_ops(model)
    assert applied.rope
    assert applied.attention
    found = loss_and_gradients(model, [row])
    revert_packing_ops(model)
    assert_same_training(found, wanted)


def test_layers_of_gemma_4_that_share_keys_train_packed(device):
    """They are given slices of cos, sin and the mask, of all positions."""
    if "gemma4_text" not in FAMILIES["CAUSAL_LM"]:
        pytest.skip("not in this transformers")
    config_class, model_class = FAMILIES["CAUSAL_LM"]["gemma4_text"]
    kinds = ["sliding_attention", "full_attention"] * 2
    more = {"num_hidden_layers": 4, "layer_types": kinds, "num_kv_shared_layers": 2}
    config = tiny_config("gemma4_text", config_class, **more)
    torch.manual_seed(0)
    assert_trains_packed(model_class._from_config(config).float(), device)


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "roberta", "eurobert"])
def test_encoders_train_packed(model_type, device):
    """Full attention, and windows on both sides in ModernBERT; every gradient of the masked language model."""
    config_class, model_class = FAMILIES["MASKED_LM"].get(model_type) or pytest.skip("not in this transformers")
    model = made(model_type, config_class, model_class)[0].to(device)
    torch.manual_seed(1)
    documents = [torch.randint(3, 60, (length,), device=device) for length in LENGTHS]

    def trained(batches):
        model.zero_grad()
        total = 0.0
        for batch in batches:
            logits = model(**batch).logits.flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, batch["input_ids"].flatten(), reduction="sum")
            loss.backward()
            total += loss.item()
        return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    wanted = trained([{"input_ids": ids[None]} for ids in documents])
    positions = po.PackedMetadata.from_lengths(LENGTHS, device=device).position_ids
    offset = 1 if model_type == "roberta" else 0  # it counts from the padding's index on
    options = {"rope": "modern" in model_type or model_type == "eurobert", "rms_norm": False}
    applied = apply_packing_ops(model, **options)
    assert applied.attention == 2
    found = trained([{"input_ids": torch.cat(documents)[None], "position_ids": positions[None] + offset}])
    revert_packing_ops(model)
    assert_same_training(found, wanted)


def test_a_trial_needs_no_more_than_its_module():
    """No weights, no GPU, no random numbers, no gradient, in whatever the caller runs under."""
    module = sys.modules["transformers.models.llama.modeling_llama"]
    from packing_ops.integrations._rope_trial import rotation_of

    state = torch.get_rng_state()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        default, _ = torch.get_default_dtype(), torch.set_default_dtype(torch.float64)
        try:
            rotation = rotation_of.__wrapped__(module.apply_rotary_pos_emb)  # not the one that is kept
        finally:
            torch.set_default_dtype(default)
    assert (rotation.tables, rotation.interleaved, rotation.partial) == ("elements", False, False)
    assert torch.equal(torch.get_rng_state(), state)
