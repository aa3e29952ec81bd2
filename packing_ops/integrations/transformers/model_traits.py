"""What is known of a model's class and config: the masks it reads, and what mixes tokens beside its attention."""

import inspect

import torch

from packing_ops.integrations.transformers.imports import version

# The forms of a mask. A MaskPattern is for our attention alone. A model that supports neither FlashAttention nor
# FlexAttention reads masks itself, or has an attention of its own: it gets a tensor, bool as for SDPA, or additive as for
# eager attention where it does not support SDPA.
PATTERN, BOOL, ADDITIVE = "pattern", "bool", "additive"
_READERS = ("transformers.models.doge.",)  # supports FlexAttention, and reads every other mask itself
# Here tokens of neighbouring documents also mix outside of attention: convolutions, trigrams, compressed keys.
_MIXERS = frozenset(
    (
        "canine",
        "convbert",
        "deepseek_v4",
        "inkling2_text",
        "inkling_text",
        "mobilebert",
        "nystromformer",
        "sam3_lite_text_text_model",
    )
)
OTHER_POSITIONS = frozenset(("decision_transformer",))  # position_ids of zeros, beside embeddings of the time


def not_causal(model) -> str | None:
    """Why a model would run without its causal mask under every attn_implementation but its eager one."""
    if version.startswith("4.") and model.config.model_type == "decision_transformer":
        return f"the attention of {type(model).__name__} in transformers {version} is causal in its eager form alone"
    return None


def mixes_tokens(config) -> bool:
    """Beside attention, and past the end of a document."""
    # token_dropout of ESM scales a row by how many of all its tokens are masked.
    return config.model_type in _MIXERS or bool(getattr(config, "token_dropout", False))


_traits: dict[tuple, tuple] = {}  # torch.compile would look through functools.cache


@torch.compiler.assume_constant_result
def traits_of(cls, config_cls):
    """The form of its masks, where position_ids and attention_mask are among its arguments, its model_type."""
    if (cls, config_cls) not in _traits:
        names = list(inspect.signature(cls.forward).parameters)[1:]
        indices = {name: names.index(name) for name in ("position_ids", "attention_mask") if name in names}
        form = BOOL if cls._supports_sdpa else ADDITIVE
        if cls._supports_flash_attn or cls._supports_flex_attn:
            form = form if any(base.__module__.startswith(_READERS) for base in cls.__mro__) else PATTERN
        _traits[cls, config_cls] = form, indices, config_cls.model_type
    return _traits[cls, config_cls]
