"""TRL: its packing contract kept over the whole dataset, its trainers with packing_ops attention, packed log-probs."""

import functools
import itertools
import sys

import numpy as np
import pytest
import torch
from helpers import cu_seqlens_of, fresh_process, lengths_strategy
from hypothesis import given
from hypothesis import strategies as st

datasets = pytest.importorskip("datasets")
pytest.importorskip("trl")
import trl.data_utils as data_utils  # noqa: E402
import trl.trainer.sft_trainer as sft_trainer  # noqa: E402
from common.hf_setup import byte_tokenizer  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.data import PaddingFreeCollator  # noqa: E402
from packing_ops.integrations import trl as integration  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops  # noqa: E402

STOCK = data_utils.pack_dataset
datasets.disable_progress_bars()


@pytest.fixture(autouse=True)
def stock_trl():
    yield
    integration.revert_pack_dataset()


def rows_of(lengths, dtype="int64"):
    """Every token has a separate value; labels are the token negated, so that columns stay together."""
    ends = np.cumsum([0, *lengths])
    ids = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    feature = datasets.List(datasets.Value(dtype))
    features = datasets.Features(input_ids=feature, labels=feature)
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": [-i for i in ids]}, features=features)


def kept_documents(lengths, seq_length, strategy):
    """What must be in the rows: every document whole, cut, or split."""
    documents, token = [], 0
    for length in lengths:
        ids = list(range(token, token + length))
        token += length
        pieces = [ids[i : i + seq_length] for i in range(0, length, seq_length)]
        documents += pieces[:1] if strategy == "bfd" else pieces
    return documents


def documents_of(row):
    ends = np.cumsum([0, *row["seq_lengths"]]).tolist()
    assert ends[-1] == len(row["input_ids"]) == len(row["labels"])
    assert row["labels"] == [-i for i in row["input_ids"]]
    return [row["input_ids"][a:b] for a, b in itertools.pairwise(ends)]


def check(packed, theirs, lengths, seq_length, strategy):
    documents = [d for row in packed for d in documents_of(row)]
    assert sorted(documents) == sorted(kept_documents(lengths, seq_length, strategy))
    assert all(0 < len(row["input_ids"]) <= seq_length for row in packed)
    assert len(packed) <= len(theirs)
    assert packed.features == theirs.features
    assert packed.data.schema.remove_metadata() == theirs.data.schema.remove_metadata()


@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=40),
    st.integers(1, 16),
    st.sampled_from(["bfd", "bfd_split"]),
    st.integers(1, 8),
)
def test_contract_of_trl(lengths, seq_length, strategy, chunk):
    rows, options = rows_of(lengths), {"batch_size": chunk}
    theirs = STOCK(rows, seq_length, strategy, options)
    check(integration.pack_dataset(rows, seq_length, strategy, options), theirs, lengths, seq_length, strategy)


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_more_rows_than_trl_packs_at_a_time(strategy, dtype):
    lengths = np.random.default_rng(0).lognormal(3, 0.8, 3500).astype(int).clip(1).tolist()
    theirs = STOCK(rows_of(lengths, dtype), 64, strategy)
    ours = integration.pack_dataset(rows_of(lengths, dtype), 64, strategy)
    check(ours, theirs, lengths, 64, strategy)
    assert len(ours) < len(theirs)


def test_parts_are_taken_where_the_whole_needs_more_rows():
    """Best fit over 5 4 4 3 2 2 needs three rows of 10; 5 3 2 and 4 4 2 fill one each."""
    lengths = [5, 3, 2, 4, 4, 2]
    packed = integration.pack_dataset(rows_of(lengths), 10, map_kwargs={"batch_size": 3})
    assert packed["seq_lengths"][:] == [[5, 3, 2], [4, 4, 2]]
    assert len(integration.pack_dataset(rows_of(lengths), 10)) == 3


def test_shuffled_formatted_split_and_in_processes(tmp_path):
    lengths = np.random.default_rng(1).integers(1, 30, 300).tolist()
    rows_of(lengths).save_to_disk(tmp_path / "rows")
    on_disk = datasets.load_from_disk(tmp_path / "rows").shuffle(seed=3).with_format("numpy", dtype=np.int32)
    theirs, ours = (
        STOCK(on_disk, 32),
        integration.pack_dataset(on_disk, 32, map_kwargs={"num_proc": 2, "batch_size": 50}),
    )
    assert ours.format == theirs.format
    assert ours[0]["input_ids"].dtype == theirs[0]["input_ids"].dtype == np.int32
    check(ours.with_format(None), theirs.with_format(None), lengths, 32, "bfd")
    both = integration.pack_dataset(datasets.DatasetDict(train=on_disk, test=on_disk.select(range(7))), 32)
    assert both["train"].with_format(None)[:] == ours.with_format(None)[:]
    assert sum(map(sum, both["test"]["seq_lengths"])) == sum(len(row["input_ids"]) for row in on_disk.select(range(7)))


def test_same_settings_come_from_the_cache(tmp_path):
    rows_of([3, 4, 5]).save_to_disk(tmp_path / "rows")
    first, again, other = (
        integration.pack_dataset(datasets.load_from_disk(tmp_path / "rows"), size) for size in (8, 8, 9)
    )
    assert first.cache_files == again.cache_files != other.cache_files
    assert first._fingerprint != STOCK(datasets.load_from_disk(tmp_path / "rows"), 8)._fingerprint


def test_empty_and_null_rows_are_left_out():
    features = datasets.Features(input_ids=datasets.List(datasets.Value("int64")))
    rows = datasets.Dataset.from_dict({"input_ids": [[], [1, 2], None, [3], []]}, features=features)
    assert integration.pack_dataset(rows, 4)[:] == STOCK(rows, 4)[:]
    for nothing in ([0, 2], []):
        with pytest.raises(ValueError, match=f"got {len(nothing)} rows without any"):
            integration.pack_dataset(rows.select(nothing), 4)


def test_the_rest_is_trls_own():
    rows = rows_of([3, 4, 5])
    assert integration.pack_dataset(rows, 4, "wrapped")[:] == STOCK(rows, 4, "wrapped")[:]
    with pytest.raises(ValueError, match="strategy"):
        integration.pack_dataset(rows, 4, "no such")
    with pytest.warns(UserWarning, match="IterableDataset is streamed"):
        streamed = integration.pack_dataset(rows.to_iterable_dataset(), 8)
    assert list(streamed) == list(STOCK(rows, 8))


def test_bad_columns_are_named():
    rows = rows_of([3, 4])
    with pytest.raises(TypeError, match="expected lists in every column, got int64 in 'uid'"):
        integration.pack_dataset(rows.add_column("uid", [1, 2]), 8)
    with pytest.raises(ValueError, match="other lengths in 'mask' than in 'input_ids'"):
        integration.pack_dataset(rows.add_column("mask", [[1] * 3, [1] * 5]), 8)
    with pytest.raises(ValueError, match="capacity"):
        integration.pack_dataset(rows, 0)


REACHES = """
import trl
import trl.trainer.sft_trainer as sft_trainer
from trl import data_utils
from packing_ops.integrations import trl as integration

stock = data_utils.pack_dataset
assert trl.pack_dataset is sft_trainer.pack_dataset is stock
for _ in range(2):
    assert integration.patch_pack_dataset()
    assert trl.pack_dataset is sft_trainer.pack_dataset is data_utils.pack_dataset is integration.pack_dataset
for _ in range(2):
    integration.revert_pack_dataset()
    assert trl.pack_dataset is sft_trainer.pack_dataset is data_utils.pack_dataset is stock
"""


def test_patch_reaches_every_module_of_trl_and_reverts(tmp_path):
    """In a process where no other test has imported a part of TRL."""
    fresh_process.run("-c", REACHES, folder=tmp_path)


def test_own_pack_dataset_is_the_wrapped_one():
    assert integration.patch_pack_dataset()
    assert integration.pack_dataset(rows_of([3, 4]), 4, "wrapped")[:] == STOCK(rows_of([3, 4]), 4, "wrapped")[:]


def test_another_signature_is_left_alone(monkeypatch):
    def another(dataset, seq_length, packing):
        raise AssertionError

    monkeypatch.setattr(data_utils, "pack_dataset", another)
    with pytest.warns(UserWarning, match=r"got \(dataset, seq_length, packing\); left alone"):
        assert not integration.patch_pack_dataset()
    assert data_utils.pack_dataset is another


def test_without_trl_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "trl.data_utils")
    for call in (integration.register, integration.patch_pack_dataset, lambda: integration.pack_dataset(None, 8)):
        with pytest.raises(ImportError, match="pip install 'trl>=1' datasets"):
            call()


@given(lengths_strategy.filter(sum), st.booleans(), st.sampled_from([torch.bool, torch.int64]))
def test_packed_logps_are_the_sums_of_each_document(device, lengths, average, dtype):
    total = sum(lengths)
    log_probs = torch.randn(1, total - 1, device=device, requires_grad=True)
    mask = (torch.rand(1, total, device=device) < 0.6).to(dtype)
    got = integration.packed_logps(log_probs, mask, cu_seqlens_of(lengths, device), average=average)
    wanted, begin = [], 0
    for length in lengths:
        counted = [log_probs[0, t - 1] for t in range(begin + 1, begin + length) if mask[0, t]]
        wanted.append(sum(counted, log_probs.sum() * 0) / (max(len(counted), 1) if average else 1))
        begin += length
    torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-5, atol=1e-5)
    weights = torch.randn(len(lengths), device=device)
    ours, loops = (torch.autograd.grad((s * weights).sum(), log_probs)[0] for s in (got, torch.stack(wanted)))
    torch.testing.assert_close(ours, loops, rtol=1e-5, atol=1e-5)


def test_packed_logps_want_one_entry_less_than_tokens():
    with pytest.raises(ValueError, match=r"log_probs: expected one entry less than mask=\[1, 5\], got \[1, 5\]"):
        integration.packed_logps(torch.zeros(1, 5), torch.ones(1, 5), cu_seqlens_of([5]))


def trained(model, lengths, tmp_path, collator=None, prepare=None, **options):
    """Losses of three passes over the same documents; what the decoder was given. prepare gets the trainer's model."""
    trl = pytest.importorskip("trl")
    losses, given_kwargs = [], []

    class Recorded(trl.SFTTrainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    rows = rows_of(lengths).map(lambda row: {"input_ids": [i % 256 for i in row["input_ids"]]})
    rows = rows.map(lambda row: {"labels": [-100, *row["input_ids"][1:]]})
    settings = trl.SFTConfig(
        output_dir=str(tmp_path),
        num_train_epochs=3,
        learning_rate=1e-2,
        optim="sgd",
        lr_scheduler_type="constant",
        bf16=False,
        use_cpu=next(model.parameters()).device.type == "cpu",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    trainer = Recorded(model, settings, collator, rows, processing_class=byte_tokenizer())
    model.model.register_forward_pre_hook(lambda _, args, kwargs: given_kwargs.append(kwargs), with_kwargs=True)
    if prepare is not None:
        prepare(trainer.model)
    trainer.train()
    return losses, given_kwargs, trainer


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mode", ["padding_free", "packing", "our collator"])
def test_sft_trainer_trains_the_same_without_padding(device, mode, checkpointing, tmp_path, capfd):
    lengths = [30, 7, 21, 2, 50, 33, 12, 9]
    options = {"gradient_checkpointing": checkpointing, "max_length": 64}
    model = tiny_model("llama", device=device, vocab_size=258)
    wanted, _, _ = trained(model, lengths, tmp_path, per_device_train_batch_size=len(lengths), **options)
    integration.register()
    integration.patch_pack_dataset()
    packed_model = tiny_model("llama", attn_implementation="packing_ops", device=device, vocab_size=258)
    capfd.readouterr()
    options |= {
        "padding_free": {"padding_free": True, "max_length": None},
        "packing": {"packing": True},
        "our collator": {"collator": PaddingFreeCollator()},  # TRL takes none next to the two
    }[mode]
    losses, given_kwargs, trainer = trained(
        packed_model, lengths, tmp_path, per_device_train_batch_size=len(lengths), **options
    )
    said = "".join(capfd.readouterr()).lower()
    assert "flash" not in said
    assert "attn_implementation" not in said
    assert "attention implementation" not in said
    assert len(losses) == 3
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    for ours, stock in zip(packed_model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
    # The collator says where documents end, and the decoder hears it.
    for kwargs in given_kwargs:
        assert sorted(kwargs["cu_seq_lens_q"].diff().tolist()) == sorted(lengths)
        assert (kwargs["max_length_q"], kwargs["max_length_k"]) == (50, 50)
        assert kwargs.get("attention_mask") is None
    if mode == "packing":
        assert len(trainer.train_dataset) == 3
    if mode == "our collator":
        assert all("seq_idx" in kwargs for kwargs in given_kwargs)


@pytest.mark.parametrize("multiple", [None, 64])
def test_sft_trainer_trains_compiled_layers_as_eager_ones(device, multiple, tmp_path, fresh_compile):
    """Packed rows of TRL differ in length; pad_to_multiple_of=max_length makes them equal."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def compiled(model):
        apply_packing_ops(model)
        for layer in model.get_decoder().layers:
            layer.compile(backend=backend)

    integration.patch_pack_dataset()
    lengths = [30, 7, 21, 2, 50, 33, 12, 9, 40, 60]
    options = {"packing": True, "max_length": 64, "per_device_train_batch_size": 1, "pad_to_multiple_of": multiple}
    (wanted, rows, _), (losses, same_rows, _) = (
        trained(tiny_model("llama", device=device, vocab_size=258), lengths, tmp_path, prepare=prepare, **options)
        for prepare in (apply_packing_ops, compiled)
    )
    assert len(losses) == 15
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    assert 0 < len(graphs) <= (2 if multiple else 3)  # the first row, other numbers of documents, of slots
    slots = [row["position_ids"].shape for row in rows]
    assert slots == [row["position_ids"].shape for row in same_rows]
    assert {*slots} == {(1, 64)} if multiple else len({*slots}) > 2
    documents = sorted(n for row in rows for n in row["cu_seq_lens_q"].diff().tolist())
    assert [n for n in documents if n > 1] == sorted(lengths * 3)  # a slot of padding is a document of one token


def test_register_enters_the_list_of_implementations_where_trl_has_one(monkeypatch):
    import trl.trainer.sft_trainer as sft_trainer

    monkeypatch.setattr(sft_trainer, "FLASH_ATTENTION_VARIANTS", {"flash_attention_2"}, raising=False)
    for _ in range(2):
        integration.register()
    assert {"flash_attention_2", "packing_ops"} == sft_trainer.FLASH_ATTENTION_VARIANTS
    integration.revert_registration()
    assert {"flash_attention_2"} == sft_trainer.FLASH_ATTENTION_VARIANTS
    integration.register()  # models of other tests have it


# --- as TRL's documentation has it: a path, packing=True, packing_strategy="bfd" ---


def test_packing_of_texts_end_to_end(device, tmp_path):
    trl = pytest.importorskip("trl")
    folder = tmp_path / "model"
    tiny_model("llama", vocab_size=258).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    integration.register()
    integration.patch_pack_dataset()
    texts = ["ab" * length for length in (30, 7, 21, 2, 45, 33, 12, 9, 40, 3)]
    settings = trl.SFTConfig(
        output_dir=str(tmp_path / "out"),
        packing=True,
        packing_strategy="bfd",
        max_length=64,
        model_init_kwargs={"attn_implementation": "packing_ops", "dtype": "float32"},
        per_device_train_batch_size=2,
        num_train_epochs=4,
        learning_rate=1e-2,
        bf16=False,
        use_cpu=device == "cpu",
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    rows = datasets.Dataset.from_dict({"text": texts})
    trainer = trl.SFTTrainer(str(folder), args=settings, train_dataset=rows)
    assert trainer.model.config._attn_implementation == "packing_ops"
    documents = [document for row in trainer.train_dataset for document in split(row["input_ids"], row["seq_lengths"])]
    assert sorted(map(len, documents)) == sorted(min(len(text) + 1, 64) for text in texts)  # with the end token

    batch = trainer.data_collator(list(trainer.train_dataset))
    batch = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
    loss = trainer.compute_loss(trainer.model, batch)
    stock = tiny_model("llama", vocab_size=258, device=device)
    num_targets = sum(len(document) - 1 for document in documents)
    rows = [torch.tensor([document], device=device) for document in documents]
    wanted = sum(stock(row, labels=row, num_items_in_batch=num_targets).loss for row in rows)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert float(losses[-1]) < float(losses[0])


def split(ids, lengths):
    return [list(piece) for piece in torch.tensor(ids).split(list(lengths))]


# --- DPO (the padding_free option of TRL's trainer is switched off in 1.16) ---


def packed_dpo_logps(model, batch):
    """[2 * pairs] log-probabilities of the completions in TRL's padded batch, by one packed row."""
    mask = batch["attention_mask"]
    metadata = po.PackedMetadata.from_attention_mask(mask)
    columns, *_ = po.unpad_inputs({name: batch[name] for name in ("input_ids", "completion_mask")}, mask)
    ids = columns["input_ids"][None]
    inputs = {"position_ids": metadata.position_ids[None], **metadata.to_transformers()}
    logits = model(ids, **inputs, use_cache=False).logits[:, :-1]
    log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return integration.packed_logps(log_probs, columns["completion_mask"], metadata.cu_seqlens)


def test_dpo_without_padding_is_dpo_with_it(device, tmp_path):
    trl = pytest.importorskip("trl")
    settings = trl.DPOConfig(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=device == "cpu",
        report_to="none",
        disable_tqdm=True,
    )
    pairs = [{"prompt": "p" * i, "chosen": "yes" * (5 - i), "rejected": "no" * 3 * i} for i in (1, 2, 3, 4)]
    trainer = trl.DPOTrainer(
        model=tiny_model("llama", vocab_size=258, device=device),
        ref_model=tiny_model("llama", vocab_size=258, device=device, seed=1),
        args=settings,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=byte_tokenizer(),
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["attention_mask"] == 0).any()
    trainer.model.train()
    wanted = trainer.compute_loss(trainer.model, batch)
    wanted.backward()

    integration.register()
    ours = {"attn_implementation": "packing_ops", "vocab_size": 258, "device": device}
    model, reference = tiny_model("llama", **ours), tiny_model("llama", **ours, seed=1)
    with torch.no_grad():
        of_reference = packed_dpo_logps(reference, batch)
    sums = torch.cat(trainer.compute_ref_log_probs(trainer.ref_model, batch))
    torch.testing.assert_close(of_reference, sums, rtol=1e-5, atol=1e-5)
    chosen, rejected = (packed_dpo_logps(model, batch) - of_reference).chunk(2)
    loss = -torch.nn.functional.logsigmoid(settings.beta * (chosen - rejected)).mean()
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    for (name, parameter), stock in zip(model.named_parameters(), trainer.model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, stock.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_patched_again_over_a_wrapper_of_ours():
    """TRL's is what was there first: the wrapper would call ours, and ours the wrapper. The wrapper stays."""
    integration.patch_pack_dataset()
    ours = data_utils.pack_dataset
    wrapper = data_utils.pack_dataset = functools.wraps(ours)(lambda *args, **kwargs: ours(*args, **kwargs))
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    try:
        for _ in range(2):
            integration.patch_pack_dataset()
            assert data_utils.pack_dataset is sft_trainer.pack_dataset is ours
            assert len(data_utils.pack_dataset(rows, 3, "wrapped")) == 1
            with pytest.warns(UserWarning, match=r"got another library's over it; left alone, and it may call ours"):
                integration.revert_pack_dataset()
            assert (data_utils.pack_dataset, sft_trainer.pack_dataset) == (wrapper, STOCK)
            assert len(wrapper(rows, 3, "wrapped")) == 1
    finally:
        data_utils.pack_dataset = STOCK
