"""Balance losses of transformers' mixtures of experts: a packed row against its documents alone."""

import importlib

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hf_models import OLD

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops

LENGTHS, TAIL, TOP_K, EXPERTS = [5, 1, 11], 4, 2, 4
FAMILIES = {
    "mixtral": ("Mixtral", {"num_local_experts": EXPERTS}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": 16}),
}


def made(family, device):
    """A tiny model, its stock balance loss, a padded row of documents and their metadata."""
    name, own = FAMILIES[family]
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": TOP_K,
        "initializer_range": 0.3,
    }
    config = getattr(transformers, f"{name}Config")(**sizes, **own, output_router_logits=True)
    if not OLD:
        config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(device)
    stock = importlib.import_module(type(model).__module__).load_balancing_loss_func
    metadata = po.PackedMetadata.from_lengths(LENGTHS, total=sum(LENGTHS) + TAIL, device=device)
    return model, stock, torch.randint(1, 64, (1, metadata.total), device=device), metadata


def router_logits_of_the_row(model, tokens):
    """To attention the padding is one more document."""
    apply_packing_ops(model)
    row = po.PackedMetadata.from_lengths([*LENGTHS, TAIL], device=tokens.device)
    given = {"cu_seq_lens_q": row.cu_seqlens, "cu_seq_lens_k": row.cu_seqlens}
    given |= {"max_length_q": row.max_seqlen, "max_length_k": row.max_seqlen}
    return model.model(tokens, position_ids=row.position_ids[None], output_router_logits=True, **given).router_logits


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_of_a_packed_row_is_that_of_its_documents(device, family):
    model, stock, tokens, metadata = made(family, device)
    documents = tokens[0, : sum(LENGTHS)].split(LENGTHS)
    alone = [model.model(document[None], output_router_logits=True).router_logits for document in documents]
    together = tuple(torch.cat(layers) for layers in zip(*alone, strict=True))
    expected = stock(together, EXPERTS, TOP_K)
    each = torch.stack([stock(layers, EXPERTS, TOP_K) for layers in alone])
    (wanted,) = torch.autograd.grad(expected, model.model.embed_tokens.weight)

    logits = router_logits_of_the_row(model, tokens)
    probabilities = [layer.softmax(-1) for layer in logits]
    loss = po.load_balancing_loss(probabilities, metadata, top_k=TOP_K)
    torch.testing.assert_close(loss, expected)
    by_document = po.load_balancing_loss(probabilities, metadata, top_k=TOP_K, by_document=True)
    torch.testing.assert_close(by_document, each)
    assert not torch.allclose(stock(logits, EXPERTS, TOP_K), expected), "counts the padding"
    (found,) = torch.autograd.grad(loss, model.model.embed_tokens.weight)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
