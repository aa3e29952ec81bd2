"""The Python of docs/trl.md runs as it is written, and images train in SFTTrainer as the page says."""

import importlib
import json

import pytest
import torch
from helpers import ROOT
from helpers.pages import block_with, in_place_of, tiny_llama

DATA = {
    "pairs.jsonl": [{"prompt": "p" * i, "chosen": "ab", "rejected": "c"} for i in (1, 2, 3)],
    "prompts.jsonl": [{"prompt": "p" * i} for i in (1, 2, 3)],
}
OPTIONS = {
    "DPO": {},
    "GRPO": {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "beta": 0.1},
}
FIXED = {
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "max_steps": 1,
    "bf16": False,
}


@pytest.fixture
def program(device, one_gpu, tmp_path, monkeypatch, fresh_compile):
    """Returns the block of a trainer of TRL: with a small model, settings for the device, and the files it reads."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from common.hf_setup import byte_tokenizer

    datasets.disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    tiny_llama(use_cache=True).save_pretrained(tmp_path / "model")
    for name, rows in DATA.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))

    def of(kind):
        trainer, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
        made = lambda self, *args, **given: trainer.__init__(  # noqa: E731
            self, *args, processing_class=byte_tokenizer(), **given
        )
        monkeypatch.setattr(trl, f"{kind}Trainer", type(trainer.__name__, (trainer,), {"__init__": made}))
        monkeypatch.setattr(
            trl, f"{kind}Config", lambda out: config(out, **FIXED, **OPTIONS[kind], use_cpu=device == "cpu")
        )
        block = block_with("docs/trl.md", f"{kind}Trainer").replace("Qwen/Qwen3-0.6B", str(tmp_path / "model"))
        return in_place_of("compile()", "compile(backend=backend)", block)

    return of


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_a_trainer_of_the_page_takes_a_step_on_packed_rows(kind, program):
    """Its layers are compiled in training, and not in generation, which would use up the limit of torch.compile."""
    made, train, _ = program(kind).partition("trainer.train()")
    graphs, rows, generated = [], [], []
    exec(made, names := {"backend": lambda graph, _: graphs.append(graph) or graph.forward})
    trainer, generate = names["trainer"], names["trainer"].model.generate
    for model in (trainer.model, trainer.ref_model):
        assert model.config._attn_implementation == "packing_ops"

    def watched(*args, **options):
        before = len(graphs), len(rows)
        found = generate(*args, **options)
        generated.append(len(graphs) - before[0])
        del rows[before[1] :]
        return found

    trainer.model.generate = watched
    trainer.model.model.register_forward_pre_hook(
        lambda _, __, given: rows.append(given["input_ids"].shape[0]), with_kwargs=True
    )
    exec(train, names)
    assert {*rows} == {1}
    assert trainer.state.global_step == 1
    assert generated == {"DPO": [], "GRPO": [0]}[kind]
    assert graphs


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_a_reference_model_that_is_left_out(kind, program):
    block, line = program(kind), "    apply_packing_ops(trainer.ref_model)"
    assert block.count(line) == 1
    with pytest.raises(ValueError, match="ref_model"):
        exec(block.replace(line, "    pass"), {"backend": "eager"})


def test_images_in_sft_trainer(device, one_gpu, tmp_path, monkeypatch):
    """The loss is the one of separate documents; without the setting that keeps their columns there are no images."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("vlm_sft")
    from common.hf_setup import byte_tokenizer

    from packing_ops.data import PaddingFreeCollator
    from packing_ops.integrations.transformers import apply_packing_ops

    datasets.disable_progress_bars()
    documents, collate, found = [example.document_of(number) for number in range(4)], PaddingFreeCollator(), {}
    dataset = datasets.Dataset.from_list(
        [{**each, "pixel_values": each["pixel_values"].tolist()} for each in documents]
    )
    options = FIXED | {"per_device_train_batch_size": 4, "logging_steps": 1, "max_length": None}
    options |= {"use_cpu": device == "cpu"}
    options |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
    for unused in (False, True):
        torch.manual_seed(0)
        model = example.new_model().to(device)
        if not unused:
            losses = [example.loss_of(model, collate([document]), device).item() for document in documents]
        settings = trl.SFTConfig(str(tmp_path), **options, remove_unused_columns=unused)
        given = {"data_collator": collate, "processing_class": byte_tokenizer()}
        trainer = trl.SFTTrainer(model, settings, train_dataset=dataset, **given)
        apply_packing_ops(trainer.model)
        seen = []
        trainer.model.register_forward_pre_hook(
            lambda _, __, given, seen=seen: seen.append((given["input_ids"].shape[0], "pixel_values" in given)),
            with_kwargs=True,
        )
        trainer.train()
        assert seen == [(1, not unused)]
        found[unused] = trainer.state.log_history[0]["loss"]
    targets = sum(label != -100 for document in documents for label in document["labels"])
    assert found[False] == pytest.approx(sum(losses) / targets, rel=1e-4)
    assert found[True] != pytest.approx(found[False], rel=1e-3)
