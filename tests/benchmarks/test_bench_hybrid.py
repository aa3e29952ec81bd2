"""benchmarks/bench_hybrid.py: which providers run."""

import pytest

pytest.importorskip("transformers")

import bench_hybrid


def test_bamba_has_no_fused_loss():
    """Nor has a provider without swaps."""
    chosen = bench_hybrid.providers_of("bamba", "")
    assert chosen
    assert {*bench_hybrid.PROVIDERS} - {*chosen} == {name for name in bench_hybrid.PROVIDERS if "fused_loss" in name}
    assert bench_hybrid.providers_of("qwen3_5_text", "") == bench_hybrid.PROVIDERS
    assert [*bench_hybrid.providers_of("bamba", "sdpa")] == ["padded batches of 8, sdpa"]
