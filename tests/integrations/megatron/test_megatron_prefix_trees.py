"""Prefix trees in megatron-core: loss and gradients of a tree are those of its samples without sharing."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")

from helpers import ROOT
from helpers.megatron_case import (
    RECOMPUTED,
    SHAPE,
    VOCABULARY,
    assert_near,
    causal_mask,
    config_of,
    heads_of,
    module_of,
    one_process,  # noqa: F401
    parallel,
    spawn,
    tensor_parallel_part,
    tiny_gpt,
)
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig

import packing_ops as po
from packing_ops.integrations.megatron import (
    next_token_targets,
    packed_seq_params,
    patch_rope,
    revert_rope,
    use_packing_ops,
)

BIASED = {"add_bias_linear": False}  # biases of tensor-parallel parts are 0 in tiny_gpt


@pytest.fixture(autouse=True)
def patched():
    patch_rope()
    yield
    revert_rope()


def samples_of():
    """Three answers of one prompt, one that is its beginning, and a separate sample: [128, 9, 5, 14, 8] rows."""
    tokens = torch.randint(1, VOCABULARY, (400,), generator=torch.Generator().manual_seed(5))
    prompt = tokens[:131]
    samples = [torch.cat([prompt, tokens[a:b]]) for a, b in ((200, 206), (210, 212), (220, 231))]
    return [*samples, prompt[:60], tokens[300:308]]


def tree_of(samples, device="cpu"):
    tokens = torch.cat(samples)
    tree = po.pack_prefix_tree(tokens, po.cu_seqlens_from_lengths([len(each) for each in samples]))
    assert tree.num_slots < tree.num_tokens - 300
    return tokens, tree


def weights_of(tokens, tree, device="cpu"):
    """One for each token, 0 where nothing predicts it: a token of the prompt counts otherwise in each sample."""
    first = tree.position_ids[tree.slot_of_token] == 0
    return torch.linspace(0.5, 1.5, len(tokens)).masked_fill(first, 0).to(device)


def of_tree(model, device="cpu", **changed):
    """Loss over all samples, from the rows of the tree."""
    tokens, tree = tree_of(samples_of())
    weights, tree, ids = weights_of(tokens, tree, device), tree.to(device), tokens[tree.token_of_slot][None].to(device)
    params = packed_seq_params(po.PackedMetadata.from_prefix_tree(tree.to("cpu"), device=device))
    for name, value in changed.items():
        setattr(params, name, value)
    logits = model(ids, None, None, packed_seq_params=params)[0]
    losses = vocab_parallel_cross_entropy(logits[tree.slots_before].float(), ids[0])
    return (losses[tree.slot_of_token] * weights).sum()


def of_samples(model, device="cpu"):
    """The same from each sample separately, in stock megatron-core's layout and attention."""
    tokens, tree = tree_of(samples_of())
    weights = weights_of(tokens, tree, device).split([len(each) for each in samples_of()])
    loss = 0.0
    for ids, weight in zip(samples_of(), weights, strict=True):
        ids = ids[None].to(device)
        losses = model(ids[:, :-1], None, causal_mask(ids.shape[1] - 1, device), labels=ids[:, 1:])
        loss = loss + (losses[0] * weight[1:]).sum()
    return loss


def gradients_of(loss, model):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


CONFIGS = {
    "plain": {},
    "fused": {"apply_rope_fusion": True},
    "interleaved": {"apply_rope_fusion": True, "rotary_interleaved": True},
    "window": {"window_size": (40, 0)},
    "recomputed": RECOMPUTED["full, uniform"],
    "core recomputed": RECOMPUTED["core attention"],
    "no rope in one layer": {"no_rope_freq": [0, 1]},
}


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradients_are_those_of_the_samples(name, device):
    ours = tiny_gpt(use_packing_ops(get_gpt_layer_local_spec()), device, **CONFIGS[name])
    reference = ours if name == "window" else tiny_gpt(None, device, **CONFIGS[name])  # stock has no window here
    loss, expected = of_tree(ours, device), of_samples(reference, device)
    assert_near(loss, expected)
    found, wanted = gradients_of(loss, ours), gradients_of(expected, reference)
    assert found.keys() == wanted.keys()
    for parameter, gradient in found.items():
        assert_near(gradient, wanted[parameter])


@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize("device", ["cpu"])  # where the block makes its tree
def test_the_block_of_the_page_runs(device):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "megatron.md").read_text(), re.S)
    (block,) = (each for each in blocks if "pack_prefix_tree" in each)
    tokens, tree = tree_of(samples_of())
    model = tiny_gpt(use_packing_ops(get_gpt_layer_local_spec()), device)
    names = {"po": po, "tokens": tokens, "cu_seqlens": tree.sample_cu_seqlens, "model": model, "patch_rope": patch_rope}
    names |= {"packed_seq_params": packed_seq_params, "vocab_parallel_cross_entropy": vocab_parallel_cross_entropy}
    exec(block, names)
    weights = weights_of(tokens, tree)
    assert_near((names["of_tokens"] * weights).sum(), of_tree(model))


@pytest.mark.usefixtures("megatron")
def test_rows_have_the_bits_of_the_samples(device):
    """Without sharing, in the same layers: attention and RoPE of a row do not depend on what it is shared by."""
    layer = module_of(device=device)
    _, tree = tree_of(samples_of())
    metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
    q, k, v = heads_of(tree.num_slots, device=device)
    out = layer(q, k, v, None, packed_seq_params=metadata)
    rows = tree.slot_of_token[: tree.sample_cu_seqlens[1]].to(device)
    alone = po.PackedMetadata.from_lengths([len(rows)], device=device)
    assert torch.equal(out[rows], layer(*(t[rows] for t in (q, k, v)), None, packed_seq_params=alone))


@pytest.mark.usefixtures("megatron")
def test_a_stream_that_forks_inside_of_a_tile(device):
    """Logits of a prompt and its answers, as another library has laid them out, are those of each sample."""
    ours, reference = tiny_gpt(use_packing_ops(get_gpt_layer_local_spec()), device), tiny_gpt(None, device)
    groups = torch.arange(4).repeat_interleave(torch.tensor([131, 6, 2, 11]))
    stream = torch.randint(1, VOCABULARY, groups.shape, device=device)
    metadata = po.prefix_tree_metadata(groups, torch.zeros_like(groups), device=device)
    logits = ours(stream[None], None, None, packed_seq_params=packed_seq_params(metadata))[0]
    for answer in (1, 2, 3):
        rows = ((groups == 0) | (groups == answer)).to(device)
        ids = stream[rows][None]
        assert_near(logits[rows], reference(ids, None, causal_mask(ids.shape[1], device))[0])


@pytest.mark.usefixtures("megatron")
def test_parents_as_a_tensor(device):
    model = tiny_gpt(use_packing_ops(get_gpt_layer_local_spec()), device)
    _, tree = tree_of(samples_of())
    assert torch.equal(of_tree(model, device, segment_parents=tree.parents.to(device)), of_tree(model, device))


@pytest.mark.usefixtures("megatron")
def test_other_trees_of_the_same_model(device):
    """Nothing of the first tree is kept for the second, whose segments have the same lengths."""
    model = tiny_gpt(use_packing_ops(get_gpt_layer_local_spec()), device)
    cu_seqlens = torch.tensor([0, 128, 256, 260], dtype=torch.int32, device=device)
    ids, outs = torch.randint(1, VOCABULARY, (1, 260), device=device), []
    for parents in ([-1, 0, 1], [-1, -1, 1]):
        params = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=260, max_seqlen_kv=260)
        params.segment_parents = torch.tensor(parents, dtype=torch.int32, device=device)
        outs.append(model(ids, None, None, packed_seq_params=params)[0])
    assert_near(outs[0][:128], outs[1][:128])
    assert_near(outs[1][128:], model(ids[:, 128:], None, causal_mask(132, device))[0])
    assert (outs[0][128:] - outs[1][128:]).abs().max() > 0.01


# --- ranks ---


class Norm(torch.nn.LayerNorm):
    """torch's is refused under sequence parallelism."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)


def model_of_ranks(**sizes):
    spec = get_gpt_decoder_block_spec(config_of(**BIASED, **sizes), use_transformer_engine=False)
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    return tiny_gpt(use_packing_ops(spec), **BIASED, **sizes)


def tensor_parallel_step():
    """(loss, its largest difference from one process, and the one of this rank's part of a gradient)."""
    patch_rope()
    found = []
    with parallel():
        whole = model_of_ranks()
        expected = of_tree(whole)
        gradients = gradients_of(expected, whole)
    for more in ({}, {"sequence_parallel": True}):
        with parallel(tensor_model_parallel_size=2):
            model = model_of_ranks(tensor_model_parallel_size=2, **more)
            loss = of_tree(model)
            name = "decoder.layers.0.self_attention.linear_proj.weight"
            own = gradients_of(loss, model)[name]
            part = tensor_parallel_part(gradients[name], 1, own.shape[1])
            found.append((loss.item(), (loss - expected).abs().item(), (own - part).abs().max().item()))
    return found


def context_parallel_refusal():
    patch_rope()
    with parallel(context_parallel_size=2):
        model = tiny_gpt(use_packing_ops(get_gpt_layer_local_spec()), context_parallel_size=2)
        with pytest.raises(NotImplementedError) as of_model:
            of_tree(model)
        layer = module_of(context_parallel_size=2)
        _, tree = tree_of(samples_of())
        metadata = po.PackedMetadata.from_prefix_tree(tree)
        with pytest.raises(NotImplementedError) as of_module:
            layer(*heads_of(tree.num_slots), None, packed_seq_params=metadata)
        assert parallel_state.get_context_parallel_world_size() == 2
    return str(of_model.value), str(of_module.value)


def test_tensor_parallel(tmp_path):
    for found in spawn(tensor_parallel_step, 2, tmp_path):
        for loss, difference, of_gradient in found:
            assert loss > 1
            assert difference <= 1e-5 * loss
            assert of_gradient <= 1e-4


def test_context_parallel_is_refused(tmp_path):
    for of_model, of_module in spawn(context_parallel_refusal, 2, tmp_path):
        assert of_model.startswith("segment_parents: expected context_parallel_size 1, got 2")
        assert of_module.startswith("segment_parents: expected no context parallelism, got 2 ranks")


# --- what is refused ---


def test_params_of_a_tree():
    _, tree = tree_of(samples_of())
    metadata = po.PackedMetadata.from_prefix_tree(tree)
    fields = metadata.to_megatron()
    assert fields["segment_parents"] is metadata.paths
    assert fields["max_seqlen_q"] == 142  # the longest path
    params = packed_seq_params(metadata)
    assert params.segment_parents is metadata.paths
    assert params.cu_seqlens_q is params.cu_seqlens_kv is metadata.cu_seqlens
    assert not hasattr(packed_seq_params(po.PackedMetadata.from_lengths([3])), "segment_parents")
    padded = dataclasses.replace(metadata, total=metadata.total + 1)
    with pytest.raises(ValueError, match=f"total: expected the {tree.num_slots} slots of a prefix tree"):
        padded.to_megatron()
    with pytest.raises(ValueError, match="packed_seq_params: expected packed documents, got the segments of a prefix"):
        next_token_targets(torch.zeros(1, 4, dtype=torch.long), params, torch.ones(1, 4))


@pytest.mark.usefixtures("megatron")
def test_models_that_are_refused(device):
    model = tiny_gpt(use_packing_ops(get_gpt_layer_local_spec()), device)
    ends = torch.tensor([0, 163], dtype=torch.int32, device=device)
    for changed, message in (
        ({"cu_seqlens_q_padded": ends}, "cu_seqlens_q_padded: expected None beside segment_parents"),
        ({"cu_seqlens_kv": ends}, "cu_seqlens_kv: expected the same tensor as cu_seqlens_q"),
        ({"qkv_format": "sbhd"}, "packed_seq_params.qkv_format: expected 'thd' beside segment_parents, got 'sbhd'"),
        ({"max_seqlen_q": 20, "max_seqlen_kv": 20}, "packed_seq_params.max_seqlen_q: expected at least the longest path"),
        ({"segment_parents": [-1, 0]}, "segment_parents: expected a tensor"),
        ({"segment_parents": torch.zeros(5, dtype=torch.int32, device=device)}, "parents: expected -1 or an earlier"),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=message):
            of_tree(model, device, **changed)
    model.config.mtp_num_layers = 1
    with pytest.raises(NotImplementedError, match="mtp_num_layers: expected None beside segment_parents, got 1"):
        of_tree(model, device)
    revert_rope()
    with pytest.raises(ValueError, match=r"segment_parents: expected patch_rope\(\) before the forward"):
        of_tree(model, device)


@pytest.mark.usefixtures("megatron")
def test_masks_that_are_not_causal_are_refused(device):
    _, tree = tree_of(samples_of())
    metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
    layer = module_of(mask=AttnMaskType.no_mask, device=device)
    with pytest.raises(ValueError, match="causal, window_size: expected a causal call for a prefix tree"):
        layer(*heads_of(tree.num_slots, device=device), None, packed_seq_params=metadata)


def test_cross_attention_is_refused():
    params = SimpleNamespace(segment_parents=torch.zeros(1))
    layer = SimpleNamespace(config=config_of())
    with pytest.raises(ValueError, match="key_value_states: expected None beside segment_parents"):
        Attention.forward(layer, None, None, key_value_states=torch.zeros(1), packed_seq_params=params)


def test_ranks_of_a_batch_are_refused():
    params = SimpleNamespace(segment_parents=torch.zeros(1), cp_group=SimpleNamespace(size=lambda: 2))
    with pytest.raises(NotImplementedError, match="segment_parents: expected no context parallelism, got 2 ranks"):
        Attention.forward(SimpleNamespace(config=config_of()), None, None, packed_seq_params=params)


@pytest.mark.usefixtures("megatron")
def test_multi_latent_attention_is_refused(device, monkeypatch):
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False, raising=False)
    latent = {"multi_latent_attention": True, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_head_dim": 8,
              "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "rope_type": "rope", "num_query_groups": 4}  # fmt: skip
    spec = use_packing_ops(get_gpt_layer_local_spec(multi_latent_attention=True))
    model = GPTModel(
        MLATransformerConfig(**{**SHAPE, **latent}), spec, VOCABULARY, 256, position_embedding_type="rope"
    ).to(device)
    with pytest.raises(ValueError, match=r"segment_parents: expected patch_rope.*not multi-latent attention"):
        of_tree(model, device)
