"""The examples of the data path run, and what they print as equal is equal."""

import json
import sys
from statistics import median

import pytest
from helpers import fresh_process


@pytest.mark.parametrize(
    ("reduction", "ranks"),
    [("token_mean", 1), ("sequence_mean", 2), ("seq_mean_token_sum_norm", 3), ("prompt_mean", 4)],
)
def test_rl_step_on_packed_rows_is_that_of_rows_alone(tmp_path, monkeypatch, capsys, reduction, ranks):
    from rl_mini_batches import main

    options = ["--prompts", 3, "--samples", 2, "--mini-batch-size", 1, "--ranks", ranks, "--reduction", reduction]
    monkeypatch.setattr(sys, "argv", [str(word) for word in ("rl_mini_batches.py", "--out", tmp_path, *options)])
    main()
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "demo_rl.json").read_text())
    assert len(result["steps"]) == 3, "as many as there are prompts, whatever their turns"
    assert len({step["rows"] for step in result["steps"]}) > 1, "turns are ragged"
    for (start, end), step in zip(result["boundaries"], result["steps"], strict=True):
        assert step["rows"] == end - start
        assert step["rows_per_rank"] == -(-step["rows"] // ranks)
        assert step["loss_packed"] == pytest.approx(step["loss_unpacked"], rel=1e-9, abs=1e-12)
        assert step["gradient_difference"] < 1e-9
        assert step["tokens_packed"] < step["slots_padded"]
    assert any(step["loss_packed"] != 0 for step in result["steps"])
    assert f"{reduction} {result['steps'][0]['loss_packed']:+.9f} packed" in printed


def test_collation_is_hidden_behind_the_step(tmp_path):
    file = tmp_path / "pairs.jsonl"
    records = [{"prompt": f"count to {n}: ", "completion": " ".join(map(str, range(n % 40)))} for n in range(192)]
    file.write_text("\n".join(map(json.dumps, records)))
    command = "examples/async_sft.py", "--out", tmp_path, "--data", file, "--rounds", "1"
    printed = fresh_process.run(*command, folder=tmp_path)  # it sets torch's threads
    result = json.loads((tmp_path / "demo_async_cpu.json").read_text())
    in_loop, ahead = result["runs"]
    assert (in_loop["ahead"], ahead["ahead"]) == (False, True)
    assert result["documents"] == 192
    assert len(ahead["losses"]) == 12
    assert ahead["losses"] == in_loop["losses"]
    assert result["losses_equal"]
    assert ahead["losses"][-1] < ahead["losses"][0]
    assert len(ahead["waited"]) == 10, "all but the first of each epoch"
    assert len(ahead["collated"]) == len(in_loop["collated"]) == 12
    assert result["waited_seconds"] == {"in_loop": median(in_loop["waited"]), "ahead": median(ahead["waited"])}
    assert min(ahead["waited"]) < min(in_loop["waited"]), "on a busy machine too, some batch was there"
    assert result["verdict"].startswith(("a gain: a step is ", "no gain here: collating takes "))
    assert result["verdict"] in printed


@pytest.mark.parametrize(
    ("in_loop", "ahead", "collated", "said"),
    [
        (0.10, 0.05, 0.05, "a gain: a step is 2.00x faster, 100% of collating is hidden"),
        (0.10, 0.08, 0.04, "a gain: a step is 1.25x faster, 50% of collating is hidden"),
        (0.10, 0.05, 0.04, "a gain: a step is 2.00x faster, 100% of collating is hidden"),
        (0.10, 0.099, 0.04, "no gain here: collating takes 40% of a step, and beside the step"),
        (0.10, 0.12, 0.04, "no gain here: collating takes 40% of a step, and beside the step"),
        (0.10, 0.10, 0.001, "no gain here: collating takes 1.0% of a step, there is nothing to hide"),
    ],
)
def test_a_gain_is_told_from_none(in_loop, ahead, collated, said):
    from async_sft import verdict

    assert verdict(in_loop, ahead, collated).startswith(said)
