"""keep_float32 where only a GPU can tell: steps in CUDA graphs, and steps that wait for nothing."""

import pytest
import torch
from helpers import captured

from packing_ops.optim import keep_float32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

OPTIMIZERS = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=1e-3, capturable=True),
    "AdamW, one by one": lambda weights: torch.optim.AdamW(weights, lr=1e-3, capturable=True, foreach=False),
    "AdamW fused": lambda weights: torch.optim.AdamW(weights, lr=1e-3, capturable=True, fused=True),
    "AdamW, a tensor as lr": lambda weights: torch.optim.AdamW(
        weights, lr=torch.tensor(1e-3, device="cuda"), capturable=True
    ),
    "NAdam": lambda weights: torch.optim.NAdam(weights, lr=1e-3, capturable=True),
    "RAdam": lambda weights: torch.optim.RAdam(weights, lr=1e-3, capturable=True),
    "Adamax": lambda weights: torch.optim.Adamax(weights, lr=1e-3, capturable=True),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=1e-3, capturable=True),
    "Rprop": lambda weights: torch.optim.Rprop(weights, lr=1e-3, capturable=True),
    "SGD, momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "SGD fused": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, fused=True),
}


def weights_of(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to("cuda", dtype).requires_grad_() for shape in ((4, 6), (6, 4))]


def pair(name, dtype=torch.bfloat16):
    """Half weights with their optimizer of copies, and float32 weights of the same values with theirs."""
    half = weights_of(dtype)
    full = [weight.detach().float().requires_grad_() for weight in half]
    for weight in half:
        weight.grad = torch.zeros_like(weight)
    return half, keep_float32(OPTIMIZERS[name](half)), full, OPTIMIZERS[name](full)


def new_gradients(half, full, seed):
    """Into the same tensors, which a graph reads."""
    generator = torch.Generator().manual_seed(seed)
    for of_half, of_full in zip(half, full, strict=True):
        of_half.grad.copy_(torch.randn(of_half.shape, generator=generator))
        of_full.grad = of_half.grad.float()


def assert_equal(half, kept, full, reference):
    for weight, wanted in zip(half, full, strict=True):
        assert torch.equal(weight, wanted.to(weight.dtype))
        states = dict(kept.state[weight])
        assert torch.equal(states.pop("float32_copy"), wanted)
        assert {*states} == {*reference.state[wanted]}
        for name, value in reference.state[wanted].items():
            assert value is None or torch.equal(states[name], value), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_in_a_graph_are_those_on_float32_weights(name, dtype):
    half, kept, full, reference = pair(name, dtype)
    new_gradients(half, full, 0)
    graph, _ = captured(kept.step)  # after a step on another stream
    reference.step()
    assert_equal(half, kept, full, reference)
    for step in range(1, 6):
        new_gradients(half, full, step)
        if step == 3:  # weights that are written win, also in a replay
            with torch.no_grad():
                half[0][0] = full[0][0] = 9.0
        graph.replay()
        reference.step()
    assert_equal(half, kept, full, reference)
    new_gradients(half, full, 6)
    kept.step(), reference.step()  # not in the graph
    assert_equal(half, kept, full, reference)


def training(dtype):
    """(the weights, their optimizer, what is filled with the rows, a step)."""
    weights, rows = weights_of(dtype), torch.ones((), dtype=dtype, device="cuda")
    optimizer = keep_float32(OPTIMIZERS["AdamW"](weights))

    def step():
        optimizer.zero_grad()
        loss = torch.stack([(weight * rows).float().square().sum() for weight in weights]).sum()
        loss.backward()
        optimizer.step()

    return weights, optimizer, rows, step


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_forward_backward_and_step_in_a_graph(dtype):
    weights, optimizer, rows, step = training(dtype)
    others, other, values, eager = training(dtype)
    graph, _ = captured(step)
    eager()
    for value in (0.5, 2.0, 0.25, 1.5):
        rows.fill_(value), values.fill_(value)
        graph.replay(), eager()
    for weight, wanted in zip(weights, others, strict=True):
        assert torch.equal(weight, wanted)
        assert torch.equal(optimizer.state[weight]["float32_copy"], other.state[wanted]["float32_copy"])


@pytest.mark.parametrize("name", ["AdamW", "SGD fused"])
def test_a_first_step_in_a_graph_is_an_error(name):
    half, kept, full, reference = pair(name)
    new_gradients(half, full, 0)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        with pytest.raises(RuntimeError, match="the first step of a weight is in a CUDA graph"):
            kept.step()
    assert not kept.state
    kept.step(), reference.step()
    assert_equal(half, kept, full, reference)


def test_a_closure_in_a_graph_may_leave_a_weight_without_gradient():
    half, kept, full, reference = pair("SGD, momentum")
    new_gradients(half, full, 0)
    half[1].grad = full[1].grad = None
    graph, _ = captured(lambda: kept.step(lambda: None))
    reference.step()
    for step in range(1, 4):
        new_gradients(half[:1], full[:1], step)
        graph.replay(), reference.step()
    assert_equal(half[:1], kept, full[:1], reference)
    assert torch.equal(half[1], full[1].bfloat16())
    assert half[1] not in kept.state


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "SGD, momentum"])
def test_steps_do_not_synchronise(name):
    half, kept, full, reference = pair(name)
    for step in range(3):
        new_gradients(half, full, step)
        reference.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            kept.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert_equal(half, kept, full, reference)
