"""torch.compile as a benchmark wants it: for the shapes of one case, and known to have run.

It takes sizes for variables once a function has seen two shapes, head_dim among them, and its kernels are several times
slower from then on; after eight it runs eager code, without a word.
"""

import types
from collections.abc import Callable

import torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile


def compiled_alone(function: Callable) -> Callable:
    """``function`` compiled for the shapes that it gets, whatever other cases compiled it for: a copy has its own
    code.
    """
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, function.__defaults__
    )
    return torch.compile(copy, dynamic=False)


def num_graphs() -> int:
    """Graphs that torch.compile has made in this process, recompilations among them."""
    return counters["stats"]["unique_graphs"]


def num_entries(call: Callable) -> int:
    """How often ``call`` entered compiled code, which the profiler names as a region of its own."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        call()
    return sum(event.name.startswith("Torch-Compiled Region") for event in trace.events())
