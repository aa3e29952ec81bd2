"""The modelling modules of transformers whose ``apply_rotary_pos_emb`` can be swapped, and the swap."""

import functools
import importlib
import inspect
import sys
import weakref
from importlib.util import find_spec
from typing import NamedTuple

import torch

from packing_ops.integrations.transformers.imports import version
from packing_ops.integrations.transformers.positions import give_position_ids, give_text_positions
from packing_ops.rope import apply_rotary_qk

# How a swap reaches one model only. Attention looks apply_rotary_pos_emb up in its module, which all models of the
# family share, so a dispatcher stands there while it is needed. A hook on the model's rotary_emb returns cos as Tables;
# the dispatcher rotates those by our op and calls the stock function for anything else. No global state is set around a
# forward, so recomputation, threads and torch.compile see the same program.


class Family(NamedTuple):
    """What differs between modelling modules."""

    interleaved: bool = False  # pairs are elements 2i and 2i + 1
    half_tables: bool = False  # cos and sin have one entry per pair, not one per element
    multimodal: bool = False  # position_ids have a row per axis
    norm: str = "weight"  # the RMSNorm formula, a key of rms_norm.FORWARDS


FAMILIES = {
    "gemma": Family(norm="one_plus_weight"),
    "gemma2": Family(norm="one_plus_weight"),
    "gemma3": Family(norm="one_plus_weight"),
    "glm": Family(interleaved=True),
    "glm4": Family(interleaved=True),
    "gpt_oss": Family(half_tables=True, norm="weight_in_fp32"),
    "llama": Family(),
    "ministral": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "phi": Family(),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen2_5_vl": Family(multimodal=True),
    "qwen2_moe": Family(),
    "qwen2_vl": Family(multimodal=True),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "qwen3_vl": Family(multimodal=True),
    "stablelm": Family(),
}
# Up to 4.57 these rotate by functions of their own.
_NOT_KNOWN = ("qwen2_vl", "qwen2_5_vl") if version.startswith("4.") else ()
MODULES = {  # that this transformers has
    f"transformers.models.{name}.modeling_{name}": family
    for name, family in FAMILIES.items()
    if name not in _NOT_KNOWN and find_spec(f"transformers.models.{name}")
}
FUNCTION = "apply_rotary_pos_emb"


class Tables(NamedTuple):
    """cos and sin of a model that rotates with packing_ops."""

    cos: torch.Tensor
    sin: torch.Tensor


class Swap:
    """The dispatcher of one modelling module: there while a model or everyone needs it."""

    def __init__(self, module_name: str):
        self.family = MODULES[module_name]
        self.module = importlib.import_module(module_name)
        self.users = weakref.WeakSet()
        self.everywhere = False
        self.stock = self.dispatcher = None

    @property
    def installed(self) -> bool:
        """Another library may have put its own function over the dispatcher."""
        return self.dispatcher is not None and vars(self.module)[FUNCTION] is self.dispatcher

    def install(self) -> None:
        if not self.installed:
            self.stock = vars(self.module)[FUNCTION]
            self.dispatcher = self._dispatcher(self.stock)
            setattr(self.module, FUNCTION, self.dispatcher)

    def remove_if_unused(self) -> None:
        if not self.everywhere and not any(True for _ in self.users):  # len() counts one that is just dying
            if self.installed:
                setattr(self.module, FUNCTION, self.stock)
            self.stock = self.dispatcher = None

    def _dispatcher(self, stock):
        names = list(inspect.signature(stock).parameters)[4:]  # up to 4.57 position_ids, which are not read, come first
        place = names.index("unsqueeze_dim") if "unsqueeze_dim" in names else 0

        @functools.wraps(stock)
        def apply_rotary_pos_emb(q, k, cos, sin, *rest, **named):
            if isinstance(cos, Tables):
                cos, sin = cos
            elif not self.everywhere:
                _remove_left()
                return stock(q, k, cos, sin, *rest, **named)
            unsqueeze_dim = rest[place] if len(rest) > place else named.get("unsqueeze_dim", 1)
            return self.rotate(q, k, cos, sin, unsqueeze_dim)

        return apply_rotary_pos_emb

    def rotate(self, q, k, cos, sin, unsqueeze_dim):
        pairs = cos.shape[-1] if self.family.half_tables else cos.shape[-1] // 2
        if self.family.interleaved:  # the model repeats the first half of its tables
            cos, sin = cos[..., :pairs], sin[..., :pairs]
        layout = {"interleaved": self.family.interleaved, "unsqueeze_dim": unsqueeze_dim, "rotary_dim": 2 * pairs}
        return apply_rotary_qk(q, k, cos, sin, **layout)


_swaps: dict[str, Swap] = {}
_left: list[Swap] = []  # whose last model went where nothing may be removed


def _remove_when_gone(swap) -> None:
    """Whatever starts the garbage collector runs this, the tracer of torch.compile too, whose guards read the module."""
    _left.append(swap)
    _remove_left()


def _remove_left() -> None:
    if not torch.compiler.is_compiling() and _left and not _something_compiles():
        while _left:
            _left.pop().remove_if_unused()


def _something_compiles() -> bool:
    """In this thread, or in another one."""
    if torch._guards.CompileContext.try_get() is not None:
        return True
    lock = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    if lock is None:
        return False
    free = lock.acquire(blocking=False)
    if free:
        lock.release()
    return not free


def swap_of(module_name: str) -> Swap:
    if module_name not in _swaps:
        _swaps[module_name] = Swap(module_name)
    return _swaps[module_name]


def is_rotary(cls: type) -> bool:
    """The rotary embedding of a language model that we know."""
    name = cls.__name__
    return cls.__module__ in MODULES and name.endswith("RotaryEmbedding") and "Vision" not in name


# --- one model ---


def owners(model: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """(owner, rotary embedding) of every language model inside whose attention calls the function of its module."""
    found = []
    for owner in model.modules():
        for rotary in owner.children():
            if is_rotary(type(rotary)) and _rotates_with(owner, type(rotary).__module__):
                found.append((owner, rotary))
    return found


def attentions(owner) -> list[torch.nn.Module]:
    return [module for module in owner.modules() if type(module).__name__.endswith("Attention")]


def _rotates_with(owner, module_name) -> bool:
    """Somebody's own attention would not find the dispatcher and could not read Tables."""
    found = {type(module) for module in attentions(owner)}
    return bool(found) and all(cls.forward.__module__ == module_name for cls in found)


def apply_to_model(model: torch.nn.Module, fp32_cos_sin: bool) -> int:
    """How many attention modules rotate with ours from now on."""
    found = owners(model)
    _remove_left()
    for owner, rotary in found:
        _remove_hooks(owner, rotary)
        use(rotary)
        rotary.register_forward_hook(_tag)
        if fp32_cos_sin:
            rotary.register_forward_pre_hook(_ask_for_fp32)
        multimodal = MODULES[type(rotary).__module__].multimodal
        owner.register_forward_pre_hook(give_text_positions if multimodal else give_position_ids, with_kwargs=True)
    return len({id(module) for owner, _ in found for module in attentions(owner)})


def rotates(rotary: torch.nn.Module) -> bool:
    """Whether ours rotates: swapped in this model, or in all models of its class."""
    swap = swap_of(type(rotary).__module__)
    return (swap.installed and swap.everywhere) or _tag in rotary._forward_hooks.values()


def revert_model(model: torch.nn.Module) -> None:
    for owner, rotary in owners(model):
        _remove_hooks(owner, rotary)
        swap_of(type(rotary).__module__).users.discard(rotary)
    for swap in _swaps.values():
        swap.remove_if_unused()


def use(rotary: torch.nn.Module) -> None:
    swap = swap_of(type(rotary).__module__)
    if rotary not in swap.users:
        swap.users.add(rotary)
        weakref.finalize(rotary, _remove_when_gone, swap).atexit = False
    swap.install()


def _remove_hooks(owner, rotary) -> None:
    for hooks in (rotary._forward_hooks, rotary._forward_pre_hooks, owner._forward_pre_hooks):
        for key in [key for key, hook in hooks.items() if hook in _HOOKS]:
            del hooks[key]
            owner._forward_pre_hooks_with_kwargs.pop(key, None)


def _tag(rotary, args, output):
    _remove_left()
    if not swap_of(type(rotary).__module__).installed:
        use(rotary)  # a copy or an unpickled model brings its hooks without having been applied to
    cos, sin = output
    return Tables(cos, sin), sin


def _ask_for_fp32(rotary, args):
    x, *others = args
    return (in_fp32(x), *others)


def in_fp32(x: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings compute in fp32 and read nothing of x but its device and the dtype to cast down to."""
    return x if x.dtype in (torch.float32, torch.float64) else x.new_empty((), dtype=torch.float32)


_HOOKS = (_tag, _ask_for_fp32, give_position_ids, give_text_positions)
