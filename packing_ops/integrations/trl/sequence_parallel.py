"""TRL's SFTTrainer with packing under accelerate's sequence parallelism (sp_size), which is DeepSpeed's Ulysses."""

import functools
from typing import Any

_OF_ROWS = ("input_ids", "labels", "position_ids")
_BESIDE = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")  # what position_ids say too


def enable_sequence_parallel(trainer: Any) -> None:
    """Let a packed SFTTrainer train under ``sp_size``: rows on several ranks, documents kept apart.

    DeepSpeed shards what a batch has one value for each token of, and fails on the cu_seq_lens that TRL's collator
    adds; accelerate does not take our attention's name. After this call batches have input_ids, labels and
    position_ids, which say where the documents are, and accelerate hands the model's attention to DeepSpeed. The length
    of a row must be a multiple of sp_size: ``SFTConfig(pad_to_multiple_of=sp_size)``.

    Args:
        trainer: an SFTTrainer after it is made and ``apply_packing_ops(trainer.model)``, before train().

    A second call changes nothing; revert_sequence_parallel reverts it.

    Example:
        >>> enable_sequence_parallel(trainer)  # needs a trainer on several ranks # doctest: +SKIP

    Raises:
        ValueError: no sp_size above 1; a model with another attention; cp_size, torch's context parallelism, which
            knows no documents.
    """
    from packing_ops.integrations.transformers.call import NAMES

    config = getattr(trainer.accelerator, "parallelism_config", None)
    if getattr(config, "cp_size", 1) > 1:
        raise ValueError(
            f"parallelism_config: expected sp_size, got cp_size={config.cp_size}: torch's context parallelism knows no "
            "documents; set cp_size=1 and sp_size to the ranks of a row"
        )
    if getattr(config, "sp_size", 1) <= 1:
        raise ValueError(
            "parallelism_config: expected sp_size above 1, got 1 or none; training on whole rows needs no call"
        )
    name = trainer.model.config._attn_implementation
    if name not in NAMES:
        raise ValueError(
            f"trainer: expected a model with attn_implementation='packing_ops', got {name!r}; call "
            "apply_packing_ops(trainer.model) first"
        )
    if not _is_enabled(trainer):
        trainer.data_collator = functools.partial(
            _without_cu_seqlens, trainer.data_collator, config.sp_handler.sp_attn_implementation
        )
        config.sp_handler.sp_attn_implementation = name


def revert_sequence_parallel(trainer: Any) -> None:
    """Revert enable_sequence_parallel: collator and setting of accelerate are as before. A second call does
    nothing.

    Example:
        >>> revert_sequence_parallel(trainer)  # needs a trainer on several ranks # doctest: +SKIP
    """
    if _is_enabled(trainer):
        stock, before = trainer.data_collator.args
        trainer.data_collator = stock
        trainer.accelerator.parallelism_config.sp_handler.sp_attn_implementation = before


def _is_enabled(trainer: Any) -> bool:
    return getattr(trainer.data_collator, "func", None) is _without_cu_seqlens


def _without_cu_seqlens(stock: Any, before: str | None, examples: list[Any]) -> dict[str, Any]:
    batch = stock(examples)
    if "position_ids" not in batch or not {*batch} <= {*_OF_ROWS, *_BESIDE}:
        raise ValueError(
            f"data_collator: expected input_ids, labels and position_ids of packed rows, got {', '.join(batch)}; set "
            "packing=True or padding_free=True, and give rows without images"
        )
    return {name: batch[name] for name in _OF_ROWS if name in batch}
