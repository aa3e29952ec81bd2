"""The model families that are known, and which formula of RoPE and RMSNorm each has: a new family is a line here."""

from importlib.util import find_spec
from typing import NamedTuple

from packing_ops.integrations.transformers.imports import version


class Family(NamedTuple):
    """What differs between modelling modules."""

    interleaved: bool = False  # pairs are elements 2i and 2i + 1
    half_tables: bool = False  # cos and sin have one entry per pair, not one per element
    multimodal: bool = False  # position_ids have a row per axis
    norm: str = "weight"  # the RMSNorm formula, a key of rms_norm.FORWARDS


FAMILIES = {
    "gemma": Family(norm="one_plus_weight"),
    "gemma2": Family(norm="one_plus_weight"),
    "gemma3": Family(norm="one_plus_weight"),
    "glm": Family(interleaved=True),
    "glm4": Family(interleaved=True),
    "gpt_oss": Family(half_tables=True, norm="weight_in_fp32"),
    "llama": Family(),
    "ministral": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "phi": Family(),
    "phi3": Family(),
    "qwen2": Family(),
    "qwen2_5_vl": Family(multimodal=True),
    "qwen2_moe": Family(),
    "qwen2_vl": Family(multimodal=True),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "qwen3_vl": Family(multimodal=True),
    "stablelm": Family(),
}
# Up to 4.57 these rotate by functions that no other model has.
_NOT_KNOWN = ("qwen2_vl", "qwen2_5_vl") if version.startswith("4.") else ()
MODULES = {  # that this transformers has
    f"transformers.models.{name}.modeling_{name}": family
    for name, family in FAMILIES.items()
    if name not in _NOT_KNOWN and find_spec(f"transformers.models.{name}")
}
