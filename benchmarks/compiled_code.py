"""Whether what a benchmark calls compiled ran compiled: torch.compile falls back to eager code without a word."""

from collections.abc import Callable

from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile


def num_graphs() -> int:
    """Graphs that torch.compile has made in this process, recompilations among them."""
    return counters["stats"]["unique_graphs"]


def num_entries(call: Callable) -> int:
    """How often ``call`` entered compiled code, which the profiler names as a region of its own."""
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        call()
    return sum(event.name.startswith("Torch-Compiled Region") for event in trace.events())
