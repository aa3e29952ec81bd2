"""What others add to a row in front of a model of ours.

PEFT's virtual tokens belong to a row, and a few of its adapters look at all of it: refused for several documents.
NEFTune's noise goes by the length: of each document.
"""

import functools
import sys

import torch
from transformers.utils import PushToHubMixin

from packing_ops.integrations._patching import Patch
from packing_ops.integrations.transformers.call import GUARD, NAMES, current, numbers_of
from packing_ops.integrations.transformers.documents import is_tensor, one_each, refuse_where, several_in

# --- PEFT: PeftModel makes inputs_embeds, masks and caches of what it is called with, and drops position_ids ---


def patch_of_peft() -> Patch:
    """Return what watches the calls of PeftModel, or the patch that waits until PEFT is imported and makes it."""
    peft = sys.modules.get("peft")
    return _patch(peft.PeftModel) if hasattr(peft, "PeftModel") else WHEN_MADE


def _looked_at(stock):
    def __init_subclass__(cls, **options):
        super(PushToHubMixin, cls).__init_subclass__(**options)
        if (cls.__module__, cls.__name__) == ("peft.peft_model", "PeftModel"):
            _patch(cls).pin()

    return classmethod(__init_subclass__)


WHEN_MADE = Patch(PushToHubMixin, "__init_subclass__", _looked_at)  # a base of PeftModel


@functools.cache
def _patch(cls) -> Patch:
    return Patch(cls, "__call__", _watched)


def _watched(stock):
    def __call__(self, *args, **kwargs):
        if why := _why_one_row(self):
            mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
            numbers = numbers_of(mask, None)
            cu_seqlens = kwargs.get("cu_seq_lens_q", kwargs.get("cu_seq_lens_k"))
            told = {"position_ids": kwargs.get("position_ids"), "cu_seq_lens_q": cu_seqlens, "attention_mask": numbers}
            name = next((name for name, value in told.items() if value is not None), None)
            batch = next((len(t) for t in (*args[:1], kwargs.get("input_ids"), mask) if t is not None), 1)
            several = several_in(told["position_ids"], mask, cu_seqlens, numbers, batch)
            refuse_where(several, one_each(name, why))
        return stock(self, *args, **kwargs)

    return __call__


def _why_one_row(model) -> str:
    """Return why_one_row, if the model inside has our attention; else nothing."""
    base = model.get_base_model()
    ours = getattr(getattr(base, "config", None), "_attn_implementation", None) in NAMES or GUARD in vars(base)
    if not ours or getattr(model.forward, "__self__", model) is not model:  # disable_adapter: the inner model's forward
        return ""
    return why_one_row(model.active_peft_config)


_ALL_TOKENS = {  # by PEFT's type of an adapter
    "LILY": "takes the mean of its experts over all tokens of a batch",
    "SHADOW": "runs a network beside the model, which is not told of documents",
}


def why_one_row(config) -> str:
    """Return what an adapter of PEFT does once for a row, or an empty string."""
    name, kind = type(config).__name__, str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning:
        return f"PEFT's {name} puts virtual tokens in front of the row, for its first document alone"
    if getattr(config, "alora_invocation_tokens", None):
        return f"PEFT's {name} with alora_invocation_tokens looks for these once in a row"
    return f"PEFT's {name} {_ALL_TOKENS[kind]}" if kind in _ALL_TOKENS else ""


# --- NEFTune ---

_NOISE = "neftune_post_forward_hook"  # transformers' hook of the embeddings, and others' copies


def noise_by_document(model, call) -> None:
    """Replace NEFTune's hook of the model's embeddings from now on. Raises ValueError in a graph, where it cannot be
    replaced.
    """
    if call.outer is not None or not model.training:
        return
    try:
        hooks = getattr(model.get_input_embeddings(), "_forward_hooks", {})
    except (AttributeError, NotImplementedError):  # no embeddings
        return
    for key in [key for key, hook in hooks.items() if getattr(hook, "__name__", "") == _NOISE]:
        if not torch.compiler.is_compiling():
            hooks[key] = functools.partial(_noise, hooks[key])
            continue
        batch = next((len(t) for t in (call.position_ids, call.mask) if is_tensor(t, 2)), 1)
        positions = call.position_ids if is_tensor(call.position_ids, 2) else None
        message = (
            "neftune_noise_alpha: expected None in a graph with several documents in a row, or a first call without it"
        )
        refuse_where(call.several(batch, positions), message)


def _noise(stock, module, args, embeddings):
    """Call stock; for packed rows draw the noise that each document has in a row without others: up to alpha /
    sqrt(length * width).
    """
    call = current()
    if not module.training or call is None or not is_tensor(embeddings, 3):
        return stock(module, args, embeddings)
    if call.segment_parents is not None:
        raise ValueError(
            "neftune_noise_alpha: expected None beside segment_parents, whose tokens are in several samples"
        )
    batch, seqlen, width = embeddings.shape
    positions = call.row_positions(batch, seqlen)
    if positions is None and call.cu_seqlens is None and call.numbers is None:
        return stock(module, args, embeddings)
    documents = call.documents_of_tokens(embeddings, positions)
    if documents.several is False:
        return stock(module, args, embeddings)
    ids = documents.document_ids(batch, seqlen).clamp(min=0).long()
    lengths = documents.cu_seqlens.diff().clamp(min=1)[ids]
    largest = (module.neftune_noise_alpha / (lengths * width).sqrt()).to(embeddings.dtype)
    return embeddings + torch.zeros_like(embeddings).uniform_(-1, 1) * largest[..., None]
