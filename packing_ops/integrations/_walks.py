"""What a walk over the modules of a model found, kept with the model while its modules are the same.

A call of a model asks several such questions. It compares once what the walks have read, which takes less than a walk.
"""

import ctypes
import functools
import weakref

import torch

from packing_ops.integrations._patching import PRIVATE

_KEPT = f"{PRIVATE}walks"
MIXES = f"{PRIVATE}mixes"  # what declare() leaves in a class: subclasses inherit it, FSDP2's among them
SWAPPED = f"{PRIVATE}linear_attention"  # in a layer that linear_attention has swapped
DOCUMENTS = "packing_ops_documents"  # a keyword of these layers: RowDocuments, or None: each row is one document
# _old_forward is accelerate's.
_IN_INSTANCE = ("forward", "_old_forward", "rope_type", "padding_idx", SWAPPED)


def constant_of_model(function):
    """Wrap function(model, *args) so that it is not traced: in a graph its result is a constant."""

    # torch.compile before 2.13 takes no module for a constant, but its id.
    @torch.compiler.assume_constant_result
    def of_graph(model_id, *args):
        return function(ctypes.cast(model_id, ctypes.py_object).value, *args)

    untraced = torch.compiler.disable(function)  # also where Dynamo left a frame to Python, behind a break of the graph

    def of_model(model, *args):
        return of_graph(id(model), *args) if torch.compiler.is_compiling() else untraced(model, *args)

    return of_model


def kept_with_model(function):
    """Return a function of (PackedCall of the model, model, *args), with the results of function(model, *args).

    function may read what _read has of each module. In a graph of torch.compile its result is a constant.
    """
    in_graph = constant_of_model(function)

    @torch.compiler.disable  # also where Dynamo left a frame to Python, behind a break of the graph
    def in_call(call, model, *args):
        if call.walks is None:
            kept = vars(model).get(_KEPT)
            call.walks = kept if isinstance(kept, _Kept) and kept.is_of(model) else _Kept(model)
        key = (function.__qualname__, *args)
        if key not in call.walks.results:
            result = function(model, *args)
            if not call.walks.is_of(model):  # it has put functions into modules
                call.walks = _Kept(model)
            vars(model)[_KEPT] = call.walks
            call.walks.results[key] = result
        return call.walks.results[key]

    @functools.wraps(function)
    def of_call(call, model, *args):
        return in_graph(model, *args) if torch.compiler.is_compiling() else in_call(call, model, *args)

    return of_call


class _Kept:
    """results: {(name of a function, *args): what it returned} for modules as they were then."""

    def __init__(self, model):
        self.model, self.results = weakref.ref(model), {}
        self.of_model = _read(model)
        self.modules = [(module, _read(module)) for module in model.modules() if module is not model]

    def is_of(self, model) -> bool:
        if self.model() is not model or self.of_model != _read(model):  # a shallow copy has it too
            return False
        return all([_read(module) == read for module, read in self.modules])

    def __reduce__(self):
        return dict, ()  # a copy of the model, or one from a file, starts without


def _read(module):
    held, cls = module.__dict__, module.__class__
    return (cls, cls.forward, getattr(cls, MIXES, None), *map(held.get, _IN_INSTANCE), *held["_modules"].values())
