"""GRPO with vLLM in the same process: sampled by vLLM, trained on packed rows, with the same bits.

    python examples/grpo_vllm.py   a tiny Qwen3, on the CPU in some minutes; needs vLLM (pip install --group vllm)

vLLM samples several answers to each prompt, on packing_ops' attention and with layers that run as the trainer's do. It
hands back the log-probability of each token, the update takes them again from packed rows, and the new weights go into
vLLM without a file. |rollout log-prob - trainer log-prob| is 0.0 for every token of every step. The same loop runs
beside it with vLLM's own backend and a trainer without the mode. An answer's reward is the share of its tokens that are
even numbers.
"""

import argparse
import functools
import gc
import os
import tempfile
from pathlib import Path

from common.options import needs

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each loop (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="of each step (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for grpo_vllm_cpu.json and .png")
    return parser.parse_args()


if __name__ == "__main__":
    needs("vllm", "transformers", "matplotlib", options=parse_arguments)

import torch
import transformers
import vllm
from common.grpo import Answers, save_picture, take_step, told
from common.results import save_results

from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops
from packing_ops.integrations.vllm import register

SIZES = {
    **{"vocab_size": 5000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4, "initializer_range": 0.1},
}
PROMPT, ANSWER = 100, 32  # tokens, at most
ENDS = list(range(0, SIZES["vocab_size"], 64))  # one token in 64 ends an answer


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    """Each as often as it is answered."""
    lengths = torch.randint(1, PROMPT + 1, (arguments.prompts,)).tolist()
    return [p for n in lengths for p in [torch.randint(SIZES["vocab_size"], (n,)).tolist()] * arguments.samples]


def new_model(seed: int) -> tuple[torch.nn.Module, str]:
    """A model, and the folder that vLLM reads it from once."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**SIZES))
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    return model, folder


def new_engine(folder: str, seed: int, ours: bool) -> vllm.LLM:
    options = {"attention_backend": "CUSTOM" if ours else None, "enforce_eager": True, "dtype": "float32"}
    sizes = {"max_model_len": PROMPT + ANSWER, "max_num_seqs": 32}
    return vllm.LLM(folder, skip_tokenizer_init=True, seed=seed, **options, **sizes)


def sample(llm: vllm.LLM, model: torch.nn.Module, prompts: list[list[int]]) -> Answers:
    """Answers and their log-probabilities, with the weights that the model has now."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(model.state_dict().items())})
    llm.reset_prefix_cache()
    sampling = vllm.SamplingParams(max_tokens=ANSWER, stop_token_ids=ENDS, logprobs=0, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = [each.outputs[0] for each in llm.generate(given, sampling, use_tqdm=False)]
    logps = [[place[t].logprob for place, t in zip(a.logprobs, a.token_ids, strict=True)] for a in found]
    return [list(answer.token_ids) for answer in found], list(map(torch.tensor, logps))


def train(arguments: argparse.Namespace, ours: bool) -> list[dict]:
    """The loop: what each step measured."""
    model, folder = new_model(arguments.seed)
    llm = new_engine(folder, arguments.seed, ours)
    applied = apply_packing_ops(model, invariant=ours)
    if applied.skipped:
        print(f"not claimed: {applied.skipped}")
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for step in range(arguments.steps):
        torch.manual_seed(arguments.seed + step)
        prompts = prompts_of(arguments)
        steps.append(take_step(model, optimizer, functools.partial(sample, llm), prompts, arguments.samples))
        print(f"{'packing_ops' if ours else 'vLLM alone'}, step {step}: {told(steps[-1])}")
    revert_packing_ops(model)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()  # with the engine its patches go
    return steps


def main() -> None:
    arguments = parse_arguments()
    register()  # where packing_ops is installed vLLM calls it
    measured = {title: train(arguments, ours) for title, ours in (("vLLM alone", False), ("packing_ops", True))}
    save_results(arguments.out / "grpo_vllm_cpu.json", measured, "cpu")
    save_picture(arguments.out / "grpo_vllm_cpu.png", measured)


if __name__ == "__main__":
    main()
