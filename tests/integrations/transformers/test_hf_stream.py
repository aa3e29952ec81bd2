"""A PackedStream as the data set of transformers' Trainer and of TRL's: their batches are its rows, also after a
resume.
"""

import importlib
import json

import pytest
from helpers import ROOT, fresh_process

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
pytest.importorskip("accelerate")

from common.hf_setup import byte_tokenizer  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from packing_ops.data import PackedStream, PaddingFreeCollator  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_gpu")
EXAMPLES = [{"input_ids": (ids := [3 + i] * (2 + 7 * i % 29)), "labels": ids} for i in range(40)]
STEPS = 8


def recorded(trainer_class):
    class Recorded(trainer_class):
        def training_step(self, model, inputs, num_items_in_batch=None):
            self.seen = [*getattr(self, "seen", []), (inputs["input_ids"].tolist(), inputs["cu_seq_lens_q"].tolist())]
            return super().training_step(model, inputs, num_items_in_batch)

    return Recorded


def settings(kind, folder, device, **more):
    return kind(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=STEPS // 2,
        use_cpu=device == "cpu",
        bf16=False,
        report_to="none",
        disable_tqdm=True,
        accelerator_config={"dispatch_batches": False},
        **{"per_device_train_batch_size": 1, **more},
    )


def model_on(device):
    model = tiny_model("qwen3", device=device, vocab_size=258)
    assert apply_packing_ops(model)
    return model


def batches_of(stream, batch_size=1):
    loader = DataLoader(stream, batch_size=batch_size, collate_fn=PaddingFreeCollator())
    return [(batch["input_ids"].tolist(), batch["cu_seq_lens_q"].tolist()) for batch in loader]


def stream_of(examples=EXAMPLES, rows=1):
    return PackedStream(examples, 64, buffer=10, rows_per_batch=rows)


@pytest.mark.parametrize(("rows", "num_workers"), [(1, 0), (2, 2)])
def test_batches_of_transformers_trainer(rows, num_workers, device, tmp_path):
    options = {"per_device_train_batch_size": rows, "dataloader_num_workers": num_workers}

    def trainer():
        made = recorded(transformers.Trainer)(
            model=model_on(device),
            args=settings(transformers.TrainingArguments, tmp_path, device, **options),
            data_collator=PaddingFreeCollator(),
            train_dataset=stream_of(rows=rows),
        )
        made.remove_callback(transformers.PrinterCallback)
        return made

    (whole := trainer()).train()
    first, second = stream_of(rows=rows), stream_of(rows=rows)
    second.set_epoch(1)
    assert whole.seen == (batches_of(first, rows) + batches_of(second, rows))[:STEPS]
    (resumed := trainer()).train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    assert resumed.seen == whole.seen[STEPS // 2 :]


@pytest.mark.parametrize("streaming", [False, True])
def test_batches_of_trl_trainer(streaming, device, tmp_path):
    trl = pytest.importorskip("trl")
    texts = datasets.Dataset.from_list([{"text": "word " * (1 + i % 5)} for i in range(30)])
    trainer = recorded(trl.SFTTrainer)(
        model=model_on(device),
        args=settings(trl.SFTConfig, tmp_path, device, max_length=None),
        train_dataset=texts.to_iterable_dataset() if streaming else texts,
        processing_class=byte_tokenizer(),
    )
    prepared = list(trainer.train_dataset)
    trainer.train_dataset = stream_of(trainer.train_dataset)  # what TRL has tokenized
    trainer.data_collator = PaddingFreeCollator()
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    wanted = batches_of(stream_of(prepared))[:STEPS]
    assert len(wanted) == STEPS
    assert trainer.seen == wanted


# --- several processes ---

PROGRAM = "tests/integrations/transformers/train_on_stream.py"


def trained(folder, ranks, *arguments):
    """What each rank wrote down."""
    paths = [ROOT, ROOT / "tests", ROOT / "examples", ROOT / "tests" / "integrations" / "transformers"]
    fresh_process.run_ranks(ranks, ROOT / PROGRAM, *arguments, folder=folder, paths=[str(path) for path in paths])
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def rows_and_program():
    pytest.importorskip("trl")
    program = importlib.import_module("train_on_stream")
    stream = program.stream_of(program.examples_of(program.TEXTS))
    return [[token for example in row for token in example["input_ids"]] for row in stream], program


@pytest.mark.parametrize("kind", ["transformers", "trl"])
def test_two_processes_share_the_rows(kind, tmp_path):
    """Rank r has rows r, r + 2, ..., and both have the same weights."""
    rows, _ = rows_and_program()
    ranks = trained(tmp_path, 2, kind, tmp_path, 6, 0)
    for rank in range(2):
        assert ranks[rank]["seen"] == rows[rank:12:2]
    assert ranks[0]["weights"] == pytest.approx(ranks[1]["weights"])


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) == (5, 17), reason="its Trainer loads none on 'cpu:0'"
)
@pytest.mark.parametrize("kind", ["transformers", "trl"])
def test_two_processes_resume_with_the_rows_that_are_left(kind, tmp_path):
    rows, program = rows_and_program()
    assert len(rows) > 28 > 2 * len(rows) / program.EPOCHS  # past the first pass over the examples
    whole = trained(tmp_path, 2, kind, tmp_path, 14, 0)
    resumed = trained(tmp_path, 2, kind, tmp_path, 14, 0, tmp_path / "checkpoints" / "checkpoint-7")
    for rank in range(2):
        assert whole[rank]["seen"] == rows[rank:28:2]
        assert resumed[rank]["seen"] == rows[14 + rank : 28 : 2]
        assert resumed[rank]["weights"] == pytest.approx(whole[rank]["weights"])


def test_two_processes_with_workers_have_each_row_once(tmp_path):
    rows, _ = rows_and_program()
    steps = len(rows) // 4 * 2  # of two ranks with two workers each, without the last rows
    ranks = trained(tmp_path, 2, "transformers", tmp_path, steps, 2)
    seen = [tokens for rank in ranks for tokens in rank["seen"]]
    assert sorted(seen) == sorted(rows[: 2 * steps])
