"""What examples need before anything that only an extra brings is imported: their options, and what is missing."""

import argparse
import contextlib
import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path

PACKAGES = {"transformers": "'transformers>=5.17'", "trl": "'trl>=1'", "megatron.core": "'megatron-core>=0.13'"}


def needs(*modules: str, options: Callable[[], object]) -> None:
    """Reads the options, so that --help and mistakes in them are told first; then ends where modules are missing."""
    options()
    missing = [name for name in modules if not _found(name)]
    if missing:
        packages = " ".join(PACKAGES.get(name, name) for name in missing)
        raise SystemExit(f"{sys.argv[0]} needs {' and '.join(missing)}: pip install {packages}")


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def at_least(least: int) -> Callable[[str], int]:
    """A type of an option: whole numbers."""

    def number(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least}, got {text!r}")
        return int(text)

    return number


def checkpointing(text: str) -> str:
    """A type of an option: what put_checkpoints takes."""
    with contextlib.suppress(ValueError):
        if text in ("full", "auto") or 0 < float(text) < math.inf:
            return text
    raise argparse.ArgumentTypeError(f"expected full, auto or GiB above 0, got {text!r}")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        default="cpu",
        type=_device,
        choices=["cpu", "cuda"],
        metavar="{cpu,cuda,auto}",
        help="auto: cuda, where torch sees a GPU and packing_ops has kernels for it; default: %(default)s",
    )


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    import packing_ops as po

    return "cuda" if torch.cuda.is_available() and po.build_info()["cuda"] else "cpu"


def parser_of(
    description: str, *, documents: int, writes: str, data: str = "JSONL of chats or prompt/completion pairs"
) -> argparse.ArgumentParser:
    """What every Hugging Face example is told: model, data, how many documents, learning rate, seed, device, folder."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal LM with its tokenizer; default: a tiny Llama")
    parser.add_argument("--data", type=Path, help=f"{data}; default: docstrings")
    parser.add_argument("--documents", type=int, default=documents, help="at most this many documents")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument(
        "--stock", action="store_true", help="packed rows, but nothing of packing_ops in model or trainer"
    )
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help=f"folder for {writes}")
    return parser
