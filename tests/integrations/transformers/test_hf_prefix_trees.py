"""Models of transformers over prefix trees: against each sample separately, and what is refused."""

import functools

import pytest
import torch
from helpers.hf_models import CACHE, FAMILIES, tiny_model, transformers

import packing_ops as po
from packing_ops.integrations.transformers import (
    apply_packing_ops,
    info,
    register,
    revert_packing_ops,
    revert_registration,
)

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "head_dim": 16,
    "vocab_size": 128,
}  # whole vectors: see same-bits-details.md
PROMPT, ANSWERS = 130, (9, 4, 1)


@pytest.fixture
def one_thread():
    """On the CPU the last elements of each thread's part of an activation have other bits: see same-bits-details.md."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    revert_registration()


def samples(device):
    """(tokens, cu_seqlens, tree): a prompt with three answers, and another prompt."""
    prompt = torch.randint(3, 61, (PROMPT,))
    parts = [torch.cat([prompt, torch.randint(3, 61, (n,))]) for n in ANSWERS] + [torch.randint(3, 61, (7,))]
    tokens, cu_seqlens = torch.cat(parts), torch.tensor([0, *(len(part) for part in parts)]).cumsum(0).int()
    return tokens.to(device), cu_seqlens.to(device), po.pack_prefix_tree(tokens, cu_seqlens)


def hidden_of_tree(model, tokens, tree, device, **given):
    metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
    ids = tokens[tree.token_of_slot.to(device)]
    out = model(
        ids[None], position_ids=metadata.position_ids[None], **metadata.to_transformers(), use_cache=False, **given
    )
    return out.logits[0]


def loss_of(logits, tokens, cu_seqlens, weights):
    logps = logits.double().log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
    keep = torch.ones(len(tokens), dtype=torch.bool, device=tokens.device).index_fill(0, cu_seqlens[:-1].long(), False)[
        1:
    ]
    return (logps * weights[1:] * keep).sum()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_are_those_of_the_samples(family, device):
    model = tiny_model(family, attn_implementation="packing_ops", device=device).train()
    tokens, cu_seqlens, tree = samples(device)
    weights = torch.randn(len(tokens), device=device, dtype=torch.float64)

    def step(logits):
        model.zero_grad()
        loss_of(logits, tokens, cu_seqlens, weights).backward()
        return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    logits = hidden_of_tree(model, tokens, tree, device)
    assert logits.shape[0] == tree.num_slots < len(tokens) / 2
    shared = step(logits[tree.slot_of_token.to(device)])
    positions = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()]).to(device)
    told = po.PackedMetadata.from_cu_seqlens(cu_seqlens).to_transformers()
    unshared = step(model(tokens[None], position_ids=positions[None], use_cache=False, **told).logits[0])
    torch.testing.assert_close(shared, unshared, rtol=2e-4, atol=2e-4)


def test_the_tree_is_what_keeps_samples_apart(device):
    """Without it the same row gives other logits: the test above can fail."""
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    tokens, _, tree = samples(device)
    with torch.no_grad():
        logits = hidden_of_tree(model, tokens, tree, device)
        metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
        other = model(tokens[tree.token_of_slot.to(device)][None], position_ids=metadata.position_ids[None]).logits[0]
    assert not torch.allclose(logits, other, atol=1e-2)


def test_applied_and_invariant(device, one_thread):
    """A token has the bits of its sample in a separate row, in a whole model."""
    model = tiny_model("qwen3", device=device, **SIZES)
    if device == "cuda":
        model.bfloat16()  # the mode does not claim cuBLASLt's float32 products of few rows
    applied = apply_packing_ops(model, invariant=True)
    assert not applied.skipped
    assert applied.rms_norm > 0
    tokens, cu_seqlens, tree = samples(device)
    with torch.no_grad():
        shared = hidden_of_tree(model, tokens, tree, device)[tree.slot_of_token.to(device)]
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            alone = model(tokens[None, start:end], position_ids=torch.arange(end - start, device=device)[None]).logits[
                0
            ]
            assert torch.equal(shared[start:end], alone)
        shared = hidden_of_tree(model, tokens, tree, device)
    assert "segment_parents" in info(model)
    revert_packing_ops(model)


def test_parents_as_a_tensor_and_gradient_checkpointing(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device).train()
    tokens, _, tree = samples(device)
    expected = hidden_of_tree(model, tokens, tree, device)
    model.gradient_checkpointing_enable()
    metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
    given = {**metadata.to_transformers(), "segment_parents": tree.parents.to(device)}
    logits = model(
        tokens[tree.token_of_slot.to(device)][None], position_ids=metadata.position_ids[None], use_cache=False, **given
    ).logits
    assert torch.equal(logits[0], expected)
    logits.sum().backward()


def test_compiled_fullgraph(device, fresh_compile):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    tokens, _, tree = samples(device)
    expected = hidden_of_tree(model, tokens, tree, device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(hidden_of_tree(compiled, tokens, tree, device), expected, rtol=1e-5, atol=1e-5)


def test_refused(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    tokens, _, tree = samples(device)
    for given, message in (
        ({"labels": tokens[None]}, "labels: expected None beside segment_parents"),
        ({"attention_mask": torch.ones(1, tree.num_slots, device=device)}, "attention_mask: expected None beside"),
        ({"cu_seq_lens_k": torch.tensor([0, tree.num_slots], dtype=torch.int32, device=device)}, "cu_seq_lens_q: expected the segments"),
        (dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k")), "cu_seq_lens_q: expected the segments of the tree beside segment_parents, got None"),
    ):  # fmt: skip
        metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
        told = {"position_ids": metadata.position_ids[None], **metadata.to_transformers(), **given}
        with pytest.raises(ValueError, match=message):
            model(tokens[tree.token_of_slot.to(device)][None], **told)


STATEFUL = {
    "Qwen3NextConfig": {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2},
    "Qwen3_5TextConfig": {"layer_types": ["linear_attention", "full_attention"]},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "use_mamba_kernels": False},
    "NemotronHConfig": {"layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1},
    "MambaConfig": {"state_size": 8},
}  # fmt: skip


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("config", ["LlamaConfig", "Qwen3_5TextConfig", "Lfm2Config"])
def test_a_stream_that_forks_inside_of_a_tile(config, swapped, device):
    """Of a prompt and its answers, as another library has laid it out."""
    if not hasattr(transformers, config):
        pytest.skip("not in this transformers")
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    options = {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **STATEFUL.get(config, {})}
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**options), attn_implementation="packing_ops"
    ).to(device)
    if swapped:
        apply_packing_ops(model)
    groups = torch.arange(1 + len(ANSWERS)).repeat_interleave(torch.tensor([PROMPT, *ANSWERS]))
    stream = torch.randint(3, 61, groups.shape, device=device)
    metadata = po.prefix_tree_metadata(groups, torch.zeros_like(groups), device=device)
    rows = [(groups == 0) | (groups == answer) for answer in range(1, 1 + len(ANSWERS))]
    weights = [torch.randn(int(mask.sum()), 61, device=device) for mask in rows]

    def step(logits):
        model.zero_grad()
        sum((each * weight).sum() for each, weight in zip(logits, weights, strict=True)).backward()
        return [each.detach() for each in logits], [p.grad.clone() for p in model.parameters() if p.grad is not None]

    given = {"position_ids": metadata.position_ids[None], **metadata.to_transformers(), "use_cache": False}
    logits = model(stream[None], **given).logits[0]
    shared = step([logits[mask.to(device)] for mask in rows])
    alone = step([model(stream[None, mask.to(device)], use_cache=False).logits[0] for mask in rows])
    torch.testing.assert_close(shared, alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("config", STATEFUL)
def test_layers_with_a_state_run_on_whole_paths(config, device):
    if not hasattr(transformers, config):
        pytest.skip("not in this transformers")
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    options = {**sizes, "num_key_value_heads": 2, "head_dim": 8, **STATEFUL[config]}
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**options), attn_implementation="packing_ops"
    ).to(device)
    tokens, cu_seqlens, tree = samples(device)
    weights = torch.randn(tree.num_tokens, 61, device=device)

    def step(logits):
        model.zero_grad()
        (logits * weights).sum().backward()
        return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]

    shared = step(hidden_of_tree(model, tokens, tree, device)[tree.slot_of_token.to(device)])
    spans = zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)
    alone = step(torch.cat([model(tokens[None, start:end], use_cache=False).logits[0] for start, end in spans]))
    torch.testing.assert_close(shared, alone, rtol=1e-3, atol=1e-3)


def test_models_that_do_not_pass_them_on_are_refused(device):
    config = transformers.DebertaV2Config(vocab_size=61, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.AutoModel.from_config(config, attn_implementation="packing_ops").to(device)
    tokens, _, tree = samples(device)
    metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
    with pytest.raises((ValueError, TypeError), match="segment_parents"):
        model(
            tokens[tree.token_of_slot.to(device)][None],
            position_ids=metadata.position_ids[None],
            **metadata.to_transformers(),
        )


def test_a_cache_with_tokens_is_refused(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    tokens, _, tree = samples(device)
    cache = {CACHE: getattr(model(tokens[None, :5], use_cache=True), CACHE)}
    metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
    told = {"position_ids": metadata.position_ids[None], **metadata.to_transformers(), **cache}
    with pytest.raises(NotImplementedError, match="segment_parents: expected a call that varlen attention serves"):
        model(tokens[tree.token_of_slot.to(device)][None], **told)


@pytest.mark.parametrize("wrong", ["none", "along the row", "from 0 in each segment"])
def test_positions_that_are_no_depths_are_refused(wrong, device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    tokens, _, tree = samples(device)
    metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
    rows = torch.arange(tree.num_slots, device=device)
    positions = {"none": None, "along the row": rows[None]}.get(
        wrong, po.position_ids_from_cu_seqlens(metadata.cu_seqlens, tree.num_slots)[None]
    )
    with pytest.raises(ValueError, match="position_ids: expected each row's distance from its root"):
        model(tokens[tree.token_of_slot.to(device)][None], position_ids=positions, **metadata.to_transformers())


def test_layers_that_are_compiled_one_by_one(device, fresh_compile):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    tokens, _, tree = samples(device)
    expected = hidden_of_tree(model, tokens, tree, device)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    torch.testing.assert_close(hidden_of_tree(model, tokens, tree, device), expected, rtol=1e-5, atol=1e-5)


def test_attention_that_is_not_given_them_is_an_error(device, monkeypatch):
    """The mask says that the call has a tree."""
    from transformers.models.llama import modeling_llama

    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    stock = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention,
        "forward",
        functools.wraps(stock)(lambda self, *args, segment_parents=None, **given: stock(self, *args, **given)),
    )
    tokens, _, tree = samples(device)
    with pytest.raises(ValueError, match="segment_parents: expected a model that passes them to its attention"):
        hidden_of_tree(model, tokens, tree, device)


def test_boundaries_that_were_copied_apart(device):
    """As accelerate moves a batch: cu_seq_lens_q and cu_seq_lens_k are then two tensors."""
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    tokens, _, tree = samples(device)
    metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
    told = metadata.to_transformers()
    told["cu_seq_lens_k"] = told["cu_seq_lens_k"].clone()
    ids = tokens[tree.token_of_slot.to(device)][None]
    logits = model(ids, position_ids=metadata.position_ids[None], use_cache=False, **told).logits[0]
    assert torch.equal(logits, hidden_of_tree(model, tokens, tree, device))


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="older ones hand the text's cu_seq_lens_q to the tower, where they are refused",
)
def test_a_vision_tower_beside_the_tree(device):
    """Its patches are other rows: text that shares a prompt with an image."""
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "patch_size": 4,
    }
    text = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text |= {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0},
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=90, vision_start_token_id=91, video_token_id=92
    )
    model = (
        transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="packing_ops")
        .to(device)
        .eval()
    )
    tokens, cu_seqlens, tree = samples(device)
    tokens[torch.arange(2, device=device)[:, None] + cu_seqlens[:3].long()] = (
        90  # of each sample, two patches of one image
    )
    tree = po.pack_prefix_tree(tokens.cpu(), cu_seqlens.cpu())
    pixels = torch.randn(8, 3 * 2 * 4 * 4, device=device)
    image = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 4]], device=device)}
    metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
    depths = metadata.position_ids
    with torch.no_grad():
        shared = model(
            input_ids=tokens[tree.token_of_slot.to(device)][None], position_ids=depths.expand(3, 1, -1), use_cache=False,
            **metadata.to_transformers(), **image,
        ).logits[0][tree.slot_of_token.to(device)]  # fmt: skip
        first, last = cu_seqlens[1:3].tolist()
        alone = model(
            input_ids=tokens[None, first:last],
            position_ids=torch.arange(last - first, device=device).expand(3, 1, -1),
            **image,
        ).logits[0]
    torch.testing.assert_close(shared[first:last], alone, rtol=1e-4, atol=1e-4)
