"""Collators that concatenate the examples of a batch into one row, without padding between them."""

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from packing_ops._runtime.arguments import at_least, int64_tensor, integer, old_name, one_of
from packing_ops.boundaries import cu_seqlens_from_lengths, mask_boundary_labels
from packing_ops.data._examples import (
    OF_TOKENS,
    TARGETS,
    Documents,
    Examples,
    check_examples,
    check_pairs,
    column,
    documents_of,
    tokens_of,
    trained_on,
    without_rows,
)
from packing_ops.data._fields import (
    RopeIndex,
    axes_of_documents,
    check_fields,
    check_image_fields,
    document_field,
    joined_rows,
    token_fields,
)
from packing_ops.data.context_parallel import aligned
from packing_ops.data.token_budget import BatchSelection, num_fitting
from packing_ops.metadata import PackedMetadata
from packing_ops.packing import whole_rows
from packing_ops.prefix_tree import pack_prefix_tree


@old_name("max_seq_length", "capacity")
@dataclass
class PaddingFreeCollator:
    """Concatenates examples into one row, with the options of transformers' DataCollatorWithFlattening.

    Attributes:
        return_flash_attn_kwargs: return ``cu_seq_lens_q/k`` and ``max_length_q/k``.
        return_position_ids: return ``position_ids``.
        return_seq_idx: return ``seq_idx``.
        return_packed_metadata: return ``packed_metadata``, the PackedMetadata of the row, for code that calls
            packing_ops itself; models of transformers do not take it.
        return_num_targets: next to cu_seq_lens and in packed_metadata return ``num_targets``: the losses of packing_ops
            multiply no more rows. Whoever puts other labels in their place counts them again or drops it. A padded row
            has ``num_tokens`` too. False for exactly the keys of DataCollatorWithFlattening.
        separator_id: label of each document's first token, which nothing predicts. None leaves the labels as they are:
            those of the tokens themselves, for masked language models and tags.
        capacity: tokens of the row, None for as many as there are. A shorter row is padded: input_ids with
            pad_token_id, labels with -100. The padding is a separate document in position_ids, seq_idx and
            cu_seq_lens, so that no other attends to it.
        overlong: what happens to examples, taken in order, that exceed capacity or max_sequences_per_bin:
            ``"error"``;
            ``"truncate"``: the row is cut at the limit;
            ``"drop"``: an example that does not fit whole is dropped; later ones that fit are kept;
            ``"carry"``: the first examples that fit are kept. The caller puts the others,
            ``selection(features).carried``, at the front of the next batch;
            ``"own"``: like carry, but a first example that is longer than capacity is kept whole, the only one in a
            longer row. Truncate and drop warn with the number of lost tokens.
        pad_token_id: see capacity.
        max_sequences_per_bin: maximum number of examples in the row, or None.
        document_multiple, row_multiple: a document takes its tokens rounded up to a multiple of the first, filled like
            padding behind them; the row is padded to a multiple of the second, or to the largest one in capacity.
            ``packed_alignment(tp=, cp=, fp8=)`` gives both.
        token_fields: columns with a value for each token, of any shape behind it, such as ``"old_logps"``: returned as
            ``[1, total, ...]``, int64 or float32, 0 in slots without a token. ``"routed_experts"`` (of each layer) are
            int16 ``[1, total, layers, k]``, -1 there. ``"allowed_ids"``, a list of ids for each token, or all end to
            end with ``allowed_offsets``, become allowed_ids and allowed_offsets as token_logps takes them.
        document_fields: columns with one number for each example, such as ``"advantage"``: float32
            ``[num_documents]``, 0 for the padding.
        image_fields: ``{name: axis}`` of columns of images, videos and sounds: the rows of all examples are joined
            along the axis. Those of docs/columns.md are known, along axis 0.
        rope_index: ``model.model.get_rope_index`` of a model whose positions have several axes. It is asked for those
            of each example in a separate call; position_ids are ``[4, 1, total]``, text positions in front. A model
            after apply_packing_ops asks by itself, except where torch.compile makes one graph of it.

    Called with a list of examples, dicts of ``input_ids`` and, in all of them or nowhere, ``labels`` (input_ids by
    default, not shifted), ``attention_mask`` (must be all 1: examples have no padding) and the columns of
    docs/columns.md: masks of what is trained on, documents within an example, images. Each is a list, array or tensor
    ``[length]`` or ``[1, length]``. The collator returns

        input_ids, labels, position_ids: int64 ``[1, total]``.
        seq_idx: int32 ``[1, total]``, index of each token's document.
        cu_seq_lens_q, cu_seq_lens_k: one int32 tensor ``[num_documents + 1]``.
        max_length_q, max_length_k: longest document, an int.
        num_targets: labels that are not -100, an int, where the examples are on the CPU.
        num_tokens: slots before the padding, an int, if there is padding; where document_multiple pads documents the
            tokens of each, int32 ``[num_documents]``.

    on the device of the examples.

    Example:
        >>> batch = PaddingFreeCollator(capacity=6)([{"input_ids": [5, 6]}, {"input_ids": [7, 8, 9]}])
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 7, 8, 9, 0]], [[-100, 6, -100, 8, 9, -100]])
        >>> batch["position_ids"].tolist(), batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]
        ([[0, 1, 0, 1, 2, 0]], [0, 2, 5, 6], 3)

        Row after row, with nothing dropped:

        >>> collator, queue = PaddingFreeCollator(capacity=6, overlong="carry"), [{"input_ids": [7] * 4}] * 3
        >>> while queue:
        ...     chosen = collator.selection(queue)
        ...     print(collator(queue)["cu_seq_lens_q"].tolist(), len(chosen.carried), chosen.carried_tokens)
        ...     queue = [queue[i] for i in chosen.carried]
        [0, 4, 6] 2 8
        [0, 4, 6] 1 4
        [0, 4, 6] 0 0

    Raises:
        ValueError: no examples; one without tokens; a key that only some examples have; labels of another length than
            input_ids; a column that would be dropped; padding in an attention_mask; more than capacity tokens or
            max_sequences_per_bin examples with ``overlong="error"``, or no example that fits; an unknown overlong;
            return_tensors other than "pt".
        TypeError: a pad_token_id that is no integer (None: a tokenizer without one); examples that are no dicts.

    Deterministic; stateless, so threads may share one. Time and memory are linear in the tokens.
    """

    return_flash_attn_kwargs: bool = True
    return_position_ids: bool = True
    return_seq_idx: bool = True
    return_packed_metadata: bool = field(default=False, kw_only=True)
    return_num_targets: bool = field(default=True, kw_only=True)
    separator_id: int | None = -100
    capacity: int | None = None
    overlong: Literal["error", "truncate", "drop", "carry", "own"] = "error"
    pad_token_id: int = 0
    max_sequences_per_bin: int | None = None
    document_multiple: int = field(default=1, kw_only=True)
    row_multiple: int = field(default=1, kw_only=True)
    token_fields: Sequence[str] = field(default=(), kw_only=True)
    document_fields: Sequence[str] = field(default=(), kw_only=True)
    image_fields: Mapping[str, int] = field(default_factory=dict, kw_only=True)
    rope_index: RopeIndex | None = field(default=None, kw_only=True)

    _prefixes: ClassVar[tuple[str, ...]] = ("",)

    def __post_init__(self) -> None:
        for name, unit in (("capacity", "token"), ("max_sequences_per_bin", "example")):
            most = getattr(self, name)
            if most is not None:
                at_least(most, name, 1, f"{unit} or None")
        one_of(self.overlong, ("error", "truncate", "drop", "carry", "own"), "overlong")
        self.pad_token_id = integer(self.pad_token_id, "pad_token_id")
        self.separator_id = None if self.separator_id is None else integer(self.separator_id, "separator_id")
        at_least(self.document_multiple, "document_multiple", 1)
        at_least(self.row_multiple, "row_multiple", 1)
        self.token_fields = check_fields(self.token_fields, "token_fields")
        self.document_fields = check_fields(self.document_fields, "document_fields")
        self._image_axes = check_image_fields(self.image_fields, [*self.token_fields, *self.document_fields])
        if self._most_slots is not None and self._most_slots < self.document_multiple:
            raise ValueError(
                f"document_multiple: expected at most {self._most_slots} slots, got {self.document_multiple}"
            )

    @property
    def _most_slots(self) -> int | None:
        """Return the slots of a row: capacity in whole multiples of row_multiple."""
        return None if self.capacity is None else whole_rows(self.capacity, self.row_multiple, "capacity")

    @property
    def _longest(self) -> int | None:
        """Return the tokens of the longest example that fits."""
        most = self._most_slots
        return None if most is None else most // self.document_multiple * self.document_multiple

    def _slots(self, lengths: Sequence[int]) -> tuple[int, ...]:
        if self.document_multiple == 1:
            return tuple(lengths)
        return tuple(aligned(length, self.document_multiple) for length in lengths)

    def __call__(
        self, features: Sequence[Mapping[str, Any]], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict[str, Any]:
        features = without_rows(features)
        _check_arguments(features, return_tensors)
        known = {*self._image_axes, *self.token_fields, *self.document_fields, "allowed_offsets"}
        (documents,), kept = self._documents(features, known)
        examples = [features[i] for i in kept]
        images = joined_rows(examples, self._image_axes)
        if images and documents.num_tokens < sum(tokens_of(examples)[1]):
            raise ValueError(f"{min(images)}: expected examples that fit whole, got one that overlong='truncate' cuts")
        batch = self._row(documents, self._most_slots, separator_id)
        if self.rope_index is not None and self.return_position_ids:
            if several := [i for i, own in enumerate(documents.lengths) if len(own) > 1]:
                raise ValueError(
                    f"rope_index: expected one document in each example, got several in example {several[0]}"
                )
            places = documents.flat_lengths, self._slots(documents.flat_lengths)
            batch["position_ids"] = axes_of_documents(
                self.rope_index, examples, self._image_axes, *places, batch["position_ids"]
            )
        return batch | images | self._fields(examples, documents, batch["input_ids"])

    def _fields(self, examples: Examples, documents: Documents, row: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return token_fields and document_fields of the examples in the row."""
        lengths, total = list(map(sum, documents.lengths)), row.shape[1]
        slots = self._slots(lengths)
        found = token_fields(self.token_fields, examples, lengths, slots, total)
        fields = {name: value if name.startswith("allowed_") else value[None] for name, value in found.items()}
        rest = [0.0] * (total > sum(slots))
        for name in self.document_fields:
            by_example = zip(document_field(name, examples), documents.lengths, strict=True)
            values = [value for value, own in by_example for _ in own]
            fields[name] = torch.tensor(values + rest, dtype=torch.float32, device=row.device)
        return fields

    def selection(self, features: Sequence[Mapping[str, Any]]) -> BatchSelection:
        """Say which of the examples a batch would keep, cut, drop or carry over. Nothing is collated.

        Args:
            features: as for the collator; only input_ids and attention_mask are read.

        Example:
            >>> examples = [{"input_ids": [7] * length} for length in (2, 7, 2)]
            >>> selection = PaddingFreeCollator(capacity=6, overlong="drop").selection(examples)
            >>> selection.kept, selection.dropped, selection.num_tokens, selection.lost_tokens
            ([0, 2], [1], 4, 7)

        Raises:
            ValueError, TypeError: as the collator for these input_ids and attention_mask.
        """
        _check_arguments(features, None)
        lengths = list(zip(*(tokens_of(features, prefix)[1] for prefix in self._prefixes), strict=True))
        return BatchSelection.of(lengths, self._kept(lengths), self.overlong, self._longest)

    def _documents(self, features: Examples, known: Collection[str] = ()) -> tuple[list[Documents], list[int]]:
        """Return the kept documents, for each prefix, and the indices of their examples. ``known``: columns that are
        read elsewhere.
        """
        sides = [documents_of(features, prefix, known) for prefix in self._prefixes]
        by_example = list(zip(*(map(sum, side.lengths) for side in sides), strict=True))
        if self.document_multiple > 1 and any(len(own) > 1 for side in sides for own in side.lengths):
            raise ValueError(
                f"document_multiple: expected 1 beside examples of several documents, got {self.document_multiple}"
            )
        kept = self._kept(by_example)
        if kept != by_example:
            chosen = BatchSelection.of(by_example, kept, self.overlong, self._longest)
            given = {n: getattr(self, n) for n in ("capacity", "max_sequences_per_bin")}
            limits = ", ".join(f"{name}={most}" for name, most in given.items() if most is not None)
            if chosen.lost_tokens:
                warnings.warn(
                    f"{limits}: {len(chosen.dropped)} of {len(by_example)} examples dropped and "
                    f"{len(chosen.truncated)} cut, {chosen.lost_tokens} of "
                    f"{chosen.num_tokens + chosen.lost_tokens} tokens lost",
                    stacklevel=3,
                )
            sides = [side.cut(own) for side, own in zip(sides, zip(*kept, strict=True), strict=True)]
        return sides, [index for index, own in enumerate(kept) if all(own)]

    def _kept(self, lengths: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Return how many tokens of each example are kept, per side (chosen, rejected): 0 on one side is 0 on both."""
        limit = math.inf if self._most_slots is None else self._most_slots
        most = len(lengths) if self.max_sequences_per_bin is None else self.max_sequences_per_bin
        slots = list(map(self._slots, lengths))
        longest = max(map(sum, zip(*slots, strict=True)))
        if longest <= limit and len(lengths) <= most:
            return lengths
        if self.overlong == "error":
            unit = "tokens" if self.document_multiple == 1 else "slots"
            over = f"capacity: expected at least the {longest} {unit} of the examples, got {limit}"
            if longest <= limit:
                over = f"max_sequences_per_bin: expected at least the {len(lengths)} examples, got {most}"
            raise ValueError(f"{over}; overlong='truncate', 'drop', 'carry' or 'own' accepts them")
        if self.overlong in ("carry", "own"):
            least = 1 if self.overlong == "own" else 0
            count = max(least, min(num_fitting(slots, limit), most))
            kept = lengths[:count]
            kept += [(0,) * len(own) for own in lengths[count:]]
        else:
            kept = self._taken(lengths, limit, most)
        if not any(map(any, kept)):
            room, advice = f"one of {len(lengths)} examples", ""
            if self.overlong == "carry":
                room = f"the first example of {max(lengths[0])} tokens"
                advice = "; overlong='own' keeps it whole"
            raise ValueError(f"capacity: expected room for {room}, got {limit}{advice}")
        return kept

    def _taken(self, lengths: list[tuple[int, ...]], limit: float, most: int) -> list[tuple[int, ...]]:
        """Compute _kept for overlong="truncate" and "drop"."""
        kept: list[tuple[int, ...]] = []
        room = [limit] * len(lengths[0])
        for own in lengths:
            wanted = own
            if self.overlong == "truncate":
                whole = [min(free, n) for n, free in zip(self._slots(own), room, strict=True)]
                whole = [n // self.document_multiple * self.document_multiple for n in whole]
                wanted = tuple(int(min(pair)) for pair in zip(own, whole, strict=True))
            slots = self._slots(wanted)
            fits = most > 0 and all(0 < n <= free for n, free in zip(slots, room, strict=True))
            kept.append(wanted if fits else (0,) * len(own))
            room = [free - n for free, n in zip(room, self._slots(kept[-1]), strict=True)]
            most -= fits
        return kept

    def _targets(
        self,
        documents: Documents,
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor,
        separator_id: int | None,
        **gaps: Any,
    ) -> torch.Tensor:
        """Return labels, -100 where a mask says that a token is not trained on, and separator_id at documents' first
        tokens.
        """
        labels = documents.columns.get("labels")
        targets = tokens
        if labels is not None or gaps.get("gaps") is not None:
            targets = documents.flattened("input_ids" if labels is None else "labels", fill=-100, **gaps)
        for name in TARGETS:
            if name in documents.columns:
                targets = targets.masked_fill(~trained_on(documents, name, **gaps), -100)
        separator_id = self.separator_id if separator_id is None else integer(separator_id, "separator_id")
        if separator_id is None:
            return targets
        if labels is not None and targets.is_cpu:  # elsewhere the host would wait
            self._check_first_labels(targets, tokens, cu_seqlens[:-1].long())
        return mask_boundary_labels(targets, cu_seqlens, ignore_index=separator_id)

    def _check_first_labels(self, targets: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor) -> None:
        """Raise ValueError where a document's first label is not -100, separator_id or the token: nothing predicts
        it. The collator of contrib.open_instruct accepts them.
        """
        first = targets[starts]
        wrong = ((first != -100) & (first != self.separator_id) & (first != tokens[starts])).nonzero()
        if wrong.numel():
            raise ValueError(
                "labels: expected -100 or the token itself at a document's first token, which nothing predicts, got "
                f"{int(first[wrong[0]])}; PaddingFreeCollator(separator_id=None) keeps labels of the tokens themselves "
                "(masked language models, tags)"
            )

    def _row(self, documents: Documents, total: int | None, separator_id: int | None) -> dict[str, Any]:
        lengths = documents.flat_lengths
        slots = self._slots(lengths)
        gaps = [a - b for a, b in zip(slots, lengths, strict=True)] if self.document_multiple > 1 else None
        tokens = documents.flattened("input_ids", gaps=gaps, fill=self.pad_token_id)
        if total is not None or self.row_multiple > 1:
            total = max(total or 0, aligned(len(tokens), self.row_multiple))  # longer with overlong="own"
        metadata = PackedMetadata.from_lengths(list(slots), total=total, device=tokens.device)
        if gaps is not None and any(gaps):
            document_tokens = torch.tensor(lengths, dtype=torch.int32, device=tokens.device)
            metadata = replace(metadata, document_tokens=document_tokens)
        targets = self._targets(documents, tokens, metadata.cu_seqlens, separator_id, gaps=gaps)
        if self.return_num_targets and targets.is_cpu:  # elsewhere the host would wait
            metadata = replace(metadata, num_targets=int((targets != -100).sum()))
        rest = metadata.total - len(tokens)
        batch: dict[str, Any] = {
            "input_ids": torch.cat([tokens, tokens.new_full((rest,), self.pad_token_id)])[None],
            "labels": torch.cat([targets, targets.new_full((rest,), -100)])[None],
        }
        for name in OF_TOKENS:
            if name in documents.columns:
                values = documents.flattened(name, gaps=gaps)
                batch[name] = torch.cat([values, values.new_zeros(rest)])[None]
        if self.return_position_ids:
            batch["position_ids"] = metadata.position_ids[None]
        if self.return_seq_idx:
            batch["seq_idx"] = metadata.seq_idx[None]
        given = metadata.to_transformers()
        if not self.return_num_targets:
            given.pop("num_tokens", None)
        if self.return_flash_attn_kwargs:
            batch.update(given)
        elif "num_tokens" in given:  # positions do not say that the last document is padding
            batch["num_tokens"] = given["num_tokens"]
        if self.return_packed_metadata:
            batch["packed_metadata"] = metadata
        return batch


@old_name("max_seq_length", "capacity")
@dataclass
class PaddingFreeDPOCollator(PaddingFreeCollator):
    """PaddingFreeCollator for preference pairs: examples with ``chosen_*``, ``rejected_*`` and optionally ``index``.

    capacity limits each side separately. A pair without room on one side is left out of both, so that pairs stay
    pairs. ``overlong="own"`` is the rule of open-instruct's loader: the first pairs that fit, at least one, whole.
    selection and count_within_token_budget give their number without collating. To batch a whole dataset, pass the
    lengths of both sides to pack_sequences or PackedBatchSampler.

    Attributes:
        concatenated: False: the entries of PaddingFreeCollator twice, as ``chosen_*`` and ``rejected_*``, a row for
            each side. True: one row for one forward, all chosen documents and then all rejected ones, with one
            cu_seq_lens over both. Documents i and i + num_pairs are a pair; padding to ``2 * capacity`` is at the
            end.
        share_prompt: one row for one forward, a prefix tree (pack_prefix_tree) that holds once what documents share
            from their first token on, as a pair its prompt. Documents are in the order of ``concatenated``. Returned
            are

            input_ids, position_ids: ``[1, num_slots]``. Nothing pads the row; capacity limits the documents of a
                side, counted as without sharing.
            cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k: of the segments; max_length of the longest
                document.
            segment_parents: int32 ``[num_segments]``.
            slot_of_token: int64 ``[num_tokens]``: hidden states or logits of the row, indexed by it, are those of the
                documents end to end.
            sample_cu_seqlens: int32 ``[2 * num_pairs + 1]``, where each document is in slot_of_token and labels.
            labels: ``[1, num_tokens]``, of the documents and not of the row: keep them from the model, for the loss.
            prefix_tree: with return_packed_metadata the PrefixTree, which prefix_token_logps takes.

    Also returns ``index``, int64 ``[num_pairs]``, of the pairs that are kept, if the examples have one.

    Example:
        >>> pair = {"chosen_input_ids": [5, 6], "rejected_input_ids": [5, 7, 8], "index": 3}
        >>> batch = PaddingFreeDPOCollator()([pair, pair])
        >>> batch["chosen_cu_seq_lens_q"].tolist(), batch["rejected_cu_seq_lens_q"].tolist(), batch["index"].tolist()
        ([0, 2, 4], [0, 3, 6], [3, 3])
        >>> PaddingFreeDPOCollator(concatenated=True)([pair, pair])["cu_seq_lens_q"].tolist()
        [0, 2, 4, 7, 10]

        >>> prompt = list(range(128))
        >>> pair = {"chosen_input_ids": [*prompt, 200, 201], "rejected_input_ids": [*prompt, 300]}
        >>> batch = PaddingFreeDPOCollator(share_prompt=True)([pair])
        >>> batch["cu_seq_lens_q"].tolist(), batch["segment_parents"].tolist(), batch["sample_cu_seqlens"].tolist()
        ([0, 128, 130, 131], [-1, 0, 0], [0, 130, 259])

    Raises: as PaddingFreeCollator; TypeError for an index that is no integer.
    """

    concatenated: bool = False
    share_prompt: bool = field(default=False, kw_only=True)

    _prefixes: ClassVar[tuple[str, ...]] = ("chosen_", "rejected_")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("document_multiple", "row_multiple"):
            if self.share_prompt and getattr(self, name) > 1:
                raise ValueError(f"{name}: expected 1 beside share_prompt, got {getattr(self, name)}")
        for name in ("token_fields", "document_fields", "image_fields", "rope_index"):
            if given := getattr(self, name):
                raise NotImplementedError(f"{name}: expected none for preference pairs, got {given}")

    def __call__(
        self, features: Sequence[Mapping[str, Any]], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict[str, Any]:
        _check_arguments(features, return_tensors)
        sides, kept = self._documents(features)
        check_pairs(features, sides)
        if self.share_prompt:
            batch = self._tree(sides[0] + sides[1], separator_id)
        elif self.concatenated:
            total = None if self._most_slots is None else 2 * self._most_slots
            batch = self._row(sides[0] + sides[1], total, separator_id)
        else:
            batch = {}
            for prefix, side in zip(self._prefixes, sides, strict=True):
                row = self._row(side, self._most_slots, separator_id)
                batch.update({prefix + name: value for name, value in row.items()})
        if any("index" in example for example in features):
            index = column(features, "index")
            batch["index"] = int64_tensor([integer(index[i], "index") for i in kept])
        return batch

    def _tree(self, documents: Documents, separator_id: int | None) -> dict[str, Any]:
        if of_tokens := documents.columns.keys() & set(OF_TOKENS):
            raise ValueError(
                f"{min(of_tokens)}: expected none beside share_prompt, whose rows are of several documents"
            )
        lengths = documents.flat_lengths
        tokens = documents.flattened("input_ids")
        tree = pack_prefix_tree(tokens, cu_seqlens_from_lengths(lengths)).to(tokens.device)
        batch = {
            "input_ids": tokens[tree.token_of_slot][None],
            "position_ids": tree.position_ids[None],
            "cu_seq_lens_q": tree.cu_seqlens,
            "cu_seq_lens_k": tree.cu_seqlens,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
            "segment_parents": tree.parents,  # a tensor: trainers that move tuples rebuild them from one argument
            "slot_of_token": tree.slot_of_token,
            "row_of_token": tree.slot_of_token,  # the older name, until the next minor version
            "sample_cu_seqlens": tree.sample_cu_seqlens,
            "labels": self._targets(documents, tokens, tree.sample_cu_seqlens, separator_id)[None],
        }
        return {**batch, "prefix_tree": tree} if self.return_packed_metadata else batch


def _check_arguments(features: Examples, return_tensors: str | None) -> None:
    if return_tensors not in (None, "pt"):
        raise ValueError(f'return_tensors: expected "pt" or None, got {return_tensors!r}')
    check_examples(features, "features")
    if not features:
        raise ValueError("features: expected at least one example, got none")
