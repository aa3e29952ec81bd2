"""Rows in which another library has laid out prefix trees, forks at any token: prefix_tree_metadata."""

import pytest
import torch
from helpers import captured
from helpers.attention_case import assert_close
from helpers.tree_case import Tree, reads_of
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po

# (tokens, group, parent) of each group, in the order of the row
ART = [
    (37, 7, 7),
    (5, 8, 7),
    (130, 9, 7),
    (200, -(2**63), -(2**63)),
    (9, 2**63 - 1, -(2**63)),
    (64, 3, 7),
    (11, -1, -1),
]
DEEP = [(128, 1, 1), (45, 2, 1), (7, 3, 2), (129, 4, 2), (1, 5, 1), (3, 6, 6), (2, 7, 5)]
IN_BLOCKS = [(128, 1, 1), (256, 2, 1), (7, 3, 2), (30, 4, 2), (1, 5, 1)]
ROWS = {"ART": ART, "deep": DEEP, "in blocks": IN_BLOCKS}
OPTIONS = [{}, {"window_size": (40, 0), "sinks": True}, {"softcap": 2.0, "heads": (6, 2)}]


def ids_of(row, device="cpu"):
    """(group_ids, parent_ids), as ART has them."""
    lengths, groups, parents = (torch.tensor(each) for each in zip(*row, strict=True))
    return groups.repeat_interleave(lengths).to(device), parents.repeat_interleave(lengths).to(device)


def paths_of(row):
    """The rows that the last token of each group sees, by only the ids."""
    groups, paths = ids_of(row)[0].tolist(), []
    for _, group, parent in row:
        chain = {group, parent}
        while (above := next(up for _, each, up in row if each == parent)) not in chain:
            chain.add(above)
            parent = above
        paths.append([slot for slot in range(len(groups)) if groups[slot] in chain])
    return [torch.tensor(path) for path in paths]


def tree_of(row, device, **options):
    tree = Tree([tokens for tokens, _, _ in row], [-1] * len(row), device=device, **options)
    tree.parents = po.prefix_tree_metadata(*ids_of(row), device=device).paths
    return tree


def assert_bits_of_samples(row, device, **options):
    tree = tree_of(row, device, **options)
    shared = tree.ours()
    leaves = {group for _, group, _ in row} - {parent for _, group, parent in row if parent != group}
    for (tokens, group, _), rows in zip(row, paths_of(row), strict=True):
        rows = rows.to(device)
        alone, own = tree.alone(rows), slice(len(rows) - tokens, None)
        assert torch.equal(shared["out"][rows], alone["out"])
        assert torch.equal(shared["lse"][:, rows], alone["lse"])
        of_dq = own if tree.q.is_cuda else slice(None)
        assert torch.equal(shared["dq"][rows][of_dq], alone["dq"][of_dq])
        if group in leaves:  # rows of one sample
            assert torch.equal(shared["dk"][rows][own], alone["dk"][own])
            assert torch.equal(shared["dv"][rows][own], alone["dv"][own])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_each_sample_has_its_bits_alone(device, name, options, dtype):
    assert_bits_of_samples(ROWS[name], device, dtype=dtype, **options)


@st.composite
def drawn_rows(draw):
    """Groups in any order after their parents."""
    row = []
    for group in range(draw(st.integers(1, 9))):
        row.append((draw(st.sampled_from([1, 2, 63, 64, 127, 128, 129, 200])), group, draw(st.integers(0, group))))
    return row


@given(row=drawn_rows(), half=st.booleans())
def test_each_sample_of_a_drawn_row_has_its_bits_alone(device, row, half):
    assert_bits_of_samples(row, device, dtype=torch.bfloat16 if half else torch.float32)


def test_equals_the_mask_of_group_and_parent_ids(device):
    """ART's mask, in whose trees no group's parent has a parent; gradients of shared rows are sums too."""
    tree = tree_of(ART, device, dtype=torch.float64 if device == "cpu" else torch.float32, heads=(2, 2))
    group_ids, parent_ids = ids_of(ART, device)
    same, of_parent = group_ids[:, None] == group_ids, parent_ids[:, None] == group_ids
    mask = (same | of_parent).tril()

    def attend(q, k, v, sinks):
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -float("inf"))
        return (scores.softmax(-1) @ v).transpose(0, 1), scores.logsumexp(-1)

    assert_close(tree.ours(), tree.results_of(attend, torch.float64), 1e-12 if device == "cpu" else 1e-4)


def test_position_ids_are_those_of_the_samples(device):
    metadata = po.prefix_tree_metadata(*ids_of(DEEP, device))
    found = torch.full((metadata.total,), -1, device=device)
    for rows in paths_of(DEEP):
        found[rows.to(device)] = torch.arange(len(rows), device=device)
    assert metadata.position_ids.device.type == device
    assert torch.equal(metadata.position_ids, found)
    assert metadata.max_seqlen == 128 + 45 + 129


@pytest.mark.parametrize(("name", "in_place"), [("ART", False), ("in blocks", True)])
def test_forks_at_whole_tiles_are_read_where_they_lie(device, name, in_place, monkeypatch):
    read_in_place = reads_of(monkeypatch)
    tree_of(ROWS[name], device).ours()
    assert read_in_place == [in_place, in_place], "the forward and the backward"


def test_equals_the_paths_of_pack_prefix_tree(device):
    prompt = torch.arange(1000, 1256)
    samples = [torch.cat([prompt, torch.arange(n)]) for n in (3, 70)] + [torch.arange(40)]
    tree = po.pack_prefix_tree(torch.cat(samples), po.cu_seqlens_from_lengths([len(each) for each in samples]))
    wanted = po.PackedMetadata.from_prefix_tree(tree, device=device)
    groups = torch.arange(tree.num_segments).repeat_interleave(tree.lengths)
    parents = torch.where(tree.parents < 0, torch.arange(tree.num_segments), tree.parents)
    found = po.prefix_tree_metadata(groups.to(device), parents[groups].to(device))
    assert (found.total, found.max_seqlen, found.paths[-2:]) == (wanted.total, wanted.max_seqlen, wanted.paths[-2:])
    for ours, theirs in zip(found.paths[:5], wanted.paths[:5], strict=True):
        assert ours.device.type == device
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_forms_of_ids(device, dtype):
    groups, parents = torch.tensor([[5, 5, 6], [5, 5, 5]], dtype=dtype, device=device)
    for given_ids in ((groups, parents), (groups[None], parents[None]), (groups.tolist(), parents.cpu().numpy())):
        assert po.prefix_tree_metadata(*given_ids).position_ids.tolist() == [0, 1, 2]
    strided = torch.stack([groups, parents], 1)
    assert po.prefix_tree_metadata(*strided.T).paths.slot_of_key.tolist() == [0, 1, 0, 1, 2]
    nothing = po.prefix_tree_metadata([], [])
    assert (nothing.total, nothing.num_documents, nothing.paths.shares) == (0, 0, False)
    alone = po.prefix_tree_metadata([4, 4, 9], [4, 4, 9])
    assert not alone.paths.shares
    assert alone.position_ids.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("group_ids", "parent_ids", "message"),
    [
        ([1, 2, 1], [1, 1, 1], r"group_ids: expected .* next to each other, with one parent, got 1 again at index 2"),
        ([1, 2, 3, 3], [1, 1, 1, 2], r"group_ids: expected .* with one parent, got 3 again at index 3"),
        ([1, 2, 3], [1, 3, 3], r"parent_ids: expected the group itself or one that is before it, got 3 at index 1"),
        ([1, 2], [1, 7], r"parent_ids: expected .* before it, got 7 at index 1"),
        ([1, 2], [1], r"parent_ids: expected \[total=2\] like group_ids, got int64 \[1\]"),
        (torch.ones(2), [1, 1], r"group_ids: expected int32 or int64, got float32 \[2\]"),
        ([1, 1], torch.ones(2, dtype=torch.bool), r"parent_ids: expected int32 or int64, got bool \[2\]"),
        (torch.ones(2, 2).long(), [1, 1], r"group_ids: expected \[total\] or \[1, total\], got int64 \[2, 2\]"),
    ],
)  # fmt: skip
def test_what_is_no_tree_is_named(group_ids, parent_ids, message):
    with pytest.raises(ValueError, match=message):
        po.prefix_tree_metadata(group_ids, parent_ids)


def test_ids_that_are_no_integers_are_named():
    for wrong in (None, [1.5], ["a"]):
        with pytest.raises(TypeError, match="parent_ids: expected"):
            po.prefix_tree_metadata([1], wrong)


def test_paths_past_int32_are_named():
    groups = torch.arange(120_000)
    groups[:50_000] = 0
    with pytest.raises(ValueError, match=r"parents: expected paths of fewer than 2\*\*31 tokens together, got"):
        po.prefix_tree_metadata(groups, torch.zeros_like(groups))


def test_compiled(device, fresh_compile):
    """Rows of other trees compile nothing again."""
    compiled = torch.compile(po.varlen_attention, backend="aot_eager", fullgraph=True)
    for row in (ART, DEEP):
        metadata = po.prefix_tree_metadata(*ids_of(row), device=device)
        heads = torch.randn(3, metadata.total, 2, 8, device=device)
        assert torch.equal(compiled(*heads, metadata), po.varlen_attention(*heads, metadata))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_in_a_cuda_graph():
    metadata = po.prefix_tree_metadata(*ids_of(ART), device="cuda")
    heads = torch.randn(3, metadata.total, 2, 64, dtype=torch.bfloat16, device="cuda")
    graph, result = captured(lambda: po.varlen_attention(*heads, metadata))
    graph.replay()
    assert torch.equal(result, po.varlen_attention(*heads, metadata))
