"""The indented Python of docs/parallel*.md and docs/long-documents.md runs as it is written, on CPU processes and two
GPUs.
"""

import functools
import os
import re
import textwrap
import warnings

import pytest
import torch
from helpers import processes
from helpers.pages import ROWS, block_with, blocks_of, tiny_llama

import packing_ops

GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
LIMITS = {"cpu": {"rtol": 1e-4, "atol": 1e-6}, "cuda": {"rtol": 1e-3, "atol": 1e-5}}
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPUS])]


def spawned(device, worker, *arguments, folder):
    """What the worker returns in each of two processes."""
    spawn = processes.spawn if device == "cpu" else processes.spawn_on_gpus
    return spawn(functools.partial(worker, *arguments, device), 2, folder)


def packed_row(device="cpu"):
    torch.manual_seed(1)
    lengths = [5, 7, 4]
    metadata = packing_ops.PackedMetadata.from_lengths(lengths)
    ids = torch.randint(3, 250, (1, 16))
    labels = packing_ops.mask_boundary_labels(ids, metadata)
    row = {
        "input_ids": ids,
        "labels": labels,
        "position_ids": metadata.position_ids[None],
        **metadata.to_transformers(),
    }
    return {name: value.to(device) if torch.is_tensor(value) else value for name, value in row.items()}


def for_two_ranks(block, device, *more):
    """A block of the page for two processes, with steps whose size goes by the gradient."""
    step = "AdamW(model.parameters(), lr=1e-5", "SGD(model.parameters(), lr=0.1"
    for there, here in (('"cuda"', f'"{device}"'), step, *more):
        assert there in block
        block = block.replace(there, here)
    return block


def long_document(folder, device):
    """What the script of one document over 4 GPUs gives on two ranks: its parameters after a step."""
    block = block_with("docs/long-documents.md", "for document in documents")
    block = for_two_ranks(
        block,
        device,
        ("param_dtype=torch.bfloat16", "param_dtype=torch.float32"),
        ("(4,)", "(2,)"),
        ("targets / 4", "targets / 2"),
    )
    names = {"name": folder / "model", "documents": [{"input_ids": packed_row()["input_ids"][0, :13].tolist()}]}
    exec(block, names)
    return [parameter.full_tensor().detach().cpu() for parameter in names["model"].parameters()]


def losses_of_a_rank(folder, device):
    from torch.distributed.fsdp import fully_shard

    block = block_with("docs/long-documents.md", "targets / (dp * sp)")
    names = {"dp": 1, "sp": 2, "model": tiny_llama().to(device), "rows": [packed_row(device)]}
    names["fully_shard"] = fully_shard
    exec(block.replace('"cuda"', f'"{device}"'), names)
    return names["loss"].item(), long_document(folder, device)


@pytest.mark.parametrize("device", DEVICES)
def test_model_on_two_ranks(device, tmp_path):
    whole = tiny_llama("eager")
    whole.save_pretrained(tmp_path / "model")
    losses, stepped = zip(*spawned(device, losses_of_a_rank, tmp_path, folder=tmp_path), strict=True)
    row, alone = packed_row(), []
    for start, end in ((0, 5), (5, 12), (12, 16)):
        ids = row["input_ids"][:, start:end]
        alone.append(whole(ids, labels=ids).loss.item() * (end - start - 1))
    assert sum(losses) / 2 == pytest.approx(sum(alone) / 13, rel=1e-5)
    ids, optimizer = row["input_ids"][:, :13], torch.optim.SGD(whole.parameters(), lr=0.1)
    whole.train()(ids, labels=ids).loss.backward()
    optimizer.step()
    for found in stepped:
        torch.testing.assert_close(found, [each.detach() for each in whole.parameters()], **LIMITS[device])


def in_place_of(line, block, text):
    """The block with the page's other lines in place of the one that begins so."""
    changed = re.sub(
        rf"^( *){re.escape(line)}.*\n", lambda found: textwrap.indent(block + "\n", found[1]), text, flags=re.M
    )
    assert changed != text
    return changed


def of_page(text):
    """The block of the guide, or of its special cases, with this text."""
    pages = "docs/parallel.md", "docs/parallel-cases.md"
    (found,) = (block for page in pages for block in blocks_of(page) if text in block)
    return found


def blocks_for(wrapper, device):
    """(those until the optimizer is made, the loop) of the page, as it says them for DDP, with autocast, adapters, or a
    larger model.
    """
    model = of_page("starts NCCL")
    if "DDP" in wrapper:
        wrapped = of_page("DistributedDataParallel").replace('"cuda"', f'"{device}"')
        wrapped = wrapped.replace("torch.bfloat16", f"torch.bfloat16, enabled={'autocast' in wrapper}")
    else:
        wrapped = of_page("cast_forward_inputs")
        if "mixed" not in wrapper:
            wrapped = wrapped.replace("param_dtype=torch.bfloat16", "param_dtype=torch.float32")
    if "LoRA" in wrapper:
        model = re.sub(r"# (model = get_peft_model.*)   #.*", r"torch.manual_seed(7)\n\1", model).replace("r=16", "r=2")
        model = "from peft import LoraConfig, get_peft_model\n" + model
    if "larger" in wrapper:
        model = of_page("init_empty_weights")
        wrapped += "\n" + of_page("HuggingFaceStorageReader" if "parts" in wrapper else "set_model_state_dict")
    if "prefetch" in wrapper:
        wrapped += "\n" + of_page("set_modules_to_forward_prefetch")
    if "checkpointing" in wrapper:
        model = in_place_of("# model.gradient_checkpointing", "model.gradient_checkpointing_enable()", model + "\n")
    made = "\n".join([model, wrapped, of_page("PackedBatchSampler")])
    made = made.replace('"cuda"', f'"{device}"').replace('int(os.environ["WORLD_SIZE"])', "2")
    loop = of_page("done += len(step)")
    loop = loop.replace('"cuda"', f'"{device}"').replace("model.parameters(), 1.0)", "model.parameters(), 1e6)")
    return made, loop


def parameters_of(names, wrapper):
    parameters = [each.detach() for each in names["model"].parameters()]
    return [(each if "DDP" in wrapper else each.full_tensor()).cpu() for each in parameters]


def parameters_of_a_rank(folder, wrapper, device):
    """Parameters and the loss to log."""
    made, loop = blocks_for(wrapper, device)
    names = {"name": folder / "model", "folder": str(folder / "model"), "dataset": ROWS, "capacity": 64, "epochs": 1}
    names["rows_per_step"] = 2 if "two rows" in wrapper else 1
    exec(made.replace("AdamW(model.parameters(), lr=1e-5", "SGD(model.parameters(), lr=0.1"), names)
    exec(loop, names)
    for saved in ("full_state_dict=True, cpu_offload", "HuggingFaceStorageWriter")[: SAVED.get(wrapper, 0)]:
        out = "joined" if "Hugging" in saved else "out"
        exec(of_page(saved).replace('"out"', repr(str(folder / out))), names)
    return parameters_of(names, wrapper), names["mean"].item()


WRAPPERS = ["FSDP2", "DDP", "DDP, autocast", "FSDP2, LoRA", "DDP, LoRA", "FSDP2, a larger model", "FSDP2, larger, tied"]
WRAPPERS += ["FSDP2, larger, in parts", "FSDP2, larger, in parts, tied"]
WRAPPERS += ["FSDP2, two rows, prefetch", "DDP, two rows", "FSDP2, mixed, checkpointing"]
SAVED = {"FSDP2": 2, "DDP": 1, "FSDP2, LoRA": 1, "DDP, LoRA": 1, "FSDP2, larger, in parts, tied": 2}  # ways


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_rows_of_each_rank_on_two_ranks(wrapper, device, tmp_path):
    """An epoch gives the parameters that documents give one by one, averaged over the targets of both ranks."""
    from packing_ops.data import PackedBatchSampler

    model = tiny_llama("eager", tie_word_embeddings="tied" in wrapper)
    model.save_pretrained(tmp_path / "model")
    if "parts" in wrapper:  # of files in bfloat16, as most are
        model.bfloat16().save_pretrained(tmp_path / "model")
        model = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    if "LoRA" in wrapper:
        peft = pytest.importorskip("peft")
        torch.manual_seed(7)
        adapters = peft.LoraConfig(r=2, target_modules="all-linear")
        model = peft.get_peft_model(model, adapters)
    start = [each.detach().clone() for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = [len(row["input_ids"]) for row in ROWS]
    samplers = [[*PackedBatchSampler(lengths, 64, rank, 2, drop_last=True)] for rank in range(2)]
    of_step = 2 if "two rows" in wrapper else 1
    assert len(samplers[0]) > 3
    for first in range(0, len(samplers[0]), of_step):
        rows = [row for rank in samplers for row in rank[first : first + of_step]]
        documents = [torch.tensor([ROWS[i]["input_ids"]]) for row in rows for i in row]
        losses = [model(ids, labels=ids).loss * (ids.numel() - 1) for ids in documents]
        mean = sum(losses) / sum(ids.numel() - 1 for ids in documents)
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
    wanted = [each.detach() for each in model.parameters()]
    assert sum((a - b).abs().sum() for a, b in zip(start, wanted, strict=True)) > 1
    in_bf16 = "autocast" in wrapper or "mixed" in wrapper
    limits = {"rtol": 0, "atol": 2e-2} if in_bf16 else LIMITS[device]
    for found, logged in spawned(device, parameters_of_a_rank, tmp_path, wrapper, folder=tmp_path):
        assert logged == pytest.approx(mean.item(), rel=1e-2 if in_bf16 else LIMITS[device]["rtol"] / 10)
        assert all(each.dtype == torch.float32 for each in found)
        torch.testing.assert_close(found, wanted, **limits)
        assert in_bf16 == (max((a - b).abs().max() for a, b in zip(found, wanted, strict=True)) > 1e-4)
    for out in ("out", "joined")[: SAVED.get(wrapper, 0)]:
        if "LoRA" in wrapper:
            saved = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path / out)
        else:
            saved = type(model).from_pretrained(tmp_path / out, dtype=torch.float32)
        torch.testing.assert_close([each.detach() for each in saved.parameters()], wanted, **limits)


def resumed_rank(folder, wrapper):
    """Parameters of a run that saves as it goes, and of one that begins at one of its checkpoints."""
    made, loop = blocks_for(wrapper, "cpu")
    loop = in_place_of("# if done", 'save(f"{folder}/{epoch}-{done}", done)', loop + "\n")
    found = []
    for resume in (False, True):
        names = {"name": folder / "model", "dataset": ROWS, "capacity": 64, "epochs": 2, "rows_per_step": 2}
        names["folder"] = folder / f"checkpoints {resume}"
        exec("\n".join([made.replace("lr=1e-5", "lr=1e-2"), of_page("def load")]), names)
        if resume:
            names["load"](folder / "checkpoints False" / "1-2")
        exec(loop, names)
        found.append(parameters_of(names, wrapper))
    steps = [len(list((folder / f"checkpoints {resume}").iterdir())) for resume in (False, True)]
    return found, steps


@pytest.mark.parametrize("wrapper", ["FSDP2", "DDP", "FSDP2, LoRA"])
def test_a_resumed_run_has_the_bits_of_the_run_that_went_on(wrapper, tmp_path):
    if "LoRA" in wrapper:
        pytest.importorskip("peft")
    tiny_llama().save_pretrained(tmp_path / "model")
    for (went_on, resumed), (steps, later) in processes.spawn(
        functools.partial(resumed_rank, tmp_path, wrapper), 2, tmp_path
    ):
        assert later == steps // 2 - 1 > 1  # of the second epoch all but the first
        assert all(map(torch.equal, went_on, resumed))


def sample_of(prompt, answer, advantage):
    tokens = [3 + (7 * prompt + answer * j) % 250 for j in range(answer)]
    return {"input_ids": [9] * prompt + tokens, "labels": [-100] * prompt + tokens, "advantage": advantage}


SAMPLES = [sample_of(3, 4, 1.0), sample_of(3, 9, -1.0), sample_of(12, 20, 0.5)]
SAMPLES += [sample_of(12, 11, -0.5), sample_of(5, 30, 2.0), sample_of(5, 20, -2.0)]


def policy_of_a_rank(folder, dtype, rollouts, updates):
    """Parameters after the updates; whether the rank has a row without a sample."""
    block = "\n".join([of_page("starts NCCL"), of_page("cast_forward_inputs"), of_page("register_fsdp_forward_method")])
    block = block.replace("param_dtype=torch.bfloat16", f"param_dtype={dtype}").replace("lr=1e-6", "lr=1e-5")
    more = ('int(os.environ["WORLD_SIZE"])', "2"), ("model.parameters(), 1.0)", "model.parameters(), 1e6)")
    names = {"name": folder / "model", "rollouts": rollouts, "capacity": 36, "updates": updates}
    exec(for_two_ranks(block, "cpu", *more), names)
    return parameters_of(names, "FSDP2"), not all(names["mine"])


def policy_alone(dtype, rollouts, updates):
    """Parameters and ratios of samples one by one, in stock code."""
    model = tiny_llama("eager").train()
    optimizer, ratios = torch.optim.SGD(model.parameters(), lr=0.1), []

    def logps(sample):
        ids, start = torch.tensor(sample["input_ids"]), sample["labels"].count(-100)
        parameters = {name: each.to(dtype) for name, each in model.named_parameters()}
        logits = torch.func.functional_call(model, parameters, (ids[None],)).logits[0, :-1].float()
        return logits.log_softmax(-1).gather(1, ids[1:, None])[start - 1 :, 0]

    for samples in rollouts:
        old = [logps(sample).detach() for sample in samples]
        for _ in range(updates):
            losses = []
            for sample, before in zip(samples, old, strict=True):
                ratios.append(ratio := (logps(sample) - before).exp())
                losses.append(-torch.minimum(ratio * sample["advantage"], ratio.clamp(0.8, 1.2) * sample["advantage"]))
            torch.cat(losses).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [each.detach() for each in model.parameters()], torch.cat(ratios).detach()


def test_grpo_on_two_ranks(tmp_path):
    """Two updates for each list of samples give the parameters of samples one by one."""
    tiny_llama().save_pretrained(tmp_path / "model")
    setting = torch.float32, [SAMPLES[:3], SAMPLES[3:]], 2
    wanted, ratios = policy_alone(*setting)
    assert (ratios - 1).abs().max() > 0.2  # some are clipped
    ranks = processes.spawn(functools.partial(policy_of_a_rank, tmp_path, *setting), 2, tmp_path)
    for found, _ in ranks:
        torch.testing.assert_close(found, wanted, **LIMITS["cpu"])
    assert any(without for _, without in ranks)


def test_grpo_in_mixed_precision_on_two_ranks(tmp_path):
    """A step's error is at most twice the one of stock code in bfloat16."""
    tiny_llama().save_pretrained(tmp_path / "model")
    exact, stock = (policy_alone(dtype, [SAMPLES[:3]], 1)[0] for dtype in (torch.float32, torch.bfloat16))

    def error(found):
        return sum((a - b).square().sum() for a, b in zip(found, exact, strict=True)).sqrt()

    setting = torch.bfloat16, [SAMPLES[:3]], 1
    for found, _ in processes.spawn(functools.partial(policy_of_a_rank, tmp_path, *setting), 2, tmp_path):
        assert 0 < error(found) <= 2 * error(stock)


def tensor_parallel_rank(folder, device):
    """Whether weights are sharded, parameters after the steps, and the loss with them."""
    transformers = pytest.importorskip("transformers")
    from packing_ops.integrations.transformers import apply_packing_ops

    rank = str(torch.distributed.get_rank())
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"})  # as torchrun does
    block = for_two_ranks(of_page('tp_plan="auto"'), device)
    names = {"name": folder, "torch": torch, "rows": [packed_row(device)] * STEPS[device]}
    names["init_device_mesh"] = torch.distributed.device_mesh.init_device_mesh
    names |= {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "apply_packing_ops": apply_packing_ops}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # transformers gives it for arguments that go
        exec(block, names)
    model, weight = names["model"], names["model"].lm_head.weight
    found = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    found = [each.detach().cpu() for each in found]
    loss = model(**packed_row(device), use_cache=False).loss.item()
    return weight.to_local().shape != weight.shape, found, loss


STEPS = {"cpu": 2, "cuda": 0}  # of the optimizer: on GPUs only the loss was compared


@pytest.mark.parametrize("device", DEVICES)
def test_tensor_parallel_model_on_two_ranks(device, tmp_path):
    from packing_ops.integrations.transformers import apply_packing_ops

    model = tiny_llama()
    model.save_pretrained(tmp_path)
    apply_packing_ops(model)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    for _ in range(STEPS[device]):
        model(**packed_row(), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = model(**packed_row(), use_cache=False).loss.item()
    for sharded, parameters, found in spawned(device, tensor_parallel_rank, tmp_path, folder=tmp_path):
        assert sharded
        torch.testing.assert_close(parameters, [each.detach() for each in model.parameters()], **LIMITS[device])
        assert found == pytest.approx(loss, rel=1e-5)


def attention_of_a_rank():
    from packing_ops.parallel import shard_packed, sharded_loss, ulysses_attention

    torch.manual_seed(torch.distributed.get_rank())
    q, k, v = (torch.randn(8, 2, 8, requires_grad=True) for _ in range(3))
    row = packed_row()
    names = {"shard_packed": shard_packed, "sharded_loss": sharded_loss, "ulysses_attention": ulysses_attention}
    names |= {"ids": row["input_ids"][0], "labels": row["labels"][0], "q": q, "k": k, "v": v, "world_size": 2}
    names |= {"metadata": packing_ops.PackedMetadata.from_lengths([5, 7, 4]), "losses": torch.ones(8)}
    names["group"] = torch.distributed.group.WORLD
    block = block_with("docs/long-documents.md", "sharded_loss")
    exec(block, names)
    return [each.detach() for each in (q, k, v, names["out"], names["loss"])]


def planned_loss_of_a_rank():
    """The sum over the ranks of what the plan's block gives, and the mean over the targets of the separate
    documents; whether some rank has no document in a step.
    """
    texts = [{"input_ids": [3 + i] * length} for i, length in enumerate((30, 29, 28, 9, 5))]
    model, alone, found = tiny_llama(), tiny_llama("eager"), []
    model.register_forward_hook(lambda _, __, output: found.append(output.loss.detach()))
    names = {"model": model, "world_size": 4, "capacity": 16, "examples": texts}
    names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.0)
    exec(block_with("docs/long-documents.md", "plan_step").replace("max_size=8", "max_size=2"), names)
    assert any(not share.documents for shares in names["plan"].steps for share in shares)
    total = torch.stack(found).sum()
    torch.distributed.all_reduce(total)
    ids = [torch.tensor([text["input_ids"]]) for text in texts]
    wanted = sum(alone(each, labels=each).loss.detach() * (each.numel() - 1) for each in ids) / 96
    return (total / 4).item(), wanted.item()


def test_a_plan_on_four_ranks(tmp_path):
    for found, wanted in processes.spawn(planned_loss_of_a_rank, 4, tmp_path):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_attention_on_two_ranks(tmp_path):
    ranks = processes.spawn(attention_of_a_rank, 2, tmp_path)
    q, k, v, out = (torch.cat(parts) for parts in list(zip(*ranks, strict=True))[:4])
    metadata = packing_ops.PackedMetadata.from_lengths([5, 7, 4])
    torch.testing.assert_close(out, packing_ops.varlen_attention(q, k, v, metadata, causal=True))
    assert sum(loss.item() for *_, loss in ranks) / 2 == pytest.approx(1)


def tree_over(group):
    """log-probs, and the gradient of the embedding for a loss that is divided by the ranks."""
    from packing_ops.parallel import shard_packed, ulysses_attention, unshard

    torch.manual_seed(3)
    embedding = torch.randn(300, 4, 8, requires_grad=True)
    prompt = torch.arange(140)

    def model(input_ids, position_ids, metadata):
        heads = embedding[input_ids] + position_ids[:, None, None] / 100
        return ulysses_attention(heads, heads[:, :2], heads[:, 2:], metadata, group).flatten(1)

    names = {"po": packing_ops, "shard_packed": shard_packed, "unshard": unshard, "model": model, "group": group}
    names |= {"tokens": torch.cat([prompt, torch.arange(200, 209), prompt, torch.arange(250, 256)])}
    names |= {"cu_seqlens": torch.tensor([0, 149, 295]), "weight": torch.randn(300, 32)}
    exec(block_with("docs/long-documents.md", "pack_prefix_tree"), names)
    (names["logps"].square().sum() / group.size()).backward()
    return names["logps"].detach(), embedding.grad


def tree_of_a_rank():
    world = torch.distributed.group.WORLD
    alone = [torch.distributed.new_group([rank]) for rank in range(2)][world.rank()]
    return tree_over(world), tree_over(alone)


def test_tree_on_two_ranks(tmp_path):
    ((logps, first), (expected, whole)), ((others, second), _) = processes.spawn(tree_of_a_rank, 2, tmp_path)
    assert torch.equal(logps, expected)
    assert torch.equal(others, expected)
    assert whole.abs().max() > 0.1
    torch.testing.assert_close(first + second, whole)


def sft_of_a_rank(folder, wrapper):
    """What wraps the model, and the parameters, of a run that saves as it goes and of one that resumes it."""
    import datasets
    import trl
    from common.hf_setup import byte_tokenizer

    processes.as_launched()
    os.chdir(folder)
    block = re.sub("^from (datasets|trl) import.*\n", "", of_page("SFTConfig("), flags=re.M)
    block = block.replace("Qwen/Qwen3-8B", str(folder / "model"))
    if wrapper == "DDP":
        block = re.sub(r"^wrapped = {.*?^}", "wrapped = {}", block, flags=re.S | re.M)
    fixed = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "max_length": 64}
    fixed |= {"max_steps": 4, "save_steps": 2, "learning_rate": 1e-2}
    names = {
        "load_dataset": lambda *_, **__: datasets.Dataset.from_list(ROWS),
        "SFTConfig": lambda out, **given: trl.SFTConfig(out, **given | fixed),
        "SFTTrainer": functools.partial(trl.SFTTrainer, processing_class=byte_tokenizer()),
    }
    found = []
    for start, out in (("train()", "trained"), ('train(resume_from_checkpoint="out/checkpoint-2")', "resumed")):
        exec(block.replace("train()   #", f"{start}   #").replace("out/trained", f"out/{out}"), names)
        model = names["trainer"].model_wrapped
        found.append((type(model).__name__, parameters_of({"model": model}, wrapper)))
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}  # the files are in bfloat16
    return found


@pytest.mark.parametrize("wrapper", ["FSDP2", "DDP"])
def test_sft_trainer_saves_and_resumes(wrapper, tmp_path):
    """from_pretrained loads what the trainer saves, its checkpoints too; a resumed run has the bits of the first."""
    # In DDP 5.17 loads the optimizer's state to cpu:0, which torch does not know.
    transformers = pytest.importorskip("transformers", "5.23" if wrapper == "DDP" else None)
    pytest.importorskip("trl")
    tiny_llama().bfloat16().save_pretrained(tmp_path / "model")

    def is_in(folder, parameters):
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=torch.float32)
        return all(map(torch.equal, parameters, saved.parameters()))

    worker = functools.partial(sft_of_a_rank, tmp_path, wrapper)
    for (name, wanted), (_, resumed) in processes.spawn(worker, 2, tmp_path):
        assert name == {"FSDP2": "FSDPLlamaForCausalLM", "DDP": "DistributedDataParallel"}[wrapper]
        assert all(map(torch.equal, wanted, resumed))
        assert is_in("out/trained", wanted)
        assert is_in("out/resumed", wanted)
        assert is_in("out/checkpoint-4", wanted)
        assert not is_in("out/checkpoint-2", wanted)
