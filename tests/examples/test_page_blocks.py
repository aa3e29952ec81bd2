"""The indented Python of the pages runs as it is written, in a program that has what the text around it names."""

import contextlib
import functools
import json
import os
import re
import statistics
import types
from unittest import mock

import pytest
import torch
from helpers import ROOT, processes
from helpers.pages import PAGES, ROWS, block_with, blocks_of, tiny_llama

import packing_ops

# --- data.md ---

TRAINING = {"max_steps": 2, "per_device_train_batch_size": 1, "use_cpu": True, "bf16": False, "report_to": "none"}
TRAINING |= {"save_strategy": "no", "disable_tqdm": True, "accelerator_config": {"dispatch_batches": False}}


def small(block):
    return block.replace("4096", "64").replace("max_steps=1000", "max_steps=2")


def test_a_stream_is_loaded(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    from packing_ops.data import PackedStream, PaddingFreeCollator

    monkeypatch.chdir(tmp_path)
    for number, rows in enumerate((ROWS[:25], ROWS[25:])):
        (tmp_path / f"sft-{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    seen = []

    def loader(*args, **more):
        """In place of torchdata's: the tests of PackedStream resume that one."""
        seen.extend(made := [*torch.utils.data.DataLoader(*args, **more)])
        return made

    names = {"load_dataset": datasets.load_dataset, "PackedStream": PackedStream, "StatefulDataLoader": loader}
    names |= {"PaddingFreeCollator": PaddingFreeCollator, "rank": 0, "world_size": 1, "epochs": 1}
    exec(small(blocks_of("docs/data.md")[1]), names)
    documents = [each for row in seen for each in row["input_ids"][0].split(row["cu_seq_lens_q"].diff().tolist())]
    assert sorted(each.tolist() for each in documents) == sorted(row["input_ids"] for row in ROWS)
    assert len(seen) < len(ROWS) / 2


def rows_trained(trainer, **options):
    seen = []
    trainer.model.model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["input_ids"][0].tolist()), with_kwargs=True
    )
    trainer.train(**options)
    return seen


def rows_of(examples):
    from packing_ops.data import PackedStream

    return [[token for each in row for token in each["input_ids"]] for row in PackedStream(examples, 64)]


def test_trainers_take_a_stream(tmp_path, monkeypatch):
    transformers, trl = pytest.importorskip("transformers"), pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from common.hf_setup import byte_tokenizer

    from packing_ops.data import PackedStream, PaddingFreeCollator
    from packing_ops.integrations.transformers import apply_packing_ops

    monkeypatch.chdir(tmp_path)
    _, _, by_trainer, by_trl, _ = map(small, blocks_of("docs/data.md"))
    apply_packing_ops(model := tiny_llama())
    names = {"PackedStream": PackedStream, "PaddingFreeCollator": PaddingFreeCollator, "model": model, "examples": ROWS}
    names |= {"Trainer": transformers.Trainer, "SFTTrainer": trl.SFTTrainer, "tokenizer": byte_tokenizer()}
    names["TrainingArguments"] = lambda *args, **more: transformers.TrainingArguments(*args, **(TRAINING | more))
    exec(by_trainer, names)
    assert rows_trained(names["trainer"]) == rows_of(ROWS)[:2]
    names["args"] = trl.SFTConfig("out", max_length=None, **TRAINING)
    names["dataset"] = datasets.Dataset.from_list([{"text": "word " * (1 + i % 5)} for i in range(30)])
    exec(by_trl, names)
    tokenized = [*names["trainer"].train_dataset.examples]
    assert rows_trained(names["trainer"]) == rows_of(tokenized)[:2]


def test_a_trainer_whose_rows_a_sampler_fills(device, one_gpu, tmp_path, monkeypatch):
    """Other rows in a second epoch; a run that was stopped in it goes on at its next row."""
    transformers = pytest.importorskip("transformers")
    from packing_ops.data import PackedBatchSampler, PaddingFreeCollator
    from packing_ops.integrations.transformers import apply_packing_ops

    monkeypatch.chdir(tmp_path)
    sampler, collator = (
        PackedBatchSampler([len(row["input_ids"]) for row in ROWS], 64, drop_last=True),
        PaddingFreeCollator(capacity=64),
    )
    wanted = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        wanted += [collator([ROWS[i] for i in batch])["input_ids"][0].tolist() for batch in sampler]
    rows, last = len(sampler), len(wanted)
    assert wanted[:rows] != wanted[rows : 2 * rows]
    names = {}
    exec(block_with("docs/data.md", "class PackedTrainer").replace("8192", "64"), names)

    def trained(steps, **resumed):
        apply_packing_ops(model := tiny_llama())
        options = TRAINING | {"max_steps": steps, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 1}
        options |= {"use_cpu": device == "cpu"}
        trainer = names["PackedTrainer"](model, transformers.TrainingArguments("out", **options), train_dataset=ROWS)
        return rows_trained(trainer, **resumed)

    assert trained(rows + 2) == wanted[: rows + 2]
    assert trained(last, resume_from_checkpoint=True) == wanted[rows + 2 :]


SAMPLES = [
    [("a", [5, 6], [7, 8, 9], 1.0), ("a", [5, 6], [3], 0.0), ("b", [4], [4, 8, 2, 6], 0.0), ("b", [4], [9, 9], 1.0)],
    [
        ("c", [9] * 4, [7] * 4, 2.0),
        ("c", [9] * 4, [5] * 3, 1.0),
        ("c", [9] * 4, [6] * 2, 0.5),
    ],  # three rows for two ranks
]


def loop_of_a_rank(folder, autocast):
    """Parameters and micro-batches, of the model of parallel.md's blocks."""
    os.environ["WORLD_SIZE"] = "2"  # a process of the test
    made = "\n".join(block_with("docs/parallel.md", text) for text in ("starts NCCL", "DistributedDataParallel"))
    made = made.replace('"cuda"', '"cpu"').replace("torch.bfloat16)", f"torch.bfloat16, enabled={autocast})")
    keys = ("uid", "prompt", "answer", "reward")
    names = {"name": folder, "capacity": 8}
    names["rollouts"] = [[dict(zip(keys, sample, strict=True)) for sample in samples] for samples in SAMPLES]
    exec(made, names)
    names["optimizer"] = torch.optim.SGD(names["model"].parameters(), lr=0.1)
    names["rank"] = names["mesh"].get_rank()
    exec(blocks_of("docs/data.md")[4], names)
    return [parameter.detach() for parameter in names["model"].parameters()], names["steps"]


@pytest.mark.parametrize("autocast", [False, True])
def test_rl_loop_on_two_ranks(autocast, tmp_path):
    """Two optimizer steps give the parameters that the samples give one by one, by definition."""
    model, start = tiny_llama("eager"), tiny_llama("eager")
    model.save_pretrained(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for samples in SAMPLES:
        means = {uid: statistics.mean(r for u, *_, r in samples if u == uid) for uid, *_ in samples}
        for uid, prompt, answer, reward in samples:
            logps = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
            of_answer = logps[torch.arange(len(prompt) - 1, len(prompt + answer) - 1), answer]
            (-(reward - means[uid]) * of_answer.sum() / sum(len(a) for _, _, a, _ in samples)).backward()
        optimizer.step()
        optimizer.zero_grad()
    ranks = processes.spawn(functools.partial(loop_of_a_rank, tmp_path, autocast), 2, tmp_path)
    changes = [(a - b).abs().max() for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert max(changes) > 0.1
    limits = {"rtol": 0, "atol": 2e-2} if autocast else {"rtol": 1e-4, "atol": 1e-6}
    assert [[] in steps for _, steps in ranks] == [True, False], "one of them waits with an empty micro-batch"
    for parameters, _ in ranks:
        torch.testing.assert_close(parameters, [p.detach() for p in model.parameters()], **limits)


def test_a_prefix_tree():
    from packing_ops.integrations.transformers import apply_packing_ops

    pack, run, of_art, of_unsloth, bins = blocks_of("docs/prefix-trees.md")
    names = {"torch": torch, "po": packing_ops, "apply_packing_ops": apply_packing_ops}
    block = pack.replace("torch.arange(1000, 2024)", "torch.arange(1000, 2024) % 256").replace("300, 340", "200, 240")
    exec(block, names)
    tree = names["tree"]
    assert f"({tree.num_tokens}, {tree.num_slots})" in block
    assert f"{tree.lengths.tolist()}, {tree.parents.tolist()}" in block
    assert f"all {tree.num_tokens:,} tokens" in block
    assert torch.equal(names["input_ids"][tree.slot_of_token], names["tokens"])
    assert len(names["of_samples"]) == tree.num_tokens
    names["model"] = tiny_llama()
    exec(run, names)
    assert names["logps"].shape == (tree.num_tokens,)
    exec(of_art, names)
    assert names["metadata"].position_ids[[0, 300, 340, 365]].tolist() == [0, 300, 300, 0]
    assert names["out"].shape == (368, 4, 64)
    exec(of_unsloth, names)
    assert names["metadata"].lengths.tolist() == [300, 40, 25, 128, 7]
    exec(bins, names)
    assert names["packed"].num_bins > 1
    assert int(names["one"].num_slots) <= 1120


def test_keys_in_pages():
    paged, cached = blocks_of("docs/pages.md")
    names = {"torch": torch, "po": packing_ops}
    exec(paged, names)
    assert names["seqused_k"].tolist() == [134, 154]
    k, v = (names[name][[4, 0]].flatten(0, 1)[:134] for name in ("k_pages", "v_pages"))
    one, keys = torch.tensor([[0, 1], [0, 134]], dtype=torch.int32)
    assert torch.equal(names["out"][:1], packing_ops.varlen_attention(names["q"][:1], k, v, one, keys))
    exec(cached, names)
    assert names["lengths"].tolist() == [134, 154]
    assert names["cache"][:, 1, 153].any()
    assert not names["cache"][:, 1, 154:].any()


def test_distillation_of_the_page():
    names = {"po": packing_ops, "torch": torch}
    exec(block_with("docs/losses.md", "token_kl"), names)
    assert 0 < names["loss"] < 1
    torch.testing.assert_close(names["by_document"].sum() / (8 + 26 + 3), names["loss"])
    assert names["student"].weight.grad.any()
    assert names["teacher_head"].weight.grad is None


def decoder_of_a_rank(sharded):
    """Gradients of a rank's row, or of the rows of both in one process."""
    text = (ROOT / "docs/decoder.md").read_text()
    names = {"torch": torch, "po": packing_ops}
    exec(re.search(r"```python\n(.*?)\ndevice, capacity =", text, re.S)[1], names)
    torch.manual_seed(1)
    names["model"] = names["Decoder"]()
    rows = [packing_ops.PackedMetadata.from_lengths(lengths) for lengths in ([9, 4, 2], [3, 20])]
    if not sharded:
        losses = []
        for metadata in rows:
            ids = torch.arange(metadata.total) % 7
            found = names["model"](ids, metadata), names["model"].head.weight
            losses.append(packing_ops.chunked_cross_entropy(*found, ids, metadata, num_items_in_batch=12 + 21))
        sum(losses).backward()
        return [each.grad for each in names["model"].parameters()]
    metadata = rows[torch.distributed.get_rank()]
    ids = torch.arange(metadata.total) % 7
    block = block_with("docs/decoder.md", "fully_shard").replace('"cuda"', '"cpu"')
    for done_later in ("optimizer.zero_grad()", "dist.destroy_process_group()"):
        block = block.replace(done_later, "")
    os.environ["WORLD_SIZE"] = "2"  # a process of the test
    losses, names = [], names | {"rows": [(ids, ids, metadata)], "capacity": 512}
    for text in (block, block.replace("torch.bfloat16", "torch.float32")):
        torch.manual_seed(1)
        exec(text, names)
        losses.append(names["loss"].detach())
    torch.testing.assert_close(losses[0], losses[1], rtol=0.01, atol=0)
    assert losses[0] != losses[1]
    return [each.grad.full_tensor() for each in names["model"].parameters()]


def test_a_decoder_in_fsdp2(tmp_path):
    for found in processes.spawn(functools.partial(decoder_of_a_rank, True), 2, tmp_path):
        torch.testing.assert_close(found, decoder_of_a_rank(False))


def test_a_cuda_graph(monkeypatch):
    names, block = {}, block_with("docs/ops.md", "CUDAGraph")

    def replay():
        names["out"], names["gradients"] = names["attention"]()

    if not torch.cuda.is_available():
        block = block.replace('"cuda"', '"cpu"')
        for name, found in (("CUDAGraph", types.SimpleNamespace(replay=replay)), ("Stream", mock.Mock())):
            monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
        monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
        for name in ("graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    exec(block, names)
    row = packing_ops.PackedMetadata.from_lengths([1000, 20], total=1024, device=names["q"].device)
    out = packing_ops.varlen_attention(*(names[name] for name in "qkv"), row)
    assert torch.equal(names["out"], out)
    out.backward(names["gradient"])
    assert all(map(torch.equal, names["gradients"], (names[name].grad for name in "qkv")))


def test_balance_loss_of_the_page():
    model = pytest.importorskip("helpers.hf_models").tiny_model("gpt_oss", vocab_size=64)
    names = {"model": model, "documents": [[5, 6, 7], [9, 8, 9, 3, 4]]}
    exec(block_with("docs/balance-losses.md", "load_balancing_loss"), names)
    assert names["aux_loss"] >= 1
    assert names["sequence_wise"] >= 1


def test_attention_that_is_compiled(fresh_compile):
    names = {"torch": torch, "po": packing_ops}
    block = block_with("docs/ops.md", "mark_dynamic").replace("fullgraph=True", 'fullgraph=True, backend="eager"')
    exec(block, names)
    q, k, v, metadata = (names[name] for name in ("q", "k", "v", "metadata"))
    assert torch.equal(names["out"], packing_ops.varlen_attention(q, k, v, metadata))
    with torch._dynamo.config.patch(error_on_recompile=True):
        other = packing_ops.PackedMetadata.from_lengths([7, 20, 11, 4])
        q, k, v = (rows[: other.total] for rows in (q, k, v))
        names["attention"](q, k, v, other)


def test_a_module_that_is_compiled_never_compiles_again(fresh_compile):
    """As docs/ops.md says: with the row and cu_seqlens marked, forward and backward, also for one document."""

    class OneLayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.qkv = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 96)

        def forward(self, ids, metadata):
            x = self.embedding(ids)
            heads = self.qkv(torch.nn.functional.rms_norm(x, (32,))).unflatten(-1, (3, 2, 16)).unbind(1)
            x = x + packing_ops.varlen_attention(*heads, metadata).flatten(1)
            return packing_ops.chunked_cross_entropy(x, self.embedding.weight, ids, metadata)

    compiled, rows = torch.compile(OneLayer(), fullgraph=True, backend="aot_eager"), ([9, 4], [3, 20, 7], [5], [2, 2])
    for number, lengths in enumerate(rows):
        metadata = packing_ops.PackedMetadata.from_lengths(lengths)
        ids = torch.randint(64, (metadata.total,))
        for tensor in (ids, metadata.cu_seqlens):
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            compiled(ids, metadata).backward()


def test_which_kernels_the_page_asks_for():
    names = {}
    exec(block_with("docs/ops.md", "select_attention_backend").replace('"cuda"', '"cpu"'), names)
    assert names["kernels"] == "forward: cpu, backward: cpu"


def test_flash_attention_2_of_torch(monkeypatch, tmp_path):
    """The model of the page calls torch's kernel, here in plain torch, with the documents of a row."""
    pytest.importorskip("transformers")
    seen = []

    def varlen_attn(q, k, v, documents, *_, scale, **__):
        seen.append(documents.tolist())
        return packing_ops.varlen_attention(q, k, v, documents, softmax_scale=scale)

    monkeypatch.setattr(pytest.importorskip("torch.nn.attention.varlen"), "varlen_attn", varlen_attn)
    tiny_llama().save_pretrained(tmp_path)
    names = {"name": str(tmp_path)}
    exec(block_with("docs/performance-models.md", "torch_fa2"), names)
    ids, metadata = torch.arange(3, 12), packing_ops.PackedMetadata.from_lengths([4, 5])
    row = {"position_ids": metadata.position_ids[None], **metadata.to_transformers()}
    found = names["model"](ids[None], use_cache=False, **row).logits[0]
    assert seen == [[0, 4, 9]] * names["model"].config.num_hidden_layers
    stock = tiny_llama().eval()
    by_itself = [stock(each[None], use_cache=False).logits[0] for each in ids.split([4, 5])]
    torch.testing.assert_close(found, torch.cat(by_itself))


def test_invariant_mode_is_on():
    pytest.importorskip("transformers")
    from packing_ops.integrations.transformers import info

    model = tiny_llama(intermediate_size=64)  # a multiple of 32: bits of the CPU's SiLU depend on the place in a row
    exec(block_with("docs/same-bits.md", "invariant=True"), names := {"model": model})
    assert "invariant" not in names["applied"].skipped
    assert "invariant: off" not in str(info(model))


def test_every_block_is_run():
    """A page with a new block needs a test above, parallel*.md and long-documents.md one in test_page_parallel.py."""
    found = {page: len(blocks) for page in PAGES if (blocks := blocks_of(page))}
    assert found == {
        "README.md": 3,
        "docs/adopt/README.md": 1,
        "docs/balance-losses.md": 1,
        "docs/data.md": 5,
        "docs/decoder.md": 1,
        "docs/long-documents.md": 5,
        "docs/losses.md": 1,
        "docs/memory.md": 2,
        "docs/ops.md": 3,
        "docs/pages.md": 2,
        "docs/parallel-cases.md": 8,
        "docs/parallel.md": 7,
        "docs/performance-models.md": 1,
        "docs/prefix-trees.md": 5,
        "docs/same-bits.md": 1,
        "docs/transformers-models.md": 2,
        "docs/transformers.md": 10,
        "docs/trl.md": 2,
        "docs/vllm.md": 3,
    }


def test_blocks_of_vllm_are_run_with_it():
    """``make test-vllm`` makes the same calls: vLLM is not here."""
    calls = ("attention_backend=", "enable_padding_free", "record(llm, ")
    engine, under_trl, record = (block_with("docs/vllm.md", call) for call in calls)
    names = ("cases.py", "check_vllm.py", "check_vllm_trl.py")
    cases, checks, trl = ((ROOT / "tests" / "engines" / name).read_text() for name in names)
    for call in ("apply_packing_ops(trainer.model, invariant=True)", "enable_padding_free(trainer)"):
        assert call in under_trl
        assert call in trl
    (settings,) = re.findall(r"GRPOConfig\((.*?)^\)", under_trl, re.S | re.M)
    found = dict(re.findall(r"^    (\w+)=(.*?),(?:  #.*)?$", settings, re.M))
    assert found.keys() == {"use_vllm", "vllm_mode", "bf16", "model_init_kwargs"}
    assert all(f'"{name}": {value}' in trl for name, value in found.items())
    assert '"attention_backend": "CUSTOM"' in cases
    assert 'attention_backend="CUSTOM"' in engine
    for call in ("record(llm, ", "po.check_invariance(model, rollout=rollout)"):
        assert call in record
        assert call in checks
