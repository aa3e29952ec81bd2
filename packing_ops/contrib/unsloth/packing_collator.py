"""A collator around a collator: whatever that one returns becomes one packed row."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packing_ops import PackedMetadata, mask_boundary_labels, unpad_inputs
from packing_ops.integrations.adapters import check_tensor, integer


class PackingCollator:
    """What unsloth.enable_packing makes of a collator; attributes are those of the collator inside.

    Called, or by ``torch_call`` as some trainers do it: both pack. transformers' ways for other frameworks are errors.
    """

    _unsloth_packing_wrapped = _unsloth_padding_free_lengths_wrapped = True  # Unsloth wraps no collator twice

    def __init__(self, collator: Any, sequence_lengths_key: str = "seq_lengths") -> None:
        self.collator = collator
        self.sequence_lengths_key = sequence_lengths_key

    def __call__(
        self, features: Sequence[Mapping[str, Any]], return_tensors: str | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        if return_tensors not in (None, "pt"):
            raise ValueError(f'return_tensors: expected "pt" or None, got {return_tensors!r}')
        return self.torch_call(features, **kwargs)

    def torch_call(self, examples: Sequence[Mapping[str, Any]], **kwargs: Any) -> dict[str, Any]:
        lengths = [length for example in examples for length in self._lengths(example)]
        collate = self.collator if callable(self.collator) else self.collator.torch_call
        batch = _one_row(dict(collate(examples, **kwargs)), sum(lengths))
        metadata = self._layout(batch, lengths)
        batch["position_ids"] = metadata.position_ids[None]
        batch.update(metadata.to_unsloth())
        if sum(lengths) < metadata.total:
            batch["num_tokens"] = sum(lengths)  # the padding counts in no balance loss
        if "labels" in batch:
            batch["labels"] = mask_boundary_labels(batch["labels"][0], metadata.cu_seqlens)[None]
        # A layout in transformers' words that the collator gave too must be this one.
        layout_keys = {**metadata.to_transformers(), "seq_idx": metadata.seq_idx[None]}
        batch.update({name: value for name, value in layout_keys.items() if name in batch})
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "collator":  # before __init__, as pickle asks
            raise AttributeError(name)
        if name.endswith("_call"):  # into the collator inside, past the packing
            raise AttributeError(f"{name}: a collator that packs gives tensors alone, by a call or torch_call")
        return getattr(self.collator, name)

    def __setattr__(self, name: str, value: object) -> None:
        inside = name not in ("collator", "sequence_lengths_key") and not hasattr(type(self), name)
        if inside and hasattr(self.collator, name):
            setattr(self.collator, name, value)
        else:
            super().__setattr__(name, value)

    def _lengths(self, example: Mapping[str, Any]) -> Sequence[int]:
        lengths = example.get(self.sequence_lengths_key)
        if lengths is None:
            return [len(example["input_ids"])]
        return [integer(length, self.sequence_lengths_key) for length in lengths]

    def _layout(self, batch: dict[str, Any], lengths: list[int]) -> PackedMetadata:
        """Return the documents of the row, which end with it."""
        total, documents = batch["input_ids"].shape[1], sum(lengths)
        if documents < total and _is_padding(batch, documents):
            lengths = [*lengths, total - documents]
        elif documents != total:
            raise ValueError(
                f"{self.sequence_lengths_key}: expected lengths that make the collator's row of {total} tokens, got "
                f"{documents} tokens in {len(lengths)} documents (does the collator cut its examples?)"
            )
        return PackedMetadata.from_lengths(lengths, device=batch["input_ids"].device)


def _one_row(batch: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return rows end to end as ``[1, total]``, without padding and without attention_mask; ``tokens`` are in
    documents.
    """
    check_tensor(batch.get("input_ids"), "input_ids")
    mask = batch.pop("attention_mask", None)
    shape = batch["input_ids"].shape
    positions = batch.get("position_ids")
    if positions is not None and positions.shape != shape:
        raise ValueError(f"position_ids: expected {list(shape)} like input_ids, got {list(positions.shape)}")
    if mask is not None and mask.shape != shape:
        raise ValueError(f"attention_mask: expected {list(shape)} like input_ids, got {list(mask.shape)}")
    rows = {n: t for n, t in batch.items() if isinstance(t, torch.Tensor) and t.shape[:2] == shape}
    if mask is not None and not bool(mask.all()):
        packed, *_ = unpad_inputs(rows, mask)
        batch.update({name: tensor[None] for name, tensor in packed.items()})
    elif shape[0] != 1:
        if mask is None and tokens != shape.numel():  # nothing else says on which side of a row its padding is
            raise ValueError(
                f"attention_mask: expected beside {shape[0]} rows of {shape[1]} slots for {tokens} tokens, got none"
            )
        batch.update({name: tensor.flatten(0, 1)[None] for name, tensor in rows.items()})
    return batch


def _is_padding(batch: dict[str, Any], start: int) -> bool:
    """Return the slots that no loss counts and where no document goes on."""
    labels, positions = batch.get("labels"), batch.get("position_ids")
    unlabelled = labels is not None and bool((labels[:, start:] == -100).all())
    return unlabelled and (positions is None or bool((positions[:, start] == 0).all()))


def enable_packing(trainer_or_collator: Any, *, sequence_lengths_key: str = "seq_lengths") -> Any:
    """Make a collator give packed batches with ``packed_seq_lengths``, as Unsloth does for TRL's.

    A batch then is one row: the rows that the collator returned, without their padding, end to end (also longer than
    the model's max_seq_length); ``position_ids`` int64 ``[1, total]`` that restart with each document;
    ``packed_seq_lengths`` int32 ``[num_documents]``, which end at total: padding after the last document is one more,
    and ``num_tokens``, an int, says where it begins; no attention_mask. Labels that start a document are -100, since no
    token of the row predicts them.

    Args:
        trainer_or_collator: a trainer with ``data_collator``, or a collator: a callable that takes a list of examples,
            or an object with only ``torch_call``, as Unsloth wants it. A collator's ``padding_free`` and
            ``return_position_ids`` are switched on where it has them; a trainer's ``args.remove_unused_columns`` off,
            and modules of its model that have ``max_seq_length`` get ``_unsloth_allow_packed_overlength``, as rows may
            be longer.
        sequence_lengths_key: name of the examples' document lengths, as packing makes it; an example without it is
            one document.

    Returns:
        The trainer, its data_collator replaced; or the collator that packs, called or by ``torch_call`` (the one given
        stays, but for its switches). Twice is once. To revert it put the collator back,
        ``trainer.data_collator.collator``; switches and flags stay as they were set.

    Example:
        >>> def pad(examples):  # any collator will do, such as transformers' DataCollatorForSeq2Seq
        ...     rows = [torch.tensor(example["input_ids"]) for example in examples]
        ...     ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        ...     return {"input_ids": ids, "attention_mask": ids != 0}
        >>> batch = enable_packing(pad)([{"input_ids": [5, 6]}, {"input_ids": [7]}])
        >>> batch["input_ids"], batch["position_ids"], batch["packed_seq_lengths"]
        (tensor([[5, 6, 7]]), tensor([[0, 1, 0]]), tensor([2, 1], dtype=torch.int32))

    Raises:
        TypeError: neither a trainer nor a collator.
        ValueError: (when collating) lengths that do not make the row, return_tensors other than "pt".
    """
    if hasattr(trainer_or_collator, "data_collator"):
        trainer = trainer_or_collator
        trainer.data_collator = enable_packing(trainer.data_collator, sequence_lengths_key=sequence_lengths_key)
        if hasattr(getattr(trainer, "args", None), "remove_unused_columns"):
            trainer.args.remove_unused_columns = False  # the lengths are one
        for module in trainer.model.modules() if isinstance(getattr(trainer, "model", None), torch.nn.Module) else ():
            if hasattr(module, "max_seq_length"):
                module._unsloth_allow_packed_overlength = True
        return trainer
    collator = trainer_or_collator
    if not callable(collator) and not hasattr(collator, "torch_call"):
        raise TypeError(
            f"trainer_or_collator: expected data_collator, or a callable or torch_call, got {type(collator).__name__}"
        )
    if isinstance(collator, PackingCollator) or getattr(collator, "_unsloth_packing_wrapped", False):
        return collator
    for switch in ("padding_free", "return_position_ids"):
        if hasattr(collator, switch):
            setattr(collator, switch, True)
    return PackingCollator(collator, sequence_lengths_key)
