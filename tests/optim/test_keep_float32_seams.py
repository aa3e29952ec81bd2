"""keep_float32 beside what else a loop hangs on an optimizer: hooks, another step, failed loads, marks of weights."""

import copy
import warnings

import pytest
import torch
from torch.utils import _pytree as pytree

from packing_ops.optim import keep_float32

VALUES = torch.linspace(-1, 1, 6)


def weight_of(device, dtype=torch.bfloat16):
    return VALUES.to(device, torch.bfloat16).to(dtype).requires_grad_()


def steps(optimizer, weight, count=3):
    for _ in range(count):
        weight.grad = torch.ones_like(weight)
        optimizer.step()


def stepped(device, make, count=3):
    """The weight that count steps on float32 leave."""
    weight = weight_of(device, torch.float32)
    steps(make([weight]), weight, count)
    return weight.bfloat16()


def sgd(weights):
    return torch.optim.SGD(weights, lr=1e-3, momentum=0.9)


@pytest.mark.parametrize("early", [True, False])
def test_a_post_hook_may_save_the_states_and_clear_gradients(early, device):
    weight, saved = weight_of(device), []
    optimizer = sgd([weight])

    def hook(*_):
        assert optimizer.param_groups[0]["params"][0] is weight
        saved.append(copy.deepcopy(optimizer.state_dict()))
        optimizer.zero_grad()

    if early:
        optimizer.register_step_post_hook(hook)
    keep_float32(optimizer)
    if not early:
        optimizer.register_step_post_hook(hook)
    steps(optimizer, weight)
    assert weight.grad is None
    assert torch.equal(weight, stepped(device, sgd))
    assert torch.equal(saved[-1]["state"][0]["float32_copy"], optimizer.state[weight]["float32_copy"])


@pytest.mark.parametrize("call", ["state_dict", "load_state_dict"])
def test_states_in_a_later_pre_hook_are_an_error(call, device):
    weight = weight_of(device)
    optimizer = keep_float32(sgd([weight]))
    states = optimizer.state_dict()
    arguments = (states,) if call == "load_state_dict" else ()
    hook = optimizer.register_step_pre_hook(lambda *_: getattr(optimizer, call)(*arguments) and None)
    with pytest.raises(RuntimeError, match="inside a step: register the pre-hook before keep_float32"):
        steps(optimizer, weight, 1)
    hook.remove()
    steps(optimizer, weight)
    assert torch.equal(weight, stepped(device, sgd))


def test_states_in_a_later_hook_of_a_load_are_an_error(device):
    """They would take away what keeps the loaded copies in float32."""
    weight = weight_of(device)
    optimizer = keep_float32(sgd([weight]))
    steps(optimizer, weight)
    states = copy.deepcopy(optimizer.state_dict())
    hook = optimizer.register_load_state_dict_pre_hook(lambda optimizer, _: optimizer.state_dict() and None)
    with pytest.raises(RuntimeError, match="inside a load: register the pre-hook before keep_float32"):
        optimizer.load_state_dict(states)
    hook.remove()
    optimizer.load_state_dict(states)
    assert optimizer.state[weight]["float32_copy"].dtype == torch.float32


def test_a_load_that_raised_leaves_the_weights_in_the_groups(device):
    weight = weight_of(device)
    optimizer = keep_float32(sgd([weight]))
    steps(optimizer, weight)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    optimizer.zero_grad()
    assert optimizer.param_groups[0]["params"][0] is weight
    assert weight.grad is None


def test_a_scheduler_of_before_sees_the_steps(device):
    weight = weight_of(device)
    optimizer = sgd([weight])
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    keep_float32(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        steps(optimizer, weight)
        scheduler.step()


def test_a_step_of_the_instance_stays(device):
    weight, calls = weight_of(device), []
    optimizer = sgd([weight])
    stock = optimizer.step

    def step(closure=None):
        calls.append(closure)
        return stock(closure)

    optimizer.step = step
    steps(keep_float32(optimizer), weight)
    assert calls == [None] * 3
    assert torch.equal(weight, stepped(device, sgd))


class Marked(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            if weight.requires_grad and weight.grad is not None:
                weight.sub_(weight.grad * getattr(weight, "rate", 1e-3))


@pytest.mark.parametrize("rate", [None, 1e-4])
def test_an_optimizer_that_reads_marks_of_weights(rate, device):
    weight, wanted = weight_of(device), weight_of(device, torch.float32)
    if rate:
        weight.rate = wanted.rate = rate
    optimizer, reference = keep_float32(Marked([weight], lr=1.0)), Marked([wanted], lr=1.0)
    steps(optimizer, weight), steps(reference, wanted)
    found = optimizer.state[weight]["float32_copy"]
    assert torch.equal(found, wanted)
    assert not found.requires_grad


class Wrapped(torch.Tensor):
    """Its values are a tensor in its __dict__, as those of torchao's float8 weights are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        given = pytree.tree_map(lambda value: value.inner if isinstance(value, cls) else value, (args, kwargs or {}))
        result = function(*given[0], **given[1])
        if function._schema.is_mutable:
            return args[0]
        return pytree.tree_map(lambda value: cls(value) if isinstance(value, torch.Tensor) else value, result)


@pytest.mark.parametrize("make", [sgd, lambda weights: torch.optim.AdamW(weights, lr=1e-4, foreach=False)])
def test_a_weight_that_wraps_its_values(make, device):
    weight = torch.nn.Parameter(Wrapped(weight_of(device).detach()))
    optimizer = keep_float32(make([weight]))
    steps(optimizer, weight)
    found = optimizer.state[weight]["float32_copy"]
    assert found.inner.dtype == torch.float32
    assert torch.equal(weight.inner, stepped(device, make))
    assert torch.equal(weight.inner, found.inner.bfloat16())
    assert not torch.equal(weight.inner.float(), found.inner)


class Listed(torch.optim.SGD):
    def __init__(self, weights, lr):
        super().__init__(weights, lr=lr)
        self.weights = [*self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for weight in self.weights:
            weight.sub_(weight.grad)


def test_an_optimizer_that_steps_no_groups_is_an_error(device):
    weight = weight_of(device)
    with pytest.raises(RuntimeError, match="Listed, or a hook of it, wrote into weights"):
        steps(keep_float32(Listed([weight], lr=1.0)), weight)


def test_a_resumed_optimizer_of_weights_that_are_gone_is_an_error(device):
    weight = weight_of(device)
    optimizer = keep_float32(sgd([weight]))
    steps(optimizer, weight)
    resumed = keep_float32(sgd([weight_of(device)]))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with pytest.raises(RuntimeError, match="no weight of the optimizer has a gradient"):
        resumed.step()


def test_lbfgs_moves_a_weight_that_was_frozen(device):
    """By earlier gradients, as it moves one of float32."""

    def run(dtype):
        weights = [weight_of(device, dtype), weight_of(device, dtype)]
        optimizer = torch.optim.LBFGS(weights, lr=0.1, max_iter=3)
        if dtype != torch.float32:
            keep_float32(optimizer)

        def closure():
            optimizer.zero_grad()
            for index, weight in enumerate(weights):
                if weight.requires_grad:
                    weight.grad = (weight.detach().bfloat16() + index).to(dtype)
            return 0.0

        for frozen in (False, False, True, False):
            weights[1].requires_grad_(not frozen)
            optimizer.step(closure)
        return [weight.bfloat16() for weight in weights]

    for half, wanted in zip(run(torch.bfloat16), run(torch.float32), strict=True):
        assert torch.equal(half, wanted)
