"""GRPO in a loop with FSDP2, on packed rows: the blocks of docs/parallel-cases.md as one file.

torchrun --nproc-per-node 2 examples/first/grpo_fsdp2.py MODEL samples.jsonl

Sampling is not part of it. Each line is a list of samples, in JSON: {"input_ids": prompt + answer, "labels": [-100] *
len(prompt) + answer, "advantage": a number}.
"""

import contextlib
import json
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from transformers import AutoModelForCausalLM

import packing_ops as po
from packing_ops.data import PaddingFreeCollator, token_budget_microbatches
from packing_ops.integrations.transformers import apply_packing_ops

name, data = sys.argv[1:]
capacity, updates = 16384, 1
rollouts = map(json.loads, Path(data).read_text().splitlines())  # in place of your engine

# --- the model ---

world_size = int(os.environ["WORLD_SIZE"])
mesh = init_device_mesh("cuda", (world_size,))  # starts NCCL, and gives each process its GPU
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to("cuda").train()
apply_packing_ops(model, fused_loss=True)
# model.gradient_checkpointing_enable({"use_reentrant": False})  # optional: less memory, slower
# for layer in model.get_decoder().layers: layer.compile()  # optional: see What to set on the page

# --- FSDP2 ---

mixed = MixedPrecisionPolicy(  # float32 weights compute in bfloat16
    param_dtype=torch.bfloat16,
    reduce_dtype=torch.float32,
    cast_forward_inputs=False,  # a cast would round num_items_in_batch to bfloat16
)
for layer in model.get_decoder().layers:
    fully_shard(layer, mesh=mesh, mp_policy=mixed)
fully_shard(model, mesh=mesh, mp_policy=mixed)


def reducing(last):  # gradients are reduced once, with the last row of a step
    model.set_requires_gradient_sync(last)
    return contextlib.nullcontext()


# --- GRPO ---


def token_logps(self, labels, num_targets, **row):  # [slots]: slot t has the one of token t + 1
    hidden = self.get_decoder()(**row, use_cache=False).last_hidden_state[0]
    head = self.get_output_embeddings().weight
    return po.token_logps(hidden, head, labels[0], row["cu_seq_lens_q"], max_targets=num_targets)


model.token_logps = types.MethodType(token_logps, model)
register_fsdp_forward_method(model, "token_logps")  # after fully_shard
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
collate = PaddingFreeCollator(return_seq_idx=False, document_fields=("advantage",))

for samples in rollouts:
    lengths = [len(sample["input_ids"]) for sample in samples]
    mine = token_budget_microbatches(lengths, capacity, dp_size=world_size)[mesh.get_rank()]
    targets = sum(label != -100 for sample in samples for label in sample["labels"])  # of all ranks
    rows = []
    for chosen in mine:  # equally many rows on every rank
        row = collate([samples[i] for i in chosen or [0]])  # without samples: any row, with a mask of 0
        row = {k: v.to("cuda") if torch.is_tensor(v) else v for k, v in row.items()}
        documents = row["cu_seq_lens_q"]
        advantages = po.segment_broadcast(row.pop("advantage"), documents, row["input_ids"].numel())
        mask = (po.shift_labels(row["labels"][0], documents) != -100) * bool(chosen)
        with torch.no_grad():
            old = model.token_logps(**row)  # before the first update
        rows.append((row, advantages, mask, old))
    for _ in range(updates):
        for row, advantages, mask, old in rows:
            with reducing(row is rows[-1][0]):
                ratio = (model.token_logps(**row) - old).exp()
                losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                loss = (losses * mask).sum() / targets * world_size  # FSDP2 averages over the ranks
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

# --- the model for from_pretrained ---

inner = getattr(model, "module", model)  # DDP has the model in .module
whole = get_model_state_dict(inner, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if mesh.get_rank() == 0:
    inner.save_pretrained("out", state_dict=whole)
dist.destroy_process_group()
