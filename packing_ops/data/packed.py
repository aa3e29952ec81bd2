"""A collator that packs several documents into each row, for data, tensor and context parallel training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Literal

import torch

from packing_ops._runtime.arguments import at_least, int64_tensor, integer, one_of, place_in
from packing_ops.data._examples import (
    OF_TOKENS,
    Examples,
    check_columns,
    check_examples,
    flattened,
    lengths_of_documents,
    num_actions_of,
    optional_column,
    tokens_of,
    without_rows,
)
from packing_ops.data._fields import check_fields, check_image_fields, document_field, joined_rows, token_fields
from packing_ops.data.context_parallel import aligned, packed_alignment, thd_partition_indices
from packing_ops.metadata import PackedMetadata
from packing_ops.packing import Strategy, pack_sequences, whole_rows

# Columns of its examples.
_KNOWN = ("input_ids", "attention_mask", "num_actions", "loss_mask", "position_ids", "allowed_offsets", *OF_TOKENS)


@dataclass
class PackedCollator:
    """Packs examples into rows, the same number for every rank, as SkyRL's PackedDataCollator does.

    Differences from SkyRL's:

    - No row is longer than the capacity, because documents count with their aligned length. SkyRL counts raw lengths:
      at alignment 32 it puts 41 documents of 33 tokens into one row of 2,624 slots for a capacity of 2,048. Where
      alignment makes no row too long, the batch is SkyRL's, byte for byte.
    - An example as long as the capacity therefore fits only if the alignment divides the capacity. Round the capacity
      up, or pass ``round_capacity=True``.
    - Weights are divided by their sum. SkyRL truncates the sum to an integer; for masks of 0 and 1 that is the same.
    - The batch is a dict and always packed; SkyRL's unpacked batches for evaluation are left to the caller.
      sub_seq_lengths are lists, response_length is an entry, order is new.

    Attributes:
        capacity: maximum slots of a row, counting aligned lengths.
        pad_token_id: fills the slots without a document.
        dp_size: number of data-parallel ranks; the rows of rank r are ``sequences.chunk(dp_size)[r]``.
        tp_size, cp_size: a document occupies its length rounded up to a multiple of tp_size, or of
            ``2 * tp_size * cp_size`` when cp_size > 1.
        fp8: the multiple is also a multiple of ``16 * cp_size``.
        document_multiple, row_multiple: in place of the multiple above, and a multiple for the width of the rows:
            ``PackedCollator(capacity, cp_size=cp, **packed_alignment(tp=tp, cp=cp, fp8=fp8)._asdict())``. What fills a
            row up is a document at its end, which counts nowhere.
        strategy: of pack_sequences: "ffd", "bfd", "next_fit", "first_fit" or "balanced". Those that sort do it by raw
            length, the later of two equal examples first, which is SkyRL's order. Aligned lengths then fall too.
        overlong: ``"error"``, or ``"own"``: an example over the capacity is kept whole, in a row without others. All
            rows are then as wide as this row.
        round_capacity: round the capacity up to a multiple of the alignment.
        token_fields, document_fields: as PaddingFreeCollator's, in the shapes ``[rows, width, ...]`` and a list of the
            documents' numbers per row; allowed_ids are those of the rows end to end.
        image_fields: as PaddingFreeCollator's; a list of what belongs to each row, None where it has no image.
            model_inputs joins them.

    Called with a list of examples, dicts of ``input_ids`` (integers), ``num_actions`` (int: how many tokens at the end
    are trained on), optional ``loss_mask`` (num_actions weights; 1 by default) and optional ``attention_mask`` (must be
    all 1: examples have no padding). Sequences are lists, arrays or tensors ``[length]`` or ``[1, length]``. The
    collator returns on the CPU

        sequences: int64 ``[rows, width]``; the width is the number of slots in the fullest row.
        attention_mask: int64 ``[rows, width]``, 1 for tokens.
        loss_mask: float32 ``[rows, width - 1]``. Slot p has the weight of token p + 1, divided by the sum of the
            weights of the whole batch, so that a sum over all rows is a mean. 0 at the last token of each document,
            since the first token of a document is no target.
        sub_seq_lengths: tokens of each document, a list per row, not aligned.
        response_length: width - 1, an int.
        order: index of each document's example, row by row. slice_batch, select_rows,
            pad_batch_to_multiple and stage_chunks keep its entries with their rows.

    Example:
        >>> examples = [{"input_ids": [1] * 5, "num_actions": 3}, {"input_ids": [2] * 7, "num_actions": 4}]
        >>> batch = PackedCollator(12)(examples)
        >>> batch["order"], batch["sub_seq_lengths"], batch["sequences"].shape
        ([1, 0], [[7, 5]], torch.Size([1, 12]))
        >>> (7 * batch["loss_mask"]).int().tolist()
        [[0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1]]

    Raises:
        ValueError: fewer examples than dp_size, or than rows are needed for a multiple of it; an example without
            tokens, or over the capacity with ``overlong="error"``; a column that would be dropped (docs/columns.md); an
            unknown overlong; a key that all or some examples lack; lengths that do not fit each other; padding in an
            attention_mask; weights that are negative or not finite, or whose sum float32 does not hold.
        TypeError: a capacity, size or pad_token_id that is no integer (None: a tokenizer without one); examples that
            are no list of dicts.

    A batch without any target has a loss_mask of zeros. Deterministic; stateless, so threads may share one. Time and
    memory are linear in the tokens.
    """

    capacity: int
    _: KW_ONLY
    pad_token_id: int = 0
    dp_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    fp8: bool = False
    document_multiple: int | None = None
    row_multiple: int = 1
    strategy: Strategy = "ffd"
    overlong: Literal["error", "own"] = "error"
    round_capacity: bool = False
    token_fields: Sequence[str] = ()
    document_fields: Sequence[str] = ()
    image_fields: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("capacity", "dp_size", "tp_size", "cp_size"):
            at_least(getattr(self, name), name, 1)
        self.pad_token_id = integer(self.pad_token_id, "pad_token_id")
        self.token_fields = check_fields(self.token_fields, "token_fields")
        self.document_fields = check_fields(self.document_fields, "document_fields")
        self._image_axes = check_image_fields(self.image_fields, [*self.token_fields, *self.document_fields])
        one_of(self.overlong, ("error", "own"), "overlong")
        if self.document_multiple is not None:
            chunks = 2 * self.cp_size if self.cp_size > 1 else 1
            if at_least(self.document_multiple, "document_multiple", 1) % chunks:
                raise ValueError(
                    f"document_multiple: expected a multiple of 2 * cp_size = {chunks}, got {self.document_multiple}"
                )
        if self.round_capacity:
            self.capacity = aligned(aligned(self.capacity, self.alignment), self._width_multiple)
        whole_rows(self.capacity, self._width_multiple, "capacity")

    @property
    def alignment(self) -> int:
        """Return the multiple of slots that a document takes."""
        if self.document_multiple is not None:
            return self.document_multiple
        return packed_alignment(self.tp_size, self.cp_size, self.fp8)

    @property
    def _width_multiple(self) -> int:
        return 1 if self.row_multiple == 1 else math.lcm(self.alignment, at_least(self.row_multiple, "row_multiple", 1))

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        examples = without_rows(examples)
        input_ids, lengths = self._tokens(examples)
        num_actions = num_actions_of(examples, lengths)
        weights = optional_column(examples, "loss_mask", num_actions, "num_actions")
        rows = self._rows(lengths)
        order = [index for row in rows for index in row]
        sub_seq_lengths = [[lengths[index] for index in row] for row in rows]

        # slots: from the start of a document to the start of the next one, or to the end of the row.
        slots_of_rows = self._aligned_rows(sub_seq_lengths)
        width = aligned(max(map(sum, slots_of_rows)), self._width_multiple)
        for row in slots_of_rows:
            row[-1] += width - sum(row)
        slots = int64_tensor([own for row in slots_of_rows for own in row])
        tokens = int64_tensor([lengths[index] for index in order])
        actions = int64_tensor([num_actions[index] for index in order])
        starts = slots.cumsum(0) - slots
        size = len(rows), width
        is_token = _covered(starts, tokens, math.prod(size))
        is_action = _covered(starts + tokens - actions, actions, math.prod(size))

        gaps = (slots - tokens).tolist()
        sequences = flattened(input_ids, "input_ids", order=order, gaps=gaps, fill=self.pad_token_id)
        weight = is_action.byte().float()  # bool.float() takes twice as long
        if weights is not None:
            given = flattened(weights, "loss_mask", torch.float32, order=order).cpu()
            least, most = given.aminmax() if given.numel() else (0, 0)
            if not 0 <= least <= most < math.inf:
                raise ValueError(f"loss_mask: expected finite weights of at least 0, got {least:g} to {most:g}")
            weight.masked_scatter_(is_action, given)
        weight[starts] = 0  # first tokens of documents: nothing predicts them
        targets = weight.sum().item()
        if targets == math.inf:
            raise ValueError("loss_mask: expected weights whose sum float32 holds, got more")
        return {
            "sequences": sequences.cpu().view(size),
            "attention_mask": is_token.long().view(size),
            "loss_mask": weight.view(size)[:, 1:] / (targets or 1.0),
            "sub_seq_lengths": sub_seq_lengths,
            "response_length": width - 1,
            "order": order,
            **self._fields([examples[index] for index in order], rows, (slots.tolist(), tokens.tolist()), size),
        }

    def _fields(
        self, examples: Examples, rows: list[list[int]], places: tuple[list[int], list[int]], size: tuple[int, int]
    ) -> dict[str, Any]:
        """Return the batch's fields other than the tokens; ``places``: slots and tokens of each document."""
        slots, tokens = places
        names = dict.fromkeys((*self.token_fields, *(name for name in OF_TOKENS if name in examples[0])))
        found = token_fields([*names], examples, tokens, slots, math.prod(size))
        fields: dict[str, Any] = {
            name: value if name.startswith("allowed_") else value.view(*size, *value.shape[1:])
            for name, value in found.items()
        }
        for name in self.document_fields:
            values = iter(document_field(name, examples))
            fields[name] = [[next(values) for _ in row] for row in rows]
        documents = iter(examples)
        images = [joined_rows([next(documents) for _ in row], self._image_axes) for row in rows]
        return fields | {name: [own.get(name) for own in images] for name in set[str]().union(*images)}

    def context_parallel_split(self, batch: Mapping[str, Any], cp_rank: int) -> dict[str, Any]:
        """Return one context-parallel rank's part of a batch, or of some of its rows: two chunks of each document.

        A document's aligned slots are split into ``2 * cp_size`` chunks; rank r holds chunks r and
        ``2 * cp_size - 1 - r`` (the zigzag split of Transformer Engine's thd layout), so that causal attention is equal
        work for all ranks.

        Args:
            batch: what calling this collator returned; at least sequences, attention_mask, loss_mask, sub_seq_lengths.
            cp_rank: 0 to cp_size - 1.

        Returns:
            sequences, attention_mask, position_ids, labels int64 and loss_mask float32, all
            ``[rows, width / cp_size]``. ``position_ids`` count from the start of the whole document. ``labels`` and
            ``loss_mask`` are those of the next token, which may be on another rank; weight 0 at the row's end.
            Other entries of the batch are copied over.

        Example:
            >>> collator = PackedCollator(8, cp_size=2)
            >>> batch = collator([{"input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "num_actions": 4}])
            >>> collator.context_parallel_split(batch, 0)["sequences"].tolist()
            [[1, 2, 7, 8]]

        Raises:
            ValueError: cp_rank outside 0 to cp_size - 1; rows that are not this collator's.
        """
        place_in(cp_rank, "cp_rank", self.cp_size, "cp_size")
        sequences = batch["sequences"]
        documents = self.packed_metadata(batch)
        slots = thd_partition_indices(documents.cu_seqlens, self.cp_size, cp_rank, total=documents.total)
        whole = {
            "sequences": sequences,
            "attention_mask": batch["attention_mask"],
            "position_ids": documents.position_ids,
            "labels": sequences.roll(-1, dims=1),
            "loss_mask": torch.nn.functional.pad(batch["loss_mask"], (0, 1)),
        }
        shares = {name: rows.reshape(-1)[slots].view(len(sequences), -1) for name, rows in whole.items()}
        if images := self._image_axes.keys() & batch.keys():
            raise NotImplementedError(f"{min(images)}: expected no images under context parallelism, got some")
        for name in (*self.token_fields, *(name for name in OF_TOKENS if name in batch)):
            if name == "allowed_ids":
                raise NotImplementedError("token_fields: expected no allowed_ids under context parallelism, got them")
            value = batch[name]
            share = value.flatten(0, 1)[slots.to(value.device)]
            shares[name] = share.view(len(sequences), -1, *value.shape[2:])
        return {**batch, **shares}

    def model_inputs(self, batch: Mapping[str, Any], *, ignore_index: int = -100) -> dict[str, Any]:
        """Return a batch, or some of its rows, as keyword arguments of a Hugging Face model: ``model(**inputs)``.

        Args:
            batch: what calling this collator returned, also after select_rows, slice_batch or pad_batch_to_multiple, on
                any device; at least sequences, loss_mask and sub_seq_lengths.
            ignore_index: label of what is not trained on.

        Returns:
            input_ids, position_ids int64 ``[rows, width]``: positions restart in each document.
            labels int64 ``[rows, width]``, not shifted: the token where its weight in loss_mask is not 0, else
                ignore_index. For weights other than 0 and 1, multiply ``reduction="none"`` losses by loss_mask.
            cu_seq_lens_q, cu_seq_lens_k: one int32 tensor for the rows flattened to ``[rows * width]``, as
                varlen_attention takes it. A document spans its aligned slots; the unused end of a row is a document
                too.
            max_length_q, max_length_k: the longest of these documents, an int.
            num_targets: labels that are not ignore_index, an int; of a batch on the CPU.
            num_tokens: int32 ``[num_documents]``, tokens of each of these documents, 0 for the unused end of a row;
                where a slot is padding.

        Example:
            >>> collator = PackedCollator(8)
            >>> examples = [{"input_ids": [1, 2, 3, 4, 5], "num_actions": 3}, {"input_ids": [6, 7], "num_actions": 1}]
            >>> inputs = collator.model_inputs(collator(examples))
            >>> inputs["input_ids"].tolist(), inputs["position_ids"].tolist(), inputs["labels"].tolist()
            ([[1, 2, 3, 4, 5, 6, 7]], [[0, 1, 2, 3, 4, 0, 1]], [[-100, -100, 3, 4, 5, -100, 7]])
            >>> inputs["cu_seq_lens_q"].tolist(), inputs["max_length_q"]
            ([0, 5, 7], 5)

        Raises:
            ValueError: rows that are not this collator's.
        """
        sequences = batch["sequences"]
        documents = self.packed_metadata(batch)
        weights = torch.nn.functional.pad(batch["loss_mask"], (1, 0))  # at the token itself
        if weights.is_cpu:  # elsewhere the host would wait
            documents = replace(documents, num_targets=int(weights.count_nonzero()))
        images = {name: [each for each in batch.get(name, ()) if each is not None] for name in self._image_axes}
        return {
            **{name: torch.cat(own, self._image_axes[name]) for name, own in images.items() if own},
            **{name: batch[name] for name in OF_TOKENS if name in batch},
            "input_ids": sequences,
            "position_ids": documents.position_ids.view(sequences.shape),
            "labels": torch.where(weights != 0, sequences, ignore_index),
            **documents.to_transformers(),
        }

    def _tokens(self, examples: Examples) -> tuple[list[Any], list[int]]:
        check_examples(examples, "examples")
        if len(examples) < self.dp_size:
            raise ValueError(f"examples: expected at least dp_size={self.dp_size}, got {len(examples)}")
        input_ids, lengths = tokens_of(examples)
        found: set[str] = set().union(*examples)
        known = {*_KNOWN, *self._image_axes, *self.token_fields, *self.document_fields}
        check_columns(examples, found, lengths, known)
        for i, own in enumerate(lengths_of_documents(examples, found & {"position_ids"}, lengths)):
            if len(own) > 1:
                raise ValueError(f"position_ids: expected one document in each example, got {len(own)} in example {i}")
        longest = max(lengths)
        slots = aligned(aligned(longest, self.alignment), self._width_multiple)
        if slots > self.capacity and self.overlong == "error":
            rounds = longest <= self.capacity
            raise ValueError(
                f"input_ids: expected at most capacity={self.capacity} slots, got {slots} for {longest} tokens "
                f"(alignment={self.alignment}) in example {lengths.index(longest)}, which exceeds bin capacity; "
                f"{'round_capacity=True or ' if rounds else ''}overlong='own' accepts it"
            )
        return input_ids, lengths

    def _rows(self, lengths: Sequence[int]) -> list[list[int]]:
        """Return the indices of the examples in each row; the rows of rank 0 are first."""
        index: Sequence[int] = range(len(lengths))
        if self.strategy not in ("next_fit", "first_fit"):  # these keep the order of the examples
            index = [i for _, i in sorted(zip(lengths, index, strict=True), reverse=True)]
        try:
            packing = pack_sequences(
                [lengths[i] for i in index],
                self.capacity,
                strategy=self.strategy,
                alignment=self.alignment,
                row_multiple=self._width_multiple,
                bins_multiple_of=self.dp_size,
                overlong=self.overlong,
            )
        except ValueError as error:
            raise ValueError(f"dp_size={self.dp_size}, strategy={self.strategy!r}: {error}") from None
        bins = (packing.bins[b] for rank in range(self.dp_size) for b in packing.rows_for_rank(rank, self.dp_size))
        return [[index[i] for i in bin] for bin in bins]

    def _aligned_rows(self, sub_seq_lengths: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the aligned length of each document, a list per row."""
        alignment = self.alignment
        return [[aligned(length, alignment) for length in row] for row in sub_seq_lengths]

    def packed_metadata(self, batch: Mapping[str, Any]) -> PackedMetadata:
        """Return PackedMetadata of the rows flattened into one: aligned documents, and the unused end of each row as
        one more.

        Where a slot is padding it has document_tokens.

        Args:
            batch: of this collator, or some rows of it.

        Example:
            >>> collator = PackedCollator(8)
            >>> batch = collator([{"input_ids": [1] * n, "num_actions": 1} for n in (5, 2, 6)])
            >>> collator.packed_metadata(batch).lengths.tolist()
            [6, 2, 5, 3]
            >>> collator.packed_metadata(batch).document_tokens.tolist()
            [6, 2, 5, 0]

        Raises:
            ValueError: sub_seq_lengths that do not fit the rows.
        """
        sequences, sub_seq_lengths = batch["sequences"], batch["sub_seq_lengths"]
        num_rows, width = sequences.shape
        if len(sub_seq_lengths) != num_rows:
            raise ValueError(f"sub_seq_lengths: expected {num_rows} lists, one per row, got {len(sub_seq_lengths)}")
        # Slots and tokens of each document, and after those of a row of its unused end
        segments: list[tuple[int, int]] = []
        for r, row in enumerate(self._aligned_rows(sub_seq_lengths)):
            rest = width - sum(row)
            if rest < 0 or rest % self.alignment:
                raise ValueError(
                    f"sub_seq_lengths: expected documents that leave a multiple of {self.alignment} of the {width} "
                    f"slots, got {sum(row)} slots of documents in row {r}"
                )
            segments += [*zip(row, sub_seq_lengths[r], strict=True), (rest, 0)]
        segments = [segment for segment in segments if segment[0]]
        metadata = PackedMetadata.from_lengths([slots for slots, _ in segments], device=sequences.device)
        if all(slots == tokens for slots, tokens in segments):
            return metadata
        tokens = torch.tensor([tokens for _, tokens in segments], dtype=torch.int32, device="cpu")
        return replace(metadata, document_tokens=tokens.to(sequences.device, non_blocking=True))


def _covered(starts: torch.Tensor, lengths: torch.Tensor, total: int) -> torch.Tensor:
    """Return bool ``[total]``, True in the ranges ``starts[i] : starts[i] + lengths[i]``, which do not overlap.

    Example:
        >>> _covered(torch.tensor([0, 4]), torch.tensor([2, 3]), 8).int().tolist()
        [1, 1, 0, 0, 1, 1, 1, 0]
    """
    edges, one = starts.new_zeros(total + 1, dtype=torch.int8), torch.ones_like(starts, dtype=torch.int8)
    edges.index_add_(0, starts, one).index_add_(0, starts + lengths, one, alpha=-1)
    return edges[:total].cumsum(0, dtype=torch.int8).view(torch.bool)
