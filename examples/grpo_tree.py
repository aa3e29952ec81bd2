"""A step of GRPO on samples that share their prompt, each with the prompt in front, and as a prefix tree.

    python examples/grpo_tree.py                 a tiny Qwen3, on the CPU in a minute
    python examples/grpo_tree.py --device cuda

Both steps have the same loss and the same gradients. The tree holds each prompt once: its rows are fewer than the
samples' tokens, in every layer. The result is written with times, the rows that the model computes and the memory that
the backward keeps; the picture shows who sees what in the row of one prompt.
"""

import argparse
import time
from pathlib import Path

from common.options import add_device, needs


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--samples", type=int, default=8, help="for each prompt (default: %(default)s)")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt (default: 512, on a GPU 8192)")
    parser.add_argument("--answer", type=int, help="tokens of the longest answer (default: 64, on a GPU 1024)")
    parser.add_argument("--repeat", type=int, default=5, help="steps of each kind, in turns; the fastest counts")
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for grpo_tree_DEVICE.json and .png")
    return parser.parse_args()


if __name__ == "__main__":
    needs("transformers", "matplotlib", options=parse_arguments)

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import transformers
from common.results import save_results

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops

VOCAB = 5000
SIZES = {
    "cpu": {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32},
    "cuda": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128},
}
LENGTHS = {"cpu": (512, 64), "cuda": (8192, 1024)}  # of a prompt, and of the longest answer


def new_model(arguments: argparse.Namespace) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=VOCAB, num_hidden_layers=4, num_key_value_heads=2, use_cache=False, **SIZES[arguments.device]
    )
    torch.manual_seed(arguments.seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to(arguments.device, torch.bfloat16 if arguments.device == "cuda" else torch.float32)
    apply_packing_ops(model)
    return model


class Samples:
    """Prompts with their answers, end to end. weights: the advantage at slots that predict a token of an answer, else
    0.
    """

    def __init__(self, arguments: argparse.Namespace):
        prompt, longest = LENGTHS[arguments.device]
        prompt, longest = arguments.prompt or prompt, arguments.answer or longest
        parts, trained = [], []
        for _ in range(arguments.prompts):
            shared = torch.randint(VOCAB, (prompt,))
            for length in torch.randint(longest // 2, longest + 1, (arguments.samples,)).tolist():
                parts.append(torch.cat([shared, torch.randint(VOCAB, (length,))]))
                slots = torch.arange(prompt + length)  # slot t predicts token t + 1
                trained.append((slots >= prompt - 1) & (slots < prompt + length - 1))
        self.tokens = torch.cat(parts)
        self.metadata = po.PackedMetadata.from_lengths([len(part) for part in parts], device=arguments.device)
        self.tree = po.pack_prefix_tree(self.tokens, self.metadata.cu_seqlens.cpu())
        self.tokens = self.tokens.to(arguments.device)
        advantages = torch.randn(len(parts), device=arguments.device)
        self.weights = po.segment_broadcast(advantages, self.metadata) * torch.cat(trained).to(arguments.device)


def loss_of(logps: torch.Tensor, samples: Samples) -> torch.Tensor:
    """GRPO's first step: the ratio is 1, and its gradient that of the log-probability. The same for both kinds of
    steps.
    """
    ratio = (logps - logps.detach()).exp()
    return -(ratio * samples.weights).sum() / (samples.weights != 0).sum()


def unshared_logps(model: torch.nn.Module, samples: Samples) -> torch.Tensor:
    given = samples.metadata.to_transformers()
    hidden = model.model(
        input_ids=samples.tokens[None], position_ids=samples.metadata.position_ids[None], **given
    ).last_hidden_state
    return po.token_logps(hidden, model.lm_head.weight, samples.tokens, samples.metadata)


def shared_logps(model: torch.nn.Module, samples: Samples) -> torch.Tensor:
    tree = samples.tree.to(samples.tokens.device)
    metadata = po.PackedMetadata.from_prefix_tree(samples.tree, device=samples.tokens.device)
    input_ids = samples.tokens[tree.token_of_slot]
    hidden = model.model(
        input_ids=input_ids[None], position_ids=metadata.position_ids[None], **metadata.to_transformers()
    ).last_hidden_state
    return po.prefix_token_logps(hidden, model.lm_head.weight, input_ids, tree)


KINDS = {"each sample with its prompt": unshared_logps, "as a prefix tree": shared_logps}


class Kept:
    """Bytes that autograd keeps for the backward, parameters aside."""

    def __init__(self, model: torch.nn.Module):
        self.storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.bytes = 0

    def __enter__(self) -> "Kept":
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.hooks.__exit__(*error)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.storages:
            self.storages.add(storage.data_ptr())
            self.bytes += storage.nbytes()
        return tensor


def step(model: torch.nn.Module, samples: Samples, kind: str) -> dict:
    """One forward and backward: loss, gradients, seconds, MiB."""
    on_gpu = samples.tokens.is_cuda
    model.zero_grad()
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with Kept(model) as kept:
        loss = loss_of(KINDS[kind](model, samples), samples)
    loss.backward()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    gradients = {name: p.grad.float().cpu() for name, p in model.named_parameters()}
    return {"seconds": seconds, "loss": float(loss.detach()), "kept_mib": kept.bytes / 2**20, "gradients": gradients}


def save_picture(path: Path, samples: Samples) -> None:
    """Who sees whom in the rows of the first tree, one pixel for some tokens."""
    tree = samples.tree
    roots = [*(tree.parents < 0).nonzero()[:, 0].tolist(), tree.num_segments]
    segments = roots[1]
    end = int(tree.cu_seqlens[segments])
    segment_of = torch.repeat_interleave(torch.arange(segments), tree.lengths[:segments])
    above = torch.eye(segments, dtype=torch.bool)  # [segment, the segments that it continues]
    for segment, parent in enumerate(tree.parents[:segments].tolist()):
        if parent >= 0:
            above[segment] |= above[parent]
    rows = torch.arange(0, end, max(end // 400, 1))
    seen = above[segment_of[rows][:, None], segment_of[rows][None]] & (rows[None] <= rows[:, None])
    figure, axis = plt.subplots(figsize=(5.4, 5), layout="constrained")
    axis.imshow(seen, cmap="Blues", extent=(0, end, end, 0), vmin=-0.2, vmax=1.4)
    tokens = int(tree.copies[:end].sum())
    axis.set_title(
        f"{segments - 1} answers to one prompt:\n{end:,} rows instead of {tokens:,}, {tokens / end:.1f} times fewer"
    )
    axis.set(xlabel="row that is seen", ylabel="row that sees")
    figure.savefig(path, dpi=120)


def main() -> None:
    arguments = parse_arguments()
    model = new_model(arguments)
    samples = Samples(arguments)
    results = {kind: step(model, samples, kind) for kind in KINDS}  # the first step of each is slower
    for _ in range(arguments.repeat):
        for kind, result in results.items():
            result["seconds"] = min(result["seconds"], step(model, samples, kind)["seconds"])
    unshared, shared = (results[kind].pop("gradients") for kind in KINDS)
    largest = max(float(g.abs().max()) for g in unshared.values())
    apart = max(float((shared[name] - g).abs().max()) for name, g in unshared.items()) / largest
    for kind, rows in zip(KINDS, (samples.tree.num_tokens, samples.tree.num_slots), strict=True):
        results[kind]["rows"] = rows
        figures = results[kind]
        print(
            f"{kind}: {rows} rows, {figures['seconds']:.3f} s, {figures['kept_mib']:.0f} MiB kept for the backward, "
            f"loss {figures['loss']:.7f}"
        )
    before, after = (results[kind] for kind in KINDS)
    print(
        f"{before['seconds'] / after['seconds']:.2f} times as fast; gradients differ by {apart:.1e} of the "
        "largest entry"
    )
    results["gradients_differ_by"] = apart
    save_results(arguments.out / f"grpo_tree_{arguments.device}.json", results, arguments.device)
    save_picture(arguments.out / f"grpo_tree_{arguments.device}.png", samples)


if __name__ == "__main__":
    main()
