"""PackedMetadata: where the documents of a packed batch are, computed once and used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import (
    check_cu_seqlens,
    check_cumulated,
    check_tensor,
    described,
    index_tensor,
    int32_cu_seqlens,
    integer,
    one_row,
    window_sides,
    wrong_type,
)
from packing_ops._runtime.batch_cache import BatchCache, is_real, kept_with
from packing_ops.keys import Keys, PrefixPaths, PrefixTree, plan_of, positions_of_paths, prefix_paths


@dataclass(frozen=True, eq=False)
class PackedMetadata:
    """Layout of one packed batch; make it with one of the ``from_*`` functions and hand it to every layer.

    varlen_attention, token_logps, the functions of labels and segments and the losses take it where they take
    cu_seqlens, apply_rotary_qk takes it for position_ids. What the layers share is kept in it: attention plans, and the
    layout of pad and unpad. position_ids and seq_idx are new tensors at each use, and writing into them changes nothing
    here.

    Attributes:
        cu_seqlens: int32 ``[num_documents + 1]``.
        total: slots of the packed row, a Python int; slots from ``cu_seqlens[-1]`` on are padding.
        max_seqlen: longest document, or longest path of a prefix tree, a Python int.
        indices: int64 ``[total]``, slots of the padded batch that were kept; only after from_attention_mask.
        num_tokens: ``cu_seqlens[-1]`` as a Python int; None if it was neither given nor read.
        document_tokens: int32 ``[num_documents]``, how many of each document's slots, from its first on, hold tokens:
            the others are padding, which no balance loss counts. None: every slot of a document is a token. The
            collators that pad documents give it.
        num_targets: slots that have a target in the labels of this batch, or an upper bound, a Python int; None if
            unknown. The collators count it. token_logps and the losses multiply no more rows: for labels with more
            targets give them ``max_targets=total``, or set it with ``dataclasses.replace``.
        seqlen: columns of the padded batch, for pad and unpad; only after from_attention_mask.
        paths: PrefixPaths of a prefix tree, whose segments cu_seqlens then are; only after from_prefix_tree.
        visible_end: int32 ``[total]``, how far each query sees. varlen_attention takes it from here. None: causality or
            a window decides. Set it with ``dataclasses.replace(metadata, visible_end=...)``.
        position_ids: int64 ``[total]``, restarting in every document, in a prefix tree the distance from the root; a
            new tensor at each use.
        seq_idx: int32 ``[total]``, the index of every slot's document; a new tensor at each use.

    Example:
        >>> metadata = PackedMetadata.from_lengths([2, 1, 3])
        >>> metadata.cu_seqlens.tolist(), metadata.max_seqlen, metadata.position_ids.tolist()
        ([0, 2, 3, 6], 3, [0, 1, 0, 0, 1, 2])

    Compared by identity: comparing values would wait for the GPU.
    """

    cu_seqlens: torch.Tensor
    total: int
    max_seqlen: int
    indices: torch.Tensor | None = None
    num_tokens: int | None = None
    seqlen: int | None = None
    visible_end: torch.Tensor | None = None
    paths: PrefixPaths | None = None
    num_targets: int | None = None
    document_tokens: torch.Tensor | None = None
    _cache: ClassVar[BatchCache | None] = None  # no field: hosts copy dataclasses field by field

    def __post_init__(self) -> None:
        if not torch.compiler.is_compiling():  # nothing is kept in a trace
            object.__setattr__(self, "_cache", BatchCache())

    @classmethod
    def from_lengths(
        cls,
        lengths: torch.Tensor | Sequence[int],
        *,
        total: int | None = None,
        device: torch.device | str | None = None,
    ) -> "PackedMetadata":
        """Make it from tokens per document. Lengths on the CPU cost no synchronisation, CUDA lengths one.

        Args:
            lengths: int32 or int64 ``[num_documents]`` or a Python sequence.
            total: slots of the row, if it is longer than the documents.
            device: of the tensors; by default the device of ``lengths``.

        Raises:
            ValueError: a negative length, or more tokens than ``total``.
        """
        lengths = index_tensor(lengths, "lengths")
        cu_seqlens = gate.cu_seqlens_from_lengths(lengths)
        if lengths.is_cpu:
            end, longest = int(cu_seqlens[-1]), int(lengths.max()) if lengths.numel() else 0
            cu_seqlens = cu_seqlens.to(device or "cpu", non_blocking=True)
        else:
            end, longest = _end_and_longest(cu_seqlens)
        return cls(cu_seqlens, _checked_total(total, end), longest, num_tokens=end)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_seqlens: torch.Tensor,
        *,
        total: int | None = None,
        max_seqlen: int | None = None,
        num_tokens: int | None = None,
    ) -> "PackedMetadata":
        """Make it from cumulated lengths. On CUDA no synchronisation when max_seqlen and total or num_tokens are given,
        else one.

        Args:
            cu_seqlens: int32 ``[num_documents + 1]``.
            total: slots of the row, if it is longer than the documents. Without a synchronisation the padding is known
                only if num_tokens is given too.
            max_seqlen: longest document, or an upper bound.
            num_tokens: ``cu_seqlens[-1]``.

        Raises:
            ValueError: another dtype or shape; on the CPU also values that do not start at 0 or decrease, and a total,
                max_seqlen or num_tokens that contradict them.
        """
        check_cu_seqlens(cu_seqlens)
        if cu_seqlens.is_cpu and is_real(cu_seqlens):
            check_cumulated(cu_seqlens)
            last, longest = _end_and_longest(cu_seqlens)
            _checked_total(total, last)
            if max_seqlen is not None and integer(max_seqlen, "max_seqlen") < longest:
                raise ValueError(
                    f"max_seqlen: expected at least {longest}, the longest of cu_seqlens, got {max_seqlen}"
                )
            if num_tokens is not None and integer(num_tokens, "num_tokens") != last:
                raise ValueError(f"num_tokens: expected {last}, the last of cu_seqlens, got {num_tokens}")
        cu_seqlens = int32_cu_seqlens(cu_seqlens)
        if max_seqlen is None or (total is None and num_tokens is None):
            num_tokens, longest = _end_and_longest(cu_seqlens)
            max_seqlen = longest if max_seqlen is None else integer(max_seqlen, "max_seqlen")
        if num_tokens is not None:
            total = _checked_total(total, num_tokens)
        return cls(cu_seqlens, total, max_seqlen, num_tokens=num_tokens)  # type: ignore[arg-type]

    @classmethod
    def from_position_ids(cls, position_ids: torch.Tensor) -> "PackedMetadata":
        """Make it from position_ids ``[total]`` or ``[1, total]``; a document starts where they stop growing. CUDA: one
        sync.

        Example:
            >>> PackedMetadata.from_position_ids(torch.tensor([[0, 1, 0, 1, 2]])).cu_seqlens
            tensor([0, 2, 5], dtype=torch.int32)
        """
        padded, count = gate.cu_seqlens_from_position_ids(one_row(position_ids, "position_ids"))
        num_documents, longest = torch.cat(
            [count, padded.diff().amax(0, keepdim=True) if padded.numel() > 1 else count]
        ).tolist()
        total = position_ids.numel()
        return cls(padded[: num_documents + 1], total, longest, num_tokens=total)

    @classmethod
    def from_attention_mask(cls, attention_mask: torch.Tensor) -> "PackedMetadata":
        """Make it from a padding mask ``[batch, seqlen]`` (left, right, both sides, holes): unpad_input's layout.
        CUDA: one sync.
        """
        indices, cu_seqlens, _, totals = gate.unpad_layout(attention_mask, None, True)
        total, longest = totals.tolist()
        return cls(cu_seqlens, total, longest, indices[:total], num_tokens=total, seqlen=attention_mask.shape[1])

    @classmethod
    def from_prefix_tree(cls, tree: PrefixTree, *, device: torch.device | str | None = None) -> "PackedMetadata":
        """Make it from pack_prefix_tree's result: cu_seqlens are its segments, num_documents counts them. No
        synchronisation.

        varlen_attention and apply_rotary_qk take it, and models by to_transformers. What works sample by sample
        (token_logps, labels, segment sums) refuses it: it takes the samples, see PrefixTree.slot_of_token.

        Args:
            tree: of one row of the batch (PrefixTree.bin), on the CPU; one on CUDA is read by the host, which waits.
            device: of the tensors; by default the tree's.

        Example:
            >>> from packing_ops import pack_prefix_tree
            >>> samples = torch.tensor([7] * 130 + [7] * 128 + [8, 9])
            >>> tree = pack_prefix_tree(samples, torch.tensor([0, 130, 260]))
            >>> metadata = PackedMetadata.from_prefix_tree(tree)
            >>> metadata.lengths.tolist(), metadata.position_ids[128:].tolist()
            ([128, 2, 2], [128, 129, 128, 129])

        Raises:
            ValueError: segments and parents that are no tree; a tree of several bins.
        """
        if tree.num_bins > 1:
            raise ValueError(f"tree: expected that of one row of the batch (PrefixTree.bin), got {tree.num_bins} bins")
        return metadata_of_segments(tree.cu_seqlens, tree.parents, tree.num_slots, device)

    @property
    def num_documents(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def lengths(self) -> torch.Tensor:
        """Return the documents' lengths, int32 ``[num_documents]``."""
        return self.cu_seqlens.diff()

    @property
    def position_ids(self) -> torch.Tensor:  # not kept: it costs no more than comparing cu_seqlens with those before
        if self.paths is not None:
            return positions_of_paths(self.paths, self.total)
        return gate.position_ids_from_cu_seqlens(self.cu_seqlens, self.total)

    @property
    def seq_idx(self) -> torch.Tensor:
        return gate.seq_idx_from_cu_seqlens(self.cu_seqlens, self.total)

    def unpad(self, x: torch.Tensor) -> torch.Tensor:
        """Pack a padded batch with this layout, and return the row: unpad_input for one more tensor. Differentiable.

        Args:
            x: ``[batch, seqlen, ...]``, any dtype: shaped as the attention_mask that this was made from, else one row
                per document, padded on the right to max_seqlen columns or more.

        Returns:
            ``[total, ...]``, zeros in the slots after the documents. No synchronisation.

        Example:
            >>> metadata = PackedMetadata.from_attention_mask(torch.tensor([[1, 1, 0], [0, 1, 0]]))
            >>> metadata.unpad(torch.tensor([[0.5, 2.0, 9.0], [9.0, 4.0, 9.0]]))
            tensor([0.5000, 2.0000, 4.0000])
            >>> PackedMetadata.from_lengths([2, 1]).unpad(torch.tensor([[5, 6], [7, 0]]))
            tensor([5, 6, 7])

        Raises:
            ValueError: another shape or device.
        """
        check_tensor(x, "x")
        check_no_tree(self)
        batch, shape = self.num_documents, tuple(x.shape[:2])
        wide = self.seqlen is None and len(shape) == 2 and shape[0] == batch and shape[1] >= self.max_seqlen
        if not wide and shape != (batch, self.seqlen):
            columns = f"at least {self.max_seqlen}" if self.seqlen is None else self.seqlen
            raise ValueError(f"x: expected [batch={batch}, seqlen={columns}, ...], got {list(x.shape)}")
        return gate.gather_rows(x, self._slots(shape[1]), self.total)

    def pad(self, x: torch.Tensor) -> torch.Tensor:
        """Pad a packed row with this layout, and return the batch: the inverse of unpad, as pad_input. Differentiable.

        Args:
            x: ``[total, ...]``, any dtype.

        Returns:
            ``[batch, seqlen, ...]``: shaped as the attention_mask that this was made from, else one row per document,
            padded on the right to max_seqlen. Zeros where there was no token. No synchronisation.

        Example:
            >>> metadata = PackedMetadata.from_attention_mask(torch.tensor([[1, 1, 0], [0, 1, 0]]))
            >>> metadata.pad(torch.tensor([5, 6, 7]))
            tensor([[5, 6, 0],
                    [0, 7, 0]])
            >>> PackedMetadata.from_lengths([2, 1], total=4).pad(torch.tensor([5, 6, 7, 99]))
            tensor([[5, 6],
                    [7, 0]])

        Raises:
            ValueError: x has not ``total`` rows, or is on another device.
        """
        check_tensor(x, "x")
        check_no_tree(self)
        if x.dim() == 0 or x.shape[0] != self.total:
            raise ValueError(f"x: expected [total={self.total}, ...], got {list(x.shape)}")
        seqlen = self.max_seqlen if self.seqlen is None else self.seqlen
        return gate.scatter_rows(x, self._slots(seqlen), self.num_documents, seqlen)

    def _slots(self, seqlen: int) -> torch.Tensor:
        """Return int64 ``[total]``: each token's slot in the padded batch, -1 for the padding of the row."""
        if self.indices is not None:
            return self.indices

        def make() -> torch.Tensor:
            row = gate.seq_idx_from_cu_seqlens(self.cu_seqlens, self.total)
            slots = gate.position_ids_from_cu_seqlens(self.cu_seqlens, self.total) + row.long() * seqlen
            return slots.masked_fill(row == self.num_documents, -1)

        return kept_with((self.cu_seqlens,), ("slots", self.total, seqlen), make, cache=self._cache)

    def attention_plan(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        head_dim_v: int | None = None,
    ) -> torch.Tensor:
        """Return the ``plan`` of varlen_attention for this batch: made at first use, the same tensor for every layer
        after.

        Do not write into it. While a CUDA graph is captured, each call makes a new plan, and each replay makes it from
        the lengths that cu_seqlens then has.
        """
        sides = window_sides(window_size)
        of_v = head_dim if head_dim_v is None else head_dim_v
        keys: Keys = self.cu_seqlens
        total_k = self.total
        if self.paths is not None and self.paths.shares:
            keys, total_k = self.paths, self.paths.slot_of_key.shape[0]
        geometry = (self.total, total_k, num_heads, num_kv_heads, head_dim, causal, *sides, of_v)
        return plan_of(self.cu_seqlens, keys, geometry, self._cache, visible_end=self.visible_end)

    def to_transformers(self) -> dict[str, Any]:
        """Return keyword arguments of a Hugging Face forward: ``cu_seq_lens_q/k``, ``max_length_q/k``, for a tree
        ``segment_parents``.

        Also ``num_targets`` where it is known, which the fused loss of apply_packing_ops takes. Padding after the last
        document becomes one more document, since cu_seq_lens must end where the row ends; ``num_tokens`` then says
        where it begins, for the balance loss of apply_packing_ops. With document_tokens num_tokens are these, a tensor.

        Example:
            >>> PackedMetadata.from_lengths([2, 1], total=5).to_transformers()["cu_seq_lens_q"]
            tensor([0, 2, 3, 5], dtype=torch.int32)

        Raises:
            ValueError: there is a visible_end, for which these arguments have no place.
        """
        cu_seqlens, max_seqlen = self._whole_row()
        return {
            "cu_seq_lens_q": cu_seqlens,
            "cu_seq_lens_k": cu_seqlens,
            "max_length_q": max_seqlen,
            "max_length_k": max_seqlen,
            **({} if self.paths is None else {"segment_parents": self.paths}),
            **({} if self.num_targets is None else {"num_targets": self.num_targets}),
            **self._tokens(cu_seqlens is self.cu_seqlens),
        }

    def to_unsloth(self) -> dict[str, Any]:
        """Return Unsloth's ``packed_seq_lengths``: int32 ``[num_documents]`` on the device of cu_seqlens, padding left
        out.

        Raises:
            ValueError: there is a visible_end, for which lengths have no place.
        """
        check_causal(self)
        return {"packed_seq_lengths": self.lengths}

    def to_megatron(self) -> dict[str, Any]:
        """Return fields of Megatron-core's PackedSeqParams; padding after the last document is one more document.

        For a tree also ``segment_parents``, which is an attribute there and no field: the integration's
        packed_seq_params sets it.

        Raises:
            ValueError: there is a visible_end, for which these fields have no place.
        """
        cu_seqlens, max_seqlen = self._whole_row()
        return {
            "qkv_format": "thd",
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_kv": cu_seqlens,
            "max_seqlen_q": max_seqlen,
            "max_seqlen_kv": max_seqlen,
            **({} if self.paths is None else {"segment_parents": self.paths}),
        }

    def _tokens(self, whole: bool) -> dict[str, Any]:
        """Return ``num_tokens`` of to_transformers, if a slot is padding; ``whole``: the documents fill the row."""
        if self.document_tokens is None:
            return {} if whole else {"num_tokens": self._num_tokens()}
        return {"num_tokens": self.document_tokens if whole else F.pad(self.document_tokens, (0, 1))}

    def _num_tokens(self) -> int:
        """Return the slots before the padding; total if the number is not known without a synchronisation."""
        if type(self.cu_seqlens) is torch.Tensor and self.cu_seqlens.is_cpu and not torch.compiler.is_compiling():
            return int(self.cu_seqlens[-1])  # neither fake nor traced: reading it is free
        return self.total if self.num_tokens is None else self.num_tokens

    def _whole_row(self) -> tuple[torch.Tensor, int]:
        """Return cu_seqlens and max_seqlen for a host, with the padding as a document, if num_tokens is known. No
        synchronisation. Raises ValueError for a visible_end, which no host takes.
        """
        if self.paths is None:
            check_causal(self)
        num_tokens = self._num_tokens()
        if num_tokens >= self.total:
            return self.cu_seqlens, self.max_seqlen
        if self.paths is not None:
            raise ValueError(f"total: expected the {num_tokens} slots of a prefix tree, got {self.total}")
        end = self.cu_seqlens.new_full((1,), self.total)
        return torch.cat([self.cu_seqlens, end]), max(self.max_seqlen, self.total - num_tokens)


def metadata_of_segments(
    cu_seqlens: torch.Tensor, parents: torch.Tensor | PrefixPaths, total: int, device: torch.device | str | None = None
) -> PackedMetadata:
    """Return PackedMetadata.from_prefix_tree of the segments only. CUDA: the host reads them, or their longest path.

    Example:
        >>> cu_seqlens, parents = torch.tensor([[0, 128, 130], [-1, 0, 0]], dtype=torch.int32)
        >>> metadata_of_segments(cu_seqlens, parents[:2], 130).max_seqlen
        130
    """
    paths = parents if isinstance(parents, PrefixPaths) else prefix_paths(cu_seqlens, parents, total)
    _, longest = _end_and_longest(paths.cu_seqlens)
    paths = paths.to(device)
    return PackedMetadata(paths.segments.clone(), total, longest, num_tokens=total, paths=paths)


def check_causal(metadata: PackedMetadata) -> None:
    """Raise ValueError for a visible_end or a prefix tree, which a host or a mask cannot express.

    Example:
        >>> check_causal(PackedMetadata.from_lengths([2, 1]))
    """
    check_no_tree(metadata)
    if metadata.visible_end is not None:
        raise ValueError(
            "visible_end: expected None in a PackedMetadata for models and masks that do not take it (models make "
            "masks of their own arguments; dataclasses.replace(metadata, visible_end=None)), got "
            f"{described(metadata.visible_end)}"
        )


def check_no_tree(metadata: PackedMetadata, name: str = "metadata") -> None:
    """Raise ValueError for a prefix tree, where code that works sample by sample would take its segments for samples.

    Example:
        >>> check_no_tree(PackedMetadata.from_lengths([2, 1]))
    """
    if metadata.paths is not None:
        raise ValueError(
            f"{name}: expected packed documents, got a prefix tree: index the values of its slots with "
            "PrefixTree.slot_of_token and pass the samples' metadata"
        )


def cu_seqlens_of(
    documents: PackedMetadata | torch.Tensor, total: int, like: str, name: str = "cu_seqlens", *, tree: bool = False
) -> torch.Tensor:
    """Return the cu_seqlens of an argument ``name`` that may be a PackedMetadata, for a row of ``total`` slots.

    Example:
        >>> cu_seqlens_of(PackedMetadata.from_lengths([2, 1]), 3, like="labels")
        tensor([0, 2, 3], dtype=torch.int32)

    Raises:
        ValueError: a PackedMetadata of another total; of a prefix tree, unless ``tree``.
        TypeError: neither it nor a tensor.
    """
    if isinstance(documents, torch.Tensor):
        return documents
    if not isinstance(documents, PackedMetadata):
        raise wrong_type(name, "PackedMetadata or its cu_seqlens", documents)
    if not tree:
        check_no_tree(documents, name)
    # Not in a graph: total is a number there, and comparing it would make the size of the row one too.
    if not torch.compiler.is_compiling() and documents.total != total:
        raise ValueError(f"{name}: expected total={total} like {like}, got PackedMetadata with total={documents.total}")
    return documents.cu_seqlens


def _end_and_longest(cu_seqlens: torch.Tensor) -> tuple[int, int]:
    """Return cu_seqlens[-1] and the longest document, in one transfer."""
    if cu_seqlens.numel() < 2:
        return 0, 0
    end, longest = torch.stack([cu_seqlens[-1], cu_seqlens.diff().amax()]).tolist()
    return end, longest


def _checked_total(total: int | None, end: int) -> int:
    if total is not None and integer(total, "total") < end:
        raise ValueError(f"total: expected at least the {end} tokens of the documents, got {total}")
    return end if total is None else total
