"""token_logps where each rank has a shard of the vocabulary: results and gradients of the whole."""

import pytest
import torch
import torch.distributed as dist
from helpers import cu_seqlens_of, fresh_process

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


def worker(rank, folder, shut):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    hidden, weight, bias, labels, cu_seqlens = batch(shut)
    shard = slice(rank * VOCAB // 2, (rank + 1) * VOCAB // 2)
    torch.save(results(hidden, weight[shard], bias[shard], labels, cu_seqlens, dist.group.WORLD), f"{folder}/{rank}.pt")
    try:  # of the whole vocabulary, not of the shard
        po.token_logps(hidden, weight[shard], labels + VOCAB, cu_seqlens, group=dist.group.WORLD)
    except ValueError as error:
        torch.save(str(error), f"{folder}/{rank}.error.pt")
    try:
        shard = slice(14 * rank, 14 + 12 * rank)
        po.token_logps(hidden, weight[shard], labels.clamp(max=20), cu_seqlens, group=dist.group.WORLD)
    except ValueError as error:
        torch.save(str(error), f"{folder}/{rank}.uneven.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("shut", [False, True], ids=["", "a shard that is all -inf"])
def test_shards_of_the_vocabulary(tmp_path, shut):
    fresh_process.start_server()
    torch.multiprocessing.start_processes(worker, (tmp_path, shut), nprocs=2, start_method="forkserver")
    expected = results(*batch(shut))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for actual in ranks:  # hidden's gradient is whole on each
        torch.testing.assert_close(actual[:4], expected[:4])
    for shards, whole in zip(zip(*(rank[4:] for rank in ranks), strict=True), expected[4:], strict=True):
        torch.testing.assert_close(torch.cat(shards), whole)
    assert "labels: expected 0 to 25 or ignore_index=-100" in torch.load(tmp_path / "1.error.pt")
    for rank, size in enumerate((14, 12)):
        expected = f"weight: expected as many entries on every rank of group, got 12 to 14, here {size}"
        assert torch.load(tmp_path / f"{rank}.uneven.pt") == expected
