"""What the integration uses of transformers, imported once: torch.compile traces no import inside a forward."""

try:
    import transformers.masking_utils as masking_utils
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.utils import logging
except ImportError as error:
    raise ImportError("transformers 5 is needed: pip install packing_ops[hf]") from error

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "PreTrainedModel",
    "logging",
    "masking_utils",
    "sdpa_attention_forward",
]
