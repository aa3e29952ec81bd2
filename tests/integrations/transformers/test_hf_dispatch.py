"""What a layer hands to torch's dispatcher under attn_implementation="packing_ops": each op costs every layer host
time.
"""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from helpers.hf_models import FAMILIES, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

import packing_ops as po
from packing_ops.integrations.transformers import register
from packing_ops.integrations.transformers.attention import packing_ops_attention
from packing_ops.integrations.transformers.masks import MaskPattern

LENGTHS = [7, 1, 12, 4]


class Dispatched(TorchDispatchMode):
    """Names of the ops, views included, in order; without detach, which is how a mode sees that autograd saves out."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            self.names.append(func.name().removeprefix("packing_ops::"))
        return func(*args, **(kwargs or {}))


def layer_of(kind, device):
    """A call of the interface as a layer makes it, and the leaves that it attends with."""
    metadata = po.PackedMetadata.from_lengths(LENGTHS, device=device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = [torch.randn(1, metadata.total, n, 16, device=device, dtype=dtype) for n in (4, 2, 2)]
    leaves = [row.transpose(1, 2).requires_grad_() for row in rows]
    positions = metadata.position_ids[None]
    given = {"position_ids": None if kind == "plain" else positions}
    given |= metadata.to_transformers() if kind == "kwargs" else {}
    mask = torch.ones(1, metadata.total, dtype=torch.bool, device=device) if kind == "mask" else None
    patterns = [MaskPattern(True, window, metadata.total, mask, given["position_ids"]) for window in [(-1, -1), (4, 0)]]
    for pattern in patterns if kind != "plain" else []:  # as where transformers makes the mask
        pattern.find(rows[0][..., 0, 0][:, None], (given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")))
    module = SimpleNamespace(num_key_value_groups=2, training=True)

    def layer(pattern=patterns[0], leaves=leaves, dropout=0.0):
        return packing_ops_attention(module, *leaves, pattern, dropout=dropout, scaling=0.25, **given)[0]

    return layer, leaves, patterns


@pytest.mark.parametrize("kind", ["plain", "position_ids", "kwargs", "mask"])
def test_one_op_forward_and_one_backward(kind, device):
    layer, leaves, _ = layer_of(kind, device)
    torch.autograd.grad(layer().sum(), leaves)  # finds the documents
    with Dispatched() as forward:
        out = layer()
    dout = torch.randn_like(out)
    with Dispatched() as backward:
        grads = torch.autograd.grad(out, leaves, dout)
    assert forward.names == ["varlen_attention"]
    assert backward.names == ["varlen_attention_backward"]
    assert out.is_contiguous()
    assert all(grad.transpose(1, 2).is_contiguous() for grad in grads)


def test_the_next_layer_may_be_another(device):
    """Nothing that one layer found out about its tensors is taken for those of another."""
    layer, leaves, (full, window) = layer_of("position_ids", device)
    rows = [leaf.detach() for leaf in leaves]
    cu_seqlens = po.PackedMetadata.from_lengths(LENGTHS, device=device).cu_seqlens

    def expected(rows, **options):
        packed = [row[0].transpose(0, 1) for row in rows]
        return po.varlen_attention(*packed, cu_seqlens, softmax_scale=0.25, **options)[None]

    fewer_heads = [rows[0], *(row[:, :1] for row in rows[1:])]
    calls = [rows, [row.half() for row in rows], [row[..., :8] for row in rows], fewer_heads]
    for given in (*calls, *reversed(calls)):
        torch.testing.assert_close(layer(full, given), expected(given), rtol=0, atol=0)
        torch.testing.assert_close(layer(window, given), expected(given, window_size=(4, 0)), rtol=0, atol=0)
    mixed = [rows[0].float(), rows[1].half(), rows[2].half()]
    assert layer(full, mixed).dtype == torch.half
    with torch.autocast(device, torch.bfloat16):
        assert layer(full, mixed).dtype == torch.bfloat16
    with Dispatched() as fallen_back:
        layer(full, rows, dropout=0.5)
    assert not any("varlen" in name for name in fallen_back.names)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_a_model(family, device):
    """The model's reshape to [batch, seqlen, hidden] is the next thing that a layer does with what attention
    gave.
    """
    register()
    model = tiny_model(family, attn_implementation="packing_ops", device=device)
    metadata = po.PackedMetadata.from_lengths(LENGTHS, device=device)
    inputs = {"input_ids": torch.randint(3, 61, (1, metadata.total), device=device)}
    inputs |= {"position_ids": metadata.position_ids[None], **metadata.to_transformers()}
    model(**inputs)
    with Dispatched() as ours:
        model(**inputs)
    assert ours.names.count("varlen_attention") == model.config.num_hidden_layers
    assert ours.names.count("check_documents") == 1
    following = [after for name, after in pairwise(ours.names) if name == "varlen_attention"]
    assert set(following) <= {"aten::view", "aten::_unsafe_view"}
