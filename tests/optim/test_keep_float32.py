"""keep_float32: an optimizer of half weights steps as the same one on float32 weights with the same gradients."""

import itertools
import weakref
from unittest import mock

import pytest
import torch

from packing_ops.optim import keep_float32

OPTIMIZERS = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=1e-3),
    "AdamW fused": lambda weights: torch.optim.AdamW(weights, lr=1e-3, fused=True),
    "AdamW foreach": lambda weights: torch.optim.AdamW(weights, lr=1e-3, foreach=True, amsgrad=True),
    "AdamW, a tensor as lr": lambda weights: torch.optim.AdamW(weights, lr=torch.tensor(1e-3)),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=1e-3),
    "SGD fused": lambda weights: torch.optim.SGD(weights, lr=1e-3, fused=True),
    "SGD, momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adafactor": lambda weights: torch.optim.Adafactor(weights, lr=1e-3),
    "Muon": lambda weights: torch.optim.Muon(weights, lr=1e-3),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=1e-3, centered=True),
    "NAdam": lambda weights: torch.optim.NAdam(weights, lr=1e-3),
    "Rprop": lambda weights: torch.optim.Rprop(weights, lr=1e-3),
}


def pair(device, make=OPTIMIZERS["AdamW"], dtype=torch.bfloat16, groups=None):
    """Half weights with their optimizer of copies, and float32 weights of the same values with theirs."""
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator).to(device, dtype) for shape in ((4, 6), (6, 4))]
    half = [weight.clone().requires_grad_() for weight in start]
    full = [weight.float().requires_grad_() for weight in start]
    groups = groups or (lambda weights: weights)
    return half, keep_float32(make(groups(half))), full, make(groups(full))


def gradients(half, full, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for of_half, of_full in zip(half, full, strict=True):
        of_half.grad = (torch.randn(of_half.shape, generator=generator) * scale).to(of_half.device, of_half.dtype)
        of_full.grad = of_half.grad.float()


def copies_of(optimizer, weights):
    return [optimizer.state[weight]["float32_copy"] for weight in weights]


def assert_equal(half, optimizer, full, reference):
    for weight, copy, wanted in zip(half, copies_of(optimizer, half), full, strict=True):
        assert torch.equal(copy, wanted)
        assert torch.equal(weight, wanted.to(weight.dtype))
        states = {name: value for name, value in optimizer.state[weight].items() if name != "float32_copy"}
        assert {*states} == {*reference.state[wanted]}
        for name, value in states.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(reference.state[wanted][name])), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_on_float32_weights(name, dtype, device):
    half, kept, full, reference = pair(device, OPTIMIZERS[name], dtype)
    for step in range(20):
        gradients(half, full, step)
        kept.step()
        reference.step()
        assert [weight for group in kept.param_groups for weight in group["params"]] == half
    assert_equal(half, kept, full, reference)
    assert any(not torch.equal(copy, copy.to(dtype).float()) for copy in copies_of(kept, half))


def test_small_steps_are_not_rounded_away(device):
    start, stepped = torch.tensor([0.0006, 0.02, 1.0], dtype=torch.bfloat16, device=device), []
    for keep in (lambda optimizer: optimizer, keep_float32):
        weight = start.clone().requires_grad_()
        optimizer = keep(torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0))
        for _ in range(200):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        stepped.append((weight.detach() != start).tolist())
    assert stepped == [[False, False, False], [True, True, False]]


def test_groups_keep_their_options_and_schedulers_work(device):
    groups = lambda weights: [  # noqa: E731
        {"params": weights[:1], "lr": 1e-2, "weight_decay": 0.5}, {"params": weights[1:], "betas": (0.5, 0.7)}
    ]  # fmt: skip
    half, kept, full, reference = pair(device, groups=groups)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (kept, reference)]
    for step in range(8):
        gradients(half, full, step)
        for optimizer, scheduler in zip((kept, reference), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert_equal(half, kept, full, reference)
    assert kept.param_groups[0]["lr"] == reference.param_groups[0]["lr"] == 1e-2 / 16


def test_a_scheduler_may_come_before(device):
    weight = torch.ones(3, dtype=torch.bfloat16, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    keep_float32(optimizer)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    scheduler.step()
    assert copies_of(optimizer, [weight])[0].dtype == torch.float32


def test_float32_weights_and_weights_without_gradient_stay(device):
    half, single, unused, frozen = (
        torch.ones(3, dtype=dtype, device=device) for dtype in (torch.bfloat16, torch.float32, *[torch.bfloat16] * 2)
    )
    half.requires_grad_(), single.requires_grad_(), unused.requires_grad_()
    optimizer = keep_float32(torch.optim.AdamW([half, single, unused, frozen], lr=1e-3))
    half.grad, single.grad = torch.ones_like(half), torch.ones_like(single)
    optimizer.step()
    assert "float32_copy" not in optimizer.state[single]
    assert {*optimizer.state} == {half, single}
    assert torch.equal(copies_of(optimizer, [half])[0], single)
    unused.grad = torch.ones_like(unused)  # now it has one, and is like the first after its first step
    half.grad = None
    before = copies_of(optimizer, [half])[0].clone()
    optimizer.step()
    assert torch.equal(copies_of(optimizer, [unused])[0], before)
    assert torch.equal(copies_of(optimizer, [half])[0], before)


def test_weights_that_are_added_later_have_copies(device):
    _, kept, _, _ = pair(device)
    added = torch.ones(2, dtype=torch.bfloat16, device=device, requires_grad=True)
    kept.add_param_group({"params": [added]})
    added.grad = torch.ones_like(added)
    kept.step()
    assert copies_of(kept, [added])[0].dtype == torch.float32


def test_gradients_stay_until_zero_grad_and_are_clipped_as_before(device):
    half, kept, full, reference = pair(device)
    gradients(half, full, 0, 10.0)
    torch.nn.utils.clip_grad_norm_(half, 1.0)
    for of_half, of_full in zip(half, full, strict=True):
        of_full.grad = of_half.grad.float()
    clipped = [weight.grad.clone() for weight in half]
    kept.step()
    reference.step()
    assert_equal(half, kept, full, reference)
    assert all(map(torch.equal, clipped, [weight.grad for weight in half]))
    assert all(copy.grad is None for copy in copies_of(kept, half))
    kept.zero_grad(set_to_none=False)
    assert all(weight.grad.count_nonzero() == 0 for weight in half)
    kept.zero_grad()
    assert all(weight.grad is None for weight in half)


def test_gradients_accumulate_in_the_weights(device):
    half, kept, full, reference = pair(device)
    for _ in range(3):
        for part in range(2):
            ((half[0] @ half[1]).float().sum() * (part + 1)).backward()
        for of_half, of_full in zip(half, full, strict=True):
            of_full.grad = of_half.grad.float()
        kept.step(), reference.step()
        kept.zero_grad(), reference.zero_grad()
    assert_equal(half, kept, full, reference)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "LBFGS", "LBFGS, line search"])
@pytest.mark.parametrize("keyword", [False, True])
def test_closures(name, keyword, device):
    """The closure sees the rounded weights, and may call zero_grad."""
    lbfgs = {"LBFGS": None, "LBFGS, line search": "strong_wolfe"}
    make = OPTIMIZERS.get(name) or (lambda weights: torch.optim.LBFGS(weights, lr=0.1, line_search_fn=lbfgs[name]))
    half, kept, full, reference = pair(device, make)

    def closure_of(optimizer, weights):
        def closure():
            optimizer.zero_grad()
            if weights is full:  # the same gradients: those at the rounded weights, rounded
                rounded = [weight.detach().bfloat16().requires_grad_() for weight in full]
                loss = (rounded[0] @ rounded[1]).square().mean()
                for weight, grad in zip(full, torch.autograd.grad(loss, rounded), strict=True):
                    weight.grad = grad.float()
                return loss.float()
            loss = (weights[0] @ weights[1]).square().mean()
            loss.backward()
            return loss.float()

        return {"closure": closure} if keyword else closure

    losses = []
    for _ in range(4):
        for optimizer, weights in ((kept, half), (reference, full)):
            closure = closure_of(optimizer, weights)
            losses.append((optimizer.step(**closure) if keyword else optimizer.step(closure)).item())
    assert losses[::2] == losses[1::2]
    assert losses[-1] < losses[0]
    states = [optimizer.state[weights[0]] for optimizer, weights in ((kept, half), (reference, full))]
    assert torch.equal(states[0]["float32_copy"], full[0])
    if "LBFGS" in name:
        assert states[0]["func_evals"] == states[1]["func_evals"]


def test_lbfgs_moves_weights_whose_last_gradient_is_none(device):
    half, kept, full, reference = pair(device, lambda weights: torch.optim.LBFGS(weights, 0.1, max_iter=2, max_eval=9))

    def closure_of(weights, calls):
        def closure():
            rounded = [weight.detach().bfloat16().to(weight.dtype) for weight in weights]
            weights[0].grad, weights[1].grad = rounded[0], rounded[1] if next(calls) % 2 == 0 else None
            return sum(each.float().square().sum() for each in rounded)

        return closure

    closures = closure_of(half, itertools.count()), closure_of(full, itertools.count())
    for _ in range(3):
        kept.step(closures[0]), reference.step(closures[1])
        assert half[1].grad is None
        assert all(map(torch.equal, copies_of(kept, half), full))
        assert all(torch.equal(weight, wanted.bfloat16()) for weight, wanted in zip(half, full, strict=True))


def test_an_optimizer_that_asks_whether_a_weight_has_a_state(device):
    class Counting(torch.optim.Optimizer):
        def step(self, closure):
            closure()
            for weight in self.param_groups[0]["params"]:
                if weight not in self.state:
                    self.state[weight] = {"steps": 0}
                self.state[weight]["steps"] += 1

    half, kept, full, _ = pair(device, lambda weights: Counting(weights, {}))
    gradients(half, full, 0)
    for _ in range(2):
        kept.step(lambda: None)
    assert [kept.state[weight]["steps"] for weight in half] == [2, 2]


def test_a_closure_in_a_graph_may_leave_a_weight_without_gradient(device, monkeypatch):
    half, kept, _, _ = pair(device, OPTIMIZERS["SGD"])

    def closure():
        half[0].grad = torch.ones_like(half[0])

    kept.step(closure)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    kept.step(closure)
    assert half[1] not in kept.state
    half[1].grad = torch.ones_like(half[1])
    with pytest.raises(RuntimeError, match="the first step of a weight is in a CUDA graph"):
        kept.step(closure)


def test_a_closure_that_raises_leaves_the_weights_in_the_groups(device):
    half, kept, full, reference = pair(device)
    gradients(half, full, 0)
    kept.step(), reference.step()

    def closure():
        raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        kept.step(closure)
    assert [weight for group in kept.param_groups for weight in group["params"]] == half
    gradients(half, full, 1)
    kept.step(), reference.step()
    assert_equal(half, kept, full, reference)


def squares(weights):
    return (weights[0] @ weights[1]).square().mean()


@pytest.mark.parametrize("name", ["AdamW", "LBFGS"])
def test_a_closure_may_save_the_states(name, device):
    make = {"LBFGS": lambda weights: torch.optim.LBFGS(weights, lr=0.1, max_iter=4)} | OPTIMIZERS
    half, kept, others, other = *pair(device, make[name])[:2], *pair(device, make[name])[:2]
    saved = []

    def closure(optimizer, weights):
        optimizer.zero_grad()
        loss = squares(weights)
        loss.backward()
        if weights is half:
            assert [weight for group in kept.param_groups for weight in group["params"]] == half
            saved.append(kept.state_dict()["state"])
        return loss.float()

    for _ in range(3):
        kept.step(lambda: closure(kept, half)), other.step(lambda: closure(other, others))
        assert all(map(torch.equal, copies_of(kept, half), copies_of(other, others)))
    assert all({"float32_copy"} <= {*state} for state in saved[-1].values())
    assert {*saved[-1]} == {0, 1}


def test_gradients_of_copies_are_gone_while_a_closure_runs(device):
    class Twice(torch.optim.SGD):
        def step(self, closure):
            with torch.enable_grad():
                closure()
                seen.extend(weakref.ref(weight.grad) for group in self.param_groups for weight in group["params"])
                assert all(grad() is not None for grad in seen)
                closure()

    half, kept, _, _ = pair(device, lambda weights: Twice(weights, lr=0.1))
    seen, alive = [], []

    def closure():
        alive.append(sum(grad() is not None for grad in seen))
        squares(half).backward()

    kept.step(closure)
    assert len(seen) == 2
    assert alive == [0, 0]


def test_a_loss_of_before_the_step_is_an_error_of_torch(device):
    half, kept, _, _ = pair(device)
    loss = squares(half)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.step(loss.backward)


def test_a_step_that_runs_out_of_memory_loses_no_state(device):
    half, kept, full, reference = pair(device)
    gradients(half, full, 0)
    kept.step(), reference.step()
    with mock.patch("torch.where", side_effect=MemoryError), pytest.raises(MemoryError):
        kept.step()
    assert_equal(half, kept, full, reference)
    kept.step(), reference.step()
    assert_equal(half, kept, full, reference)


def test_a_step_that_raised_is_followed_by_others(device):
    half, kept, full, reference = pair(device)
    gradients(half, full, 0)
    kept.step(), reference.step()
    betas, kept.param_groups[0]["betas"] = kept.param_groups[0]["betas"], None
    with pytest.raises(TypeError):
        kept.step()
    kept.param_groups[0]["betas"] = betas
    assert {*kept.state_dict()["state"]} == {0, 1}
    assert [weight for group in kept.param_groups for weight in group["params"]] == half
    gradients(half, full, 1)
    kept.step(), reference.step()
    assert_equal(half, kept, full, reference)


def test_after_a_step_that_raised_gradients_are_those_of_the_weights(device):
    half, kept, full, reference = pair(device)
    gradients(half, full, 0)
    betas, kept.param_groups[0]["betas"] = kept.param_groups[0]["betas"], None
    with pytest.raises(TypeError):
        kept.step()
    kept.param_groups[0]["betas"] = betas
    kept.zero_grad(), reference.zero_grad()
    assert all(weight.grad is None for weight in half)
    gradients(half, full, 1)
    kept.step(), reference.step()
    assert_equal(half, kept, full, reference)


@pytest.mark.parametrize("early", [True, False])
def test_what_a_hook_writes_into_gradients(early, device):
    """Registered after keep_float32 it comes too late for those of the weights; in the groups it finds the copies'."""
    half, kept, full, reference = pair(device, lambda weights: torch.optim.SGD(weights, lr=0.01))
    seen = []

    def halve(optimizer, args, kwargs):
        seen.extend(optimizer.param_groups[0]["params"])
        for weight in half:
            weight.grad *= 0.5

    if early:
        kept = torch.optim.SGD(half, lr=0.01)
        kept.register_step_pre_hook(halve)
        keep_float32(kept)
    else:
        kept.register_step_pre_hook(halve)
    gradients(half, full, 0)
    for weight in full if early else ():
        weight.grad *= 0.5
    kept.step(), reference.step()
    assert_equal(half, kept, full, reference)
    assert {weight.dtype for weight in seen} == {torch.bfloat16 if early else torch.float32}


def test_an_optimizer_that_clears_gradients_in_its_step(device):
    class Clearing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.zero_grad()

    half, kept, full, reference = pair(device, lambda weights: Clearing(weights, lr=0.01))
    for step in range(3):
        gradients(half, full, step)
        kept.step(), reference.step()
    assert_equal(half, kept, full, reference)


@pytest.mark.parametrize(
    ("name", "dtype"), [("AdamW", torch.bfloat16), ("AdamW fused", torch.bfloat16), ("AdamW fused", torch.float16)]
)
def test_grad_scaler(name, dtype, device):
    if device == "cuda" and dtype == torch.bfloat16:
        pytest.skip("GradScaler unscales no bfloat16 gradients on a GPU")
    half, kept, full, reference = pair(device, OPTIMIZERS[name], dtype)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    for step in range(4):
        gradients(half, full, step)
        scaler.scale(torch.zeros((), device=device))  # as a loss is
        for weight in half:
            weight.grad *= 4
        if step == 2:
            half[0].grad[0, 0] = float("inf")
        scaler.step(kept)
        scaler.update(4.0)
        if step != 2:
            reference.step()
    assert all(map(torch.equal, copies_of(kept, half), full))


def test_a_scale_of_float16_gradients_without_fused_is_an_error_of_torch(device):
    half, kept, full, _ = pair(device, dtype=torch.float16)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    scaler.scale(torch.zeros((), device=device))
    gradients(half, full, 0)
    with pytest.raises(ValueError, match="unscale FP16 gradients"):
        scaler.step(kept)


def test_twice_is_once(device):
    half, kept, full, reference = pair(device)
    assert keep_float32(kept) is kept
    for step in range(3):
        gradients(half, full, step)
        kept.step(), reference.step()
    assert_equal(half, kept, full, reference)


def test_layers_may_be_compiled_and_checkpointed():
    """The compiled graph reads the same weights as before."""
    layer = torch.nn.Linear(8, 8).bfloat16()
    compiled, rows = torch.compile(layer, backend="aot_eager"), torch.randn(4, 8).bfloat16()
    optimizer, seen = keep_float32(torch.optim.SGD(layer.parameters(), lr=0.1)), []
    for _ in range(3):
        loss = torch.utils.checkpoint.checkpoint(compiled, rows, use_reentrant=False).square().mean()
        seen.append(loss.item())
        assert torch.equal(loss, layer(rows).square().mean())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen[2] < seen[0]


@pytest.mark.parametrize("how", ["in place", "data"])
def test_weights_that_were_written_win(how, device):
    """Also by .data, which moves no version counter."""
    half, kept, full, reference = pair(device)
    gradients(half, full, 0)
    kept.step(), reference.step()
    with torch.no_grad():
        for weights in (half, full):
            (weights[0] if how == "in place" else weights[0].data)[0] = 3.0
    gradients(half, full, 1)
    kept.step(), reference.step()
    assert_equal(half, kept, full, reference)


def test_errors_say_what_to_do(device):
    weight = torch.ones(3, dtype=torch.bfloat16, device=device, requires_grad=True)
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, got Linear"):
        keep_float32(torch.nn.Linear(1, 1))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(ValueError, match="expected one without state"):
        keep_float32(optimizer)
    with pytest.raises(ValueError, match="expected one without state"):
        keep_float32(torch.optim.Adagrad([weight]))
    twice = torch.optim.SGD([torch.ones(1, device=device)])
    twice.param_groups[0]["params"] = [weight]
    twice.param_groups.append(dict(twice.param_groups[0], params=[weight]))
    with pytest.raises(ValueError, match="twice"):
        keep_float32(twice)
    around = torch.optim.SGD([weight])
    around.inner = torch.optim.SGD([weight])
    with pytest.raises(TypeError, match=r"call keep_float32\(optimizer\.inner\)"):
        keep_float32(around)
    of_a_library = type("Adam8bit", (torch.optim.SGD,), {"load_state_dict": lambda *_: None})
    with pytest.raises(TypeError, match=r"expected torch's load_state_dict, .* got Adam8bit's"):
        keep_float32(of_a_library([weight]))
    kept = keep_float32(torch.optim.SGD([weight]))
    kept.step(), kept.zero_grad(), kept.step()  # the second one has no gradients
    lbfgs = torch.optim.LBFGS  # counts in its state before it calls the closure
    for make, step in ((torch.optim.SGD, {}), *((each, {"closure": lambda: 0.0}) for each in (torch.optim.SGD, lbfgs))):
        with pytest.raises(RuntimeError, match="no weight of the optimizer has a gradient"):
            keep_float32(make([weight])).step(**step)
