"""The gate: every op of the library as this package calls it, so that a mistake raises the same class on every torch.

``gate.shift_labels(...)`` is ``torch.ops.packing_ops.shift_labels.default(...)`` with these errors, whatever torch made
of them (up to 2.13 a std::invalid_argument of C++ is a ValueError, later the stable ABI makes a RuntimeError of it):
    ValueError: what C++ found wrong. Its text says so: it starts with the arguments' names and ": expected".
    TypeError: what is no tensor, integer, ... to C++, by name instead of the schema.
Integers and columns of NumPy, pandas and pyarrow that the dispatcher does not know are taken. All of this costs nothing
where the op does not raise. Everything else (NotImplementedError, torch.OutOfMemoryError, CUDA's errors) is as torch
has it.

Without a compiled library ``gate.shift_labels`` is the one of _runtime/plain.py, and an op that is not there raises
ImportError.
"""

import operator
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from packing_ops._runtime import autograd, fakes, library
from packing_ops._runtime.arguments import integer, number, plain, wrong_type

_MISTAKE = re.compile(r"[A-Za-z]\w*(, [A-Za-z]\w*)*: expected ")
_NO_MATCH = re.compile(r"packing_ops::\w+\(\) ")
# Of a schema's type: the class of its values, and what an error calls it.
_KINDS = {
    "Tensor": (torch.Tensor, "a tensor"),
    "bool": (bool, "True or False"),
    "str": (str, "a name"),
    "ScalarType": (torch.dtype, "a torch.dtype"),
}


def _gate(op: torch._ops.OpOverload) -> Callable:
    def call(*args):
        if not autograd.OWN:
            autograd.refuse_lost_tangents(name, args)
        try:
            return op(*args)
        except RuntimeError as error:
            if type(error) not in (RuntimeError, NotImplementedError):  # the latter for None as the only tensor
                raise
            if type(error) is RuntimeError and _MISTAKE.match(str(error)):
                raise ValueError(str(error)) from None
            # Arguments with a default may be left out. None for a tensor passes the dispatcher and fails in the kernel.
            given = [(str(a.real_type), value, a.name) for a, value in zip(op._schema.arguments, args, strict=False)]
            no_match = _NO_MATCH.match(str(error)) or any(each[:2] == ("Tensor", None) for each in given)
            taken = [_as(*each) for each in given] if no_match else args
            if all(map(operator.is_, taken, args)):  # there was nothing to convert
                raise
        return call(*taken)  # the same errors: what is converted needs no third attempt

    name = op._schema.name.partition("::")[2]
    call.__name__ = call.__qualname__ = name
    call.__code__ = call.__code__.replace(co_name=name)  # torch.compile counts recompilations by code object
    return call


def _as(kind: str, value, name: str):
    """Return ``value`` converted to the schema's type ``kind``. TypeError names what cannot be converted."""
    if kind.startswith("Optional["):
        return None if value is None else _as(kind[len("Optional[") : -1], value, name)
    if kind.startswith("List["):
        values = plain(value)
        if not isinstance(values, (list, tuple)):
            raise wrong_type(name, "a list", value)
        inner = kind[len("List[") : -1]
        taken = [_as(inner, one, name) for one in values]
        return value if all(new is old for new, old in zip(taken, values, strict=True)) and values is value else taken
    if kind in ("int", "SymInt"):
        return value if isinstance(value, (int, torch.SymInt)) else integer(value, name)
    if kind == "float":
        return number(value, name)
    taken = plain(value) if kind == "bool" else value
    if kind in _KINDS and not isinstance(taken, _KINDS[kind][0]):
        raise wrong_type(name, _KINDS[kind][1], value)
    return taken


def register_fake(name: str, fake: Callable[[SimpleNamespace], Any]) -> None:
    """Register for torch.compile the shapes of an op's results: ``fake`` makes them of its arguments, by their
    names.
    """
    if library.MISSING:
        return
    bind = library.named_arguments(name)

    def checked(*args):
        a = bind(args)
        on_meta = {name: arg.device.type == "meta" for name, arg in vars(a).items() if isinstance(arg, torch.Tensor)}
        if len(set(on_meta.values())) == 2:  # torch would run the fake, whose result holds no values
            given, real = (next(name for name in on_meta if on_meta[name] is kind) for kind in (True, False))
            raise ValueError(f"{given}: expected a tensor on the device of {real}, got one on meta")
        return fake(a)

    torch.library.register_fake(f"packing_ops::{name}")(checked)


if library.MISSING:
    from packing_ops._runtime.plain import op_without_library as __getattr__  # noqa: F401

for _name, _fake in fakes.FAKES.items():
    register_fake(_name, _fake)
globals().update({name: _gate(getattr(torch.ops.packing_ops, name).default) for name in library.op_names()})


# --- torch.func.vmap ---

# torch calls an op that has no batching rule in a loop, which is right. These it cannot: lists of tensors, memory that
# is written, sizes that depend on values.
_batched = torch.library.Library("packing_ops", "IMPL", "FuncTorchBatched")


def _refuse_vmap(name: str, *args):
    raise NotImplementedError(f"packing_ops::{name} has no batching rule for torch.func.vmap: call it in a loop")


for _name in library.op_names():
    _schema = getattr(torch.ops.packing_ops, _name).default._schema
    _lists = any("List[Tensor]" in str(value.type) for value in (*_schema.arguments, *_schema.returns))
    if _lists or _schema.is_mutable or _name in ("pack_sequences", "pack_prefix_tree"):
        _batched.impl(_name, partial(_refuse_vmap, _name))
