"""keep_float32 in two processes: DDP and FSDP2 in a loop, with checkpoints by torch.distributed.checkpoint."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.optim
from helpers.processes import message_of, spawn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.fsdp import fully_shard

from packing_ops.optim import keep_float32


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3)).bfloat16()


def wrapped(kind, model):
    if kind == "DDP":
        return torch.nn.parallel.DistributedDataParallel(model)
    fully_shard(model[0])
    return fully_shard(model)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def optimizer_of(weights):
    return torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.1)


def train(model, optimizer, steps, reference=None):
    """The reference steps float32 weights with the gradients of the model."""
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        model(torch.randn(16, 8, generator=generator).bfloat16()).float().square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        for weight, full in zip(model.parameters(), reference[0] if reference else [], strict=False):
            full.grad = whole(weight.grad).float()
        if reference:
            reference[1].step()
        optimizer.step()
        optimizer.zero_grad()


def copies(model, optimizer):
    return [whole(optimizer.state[weight]["float32_copy"]) for weight in model.parameters()]


def equal_to_float32(kind, checkpoint):
    """(equal to float32 weights, the weights are rounded copies, a resumed run is equal, the copies)."""
    full = [weight.detach().float().requires_grad_() for weight in model_of().parameters()]
    reference = full, optimizer_of(full)
    model = wrapped(kind, model_of())
    optimizer = keep_float32(optimizer_of(model.parameters()))
    train(model, optimizer, range(3), reference)
    states = {"model": dcp.get_model_state_dict(model), "optimizer": dcp.get_optimizer_state_dict(model, optimizer)}
    torch.distributed.checkpoint.save(states, checkpoint_id=checkpoint)
    train(model, optimizer, range(3, 6), reference)
    found = copies(model, optimizer)
    as_float32 = all(map(torch.equal, found, full))
    rounded = all(torch.equal(whole(w), copy.bfloat16()) for w, copy in zip(model.parameters(), found, strict=True))

    resumed = wrapped(kind, model_of(1))
    its = keep_float32(optimizer_of(resumed.parameters()))
    states = {"model": dcp.get_model_state_dict(resumed), "optimizer": dcp.get_optimizer_state_dict(resumed, its)}
    torch.distributed.checkpoint.load(states, checkpoint_id=checkpoint)
    dcp.set_model_state_dict(resumed, states["model"])
    dcp.set_optimizer_state_dict(resumed, its, states["optimizer"])
    train(resumed, its, range(3, 6))
    return as_float32, rounded, all(map(torch.equal, copies(resumed, its), found)), found


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_steps_are_those_on_float32_weights(kind, tmp_path):
    first, second = spawn(functools.partial(equal_to_float32, kind, tmp_path / "checkpoint"), 2, tmp_path)
    assert first[:3] == second[:3] == (True, True, True)
    assert all(map(torch.equal, first[3], second[3]))
    assert any(not torch.equal(copy, copy.bfloat16().float()) for copy in first[3])


def made_too_early():
    model = model_of()
    optimizer = keep_float32(optimizer_of(model.parameters()))
    fully_shard(model)
    return message_of(lambda: train(model, optimizer, range(1)))


def around_shards():
    """ZeroRedundancyOptimizer steps an optimizer of a rank's weights."""
    model = wrapped("DDP", model_of())
    full = [weight.detach().float().requires_grad_() for weight in model_of().parameters()]
    zero = torch.distributed.optim.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=1e-3, weight_decay=0.1
    )
    message = message_of(lambda: keep_float32(zero))
    keep_float32(zero.optim)
    train(model, zero, range(5), (full, optimizer_of(full)))
    weights = zip(model.parameters(), full, strict=True)
    return message, all(torch.equal(weight, of_full.bfloat16()) for weight, of_full in weights)


def test_what_would_not_train_is_an_error(tmp_path):
    (tmp_path / "other").mkdir()
    for message in spawn(made_too_early, 2, tmp_path):
        assert "make the optimizer of the weights that the model has, after fully_shard" in message
    for message, equal in spawn(around_shards, 2, tmp_path / "other"):
        assert "ZeroRedundancyOptimizer steps another optimizer, optimizer.optim: call keep_float32(" in message
        assert equal
