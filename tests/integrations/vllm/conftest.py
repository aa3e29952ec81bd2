"""The integration over stand-ins for vLLM."""

import importlib
import sys
import types

import pytest
from helpers import vllm_case


@pytest.fixture
def vllm(monkeypatch):
    """Its package, backend and layers."""
    vllm_case.install(monkeypatch)
    parts = [importlib.import_module(f"packing_ops.integrations.vllm{part}") for part in ("", ".backend", ".layers")]
    yield types.SimpleNamespace(plugin=parts[0], backend=parts[1], layers=parts[2])
    for name in [name for name in sys.modules if name.startswith("packing_ops.integrations.vllm")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def patched(vllm):
    """With an attention, so that layers run as a trainer's do."""
    vllm.impl = vllm.backend.Impl(4, 16, 16**-0.5, 2)
    return vllm
