"""Examples end to end in one row, without padding between them."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

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
        overlong: what happens to examples that are too many for max_seq_length, in their order:
            ``"error"``; ``"truncate"``: the row is cut there; ``"drop"``: examples that do not fit whole are left out.
            What is lost is counted in a warning.
        pad_token_id: see max_seq_length.

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

    Raises:
        ValueError: no examples; one without tokens; a key that only some examples have; labels of another length than
            input_ids; padding in an attention_mask; more than max_seq_length tokens with ``overlong="error"``, or
            nothing that fits; an unknown policy; return_tensors other than "pt".
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

    def __post_init__(self):
        if self.max_seq_length is not None and integer(self.max_seq_length, "max_seq_length") < 1:
            raise ValueError(f"max_seq_length: expected at least 1 token or None, got {self.max_seq_length}")
        if self.overlong not in ("error", "truncate", "drop"):
            raise ValueError(f"overlong: expected 'error', 'truncate' or 'drop', got {self.overlong!r}")
        self.pad_token_id = integer(self.pad_token_id, "pad_token_id")
        self.separator_id = integer(self.separator_id, "separator_id")

    def __call__(
        self, features: Sequence[Mapping], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict:
        _check_arguments(features, return_tensors)
        (documents,), _ = self._documents(features, [""])
        return self._row(*documents, self.max_seq_length, separator_id)

    def _documents(self, features, prefixes: list[str]) -> tuple[list[tuple], list[int]]:
        """For each prefix (input_ids, labels, lengths) of the documents that are kept; and the examples they are of."""
        sides = []
        for prefix in prefixes:
            input_ids, lengths = tokens_of(features, prefix)
            labels = optional_column(features, prefix + "labels", lengths, prefix + "input_ids")
            sides.append((input_ids, input_ids if labels is None else labels, lengths))
        lengths = list(zip(*(own for _, _, own in sides), strict=True))
        kept = self._kept(lengths)
        if kept != lengths:
            sides = [_cut(*side, own) for side, own in zip(sides, zip(*kept, strict=True), strict=True)]
        return sides, [index for index, own in enumerate(kept) if all(own)]

    def _kept(self, lengths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """How many tokens of each example fit into max_seq_length: on all sides some, or on all none."""
        totals = [sum(side) for side in zip(*lengths, strict=True)]
        limit = self.max_seq_length
        if limit is None or max(totals) <= limit:
            return lengths
        if self.overlong == "error":
            raise ValueError(
                f"max_seq_length: expected at least the {max(totals)} tokens of the examples, got {limit}; "
                "overlong='truncate' or 'drop' accepts them"
            )
        kept, room = [], [limit] * len(totals)
        for own in lengths:
            wanted = tuple(map(min, own, room)) if self.overlong == "truncate" else own
            fits = all(0 < n <= free for n, free in zip(wanted, room, strict=True))
            kept.append(wanted if fits else (0,) * len(own))
            room = [free - n for free, n in zip(room, kept[-1], strict=True)]
        dropped = sum(not any(own) for own in kept)
        if dropped == len(lengths):
            raise ValueError(f"max_seq_length: expected room for one of {len(lengths)} examples, got {limit}")
        cut = sum(own != all_of_it for own, all_of_it in zip(kept, lengths, strict=True)) - dropped
        lost = sum(totals) - sum(map(sum, kept))
        warnings.warn(
            f"max_seq_length={limit}: {dropped} of {len(lengths)} examples dropped and {cut} cut, "
            f"{lost} of {sum(totals)} tokens lost",
            stacklevel=4,
        )
        return kept

    def _row(self, input_ids: list, labels: list, lengths: list[int], total: int | None, separator_id: int | None):
        separator_id = self.separator_id if separator_id is None else integer(separator_id, "separator_id")
        tokens = flattened(input_ids, "input_ids")
        targets = tokens if labels is input_ids else flattened(labels, "labels")
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

    max_seq_length is the budget of each side. A pair that has no room on one side is left out of both, so that pairs
    stay pairs; count_within_token_budget tells beforehand how many fit.

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

    def __call__(
        self, features: Sequence[Mapping], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict:
        _check_arguments(features, return_tensors)
        sides, kept = self._documents(features, ["chosen_", "rejected_"])
        if self.concatenated:
            total = None if self.max_seq_length is None else 2 * self.max_seq_length
            batch = self._row(
                *(chosen + rejected for chosen, rejected in zip(*sides, strict=True)), total, separator_id
            )
        else:
            batch = {}
            for prefix, side in zip(("chosen_", "rejected_"), sides, strict=True):
                row = self._row(*side, self.max_seq_length, separator_id)
                batch.update({prefix + name: value for name, value in row.items()})
        if any("index" in example for example in features):
            index = column(features, "index")
            batch["index"] = int64_tensor([integer(index[i], "index") for i in kept])
        return batch


def count_within_token_budget(features: Sequence[Mapping], max_seq_length: int | None) -> int:
    """How many examples, from the first on, fit into rows of max_seq_length tokens.

    Args:
        features: dicts with ``input_ids``, or a preference pair with ``chosen_input_ids`` and ``rejected_input_ids``.
        max_seq_length: tokens of either side's row; None for no limit.

    Returns:
        The number before the first example with which either side would exceed the budget; at least 1 where there is
        an example. Collate ``features[:count]`` and carry the others over to the next batch.

    Example:
        >>> pairs = [{"chosen_input_ids": [1] * c, "rejected_input_ids": [2] * r} for c, r in ((3, 4), (2, 3), (1, 1))]
        >>> count_within_token_budget(pairs, 6), count_within_token_budget(pairs, 7), count_within_token_budget(pairs, 2)
        (1, 2, 1)

    Raises:
        ValueError: no input_ids, or a name of them that some examples lack.
        TypeError: features that are no list of dicts.
    """
    check_examples(features, "features")
    if max_seq_length is None or not features:
        return len(features)
    names = [name for name in features[0] if name.endswith("input_ids")] or ["input_ids"]
    sides = [accumulate(lengths_of(column(features, name), name)) for name in names]
    fitting = takewhile(lambda totals: max(totals) <= max_seq_length, zip(*sides, strict=True))
    return max(1, sum(1 for _ in fitting))


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
