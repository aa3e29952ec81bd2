"""``patch_rope``: megatron-core's fused RoPE (``apply_rope_fusion=True``) by apply_rotary_qk, without
TransformerEngine.

megatron-core rotates q, then k, by ``apply_rotary_pos_emb`` with angles ``freqs`` in float32, and under
``fused_single_qkv_rope`` (sbhd) both at once. Tables of cos and sin are worked out once per ``freqs``, positions once
per ``cu_seqlens``: all layers share them. Whole layers that are recomputed in backward are given separate ``freqs``,
and work them out again.
"""

import megatron.core.models.common.embeddings.rope_utils as rope_utils
import megatron.core.transformer.attention as attention
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from packing_ops import apply_rotary_qk
from packing_ops._runtime import gate
from packing_ops._runtime.batch_cache import kept_with
from packing_ops.data.context_parallel import thd_partition_indices
from packing_ops.integrations._patching import Patch
from packing_ops.integrations.megatron.prefix_tree import with_depths


def patch_rope() -> None:
    """Make ``apply_rope_fusion=True`` work in megatron-core, in thd and sbhd; calling it twice is harmless.

    Call it before the TransformerConfig is made, which refuses the flag otherwise. Interleaved and partial rotary,
    documents that restart at position 0, context parallelism, mscale (YaRN) and multimodal angles are served, where
    megatron-core's fused path drops interleaved pairs and mscale in thd. Models without the flag, and multi-latent
    attention, run as before. ``fused_single_qkv_rope`` works too (sbhd): one pass for q and k. Prefix trees need it,
    with the flag or without: rows are rotated by their depths.

    Example:
        >>> from megatron.core.transformer.transformer_config import TransformerConfig
        >>> patch_rope()
        >>> config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, apply_rope_fusion=True)
        >>> revert_rope()

    Raises:
        AttributeError: a megatron-core without a function that is replaced; names it.
    """
    for patch in _PATCHES:
        if patch.name not in _MAY_BE_MISSING:
            getattr(patch.owner, patch.name)
    for patch in _PATCHES:
        patch.apply()


def revert_rope() -> None:
    """Put megatron-core's functions back."""
    for patch in _PATCHES:
        patch.revert()


def fused_apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    transpose_output_memory: bool = False,
    interleaved: bool = False,
    *,
    mscale: float = 1.0,
) -> torch.Tensor:
    """Rotate sbhd heads by the angles of their positions.

    Args:
        t: ``[seqlen, batch, num_heads, head_dim]``.
        freqs: angles float32 ``[at least seqlen, 1 or batch, 1, rotary_dim]``; of this rank's tokens under context
            parallelism. Elements of a head after rotary_dim are copied.
        transpose_output_memory: not looked at, as in megatron-core's.
        interleaved: pairs are elements 2i and 2i + 1.
        mscale: factor of cos and sin.

    Returns:
        As t, computed in float32. Differentiable in t.
    """
    return _rotated(t, None, freqs, interleaved, mscale)[0]


def fused_apply_rotary_pos_emb_thd(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    *,
    interleaved: bool = False,
    mscale: float = 1.0,
) -> torch.Tensor:
    """Rotate thd heads by the angles of their positions in their documents.

    Args:
        t: ``[total / cp_size, num_heads, head_dim]``, this rank's zigzag part of each document.
        cu_seqlens: int32 ``[num_documents + 1]`` of the whole row: the padded ones where documents are padded.
        freqs: angles float32 ``[max_seqlen, 1, 1, rotary_dim]``, by position in the document; or of every token
            of the whole row ``[total, 1, 1, rotary_dim]``, which is taken to be meant when there are as many.
        cp_size, cp_rank: of the context-parallel group.
        interleaved, mscale: as fused_apply_rotary_pos_emb.

    Returns:
        As t, computed in float32. Differentiable in t. Padding after the last document keeps position 0.
        No synchronisation.

    Raises:
        ValueError: cu_seqlens that are no multiples of ``2 * cp_size``; a document longer than ``freqs``. On CUDA both
            are positions outside the tables, which apply_rotary_qk reports at the next call.
    """
    total = t.shape[0] * cp_size

    def make():
        # Tables
        cos, sin = _tables(freqs, mscale)
        if cos.shape[1] != 1:
            raise ValueError(f"freqs: expected [max_seqlen, 1, 1, rotary_dim] for thd, got {list(freqs.shape)}")
        # Their rows for the tokens of the whole row
        slots = torch.arange(total, device=cu_seqlens.device)
        positions = slots
        if freqs.shape[0] != total:
            positions = gate.position_ids_from_cu_seqlens(cu_seqlens, total).masked_fill_(slots >= cu_seqlens[-1], 0)
        # Those of this rank
        if cp_size > 1:
            held = thd_partition_indices(cu_seqlens, cp_size, cp_rank, total=total)
            # The index `total` says that a document did not divide: outside every table, so that the rotation reports
            # it.
            positions = torch.nn.functional.pad(positions, (0, 1), value=2**31 - 1)[held]
        return cos[:, 0], sin[:, 0], positions

    tables = kept_with((cu_seqlens, freqs), ("thd", total, cp_size, cp_rank, mscale), make)
    return apply_rotary_qk(t, None, *tables, interleaved=interleaved, rotary_dim=freqs.shape[-1])[0]


def _with_our_fusion(stock):
    def apply_rotary_pos_emb(t, freqs, config, cu_seqlens=None, mscale=1.0, cp_group=None):
        """Rotate as megatron-core's function of this name does, and call that one if the model does not ask for
        fusion.
        """
        if cu_seqlens is None and t.dim() == 3 and freqs.dim() == 4:  # thd heads of TreeParams, angles of each row
            return apply_rotary_pos_emb(t[:, None], freqs, config, None, mscale, cp_group)[:, 0]
        if not config.apply_rope_fusion or config.multi_latent_attention:
            return stock(t, freqs, config, cu_seqlens, mscale, cp_group)
        interleaved = config.rotary_interleaved
        if cu_seqlens is None:
            return fused_apply_rotary_pos_emb(t, freqs, interleaved=interleaved, mscale=mscale)
        if cp_group is None:
            cp_group = parallel_state.get_context_parallel_group()
        cp = cp_group.size(), cp_group.rank()
        return fused_apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, *cp, interleaved=interleaved, mscale=mscale)

    return apply_rotary_pos_emb


class _Split(list):
    """Sizes of q, k and v in an unsplit projection. The rotation gets them from the layer, and so its config."""

    def __init__(self, sizes, config):
        super().__init__(sizes)
        self.config = config


def _with_config_beside_split(stock):
    def get_query_key_value_tensors(self, *args, **kwargs):
        """Call megatron-core's method; the sizes of an unsplit projection bring the config."""
        result = stock(self, *args, **kwargs)
        if kwargs.get("split_qkv") is not False:
            return result
        mixed_qkv, sizes = result
        return mixed_qkv, _Split(sizes, self.config)

    return get_query_key_value_tensors


def _rotate_mixed(mixed_qkv, q_freqs, k_freqs, split):
    """Return q, k and v of megatron-core's qkv projection, q and k rotated in one pass if their angles are the same.

    mixed_qkv ``[seqlen, batch, groups, (queries of a group + 2) * head_dim]``; ``split`` its parts in the last
    dimension.
    """
    config = getattr(split, "config", None)
    if config is None:
        raise NotImplementedError(
            "fused_single_qkv_rope: expected a projection of megatron-core's SelfAttention, got another one"
        )
    seqlen, batch, groups, _ = mixed_qkv.shape
    q, k, v = mixed_qkv.split(split, -1)
    # Groups go with the batch: q of all groups is one strided tensor then, and no copy is made.
    q, k = (x.flatten(1, 2).unflatten(-1, (-1, split[1])) for x in (q, k))
    interleaved, mscale = config.rotary_interleaved, attention._yarn_get_concentration_factor_from_config(config)
    if q_freqs.shape[1] > 1:
        q_freqs, k_freqs = (freqs.repeat_interleave(groups, 1) for freqs in (q_freqs, k_freqs))
    if q_freqs is k_freqs:
        q, k = _rotated(q, k, q_freqs, interleaved, mscale)
    else:
        q, k = (_rotated(x, None, f, interleaved, mscale)[0] for x, f in ((q, q_freqs), (k, k_freqs)))
    return *(x.reshape(seqlen, batch, -1, split[1]) for x in (q, k)), v


def _without_its_version_check(stock):
    def __post_init__(self):
        """Check a config as megatron-core does; interleaved pairs need no version of TransformerEngine here."""
        served = self.apply_rope_fusion and self.rotary_interleaved and not self.multi_latent_attention
        if served:
            self.rotary_interleaved = False
        try:
            stock(self)
        finally:
            if served:
                self.rotary_interleaved = True

    return __post_init__


def _rotated(q, k, freqs, interleaved, mscale):
    """Return sbhd q and k (or None), rotated by the angles of their positions."""
    seqlen = q.shape[0]
    if freqs.shape[0] < seqlen:
        raise ValueError(f"freqs: expected at least {seqlen} positions for sbhd, got {list(freqs.shape)}")

    def make():
        return [table[:seqlen].transpose(0, 1) for table in _tables(freqs, mscale)]

    cos, sin = kept_with((freqs,), ("sbhd", seqlen, mscale), make)
    q, k = q.transpose(0, 1), None if k is None else k.transpose(0, 1)
    q, k = apply_rotary_qk(q, k, cos, sin, interleaved=interleaved, unsqueeze_dim=2, rotary_dim=freqs.shape[-1])
    return q.transpose(0, 1), None if k is None else k.transpose(0, 1)


def _tables(freqs, mscale):
    """Return cos and sin float32 ``[positions, 1 or batch, rotary_dim]``."""
    if freqs.dim() != 4 or freqs.shape[2] != 1:
        raise ValueError(f"freqs: expected [positions, 1 or batch, 1, rotary_dim], got {list(freqs.shape)}")

    def make():
        angles = freqs.float().squeeze(2)
        return angles.cos().mul_(mscale), angles.sin().mul_(mscale)

    return kept_with((freqs,), ("rope tables", mscale), make)


_PATCHES = [
    Patch(rope_utils, "fused_apply_rotary_pos_emb", lambda _: fused_apply_rotary_pos_emb),
    Patch(rope_utils, "fused_apply_rotary_pos_emb_thd", lambda _: fused_apply_rotary_pos_emb_thd),
    # Modules that imported it hold it by name: megatron-core's modules, and those of models built on it.
    Patch(rope_utils, "apply_rotary_pos_emb", _with_our_fusion, imported_by=""),
    Patch(TransformerConfig, "__post_init__", _without_its_version_check),
    Patch(attention.Attention, "forward", with_depths),
]
_MAY_BE_MISSING = ("apply_fused_qkv_rotary_pos_emb",)  # without TransformerEngine
if hasattr(attention, "HAVE_FUSED_QKV_ROPE"):  # since 0.15
    _PATCHES += [
        Patch(attention, "HAVE_FUSED_QKV_ROPE", lambda _: True),
        Patch(attention, "apply_fused_qkv_rotary_pos_emb", lambda _: _rotate_mixed),
        Patch(attention.SelfAttention, "get_query_key_value_tensors", _with_config_beside_split),
    ]
