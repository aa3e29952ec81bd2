"""Subclasses of a model's module classes with a forward of ours: torch.compile guards classes, so layers share graphs."""

import functools

import torch

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
