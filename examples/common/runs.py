"""A training run: which documents share a step, and what is measured."""

import resource
from dataclasses import dataclass, field

import torch

import packing_ops as po


@dataclass
class Run:
    """What one training run measured."""

    mode: str
    steps: int = 0
    real_tokens: int = 0
    slots: int = 0
    seconds: float = 0.0
    peak_mib: float = 0.0
    losses: list[float] = field(default_factory=list)
    tokens_seen: list[int] = field(default_factory=list)
    seconds_seen: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.real_tokens / self.seconds

    @property
    def padding_waste(self) -> float:
        return 1 - self.real_tokens / self.slots


def groups_of(mode: str, lengths: list[int], arguments) -> list[list[int]]:
    """Which documents share a step, in a shuffled order that is the same on every machine."""
    generator = torch.Generator().manual_seed(arguments.seed)
    if mode == "padded":
        order = torch.randperm(len(lengths), generator=generator).tolist()
        return [order[i : i + arguments.batch_size] for i in range(0, len(order), arguments.batch_size)]
    bins = po.pack_sequences(lengths, arguments.capacity, strategy="ffd").bins
    return [bins[i] for i in torch.randperm(len(bins), generator=generator).tolist()]


def peak_mib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
