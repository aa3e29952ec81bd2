"""FlopCounterMode over varlen_attention, against a plain count of the pairs that see each other."""

import subprocess
import sys

import pytest
import torch
from helpers.attention_case import OPEN, Case
from helpers.pages_case import paged_case
from test_attention_prefix_trees import Tree, drawn_tree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import packing_ops as po
from packing_ops._runtime.flops import visible_pairs
from packing_ops.keys import PrefixPaths
from packing_ops.reference.attention import visible, visible_in_tree

LENGTHS = [3, 0, 100, 1, 64]
CROSS = [0, 5, 40, 7, 300]
WINDOWS = [OPEN, (0, 0), (5, 0), (70, -1), (-1, 0), (3, 9), (-1, 20), (sys.maxsize, sys.maxsize)]


def counted(call):
    po.register_flop_formulas()
    with FlopCounterMode(display=False) as counter:
        call()
    return {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}


def pairs_of(lengths_q, lengths_k, causal, window):
    sizes = zip(lengths_q, lengths_k, strict=True)
    return sum(int(visible(n, m, causal, window).sum()) for n, m in sizes)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_pairs_of_one_document(causal, window):
    left, right = (window[0], 0) if causal else window
    for num_q in (0, 1, 2, 7, 30):
        for num_k in (0, 1, 2, 7, 30, 100):
            wanted = pairs_of([num_q], [num_k], causal, [min(side, 2**40) for side in (left, right)])
            assert visible_pairs(num_q, num_k, left, right) == wanted


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window_size": (5, 0)}, {"causal": False, "window_size": (3, 9), "sinks": True}],
    ids=str,
)
def test_forward_and_backward(device, options, cross):
    case = Case(LENGTHS, CROSS if cross else LENGTHS, heads=(6, 2), dim=16, device=device, tail=9, **options)
    pairs = pairs_of(
        LENGTHS, CROSS if cross else LENGTHS, options.get("causal", True), options.get("window_size", OPEN)
    )
    forward = 4 * 16 * 6 * pairs
    assert counted(case.ours) == {
        "packing_ops.varlen_attention": forward,
        "packing_ops.varlen_attention_backward": 5 * forward // 2,
    }


def test_heads_first_and_dense(device):
    q = torch.randn(1, 4, 10, 8, device=device)
    cu_seqlens = torch.tensor([0, 4, 10], dtype=torch.int32, device=device)
    found = counted(lambda: po.varlen_attention(q, q[:, :2], q[:, :2], cu_seqlens))
    assert found == {"packing_ops.varlen_attention": 4 * 8 * 4 * (10 + 21)}
    dense = torch.randn(3, 10, 4, 8, device=device)
    found = counted(lambda: po.flash_attn_func(dense, dense, dense))
    assert found == {"packing_ops.varlen_attention": 4 * 8 * 4 * 3 * 100}


@pytest.mark.parametrize("left", [-1, 5, 200])
def test_prefix_trees(device, left):
    tree = Tree(*drawn_tree(3, 9), heads=(6, 2), dim=16, dim_v=8, device=device, tail=5, window_size=(left, 0))
    pairs = int(visible_in_tree(tree.cu_seqlens, tree.parents, tree.q.shape[0], left).sum())

    def call(q, k, v, sinks, **options):
        return po.varlen_attention(q, k, v, tree.cu_seqlens, parents=tree.parents, return_lse=True, **options)

    assert counted(lambda: tree.results_of(call)) == {
        "packing_ops.prefix_attention": 2 * (16 + 8) * 6 * pairs,
        "packing_ops.prefix_attention_backward": 2 * (3 * 16 + 2 * 8) * 6 * pairs,
    }


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window_size": (70, 0)}], ids=str)
def test_pages(device, options):
    lengths = [(1, 300), (5, 5), (0, 9), (130, 256)]
    case, pages = paged_case(lengths, heads=(4, 2), dim=16, device=device, tail=2)
    pairs = pairs_of(*zip(*lengths, strict=True), options.get("causal", True), options.get("window_size", OPEN))
    found = counted(
        lambda: po.varlen_attention(case.q, pages.k, pages.v, case.cu_seqlens[0], **pages.keywords(), **options)
    )
    assert found == {"packing_ops.paged_attention": 4 * 16 * 4 * pairs}


def test_fake_trees_and_pages_count_as_many_pairs_as_there_can_be():
    with FakeTensorMode():
        q, cu_seqlens = torch.randn(20, 4, 8, requires_grad=True), torch.zeros(4, dtype=torch.int32)
        table, used = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        pages = torch.randn(9, 128, 2, 8)
        found = counted(lambda: po.varlen_attention(q, pages, pages, cu_seqlens, block_table=table, seqused_k=used))
        assert found == {"packing_ops.paged_attention": 4 * 8 * 4 * visible_pairs(20, 256, -1, 0)}
        offsets, rows = torch.zeros(21, dtype=torch.int32), torch.zeros(50, dtype=torch.int32)
        paths = PrefixPaths(cu_seqlens, cu_seqlens, rows, offsets, rows)
        found = counted(lambda: po.varlen_attention(q, q, q, cu_seqlens, parents=paths).sum().backward())
        forward = 4 * 8 * 4 * visible_pairs(20, 50, -1, 0)
        assert found == {
            "packing_ops.prefix_attention": forward,
            "packing_ops.prefix_attention_backward": 5 * forward // 2,
        }


def test_fake_tensors_count_as_one_document():
    with FakeTensorMode():
        q = torch.randn(164, 4, 8, requires_grad=True)
        cu_seqlens = torch.zeros(6, dtype=torch.int32)
        for options, pairs in (({}, 164 * 165 // 2), ({"causal": False}, 164**2), ({"window_size": (0, 0)}, 164)):
            forward = 4 * 8 * 4 * pairs
            found = counted(lambda: po.varlen_attention(q, q, q, cu_seqlens, **options).sum().backward())  # noqa: B023
            assert found["packing_ops.varlen_attention"] == forward
            assert found["packing_ops.varlen_attention_backward"] == 5 * forward // 2


def test_sizes_that_are_not_known_yet():
    """The formulas put no guard on a size."""
    count = lambda q: q * visible_pairs(q.shape[0], q.shape[0], 30, 0)  # noqa: E731
    graph = make_fx(count, tracing_mode="symbolic")(torch.ones(164))
    assert graph.shape_env.guards == []
    assert graph(torch.ones(10))[0] == 55
    assert graph(torch.ones(100))[0] == visible_pairs(100, 100, 30, 0)


@pytest.mark.parametrize("counter_first", [True, False])
def test_import_order(counter_first):
    """Next to a counter that is imported already the formulas are registered; else packing_ops leaves it alone until
    asked.
    """
    lines = [
        "import sys",
        "import torch",
        "import torch.utils.flop_counter" if counter_first else "",
        "import packing_ops",
        f"assert {counter_first} or 'torch._dynamo' not in sys.modules",  # its import takes as long as torch's
        f"assert ('torch.utils.flop_counter' in sys.modules) == {counter_first}",
        "assert not [each for each in sys.meta_path if 'packing_ops' in type(each).__module__]",
        "from torch.utils.flop_counter import flop_registry",
        "ops = torch.ops.packing_ops",
        "ours = ops.varlen_attention, ops.prefix_attention_backward, ops.token_logps, ops.token_logps_backward",
        f"assert [op in flop_registry for op in ours] == 4 * [{counter_first}]",
        "packing_ops.register_flop_formulas()",
        "packing_ops.register_flop_formulas()",
        "assert all(op in flop_registry for op in ours)",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
