"""RoPE of a model by apply_rotary_qk: a hook tags cos, and the functions of the modelling module look for the tag.

Attention looks apply_rotary_pos_emb up in its module, which all models of a family share. While a swapped model lives,
a dispatcher replaces that function. A hook on the model's rotary embedding returns cos as Tables. The
dispatcher rotates with our op if it gets Tables, else it calls the stock function. No global state is set around a
forward, so recomputation, threads and torch.compile see the same program.
"""

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch

from packing_ops.boundaries import position_ids_from_cu_seqlens
from packing_ops.integrations import _patching
from packing_ops.integrations._patching import Patch, kept_with_class, put_hook, revert_left, stock_of, take_out_hook
from packing_ops.integrations._rope_trial import Rotation, rotation_of
from packing_ops.integrations.transformers.documents import TIME, first_axis, tokens_of
from packing_ops.integrations.transformers.versions import parameters_of

# --- functions of a modelling module ---

ROTARY = re.compile(r"_*apply_\w*rot\w*")
HOSTS = ("transformers.", "transformers_modules.")  # packages whose modelling modules are looked into


class Tables(NamedTuple):
    """cos of a model that rotates with packing_ops, or cos and sin as one complex table.

    Only a dispatcher asks for this type. Code of a model that computes with it gets the tensor.
    """

    table: torch.Tensor

    def __getitem__(self, index):
        return Tables(self.table[index])

    def to(self, *args, **kwargs):
        return Tables(self.table.to(*args, **kwargs))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function(*map(_plain, args), **{name: _plain(value) for name, value in (kwargs or {}).items()})


def _of_table(name):
    return property(lambda self: getattr(self.table, name))


def _operator(name):  # a function: torch.compile does not trace an operator that is a property
    return lambda self, *others: getattr(self.table, name)(*others)


# Lists, since torch.compile does not trace a NamedTuple with a __getattr__.
for _name in ("shape", "dtype", "device", "ndim", "dim", "size", "real", "imag", "unsqueeze", "squeeze", "view",
              "reshape", "expand", "repeat", "repeat_interleave", "transpose", "permute", "chunk", "split", "flatten",
              "float", "contiguous", "type_as", "index_select", "gather", "narrow", "select", "clone",
              "detach"):  # fmt: skip
    setattr(Tables, _name, _of_table(_name))
for _name in ("__neg__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"):
    setattr(Tables, _name, _operator(_name))


def _plain(value):
    if isinstance(value, Tables):
        return value.table
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


PATCHES: dict[str, dict[str, Patch]] = {}  # {modelling module: {function: Patch}}


def patches_of(module_name: str) -> dict[str, Patch]:
    """Return {function: its Patch}, of the functions that apply_rotary_qk can serve. Users are rotary embeddings of
    models.
    """
    if module_name not in PATCHES:
        module = importlib.import_module(module_name)
        PATCHES[module_name] = {name: new_patch(module, name) for name in _names(module) if not refusal(module, name)}
    return PATCHES[module_name]


def dispatch_for(user: torch.nn.Module) -> None:
    """Put dispatchers in place of the functions of its modelling module, until user dies or is reverted."""
    _patching.apply_all(patches_of(type(user).__module__), user)


def new_patch(module, name: str) -> Patch:
    tried = rotation_of(vars(module)[name])

    def make(stock):
        # Another library may have wrapped a function that was tried before: swapped models keep its rotation.
        found = rotation_of(stock)
        rotation = tried if isinstance(found, str) else found
        index = rotation.parameters.index(rotation.table)

        @functools.wraps(stock)
        def rotate(*args, **named):
            table = args[index] if len(args) > index else named.get(rotation.table)
            if not isinstance(table, Tables):
                revert_left()
                return stock(*args, **named)
            if len(args) > index:
                args = (*args[:index], table.table, *args[index + 1 :])
            else:
                named = {**named, rotation.table: table.table}
            return rotation.serve(stock, args, named)

        return rotate

    return Patch(module, name, make)


@kept_with_class
def functions_called(cls: type) -> tuple[str, ...]:
    """Return the names of the rotary functions that forward of this class calls."""
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return tuple(filter(ROTARY.fullmatch, getattr(code, "co_names", ())))


def _names(module) -> list[str]:
    return [name for name, value in vars(module).items() if ROTARY.fullmatch(name) and callable(value)]


def refusal(module, name) -> str | None:
    """Return why apply_rotary_qk cannot serve this function; None if it can."""
    rotation = rotation_in(module, name)
    return f"{name}: {rotation}" if isinstance(rotation, str) else None


def rotation_in(module, name) -> Rotation | str:
    """Return the rotation of this function of a module, or of the one that a dispatcher replaces."""
    patch = PATCHES.get(module.__name__, {}).get(name)
    return rotation_of(patch.stock if patch is not None and patch.is_applied else vars(module)[name])


# --- positions for a model whose call has only cu_seq_lens_q ---


def give_position_ids(owner, args, kwargs):
    """Give position_ids, as a hook: without them a model counts along the row, and scales long-context RoPE by the
    row's length.
    """
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None or len(args) > 2 or kwargs.get("position_ids") is not None:
        return None
    tokens = tokens_of(args, kwargs)
    if tokens is None or tokens.shape[0] != 1:
        return None
    return args, {**kwargs, "position_ids": position_ids_from_cu_seqlens(cu_seqlens, tokens.shape[1])[None]}


# --- in a model ---


class Rotating(NamedTuple):
    """A language model, its rotary embedding, and its attention modules that call the functions of its module."""

    owner: torch.nn.Module
    rotary: torch.nn.Module
    attentions: list[torch.nn.Module]


def find(model: torch.nn.Module) -> tuple[list[Rotating], list[str]]:
    """Find the language models inside that can rotate with ours, and why others, or parts of them, cannot."""
    found, reasons = [], []
    for owner, rotary in _pairs(model):
        classes = dict.fromkeys(type(module) for module in owner.modules())
        # Attention that is not of transformers may use the angles in another way.
        own = [
            f"{cls.__name__} has a forward of its own, in {cls.forward.__module__}"
            for cls in classes
            if cls.__name__.endswith("Attention") and not cls.forward.__module__.startswith((*HOSTS, "torch."))
        ]
        if own:
            reasons.append(own[0])
            continue
        # Functions of its modelling module that it calls, and those of them that apply_rotary_qk serves.
        home = importlib.import_module(type(rotary).__module__)
        calls = {cls: functions_called(cls) for cls in classes if cls.forward.__module__ == home.__name__}
        called = dict.fromkeys(name for names in calls.values() for name in names)
        if not called:
            reasons.append(f"{type(owner).__name__} calls no function of {home.__name__} that rotates q and k")
        reasons += [reason for name in called if name in vars(home) and (reason := refusal(home, name))]
        served = patches_of(home.__name__)
        ours = [module for module in owner.modules() if served.keys() & {*calls.get(type(module), ())}]
        if ours:
            found.append(Rotating(owner, rotary, ours))
    return found, list(dict.fromkeys(reasons))


def _pairs(model) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Yield (owner, rotary embedding), not of the patches of an image. An owner may hold a list of them, one for
    each base of the angles.
    """
    lists = torch.nn.ModuleList, torch.nn.ModuleDict
    for owner in model.modules():
        children = [] if isinstance(owner, lists) else list(owner.children())
        children += [inner for child in children if isinstance(child, lists) for inner in child.children()]
        for child in children:
            name = type(child).__name__
            if type(child).__module__.startswith(HOSTS) and "RotaryEmbedding" in name and "Vision" not in name:
                yield owner, child


def why_not(model: torch.nn.Module) -> str | None:
    """Return why RoPE of this model, or of a part of it, cannot be swapped; None if all of it can."""
    found, reasons = find(model)
    if found or reasons or towers(model):
        return "; ".join(reasons) or None
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        for name in functions_called(cls) if cls.__module__.startswith(HOSTS) else ():
            home = sys.modules[inspect.unwrap(cls.forward).__module__]
            if not hasattr(home, name):
                return f"{cls.__name__} rotates by a method of its own"
            return refusal(home, name) or f"{cls.__name__} has angles that come from no rotary embedding"
    return "no rotary embedding was found in it"


def counts(model: torch.nn.Module) -> tuple[int, int]:
    """Return (attention modules that rotate with ours, those that can)."""
    (found, _), in_towers = find(model), towers(model)
    ours = [each for each in found if _tag in each.rotary._forward_hooks.values()]
    tagged = [module for module in in_towers if _tag_tower in module._forward_pre_hooks.values()]
    return _count(ours, tagged), _count(found, in_towers)


def _count(found: list[Rotating], in_towers: list[torch.nn.Module]) -> int:
    return len({module for each in found for module in each.attentions}) + len(in_towers)


def apply_to_model(model: torch.nn.Module, fp32_cos_sin: bool) -> None:
    """Let attention modules rotate with ours from now on."""
    found, _ = find(model)
    for owner, rotary, _ in found:
        dispatch_for(rotary)
        put_hook(rotary, _tag)
        if fp32_cos_sin:
            put_hook(rotary, _ask_for_fp32, before=True)
        else:
            take_out_hook(rotary, _ask_for_fp32)
        # With another attention Qwen2-VL lets documents of one axis see each other.
        if "position_ids" in inspect.signature(owner.forward).parameters and first_axis(type(owner)) != TIME:
            put_hook(owner, give_position_ids, before=True, with_kwargs=True)
    for module in towers(model):
        dispatch_for(module)
        put_hook(module, _tag_tower, before=True, with_kwargs=True)


def release(model: torch.nn.Module) -> None:
    """Release the dispatchers: the model does not need them any more."""
    for patches in PATCHES.values():
        _patching.release(patches, model)


def _tag(rotary, args, output):
    dispatch_for(rotary)  # a copied or unpickled model has hooks, and is no user yet
    if isinstance(output, torch.Tensor):
        return Tables(output) if output.is_complex() else output
    if not isinstance(output, tuple) or len(output) != 2:
        return output  # an unknown form goes to the stock functions
    cos, sin = output
    return Tables(cos), sin


def _ask_for_fp32(rotary, args):
    """Replace x, as a hook: rotary embeddings read from it the device, the shape, and the dtype to return."""
    x, *others = args
    if x.dtype not in (torch.float32, torch.float64):
        x = x.new_empty((), dtype=torch.float32).expand(x.shape)
    return (x, *others)


# --- in vision and audio towers, whose calls bring the tables as position_embeddings ---


def towers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return attention modules that rotate ``[total, num_heads, head_dim]`` by functions that apply_rotary_qk
    serves.
    """
    return [module for module in model.modules() if "forward" not in vars(module) and _served(stock_of(type(module)))]


def _served(cls: type) -> bool:
    if not cls.__module__.startswith(HOSTS) or cls.forward.__module__ != cls.__module__:
        return False
    names = parameters_of(cls.forward)
    if names[:2] != ("hidden_states", "cu_seqlens") or "position_embeddings" not in names:
        return False
    patches = patches_of(cls.__module__)
    rotations = [rotation_in(patches[name].owner, name) if name in patches else None for name in functions_called(cls)]
    return bool(rotations) and all(getattr(rotation, "tokens", False) for rotation in rotations)


def _tag_tower(module, args, kwargs):
    dispatch_for(module)  # see _tag
    given = kwargs.get("position_embeddings")
    if not isinstance(given, tuple) or len(given) != 2 or isinstance(given[0], Tables):
        return args, kwargs
    return args, {**kwargs, "position_embeddings": (Tables(given[0]), given[1])}
