"""Under another library's Ulysses that passes no mask on: a layer is served where it tells by itself what its mask
said.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from packing_ops.integrations.transformers import layer_documents

FULL, WINDOW, SEVEN = (True, (-1, -1)), (True, (3, 0)), (True, (7, 0))


def refuse(masks, told, layer_type, monkeypatch):
    """Of rows of 4 slots on each of two ranks."""
    own = torch.arange(4, device="cpu")[None]
    call = SimpleNamespace(position_ids=own, mask=None, looked_at_parts=False, masks=masks)
    monkeypatch.setattr(layer_documents, "current", lambda: call)
    layer = SimpleNamespace(layer_idx=0, config=SimpleNamespace(layer_types=layer_type and [layer_type]))
    gathered = own.repeat(1, 2)
    layer_documents.refuse_dropped_mask(layer, torch.zeros(1, 1, 8, 2, device="cpu"), (None, None), gathered, *told)


@pytest.mark.parametrize(
    ("masks", "told", "layer_type"),
    [
        ({FULL}, FULL, None),
        ({WINDOW}, WINDOW, None),
        ({FULL, WINDOW}, WINDOW, None),
        ({FULL, WINDOW}, FULL, "full_attention"),
        ({SEVEN}, SEVEN, None),
        ({SEVEN}, FULL, None),
        ({FULL}, SEVEN, None),
    ],
)
def test_served(masks, told, layer_type, monkeypatch):
    refuse(masks, told, layer_type, monkeypatch)


@pytest.mark.parametrize(
    ("masks", "told", "layer_type"),
    [
        ({WINDOW}, FULL, None),
        ({FULL, WINDOW}, FULL, None),
        ({FULL, WINDOW}, FULL, "sliding_attention"),
        ({FULL, None}, FULL, "chunked_attention"),
        ({FULL, None}, FULL, "full_attention"),
        ({FULL}, (False, (-1, -1)), None),
    ],
)
def test_refused(masks, told, layer_type, monkeypatch):
    with pytest.raises(
        ValueError, match="attention_mask: expected to reach attention, got dropped where rows of 4 slots"
    ):
        refuse(masks, told, layer_type, monkeypatch)
