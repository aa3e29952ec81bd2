"""A rollout beside the trainer's model: log-probabilities that differ, and the first layer whose rows do."""

from collections.abc import Mapping, Sequence

import torch

from packing_ops.invariance.check import LOGPS, Comparison, bits_of_rows

Layers = Mapping[str, Sequence[torch.Tensor]]
Parts = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Layers]
Rollout = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]] | Parts


def split_rollout(rollout: Rollout) -> Parts:
    """Return a rollout in three parts; ValueError where they do not fit together."""
    documents, logps, *more = rollout
    lengths = [(len(document), len(given)) for document, given in zip(documents, logps, strict=False)]
    if len(documents) != len(logps) or any(given >= length for length, given in lengths):
        came = f"{len(documents)} documents and {len(logps)} log-probabilities, (tokens, log-probabilities) {lengths}"
        raise ValueError(f"rollout: expected log-probabilities of the last tokens of each document, got {came}")
    return documents, logps, more[0] if more else {}


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
