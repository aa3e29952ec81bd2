"""SFT on packed rows with TRL: python examples/first/sft_trl.py MODEL chats.jsonl"""

import sys

import torch
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

from packing_ops.integrations import trl as po_trl
from packing_ops.integrations.transformers import apply_packing_ops

model, data = sys.argv[1:]
po_trl.patch_pack_dataset()  # optional: fills rows over the whole dataset, not 1,000 examples at a time
on_cpu = not torch.cuda.is_available()
settings = SFTConfig("out", packing=True, max_length=16384, per_device_train_batch_size=1, use_cpu=on_cpu)
trainer = SFTTrainer(model, settings, train_dataset=load_dataset("json", data_files=data, split="train"))
print(apply_packing_ops(trainer.model))  # attention that keeps documents apart, fused RoPE and RMSNorm
trainer.train()
