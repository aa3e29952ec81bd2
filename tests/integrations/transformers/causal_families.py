"""Every causal language model that the installed transformers has, tiny: its packed documents are apart and right, or
refused.

python tests/integrations/transformers/causal_families.py [family ...]   # runs these, or those that have changed

It writes causal_families.json; of the oldest transformers that is served, causal_families_<version>.json. Sizes that
a family needs beyond the recipe are in MORE of tests/helpers/hf_families.py.
"""

import hashlib
import importlib
import inspect
import json
import re
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script

import torch
import transformers
from helpers import hf_families
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops
from packing_ops.integrations.transformers.versions import OLDEST

VERSION = ".".join(transformers.__version__.split(".")[:2])
# {family: [sha256 of its modelling module, what was seen with attn_implementation, and after apply_packing_ops]}
RESULTS = Path(__file__).with_name(f"causal_families{f'_{VERSION}' if VERSION == OLDEST else ''}.json")
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LENGTHS, SHORT = [30, 41, 9], [5, 7, 4]  # the first in all more than a table of positions has
BUFFERS = {"big_bird", "git", "gpt_neo", "megatron-bert", "reformer", "rembert", "xlm"}  # as long as a row, or an error
WAYS = ["beside cu_seq_lens_q", "by cu_seq_lens_q alone", "by numbers"]
MOST = 5_000_000  # parameters of a model that is run
APART, REFUSED = "apart", "refused: "
NOT_PACKED = {  # neither served nor refused, and why that is no leak
    "gemma3n": "transformers makes its vision tower by timm, which is not installed; gemma3n_text is its language model",
    "gemma4_assistant": "drafts a token at a time from the keys of another model",
    "gemma4_unified_assistant": "drafts a token at a time from the keys of another model",
}
if VERSION == OLDEST:
    _WITHOUT_PARTS = "its config has no parts by default, and so no decoder to make small"
    NOT_PACKED |= dict.fromkeys(("musicgen", "musicgen_melody"), _WITHOUT_PARTS)


def class_of(family):
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def digest_of(family):
    """Of the code of its models: another code has to be tried again."""
    return hashlib.sha256(inspect.getsource(importlib.import_module(class_of(family).__module__)).encode()).hexdigest()


def config_of(family):
    config_class = transformers.models.auto.configuration_auto.CONFIG_MAPPING[family]
    config = hf_families.tiny_config_of(config_class.model_type, config_class, class_of(family))
    for part in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        _lower_thresholds(getattr(part, "rope_parameters", None) or {})
    return config


def _lower_thresholds(rope):
    """Positions from which angles or queries are scaled: documents are longer."""
    if rope.get("original_max_position_embeddings"):
        rope["original_max_position_embeddings"] = 4
    for of_layers in (value for value in rope.values() if isinstance(value, dict)):
        _lower_thresholds(of_layers)


def model_on_meta(family):
    with torch.device("meta"):
        return class_of(family)._from_config(config_of(family))


def model_of(family, attn_implementation):
    size = sum(parameter.numel() for parameter in model_on_meta(family).parameters())
    if size > MOST:
        raise MemoryError(f"{size} parameters with this config")
    torch.manual_seed(0)
    config = config_of(family)  # anew: a model writes into its config
    model = class_of(family)._from_config(config, attn_implementation=attn_implementation).float().eval()
    numbers = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15, generator=numbers)
        else:  # weights of norms among them, none of which is as good as another
            parameter.data += 0.2 * torch.randn(parameter.shape, generator=numbers)
    return model


@torch.no_grad()
def seen_in(family):
    """What is seen with attn_implementation="packing_ops", and after apply_packing_ops(model).

    Each is 'apart', 'refused: why', or what is wrong: by position_ids, and in each other WAY in which it is something
    else.
    Apart: tokens of one document change nothing in the others, and logits are those of the stock model, one document at
    a time.
    """
    stock = model_of(family, "eager")
    takes = "position_ids" in inspect.signature(stock.forward).parameters
    lengths = SHORT if family in BUFFERS else LENGTHS
    ids = torch.randint(3, 50, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    # A mask of ones: without one Moshi's eager attention is not causal in transformers 5.17.
    masked = "attention_mask" in inspect.signature(stock.forward).parameters
    alone = []
    for document in ids.split(lengths, 1):
        ones = {"attention_mask": torch.ones_like(document)} if masked else {}
        alone.append(stock(input_ids=document, use_cache=False, **ones).logits)
    packed = po.PackedMetadata.from_lengths(lengths)
    positions, told = {"position_ids": packed.position_ids[None]}, packed.to_transformers()
    batches = positions, {**(positions if takes else {}), **told}, told, {"attention_mask": packed.seq_idx[None] + 1}

    def seen(way):
        try:
            model = way()
        except ValueError as error:
            return f"{REFUSED}{error}"
        first, *others = [seen_by(model, ids, torch.cat(alone, 1), arguments, lengths[0]) for arguments in batches]
        # Two refusals differ in the argument that they name.
        kind = first.startswith(REFUSED)
        others = [(way, what) for way, what in zip(WAYS, others, strict=True) if what != first]
        return first + "".join(f"; {way} {what}" for way, what in others if not (kind and what.startswith(REFUSED)))

    def named():
        model = model_of(family, "packing_ops")
        model.load_state_dict(stock.state_dict())  # a few are made from random numbers
        return model

    def applied():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is not swapped
            apply_packing_ops(stock)
        return stock

    return seen(named), seen(applied)


def seen_by(model, ids, alone, arguments, first=LENGTHS[0]):
    """first: the length of the first document."""
    other = torch.cat([(ids[:, :first] + 7) % 50 + 3, ids[:, first:]], 1)
    try:
        one, two = (model(input_ids=row, use_cache=False, **arguments).logits for row in (ids, other))
    except (ValueError, NotImplementedError) as error:
        return f"{REFUSED}{error}"
    far = (one - two)[:, first:].abs().max().item()  # experts' matrices have other shapes: not to the bit
    if far > 1e-4:
        return "LEAK"
    return APART if (one - alone).abs().max() <= 1e-4 * alone.abs().max().clamp(min=1) else "DIFFERS from alone"


def tried(family):
    """seen_in, whatever transformers raises on the way to a model."""
    try:
        return list(seen_in(family))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return [f"not run: {type(error).__name__}: {lines[-1].strip()[:200]}"] * 2


def is_told(what):
    """Whether documents are apart, or else an error names the argument and what was expected of it."""
    each = re.split(f"; (?:{'|'.join(WAYS)}) ", what)
    return all(part == APART or (part.startswith(REFUSED) and ": expected " in part) for part in each)


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
            found[family] = [digest, *tried(family)]
        print(family, *found[family][1:], sep="\n    ", flush=True)
    lines = [f"  {json.dumps(name)}: {json.dumps(found[name])}" for name in NAMES if name in found]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
