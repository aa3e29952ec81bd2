"""open-instruct's padding-free collators, GRPO's packs, two lines for its log. Nothing here imports open-instruct."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from packing_ops import PackedMetadata, pack_sequences
from packing_ops.data import PaddingFreeCollator, PaddingFreeDPOCollator, packing_advice
from packing_ops.integrations.adapters import at_least, index_tensor

__all__ = [
    "TensorDataCollatorWithFlattening",
    "TensorDataCollatorWithFlatteningDPO",
    "mixing_warning",
    "packing_advice",
    "packs_for_ranks",
]


@dataclass
class TensorDataCollatorWithFlattening(PaddingFreeCollator):
    """PaddingFreeCollator under the name and with the keys of open-instruct's collator.

    Rows over max_seq_length are cut by default, with a warning that counts what is lost. What fills shorter ones has
    input_ids 0, labels -100, position_ids 0 and seq_idx -1.

    Attributes:
        max_seq_length: open-instruct's name of capacity.
        return_tensors: taken, as transformers' collators have it; always "pt".
        pad_segment: the padding is a document too: cu_seq_lens end at the row's end (as attention over the whole row
            wants), and its position_ids count. Off, cu_seq_lens have only the real documents, as open-instruct's.

    Example:
        >>> import torch
        >>> batch = TensorDataCollatorWithFlattening()([{"input_ids": torch.tensor(ids)} for ids in ([5, 6], [7, 8])])
        >>> batch["labels"], batch["position_ids"], batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]
        (tensor([[-100,    6, -100,    8]]), tensor([[0, 1, 0, 1]]), [0, 2, 4], 2)

    Raises: as PaddingFreeCollator.
    """

    return_num_targets: bool = field(default=False, kw_only=True)
    max_seq_length: int | None = field(default=None, kw_only=True)
    overlong: Literal["error", "truncate", "drop", "carry", "own"] = "truncate"
    return_tensors: str = "pt"
    pad_segment: bool = False

    def __post_init__(self) -> None:
        if self.max_seq_length is not None:
            self.capacity = self.max_seq_length
        super().__post_init__()

    def _check_first_labels(self, *_: Any) -> None:
        """Accept any labels, as open-instruct's collator does."""

    def _row(self, documents: Any, total: int | None, separator_id: int | None) -> dict[str, Any]:
        batch = super()._row(documents, total, separator_id)
        lengths = documents.flat_lengths
        padding = slice(sum(lengths), None)
        if self.return_seq_idx:
            batch["seq_idx"][:, padding] = -1
        if not self.pad_segment:
            if self.return_position_ids:
                batch["position_ids"][:, padding] = 0
            if self.return_flash_attn_kwargs:
                real = PackedMetadata.from_lengths(lengths, device=batch["input_ids"].device)
                batch.update(real.to_transformers())
        return batch


@dataclass
class TensorDataCollatorWithFlatteningDPO(TensorDataCollatorWithFlattening, PaddingFreeDPOCollator):
    """The same for preference pairs: ``chosen_*`` and ``rejected_*`` rows, each with a separate layout.

    Over max_seq_length the rule is that by which open-instruct's loader counts (``overlong="own"``): the first pairs of
    which both sides fit, whole, and at least one, in a longer row if it must be. The others are not lost: the loader
    carries what ``len(batch["index"])`` leaves, and ``selection(features)`` lists it. Nothing warns of it.
    ``index`` int64 ``[num_pairs]``, of the pairs in the batch, where the examples have one.

    Example:
        >>> pair = {"chosen_input_ids": [5, 6], "rejected_input_ids": [5, 7, 8]}
        >>> batch = TensorDataCollatorWithFlatteningDPO()([pair, pair])
        >>> batch["chosen_cu_seq_lens_q"].tolist(), batch["rejected_cu_seq_lens_q"].tolist()
        ([0, 2, 4], [0, 3, 6])
        >>> pairs = [{**pair, "index": i} for i in range(3)]
        >>> TensorDataCollatorWithFlatteningDPO(max_seq_length=6)(pairs)["index"].tolist()
        [0, 1]
    """

    overlong: Literal["error", "truncate", "drop", "carry", "own"] = "own"


def packs_for_ranks(lengths: torch.Tensor | Sequence[int], pack_length: int, num_ranks: int = 1) -> list[list[int]]:
    """Choose which sequences go into which packed row, so that each rank has a row and no row is left over.

    Args:
        lengths: int32 or int64 ``[num_sequences]``, tokens, or a list of ints. One over ``pack_length`` gets a separate
            row.
        pack_length: tokens of a row.
        num_ranks: of data parallelism, each of which takes as many rows as the others.

    Returns:
        The rows, each the indices of its sequences in ascending order: the first ``num_rows / num_ranks`` are for rank
        0, and so on. Few rows: of one rank by best fit ("bfd" of pack_sequences); of several a multiple of
        ``num_ranks``, nearly equal in tokens. With too few sequences for such a multiple, no multiple.

    Example:
        >>> packs_for_ranks([5, 4, 3, 2, 9], pack_length=10, num_ranks=2)
        [[4], [1], [0], [2, 3]]
        >>> packs_for_ranks([5, 4, 3], pack_length=16)
        [[0, 1, 2]]

    Raises:
        ValueError: pack_length or num_ranks below 1, a negative length.

    Determinism: the same packs in every call and on every rank.
    Synchronises: once for a CUDA tensor, which is copied.
    Memory: grows with the number of sequences, on the CPU.
    Gradients: none: integers.
    """
    lengths = index_tensor(lengths, "lengths")
    capacity, ranks = at_least(pack_length, "pack_length", 1, "token"), at_least(num_ranks, "num_ranks", 1)
    options: dict[str, Any] = {"strategy": "bfd" if ranks == 1 else "balanced", "overlong": "own"}
    packing = pack_sequences(lengths, capacity, **options)
    order = list(range(packing.num_bins))
    if ranks > 1 and max(-(-packing.num_bins // ranks), 1) * ranks <= lengths.numel():
        packing = pack_sequences(lengths, capacity, min_bins=ranks, bins_multiple_of=ranks, **options)
        order = [row for rank in range(ranks) for row in packing.rows_for_rank(rank, ranks)]
    bins = packing.bins
    return [sorted(bins[row]) for row in order]


@torch.no_grad()
def mixing_warning(model: torch.nn.Module, batch: Mapping[str, Any]) -> str | None:
    """Return a line for the log where a model mixes the documents of a packed row; None where it keeps them apart.

    It runs the model twice, as in evaluation: on the batch, and with other tokens in all documents but the last,
    whose logits must stay.

    Args:
        model: of ``model(**batch).logits``, on every rank where its parameters are sharded.
        batch: a row ``input_ids`` ``[1, total]`` with ``cu_seq_lens_q``, or ``position_ids`` that restart, and whatever
            else the model takes.

    Returns:
        The line, or None, also for one document.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
        >>> batch = TensorDataCollatorWithFlattening()([{"input_ids": [5, 6]}, {"input_ids": [7, 8]}])
        >>> mixing_warning(model, batch)
        >>> mixing_warning(model, {**batch, "attention_mask": torch.ones(1, 4)}).split(":")[0]
        'LlamaForCausalLM mixes the documents of a packed row'

    Raises:
        ValueError: neither cu_seq_lens_q nor position_ids; several rows.

    Determinism: as the model's.
    Synchronises: twice on CUDA. It is for the first batch of a run.
    Memory: two forwards without gradients, and their logits.
    Gradients: none.
    """
    ids = batch["input_ids"]
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"input_ids: expected a row [1, total], got {list(ids.shape)}")
    if (cu_seqlens := batch.get("cu_seq_lens_q")) is not None:
        edges = cu_seqlens.unique().tolist()  # without documents of no tokens
    elif (position_ids := batch.get("position_ids")) is not None:
        starts = (position_ids.flatten(0, -2) == 0).all(0)  # of one axis several: an image's first rows
        edges = [*starts.nonzero()[:, 0].tolist(), ids.shape[1]]
    else:
        raise ValueError(f"batch: expected cu_seq_lens_q or position_ids, got {sorted(batch)}")
    if len(edges) < 3:
        return None
    start, end = edges[-2:]  # what is behind cu_seqlens is padding, whose logits may be anything
    # Each token becomes the next greater one of the row, 0 and 1, so that none stays
    known = torch.cat([ids[0], ids.new_tensor([0, 1])]).unique()
    others = ids.clone()
    others[:, :start] = known[(torch.searchsorted(known, ids[:, :start]) + 1) % known.numel()]
    inputs = {name: value for name, value in batch.items() if name not in ("input_ids", "labels")}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        first, second = (
            model(**inputs, input_ids=each, use_cache=False).logits[:, start:end].float() for each in (ids, others)
        )
    finally:
        for module, training in modes:
            module.training = training
    finite = first.isfinite() & second.isfinite()  # a vocabulary's padding may have -inf
    largest = float(first[finite].abs().amax()) if finite.any() else 0.0
    moved = float((first - second)[finite].abs().amax()) / largest if largest else 0.0
    if moved < 2.0**-10:
        return None
    name = type(model).__name__
    return (
        f"{name} mixes the documents of a packed row: another first document moves the logits of the last by "
        f"{moved:.1%}. packing_ops.integrations.transformers.apply_packing_ops(model) keeps them apart, or says why not"
    )
