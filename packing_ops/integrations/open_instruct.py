"""open-instruct's padding-free collator contract. Nothing here imports open-instruct or transformers."""

from dataclasses import dataclass, field
from typing import Any, Literal

from packing_ops import PackedMetadata
from packing_ops.data import PaddingFreeCollator, PaddingFreeDPOCollator

__all__ = ["TensorDataCollatorWithFlattening", "TensorDataCollatorWithFlatteningDPO"]


@dataclass
class TensorDataCollatorWithFlattening(PaddingFreeCollator):
    """PaddingFreeCollator under the name and with the keys of open-instruct's collator.

    Rows over max_seq_length are cut by default, with a warning that counts what is lost. What fills shorter ones has
    input_ids 0, labels -100, position_ids 0 and seq_idx -1.

    Attributes:
        return_tensors: taken, as transformers' collators have it; always "pt".
        pad_segment: the padding is a document too: cu_seq_lens end at the row's end (as attention over the whole row
            wants), and its position_ids count. Off, cu_seq_lens have the real documents alone, as open-instruct's.

    Example:
        >>> import torch
        >>> batch = TensorDataCollatorWithFlattening()([{"input_ids": torch.tensor(ids)} for ids in ([5, 6], [7, 8])])
        >>> batch["labels"], batch["position_ids"], batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]
        (tensor([[-100,    6, -100,    8]]), tensor([[0, 1, 0, 1]]), [0, 2, 4], 2)

    Raises: as PaddingFreeCollator.
    """

    return_num_targets: bool = field(default=False, kw_only=True)
    overlong: Literal["error", "truncate", "drop", "carry", "own"] = "truncate"
    return_tensors: str = "pt"
    pad_segment: bool = False

    def _row(
        self, input_ids: list[Any], labels: list[Any], lengths: list[int], total: int | None, separator_id: int | None
    ) -> dict[str, Any]:
        batch = super()._row(input_ids, labels, lengths, total, separator_id)
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
    """The same for preference pairs: ``chosen_*`` and ``rejected_*`` rows, each with its own layout.

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
