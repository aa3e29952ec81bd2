"""Trainers of TRL on a tiny model: their settings, and the same without padding."""

import copy

import datasets
import torch
import transformers
import trl

from helpers.hf_models import tiny_model
from packing_ops.integrations import trl as integration
from packing_ops.integrations.transformers import apply_packing_ops

datasets.disable_progress_bars()
PAIRS = [{"prompt": "p" * i, "chosen": "yes" * (5 - i), "rejected": "no" * 3 * i} for i in (1, 2, 3, 4)]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
ROWS = torch.tensor([[1] * 7, [1, 1, 1, 0, 0, 0, 0], [1] + [0] * 6])


def settings(kind, tmp_path, device, **more):
    return (getattr(trl, kind) if isinstance(kind, str) else kind)(
        output_dir=str(tmp_path),
        bf16=False,
        use_cpu=device == "cpu",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **{"gradient_checkpointing": False, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, **more},
    )


def without_padding(trainer):
    for name in ("model", "ref_model", "teacher_model"):
        if getattr(trainer, name, None) is not None:
            apply_packing_ops(getattr(trainer, name))
    integration.enable_padding_free(trainer)
    return trainer


def reward_model(device):
    config = copy.deepcopy(tiny_model("llama", vocab_size=258).config)
    config.num_labels = 1
    torch.manual_seed(0)
    return transformers.AutoModelForSequenceClassification.from_config(config).to(device)


def both(model, kind):
    """The model, padded, and a copy that runs without padding."""
    packed = copy.deepcopy(model)
    without_padding(type(kind, (), {"model": packed, "ref_model": None})())
    return model.eval(), packed.eval()
