"""patch_rope: megatron-core's fused RoPE equals its unfused one, values and gradients, in every form that it has."""

import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")

import megatron.core.models.common.embeddings.rope_utils as rope_utils
import megatron.core.transformer.attention as attention
from helpers import assert_same, cu_seqlens_of
from helpers.megatron_case import config_of, one_process, thd_params, tiny_gpt  # noqa: F401
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from packing_ops import apply_rotary_qk
from packing_ops.data.context_parallel import thd_partition_indices
from packing_ops.integrations.megatron import rope
from packing_ops.integrations.megatron.rope import (
    fused_apply_rotary_pos_emb,
    fused_apply_rotary_pos_emb_thd,
    patch_rope,
    revert_rope,
)
from packing_ops.integrations.megatron.spec import use_packing_ops

LENGTHS = [8, 16, 0, 24]
unfused = rope_utils.apply_rotary_pos_emb


@pytest.fixture(autouse=True)
def unpatched():
    yield
    revert_rope()


def angles(places, rotary_dim, *, interleaved=False, batch=1, device="cpu"):
    """As RotaryEmbedding gives them; with ``batch`` separate angles for each row, as multimodal rope."""
    positions = torch.arange(places, dtype=torch.float32)[:, None] + 3 * torch.arange(batch)
    halves = positions[..., None] / 10_000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    full = halves.repeat_interleave(2, -1) if interleaved else torch.cat([halves, halves], -1)
    return full[:, :, None].to(device)


def config(*, fused=True, interleaved=False, mrope_section=None):
    return SimpleNamespace(
        apply_rope_fusion=fused,
        rotary_interleaved=interleaved,
        multi_latent_attention=False,
        mrope_section=mrope_section,
    )


def group(size=1, rank=0):
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def check(t, freqs, *, interleaved=False, atol=1e-5, **more):
    """Ours against megatron-core's unfused path, forward and backward of one gradient."""
    results, gradient = [], torch.randn_like(t)
    for fused in (False, True):
        leaf = t.detach().requires_grad_()
        apply = rope_utils.apply_rotary_pos_emb if fused else unfused
        out = apply(leaf, freqs, config(fused=fused, interleaved=interleaved), **{"cp_group": group(), **more})
        out.backward(gradient)
        results += [out.detach(), leaf.grad]
    expected, expected_gradient, out, grad = results
    assert out.dtype == t.dtype
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)
    torch.testing.assert_close(grad, expected_gradient, rtol=0, atol=atol)
    return out


FORMS = pytest.mark.parametrize(
    ("interleaved", "rotary_dim", "mscale"),
    [(False, 16, 1.0), (True, 16, 1.0), (False, 8, 1.0), (True, 8, 1.25), (False, 16, 0.7)],
)


@FORMS
def test_sbhd(device, interleaved, rotary_dim, mscale):
    patch_rope()
    freqs = angles(12, rotary_dim, interleaved=interleaved, device=device)
    t = torch.randn(12, 3, 4, 16, device=device)
    check(t, freqs, interleaved=interleaved, mscale=mscale)
    check(torch.randn(12, 3, 9, 16, device=device)[:, :, 1:5], freqs, interleaved=interleaved, mscale=mscale)


@FORMS
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_thd(device, interleaved, rotary_dim, mscale, cp_size):
    """Positions restart in every document; each rank has its zigzag part of each."""
    patch_rope()
    lengths = [length for length in LENGTHS if length or not interleaved]  # megatron-core 0.14 has no length of 0 there
    cu_seqlens = cu_seqlens_of(lengths, device)
    freqs = angles(max(lengths), rotary_dim, interleaved=interleaved, device=device)
    whole = torch.randn(sum(lengths), 4, 16, device=device)
    more = {"interleaved": interleaved, "mscale": mscale, "cu_seqlens": cu_seqlens}
    row = check(whole, freqs, **more)
    for rank in range(cp_size):
        held = thd_partition_indices(cu_seqlens, cp_size, rank)
        part = check(whole[held], freqs, cp_group=group(cp_size, rank), **more)
        assert_same(part, row[held])


@pytest.mark.parametrize("cp_size", [1, 2])
def test_thd_with_angles_of_every_token(device, cp_size):
    """As many angles as tokens: they are those of the tokens, not of the positions (multimodal rope)."""
    pytest.importorskip("megatron.core", minversion="0.15")
    patch_rope()
    cu_seqlens = cu_seqlens_of(LENGTHS, device)
    freqs = torch.randn(sum(LENGTHS), 1, 1, 8, device=device).repeat(1, 1, 1, 2)
    t = torch.randn(sum(LENGTHS), 4, 16, device=device)
    for rank in range(cp_size):
        held = thd_partition_indices(cu_seqlens, cp_size, rank)
        check(t[held], freqs, cu_seqlens=cu_seqlens, cp_group=group(cp_size, rank))


def test_sbhd_of_several_lengths(device):
    """RotaryEmbedding gives the same angles to all that are short enough."""
    patch_rope()
    freqs = angles(12, 16, device=device)
    for length in (5, 12):
        t = torch.randn(length, 3, 4, 16, device=device)
        assert_same(fused_apply_rotary_pos_emb(t, freqs), check(t, freqs[:length]))


def test_sbhd_with_angles_of_every_row(device):
    patch_rope()
    check(torch.randn(12, 3, 4, 16, device=device), angles(12, 16, batch=3, device=device))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.sampled_from([1, 2, 4]), st.integers(0, 3))
def test_positions_of_any_documents(device, chunks, cp_size, longer):
    lengths = [2 * cp_size * chunk for chunk in chunks]
    patch_rope()
    cu_seqlens = cu_seqlens_of(lengths, device)
    freqs = angles(max(lengths) + longer, 8, device=device)
    whole = torch.randn(sum(lengths), 2, 8, device=device)
    for rank in range(cp_size):
        held = thd_partition_indices(cu_seqlens, cp_size, rank)
        check(whole[held], freqs, cu_seqlens=cu_seqlens, cp_group=group(cp_size, rank))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_takes_angles_in_float32(device, dtype):
    """megatron-core rounds cos and sin to the heads' dtype first; ours is as near to float32 as one rounding."""
    patch_rope()
    t, freqs = torch.randn(40, 2, 4, 16, device=device).to(dtype), angles(40, 16, device=device)
    out = rope_utils.apply_rotary_pos_emb(t, freqs, config(), cp_group=group())
    exact = unfused(t.float(), freqs, config(fused=False), cp_group=group())
    assert_same(out, exact.to(dtype))


def test_padding_after_the_documents_stays(device):
    cu_seqlens = cu_seqlens_of([4, 2], device)
    t = torch.randn(30, 2, 8, device=device)
    out = fused_apply_rotary_pos_emb_thd(t, cu_seqlens, angles(4, 8, device=device))
    assert_same(out[6:], t[6:])
    assert not torch.equal(out[1:4], t[1:4])


def test_a_changed_batch_is_seen(device):
    """Positions are kept with cu_seqlens, tables with freqs: by what they hold now, not by what they held."""
    cu_seqlens, freqs = cu_seqlens_of([6, 6], device), angles(12, 8, device=device)[:11]
    t = torch.randn(12, 2, 8, device=device)
    for change in (lambda: None, lambda: cu_seqlens.copy_(cu_seqlens_of([2, 10], device)), lambda: freqs.mul_(0.5)):
        change()
        for mscale in (1.0, 1.3):
            expected = unfused(t, freqs, config(fused=False), cu_seqlens, mscale, group())
            out = fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, mscale=mscale)
            torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_layers_share_tables_and_positions(device, monkeypatch):
    calls = []
    monkeypatch.setattr(rope, "thd_partition_indices", lambda *a, **k: calls.append(a) or held)
    monkeypatch.setattr(rope, "apply_rotary_qk", lambda *a, **k: (a[2:5], None))
    cu_seqlens, freqs = cu_seqlens_of([8, 4], device), angles(11, 8, device=device)
    held = thd_partition_indices(cu_seqlens, 2, 0)
    t = torch.randn(6, 2, 8, device=device)
    tables = [fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, 2) for _ in range(3)]
    assert len(calls) == 1
    for shared in zip(*tables, strict=True):
        assert len({table.data_ptr() for table in shared}) == 1
    fused_apply_rotary_pos_emb_thd(t, cu_seqlens.clone(), freqs, 2)
    assert len(calls) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("cp_size", [1, 2])
def test_the_hook_does_not_synchronise(cp_size, monkeypatch):
    """Neither where positions and tables are made nor in the layers after."""
    monkeypatch.delenv("PACKING_OPS_CHECK")
    t = torch.randn(sum(LENGTHS) // cp_size, 2, 8, device="cuda", requires_grad=True)
    batches = [(cu_seqlens_of(LENGTHS, "cuda"), angles(24, 8, device="cuda")) for _ in range(2)]
    fused_apply_rotary_pos_emb_thd(t, *batches[0], cp_size).sum().backward()  # what the first call of all sets up
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            fused_apply_rotary_pos_emb_thd(t, *batches[1], cp_size).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- inside a model ---


def outputs(model, device, packed):
    """Per-token losses and every gradient."""
    torch.manual_seed(1)
    ids = torch.randint(0, 64, (1, 16) if packed else (2, 8), device=device)
    positions = torch.zeros_like(ids)
    losses = model(ids, positions, None, labels=ids, packed_seq_params=thd_params(device=device) if packed else None)
    losses.sum().backward()
    return [losses.detach(), *(parameter.grad for parameter in model.parameters())]


MODELS = [(packed, more) for packed in (True, False) for more in ({}, {"rotary_interleaved": True})]
MODELS += [(False, {"fused_single_qkv_rope": True, "rotary_interleaved": interleaved}) for interleaved in (True, False)]


@pytest.mark.parametrize("mscale", [1.0, 1.3])
@pytest.mark.parametrize(("packed", "more"), MODELS)
def test_gpt_model_equals_the_unfused_one(megatron, device, packed, more, mscale, monkeypatch):
    if mscale != 1.0:
        pytest.importorskip("megatron.core", minversion="0.15")
        monkeypatch.setattr(attention, "_yarn_get_concentration_factor_from_config", lambda config: mscale)
    spec = use_packing_ops(get_gpt_layer_local_spec())
    interleaved = more.get("rotary_interleaved", False)
    expected = outputs(tiny_gpt(spec, device, rotary_interleaved=interleaved), device, packed)
    patch_rope()
    launches = []

    def rotate(q, k, *args, **kwargs):
        launches.append("q" if k is None else "q and k")
        return apply_rotary_qk(q, k, *args, **kwargs)

    monkeypatch.setattr(rope, "apply_rotary_qk", rotate)
    fused = outputs(tiny_gpt(spec, device, apply_rope_fusion=True, **more), device, packed)
    layers = 2
    assert launches == (["q and k"] * layers if "fused_single_qkv_rope" in more else ["q"] * 2 * layers)
    for ours, wanted in zip(fused, expected, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_config_is_refused_before_and_after():
    with pytest.raises(ValueError, match="apply_rope_fusion is not available"):  # without TransformerEngine
        config_of(apply_rope_fusion=True)
    patch_rope()
    assert config_of(apply_rope_fusion=True, rotary_interleaved=True).rotary_interleaved
    revert_rope()
    with pytest.raises((ValueError, TypeError)):  # it compares the version of TransformerEngine, None without it
        config_of(apply_rope_fusion=True, rotary_interleaved=True)


def test_a_version_without_a_function_is_named(monkeypatch):
    """And nothing is replaced."""
    stock = rope_utils.fused_apply_rotary_pos_emb_thd
    monkeypatch.delattr(rope_utils, "apply_rotary_pos_emb")
    with pytest.raises(AttributeError, match=r"rope_utils.*apply_rotary_pos_emb"):
        patch_rope()
    assert rope_utils.fused_apply_rotary_pos_emb_thd is stock
    assert not [patch.name for patch in rope._PATCHES if patch.layers]


def test_unpatch_puts_everything_back():
    before = {
        "apply": attention.apply_rotary_pos_emb,
        "thd": rope_utils.fused_apply_rotary_pos_emb_thd,
        "have": getattr(attention, "HAVE_FUSED_QKV_ROPE", None),
        "qkv": attention.SelfAttention.get_query_key_value_tensors,
    }
    revert_rope()  # nothing to do
    patch_rope()
    patch_rope()
    assert attention.apply_rotary_pos_emb is not before["apply"]
    late = sys.modules["a_model_that_came_late"] = SimpleNamespace(apply_rotary_pos_emb=rope_utils.apply_rotary_pos_emb)
    try:
        revert_rope()
        after = {
            "apply": late.apply_rotary_pos_emb,
            "thd": rope_utils.fused_apply_rotary_pos_emb_thd,
            "have": getattr(attention, "HAVE_FUSED_QKV_ROPE", None),
            "qkv": attention.SelfAttention.get_query_key_value_tensors,
        }
        assert after == before
        assert attention.apply_rotary_pos_emb is before["apply"]
    finally:
        del sys.modules["a_model_that_came_late"]


def test_a_model_without_the_flag_runs_as_before():
    patch_rope()
    t, freqs = torch.randn(6, 2, 4, 8), angles(6, 8)
    out = rope_utils.apply_rotary_pos_emb(t, freqs, config(fused=False), cp_group=group())
    assert_same(out, unfused(t, freqs, config(fused=False), cp_group=group()))


# --- bad input ---


def test_refuses(device):
    cu_seqlens, t = cu_seqlens_of([6, 6], device), torch.randn(12, 2, 8, device=device)
    with pytest.raises(ValueError, match="position"):
        fused_apply_rotary_pos_emb_thd(t, cu_seqlens, angles(5, 8, device=device))
    with pytest.raises(ValueError, match=r"freqs: expected \[positions, 1 or batch, 1, rotary_dim\], got \[6, 8\]"):
        fused_apply_rotary_pos_emb_thd(t, cu_seqlens, angles(6, 8, device=device)[:, 0, 0])
    with pytest.raises(ValueError, match=r"freqs: expected \[max_seqlen, 1, 1, rotary_dim\] for thd"):
        fused_apply_rotary_pos_emb_thd(t, cu_seqlens, angles(6, 8, batch=2, device=device))
    with pytest.raises(ValueError, match=r"freqs: expected at least 12 positions for sbhd, got \[6, 1, 1, 8\]"):
        fused_apply_rotary_pos_emb(t[:, None], angles(6, 8, device=device))


def test_a_projection_of_another_library():
    """Its sizes of q, k and v are passed without the config."""
    with pytest.raises(NotImplementedError, match="fused_single_qkv_rope: expected a projection of megatron-core's"):
        rope._rotate_mixed(torch.randn(6, 2, 1, 24), angles(6, 8), angles(6, 8), [8, 8, 8])


def test_documents_that_context_parallelism_cannot_divide(device):
    """Said before the rotation on the CPU; on a GPU by the rotation, which has no such position."""
    wanted = r"cu_seqlens: expected multiples of 2 \* cp_size = 4|position"
    cu_seqlens, t = cu_seqlens_of([6, 6], device), torch.randn(6, 2, 8, device=device)
    with pytest.raises(ValueError, match=wanted):
        fused_apply_rotary_pos_emb_thd(t, cu_seqlens, angles(6, 8, device=device), 2, 0)
