"""verl's fused forward trains a tiny Llama of transformers on the CPU: padded rows, and rows without padding.

run.py starts it under the patches with their flag set; the last line that it prints is JSON, the losses of each way.
The loop is of this script: verl's starts with ray and GPUs. Attention is transformers' own: register asks
for 5.17, which verl does not take yet.
"""

import json
import os

import stand_ins  # noqa: F401
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from verl.models.transformers.dense_common import forward_with_torch_backend
from verl.utils.attention_utils import pad_input, unpad_input
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

STEPS, VOCABULARY, TEMPERATURE = 4, 64, 0.7
LENGTHS = [19, 5, 11, 30, 7, 2, 23, 14]


class Model(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return forward_with_torch_backend(self, *args, return_dict=True, temperature=TEMPERATURE, **kwargs)


def batch():
    """Right-padded ids and their mask."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return ids, (ids > 0).long()


def policy_loss(log_probs, entropy, mask):
    """Of [batch, seqlen], where slot t predicts the token at t + 1; advantages differ by row."""
    advantages = torch.linspace(0.5, 1.5, len(LENGTHS))[:, None]
    trained = mask[:, 1:]
    found = (-log_probs * advantages - 0.01 * entropy)[:, :-1]
    return found.where(trained > 0, 0).sum() / trained.sum()


def train(packed, flag):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, num_hidden_layers=2, use_cache=False)
    model = Model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        os.environ["VERL_PACKING_OPS"] = "1" if flag else "0"
        ids, mask = batch()
        # Two micro-batches of like numbers of tokens
        for rows in get_seqlen_balanced_partitions(LENGTHS, 2, equal_size=False):
            keep = torch.zeros_like(mask).index_fill(0, torch.tensor(rows), 1) * mask
            loss = (without_padding if packed else with_padding)(model, ids, keep, mask)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return [sum(losses[at : at + 2]) for at in range(0, 2 * STEPS, 2)]


def with_padding(model, ids, keep, mask):
    came = model(input_ids=ids, attention_mask=mask)
    share = keep[:, 1:].sum() / mask[:, 1:].sum()
    return policy_loss(came.log_probs, came.entropy, keep) * share


def without_padding(model, ids, keep, mask):
    flat, indices, *_ = unpad_input(ids[..., None], keep)
    positions, *_ = unpad_input((keep.cumsum(-1) - 1)[..., None], keep)
    came = model(input_ids=flat.T, position_ids=positions.T)
    size = {"batch": ids.shape[0], "seqlen": ids.shape[1]}
    log_probs, entropy = (pad_input(each.T, indices, **size)[..., 0] for each in (came.log_probs, came.entropy))
    share = keep[:, 1:].sum() / mask[:, 1:].sum()
    return policy_loss(log_probs, entropy, keep) * share


def main():
    assert os.environ["VERL_PACKING_OPS"] == "1"
    ways = {"padded": train(packed=False, flag=False), "packed": train(packed=True, flag=True)}
    print(json.dumps({"GRPO": ways}))


if __name__ == "__main__":
    main()
