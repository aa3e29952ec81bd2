"""examples/megatron_sft.py runs, and trains the same way in one process, data parallel and context parallel."""

import json

import pytest
from helpers import fresh_process

pytest.importorskip("megatron.core")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Chats of ragged length, and what one process makes of them; the last padded batch and the last step hold one
    row.
    """
    folder = tmp_path_factory.mktemp("megatron")
    records = [{"prompt": f"count to {i}: ", "completion": " ".join(map(str, range(7 * i % 31)))} for i in range(2, 35)]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder, run(folder)


def run(folder, *, processes=1, context_parallel=1):
    options = ["--data", folder / "chat.jsonl", "--capacity", 256, "--context-parallel", context_parallel]
    fresh_process.run_ranks(processes, "examples/megatron_sft.py", *options, "--out", folder, folder=folder)
    shared = f"_dp{processes // context_parallel}_cp{context_parallel}" if processes > 1 else ""
    return json.loads((folder / f"demo_megatron_cpu{shared}.json").read_text())


def losses_of(result):
    return [loss for run in result["runs"] for loss in run["losses"]]


def test_packed_padded_and_one_by_one_are_the_same_loss(alone):
    folder, result = alone
    losses = result["first_step_loss"]
    assert losses["packed"] == pytest.approx(losses["padded"], abs=1e-5)
    assert losses["unpacked"] == pytest.approx(losses["padded"], abs=1e-5)
    padded, packed = result["runs"]
    assert result["documents"] == 33
    assert padded["real_tokens"] == packed["real_tokens"] > 0
    assert packed["padding_waste"] < padded["padding_waste"]
    assert packed["tokens_per_second"] > 0
    assert all(run["losses"][-1] < run["losses"][0] for run in (padded, packed))
    assert (folder / "demo_megatron_cpu.png").stat().st_size > 10_000


@pytest.mark.parametrize("context_parallel", [1, 2])
def test_two_processes_train_as_one(alone, context_parallel):
    folder, one = alone
    two = run(folder, processes=2, context_parallel=context_parallel)
    assert (two["data_parallel"], two["context_parallel"]) == (2 // context_parallel, context_parallel)
    assert two["first_step_loss"] == pytest.approx(one["first_step_loss"], abs=1e-5)
    assert losses_of(two) == pytest.approx(losses_of(one), abs=1e-4)
