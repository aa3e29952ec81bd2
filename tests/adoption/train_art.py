"""ART's trainer trains a tiny Llama of transformers on packed RL rows on the CPU: a dense mask, and paths of a tree.

run.py starts it under the patch with its flag set; the last line that it prints is JSON, the losses of each way. The
model is transformers': Unsloth's need a GPU.
"""

import json
from collections import defaultdict
from types import SimpleNamespace

import stand_ins  # noqa: F401
import torch
from art import types
from art.local import train as trainer_of_art
from art.local.pack import packed_tensors_from_tokenized_results
from art.local.tokenize import TokenizedResult
from transformers import LlamaConfig, LlamaForCausalLM

from packing_ops.integrations.transformers import apply_packing_ops

STEPS, VOCABULARY, WIDTH, CHUNK = 4, 64, 256, 16
LENGTHS = [19, 5, 11, 30, 7, 2]  # of the answers, three to a prompt
PROMPTS = [[9, 8, 7, 6, 5], [3, 4]]
widths = set()  # of the rows that a model was given


class Model(LlamaForCausalLM):
    """Gives hidden states as logits, as Unsloth's models do here."""

    def forward(self, input_ids, causal_mask=None, prefix_seg_info=None, **kwargs):
        widths.add(tuple(input_ids.shape))
        mask = None if causal_mask is None else causal_mask[:, None].float()
        return SimpleNamespace(logits=self.model(input_ids, attention_mask=mask, **kwargs).last_hidden_state)


def model_of(paths):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Model(LlamaConfig(**sizes, vocab_size=VOCABULARY, num_hidden_layers=2))
    if paths:
        apply_packing_ops(model)
    return model


def results(shared):
    """Answers; those to one prompt share it, or each has a prompt of its own. The first token of one is not learnt."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, length in enumerate(LENGTHS):
        prompt = PROMPTS[i // 3]
        tokens = prompt + torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        learnt = [int(at > len(prompt)) for at in range(len(tokens))]
        result = TokenizedResult(
            trajectory=None, advantage=(-1.0) ** i, chat="", tokens=[""] * len(tokens), token_ids=tokens,
            input_pos=list(range(len(tokens))), assistant_mask=learnt,
            logprobs=[-4.0 if each else float("nan") for each in learnt],
            prompt_id=1 + (i // 3 if shared else i), prompt_length=len(prompt),
        )  # fmt: skip
        made.append(result)
    return made


def rl(flag, shared, shape):
    """The loss of each step on one packed row, of which the model must see that much."""
    packed = packed_tensors_from_tokenized_results(results(shared), WIDTH, pad_token_id=0)
    assert packed["tokens"].shape == (1, WIDTH)
    model = model_of(paths=flag)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    trainer = SimpleNamespace(model=model, optimizer=optimizer, accelerator=accelerator, _metrics=defaultdict(list))
    compute_loss = trainer_of_art.get_compute_loss_fn(trainer)
    trainer_of_art._PACKING_OPS = flag
    widths.clear()
    losses = []
    for _ in range(STEPS):
        settings = {"config": types.TrainConfig(learning_rate=1e-2)}
        settings["_config"] = {"logprob_calculation_chunk_size": CHUNK}
        loss = compute_loss(model, {**packed, **settings})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert widths == {shape}, f"expected a row of {shape}, got {widths}"
    return losses


def main():
    assert trainer_of_art._PACKING_OPS, "expected ART_PACKING_OPS=1"
    ways = {
        "dense mask, each answer after a prompt of its own": rl(flag=False, shared=False, shape=(1, WIDTH)),
        "paths, each answer after a prompt of its own": rl(flag=True, shared=False, shape=(1, 96)),
        "paths, a prompt once for its answers": rl(flag=True, shared=True, shape=(1, 96)),
    }
    dense = rl(flag=False, shared=True, shape=(1, WIDTH))
    first = ways["paths, a prompt once for its answers"]
    assert abs(dense[0] - first[0]) > 1e-5, "expected other losses where positions count along the row"
    print(json.dumps({"RL": ways}))


if __name__ == "__main__":
    main()
