"""What the examples write down: figures, and the machine that they come from."""

import json
from pathlib import Path

import torch


def machine(device: str) -> dict:
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__}


def save_results(path: Path, results: dict, device: str) -> None:
    """``results`` as JSON, with the device and the torch that they come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**machine(device), **results}, indent=1) + "\n")
    print(f"written: {path}")
