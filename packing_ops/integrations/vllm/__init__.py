"""Sampling by vLLM with the bits of a trainer: attention, linear layers, norms, RoPE and log-probabilities.

vLLM finds ``register`` by its entry point, in every process. Nothing changes until an engine asks for it, by
``attention_backend="CUSTOM"`` or by PACKING_OPS_VLLM=1 in the environment.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

from packing_ops.integrations._patching import Patch
from packing_ops.integrations.vllm.rollout import record

__all__ = ["record", "register", "unregister"]

_PATH = f"{__name__}.backend.Backend"


def register() -> None:
    """Makes the attention backend "CUSTOM" known to vLLM, which calls this by its entry point in each of its processes.

    A second call changes nothing, and a backend of another plugin under that name stays. The engine that is then built
    with ``attention_backend="CUSTOM"`` raises NotImplementedError for what is not served, by the name of the setting.

    Example:
        >>> register()  # needs vllm # doctest: +SKIP
        >>> llm = LLM(folder, attention_backend="CUSTOM", enforce_eager=True)  # needs vllm # doctest: +SKIP
        >>> unregister()  # needs vllm # doctest: +SKIP

    Raises:
        ImportError: vllm is missing.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, _PATH)
    _choice().pin()


def unregister() -> None:
    """Undoes register. An engine that runs keeps its attention, and the layers that go with it until it is freed."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if AttentionBackendEnum.CUSTOM.is_overridden() and AttentionBackendEnum.CUSTOM.get_path() == _PATH:
        AttentionBackendEnum.CUSTOM.clear_override()
    _choice().revert()


@functools.cache
def _choice() -> Patch:
    from vllm.platforms import current_platform

    return Patch(type(current_platform), "get_attn_backend_cls", _choose)


def _choose(stock: Callable[..., str]) -> "staticmethod[..., str]":
    """The CPU's platform has no backend but its own. PACKING_OPS_VLLM=1: CUSTOM is the default."""

    def choose(selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        custom = AttentionBackendEnum.CUSTOM
        if selected_backend is None and os.environ.get("PACKING_OPS_VLLM") == "1":
            selected_backend = custom
        if selected_backend is custom and current_platform.is_cpu():
            return custom.get_path()
        return stock(selected_backend, *args, **kwargs)

    return staticmethod(choose)
