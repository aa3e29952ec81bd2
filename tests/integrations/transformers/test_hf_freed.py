"""What is put into a model does not keep it alive: its memory is free when its last name goes, not when gc runs."""

import gc
import weakref

import pytest

pytest.importorskip("transformers")

from helpers.hf_models import tiny_model
from stateful_case import Decays, in_llama, packed
from stateful_models import stateful_model
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from packing_ops.integrations.transformers import apply_packing_ops, declare, register


@pytest.fixture
def without_gc():
    register()
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def checkpointed():
    model = stateful_model("jamba")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def applied():
    model = tiny_model("llama")
    apply_packing_ops(model, rms_norm=True, fused_loss=True)
    return model


def declared():
    class Declared(Decays):
        pass

    declare(Declared, mixes=True)
    return in_llama(Declared())


MAKERS = {
    "attention alone": lambda: tiny_model("llama", attn_implementation="packing_ops"),
    "convolutions": lambda: stateful_model("lfm2"),
    "mamba, checkpointing": checkpointed,
    "declared": declared,
    "all of apply_packing_ops": applied,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_is_freed_with_its_last_name(kind, without_gc):
    model = MAKERS[kind]()
    ids, positions, _ = packed("cpu")
    for _ in range(2):
        model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    parts = {name: weakref.ref(module) for name, module in model.named_modules()}
    del model
    assert [name for name, part in parts.items() if part() is not None] == []


def test_classes_are_freed_with_their_models():
    """Classes of code from the Hub are made again with each load of it."""

    class Declared(Decays):
        pass

    class Norm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states)

    declare(Declared, mixes=True)
    declare(Norm, mixes=False)
    register()
    model = in_llama(Declared())
    model.model.norm.__class__ = Norm
    apply_packing_ops(model, rms_norm=True, fused_loss=True)
    ids, positions, _ = packed("cpu")
    model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    classes = [weakref.ref(cls) for cls in (Declared, Norm)]
    del model, Declared, Norm
    gc.collect()  # the subclass
    gc.collect()  # what it was made of
    assert [reference() for reference in classes] == [None, None]
