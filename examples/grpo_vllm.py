"""GRPO with vLLM in the same process: sampled by vLLM, trained on packed rows, with the same bits.

    python examples/grpo_vllm.py                 a tiny Qwen3, on the CPU in some minutes; needs vLLM
    python examples/grpo_vllm.py --device cuda   a Qwen3 of 0.6B's shape in bfloat16

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

from common.options import add_device, needs

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "1")  # KiB: torch reads it at the first product on a GPU
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each loop (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=4, help="of each step (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for grpo_vllm_DEVICE.json and .png")
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
    "cpu": {
        **{"vocab_size": 5000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 4, "initializer_range": 0.1},
    },
    "cuda": {  # Qwen3-0.6B's
        **{"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28, "tie_word_embeddings": True},
    },
}
DTYPES, LEARNING_RATES = {"cpu": torch.float32, "cuda": torch.bfloat16}, {"cpu": 1e-3, "cuda": 1e-4}
PROMPT, ANSWER = 100, {"cpu": 32, "cuda": 128}  # tokens, at most
ENDS = {"cpu": 64, "cuda": 512}  # one token in so many ends an answer
# Decoding steps as CUDA graphs of the layers as they are: layers that vLLM compiles have other bits.
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
ENGINES = {  # vLLM alone, and with packing_ops
    "cpu": ({"enforce_eager": True}, {"enforce_eager": True}),
    "cuda": ({"gpu_memory_utilization": 0.3}, {"gpu_memory_utilization": 0.3, **GRAPHS}),
}


def prompts_of(arguments: argparse.Namespace) -> list[list[int]]:
    """Each as often as it is answered."""
    lengths, vocab = torch.randint(1, PROMPT + 1, (arguments.prompts,)).tolist(), SIZES[arguments.device]["vocab_size"]
    return [p for n in lengths for p in [torch.randint(vocab, (n,)).tolist()] * arguments.samples]


def new_model(arguments: argparse.Namespace) -> tuple[torch.nn.Module, str]:
    """A model, and the folder that vLLM reads it from once."""
    torch.manual_seed(arguments.seed)
    config = transformers.Qwen3Config(**SIZES[arguments.device])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[arguments.device])
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    return model.to(arguments.device), folder


def new_engine(arguments: argparse.Namespace, folder: str, ours: bool) -> vllm.LLM:
    options = {**ENGINES[arguments.device][ours], "attention_backend": "CUSTOM" if ours else None}
    sizes = {"max_model_len": PROMPT + ANSWER[arguments.device], "max_num_seqs": arguments.prompts * arguments.samples}
    dtype = str(DTYPES[arguments.device]).removeprefix("torch.")
    return vllm.LLM(folder, skip_tokenizer_init=True, seed=arguments.seed, dtype=dtype, **sizes, **options)


def sample(llm: vllm.LLM, model: torch.nn.Module, prompts: list[list[int]]) -> Answers:
    """Answers and their log-probabilities, with the weights that the model has now."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(model.state_dict().items())})
    llm.reset_prefix_cache()
    device = model.device.type
    ends = list(range(0, model.config.vocab_size, ENDS[device]))
    sampling = vllm.SamplingParams(max_tokens=ANSWER[device], stop_token_ids=ends, logprobs=0, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    found = [each.outputs[0] for each in llm.generate(given, sampling, use_tqdm=False)]
    logps = [[place[t].logprob for place, t in zip(a.logprobs, a.token_ids, strict=True)] for a in found]
    return [list(answer.token_ids) for answer in found], list(map(torch.tensor, logps))


def train(arguments: argparse.Namespace, ours: bool) -> list[dict]:
    """The loop: what each step measured."""
    model, folder = new_model(arguments)
    llm = new_engine(arguments, folder, ours)
    applied = apply_packing_ops(model, invariant=ours)
    if applied.skipped:
        print(f"not claimed: {applied.skipped}")
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATES[arguments.device]), []
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
    name = f"grpo_vllm_{arguments.device}"
    save_results(arguments.out / f"{name}.json", measured, arguments.device)
    save_picture(arguments.out / f"{name}.png", measured)


if __name__ == "__main__":
    main()
