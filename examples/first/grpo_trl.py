"""GRPO on packed rows with TRL: python examples/first/grpo_trl.py MODEL prompts.jsonl"""

import sys

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

from packing_ops.integrations.transformers import apply_packing_ops
from packing_ops.integrations.trl import enable_padding_free


def brevity(completions, **columns):
    """Reward short answers: put yours here. The columns of the dataset arrive by name."""
    return [-len(completion) / 100 for completion in completions]


model, data = sys.argv[1:]  # each line of data: {"prompt": "..."}
settings = GRPOConfig(
    "out",
    num_generations=4,  # answers to each prompt
    per_device_train_batch_size=8,  # answers: two prompts. A multiple of num_generations
    max_completion_length=256 if torch.cuda.is_available() else 16,
    use_cpu=not torch.cuda.is_available(),
)
prompts = load_dataset("json", data_files=data, split="train")
trainer = GRPOTrainer(model, brevity, args=settings, train_dataset=prompts)
print(apply_packing_ops(trainer.model))  # with beta above 0 also apply_packing_ops(trainer.ref_model)
print(enable_padding_free(trainer))  # log-probs of packed rows; sampling stays TRL's
trainer.train()
