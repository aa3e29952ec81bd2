"""The names of ring_flash_attn: against a loop over documents, in a transformers model, and by its alias."""

import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import cu_seqlens_of
from helpers.processes import message_of, spawn

from packing_ops.contrib.ring_flash_attn import (
    install_ring_flash_attn_alias,
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
    revert_hf_flash_attn,
    revert_ring_flash_attn_alias,
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)

RANKS = 3
LENGTHS = [5, 1, 19, 0, 8]  # 33 slots
OPTIONS = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "window": {"causal": True, "window_size": (4, 4), "softmax_scale": 0.3},
}


def loop_over_documents(q, k, v, causal, window_size=(-1, -1), softmax_scale=None):
    outs, start = [], 0
    for length in LENGTHS:
        rows = [t[start : start + length].transpose(0, 1) for t in (q, k, v)]
        slots = torch.arange(length)
        behind = slots[:, None] - slots
        mask = (behind >= 0) | (not causal)
        if window_size[0] >= 0:
            mask &= behind <= window_size[0]
        out = F.scaled_dot_product_attention(*rows, attn_mask=mask, scale=softmax_scale, enable_gqa=True)
        outs.append(out.transpose(0, 1))
        start += length
    return torch.cat(outs)


def case(options, packed=None):
    """Largest difference of out and gradients of this rank from the loop's."""
    rank, total = dist.get_rank(), sum(LENGTHS)
    own = slice(rank * total // RANKS, (rank + 1) * total // RANKS)
    generator = torch.Generator().manual_seed(0)
    heads = (4, 4, 4) if packed == "qkv" else (4, 2, 2)
    whole = [torch.randn(total, h, 8, generator=generator, dtype=torch.float64).requires_grad_() for h in heads]
    dout = torch.randn(total, 4, 8, generator=generator, dtype=torch.float64)
    expected = loop_over_documents(*whole, **options)
    wanted = [expected, *torch.autograd.grad(expected, whole, dout)]
    q, k, v = (t.detach()[own].requires_grad_() for t in whole)
    causal = options["causal"]
    cu_q, cu_k, max_q, max_k, keys = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens_of(LENGTHS), causal, rank, RANKS)
    rest = (cu_q, cu_k, max_q, max_k, 1, keys)
    if packed == "qkv":
        out = llama3_flash_attn_varlen_qkvpacked_func(torch.stack([q, k, v], 1), *rest, **options)
    elif packed == "kv":
        out = llama3_flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *rest, **options)
    else:
        out = llama3_flash_attn_varlen_func(q, k, v, *rest, **options, group=dist.group.WORLD)
    found = [out, *torch.autograd.grad(out, (q, k, v), dout[own])]
    return max((a - b[own]).abs().max().item() for a, b in zip(found, wanted, strict=True))


def in_transformers():
    from helpers.hf_models import tiny_model

    import packing_ops as po

    total, rank = sum(LENGTHS), dist.get_rank()
    own = slice(rank * total // RANKS, (rank + 1) * total // RANKS)
    ids = torch.randint(3, 61, (1, total), generator=torch.Generator().manual_seed(0))
    metadata = po.PackedMetadata.from_lengths(LENGTHS)
    from packing_ops.integrations.transformers import apply_packing_ops

    whole = tiny_model("mistral", dtype=torch.float64)
    apply_packing_ops(whole, rms_norm=False)  # as the model that it is compared with
    expected = whole(ids, position_ids=metadata.position_ids[None], **metadata.to_transformers()).logits[:, own]
    model = tiny_model("mistral", dtype=torch.float64)
    model.config._attn_implementation = "flash_attention_2"  # what choosing it checks is whether flash-attn is there
    substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=1)
    update_ring_flash_attn_params(metadata.cu_seqlens, dist.group.WORLD)
    logits = model(ids[:, own], position_ids=metadata.position_ids[None, own]).logits
    revert_hf_flash_attn()
    return (logits - expected).abs().max().item()


def not_sharded():
    """The whole row's tensors on every rank, next to the documents of a rank's part."""
    q = torch.randn(sum(LENGTHS), 2, 8)
    cu_q, cu_k, *longest, keys = llama3_flash_attn_prepare_cu_seqlens(
        cu_seqlens_of(LENGTHS), True, dist.get_rank(), RANKS
    )
    return message_of(lambda: llama3_flash_attn_varlen_func(q, q, q, cu_q, cu_k, *longest, 1, keys, causal=True))


def every_case():
    found = {name: case(options) for name, options in OPTIONS.items()}
    found |= {packed: case({"causal": True}, packed) for packed in ("kv", "qkv")}
    found["transformers"], found["not sharded"] = in_transformers(), not_sharded()
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    pytest.importorskip("transformers")
    return spawn(every_case, RANKS, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", [*OPTIONS, "kv", "qkv", "transformers"])
def test_against_a_loop_over_documents(name, by_rank):
    assert all(found[name] <= (1e-6 if name == "transformers" else 1e-12) for found in by_rank)


def test_a_row_that_is_not_sharded(by_rank):
    """Its slots past the part would attend to nothing."""
    for found in by_rank:
        assert found["not sharded"] == (
            "ValueError: cu_seqlens_q: expected to end at the 33 rows of q, a rank's part, got 11"
        )


def test_alias():
    assert install_ring_flash_attn_alias()
    assert install_ring_flash_attn_alias()
    from ring_flash_attn import llama3_flash_attn_prepare_cu_seqlens as served
    from ring_flash_attn.adapters.hf_adapter import substitute_hf_flash_attn as substitution

    assert served is llama3_flash_attn_prepare_cu_seqlens
    assert substitution is substitute_hf_flash_attn
    with pytest.raises(ImportError, match=r"ring_flash_attn\.zigzag_ring_flash_attn_func is not served"):
        from ring_flash_attn import zigzag_ring_flash_attn_func  # noqa: F401
    revert_ring_flash_attn_alias()
    assert "ring_flash_attn" not in sys.modules
    assert importlib.util.find_spec("ring_flash_attn") is None


def test_refusals():
    q = torch.randn(4, 2, 8)
    with pytest.raises(ValueError, match="cu_seqlens: expected to end at a multiple of world_size=2, got 5"):
        llama3_flash_attn_prepare_cu_seqlens(cu_seqlens_of([5]), True, 0, 2)
    given = (q, q, q, *llama3_flash_attn_prepare_cu_seqlens(cu_seqlens_of([4]), True, 0, 1)[:4], 1, slice(0, 4))
    with pytest.raises(NotImplementedError, match=r"dropout_p: expected 0\.0"):
        llama3_flash_attn_varlen_func(*given, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match="alibi_slopes: expected None"):
        llama3_flash_attn_varlen_func(*given, alibi_slopes=q)
    with pytest.raises(NotImplementedError, match=r"window_size: expected \(-1, -1\) without a causal mask"):
        llama3_flash_attn_varlen_func(*given, causal=False, window_size=(1, 1))
