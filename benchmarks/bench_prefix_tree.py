"""python benchmarks/bench_prefix_tree.py --device cpu: pack_prefix_tree on one core, from 10,000 to 9.4 million tokens.

Beside it new tensors of the sizes of its results, filled with a number: getting memory is most of the time of large
ones.
"""

import torch
from harness import Case, run

import packing_ops as po

CAPACITY = 65_536


def some(generator, count):
    return torch.randint(0, 150_000, (count,), generator=generator)


def answers(generator, prompt, answer, group=8):
    """A prompt and its answers, each sample with the prompt."""
    shared = some(generator, prompt)
    return [torch.cat([shared, some(generator, answer)]) for _ in range(group)]


def turns(generator, turn, count=16):
    """An agent's run, a sample for each turn: what was said before, and an answer that later turns see cut short."""
    samples, seen = [], some(generator, turn)
    for _ in range(count):
        samples.append(torch.cat([seen, some(generator, turn)]))
        seen = torch.cat([samples[-1][: -(turn // 4)], some(generator, turn // 2)])
    return samples


ANSWERS = "8 answers of 1/8 of the prompt"
LARGEST = 9_437_184  # 1,024 samples of 9,216 tokens
KINDS = {
    ANSWERS: lambda g, size: answers(g, 1024, 128) if size < 50_000 else answers(g, 8192, 1024),
    "16 turns of a run": lambda g, size: turns(g, 64 if size < 50_000 else 512),
    "nothing shared": lambda g, size: [some(g, 1024)],
}


def case(kind, size, dtype=torch.int64):
    generator = torch.Generator().manual_seed(0)
    samples = KINDS[kind](generator, size)
    for _ in range(round(size / sum(map(len, samples))) - 1):
        samples += KINDS[kind](generator, size)
    tokens = torch.cat(samples).to(dtype)
    cu_seqlens = torch.tensor([0, *map(len, samples)]).cumsum(0)
    tree = po.pack_prefix_tree(tokens, cu_seqlens, capacity=CAPACITY)
    results = [value for value in vars(tree).values() if isinstance(value, torch.Tensor)]
    shape = f"{kind}, samples={len(samples)} tokens={len(tokens)} rows={tree.num_slots}"
    return Case(
        "pack_prefix_tree",
        shape,
        str(dtype).removeprefix("torch."),
        {
            "packing_ops": lambda: po.pack_prefix_tree(tokens, cu_seqlens, capacity=CAPACITY),
            "filling new tensors of these sizes": lambda: [torch.full_like(result, 1) for result in results],
        },
    )


def cases(device):
    if device == "cuda":
        raise SystemExit("pack_prefix_tree runs on the CPU: --device cpu")
    torch.set_num_threads(1)
    for kind in KINDS:
        for size in (10_000, 100_000, 1_000_000, LARGEST):
            yield case(kind, size)
    yield case(ANSWERS, LARGEST, torch.int32)


if __name__ == "__main__":
    run("prefix_tree", cases)
