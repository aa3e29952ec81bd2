"""Trains a tiny Qwen2-VL on packed rows of text and images, and compares a row with its documents one by one.

    python examples/vlm_sft.py
    python examples/vlm_sft.py --device cuda --documents 4000

A document shows one to three images of one color each, between words of text, and ends with the names of the colors. A
PackedStream puts documents into rows by two budgets, tokens and patches of images. PaddingFreeCollator joins their
patches and gives each document the three axes of its positions, by the model's own get_rope_index.
"""

import argparse
from pathlib import Path

from common.options import add_device, needs


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=256, help="of a row, at most")
    parser.add_argument("--patches", type=int, default=384, help="of all images of a row, at most")
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    add_device(parser)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for demo_vlm_DEVICE.json")
    return parser.parse_args()


if __name__ == "__main__":
    needs("transformers", options=parse_arguments)

import random

import torch
import transformers
from common.results import save_results

from packing_ops.data import PackedStream, PaddingFreeCollator
from packing_ops.integrations.transformers import apply_packing_ops

COLORS = {"red": (1.0, 0.0, 0.0), "green": (0.0, 1.0, 0.0), "blue": (0.0, 0.0, 1.0), "white": (1.0, 1.0, 1.0)}
START, IMAGE, END, QUESTION, FIRST_COLOR, FIRST_WORD, VOCABULARY = 1, 2, 3, 4, 5, 10, 60
PATCH, MERGED = 4, 4  # pixels of a patch's side; patches that are one token


def new_model() -> torch.nn.Module:
    text = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": PATCH}
    config = transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def patches_of(color: str, height: int, width: int, draw: random.Random) -> torch.Tensor:
    """``[height * width, 96]``, as the processor makes them of an image in this color: noise on it, two equal
    frames.
    """
    noise = torch.rand(height * width, 3, 2 * PATCH**2, generator=torch.Generator().manual_seed(draw.randrange(2**31)))
    return (torch.tensor(COLORS[color])[:, None] + 0.3 * (noise - 0.5)).flatten(1)


def document_of(number: int) -> dict:
    """The columns that a processor returns, and labels."""
    draw = random.Random(number)
    shown = [draw.choice([*COLORS]) for _ in range(draw.randint(1, 3))]
    grids = [(1, 2 * draw.randint(1, 4), 2 * draw.randint(1, 4)) for _ in shown]
    tokens: list[int] = []
    for _, height, width in grids:
        words = [draw.randrange(FIRST_WORD, VOCABULARY) for _ in range(draw.randint(0, 12))]
        tokens += [*words, START, *[IMAGE] * (height * width // MERGED), END]
    answer = [FIRST_COLOR + [*COLORS].index(color) for color in shown]
    ids = [*tokens, QUESTION, *answer]
    return {
        "input_ids": ids,
        "labels": [-100] * (len(ids) - len(answer)) + answer,
        "mm_token_type_ids": [int(token == IMAGE) for token in ids],
        "pixel_values": torch.cat(
            [patches_of(color, h, w, draw) for color, (_, h, w) in zip(shown, grids, strict=True)]
        ),
        "image_grid_thw": grids,
    }


def loss_of(model, row: dict, device: str) -> torch.Tensor:
    """The sum over the labels."""
    row = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in row.items()}
    return model(**row, use_cache=False, num_items_in_batch=1).loss


def compare(model, collate, documents: list[dict], device: str) -> dict[str, float]:
    """Loss of a row, and of its documents one by one, and how far their gradients are apart, by the largest."""
    found = []
    for rows in ([documents], [[document] for document in documents]):
        model.zero_grad()
        losses = [loss_of(model, collate(row), device) for row in rows]
        sum(losses).backward()
        found.append((sum(losses).item(), torch.cat([p.grad.flatten() for p in model.parameters()])))
    (packed, gradient), (alone, wanted) = found
    return {
        "packed": packed,
        "alone": alone,
        "gradient_apart": ((gradient - wanted).abs().max() / wanted.abs().max()).item(),
    }


def main():
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    model = new_model().to(arguments.device)
    print(apply_packing_ops(model))
    documents = [document_of(number) for number in range(arguments.documents)]
    stream = PackedStream(documents, {"tokens": arguments.tokens, "patches": arguments.patches}, seed=arguments.seed)
    collate = PaddingFreeCollator(rope_index=model.model.get_rope_index)
    first = compare(model, collate, next(iter(stream)), arguments.device)
    print(f"a row: loss {first['packed']:.4f}, its documents one by one {first['alone']:.4f}")

    optimizer = torch.optim.AdamW(model.parameters(), arguments.learning_rate)
    losses = []
    for examples in stream:
        row = collate(examples)
        loss = loss_of(model, row, arguments.device) / row["num_targets"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(
        f"{len(documents)} documents in {len(losses)} rows, {stream.progress.padding:.1%} of their slots without "
        "a token; "
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}"
    )
    result = {"first_row": first, "losses": losses, "rows": len(losses), "tokens": stream.progress.tokens}
    save_results(arguments.out / f"demo_vlm_{arguments.device}.json", result, arguments.device)


if __name__ == "__main__":
    main()
