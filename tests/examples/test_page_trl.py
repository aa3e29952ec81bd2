"""The Python of docs/trl.md runs as it is written, on the CPU."""

import json

import pytest
from helpers.pages import block_with, tiny_llama

DATA = {
    "pairs.jsonl": [{"prompt": "p" * i, "chosen": "ab", "rejected": "c"} for i in (1, 2, 3)],
    "prompts.jsonl": [{"prompt": "p" * i} for i in (1, 2, 3)],
}
OPTIONS = {
    "DPO": {},
    "GRPO": {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 4, "beta": 0.1},
}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Returns the block of a trainer of TRL: with a small model, settings for the CPU, and the files it reads."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from common.hf_setup import byte_tokenizer

    datasets.disable_progress_bars()
    monkeypatch.chdir(tmp_path)
    tiny_llama().save_pretrained(tmp_path / "model")
    for name, rows in DATA.items():
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    fixed = {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "max_steps": 1}

    def of(kind):
        trainer, config = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
        made = lambda self, *args, **given: trainer.__init__(  # noqa: E731
            self, *args, processing_class=byte_tokenizer(), **given
        )
        monkeypatch.setattr(trl, f"{kind}Trainer", type(trainer.__name__, (trainer,), {"__init__": made}))
        monkeypatch.setattr(trl, f"{kind}Config", lambda out: config(out, bf16=False, **fixed, **OPTIONS[kind]))
        return block_with("docs/trl.md", f"{kind}Trainer").replace("Qwen/Qwen3-0.6B", str(tmp_path / "model"))

    return of


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_a_trainer_of_the_page_takes_a_step_on_packed_rows(kind, program):
    made, train, _ = program(kind).partition("trainer.train()")
    exec(made, names := {})
    trainer, rows = names["trainer"], []
    for model in (trainer.model, trainer.ref_model):
        assert model.config._attn_implementation == "packing_ops"
    trainer.model.model.register_forward_pre_hook(
        lambda _, __, given: rows.append(given["input_ids"].shape[0]), with_kwargs=True
    )
    exec(train, names)
    assert {*rows} == {1}
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("kind", ["DPO", "GRPO"])
def test_a_reference_model_that_is_left_out(kind, program):
    block, line = program(kind), "    apply_packing_ops(trainer.ref_model)"
    assert block.count(line) == 1
    with pytest.raises(ValueError, match="ref_model"):
        exec(block.replace(line, "    pass"), {})
