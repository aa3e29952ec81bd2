"""Hooks that give a patched model position_ids where its call has cu_seq_lens_q alone."""

from packing_ops.boundaries import position_ids_from_cu_seqlens
from packing_ops.integrations.transformers.model_call import NAMES


def give_position_ids(owner, args, kwargs):
    """Without them the model would count positions along the row, and scale long-context RoPE by the row's length."""
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    if cu_seqlens is None or len(args) > 2 or kwargs.get("position_ids") is not None:
        return None
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None or tokens.shape[0] != 1:
        return None
    return args, {**kwargs, "position_ids": position_ids_from_cu_seqlens(cu_seqlens, tokens.shape[1])[None]}


def give_axes(owner, args, kwargs):
    """Text alone: its positions for all axes, and in front of them, where the mask of a multimodal model reads them."""
    if owner.config._attn_implementation not in NAMES:
        return None  # under another implementation Qwen2-VL lets such documents see each other
    args, kwargs = give_position_ids(owner, args, kwargs) or (args, kwargs)
    position_ids = kwargs.get("position_ids")
    if position_ids is None or position_ids.dim() != 2:
        return None
    return args, {**kwargs, "position_ids": position_ids[None].expand(4, -1, -1)}
