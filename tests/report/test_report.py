"""python -m packing_ops report: every example is counted, and the figures are those of plain loops."""

import io
import itertools
import json
import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT
from helpers.report_case import RECORDS, write_lines
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.__main__ import main
from packing_ops.report import make_report
from packing_ops.report.statistics import STRATEGIES, layouts, length_statistics
from packing_ops.report.tables import progress, show_report

# --- figures ---


def flops(length, hidden_size):
    return 12 * hidden_size * length + length**2


def epoch(units, dp):
    """(slots of the slowest ranks, their operations, balance) of [(slots, operations)] by plain loops."""
    slots = slowest = 0
    for step in range(0, len(units), dp):
        slots += max(unit[0] for unit in units[step : step + dp])
        slowest += max(unit[1] for unit in units[step : step + dp])
    return slots, slowest, sum(unit[1] for unit in units) / (dp * slowest)


def row(lengths, capacity, hidden_size):
    slots = max(capacity, sum(lengths))
    segments = [*lengths, slots - sum(lengths)]
    return slots, sum(flops(length, hidden_size) for length in segments)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    capacity=st.integers(5, 40),
    batch_size=st.integers(1, 5),
    dp=st.integers(1, 4),
    overlong=st.sampled_from(["truncate", "split", "own"]),
)
def test_layouts_are_those_of_plain_loops(lengths, capacity, batch_size, dp, overlong):
    hidden_size = 3
    result = layouts(
        torch.tensor(lengths),
        capacity=capacity,
        batch_size=batch_size,
        dp=dp,
        overlong=overlong,
        hidden_size=hidden_size,
    )
    pieces = []
    for length in lengths:
        if overlong == "own":
            pieces.append(length)
        elif overlong == "truncate":
            pieces.append(min(length, capacity))
        else:
            pieces += [capacity] * (length // capacity) + [length % capacity] * (length % capacity > 0)
    batches = [pieces[i : i + batch_size] for i in range(0, len(pieces), batch_size)]
    size = batch_size * dp * max(1, min(50, len(pieces) // (4 * batch_size * dp)))
    groups = (sorted(pieces[i : i + size], reverse=True) for i in range(0, len(pieces), size))
    by_length = list(itertools.chain(*groups))
    alike = [by_length[i : i + batch_size] for i in range(0, len(pieces), batch_size)]
    units = {
        "padded": [(len(b) * max(b), len(b) * flops(max(b), hidden_size)) for b in batches],
        "length_grouped": [(len(b) * max(b), len(b) * flops(max(b), hidden_size)) for b in alike],
        "padding_free": [(sum(b), sum(flops(length, hidden_size) for length in b)) for b in batches],
    }
    for strategy in STRATEGIES:
        options = {"strategy": strategy, "overlong": overlong, "balance": ("flops", 12.0 * hidden_size, 1.0)}
        try:
            packing = po.pack_sequences(lengths, capacity, bins_multiple_of=dp, **options)
        except ValueError as error:
            assert "at most as many bins as sequences" in str(error)  # noqa: PT017
            packing = po.pack_sequences(lengths, capacity, **options)
        rows = [[length for _, _, length in packing.pieces(i)] for i in range(packing.num_bins)]
        assert sorted(itertools.chain(*rows)) == sorted(pieces)
        units[strategy] = [row(each, capacity, hidden_size) for each in rows]
    today = epoch(units["padded"], dp)
    assert result["layouts"].keys() == units.keys()
    for name, layout in result["layouts"].items():
        slots, slowest, balance = epoch(units[name], dp)
        assert layout["slots"] == sum(unit[0] for unit in units[name])
        assert layout["fill"] == pytest.approx(sum(pieces) / layout["slots"])
        assert layout["rows"] == (len(units[name]) if name in STRATEGIES else len(pieces))
        assert layout["steps"] == math.ceil(len(units[name]) / dp)
        assert layout["flop_balance"] == pytest.approx(balance)
        expected = {"tokens": today[0] / slots, "flops": today[1] / slowest}
        assert layout["epoch_time_ratio"] == pytest.approx(expected)
        shorter = layout["steps"] / result["layouts"]["padded"]["steps"]
        assert layout["step_time_ratio"] == pytest.approx({by: ratio * shorter for by, ratio in expected.items()})
    assert result["overlong"]["documents"] == sum(length > capacity for length in lengths)
    assert result["overlong"]["lost_tokens"] == sum(lengths) - sum(pieces)


def test_fewer_documents_than_ranks(tmp_path, capsys):
    file = write_lines(tmp_path / "a.jsonl", *RECORDS)
    assert main(["report", str(file), "--dp", "4", "--json", f"{tmp_path}/r.json"]) == 0
    ffd = json.loads((tmp_path / "r.json").read_text())["layouts"]["ffd"]
    assert (ffd["rows"], ffd["steps"]) == (1, 1)
    assert ffd["flop_balance"] == pytest.approx(1 / 4)  # three ranks wait for one


def test_batches_and_ranks_far_above_the_documents(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", *RECORDS)

    def found(batch_size, dp):
        options = ["--batch-size", str(batch_size), "--dp", str(dp), "--json", f"{tmp_path}/r.json"]
        assert main(["report", str(file), *options]) == 0
        return json.loads((tmp_path / "r.json").read_text())["layouts"]

    assert found(10**13, 1) == found(3, 1)
    many, few = found(1, 10**13), found(1, 100)
    for name in few:
        assert many[name].pop("flop_balance") == pytest.approx(few[name].pop("flop_balance") * 1e-11)
        for layouts_found in (many, few):
            layouts_found[name].pop("flop_balance_as_packed", None)
    assert many == few


@pytest.mark.parametrize("option", ["--batch-size", "--dp", "--capacity", "--hidden-size"])
def test_a_number_past_int64_is_named(tmp_path, capsys, option):
    file = write_lines(tmp_path / "a.jsonl", *RECORDS)
    assert main(["report", str(file), option, str(10**400)]) == 2
    name = option.removeprefix("--").replace("-", "_")
    assert capsys.readouterr().err.startswith(f"error: {name}: expected an integer that fits int64, got 1000")
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        make_report([file], **{name: 0})


def test_balance_as_packed_is_that_without_balance():
    lengths = [10, 1, 1, 9, 10, 1]
    result = layouts(torch.tensor(lengths), capacity=10, batch_size=1, dp=2, overlong="error", hidden_size=1)
    packing = po.pack_sequences(lengths, 10, strategy="next_fit", bins_multiple_of=2)
    rows = [row([length for _, _, length in packing.pieces(i)], 10, 1) for i in range(packing.num_bins)]
    next_fit = result["layouts"]["next_fit"]
    assert next_fit["flop_balance_as_packed"] == pytest.approx(epoch(rows, 2)[2])
    assert next_fit["flop_balance_as_packed"] < next_fit["flop_balance"]


def test_worked_values_of_the_docstrings():
    found = layouts(torch.tensor([5, 7, 2, 6]), capacity=10, batch_size=2, dp=1, overlong="truncate", hidden_size=64)[
        "layouts"
    ]
    shown = [(name, found[name]["rows"], found[name]["slots"]) for name in ("padded", "padding_free", "ffd")]
    assert shown == [("padded", 4, 26), ("padding_free", 4, 20), ("ffd", 3, 30)]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50))
def test_histogram_holds_every_document_once(lengths):
    found = length_statistics(torch.tensor(lengths))
    for bucket in found["histogram"]:
        inside = [length for length in lengths if bucket["from"] <= length <= bucket["to"]]
        assert (bucket["documents"], bucket["tokens"]) == (len(inside), sum(inside))
    assert sum(bucket["documents"] for bucket in found["histogram"]) == len(lengths)
    assert found["histogram"][0]["documents"] > 0
    assert (found["mean"], found["max"]) == (pytest.approx(sum(lengths) / len(lengths)), max(lengths))
    assert found["p50"] in lengths


@pytest.mark.parametrize(
    ("overlong", "kept", "lost", "said"),
    [
        ("truncate", [8, 3, 8], 6, "over 8 bytes, truncated; bytes lost: 6"),
        ("split", [8, 2, 3, 8, 4], 0, "over 8 bytes, split"),
        ("own", [10, 3, 12], 0, "over 8 bytes, given a row of their own"),
        ("drop", [3], 22, "over 8 bytes, dropped; bytes lost: 22"),
    ],
)
def test_overlong_documents_are_counted_and_told(tmp_path, capsys, overlong, kept, lost, said):
    file = write_lines(tmp_path / "long.jsonl", *({"text": "x" * length} for length in (10, 3, 12)))
    assert main(["report", str(file), "--capacity", "8", "--overlong", overlong, "--json", f"{tmp_path}/r.json"]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert said in capsys.readouterr().out
    assert (report["overlong"]["documents"], report["overlong"]["lost_tokens"]) == (2, lost)
    assert report["layouts"]["padding_free"]["slots"] == sum(kept)
    assert report["examples"] == {"read": 3, "documents": 3, "tokens": 25}


def test_all_dropped_is_told(tmp_path, capsys):
    file = write_lines(tmp_path / "long.jsonl", {"text": "x" * 9})
    assert main(["report", str(file), "--capacity", "8", "--overlong", "drop"]) == 0
    assert "over 8 bytes, dropped; bytes lost: 9" in capsys.readouterr().out


# --- what follows ---


def shown(capsys, *arguments, code=0):
    assert main(["report", *map(str, arguments)]) == code
    return capsys.readouterr().out


def test_a_sentence_on_top_says_what_packing_would_save(tmp_path, capsys):
    long, short = ({"text": "x" * length} for length in (100, 10))
    file = write_lines(tmp_path / "a.jsonl", *[long, *[short] * 9] * 8)
    found = layouts(
        torch.tensor([100, *[10] * 9] * 8), capacity=400, batch_size=10, dp=1, overlong="truncate", hidden_size=4096
    )["layouts"]
    first, *_ = shown(capsys, file, "--capacity", 400, "--batch-size", 10).splitlines()
    faster = found["ffd"]["epoch_time_ratio"]["tokens"]
    assert f"an estimated {faster:.1f} times as fast as in padded batches of 10 and " in first
    grouped = faster / found["length_grouped"]["epoch_time_ratio"]["tokens"]
    assert f"{grouped:.1f} times as fast as in such batches grouped by length" in first
    assert f"{1 - found['ffd']['fill']:.1%} padding, not 81.0% or {1 - found['length_grouped']['fill']:.1%}" in first


@pytest.mark.parametrize(
    ("records", "options", "said"),
    [
        (
            [{"text": "x" * 64}] * 64,
            ["--capacity", 64],
            "Packing saves next to nothing: 0.0% of padded batches of 8 is",
        ),
        ([{"text": "x" * 9}], ["--capacity", 8, "--overlong", "drop"], "Nothing to pack: every document is over the "),
        ([], [], "Nothing to pack: no document was read."),
    ],
)
def test_the_sentence_where_there_is_nothing_to_save(tmp_path, capsys, records, options, said):
    file, code = write_lines(tmp_path / "a.jsonl", *records), 0 if records else 2
    assert shown(capsys, file, *options, code=code).startswith(said)


def test_balance_is_shown_where_there_are_ranks_to_balance(tmp_path, capsys):
    file = write_lines(tmp_path / "a.jsonl", *RECORDS)
    alone, two = shown(capsys, file), shown(capsys, file, "--dp", 2)
    for words in ("FLOP balance", "as packed", "slowest rank"):
        assert words not in alone
        assert words in two


def test_bytes_are_told_loudly(tmp_path, capsys):
    text, ids = write_lines(tmp_path / "a.jsonl", *RECORDS), write_lines(tmp_path / "b.jsonl", {"input_ids": [1, 2]})
    loud = "ARE BYTES, NOT TOKENS, and the capacity of 4,096 is too: --tokenizer counts tokens."
    assert f"LENGTHS {loud}" in shown(capsys, text).splitlines()[1]
    assert f"LENGTHS OF 3 OF 4 DOCUMENTS {loud}" in shown(capsys, text, ids).splitlines()[1]
    assert "BYTES" not in shown(capsys, ids)


# --- the command ---


@pytest.fixture(scope="module")
def docstrings(tmp_path_factory):
    """Every docstring of the standard library as prompt and completion; also their bytes."""
    from common.text_data import docstring_pairs

    pairs = docstring_pairs(10**9)
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    file = write_lines(tmp_path_factory.mktemp("docstrings") / "docstrings.jsonl", *records)
    return file, [len((prompt + completion).encode()) for prompt, completion in pairs]


def test_docstrings_of_the_standard_library(docstrings, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file, lengths = docstrings
    arguments = ["--capacity", "2048", "--dp", "8", "--overlong", "split"]
    outputs = ["--plot", str(tmp_path / "p.png"), "--json", str(tmp_path / "r.json")]
    assert main(["report", str(file), *arguments, *outputs]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["examples"] == {"read": len(lengths), "documents": len(lengths), "tokens": sum(lengths)}
    found = report["layouts"]
    assert found["padded"]["fill"] < found["next_fit"]["fill"] < found["ffd"]["fill"] <= 1
    assert all(found[name]["rows"] % 8 == 0 for name in STRATEGIES)
    assert found["ffd"]["epoch_time_ratio"]["flops"] > 1
    out = capsys.readouterr().out
    for layout in found.values():
        assert f"{layout['rows']:,}" in out
        assert f"{layout['epoch_time_ratio']['flops']:.2f}x" in out
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_among_the_results_says_its_commit(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("PACKING_OPS_COMMIT", "0123456789ab")
    import bench_report

    def report(file, *options):
        assert main(["report", str(file), *map(str, options[:6])]) == 0  # all but the picture

    def run(command, check):
        """examples/docstrings.py, with fewer of them."""
        write_lines(Path(command[-1]), *({"prompt": f"{name}()", "completion": "does"} for name in "fg"))

    monkeypatch.setattr(bench_report, "report", report)
    monkeypatch.setattr(bench_report, "subprocess", SimpleNamespace(run=run))  # others still run commands
    bench_report.docstrings(tmp_path, tmp_path)
    written = json.loads((tmp_path / "report_docstrings.json").read_text())
    assert (written["commit"], written["examples"]["documents"]) == ("0123456789ab", 2)


def test_report_is_the_same_from_python(docstrings, tmp_path):
    file, _ = docstrings
    main(["report", str(file), "--json", str(tmp_path / "r.json")])
    assert make_report([file]) == json.loads((tmp_path / "r.json").read_text())


def test_without_rich_tables_are_plain_and_say_the_same(tmp_path, capsys, monkeypatch):
    pytest.importorskip("rich")
    file = write_lines(tmp_path / "[bold]a.jsonl", *RECORDS)
    show_report(make_report([file]))
    drawn = capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich", None)
    show_report(make_report([file]))
    plain = capsys.readouterr().out
    assert "─" in drawn
    assert "─" not in plain
    assert set(plain.split()) == {word for word in drawn.split() if set(word) != {"─"}}
    assert "packed, ffd" in plain


def test_a_bar_shows_how_far_reading_is(monkeypatch):
    console = pytest.importorskip("rich.console")
    terminal = io.StringIO()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(console, "Console", partial(console.Console, file=terminal, force_terminal=True))
    with progress(200) as advance:
        advance(50)
        advance(100)
    assert "75%" in terminal.getvalue()


@pytest.mark.parametrize(
    ("library", "file", "options", "package"),
    [
        ("pyarrow", "a.parquet", [], "pyarrow"),
        ("datasets", "folder", [], "datasets"),
        ("numpy", "ids.jsonl", [], "numpy"),
        ("matplotlib.figure", "a.jsonl", ["--plot", "p.png"], "matplotlib"),
        ("transformers", "a.jsonl", ["--tokenizer", "folder"], "'transformers>=5.17'"),
    ],
)
def test_a_missing_library_is_named_with_its_command(tmp_path, monkeypatch, capsys, library, file, options, package):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    write_lines(tmp_path / "ids.jsonl", {"input_ids": [1]})
    write_lines(tmp_path / "a.jsonl", *RECORDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "packing_ops.report.picture", raising=False)
    assert main(["report", file, *options]) == 2
    assert f"pip install {package}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["a.jsonl", "nowhere.jsonl"], "nowhere.jsonl"),
        (
            ["a.jsonl", "--tokenizer", "./nowhere"],
            "tokenizer: expected bytes, a tokenizer's folder or a model's name, got './",
        ),
        (["a.jsonl", "--overlong", "error", "--capacity", "2"], "expected at most capacity=2, got 9 at index 0"),
        (["a.parquet"], "a.parquet: "),
    ],
)
def test_no_report_is_exit_code_2(tmp_path, monkeypatch, capsys, arguments, message):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    write_lines(tmp_path / "a.jsonl", *RECORDS)
    monkeypatch.chdir(tmp_path)
    assert main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert message in err
    assert out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: command"),
        (["report"], "FILE"),
        (["report", "a", "--capacity", "0"], "--capacity: expected at least 1, got 0"),
        (["report", "a", "--dp", "x"], "--dp"),
        (["report", "a", "--overlong", "lose"], "--overlong"),
        (["report", "a", "--json", "no/such/folder.json"], "--json: no folder no/such"),
    ],
)
def test_wrong_arguments_are_exit_code_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_help_tells_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    out = capsys.readouterr().out
    assert "exit codes:" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ") and line.split()[0] in "012"] == [
        *"012"
    ]


def test_as_a_command_and_without_host_libraries(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", *RECORDS, "{")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "packing_ops", "report", file],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "packed, ffd" in done.stdout
    assert f"{file}, line 4: corrupt: " in done.stderr
    imported = {line.split("|")[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert not imported & {"pyarrow", "datasets", "transformers", "matplotlib"}
