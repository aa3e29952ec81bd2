"""The loss of a causal language model from its hidden states: its logits are never there at once.

In training with labels the head hands the hidden states on, the loss function gets them in place of the logits and
calls chunked_cross_entropy, and the output has no logits (None). Else the model is the stock one.
"""

import functools
import inspect
import re

import torch

from packing_ops._args import int32_cu_seqlens
from packing_ops.integrations.transformers._host import PreTrainedModel
from packing_ops.logps import chunked_cross_entropy

_STATE = "_packing_ops_fused_loss"
_HEAD = "self.lm_head("
_LOSS = "self.loss_function("
_BETWEEN = re.compile(r"\s*(loss = None|if labels is not None:|)\s*")
_CAP = "self.config.final_logit_softcapping"  # Gemma's; None is none
_CAPPED = re.compile(
    rf"\s*(if {_CAP} is not None:|logits = logits / {_CAP}|logits = torch.tanh\(logits\)|logits = logits \* {_CAP})\s*"
)


class FusedLoss:
    """Of one model: whether its head hands hidden states on right now, and which; whether it had a loss of its own."""

    def __init__(self, had_own_loss):
        self.active, self.hidden, self.had_own_loss = False, None, had_own_loss


def is_fused(model) -> bool:
    return _STATE in model.__dict__


def refusal(model: PreTrainedModel) -> str | None:
    """Why this model's loss cannot be made from its hidden states; None where it can."""
    if is_fused(model):
        return None
    head = getattr(model, "lm_head", None)
    if type(head) is not torch.nn.Linear or "forward" in head.__dict__:
        return "its lm_head is no plain torch.nn.Linear (fused_loss=False swaps the rest)"
    if "forward" in model.__dict__:
        return "its forward is wrapped already (fused_loss=False swaps the rest)"
    if getattr(model.loss_function, "__name__", None) != "ForCausalLMLoss":
        return "its loss_function is not transformers' ForCausalLMLoss (fused_loss=False swaps the rest)"
    if not _goes_straight(type(model), getattr(model.config, "final_logit_softcapping", None) is not None):
        return "its forward changes the logits before the loss (fused_loss=False swaps the rest)"
    return None


def apply_to_model(model: PreTrainedModel) -> None:
    """For a model that refusal(model) says nothing against. Twice is once. Outputs in training have logits None."""
    if is_fused(model):
        return
    state = model.__dict__[_STATE] = FusedLoss("_loss_function" in model.__dict__)
    # Partials, not closures: they can be pickled, and copies of the model get their own.
    model.loss_function = functools.partial(_loss, state, model.lm_head, model.loss_function)
    model.lm_head.forward = functools.partial(_head, state, model.lm_head)
    model.forward = functools.wraps(type(model).forward)(functools.partial(_forward, model))


def revert_model(model: PreTrainedModel) -> None:
    state = model.__dict__.pop(_STATE, None)
    if state is None:
        return
    stock = model.loss_function.args[2]
    if state.had_own_loss:
        model.loss_function = stock
    else:
        del model._loss_function
    del model.lm_head.forward
    if _is_ours(model.__dict__.get("forward")):  # another wrapper finds the state gone, and runs the stock forward
        del model.forward


@functools.cache
def _goes_straight(cls, capped) -> bool:
    """Nothing is done between the head and the loss in its forward."""
    try:
        lines = inspect.getsource(cls.forward).splitlines()
    except (OSError, TypeError):
        return False
    heads = [i for i, line in enumerate(lines) if _HEAD in line]
    losses = [i for i, line in enumerate(lines) if _LOSS in line]
    if len(heads) != 1 or len(losses) != 1 or not lines[heads[0]].strip().startswith(f"logits = {_HEAD}"):
        return False
    between = lines[heads[0] + 1 : losses[0]]
    if not capped:
        between = [line for line in between if not _CAPPED.fullmatch(line)]
    return lines[heads[0]].rstrip().endswith(")") and all(map(_BETWEEN.fullmatch, between))


def _is_ours(forward) -> bool:
    return getattr(forward, "func", None) is _forward


def _forward(model, *args, **kwargs):
    state, stock = model.__dict__.get(_STATE), type(model).forward
    fused = state is not None and model.training and kwargs.get("labels") is not None
    if not fused or kwargs.get("shift_labels") is not None or not _whole(kwargs.get("logits_to_keep")):
        return stock(model, *args, **kwargs)
    state.active = True
    try:
        output = stock(model, *args, **kwargs)
        if isinstance(output, tuple):
            return tuple(each for each in output if each is not state.hidden)
        output.logits = None  # hidden states
        return output
    finally:
        state.active, state.hidden = False, None


def _whole(logits_to_keep) -> bool:
    return logits_to_keep is None or (isinstance(logits_to_keep, int) and logits_to_keep == 0)


def _head(state, head, hidden):
    if not state.active:
        return type(head).forward(head, hidden)
    state.hidden = hidden
    return hidden


def _loss(state, head, stock, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
    if not state.active:
        return stock(
            logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, **kwargs
        )
    hidden, labels = logits.flatten(0, 1), labels.to(logits.device)
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None:  # each row is a document
        rows, seqlen = labels.shape
        cu_seqlens = torch.arange(rows + 1, dtype=torch.int32, device=labels.device) * seqlen
    return chunked_cross_entropy(
        hidden,
        head.weight,
        labels.flatten(),
        int32_cu_seqlens(cu_seqlens.to(hidden.device)),
        bias=head.bias,
        ignore_index=ignore_index,
        num_items_in_batch=num_items_in_batch,
    )
