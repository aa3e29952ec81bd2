"""torch.func.vmap over the public functions: what a loop gives, or an error that names the op."""

import pytest
import torch
from torch.func import vmap

import packing_ops as po
from packing_ops._runtime import library

BATCH = 3
CU_SEQLENS = torch.tensor([0, 2, 5], dtype=torch.int32)
MANY = torch.tensor([[0, 2, 5], [0, 1, 5], [0, 5, 5]], dtype=torch.int32)
LABELS = torch.arange(15).view(BATCH, 5)
UIDS = torch.tensor([[1, 1, 2], [3, 4, 4], [5, 6, 7]])
ROWS = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(0))
HEADS = torch.randn(BATCH, 5, 2, 8, generator=torch.Generator().manual_seed(1))
PADDED = torch.randn(BATCH, 2, 4, generator=torch.Generator().manual_seed(2))
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0]])
SLOTS = torch.tensor([0, 1, 4, 5, 6])
TABLE = torch.randn(5, 8, generator=torch.Generator().manual_seed(3))
WEIGHT = torch.randn(11, 8, generator=torch.Generator().manual_seed(4))


def rotate(q, **options):
    return po.apply_rotary_qk(q[None], None, TABLE, TABLE, unsqueeze_dim=2, **options)[0]


def logps(hidden):
    return po.token_logps(hidden, WEIGHT, LABELS[0] % 11, CU_SEQLENS)


def kl(hidden):
    return po.token_kl(hidden, WEIGHT, TABLE, WEIGHT, None, CU_SEQLENS, beta=0.5)


SERVED = {
    "cu_seqlens_from_lengths": (po.cu_seqlens_from_lengths, LABELS),
    "position_ids": (lambda c: po.position_ids_from_cu_seqlens(c, 5), MANY),
    "seq_idx": (lambda c: po.seq_idx_from_cu_seqlens(c, 5), MANY),
    "cu_seqlens_from_position_ids": (lambda p: po.cu_seqlens_from_position_ids(p, padded=True), UIDS),
    "mask_boundary_labels": (lambda x: po.mask_boundary_labels(x, CU_SEQLENS), LABELS),
    "shift_labels": (lambda x: po.shift_labels(x, CU_SEQLENS), LABELS),
    "shift_values": (lambda x: po.shift_values(x, CU_SEQLENS), ROWS),
    "count_target_tokens": (lambda x: po.count_target_tokens(x, CU_SEQLENS), LABELS),
    "block_causal_mask": (lambda c: po.block_causal_mask(c, 5), MANY),
    "segment_sum": (lambda x: po.segment_sum(x, CU_SEQLENS), HEADS),
    "segment_sum by cu_seqlens": (lambda c: po.segment_sum(ROWS[0], c), MANY),
    "segment_mean": (lambda x: po.segment_mean(x, CU_SEQLENS), ROWS),
    "segment_std": (lambda x: po.segment_std(x, CU_SEQLENS), ROWS),
    "segment_broadcast": (lambda x: po.segment_broadcast(x, CU_SEQLENS, 5), ROWS[:, :2]),
    "gradient of a sum": (torch.func.grad(lambda x: po.segment_sum(x, CU_SEQLENS).square().sum()), ROWS),
    "pad_input": (lambda x: po.pad_input(x, SLOTS, 2, 4), ROWS),
    "apply_rotary_qk": (rotate, HEADS),
    "varlen_attention": (lambda q: po.varlen_attention(q, q, q, CU_SEQLENS), HEADS),
    "varlen_attention by cu_seqlens": (lambda c: po.varlen_attention(*[HEADS[0]] * 3, c), MANY),
    "flash_attn_func": (lambda q: po.flash_attn_func(*[q[None]] * 3), HEADS),
    "gradient of attention": (
        torch.func.grad(lambda q: po.varlen_attention(q, q, q, CU_SEQLENS).square().sum()),
        HEADS,
    ),
    "attention_plan": (
        lambda c: po.attention_plan(c, total_q=5, num_heads=2, num_kv_heads=2, head_dim=8),
        MANY,
    ),
    "load_balancing_loss": (lambda p: po.load_balancing_loss(p, CU_SEQLENS, top_k=2), TABLE.expand(BATCH, 5, 8) + 0.1),
    "token_kl": (kl, TABLE.expand(BATCH, 5, 8) * torch.arange(3.0)[:, None, None]),
    "token_logps": (logps, TABLE.expand(BATCH, 5, 8) * 2),
    "pack_ffd": (lambda lengths: po.pack_ffd(lengths, 20), LABELS),
}
REFUSED = {
    "mask_boundary_labels_shifted_": (lambda x: po.mask_boundary_labels_shifted_(x, CU_SEQLENS), LABELS.clone()),
    "rope_qk_": (lambda q: rotate(q, inplace=True), HEADS.clone()),
    "unpad_rows": (lambda x: po.unpad_input(x, MASK), PADDED),
    "scatter_rows_many": (lambda x: po.pad_inputs({"a": x}, SLOTS, 2, 4), ROWS),
    "pack_sequences": (lambda lengths: po.pack_sequences(lengths, 20), LABELS),
    "pack_prefix_tree": (
        lambda tokens: torch.ops.packing_ops.pack_prefix_tree(tokens, CU_SEQLENS, None, None, 1),
        LABELS,
    ),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("case", SERVED)
def test_what_a_loop_gives(case):
    call, inputs = SERVED[case]
    found, wanted = vmap(call)(inputs), [call(one) for one in inputs]
    if isinstance(found, torch.Tensor):
        found, wanted = (found,), [(one,) for one in wanted]
    for values, columns in zip(found, zip(*wanted, strict=True), strict=True):
        torch.testing.assert_close(values, torch.stack(columns))


@pytest.mark.parametrize("op", REFUSED)
def test_what_is_refused_is_named(op):
    call, inputs = REFUSED[op]
    with pytest.raises(NotImplementedError, match=f"packing_ops::{op} .*torch.func.vmap.* loop"):
        vmap(call)(inputs)


def test_the_gradient_of_what_is_served_may_be_refused():
    with pytest.raises(NotImplementedError, match=r"packing_ops::scatter_rows_many .*vmap"):
        torch.func.jacrev(lambda x: po.unpad_input(x, MASK)[0])(PADDED[0])


def test_every_op_that_torch_has_no_loop_for_says_so():
    """Lists of tensors, memory that is written, sizes that depend on values."""
    for name in library.op_names():
        schema = getattr(torch.ops.packing_ops, name).default._schema
        lists = any("List[Tensor]" in str(value.type) for value in (*schema.arguments, *schema.returns))
        wanted = lists or schema.is_mutable or name in ("pack_sequences", "pack_prefix_tree")
        refused = torch._C._dispatch_has_kernel_for_dispatch_key(f"packing_ops::{name}", "FuncTorchBatched")
        assert refused == wanted, name
