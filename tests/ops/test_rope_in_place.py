"""apply_rotary_qk(inplace=True): what shares memory is refused, what is interleaved is not."""

import random
from collections import Counter

import pytest
import torch
from helpers import assert_same
from helpers.rope_inputs import tables

import packing_ops as po


def offsets(tensor):
    """Of all elements, from the first."""
    steps = [torch.arange(n) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return torch.cartesian_prod(*steps).sum(-1)


def test_in_place_refuses_exactly_what_overlaps(device):
    """Tensors of any strides over one piece of memory, against the addresses of all their elements."""
    random.seed(0)
    cos, sin = tables(3, 2, device=device)
    found = Counter()
    for _ in range(400):
        base = torch.randn(400, device=device)
        q, k = (
            base.as_strided((*sizes, 4), (*strides, 1), start)
            for sizes, strides, start in (
                (
                    (random.randint(1, 2), random.randint(1, 3), 3),
                    random.choices([0, 1, 3, 4, 5, 8, 12, 16, 24, 36, 48], k=3),
                    random.randint(0, 60),
                )
                for _ in "qk"
            )
        )
        k = k if k.shape[0] == q.shape[0] and random.random() < 0.8 else None
        addresses = [t.storage_offset() + offsets(t) for t in (q, k) if t is not None]
        apart = all(len(a) == len(a.unique()) for a in addresses)
        apart = apart and len(torch.cat(addresses).unique()) == sum(map(len, addresses))
        found[apart] += 1
        if apart:
            wanted = po.apply_rotary_qk(q, k, cos, sin)
            po.apply_rotary_qk(q, k, cos, sin, inplace=True)
            assert_same(q, wanted[0])
            assert k is None or torch.equal(k, wanted[1])
        else:
            with pytest.raises(ValueError, match="expected memory of its own"):
                po.apply_rotary_qk(q, k, cos, sin, inplace=True)
    assert min(found.values()) > 50


def test_in_place_on_a_fused_projection(device):
    """Heads of q and k are interleaved in memory, and nothing is shared."""
    fused = torch.randn(2, 7, 6, 8, device=device)
    cos, sin = tables(7, 4, device=device)
    for q, k in ((fused[:, :, :4], fused[:, :, 4:]), (fused[:, :, ::2], fused[:, :, 1::2])):
        wanted = po.apply_rotary_qk(q, k, cos, sin, unsqueeze_dim=2)
        po.apply_rotary_qk(q, k, cos, sin, unsqueeze_dim=2, inplace=True)
        assert_same((q.clone(), k.clone()), wanted)
