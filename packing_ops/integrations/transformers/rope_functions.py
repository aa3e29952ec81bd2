"""The functions of a modelling module that rotate, and the dispatchers that take their places while somebody needs them."""

import functools
import importlib
import inspect
import re
from typing import NamedTuple

import torch

from packing_ops.integrations._patching import Patch, revert_left
from packing_ops.integrations.transformers.rope_trial import Rotation, rotation_of

# How one model is patched and not the others of its family. Attention looks apply_rotary_pos_emb up in its module, which
# all models of the family share, so that function is replaced by a dispatcher. A hook on the patched model's rotary_emb
# returns cos as Tables; the dispatcher rotates with our op if it gets Tables, else it calls the stock function. No global
# state is set around a forward, so recomputation, threads and torch.compile see the same program.

ROTARY = re.compile(r"apply_\w*rot\w*")
HOSTS = ("transformers.", "transformers_modules.")  # packages whose modelling modules are looked into


class Tables(NamedTuple):
    """cos, or cos and sin as one complex table, of a model that rotates with packing_ops.

    Only a dispatcher asks whether it is one. A model that computes with it computes with the tensor.
    """

    table: torch.Tensor

    def __getitem__(self, index):
        return Tables(self.table[index])

    def to(self, *args, **kwargs):
        return Tables(self.table.to(*args, **kwargs))

    def __neg__(self):
        return -self.table

    def __add__(self, other):
        return self.table + other

    def __mul__(self, other):
        return self.table * other

    __radd__, __rmul__ = __add__, __mul__

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return function(*map(_plain, args), **{name: _plain(value) for name, value in (kwargs or {}).items()})


def _of_table(name):
    return property(lambda self: getattr(self.table, name))


# By name: torch.compile takes no NamedTuple with a __getattr__.
for _name in ("shape", "dtype", "device", "ndim", "dim", "size", "real", "imag", "unsqueeze", "squeeze", "view", "reshape",
              "expand", "repeat", "repeat_interleave", "transpose", "permute", "chunk", "split", "flatten", "float",
              "contiguous", "type_as", "index_select", "gather", "narrow", "select", "clone", "detach", "__rsub__", "__sub__",
              "__truediv__"):  # fmt: skip
    setattr(Tables, _name, _of_table(_name))


def _plain(value):
    if isinstance(value, Tables):
        return value.table
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


PATCHES: dict[str, dict[str, Patch]] = {}  # {modelling module: {function: Patch}}


def patches_of(module_name: str) -> dict[str, Patch]:
    """By the name of the function, of all that apply_rotary_qk can serve. Their users are rotary embeddings of models."""
    if module_name not in PATCHES:
        module = importlib.import_module(module_name)
        found = {name: new_patch(module, name) for name in _names(module) if not refusal(module, name)}
        if not found:
            return {}
        PATCHES[module_name] = found
    return PATCHES[module_name]


def dispatch_for(user: torch.nn.Module, module_name: str) -> None:
    """Puts dispatchers in the places of the module's functions, for as long as user lives or until it is reverted."""
    for patch in patches_of(module_name).values():
        if not patch.is_applied or not (torch.compiler.is_compiling() or user in patch.users):
            patch.apply(user)


def new_patch(module, name: str) -> Patch:
    tried = rotation_of(vars(module)[name])

    def make(stock):
        # What others put over a function that was tried has its signature, and swapped models keep their rotation.
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


@functools.cache
def functions_called(cls: type) -> tuple[str, ...]:
    """The rotary functions of its module that the forward of this class calls, by name."""
    forward = inspect.unwrap(cls.forward)
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return tuple(name for name in names if ROTARY.fullmatch(name.lstrip("_")))


def _names(module) -> list[str]:
    return [name for name, value in vars(module).items() if ROTARY.fullmatch(name.lstrip("_")) and callable(value)]


def refusal(module, name) -> str | None:
    patch = PATCHES.get(module.__name__, {}).get(name)
    verdict = rotation_of(vars(module)[name]) if patch is None else rotation_in(patch)
    return f"{name}: {verdict}" if isinstance(verdict, str) else None


def rotation_in(patch: Patch) -> Rotation | str:
    """Of the function that it replaces, now or later."""
    return rotation_of(patch.stock if patch.is_applied else vars(patch.owner)[patch.name])
