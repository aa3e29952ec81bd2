"""A resumed run has the bits of one that went on: torch.save, torch.distributed.checkpoint, transformers' Trainer."""

import copy
import io

import pytest
import torch
from torch.distributed.checkpoint import state_dict as dcp

from packing_ops.optim import keep_float32


def run(device, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(device, torch.bfloat16)
    model[1].bias.requires_grad_(False)
    return model, keep_float32(torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1))


def rows_of(generator, model):
    return torch.randn(16, 8, generator=generator).to(model[0].weight)


def train(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        model(rows_of(generator, model)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values_by_name(model, optimizer):
    states = optimizer.state_dict()["state"].values()
    return [*model.state_dict().items(), *(item for state in states for item in state.items() if item[1] is not None)]


def values(model, optimizer):
    return [value for _, value in values_by_name(model, optimizer)]


def assert_same(one, other):
    assert len(values(*one)) == len(values(*other)) > 12
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(values(*one), values(*other), strict=True))


@pytest.mark.parametrize("first", ["model", "optimizer"])
@pytest.mark.parametrize("stepped", [0, 2])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(tmp_path, first, stepped, device):
    went_on = run(device)
    train(*went_on, range(3))
    torch.save({"model": went_on[0].state_dict(), "optimizer": went_on[1].state_dict()}, tmp_path / "saved.pt")
    train(*went_on, range(3, 6))
    saved = torch.load(tmp_path / "saved.pt", weights_only=True, map_location="cpu")
    states = saved["optimizer"]["state"]
    assert {*states} == {0, 1, 2}  # the frozen bias has none
    assert {value.dtype for state in states.values() for value in state.values()} == {torch.float32}
    resumed = run(device, 1)
    train(*resumed, range(10, 10 + stepped))  # loads over what is there
    for part in (0, 1) if first == "model" else (1, 0):
        resumed[part].load_state_dict(saved["optimizer" if part else "model"])
    train(*resumed, range(3, 6))
    assert_same(went_on, resumed)


def test_a_state_dict_without_copies_begins_at_the_weights(device):
    model, optimizer = run(device)
    train(model, optimizer, range(3))
    without = copy.deepcopy(optimizer.state_dict())
    for state in without["state"].values():
        del state["float32_copy"]
    other, resumed = run(device, 1)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(without))  # load_state_dict shares tensors
    train(other, resumed, range(3, 4))
    full = copy.deepcopy(model).float()
    reference = torch.optim.AdamW(full.parameters(), lr=1e-3, weight_decay=0.1)
    reference.load_state_dict(without)
    model.zero_grad()
    model(rows_of(torch.Generator().manual_seed(3), model)).float().square().mean().backward()
    for weight, of_full in zip(model.parameters(), full.parameters(), strict=True):
        of_full.grad = None if weight.grad is None else weight.grad.float()
    reference.step()
    for weight, of_full in zip(other.parameters(), full.parameters(), strict=True):
        assert torch.equal(weight, of_full.bfloat16())
        if of_full.grad is not None:
            assert torch.equal(resumed.state[weight]["float32_copy"], of_full)


def test_a_state_dict_that_is_kept_has_copies_after_later_steps(device):
    """Also of an optimizer without other states: torch shares what it holds."""
    weight = torch.ones(3, dtype=torch.bfloat16, device=device, requires_grad=True)
    optimizer = keep_float32(torch.optim.SGD([weight], lr=1e-3))
    for _ in range(2):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        saved = optimizer.state_dict()
    optimizer.step()
    assert saved["state"][0]["float32_copy"] is optimizer.state[weight]["float32_copy"]


def test_a_state_dict_loads_into_an_optimizer_without_copies(device):
    model, optimizer = run(device)
    train(model, optimizer, range(3))
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain.load_state_dict(optimizer.state_dict())
    train(model, plain, range(3, 5))
    assert {state["exp_avg"].dtype for state in plain.state.values()} == {torch.bfloat16}


def test_a_load_that_raised_changes_nothing(device):
    went_on, other = run(device), run(device)
    train(*went_on, range(3))
    train(*other, range(3))
    wrong = other[1].state_dict()
    wrong["param_groups"] = wrong["param_groups"] * 2
    with pytest.raises(ValueError, match="different number of parameter groups"):
        other[1].load_state_dict(wrong)
    train(*went_on, range(3, 5))
    train(*other, range(3, 5))
    assert_same(went_on, other)


def through_torch_save(made):
    torch.save(made, file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, through_torch_save])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("options", ["AdamW", "momentum", "SGD"])
def test_a_copy_of_model_and_optimizer_goes_on_with_the_same_bits(copied, steps, options, device):
    model, optimizer = run(device)
    if options != "AdamW":
        momentum = 0.9 if options == "momentum" else 0
        optimizer = keep_float32(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=momentum))
    train(model, optimizer, range(steps))
    other, its_optimizer = copied((model, optimizer))
    assert all(a is b for a, b in zip(other.parameters(), its_optimizer.param_groups[0]["params"], strict=True))
    before = copy.deepcopy(values(model, optimizer))
    train(other, its_optimizer, range(3, 6))
    assert all(map(torch.equal, before, values(model, optimizer)))
    train(model, optimizer, range(3, 6))
    copies = [value for key, value in values_by_name(model, optimizer) if key == "float32_copy"]
    assert len(copies) == 3
    assert any(not torch.equal(each, each.bfloat16().float()) for each in copies)
    for (key, a), (_, b) in zip(values_by_name(model, optimizer), values_by_name(other, its_optimizer), strict=True):
        assert torch.equal(a, b), key
        assert a.dtype == b.dtype, key


def test_a_copy_of_the_optimizer_alone_has_other_weights(device):
    model, optimizer = run(device)
    train(model, optimizer, range(2))
    with pytest.raises(RuntimeError, match="make the optimizer of the weights that the model has"):
        train(model, copy.deepcopy(optimizer), range(2, 3))


@pytest.mark.parametrize("flat", [False, True])
def test_states_by_names_of_torch_distributed_checkpoint(tmp_path, flat, device):
    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat, full_state_dict=not flat)
    went_on = run(device)
    train(*went_on, range(3))
    states = {
        "model": dcp.get_model_state_dict(went_on[0]),
        "optimizer": dcp.get_optimizer_state_dict(*went_on, options=options),
    }
    torch.distributed.checkpoint.save(states, checkpoint_id=tmp_path)
    train(*went_on, range(3, 6))
    resumed = run(device, 1)
    model = dcp.get_model_state_dict(resumed[0])
    states = {"model": model, "optimizer": dcp.get_optimizer_state_dict(*resumed, options=options)}
    torch.distributed.checkpoint.load(states, checkpoint_id=tmp_path)
    dcp.set_model_state_dict(resumed[0], states["model"])
    dcp.set_optimizer_state_dict(*resumed, states["optimizer"], options=options)
    train(*resumed, range(3, 6))
    assert_same(went_on, resumed)
