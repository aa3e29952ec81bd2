"""What python -m packing_ops report reads: every format, every example counted, nothing lost silently."""

import gzip
import io
import json
import os
import re
import threading
import tracemalloc
from contextlib import suppress

import pytest
from helpers import fresh_process
from helpers.report_case import CHAT, LENGTHS, RECORDS, write_lines

from packing_ops.__main__ import main
from packing_ops.report import readers
from packing_ops.report.corpus import NAMED, read_corpus
from packing_ops.report.readers import ROWS, records


def counts(problems):
    return {kind: problem["count"] for kind, problem in problems.items()}


def test_every_format_of_jsonl_by_its_bytes(tmp_path):
    corpus = read_corpus([write_lines(tmp_path / "a.jsonl", *RECORDS, ""), write_lines(tmp_path / "b", {"text": "x"})])
    assert corpus.lengths.tolist() == [*LENGTHS, 1]
    assert (corpus.num_read, corpus.unreadable, corpus.noted) == (4, {}, {})


def test_a_null_among_tokens_is_its_own_rows_mistake(tmp_path, capsys):
    pa = pytest.importorskip("pyarrow")
    rows = pa.array([[1, None], [3, 4], None, [5]])
    pytest.importorskip("pyarrow.parquet").write_table(pa.table({"input_ids": rows}), tmp_path / "a.parquet")
    corpus = read_corpus([tmp_path / "a.parquet"])
    assert corpus.lengths.tolist() == [2, 1]
    assert counts(corpus.unreadable) == {"wrong type": 1, "missing keys": 1}
    assert "got input_ids (null)" in capsys.readouterr().err


def test_chats_with_parts_tools_and_prompts_that_are_chats(tmp_path):
    call = [{"name": "f"}]
    file = write_lines(
        tmp_path / "a.jsonl",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "abc"}, {"type": "text", "text": "de"}]}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": call}]},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"messages": None, "text": "xyz"},
    )
    corpus = read_corpus([file])
    assert corpus.lengths.tolist() == [5, len(json.dumps(call)), 9, 3]
    assert counts(corpus.noted) == {"no target": 1}


def test_parquet_and_saved_datasets_as_jsonl(tmp_path):
    datasets = pytest.importorskip("datasets")
    keys = ("id", "messages", "prompt", "completion", "text")
    dataset = datasets.Dataset.from_list([{key: record.get(key) for key in keys} for record in RECORDS])
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "splits")
    write_lines(tmp_path / "a.jsonl", *RECORDS)
    for name, times in (("a.jsonl", 1), ("a.parquet", 1), ("saved", 1), ("splits", 2)):
        corpus = read_corpus([tmp_path / name])
        assert corpus.lengths.tolist() == LENGTHS * times
        assert corpus.num_read == 3 * times
        parts = []
        assert len(list(records(tmp_path / name, parts.append))) == 3 * times
        assert sum(parts) == pytest.approx(1)  # what the progress bar is given


TOKENIZED = [
    {"input_ids": [1, 2, 3], "labels": [-100, 2, 3], "loss_mask": None, "attention_mask": [1, 1, 0]},
    {"input_ids": [1, 2, 3], "labels": [-100, -100, -100], "loss_mask": None, "attention_mask": None},
    {"input_ids": [1, 2, 3], "labels": [1, -100, 3], "loss_mask": [0.0, 1.0, 0.0], "attention_mask": None},
    {"input_ids": [1, 2, 3], "labels": [1, 2], "loss_mask": None, "attention_mask": None},
    {"input_ids": [], "labels": [], "loss_mask": None, "attention_mask": None},
    {"input_ids": [1, 2, 3, 4], "labels": None, "loss_mask": [0.0, 0.0, 0.0, 0.5], "attention_mask": None},
    {"input_ids": None, "labels": [1], "loss_mask": None, "attention_mask": None},
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
def test_token_ids_in_the_file(tmp_path, kind, capsys):
    path = tmp_path / f"tokens.{kind}"
    if kind == "jsonl":
        write_lines(path, *TOKENIZED)
    else:
        dataset = pytest.importorskip("datasets").Dataset.from_list(TOKENIZED)
        dataset.to_parquet(path) if kind == "parquet" else dataset.save_to_disk(path)
    corpus = read_corpus([path])
    assert corpus.lengths.tolist() == [2, 3, 3, 4]
    assert counts(corpus.unreadable) == {"lists of different length": 1, "missing keys": 1}
    assert counts(corpus.noted) == {"no target": 2, "empty": 1}
    place = f"{path}, line 4" if kind == "jsonl" else f"{path}, row 3"
    assert f"{place}: lists of different length: expected 3 like input_ids, got input_ids 3, labels 2" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_no_known_column_is_missing_keys(tmp_path, kind, capsys):
    dataset = pytest.importorskip("datasets").Dataset.from_list([{"question": "a", "answer": "b"}] * 2)
    dataset.to_parquet(tmp_path / "x") if kind == "parquet" else dataset.save_to_disk(tmp_path / "x")
    corpus = read_corpus([tmp_path / "x"])
    assert counts(corpus.unreadable) == {"missing keys": 2}
    assert "got question, answer" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["text", "question"])
def test_parquet_without_rows(tmp_path, name):
    pytest.importorskip("datasets").Dataset.from_dict({name: []}).to_parquet(tmp_path / "x.parquet")
    corpus = read_corpus([tmp_path / "x.parquet", write_lines(tmp_path / "a.jsonl", {"text": "ab"})])
    assert (corpus.lengths.tolist(), corpus.num_read, corpus.unreadable) == ([2], 1, {})


def test_folders_that_datasets_cannot_load_are_named(tmp_path, capsys):
    pytest.importorskip("datasets").Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    capsys.readouterr()
    for name in ("empty", "other"):
        assert main(["report", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {tmp_path / name}: datasets cannot load it: ")


@pytest.mark.parametrize("damage", [lambda data: data[:1000], lambda data: data[:200] + b"\xff" * 200 + data[400:]])
def test_a_damaged_parquet_file_is_named(tmp_path, capsys, damage):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"text": [f"{i} " * 50 for i in range(5000)]}), file, compression="snappy")
    file.write_bytes(damage(file.read_bytes()))
    assert main(["report", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: ")


BAD = {
    '{"text": "cut': "corrupt",
    "[1, 2]": "corrupt",
    "null": "corrupt",
    "[" * 100_000: "corrupt",
    '{"text": "\\ud800"}': "corrupt",
    "{}": "missing keys",
    '{"prompt": "no completion"}': "missing keys",
    '{"messages": [{"content": "no role"}]}': "missing keys",
    '{"messages": [{"role": "user"}]}': "missing keys",
    '{"text": 5}': "wrong type",
    '{"messages": "hello"}': "wrong type",
    '{"messages": ["hello"]}': "wrong type",
    '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}': "wrong type",
    '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}': "images and other parts",
    '{"messages": [{"role": "user", "content": [{"type": "audio", "text": null}]}]}': "images and other parts",
    '{"input_ids": [9223372036854775808]}': "wrong type",
    '{"input_ids": [1], "labels": [18446744073709551516]}': "wrong type",
    '{"prompt": [], "completion": "a"}': "wrong type",
    '{"input_ids": [1.5]}': "wrong type",
    '{"input_ids": [[1], [2, 3]]}': "wrong type",
    '{"input_ids": [[1, 2], [3, 4]]}': "wrong type",
    '{"input_ids": "12"}': "wrong type",
    '{"input_ids": [1], "loss_mask": ["1"]}': "wrong type",
    '{"input_ids": [1, 2], "position_ids": [0]}': "lists of different length",
}


@pytest.mark.parametrize(("line", "kind"), BAD.items(), ids=[line[:40] for line in BAD])
def test_a_line_that_cannot_be_read_is_named_and_the_rest_counted(tmp_path, capsys, line, kind):
    file = write_lines(tmp_path / "bad.jsonl", {"text": "hello"}, line, {"text": "hi"})
    assert main(["report", str(file), "--json", str(tmp_path / "r.json")]) == 1
    out, err = capsys.readouterr()
    assert err.startswith(f"{file}, line 2: {kind}: ")
    assert len(err.splitlines()) == 1
    assert f"unreadable, left out: {kind}" in out
    report = json.loads((tmp_path / "r.json").read_text())
    assert counts(report["unreadable"]) == {kind: 1}
    assert (
        report["unreadable"][kind]["where"] == [report["unreadable"][kind]["errors"][0]["first"]] == [f"{file}, line 2"]
    )
    assert report["examples"] == {"read": 3, "documents": 2, "tokens": 7}


def test_bytes_that_are_no_utf8(tmp_path, capsys):
    file = tmp_path / "latin.jsonl"
    file.write_bytes(b'{"text": "gr\xfcn"}\n{"text": "ok"}')
    assert main(["report", str(file)]) == 1
    assert f"{file}, line 1: corrupt: " in capsys.readouterr().err


@pytest.mark.parametrize("more", [0, 50])
def test_many_of_a_kind_are_counted_and_not_all_their_places_kept(tmp_path, capsys, more):
    corpus = read_corpus([write_lines(tmp_path / "bad.jsonl", *(["{"] * (NAMED + more)))])
    assert corpus.unreadable["corrupt"]["count"] == NAMED + more
    assert len(corpus.unreadable["corrupt"]["where"]) == NAMED
    assert capsys.readouterr().err.endswith(f" ({NAMED + more - 1} more like this)\n")


def test_rows_of_later_batches_are_named_and_the_files_order_is_kept(tmp_path, capsys):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    texts = ["x" * (1 + i % 7) for i in range(2 * ROWS + 3)]
    parquet.write_table(pa.table({"text": [*texts, None]}), tmp_path / "a.parquet")
    corpus = read_corpus([tmp_path / "a.parquet"])
    assert corpus.lengths.tolist() == [len(text) for text in texts]
    assert f"a.parquet, row {len(texts)}: missing keys" in capsys.readouterr().err


# --- what is no plain file of lines ---


def through_a_pipe(data, parts, *options):
    """Exit code of a report on a pipe that gets ``data`` in that many writes."""
    reader, writer = os.pipe()

    def write():
        with suppress(BrokenPipeError), open(writer, "wb", buffering=0) as pipe:
            for part in range(parts):
                pipe.write(data[part * len(data) // parts : (part + 1) * len(data) // parts])

    thread = threading.Thread(target=write)
    thread.start()
    try:
        return main(["report", f"/dev/fd/{reader}", *options])
    finally:
        os.close(reader)
        thread.join()


@pytest.mark.parametrize(("lines", "parts"), [(0, 1), (2, 1), (2, 36), (3000, 1)])
def test_a_pipe_is_read_to_its_end(tmp_path, lines, parts):
    text = b'{"text": "hello"}\n' * lines
    assert through_a_pipe(text, parts, "--json", str(tmp_path / "r.json")) == (0 if lines else 2)
    read = json.loads((tmp_path / "r.json").read_text())["examples"]
    assert read == {"read": lines, "documents": lines, "tokens": 5 * lines}


def test_parquet_in_a_pipe_is_named(tmp_path, capsys):
    pytest.importorskip("datasets").Dataset.from_dict({"text": ["a"]}).to_parquet(tmp_path / "a.parquet")
    assert through_a_pipe((tmp_path / "a.parquet").read_bytes(), 9) == 2
    assert re.search(r"error: /dev/fd/\d+: expected a file for Parquet, .* got a pipe", capsys.readouterr().err)


# What `cat a.gz | python -m packing_ops report FILE` and `... report <(cat a.gz)` run.
REPORT_OF_A_PIPE = """
import os, subprocess, sys
cat = subprocess.Popen(["cat", "a.gz"], stdout=subprocess.PIPE)
pipe = cat.stdout.fileno()
file = sys.argv[1]
if file == "SUBSTITUTION":
    file = f"/dev/fd/{pipe}"
else:
    os.dup2(pipe, 0)
    sys.stdin = open(0)
from packing_ops.__main__ import main
sys.exit(main(["report", "--json", "r.json", file]))
"""


@pytest.mark.parametrize("how", ["-", "/dev/stdin", "substitution", "gzip, -", "gzip, file", "gzip, substitution"])
def test_stdin_pipes_and_gzip_are_read(tmp_path, how):
    text = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    data = gzip.compress(text) if how.startswith("gzip") else text
    (tmp_path / "a.gz").write_bytes(data)
    file = {"substitution": "SUBSTITUTION", "file": "a.gz"}.get(how.removeprefix("gzip, "), how.removeprefix("gzip, "))
    fresh_process.run("-c", REPORT_OF_A_PIPE, file, cwd=tmp_path, folder=tmp_path)
    read = json.loads((tmp_path / "r.json").read_text())["examples"]
    assert read == {"read": 3, "documents": 3, "tokens": sum(LENGTHS)}


@pytest.mark.parametrize("depth", [600, 900])  # the decoder takes these, but for a little stack
@pytest.mark.parametrize("key", ["tools", "chat_template_kwargs", "messages"])
def test_brackets_in_brackets_are_counted(tmp_path, depth, key):
    deep = "[" * depth + "]" * depth
    records = {
        "tools": f'{{"messages": {json.dumps(CHAT)}, "tools": {deep}}}',
        "chat_template_kwargs": f'{{"messages": {json.dumps(CHAT)}, "chat_template_kwargs": {{"a": {deep}}}}}',
        "messages": f'{{"messages": [{{"role": "assistant", "content": "a", "tool_calls": {deep}}}]}}',
    }
    corpus = read_corpus([write_lines(tmp_path / "a.jsonl", records[key], {"text": "ok"})])
    assert (corpus.lengths.tolist()[-1], corpus.num_read) == (2, 2)
    assert counts(corpus.unreadable) in ({"corrupt": 1}, {})


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:40] + b"\xff" * 40 + data[80:]])
def test_a_damaged_gzip_file_is_named(tmp_path, capsys, damage):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(damage(gzip.compress("".join(f'{{"text": "{i}"}}\n' for i in range(1000)).encode())))
    assert main(["report", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: damaged gzip: ")


ARRAYS = {
    "one line": json.dumps(RECORDS),
    "a line each": "[\n" + ",\n".join(map(json.dumps, RECORDS)) + "\n]\n",
    "indented": "\ufeff \n" + json.dumps(RECORDS, indent=2, ensure_ascii=False),
}


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
@pytest.mark.parametrize("kind", ARRAYS)
def test_a_json_array(tmp_path, monkeypatch, kind, chunk):
    monkeypatch.setattr(readers, "CHUNK", chunk)
    (tmp_path / "a.json").write_text(ARRAYS[kind])
    corpus = read_corpus([tmp_path / "a.json"])
    assert (corpus.lengths.tolist(), corpus.num_read, corpus.unreadable) == (LENGTHS, 3, {})
    assert [place for place, _ in records(tmp_path / "a.json", lambda part: None)][2] == f"{tmp_path}/a.json, element 3"


@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_elements_are_those_of_json(monkeypatch, chunk):
    monkeypatch.setattr(readers, "CHUNK", chunk)
    for text in ("[]", " [ ] ", "[1, 23, -4.5e6, null]", '["], [", {"a": [1, {}]}, []]', '["\\ud800\\u00fc", "ü"]'):
        assert list(readers.elements(io.BytesIO(text.encode()), 100)) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"}', "element 1: expected , or ], got 'the end'"),
        ('[{"text": "a"}, {"text": ', "element 1: Expecting value, got ''"),
        ('[{"text": "a"} {"text": "b"}]', 'element 1: expected , or ], got \'{"text": "b"}]\''),
        ("[1] [2]", "element 1: expected nothing behind the array, got '[2]'"),
        ("[" * 100_000, "element 0: "),
        ('["' + "x" * 2000 + '"]', "element 0: expected an element of at most 1,000 characters, got more"),
    ],
)
def test_a_damaged_json_array_is_named(tmp_path, monkeypatch, capsys, text, message):
    monkeypatch.setattr(readers, "LONGEST", 1000)
    monkeypatch.setattr(readers, "CHUNK", 500)
    (tmp_path / "a.json").write_text(text)
    assert main(["report", str(tmp_path / "a.json")]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith(f"error: {tmp_path}/a.json: damaged JSON array after {message}")
    )


def test_an_array_is_never_whole_in_memory(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps([{"text": "x" * 1000}] * 40_000))
    tracemalloc.start()
    corpus = read_corpus([file])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert corpus.lengths.tolist() == [1000] * 40_000
    assert peak < file.stat().st_size / 2


def test_a_line_without_an_end_is_named_and_not_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(readers, "LONGEST", 1000)
    exact, long = '"' + "x" * 998 + '"', '"' + "x" * 4_000_000
    file = write_lines(tmp_path / "a.jsonl", {"text": "hello"}, long, {"text": "hi"}, exact)
    with file.open("a") as more:
        more.write(long)
    tracemalloc.start()
    corpus = read_corpus([file])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (corpus.lengths.tolist(), corpus.num_read) == ([5, 2], 5)
    assert corpus.unreadable["corrupt"]["where"] == [f"{file}, line {line}" for line in (2, 4, 5)]
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"{file}, line 2: corrupt: expected a line of at most 1,000 bytes, got more (1 more like this)"
    assert told[1].endswith("expected an object, got str")
    assert peak < len(long)


ESCAPES = {
    "key": '{"\\u001b[2Jkey": 1}',
    "key of a message": '{"messages": [{"\\u001b[2Jkey": 1}]}',
    "next line": '{"key\\r\\nerror: none": 1}',
    "direction": '{"key\\u202e": 1}',
    "lone half": '{"key\\ud800": 1}',
}


@pytest.mark.parametrize("case", ESCAPES)
def test_nothing_of_a_file_reaches_the_terminal_but_text(tmp_path, capsys, case):
    file = write_lines(tmp_path / "a\x1b[2J.jsonl", ESCAPES[case], {"text": "hello"})
    assert main(["report", str(file)]) == 1
    out, err = capsys.readouterr()
    assert all(character.isprintable() for character in (out + err).replace("\n", ""))
    assert len(err.splitlines()) == 1
    assert "missing keys: " in err
    assert "key" in err
    assert r"a\x1b[2J.jsonl" in out
    assert main(["report", str(tmp_path / "\x1b[2J")]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_many_keys_are_not_all_told(tmp_path, capsys):
    read_corpus([write_lines(tmp_path / "a.jsonl", {f"{i:04}" + "k" * 1000: 1 for i in range(1000)})])
    assert 100 < len(capsys.readouterr().err) < 1000


def test_empty_and_unanswered_examples_are_told(tmp_path, capsys):
    file = write_lines(
        tmp_path / "a.jsonl",
        *({"text": ""}, {"messages": []}, {"prompt": "ab", "completion": ""}, {"messages": CHAT[:1]}, {"text": "x"}),
    )
    assert main(["report", str(file), "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert counts(report["noted"]) == {"empty": 2, "no target": 2}
    assert report["examples"] == {"read": 5, "documents": 3, "tokens": 7}
    out = capsys.readouterr().out
    assert "empty, left out" in out
    assert "without a target" in out


def test_no_examples_at_all(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = write_lines(tmp_path / "empty.jsonl")
    assert main(["report", str(file), "--plot", str(tmp_path / "p.png"), "--json", str(tmp_path / "r.json")]) == 2
    assert json.loads((tmp_path / "r.json").read_text())["layouts"] == {}
    assert "no document was read" in capsys.readouterr().out


# --- tokenizers ---


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Words, [B] before a text, and a template that refuses what does not start with the user."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[U]": 0, "[B]": 1, "[R]": 2}, "[U]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.post_processor = tokenizers.processors.TemplateProcessing(single="[B] $A", special_tokens=[("[B]", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[U]", bos_token="[B]")
    fast.chat_template = (
        "{% if messages[0]['role'] != 'user' %}{{ raise_exception('who asks?') }}{% endif %}"
        "{% for m in messages %} [R] {{ m['content'] }}{% endfor %}"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return folder


def test_tokens_of_a_pretrained_tokenizer(tmp_path, tokenizer, capsys):
    file = write_lines(
        tmp_path / "a.jsonl",
        {"text": "one two three"},
        {"messages": [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]},
        {"messages": [{"role": "assistant", "content": "first"}]},
        {"input_ids": [7, 8]},
        {"prompt": "one two", "completion": " three four"},
        {"text": ""},
    )
    corpus = read_corpus([file], str(tokenizer))
    assert corpus.lengths.tolist() == [4, 5, 2, 5]
    assert counts(corpus.unreadable) == {"refused by the tokenizer": 1}
    assert counts(corpus.noted) == {"empty": 1}
    assert f"{file}, line 3: refused by the tokenizer: chat template: who asks?" in capsys.readouterr().err
