"""Families whose values have another head_dim than their keys, or whose head_dim is above 256: no padding, no SDPA."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers import assert_same  # noqa: E402

import packing_ops  # noqa: E402
from packing_ops.integrations.transformers import attention, register, versions  # noqa: E402

LENGTHS = [7, 1, 12, 4]
_SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
          "max_position_embeddings": 64, "initializer_range": 0.3, "use_cache": False, "pad_token_id": 0}  # fmt: skip
_LATENT = {**_SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
           "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2}  # fmt: skip
FAMILIES = {
    "DeepseekV2Config": (_LATENT, {(24, 16)}),
    "DeepseekV3Config": (_LATENT, {(24, 16)}),
    "Gemma4TextConfig": (
        {**_SIZES, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 264, "sliding_window": 5,
         "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": 61,
         "hidden_size_per_layer_input": 8},
        {(16, 16), (264, 264)},
    ),
}  # fmt: skip


def model_of(family, implementation, device):
    if not hasattr(transformers, family):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    config = getattr(transformers, family)(**FAMILIES[family][0])
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).to(device).train()


def packed(documents):
    positions = torch.cat([torch.arange(len(d), device=d.device) for d in documents])
    return {"input_ids": torch.cat(documents)[None], "position_ids": positions[None]}


@pytest.fixture
def widths(monkeypatch):
    """(head_dim of q, of v) of every call of the op; a fallback fails."""
    seen = set()
    attend = attention.attend

    def watched(q, k, v, *args, **options):
        seen.add((q.shape[-1], v.shape[-1]))
        return attend(q, k, v, *args, **options)

    def refuse(reason):
        raise AssertionError(f"fell back: {reason}")

    register()
    monkeypatch.setattr(attention, "attend", watched)
    monkeypatch.setattr(versions, "warn_once", refuse)
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_equal_the_stock_model_document_by_document(family, device, widths):
    documents = [torch.randint(3, 61, (length,), device=device) for length in LENGTHS]
    model, stock = (model_of(family, name, device) for name in ("packing_ops", "eager"))
    targets = sum(length - 1 for length in LENGTHS)
    inputs = packed(documents)
    cu_seqlens = packing_ops.cu_seqlens_from_lengths(LENGTHS).to(device)
    labels = packing_ops.mask_boundary_labels(inputs["input_ids"][0], cu_seqlens)[None]
    loss = model(**inputs, labels=labels, num_items_in_batch=targets).loss
    alone = [stock(d[None], labels=d[None], num_items_in_batch=targets).loss for d in documents if len(d) > 1]
    torch.testing.assert_close(loss, sum(alone), rtol=1e-5, atol=1e-5)
    loss.backward()
    sum(alone).backward()
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            tolerance = 1e-5 * theirs.grad.abs().max().item() + 1e-6
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=tolerance)
    assert widths == FAMILIES[family][1]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_reaches_no_other(family, device, widths):
    documents = [torch.randint(3, 61, (length,), device=device) for length in LENGTHS]
    model = model_of(family, "packing_ops", device)
    before = model(**packed(documents)).logits[0].split(LENGTHS)
    documents[2] = (documents[2] - 3 + 5) % 58 + 3
    after = model(**packed(documents)).logits[0].split(LENGTHS)
    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        if i == 2:
            assert (old - new).abs().max() > 0.1
        else:
            assert_same(new, old)
