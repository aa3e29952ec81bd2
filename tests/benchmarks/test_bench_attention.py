"""benchmarks/bench_attention.py on the CPU: peers that agree are timed, one that is wrong or cannot run is left out."""

import importlib.machinery
import sys
from types import ModuleType

import pytest
import torch

pytest.importorskip("rich")

import attention_peers as peers
import bench_attention

import packing_ops as po


@pytest.fixture
def flash_3(monkeypatch):
    """A flash_attn_interface of the names and arguments of FlashAttention-3, computed by our op."""
    module = ModuleType("flash_attn_interface")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)
    module.seen, module.scale = [], 1.0

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, deterministic
    ):
        module.seen.append((max_seqlen_q, max_seqlen_k, causal, deterministic))
        return po.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal) * module.scale

    module.flash_attn_varlen_func = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)
    monkeypatch.setattr(bench_attention, "left_out", [])
    return module


def cases_of(*with_peers):
    cases = bench_attention.op_cases("small", [5, 3, 8], (4, 2), 16, with_peers, device="cpu")
    return {case.op: case.providers for case in cases}


def test_peers_that_agree_are_timed(flash_3):
    found = cases_of(peers.sdpa_mask, peers.flash_3)
    assert list(found["varlen_attention"]) == ["packing_ops", "torch SDPA block mask", peers.FLASH_3]
    assert list(found["varlen_attention_backward"])[1:] == [
        "torch SDPA block mask", peers.FLASH_3, f"{peers.FLASH_3}, deterministic",
    ]  # fmt: skip
    assert bench_attention.left_out == []
    assert {(8, 8, True, False), (8, 8, True, True)} == set(flash_3.seen)
    for providers in found.values():
        for call in providers.values():
            call()
            call()


def test_a_wrong_peer_is_left_out_and_named(flash_3):
    flash_3.scale = 1.1
    found = cases_of(peers.flash_3, peers.sdpa_mask)
    assert [list(providers) for providers in found.values()] == [["packing_ops", "torch SDPA block mask"]] * 2
    assert ["results apart by 0.091" in text for text in bench_attention.left_out] == [True]


def test_a_peer_that_cannot_run_is_left_out_and_named(flash_3):
    def refuses(*_, **__):
        raise RuntimeError("head_dim 16 has no kernel")

    flash_3.flash_attn_varlen_func = refuses
    assert list(cases_of(peers.flash_3)["varlen_attention"]) == ["packing_ops"]
    assert "head_dim 16 has no kernel" in bench_attention.left_out[0]


@pytest.mark.parametrize("package", ["fa3_fwd_interface", "flash_attn.cute"])
def test_packages_of_other_names(package, monkeypatch):
    """fa3-fwd has only FlashAttention-3's forward; flash-attn-4 takes keywords and both backwards."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, deterministic=False
    ):
        return po.varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal), None

    parents = [package.partition(".")[0]] if "." in package else []
    for name in (*parents, package):
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name in parents)
        module.__path__, module.flash_attn_varlen_func = [], flash_attn_varlen_func
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(bench_attention, "left_out", [])
    found = cases_of(peers.flash_3, peers.flash_4)
    three = package == "fa3_fwd_interface"
    assert list(found["varlen_attention"])[1:] == [peers.FLASH_3 if three else peers.FLASH_4]
    assert list(found["varlen_attention_backward"])[1:] == (
        [] if three else [peers.FLASH_4, f"{peers.FLASH_4}, deterministic"]
    )
    assert bench_attention.left_out == []


def test_what_is_not_installed_is_not_compared_with(monkeypatch):
    for name in ("flash_attn_interface", "fa3_fwd_interface", "flash_attn"):
        monkeypatch.setitem(sys.modules, name, None)
    batch = peers.Batch(*bench_attention.packed([3, 5], (2, 2), 16, "cpu"), 5)
    assert [*peers.flash_3(batch), *peers.flash_4(batch)] == []


def test_flex_attentions_mask_and_shapes_are_right(monkeypatch):
    """Its mask and layout, through SDPA: FlexAttention itself has no backward on the CPU."""
    from torch.nn.attention import flex_attention as flex

    def by_mask(q, k, v, block_mask, enable_gqa):
        mask = flex.create_mask(block_mask.mask_mod, 1, 1, q.shape[2], k.shape[2], device="cpu")
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=enable_gqa)

    monkeypatch.setattr(flex, "flex_attention", by_mask)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(bench_attention, "left_out", [])
    found = cases_of(peers.flex)
    assert bench_attention.left_out == []
    assert list(found["varlen_attention"]) == [
        "packing_ops", f"{peers.FLEX}, its block mask", peers.FLEX, "packing_ops, its plan",
    ]  # fmt: skip
    for call in found["varlen_attention"].values():
        call()


def test_images_beside_causal_attention():
    cases = {
        case.op: case.providers for case in bench_attention.image_cases("small", [9, 4], (4, 2), 16, "cpu", block=2)
    }
    for providers in cases.values():
        images, causal, told = (call()[0] for call in providers.values())
        assert torch.equal(causal, told)
        assert not torch.equal(images, causal)
