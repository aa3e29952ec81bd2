"""What one record of the report is: chats, ShareGPT, Alpaca, preference pairs, tools, columns by other names."""

import json

import pytest
from helpers.report_case import CHAT, write_lines

from packing_ops.__main__ import main
from packing_ops.report.corpus import NAMED, read_corpus

SHAREGPT = [{"from": "human", "value": "four"}, {"from": "gpt", "value": "grün"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
FORMS = {  # record: bytes of its documents
    "ShareGPT": ({"conversations": SHAREGPT}, [9]),
    "ShareGPT with a system": ({"conversations": SHAREGPT, "system": "be"}, [11]),
    "ShareGPT with two": ({"conversations": [{"from": "system", "value": "a"}, *SHAREGPT], "system": "be"}, [10]),
    "messages called conversations": ({"conversations": CHAT}, [9]),
    "Alpaca": ({"instruction": "sum", "input": "1 2", "output": "3"}, [3 + 1 + 3 + 1]),
    "Alpaca without input": ({"instruction": "say", "input": "", "output": "hi"}, [5]),
    "Alpaca with history": ({"instruction": "say", "output": "hi", "history": [["a", "b"]], "system": "s"}, [8]),
    "Alpaca before its text": ({"instruction": "say", "output": "hi", "text": "Below: say hi"}, [5]),
    "preference": ({"prompt": "four", "chosen": "grün", "rejected": "?"}, [9, 5]),
    "preference, no prompt": ({"chosen": "four grün", "rejected": "four ?"}, [10, 6]),
    "preference, chats": ({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[1:]}, [9, 9]),
    "preference, whole chats": ({"chosen": CHAT, "rejected": CHAT[:1]}, [9, 4]),
    "preference, whole chats beside a text": ({"prompt": "four", "chosen": CHAT, "rejected": CHAT}, [9, 9]),
    "tools": ({"messages": CHAT, "tools": TOOLS}, [9 + len(json.dumps(TOOLS))]),
    "tools as JSON": ({"messages": CHAT, "tools": json.dumps(TOOLS)}, [9 + len(json.dumps(TOOLS))]),
    "no tools": ({"messages": CHAT, "tools": []}, [9]),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}, "c"]}, CHAT[1]]}, [8]),
}


@pytest.mark.parametrize(("record", "lengths"), FORMS.values(), ids=FORMS)
def test_every_form_by_its_bytes(tmp_path, record, lengths):
    corpus = read_corpus([write_lines(tmp_path / "a.jsonl", record)])
    assert corpus.lengths.tolist() == lengths
    assert (corpus.num_read, corpus.unreadable, corpus.noted) == (1, {}, {})
    assert corpus.num_bytes == len(lengths)


WRONG = {
    '{"conversations": [{"value": "a"}]}': "conversations[0]: expected role and content, or from and value, got value",
    '{"conversations": 5}': "conversations: expected a list of messages, got int",
    '{"instruction": "a", "output": 5}': "output: expected a string, got int",
    '{"instruction": "a", "output": "b", "history": [["a"]]}': "history: expected [question, answer] in a list, got list",
    '{"chosen": "a", "rejected": ["b"]}': "rejected[0]: expected an object, got str",
    '{"chosen": "a"}': "expected input_ids, or messages, or conversations, or chosen and rejected, or",
    '{"conversations": [], "system": [1]}': "system: expected a string, got list",
    '{"messages": [], "tools": "{"}': "tools: ",
    '{"messages": [], "tools": {"a": 1}}': "tools: expected a list, or a list as JSON, got dict",
    '{"messages": [], "chat_template_kwargs": [1]}': "chat_template_kwargs: expected an object, got list",
}


@pytest.mark.parametrize(("line", "told"), WRONG.items(), ids=WRONG)
def test_what_is_wrong_is_named(tmp_path, capsys, line, told):
    corpus = read_corpus([write_lines(tmp_path / "a.jsonl", line, {"text": "ok"})])
    assert (corpus.lengths.tolist(), corpus.num_read) == ([2], 2)
    assert told in capsys.readouterr().err


def test_a_pair_counts_whole_or_not_at_all(tmp_path):
    pairs = [{"chosen": "ab", "rejected": ""}, {"chosen": "ab", "rejected": 5}, {"chosen": "ab", "rejected": "c"}]
    corpus = read_corpus([write_lines(tmp_path / "a.jsonl", *pairs)])
    assert corpus.lengths.tolist() == [2, 1]
    assert corpus.noted["empty"]["count"] == corpus.unreadable["wrong type"]["count"] == 1


# --- --columns ---


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved"])
@pytest.mark.parametrize(
    ("columns", "lengths"),
    [("prompt=question,completion=answer", [4]), ("text=question", [3]), ("messages=dialogue", [9])],
)
def test_columns_by_other_names(tmp_path, kind, columns, lengths):
    record = {"question": "abc", "answer": "d", "dialogue": CHAT, "text": "not this", "prompt": "nor this"}
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        write_lines(path, record)
    else:
        dataset = pytest.importorskip("datasets").Dataset.from_list([record])
        dataset.to_parquet(path) if kind == "parquet" else dataset.save_to_disk(path)
    assert main(["report", "--columns", columns, str(path), "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["examples"]["tokens"] == sum(lengths)
    assert report["settings"]["columns"] == dict(pair.split("=") for pair in columns.split(","))


def test_columns_that_are_not_there_are_named_as_they_are_called(tmp_path, capsys):
    file = write_lines(tmp_path / "a.jsonl", {"text": "ab"})
    assert main(["report", str(file), "--columns", "prompt=question"]) == 1
    assert "expected question and completion (or --columns), got text" in capsys.readouterr().err


def test_a_column_beside_leaves_the_form_open(tmp_path):
    file = write_lines(tmp_path / "a.jsonl", {"messages": CHAT, "functions": TOOLS}, {"text": "ab"})
    assert read_corpus([file], columns={"tools": "functions"}).lengths.tolist() == [9 + len(json.dumps(TOOLS)), 2]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("text", "--columns: expected KEY=COLUMN, with commas between, got 'text'"),
        ("a=b", "columns: expected input_ids,"),
    ],
)
def test_wrong_columns_are_exit_code_2(tmp_path, capsys, columns, message):
    try:
        code = main(["report", str(write_lines(tmp_path / "a.jsonl", {"text": "a"})), "--columns", columns])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert message in capsys.readouterr().err


# --- equal errors ---


def test_equal_errors_are_one_line_with_the_first_place(tmp_path, capsys):
    bad = [{"messages": [*CHAT] * i + [5]} for i in range(3)] + [{"text": 5}, {"text": 7}, {"question": "a"}]
    file = write_lines(tmp_path / "a.jsonl", {"text": "ok"}, *bad)
    assert main(["report", str(file), "--json", str(tmp_path / "r.json")]) == 1
    assert capsys.readouterr().err.splitlines()[:2] == [
        f"{file}, line 2: wrong type: messages[0]: expected an object, got int (2 more like this)",
        f"{file}, line 5: wrong type: text: expected a string, got int (1 more like this)",
    ]
    wrong = json.loads((tmp_path / "r.json").read_text())["unreadable"]["wrong type"]
    assert wrong["count"] == sum(error["count"] for error in wrong["errors"]) == 5
    assert wrong["errors"][0]["first"] == f"{file}, line 2"


def test_very_many_errors_are_counted_and_not_all_named(tmp_path, capsys):
    keys = ["".join(chr(ord("a") + int(digit)) for digit in str(i)) for i in range(NAMED + 7)]
    corpus = read_corpus([write_lines(tmp_path / "a.jsonl", *({key: 1} for key in keys))])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == NAMED + 1
    assert lines[-1] == "missing keys: 7 others are counted, not named"
    assert corpus.unreadable["missing keys"]["count"] == NAMED + 7


# --- chat templates ---


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Words; a template that writes tools, and thoughts unless an example says otherwise."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[U]": 0}, "[U]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[U]")
    fast.chat_template = (
        "{% if tools %}{% for t in tools %} tool {{ t.function.name }} {{ t.function | length }}{% endfor %}{% endif %}"
        "{% if enable_thinking is not defined or enable_thinking %} think about it{% endif %}"
        "{% for m in messages %} {{ m.role }} {{ m.content }}{% if m.tool_calls is defined %} calls{% endif %}{% endfor %}"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_template_is_given_tools_and_options(tmp_path, tokenizer, kind):
    quiet, chat = (
        {"enable_thinking": False},
        [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}],
    )
    records = [
        {"messages": chat, "tools": None, "chat_template_kwargs": None},
        {"messages": chat, "tools": TOOLS, "chat_template_kwargs": None},
        {"messages": chat, "tools": None, "chat_template_kwargs": quiet},
        {"messages": chat, "tools": TOOLS, "chat_template_kwargs": {"other": 1}},
    ]
    if kind == "jsonl":
        file = write_lines(tmp_path / "a.jsonl", *records)
    else:
        file = tmp_path / "a.parquet"
        strings = [record | {"tools": record["tools"] and json.dumps(record["tools"])} for record in records]
        pytest.importorskip("datasets").Dataset.from_list(strings).to_parquet(file)
    corpus = read_corpus([file], tokenizer)
    assert corpus.lengths.tolist() == [8, 8 + 3, 5, 8 + 3]
    assert corpus.num_bytes == 0


def test_the_template_is_given_roles_text_and_no_columns_of_other_rows(tmp_path, tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}]
    empty = [{"role": "user", "content": "a", "tool_calls": None, "name": None}]
    file = write_lines(
        tmp_path / "a.jsonl",
        {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c"}]},
        {"instruction": "a", "input": "b", "output": "c"},
        {"messages": parts},
        {"messages": empty},
        {"chosen": parts, "rejected": empty},
        {"messages": empty, "chat_template_kwargs": {"tokenize": True}},
    )
    corpus = read_corpus([file], tokenizer)
    assert corpus.lengths.tolist() == [8, 8, 6, 5, 6, 5]
    assert corpus.unreadable["refused by the tokenizer"]["count"] == 1
