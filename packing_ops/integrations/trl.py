"""For TRL: attention of its trainers, packing over the whole dataset, log-probs of packed documents."""

import inspect
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F

import packing_ops as po

# {strategy of TRL: overlong of pack_sequences}. TRL packs by its other strategies itself.
_OVERLONG = {"bfd": "truncate", "bfd_split": "split"}
_TRL_CHUNK = 1000  # rows that TRL packs at a time: the default batch_size of Dataset.map
_PARAMETERS = ["dataset", "seq_length", "strategy", "map_kwargs"]

_stock_pack_dataset = None  # TRL's own, while patched


def register(name: str = "packing_ops") -> None:
    """Make ``attn_implementation=name`` work in TRL's trainers, ``packing=True`` and ``padding_free=True`` included.

    Registers the attention with transformers and, in older TRL, in its list of implementations that keep packed
    documents apart (TRL 1.16 has none). A second call does nothing.

    Example:
        >>> register()
        >>> from trl import SFTConfig, SFTTrainer
        >>> options = {"packing": True, "model_init_kwargs": {"attn_implementation": "packing_ops"}}
        >>> trainer = SFTTrainer(name, SFTConfig(**options), train_dataset=dataset)  # needs a model # doctest: +SKIP

    Raises:
        ImportError: TRL or transformers is not installed.
    """
    _trl()
    import trl.trainer.sft_trainer as sft_trainer

    from packing_ops.integrations import transformers

    transformers.register(name)
    known = getattr(sft_trainer, "FLASH_ATTENTION_VARIANTS", None)
    if isinstance(known, set):
        known.add(name)


def pack_dataset(dataset: Any, seq_length: int, strategy: str = "bfd", map_kwargs: dict | None = None) -> Any:
    """trl.pack_dataset with the same columns, dtypes and format, packed over the whole dataset at once.

    Args:
        dataset: Dataset or DatasetDict whose columns are all lists, of equal length within a row. Streamed datasets
            cannot be seen whole: they go to TRL's own, with a warning.
        seq_length: tokens of a packed row.
        strategy: ``"bfd"`` cuts sequences to seq_length, ``"bfd_split"`` splits them. Any other goes to TRL's own.
        map_kwargs: for Dataset.map (num_proc, desc, load_from_cache_file, ...).

    Returns:
        The same type. Rows are best-fit-decreasing bins; column ``seq_lengths`` lists the tokens of each document.
        Empty rows are left out. Never more rows than packing every ``batch_size`` (default 1000) rows alone gives.

    Example:
        >>> from datasets import Dataset
        >>> rows = {"input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]}
        >>> pack_dataset(Dataset.from_dict(rows), seq_length=4)[:]
        {'input_ids': [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]], 'seq_lengths': [[4], [3, 1], [2]]}

    Raises:
        ImportError: TRL is not installed.
        TypeError: a column that holds no lists.
        ValueError: columns of different lengths in one row; no tokens at all; seq_length below 1.

    Memory: 40 bytes per row beside the data, which is read in batches. Deterministic.
    """
    _trl()
    from datasets import Dataset, DatasetDict

    if strategy not in _OVERLONG:
        return _own_pack_dataset()(dataset, seq_length, strategy, map_kwargs)
    if isinstance(dataset, DatasetDict):
        packed = {key: pack_dataset(split, seq_length, strategy, map_kwargs) for key, split in dataset.items()}
        return DatasetDict(packed)
    if not isinstance(dataset, Dataset):
        warnings.warn(
            f"packing_ops.pack_dataset: {type(dataset).__name__} is streamed and cannot be packed as a whole; "
            "TRL's own packing takes it",
            stacklevel=2,
        )
        return _own_pack_dataset()(dataset, seq_length, strategy, map_kwargs)
    return _pack_dataset(dataset, seq_length, _OVERLONG[strategy], dict(map_kwargs or {}))


def patch_pack_dataset() -> bool:
    """Replace TRL's pack_dataset by ours, in trl.data_utils and every module of TRL that imported it.

    A pack_dataset that your own code imported from TRL before stays TRL's. A second call does nothing;
    unpatch_pack_dataset undoes it.

    Returns:
        True when TRL packs with packing_ops now; False, with a warning, when the installed TRL has a pack_dataset of
        another signature, which is left alone.

    Example:
        >>> patch_pack_dataset()
        True
        >>> unpatch_pack_dataset()

    Raises:
        ImportError: TRL is not installed.
    """
    global _stock_pack_dataset
    data_utils = _trl()
    if data_utils.pack_dataset is pack_dataset:
        return True
    found = list(inspect.signature(data_utils.pack_dataset).parameters)
    if found != _PARAMETERS:
        warnings.warn(
            f"packing_ops.patch_pack_dataset: expected trl.pack_dataset({', '.join(_PARAMETERS)}), "
            f"got ({', '.join(found)}); left alone",
            stacklevel=2,
        )
        return False
    _stock_pack_dataset = data_utils.pack_dataset
    _swap(_stock_pack_dataset, pack_dataset)
    return True


def unpatch_pack_dataset() -> None:
    """Undo patch_pack_dataset."""
    global _stock_pack_dataset
    if _stock_pack_dataset is not None:
        _swap(pack_dataset, _stock_pack_dataset)
        _stock_pack_dataset = None


def packed_logps(
    log_probs: torch.Tensor, mask: torch.Tensor, cu_seqlens: torch.Tensor, *, average: bool = False
) -> torch.Tensor:
    """Log-probability of each completion in a packed row: what DPO compares, without padding.

    Args:
        log_probs: ``[total - 1]`` or ``[1, total - 1]``, floating: entry t is log p of token t + 1, as TRL's fused LM
            head and ``logits[:, :-1]`` give it.
        mask: ``[total]`` or ``[1, total]``, bool or integer: tokens that count (TRL's completion_mask). The first
            token of a document never counts: the entry before it stands in another document.
        cu_seqlens: int32 ``[num_documents + 1]``.
        average: mean over the tokens that count, as IPO takes it, instead of their sum.

    Returns:
        ``[num_documents]``, float64 for float64, else float32. Differentiable in log_probs. No synchronisation.

    Example:
        >>> log_probs = torch.tensor([[-1.0, -2.0, -9.0, -4.0]])
        >>> packed_logps(log_probs, torch.tensor([[0, 1, 1, 0, 1]]), torch.tensor([0, 3, 5], dtype=torch.int32))
        tensor([-3., -4.])

    Raises:
        ValueError: log_probs that are not one shorter than mask.
    """
    if log_probs.numel() + 1 != mask.numel():
        raise ValueError(
            f"log_probs: expected one entry less than mask={list(mask.shape)}, got {list(log_probs.shape)}"
        )
    counts = po.mask_boundary_labels((mask.reshape(-1) != 0).long(), cu_seqlens, ignore_index=0)
    return po.segment_sum(F.pad(log_probs.reshape(-1), (1, 0)), cu_seqlens, counts.bool(), average)


# --- what the above is made of ---


def _trl():
    try:
        import trl.data_utils
    except ImportError as error:
        raise ImportError("packing_ops.integrations.trl needs TRL: pip install packing_ops[hf]") from error
    return trl.data_utils


def _own_pack_dataset():
    return _stock_pack_dataset or _trl().pack_dataset


def _swap(old, new) -> None:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trl" and getattr(module, "__dict__", {}).get("pack_dataset") is old:
            module.pack_dataset = new


def _pack_dataset(dataset, seq_length: int, overlong: str, map_kwargs: dict):
    from datasets.fingerprint import update_fingerprint

    from packing_ops.integrations._arrow import best_fit_bins, packed_table, row_lengths

    style = dict(dataset.format)
    style.update(style.pop("format_kwargs"))
    style["columns"] = [*style["columns"], "seq_lengths"]
    dataset = dataset.with_format("arrow")
    chunk = map_kwargs.get("batch_size", _TRL_CHUNK) or len(dataset)
    bins = best_fit_bins(row_lengths(dataset), seq_length, overlong, chunk if chunk > 0 else len(dataset))
    num_rows, num_bins = len(dataset), len(bins[0]) - 1
    if num_bins == 0:
        raise ValueError(f"dataset: expected at least one row with tokens, got {num_rows} rows without any")

    def packed_rows(_, indices):
        # This batch's share of the bins: Dataset.map keeps its batches, processes and cache files to itself.
        first, last = (-(-i * num_bins // num_rows) for i in (indices[0], indices[-1] + 1))
        return packed_table(dataset, bins, first, last)

    # The bins follow from these: hashing the closure would hash the data.
    settings = {"seq_length": seq_length, "overlong": overlong, "chunk": chunk}
    map_kwargs.setdefault(
        "new_fingerprint", update_fingerprint(dataset._fingerprint, "packing_ops.pack_dataset", settings)
    )
    return dataset.map(packed_rows, batched=True, with_indices=True, **map_kwargs).with_format(**style)
