"""Calls that varlen_attention does not serve run by transformers' SDPA, with a mask of the same documents."""

import inspect

import torch
import torch.nn.functional as F

from packing_ops.integrations.transformers.versions import PAGED, logging, sdpa_attention_forward
from packing_ops.masks import visible_mask

_SDPA_OPTIONS = inspect.signature(sdpa_attention_forward).parameters  # no position_bias up to transformers 4.57
_warned: set[str] = set()
_BY_SDPA = "; this call runs by SDPA instead"


@torch.compiler.assume_constant_result
def log_once(message: str):
    """One warning per message, also while compiling."""
    if message not in _warned:
        _warned.add(message)
        logging.get_logger(__name__).warning(f"packing_ops attention: {message}.")


def warn_once(reason: str):
    log_once(f"{reason}{_BY_SDPA}")


def sdpa_reasons() -> list[str]:
    """Why calls ran by SDPA in this process, as a line of info."""
    reasons = sorted(message.removesuffix(_BY_SDPA) for message in _warned if message.endswith(_BY_SDPA))
    return [f"by SDPA so far: {'; '.join(reasons)}"] if reasons else []


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


def attend(module, query, key, value, mask, options, dropout, given):
    """SDPA as transformers calls it; what it does not have, such as softcap and sinks, by the plain formula.

    given: other keywords of the layer.
    """
    causal, scaling, softcap, sinks = options.causal, options.softmax_scale, options.softcap, options.sinks
    biased = given.get("position_bias") is not None and "position_bias" not in _SDPA_OPTIONS
    if not softcap and sinks is None and not biased:
        causal = causal and mask is None and query.shape[2] > 1  # up to transformers 4.57 it is torch's option
        return sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=causal, **given
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.float()
    if given.get(PAGED) is not None:
        raise NotImplementedError("cache: expected None beside softcap or sinks, got a paged one")
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
