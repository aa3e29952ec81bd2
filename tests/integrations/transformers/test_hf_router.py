"""Balance losses of transformers' mixtures of experts: a packed row against its separate documents."""

import copy
import gc
import importlib
import pickle

import pytest
import torch

pytest.importorskip("transformers")

import transformers

import packing_ops as po
from packing_ops.contrib.unsloth import enable_packing
from packing_ops.data import PackedCollator, PaddingFreeCollator
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops

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


# --- apply_packing_ops(model, balance_loss=): the loss inside of a model ---

CAUSAL = ["batch", "document"]


def rows_of(**options):
    """The rows of a PackedCollator, with unused ends."""
    collator = PackedCollator(14, pad_token_id=9, **options)
    return lambda examples: collator.model_inputs(collator(examples))


def with_padding(examples):
    """A row as a collator of any trainer fills it, through unsloth's."""
    row = [token for example in examples for token in example["input_ids"]] + [9] * TAIL
    ids = torch.tensor([row])
    return {"input_ids": ids, "labels": torch.where(ids == 9, -100, ids)}


def unsloth_row(examples):
    batch = enable_packing(with_padding)(examples)
    assert batch.pop("packed_seq_lengths").sum() == batch["input_ids"].numel()
    return batch


COLLATED = {
    "rows": rows_of(),
    "aligned rows": rows_of(tp_size=4),
    "positions alone": PaddingFreeCollator(
        capacity=sum(LENGTHS) + TAIL, pad_token_id=9, return_flash_attn_kwargs=False
    ),
    "unsloth": unsloth_row,
}


def inputs_of(kind, documents, metadata, device):
    """The batch of a model's call: a packed row with padding at its end, or padded rows."""
    if kind == "packed":
        row = torch.nn.functional.pad(torch.cat(documents), (0, TAIL), value=9)[None]
        return {"input_ids": row, "position_ids": metadata.position_ids[None], **metadata.to_transformers()}
    if kind in COLLATED:
        batch = COLLATED[kind]([{"input_ids": each.tolist(), "num_actions": 0} for each in documents])
        return {name: value.to(device) if hasattr(value, "to") else value for name, value in batch.items()}
    longest = max(LENGTHS) + 2
    rows = torch.full((len(documents), longest), 9, device=device)
    mask = torch.zeros_like(rows)
    for i, document in enumerate(documents):  # on the left and on the right
        start = (i % 2) * (longest - len(document))
        rows[i, start : start + len(document)] = document
        mask[i, start : start + len(document)] = 1
    return {"input_ids": rows, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}


def expected_loss(model, stock, documents, kind):
    """By the stock function: of each document separately, or of all of their tokens."""
    alone = [model.model(document[None], output_router_logits=True).router_logits for document in documents]
    if kind == "document":
        return torch.stack([stock(layers, EXPERTS, TOP_K) for layers in alone]).mean()
    return stock(tuple(torch.cat(layers) for layers in zip(*alone, strict=True)), EXPERTS, TOP_K)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", ["packed", "padded", *COLLATED])
@pytest.mark.parametrize("kind", CAUSAL)
def test_balance_loss_of_a_model(device, family, form, kind):
    """aux_loss, what the loss adds of it, and its gradients."""
    model, stock, tokens, metadata = made(family, device)
    documents = tokens[0, : sum(LENGTHS)].split(LENGTHS)
    expected = expected_loss(model, stock, documents, kind)
    (wanted,) = torch.autograd.grad(expected, model.model.layers[0].input_layernorm.weight)
    assert apply_packing_ops(model, balance_loss=kind, strict=True)
    batch = inputs_of(form, documents, metadata, device)
    labels = torch.where(batch["input_ids"] == 9, -100, batch["input_ids"])
    batch.pop("labels", None)
    model.router_aux_loss_coef = 0.0
    plain = model(**batch, labels=labels).loss
    model.router_aux_loss_coef = 0.7
    out = model(**batch, labels=labels)
    torch.testing.assert_close(out.aux_loss, expected)
    torch.testing.assert_close(out.loss, plain + 0.7 * expected)
    (found,) = torch.autograd.grad(out.aux_loss, model.model.layers[0].input_layernorm.weight)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    revert_packing_ops(model)
    assert importlib.import_module(type(model).__module__).load_balancing_loss_func is stock


@pytest.mark.parametrize("kind", CAUSAL)
def test_fused_and_compiled(device, kind, fresh_compile):
    model, stock, tokens, metadata = made("qwen3_moe", device)
    model.config._experts_implementation = "batched_mm"  # a loop over experts breaks the graph at each
    documents = tokens[0, : sum(LENGTHS)].split(LENGTHS)
    expected = expected_loss(model, stock, documents, kind)
    apply_packing_ops(model, balance_loss=kind, fused_loss=True)
    batch = inputs_of("packed", documents, metadata, device)
    for each in (model, torch.compile(model, backend="aot_eager")):
        torch.testing.assert_close(each(**batch, labels=batch["input_ids"]).aux_loss, expected)


def test_numbered_masks(device):
    """Documents of a padded row by the numbers of its mask."""
    model, stock, tokens, _ = made("mixtral", device)
    documents = tokens[0, : sum(LENGTHS)].split(LENGTHS)
    expected = expected_loss(model, stock, documents, "document")
    apply_packing_ops(model, balance_loss="document")
    numbers = torch.cat([torch.full_like(document, i + 1) for i, document in enumerate(documents)])
    positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
    row = [torch.nn.functional.pad(each, (0, TAIL))[None] for each in (torch.cat(documents), numbers, positions)]
    out = model(input_ids=row[0], attention_mask=row[1], position_ids=row[2])
    torch.testing.assert_close(out.aux_loss, expected)


def test_other_models_and_copies(device):
    """A model of the same module keeps the stock loss; copies and pickles keep ours, also when the first one is
    gone.
    """
    (other, stock, tokens, metadata), (model, *_) = made("mixtral", device), made("mixtral", device)
    documents = tokens[0, : sum(LENGTHS)].split(LENGTHS)
    expected = expected_loss(other, stock, documents, "document")  # of the same weights
    batch = inputs_of("packed", documents, metadata, device)
    apply_packing_ops(other)
    stock_loss = other(**batch).aux_loss
    apply_packing_ops(model, balance_loss="document")
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    torch.testing.assert_close(other(**batch).aux_loss, stock_loss)
    assert not torch.allclose(stock_loss, expected)
    del model
    gc.collect()
    for each in copies:
        torch.testing.assert_close(each(**batch).aux_loss, expected)


def test_rows_on_several_ranks_are_refused(device, tmp_path):
    model, _, tokens, metadata = made("mixtral", device)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        apply_packing_ops(model, balance_loss="document", sequence_group=torch.distributed.group.WORLD)
        with pytest.raises(ValueError, match="balance_loss: expected False beside a sequence_group"):
            model(tokens, position_ids=metadata.position_ids[None])
    finally:
        torch.distributed.destroy_process_group()


def test_what_has_no_such_loss_is_named(device):
    model, _, _, _ = made("mixtral", device)
    with pytest.raises(ValueError, match=r"balance_loss: expected 'batch', 'document' or False, got 'sequence'"):
        apply_packing_ops(model, balance_loss="sequence")
    with pytest.raises(ValueError, match=r"balance_loss: documents are found with attention=True"):
        apply_packing_ops(model, attention=False, balance_loss="document", strict=True)
    with pytest.raises(ValueError, match=r"balance_loss: no load_balancing_loss_func"):
        apply_packing_ops(model.model, balance_loss="document", strict=True)


def test_generate_runs_as_without(device):
    """A step over a KV cache has no documents: it takes the stock loss."""
    model, _, tokens, _ = made("qwen3_moe", device)
    wanted = model.eval().generate(tokens[:, :7], max_new_tokens=4, do_sample=False, pad_token_id=0)
    apply_packing_ops(model, balance_loss="document")
    found = model.generate(tokens[:, :7], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_trls_fused_head_is_balanced_too(device, family):
    """It calls the function of Mixtral's module for every family."""
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has no fused head")
    model, _, tokens, metadata = made(family, device)
    row = {"input_ids": tokens, "position_ids": metadata.position_ids[None], **metadata.to_transformers()}
    apply_packing_ops(model, balance_loss="document", strict=True)
    wanted = model(**row).aux_loss
    utils.add_fused_lm_head(model)
    torch.testing.assert_close(model(**row, labels=tokens, fused_lm_head=True).aux_loss, wanted)


def test_images_with_as_many_patches_as_the_text_has_slots():
    """Documents are those of the text: 2 images of 16 patches next to 2 rows of 16 slots."""
    from helpers.hf_towers import TEXT, TOKENS, TOWERS

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text = {**TEXT, **experts, "decoder_sparse_step": 1, "mlp_only_layers": []}
    tower = {**TOWERS["qwen3_vl"][1], "patch_size": 4, "temporal_patch_size": 2}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=tower, **TOKENS)
    config.text_config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    rows = torch.randint(5, 140, (2, 16))
    rows[:, 1:6] = torch.tensor([153, 151, 151, 151, 151])
    mask = torch.ones_like(rows)
    mask[1, -5:] = 0
    batch = {
        **{"input_ids": rows, "attention_mask": mask, "mm_token_type_ids": (rows == 151).int()},
        **{"pixel_values": torch.randn(32, 96), "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]])},
    }
    with torch.no_grad():
        wanted = model(**batch, output_router_logits=True).aux_loss
        apply_packing_ops(model, balance_loss="batch", strict=True)
        torch.testing.assert_close(model(**batch, output_router_logits=True).aux_loss, wanted)


def test_tokens_of_other_documents_are_named(device):
    model, _, tokens, metadata = made("mixtral", device)
    apply_packing_ops(model, balance_loss="batch")
    given = metadata.to_transformers() | {"num_tokens": torch.tensor(LENGTHS, device=device)}
    with pytest.raises(
        ValueError, match=r"num_tokens: expected a number or \[num_documents=4\] like cu_seqlens, got int64"
    ):
        model(tokens, position_ids=metadata.position_ids[None], **given)
