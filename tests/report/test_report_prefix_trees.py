"""python -m packing_ops report --prefix-trees and --group-by: what sharing would save, against plain counts."""

import json

import pytest
from helpers.report_case import write_lines

from packing_ops.__main__ import main
from packing_ops.report import make_report

PROMPT = "p" * 130
# Two answers of a prompt, one of the same prompt in another group, and a separate document.
RECORDS = [
    {"prompt": PROMPT, "completion": "abc", "uid": 1},
    {"prompt": PROMPT, "completion": "de", "uid": 1},
    {"prompt": PROMPT, "completion": "fg", "uid": {"of": "another"}},
    {"prompt": "q", "completion": "hi", "uid": 1},
]
LENGTHS = [133, 132, 132, 3]
ALONE = sum(LENGTHS)
PAIRS = sum(n * (n + 1) // 2 for n in LENGTHS)


def trees_of(path, **options):
    return make_report([path], **{"capacity": 256, "batch_size": 2, **options})["prefix_trees"]


@pytest.fixture
def file(tmp_path):
    return write_lines(tmp_path / "samples.jsonl", *RECORDS)


def test_common_prefixes(file):
    found = trees_of(file, prefix_trees=True)
    of_tree = sum(range(1, 129)) + sum(range(129, 134)) + 2 * sum(range(129, 133)) + sum(range(1, 4))
    assert found == {
        "group_by": None,
        "groups": None,
        "documents": 4,
        "tokens": {"alone": ALONE, "shared": 128 + 5 + 4 + 4 + 3},
        "rows": {"alone": 3, "shared": 1},
        "pairs": {"alone": PAIRS, "shared": of_tree},
        "repeated_at_forks": 4,
        "repeated_by_cuts": 0,
    }


def test_group_by(file):
    found = trees_of(file, group_by="uid")
    assert (found["group_by"], found["groups"]) == ("uid", 2)
    assert found["tokens"] == {"alone": ALONE, "shared": 128 + 5 + 4 + 132 + 3}


def test_by_the_prompt_itself_and_by_columns_with_other_names(tmp_path):
    records = [{"question": r["prompt"], "answer": r["completion"]} for r in RECORDS]
    path = write_lines(tmp_path / "renamed.jsonl", *records)
    found = trees_of(path, columns={"prompt": "question", "completion": "answer"}, group_by="question")
    assert (found["groups"], found["tokens"]["shared"]) == (2, 128 + 5 + 4 + 4 + 3)


def test_preference_pairs_and_token_ids(tmp_path):
    pair = {"prompt": PROMPT, "chosen": "abc", "rejected": "de"}
    found = trees_of(write_lines(tmp_path / "pairs.jsonl", pair), prefix_trees=True)
    assert found["tokens"] == {"alone": 133 + 132, "shared": 128 + 5 + 4}
    padded = {"input_ids": [0, *[7] * 130, 8], "attention_mask": [0, *[1] * 131]}
    found = trees_of(write_lines(tmp_path / "ids.jsonl", padded, {"input_ids": [7] * 129}), prefix_trees=True)
    assert found["tokens"] == {"alone": 131 + 129, "shared": 131}


@pytest.mark.parametrize(
    ("overlong", "documents", "tokens", "repeated"),
    [("truncate", 4, 396, 256), ("split", 4, 396, 256), ("drop", 1, 3, 0)],
)
def test_documents_over_the_capacity(file, overlong, documents, tokens, repeated):
    """Of 131 tokens the last ones differ: each is a separate row, which repeats the 128 above it."""
    found = trees_of(file, prefix_trees=True, capacity=131, overlong=overlong)
    assert (found["documents"], found["repeated_by_cuts"]) == (documents, repeated)
    assert found["tokens"] == {"alone": tokens, "shared": tokens}


def test_tokens_of_a_tokenizer(tmp_path, file):
    pytest.importorskip("transformers")
    from common.hf_setup import byte_tokenizer

    folder = tmp_path / "tokenizer"
    byte_tokenizer().save_pretrained(folder)
    report = make_report([file], tokenizer=str(folder), capacity=256, prefix_trees=True)
    assert report["prefix_trees"]["tokens"]["alone"] == report["examples"]["tokens"]
    assert report["prefix_trees"]["tokens"]["shared"] < ALONE - 200


def test_the_table_and_the_exit_code(file, tmp_path, capsys):
    out = tmp_path / "report.json"
    assert main(["report", str(file), "--capacity", "256", "--group-by", "uid", "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "Prefix trees: what documents share from their start on, computed once (2 groups by uid)" in printed
    line = next(line for line in printed.splitlines() if line.strip().startswith("bytes"))
    assert line.split() == ["bytes", "400", "272", "1.47x"]
    assert json.loads(out.read_text())["prefix_trees"]["tokens"] == {"alone": 400, "shared": 272}
    assert main(["report", str(file)]) == 0
    assert "Prefix trees" not in capsys.readouterr().out


def test_an_example_without_the_field(tmp_path, capsys):
    path = write_lines(tmp_path / "one.jsonl", RECORDS[0], {"text": "x"}, {"text": "y", "uid": None})
    assert main(["report", str(path), "--group-by", "uid"]) == 1
    assert "missing keys: expected uid (--group-by), got text" in capsys.readouterr().err
    assert trees_of(path, group_by="uid")["documents"] == 1


def test_no_documents(tmp_path):
    path = write_lines(tmp_path / "none.jsonl", {"text": ""})
    assert trees_of(path, prefix_trees=True)["tokens"] == {"alone": 0, "shared": 0}
