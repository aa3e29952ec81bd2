"""Adapters for other libraries (hosts), a folder or module each, imported at their first use.

Public is what the folder's ``__init__.py`` names in ``__all__``; its other modules are private. Modules with an
underscore serve several hosts: whatever replaces an attribute of a host's module or class is a Patch of _patching.py.
open_instruct, ring_flash_attn and unsloth are old names of packing_ops.contrib.
"""

from packing_ops._runtime.lazy import lazy_modules

_LIBRARIES = {
    "flash_attn": "torch",
    "megatron": "megatron",
    "open_instruct": "torch",
    "ring_flash_attn": "torch",
    "transformers": "transformers",
    "trl": "trl",
    "unsloth": "torch",
    "vllm": "torch",
}
__getattr__, __dir__ = lazy_modules(globals(), _LIBRARIES)
