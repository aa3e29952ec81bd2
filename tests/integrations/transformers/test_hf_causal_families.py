"""Every causal language model of the installed transformers: documents apart, or an error that says why."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import causal_families  # noqa: E402
from causal_families import APART  # noqa: E402
from stateful_models import FAMILIES  # noqa: E402

from packing_ops.integrations.transformers import register  # noqa: E402
from packing_ops.integrations.transformers.call import mixes_tokens  # noqa: E402
from packing_ops.integrations.transformers.states import stateful  # noqa: E402
from packing_ops.integrations.transformers.versions import NEWEST, OLDEST  # noqa: E402

STATES = {"linear_attention", "conv", "mamba", "recurrent", "hybrid", "hybrid_sliding"}


def declares_a_state(model):
    """In transformers' words."""
    config = model.config.get_text_config()
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return bool(getattr(model, "_is_stateful", False)) or not STATES.isdisjoint(types)


def test_layers_with_a_state_are_found_and_no_others():
    wrong = {}
    for family in causal_families.NAMES:
        if family in causal_families.NOT_PACKED or (_is_between() and family not in causal_families.results()):
            continue
        model = causal_families.model_on_meta(family)
        kinds = stateful.layers_of(model)
        if unknown := [type(layer) for layer, kind in kinds.items() if kind is stateful.StateKind.UNKNOWN]:
            wrong[family] = f"nothing says of {unknown} whether they mix tokens"
        layers = [layer for layer, kind in kinds.items() if kind is stateful.StateKind.RECURRENT]
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


HOW = (
    "python tests/integrations/transformers/causal_families.py runs what is new and writes it down. 'not run': give the "
    "family sizes in MORE of tests/helpers/hf_families.py, or a reason in NOT_PACKED of causal_families.py. 'LEAK' and 'DIFFERS': "
    "packing_ops lets documents see each other or counts their positions wrongly: mend it, or refuse it with an error "
    "that names the argument"
)


def test_each_family_is_served_or_refused_with_a_reason():
    """With attn_implementation and after apply_packing_ops. A family that is new, or whose code has changed, is run
    here.
    """
    register()
    seen = causal_families.results()
    found = {}
    for name in causal_families.NAMES:
        digest, *both = seen.get(name, [None])
        found[name] = both if digest == causal_families.digest_of(name) else causal_families.tried(name)
    wrong = {name: both for name, both in found.items() if not all(map(causal_families.is_told, both))}
    reasons = causal_families.NOT_PACKED
    if _is_between():  # its configs may have other names for sizes
        reasons = {name: why for name, why in reasons.items() if name in wrong}
        wrong = {name: both for name, both in wrong.items() if name in reasons or "not run" not in both[0]}
    assert {name: both for name, both in wrong.items() if name not in reasons} == {}, HOW
    assert [name for name in reasons if name in found and name not in wrong] == [], "no reason is needed: they are told"
    assert set(FAMILIES) <= {name for name, both in found.items() if all(what == APART for what in both)}


def test_both_ways_serve_the_same_unless_a_model_keeps_its_attention():
    found = {name: both for name, (_, *both) in causal_families.results().items()}
    kept = {name for name, (_, applied) in found.items() if "keeps its attention" in applied}
    other = {name for name, (named, applied) in found.items() if named != applied} - kept
    # apply_packing_ops also makes position_ids of cu_seq_lens_q for a multimodal model.
    axes = {"qwen3_5", "qwen3_5_moe", "qwen4_exp"}
    assert other == {"cohere_compass_text", *axes, *(f"{name}_text" for name in axes)}


def _is_between():
    """Of the oldest transformers that is served, and of the newest, results are written down."""
    numbers = [tuple(map(int, version.split(".")[:2])) for version in (transformers.__version__, NEWEST)]
    return causal_families.VERSION != OLDEST and numbers[0] < numbers[1]


# One for each way in which a family is refused, and for each that is found by little: these run every time.
WATCHED = ["bart", "bloom", "blt", "deepseek_v32", "falcon", "git", "got_ocr2", "llama4_text", "mpt", "opt", "roformer"]
WATCHED += ["moss_transcribe_diarize", "whisper"]


@pytest.mark.parametrize("family", [family for family in WATCHED if family in causal_families.NAMES])
def test_what_is_written_down_is_so(family):
    register()
    digest, *both = causal_families.results()[family]
    if digest != causal_families.digest_of(family):
        pytest.skip("of another transformers, and run above")
    assert causal_families.tried(family) == both


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("apart", True),
        ("refused: position_ids: expected one document in each row, got several", True),
        ("apart; beside cu_seq_lens_q refused: cu_seq_lens_q: expected one, got two", True),
        ("apart; beside cu_seq_lens_q LEAK", False),
        ("LEAK", False),
        ("DIFFERS from alone", False),
        ("refused: 'packing_ops'", False),
        ("not run: MemoryError: 7 parameters", False),
    ],
)
def test_what_a_user_is_told(what, told):
    assert causal_families.is_told(what) == told
