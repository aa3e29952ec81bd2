"""Refuses keywords that describe documents under a name that transformers does not read, such as ``cu_seqlens``."""

import inspect
import re

import torch

_READ = ("cu_seq_lens_q", "cu_seq_lens_k")
_NEAR = re.compile(
    r"cu(m|mulative)?_?seq(uence)?s?_?len(gth)?s?(_?(q|k|kv|padded))*"
    r"|((packed|sub)_?)?(seq|sequence|doc|document)s?_?len(gth)?s(_?(q|k|kv))?"
    r"|seq_idx"
)
_BESIDE = ("packed_seq_lengths", "seq_idx")  # collators give these together with what attention reads
_found: dict[tuple, tuple] = {}  # torch.compile would look through functools.cache


def check_keywords(cls: type, kwargs: dict) -> None:
    """TypeError for near misses of cu_seq_lens_q: the model would drop them, and the documents would see each other."""
    for name in _READ:
        if not isinstance(kwargs.get(name), (torch.Tensor, type(None))):
            raise ValueError(f"{name}: expected an int32 tensor [num_documents + 1], got {kwargs[name]!r}")
    for name in _near_misses(cls, tuple(kwargs)):
        beside = kwargs.get("position_ids") is not None or kwargs.get("cu_seq_lens_q") is not None
        if kwargs[name] is None or (name in _BESIDE and beside):
            continue
        raise TypeError(
            f"{name}: expected cu_seq_lens_q and cu_seq_lens_k, int32 [num_documents + 1], which attention reads "
            f"(PackedMetadata.from_lengths(lengths).to_transformers() makes them), got {name}, which "
            f"{cls.__name__} would drop"
        )


@torch.compiler.assume_constant_result
def _near_misses(cls, names):
    """Near misses among ``names`` that a language model's forward does not declare."""
    if (cls, names) not in _found:
        near = [name for name in names if name not in _READ and _NEAR.fullmatch(name.lower())]
        known = inspect.signature(cls.forward).parameters if near else ()
        reads_text = "input_ids" in known or "inputs_embeds" in known
        _found[cls, names] = tuple(name for name in near if reads_text and name not in known)
    return _found[cls, names]
