"""Sampling by vLLM with the bits of a trainer: attention, linear layers, norms, RoPE and log-probabilities.

vLLM finds ``register`` by its entry point, in every process. Nothing changes until an engine asks for it, by
``attention_backend="CUSTOM"`` or by PACKING_OPS_VLLM=1 in the environment.
"""

import copy
import functools
import os
from collections.abc import Callable
from typing import Any

from packing_ops._runtime.lazy import old_names
from packing_ops.integrations._patching import Patch
from packing_ops.integrations.vllm.rollout import record

__all__ = ["record", "register", "revert_registration"]
__getattr__ = old_names(globals(), {"unregister": "revert_registration"})

_PATH = f"{__name__}.backend.Backend"


def register() -> None:
    """Makes the attention backend "CUSTOM" known to vLLM, which calls this by its entry point in each of its processes.

    A second call changes nothing, and a backend of another plugin under that name stays. The engine that is then built
    with ``attention_backend="CUSTOM"`` raises NotImplementedError for what is not served, by the name of the setting.

    Example:
        >>> register()  # needs vllm # doctest: +SKIP
        >>> llm = LLM(folder, attention_backend="CUSTOM", enforce_eager=True)  # needs vllm # doctest: +SKIP
        >>> revert_registration()  # needs vllm # doctest: +SKIP

    Raises:
        ImportError: vllm is missing.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if not custom.is_overridden():
        register_backend(custom, _PATH)
    for patch in _patches():
        patch.pin()


def revert_registration() -> None:
    """Reverts register. An engine that runs keeps its attention, and the layers that go with it until it is freed."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if AttentionBackendEnum.CUSTOM.is_overridden() and AttentionBackendEnum.CUSTOM.get_path() == _PATH:
        AttentionBackendEnum.CUSTOM.clear_override()
    for patch in _patches():
        patch.revert()


@functools.cache
def _patches() -> tuple[Patch, ...]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    return (
        Patch(type(current_platform), "get_attn_backend_cls", _choose),
        Patch(EngineArgs, "create_engine_config", _asked),
    )


def _choose(stock: Callable[..., str]) -> "staticmethod[..., str]":
    """The CPU's platform knows no backend but its own."""

    def choose(selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if selected_backend is AttentionBackendEnum.CUSTOM and current_platform.is_cpu():
            return selected_backend.get_path()
        return stock(selected_backend, *args, **kwargs)

    return staticmethod(choose)


def _asked(stock: Callable[..., Any]) -> Callable[..., Any]:
    """PACKING_OPS_VLLM=1: an engine that names no attention gets ours; nothing compiles, decoding steps are graphs."""
    from vllm.config import CompilationMode, CUDAGraphMode

    @functools.wraps(stock)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = self.attention_backend or self.attention_config.backend
        if os.environ.get("PACKING_OPS_VLLM") == "1" and named is None:
            self.attention_backend, chosen = "CUSTOM", copy.copy(self.compilation_config)
            chosen.mode = chosen.mode or CompilationMode.NONE
            # Pieces are of compiled layers. On the CPU vLLM makes no graphs.
            if chosen.cudagraph_mode in (None, CUDAGraphMode.FULL_AND_PIECEWISE):
                chosen.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            self.compilation_config = chosen
        return stock(self, *args, **kwargs)

    return create_engine_config
