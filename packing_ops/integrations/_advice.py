"""What a training run need not compute, in one line of the log each: the padding of its batches, logits."""

import sys

import torch

from packing_ops.integrations.transformers.fused_loss import refusal
from packing_ops.integrations.transformers.versions import class_name, log_once

BATCHES = 20  # of which padding is counted
LARGE = 2**30  # bytes of logits
_PADDING = "_packing_ops_padding"  # in a model that trains: the Padding of its batches
_PACKING_OF_TRL = "; in TRL packing=True, padding_free=True, or enable_padding_free of packing_ops.integrations.trl"
_OF_TRL_S_TRAINERS = "; TRL's SFT, DPO, KTO, GRPO and RLOO trainers need it not, their fused LM head makes no logits"


class Padding:
    """The slots and tokens of the first batches of a run."""

    def __init__(self):
        self.batches = self.slots = self.tokens = 0

    def add(self, model, slots, tokens) -> None:
        """Count a batch. After the last one say how much padding there is, if it is a tenth or more."""
        self.batches, self.slots, self.tokens = self.batches + 1, self.slots + slots, self.tokens + tokens
        if self.batches < BATCHES or not self.slots:
            return
        if (padding := round(100 - 100 * int(self.tokens) / self.slots)) >= 10:
            log_once(
                f"the first {BATCHES} training batches of {class_name(model)} are {padding}% padding, which packing "
                f"leaves out (collators of packing_ops.data{_PACKING_OF_TRL if 'trl' in sys.modules else ''})"
            )


def advise(model, call, kwargs, outputs) -> None:
    """Look at a call of a model with packing_ops' attention that has ended."""
    if torch.compiler.is_compiling() or not is_step(model):
        return
    _advise_packing(model, call)
    logits = getattr(outputs, "logits", None)
    if kwargs.get("labels") is None or not (isinstance(logits, torch.Tensor) and logits.requires_grad):
        return
    if logits.nbytes > LARGE and not refusal(model):
        log_once(
            f"a training step of {class_name(model)} keeps logits of more than {LARGE / 2**30:.3g} GiB: "
            "apply_packing_ops(model, fused_loss=True) makes none"
            f"{_OF_TRL_S_TRAINERS if 'trl' in sys.modules else ''}"
        )


def is_step(model) -> bool:
    """Return whether a call of the model is a step of its training."""
    return model.training and torch.is_grad_enabled()


def _advise_packing(model, call) -> None:
    """Count the padding that attention has found, so that nothing waits for the GPU."""
    if call.outer is not None or call.has_cache or not call.answers:
        return
    padding = model.__dict__.setdefault(_PADDING, Padding())
    (batch, seqlen), (*cu_seqlens, _, _), documents = call.answers[-1]  # a vision tower's precede the text's
    if padding.batches < BATCHES and cu_seqlens == [None, None]:
        slots = batch * seqlen
        padding.add(model, slots, slots if documents.indices is None else documents.indices.numel())
