"""Where the keys of attention are: end to end by cu_seqlens, along the paths of a prefix tree, or in pages.

A prefix tree is a row of segments in depth-first order. A segment's keys are its path: the slots of its ancestors,
then its slots. In pages key j of document i is row ``j % page_size`` of page ``block_table[i, j // page_size]``.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import check_tensor, int32_cu_seqlens, integer, refuse_beside
from packing_ops._runtime.batch_cache import BatchCache, check_same, is_captured, kept_with
from packing_ops._runtime.lazy import old_attributes
from packing_ops.varlen.options import AttentionOptions

# --- a prefix tree ---

FORK_ALIGNMENT = 128  # csrc/core/fork_alignment.h
"""Forks of a prefix tree are at multiples of this number of tokens: no key tile of attention holds two segments."""


@dataclass(frozen=True, eq=False, repr=False)
class PrefixTree:
    """Samples as trees of segments; pack_prefix_tree makes it.

    A slot is the place of one token that a model computes. It sees the slots of its segment up to itself, and all slots
    of the segments above: of the segment's parent, of the parent's parent, and so on. Segments are in depth-first
    order, tree after tree, so that all segments below one follow it. Those of one bin (one row of the batch) are next
    to each other.

    Attributes:
        token_of_slot: int64 ``[num_slots]``, the token that each slot holds: ``tokens[tree.token_of_slot]`` are the
            input_ids.
        cu_seqlens: int32 ``[num_segments + 1]``; segment i has the slots ``cu_seqlens[i] : cu_seqlens[i + 1]``. The
            length of a segment with children is a multiple of FORK_ALIGNMENT.
        parents: int32 ``[num_segments]``, the segment that each one continues, always an earlier one; -1: a root.
        position_ids: int64 ``[num_slots]``, each slot's distance from its root: its tokens' positions in their samples.
        slot_of_token: int64 ``[num_tokens]``, the slot that computes each token of the samples. What a model makes of
            the slots, indexed by it, is what it makes of the samples end to end, and the gradient of a slot is the sum
            over its tokens.
        copies: int64 ``[num_slots]``, the number of tokens that each slot computes, at least 1.
        bin_offsets: int64 ``[num_bins + 1]``; bin b has the segments ``bin_offsets[b] : bin_offsets[b + 1]``.
        samples: int64 ``[num_samples]``, ascending: which of the samples that were packed. All of them, except in the
            tree of one bin.
        sample_bins: int64 ``[num_samples]``, the bin that has all slots of a sample.
        sample_cu_seqlens: int32 ``[num_samples + 1]``, where the samples are in slot_of_token.
        repeated_at_forks: slots that hold again what a sibling segment holds, since a fork is at a multiple of
            FORK_ALIGNMENT and no earlier than min_shared. None in the tree of one bin.
        repeated_by_cuts: slots that bins hold again of a tree that capacity cut. None in the tree of one bin.

    Example:
        >>> from packing_ops import pack_prefix_tree
        >>> tokens = torch.arange(400)
        >>> tokens[200:350] = tokens[:150]  # two samples of 200 tokens begin with the same 150
        >>> tree = pack_prefix_tree(tokens, [0, 200, 400])
        >>> tree
        PrefixTree(num_samples=2, num_tokens=400, num_slots=272, num_segments=3, num_bins=1)
        >>> tree.lengths.tolist(), tree.parents.tolist()  # 22 of the 150 tokens are once in each child
        ([128, 72, 72], [-1, 0, 0])
        >>> bool((tokens[tree.token_of_slot][tree.slot_of_token] == tokens).all())
        True

    Compared by identity, as PackedMetadata.
    """

    token_of_slot: torch.Tensor
    cu_seqlens: torch.Tensor
    parents: torch.Tensor
    position_ids: torch.Tensor
    slot_of_token: torch.Tensor
    copies: torch.Tensor
    bin_offsets: torch.Tensor
    samples: torch.Tensor
    sample_bins: torch.Tensor
    sample_cu_seqlens: torch.Tensor
    repeated_at_forks: int | None
    repeated_by_cuts: int | None

    if not TYPE_CHECKING:
        __getattr__ = old_attributes({
            "rows": "token_of_slot", "row_of_token": "slot_of_token", "num_rows": "num_slots",
            "rows_before": "slots_before",
        })  # fmt: skip

    @property
    def num_slots(self) -> int:
        """Return the number of tokens that a model computes."""
        return self.token_of_slot.numel()

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the samples."""
        return self.slot_of_token.numel()

    @property
    def num_segments(self) -> int:
        return self.parents.numel()

    @property
    def num_bins(self) -> int:
        return self.bin_offsets.numel() - 1

    @property
    def num_samples(self) -> int:
        return self.samples.numel()

    @property
    def shared_tokens(self) -> int | None:
        """Return the number of tokens that an earlier sample begins with too: num_slots is num_tokens less these,
        plus what is repeated.
        """
        if self.repeated_at_forks is None or self.repeated_by_cuts is None:
            return None
        return self.num_tokens - self.num_slots + self.repeated_at_forks + self.repeated_by_cuts

    @property
    def lengths(self) -> torch.Tensor:
        """Return the segments' lengths, int32 ``[num_segments]``."""
        return self.cu_seqlens.diff()

    @property
    def slots_before(self) -> torch.Tensor:
        """Return int64 ``[num_slots]``: the slot before each slot on its path; -1 for a root's first slot. No
        synchronisation.
        """
        before = torch.arange(-1, self.num_slots - 1, device=self.token_of_slot.device)
        last_slots = F.pad(self.cu_seqlens[1:].long() - 1, (0, 1), value=-1)  # parent -1 has the last entry
        return before.index_put((self.cu_seqlens[:-1].long(),), last_slots[self.parents.long()])

    def bin(self, index: int) -> "PrefixTree":
        """Return the tree of one bin, one row of the batch, with the samples that the bin has.

        ``token_of_slot`` are still indices of the tokens that were packed, ``samples`` of the samples; the rest counts
        from 0.
        Take it before ``to``: on a GPU it waits for values.

        Example:
            >>> from packing_ops import pack_prefix_tree
            >>> tree = pack_prefix_tree(torch.tensor([5, 6, 7, 8, 9]), [0, 2, 5], capacity=3)
            >>> tree.bin(1).samples.tolist(), tree.bin(1).token_of_slot.tolist()
            ([0], [0, 1])

        Raises:
            ValueError: index outside 0 to num_bins - 1.
        """
        if not 0 <= integer(index, "index") < self.num_bins:
            raise ValueError(f"index: expected 0 to num_bins - 1 = {self.num_bins - 1}, got {index}")
        if self.num_bins == 1:
            return self
        first, last = self.bin_offsets[index : index + 2].tolist()
        begin, end = self.cu_seqlens[[first, last]].tolist()
        parents = self.parents[first:last]
        served = self.sample_bins == index
        lengths = self.sample_cu_seqlens.diff()
        slot_of_token = self.slot_of_token[served.repeat_interleave(lengths)]
        return PrefixTree(
            token_of_slot=self.token_of_slot[begin:end].clone(),  # a view would be pickled with all of its memory
            cu_seqlens=self.cu_seqlens[first : last + 1] - begin,
            parents=torch.where(parents < 0, parents, parents - first),
            position_ids=self.position_ids[begin:end].clone(),
            slot_of_token=slot_of_token - begin,
            copies=self.copies[begin:end].clone(),
            bin_offsets=self.bin_offsets[index : index + 2] - first,
            samples=self.samples[served],
            sample_bins=torch.zeros_like(self.samples[served]),
            sample_cu_seqlens=gate.cu_seqlens_from_lengths(lengths[served]),
            repeated_at_forks=None,
            repeated_by_cuts=None,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> "PrefixTree":
        """Return the same tree with its tensors on ``device``. A copy to the CPU is always waited for."""
        return PrefixTree(**_moved(vars(self), device, non_blocking))

    def __repr__(self) -> str:
        return (
            f"PrefixTree(num_samples={self.num_samples}, num_tokens={self.num_tokens}, num_slots={self.num_slots}, "
            f"num_segments={self.num_segments}, num_bins={self.num_bins})"
        )


class PrefixPaths(NamedTuple):
    """The paths of a tree's segments, one after the other: which slots of k and v they hold. int32, on the device of k.

    Attributes:
        segments: ``[num_segments + 1]``, the tree's cu_seqlens that the paths are of.
        cu_seqlens: ``[num_segments + 1]``, where each path starts in ``slot_of_key``.
        slot_of_key: ``[paths]``.
        key_offsets: ``[total + 1]``; the keys of slot ``s`` are ``keys_of_slot[key_offsets[s] : key_offsets[s + 1]]``.
        keys_of_slot: ``[paths]``.
        shares: whether a segment has a parent. Without, the segments are documents.
        in_blocks: whether in every FORK_ALIGNMENT keys of a path, counted from its start, the slots follow each other.
            Then attention reads k and v in place, else it gathers them along the paths.
    """

    segments: torch.Tensor
    cu_seqlens: torch.Tensor
    slot_of_key: torch.Tensor
    key_offsets: torch.Tensor
    keys_of_slot: torch.Tensor
    shares: bool = True
    in_blocks: bool = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.cu_seqlens, self.slot_of_key, self.key_offsets, self.keys_of_slot

    def padded(self, total: int) -> "PrefixPaths":
        """Return the paths of the same tree in a row of ``total`` slots."""
        more = total + 1 - self.key_offsets.shape[0]
        last = self.key_offsets[-1:].expand(more)
        return self._replace(key_offsets=torch.cat([self.key_offsets, last]))

    def to(self, device: torch.device | str | None) -> "PrefixPaths":
        return PrefixPaths(**_moved(self._asdict(), device or self.segments.device))


if not TYPE_CHECKING:
    PrefixPaths.__getattr__ = old_attributes({"row_of_key": "slot_of_key", "keys_of_row": "keys_of_slot"})


def _moved(fields: dict[str, Any], device: torch.device | str, non_blocking: bool = True) -> dict[str, Any]:
    """Return the fields with their tensors on a device. A copy to the CPU is always waited for."""
    device = torch.device(device)
    waits = device.type == "cpu" or not non_blocking
    return {n: v.to(device, non_blocking=not waits) if isinstance(v, torch.Tensor) else v for n, v in fields.items()}


def prefix_paths(cu_seqlens: torch.Tensor, parents: torch.Tensor, total: int) -> PrefixPaths:
    """Find the paths of a tree's segments. Tensors on CUDA are copied to the host, which waits for them.

    Args:
        cu_seqlens: int32 ``[num_segments + 1]``; a segment with children has a multiple of 128 tokens.
        parents: int32 ``[num_segments]``, the index of an earlier segment, -1 for a root; segments are in depth-first
            order.
        total: slots, those after the last segment included.

    Example:
        >>> cu_seqlens = torch.tensor([0, 128, 130, 131], dtype=torch.int32)
        >>> paths = prefix_paths(cu_seqlens, torch.tensor([-1, 0, 0], dtype=torch.int32), 131)
        >>> paths.cu_seqlens.tolist(), paths.slot_of_key[128 + 128 :].tolist()[:4], paths.slot_of_key[-1:].tolist()
        ([0, 128, 258, 387], [128, 129, 0, 1], [130])

    Raises:
        ValueError: segments or parents that are no tree in this form; the message names the argument.
    """
    path_cu_seqlens, slot_of_key, key_offsets, keys_of_slot = gate.prefix_paths(cu_seqlens, parents, total)
    shares = torch.compiler.is_compiling() or bool((parents >= 0).any())
    return PrefixPaths(
        cu_seqlens.clone(), path_cu_seqlens, slot_of_key, key_offsets, keys_of_slot, shares, in_blocks=True
    )


def paths_of_segments(cu_seqlens: torch.Tensor, parents: torch.Tensor, total: int) -> PrefixPaths:
    """Return the paths of segments that fork at any token, and stand in any order after their parents.

    Args:
        cu_seqlens, parents, total: as prefix_paths, on the CPU.

    Example:
        >>> cu_seqlens, parents = torch.tensor([[0, 2, 3, 5], [-1, 0, 0, 0]], dtype=torch.int32)
        >>> paths = paths_of_segments(cu_seqlens, parents[:3], 5)
        >>> paths.cu_seqlens.tolist(), paths.slot_of_key.tolist(), paths.in_blocks
        ([0, 2, 5, 9], [0, 1, 0, 1, 2, 0, 1, 3, 4], False)

    Raises:
        ValueError: parents that are not before their children, or paths of 2**31 keys or more in all.
    """
    of_paths, *found = gate.prefix_paths(cu_seqlens, parents, total, True)
    forks = of_paths.diff()[parents[parents >= 0]]
    in_blocks = bool((forks % FORK_ALIGNMENT == 0).all())
    slot_of_key, key_offsets, keys_of_slot = found
    shares = forks.numel() > 0
    return PrefixPaths(cu_seqlens, of_paths, slot_of_key, key_offsets, keys_of_slot, shares, in_blocks)


def paths_of_slots(
    segments: torch.Tensor, cu_seqlens: torch.Tensor, slot_of_key: torch.Tensor, total: int
) -> PrefixPaths:
    """Return the paths of a library that finds their slots itself. No synchronisation.

    Args:
        segments: int32 ``[num_segments + 1]``, the tree's cu_seqlens.
        cu_seqlens: int32 ``[num_segments + 1]``, where each path starts in ``slot_of_key``.
        slot_of_key: integer ``[paths]``.
        total: slots of k and v.

    Example:
        >>> segments, cu_seqlens = torch.tensor([[0, 2, 3], [0, 2, 5]], dtype=torch.int32)
        >>> paths = paths_of_slots(segments, cu_seqlens, torch.tensor([0, 1, 0, 1, 2]), 3)
        >>> paths.key_offsets.tolist(), paths.keys_of_slot.tolist()
        ([0, 2, 4, 5], [0, 2, 1, 3, 4])
    """
    in_order, keys_of_slot = slot_of_key.sort(stable=True)
    key_offsets = torch.searchsorted(in_order, torch.arange(total + 1, device=slot_of_key.device))
    return PrefixPaths(segments.clone(), cu_seqlens, slot_of_key.int(), key_offsets.int(), keys_of_slot.int())


def positions_of_paths(paths: PrefixPaths, total: int) -> torch.Tensor:
    """Return int64 ``[total]``: each slot's distance from its root; the slots after the last segment count from 0.

    Example:
        >>> segments, parents = torch.tensor([0, 128, 130, 133], dtype=torch.int32), torch.tensor([-1, 0, 0])
        >>> paths = prefix_paths(segments, parents.int(), 134)  # two answers of a prompt, then padding
        >>> positions_of_paths(paths, 134)[126:].tolist()
        [126, 127, 128, 129, 128, 129, 130, 0]
    """
    cu_seqlens = paths.segments
    before = F.pad(paths.cu_seqlens.diff() - cu_seqlens.diff(), (0, 1))  # 0 behind the last segment
    segment = gate.seq_idx_from_cu_seqlens(cu_seqlens, total)
    return gate.position_ids_from_cu_seqlens(cu_seqlens, total) + before.index_select(0, segment)


def cached_paths(
    cu_seqlens: torch.Tensor, parents: torch.Tensor | PrefixPaths, total: int, cache: BatchCache | None
) -> PrefixPaths:
    """Return prefix_paths, found once for the layers of a model; paths that were given are returned as they are."""
    if isinstance(parents, PrefixPaths):
        return parents
    if is_captured(cu_seqlens):
        raise ValueError(
            "parents: expected PackedMetadata.from_prefix_tree in place of parents while a CUDA graph is captured, "
            "since the host reads them"
        )
    key = ("paths", total)
    return kept_with((cu_seqlens, parents), key, partial(prefix_paths, cu_seqlens, parents, total), cache=cache)


# --- pages ---


class KeyPages(NamedTuple):
    """Where the keys of documents are: int32 ``[num_documents, pages]`` and int32 ``[num_documents]``."""

    block_table: torch.Tensor
    seqused_k: torch.Tensor


def lengths_of(cu_seqlens_k: torch.Tensor) -> torch.Tensor:
    """Return seqused_k of calls that give the lengths by cu_seqlens, -1 where these do not start at 0; the same
    tensor for the layers of a model.
    """

    def lengths() -> torch.Tensor:
        return int32_cu_seqlens(cu_seqlens_k).diff().where(cu_seqlens_k[0] == 0, -1)

    return kept_with((cu_seqlens_k,), ("lengths",), lengths)


def lengths_with(lengths: torch.Tensor, new: int) -> torch.Tensor:
    """Return ``lengths + new``, -1 for lengths below 0; the same tensor for the layers of a model."""
    return kept_with((lengths,), ("lengths", new), lambda: torch.where(lengths < 0, -1, lengths + new))


# --- the keys of a call ---


class Parents(NamedTuple):
    """A prefix tree whose paths have not been found: int32 ``[num_segments]``, as varlen_attention takes it."""

    parents: torch.Tensor


Keys: TypeAlias = torch.Tensor | PrefixPaths | KeyPages
"""Where the keys of each document lie. A tensor is their cu_seqlens: end to end."""


def keys_of(
    documents: Any,
    cu_seqlens_k: Any,
    parents: torch.Tensor | PrefixPaths | None,
    block_table: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> Any:
    """Return varlen_attention's arguments as attend takes them: Keys, Parents or a PackedMetadata; those of q by
    default.

    Raises:
        ValueError: arguments of two kinds, or a half of pages.
    """
    if block_table is not None or seqused_k is not None:
        refuse_beside("block_table", cu_seqlens_k=cu_seqlens_k, parents=parents)
        for tensor, name, other in ((block_table, "block_table", "seqused_k"), (seqused_k, "seqused_k", "block_table")):
            if tensor is None:
                raise ValueError(f"{name}: expected a tensor beside {other}, got None")
            check_tensor(tensor, name)
        return KeyPages(block_table, seqused_k)  # type: ignore[arg-type]
    if parents is None:
        return documents if cu_seqlens_k is None else cu_seqlens_k
    if cu_seqlens_k is not None and cu_seqlens_k is not documents:
        raise ValueError("cu_seqlens_k: expected None beside a prefix tree, whose segments are those of q and of k")
    return keys_of_tree(parents)


def keys_of_tree(parents: torch.Tensor | PrefixPaths) -> Parents | PrefixPaths:
    """Return an argument ``parents`` as attend takes it."""
    if isinstance(parents, PrefixPaths):
        return parents
    check_tensor(parents, "parents")
    return Parents(parents)


def checked_tree(tree: Parents | PrefixPaths, cu_seqlens: torch.Tensor, rows: int, cache: BatchCache | None) -> Keys:
    """Return the paths of a tree's segments; cu_seqlens if they share nothing, and so are documents.

    Raises:
        ValueError: paths of another tree, here or on CUDA in a later call.
    """
    if isinstance(tree, Parents):
        tree = cached_paths(cu_seqlens, tree.parents, rows, cache)
    elif tree.key_offsets.shape[0] != rows + 1:
        raise ValueError(f"parents: expected the paths of a tree of {rows} rows, got {tree.key_offsets.shape[0] - 1}")
    else:
        check_same(cu_seqlens, tree.segments, "segments")
    return tree if tree.shares else cu_seqlens


def plan_for(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    keys: Keys,
    options: AttentionOptions,
    cache: BatchCache | None = None,
) -> torch.Tensor | None:
    """Return the plan of a call, the same one for the layers of a model; None on the CPU, and for shapes that the op
    refuses.
    """
    if not (q.is_cuda and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)):
        return None
    pages = keys if isinstance(keys, KeyPages) else None
    if q.dim() not in (3, 4) or k.dim() != (q.dim() if pages is None else 4) or v.dim() != k.dim():
        return None
    tokens = 0 if q.dim() == 3 else 2
    total_q, num_heads, head_dim, head_dim_v = q.shape[tokens], q.shape[1], q.shape[-1], v.shape[-1]
    if pages is not None:
        num_kv_heads = k.shape[2] if pages.block_table.dim() == 2 else 0
        total_k = pages.block_table.shape[-1] * k.shape[1] if k.shape[0] else 0
    else:
        num_kv_heads = k.shape[1] if q.dim() == 3 or q.shape[0] == k.shape[0] == 1 else 0
        total_k = keys.slot_of_key.shape[0] if isinstance(keys, PrefixPaths) else k.shape[tokens]
    if num_kv_heads == 0 or num_heads % num_kv_heads or not (0 < head_dim <= 512 and 0 < head_dim_v <= 512):
        return None
    geometry = total_q, total_k, num_heads, num_kv_heads, head_dim, options.causal, *options.window_size, head_dim_v
    return plan_of(cu_seqlens_q, keys, geometry, cache, visible_end=options.visible_end)


def plan_of(
    cu_seqlens_q: torch.Tensor, keys: Keys, geometry: tuple[Any, ...], cache: BatchCache | None = None, *,
    visible_end: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the plan of a call: made for the first layer with this geometry, kept with cu_seqlens_q for the others."""
    tensors: tuple[torch.Tensor, ...]
    key: tuple[Any, ...]
    if isinstance(keys, KeyPages):
        used = keys.seqused_k
        tensors, key = (cu_seqlens_q, used), ("pages", geometry)
        make = partial(gate.paged_attention_plan, cu_seqlens_q, used, *geometry)
    else:
        of_keys = keys.cu_seqlens if isinstance(keys, PrefixPaths) else keys
        same = of_keys is cu_seqlens_q
        tensors = (cu_seqlens_q,) if same else (cu_seqlens_q, of_keys)
        tensors += () if visible_end is None else (visible_end,)
        key = "plan", same, visible_end is None, geometry
        make = partial(gate.attention_plan, cu_seqlens_q, of_keys, *geometry, visible_end)
    return kept_with(tensors, key, make, checked_by_kernel=True, cache=cache)
