"""SFT in a loop with FSDP2, on packed rows: the blocks of docs/parallel.md as one file.

torchrun --nproc-per-node 2 examples/first/loop_fsdp2.py MODEL chats.jsonl
"""

import contextlib
import itertools
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

from packing_ops.data import PackedBatchSampler, PaddingFreeCollator
from packing_ops.integrations.transformers import apply_packing_ops
from packing_ops.parallel import count_targets

name, data = sys.argv[1:]  # each line of data: {"messages": [{"role": ..., "content": ...}, ...]}
capacity, rows_per_step, epochs = 16384, 1, 1
chats = [json.loads(line)["messages"] for line in Path(data).read_text(encoding="utf-8").splitlines()]
template = AutoTokenizer.from_pretrained(name).apply_chat_template
dataset = [{"input_ids": template(chat, return_dict=False)[:capacity]} for chat in chats]  # all tokens are learnt

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


# --- the data and the optimizer ---

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)  # after fully_shard, which replaces the parameters
lengths = [len(example["input_ids"]) for example in dataset]
sampler = PackedBatchSampler(lengths, capacity, mesh.get_rank(), world_size, drop_last=True)
if len(sampler) == 0:
    raise ValueError("the documents fill fewer rows than there are ranks")
loader = DataLoader(dataset, batch_sampler=sampler, collate_fn=PaddingFreeCollator(capacity=capacity))

# --- the loop ---

for epoch in range(sampler.epoch, epochs):
    sampler.set_epoch(epoch)  # other rows in each epoch
    done = sampler.batches_done  # rows of this epoch: 0 if it begins
    rows = ({k: v.to("cuda") if torch.is_tensor(v) else v for k, v in row.items()} for row in loader)
    while step := list(itertools.islice(rows, rows_per_step)):
        targets = sum(count_targets(row["labels"]) for row in step)  # of all ranks and rows
        total = 0
        for row in step:
            with reducing(row is step[-1]):
                loss = model(**row, num_items_in_batch=targets / world_size).loss
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        mean = total / world_size  # the loss of the step
        if mesh.get_rank() == 0:
            print(f"loss {mean.item():.4f}")  # waits for the GPU
        done += len(step)

# --- the model for from_pretrained ---

inner = getattr(model, "module", model)  # DDP has the model in .module
whole = get_model_state_dict(inner, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if mesh.get_rank() == 0:
    inner.save_pretrained("out", state_dict=whole)
dist.destroy_process_group()
