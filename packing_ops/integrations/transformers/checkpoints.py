"""Checkpoints of torch.utils.checkpoint, whoever calls them: a model's layers run again in backward, after its call.

Layers with a state get the documents of the call again. Attention finds its name in the model's config again, and reads
cu_seq_lens_q again. Where one is not as it was, the backward is refused, as torch's autograd refuses a saved tensor
that was written in place. Masks and position_ids may change: masks keep what the forward found.
"""

import functools
import weakref

import torch
from torch.utils import checkpoint

from packing_ops.integrations._patching import Patch
from packing_ops.integrations.transformers.call import NAMES, now


class _Checkpoint:
    """A function that may run again: the documents of layers with a state, and what compares the calls around it, or
    those that begin in it, with what they were.
    """

    @torch.compiler.disable
    def __init__(self, state):
        call, around = now.call, now.checkpoint
        self.documents, self.state = now.row_documents or False, weakref.ref(state)
        if call is not None:
            self.checks = [_check_of(each) for each in (*reversed(call.outers), call) if not each.by_masks]
            return
        self.checks = [] if around is None else [*around.checks]
        now.frames = (*(each for each in now.frames if _in_forward(each())), weakref.ref(self))

    def run(self, function, *args, **kwargs):
        for check in self.checks:
            check()
        before = now.row_documents, now.checkpoint
        now.row_documents, now.checkpoint = self.documents, self
        try:
            return function(*args, **kwargs)
        finally:
            now.row_documents, now.checkpoint = before


class Layers:
    """The layers of a call that keep documents apart: [(function that says whether ours is in a layer, layer)].

    found: the backward in which ours was in all of them: a checkpoint of each layer asks for all layers.
    """

    def __init__(self, layers):
        self.layers, self.found = layers, -1

    def are_in(self) -> bool:
        backward = torch._C._current_graph_task_id()
        if backward == -1 or backward != self.found:
            if not all(is_in(layer) for is_in, layer in self.layers):
                return False
            self.found = backward
        return True


def _in_forward(of_frame) -> bool:
    """Return whether this is a _CheckpointFrame's, whose first run, by its caller, goes on."""
    return of_frame is not None and not getattr(of_frame.state(), "forward_completed", True)


def note(call) -> None:
    """Let the checkpoints that a call begins in know it: they run it again."""
    frames = [each for reference in now.frames if _in_forward(each := reference())]
    for each in frames if now.checkpoint is None else (now.checkpoint, *frames):
        each.checks.append(_check_of(call))


def _check_of(call):
    """Return _refuse_changed of a call as it is."""
    tensors = [(name, each) for name, each in call.given_documents.items() if isinstance(each, torch.Tensor)]
    versions = [(name, each, each._version) for name, each in tensors if not each.is_inference()]
    has_ours = call.config._attn_implementation in NAMES
    return functools.partial(_refuse_changed, call.name, call.config, has_ours, call.layers, versions)


@torch.compiler.disable
def _refuse_changed(model, config, had_ours, layers, versions) -> None:
    """Raise RuntimeError where layers would run again with other documents than in the forward, or with none.

    layers: Layers, or None.
    """
    if (config._attn_implementation in NAMES) != had_ours or not (layers is None or layers.are_in()):
        raise RuntimeError(
            f"backward: expected to run before {model} is reverted or gets another attention, got one after it: "
            "checkpoints run its layers again, which would not keep the documents of a row apart; call backward first, "
            "or run the forward again"
        )
    for name, tensor, version in versions:
        if tensor._version != version:
            raise RuntimeError(
                f"{name}: expected the values of the forward of {model} until its backward, whose checkpoints read "
                "them again, got a tensor that was written in place; give each batch a new one"
            )


def _noting(stock):
    """Wrap a method of torch that begins a checkpoint."""
    return lambda state, function, *args, **kwargs: stock(
        state, functools.partial(_Checkpoint(state).run, function), *args, **kwargs
    )


# Both forms. Under a torch without these names a layer with a state that runs again is refused.
PATCHES = tuple(
    Patch(vars(checkpoint)[owner], method, _noting)
    for owner, method in (("_CheckpointFrame", "__init__"), ("CheckpointFunction", "forward"))
    if owner in vars(checkpoint)
)
