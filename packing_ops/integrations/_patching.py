"""How code is put into a host library, and taken out again.

In a module or a class of the host, which all of its models share: Patch, in place of an attribute.
In one torch.nn.Module: put and put_around, in place of an attribute; put_class, in place of its class; put_hook, before
or after its forward. take_out reverts these.
"""

import copy
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable

import torch

_MISSING = object()
_lock = threading.RLock()


class Patch:
    """``owner.name`` is ``make(stock)`` from the first apply to the last revert.

    If another library replaces ours in its turn, revert leaves that in place: a wrapper goes on to call ours. Modules
    that imported ours by name get back what ours stood in place of; what they imported of another library stays.

    Args:
        owner: a module or a class.
        make: called with the present attribute, None if it is missing; returns the replacement.
        imported_by: a package ("" for any). Its modules that imported the attribute by name get the replacement too.

    Attributes:
        pinned: applied without a user: until revert() without one.
        layers: [(ours, stock, modules that had imported the same replacement before)], the last one on top: each stands
            over what others put over the one before it.
    """

    def __init__(self, owner, name: str, make: Callable, imported_by: str | None = None):
        self.owner, self.name, self.make, self.imported_by = owner, name, make, imported_by
        self.users, self.pinned, self.layers = weakref.WeakSet(), False, []

    @property
    def is_applied(self) -> bool:
        return bool(self.layers) and vars(self.owner).get(self.name) is self.layers[-1][0]

    @property
    def stock(self):
        """Return what our replacement stands in place of, while applied."""
        return self.layers[-1][1]

    def apply(self, user: object = None) -> None:
        """Replace the attribute for as long as ``user`` lives; without a user until revert()."""
        with _lock:
            was_pinned = self.pinned
            if user is None:
                self.pinned = True
            elif user not in self.users:
                self.users.add(user)
                weakref.finalize(user, _revert_when_gone, self).atexit = False
            self._uncover()
            for ours, stock, _ in self.layers:  # also those that a revert left under another library's wrapper
                self._give_importers(stock, ours)
            if self.is_applied:
                return
            stock = vars(self.owner).get(self.name, _MISSING)
            try:
                ours = self.make(getattr(self.owner, self.name, None))
            except BaseException:
                self.pinned = was_pinned
                raise
            self.layers.append((ours, stock, {*self._importers(ours)}))
            setattr(self.owner, self.name, ours)
            self._give_importers(stock, ours)

    def pin(self) -> None:
        """apply() once: what another library puts over it stays outside."""
        if not self.pinned:
            self.apply()

    def revert(self, user: object = None) -> None:
        with _lock:
            if user is None:
                self.pinned = False
            else:
                self.users.discard(user)
            self.revert_if_unused()

    def revert_if_unused(self) -> None:
        with _lock:
            if self.pinned or any(True for _ in self.users):  # len() counts one that is just dying
                return
            self._uncover()
            layers = self.layers[::-1]
            if self.is_applied:
                _, stock, _ = self.layers.pop()
                if stock is _MISSING:
                    delattr(self.owner, self.name)
                else:
                    setattr(self.owner, self.name, stock)
            for layer in layers:
                self._give_importers(*layer)

    def _uncover(self) -> None:
        """Drop the layers above ours if another library took away what it had put over it."""
        there = vars(self.owner).get(self.name, _MISSING)
        while not self.is_applied and any(ours is there for ours, *_ in self.layers):
            self._give_importers(self.layers.pop()[0], there)

    def _importers(self, value) -> dict:
        """Return {name: module} of those that imported this value."""
        return {
            name: module
            for name, module in list(sys.modules.items() if self.imported_by is not None else ())
            if self.imported_by in ("", name.partition(".")[0])
            and getattr(module, "__dict__", {}).get(self.name, self) is value
        }

    def _give_importers(self, old, new, but=()) -> None:
        for name, module in self._importers(old).items():
            if name not in but and new is not _MISSING:
                setattr(module, self.name, new)


# --- in one model ---

PRIVATE = "_packing_ops_"  # what the name of an attribute that we keep in a module begins with
PACKS_ROWS = "_packing_ops_packs_rows"  # in a model that packs padded rows: (args, kwargs) -> whether those of a call


def put(module: torch.nn.Module, name: str, function: Callable, *args) -> None:
    """Make ``module.name`` be ``function(module, *args, ...)`` from now on. A second call replaces the args."""
    before = vars(module).get(name)
    if isinstance(before, WeakPartial) and before.func is function:
        before = before.before
    partial = vars(module)[name] = WeakPartial(function, module, *args)
    if before is not None:
        partial.before = before


def put_around(module: torch.nn.Module, name: str, function: Callable, *args) -> None:
    """Make ``module.name`` be ``function(module, before, *args, ...)``: before is what it replaced in the module, or
    None, if the class has it. A second call changes nothing.
    """
    before = vars(module).get(name)
    if function_of(before) is not function:
        put(module, name, function, before, *args)


def put_class(module: torch.nn.Module, forward: Callable) -> None:
    """Let the module run ``forward`` of its class from now on: torch.compile guards classes, so layers share graphs."""
    module.__class__ = subclass_of(stock_of(type(module)), forward)


def put_hook(module: torch.nn.Module, hook: Callable, before: bool = False, with_kwargs: bool = False) -> None:
    """Run ``hook`` before or after the forward of the module. Twice is once."""
    hooks = module._forward_pre_hooks if before else module._forward_hooks
    register = module.register_forward_pre_hook if before else module.register_forward_hook
    if hook not in hooks.values():
        register(hook, with_kwargs=with_kwargs)


def take_out(module: torch.nn.Module, package: str) -> None:
    """Revert put, put_class and put_hook of functions of a package in one module, and delete its PRIVATE attributes.

    What another library put over ours stays.
    """
    cls, stock = type(module), stock_of(type(module))
    # Attributes
    for name, value in list(vars(module).items()):
        if name.startswith(PRIVATE):
            del vars(module)[name]
        elif isinstance(value, WeakPartial) and is_of(value.func, package):
            while isinstance(vars(module).get(name), WeakPartial) and is_of(vars(module)[name].func, package):
                _put_back(module, name)  # one around another
        elif cls is not stock and getattr(value, "__func__", None) is cls.forward:
            vars(module)[name] = types.MethodType(stock.forward, module)  # accelerate keeps the forward that it wraps
    # Class
    if cls is not stock:
        module.__class__ = stock
    # Hooks
    for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
        if is_of(hook, package):
            take_out_hook(module, hook)


def take_out_function(module: torch.nn.Module, function: Callable) -> None:
    """Revert put of this function."""
    for name, value in list(vars(module).items()):
        if isinstance(value, WeakPartial) and value.func is function:
            _put_back(module, name)


def _put_back(module: torch.nn.Module, name: str) -> None:
    before = vars(module)[name].before
    if before is None:
        del vars(module)[name]
    else:
        vars(module)[name] = before


def take_out_hook(module: torch.nn.Module, hook: Callable) -> None:
    for hooks, more in (
        (module._forward_hooks, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
        (module._forward_pre_hooks, (module._forward_pre_hooks_with_kwargs,)),
    ):
        for key in [key for key, present in hooks.items() if present is hook]:
            for each in (hooks, *more):
                each.pop(key, None)


def is_of(function: Callable | None, package: str) -> bool:
    return (getattr(function, "__module__", None) or "").startswith(f"{package}.")


_STOCK = "_packing_ops_stock"


_subclasses: weakref.WeakValueDictionary[tuple, type] = weakref.WeakValueDictionary()  # by stock class and forward


def subclass_of(stock: type, forward) -> type:
    """Return a subclass with the name of stock: one class as long as a module has it. A copy or a pickle is made by way
    of the stock class, which pickle finds by name.

    Args:
        forward: a function of a module of ours, which pickle finds by name too.
    """

    def __reduce_ex__(self, protocol):
        _, _, state, *_ = stock.__reduce_ex__(self, 2)
        return _new, (stock, forward), state

    with _lock:
        found = _subclasses.get((stock, forward))
        if found is None:
            parts = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
            parts |= {_STOCK: stock, "__reduce_ex__": __reduce_ex__, "forward": forward}
            found = _subclasses[stock, forward] = type(stock.__name__, (stock,), parts)
        return found


def stock_of(cls: type) -> type:
    """Return the class that a subclass of ours was made of, or the class itself."""
    return vars(cls).get(_STOCK, cls)


def stock_class(module: torch.nn.Module) -> type:
    """Return stock_of a module's class, also where FSDP2 has made a subclass of it."""
    return getattr(type(module), _STOCK, type(module))


def _new(stock: type, forward) -> torch.nn.Module:
    cls = subclass_of(stock, forward)
    return cls.__new__(cls)


def function_of(method) -> Callable | None:
    """Return what a partial or a bound method calls."""
    return getattr(method, "func", None) or getattr(method, "__func__", None)


def calls(function, ours: Callable, seen: dict[int, object], depth: int = 8) -> bool:
    """Return whether a function is ours, or was put in front of it: what it holds is looked through. seen: of none
    yet {}, which gets what was looked at, by id: a method holds its module, and that the method. depth: of a chain, as
    a mock has one without an end.
    """
    if function is ours or isinstance(function, type | types.ModuleType | None) or depth == 0 or id(function) in seen:
        return function is ours
    seen[id(function)] = function
    held = [function_of(function), getattr(function, "__self__", None), *getattr(function, "__dict__", {}).values()]
    held += [
        cell.cell_contents
        for cell in getattr(function, "__closure__", None) or ()
        if isinstance(cell, types.CellType) and cell != types.CellType()  # an empty one
    ]
    if (code := getattr(function, "__code__", None)) is not None:  # of a script: its variables are global
        held += [each for each in map(function.__globals__.get, code.co_names) if isinstance(each, WeakPartial)]
    return any(calls(each, ours, seen, depth - 1) for each in held)


class WeakPartial:
    """functools.partial(func, owner, *args) as an attribute of the owner. It holds the owner weakly: in a reference
    cycle its memory would wait for the garbage collector. A copy or a pickle of the owner gets a new partial.

    args: without the owner.
    before: what it replaced; None if nothing.
    """

    before = None

    __slots__ = ("__dict__", "_owner", "args", "func")  # functools.wraps copies the __dict__ of another one

    def __init__(self, func, owner, *args):
        self.func, self.args, self._owner = func, args, weakref.ref(owner)

    def __call__(self, *args, **kwargs):
        owner = self._owner()
        if owner is None:
            raise ReferenceError("forward: expected a model that is still there, got one that nothing else held")
        return self.func(owner, *self.args, *args, **kwargs)

    def __deepcopy__(self, memo):
        made = type(self)(self.func, copy.deepcopy(self._owner(), memo), *copy.deepcopy(self.args, memo))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __reduce__(self):
        return type(self), (self.func, self._owner(), *self.args), vars(self)


# --- users that the garbage collector frees ---

_left: list[Patch] = []  # a user of these was freed; they are reverted as soon as nothing compiles


def _revert_when_gone(patch) -> None:
    """Queue a patch to be reverted, and revert it if possible. The garbage collector may run this anywhere, also
    inside torch.compile, whose guards read the owner.
    """
    _left.append(patch)
    revert_left()


def apply_all(patches: dict[str, Patch], user: object) -> None:
    """Apply patches for this user where they are not: a copied or unpickled model is no user yet."""
    revert_left()
    for patch in patches.values():
        # In a graph a user cannot be looked up in a WeakSet: an applied patch will do.
        if not patch.is_applied or not (torch.compiler.is_compiling() or user in patch.users):
            patch.apply(user)


def release(patches: dict[str, Patch], model: torch.nn.Module) -> None:
    """Revert those of the patches that only modules of this model needed."""
    users = {*model.modules()}
    for patch in patches.values():
        for user in users.intersection(patch.users):
            patch.revert(user)
    revert_left()


def revert_left() -> None:
    """Revert what _revert_when_gone could not."""
    if torch.compiler.is_compiling() or not _left or _something_compiles():
        return
    if _lock.acquire(blocking=False):  # the garbage collector waits for nobody
        try:
            while _left:
                _left.pop().revert_if_unused()
        finally:
            _lock.release()


def _something_compiles() -> bool:
    """Return whether this thread or another one compiles."""
    if torch._guards.CompileContext.try_get() is not None:
        return True
    lock = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    if lock is None:
        return False
    free = lock.acquire(blocking=False)
    if free:
        lock.release()
    return not free


# --- what was found of a class ---


def kept_with_class(function):
    """Cache a function of classes and functions, as functools.cache, without keeping any of them alive: a result
    goes with the first one.
    """
    kept = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def of_class(first, *others):
        results, key = kept.setdefault(first, {}), _weak(others)
        if key not in results:
            results[key] = function(first, *others)
        return results[key]

    of_class.cache_clear = kept.clear
    return of_class


def _weak(value):
    if isinstance(value, tuple):
        return tuple(map(_weak, value))
    return weakref.ref(value) if isinstance(value, (type, types.FunctionType)) else value
