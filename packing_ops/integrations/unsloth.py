"""Adapters for Unsloth: its packed_seq_lengths in and out, its masks, its rope call, collators that pack.

A packed batch is one row ``[1, total]`` without attention_mask; ``packed_seq_lengths`` int32 ``[num_documents]`` says
where its documents end. Nothing here imports Unsloth.
"""

from collections.abc import Mapping

import torch

from packing_ops import PackedMetadata, apply_rotary_qk, block_causal_mask, xformers_bias
from packing_ops._batch_cache import kept_with
from packing_ops.integrations._packing_collator import PackingCollator

# --- metadata and masks ---


def packed_metadata(kwargs: Mapping, device: torch.device | str | None = None) -> PackedMetadata | None:
    """The layout that ``packed_seq_lengths`` describes: the same object for every layer that asks with that tensor.

    Args:
        kwargs: keyword arguments of a forward, or a batch. ``packed_seq_lengths``: int32 or int64
            ``[num_documents]`` or a sequence of ints. ``input_ids`` or ``position_ids`` ``[..., total]`` beside it
            say how long the row is; slots after the last document are padding.
        device: where the layout is needed; that of packed_seq_lengths by default.

    Returns:
        PackedMetadata, or None without packed_seq_lengths. Lengths on the CPU cost no synchronisation, CUDA lengths
        one, at the first call. ``metadata.to_unsloth()`` is the way back.

    Example:
        >>> packed_metadata({"packed_seq_lengths": torch.tensor([2, 3], dtype=torch.int32)}).cu_seqlens
        tensor([0, 2, 5], dtype=torch.int32)

    Raises:
        ValueError: a negative length, or more tokens than the row has.
    """
    lengths = kwargs.get("packed_seq_lengths")
    if lengths is None:
        return None
    row = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("position_ids")
    total = None if row is None else row.numel()
    if not isinstance(lengths, torch.Tensor):
        return PackedMetadata.from_lengths(lengths, total=total, device=device)
    return _metadata_of(lengths.reshape(-1) if lengths.dim() != 1 else lengths, total, device)


def _metadata_of(lengths, total, device) -> PackedMetadata:
    device = torch.device(device or lengths.device)

    def make():
        own = lengths.to(device) if lengths.is_cuda else lengths
        return PackedMetadata.from_lengths(own, total=total, device=device)

    return kept_with([lengths], ("unsloth", total, device), make)


def sdpa_mask(
    metadata: PackedMetadata, *, dtype: torch.dtype = torch.bool, sliding_window: int | None = None
) -> torch.Tensor:
    """Mask for scaled_dot_product_attention: causal inside each document.

    Args:
        metadata: of the packed row.
        dtype: bool (True = visible) or a floating dtype (0 = visible, -inf = hidden), which is Unsloth's.
        sliding_window: visible keys including the query itself; None or 0 for all.

    Returns:
        ``[1, 1, total, total]`` on the device of cu_seqlens: total**2 elements.

    Example:
        >>> sdpa_mask(PackedMetadata.from_lengths([1, 2])).int().tolist()
        [[[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]]
    """
    return block_causal_mask(metadata.cu_seqlens, metadata.total, dtype=dtype, window=sliding_window or None)[
        None, None
    ]


def xformers_mask(metadata: PackedMetadata, *, sliding_window: int | None = None):
    """The same visibility as sdpa_mask, as an xformers bias that holds lengths instead of a matrix.

    Returns:
        ``BlockDiagonalCausalMask`` (its local form with ``sliding_window``), or None where xformers is not
        installed. One synchronisation for cu_seqlens on CUDA.

    Example:
        >>> xformers.ops.memory_efficient_attention(q, k, v, attn_bias=xformers_mask(metadata))  # doctest: +SKIP
    """
    lengths = metadata.lengths.tolist()
    lengths.append(metadata.total - sum(lengths))  # padding is a segment of its own
    try:
        return xformers_bias([length for length in lengths if length], window=sliding_window or None)
    except ImportError:
        return None


# --- rope ---


def fast_rope_embedding(
    Q: torch.Tensor,
    K: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rope_embedding_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """apply_rotary_qk under the name and with the arguments of unsloth.kernels.fast_rope_embedding. Differentiable.

    Args:
        Q: ``[batch, num_heads, seqlen, head_dim]``, any strides with a contiguous last dimension.
        K: as Q with its own number of heads.
        cos, sin: cache ``[max_positions, head_dim or head_dim / 2]``; dimensions of 1 in front are dropped.
        rope_embedding_indices: int32 or int64 positions, ``[batch, seqlen]`` or anything with as many elements, or
            ``[seqlen]`` for all rows of the batch. Without them token s of each row stands at s.

    Returns:
        (Q, K) rotated, new tensors (Unsloth may write into its arguments). Computed in float32. Half-split pairs.

    Example:
        >>> Q, K, angles = torch.ones(1, 4, 3, 2), torch.ones(1, 2, 3, 2), torch.arange(8.0)[:, None]
        >>> Q, K = fast_rope_embedding(Q, K, angles.cos(), angles.sin(), torch.tensor([[0, 1, 0]]))
        >>> K[0, 0]
        tensor([[ 1.0000,  1.0000],
                [-0.3012,  1.3818],
                [ 1.0000,  1.0000]])

    Raises:
        ValueError: shapes that do not fit; a position outside of cos.
    """
    if Q.dim() != 4:
        raise ValueError(f"Q: expected [batch, num_heads, seqlen, head_dim], got {list(Q.shape)}")
    batch, seqlen = Q.shape[0], Q.shape[2]
    cos, sin = _cache("cos", cos), _cache("sin", sin)
    if rope_embedding_indices is None:
        if seqlen > cos.shape[0]:
            raise ValueError(f"cos: expected rows for {seqlen} positions, got {list(cos.shape)}")
        return apply_rotary_qk(Q, K, cos[:seqlen], sin[:seqlen])
    positions = rope_embedding_indices.to(Q.device)
    if positions.numel() == batch * seqlen:
        positions = positions.reshape(batch, seqlen)
    elif positions.numel() == seqlen:
        positions = positions.reshape(seqlen)
    else:
        raise ValueError(
            f"rope_embedding_indices: expected [batch={batch}, seqlen={seqlen}], got {list(positions.shape)}"
        )
    return apply_rotary_qk(Q, K, cos, sin, positions)


def _cache(name: str, table: torch.Tensor) -> torch.Tensor:
    if table.dim() < 2 or any(size != 1 for size in table.shape[:-2]):
        raise ValueError(f"{name}: expected [max_positions, head_dim or head_dim / 2], got {list(table.shape)}")
    return table.reshape(table.shape[-2:])


# --- collators ---


def enable_packing(trainer_or_collator, *, sequence_lengths_key: str = "seq_lengths"):
    """Make a collator give packed batches with ``packed_seq_lengths``, as Unsloth does for TRL's.

    A batch then is one row: the rows that the collator returned, without their padding, end to end (also longer than
    the model's max_seq_length); ``position_ids`` int64 ``[1, total]`` that restart with each document;
    ``packed_seq_lengths`` int32 ``[num_documents]``, which end at total: padding after the last document is one more;
    no attention_mask. Labels that start a document are -100, since no token of the row predicts them.

    Args:
        trainer_or_collator: a trainer with ``data_collator``, or a collator: a callable that takes a list of examples,
            or an object with ``torch_call`` alone, as Unsloth wants it. A collator's own ``padding_free`` and ``return_position_ids`` are switched on where it has them; a trainer's
            ``args.remove_unused_columns`` off, and modules of its model that have ``max_seq_length`` are told
            (``_unsloth_allow_packed_overlength``) that rows may be longer.
        sequence_lengths_key: name of the examples' document lengths, as packing makes it; an example without it is
            one document.

    Returns:
        The trainer, its data_collator replaced; or the collator that packs, called or by ``torch_call`` (the one given
        stays, but for its switches). Twice is once.

    Example:
        >>> def pad(examples):  # any collator will do, such as transformers' DataCollatorForSeq2Seq
        ...     rows = [torch.tensor(example["input_ids"]) for example in examples]
        ...     ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        ...     return {"input_ids": ids, "attention_mask": ids != 0}
        >>> batch = enable_packing(pad)([{"input_ids": [5, 6]}, {"input_ids": [7]}])
        >>> batch["input_ids"], batch["position_ids"], batch["packed_seq_lengths"]
        (tensor([[5, 6, 7]]), tensor([[0, 1, 0]]), tensor([2, 1], dtype=torch.int32))

    Raises:
        TypeError: neither a trainer nor a collator. ValueError (when collating): lengths that do not make the row,
        return_tensors other than "pt".
    """
    if hasattr(trainer_or_collator, "data_collator"):
        trainer = trainer_or_collator
        trainer.data_collator = enable_packing(trainer.data_collator, sequence_lengths_key=sequence_lengths_key)
        if hasattr(getattr(trainer, "args", None), "remove_unused_columns"):
            trainer.args.remove_unused_columns = False  # the lengths are one
        for module in trainer.model.modules() if isinstance(getattr(trainer, "model", None), torch.nn.Module) else ():
            if hasattr(module, "max_seq_length"):
                module._unsloth_allow_packed_overlength = True
        return trainer
    collator = trainer_or_collator
    if not callable(collator) and not hasattr(collator, "torch_call"):
        raise TypeError(
            f"trainer_or_collator: expected data_collator, or a callable or torch_call, got {type(collator).__name__}"
        )
    if isinstance(collator, PackingCollator) or getattr(collator, "_unsloth_packing_wrapped", False):
        return collator
    for switch in ("padding_free", "return_position_ids"):
        if hasattr(collator, switch):
            setattr(collator, switch, True)
    return PackingCollator(collator, sequence_lengths_key)
