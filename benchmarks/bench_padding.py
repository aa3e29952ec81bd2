"""python benchmarks/bench_padding.py [--device cpu|cuda]"""

import torch
from compiled_code import compiled_alone
from harness import Case, run

import packing_ops as po

BATCH, SEQLEN, HIDDEN = 16, 512, 1024


def lengths_of(batch, seqlen, seed=0):
    """Lognormal lengths of which the longest fills the row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randn(batch, generator=generator) * 0.6).exp() * seqlen / 2
    lengths = lengths.clamp(1, seqlen).long()
    lengths[0] = seqlen
    return lengths


def masks(device):
    column, lengths = torch.arange(SEQLEN), lengths_of(BATCH, SEQLEN)[:, None]
    holes = torch.rand(BATCH, SEQLEN, generator=torch.Generator().manual_seed(0)) < 0.5
    found = {"right": column < lengths, "left": column >= SEQLEN - lengths, "holes": holes}
    return {name: mask.to(device, torch.int64) for name, mask in found.items()}


# The formulas of flash_attn.bert_padding, and of trimming, in torch.


def eager_unpad(hidden, mask):
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = mask.flatten().nonzero().flatten()
    max_seqlen = lengths.max().item()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = hidden.flatten(0, 1)
    width = rows[0].numel()
    expanded = indices[:, None].expand(-1, width)
    packed = rows.reshape(rows.shape[0], width).gather(0, expanded).reshape(-1, *rows.shape[1:])
    return packed, indices, cu_seqlens, max_seqlen, lengths


def eager_pad(packed, indices, batch, seqlen):
    out = torch.zeros(batch * seqlen, *packed.shape[1:], dtype=packed.dtype, device=packed.device)
    out[indices] = packed
    return out.unflatten(0, (batch, seqlen))


def eager_trim(batch):
    """On the right."""
    real = batch["attention_mask"].any(dim=0).nonzero()
    end = int(real[-1]) + 1 if len(real) else 0
    return {name: values[:, :end] for name, values in batch.items()}


def plain_scatter(packed, indices, batch, seqlen):
    out = torch.zeros(batch * seqlen, *packed.shape[1:], dtype=packed.dtype, device=packed.device)
    return out.index_copy_(0, indices, packed)


def compiled(device, function, *arguments):
    """On CUDA the same formulas under torch.compile."""
    if device != "cuda":
        return {}
    own = compiled_alone(function)
    return {"bert_padding formulas, torch.compile": lambda: own(*arguments)}


def row_cases(device, kind, mask, row, dtype):
    hidden = torch.randint(0, 100, (*mask.shape, *row), device=device).to(dtype)
    packed, indices, *_ = po.unpad_input(hidden, mask)
    batch, seqlen = mask.shape
    rows = hidden.flatten(0, 1)
    shape = f"B={batch} S={seqlen} row={list(row)} total={len(indices)} {kind}"
    name = str(dtype).removeprefix("torch.")
    packed_bytes = packed.numel() * packed.element_size()
    padded_bytes = hidden.numel() * hidden.element_size()
    return [
        Case("unpad_input", shape, name, {
            "packing_ops": lambda: po.unpad_input(hidden, mask),
            "torch index_select": lambda: rows.index_select(0, indices),
            "bert_padding formulas": lambda: eager_unpad(hidden, mask),
            **compiled(device, eager_unpad, hidden, mask),
        }, bytes=2 * packed_bytes),
        Case("pad_input", shape, name, {
            "packing_ops": lambda: po.pad_input(packed, indices, batch, seqlen),
            "torch zeros + index_copy": lambda: plain_scatter(packed, indices, batch, seqlen),
            "bert_padding formulas": lambda: eager_pad(packed, indices, batch, seqlen),
            **compiled(device, eager_pad, packed, indices, batch, seqlen),
        }, bytes=packed_bytes + padded_bytes),
    ]  # fmt: skip


def many_case(device, mask, names=("input_ids", "labels", "positions")):
    tensors = {name: torch.randint(0, 32000, mask.shape, device=device) for name in names}
    indices = po.unpad_input(mask, mask)[1]
    return Case("unpad_inputs", f"{len(names)} x {list(mask.shape)} right", "int64", {
        "packing_ops": lambda: po.unpad_inputs(tensors, mask),
        "torch index_select": lambda: [t.flatten().index_select(0, indices) for t in tensors.values()],
        "bert_padding formulas": lambda: [eager_unpad(t, mask) for t in tensors.values()],
    }, bytes=len(names) * 2 * 8 * len(indices))  # fmt: skip


def ragged_mask(batch, seqlen, kept, device):
    """int64, padded on the right, lengths uniform with the share ``kept`` of all slots."""
    lengths = torch.rand(batch, 1, generator=torch.Generator().manual_seed(0)) * 2 * kept * seqlen
    return (torch.arange(seqlen) < lengths).to(device, torch.int64)


def large_cases(device):
    """Hidden states of a training step, 35 and 50 percent kept, and four tensors of token ids with one layout."""
    found = []
    for batch, seqlen, width, kept in ((64, 2048, 4096, 0.35), (256, 512, 1024, 0.5)):
        mask = ragged_mask(batch, seqlen, kept, device)
        found += row_cases(device, "right", mask, (width,), torch.bfloat16)
        if batch == 64:
            found.append(many_case(device, mask, ("input_ids", "labels", "positions", "loss_mask")))
    return found


def trim_case(device):
    """Token ids and their mask: the longest row fills 70 percent."""
    mask = ragged_mask(64, 2048, 0.35, device)
    batch = {"input_ids": mask.clone(), "attention_mask": mask}
    return Case("trim_padding", "B=64 S=2048", "int64", {
        "packing_ops": lambda: po.trim_padding(batch),
        "torch formulas": lambda: eager_trim(batch),
    })  # fmt: skip


def tiny_cases(device):
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], device=device)
    hidden = torch.randn(2, 4, 8, device=device)
    packed, indices, *_ = po.unpad_input(hidden, mask)
    batch = {"input_ids": mask, "attention_mask": mask}
    shape = "B=2 S=4 (call overhead)"
    return [
        Case("unpad_input", shape, "float32", {
            "packing_ops": lambda: po.unpad_input(hidden, mask),
            "bert_padding formulas": lambda: eager_unpad(hidden, mask),
        }),
        Case("pad_input", shape, "float32", {
            "packing_ops": lambda: po.pad_input(packed, indices, 2, 4),
            "bert_padding formulas": lambda: eager_pad(packed, indices, 2, 4),
        }),
        Case("trim_padding", shape, "int64", {
            "packing_ops": lambda: po.trim_padding(batch),
            "torch formulas": lambda: eager_trim(batch),
        }),
    ]  # fmt: skip


def cases(device):
    by_kind = masks(device)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for kind, mask in by_kind.items():
            found += row_cases(device, kind, mask, (HIDDEN,), dtype)
    found += row_cases(device, "right", by_kind["right"], (), torch.int64)
    if device == "cuda":
        found += large_cases(device)
    return [*found, many_case(device, by_kind["right"]), trim_case(device), *tiny_cases(device)]


if __name__ == "__main__":
    run("padding", cases)
