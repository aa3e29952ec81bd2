"""What the integration uses of transformers, imported once: torch.compile traces no import inside a forward."""

import ast
import functools
import inspect
import re
import sys

import torch

import packing_ops
from packing_ops._runtime.arguments import first_time, warned
from packing_ops.integrations._patching import kept_with_class

OLDEST, NEWEST = "5.17", "5.24"  # oldest and newest that tests have run with, 5.24 by hand


def refusal(version: str | None) -> str:
    """Say that a transformers is not served, with its version and ours."""
    here = f"transformers {version} is here" if version else "there is none"
    ours = f"packing_ops {packing_ops.__version__} serves {OLDEST} and later (tested to {NEWEST})"
    return f"transformers: {ours}, {here}: pip install 'transformers>={OLDEST}'"


def check(version: str) -> None:
    if _numbers(version) < _numbers(OLDEST):
        raise ImportError(refusal(version))


def _numbers(version) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


try:
    import transformers
    import transformers.masking_utils as masking_utils
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    from transformers.utils import logging
except ImportError as error:
    raise ImportError(refusal(getattr(sys.modules.get("transformers"), "__version__", None))) from error
version = transformers.__version__
check(version)

# The keyword of models for their KV cache, renamed in 5.24. Before, "cache" was the paged one of continuous batching
# only.
CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"

# Values of a model's loss_type for which its loss_function takes the label of the next token; None is its default.
SHIFTED = frozenset((None, *(name for name, loss in LOSS_MAPPING.items() if loss is ForCausalLMLoss)))

# What other modules take from here of transformers.
__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "ForCausalLMLoss",
    "PreTrainedModel",
    "masking_utils",
    "sdpa_attention_forward",
]


# --- constants of a graph ---


def constant(function):
    """Cache as kept_with_class, which torch.compile would look through: to it the result is a constant."""
    cached = kept_with_class(function)

    @torch.compiler.assume_constant_result
    def of_graph(*args):
        return cached(*args)

    return of_graph


graphs: list[bool] = []  # not empty where our attention is in a graph, which notes nothing when it runs


@torch.compiler.assume_constant_result
def note_graph() -> None:
    graphs[:] = [True]


# --- of a module ---


def unwrapped(cls: type) -> type:
    """Return a module's class, without the one that FSDP2 puts in front."""
    return next(base for base in cls.__mro__ if not base.__module__.startswith("torch.distributed."))


def class_name(module) -> str:
    return unwrapped(type(module)).__name__


def models_in(model) -> list[PreTrainedModel]:
    """Return the transformers models in it, also those inside of others."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


@constant
def parameters_of(method) -> tuple[str, ...]:
    """Return the names of its parameters, without self."""
    return tuple(inspect.signature(method).parameters)[1:]


@kept_with_class
def reads_text(cls: type) -> bool:
    return not {"input_ids", "inputs_embeds"}.isdisjoint(inspect.signature(cls.forward).parameters)


def cached_length(cache):
    """Return how many tokens a KV cache holds, by a layer of attention: the first one of MiniMax's counts none."""
    length = cache.get_seq_length()
    if isinstance(length, torch.Tensor) or length > 0:
        return length
    others = (each.get_seq_length() for each in getattr(cache, "layers", ()) if hasattr(each, "get_seq_length"))
    return next((each for each in others if isinstance(each, int) and each > 0), length)


ARGUMENTS = r"((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)"  # of a call in such code, also with calls of calls in them


@kept_with_class  # several patterns are looked for in the same code
def source_of(code) -> str:
    """Return the source of a function, a class or a module, empty if there is none."""
    if isinstance(code, type) and (found := _classes_in(code.__module__).get(code.__qualname__)):
        return found
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):
        return ""


@kept_with_class
def code_has(code, pattern: str) -> bool:
    """Return whether the source of a function, or of a module's class and those it inherits from, has this pattern."""
    bases = [each for each in getattr(code, "__mro__", ()) if issubclass(each, torch.nn.Module)]
    return any(
        re.search(pattern, source_of(each), re.MULTILINE)
        for each in bases or [code]
        if not (each.__module__ or "").startswith("torch.")
    )


@functools.lru_cache(maxsize=4)  # the text of a file: layers of a model are in one or two
def _classes_in(module: str) -> dict[str, str]:
    """Return the code of transformers' classes by name: inspect.getsource would parse the module's file for each of
    them.
    """
    if not module.startswith("transformers."):
        return {}  # code from the Hub may be loaded again under its name
    source = source_of(sys.modules[module])
    lines, classes = source.splitlines(), [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in classes}


# --- warnings by the logger of transformers, once each ---

_BY_SDPA = "; this call runs by SDPA instead"


@torch.compiler.assume_constant_result
def log_once(message: str):
    """Log one warning per message, also while compiling."""
    if first_time(message):
        logging.get_logger(__name__).warning(f"packing_ops attention: {message}.")


def warn_once(reason: str):
    log_once(f"{reason}{_BY_SDPA}")


def sdpa_reasons() -> list[str]:
    """Say why calls ran by SDPA in this process, as a line of info."""
    reasons = sorted(message.removesuffix(_BY_SDPA) for message in warned if message.endswith(_BY_SDPA))
    return [f"by SDPA so far: {'; '.join(reasons)}"] if reasons else []
