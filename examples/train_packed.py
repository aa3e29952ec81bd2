"""Trains one small model on the same real documents twice, padded and packed, and compares.

    python examples/train_packed.py                        docstrings of the standard library
    python examples/train_packed.py --data chat.jsonl      {"messages": [...]} or {"prompt": ..., "completion": ...}
    python examples/train_packed.py --device cuda

Padded: batches of 8, each padded to its longest. Packed: rows of 2048 slots filled first-fit-decreasing. Each run has a
process of its own, so that peak memory is its own too. The two take turns, so that whatever else the machine does slows
both alike.
"""

import argparse
from pathlib import Path

from common.options import add_device, needs


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="JSONL of chats or prompt/completion pairs; default: docstrings")
    parser.add_argument("--documents", type=int, default=2048, help="at most this many documents")
    parser.add_argument("--capacity", type=int, default=2048, help="slots of a packed row")
    parser.add_argument("--batch-size", type=int, default=8, help="documents of a padded batch")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for demo_DEVICE.json and .png")
    return parser.parse_args()


if __name__ == "__main__":
    needs("matplotlib", "rich", options=parse_arguments)

import math
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import torch
from common.batches import packed_batch, padded_batch, summed_loss, to_device, unpadded_batch
from common.report_packed import save_report
from common.results import machine
from common.runs import Run, groups_of, peak_mib
from common.text_data import Document, load_documents
from common.tiny_llama import Config, TinyLlama

MODES = ("padded", "packed")
TURNS = 16  # of each run
turns = {}  # a semaphore for each run, in its process


def new_model(arguments) -> TinyLlama:
    torch.manual_seed(arguments.seed)
    return TinyLlama(Config(max_positions=arguments.capacity)).to(arguments.device)


def take_turns(semaphores) -> None:
    turns.update(semaphores)


def train(mode: str, arguments) -> Run:
    """One pass over the documents; runs in a process of its own, in turns with the other mode's."""
    other = MODES[1 - MODES.index(mode)]
    try:
        return train_in_turns(mode, arguments, turns[mode], turns[other])
    finally:
        for _ in range(TURNS + 1):  # a run that failed leaves the other one every turn
            turns[other].release()


def train_in_turns(mode: str, arguments, turn, turn_of_other) -> Run:
    # Before the first turn: model, optimizer, one step as a warm-up.
    turn.acquire()
    documents, _ = load_documents(arguments.data, arguments.documents, arguments.capacity)
    groups = groups_of(mode, [len(d) for d in documents], arguments)
    collate = padded_batch if mode == "padded" else packed_batch
    model = new_model(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    summed_loss(model, to_device(collate([documents[i] for i in groups[0]]), arguments.device)).backward()
    optimizer.zero_grad()
    run = Run(mode)
    turn_of_other.release()

    # The turns: only their seconds count.
    for i in range(TURNS):
        turn.acquire()
        start = time.perf_counter() - run.seconds
        for group in groups[i * len(groups) // TURNS : (i + 1) * len(groups) // TURNS]:
            batch = to_device(collate([documents[i] for i in group]), arguments.device)
            loss = summed_loss(model, batch) / batch.num_targets
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.steps += 1
            run.real_tokens += batch.real_tokens
            run.slots += batch.input_ids.numel() if mode == "padded" else max(arguments.capacity, batch.real_tokens)
            run.losses.append(loss.item())
            run.tokens_seen.append(run.real_tokens)
            run.seconds_seen.append(time.perf_counter() - start)
        run.seconds = time.perf_counter() - start
        told = f"{mode} {run.steps:>4} of {len(groups)} steps, loss {run.losses[-1] if run.losses else math.nan:.3f}"
        print(told, end="   " if mode == MODES[0] else "\n", flush=True)
        turn_of_other.release()
    run.peak_mib = peak_mib(arguments.device)
    return run


def first_step_losses(documents: list[Document], arguments) -> dict[str, float]:
    """The same 8 documents padded, unpadded and packed: one number, normalised by target tokens, in float32."""
    model = new_model(arguments)
    losses = {}
    for name, collate in (("padded", padded_batch), ("unpadded", unpadded_batch), ("packed", packed_batch)):
        batch = to_device(collate(documents[: arguments.batch_size]), arguments.device)
        with torch.no_grad():
            losses[name] = (summed_loss(model, batch).double() / batch.num_targets).item()
    return losses


def main():
    arguments = parse_arguments()
    documents, cut = load_documents(arguments.data, arguments.documents, arguments.capacity)
    lengths = [len(d) for d in documents]
    told = f"{len(documents)} documents, {sum(lengths)} tokens, {cut} cut to {arguments.capacity}"
    print(f"{told}; on {machine(arguments.device)['device']}")
    losses = first_step_losses(documents, arguments)
    context = multiprocessing.get_context("forkserver")
    semaphores = {mode: context.Semaphore(int(mode == MODES[0])) for mode in MODES}
    with ProcessPoolExecutor(2, context, take_turns, (semaphores,), max_tasks_per_child=1) as pool:
        runs = [future.result() for future in [pool.submit(train, mode, arguments) for mode in MODES]]
    stem = arguments.out / f"demo_{arguments.device}"
    save_report(stem, lengths, cut, arguments, runs, losses)


if __name__ == "__main__":
    main()
