"""torch.compile without what it measures, writes down and cleans up beside its work: a quarter of its time in tests."""

import functools
import logging
import sys
import traceback

import torch


def quick() -> None:
    """Leave out of torch.compile what no test reads, where it is imported; torch versions differ in what there is."""
    # pytest listens to every logger that does not propagate: for this one torch writes down all that it compiles.
    logging.getLogger("torch.__trace").propagate = True
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    dynamo.config.run_gc_after_compile = False
    replace("guards", "profile_guard_manager", lambda stock: lambda root, values, runs: 0.0)  # it flushes caches first
    replace("exc", "_extract_stack_with_positions", lambda stock: traceback.StackSummary)  # of pytest's frames
    # It keeps 128 functions; a model has more.
    replace("bytecode_transformation", "_cached_cleaned_instructions", lambda stock: functools.cache(stock.__wrapped__))


def replace(module, name, by):
    module = sys.modules[f"torch._dynamo.{module}"]
    if hasattr(module, name):
        setattr(module, name, by(getattr(module, name)))


def run_as_they_are(monkeypatch):
    """Graphs of modules that are compiled, in place of an inner compiler's, whose backward takes seconds."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compiled(module, **{**options, "backend": "eager"})
    )
