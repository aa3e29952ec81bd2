"""Trains the same model on the same batches twice: collated in the loop, and one step ahead by prefetch.

    python examples/async_sft.py
    python examples/async_sft.py --data chat.jsonl --device cuda

The documents lie tokenised in compressed groups, as in the row groups of a Parquet file: collating a batch of shuffled
documents decompresses a group for each of them, then packs. In the loop that is added to every step; one step ahead,
the step hides it, if it leaves a core to the worker: on the CPU torch is given all cores but one, in both runs. What
holds the GIL in the worker is hidden less well: the step needs it too. The last line says how much faster a step is, or
that there is no gain here and why. The order is shuffled anew in every epoch, so the first batch of an epoch is never
collated ahead.
"""

import argparse
from pathlib import Path

from common.options import add_device, needs


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL of chats or prompt/completion pairs; default: docstrings")
    parser.add_argument("--documents", type=int, default=256, help="at most this many documents")
    parser.add_argument("--batch-size", type=int, default=32, help="documents of a step")
    parser.add_argument("--max-length", type=int, default=1024, help="longer documents are cut")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind, in turn; the quietest is shown")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for demo_async_DEVICE.json")
    return parser.parse_args()


if __name__ == "__main__":
    needs("matplotlib", "numpy", "rich", options=parse_arguments)

import lzma
import os
import pickle
import time
from dataclasses import asdict, dataclass, field
from statistics import median

import torch
from common.batches import packed_batch, summed_loss, to_device
from common.results import save_results
from common.text_data import Document, load_documents
from common.tiny_llama import Config, TinyLlama

from packing_ops.data import prefetch

GROUP = 64
NOISE = 0.02  # of a step: what the medians of two runs of the same differ by


@dataclass
class Run:
    """Seconds of every step, waiting for its batch included; what collating took, in the loop or beside it; losses."""

    ahead: bool
    waited: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    collated: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def compressed_groups(documents: list[Document]) -> list[bytes]:
    """Groups of ``GROUP`` documents, each document as the bytes of its int16 ids and labels."""
    parts = [[part.short().numpy().tobytes() for part in (d.input_ids, d.labels)] for d in documents]
    return [lzma.compress(pickle.dumps(parts[i : i + GROUP])) for i in range(0, len(parts), GROUP)]


def read_document(groups: list[bytes], index: int) -> Document:
    parts = pickle.loads(lzma.decompress(groups[index // GROUP]))[index % GROUP]
    return Document(*(torch.frombuffer(bytearray(part), dtype=torch.int16).long() for part in parts))


def train(groups: list[bytes], num_documents: int, ahead: bool, arguments) -> Run:
    order = list(range(num_documents))
    steps_per_epoch = num_documents // arguments.batch_size

    def collate(step):
        start, first = time.perf_counter(), step % steps_per_epoch * arguments.batch_size
        batch = packed_batch([read_document(groups, i) for i in order[first : first + arguments.batch_size]])
        run.collated.append(time.perf_counter() - start)
        return batch

    torch.manual_seed(arguments.seed)
    config = Config(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, max_positions=arguments.max_length)
    model = TinyLlama(config).to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    run = Run(ahead)
    for epoch in range(arguments.epochs):
        generator = torch.Generator().manual_seed(arguments.seed + epoch)
        order[:] = torch.randperm(num_documents, generator=generator).tolist()  # nobody reads it: prefetch has ended
        steps = range(epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch)
        batches = prefetch(steps, collate) if ahead else map(collate, steps)
        start = time.perf_counter()
        for step, batch in enumerate(batches, start=steps.start):
            waited = time.perf_counter() - start
            batch = to_device(batch, arguments.device)
            loss = summed_loss(model, batch) / batch.num_targets
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())
            if step > steps.start:  # nothing trains while the first batch of an epoch is collated
                run.waited.append(waited)
                run.step.append(time.perf_counter() - start)
            start = time.perf_counter()
    return run


def verdict(in_loop: float, ahead: float, collated: float) -> str:
    """What the seconds of a step with its batch collated in the loop and one step ahead, and of collating, come to."""
    saved = in_loop - ahead
    if saved > NOISE * in_loop:
        return f"a gain: a step is {in_loop / ahead:.2f}x faster, {min(saved / collated, 1):.0%} of collating is hidden"
    if collated <= NOISE * in_loop:
        return f"no gain here: collating takes {collated / in_loop:.1%} of a step, there is nothing to hide"
    return (
        f"no gain here: collating takes {collated / in_loop:.0%} of a step, and beside the step it slows that down as "
        "much: no core is free for the worker, or it holds the GIL"
    )


def main():
    arguments = parse_arguments()
    if arguments.device == "cpu":  # the step and the worker need a core each
        torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))
    documents, cut = load_documents(arguments.data, arguments.documents, arguments.max_length)
    if len(documents) < 2 * arguments.batch_size:
        raise SystemExit(
            f"--batch-size: expected two steps or more of {len(documents)} documents, got {arguments.batch_size}"
        )
    groups = compressed_groups(documents)
    train(groups, 2 * arguments.batch_size, False, arguments)  # warm-up
    runs = [train(groups, len(documents), ahead, arguments) for _ in range(arguments.rounds) for ahead in (False, True)]
    same = all(run.losses == runs[0].losses for run in runs)
    in_loop, ahead = (
        min((run for run in runs if run.ahead == kind), key=lambda run: median(run.step)) for kind in (False, True)
    )
    print(
        f"{len(documents)} documents ({cut} cut), {len(runs[0].losses)} steps; "
        f"losses {'are equal to the bit' if same else 'DIFFER'}"
    )
    for name, run in (("in the loop", in_loop), ("one step ahead", ahead)):
        step, waited = median(run.step) * 1e3, median(run.waited) * 1e3
        print(f"collated {name:14}: step {step:7.2f} ms, {waited:6.2f} ms of it waiting for the batch")
    seconds = median(in_loop.step), median(ahead.step), median(in_loop.collated)
    print(
        f"collating takes {seconds[2] * 1e3:.2f} ms in the loop, {median(ahead.collated) * 1e3:.2f} ms beside the step"
    )
    print(verdict(*seconds))

    results = {
        "documents": len(documents),
        "documents_cut": cut,
        "losses_equal": same,
        "verdict": verdict(*seconds),
        "step_seconds": {"in_loop": seconds[0], "ahead": seconds[1]},
        "waited_seconds": {"in_loop": median(in_loop.waited), "ahead": median(ahead.waited)},
        "runs": [asdict(run) for run in runs],
    }
    save_results(arguments.out / f"demo_async_{arguments.device}.json", results, arguments.device)


if __name__ == "__main__":
    main()
