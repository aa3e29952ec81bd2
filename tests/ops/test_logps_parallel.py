"""token_logps where each rank has a shard of the vocabulary: results and gradients of the whole."""

import functools

import pytest
import torch
import torch.distributed as dist
from helpers import cu_seqlens_of
from helpers.processes import message_of, spawn

import packing_ops as po

VOCAB, SIZE, LENGTHS = 26, 5, [4, 0, 1, 6]


def batch(shut):
    torch.manual_seed(0)
    hidden, weight = torch.randn(13, SIZE, dtype=torch.float64), torch.randn(VOCAB, SIZE, dtype=torch.float64)
    labels, bias = torch.randint(0, VOCAB, (13,)), torch.randn(VOCAB, dtype=torch.float64)
    labels[2] = -100
    if shut:  # the whole shard of the second rank
        bias[VOCAB // 2 :] = -torch.inf
        labels.clamp_(max=VOCAB // 2 - 1)
    return hidden, weight, bias, labels, cu_seqlens_of(LENGTHS)


def results(hidden, weight, bias, labels, cu_seqlens, group=None):
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight, bias)]
    options = {"bias": leaves[2], "temperature": 0.7, "chunk": 6, "group": group}
    logps, entropy = po.token_logps(*leaves[:2], labels, cu_seqlens, entropy=True, **options)
    loss = po.chunked_cross_entropy(*leaves[:2], labels, cu_seqlens, **options)
    (logps.square().sum() + entropy.sin().sum() + loss).backward()
    return [logps.detach(), entropy.detach(), loss.detach(), *(t.grad for t in leaves)]


def of_a_rank(shut):
    """Its results, what labels of the whole vocabulary raise, and what shards of other sizes raise."""
    hidden, weight, bias, labels, cu_seqlens = batch(shut)
    rank, group = dist.get_rank(), dist.group.WORLD
    shard = slice(rank * VOCAB // 2, (rank + 1) * VOCAB // 2)
    uneven = slice(14 * rank, 14 + 12 * rank)
    return (
        results(hidden, weight[shard], bias[shard], labels, cu_seqlens, group),
        message_of(lambda: po.token_logps(hidden, weight[shard], labels + VOCAB, cu_seqlens, group=group)),
        message_of(lambda: po.token_logps(hidden, weight[uneven], labels.clamp(max=20), cu_seqlens, group=group)),
    )


@pytest.mark.parametrize("shut", [False, True], ids=["", "a shard that is all -inf"])
def test_shards_of_the_vocabulary(tmp_path, shut):
    expected = results(*batch(shut))
    found = spawn(functools.partial(of_a_rank, shut), 2, tmp_path)
    ranks, outside, uneven = zip(*found, strict=True)
    for actual in ranks:  # hidden's gradient is whole on each
        torch.testing.assert_close(actual[:4], expected[:4])
    for shards, whole in zip(zip(*(rank[4:] for rank in ranks), strict=True), expected[4:], strict=True):
        torch.testing.assert_close(torch.cat(shards), whole)
    assert "labels: expected 0 to 25 or ignore_index=-100" in outside[1]
    for rank, size in enumerate((14, 12)):
        expected = f"weight: expected as many entries on every rank of group, got 12 to 14, here {size}"
        assert uneven[rank] == f"ValueError: {expected}"
