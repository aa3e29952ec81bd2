"""What a fake announces to torch.compile is what the kernel gives: shapes, strides and dtypes, in forward and backward.

A compiled graph makes views by the announced strides: where they differ, it fails.
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import cu_seqlens_of
from helpers.rope_inputs import LAYOUTS, dim_of_heads, heads, tables
from torch._subclasses.fake_tensor import FakeTensorMode

import packing_ops as po

ops = torch.ops.packing_ops


def transposed(shape, **like):
    """Tokens and heads the other way round in memory."""
    first = max(len(shape) - 3, 0)
    memory = list(shape)
    memory[first], memory[first + 1] = memory[first + 1], memory[first]
    return torch.randn(memory, **like).transpose(first, first + 1)


GRADS = {
    "contiguous": lambda shape, **like: torch.randn(shape, **like),
    "expanded": lambda shape, **like: torch.randn((), **like).expand(shape),
    "reversed": lambda shape, **like: torch.randn(shape[::-1], **like).permute(*range(len(shape))[::-1]),
    "transposed": transposed,
    "slice": lambda shape, **like: torch.randn(*shape[:-1], shape[-1] + 8, **like)[..., : shape[-1]],
}
every_grad = pytest.mark.parametrize("grad", GRADS)


def layouts_of(tensors):
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


def assert_as_announced(call, leaves, grad):
    """Outputs of ``call(*leaves)``, and gradients of the leaves where those of the outputs have the layout ``grad``."""

    def results_of(leaves, grads):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        outputs = call(*leaves)
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads)]

    grads = [GRADS[grad](out.shape, device=out.device, dtype=out.dtype) for out in call(*leaves)]
    real = results_of(leaves, grads)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        announced = results_of(*([mode.from_tensor(tensor) for tensor in tensors] for tensors in (leaves, grads)))
    assert layouts_of(announced) == layouts_of(real)


@every_grad
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", [*LAYOUTS, "one_row_for_all"])
def test_rope(device, layout, batch, grad):
    if layout == "one_row_for_all":
        q, k = (heads("heads_first_view", 1, 5, n, 8, device=device).expand(batch, -1, -1, -1) for n in (4, 2))
    else:
        q, k = (heads(layout, batch, 5, n, 8, device=device) for n in (4, 2))
    cos, sin = tables(5 * batch if layout == "packed" else 5, 4, device=device)
    unsqueeze_dim = 1 if layout == "one_row_for_all" else dim_of_heads(layout)
    assert_as_announced(lambda q, k: po.apply_rotary_qk(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim), [q, k], grad)


@every_grad
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("layout", ["packed", "heads_first", "fused", "odd_fused"])
def test_attention(device, layout, batch, dtype, grad):
    if layout == "packed":
        q, k, v = (torch.randn(9, n, 16, device=device, dtype=dtype) for n in (4, 2, 2))
    elif layout == "heads_first":
        q, k, v = (torch.randn(n, 9, 16, device=device, dtype=dtype).transpose(0, 1) for n in (4, 2, 2))
    else:  # odd: rows that no 16-byte copy can start at
        first = 3 if layout == "odd_fused" else 0
        fused = torch.randn(9, first + 8 * 16, device=device, dtype=dtype)[:, first:].unflatten(1, (8, 16))
        q, k, v = fused.split([4, 2, 2], dim=1)
    if batch:  # as models hold them, heads before tokens
        q, k, v = (t[None].transpose(1, 2) for t in (q, k, v))
    sinks, cu_seqlens = torch.randn(4, device=device), cu_seqlens_of([4, 3], device)

    def attend(q, k, v, sinks):
        return po.varlen_attention(q, k, v, cu_seqlens, sinks=sinks, return_lse=True)

    assert_as_announced(attend, [q, k, v, sinks], grad)


@every_grad
@pytest.mark.parametrize("formula", ["weight", "one_plus_weight"])
def test_rms_norm(device, formula, grad):
    """Gemma 3 normalises heads laid out tokens first."""
    pytest.importorskip("transformers")
    from packing_ops.integrations.transformers import rms_norm

    x = torch.randn(2, 5, 4, 8, device=device).transpose(1, 2)

    def norm(x, weight):
        return [rms_norm.FORWARDS[formula](SimpleNamespace(weight=weight, eps=1e-6), x)]

    assert_as_announced(norm, [x, torch.randn(8, device=device)], grad)


@every_grad
def test_rows_out_of_padding_and_back(device, grad):
    q, k = (torch.randn(2, n, 5, 8, device=device).transpose(1, 2) for n in (4, 2))
    indices = torch.tensor([0, 1, 2, 5, 6], device=device)
    assert_as_announced(lambda *rows: ops.gather_rows_many(rows, indices, 5), [q, k], grad)
    assert_as_announced(lambda rows: [ops.gather_rows(rows, indices, 5)], [q], grad)
    assert_as_announced(lambda *rows: ops.scatter_rows_many(rows, indices, 2, 5), [q[0], k[0]], grad)
    assert_as_announced(lambda rows: [ops.scatter_rows(rows, indices, 2, 5)], [q[0]], grad)
