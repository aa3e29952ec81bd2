"""last_token_indices: where each document of a packed row ends."""

import pytest
import torch
from helpers import assert_same, cu_seqlens_of, lengths_strategy
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import boundaries as oracle


@given(lengths=lengths_strategy.filter(len), int64=st.booleans())
def test_last_tokens_of_documents(device, lengths, int64):
    cu_seqlens = cu_seqlens_of(lengths, device).to(torch.int64 if int64 else torch.int32)
    if 0 in lengths:
        empty = [i for i, length in enumerate(lengths) if not length]
        with pytest.raises(
            ValueError, match=r"cu_seqlens: expected at least one token in each document, got none in "
        ) as e:
            po.last_token_indices(cu_seqlens)
        assert str(e.value).endswith(str(empty))
        return
    metadata = po.PackedMetadata.from_lengths(torch.tensor(lengths, device=device))
    for given_as in (cu_seqlens, metadata):
        found = po.last_token_indices(given_as)
        assert_same(found, torch.tensor([end - 1 for _, end in oracle.documents(cu_seqlens)], device=device))
        assert po.seq_idx_from_cu_seqlens(cu_seqlens.int())[found].tolist() == list(range(len(lengths)))


def test_last_tokens_in_a_graph(device, fresh_compile):
    compiled = torch.compile(po.last_token_indices, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 1], [2, 5, 4]):
        cu_seqlens = cu_seqlens_of(lengths, device)
        assert torch.equal(compiled(cu_seqlens), po.last_token_indices(cu_seqlens))


@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int32), [0, 3]])
def test_last_tokens_of_what_is_no_cu_seqlens(wrong):
    with pytest.raises(ValueError, match="cu_seqlens: expected int32 or int64"):
        po.last_token_indices(wrong)


@pytest.mark.parametrize("wrong", [[1, 4], [-1, 2, 4]])
def test_last_tokens_of_documents_that_do_not_start_at_0(wrong, device):
    with pytest.raises(ValueError, match=f"cu_seqlens: expected to start at 0, got {wrong[0]}"):
        po.last_token_indices(torch.tensor(wrong, dtype=torch.int32, device=device))
