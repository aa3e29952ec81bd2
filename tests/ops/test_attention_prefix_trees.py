"""varlen_attention over prefix trees: against one mask of the whole row, and to the bit against each path
separately.
"""

import copy
import dataclasses

import pytest
import torch
from helpers import captured, cu_seqlens_of
from helpers.attention_case import assert_close
from helpers.tree_case import FORK, Tree, drawn_tree
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

import packing_ops as po
from packing_ops.keys import prefix_paths

ops = torch.ops.packing_ops
OPTIONS = [
    {},
    {"window_size": (40, 0), "sinks": True},
    {"window_size": (200, -1), "softcap": 2.0, "heads": (6, 2), "tail": 3},
    {"heads": (3, 1), "dim_v": 24, "softmax_scale": 0.5, "tail": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_equals_one_mask_of_the_row(device, seed, options):
    tree = Tree(
        *drawn_tree(seed, 9), dtype=torch.float64 if device == "cpu" else torch.float32, device=device, **options
    )
    assert_close(tree.ours(), tree.exact(), 1e-12 if device == "cpu" else 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types_round_at_most_twice_as_much_as_torch(device, dtype):
    lengths, parents = [256, *[70] * 8], [-1, *[0] * 8]
    tree = Tree(lengths, parents, heads=(4, 2), dim=32, dtype=dtype, device=device)
    ours, exact, plain = tree.ours(), tree.exact(), tree.exact(dtype)
    for name in ours:
        if name != "lse":
            error, theirs = ((each[name].double() - exact[name]).abs().max() for each in (ours, plain))
            assert error <= 2 * theirs, name


@given(seed=st.integers(0, 10**6), segments=st.integers(1, 14), option=st.integers(0, 3), half=st.booleans())
def test_sharing_changes_no_bit(device, seed, segments, option, half):
    dtype = torch.bfloat16 if half else torch.float32
    assert_same_bits(Tree(*drawn_tree(seed, segments), dtype=dtype, device=device, **OPTIONS[option]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
@given(
    seed=st.integers(0, 10**6), heads=st.sampled_from([(4, 2), (2, 2), (8, 1), (6, 2), (7, 1)]), window=st.booleans()
)
def test_sharing_changes_no_bit_of_a_gpus_heads(dim, seed, heads, window):
    options = {"window_size": (100, 0)} if window else {}
    assert_same_bits(Tree(*drawn_tree(seed, 9), dtype=torch.bfloat16, device="cuda", dim=dim, heads=heads, **options))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 24])
def test_sharing_changes_no_bit_of_long_samples(group, dim, softcap):
    prompts = 2 * [FORK * (1024 // group // FORK + 1)]  # 2,048 rows: from there on tiles start at the last row
    options = {"heads": (2 * group, 2), "dtype": torch.bfloat16, "device": "cuda", "softcap": softcap}
    assert_same_bits(Tree([*prompts, 88, 200, 1, 344], [-1, 0, 1, 1, 1, 0], dim=dim, **options))


def assert_same_bits(tree):
    """Of every segment next to the document of only its path, and from run to run. dq adds up tiles of keys in an
    order that on a GPU goes by the document's length: there the rows of a path's earlier segments are compared in their
    paths.
    """
    lengths, parents = tree.cu_seqlens.diff().tolist(), tree.parents.tolist()
    shared, inner = tree.ours(), set(parents)
    for name, again in tree.ours().items():
        assert torch.equal(shared[name], again), name
    for segment, rows in enumerate(tree.paths()):
        alone, own = tree.alone(rows), slice(len(rows) - lengths[segment], None)
        assert torch.equal(shared["out"][rows], alone["out"])
        assert torch.equal(shared["lse"][:, rows], alone["lse"])
        of_dq = own if tree.q.is_cuda else slice(None)
        assert torch.equal(shared["dq"][rows][of_dq], alone["dq"][of_dq])
        if segment not in inner:  # rows of one sample
            assert torch.equal(shared["dk"][rows][own], alone["dk"][own])
            assert torch.equal(shared["dv"][rows][own], alone["dv"][own])


def test_shared_rows_add_up_their_samples(device):
    """dk and dv of a prompt's rows."""
    lengths, parents = [FORK, 40, 50], [-1, 0, 0]
    tree = Tree(lengths, parents, dtype=torch.float64 if device == "cpu" else torch.float32, device=device)
    prompt, first, second = (tree.alone(rows) for rows in tree.paths())
    # Both paths hold the prompt's queries: they count once.
    expected = {name: (first[name][:FORK] + second[name][:FORK] - prompt[name]).double() for name in ("dk", "dv")}
    shared = {name: gradient[:FORK] for name, gradient in tree.ours().items()}
    assert_close(shared, expected, 1e-12 if device == "cpu" else 1e-4)


def test_other_trees_and_the_order_of_siblings_change_no_bit(device):
    lengths, parents = [FORK, 40, 50, 30], [-1, 0, 0, 0]
    tree = Tree(lengths, parents, device=device)
    before = tree.ours()
    # Siblings in another order, and trees around.
    order = torch.cat([torch.arange(7), 7 + torch.arange(FORK), 7 + FORK + 90 + torch.arange(30), 7 + FORK + torch.arange(90), torch.arange(9)])  # fmt: skip
    moved = Tree([7, FORK, 30, 40, 50, 9], [-1, -1, 1, 1, 1, -1], device=device)
    rows = torch.cat([torch.arange(FORK), FORK + 30 + torch.arange(90), FORK + torch.arange(30)]) + 7
    assert order.numel() == moved.q.shape[0]
    for name in ("q", "k", "v", "dout"):
        getattr(moved, name)[rows] = getattr(tree, name)
    moved.dlse[:, rows] = tree.dlse
    after = moved.ours()
    for name in ("out", "dq"):
        assert torch.equal(after[name][rows], before[name])
    assert torch.equal(after["lse"][:, rows], before["lse"])


def test_nan_stays_in_the_samples_that_see_it(device):
    tree = Tree([FORK, 40, 50], [-1, 0, 0], device=device)
    clean = tree.ours()
    tree.q[FORK + 3] = tree.k[FORK + 3] = tree.v[FORK + 3] = float("nan")  # in the first answer
    broken = tree.ours()
    rest = slice(FORK + 40, None)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(broken[name][rest], clean[name][rest])
    assert torch.equal(broken["out"][:FORK], clean["out"][:FORK])
    assert broken["out"][FORK + 3].isnan().all()
    assert broken["dk"][0].isnan().any()  # the prompt is in that sample


@pytest.mark.parametrize("fork", [0, 1, 127, 128, 129])
def test_windows_across_a_fork(device, fork):
    tree = Tree([FORK, FORK, 20, 30], [-1, 0, 1, 1], window_size=(fork, 0), dtype=torch.float32, device=device)
    assert_close(tree.ours(), tree.exact(), 1e-4)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_layouts_with_a_batch(device, layout):
    tree = Tree([FORK, 40, 50], [-1, 0, 0], heads=(4, 2), device=device)
    plain = po.varlen_attention(tree.q, tree.k, tree.v, tree.cu_seqlens, parents=tree.parents)
    swap = (lambda t: t.transpose(0, 1)[None]) if layout == "bhsd" else (lambda t: t[None])
    given = [swap(t).contiguous().requires_grad_() for t in (tree.q, tree.k, tree.v)]
    out = po.varlen_attention(*given, tree.cu_seqlens, parents=tree.parents, layout=layout)
    assert torch.equal(out[0], plain)
    grads = torch.autograd.grad(out, given, tree.dout[None])
    tree.dlse.zero_()
    ours = tree.ours()
    for found, name in zip(grads, ("dq", "dk", "dv"), strict=True):
        assert torch.equal(found, swap(ours[name]))


@pytest.mark.parametrize("dim", [8, 64, 96, 128, 192, 256, 512])
def test_every_class_of_head_dim(device, dim):
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tree = Tree([FORK, 40, 50], [-1, 0, 0], dim=dim, dtype=dtype, device=device)
    shared = tree.ours()
    for rows in tree.paths()[1:]:
        alone = tree.alone(rows)
        assert torch.equal(shared["out"][rows], alone["out"])
        assert torch.equal(shared["lse"][:, rows], alone["lse"])


def test_deep_and_wide_trees(device):
    deep = Tree(*drawn_tree(1, 50, deep=True), dtype=torch.float32, device=device)
    wide = Tree([FORK, *[3] * 1000], [-1, *[0] * 1000], dtype=torch.float32, device=device)
    for tree, segment in ((deep, 49), (wide, 1), (wide, 1000)):
        rows = tree.paths()[segment]
        assert torch.equal(tree.ours()["out"][rows], tree.alone(rows)["out"])


@pytest.mark.parametrize("lengths", [[], [0], [1], [0, 0, 5]])
def test_empty_and_tiny_trees(device, lengths):
    tree = Tree(lengths, [-1] * len(lengths), device=device, tail=2)
    results = tree.ours()
    assert torch.equal(results["out"][-2:], torch.zeros_like(results["out"][-2:]))
    assert not results["dk"][-2:].any()


def test_trees_that_share_nothing_gather_nothing(device, monkeypatch):
    tree = Tree([FORK, 40, 0, 50], [-1] * 4, device=device, tail=2)
    metadata = po.PackedMetadata.from_prefix_tree(Parts(tree), device=device)
    plain = po.varlen_attention(tree.q, tree.k, tree.v, tree.cu_seqlens)
    monkeypatch.setattr(torch.Tensor, "index_select", None)
    assert torch.equal(po.varlen_attention(tree.q, tree.k, tree.v, metadata), plain)
    assert torch.equal(po.varlen_attention(tree.q, tree.k, tree.v, tree.cu_seqlens, parents=tree.parents), plain)


# --- metadata, plans, torch.compile ---


class Parts:
    """What PackedMetadata.from_prefix_tree reads of a PrefixTree."""

    def __init__(self, tree):
        self.cu_seqlens, self.parents, self.num_bins = tree.cu_seqlens.cpu(), tree.parents.cpu(), 1
        self.num_slots = tree.q.shape[0]


def test_metadata_of_a_tree(device):
    tree = Tree([FORK, 40, 0, 50], [-1, 0, 0, 0], device=device, sinks=True)
    metadata = po.PackedMetadata.from_prefix_tree(Parts(tree), device=device)
    by_metadata = tree.results_of(
        lambda q, k, v, sinks: po.varlen_attention(q, k, v, metadata, sinks=sinks, return_lse=True)
    )
    for name, found in tree.ours().items():
        assert torch.equal(found, by_metadata[name])
    depths = [*range(FORK), *range(FORK, FORK + 40), *range(FORK, FORK + 50)]
    assert metadata.position_ids.tolist() == depths
    assert metadata.max_seqlen == FORK + 50
    moved = copy.deepcopy(metadata)
    assert torch.equal(po.varlen_attention(tree.q, tree.k, tree.v, moved, sinks=tree.sinks), by_metadata["out"])
    for refused in (
        lambda: po.shift_labels(torch.zeros(len(depths), dtype=torch.long, device=device), metadata),
        lambda: po.block_causal_mask(metadata, len(depths)),
        lambda: po.varlen_attention(tree.q, tree.k, tree.v, metadata, tree.cu_seqlens),
    ):
        with pytest.raises(ValueError, match="expected packed documents, got a prefix tree"):
            refused()


def test_a_plan_of_the_tree(device):
    tree = Tree([FORK, 40, 50], [-1, 0, 0], heads=(4, 2), device=device)
    metadata = po.PackedMetadata.from_prefix_tree(Parts(tree), device=device)
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    rows = {"total_q": FORK + 90, "parents": tree.parents}
    for plan in (metadata.attention_plan(**heads), po.attention_plan(tree.cu_seqlens, **heads, **rows)):
        for name, found in tree.ours(plan=plan).items():
            assert torch.equal(found, tree.ours()[name])
    with pytest.raises(ValueError, match="seqused_k: expected None beside parents"):
        po.attention_plan(tree.cu_seqlens, seqused_k=tree.cu_seqlens[1:], **heads, **rows)


def test_paths_are_kept_until_parents_change(device):
    tree = Tree([FORK, FORK, 50], [-1, 0, 1], device=device)
    chain = tree.ours()["out"]
    tree.parents.copy_(torch.tensor([-1, 0, 0]))
    fork = tree.ours()["out"]
    assert not torch.equal(chain, fork)
    assert torch.equal(fork, Tree.ours(tree, parents=tree.parents.clone())["out"])


def test_compiles_fullgraph_for_other_trees_without_compiling_again(device, fresh_compile):
    def step(q, k, v, metadata):
        return po.varlen_attention(q * 2, k, v, metadata, window_size=(90, 0)).square().sum()

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    trees = [  # none has as many segments as q has heads or columns
        ([FORK, 40, 50, 6, 9], [-1, 0, 0, 0, 0]),
        ([FORK, FORK, 7, 9, 31, 1], [-1, 0, 1, 1, 0, -1]),
        ([256, *[3] * 20], [-1, *[0] * 20]),
    ]
    compilations = []
    for lengths, parents in trees:
        tree = Tree(lengths, parents, heads=(4, 2), device=device)
        metadata = po.PackedMetadata.from_prefix_tree(Parts(tree), device=device)
        given = [t.requires_grad_() for t in (tree.q, tree.k, tree.v)]
        expected = torch.autograd.grad(step(*given, metadata), given)
        for found, wanted in zip(torch.autograd.grad(compiled(*given, metadata), given), expected, strict=True):
            assert torch.equal(found, wanted)
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[-1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_replays_with_other_tokens():
    """The paths are found before the capture; the graph gathers and sums the rows anew each time."""
    tree = Tree([FORK, 40, 0, 50], [-1, 0, 0, 0], heads=(4, 2), dim=64, dtype=torch.bfloat16, device="cuda")
    metadata = po.PackedMetadata.from_prefix_tree(Parts(tree), device="cuda")
    given = [t.clone().requires_grad_() for t in (tree.q, tree.k, tree.v)]

    def results():
        out = po.varlen_attention(*given, metadata)
        return [out.detach(), *torch.autograd.grad(out, given, tree.dout)]

    graph, replayed = captured(results)
    for _ in range(2):
        with torch.no_grad():
            for tensor in given:
                tensor.normal_()
        graph.replay()
        for got, wanted in zip(replayed, results(), strict=True):
            assert torch.equal(got, wanted)


def op_samples(device):
    tree = Tree([FORK, 4, 0, 5], [-1, 0, 0, 0], heads=(4, 2), device=device, sinks=True)
    path_cu_seqlens, *paths = ops.prefix_paths(tree.cu_seqlens, tree.parents, tree.q.shape[0])
    leaves = [t.requires_grad_() for t in (tree.q, tree.k, tree.v)]
    options = (0.3, 20, 0.0, None)
    documents = tree.cu_seqlens, path_cu_seqlens
    forward = (*leaves, *documents, tree.sinks.requires_grad_(), *paths, *options)
    with torch.no_grad():
        out, lse = ops.prefix_attention(*forward)
    backward = (tree.dout, tree.dlse, *(t.detach() for t in leaves), out, lse, *documents, None, *paths, *options)
    heads = [t.detach() for t in leaves]
    by_rows = (*documents, None, True, 0.3, 20, -1, 0.0, None, None, paths[0])
    return [
        (ops.prefix_paths, (tree.cu_seqlens, tree.parents, tree.q.shape[0], True)),
        (ops.prefix_attention, forward),
        (ops.prefix_attention_backward, backward),
        (ops.varlen_attention, (*heads, *by_rows)),
        (ops.varlen_attention_backward, (tree.dout, tree.dlse, *heads, out, lse, *by_rows)),
    ]


@pytest.mark.parametrize("sample", range(5))
def test_opcheck(device, sample):
    op, arguments = op_samples(device)[sample]
    utils = ["test_schema", "test_autograd_registration", "test_faketensor"]
    utils += [] if op is ops.prefix_paths else ["test_aot_dispatch_dynamic"]  # its sizes depend on values
    torch.library.opcheck(op, arguments, test_utils=utils)


def test_gradcheck():
    tree = Tree([FORK, 3, 2], [-1, 0, 0], dim=2, dtype=torch.float64, sinks=True)
    rows = torch.tensor([0, 60, 127, 128, 129, 130, 131, 132])  # of 133: the others are held

    def call(q, k, v, sinks):
        given = [whole.index_copy(0, rows, part) for whole, part in ((tree.q, q), (tree.k, k), (tree.v, v))]
        out, lse = po.varlen_attention(*given, tree.cu_seqlens, sinks=sinks, parents=tree.parents, return_lse=True)
        return out[rows], lse[:, rows]

    leaves = [t[rows].requires_grad_() for t in (tree.q, tree.k, tree.v)] + [tree.sinks.requires_grad_()]
    assert torch.autograd.gradcheck(call, leaves)


# --- bad input ---

WRONG = {
    "later parent": ([FORK, 5], [1, -1], "parents: expected -1 or an earlier segment at index 0, got 1"),
    "itself": ([FORK, 5], [-1, 1], "parents: expected -1 or an earlier segment at index 1, got 1"),
    "below -1": ([FORK, 5], [-1, -2], "parents: expected -1 or an earlier segment at index 1, got -2"),
    "not depth first": ([FORK, FORK, 5, 5, 5], [-1, 0, -1, 2, 1], "parents: expected segments with children .* got 5 in segment 2"),
    "ended subtree": ([FORK, FORK, FORK, 5], [-1, 0, 0, 1], "parents: expected segments in depth-first order, got 1 at index 3"),
    "no multiple": ([FORK + 1, 5], [-1, 0], "parents: expected segments with children to have a multiple of 128 tokens, got 129 in segment 0"),
    "one too few": ([FORK, 5], [-1], r"parents: expected \[num_segments\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_parents(device, case):
    lengths, parents, message = WRONG[case]
    tree = Tree(lengths, parents, device=device)
    with pytest.raises(ValueError, match=message):
        tree.ours()


def test_wrong_calls(device):
    tree = Tree([FORK, 5], [-1, 0], device=device)
    ends = torch.full((FORK + 5,), FORK + 5, dtype=torch.int32, device=device)
    for changed, message in (
        ({"causal": False}, "causal, window_size: expected a causal call for a prefix tree"),
        ({"window_size": (3, 1)}, "causal, window_size: expected"),
        ({"visible_end": ends}, "visible_end: expected None beside a prefix tree"),
        ({"cu_seqlens_k": tree.cu_seqlens.clone()}, "cu_seqlens_k: expected None beside a prefix tree"),
        ({"parents": tree.parents.long()}, "parents: expected int32"),
        ({"parents": tree.parents.float()}, "parents: expected int32"),
        ({"parents": tree.parents[None]}, "parents: expected"),
    ):
        with pytest.raises(ValueError, match=message):
            tree.ours(**changed)
    with pytest.raises(TypeError, match="parents: expected a tensor"):
        tree.ours(parents=[-1, 0])
    with pytest.raises(ValueError, match="cu_seqlens: expected"):
        prefix_paths(tree.cu_seqlens, tree.parents, FORK)
    metadata = po.PackedMetadata.from_prefix_tree(Parts(tree), device=device)
    with pytest.raises(ValueError, match="parents: expected None beside the PackedMetadata of a prefix tree"):
        po.varlen_attention(tree.q, tree.k, tree.v, metadata, parents=tree.parents)


def test_wrong_rows_are_named(device):
    tree = Tree([FORK, 5], [-1, 0], device=device)
    for k, v, message in (
        (None, tree.v, "k: expected a tensor"),
        ([tree.k], tree.v, "k: expected a tensor"),
        (tree.k, None, "v: expected a tensor"),
        (tree.k[1:], tree.v, "k: expected the layout and the 133 rows of q"),
        (tree.k, tree.v[1:], "v: expected the layout and the 133 rows of q"),
        (tree.k, tree.v[0], "v: expected the layout and the 133 rows of q"),
        (tree.k[None], tree.v, "k: expected the layout and the 133 rows of q"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            po.varlen_attention(tree.q, k, v, tree.cu_seqlens, parents=tree.parents)


def test_paths_of_another_tree_are_refused(device):
    tree = Tree([FORK, 40, 50], [-1, 0, 0], device=device)
    metadata = po.PackedMetadata.from_prefix_tree(Parts(tree), device=device)
    other = cu_seqlens_of([FORK, 50, 40], device)
    with pytest.raises(ValueError, match="expected"):
        po.varlen_attention(tree.q, tree.k, tree.v, other, parents=metadata.paths)
    with pytest.raises(ValueError, match="expected"):
        po.varlen_attention(tree.q, tree.k, tree.v, dataclasses.replace(metadata, cu_seqlens=other))
    tree.cu_seqlens.copy_(other)  # the metadata has a copy
    assert metadata.cu_seqlens.tolist() == [0, FORK, FORK + 40, FORK + 90]


def test_what_a_tree_s_metadata_is_not_for(device):
    tree = Tree([FORK, 40, 50], [-1, 0, 0], device=device)
    metadata = po.PackedMetadata.from_prefix_tree(Parts(tree), device=device)
    values = torch.zeros(metadata.total, device=device)
    for refused in (
        lambda: po.last_token_indices(metadata),
        lambda: metadata.pad(values),
        lambda: metadata.unpad(values),
    ):
        with pytest.raises(ValueError, match="expected packed documents, got a prefix tree"):
            refused()
    with pytest.raises(NotImplementedError, match="has no prefix trees"):
        po.attention(tree.q, tree.k, tree.v, metadata, backend="sdpa")
    by_attention = po.attention(tree.q, tree.k, tree.v, metadata)
    assert torch.equal(by_attention, po.varlen_attention(tree.q, tree.k, tree.v, metadata))


@pytest.mark.parametrize("compiled", [False, True])
def test_rope_by_metadata_rotates_by_depth(device, compiled, fresh_compile):
    tree = Tree([FORK, 40, 50], [-1, 0, 0], device=device)
    metadata = po.PackedMetadata.from_prefix_tree(Parts(tree), device=device)
    angles = torch.outer(torch.arange(FORK + 50, device=device), torch.tensor([1.0, 0.1, 0.01, 0.001], device=device))
    cos, sin = angles.cos(), angles.sin()
    rope = torch.compile(po.apply_rotary_qk, backend="eager", fullgraph=True) if compiled else po.apply_rotary_qk
    q, _ = rope(tree.q, tree.k, cos, sin, metadata)
    assert torch.equal(q, po.apply_rotary_qk(tree.q, tree.k, cos, sin, metadata.position_ids)[0])
