"""The report counts tokens only with a tokenizer, which may be a model's name, and lays out a stream."""

import json
import re

import pytest
from helpers.report_case import RECORDS, write_lines

from packing_ops.__main__ import main
from packing_ops.data import PackedStream
from packing_ops.report import make_report

SAID_OF_BYTES = {"NOT TOKENS", "not tokens", "--tokenizer counts tokens"}


def shown(capsys, *arguments):
    assert main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("options", [[], ["--capacity", 4], ["--dp", 2, "--prefix-trees"], ["--buffer", 2]])
def test_without_a_tokenizer_nothing_is_called_a_token(tmp_path, capsys, options):
    text = shown(capsys, write_lines(tmp_path / "a.jsonl", *RECORDS), *options).replace(str(tmp_path), "")
    for words in SAID_OF_BYTES:
        text = text.replace(words, "")
    assert "bytes" in text
    assert re.findall("[^\n]*token[^\n]*", text) == []


def test_with_token_ids_nothing_is_called_a_byte(tmp_path, capsys):
    text = shown(capsys, write_lines(tmp_path / "a.jsonl", {"input_ids": [1, 2, 3]}), "--capacity", 2, "--prefix-trees")
    assert "byte" not in text
    assert "over 2 tokens" in text


def test_a_picture_says_what_it_counts(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from packing_ops.report import picture

    for record, unit in ({"text": "ab"}, "bytes"), ({"input_ids": [1]}, "tokens"):
        axis: Axes = Figure().subplots()
        picture._draw_slots(axis, make_report([write_lines(tmp_path / "a.jsonl", record)]))
        assert [text.get_text() for text in axis.get_legend().get_texts()] == [unit, "padding"]


class Asked(Exception):
    pass


def asked_for(monkeypatch, tmp_path, tokenizer):
    """(source, options) that transformers is asked for."""
    transformers = pytest.importorskip("transformers")

    def from_pretrained(source, **options):
        raise Asked(source, options)

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(Asked) as found:
        make_report([write_lines(tmp_path / "a.jsonl", *RECORDS)], tokenizer=tokenizer)
    return found.value.args


def test_a_name_is_one_of_the_hub_and_a_folder_is_none(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("gpt2", "Qwen/Qwen3-0.6B"):
        assert asked_for(monkeypatch, tmp_path, name) == (name, {"trust_remote_code": False, "local_files_only": False})
    (tmp_path / "gpt2").mkdir()
    assert asked_for(monkeypatch, tmp_path, "gpt2") == ("gpt2", {"trust_remote_code": False, "local_files_only": True})


def test_a_name_that_the_hub_does_not_know(monkeypatch, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")

    def from_pretrained(source, **options):
        raise OSError(f"{source} is not a model\nand more")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    assert main(["report", str(write_lines(tmp_path / "a.jsonl", *RECORDS)), "--tokenizer", "org/none"]) == 2
    wanted = (
        "tokenizer: expected bytes, a tokenizer's folder or a model's name, got 'org/none': org/none is not a model"
    )
    assert capsys.readouterr().err == f"error: {wanted}\n"


@pytest.mark.parametrize("overlong", ["truncate", "split", "own", "drop"])
def test_a_stream_is_what_packed_stream_makes_of_the_documents(tmp_path, capsys, overlong):
    lengths = [5, 30, 7, 2, 19, 8, 8, 25, 3, 11, 6, 4]
    file = write_lines(tmp_path / "a.jsonl", *({"input_ids": [1] * length} for length in lengths))
    out = tmp_path / "report.json"
    options = ["--capacity", 20, "--buffer", 4, "--overlong", overlong, "--json", out]
    assert "packed, a stream with 4 waiting" in shown(capsys, file, *options)
    found = json.loads(out.read_text())["layouts"]["stream"]
    pieces = {
        "truncate": [min(length, 20) for length in lengths],
        "split": [piece for length in lengths for piece in ([20, length - 20] if length > 20 else [length])],
        "own": lengths,
        "drop": [length for length in lengths if length <= 20],
    }[overlong]
    stream = PackedStream([{"input_ids": [1] * length} for length in pieces], 20, buffer=4, overlong="own")
    rows = list(stream)
    assert (found["rows"], found["slots"]) == (len(rows), stream.progress.slots)
    assert found["fill"] == pytest.approx(1 - stream.progress.padding)
    assert "stream" not in make_report([file], capacity=20)["layouts"]
