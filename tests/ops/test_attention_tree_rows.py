"""Rows of a prefix tree that attention and its gradients read in place, by the row of each tile's first key."""

import pytest
import torch
from helpers.tree_case import FORK, Tree, drawn_tree, reads_of

import packing_ops as po
from packing_ops._runtime import gate
from packing_ops.keys import prefix_paths


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_read_where_they_lie(device, seed, heads_first, monkeypatch):
    """With the bits of k and v gathered along the paths, which paths of another library are."""
    tree = Tree(*drawn_tree(seed, 9, deep=seed == 2), heads=(4, 2), dtype=torch.bfloat16, device=device, tail=3)
    paths = prefix_paths(tree.cu_seqlens, tree.parents, tree.q.shape[0])
    rows = [t.transpose(0, 1)[None] if heads_first else t for t in (tree.q, tree.k, tree.v)]
    read_in_place = reads_of(monkeypatch)
    layout = "bhsd" if heads_first else None

    def results(paths):
        leaves = [t.detach().requires_grad_() for t in rows]
        out, lse = po.varlen_attention(*leaves, tree.cu_seqlens, parents=paths, return_lse=True, layout=layout)
        grads = [tree.dout.view_as(out), tree.dlse.masked_fill(lse == -float("inf"), 0)]
        return out, lse, *torch.autograd.grad([out, lse], leaves, grads)

    found, expected = results(paths), results(paths._replace(in_blocks=False))
    assert read_in_place == ([True, True, False, False] if paths.shares else [])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backward", [False, True])
def test_a_tree_takes_no_memory_for_k_and_v_along_its_paths(backward):
    device = "cuda"
    tree = Tree([1024, *[256] * 16], [-1, *[0] * 16], heads=(2, 2), dim=128, dtype=torch.bfloat16, device=device)
    paths = prefix_paths(tree.cu_seqlens, tree.parents, tree.q.shape[0])
    taken = []
    for each in (paths, paths._replace(in_blocks=False)):
        for _ in range(2):  # the plan is kept from the first call on
            leaves = [t.detach().requires_grad_(backward) for t in (tree.q, tree.k, tree.v)]
            out = po.varlen_attention(*leaves, tree.cu_seqlens, parents=each) if backward else None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            if backward:
                torch.autograd.grad(out, leaves, tree.dout)
            else:
                po.varlen_attention(*leaves, tree.cu_seqlens, parents=each)
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
    with torch.no_grad():
        out, lse = gate.varlen_attention(*given, paths.slot_of_key)
    with pytest.raises(ValueError, match="row_of_key: expected rows of k that follow each other in every 128 keys"):
        gate.varlen_attention_backward(tree.dout, None, *given[:3], out, lse, *given[3:], row_of_key)
    few = [t[:127] for t in (tree.k, tree.v)]
    with pytest.raises(ValueError, match="row_of_key: expected None beside a k of fewer than 128 rows, got 127"):
        gate.varlen_attention(tree.q.detach(), *few, *given[3:], paths.slot_of_key)
