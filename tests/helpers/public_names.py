"""What is public: packages and modules, and the names that they show."""

import importlib

NEEDS = {"transformers": "transformers", "trl": "trl", "megatron": "megatron.core"}  # to import an integration
HOSTS = ["transformers", "trl", "megatron", "flash_attn", "vllm"]
CONTRIB = ["unsloth", "ring_flash_attn", "open_instruct"]
PUBLIC = [
    "packing_ops",
    "packing_ops.data",
    "packing_ops.parallel",
    "packing_ops.optim",
    *(f"packing_ops.integrations.{host}" for host in HOSTS),
    *(f"packing_ops.contrib.{host}" for host in CONTRIB),
]


def public_names(name: str) -> dict:
    """{name: value} of ``__all__``, or of a module without one what it defines itself."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return {public: getattr(module, public) for public in module.__all__}
    own = {n: value for n, value in vars(module).items() if getattr(value, "__module__", "") == name}
    return {n: value for n, value in own.items() if not n.startswith("_")}
