"""Activation recompute of megatron-core over PackingDotProductAttention: nothing changes, and a layout is made once."""

import pytest
import torch

pytest.importorskip("megatron.core")

from helpers.megatron_case import RECOMPUTED, VOCABULARY, assert_near, one_process, thd_params, tiny_gpt  # noqa: F401
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from packing_ops.integrations.megatron import patch_rope, revert_rope, use_packing_ops
from packing_ops.integrations.megatron import varlen_call as layouts


def loss_and_gradients(device, batch, **more):
    """And how often each layer's core attention ran."""
    model = tiny_gpt(use_packing_ops(get_gpt_layer_local_spec()), device, **more)
    runs = []
    for layer in model.decoder.layers:
        attention = layer.self_attention.core_attention
        attention.register_forward_pre_hook(lambda module, _: runs.append(module.layer_number))
    loss = model(**batch)
    loss.sum().backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())], [runs.count(1), runs.count(2)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("qkv_format", ["thd", "sbhd"])
@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputed_layers(megatron, device, name, qkv_format, fused, monkeypatch):
    """The same losses and gradients, attention run twice where it is recomputed; a batch's layout is made once."""
    if fused:
        patch_rope()
    try:
        made = []
        cumulated = layouts.cumulated
        monkeypatch.setattr(layouts, "cumulated", lambda *lengths: made.append(1) or cumulated(*lengths))
        if qkv_format == "thd":
            ids = torch.randint(0, VOCABULARY, (1, 18), device=device)
            batch = {"attention_mask": None, "packed_seq_params": thd_params([5, 3, 7], device, slots=[6, 4, 8])}
        else:
            ids = torch.randint(0, VOCABULARY, (3, 6), device=device)
            padding = torch.arange(6, device=device) >= torch.tensor([[6], [4], [1]], device=device)
            causal = torch.ones(6, 6, dtype=torch.bool, device=device).triu(1)
            batch = {"attention_mask": causal | padding[:, None, None]}
        batch.update(input_ids=ids, position_ids=None, labels=ids)
        expected, once = loss_and_gradients(device, batch, apply_rope_fusion=fused)
        found, runs = loss_and_gradients(device, batch, apply_rope_fusion=fused, **RECOMPUTED[name])
    finally:
        revert_rope()
    assert once == [1, 1]
    assert runs == ([2, 1] if name == "full, one layer" else [2, 2])
    assert len(made) == (2 if qkv_format == "thd" else 0)  # of queries and of keys
    for actual, wanted in zip(found, expected, strict=True):
        assert wanted.abs().max() > 1e-3
        assert_near(actual, wanted)
