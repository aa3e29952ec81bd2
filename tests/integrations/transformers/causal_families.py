"""Every causal language model that the installed transformers has, tiny: does a packed document see another?

python tests/integrations/transformers/causal_families.py   # runs those that have changed, and writes causal_families.json
"""

import hashlib
import importlib
import inspect
import json
import sys
from pathlib import Path

import torch
import transformers
from stateful_models import COMMON, FAMILIES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

RESULTS = Path(__file__).with_suffix(".json")  # {family: [sha256 of its modelling module, what was seen]}
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LENGTHS = [5, 7, 4]
MOST = 5_000_000  # parameters of a model that is run
SMALL = {
    **COMMON,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 2,
    "d_model": 32,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
}
OWN = {
    **FAMILIES,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1},
    "reformer": {"is_decoder": True},
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1],
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_ngroups": 1,
    },
}


def class_of(family):
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def digest_of(family):
    """Of the code of its models: another code has to be tried again."""
    return hashlib.sha256(inspect.getsource(importlib.import_module(class_of(family).__module__)).encode()).hexdigest()


def config_of(family):
    """A small config, or the default one where transformers refuses the small."""
    cls = type(transformers.AutoConfig.for_model(family))
    for options in ({**SMALL, **OWN.get(family, {})}, {"num_hidden_layers": 4}, {}):
        try:
            config = cls(**options)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
            return config, model
        except Exception as error:  # the config classes of transformers raise what they like
            last = error
    raise last


def model_on_meta(family):
    return config_of(family)[1]


def seen_in(family):
    """'apart', 'LEAK', 'refused: why', or why no tiny model of it can be run."""
    config, on_meta = config_of(family)
    size = sum(parameter.numel() for parameter in on_meta.parameters())
    if size > MOST:
        return "not run: no small config"
    torch.manual_seed(0)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="packing_ops").eval()
    except (KeyError, ValueError, ImportError) as error:
        return f"refused: {type(error).__name__}"
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    ids = torch.randint(3, 50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    other = torch.cat([(ids[:, : LENGTHS[0]] + 7) % 50 + 3, ids[:, LENGTHS[0] :]], 1)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    try:
        with torch.no_grad():
            first, second = (
                model(input_ids=row, position_ids=positions, use_cache=False).logits for row in (ids, other)
            )
    except (ValueError, NotImplementedError) as error:
        return f"refused: {str(error).split(':')[0]}"
    except (RuntimeError, TypeError, IndexError, AttributeError) as error:
        return f"not run: {type(error).__name__} with a small config"
    far = (first - second)[:, LENGTHS[0] :].abs().max().item()  # experts' matrices have other shapes: not to the bit
    return "apart" if far <= 1e-4 else "LEAK"


def tried(family):
    """seen_in, whatever transformers raises on the way to a model."""
    try:
        return seen_in(family)
    except Exception as error:
        return f"not made: {type(error).__name__}"


def results():
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def main():
    from packing_ops.integrations.transformers import register

    transformers.logging.set_verbosity_error()
    register()
    found = results()
    for family in sys.argv[1:] or NAMES:
        digest = digest_of(family)
        if sys.argv[1:] or found.get(family, [None])[0] != digest:
            found[family] = [digest, tried(family)]
        print(family, found[family][1], flush=True)
        lines = [f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
        RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
