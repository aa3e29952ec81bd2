"""RoPE of vision towers under apply_packing_ops: one call of apply_rotary_qk in each attention, with stock results."""

import copy
import importlib
import pickle

import pytest
import torch
from helpers import assert_same

transformers = pytest.importorskip("transformers")


from packing_ops.integrations import _rope_trial  # noqa: E402
from packing_ops.integrations.transformers import (  # noqa: E402
    apply_packing_ops,
    info,
    register,
    revert_packing_ops,
    vision,
)

LENGTHS = [5, 1, 6]
ATTENTIONS = {  # family: class of attention, class of config, and its config
    "qwen2_vl": ("VisionAttention", "Qwen2VLVisionConfig", {"embed_dim": 32, "hidden_size": 32}),
    "qwen2_5_vl": ("Qwen2_5_VLVisionAttention", "Qwen2_5_VLVisionConfig", {}),
    "qwen3_vl": ("Qwen3VLVisionAttention", "Qwen3VLVisionConfig", {}),
    "qwen3_5": ("Qwen3_5VisionAttention", "Qwen3_5VisionConfig", {}),
    "glm4v": ("Glm4vVisionAttention", "Glm4vVisionConfig", {"attention_bias": True}),
}


def tower_attention(family, device, dtype=torch.float32):
    name, config_name, options = ATTENTIONS[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = getattr(transformers, config_name)(**{"hidden_size": 32, "num_heads": 2, **options})
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    return getattr(module, name)(config).to(device, dtype)


def results(attention, dtype=torch.float32):
    """Its output, and the gradient of its input."""
    device, total = next(attention.parameters()).device, sum(LENGTHS)
    torch.manual_seed(1)
    x = torch.randn(total, 32).to(device, dtype).requires_grad_()
    angles = torch.randn(total, 8).repeat(1, 2).to(device)
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0, dtype=torch.int32)
    tables = angles.cos().to(dtype), angles.sin().to(dtype)
    out = attention(x, cu_seqlens, position_embeddings=tables)
    (out.float() * torch.linspace(-1, 1, out.numel(), device=device).view_as(out)).sum().backward()
    return out.detach(), x.grad


@pytest.fixture
def rotations(monkeypatch):
    """Shapes of q in every call of apply_rotary_qk."""
    seen, ours = [], _rope_trial.apply_rotary_qk
    monkeypatch.setattr(
        _rope_trial, "apply_rotary_qk", lambda q, *rest, **options: seen.append([*q.shape]) or ours(q, *rest, **options)
    )
    return seen


@pytest.mark.parametrize("family", ATTENTIONS)
def test_one_rotation_with_the_stock_results(family, device, rotations):
    attention = tower_attention(family, device)
    wanted = results(attention)
    for _ in range(2):  # twice is once
        assert apply_packing_ops(attention, attention=False).rope == 1
    rotations.clear()  # of the trial
    found = results(attention)
    assert rotations == [[sum(LENGTHS), 2, 16]]
    for ours, stock in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)
    assert "packing_ops in 1 module" in str(info(attention))
    revert_packing_ops(attention)
    assert_same(results(attention), wanted)
    assert len(rotations) == 1


def test_bf16_is_at_most_twice_as_far_off_as_stock(device):
    attention = tower_attention("qwen2_5_vl", device)
    exact = results(attention.double(), torch.float64)
    attention.bfloat16()
    stock = results(attention, torch.bfloat16)
    apply_packing_ops(attention, attention=False)
    for ours, theirs, wanted in zip(results(attention, torch.bfloat16), stock, exact, strict=True):
        assert (ours - wanted).norm() <= 2 * (theirs - wanted).norm()


def test_copies_and_pickles_keep_it(device, rotations):
    attention = tower_attention("qwen3_vl", device)
    apply_packing_ops(attention, attention=False)
    wanted = results(attention)
    others = [copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))]
    revert_packing_ops(attention)
    for other in others:
        rotations.clear()
        assert_same(results(other), wanted)
        assert len(rotations) == 1
        revert_packing_ops(other)


def test_compiled_without_a_break(device, fresh_compile):
    attention = tower_attention("qwen2_5_vl", device)
    wanted = results(attention)
    register()
    apply_packing_ops(attention, attention=False)
    attention.config._attn_implementation = "packing_ops"
    vision.apply_to_model(attention)
    found = results(torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager"))
    for ours, stock in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=1e-5)


def test_a_function_that_rotates_rows_otherwise_is_not_called_with_them():
    def rotate_halves(q, k, cos, sin):
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        halves = [x.shape[-1] // 2 for x in (q, k)]
        pairs = zip((q, k), halves, strict=True)
        return tuple(x * cos + torch.cat((-x[..., h:], x[..., :h]), -1) * sin for x, h in pairs)

    def rotate_batches(q, k, cos, sin):
        return (q, k) if q.dim() == 3 else rotate_halves(q, k, cos, sin)

    assert _rope_trial.rotation_of(rotate_halves).tokens
    rotation = _rope_trial.rotation_of(rotate_batches)
    assert not rotation.tokens
    q, tables = torch.randn(5, 2, 8), torch.randn(5, 8)
    assert rotation.serve(lambda *_: "stock", (q, q, tables, tables), {}) == "stock"
