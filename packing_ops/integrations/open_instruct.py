"""open-instruct's padding-free collator contract. Nothing here imports open-instruct or transformers."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from packing_ops import PackedMetadata, mask_boundary_labels


@dataclass
class TensorDataCollatorWithFlattening:
    """Examples end to end in one row, under the name, options and keys of open-instruct's collator.

    Attributes:
        return_flash_attn_kwargs: give ``cu_seq_lens_q/k`` and ``max_length_q/k``.
        return_position_ids: give ``position_ids``.
        return_seq_idx: give ``seq_idx``.
        separator_id: label of each document's first token, which nothing predicts.
        max_seq_length: length of the row. Longer rows are cut, with a warning where a document is lost whole; shorter
            ones are filled with input_ids 0, labels -100, position_ids 0 and seq_idx -1.
        pad_segment: the filling is a document too: cu_seq_lens end at the row's end (as attention over the whole row
            wants), and its position_ids count. Off, cu_seq_lens have the real documents alone, as open-instruct's.

    Called with examples of 1-D ``input_ids`` (and ``labels``, which default to input_ids) it returns

        input_ids, labels: ``[1, total]``, dtype of the examples.
        position_ids: int64 ``[1, total]``; seq_idx: int32 ``[1, total]``.
        cu_seq_lens_q, cu_seq_lens_k: one int32 tensor ``[num_documents + 1]``; max_length_q, max_length_k: ints.
        _num_valid_seqs: documents in the row, an int.

    Example:
        >>> batch = TensorDataCollatorWithFlattening()([{"input_ids": torch.tensor(ids)} for ids in ([5, 6], [7, 8])])
        >>> batch["labels"], batch["position_ids"], batch["cu_seq_lens_q"].tolist(), batch["max_length_q"]
        (tensor([[-100,    6, -100,    8]]), tensor([[0, 1, 0, 1]]), [0, 2, 4], 2)

    Raises:
        ValueError: no examples; labels of another length than input_ids.
    """

    return_flash_attn_kwargs: bool = True
    return_position_ids: bool = True
    return_seq_idx: bool = True
    separator_id: int = -100
    max_seq_length: int | None = None
    return_tensors: str = "pt"
    pad_segment: bool = False

    def __post_init__(self):
        if self.max_seq_length is not None and self.max_seq_length < 1:
            raise ValueError(f"max_seq_length: expected at least 1 token or None, got {self.max_seq_length}")

    def __call__(
        self, features: Sequence[Mapping], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict:
        ids, labels = _tensors(features)
        return self._row(ids, labels, self._kept([len(own) for own in ids]), separator_id)

    def _kept(self, lengths: list[int]) -> list[int]:
        """What of each document stands before max_seq_length; those with nothing there are left out."""
        if self.max_seq_length is None or sum(lengths) <= self.max_seq_length:
            return lengths
        kept, room = [], self.max_seq_length
        while room > 0:
            kept.append(min(lengths[len(kept)], room))
            room -= kept[-1]
        if len(kept) < len(lengths):
            warnings.warn(
                f"max_seq_length={self.max_seq_length} dropped {len(lengths) - len(kept)} of {len(lengths)} "
                f"documents ({sum(lengths)} tokens)",
                stacklevel=3,
            )
        return kept

    def _row(self, ids, labels, lengths: list[int], separator_id: int | None) -> dict:
        """The first ``lengths`` tokens of the documents, and the filling after them."""
        separator_id = self.separator_id if separator_id is None else separator_id
        real = sum(lengths)
        total = real if self.max_seq_length is None else self.max_seq_length
        row = torch.cat(ids)[:real]
        metadata = PackedMetadata.from_lengths(lengths, total=total, device=row.device)
        targets = mask_boundary_labels(torch.cat(labels)[:real], metadata.cu_seqlens, ignore_index=separator_id)
        batch = {
            "input_ids": F.pad(row, (0, total - real))[None],
            "labels": F.pad(targets, (0, total - real), value=-100)[None],
            "_num_valid_seqs": len(lengths),
        }
        if self.return_position_ids:
            position_ids = metadata.position_ids.clone()
            if not self.pad_segment:
                position_ids[real:] = 0
            batch["position_ids"] = position_ids[None]
        if self.return_seq_idx:
            batch["seq_idx"] = F.pad(metadata.seq_idx[:real], (0, total - real), value=-1)[None]
        if self.return_flash_attn_kwargs:
            if self.pad_segment and total > real:
                metadata = PackedMetadata.from_lengths([*lengths, total - real], device=row.device)
            batch.update(metadata.to_transformers())
        return batch


def _tensors(features: Sequence[Mapping]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    if not features:
        raise ValueError("features: expected at least one example, got none")
    ids = [torch.as_tensor(example["input_ids"]) for example in features]
    labels = [torch.as_tensor(example.get("labels", example["input_ids"])) for example in features]
    for index, (own, row) in enumerate(zip(labels, ids, strict=True)):
        if own.shape != row.shape or row.dim() != 1:
            shapes = f"{list(own.shape)} and {list(row.shape)}"
            raise ValueError(f"labels: expected [length] like input_ids, got {shapes} in example {index}")
    return ids, labels


@dataclass
class TensorDataCollatorWithFlatteningDPO(TensorDataCollatorWithFlattening):
    """The same for preference pairs: ``chosen_*`` and ``rejected_*`` rows, each with its own layout.

    A document that max_seq_length leaves in only one of the two rows is taken out of that row as well, so that pairs
    stay pairs and no log-probability of it is summed. ``index`` int64 ``[num_pairs]`` where the examples have one.

    Example:
        >>> pair = {"chosen_input_ids": torch.tensor([5, 6]), "rejected_input_ids": torch.tensor([5, 7, 8])}
        >>> batch = TensorDataCollatorWithFlatteningDPO()([pair, pair])
        >>> batch["chosen_cu_seq_lens_q"].tolist(), batch["rejected_cu_seq_lens_q"].tolist()
        ([0, 2, 4], [0, 3, 6])
    """

    def __call__(
        self, features: Sequence[Mapping], return_tensors: str | None = None, separator_id: int | None = None
    ) -> dict:
        sides = {}
        for side in ("chosen_", "rejected_"):
            own = [{n.removeprefix(side): v for n, v in e.items() if n.startswith(side)} for e in features]
            ids, labels = _tensors(own)
            sides[side] = ids, labels, self._kept([len(document) for document in ids])
        pairs = min(len(kept) for _, _, kept in sides.values())
        result = {}
        for side, (ids, labels, kept) in sides.items():
            batch = self._row(ids, labels, kept[:pairs], separator_id)
            del batch["_num_valid_seqs"]
            result.update({side + name: value for name, value in batch.items()})
        if "index" in features[0]:
            result["index"] = torch.tensor([example["index"] for example in features])[:pairs]
        return result
