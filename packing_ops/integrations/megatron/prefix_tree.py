"""Prefix trees in megatron-core: ``segment_parents`` on PackedSeqParams, which packed_seq_params sets.

megatron-core's RoPE counts positions from the start of each segment. Under patch_rope, layers of its Attention class
get the angles of each row's depth, and TreeParams in place of PackedSeqParams. The core attention takes a tree only
from these.
"""

import dataclasses
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from packing_ops._runtime.arguments import check_tensor
from packing_ops._runtime.batch_cache import kept_with
from packing_ops.keys import PrefixPaths
from packing_ops.metadata import PackedMetadata, metadata_of_segments


@dataclasses.dataclass
class TreeParams(PackedSeqParams):
    """What a layer gets whose rows are rotated by their depths. It has no cu_seqlens, from which positions are
    counted.
    """

    tree: PackedMetadata | None = None


def with_depths(stock):
    """Wrap megatron-core's Attention.forward so that rows are rotated by their depths if packed_seq_params has a
    tree.
    """

    def forward(self, hidden_states, attention_mask, *args, **kwargs):
        params = kwargs.get("packed_seq_params")
        if getattr(params, "segment_parents", None) is None:
            return stock(self, hidden_states, attention_mask, *args, **kwargs)
        _refuse(self.config, params, kwargs.get("key_value_states"))
        cu_seqlens, parents = params.cu_seqlens_q, params.segment_parents
        found = isinstance(parents, PrefixPaths)
        if not found:
            check_tensor(parents, "segment_parents")

        # Made once for the layers of a model. CUDA: the host reads the segments, or of PrefixPaths their longest path.
        def make() -> PackedMetadata:  # detach: the same memory, but not the tensor that this is kept with
            total = parents.key_offsets.shape[0] - 1 if found else int(cu_seqlens[-1])
            return metadata_of_segments(cu_seqlens.detach(), parents, total)

        tree = kept_with((cu_seqlens, *(parents.tensors if found else (parents,))), ("prefix tree",), make)
        angles = kwargs.get("rotary_pos_emb")
        if angles is not None:
            of_rows = [_of_rows(freqs, tree) for freqs in (angles if isinstance(angles, tuple) else (angles,) * 2)]
            kwargs["rotary_pos_emb"] = tuple(of_rows)
        kwargs["packed_seq_params"] = TreeParams("thd", tree=tree)
        return stock(self, hidden_states, attention_mask, *args, **kwargs)

    return forward


def tree_in(params: Any, group: torch.distributed.ProcessGroup | None) -> PackedMetadata | None:
    """Return the tree that the core attention gets, in TreeParams or as PackedMetadata; None for documents.

    Raises:
        ValueError: a tree in other params, whose layer did not rotate by depths.
        NotImplementedError: several ranks.
    """
    if getattr(params, "segment_parents", None) is not None:
        raise ValueError(
            "segment_parents: expected patch_rope() before the forward, and a layer of megatron-core's SelfAttention "
            "(not "
            "multi-latent attention), whose RoPE then takes depths, got a layer that counts positions in each segment"
        )
    tree = params.tree if isinstance(params, TreeParams) else params
    if not isinstance(tree, PackedMetadata) or tree.paths is None:
        return None
    refuse_ranks(group)
    return tree


def refuse_ranks(group: torch.distributed.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        raise NotImplementedError(
            f"segment_parents: expected no context parallelism, got {group.size()} ranks "
            "(packing_ops.parallel.ulysses_attention takes a tree)"
        )


def _refuse(config: Any, params: Any, key_value_states: torch.Tensor | None) -> None:
    """Raise NotImplementedError for what of a model or a batch cannot be served with a tree."""
    for name in ("mtp_num_layers", "mrope_section"):
        if getattr(config, name, None):
            raise NotImplementedError(f"{name}: expected None beside segment_parents, got {getattr(config, name)}")
    if config.context_parallel_size > 1:
        raise NotImplementedError(
            f"segment_parents: expected context_parallel_size 1, got {config.context_parallel_size} "
            "(packing_ops.parallel.ulysses_attention takes a tree)"
        )
    refuse_ranks(getattr(params, "cp_group", None))
    if key_value_states is not None:
        raise ValueError("key_value_states: expected None beside segment_parents, which are of self-attention")
    if params.qkv_format != "thd":
        raise ValueError(
            f"packed_seq_params.qkv_format: expected 'thd' beside segment_parents, got {params.qkv_format!r}"
        )
    for side in ("q", "kv"):
        if (padded := getattr(params, f"cu_seqlens_{side}_padded", None)) is not None:
            raise ValueError(
                f"cu_seqlens_{side}_padded: expected None beside segment_parents, got {list(padded.shape)}"
            )
    if params.cu_seqlens_kv is not params.cu_seqlens_q:
        raise ValueError("cu_seqlens_kv: expected the same tensor as cu_seqlens_q beside segment_parents, got another")


def _of_rows(freqs: torch.Tensor | None, tree: PackedMetadata) -> torch.Tensor | None:
    """Return ``[total, 1, 1, rotary_dim]`` of ``[positions, 1, 1, rotary_dim]``: the angles of each row's depth."""
    if freqs is None:
        return None
    if freqs.shape[0] < tree.max_seqlen:
        raise ValueError(
            f"packed_seq_params.max_seqlen_q: expected at least the longest path of the tree, {tree.max_seqlen}, got "
            f"{freqs.shape[0]}"
        )

    return kept_with((tree.cu_seqlens, freqs), ("angles",), lambda: freqs[tree.position_ids], cache=tree._cache)
