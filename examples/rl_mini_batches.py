"""One RL update on multi-turn rollouts: mini-batches of whole prompts, dealt to ranks, packed, compared with unpacked.

    python examples/rl_mini_batches.py
    python examples/rl_mini_batches.py --prompts 8 --samples 4 --ranks 4 --reduction prompt_mean

A tiny model talks to a toy environment: every turn of every sample is a row, so prompts have as many rows as it
happens. The number of optimizer steps follows from the prompts alone. Each step is taken with the gradient of packed
rows, rank by rank, and compared with rows run one by one and reduced by definition. In float64, on the CPU.
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from common.results import save_results
from common.text_data import BOS, IGNORE
from common.tiny_llama import Config, TinyLlama

import packing_ops as po
from packing_ops.data import normalize_advantages, stage_chunks

REDUCTIONS = ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean")
OBSERVATION = list(b"\nenvironment: go on\n")


@torch.no_grad()
def sample_turn(model: TinyLlama, conversations: list[list[int]], lengths: list[int], generator) -> list[list[int]]:
    """One sampled response per conversation, as many tokens as ``lengths`` says."""
    responses = [[] for _ in conversations]
    for _ in range(max(lengths)):
        open_ones = [i for i, response in enumerate(responses) if len(response) < lengths[i]]
        rows = [torch.tensor(conversations[i] + responses[i]) for i in open_ones]
        metadata = po.PackedMetadata.from_lengths([len(row) for row in rows])
        logits = model(torch.cat(rows), metadata.position_ids, metadata.cu_seqlens)
        tokens = torch.multinomial(logits[metadata.cu_seqlens[1:] - 1].softmax(-1), 1, generator=generator)
        for i, token in zip(open_ones, tokens.flatten().tolist(), strict=True):
            responses[i].append(token)
    return responses


@dataclass
class Sample:
    """One conversation: a row per turn, ``(tokens so far, how many of them are its response)``."""

    uid: str
    conversation: list[int]
    turns: list[tuple[list[int], int]] = field(default_factory=list)
    reward: float = 0.0


def rollouts(model: TinyLlama, arguments) -> list[Sample]:
    """Samples of 1 to 5 turns; the reward is the share of even tokens in the last response."""
    generator = torch.Generator().manual_seed(arguments.seed)
    samples = []
    for prompt in range(arguments.prompts):
        tokens = [BOS, *f"prompt {prompt}: say something even\n".encode()]
        samples += [Sample(f"prompt {prompt}", tokens) for _ in range(arguments.samples)]
    num_turns = torch.randint(1, 6, (len(samples),), generator=generator).tolist()
    for turn in range(max(num_turns)):
        talking = [sample for sample, turns in zip(samples, num_turns, strict=True) if turn < turns]
        lengths = torch.randint(4, 17, (len(talking),), generator=generator).tolist()
        responses = sample_turn(model, [sample.conversation for sample in talking], lengths, generator)
        for sample, response in zip(talking, responses, strict=True):
            sample.turns.append((sample.conversation + response, len(response)))
            sample.reward = sum(token % 2 == 0 for token in response) / len(response)
            sample.conversation = sample.conversation + response + OBSERVATION
    return samples


def padded_batch(samples: list[Sample], samples_per_prompt: int) -> dict:
    """[rows, seqlen]; slot t has the loss of predicting token t + 1, so that packing needs no shift across rows."""
    rows = [turn for sample in samples for turn in sample.turns]
    tokens = [torch.tensor(row) for row, _ in rows]
    masks = [torch.tensor([0.0] * (len(row) - size - 1) + [1.0] * size + [0.0]) for row, size in rows]
    input_ids, loss_mask = (torch.nn.utils.rnn.pad_sequence(part, batch_first=True) for part in (tokens, masks))
    lengths = torch.tensor([len(row) for row in tokens])
    rewards = torch.tensor([sample.reward for sample in samples]).view(-1, samples_per_prompt)
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()  # against the other samples of the prompt
    turns = torch.tensor([len(sample.turns) for sample in samples])
    return {
        "input_ids": input_ids,
        "attention_mask": (torch.arange(input_ids.shape[1]) < lengths[:, None]).long(),
        "loss_mask": loss_mask,
        "advantages": advantages.repeat_interleave(turns)[:, None].double() * loss_mask,
        "uids": [sample.uid for sample in samples for _ in sample.turns],
    }


def token_log_probs(logits: torch.Tensor, input_ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    """[total]: log-probability of the next token of the same row, 0 at a row's last slot."""
    targets = po.shift_labels(input_ids, cu_seqlens, ignore_index=IGNORE)
    return -F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")


def policy_losses(log_probs: torch.Tensor, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """[total]: minus advantage times the ratio of new to old probability."""
    return -tokens["advantages"] * (log_probs - tokens["old_log_probs"]).exp()


def packed_log_probs(model: TinyLlama, input_ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    position_ids = po.position_ids_from_cu_seqlens(cu_seqlens, len(input_ids))
    return token_log_probs(model(input_ids, position_ids, cu_seqlens), input_ids, cu_seqlens)


@torch.no_grad()
def old_log_probs(model: TinyLlama, batch: dict) -> torch.Tensor:
    """[rows, seqlen], packed for the model and padded again."""
    mask = batch["attention_mask"]
    input_ids, indices, cu_seqlens, _, _ = po.unpad_input(batch["input_ids"], mask)
    return po.pad_input(packed_log_probs(model, input_ids, cu_seqlens), indices, *mask.shape)


def packed_loss(model: TinyLlama, chunk: dict, capacity: int) -> tuple[torch.Tensor, int]:
    """One rank's part of a mini-batch: its rows packed, its losses summed; and the tokens of the packed rows."""
    packing = po.pack_sequences(chunk["attention_mask"].sum(1), capacity)
    total = 0.0
    for rows in packing.bins:
        fields = {name: chunk[name][rows] for name in ("input_ids", "loss_mask", "advantages", "old_log_probs")}
        tokens, _, cu_seqlens, _, _ = po.unpad_inputs(fields, chunk["attention_mask"][rows])
        log_probs = packed_log_probs(model, tokens["input_ids"], cu_seqlens)
        total = total + (policy_losses(log_probs, tokens) * tokens["loss_mask"]).sum()
    return total, packing.num_tokens


def unpacked_loss(model: TinyLlama, batch: dict, start: int, end: int, arguments) -> torch.Tensor:
    """The mini-batch row by row, reduced by definition: what packing, padding and ranks must not change."""
    losses = []
    for i in range(start, end):
        length = int(batch["attention_mask"][i].sum())
        tokens = {name: value[i, :length] for name, value in batch.items() if isinstance(value, torch.Tensor)}
        logits = model(tokens["input_ids"][None], torch.arange(length)[None])[0]
        log_probs = token_log_probs(logits, tokens["input_ids"], torch.tensor([0, length], dtype=torch.int32))
        losses.append(policy_losses(log_probs, tokens)[tokens["loss_mask"] > 0])
    if arguments.reduction == "token_mean":
        return torch.cat(losses).mean()
    if arguments.reduction == "sequence_mean":
        return torch.stack([row.mean() for row in losses]).mean()
    if arguments.reduction == "seq_mean_token_sum_norm":
        return torch.stack([row.sum() / arguments.capacity for row in losses]).mean()
    prompts = po.compute_prompt_boundaries(batch["uids"][start:end])
    return torch.stack([torch.cat(losses[first:last]).mean() for first, last in prompts]).mean()


def gradients(model: TinyLlama, loss: torch.Tensor) -> list[torch.Tensor]:
    return torch.autograd.grad(loss, list(model.parameters()))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2, help="samples per prompt")
    parser.add_argument("--mini-batch-size", type=int, default=2, help="prompts per optimizer step")
    parser.add_argument("--ranks", type=int, default=2, help="data-parallel ranks, run one after the other here")
    parser.add_argument("--reduction", default="sequence_mean", choices=REDUCTIONS)
    parser.add_argument("--capacity", type=int, default=512, help="slots of a packed row")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for demo_rl.json")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    model = TinyLlama(Config(max_positions=arguments.capacity)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)

    batch = padded_batch(rollouts(model, arguments), arguments.samples)
    batch["old_log_probs"] = old_log_probs(model, batch)
    boundaries = po.compute_prompt_mini_batch_boundaries(
        batch["uids"], arguments.mini_batch_size, arguments.prompts, True, arguments.samples
    )
    scaled = normalize_advantages(
        batch["advantages"],
        batch["loss_mask"],
        boundaries,
        arguments.reduction,
        prompt_boundaries=po.compute_prompt_boundaries(batch["uids"]),
        max_seq_len=arguments.capacity,
    )
    chunks = stage_chunks(batch | {"advantages": scaled}, boundaries, arguments.ranks)

    rows = [end - start for start, end in boundaries]
    print(f"{arguments.prompts} prompts of {arguments.samples} samples: {sum(rows)} turns in mini-batches of {rows}")
    steps = []
    for (start, end), ranks in zip(boundaries, chunks, strict=True):
        parts = [packed_loss(model, chunk, arguments.capacity) for chunk in ranks]
        packed = sum(loss for loss, _ in parts)
        packed_gradients = gradients(model, packed)
        unpacked = unpacked_loss(model, batch, start, end, arguments)
        difference = max(
            ((ours - plain).norm() / plain.norm()).item()
            for ours, plain in zip(packed_gradients, gradients(model, unpacked), strict=True)
        )
        steps.append(
            {
                "rows": end - start,
                "rows_per_rank": len(ranks[0]["input_ids"]),
                "loss_packed": packed.item(),
                "loss_unpacked": unpacked.item(),
                "gradient_difference": difference,
                "slots_padded": sum(chunk["input_ids"].numel() for chunk in ranks),
                "tokens_packed": sum(tokens for _, tokens in parts),
            }
        )
        print(
            f"step {len(steps)}: {arguments.reduction} {packed.item():+.9f} packed, {unpacked.item():+.9f} row by row; "
            f"gradients differ by {difference:.0e} of their norm; "
            f"{steps[-1]['tokens_packed']} tokens instead of {steps[-1]['slots_padded']} padded slots"
        )
        for parameter, gradient in zip(model.parameters(), packed_gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    results = {"reduction": arguments.reduction, "boundaries": boundaries, "steps": steps}
    save_results(arguments.out / "demo_rl.json", results, "cpu")


if __name__ == "__main__":
    main()
