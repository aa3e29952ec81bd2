"""Examples end to end in one row, without padding between them."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import ClassVar

import torch

from packing_ops._args import int64_tensor, integer
from packing_ops.boundaries import mask_boundary_labels
from packing_ops.data._examples import check_examples, column, flattened, lengths_of, optional_column, tokens_of
from packing_ops.metadata import PackedMetadata


@dataclass
class PaddingFreeCollator:
    """Examples end to end in one row, with the options of transformers' DataCollatorWithFlattening.

    Attributes:
        return_flash_attn_kwargs: give ``cu_seq_lens_q/k`` and ``max_length_q/k``.
        return_position_ids: give ``position_ids``.
        return_seq_idx: give ``seq_idx``.
        separator_id: label of each document's first token, which nothing predicts.
        max_seq_length: tokens of the row. A shorter one is filled: input_ids pad_token_id, labels -100. The filling is
            a segment of its own in position_ids, seq_idx and cu_seq_lens, so that no document attends to it.
        overlong: what happens to examples that are too many for max_seq_length or max_sequences_per_bin, in their order:
            ``"error"``; ``"truncate"``: the row is cut there; ``"drop"``: examples that do not fit whole are left out.
            What is lost is counted in a warning. ``"carry"``: the first examples that fit, whole; the others are the
            caller's to put before those of the next batch, ``selection(features).carried`` says which. ``"own"``: the
            same, and a first example that is longer than max_seq_length is kept whole, alone in a longer row.
        pad_token_id: see max_seq_length.
        max_sequences_per_bin: examples of the row at most.

    Called with examples of 1-D ``input_ids`` (lists or tensors) and, in all or in none, ``labels`` (input_ids by
    default, not shifted) and ``attention_mask`` (all 1: examples have no padding), it returns

        input_ids, labels, position_ids: int64 ``[1, total]``.
        seq_idx: int32 ``[1, total]``, index of each token's document.
        cu_seq_lens_q, cu_seq_lens_k: one int32 tensor ``[num_documents + 1]``.
        max_length_q, max_length_k: longest document, an int.

    on the device of the examples.

    Example:
        >>> batch = PaddingFreeCollator(max_seq_length=6)([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 7, 8, 9, 0]], [[-100, 6, -100, 8, 9, -100]])
        >>> batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]
        ([[0, 1, 0, 1, 2, 0]], [0, 2, 5, 6], 3)

        Rows one after the other, nothing left out:

        >>> collator, queue = PaddingFreeCollator(max_seq_length=6, overlong="carry"), [{"input_ids": [7] * 4}] * 3
        >>> while queue:
        ...     chosen = collator.selection(queue)
        ...     print(collator(queue)["cu_seq_lens_q"].tolist(), len(chosen.carried), chosen.carried_tokens)
        ...     queue = [queue[i] for i in chosen.carried]
        [0, 4, 6] 2 8
        [0, 4, 6] 1 4
        [0, 4, 6] 0 0

    Raises:
        ValueError: no examples; one without tokens; a key that only some examples have; labels of another length than
            input_ids; padding in an attention_mask; more than max_seq_length tokens or max_sequences_per_bin examples
            with ``overlong="error"``, or nothing that fits; an unknown policy; return_tensors other than "pt".
        TypeError: a pad_token_id that is no integer (None: a tokenizer without one); examples that are no list of
            dicts.

    Deterministic; no state, so threads may share one. Time and memory linear in the tokens.
    """

    return_flash_attn_kwargs: bool = True
    return_position_ids: bool = True
    return_seq_idx: bool = True
    separator_id: int = -100
    max_seq_length: int | None = None
    overlong: str = "error"
    pad_token_id: int = 0
    max_sequences_per_bin: int | None = None

    _prefixes: ClassVar[tuple[str, ...]] = ("",)

    def __post_init__(self):
        for name, unit in (("max_seq_length", "token"), ("max_sequences_per_bin", "example")):
            most = getattr(self, name)
            if most is not None and integer(most, name) < 1:
                raise ValueError(f"{name}: expected at least 1 {unit} or None, got {most}")
        if self.overlong not in ("error", "truncate", "drop", "carry", "own"):
            raise ValueError(f"overlong: expected 'error', 'truncate', 'drop', 'carry' or 'own', got {self.overlong!r}")
        self.pad_token_id = integer(self.pad_token_id, "pad_token_id")
        self.separator_id = integer(self.separator_id, "separator_id")

    def __call__(
        self, features: Sequence[Mapping], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict:
        _check_arguments(features, return_tensors)
        (documents,), _ = self._documents(features)
        return self._row(*documents, self.max_seq_length, separator_id)

    def selection(self, features: Sequence[Mapping]) -> "BatchSelection":
        """Which of the examples a batch of them holds, and what becomes of the others; nothing is collated.

        Args:
            features: what the collator is called with; input_ids and attention_mask are looked at.

        Example:
            >>> examples = [{"input_ids": [7] * length} for length in (2, 7, 2)]
            >>> PaddingFreeCollator(max_seq_length=6, overlong="drop").selection(examples)
            BatchSelection(kept=[0, 2], truncated=[], own=[], dropped=[1], carried=[], num_tokens=4, lost_tokens=7, carried_tokens=0)

        Raises:
            ValueError, TypeError: where the collator raises them for these input_ids.
        """
        _check_arguments(features, None)
        lengths = list(zip(*(tokens_of(features, prefix)[1] for prefix in self._prefixes), strict=True))
        return BatchSelection.of(lengths, self._kept(lengths), self.overlong, self.max_seq_length)

    def _documents(self, features) -> tuple[list[tuple[list, list, list[int]]], list[int]]:
        """For each prefix (input_ids, labels, lengths) of the documents that are kept; and the examples they are of."""
        sides = []
        for prefix in self._prefixes:
            input_ids, lengths = tokens_of(features, prefix)
            labels = optional_column(features, prefix + "labels", lengths, prefix + "input_ids")
            sides.append((input_ids, input_ids if labels is None else labels, lengths))
        by_example = list(zip(*(own for _, _, own in sides), strict=True))
        kept = self._kept(by_example)
        if kept != by_example:
            self._warn(BatchSelection.of(by_example, kept, self.overlong, self.max_seq_length), len(by_example))
            sides = [_cut(*side, own) for side, own in zip(sides, zip(*kept, strict=True), strict=True)]
        return sides, [index for index, own in enumerate(kept) if all(own)]

    def _kept(self, lengths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """How many tokens of each example the row holds: on all sides some, or on all none."""
        limit = math.inf if self.max_seq_length is None else self.max_seq_length
        most = len(lengths) if self.max_sequences_per_bin is None else self.max_sequences_per_bin
        longest = max(map(sum, zip(*lengths, strict=True)))
        if longest <= limit and len(lengths) <= most:
            return lengths
        if self.overlong == "error":
            over = f"max_seq_length: expected at least the {longest} tokens of the examples, got {limit}"
            if longest <= limit:
                over = f"max_sequences_per_bin: expected at least the {len(lengths)} examples, got {most}"
            raise ValueError(f"{over}; overlong='truncate', 'drop', 'carry' or 'own' accepts them")
        if self.overlong in ("carry", "own"):
            least = 1 if self.overlong == "own" else 0
            count = max(least, min(_num_fitting(lengths, limit), most))
            kept = lengths[:count]
            kept += [(0,) * len(own) for own in lengths[count:]]
        else:
            kept = self._taken(lengths, limit, most)
        if not any(map(any, kept)):
            room, advice = f"one of {len(lengths)} examples", ""
            if self.overlong == "carry":
                room = f"the first example of {max(lengths[0])} tokens"
                advice = "; overlong='own' keeps it whole"
            raise ValueError(f"max_seq_length: expected room for {room}, got {limit}{advice}")
        return kept

    def _taken(self, lengths: list[tuple[int, ...]], limit: float, most: int) -> list[tuple[int, ...]]:
        """_kept with overlong="truncate" or "drop": each example in turn as far as there is room."""
        kept: list[tuple[int, ...]] = []
        room = [limit] * len(lengths[0])
        for own in lengths:
            wanted: tuple = tuple(map(min, own, room)) if self.overlong == "truncate" else own
            fits = most > 0 and all(0 < n <= free for n, free in zip(wanted, room, strict=True))
            kept.append(wanted if fits else (0,) * len(own))
            room = [free - n for free, n in zip(room, kept[-1], strict=True)]
            most -= fits
        return kept

    def _warn(self, chosen: "BatchSelection", num_examples: int) -> None:
        if chosen.lost_tokens:
            given = {n: getattr(self, n) for n in ("max_seq_length", "max_sequences_per_bin")}
            limits = ", ".join(f"{name}={most}" for name, most in given.items() if most is not None)
            warnings.warn(
                f"{limits}: {len(chosen.dropped)} of {num_examples} examples dropped and {len(chosen.truncated)} cut, "
                f"{chosen.lost_tokens} of {chosen.num_tokens + chosen.lost_tokens} tokens lost",
                stacklevel=4,
            )

    def _row(self, input_ids: list, labels: list, lengths: list[int], total: int | None, separator_id: int | None):
        separator_id = self.separator_id if separator_id is None else integer(separator_id, "separator_id")
        tokens = flattened(input_ids, "input_ids")
        targets = tokens if labels is input_ids else flattened(labels, "labels")
        total = None if total is None else max(total, len(tokens))  # of overlong="own"
        metadata = PackedMetadata.from_lengths(lengths, total=total, device=tokens.device)
        targets = mask_boundary_labels(targets, metadata.cu_seqlens, ignore_index=separator_id)
        rest = metadata.total - len(tokens)
        batch = {
            "input_ids": torch.cat([tokens, tokens.new_full((rest,), self.pad_token_id)])[None],
            "labels": torch.cat([targets, targets.new_full((rest,), -100)])[None],
        }
        if self.return_position_ids:
            batch["position_ids"] = metadata.position_ids[None]
        if self.return_seq_idx:
            batch["seq_idx"] = metadata.seq_idx[None]
        if self.return_flash_attn_kwargs:
            batch.update(metadata.to_transformers())
        return batch


@dataclass
class PaddingFreeDPOCollator(PaddingFreeCollator):
    """The same for preference pairs: examples of ``chosen_*`` and ``rejected_*``, and ``index`` where they have it.

    max_seq_length is the budget of each side, and both must have room: a pair that has none on one side is left out of
    both, so that pairs stay pairs. With ``overlong="own"`` that is the rule of open-instruct's loader: the first pairs that
    fit, at least one, whole. selection and count_within_token_budget tell beforehand how many those are; for a whole
    dataset pack_sequences and PackedBatchSampler take the lengths of both sides.

    Attributes:
        concatenated: off, the keys of PaddingFreeCollator twice, as ``chosen_*`` and ``rejected_*``, each side a row
            with its own layout. On, once: one row for one forward, all chosen documents and then all rejected ones,
            whose cu_seq_lens go on where the chosen end. Documents i and i + num_pairs are a pair; the row is filled
            to ``2 * max_seq_length``, after both.

    Returns ``index`` int64 ``[num_pairs]`` too, of the pairs that are kept, where the examples have one.

    Example:
        >>> pair = {"chosen_input_ids": [5, 6], "rejected_input_ids": [5, 7, 8], "index": 3}
        >>> batch = PaddingFreeDPOCollator()([pair, pair])
        >>> batch["chosen_cu_seq_lens_q"].tolist(), batch["rejected_cu_seq_lens_q"].tolist(), batch["index"].tolist()
        ([0, 2, 4], [0, 3, 6], [3, 3])
        >>> PaddingFreeDPOCollator(concatenated=True)([pair, pair])["cu_seq_lens_q"].tolist()
        [0, 2, 4, 7, 10]

    Raises: as PaddingFreeCollator; TypeError for an index that is no integer.
    """

    concatenated: bool = False

    _prefixes: ClassVar[tuple[str, ...]] = ("chosen_", "rejected_")

    def __call__(
        self, features: Sequence[Mapping], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict:
        _check_arguments(features, return_tensors)
        sides, kept = self._documents(features)
        if self.concatenated:
            total = None if self.max_seq_length is None else 2 * self.max_seq_length
            input_ids, labels, lengths = (chosen + rejected for chosen, rejected in zip(*sides, strict=True))
            batch = self._row(input_ids, labels, lengths, total, separator_id)
        else:
            batch = {}
            for prefix, side in zip(self._prefixes, sides, strict=True):
                row = self._row(*side, self.max_seq_length, separator_id)
                batch.update({prefix + name: value for name, value in row.items()})
        if any("index" in example for example in features):
            index = column(features, "index")
            batch["index"] = int64_tensor([integer(index[i], "index") for i in kept])
        return batch


def count_within_token_budget(
    features: Sequence[Mapping], max_seq_length: int | None, *, max_sequences_per_bin: int | None = None
) -> int:
    """How many examples, from the first on, fit into rows of max_seq_length tokens: the rule of ``overlong="own"``.

    Args:
        features: dicts with ``input_ids``, or a preference pair with ``chosen_input_ids`` and ``rejected_input_ids``.
        max_seq_length: tokens of either side's row; None for no limit.
        max_sequences_per_bin: examples of a row at most; None for no limit.

    Returns:
        The number before the first example with which either side would exceed the budget; at least 1 where there is
        an example. Collate ``features[:count]`` and carry the others over to the next batch.

    Example:
        >>> pairs = [{"chosen_input_ids": [1] * c, "rejected_input_ids": [2] * r} for c, r in ((3, 4), (2, 3), (1, 1))]
        >>> count_within_token_budget(pairs, 6), count_within_token_budget(pairs, 7), count_within_token_budget(pairs, 2)
        (1, 2, 1)

    Raises:
        ValueError: no input_ids, or a name of them that some examples lack; a max_sequences_per_bin below 1.
        TypeError: features that are no list of dicts.
    """
    check_examples(features, "features")
    most = len(features) if max_sequences_per_bin is None else integer(max_sequences_per_bin, "max_sequences_per_bin")
    if most < 1 and features:
        raise ValueError(f"max_sequences_per_bin: expected at least 1 example or None, got {most}")
    if max_seq_length is None or not features:
        return min(most, len(features))
    names = [name for name in features[0] if name.endswith("input_ids")] or ["input_ids"]
    lengths = list(zip(*(lengths_of(column(features, name), name) for name in names), strict=True))
    return max(1, min(_num_fitting(lengths, max_seq_length), most))


@dataclass(frozen=True)
class BatchSelection:
    """What becomes of the examples of a batch, as indices of them, and of their tokens, on all sides.

    Attributes:
        kept: in the batch, whole or cut; in their order.
        truncated: of these, those that are cut.
        own: of these, the one that is longer than max_seq_length and has a row of its own.
        dropped: left out for good.
        carried: left out for the next batch.
        num_tokens: in the batch.
        lost_tokens: of what is dropped and cut.
        carried_tokens: of what is carried.
    """

    kept: list[int]
    truncated: list[int]
    own: list[int]
    dropped: list[int]
    carried: list[int]
    num_tokens: int
    lost_tokens: int
    carried_tokens: int

    @classmethod
    def of(cls, lengths: list[tuple[int, ...]], kept: list[tuple[int, ...]], overlong: str, limit: int | None):
        """From the tokens that each example has, and those that are kept."""
        index = range(len(lengths))
        left_out = [i for i in index if not any(kept[i])]
        num_tokens = sum(map(sum, kept))
        rest, carries = sum(map(sum, lengths)) - num_tokens, overlong in ("carry", "own")
        return cls(
            kept=[i for i in index if any(kept[i])],
            truncated=[i for i in index if any(kept[i]) and kept[i] != lengths[i]],
            own=[i for i in index if limit is not None and max(kept[i]) > limit],
            dropped=[] if carries else left_out,
            carried=left_out if carries else [],
            num_tokens=num_tokens,
            lost_tokens=0 if carries else rest,
            carried_tokens=rest if carries else 0,
        )


def _num_fitting(lengths: list[tuple[int, ...]], limit: float) -> int:
    """Of the first examples, as many as fit together on all sides."""
    totals = zip(*map(accumulate, zip(*lengths, strict=True)), strict=True)
    return sum(1 for _ in takewhile(lambda total: max(total) <= limit, totals))


def _check_arguments(features, return_tensors) -> None:
    if return_tensors not in (None, "pt"):
        raise ValueError(f'return_tensors: expected "pt" or None, got {return_tensors!r}')
    check_examples(features, "features")
    if not features:
        raise ValueError("features: expected at least one example, got none")


def _cut(input_ids: list, labels: list, lengths: list[int], kept: Sequence[int]) -> tuple[list, list, list[int]]:
    """The first ``kept`` tokens of each document; those of none are left out."""

    def cut(values):
        return [value[:n] for value, n in zip(values, kept, strict=True) if n]

    own = cut(input_ids)
    return own, own if labels is input_ids else cut(labels), [n for n in kept if n]
