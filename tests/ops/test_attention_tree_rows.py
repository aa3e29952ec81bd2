"""Rows of a prefix tree that the forward of attention reads in place, by the row of each tile's first key."""

import pytest
import torch
from helpers.tree_case import FORK, Tree, drawn_tree

import packing_ops as po
from packing_ops._runtime import gate
from packing_ops.keys import prefix_paths
from packing_ops.varlen import prefix_attention


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_forward_reads_rows_where_they_lie(device, seed, heads_first, monkeypatch):
    """With the bits of k and v gathered along the paths, which paths of another library are."""
    tree = Tree(*drawn_tree(seed, 9, deep=seed == 2), heads=(4, 2), dtype=torch.bfloat16, device=device, tail=3)
    paths = prefix_paths(tree.cu_seqlens, tree.parents, tree.q.shape[0])
    rows = [t.transpose(0, 1)[None] if heads_first else t for t in (tree.q, tree.k, tree.v)]
    gathered, gather = [], prefix_attention._along_paths
    monkeypatch.setattr(prefix_attention, "_along_paths", lambda *given: gathered.append(1) or gather(*given))
    layout = "bhsd" if heads_first else None
    found, expected = (
        po.varlen_attention(*rows, tree.cu_seqlens, parents=each, return_lse=True, layout=layout)
        for each in (paths, paths._replace(in_blocks=False))
    )
    assert len(gathered) == (2 if paths.shares else 0), "k and v, once"
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tree_s_forward_takes_no_memory_for_its_paths():
    device = "cuda"
    tree = Tree([1024, *[256] * 16], [-1, *[0] * 16], heads=(2, 2), dim=128, dtype=torch.bfloat16, device=device)
    paths = prefix_paths(tree.cu_seqlens, tree.parents, tree.q.shape[0])
    taken = []
    for each in (paths, paths._replace(in_blocks=False)):
        for _ in range(2):  # the plan is kept from the first call on
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            po.varlen_attention(tree.q, tree.k, tree.v, tree.cu_seqlens, parents=each)
            peak = torch.cuda.max_memory_allocated() - before
        taken.append(peak)
    bytes_of_row = 2 * 2 * 128 * 2  # of k and v
    assert taken[1] - taken[0] >= len(paths.slot_of_key) * bytes_of_row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("key", "row"), [(0, -1), (0, 10**9), (127, 140), (128 + 127, 3), (128 + 132, 133)])
def test_rows_outside_or_apart_are_named(device, dtype, key, row):
    tree = Tree([FORK, 5], [-1, 0], dtype=dtype, device=device)
    paths = prefix_paths(tree.cu_seqlens, tree.parents, tree.q.shape[0])
    row_of_key = paths.slot_of_key.clone()
    row_of_key[key] = row
    given = tree.q, tree.k, tree.v, tree.cu_seqlens, paths.cu_seqlens, None, True, None, -1, -1, 0.0, None, None
    with pytest.raises(ValueError, match="row_of_key: expected rows of k that follow each other in every 128 keys"):
        gate.varlen_attention(*given, row_of_key)
    with pytest.raises(NotImplementedError, match="row_of_key: expected None where a gradient is recorded"):
        gate.varlen_attention(tree.q.requires_grad_(), *given[1:], paths.slot_of_key)
    few = [t[:127] for t in (tree.k, tree.v)]
    with pytest.raises(ValueError, match="row_of_key: expected None beside a k of fewer than 128 rows, got 127"):
        gate.varlen_attention(tree.q.detach(), *few, *given[3:], paths.slot_of_key)
