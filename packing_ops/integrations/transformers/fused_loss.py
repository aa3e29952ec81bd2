"""The loss of a causal language model: its labels, its hidden states in place of logits, a mixture of experts' balance
loss.

In training with labels, lm_head returns the hidden states, the loss function gets them in place of the logits and calls
chunked_cross_entropy, and the output has None for logits. Otherwise the model runs its stock code.
"""

import functools
import importlib
import inspect
import re
import warnings

import torch

from packing_ops._runtime.arguments import int32_cu_seqlens
from packing_ops._runtime.batch_cache import cu_seqlens_of_rows
from packing_ops.boundaries import mask_boundary_labels
from packing_ops.integrations._patching import (
    Patch,
    WeakPartial,
    calls,
    function_of,
    is_of,
    kept_with_class,
    put,
    put_around,
)
from packing_ops.integrations._router_replay import replay_routing as replay_routing
from packing_ops.integrations._walks import constant_of_model
from packing_ops.integrations.transformers import sequence_group
from packing_ops.integrations.transformers.call import BALANCE, SHIFT, current, now
from packing_ops.integrations.transformers.documents import first_tokens, is_tensor
from packing_ops.integrations.transformers.versions import (
    ARGUMENTS,
    SHIFTED,
    ForCausalLMLoss,
    PreTrainedModel,
    class_name,
    code_has,
    log_once,
    models_in,
    source_of,
)
from packing_ops.losses.logps import chunked_cross_entropy
from packing_ops.router import load_balancing_loss
from packing_ops.segments import segment_sum, slots_with_tokens

_STATE = "_packing_ops_fused_loss"  # in a fused model and in its lm_head: whether its logits were capped
# In the code of a forward: the lines between head and loss, and those of a cap like Gemma's, which run if its config
# has one.
_BETWEEN = r"loss = None|if labels is not None:"
_CAP = r"self\.config\.final_logit_softcapping"
_CAP_LINES = (
    rf"if {_CAP} is not None:|logits = logits / {_CAP}|logits = torch\.tanh\(logits\)|logits = logits \* {_CAP}"
)
_GIVEN = re.compile(r"\s*(logits=)?logits,\s*(labels=)?labels,(?!.*shift_labels)", re.DOTALL)
_RETURNED = re.compile(r"\blogits=logits\b|\(logits,\)|#.*")


class Running:
    """One forward of a fused model, in one thread. hidden: what lm_head got; logits: what it returned for them."""

    def __init__(self, model):
        self.model, self.head, self.hidden, self.logits, self.targets = model, model.lm_head, None, None, None


def is_fused(model) -> bool:
    return _STATE in model.__dict__


def refusal(model: PreTrainedModel) -> str | None:
    """Return why this model's loss cannot be computed from its hidden states; None if it can."""
    if is_fused(model) and not since(model):
        return None
    head = getattr(model, "lm_head", None)
    if type(head) is not torch.nn.Linear or _in_front(head):
        return "its lm_head is no plain torch.nn.Linear"
    if head._forward_hooks or head._forward_pre_hooks:
        return "its lm_head has hooks, which would see hidden states"
    if front := _in_front(model):
        return (
            "TRL's fused LM head is in front, which computes the loss from hidden states itself"
            if _is_of_trl(front)
            else "its forward is wrapped already"
        )
    if getattr(_stock_loss(model), "__name__", None) != "ForCausalLMLoss":
        return "its loss_function is not transformers' ForCausalLMLoss"
    if not _logits_feed_only_the_loss(type(model), _is_capped(model)):
        return "its forward changes the logits before the loss, or reads them for more"
    return None


def why_not(models: list[PreTrainedModel]) -> str | None:
    """Return why the loss of some of these models cannot be swapped; None if all can."""
    if not models:
        return "there is no transformers model in it"
    reasons = {type(model).__name__: reason for model in models if (reason := refusal(model))}
    if len(models) == 1:
        return next(iter(reasons.values()), None)
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or None


def since(model: PreTrainedModel, runs: bool = False) -> str | None:
    """Return what has changed in a fused model since, so that its loss is the stock one again; None if nothing has.

    runs: our forward runs, so it is there.
    """
    if not (runs or calls(vars(model).get("forward"), _forward, {})):
        return "its forward was set after apply_packing_ops(model, fused_loss=True), and does not call ours"
    if _STATE not in model.lm_head.__dict__:
        return "its lm_head was swapped after apply_packing_ops(model, fused_loss=True)"
    if _is_capped(model) != model.__dict__[_STATE]:
        return "its final_logit_softcapping was set after apply_packing_ops(model, fused_loss=True)"
    return None


def apply_to_model(model: PreTrainedModel) -> None:
    """Fuse the loss of a model. Expects refusal(model) to be None. A second call changes nothing."""
    if is_fused(model) and not since(model):
        return
    put(model, "_loss_function", _loss, _stock_loss(model))
    model.__dict__[_STATE] = model.lm_head.__dict__[_STATE] = _is_capped(model)
    put_around(model.lm_head, "forward", _head)
    put(model, "forward", _forward)
    functools.wraps(type(model).forward)(model.forward)  # Trainer reads the parameters of forward


def _is_capped(model) -> bool:
    return getattr(model.config, "final_logit_softcapping", None) is not None


def _stock_loss(model):
    return model.loss_function.args[0] if is_fused(model) else model.loss_function


@kept_with_class
def _logits_feed_only_the_loss(cls, is_capped) -> bool:
    """Return whether in its forward the logits go to the loss unchanged, and after it only to the output.

    By its source, not by a trial: a forward has branches for masks, images, caches and flags of its config, and a trial
    would see only those that it takes. Logits that change in another branch would give another loss without an error.
    """
    source = source_of(cls.forward)
    if source.count("self.lm_head(") != 1 or source.count("self.loss_function(") != 1:
        return False
    between = _BETWEEN if is_capped else f"{_BETWEEN}|{_CAP_LINES}"
    found = re.search(
        rf" logits = self\.lm_head\({ARGUMENTS}\)(?:\.float\(\)|\.contiguous\(\))? *\n"  # the loss does both itself
        rf"(?: *\n| *(?:{between}) *\n)* *(?:loss = )?self\.loss_function\({ARGUMENTS}\)",
        source,
    )
    is_given = found is not None and _GIVEN.match(found[2]) is not None
    return is_given and "logits" not in re.findall(r"\w+", _RETURNED.sub("", source[found.end() :]))


def _in_front(module):
    """Return the function that another library put in place of the module's forward, or None."""
    function = function_of(module.__dict__["forward"]) if "forward" in module.__dict__ else None
    return None if is_of(function, __package__) else function or module.__dict__.get("forward")


def _is_of_trl(forward) -> bool:
    return "fused_lm_head" in getattr(getattr(forward, "__code__", None), "co_varnames", ())


def runs_in(model) -> str:
    """Return where the loss of a fused model runs, which others may have put a forward in front of."""
    front = _in_front(model)
    if _is_of_trl(front):
        return "TRL's, whose fused LM head is in front: it computes the loss from hidden states itself"
    where = getattr(front, "__globals__", {}).get("__name__", "another library")
    behind = (
        "" if front is None or where.startswith("packing_ops.") else f", in calls that {where} in front of it passes on"
    )
    return f"packing_ops, from hidden states, in training with labels{behind}"


def _forward(model, *args, **kwargs):
    stock = type(model).forward
    fused = is_fused(model) and model.training and kwargs.get("labels") is not None
    other_targets = kwargs.get("shift_labels") is not None and sequence_group.of(model) is None
    keeps = kwargs.get("logits_to_keep", 0)
    if not fused or other_targets or not (keeps is None or (isinstance(keeps, int) and keeps == 0)):
        return stock(model, *args, **kwargs)
    if why := since(model, runs=True):
        warnings.warn(f"the loss of {type(model).__name__} is the stock one: {why}", stacklevel=2)
        return stock(model, *args, **kwargs)
    running = Running(model)
    outer, now.fused = now.fused, running
    try:
        output = stock(model, *args, **kwargs)
        if isinstance(output, tuple):
            return tuple(each for each in output if each is not running.logits)
        output.logits = None  # they were the hidden states
        return output
    finally:
        now.fused = outer


def _head(head, before, hidden):
    running = now.fused
    if running is None or running.head is not head:
        return type(head).forward(head, hidden) if before is None else before(hidden)
    if running.targets is None:
        running.hidden = hidden
        return hidden
    labels, cu_seqlens, options = running.targets
    hidden = hidden.flatten(0, 1)
    if len(labels) > len(hidden):  # from shift_labels: a label more, which no slot predicts
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, 1))
    return chunked_cross_entropy(hidden, head.weight, labels, cu_seqlens, bias=head.bias, **options)


def _loss(model, stock, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, **kwargs):
    options, running = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}, now.fused
    if running is None or running.model is not model:
        return stock(logits, labels, vocab_size, **options, **kwargs)
    # Labels and documents, as chunked_cross_entropy takes them
    running.logits, labels = logits, labels.to(running.hidden.device)
    cu_seqlens, targets = kwargs.get("cu_seq_lens_q"), kwargs.get("shift_labels")
    if targets is not None:
        # Slot t predicts label t: one place to the right, in one document, it is the label of slot t + 1.
        labels = torch.nn.functional.pad(targets.to(labels.device).flatten(), (1, 0), value=ignore_index)
        cu_seqlens = cu_seqlens_of_rows(1, len(labels), labels.device)
    if cu_seqlens is None:  # each row is a document
        cu_seqlens = cu_seqlens_of_rows(*labels.shape, labels.device)
    options["max_targets"] = kwargs.get("num_targets")  # of the collators
    running.targets = labels.flatten(), int32_cu_seqlens(cu_seqlens.to(labels.device)), options
    # By a call of the head, around which FSDP and ZeRO gather its weight
    return running.head(running.hidden)


# --- labels ---


def without_first_labels(model, call, args, kwargs):
    """Return the arguments, labels of documents' first tokens -100: what is before them is another document, or
    padding.
    """
    # Not where shift_labels say what each token is to predict, nor for a loss that shifts nothing.
    labels = call.given("labels", args, kwargs)
    may_have_documents = any(each is not None for each in (call.position_ids, call.cu_seqlens, call.numbers))
    if not may_have_documents or not is_tensor(labels, 2) or kwargs.get("shift_labels") is not None or not call.shifts:
        return args, kwargs
    if model.config.is_encoder_decoder or not _loss_shifts(model):
        return args, kwargs
    (batch, seqlen), padding = labels.shape, call.mask
    if padding is not None and (not is_tensor(padding, 2) or padding.shape != labels.shape):
        return args, kwargs
    position_ids = call.row_positions(batch, seqlen)
    if position_ids is not None and (position_ids.shape[1] != seqlen or position_ids.shape[0] not in (1, batch)):
        return args, kwargs
    if call.cu_seqlens is None:  # without documents, whose number the host would wait for
        starts = first_tokens(padding, position_ids, batch, seqlen, labels.device)
        if padding is not None:
            starts[:, 1:] |= (padding[:, :-1] == 0).to(labels.device)
        return call.put("labels", labels.masked_fill(starts, -100), args, kwargs)
    documents = call.documents_of_tokens(labels, position_ids)
    masked = mask_boundary_labels(labels.flatten(), documents.cu_seqlens)
    return call.put("labels", masked.view_as(labels), args, kwargs)


@constant_of_model
def _loss_shifts(model) -> bool:
    """Return whether its loss takes the label of the next token. Of a loss_function that somebody set nothing says
    so.
    """
    if code_has(type(model).forward, SHIFT):
        return True
    loss = getattr(model, "_loss_function", None)
    if loss is None or isinstance(loss, WeakPartial):  # of fused_loss, which replaces transformers'
        return getattr(model, "loss_type", None) in SHIFTED
    loss = loss.func if isinstance(loss, functools.partial) else loss
    if inspect.unwrap(loss) is ForCausalLMLoss:
        return True
    log_once(f"loss_function of {class_name(model)} is not transformers', and gets labels as they are")
    return False


# --- the balance loss of a mixture of experts ---

_BALANCE = "load_balancing_loss_func"
_OF_TRL = "transformers.models.mixtral.modeling_mixtral"  # whose function TRL's fused_lm_head calls for every family
_BALANCED_BY = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@functools.cache
def _balance_patch(module_name) -> Patch:
    return Patch(importlib.import_module(module_name), _BALANCE, _of_documents)


class Balance:
    """Kept in a model, for as long as its modelling module has our function. Copies and pickles make a new one."""

    def __init__(self, module_name, by_document):
        self.module_name, self.by_document = module_name, by_document
        for name in {module_name, _OF_TRL}:
            _balance_patch(name).apply(self)

    def __reduce__(self):
        return type(self), (self.module_name, self.by_document)


def _balanced(model) -> dict[PreTrainedModel, str]:
    """Return {model: the module that its forward takes transformers' balance loss from}, of the models in it that
    do.
    """
    found = {}
    for each in models_in(model):
        forward = inspect.unwrap(type(each).forward)
        function = forward.__globals__.get(_BALANCE) if code_has(forward, _BALANCE) else None
        takes = None if function is None else [*inspect.signature(function).parameters]
        if takes == _BALANCED_BY and not each.config.is_encoder_decoder:
            found[each] = forward.__module__
    return found


def why_not_balanced(model, kind, attention) -> str | None:
    if kind not in ("batch", "document"):
        raise ValueError(f"balance_loss: expected 'batch', 'document' or False, got {kind!r}")
    if not attention:
        return "documents are found with attention=True"
    return None if _balanced(model) else f"no {_BALANCE} of a causal model of transformers is in it"


def balance(model, kind) -> None:
    for each, module_name in _balanced(model).items():
        each.__dict__[BALANCE] = Balance(module_name, kind == "document")


def _of_documents(stock):
    @functools.wraps(stock)
    def load_balancing_loss_func(gate_logits, num_experts=None, top_k=2, attention_mask=None):
        """Compute transformers' loss for every model but those with balance_loss."""
        call = current()
        if call is None or call.balance is None or not isinstance(gate_logits, tuple):
            return stock(gate_logits, num_experts, top_k, attention_mask)
        # Documents of as many rows as the routers had, as attention has found them; a vision tower's precede the text's
        device, rows = gate_logits[0].device, gate_logits[0].shape[0]
        answers = (found for (batch, seqlen), _, found in reversed(call.answers) if batch * seqlen == rows)
        documents = next(answers, None)
        as_stock = call.has_cache or (call.by_masks and not call.balance.by_document)
        if documents is None and as_stock:  # a step of generate, or rows of other attention
            return stock(gate_logits, num_experts, top_k, attention_mask)
        if documents is None:
            raise ValueError(
                f"balance_loss: expected an attention over the {rows} rows of the router of {call.name}, got none (a "
                "prefix tree, rows on several ranks, or another attention)"
            )
        # Which slots hold tokens: those of padding are in no sum
        documents = documents.on(device)
        probabilities = [layer.to(device).softmax(-1) for layer in gate_logits]
        if documents.indices is None:
            counts = slots_with_tokens(call.num_tokens, documents.cu_seqlens, rows).long()
        else:
            counts = (documents.indices >= 0).long()
            probabilities = [layer[documents.indices.clamp(min=0)] for layer in probabilities]
        losses = load_balancing_loss(
            probabilities, documents.cu_seqlens, top_k=top_k, copies=counts, by_document=call.balance.by_document
        )
        if not call.balance.by_document:
            return losses
        return losses.sum() / (segment_sum(counts.float(), documents.cu_seqlens) > 0).sum().clamp(min=1)

    return load_balancing_loss_func
