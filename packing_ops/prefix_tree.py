"""Prefix trees: samples that share a prefix as one tree of segments, in which the prefix is once."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
import torch.nn.functional as F
from typing_extensions import Unpack

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import (
    check_cu_seqlens,
    described,
    index_tensor,
    int32_cu_seqlens,
    int64_tensor,
    integer,
    one_row,
    wrong_type,
)
from packing_ops.keys import FORK_ALIGNMENT, PrefixTree, paths_of_segments
from packing_ops.losses.logps import (
    HeadKeywords,
    LogpsOptions,
    checked_allowed,
    checked_head,
    checked_labels,
    logps_of_targets,
    output_names,
)
from packing_ops.metadata import PackedMetadata, cu_seqlens_of, metadata_of_segments


def pack_prefix_tree(
    tokens: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor | Sequence[int],
    *,
    groups: torch.Tensor | Sequence[int] | None = None,
    capacity: int | None = None,
    min_shared: int = FORK_ALIGNMENT,
) -> PrefixTree:
    """Find what samples share from their first token on, and arrange them as trees that hold it once.

    Args:
        tokens: int32 or int64 ``[total]`` or ``[1, total]``, the samples end to end. A CUDA tensor is copied to the
            CPU, which synchronises once; so are cu_seqlens and groups.
        cu_seqlens: int32 or int64 ``[num_samples + 1]``, a Python sequence, or a PackedMetadata: where the samples are,
            from 0 to total. A sample of no tokens has no slots, and is in bin 0.
        groups: int32 or int64 ``[num_samples]``, or a Python sequence: only samples of the same number are compared.
            They need not be next to each other. None: all are compared.
        capacity: most slots of a bin, one row of the batch. Trees are put into bins first-fit-decreasing, the one with
            the most slots first. A tree that does not fit is cut where segments fork: each bin that has a part of it
            holds the segments above the part again (``repeated_by_cuts``). None: one bin.
        min_shared: samples that part before this number of tokens, rounded up to a multiple of FORK_ALIGNMENT, are
            not joined. More makes fewer and longer segments.

    Returns:
        PrefixTree on the CPU. Trees and the children of a segment are in the order of their first sample.

    Samples fork at the last multiple of FORK_ALIGNMENT that they share; what they share beyond it is once in each
    child, at most 127 tokens. A sample that is the beginning of another, or equal to it, has no extra slots, however
    short. If it is the beginning of several, it ends in the first of them in lexicographic order.

    Example:
        >>> prompt, answers = torch.arange(256), [torch.tensor([7, 8]), torch.tensor([9])]
        >>> tokens = torch.cat([prompt, answers[0], prompt, answers[1]])
        >>> tree = pack_prefix_tree(tokens, [0, 258, 515])
        >>> tree.lengths.tolist(), tree.parents.tolist()
        ([256, 2, 1], [-1, 0, 0])
        >>> tree.position_ids[-3:].tolist(), tree.copies[-4:].tolist()
        ([256, 257, 256], [2, 1, 1, 1])
        >>> tree.num_tokens, tree.num_slots, tree.shared_tokens
        (515, 259, 256)

    Raises:
        ValueError: tokens that are not int32 or int64; cu_seqlens that do not start at 0, decrease, or do not end at
            total; groups of another length; a capacity below the longest sample; min_shared below 1.
        TypeError: a number that is not an integer.

    Time and memory grow with the tokens (docs/performance-ops.md), one core, the GIL released.

    Determinism: the same tree in every call.
    Synchronises: once for each CUDA tensor, which is copied.
    Memory: grows with the tokens, on the CPU.
    Gradients: none: integers.
    """
    tokens = one_row(tokens, "tokens")
    if isinstance(cu_seqlens, PackedMetadata):
        cu_seqlens = cu_seqlens_of(cu_seqlens, tokens.numel(), like="tokens")
    cu_seqlens = index_tensor(cu_seqlens, "cu_seqlens")
    check_cu_seqlens(cu_seqlens)
    cu_seqlens = int32_cu_seqlens(cu_seqlens.cpu())
    # Find the segments on the host
    *layout, repeated = gate.pack_prefix_tree(
        tokens,
        cu_seqlens,
        None if groups is None else index_tensor(groups, "groups"),
        None if capacity is None else integer(capacity, "capacity"),
        integer(min_shared, "min_shared"),
    )
    token_of_slot, segments, parents, position_ids, slot_of_token, copies, bin_offsets, sample_bins = layout
    repeated_at_forks, repeated_by_cuts = repeated.tolist()
    return PrefixTree(
        token_of_slot=token_of_slot,
        cu_seqlens=segments,
        parents=parents,
        position_ids=position_ids,
        slot_of_token=slot_of_token,
        copies=copies,
        bin_offsets=bin_offsets,
        samples=torch.arange(sample_bins.numel(), device="cpu"),
        sample_bins=sample_bins,
        sample_cu_seqlens=cu_seqlens.clone(),
        repeated_at_forks=repeated_at_forks,
        repeated_by_cuts=repeated_by_cuts,
    )


def prefix_tree_metadata(
    group_ids: torch.Tensor | Sequence[int],
    parent_ids: torch.Tensor | Sequence[int],
    *,
    device: torch.device | str | None = None,
) -> PackedMetadata:
    """Return the PackedMetadata of a row that holds prefix trees already, forks at any token; its order stays.

    A group is a segment of the tree: tokens next to each other that continue the group of parent_ids, and see it, its
    parent and so on, then their group causally.

    Args:
        group_ids: int64 or int32 ``[total]`` or ``[1, total]``, or a Python sequence: the group of each token. CUDA
            tensors are copied to the CPU, which synchronises.
        parent_ids: alike, the group that each token's group continues, which lies before it; a root has its group_ids.
            Padding with such ids (-1 and -1, say) is a root.
        device: of the tensors; by default that of group_ids.

    Returns:
        PackedMetadata of the row, as from_prefix_tree makes it: for varlen_attention, apply_rotary_qk and, by
        to_transformers, models. position_ids are distances from the root. cu_seqlens are the segments.

    The bits are those of pack_prefix_tree's trees. Where a group has children, and it and those above hold no multiple
    of FORK_ALIGNMENT tokens, attention gathers k and v along the paths.

    Example:
        >>> group_ids, parent_ids = [7, 7, 7, 8, 8, 9, -1], [7, 7, 7, 7, 7, 7, -1]  # a prompt, two answers, padding
        >>> metadata = prefix_tree_metadata(group_ids, parent_ids)
        >>> metadata.cu_seqlens.tolist(), metadata.position_ids.tolist()
        ([0, 3, 5, 6, 7], [0, 1, 2, 3, 4, 3, 0])

    Raises:
        ValueError: ids that are not int64 or int32 of one row, or differ in length; a group whose tokens are apart, or
            that has two parents; a parent that is not before its child.
        TypeError: ids that are not integers.

    Determinism: the same in every call.
    Synchronises: once for each CUDA tensor of ids, which is copied.
    Memory: 8 bytes for each key of the paths, and 4 for each token.
    Gradients: none: integers.
    """
    groups, of_parents = _row_of_ids(group_ids, "group_ids"), _row_of_ids(parent_ids, "parent_ids")
    if of_parents.shape != groups.shape:
        raise ValueError(f"parent_ids: expected [total={groups.numel()}] like group_ids, got {described(of_parents)}")
    # The segments' cu_seqlens and parents
    on_cpu = groups.cpu(), of_parents.cpu()
    changes = (on_cpu[0][1:] != on_cpu[0][:-1]) | (on_cpu[1][1:] != on_cpu[1][:-1])
    starts = F.pad(changes.nonzero()[:, 0] + 1, (1, 0)) if groups.numel() else on_cpu[0]
    parents, found = list[int](), dict[int, int]()
    ids = (of.index_select(0, starts).tolist() for of in on_cpu)
    for start, group, parent in zip(starts.tolist(), *ids, strict=True):
        if group in found:
            raise ValueError(
                f"group_ids: expected the tokens of a group next to each other, with one parent, got {group} again at "
                f"index {start}"
            )
        if parent != group and parent not in found:
            raise ValueError(
                f"parent_ids: expected the group itself or one that is before it, got {parent} at index {start}"
            )
        parents.append(-1 if parent == group else found[parent])
        found[group] = len(found)
    segments = F.pad(starts, (0, 1), value=groups.numel()).int(), int64_tensor(parents).int()
    paths = paths_of_segments(*segments, groups.numel())
    return metadata_of_segments(paths.segments, paths, groups.numel(), groups.device if device is None else device)


def _row_of_ids(ids: torch.Tensor | Sequence[int], name: str) -> torch.Tensor:
    """Return int64 ``[total]``, checked."""
    ids = one_row(index_tensor(ids, name), name)
    if ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected int32 or int64, got {described(ids)}")
    return ids.long()


@overload
def prefix_token_logps(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tree: PrefixTree, *,
    entropy: Literal[False] = False, outputs: None = None, **options: Unpack[HeadKeywords],
) -> torch.Tensor: ...  # fmt: skip
@overload
def prefix_token_logps(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tree: PrefixTree, *, entropy: Literal[True],
    outputs: None = None, **options: Unpack[HeadKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def prefix_token_logps(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, tree: PrefixTree, *,
    entropy: Literal[False] = False, outputs: Sequence[str], **options: Unpack[HeadKeywords],
) -> tuple[torch.Tensor, ...]: ...  # fmt: skip
def prefix_token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    tree: PrefixTree,
    *,
    temperature: float | torch.Tensor = 1.0,
    chunk: int | None = None,
    entropy: bool = False,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    outputs: Sequence[str] | None = None,
    scale: float = 1.0,
    softcap: float = 0.0,
    max_targets: int | None = None,
    keep_logits: int | Literal["auto"] = 0,
    allowed_ids: torch.Tensor | None = None,
    allowed_offsets: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Compute token_logps of the samples from the hidden states of a prefix tree's slots. Differentiable.

    Each slot but a root's first is predicted once, by the slot before it: the last slot of a shared prompt predicts the
    first of each answer. The samples' slots are then looked up, so that losses, advantages and masks of packed samples
    apply as they are, and a shared slot gets the sum of its samples' gradients.

    Args:
        hidden: ``[num_slots, hidden]`` or ``[1, num_slots, hidden]``, as token_logps.
        weight, chunk, entropy, bias, outputs, scale, softcap, keep_logits: as token_logps.
        temperature: as token_logps; a tensor is ``[num_slots]``, of what each slot predicts.
        labels: int64 or int32 ``[num_slots]`` or ``[1, num_slots]``, not shifted: ``tokens[tree.token_of_slot]``.
            ``ignore_index`` where nothing counts in any of a slot's samples; where it depends on the sample, mask the
            result.
        tree: on the device of hidden.
        max_targets: slots that are predicted, or an upper bound, as in token_logps; on CUDA num_slots by default.
        allowed_ids, allowed_offsets: as token_logps, of each slot, ``[num_slots + 1]`` offsets: what its token was
            drawn from.

    Returns:
        ``[num_tokens]``, in the order of the samples' tokens, float32 (float64 for float64): slot t holds
        log p(token t + 1), 0 at the last slot of each sample. With ``outputs`` a tuple of such, likewise 0 there (top1:
        -1). One row of hidden is multiplied with weight for each slot that is predicted. Within packing_ops.invariant()
        a token has the bits that token_logps gives its sample in a row without others.

    Example:
        >>> tokens = torch.tensor([5, 6, 7, 5, 6])  # the second sample is the beginning of the first
        >>> tree = pack_prefix_tree(tokens, [0, 3, 5])
        >>> hidden, weight = torch.zeros(tree.num_slots, 2), torch.zeros(8, 2)
        >>> prefix_token_logps(hidden, weight, tokens[tree.token_of_slot], tree).exp()
        tensor([0.1250, 0.1250, 1.0000, 0.1250, 1.0000])

    Raises:
        ValueError: as token_logps; labels or a tree that do not fit hidden.

    Determinism: the same bits in every call; within packing_ops.invariant() those of token_logps for each sample.
    Synchronises: never; a wrong label on CUDA raises in a later call.
    Memory: as token_logps for the slots of the tree.
    Gradients: of hidden, weight and bias, as token_logps.
    """
    if not isinstance(tree, PrefixTree):
        raise wrong_type("tree", "a PrefixTree", tree)
    hidden, weight, bias = checked_head(hidden, weight, bias)
    num_slots = tree.num_slots
    if hidden.shape[0] != num_slots:
        raise ValueError(f"hidden: expected [num_slots={num_slots}, hidden] like the tree, got {described(hidden)}")
    if tree.token_of_slot.device != hidden.device:
        raise ValueError(
            f"tree: expected on {hidden.device} like hidden (PrefixTree.to), got on {tree.token_of_slot.device}"
        )
    labels = checked_labels(labels, hidden)
    # Slot s is a target, and the slot before it predicts it. The op gives each slot the label of the next one: shift it
    # back.
    before = tree.slots_before
    labels = labels.masked_fill(before < 0, ignore_index)  # nothing predicts a root's first slot
    whole_row = torch.arange(2, dtype=torch.int32, device=labels.device) * num_slots
    of_next = gate.logps_targets(labels, whole_row, ignore_index, weight.shape[0])
    targets = F.pad(of_next[:-1], (1, 0), value=-1)[:num_slots]
    allowed = checked_allowed((allowed_ids, allowed_offsets), targets, weight.shape[0], ahead=0)
    if isinstance(temperature, torch.Tensor) and temperature.shape in ((num_slots,), (1, num_slots)):
        temperature = temperature.reshape(-1)[before]
    options = LogpsOptions(temperature, scale, softcap, chunk, max_targets, keep_logits, allowed=allowed)
    names = output_names(entropy, outputs)
    predicted = logps_of_targets((hidden[before], weight, bias), targets, names, options)
    # The samples' slots: each shows what predicts the token after it.
    slots = tree.slot_of_token
    first = tree.position_ids[slots] == 0
    after, is_last = slots.roll(-1), first.roll(-1)
    found = tuple(
        values[after].masked_fill(is_last, -1 if name == "top1" else 0)
        for name, values in zip(names, predicted, strict=True)
    )
    return found[0] if outputs is None and not entropy else found
