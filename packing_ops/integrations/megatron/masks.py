"""What a layer hides from its queries: attn_mask_type, window_size, and the attention_mask of an sbhd batch."""

import functools

import torch
from megatron.core.transformer import utils

from packing_ops import unpad_input
from packing_ops._runtime.batch_cache import kept_with
from packing_ops.integrations.megatron.varlen_call import field_of

# TransformerEngine's names; in thd its two padding types mean documents, in sbhd a mask of padding.
_IS_CAUSAL = {"causal": True, "padding_causal": True, "causal_bottom_right": True, "no_mask": False, "padding": False}


def window_of(config, layer_number: int) -> tuple[int, int] | None:
    """Return the window of this layer; None without one."""
    window = field_of(config, "window_size")
    is_windowed = getattr(utils, "is_layer_window_attention", None)  # since 0.15
    if is_windowed is not None and not is_windowed(window, config.window_attn_skip_freq, layer_number):
        return None
    return window and tuple(window)


@functools.lru_cache
def causal_and_window(mask_type: str, window_size: tuple[int, int] | None) -> tuple[bool, tuple[int, int]]:
    """Return ``causal`` and ``window_size`` of varlen_attention."""
    if mask_type not in _IS_CAUSAL:
        raise NotImplementedError(f"attn_mask_type: expected one of {', '.join(_IS_CAUSAL)}, got {mask_type}")
    causal = _IS_CAUSAL[mask_type]
    if not window_size:
        return causal, (-1, -1)
    left, right = window_size
    if right == 0:
        return True, (left, 0)
    if causal and right > 0:
        raise ValueError(f"window_size: expected no keys to the right under {mask_type}, got {window_size}")
    return causal, (left, 0 if causal else right)


def tokens_of(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor, mask_type: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return which slots of an sbhd batch hold tokens; None if all do. Looked at once per mask: a synchronisation.

    Layers that are recomputed in backward are given a separate mask, so each looks again.

    Args:
        mask: True for hidden, ``[1 or batch, 1, seqlen, seqlen]``: what mask_type hides and, besides, keys that are
            padding; of the padding types also ``[batch, 1, 1, seqlen]``, only the padding. It may be anywhere.
        query, key: ``[seqlen, batch, num_heads, head_dim]``; padding needs as many keys as queries.

    Returns:
        indices int64 ``[tokens]`` into ``[batch * seqlen]``, and cu_seqlens of the columns' tokens.

    Raises:
        NotImplementedError: another mask.
    """
    seqlen, batch = query.shape[:2]
    keys = key.shape[0]

    def make():
        hidden, causal = mask.bool(), _IS_CAUSAL[mask_type]
        expected = hidden.new_ones(seqlen, keys).triu(1) if causal else hidden.new_zeros(())
        is_whole = hidden.shape[-2:] == (seqlen, keys)
        if (is_whole or not causal) and (hidden == expected).all():
            return None
        if hidden.shape[-2] == 1 and mask_type in ("padding", "padding_causal"):
            padding, agrees = hidden, True
        else:
            padding = hidden.all(-2, keepdim=True)
            # Which keys a query of padding attends to does not matter.
            agrees = is_whole and bool(((hidden == (expected | padding)) | padding.mT).all())
        if not agrees or seqlen != keys or padding.shape not in {(1, 1, 1, seqlen), (batch, 1, 1, seqlen)}:
            kind = "causal mask" if causal else "mask that hides nothing"
            raise NotImplementedError(
                f"attention_mask: expected None or a {kind}, with padding or without, got another; pack "
                "documents as thd"
            )
        real = ~padding[:, 0, 0].expand(batch, seqlen)
        _, indices, cu_seqlens, _, _ = unpad_input(real, real)
        return None if real.all() else (indices, cu_seqlens)

    return kept_with((mask,), ("tokens", mask_type, seqlen, batch, keys), make)
