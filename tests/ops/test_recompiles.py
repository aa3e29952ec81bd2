"""A function that torch.compile has compiled once serves rows of other lengths, where their sizes are marked."""

import pytest
import torch
from helpers import assert_same
from torch._dynamo.testing import CompileCounterWithBackend

import packing_ops as po
from packing_ops.varlen import backends

# Other totals and other numbers of documents. Three documents have as many cu_seqlens as q has heads.
BATCHES = [[40, 20, 5], [10, 30, 33, 7, 9], [5, 70], [1, 2, 3, 4, 5, 6, 7, 8, 9], [50, 1]]
TABLE = torch.randn(128, 8)


def batch_of(lengths, device):
    metadata = po.PackedMetadata.from_lengths(lengths, device=device)
    q, k, v = (torch.randn(metadata.total, heads, 16, device=device, requires_grad=True) for heads in (4, 2, 2))
    return q, k, v, metadata


def layer(q, k, v, documents):
    """Of a PackedMetadata or of cu_seqlens."""
    if isinstance(documents, po.PackedMetadata):
        q, k = po.apply_rotary_qk(q, k, TABLE.to(q.device), TABLE.to(q.device), documents)
    out = po.varlen_attention(q, k, v, documents)
    return po.segment_sum(out.flatten(1).sum(1), documents)


def compilations(function, batches, mark, **options):
    """How often each batch compiles, forward and backward."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled, counts = torch.compile(function, fullgraph=True, backend=counter, **options), []
    for q, k, v, documents in batches:
        before = counter.frame_count
        if mark:
            cu_seqlens = documents.cu_seqlens if isinstance(documents, po.PackedMetadata) else documents
            for tensor in (q, k, v, cu_seqlens):
                torch._dynamo.mark_dynamic(tensor, 0)
        sums = compiled(q, k, v, documents)
        sums.sum().backward()
        counts.append(counter.frame_count - before)
        assert_same(sums, function(q, k, v, documents))
    return counts


@pytest.mark.parametrize("kind", ["PackedMetadata", "cu_seqlens"])
def test_marked_sizes_compile_once(kind, device, fresh_compile):
    batches = [batch_of(lengths, device) for lengths in BATCHES]
    if kind == "cu_seqlens":
        batches = [(q, k, v, metadata.cu_seqlens) for q, k, v, metadata in batches]
    assert compilations(layer, batches, mark=True) == [1, 0, 0, 0, 0]


def test_sizes_that_are_not_marked_compile_twice(device, fresh_compile):
    """The second time with sizes that torch has seen to change, and never after that."""
    assert compilations(layer, [batch_of(lengths, device) for lengths in BATCHES], mark=False) == [1, 1, 0, 0, 0]


def test_another_number_of_documents_in_rows_of_one_length(device, fresh_compile):
    batches = [batch_of(lengths, device) for lengths in ([40, 20, 5], [60, 5], [10, 20, 30, 5])]
    for *_, metadata in batches:
        torch._dynamo.mark_dynamic(metadata.cu_seqlens, 0)
    assert compilations(layer, batches, mark=False) == [1, 0, 0]


def test_a_constant_result_is_marked_as_torch_marks_it():
    def ours():
        return 0

    def theirs():
        return 0

    backends._assume_constant_result(ours)
    torch.compiler.assume_constant_result(theirs)
    assert vars(ours) == vars(theirs) != {}
