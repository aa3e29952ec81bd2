"""The examples run, and say the same thing about the same documents however these are laid out."""

import argparse
import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, fresh_process

import packing_ops as po


def train(out, *arguments):
    fresh_process.run("examples/train_packed.py", "--out", out, *arguments, folder=out)
    return json.loads((out / "demo_cpu.json").read_text())


def check(result, documents):
    losses = result["first_step_loss"]
    assert losses["packed"] == pytest.approx(losses["padded"], abs=1e-5)
    assert losses["unpadded"] == pytest.approx(losses["padded"], abs=1e-5)
    padded, packed = result["runs"]
    assert padded["real_tokens"] == packed["real_tokens"] > 0
    assert packed["padding_waste"] < padded["padding_waste"]
    assert result["documents"] == documents
    assert all(run["losses"][-1] < run["losses"][0] for run in (padded, packed))


def test_docstrings(tmp_path):
    check(train(tmp_path, "--documents", "48"), 48)
    assert (tmp_path / "demo_cpu.png").stat().st_size > 10_000


MODULES = {
    "async_sft": "matplotlib and numpy and rich: pip install matplotlib numpy rich",
    "full_sft": "transformers: pip install 'transformers>=5.17'",
    "docstrings": None,
    "fsdp2_sft": "transformers: pip install 'transformers>=5.17'",
    "grpo_same_bits": "transformers and matplotlib: pip install 'transformers>=5.17' matplotlib",
    "grpo_tree": "transformers and matplotlib: pip install 'transformers>=5.17' matplotlib",
    "grpo_vllm": "vllm and transformers and matplotlib: pip install vllm 'transformers>=5.17' matplotlib",
    "hf_sft": "transformers and matplotlib and rich: pip install 'transformers>=5.17' matplotlib rich",
    "megatron_sft": "megatron.core and matplotlib and rich: pip install 'megatron-core>=0.13' matplotlib rich",
    "rl_mini_batches": None,
    "same_bits": "transformers and matplotlib: pip install 'transformers>=5.17' matplotlib",
    "train_packed": "matplotlib and rich: pip install matplotlib rich",
    "trl_sft": "transformers and trl and datasets: pip install 'transformers>=5.17' 'trl>=1' datasets",
    "vlm_sft": "transformers: pip install 'transformers>=5.17'",
}
# Each example in turn, in a process that has what the base installation brings: torch.
BASE_ONLY = """
import contextlib, io, runpy, sys
for hidden in "datasets matplotlib megatron numpy pyarrow rich tokenizers transformers trl vllm".split():
    sys.modules[hidden] = None
complete = "examples/docstrings.py", "examples/rl_mini_batches.py"  # with torch alone
for path in sys.argv[1:]:
    for options in (["--help"],) if path in complete else (["--help"], []):
        sys.argv, printed = [path, *options], io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            print(repr((path, printed.getvalue(), end.code)))
"""


def test_examples_without_the_extras():
    """--help prints, and a run ends with one sentence that names what is missing and the extra that brings it."""
    paths = [f"examples/{name}.py" for name in MODULES]
    assert set(paths) == {f"examples/{p.name}" for p in (ROOT / "examples").glob("*.py") if "__main__" in p.read_text()}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BASE_ONLY, *paths],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    told = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    for path, missing in zip(paths, MODULES.values(), strict=True):
        (_, page, code), *run = [each for each in told if each[0] == path]
        assert code == 0
        assert page.startswith("usage: ")
        assert "--out" in page
        assert [end for _, _, end in run] == ([f"{path} needs {missing}"] if missing else [])


@pytest.mark.parametrize(("gpu", "cuda", "device"), [(True, "13.0", "cuda"), (True, "", "cpu"), (False, "13.0", "cpu")])
def test_device_auto(monkeypatch, gpu, cuda, device):
    from common.options import add_device

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(po, "build_info", lambda: {"cuda": cuda})
    parser = argparse.ArgumentParser()
    add_device(parser)
    assert parser.parse_args(["--device", "auto"]).device == device
    assert parser.parse_args([]).device == "cpu"


def test_results_say_where_they_come_from(tmp_path):
    from common.results import save_results

    save_results(tmp_path / "new folder" / "a.json", {"loss": 2.5}, "cpu")
    results = json.loads((tmp_path / "new folder" / "a.json").read_text())
    assert results == {"device": f"cpu, {torch.get_num_threads()} threads", "torch": torch.__version__, "loss": 2.5}


def test_docstrings_are_prompts_and_completions(tmp_path):
    file = tmp_path / "new folder" / "docstrings.jsonl"
    fresh_process.run("examples/docstrings.py", "--out", file, "--documents", "30", folder=tmp_path)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(records) == 30
    assert all([*record] == ["prompt", "completion"] and all(record.values()) for record in records)


def test_jsonl_of_both_formats(tmp_path):
    file = tmp_path / "chat.jsonl"
    records = []
    for i in range(40):
        records.append({"prompt": f"count to {i}: ", "completion": " ".join(map(str, range(i)))})
        messages = [{"role": "user", "content": f"hello {i}"}, {"role": "assistant", "content": "hi " * i}]
        records.append({"messages": messages})
    file.write_text("\n".join(map(json.dumps, records)))
    check(train(tmp_path, "--data", file, "--capacity", "512"), 80)


def test_bad_jsonl_line_is_named(tmp_path):
    from common.text_data import read_jsonl

    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"text": "c"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: expected messages or prompt and completion"):
        read_jsonl(file)


def blocks(page):
    """The Python of a page of docs that is not indented."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)


def block(page):
    return blocks(page)[0]


def test_the_decoder_of_the_ops_learns_and_keeps_documents_apart(capsys):
    names = {}
    torch.manual_seed(0)
    exec("".join(blocks("decoder.md")), names)
    losses = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert losses[-1] < 0.9 * losses[0]
    model, documents = names["model"].cpu(), [torch.arange(5), torch.arange(9) + 3]
    together = model(torch.cat(documents), po.PackedMetadata.from_lengths([5, 9]))
    alone = torch.cat([model(d, po.PackedMetadata.from_lengths([len(d)])) for d in documents])
    torch.testing.assert_close(together, alone)


def test_the_snippets_of_the_ops_run_one_after_the_other():
    names = {}
    for block in blocks("ops.md"):
        exec(block.replace('device="cuda"', 'device="cpu"'), names)
    assert names["packing"].bins == [[0, 3, 6], [5, 4], [2, 1]]
    assert names["metadata"].cu_seqlens.tolist() == [0, 820, 930, 980]
    assert (names["labels"] == -100).nonzero().flatten().tolist() == [0, 820, 930]
    assert names["out"].shape == (980, 8, 64)
    assert names["baseline"][[0, 819, 820]].tolist() == names["returns"][[0, 0, 1]].tolist()
    assert (names["logps"] == 0).nonzero().flatten().tolist() == [819, 929, 979]
    torch.testing.assert_close(names["sequence_logps"].sum(), -names["loss"] * names["num_targets"])
    assert names["packed"].shape == (8, 16)
    assert names["padded"].shape == (2, 5, 16)
    mask, advantages = names["loss_mask"], names["advantages"]  # the policy is the one that drew the tokens
    torch.testing.assert_close(names["policy_loss"], -(advantages * mask).sum() / mask.sum())


def test_the_snippets_of_layers_with_a_state():
    names = {}
    for block in blocks("layers-with-a-state.md"):  # decoding compares by itself
        exec(block, names)
    assert names["heads"].shape == (980, 4, 32)
    assert names["scanned"].shape == (980, 4, 64)


def test_tokens_that_a_sampler_drew():
    names = {}
    exec(block("losses.md"), names)
    assert (names["logps"] == 0).nonzero().flatten().tolist() == [6, 11]  # the last tokens of the documents


def test_the_ops_have_the_signatures_of_the_page():
    text = (ROOT / "docs" / "ops.md").read_text()
    for function in (po.varlen_attention, po.token_logps, po.chunked_cross_entropy):
        (found,) = re.findall(rf"^    {function.__name__}\((.*?)\)$", text, re.M | re.S)
        found, wanted = inspect.signature(eval(f"(lambda {found}: 0)")), inspect.signature(function)
        found, wanted = (
            {each.name: each.default for each in one.parameters.values() if each.name not in ("misplaced", "unknown")}
            for one in (found, wanted)
        )
        assert found == wanted


def test_the_page_of_ops_says_who_shifts_labels():
    """All functions that take labels are in the table; their names say where labels are shifted."""
    text = (ROOT / "docs" / "ops.md").read_text().partition("## Who shifts labels\n")[2]
    rows = re.findall(r"^\| (.*?) \| (unshifted|shifted|either) \|", text, re.M)
    found = {name: how for names, how in rows for name in re.findall(r"`([\w.]+)`", names)}
    taken = {}
    for package, prefix in ((po, ""), (po.data, "data."), (po.parallel, "parallel.")):
        for name in filter(lambda name: inspect.isfunction(getattr(package, name)), package.__all__):
            given = inspect.signature(getattr(package, name)).parameters
            if {"labels", "shift_labels"} & given.keys():
                taken[prefix + name] = "shifted" if "shift_labels" in given or "_shifted" in name else "unshifted"
    taken["parallel.count_targets"] = "either"  # it counts what is not -100
    assert found == taken
    labels, hidden, weight = torch.arange(5), torch.randn(5, 4), torch.randn(5, 4)
    documents, logits = po.PackedMetadata.from_lengths([2, 3]), hidden @ weight.T
    by_hand = -torch.nn.functional.cross_entropy(logits, po.shift_labels(labels, documents), reduction="none")
    torch.testing.assert_close(po.token_logps(hidden, weight, labels, documents), by_hand)


def test_the_page_of_ops_says_what_waits():
    text = (ROOT / "docs" / "ops.md").read_text().partition("## What waits for the GPU\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", text, re.M)
    listed = {name: waits for names, waits in rows for name in re.findall(r"`(\w+)`", names)}
    for name in filter(lambda name: inspect.isfunction(getattr(po, name)), po.__all__):
        says = re.search(r"Synchronises: (as (\w+)|.*)", getattr(po, name).__doc__)
        if says and says[2]:
            says = re.search(r"Synchronises: (.*)", getattr(po, says[2]).__doc__)
        if name in listed:
            waits = listed.pop(name)
            assert re.match(r"\w+", waits)[0] in says[1], name
            assert all(f"``{option}``" in says[1] for option in re.findall(r"`(\w+)=", waits)), name
        else:
            assert says is None or says[1].startswith("never"), name
    assert not listed


def test_the_batches_of_the_page_are_made():
    names = {}
    exec(block("data.md"), names)
    assert (names["batch"]["order"], names["batch"]["sub_seq_lengths"]) == ([1, 0], [[7, 5]])
    assert names["row"]["cu_seq_lens_q"].tolist() == [0, 5, 12]


def test_a_model_in_plain_torch_enters_the_mode_of_the_page(capsys):
    torch.manual_seed(0)
    exec(block("same-bits-details.md"), names := {})
    assert capsys.readouterr().out == "True\n"
    assert names["model"].head.weight.grad.any()
    weights = [parameter for parameter in names["model"].parameters() if parameter.dim() > 1]
    assert all(min(weight.shape) > 64 and weight.dtype == torch.bfloat16 for weight in weights), "a GPU needs it"


def test_a_rollout_of_the_page_has_the_bits_of_the_update(tmp_path):
    pytest.importorskip("transformers")
    from helpers.hf_models import tiny_model

    from packing_ops.integrations.transformers import continuous_batching, revert_packing_ops

    if not continuous_batching.PATCHES:
        pytest.skip("transformers batches in another way")
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    tiny_model("llama", **sizes).save_pretrained(tmp_path)
    given = {"name": str(tmp_path), "prompts": [[5, 6, 7]] * 2, "reward": lambda answer: float(sum(answer)), "steps": 2}
    # By default the cache of keys takes most of the machine's memory, and writes it.
    code = block("same-bits.md").replace("max_new_tokens=256", "max_new_tokens=32")
    code = code.replace("return_logprobs=True", "return_logprobs=True, num_blocks=64")
    exec(code, names := dict(given))
    assert po.check_invariance(names["model"]).prefixes
    revert_packing_ops(names["model"])
    assert all(each.logprobs for each in names["sampled"])
    assert len(names["optimizer"].state) > 0
    with pytest.raises(AssertionError):
        exec(code.replace("torch.tensor(each.logprobs", "1e-6 + torch.tensor(each.logprobs"), names := dict(given))
    revert_packing_ops(names["model"])


def test_a_loop_steps_float32_copies_of_the_weights():
    from packing_ops.optim import keep_float32

    model = torch.nn.Linear(4, 4).bfloat16()
    (line,) = re.findall(r"^optimizer = .*$", block("same-bits.md"), re.M)
    exec(line, names := {"model": model, "torch": torch, "keep_float32": keep_float32})
    model(torch.ones(2, 4).bfloat16()).sum().backward()
    names["optimizer"].step()
    assert {names["optimizer"].state[weight]["float32_copy"].dtype for weight in model.parameters()} == {torch.float32}


def test_grpo_steps_float32_copies_of_the_weights(tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from common.hf_setup import byte_tokenizer
    from helpers.pages import tiny_llama

    from packing_ops.integrations.transformers import apply_packing_ops
    from packing_ops.integrations.trl import enable_padding_free
    from packing_ops.optim import keep_float32

    tiny_llama().save_pretrained(tmp_path / "model")
    options = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "max_steps": 4, "disable_tqdm": True}
    options |= {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4}
    args = trl.GRPOConfig(str(tmp_path), bf16=False, model_init_kwargs={"dtype": "bfloat16"}, **options)
    prompts = datasets.Dataset.from_list([{"prompt": "p" * i} for i in (1, 2, 3, 4)])

    def reward(completions, **_):
        return [float(len(set(text))) for text in completions]

    folder = str(tmp_path / "model")
    trainer = trl.GRPOTrainer(folder, reward, args=args, train_dataset=prompts, processing_class=byte_tokenizer())
    apply_packing_ops(trainer.model)
    enable_padding_free(trainer)
    keep_float32(trainer.create_optimizer())
    trainer.train()
    copies = [trainer.optimizer.state[weight]["float32_copy"] for weight in trainer.model.parameters()]
    assert {copy.dtype for copy in copies} == {torch.float32}
    assert any(not torch.equal(copy, copy.bfloat16().float()) for copy in copies)
    assert all(map(torch.equal, [copy.bfloat16() for copy in copies], trainer.model.parameters()))


def test_megatron_names_of_the_page_exist():
    pytest.importorskip("megatron.core")
    imports = [line for line in block("megatron.md").splitlines() if line.startswith("from ")]
    names = {}
    exec("\n".join(imports), names)
    calls = {"use_packing_ops", "patch_rope", "preprocess_packed_seqs", "next_token_targets", "postprocess_packed_seqs"}
    assert all(callable(names[name]) for name in calls)


def test_only_targets_are_learnt():
    from common.text_data import BOS, EOS, IGNORE, encode

    document = encode([("ab", False), ("c", True)])
    assert document.input_ids.tolist() == [BOS, 97, 98, 99, EOS]
    assert document.labels.tolist() == [IGNORE, IGNORE, IGNORE, 99, EOS]


def test_switches_of_the_page_exist():
    pytest.importorskip("trl")
    section = (ROOT / "docs" / "transformers-models.md").read_text().partition("## Calls and their undo\n")[2]
    places = "integrations.transformers", "integrations.trl", "integrations.flash_attn", "contrib.ring_flash_attn"
    modules = [importlib.import_module(f"packing_ops.{place}") for place in places]
    names = re.findall(r"`(\w+)\(", "\n".join(re.findall(r"^\|.*", section.partition("\n## ")[0], re.M)))
    assert len({*names}) == 16
    for name in names:
        assert any(callable(getattr(module, name, None)) for module in modules), name
