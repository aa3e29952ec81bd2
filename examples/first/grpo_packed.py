"""A GRPO step on one packed row, no padding and no trainer: python examples/first/grpo_packed.py MODEL"""

import sys

import torch
from transformers import AutoModelForCausalLM

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops

model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
apply_packing_ops(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

# (prompt, answer, reward), token ids: two prompts, two samples of each
samples = [([5, 6], [7, 8, 9], 1.0), ([5, 6], [3], 0.0), ([4], [4, 8, 2], 0.0), ([4], [9], 1.0)]
row = po.PackedMetadata.from_lengths([len(prompt) + len(answer) for prompt, answer, _ in samples])
ids = torch.tensor([token for prompt, answer, _ in samples for token in prompt + answer])
labels = torch.tensor([token for prompt, answer, _ in samples for token in [-100] * len(prompt) + answer])

# Advantages: rewards normalised among the samples of their prompt, then one value for every token of a sample.
rewards, prompts = torch.tensor([reward for *_, reward in samples]), torch.tensor([0, 2, 4], dtype=torch.int32)
mean, std = po.segment_mean(rewards, prompts), po.segment_std(rewards, prompts)
advantages = (rewards - po.segment_broadcast(mean, prompts, 4)) / (po.segment_broadcast(std, prompts, 4) + 1e-4)
advantages = po.segment_broadcast(advantages, row.cu_seqlens, row.total)
predicts = po.shift_labels(labels, row.cu_seqlens) != -100  # slots that predict a token of an answer

inputs = {"input_ids": ids[None], "position_ids": row.position_ids[None], **row.to_transformers()}
old_logps = None  # of the policy that made the samples
for _ in range(3):
    hidden = model.model(**inputs).last_hidden_state[0]
    logps = po.token_logps(hidden, model.lm_head.weight, labels, row)  # [total]
    old_logps = logps.detach() if old_logps is None else old_logps
    ratio = (logps - old_logps).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    loss = (loss * predicts).sum() / predicts.sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
