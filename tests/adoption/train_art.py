"""ART's Unsloth trainer trains a tiny Llama of transformers on the CPU: SFT in micro-batches, RL on trimmed rows.

run.py starts it under the patches with their flag set; the last line that it prints is JSON, the losses of each way.
The model is transformers': Unsloth's need a GPU.
"""

import asyncio
import json
import os
from collections import defaultdict
from types import SimpleNamespace

import stand_ins  # noqa: F401
import torch
from art import types
from art.preprocessing.inputs import create_train_inputs
from art.preprocessing.pack import packed_tensors_from_tokenized_results
from art.preprocessing.tokenize import SFTBatch, TokenizedResult
from art.unsloth import train as trainer_of_art
from transformers import LlamaConfig, LlamaForCausalLM

STEPS, VOCABULARY, WIDTH, CHUNK = 4, 64, 256, 16
LENGTHS = [19, 5, 11, 30, 7, 2, 23, 14]
widths = set()  # of the rows that a model was given


def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


class Model(LlamaForCausalLM):
    """Gives hidden states as logits where Unsloth's do, for RL."""

    def forward(self, input_ids, causal_mask=None, **kwargs):
        widths.add(tuple(input_ids.shape))
        if causal_mask is None:
            return super().forward(input_ids, **kwargs)
        return SimpleNamespace(logits=self.model(input_ids, causal_mask[:, None].float()).last_hidden_state)


def model_of():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Model(LlamaConfig(**sizes, vocab_size=VOCABULARY, num_hidden_layers=2))


def given(run, shapes):
    """The losses of ``run()``, which must give its model rows of these shapes."""
    widths.clear()
    losses = run()
    assert widths == shapes, f"expected rows of {shapes}, got {widths}"
    return losses


def sft(flag, padding=0):
    """The loss of each batch; ``padding``: columns after each trajectory, as they were before ART's #582."""
    trajectories = []
    for ids in documents():
        end = torch.zeros(padding, dtype=torch.int64)
        row = {"input_ids": torch.cat([ids, end]), "attention_mask": torch.cat([torch.ones_like(ids), end])}
        row["labels"] = torch.cat([ids.index_fill(0, torch.arange(len(ids) // 2), -100), end - 100])
        trajectories.append({name: values[None] for name, values in row.items()})
    tokens, targets = sum(LENGTHS), sum(int((each["labels"] != -100).sum()) for each in trajectories)
    batch = SFTBatch(trajectories, 1e-2, len(trajectories), tokens, targets)
    model = model_of()
    trainer = SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters()))
    state = SimpleNamespace(trainer=trainer, peft_model=model, last_training_mode=None)
    trainer_of_art._PACKING_OPS = flag

    async def losses():
        return [step["loss"] async for step in trainer_of_art.run_unsloth_sft_training(state, [batch] * STEPS)]

    return asyncio.run(losses())


def rl(flag):
    """The loss of each step on one packed row, whose first two documents answer one prompt."""
    results = []
    for i, ids in enumerate(documents()[:4]):
        tokens = [9, 8, 7] * (i < 2) + ids.tolist()
        prompt = 3 if i < 2 else 1
        result = TokenizedResult(
            advantage=(-1.0) ** i, chat="", token_ids=tokens, input_pos=list(range(len(tokens))),
            assistant_mask=[int(at >= prompt) for at in range(len(tokens))],
            logprobs=[float("nan") if at < prompt else -4.0 for at in range(len(tokens))],
            pixel_values=None, image_grid_thw=None, trajectory=None, choice_offsets=[], extra_logprobs={},
            _tokenizer=None, weight=1.0, prompt_id=max(i, 1), prompt_length=prompt,
        )  # fmt: skip
        results.append(result)
    packed = packed_tensors_from_tokenized_results(results, WIDTH, pad_token_id=0)
    assert packed["tokens"].shape == (1, WIDTH)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    trainer = SimpleNamespace(
        model=model, optimizer=optimizer, accelerator=accelerator, _metrics={"train": defaultdict(list)}
    )
    compute_loss = trainer_of_art.get_compute_loss_fn(trainer)
    trainer_of_art._PACKING_OPS = flag
    losses = []
    for _ in range(STEPS):
        config = types.TrainConfig(learning_rate=1e-2)
        inputs = create_train_inputs(packed, 0, config, {"logprob_calculation_chunk_size": CHUNK}, warmup=False)
        loss = compute_loss(model, inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main():
    assert trainer_of_art._PACKING_OPS, "expected ART_PACKING_OPS=1"
    one_by_one, threes = {(1, length) for length in LENGTHS}, {(3, 19), (3, 30), (2, 23)}
    os.environ["ART_SFT_MICROBATCH_SIZE"] = "3"
    ways = {
        "one by one": given(lambda: sft(flag=False), one_by_one),
        "micro-batches of 3": given(lambda: sft(flag=True), threes),
        "micro-batches of 3 of trajectories with padding": given(lambda: sft(flag=True, padding=9), threes),
    }
    rows = {
        f"rows of {WIDTH}": given(lambda: rl(flag=False), {(1, WIDTH)}),
        "trimmed rows": given(lambda: rl(flag=True), {(1, 80)}),
    }
    print(json.dumps({"SFT": ways, "RL": rows}))


if __name__ == "__main__":
    main()
