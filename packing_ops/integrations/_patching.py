"""Patch: replaces an attribute of a host library's module or class while somebody uses the replacement. WeakPartial: what
stands in place of a method in an instance."""

import copy
import functools
import sys
import threading
import weakref
from collections.abc import Callable

import torch

_MISSING = object()
_lock = threading.RLock()


class Patch:
    """``owner.name`` is ``make(stock)`` from the first apply to the last revert.

    If another library replaces ours in its turn, revert leaves that in place.

    Args:
        owner: a module or a class.
        make: called with the present attribute, None if there is none; returns the replacement.
        imported_by: a package ("" for any). Its modules that imported the attribute by name get the replacement too.

    Attributes:
        stock: the attribute that was replaced, while applied.
        pinned: applied without a user: until revert() without one.
    """

    def __init__(self, owner, name: str, make: Callable, imported_by: str | None = None):
        self.owner, self.name, self.make, self.imported_by = owner, name, make, imported_by
        self.users, self.pinned = weakref.WeakSet(), False
        self.stock, self.ours = _MISSING, None
        self.covered = []  # (ours, stock) that others put something over

    @property
    def is_applied(self) -> bool:
        return self.ours is not None and vars(self.owner).get(self.name) is self.ours

    def apply(self, user: object = None) -> None:
        """Replace the attribute for as long as ``user`` lives; without a user until revert()."""
        with _lock:
            if user is None:
                was_pinned, self.pinned = self.pinned, True
            elif user not in self.users:
                self.users.add(user)
                weakref.finalize(user, _revert_when_gone, self).atexit = False
            self._uncover()
            if self.is_applied:
                return
            stock = vars(self.owner).get(self.name, _MISSING)
            try:
                ours = self.make(getattr(self.owner, self.name, None))
            except BaseException:
                self.pinned = self.pinned if user is not None else was_pinned
                raise
            self._cover()
            self.stock, self.ours = stock, ours
            setattr(self.owner, self.name, self.ours)
            self._give_importers(stock, self.ours)

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
            if self.ours is None:
                return
            if not self.is_applied:
                self._cover()
            elif self.stock is _MISSING:
                delattr(self.owner, self.name)
            else:
                setattr(self.owner, self.name, self.stock)
            self._give_importers(self.ours, self.stock)
            self.stock, self.ours = _MISSING, None

    def _cover(self) -> None:
        if self.ours is not None and not any(ours is self.ours for ours, _ in self.covered):
            self.covered.append((self.ours, self.stock))

    def _uncover(self) -> None:
        """Others may have taken away what they had put over ours: then that one counts, and none that stood above it."""
        there = vars(self.owner).get(self.name, _MISSING)
        for index, (ours, stock) in enumerate(self.covered):
            if ours is there:
                if self.ours is not None and self.ours is not ours:
                    self._give_importers(self.ours, stock)
                self.stock, self.ours = stock, ours
                del self.covered[index:]
                self._give_importers(stock, ours)
                return

    def _give_importers(self, old, new) -> None:
        for name, module in list(sys.modules.items()) if self.imported_by is not None else ():
            if (
                self.imported_by in ("", name.partition(".")[0])
                and getattr(module, "__dict__", {}).get(self.name) is old
            ):
                setattr(module, self.name, new)


def function_of(method) -> Callable | None:
    """What a partial or a bound method calls."""
    return getattr(method, "func", None) or getattr(method, "__func__", None)


class WeakPartial:
    """functools.partial(func, owner, *args), to be an attribute of the owner: it holds the owner weakly, whose memory
    would otherwise wait for the garbage collector. A copy or a pickle of the owner has one of its own.

    args: without the owner.
    """

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


# --- subclasses of a module's class with a forward of ours: torch.compile guards classes, so layers share graphs ---

_STOCK = "_packing_ops_stock"


@functools.cache
def subclass_of(stock: type, forward) -> type:
    """With the name of stock. A copy or a pickle is made by way of the stock class, which pickle finds by name.

    Args:
        forward: a function of a module of ours, which pickle finds by name too.
    """

    def __reduce_ex__(self, protocol):
        _, _, state, *_ = stock.__reduce_ex__(self, 2)
        return _new, (stock, forward), state

    parts = {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__doc__": stock.__doc__}
    return type(stock.__name__, (stock,), {**parts, _STOCK: stock, "__reduce_ex__": __reduce_ex__, "forward": forward})


def stock_of(cls: type) -> type:
    """The class that a subclass of ours was made of, or the class itself."""
    return vars(cls).get(_STOCK, cls)


def _new(stock: type, forward) -> torch.nn.Module:
    cls = subclass_of(stock, forward)
    return cls.__new__(cls)


# --- users that the garbage collector frees ---

_left: list[Patch] = []  # a user of these was freed; they are reverted as soon as nothing compiles


def _revert_when_gone(patch) -> None:
    """The garbage collector may run this anywhere, also inside torch.compile, whose guards read the owner."""
    _left.append(patch)
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
