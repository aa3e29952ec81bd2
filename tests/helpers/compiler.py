"""torch.compile without what it measures, writes down and cleans up beside its work: a quarter of its time in tests."""

import functools
import logging
import sys
import traceback

import torch


def quick() -> None:
    """Leave out of torch.compile what no test reads, where it is imported; torch versions differ in what there is."""
    listen_at_root()
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    dynamo.config.run_gc_after_compile = False
    read_at_once(dynamo.config, "verbose", "nested_graph_breaks")  # they are read for each instruction
    inside = "torch._dynamo."
    replace(inside + "guards", "profile_guard_manager", lambda stock: lambda root, values, runs: 0.0)  # flushes caches
    replace(inside + "exc", "_extract_stack_with_positions", lambda stock: traceback.StackSummary)  # of pytest's frames
    # It keeps 128 functions; a model has more.
    cleaned = "_cached_cleaned_instructions"
    replace(inside + "bytecode_transformation", cleaned, lambda stock: functools.cache(stock.__wrapped__))
    replace(inside + "trace_rules", "_as_posix_path", functools.cache)
    replace(inside + "symbolic_convert", "get_funcname", lambda stock: lambda file, line: None)  # it reads whole files
    # The lines of user code that a node, a guard and what is written to an object come from: for messages.
    of_nodes = "InstructionTranslatorBase.is_co_filename_from_nn_modules"
    replace(inside + "symbolic_convert", of_nodes, lambda stock: lambda self: True)
    replace(inside + "side_effects", "SideEffects._capture_user_stack", lambda stock: lambda self, key: None)
    replace("torch._guards", "GuardsSet.add", guard_of_no_line)
    # Graphs as text, which are made even where they are not logged.
    aot = "torch._functorch._aot_autograd.graph_compile"
    for name, text in (("_log_inference_graph", None), ("_log_joint_graph", None), ("_log_fw_bw_graphs", (None, None))):
        replace(aot, name, lambda stock, text=text: lambda *given: text)


def guard_of_no_line(stock):
    def add(self, guard, **options):
        guard.user_stack = guard.user_stack or traceback.StackSummary()
        return stock(self, guard, **options)

    return add


def listen_at_root() -> None:
    """pytest listens to every logger that does not propagate, anew for each test, and torch has a hundred. For one of
    them torch writes down all that it compiles once somebody listens.
    """
    for name, logger in logging.Logger.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


def read_at_once(config, *names):
    """Settings that no test changes, beside the function that looks where each is set."""
    vars(config).update({name: getattr(config, name) for name in names if hasattr(config, name)})


def replace(module, name, by):
    owner = sys.modules.get(module)
    *classes, name = name.split(".")
    for each in classes:
        owner = getattr(owner, each, None)
    if hasattr(owner, name):
        setattr(owner, name, by(getattr(owner, name)))


def run_as_they_are(monkeypatch):
    """Graphs of modules that are compiled, in place of an inner compiler's, whose backward takes seconds."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compiled(module, **{**options, "backend": "eager"})
    )
