"""python data_toolkit.py prints what packing_ops.data and its neighbours give: with and without a compiled library."""

import torch

import packing_ops as po
from packing_ops import data

LENGTHS = [5, 9, 3, 7, 1]
EXAMPLES = [{"input_ids": [*range(n)], "num_actions": n - 1} for n in LENGTHS]
LABELLED = [{"input_ids": each["input_ids"], "labels": each["input_ids"]} for each in EXAMPLES]
BATCH = {"input_ids": torch.arange(12).view(4, 3), "attention_mask": torch.tensor([[1, 1, 0]] * 4)}
METADATA = po.PackedMetadata.from_lengths([2, 0, 3], total=6)
CU_SEQLENS = METADATA.cu_seqlens
VALUES, LABELS = torch.arange(6.0), torch.arange(6)
ROWS = torch.arange(12.0).view(4, 3)


def gradient():
    values = VALUES.clone().requires_grad_()
    spread = po.segment_broadcast(po.segment_std(values, CU_SEQLENS), CU_SEQLENS, 6)
    loss = data.masked_loss(METADATA.unpad(METADATA.pad(values)) * spread, LABELS > 0, num_items_in_batch=3.0)
    return torch.autograd.grad(loss, values)


CALLS = {
    "pack_sequences": lambda: [
        po.pack_sequences(LENGTHS, 10, strategy=strategy, bins_multiple_of=2, balance="flops").bins
        for strategy in ("ffd", "bfd", "next_fit", "first_fit", "balanced")
    ],
    "PackedCollator": lambda: data.PackedCollator(16, tp_size=2)(EXAMPLES),
    "PaddingFreeCollator": lambda: data.PaddingFreeCollator()(LABELLED),
    "PackedBatchSampler": lambda: list(data.PackedBatchSampler(LENGTHS, 10, seed=3)),
    "token_budget_microbatches": lambda: data.token_budget_microbatches(LENGTHS, 10, dp_size=2),
    "normalize_advantages": lambda: data.normalize_advantages(
        ROWS, ROWS > 1, [(0, 2), (2, 4)], "token_mean", zscore=True
    ),
    "stage_chunks": lambda: data.stage_chunks(BATCH, [(0, 2), (2, 4)], 2),
    "sequence_logps": lambda: data.sequence_logps(ROWS, LABELS[:4] % 3, po.cu_seqlens_from_lengths([1, 3])),
    "masked_loss": lambda: [
        data.masked_loss(VALUES, LABELS > 0, num_items_in_batch=3, cu_seqlens=CU_SEQLENS, reduction=reduction)
        for reduction in ("token_mean", "sequence_mean")
    ],
    "parallel": lambda: [
        data.thd_inverse_indices(4 * CU_SEQLENS, 2),
        data.thd_partition_indices(4 * CU_SEQLENS, 2, 0),
    ],
    "trim_padding": lambda: data.trim_padding(BATCH),
    "metadata": lambda: [
        METADATA.position_ids,
        METADATA.seq_idx,
        po.PackedMetadata.from_attention_mask(ROWS > 3).lengths,
    ],
    "labels": lambda: [po.shift_labels(LABELS, CU_SEQLENS), po.count_target_tokens(LABELS, CU_SEQLENS)],
    "prompts": lambda: po.compute_prompt_mini_batch_boundaries(torch.tensor([4, 4, 2]), 1, 2, True),
    "padding": lambda: po.unpad_inputs(BATCH, BATCH["attention_mask"]),
    "gae": lambda: po.gae(VALUES, VALUES / 2, METADATA, gamma=0.99, lam=0.95),
    "gradient": gradient,
}


def found():
    return {name: repr(call()) for name, call in CALLS.items()}


if __name__ == "__main__":
    for name, result in found().items():
        print(name, result)
