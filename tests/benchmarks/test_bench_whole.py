"""The benchmark of whole models: two cases on the CPU, one of which cannot run there; what a program prints."""

import contextlib
import csv
import json
import sys
import types
import weakref

import bench_whole
import pytest
import result_rows
import torch
from helpers import compiler, fresh_process
from whole_cases import CASES, TINY


@pytest.fixture
def forks(monkeypatch, tmp_path):
    """Its programs are forks of a process that has imported transformers, one after the other."""

    class Fork:
        def __init__(self, command, stdout, env, **_):
            program = command[command.index(bench_whole.__file__) :]
            stdout.write(fresh_process.run(*program, folder=tmp_path, environment=env))
            stdout.close()

        def poll(self):
            return 0

    monkeypatch.setattr(bench_whole, "subprocess", types.SimpleNamespace(Popen=Fork, STDOUT=None))


def test_cases_have_names_of_their_own():
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_case_that_fails_leaves_the_others_theirs(tmp_path, monkeypatch, forks):
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    again = next(case.name for case in CASES if case.part == "moe" and case.provider == "fa2")
    kept = [{"case": "of another part", "loss": "1"}, {"case": again, "loss": "2"}]  # of before there were repeats
    before = tmp_path / "before"
    bench_whole.write_csv(before / "whole_cpu.csv", kept, show=False)
    monkeypatch.setattr(result_rows, "RESULTS", before)
    arguments = ["--device", "cpu", "--tiny", "--part", "moe", "--repeats", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench_whole.py", *arguments])
    bench_whole.main()
    with (tmp_path / "whole_cpu.csv").open(newline="") as file:
        before, *rows = csv.DictReader(file)
    assert (before["case"], before["repeat"]) == ("of another part", "")
    assert [(row["provider"], row["repeat"]) for row in rows] == [("fa2", "1"), ("ours", "1"), ("ours", "2")]
    flash, *of_ours = rows  # in the place that it had
    for ours in of_ours:
        assert not ours["error"]
        assert float(ours["tokens_per_second_a_gpu"]) > 0
        assert 5 < float(ours["loss"]) < 6  # log of the vocabulary
    assert flash["error"]  # torch's FlashAttention-2 is of CUDA
    assert not flash["loss"]


def test_cases_of_a_part_take_turns_in_one_program():
    found = bench_whole.programs(list(range(len(CASES))), repeats=2)
    assert sorted(turn for turns in found for turn in turns) == [(r, i) for r in (1, 2) for i in range(len(CASES))]
    kinds = [{(CASES[index].part, CASES[index].ranks) for _, index in turns} for turns in found]
    assert all(len(kind) == 1 for kind in kinds)
    assert len(set().union(*kinds)) == len(kinds)
    for turns in found:
        once = [index for _, index in turns[: len(turns) // 2]]
        assert turns == [(1, index) for index in once] + [(2, index) for index in once]


def names_printed(capsys, monkeypatch, *only):
    monkeypatch.setattr(sys, "argv", ["", "--list", "--only", *only])
    bench_whole.main()
    return capsys.readouterr().out.splitlines()


def test_a_case_is_chosen_by_its_name_alone_and_several_by_a_part_of_theirs(capsys, monkeypatch):
    for case in CASES:
        assert names_printed(capsys, monkeypatch, case.name) == [case.name]
    several = names_printed(capsys, monkeypatch, "0.6B, sft documents: ours, rows of 16,384", CASES[0].name)
    assert several[0] == CASES[0].name  # in the order of the cases
    assert sum("float32 weights" in name for name in several) == 1
    with pytest.raises(SystemExit):
        names_printed(capsys, monkeypatch, CASES[0].name, "no case")
    assert "--only: expected a name that --list prints, or a part of one, got 'no case'" in capsys.readouterr().err


def test_a_case_of_more_gpus_than_there_are_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", "--only", CASES[0].name, "--out", str(tmp_path)])
    bench_whole.main()
    assert f"{CASES[0].name}: left out, 1 of 2 GPUs" in capsys.readouterr().out


def test_a_case_that_failed_is_not_repeated(monkeypatch, capsys):
    pytest.importorskip("transformers")
    import whole_model

    def measured(case, *_):
        if case.provider == "fa2":
            raise ValueError("no GPU")
        return {"loss": "1"}

    monkeypatch.setattr(whole_model, "measured", measured)
    cases = [next(case for case in CASES if case.provider == provider) for provider in ("ours", "fa2")]
    cases = [case._replace(ranks=1) for case in cases]
    whole_model.run([(repeat, index) for repeat in (1, 2) for index in (0, 1)], cases, "cpu", tiny=True)
    lines = capsys.readouterr().out.splitlines()
    found = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT")]
    assert found == [
        {"repeat": 1, "index": 0, "loss": "1"},
        {"repeat": 1, "index": 1, "error": "ValueError: no GPU"},
        {"repeat": 2, "index": 0, "loss": "1"},
    ]


@pytest.fixture
def graphs(monkeypatch):
    compiler.run_as_they_are(monkeypatch)


@pytest.fixture
def liger(monkeypatch):
    """A stand-in for Liger on the CPU, and torch's FlashAttention-2 replaced there. Has the arguments of the patch."""
    pytest.importorskip("transformers")
    import whole_model
    from transformers.modeling_outputs import CausalLMOutput

    import packing_ops as po

    def attention(module, query, key, value, mask, cu_seq_lens_q, **_):
        q, k, v = (t.to(value.dtype).transpose(1, 2).flatten(0, 1) for t in (query, key, value))
        return po.varlen_attention(q, k, v, cu_seq_lens_q)[None], None

    def patch(model, **options):
        def forward(input_ids, labels, **arguments):
            found.append(options)
            logits = model.lm_head(model.model(input_ids, **arguments)[0])[:, :-1].float().flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
            return CausalLMOutput(loss=loss)

        model.forward = forward

    found = []
    stand_in = types.ModuleType("liger_kernel.transformers")
    stand_in.apply_liger_kernel_to_qwen3 = patch
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)
    monkeypatch.setattr(whole_model, "torch_fa2", attention)
    return found


def loss_of(part, provider):
    import whole_model

    case = next(case for case in CASES if case.part == part and case.provider == provider and case.compiled)
    with contextlib.ExitStack() as undo:
        loss = float(whole_model.measured(case.small(), "cpu", True, undo)["loss"])
    whole_model.released("cpu")
    return loss


@pytest.mark.parametrize(
    ("part", "providers"),
    [("small", ["ours", "fa2", "fa2_liger_loss", "ours"]), ("float32", ["fa2", "fa2_liger_loss"])],
)
def test_flash_attention_with_ligers_loss_is_stock_in_all_else(part, providers, liger, graphs):
    """Its layers are compiled without a break, and the loss is that of the others, in one process after the other."""
    losses = [loss_of(part, provider) for provider in providers]
    assert losses == [pytest.approx(losses[0], abs=1e-3)] * len(losses)
    assert liger
    assert all(options == {"rope": False, "rms_norm": False, "swiglu": False} for options in liger)


def test_float32_weights_compute_in_bfloat16(liger, graphs):
    import whole_model

    seen = []
    case = next(case for case in CASES if case.part == "float32" and case.provider == "fa2_liger_loss").small()
    with contextlib.ExitStack() as undo:
        model, _ = whole_model.model_of(case, "cpu", True, undo)
        product = model.model.layers[0].mlp.down_proj
        product.register_forward_hook(lambda module, args, output: seen.append((module.weight.dtype, output.dtype)))
        made, *_ = whole_model.batches(case, 256, 0, "cpu")
        optimizer = torch.optim.AdamW(model.parameters())
        whole_model.step(model, optimizer, made, case.float32)
    assert {*seen} == {(torch.float32, torch.bfloat16)}
    assert all(state["exp_avg"].dtype == torch.float32 for state in optimizer.state.values())


def test_a_case_leaves_no_model(monkeypatch):
    """After a step of one row in one compiled layer."""
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    import whole_model

    models, made = [], whole_model.model_of

    def model_of(*arguments):
        model, multiplied = made(*arguments)
        models.append(weakref.ref(model))
        return model, multiplied

    monkeypatch.setattr(whole_model, "model_of", model_of)
    monkeypatch.setitem(TINY, "num_hidden_layers", 1)
    cases = [case for case in CASES if case.part in ("one", "lora") and case.provider == "ours" and case.checkpointing]
    cases = [case._replace(row=32 * 1024, warm_ups=0) for case in cases]
    whole_model.run([(1, 0), (1, -1)], cases, "cpu", tiny=True)  # with a policy, with adapters
    assert len(models) == 2
    assert not any(model() for model in models)


def running_of(path, left, ended):
    """A program of which ``ended`` has the exit code, once it ends. left: cases, each to be measured twice."""
    running = bench_whole.Running.__new__(bench_whole.Running)
    running.left, running.log = [(repeat, index) for repeat in (1, 2) for index in left], path
    running.process = types.SimpleNamespace(poll=lambda: ended[0] if ended else None)
    return running


def printed(repeat, index):
    return f'RESULT {{"repeat": {repeat}, "index": {index}, "loss": "1"}}\n'


def test_rows_come_as_a_program_prints_them(tmp_path):
    ended, log, row = [], tmp_path / "log", {"loss": "1"}
    running = running_of(log, [3, 5], ended)
    log.write_text("said\n" + printed(1, 3) + printed(1, 5).partition(' "loss')[0])
    assert running.found() == {(1, 3): row}
    assert running.found() == {}
    ended.append(1)
    log.write_text(printed(1, 3) + printed(1, 5) + "ValueError: bad\n")
    assert running.found() == {(1, 5): row, (2, 3): {"error": "ValueError: bad"}}
    assert running.left == [(2, 5)]  # for another program


def test_a_program_of_a_case_that_fails_leaves_its_repeats_out(tmp_path):
    running = running_of(tmp_path / "log", [3, 5], [])
    running.log.write_text('RESULT {"repeat": 1, "index": 3, "error": "OutOfMemoryError"}\n')
    assert running.found() == {(1, 3): {"error": "OutOfMemoryError"}}
    assert running.left == [(1, 5), (2, 5)]


def test_a_program_that_ends_early_leaves_the_rest_without_an_error(tmp_path):
    running = running_of(tmp_path / "log", [3], [0])
    running.log.write_text(printed(1, 3))
    assert running.found() == {(1, 3): {"loss": "1"}}
    assert running.left == [(2, 3)]


def test_the_limit_ends_what_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # of two, on any machine
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", "--tiny", "--limit", "0.5", "--out", str(tmp_path)])
    bench_whole.main()
    said = capsys.readouterr().out
    assert "ended by --limit" in said
    assert "not started: ['Qwen3-8B" in said
