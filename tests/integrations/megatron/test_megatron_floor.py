"""What the integration leaves on a batch, and how far its packed_seq_params goes: nothing, and not far."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("megatron.core")

from helpers import ROOT
from helpers.megatron_case import RECOMPUTED, VOCABULARY, has_fields, one_process, thd_params, tiny_gpt  # noqa: F401
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams

import packing_ops as po
from packing_ops.integrations.megatron import packed_seq_params, patch_rope, revert_rope, use_packing_ops

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.fixture(autouse=True)
def patched():
    patch_rope()
    yield
    revert_rope()


@contextlib.contextmanager
def noticed(note):
    """``note(frame, event)`` of every Python call and return."""
    sys.setprofile(lambda frame, event, _: note(frame, event))
    try:
        yield
    finally:
        sys.setprofile(None)


def model_of(device, **more):
    return tiny_gpt(use_packing_ops(get_gpt_layer_local_spec()), device, **more)


def ids_of(*shape, device):
    return torch.randint(1, VOCABULARY, shape, device=device)


def padded_params(device):
    return packed_seq_params(po.PackedMetadata.from_lengths([5, 3], total=9, device=device))


# --- nothing is left on other libraries' objects ---


def tree_params(device):
    parents = torch.tensor([-1, 0, 0], dtype=torch.int32, device=device)
    cu_seqlens = torch.tensor([0, 128, 133, 136], dtype=torch.int32, device=device)
    params = PackedSeqParams("thd", cu_seqlens, cu_seqlens, max_seqlen_q=136, max_seqlen_kv=136)
    params.segment_parents = parents
    return params


FUSED = {"apply_rope_fusion": True}
BATCHES = {  # {name: (options of the model, packed_seq_params, shape of input_ids)}
    "documents": (FUSED, lambda device: thd_params(device=device), (1, 16)),
    "slots": (FUSED, lambda device: thd_params([5, 3, 7], device, slots=[6, 4, 8]), (1, 18)),
    "padding": (FUSED, padded_params, (1, 9)),
    "tree": ({}, tree_params, (1, 136)),
    "tree, fused": (FUSED, tree_params, (1, 136)),
    "tree, recomputed": (RECOMPUTED["full, uniform"], tree_params, (1, 136)),
    "q, k and v in one": ({**FUSED, "fused_single_qkv_rope": True}, lambda device: None, (2, 8)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_nothing_is_left_on_tensors(name, device):
    """Nor on packed_seq_params: of all that a function of megatron-core or of packing_ops holds while a model runs."""
    more, make, shape = BATCHES[name]
    if not has_fields(more.keys()):
        pytest.skip("this megatron-core has not all of these options")
    model, params, seen = model_of(device, **more), make(device), []

    def note(frame, event):
        if event == "return" and frame.f_globals.get("__name__", "").startswith(("megatron", "packing_ops")):
            values = list(frame.f_locals.values())
            values += [each for value in values if isinstance(value, (tuple, list)) for each in value]
            seen.extend(each for each in values if isinstance(each, (torch.Tensor, PackedSeqParams)))

    ids = ids_of(*shape, device=device)
    with noticed(note):
        model(ids, None, None, labels=ids, packed_seq_params=params).sum().backward()
    assert len(seen) > 100
    assert {key for each in seen for key in vars(each) if key.startswith("_packing_ops")} == set()


# --- the way of packed_seq_params ---


def carries(value, ids):
    if isinstance(value, dict):
        value = list(value.values())
    return id(value) in ids or (isinstance(value, (tuple, list)) and any(carries(each, ids) for each in value))


def ways_of(params, model):
    """For each layer the (module, function) that got packed_seq_params or cu_seqlens, in order, from the layer's
    attention to the ops of packing_ops.
    """
    ids = {id(params), *(id(value) for value in vars(params).values() if isinstance(value, torch.Tensor))}
    ways = []
    below = []  # frames of the gate of an op: what runs in it is the op

    def note(frame, event):
        code = frame.f_code
        if event == "return" and below and below[-1] is frame:
            below.pop()
        if event != "call" or below or not Path(code.co_filename).is_relative_to(ROOT / "packing_ops"):
            return
        module = Path(code.co_filename).stem
        if module == "gate":
            below.append(frame)
            return
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
        if any(carries(frame.f_locals.get(name), ids) for name in code.co_varnames[:count]):
            if (module, code.co_name) == ("prefix_tree", "forward"):
                ways.append([])
            ways[-1].append((module, code.co_qualname))

    row = ids_of(1, 18, device="cpu")
    with noticed(note):
        model(row, None, None, packed_seq_params=params)
    return ways


@pytest.mark.parametrize("slots", [None, [6, 4, 8]])
def test_packed_seq_params_passes_few_functions(slots, device):
    """Of all of packing_ops, RoPE and attention together; the first layer makes what its batch shares."""
    if device != "cpu":
        pytest.skip("counted on the CPU: on CUDA the cache makes plans and looks at streams")
    params = thd_params([5, 3, 7] if slots else [6, 4, 8], slots=slots)
    ways = ways_of(params, model_of(device, **FUSED))
    assert len(ways) == 2
    for way in ways:
        modules = [module for module, _ in way]
        left = [
            name for place, name in enumerate(modules[1:], 1) if name != modules[place - 1] and name in modules[:place]
        ]
        assert len({*way}) <= 15, way
        assert len(left) <= 8, way
