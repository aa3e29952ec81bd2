"""Derivatives beyond one backward: second ones, forward mode, torch.func. Right, or an error that names the op."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers import cu_seqlens_of

import packing_ops as po

ops = torch.ops.packing_ops
CU_SEQLENS = cu_seqlens_of([2, 0, 3])
MASK = torch.tensor([[0, 1, 1], [1, 0, 0]])
KEPT = torch.tensor([True, False, True, True, True])
ANGLES = torch.randn(2, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
INDICES = torch.tensor([1, 2, 3])


def rotated(x, **options):
    q, k = x.view(5, 3, 4).split([2, 1], dim=1)
    return torch.cat(po.apply_rotary_qk(q, k, *ANGLES, **options), dim=1)


# Of the ops that are linear: a function of 60 numbers.
LINEAR = {
    "segment_sum": lambda x: po.segment_sum(x[:5], CU_SEQLENS),
    "segment_sum, mean of some": lambda x: po.segment_sum(x[:5], CU_SEQLENS, KEPT, average=True),
    "rope": rotated,
    "rope, pairs side by side": lambda x: rotated(x, interleaved=True),
    "rope of q alone": lambda x: po.apply_rotary_qk(x.view(5, 3, 4), None, *ANGLES)[0],
    "unpad_input": lambda x: po.unpad_input(x.view(2, 3, 10), MASK)[0],
    "unpad_input, lengths known": lambda x: po.unpad_input(x.view(2, 3, 10), MASK, lengths=[2, 1])[0],
    "unpad_inputs": lambda x: po.unpad_inputs({"ids": MASK, "x": x.view(2, 3, 10)}, MASK)[0]["x"],
    "unpad_inputs, two": lambda x: torch.cat(
        [*po.unpad_inputs({"x": x.view(2, 3, 10), "y": 2 * x.view(2, 3, 10)}, MASK, lengths=[2, 1])[0].values()]
    ),
    "pad_input": lambda x: po.pad_input(x.view(3, 20), INDICES, 2, 3),
    "pad_inputs": lambda x: po.pad_inputs({"ids": INDICES, "x": x.view(3, 20)}, INDICES, 2, 3)["x"],
}
linear = pytest.mark.parametrize("name", LINEAR)


def attend(x):
    return po.varlen_attention(*x.view(5, 3, 4).split(1, dim=1), CU_SEQLENS)


def numbers():
    return torch.randn(60, dtype=torch.float64)


@linear
def test_linear_ops_have_every_derivative(name):
    f, x = LINEAR[name], numbers().requires_grad_()
    square = lambda x: f(x * x)  # noqa: E731
    assert torch.autograd.gradcheck(square, x, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(square, x, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)


@linear
def test_linear_ops_under_torch_func(name):
    f, x, along = LINEAR[name], numbers(), numbers()
    leaf = x.clone().requires_grad_()
    out = f(leaf * leaf)
    (wanted,) = torch.autograd.grad(out.square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: f(x * x).square().sum())(x), wanted)
    _, tangent = torch.func.jvp(f, (x,), (along,))
    torch.testing.assert_close(tangent, f(along))
    grad_of_grad = torch.func.grad(lambda x: torch.func.grad(lambda x: f(x * x).square().sum())(x).sum())
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(f(leaf * leaf).square().sum(), leaf, create_graph=True)
    torch.testing.assert_close(grad_of_grad(x), torch.autograd.grad(first.sum(), leaf)[0])


def test_one_tangent_of_several():
    """k, or the second tensor of a list, has a tangent where the first lacks one."""
    x, along = torch.randn(2, 5, 1, 4, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, along)
        q, k = po.apply_rotary_qk(x, dual, *ANGLES)
        assert not forward_ad.unpack_dual(q).tangent.any()
        wanted = po.apply_rotary_qk(along, None, *ANGLES)[0]
        torch.testing.assert_close(forward_ad.unpack_dual(k).tangent, wanted)
        both = po.pad_inputs({"x": x, "y": dual}, torch.arange(5), 1, 6)
        tangents = {name: forward_ad.unpack_dual(padded).tangent for name, padded in both.items()}
        assert not tangents["x"].any()
        torch.testing.assert_close(tangents["y"][0, :5], along)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_second_derivative_of_half_types(device, dtype):
    """The gradient of segment_sum is linear too, and its dtypes differ: sums are float32."""
    x = torch.randn(5, dtype=dtype, device=device, requires_grad=True)
    (first,) = torch.autograd.grad(po.segment_sum(x, CU_SEQLENS.to(device)).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    wanted = 2 * torch.tensor([2, 2, 3, 3, 3], dtype=dtype, device=device)
    torch.testing.assert_close(second, wanted)


def test_attention_under_torch_func():
    x = numbers()
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(attend(leaf).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: attend(x).square().sum())(x), wanted)
    out, pull = torch.func.vjp(attend, x)
    torch.testing.assert_close(pull(2 * out)[0], wanted)
    # One after the other in a loop: vmap over the backward.
    with pytest.warns(UserWarning, match="There is a performance drop"):
        rows = torch.func.jacrev(lambda x: attend(x)[0, 0])(x)
    torch.testing.assert_close(rows, torch.autograd.functional.jacobian(lambda x: attend(x)[0, 0], x))


def test_attention_refuses_second_derivatives():
    x = numbers().requires_grad_()
    (first,) = torch.autograd.grad(attend(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"varlen_attention.*second"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match=r"varlen_attention.*second"):
        torch.func.grad(lambda x: torch.func.grad(lambda x: attend(x).square().sum())(x).sum())(x.detach())


def test_attention_gradient_penalty_on_something_else():
    """create_graph through attention is fine as long as nobody derives its gradient again."""
    x = numbers().requires_grad_()
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = attend(x).sum() + (scale**3)
    _, of_scale = torch.autograd.grad(loss, (x, scale), create_graph=True)
    assert torch.autograd.grad(of_scale, scale)[0] == 6


SCALED = {
    "varlen_attention": (
        lambda x, **scalar: po.varlen_attention(x, x, x, CU_SEQLENS, **scalar),
        "softmax_scale",
        "softcap",
    ),
    "attention": (lambda x, **scalar: po.attention(x, x, x, CU_SEQLENS, **scalar), "softmax_scale", "softcap"),
    "flash_attn_func": (lambda x, **scalar: po.flash_attn_func(*[x[None]] * 3, **scalar), "softmax_scale", "softcap"),
    "gated_delta_rule": (
        lambda x, **scalar: po.gated_delta_rule(x, x, x, *[x[..., 0]] * 2, CU_SEQLENS, **scalar)[0],
        "scale",
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scalar_that_would_lose_its_gradient_is_refused(name):
    run, *scalars = SCALED[name]
    x, learned = torch.randn(5, 2, 8), torch.tensor(0.5, requires_grad=True)
    for scalar in scalars:
        with pytest.raises(ValueError, match=rf"^{scalar}: expected a number or a tensor without requires_grad"):
            run(x, **{scalar: learned})
        with torch.no_grad():
            assert torch.equal(run(x, **{scalar: learned}), run(x, **{scalar: 0.5}))


def test_attention_refuses_forward_mode():
    x = numbers()
    with pytest.raises(NotImplementedError, match=r"varlen_attention.*forward-mode"):
        torch.func.jvp(attend, (x,), (x,))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=r"varlen_attention.*forward-mode"):
        attend(forward_ad.make_dual(x, x))
    with forward_ad.dual_level():  # no tangent reaches it
        attend(x)
    # The derivative of the gradient along a direction: forward over reverse.
    with pytest.raises(NotImplementedError, match=r"varlen_attention.*forward-mode"):
        torch.func.jvp(torch.func.grad(lambda x: attend(x).sum()), (x,), (x,))


def test_rope_refuses_tangents_that_it_would_lose():
    q = torch.randn(5, 3, 4, dtype=torch.float64)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, q)
        with pytest.raises(ValueError, match="q: expected no forward-mode tangent with inplace=True"):
            po.apply_rotary_qk(dual, None, *ANGLES, inplace=True)
        cos = forward_ad.make_dual(ANGLES[0], ANGLES[0])
        with pytest.raises(NotImplementedError, match=r"rope_qk.*cos"):
            po.apply_rotary_qk(q, None, cos, ANGLES[1])
        with pytest.raises(ValueError, match="cos: expected no forward-mode tangent with inplace=True"):
            po.apply_rotary_qk(q, None, cos, ANGLES[1], inplace=True)


def test_ops_themselves_in_forward_mode():
    """Below the public functions: what takes floating tensors and has no derivative refuses."""
    x = torch.randn(5, 1, 4, dtype=torch.float64)
    out, lse = ops.varlen_attention(x, x, x, CU_SEQLENS, CU_SEQLENS, None, True, None, -1, -1, 0.0, None)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match=r"varlen_attention_backward.*forward-mode"):
            ops.varlen_attention_backward(
                dual, None, x, x, x, out, lse, CU_SEQLENS, CU_SEQLENS, None, True, None, -1, -1, 0.0, None
            )
        grad = forward_ad.make_dual(x[:3, 0, 0].clone(), torch.ones(3, dtype=torch.float64))
        back = ops.segment_sum_backward(grad, CU_SEQLENS, None, False, 5, torch.float64)
        assert forward_ad.unpack_dual(back).tangent.tolist() == [1.0] * 5
