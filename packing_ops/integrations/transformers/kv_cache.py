"""Refuses a call with a KV cache that holds several documents in a row: its queries would attend to all of them."""

import torch

from packing_ops.integrations.transformers.document_checks import can_read, refuse_where, several_in
from packing_ops.integrations.transformers.imports import CACHE

# Attributes of the cache. SEVERAL: a bool tensor, whether a row has several documents. READ: that tensor, once it was
# read and is False. ONE: that tensor, once a mask beside it was found to number one document.
_SEVERAL, _READ, _ONE = "_packing_ops_several", "_packing_ops_read", "_packing_ops_one"
_REFUSAL = (
    f"{CACHE}: expected a cache of one document in each row to go on with, got one that was filled with several, "
    "which would all be seen; fill a cache for each document, or number the cached tokens' documents and these in "
    "attention_mask"
)


def check_cache(cache, call, position_ids, padding, numbers, batch, length):
    """Called where a mask is made, before the keys of this call are in the cache.

    Raises:
        ValueError: the cache holds several documents. The first call with a filled cache waits for the GPU, later
            ones do not.
    """
    if call is not None:
        if call.cache is cache:  # masks of several kinds in one forward
            return
        call.cache = cache
    several, cached = getattr(cache, _SEVERAL, None), cache.get_seq_length()
    if isinstance(cached, torch.Tensor) or cached > 0:
        if length == 1 and numbers is not None and can_read(numbers):
            _refuse_numbers(cache, several, numbers)
        if several is not None:
            _refuse(cache, several, cached, numbers)
    if length > 1:
        if padding is not None and padding.dim() == 2:  # of the keys; these are the last ones
            padding = padding[:, -length:]
        cu_seqlens = None if call is None else call.cu_seqlens
        setattr(cache, _SEVERAL, several_in(position_ids, padding, cu_seqlens, numbers, batch))


def _refuse_numbers(cache, several, numbers):
    """generate gives every step a mask of integers, and 1 to each new token. On CUDA the first step alone waits for it."""
    if numbers.is_cuda and getattr(cache, _ONE, False) is several:
        return
    if bool((numbers > 1).any()):
        raise ValueError("attention_mask: expected 0 and 1 beside a KV cache, got the numbers of several documents")
    setattr(cache, _ONE, several)


def _refuse(cache, several, cached, numbers):
    compiled = torch.compiler.is_compiling()
    if not compiled and getattr(cache, _READ, None) is several:
        return
    if can_read(several) and not bool(several):
        setattr(cache, _READ, several)
        return
    wrong = several
    if isinstance(cached, torch.Tensor):  # of a cache of fixed length, which may have been reset
        wrong = wrong & (cached > 0).to(wrong.device)
    if numbers is not None:  # of all tokens: masks are made by them
        wrong = wrong & ~(numbers > 1).any().to(wrong.device)
    refuse_where(wrong, _REFUSAL)
    if not compiled and numbers is None:
        setattr(cache, _READ, several)
