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

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from packing_ops._runtime import autograd, fakes, library
from packing_ops._runtime.arguments import integer, number, plain, wrong_type

_MISTAKE = re.compile(r"[A-Za-z]\w*(, [A-Za-z]\w*)*: expected ")
_NO_MATCH = re.compile(r"packing_ops::\w+\(\) ")


def _gate(op: torch._ops.OpOverload) -> Callable:
    def call(*args):
        if not autograd.OWN:
            autograd.refuse_lost_tangents(name, args)
        try:
            return op(*args)
        except RuntimeError as error:
            if type(error) is not RuntimeError:
                raise
            if _MISTAKE.match(str(error)):
                raise ValueError(str(error)) from None
            no_match = _NO_MATCH.match(str(error)) or _lacks_a_tensor(op, args)
            taken = _taken(op, args) if no_match else None
            if taken is None:
                raise
        return call(*taken)  # the same errors: what is converted needs no third attempt

    name = op._schema.name.partition("::")[2]
    call.__name__ = call.__qualname__ = name
    call.__code__ = call.__code__.replace(co_name=name)  # torch.compile counts recompilations by code object
    return call


def _lacks_a_tensor(op, args) -> bool:
    """Return whether None was given for a tensor, which passes the dispatcher and fails in the kernel."""
    pairs = zip(op._schema.arguments, args, strict=False)  # arguments with a default may be left out
    return any(value is None and str(argument.real_type) == "Tensor" for argument, value in pairs)


def _taken(op, args) -> list | None:
    """Return the arguments converted to the schema's types; None if there was nothing to convert. TypeError names
    the first that cannot be converted.
    """
    arguments = op._schema.arguments
    taken = [_as(str(a.real_type), value, a.name) for a, value in zip(arguments, args, strict=False)]
    return None if all(new is old for new, old in zip(taken, args, strict=True)) else taken


def _as(kind: str, value, name: str):
    """Return ``value`` converted to the schema's type ``kind``."""
    if kind.startswith("Optional["):
        return None if value is None else _as(kind[len("Optional[") : -1], value, name)
    if kind.startswith("List["):
        values = plain(value)
        if not isinstance(values, (list, tuple)):
            raise wrong_type(name, "a list", value)
        inner = kind[len("List[") : -1]
        taken = [_as(inner, one, name) for one in values]
        return value if all(new is old for new, old in zip(taken, values, strict=True)) and values is value else taken
    if kind == "Tensor":
        if not isinstance(value, torch.Tensor):
            raise wrong_type(name, "a tensor", value)
    elif kind in ("int", "SymInt"):
        return value if isinstance(value, (int, torch.SymInt)) else integer(value, name)
    elif kind == "float":
        return number(value, name)
    elif kind == "bool":
        if not isinstance(plain(value), bool):
            raise wrong_type(name, "True or False", value)
        return plain(value)
    elif kind == "str":
        if not isinstance(value, str):
            raise wrong_type(name, "a name", value)
    elif kind == "ScalarType" and not isinstance(value, torch.dtype):
        raise wrong_type(name, "a torch.dtype", value)
    return value


def register_fake(name: str, fake: Callable[[SimpleNamespace], Any]) -> None:
    """Register for torch.compile the shapes of an op's results: ``fake`` makes them of its arguments, by their
    names.
    """
    if library.MISSING:
        return
    bind = library.named_arguments(name)

    def checked(*args):
        _check_meta(name, args)
        return fake(bind(args))

    torch.library.register_fake(f"packing_ops::{name}")(checked)


def _check_meta(name: str, args: tuple) -> None:
    """Raise ValueError for tensors of the meta device among others: torch would run the fake, whose result holds no
    values.
    """
    on_meta = {i: arg.device.type == "meta" for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)}
    if len(set(on_meta.values())) == 2:
        arguments = getattr(torch.ops.packing_ops, name).default._schema.arguments
        given, real = (arguments[next(i for i in on_meta if on_meta[i] is kind)].name for kind in (True, False))
        raise ValueError(f"{given}: expected a tensor on the device of {real}, got one on meta")


if library.MISSING:
    from packing_ops._runtime.plain import op_without_library as __getattr__  # noqa: F401

for _name, _fake in fakes.FAKES.items():
    register_fake(_name, _fake)
globals().update({name: _gate(getattr(torch.ops.packing_ops, name).default) for name in library.op_names()})


# --- torch.func.vmap ---

# torch calls an op that has no batching rule in a loop, which is right. These it cannot: lists of tensors, memory that
# is written, sizes that depend on values.
_batched = torch.library.Library("packing_ops", "IMPL", "FuncTorchBatched")


def _refuse_vmap(name: str) -> None:
    op = getattr(torch.ops.packing_ops, name).default
    lists = any("List[Tensor]" in str(value.type) for value in (*op._schema.arguments, *op._schema.returns))
    if not (lists or op._schema.is_mutable or name in ("pack_sequences", "pack_prefix_tree")):
        return

    def refuse(*args):
        raise NotImplementedError(f"packing_ops::{name} has no batching rule for torch.func.vmap: call it in a loop")

    _batched.impl(name, refuse)


for _name in library.op_names():
    _refuse_vmap(_name)
