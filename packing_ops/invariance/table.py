"""python -m packing_ops invariance: a model of random weights, checked layer by layer."""

import argparse
import dataclasses
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from packing_ops.invariance.api import Invariance, LayerInvariance, check_with_progress, invariant
from packing_ops.report.corpus import without_code
from packing_ops.report.tables import printable, progress

EXIT_CODES = """exit codes:
  0  no bit differs in packs (prefixes are shown beside them)
  1  a layer differs, or cannot be claimed: it is named, with what to set
  2  no answer: wrong arguments, a configuration that cannot be read, a library that is not installed"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL_OR_CONFIG", help="a config.json, its folder, or a model's name: the weights are random")
    add("--rows", type=_rows, metavar="N,N,...", help="lengths of the documents, so rows of the products")
    add("--layers", type=int, metavar="N", help="make the model with its first N layers only")
    add("--device", type=_device, default="cpu", help="cpu (default) or cuda")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="default: the config's")
    add("--stock", action="store_true", help="without the mode")
    add("--json", type=Path, metavar="JSON", help="also write every layer")


def _rows(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers above 0 with commas between, got {text!r}")
    return [int(part) for part in parts]


def _device(text: str) -> torch.device:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"expected cpu, cuda or cuda:N, got {text!r}")
    if text != "cpu" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"expected cpu, got {text!r}, and torch {torch.__version__} sees no GPU")
    return torch.device(text)


def model_of(arguments: argparse.Namespace) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    path = Path(arguments.model)
    source = path.parent if path.name == "config.json" else arguments.model
    config = without_code(AutoConfig, source, "MODEL_OR_CONFIG")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"MODEL_OR_CONFIG: expected a causal language model of transformers, got {config.model_type}")
    if arguments.layers is not None:
        most = config.num_hidden_layers
        if not 0 < arguments.layers <= most:
            raise ValueError(f"--layers: expected 1 to {most}, the layers of the model, got {arguments.layers}")
        config.num_hidden_layers = arguments.layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: arguments.layers]
    dtype = getattr(config, "dtype", None) if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
    # A configuration may name an attention of the Hub, whose code would be loaded; apply puts packing_ops' in its
    # place.
    plain = {"trust_remote_code": False, "attn_implementation": "eager"}
    with torch.device(arguments.device):
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32, **plain)
    return model.eval()


def check(arguments: argparse.Namespace, apply: Callable[[torch.nn.Module], Any]) -> Invariance:
    """Run check_invariance for the command line's arguments. apply: puts packing_ops into the model."""
    if arguments.json and not arguments.json.parent.is_dir():  # before minutes of work
        raise ValueError(f"--json: expected a file in a folder that exists, got {arguments.json}")

    with nullcontext() if arguments.stock else invariant():  # before the first product on a GPU
        model = model_of(arguments)
        apply(model)
        with progress(1.0, "comparing") as advance:
            return check_with_progress(model, None, None, arguments.rows, True, advance)


def show(found: Invariance) -> None:
    mode = "with" if found.active else "without"
    print(f"{mode} the mode, {found.dtype} on {found.device}, torch {found.torch}")
    lines: list[tuple[str, ...]] = [("layer", "kind", "rows", "packs", "prefixes")]
    for layer in grouped(found.layers):
        outcome = [f"{count} differ" if count else "equal" for count in (layer.packs, layer.prefixes)]
        lines.append((layer.name or "(the model)", layer.kind, f"{layer.rows:,}", *outcome))
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    for line in lines if found.layers else []:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())
    for sentence in found.why_not():
        print(printable(sentence))
    print("packs: " + ("equal bits" if found.packs else "not claimed"))
    print("prefixes: " + ("equal bits" if found.prefixes else "not claimed"))


def grouped(layers: tuple[LayerInvariance, ...]) -> list[LayerInvariance]:
    """Group layers of equal name but for numbers, and of equal kind and outcome, into one."""
    found: dict[tuple[Any, ...], LayerInvariance] = {}
    for layer in layers:
        name = re.sub(r"\.\d+(?=\.|$)", ".*", layer.name)
        differs = layer.packs or layer.prefixes
        key = (layer.name if differs else name, layer.kind, bool(differs))
        if key in found:
            layer = dataclasses.replace(found[key], name=name, rows=found[key].rows + layer.rows)
        found[key] = layer
    return list(found.values())


def save(found: Invariance, path: Path) -> None:
    result = {"packs": found.packs, "prefixes": found.prefixes, **dataclasses.asdict(found)}
    path.write_text(json.dumps(result, indent=1) + "\n")
