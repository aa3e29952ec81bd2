"""GRPO in one process with one model: sampled by continuous batching, trained on packed rows, with the same bits.

    python examples/grpo_same_bits.py                 a tiny Qwen3, on the CPU in two minutes
    python examples/grpo_same_bits.py --device cuda   Qwen3-0.6B's shape, random weights

generate_batch of transformers samples several answers to each prompt: prefill, chunks and decoding by packing_ops'
attention. It hands back the log-probability of each token. The update takes them again, from packed rows. Their
difference is what the first ratio of GRPO makes of two ways to compute one thing: with apply_packing_ops(model,
invariant=True) it is 0.0 for every token of every step. The same loop runs without the mode beside it. An answer's
reward is the share of its tokens that are even numbers.
"""

import argparse
import os
from pathlib import Path

from common.options import add_device, needs

os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")  # torch before 2.13 reads it once, at its first product on a GPU


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of each loop (default: 4, on a GPU 20)")
    parser.add_argument("--prompts", type=int, default=4, help="of each step (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument(
        "--out", type=Path, default=Path("demo_out"), help="folder for grpo_same_bits_DEVICE.json and .png"
    )
    return parser.parse_args()


if __name__ == "__main__":
    needs("transformers", "matplotlib", options=parse_arguments)

import torch
import transformers
from common.grpo import save_picture, take_step, told
from common.results import save_results
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops

SIZES = {
    "cpu": {
        **{"vocab_size": 5000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 4, "initializer_range": 0.1},
    },
    "cuda": {
        **{"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "tie_word_embeddings": True},
    },
}
STEPS, LEARNING_RATE = {"cpu": 4, "cuda": 20}, {"cpu": 1e-3, "cuda": 1e-5}
LONGEST = {"cpu": (100, 32), "cuda": (512, 256)}  # prompt, and answer
STEP_TOKENS = {"cpu": 64, "cuda": 1024}  # of continuous batching: longer prompts are prefilled in chunks
PAGE, BLOCKS = 256, 256  # tokens of a page of the KV cache, and how many the cache has


def new_model(arguments: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(arguments.seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES[arguments.device]))
    return model.to(arguments.device, torch.bfloat16 if arguments.device == "cuda" else torch.float32)


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    """Each as often as it is answered."""
    vocab, longest = SIZES[arguments.device]["vocab_size"], LONGEST[arguments.device][0]
    lengths = torch.randint(1, longest + 1, (arguments.prompts,)).tolist()
    return [prompt for n in lengths for prompt in [torch.randint(vocab, (n,)).tolist()] * arguments.samples]


def rollout(model: torch.nn.Module, prompts: list[list[int]]) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Answers, and their log-probabilities. One token in 64 ends an answer."""
    device = model.device.type
    ends = list(range(0, SIZES[device]["vocab_size"], 64))
    sampled = transformers.GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=LONGEST[device][1], eos_token_id=ends, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=BLOCKS, max_batch_tokens=STEP_TOKENS[device], return_logprobs=True
    )
    out = model.generate_batch(
        prompts, generation_config=sampled, continuous_batching_config=batching, progress_bar=False
    ).values()
    return [each.generated_tokens for each in out], [torch.tensor(each.logprobs) for each in out]


def train(arguments: argparse.Namespace, mode: bool) -> list[dict]:
    """The loop: what each step measured."""
    model = new_model(arguments)
    applied = apply_packing_ops(model, invariant=mode)
    if applied.skipped:
        print(f"not claimed: {applied.skipped}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE[arguments.device])
    steps = []
    for step in range(arguments.steps or STEPS[arguments.device]):
        torch.manual_seed(arguments.seed + step)
        prompts = prompts_of(arguments)
        steps.append(take_step(model, optimizer, rollout, prompts, arguments.samples))
        print(f"{'invariant' if mode else 'default'}, step {step}: {told(steps[-1])}")
    revert_packing_ops(model)
    return steps


def main() -> None:
    arguments = parse_arguments()
    measured = {
        title: train(arguments, mode) for title, mode in (("without the mode", False), ("invariant=True", True))
    }
    save_results(arguments.out / f"grpo_same_bits_{arguments.device}.json", measured, arguments.device)
    save_picture(arguments.out / f"grpo_same_bits_{arguments.device}.png", measured)


if __name__ == "__main__":
    main()
