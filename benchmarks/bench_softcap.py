"""python benchmarks/bench_softcap.py --device cuda: attention with softcap, as Gemma 2 has it, beside the same
without.
"""

from bench_attention import WORKLOADS, option_cases
from harness import run


def cases(device, softcap=50.0):
    options = {"packing_ops": (softcap, None), "packing_ops, no softcap": (0.0, None)}
    for heads, dim in (((16, 4), 256), ((32, 8), 128), ((32, 8), 64)):
        yield from option_cases(f"chat, softcap {softcap:g}", WORKLOADS["chat"], heads, dim, options, device)


if __name__ == "__main__":
    run("softcap", cases)
