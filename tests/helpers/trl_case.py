"""Trainers of TRL on a tiny model: their settings, and the same without padding."""

import datasets
import trl

from packing_ops.integrations import trl as integration
from packing_ops.integrations.transformers import apply_packing_ops

datasets.disable_progress_bars()
PAIRS = [{"prompt": "p" * i, "chosen": "yes" * (5 - i), "rejected": "no" * 3 * i} for i in (1, 2, 3, 4)]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


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
