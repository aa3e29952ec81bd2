"""DPO without padding, chosen and rejected in one packed row: python examples/first/dpo_packed.py MODEL"""

import copy
import sys

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops

policy = AutoModelForCausalLM.from_pretrained(sys.argv[1])
apply_packing_ops(policy)
reference = copy.deepcopy(policy).eval()
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)

# (prompt, chosen, rejected), token ids
pairs = [([5, 6, 7], [8, 9, 2], [3, 2]), ([4, 4], [9, 2], [8, 8, 8, 2])]
samples = [(prompt, answer) for prompt, chosen, rejected in pairs for answer in (chosen, rejected)]
row = po.PackedMetadata.from_lengths([len(prompt) + len(answer) for prompt, answer in samples])
ids = torch.tensor([token for prompt, answer in samples for token in prompt + answer])
labels = torch.tensor([token for prompt, answer in samples for token in [-100] * len(prompt) + answer])


def logps_of(model):
    """Log-probability of each answer, [len(samples)]. The logits of all tokens are never in memory at once."""
    inputs = {"input_ids": ids[None], "position_ids": row.position_ids[None], **row.to_transformers()}
    hidden = model.model(**inputs).last_hidden_state[0]
    return po.segment_sum(po.token_logps(hidden, model.lm_head.weight, labels, row), row.cu_seqlens)


with torch.no_grad():
    at_reference = logps_of(reference)
for _ in range(3):
    chosen, rejected = (logps_of(policy) - at_reference).view(-1, 2).unbind(1)
    loss = -logsigmoid(0.1 * (chosen - rejected)).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
