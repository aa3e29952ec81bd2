"""keep_float32 over random sequences of what a run does: skipped steps, schedulers, writes, closures, resumed runs."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packing_ops.optim import keep_float32

# Of float16 gradients GradScaler unscales those of a fused optimizer alone.
OPTIMIZERS = {
    "AdamW": lambda weights: torch.optim.AdamW(weights, lr=1e-2, fused=True),
    "SGD": lambda weights: torch.optim.SGD(weights, lr=1e-2, weight_decay=0.1, fused=True),
}
SCHEDULERS = {
    "none": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
    "halves": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=20, cycle_momentum=False
    ),
}
EVENTS = ["step", "inf", "one weight", "two parts", "written", "closure", "resumed"]


class Run:
    """Half weights and float32 weights, each with an optimizer, a scheduler and a GradScaler.

    Both have one, because a fused optimizer on a GPU rounds otherwise where it unscales.
    """

    def __init__(self, device, optimizer, scheduler):
        generator = torch.Generator().manual_seed(0)
        self.half = [torch.randn(n, generator=generator).to(device, torch.float16).requires_grad_() for n in (3, 8)]
        self.full = [weight.detach().float().requires_grad_() for weight in self.half]
        self.made = OPTIMIZERS[optimizer], SCHEDULERS[scheduler]
        self.kept, self.scheduler = self.optimizer_of(self.half, keep_float32)
        self.reference, self.its = self.optimizer_of(self.full, lambda made: made)
        self.scaler, self.its_scaler = (
            torch.amp.GradScaler(device, init_scale=256.0, growth_interval=2) for _ in range(2)
        )

    def optimizer_of(self, weights, keep):
        optimizer = keep(self.made[0](weights))
        return optimizer, self.made[1](optimizer)

    def gradients(self, seed, scale, of):
        generator = torch.Generator().manual_seed(seed)
        for half, full in zip(self.half[of], self.full[of], strict=True):
            drawn = torch.randn(half.shape, generator=generator).to(half) * scale
            half.grad = drawn if half.grad is None else half.grad + drawn
            full.grad = half.grad.float()

    def resumed(self):
        saved = copy.deepcopy((self.kept.state_dict(), self.scheduler.state_dict(), self.scaler.state_dict()))
        self.half = [weight.detach().clone().requires_grad_() for weight in self.half]
        self.kept, self.scheduler = self.optimizer_of(self.half, keep_float32)
        for part, state in zip((self.kept, self.scheduler, self.scaler), saved, strict=True):
            part.load_state_dict(state)

    def step(self, seed, event):
        if event == "resumed":
            self.resumed()
        if event == "written":
            with torch.no_grad():
                self.half[0][0] = self.full[0][0] = 10.0 + seed
        self.kept.zero_grad(), self.reference.zero_grad()
        if event == "closure":  # which GradScaler refuses
            self.kept.step(lambda: self.gradients(seed, 1.0, slice(2)))
            self.reference.step()
        else:
            of = slice(1) if event == "one weight" else slice(2)
            for scaler in (self.scaler, self.its_scaler):
                scaler.scale(torch.zeros((), device=self.half[0].device))  # as a loss is
            for part in range(2 if event == "two parts" else 1):
                self.gradients(2 * seed + part, self.scaler.get_scale(), of)
            if event == "inf":
                self.half[0].grad[1] = self.full[0].grad[1] = torch.inf
            for scaler, optimizer in ((self.scaler, self.kept), (self.its_scaler, self.reference)):
                scaler.step(optimizer)
                scaler.update()
        self.scheduler.step(), self.its.step()

    def check(self):
        assert self.kept.param_groups[0]["lr"] == self.reference.param_groups[0]["lr"]
        for weight, wanted in zip(self.half, self.full, strict=True):
            assert torch.equal(weight, wanted.half())
            assert torch.equal(self.kept.state.get(weight, {}).get("float32_copy", weight).float(), wanted)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@given(events=st.lists(st.sampled_from(EVENTS), min_size=1, max_size=8), scheduler=st.sampled_from([*SCHEDULERS]))
def test_steps_are_those_on_float32_weights(optimizer, device, events, scheduler):
    run = Run(device, optimizer, scheduler)
    for seed, event in enumerate(events):
        run.step(seed, event)
        run.check()


def test_a_run_with_every_event(device):
    run = Run(device, "AdamW", "cycle")
    for seed, event in enumerate(["inf", *EVENTS, "inf", "resumed", *EVENTS]):
        run.step(seed, event)
        run.check()
    assert run.scaler.get_scale() != 256.0
    assert any((run.kept.state[weight]["float32_copy"] != weight).any() for weight in run.half)
