"""100 steps on real text: packed rows learn what the same documents learn unpacked."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from common.text_data import VOCAB_SIZE, docstring_pairs, encode  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops  # noqa: E402

STEPS, DOCUMENTS, LONGEST = 100, 4, 96


def training_documents():
    found = [encode([(name, False), (text, True)]) for name, text in docstring_pairs(STEPS * DOCUMENTS)]
    cut = [(d.input_ids[:LONGEST], d.labels[:LONGEST]) for d in found]
    assert len(cut) == STEPS * DOCUMENTS
    return [cut[i : i + DOCUMENTS] for i in range(0, len(cut), DOCUMENTS)]


def packed(documents, device):
    """One row [1, T] of all documents."""
    metadata = po.PackedMetadata.from_lengths([len(ids) for ids, _ in documents], device=device)
    labels = po.mask_boundary_labels(torch.cat([labels for _, labels in documents]).to(device), metadata.cu_seqlens)
    ids = torch.cat([ids for ids, _ in documents]).to(device)
    return [{"input_ids": ids[None], "labels": labels[None], **metadata.to_transformers()}]


def unpacked(documents, device):
    return [{"input_ids": ids[None].to(device), "labels": labels[None].to(device)} for ids, labels in documents]


def losses(model, batches_of, groups, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    found = []
    for documents in groups:
        num_targets = sum(int((labels[1:] != -100).sum()) for _, labels in documents)
        loss = 0.0
        for batch in batches_of(documents, device):
            part = model(**batch, num_items_in_batch=num_targets).loss
            part.backward()
            loss += part.item()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss)
    return torch.tensor(found)


def test_packed_learns_as_unpacked(device):
    groups = training_documents()
    model = tiny_model("llama", device=device, vocab_size=VOCAB_SIZE, initializer_range=0.02)
    stock = losses(model, unpacked, groups, device)
    model = tiny_model("llama", device=device, vocab_size=VOCAB_SIZE, initializer_range=0.02)
    assert apply_packing_ops(model)
    ours = losses(model, packed, groups, device)
    revert_packing_ops(model)
    assert stock[-20:].mean() < 0.7 * stock[:5].mean()  # it learns
    # Every step within 1 %, not only the end.
    torch.testing.assert_close(ours, stock, rtol=0.01, atol=0)
