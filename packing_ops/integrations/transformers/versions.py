"""What the integration uses of transformers, imported once: torch.compile traces no import inside a forward."""

import ctypes
import functools
import importlib
import inspect
import re
import sys

import torch
import torch.nn.functional as F

import packing_ops
from packing_ops import _ops
from packing_ops._arguments import is_new, sum_dtype, warned
from packing_ops.integrations._patching import Patch
from packing_ops.masks import visible_mask

OLDEST, NEWEST = "4.57", "5.24"  # that the tests have run with


def refusal(version: str | None) -> str:
    """What to say of a transformers that is not served, with its version and ours."""
    here = f"transformers {version} is here" if version else "there is none"
    ours = f"packing_ops {packing_ops.__version__} serves {OLDEST} and later (tested to {NEWEST})"
    return f"transformers: {ours}, {here}: pip install 'transformers>=4.57'"


def check(version: str) -> None:
    if _numbers(version) < _numbers(OLDEST):
        raise ImportError(refusal(version))


def _numbers(version) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


try:
    import transformers
    import transformers.masking_utils as masking_utils
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    from transformers.utils import logging
except ImportError as error:
    raise ImportError(refusal(getattr(sys.modules.get("transformers"), "__version__", None))) from error
version = transformers.__version__
check(version)

# The keyword of models for their KV cache, renamed in 5.24. Before, "cache" was the paged one of continuous batching alone.
CACHE = "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"

# Values of a model's loss_type for which its loss_function takes the label of the next token; None is its default.
SHIFTED = frozenset((None, *(name for name, loss in LOSS_MAPPING.items() if loss is ForCausalLMLoss)))

# What other modules take from here of transformers' own.
__all__ = ["AttentionInterface", "AttentionMaskInterface", "PreTrainedModel", "masking_utils"]


def not_causal(model) -> str | None:
    """Why a model would run without its causal mask under every attn_implementation but its eager one."""
    if version.startswith("4.") and model.config.model_type == "decision_transformer":
        return f"the attention of {type(model).__name__} in transformers {version} is causal in its eager form alone"
    return None


# --- constants of a graph ---


def constant(function):
    """functools.cache, which torch.compile would look through: to it the result is a constant."""
    cached = functools.cache(function)

    @torch.compiler.assume_constant_result
    def of_graph(*args):
        return cached(*args)

    return of_graph


def constant_of_model(function):
    """function(model, *args), not traced: in a graph its result is a constant.

    torch.compile before 2.13 takes no module for a constant, but its id.
    """

    @torch.compiler.assume_constant_result
    def of_graph(model_id, *args):
        return function(ctypes.cast(model_id, ctypes.py_object).value, *args)

    untraced = torch.compiler.disable(function)  # also where Dynamo left a frame to Python, behind a break of the graph

    def of_model(model, *args):
        return of_graph(id(model), *args) if torch.compiler.is_compiling() else untraced(model, *args)

    return of_model


# --- of a module ---


def unwrapped(cls: type) -> type:
    """A module's class, without the one that FSDP2 puts in front."""
    return next(base for base in cls.__mro__ if not base.__module__.startswith("torch.distributed."))


def class_name(module) -> str:
    return unwrapped(type(module)).__name__


def models_in(hosts) -> list[PreTrainedModel]:
    """These models and the models inside of them."""
    return [module for host in hosts for module in host.modules() if isinstance(module, PreTrainedModel)]


@functools.cache
def reads_text(cls: type) -> bool:
    return not {"input_ids", "inputs_embeds"}.isdisjoint(inspect.signature(cls.forward).parameters)


def source_of(function) -> str:
    """Its code, empty where there is none."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


# --- warnings by the logger of transformers, once each ---

_BY_SDPA = "; this call runs by SDPA instead"


@torch.compiler.assume_constant_result
def log_once(message: str):
    """One warning per message, also while compiling."""
    if is_new(message):
        logging.get_logger(__name__).warning(f"packing_ops attention: {message}.")


def warn_once(reason: str):
    log_once(f"{reason}{_BY_SDPA}")


def sdpa_reasons() -> list[str]:
    """Why calls ran by SDPA in this process, as a line of info."""
    reasons = sorted(message.removesuffix(_BY_SDPA) for message in warned if message.endswith(_BY_SDPA))
    return [f"by SDPA so far: {'; '.join(reasons)}"] if reasons else []


# --- SDPA of transformers, for calls that varlen attention does not serve ---

_SDPA_OPTIONS = inspect.signature(sdpa_attention_forward).parameters  # no position_bias up to transformers 4.57


def mask_of(documents, query, options, pattern=None):
    """bool ``[batch, 1, seqlen, seqlen]``, True where visible. Padding attends to itself: its softmax is finite.

    Windows count slots, as transformers' own masks do. pattern: a MaskPattern may have blocks, and fewer queries than keys.
    """
    length = query.shape[2] if getattr(pattern, "last", None) is None else pattern.length
    ids, queries = documents.document_ids(query.shape[0], length), slice(length - query.shape[2], None)
    slots = torch.arange(length, device=ids.device)
    pairs = ids[:, queries, None], ids[:, None, :], slots[queries, None], slots[None, :]
    blocks = getattr(pattern, "blocks", None)
    if blocks is None:
        visible = visible_mask(*pairs, options.causal, options.window_size)
    else:
        blocks = blocks.to(ids.device)
        together = (blocks[:, queries, None] == blocks[:, None, :]) & (blocks[:, None, :] >= 0)
        visible = visible_mask(*pairs, False, options.window_size) & ((pairs[3] <= pairs[2]) | together)
    return (visible | torch.eq(*pairs[2:]))[:, None]


def by_sdpa(module, query, key, value, mask, options, dropout, given):
    """SDPA as transformers calls it; what it does not have, such as softcap and sinks, by the plain formula.

    given: other keywords of the layer.
    """
    # SDPA where it has every option.
    causal, scaling, softcap, sinks = options.causal, options.softmax_scale, options.softcap, options.sinks
    biased = given.get("position_bias") is not None and "position_bias" not in _SDPA_OPTIONS
    if not softcap and sinks is None and not biased:
        causal = causal and mask is None and query.shape[2] > 1  # up to transformers 4.57 it is torch's option
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal, **given
        )

    # The plain formula: scores, mask, sinks.
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.float()
    if given.get("position_bias") is not None:
        scores = scores + given["position_bias"]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and causal and query.shape[2] > 1:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        low = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, low) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    out = F.dropout(weights, dropout, module.training) @ value
    return out.transpose(1, 2).contiguous(), None


# --- continuous batching ---

# What generate_batch is made to do for models with our attention.

_BATCHING = "transformers.generation.continuous_batching"
_ASKED, _DECODES = "is_flash_attention_requested", "ensure_decode_fast_path_is_available"


def batching_patches(names: set[str]) -> list[Patch]:
    """For attn_implementations of these names. Empty where this transformers batches in another way (before 5.23)."""
    try:
        cache, api, initialization, runner = (
            importlib.import_module(f"{_BATCHING}.{name}")
            for name in ("cache", "continuous_api", "initialization", "model_runner")
        )
        config = importlib.import_module("transformers.generation.configuration_utils").ContinuousBatchingConfig
        wanted = [
            *((module, _ASKED, _taken_for_flash) for module in (cache, api, initialization)),
            (initialization, _DECODES, _with_pages),
            (runner.ModelRunner, "_sample", _with_our_logps),
        ]
    except (ImportError, AttributeError):
        return []
    if not hasattr(config, "page_size") or not all(hasattr(owner, name) for owner, name, _ in wanted):
        return []
    return [Patch(owner, name, functools.partial(make, names)) for owner, name, make in wanted]


def _taken_for_flash(names, stock):
    """It takes attention for one that follows cu_seqlens by "flash" in the name. All others get dense masks, and no CUDA
    graphs unless they are asked for."""

    @functools.wraps(stock)
    def requested(config=None, requested_attention_implementation=None, version=None):
        name = requested_attention_implementation if config is None else config._attn_implementation
        return (name in names and version is None) or stock(config, requested_attention_implementation, version)

    return requested


def _with_pages(names, stock):
    """Steps of decoding alone read keys from their pages, where these hold whole tiles of keys. It asks for a kernel of
    flash-attn. Caches of sliding windows have no block table."""

    @functools.wraps(stock)
    def ensure(config, cb_config, user_requested):
        cache = importlib.import_module(f"{_BATCHING}.cache")
        kinds = [cache.ATTN_TYPE_TO_ALLOCATOR[kind] for kind in cache.group_layers_by_attn_type(config)]
        whole_tiles = cb_config.page_size % 128 == 0
        if (
            config._attn_implementation not in names
            or not whole_tiles
            or not all(k.supports_block_table for k in kinds)
        ):
            stock(config, cb_config, user_requested)

    return ensure


def _log_probs(logits, tokens):
    """float32: log p of a token in each row, by the sums of token_logps."""
    rows, vocab = logits.shape
    logits = F.pad(logits, (0, -vocab % 8))[:, :vocab]  # rows start on 16 bytes, as those of token_logps
    sums = logits.new_zeros(3, rows, dtype=sum_dtype(logits.dtype))
    sums[0] = -float("inf")
    _ops.logps_chunk_(logits, None, tokens, 0, torch.ones_like(sums[0]), 0.0, sums)
    largest, total, chosen = sums
    return (chosen - (largest + total.log())).float()


def _with_our_logps(names, stock):
    """Log-probabilities of sampled tokens by the sums of token_logps, in place of the log of a softmax: within
    invariant() they have the bits of a trainer's."""

    @functools.wraps(stock)
    def sample(self, scores, output_ids):
        stock(self, scores, output_ids)
        if not self.return_logprobs or self.cache.config._attn_implementation not in names:
            return
        tokens, dtype = output_ids[0, : scores.shape[1]], self.cache.dtype
        found = _log_probs(scores[0], tokens)
        if not self.logit_processor.do_processing and dtype != scores.dtype:
            # The head's logits were of the model's dtype, as token_logps sees them, unless rounding to it changes one.
            rounded = scores[0].to(dtype)
            same = (rounded.to(scores.dtype) == scores[0]).all()
            found = torch.where(same, _log_probs(rounded, tokens), found)
        output_ids[1, : scores.shape[1]].copy_(found.view(torch.int32))

    return sample
