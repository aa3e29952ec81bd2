"""torch.compile without what it measures, writes down and cleans up beside its work: a quarter of its time in tests."""

import functools
import logging
import operator
import sys
import traceback

import torch
import torch.utils._config_module as config_module


def quick() -> None:
    """Leave out of torch.compile what no test reads, where it is imported; torch versions differ in what there is."""
    # pytest listens to every logger that does not propagate, twice in each phase of a test: torch has a hundred of them
    # below its first. For torch.__trace it writes down all that it compiles.
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]:
        logging.getLogger(name).propagate = True
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    dynamo.config.run_gc_after_compile = False
    # It flushes caches first.
    replace("_dynamo.guards.profile_guard_manager", lambda stock: lambda root, values, runs: 0.0)
    replace("_dynamo.exc._extract_stack_with_positions", lambda stock: traceback.StackSummary)  # of pytest's frames
    # It keeps 128 functions; a model has more.
    replace(
        "_dynamo.bytecode_transformation._cached_cleaned_instructions",
        lambda stock: functools.cache(stock.__wrapped__),
    )
    # For logs that are off: the function around each line, for which whole files are read, and the graphs as code.
    replace("_dynamo.symbolic_convert.get_funcname", lambda stock: lambda file, line: None)
    replace("_functorch._aot_autograd.graph_compile._log_joint_graph", lambda stock: lambda *given: None)
    replace("_functorch._aot_autograd.graph_compile._log_fw_bw_graphs", lambda stock: lambda *given: (None, None))
    # Thousands of reads of settings: each looks for a deprecation and for another name.
    settings = "utils._config_module.ConfigModule"
    replace(f"{settings}._warn_if_deprecated", lambda stock: lambda *given: None)
    replace(
        f"{settings}._get_alias_val",
        lambda stock: lambda config, entry: stock(config, entry) if entry.alias else config_module._UNSET_SENTINEL,
    )


def replace(path, by):
    try:
        owner, name = operator.attrgetter(path.rpartition(".")[0])(torch), path.rpartition(".")[2]
        setattr(owner, name, by(getattr(owner, name)))
    except AttributeError:  # not imported, or another version
        return


def run_as_they_are(monkeypatch):
    """Graphs of modules that are compiled, in place of an inner compiler's, whose backward takes seconds."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compiled(module, **{**options, "backend": "eager"})
    )
