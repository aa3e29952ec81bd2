"""PackedCollator's batches are those of SkyRL's PackedDataCollator, where alignment asks for nothing else.

The digests and rows are what NovaSky-AI/SkyRL at a956457 (skyrl/train/dataset/collators.py) made of the same examples.
"""

import hashlib
import json
import random

import pytest

from packing_ops.data import PackedCollator

# Of the batch of each seed, at alignment 1.
DIGESTS = [
    "8638cf58", "8dc84d44", "04df856a", "30022cb2", "064c5fa0", "d33513b5", "3d4c81eb", "07a68ea3",
    "155cc324", "61f56e2e", "f5670c14", "65ecc9ff", "4ebd4906", "a8060a87", "dfeeed3e", "4dc5d029",
    "9cb1e8a2", "3d58f869", "46e5ab74", "4355d848", "119a5775", "aa0fc7bd", "ea78e092", "8081dfef",
    "4aab6e6d", "68ae25c0", "39c12ce0", "8e131be9", "4b3b3fbd", "ee5af199", "90f5100e", "8adaca3a",
    "5b276064", "0985d771", "e3d3d9ca", "0fd78613", "a62212fe", "355f1e34", "cde6b555", "a08289f7",
    "47f2a4aa", "9f310e8a", "3a81839c", "8016f08f", "bd519515", "0a5d2c2b", "751c189a", "9ad4e097",
    "b041c01f", "59b8b9a2", "635efc3c", "0d5247aa", "58f3e945", "9041711d", "8ac39986", "cf34b1f9",
    "bc43fa95", "47821f2a", "e5e58233", "ff13401e", "b3572b1a", "e00e4388", "9815776a", "0e6eafd5",
    "1e24e0d9", "3929c2f5", "2fab1a6d", "b54131a0", "12e84363", "b2c8331b", "71a3cbb6", "43a9e9cc",
    "b056f20e", "d1716aca", "adbcc37a", "b2c82002", "61c8c667", "78d7f37d", "b799894b", "809c0d49",
    "ebafe9ed", "df4b0f1b", "1a41f9e3", "b6fba100", "0b46e2c6", "62b67916", "4b8e6efa", "9fbe3a68",
    "497a4698", "e05a4f74", "3babf44c", "d824170c", "488c1f78", "a5cfa469", "56007256", "ae17d7e6",
    "c919a316", "4e229e97", "9eb57d1c", "8560c616",
]  # fmt: skip
# {seed: digest} at tp_size=4 and at cp_size=2, which is the same alignment. Of these batches first fit by raw lengths
# puts no row over the capacity when they are aligned.
ALIGNED_DIGESTS = {
    0: "2b5504c2",
    13: "f48d3b87",
    22: "b45ef7dc",
    23: "b8bd62d9",
    30: "b6edfea3",
    34: "3f1e6694",
    36: "2bb73e57",
    40: "8f08b558",
    42: "83491aa2",
    57: "a149fb50",
    62: "5d00d5bc",
    83: "14259696",
    94: "978d660a",
    115: "b6aa0d2b",
    124: "6601ab64",
    143: "8919e919",
    147: "41d9d6df",
    148: "d1312ec6",
    153: "43f8ed78",
    158: "71b68a95",
}


def random_batch(seed):
    draw = random.Random(seed)
    capacity, dp_size = draw.choice([64, 200, 512]), draw.choice([1, 2, 4])
    examples = []
    for _ in range(draw.randint(2 * dp_size, 40)):
        length = draw.randint(1, draw.choice([8, capacity // 3, capacity]))
        num_actions = draw.randint(0, length)
        examples.append(
            {
                "input_ids": [draw.randint(1, 50_000) for _ in range(length)],
                "attention_mask": [1] * length,
                "num_actions": num_actions,
                "loss_mask": [draw.randint(0, 1) for _ in range(num_actions)],
            }
        )
    return {"capacity": capacity, "dp_size": dp_size}, examples


def digest(batch):
    found = hashlib.sha256()
    for name in ("sequences", "attention_mask", "loss_mask"):
        tensor = batch[name]
        found.update(f"{tensor.dtype} {list(tensor.shape)}".encode() + tensor.numpy().tobytes())
    found.update(json.dumps([batch["sub_seq_lengths"], batch["response_length"]]).encode())
    return found.hexdigest()[:8]


@pytest.mark.parametrize("seed", range(100))
def test_bytes_of_random_batches(seed):
    options, examples = random_batch(seed)
    assert digest(PackedCollator(**options, pad_token_id=9)(examples)) == DIGESTS[seed]


@pytest.mark.parametrize("sizes", [{"tp_size": 4}, {"cp_size": 2}])
@pytest.mark.parametrize("seed", ALIGNED_DIGESTS)
def test_bytes_of_random_batches_that_are_aligned(seed, sizes):
    options, examples = random_batch(seed)
    assert digest(PackedCollator(**options, **sizes, pad_token_id=9)(examples)) == ALIGNED_DIGESTS[seed]


def examples_of(lengths):
    return [{"input_ids": [i + 1] * length, "num_actions": length // 2} for i, length in enumerate(lengths)]


def rows_of(batch):
    order = iter(batch["order"])
    return [[next(order) for _ in row] for row in batch["sub_seq_lengths"]]


@pytest.mark.parametrize(
    ("sizes", "lengths", "rows"),
    [
        ({}, [9, 12, 10, 11, 5, 6, 7, 8, 3, 1, 23, 22], [[10, 11, 8], [1, 3, 2, 0, 5], [7, 6, 4, 9]]),
        ({"tp_size": 4}, [11, 4, 20, 19, 13, 3, 19, 18, 8, 19], [[2, 9, 8], [6, 3, 1, 5], [7, 4, 0]]),
        ({"cp_size": 2}, [11, 4, 20, 19, 13, 3, 19, 18, 8, 19], [[2, 9, 8], [6, 3, 1, 5], [7, 4, 0]]),
        ({"cp_size": 2, "dp_size": 2}, [14, 1, 19, 12, 16, 10, 8, 7, 20, 16], [[8, 2, 6], [3, 5, 7], [9, 4, 0], [1]]),
    ],
    ids=["tp 1", "tp 4", "cp 2", "cp 2, dp 2"],
)
def test_rows(sizes, lengths, rows):
    """20 and 19 tokens are as long as each other when aligned; the longer one is first all the same."""
    batch = PackedCollator(48, **sizes)(examples_of(lengths))
    assert rows_of(batch) == rows
    assert batch["sequences"].shape[1] <= 48


def test_rows_stay_within_the_capacity_where_skyrl_s_do_not():
    """SkyRL puts all 41 into one row of 2,624 slots."""
    batch = PackedCollator(2048, tp_size=8, cp_size=2)(examples_of([33] * 41))
    assert list(map(len, batch["sub_seq_lengths"])) == [32, 9]
    assert batch["sequences"].shape == (2, 2048)
