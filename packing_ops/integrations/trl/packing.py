"""TRL's pack_dataset over the whole dataset at once, and the patch that puts it into TRL."""

import functools
import inspect
import sys
import warnings
from types import ModuleType
from typing import Any, Literal

from packing_ops.integrations._patching import Patch
from packing_ops.packing import Overlong

Strategy = Literal["bfd", "bfd_split", "wrapped"]  # of TRL
# {strategy: overlong of pack_sequences}. TRL packs by its other ones itself.
_OVERLONG: dict[str, Overlong] = {"bfd": "truncate", "bfd_split": "split"}
_TRL_CHUNK = 1000  # rows that TRL packs at a time: the default batch_size of Dataset.map
_PARAMETERS = ["dataset", "seq_length", "strategy", "map_kwargs"]


def pack_dataset(
    dataset: Any, seq_length: int, strategy: Strategy = "bfd", map_kwargs: dict[str, Any] | None = None
) -> Any:
    """Pack as trl.pack_dataset, with the same columns, dtypes and format, over the whole dataset at once.

    Args:
        dataset: Dataset or DatasetDict whose columns are all lists, of equal length within a row. A streamed dataset
            cannot be packed as a whole. It goes to TRL's pack_dataset, with a warning.
        seq_length: tokens of a packed row.
        strategy: ``"bfd"`` cuts sequences to seq_length, ``"bfd_split"`` splits them. Any other strategy goes to TRL's
            pack_dataset.
        map_kwargs: for Dataset.map (num_proc, desc, load_from_cache_file, ...).

    Returns:
        The same type. Rows are best-fit-decreasing bins; column ``seq_lengths`` lists the tokens of each document.
        Empty rows are left out. There are never more rows than by packing each ``batch_size`` (default 1000) rows
        separately.

    Example:
        >>> from datasets import Dataset
        >>> rows = {"input_ids": [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11]]}
        >>> pack_dataset(Dataset.from_dict(rows), seq_length=4)[:]
        {'input_ids': [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]], 'seq_lengths': [[4], [3, 1], [2]]}

    Raises:
        ImportError: TRL is not installed.
        TypeError: a column that holds no lists.
        ValueError: columns of different lengths in one row; no tokens at all; seq_length below 1.

    Determinism: the same rows in every call.
    Synchronises: never: everything is on the CPU.
    Memory: 40 bytes per row besides the data, which is read in batches.
    Gradients: none: a dataset.
    """
    trl_data_utils()
    from datasets import Dataset, DatasetDict

    if strategy not in _OVERLONG:
        return _own_pack_dataset()(dataset, seq_length, strategy, map_kwargs)
    if isinstance(dataset, DatasetDict):
        return DatasetDict(
            {key: pack_dataset(split, seq_length, strategy, map_kwargs) for key, split in dataset.items()}
        )
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

    Code outside of TRL that has imported pack_dataset before keeps TRL's. A second call does nothing;
    revert_pack_dataset reverts it.

    Returns:
        True when TRL packs with packing_ops now; False, with a warning, when the installed TRL has a pack_dataset of
        another signature, which is left as it is.

    Example:
        >>> patch_pack_dataset()
        True
        >>> revert_pack_dataset()

    Raises:
        ImportError: TRL is not installed.
    """
    data_utils = trl_data_utils()
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
    _patch(data_utils).apply()
    return True


def revert_pack_dataset() -> None:
    """Revert patch_pack_dataset. A function that another library put over ours stays, with a warning: if it calls ours,
    it still packs with packing_ops.
    """
    if (data_utils := sys.modules.get("trl.data_utils")) is None:
        return
    patch = _patch(data_utils)
    patch.revert()
    if patch.layers and data_utils.pack_dataset is not patch.layers[0][1]:
        warnings.warn(
            "packing_ops.revert_pack_dataset: expected our function in trl.data_utils.pack_dataset, got another "
            "library's over it; left alone, and it may call ours",
            stacklevel=2,
        )


@functools.cache
def _patch(data_utils: ModuleType) -> Patch:
    return Patch(data_utils, "pack_dataset", lambda _: pack_dataset, imported_by="trl")


def trl_data_utils() -> ModuleType:
    """Return trl.data_utils, imported when it is needed: nothing here needs it before."""
    try:
        import trl.data_utils
    except ImportError as error:
        raise ImportError("packing_ops.integrations.trl needs TRL: pip install 'trl>=1' datasets") from error
    return trl.data_utils


def _own_pack_dataset() -> Any:
    patch = _patch(trl_data_utils())
    return patch.layers[0][1] if patch.layers else trl_data_utils().pack_dataset


def _pack_dataset(dataset: Any, seq_length: int, overlong: Overlong, map_kwargs: dict[str, Any]) -> Any:
    from datasets.fingerprint import update_fingerprint

    from packing_ops.integrations.trl.arrow import best_fit_bins, packed_table, row_lengths

    style = dict(dataset.format)
    style.update(style.pop("format_kwargs"))
    style["columns"] = [*style["columns"], "seq_lengths"]
    dataset = dataset.with_format("arrow")
    chunk = map_kwargs.get("batch_size", _TRL_CHUNK) or len(dataset)
    bins = best_fit_bins(row_lengths(dataset), seq_length, overlong, chunk if chunk > 0 else len(dataset))
    num_rows, num_bins = len(dataset), len(bins[0]) - 1
    if num_bins == 0:
        raise ValueError(f"dataset: expected at least one row with tokens, got {num_rows} rows without any")

    def packed_rows(_: object, indices: list[int]) -> Any:
        # This batch's share of the bins: Dataset.map keeps its batches, processes and cache files to itself.
        first, last = (-(-i * num_bins // num_rows) for i in (indices[0], indices[-1] + 1))
        return packed_table(dataset, bins, first, last)

    # The bins follow from these: hashing the closure would hash the data.
    settings = {"seq_length": seq_length, "overlong": overlong, "chunk": chunk}
    map_kwargs.setdefault(
        "new_fingerprint", update_fingerprint(dataset._fingerprint, "packing_ops.pack_dataset", settings)
    )
    return dataset.map(packed_rows, batched=True, with_indices=True, **map_kwargs).with_format(**style)
