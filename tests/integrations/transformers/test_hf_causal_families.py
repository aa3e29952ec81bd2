"""Every causal language model of the installed transformers: documents apart, or an error that says why."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import OLD  # noqa: E402

if OLD:
    pytest.skip("causal_families.json is of transformers 5", allow_module_level=True)

import causal_families  # noqa: E402

from packing_ops.integrations.transformers import register, stateful_layers  # noqa: E402
from packing_ops.integrations.transformers.model_call import mixes_tokens  # noqa: E402

STATES = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}


def declares_a_state(model):
    """In transformers' own words."""
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return bool(getattr(model, "_is_stateful", False)) or not STATES.isdisjoint(types)


def test_layers_with_a_state_are_found_and_no_others():
    wrong, seen = {}, causal_families.results()
    for family in causal_families.NAMES:
        if seen.get(family, [""] * 2)[1].startswith(("not made", "not run: no small")):
            continue  # most are wrappers of text models that are here too, with images
        model = causal_families.model_on_meta(family)
        layers = stateful_layers.stateful_layers(model)
        if declares_a_state(model):
            if not layers and not mixes_tokens(model.config.get_text_config()):
                wrong[family] = "declares a state, and none is found"
        else:
            alarms = [type(each).__name__ for each in layers if not holds_a_convolution(each)]
            if alarms:
                wrong[family] = f"declares none, found in {alarms}"
    assert wrong == {}


def holds_a_convolution(layer):
    return any(isinstance(each, torch.nn.Conv1d | torch.nn.RNNBase) for each in layer.modules())


def test_each_family_was_run_and_none_leaks():
    """One that is new, or whose code has changed, is run here: write it down by the command in causal_families.py."""
    register()
    seen = causal_families.results()
    changed = [name for name in causal_families.NAMES if seen.get(name, [None])[0] != causal_families.digest_of(name)]
    found = {name: seen[name][1] for name in causal_families.NAMES if name not in changed}
    found |= {name: causal_families.tried(name) for name in changed}
    assert [name for name, what in found.items() if what == "LEAK"] == []
    new = [name for name in changed if name not in seen or not seen[name][1].startswith("not made")]
    assert [name for name in new if found[name].startswith("not made")] == []  # give them a config in OWN
    served = [name for name, what in found.items() if what == "apart"]
    assert set(causal_families.FAMILIES) - {"zaya"} <= set(served)
