"""Oracle of packing_ops.prefix_tree: block by block, in plain Python lists, one recursion for the trie and one for
cuts.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from packing_ops.reference import packing

FORK_ALIGNMENT = 128

Tokens = tuple[int, ...]


@dataclass
class Node:
    begin: int  # depths
    end: int
    served: list[int]  # samples with tokens in it, ascending
    ends: list[int] = field(default_factory=list)  # those of them that end in it
    children: list["Node"] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.end - self.begin + sum(child.rows for child in self.children)


@dataclass
class Piece:
    nodes: list[Node]  # each with one child in this bin, but for the last
    parts: list["Piece"]

    @property
    def begin(self) -> int:
        return self.nodes[0].begin

    @property
    def end(self) -> int:
        return self.nodes[-1].end

    @property
    def rows(self) -> int:
        return self.end - self.begin + sum(part.rows for part in self.parts)


def pack_prefix_tree(
    given: Sequence[Sequence[int]],
    groups: Sequence[int] | None = None,
    capacity: float = math.inf,
    min_shared: int = FORK_ALIGNMENT,
) -> dict[str, Any]:
    """Return the fields of PrefixTree as lists; ``rows`` as (sample, depth)."""
    samples = [tuple(sample) for sample in given]
    groups = [0] * len(samples) if groups is None else groups
    first_block = -(-min_shared // FORK_ALIGNMENT) * FORK_ALIGNMENT
    top = Node(0, 0, [], [i for i, sample in enumerate(samples) if not sample])
    for group in {*groups}:
        members = [i for i, sample in enumerate(samples) if sample and groups[i] == group]
        top.children += [grow(samples, run, 0, first_block) for run in branches(samples, members, 0, first_block)]
    top.children.sort(key=lambda node: node.served[0])

    found: dict[str, Any] = {name: [] for name in ("token_of_slot", "position_ids", "parents")}
    found |= {"cu_seqlens": [0], "bin_offsets": [0], "sample_bins": [-1] * len(samples)}
    slot_of: dict[tuple[int, int], int] = {}
    for bin, piece in enumerate(pieces(top, capacity) if samples else []):
        emit(piece, -1, bin, samples, found, slot_of)
        found["bin_offsets"].append(len(found["parents"]))
    found["slot_of_token"] = [slot_of[i, depth] for i, sample in enumerate(samples) for depth in range(len(sample))]
    found["copies"] = [0] * len(found["token_of_slot"])
    for slot in found["slot_of_token"]:
        found["copies"][slot] += 1
    found["repeated_at_forks"] = top.rows - distinct_prefixes(samples, groups)
    found["repeated_by_cuts"] = len(found["token_of_slot"]) - top.rows
    return found


def branches(samples: Sequence[Tokens], members: list[int], depth: int, block: int) -> list[list[int]]:
    """Group samples that are equal up to ``depth`` by their next block; a shorter rest goes with the first that it
    begins.
    """
    rests = sorted({samples[i][depth : depth + block] for i in members})
    goes_with = {rest: rest for rest in rests}
    for after, rest in itertools.pairwise(reversed(rests)):
        if after[: len(rest)] == rest:
            goes_with[rest] = goes_with[after]
    runs: dict[Tokens, list[int]] = {}
    for i in members:
        runs.setdefault(goes_with[samples[i][depth : depth + block]], []).append(i)
    return [*runs.values()]


def grow(samples: Sequence[Tokens], members: list[int], depth: int, block: int) -> Node:
    node = Node(depth, max(len(samples[i]) for i in members), members)
    while any(len(samples[i]) >= depth + block for i in members):
        depth, block = depth + block, FORK_ALIGNMENT
        node.ends += [i for i in members if len(samples[i]) <= depth]
        members = [i for i in members if len(samples[i]) > depth]
        runs = branches(samples, members, depth, block)
        if len(runs) != 1:
            node.end = depth
            node.children = [grow(samples, run, depth, block) for run in runs]
            return node
        (members,) = runs
    node.ends += members
    return node


def pieces(node: Node, capacity: float) -> list[Piece]:
    """Return the node with all that is below it, or copies of the node with parts of that."""
    if node.begin + node.rows <= capacity:
        return [whole(node)]
    parts = [piece for child in node.children for piece in pieces(child, capacity)]
    bins = packing.pack_sequences([part.rows for part in parts], int(capacity) - node.end)
    return [joined(node, [parts[i] for i in sorted(item for item, _, _ in bin)]) for bin in bins]


def whole(node: Node) -> Piece:
    return Piece([node], [whole(child) for child in node.children])


def joined(node: Node, parts: list[Piece]) -> Piece:
    return Piece([node, *parts[0].nodes], parts[0].parts) if len(parts) == 1 else Piece([node], parts)


def emit(
    piece: Piece,
    parent: int,
    bin: int,
    samples: Sequence[Tokens],
    found: dict[str, Any],
    slot_of: dict[tuple[int, int], int],
) -> list[int]:
    """Add the piece's segments, and return its samples."""
    first_slot, segment = len(found["token_of_slot"]), parent
    if piece.end > piece.begin:
        segment = len(found["parents"])
        sample = next(i for i in piece.nodes[-1].served if len(samples[i]) >= piece.end)
        found["parents"].append(parent)
        found["token_of_slot"] += [(sample, depth) for depth in range(piece.begin, piece.end)]
        found["position_ids"] += range(piece.begin, piece.end)
        found["cu_seqlens"].append(len(found["token_of_slot"]))
    here = [i for node in piece.nodes for i in node.ends if found["sample_bins"][i] < 0]
    for i in here:
        found["sample_bins"][i] = bin
    for part in piece.parts:
        here += emit(part, segment, bin, samples, found, slot_of)
    for i in here:
        for depth in range(piece.begin, min(piece.end, len(samples[i]))):
            slot_of[i, depth] = first_slot + depth - piece.begin
    return here


def distinct_prefixes(samples: Sequence[Tokens], groups: Sequence[int]) -> int:
    """Count the tokens of the tries that fork anywhere."""
    tries: dict[int, Any] = {}
    count = 0
    for group, sample in zip(groups, samples, strict=True):
        trie = tries.setdefault(group, {})
        for token in sample:
            count += token not in trie
            trie = trie.setdefault(token, {})
    return count
