"""transformers' continuous batching (generate_batch): attention over its paged cache, and patches of what it asks
for.
"""

import functools
import importlib

import torch

from packing_ops._runtime.batch_cache import kept_with
from packing_ops.integrations._log_probs import log_sums_of
from packing_ops.integrations._patching import Patch
from packing_ops.integrations.transformers.call import NAMES, call_of_layers
from packing_ops.keys import KeyPages

# --- keys in its cache ---


def with_keys(module, heads, cu_seqlens, reason, given):
    """Return heads, cu_seqlens and Keys of several requests' new tokens and of what the paged cache holds of each
    before them: prefill, chunks and decoding alike.

    given: what generate_batch gives the layers.
    """
    if reason:
        raise NotImplementedError(
            f"cache: expected a call that varlen attention serves beside a paged one, got {reason}"
        )
    if (call := call_of_layers()) is not None:
        call.mark_consumed_by("cache", cu_seqlens[0])
    query, key, value = heads
    of_layer = {**given, "cu_seq_lens_k": cu_seqlens[1]}
    # The cache writes the new keys and adds what this layer's attention needs. From 5.24 on the layer has called it.
    if "cache" in given:
        key, value = given["cache"].update(key, value, module.layer_idx, of_layer)
    of_keys, table = of_layer["cu_seq_lens_k"], of_layer.get("block_table")
    if table is None:
        return (query, key, value), cu_seqlens[0], of_keys
    # One new token of each request, and keys that stay in their pages. The new ones are not written yet: the rows for
    # them are found once for all layers.
    caches, page_size = (of_layer["k_cache"], of_layer["v_cache"]), of_layer["k_cache"].shape[1]
    of_all_layers = table if table._base is None else table._base
    pages, rows = kept_with(
        (of_keys, of_all_layers),
        ("pages", page_size),
        lambda: pages_of_requests(table, of_keys, page_size),
        forward=call,
    )
    for cache, new in zip(caches, (key, value), strict=True):
        cache.flatten(0, 1).index_copy_(0, rows, new[0].transpose(0, 1))
    return (query, *caches), cu_seqlens[0], pages


def pages_of_requests(block_table, cu_seqlens_k, page_size):
    """Return the pages of requests, and the row of each one's last key. Of sequences that pad a step: a row of page
    0, which no request has.
    """
    used = cu_seqlens_k.diff().int()
    last = (used - 1).clamp(min=0).long()
    page = block_table.gather(1, (last // page_size)[:, None])[:, 0].clamp(min=0)
    return KeyPages(block_table, used), page * page_size + last % page_size


# --- patches of it, for models with our attention ---

_BATCHING = "transformers.generation.continuous_batching"


def _taken_for_flash(stock):
    """Wrap transformers' test for flash: it takes attention for one that follows cu_seqlens by "flash" in the name.
    All others get dense masks, and no CUDA graphs unless they are asked for.
    """

    @functools.wraps(stock)
    def requested(config=None, requested_attention_implementation=None, version=None):
        name = requested_attention_implementation if config is None else config._attn_implementation
        return (name in NAMES and version is None) or stock(config, requested_attention_implementation, version)

    return requested


def _with_pages(stock):
    """Let steps of only decoding read keys from their pages, if these hold whole tiles of keys. Stock asks for a
    kernel of flash-attn. Caches of sliding windows have no block table.
    """

    @functools.wraps(stock)
    def ensure(config, cb_config, user_requested):
        cache = importlib.import_module(f"{_BATCHING}.cache")
        kinds = [cache.ATTN_TYPE_TO_ALLOCATOR[kind] for kind in cache.group_layers_by_attn_type(config)]
        served = cb_config.page_size % 128 == 0 and all(kind.supports_block_table for kind in kinds)
        if config._attn_implementation not in NAMES or not served:
            stock(config, cb_config, user_requested)

    return ensure


def _with_our_logps(stock):
    """Compute log-probabilities of sampled tokens by the sums of token_logps, in place of the log of a softmax:
    within invariant() they have the bits of a trainer's.
    """

    @functools.wraps(stock)
    def sample(self, scores, output_ids):
        stock(self, scores, output_ids)
        if not self.return_logprobs or self.cache.config._attn_implementation not in NAMES:
            return
        logits, tokens = scores[0], output_ids[0, : scores.shape[1]]
        # Without processors the head's logits were of the model's dtype.
        sums = log_sums_of(logits, logits.dtype if self.logit_processor.do_processing else self.cache.dtype)
        chosen = logits.gather(-1, tokens.long()[:, None])[:, 0].to(sums.dtype)
        output_ids[1, : scores.shape[1]].copy_((chosen - sums).float().view(torch.int32))

    return sample


def _patches() -> list[Patch]:
    """Return the patches; empty if this transformers batches in another way (before 5.23)."""
    try:
        cache, api, initialization, runner = (
            importlib.import_module(f"{_BATCHING}.{name}")
            for name in ("cache", "continuous_api", "initialization", "model_runner")
        )
        patches = [
            *(
                Patch(module, "is_flash_attention_requested", _taken_for_flash)
                for module in (cache, api, initialization)
            ),
            Patch(initialization, "ensure_decode_fast_path_is_available", _with_pages),
            Patch(runner.ModelRunner, "_sample", _with_our_logps),
        ]
        config = importlib.import_module("transformers.generation.configuration_utils").ContinuousBatchingConfig
    except (ImportError, AttributeError):
        return []
    served = hasattr(config, "page_size") and all(hasattr(patch.owner, patch.name) for patch in patches)
    return patches if served else []


PATCHES = _patches()
