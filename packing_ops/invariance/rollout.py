"""A rollout beside the trainer's model: log-probabilities that differ, and the first layer whose rows do."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from packing_ops._runtime.arguments import FLOATS, as_tensor, described, wrong_type
from packing_ops.invariance.check import LOGPS, Comparison, bits_of_rows

Layers = Mapping[str, Sequence[torch.Tensor]]
Parts = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Layers]
Rollout = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | Parts


def split_rollout(rollout: Any, vocabulary: int | None, device: torch.device) -> Parts:
    """Return a rollout in three parts, its documents on the device.

    Raises:
        TypeError: something else than a rollout.
        ValueError: parts that do not fit together, tokens beyond the vocabulary, nothing to compare.
    """
    if not isinstance(rollout, (tuple, list)) or len(rollout) not in (2, 3):
        raise wrong_type("rollout", "(documents, log-probabilities), or these and the layers of a record", rollout)
    integers = (torch.int32, torch.int64)
    documents = [each.to(device) for each in _rows(rollout[0], "token ids", integers)]
    logps, layers = _rows(rollout[1], "log-probabilities", FLOATS), rollout[2] if len(rollout) > 2 else {}
    if not isinstance(layers, Mapping) or not all(isinstance(each, (tuple, list)) and each for each in layers.values()):
        raise wrong_type("rollout", "layers by name, a tensor for each document", layers)
    lengths = [(len(document), len(given)) for document, given in zip(documents, logps, strict=False)]
    if len(documents) != len(logps) or any(given >= length for length, given in lengths):
        came = f"{len(documents)} documents and {len(logps)} log-probabilities, (tokens, log-probabilities) {lengths}"
        raise ValueError(f"rollout: expected log-probabilities of the last tokens of each document, got {came}")
    if not any(map(len, logps)) and not (documents and layers):
        raise ValueError("rollout: expected at least one log-probability or layer, got none")
    low, high = (int(each) for each in torch.cat(documents).aminmax())
    if vocabulary is not None and not 0 <= low <= high < vocabulary:  # on a GPU an embedding would end the process
        raise ValueError(f"rollout: expected token ids from 0 to {vocabulary - 1}, got {low} to {high}")
    return documents, logps, layers


def _rows(part: Any, name: str, dtypes: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    """Return the tensors of a part of a rollout, one for each document."""
    wanted = f"{name} [tokens] of each document"
    try:
        rows = [as_tensor(each) for each in part]
    except (TypeError, ValueError, RuntimeError):
        raise wrong_type("rollout", wanted, part) from None
    for each in rows:
        if each.dim() != 1 or (each.dtype not in dtypes and len(each)):  # an empty list has no dtype
            raise ValueError(f"rollout: expected {wanted}, got {described(each)}")
    return rows


def differing_rows(comparison: Comparison, logps: Sequence[torch.Tensor], layers: Layers) -> dict[str, tuple[int, int]]:
    """Return {module: (rows, rows that differ)}. Only the first module that differs is charged, and LOGPS.

    Args:
        comparison: of the documents of the rollout.
        logps: of the last tokens of each document.
        layers: {module: bits_of_rows of its output for each document}, as an engine ran them.
    """
    calls, found = comparison.first, {}
    for name in calls:
        out = calls[name][0].out
        if name in layers and out is not None and len(theirs := torch.cat(list(layers[name]))) == len(out):
            found[name] = len(out), int((out[:, 0] != theirs).sum())
    wrong = [name for name, (_, differ) in found.items() if differ]
    # In the order of the calls a module comes before its parts, which are charged in its place.
    first = next((name for name in wrong if not any(other.startswith(f"{name}.") for other in wrong)), None)
    charged = {name: (rows, differ if name == first else 0) for name, (rows, differ) in found.items()}
    mine = calls[LOGPS][0].out if LOGPS in calls else None
    if mine is None:
        raise ValueError("rollout: expected a model with embeddings of tokens and a head, got one without")
    ends = comparison.starts[1:]
    ours = [mine[end - 1 - len(given) : end - 1, 0] for end, given in zip(ends, logps, strict=True)]
    differ = [int((a != bits_of_rows(b.float()).cpu()).sum()) for a, b in zip(ours, logps, strict=True)]
    return {**charged, LOGPS: (sum(map(len, ours)), sum(differ))}
