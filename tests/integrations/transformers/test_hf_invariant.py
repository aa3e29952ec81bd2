"""apply_packing_ops(model, invariant=True): whole tiny models, documents separate and packed, and what is refused by a
sentence.
"""

import copy
import gc
import pickle
import warnings

import pytest
import torch
from helpers import assert_same, rows_of_products
from helpers.hf_models import tiny_model
from helpers.processes import spawn_on_gpus
from hypothesis import given, settings
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.invariance import mode

transformers = pytest.importorskip("transformers")
from packing_ops.integrations.transformers import apply_packing_ops, info, revert_packing_ops  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 128}
_MORE = {
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0},
    **{"moe_intermediate_size": 32, "num_experts_per_tok": 2},
}
DEEPSEEK = {
    **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"n_routed_experts": 32, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1},
    **{"num_key_value_heads": 4, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 64},
}
QWEN3_NEXT = {
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    **{"num_experts": 32, "shared_expert_intermediate_size": 32, "num_key_value_heads": 2, "head_dim": 16},
    **{"layer_types": ["linear_attention", "full_attention"], "vocab_size": 128, "hidden_size": 64},
}
_HEADS = {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "attn_layer_indices": [1], **_HEADS}
NEMOTRON_H = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1, **_HEADS}
NEMOTRON_H["layers_block_type"] = ["mamba", "attention"]
OTHERS = {"deepseek_v3": DEEPSEEK, "qwen3_next": QWEN3_NEXT, "bamba": BAMBA, "nemotron_h": NEMOTRON_H}


@pytest.fixture(autouse=True)
def the_mode_ends(one_thread):
    yield
    if po.is_invariant():  # a model in a reference cycle may hold the mode
        gc.collect()
    assert not po.is_invariant()


def model_of(family, **more):
    """Documents of up to 80 tokens: check_invariance tries no more rows than that."""
    more = {"max_position_embeddings": 80, **more}
    if family in OTHERS:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(family, **{**_MORE, **OTHERS[family], **more})
        return transformers.AutoModelForCausalLM.from_config(config)
    return tiny_model(family, **SIZES, **more)


def differs(found):
    return [layer.name for layer in found.layers if layer.packs or layer.prefixes]


def assert_products_of_16_rows(model):
    """Forward and for the gradient of the embeddings: which numbers of rows have other bits depends on the CPU."""
    model.requires_grad_(False)
    for lengths in ([1], [5, 12], [16, 17, 30]):
        documents = [torch.randint(1, 128, (n,)) for n in lengths]
        found = rows_of_products(lambda documents=documents: gradients_of_embeddings(model, *documents))
        assert len(found) > 20
        assert set(found) == {mode.ROWS}


CLAIMED = [("llama", {}), ("qwen3", {}), ("gemma3", {}), ("deepseek_v3", {})]
CLAIMED += [("gpt_oss", {"experts_implementation": name}) for name in ("eager", "batched_mm", "grouped_mm")]


@pytest.mark.parametrize(("family", "more"), CLAIMED, ids=[" ".join([f, *m.values()]) for f, m in CLAIMED])
def test_whole_families(family, more):
    """Hidden states, log-probabilities and gradients of the embeddings: in separate rows, packed and as prefixes."""
    # batched_mm copies the weights of an expert for every token.
    longest = 80 if "batched_mm" in more.values() else 256
    model = model_of(family, max_position_embeddings=longest, **more)
    assert apply_packing_ops(model, invariant=True).skipped == {}
    assert po.is_invariant()
    found = po.check_invariance(model)
    assert found.why_not() == []
    assert found.packs and found.prefixes  # noqa: PT018
    names = [layer.name for layer in found.layers]
    assert {"token_logps", "gradient of the embeddings", "lm_head", ""} <= {*names}
    assert_products_of_16_rows(model)
    revert_packing_ops(model)
    assert not po.is_invariant()


def test_a_check_without_the_mode_looks_at_the_same_layers():
    model = model_of("llama", num_hidden_layers=1)
    apply_packing_ops(model)
    stock = po.check_invariance(model)
    assert not stock.active
    apply_packing_ops(model, invariant=True)
    assert [layer.name for layer in po.check_invariance(model).layers] == [layer.name for layer in stock.layers]
    revert_packing_ops(model)


@pytest.mark.parametrize("family", ["llama", "qwen3", "deepseek_v3"])
@torch.no_grad()
def test_steps_of_generate_have_the_bits_of_the_forward(family, device):
    device = "cpu" if family == "deepseek_v3" else device  # its experts were tried there alone
    model = model_of(family).eval().to(device, torch.bfloat16)
    assert apply_packing_ops(model, invariant=True).skipped == {}
    ids = torch.randint(3, 60, (2, 75), generator=torch.Generator().manual_seed(0)).to(device)
    whole, cache = model(ids, use_cache=False).logits, model(ids[:, :60], use_cache=True).past_key_values
    for t in range(60, 75):
        assert_same(model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits[:, 0], whole[:, t])
    options = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0, "output_logits": True}
    found = model.generate(ids[:, :9], max_new_tokens=6, return_dict_in_generate=True, **options)
    wanted = model(found.sequences, use_cache=False).logits[:, 8:-1]
    assert_same(torch.stack(found.logits, 1), wanted.to(found.logits[0].dtype))
    revert_packing_ops(model)


def batch_of(how, documents):
    """The documents as a batch, and what takes each one's rows out of its results."""
    lengths = [len(document) for document in documents]
    told = po.PackedMetadata.from_lengths(lengths)
    positions = told.position_ids[None]
    row = {"input_ids": torch.cat(documents)[None], "position_ids": positions, "use_cache": False}
    if how == "padded":
        ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
        mask = torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]
        padded = {"input_ids": ids, "attention_mask": mask.long(), "use_cache": False}
        return padded, lambda out: [rows[:length] for rows, length in zip(out, lengths, strict=True)]
    if how == "cu_seq_lens_q":
        row |= told.to_transformers()
    if how == "attention_mask":
        row["attention_mask"] = told.seq_idx[None] + 1
    return row, lambda out: out[0].split(lengths)


lengths_of_some = st.lists(st.integers(1, 40), max_size=3)


@pytest.mark.parametrize(("family", "more"), CLAIMED[:-2], ids=[" ".join([f, *m.values()]) for f, m in CLAIMED[:-2]])
@torch.no_grad()
def test_drawn_documents_prefixes_and_neighbours(family, more):
    """Logits of a document and of its prefix, in rows and micro-batches with any others, are the same as in a separate
    row.
    """
    model = model_of(family, **more)
    assert apply_packing_ops(model, invariant=True).skipped == {}
    compared = 0

    @given(
        length=st.integers(1, 80),
        share=st.floats(0, 1),
        before=lengths_of_some,
        after=lengths_of_some,
        how=st.sampled_from(["position_ids", "cu_seq_lens_q", "attention_mask", "padded"]),
        seed=st.integers(0, 9),
    )
    @settings(max_examples=12)
    def holds(length, share, before, after, how, seed):
        nonlocal compared
        numbers = torch.Generator().manual_seed(seed)
        document = torch.randint(1, 128, (length,), generator=numbers)
        others = [torch.randint(1, 128, (n,), generator=numbers) for n in [*before, *after]]
        prefix = document[: max(1, round(share * length))]
        alone = model(document[None], use_cache=False).logits[0]
        for piece in (document, prefix):
            row, rows_of = batch_of(how, [*others[: len(before)], piece, *others[len(before) :]])
            assert_same(rows_of(model(**row).logits)[len(before)], alone[: len(piece)])
            compared += len(piece)

    holds()
    assert compared > 100
    revert_packing_ops(model)


def test_a_stock_layer_that_breaks_it_is_named():
    """The gated delta rule of transformers pads a row to whole chunks of 64 for the CPU."""
    model = model_of("qwen3_next")
    with pytest.warns(
        UserWarning, match=r"invariant of Qwen3NextForCausalLM is not claimed: model\.layers\.0\.linear_attn"
    ):
        applied = apply_packing_ops(model, invariant=True, linear_attention=False)
    assert "Qwen3NextGatedDeltaNet" in applied.skipped["invariant"]
    assert "model.layers.0.linear_attn" in differs(po.check_invariance(model, gradients=False))
    assert not po.is_invariant()  # nothing is left of a mode that is not claimed
    assert not any("_by_blocks" in repr(getattr(module.forward, "func", "")) for module in model.modules())
    assert "invariant: off; apply_packing_ops(model, invariant=True) turns it on" in info(model)
    revert_packing_ops(model)


@pytest.mark.gpu
def test_a_hybrid_is_proven():
    """Its convolutions and gated delta rules are ours, whose chunks are counted from a document's first token."""
    if not torch.cuda.is_available():
        pytest.skip("exp of the CPU rounds otherwise in the last elements of a thread's part")
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "linear_num_value_heads": 2, "linear_num_key_heads": 2}
    config = transformers.Qwen3_5TextConfig(**sizes, **heads, linear_key_head_dim=64, linear_value_head_dim=64)
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM._from_config(config, dtype=torch.bfloat16).cuda().eval()
    applied = apply_packing_ops(model, invariant=True, strict=True)
    assert applied.linear_attention == 3
    assert po.check_invariance(model, gradients=False).packs
    revert_packing_ops(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["bamba", "nemotron_h"])
def test_mamba2_is_proven(family, dtype, device):
    """On the CPU too: the scan makes its steps itself, one token after the other. float32 on a GPU is refused."""
    model = model_of(family).to(device, dtype)
    if device == "cuda" and dtype == torch.float32:
        with pytest.raises(ValueError, match=r"invariant: model\.layers\."):
            apply_packing_ops(model, invariant=True, strict=True, rope=family == "bamba")
        return
    applied = apply_packing_ops(model, invariant=True, strict=True, rope=family == "bamba")
    assert applied.linear_attention == 1
    assert po.check_invariance(model, gradients=False).packs
    revert_packing_ops(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_values_are_those_without_the_mode_and_come_back():
    model = model_of("qwen3")
    ids = torch.randint(128, (1, 7))
    apply_packing_ops(model)
    before = model(ids).logits
    apply_packing_ops(model, invariant=True)
    torch.testing.assert_close(model(ids).logits, before)
    revert_packing_ops(model)
    apply_packing_ops(model)
    assert_same(model(ids).logits, before)
    assert "forward" not in vars(model.lm_head)


def test_twice_is_once_and_a_copy_has_it_too():
    model = model_of("llama", num_hidden_layers=1)
    apply_packing_ops(model, invariant=True)
    apply_packing_ops(model, invariant=True)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    revert_packing_ops(model)
    for other in copies:
        assert po.is_invariant()
        assert po.check_invariance(other, gradients=False).packs
    other = None
    copies.clear()
    gc.collect()
    assert not po.is_invariant()


def test_strict_and_what_cannot_be_claimed():
    model = model_of("llama", attention_dropout=0.1).eval()
    with pytest.raises(ValueError, match=r"invariant: model\.layers\.0\.self_attn: dropout of 0\.1 .*, and 1 more"):
        apply_packing_ops(model, invariant=True, strict=True)
    assert model.config._attn_implementation == "eager"
    with pytest.warns(UserWarning, match="is not claimed"):
        assert "invariant" in apply_packing_ops(model, invariant=True).skipped
    assert not po.is_invariant()
    broken = model_of("qwen3_next")
    with pytest.raises(ValueError, match="linear_attn"):
        apply_packing_ops(broken, invariant=True, strict=True, linear_attention=False)
    assert not po.is_invariant()
    assert broken.config._attn_implementation != "packing_ops"


def test_a_model_that_cannot_be_run_is_not_claimed():
    model = model_of("llama").to("meta")
    with pytest.warns(UserWarning, match="meta device: call packing_ops.check_invariance"):
        apply_packing_ops(model, invariant=True)
    assert "invariant: on, but not claimed: its parameters are on the meta device: call packing_ops.check" in info(
        model
    )
    assert "invariant: on, but not claimed: its parameters" in info(copy.deepcopy(model))
    assert po.is_invariant()
    revert_packing_ops(model)


# --- around the model ---


def claimed(model, **options):
    found = po.check_invariance(model, **options)
    assert found.packs, found.why_not()
    assert found.prefixes, found.why_not()
    return found


def on(device, model):  # float32 products are not claimed on a GPU
    return model.to(device, torch.float32 if device == "cpu" else torch.bfloat16)


def test_lora(device):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = on(device, peft.get_peft_model(model_of("qwen3", num_hidden_layers=1), config))
    assert apply_packing_ops(model, invariant=True).skipped == {}
    names = [layer.name for layer in claimed(model).layers]
    assert any("lora_A" in name for name in names)
    revert_packing_ops(model)


def test_lora_with_dropout_is_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model_of("llama"), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
    with pytest.warns(UserWarning, match=r"lora_dropout.*dropout of 0\.1"):
        apply_packing_ops(model, invariant=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_types(dtype):
    model = model_of("qwen3", num_hidden_layers=1).to(dtype)
    assert apply_packing_ops(model, invariant=True, rms_norm=True).skipped == {}
    claimed(model)


def test_autocast(device):
    model = on(device, model_of("llama", num_hidden_layers=1))
    apply_packing_ops(model, invariant=True)
    with torch.autocast(device, torch.bfloat16):
        claimed(model)


def gradients_of_embeddings(model, *documents):
    """Of documents ``[length]`` in one row, or of ``[1, length]``."""
    positions = torch.cat([torch.arange(ids.shape[-1], device=ids.device) for ids in documents])[None]
    embedded = model.get_input_embeddings()(torch.cat(documents, -1).reshape(1, -1)).detach().requires_grad_()
    model(inputs_embeds=embedded, position_ids=positions, use_cache=False).logits.square().sum().backward()
    return embedded.grad


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
def test_gradient_checkpointing(reentrant, device):
    """Layers that run again in backward take blocks of 16 rows there too."""
    model, ids = on(device, model_of("qwen3", num_hidden_layers=1)), torch.randint(128, (1, 5), device=device)
    apply_packing_ops(model, invariant=True)
    wanted = gradients_of_embeddings(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_same(gradients_of_embeddings(model, ids), wanted)
    if not reentrant:
        claimed(model)


def test_fused_loss():
    model, ids = model_of("qwen3"), torch.randint(128, (1, 60))
    positions = torch.cat([torch.arange(n) for n in (33, 7, 20)])[None]
    assert apply_packing_ops(model, invariant=True, fused_loss=True).skipped == {}
    out = model(ids, position_ids=positions, labels=ids)
    assert out.logits is None
    out.loss.backward()


@pytest.mark.parametrize("first", ["invariant", "fused_loss"])
def test_fused_loss_in_a_call_of_its_own(first):
    """A later call adds to an earlier one, and revert takes out both."""
    ids, found = torch.randint(128, (1, 60)), []
    positions = torch.cat([torch.arange(n) for n in (33, 7, 20)])[None]
    for calls in (
        [{"invariant": True, "fused_loss": True}],
        sorted([{"invariant": True}, {"fused_loss": True}], key=lambda c: first not in c),
    ):
        model = model_of("qwen3", num_hidden_layers=1)
        stock = model.train()(ids, position_ids=positions, labels=ids).logits
        for options in calls:
            assert apply_packing_ops(model, **options).skipped == {}
        assert "invariant: on, until revert_packing_ops(model)" in info(model)
        assert "loss: packing_ops, from hidden states, in training with labels" in info(model)
        out = model(ids, position_ids=positions, labels=ids)
        out.loss.backward()
        claimed(model.eval())
        logits = model(ids, position_ids=positions).logits
        found.append([out.loss.detach(), logits.detach(), *(p.grad for p in model.parameters())])
        assert out.logits is None
        revert_packing_ops(model)
        assert not [name for name, module in model.named_modules() if "forward" in vars(module)]
        assert_same(model.train()(ids, position_ids=positions, labels=ids).logits, stock)
    for together, apart in zip(*found, strict=True):
        assert_same(together, apart)


@pytest.fixture
def one_rank():
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_ddp(one_rank):
    model = model_of("llama", num_hidden_layers=1)
    apply_packing_ops(model, invariant=True)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    claimed(wrapped)
    wrapped(torch.randint(128, (1, 5))).logits.sum().backward()
    wrapped(torch.randint(128, (1, 5))).logits.sum().backward()


def test_fsdp2(one_rank):
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = model_of("llama", num_hidden_layers=1), init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert apply_packing_ops(model, invariant=True).skipped == {}
    claimed(model, gradients=False)
    model(torch.randint(128, (1, 5))).logits.sum().backward()
    revert_packing_ops(model)


LENGTHS = [9, 30, 1, 17]
PACKS = [[[0, 1, 2], [3]], [[3, 1], [2, 0]]]  # documents of each row, of each rank


def logits_in_rows(model, rows):
    """Of each document, by its number."""
    generator, found = torch.Generator().manual_seed(0), {}
    documents = [torch.randint(128, (n,), generator=generator) for n in LENGTHS]
    for row in rows:
        ids, lengths = torch.cat([documents[i] for i in row])[None].cuda(), [LENGTHS[i] for i in row]
        positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
        logits = model(ids, position_ids=positions).logits[0].detach().cpu()
        found |= dict(zip(row, logits.split(lengths), strict=True))
    return found


def logits_of_a_rank():
    """In DDP and in FSDP2."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for sharded in (False, True):
        model = on("cuda", model_of("qwen3", num_hidden_layers=2))
        assert apply_packing_ops(model, invariant=True, strict=True)
        for module in (*model.model.layers, model) if sharded else ():
            fully_shard(module)
        outer = model if sharded else torch.nn.parallel.DistributedDataParallel(model)
        found.append(logits_in_rows(outer, PACKS[torch.distributed.get_rank()]))
        revert_packing_ops(model)
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_other_rows_on_two_gpus_have_the_bits_of_documents_alone(tmp_path):
    model = on("cuda", model_of("qwen3", num_hidden_layers=2))
    apply_packing_ops(model, invariant=True)
    wanted = logits_in_rows(model, [[i] for i in range(len(LENGTHS))])
    for of_rank in spawn_on_gpus(logits_of_a_rank, 2, tmp_path):
        for found in of_rank:
            for document, logits in wanted.items():
                assert_same(found[document], logits)
    revert_packing_ops(model)


def test_tensor_parallel_is_refused(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = model_of("llama")
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"model.layers.0.mlp.up_proj": ColwiseParallel()})
    with pytest.warns(UserWarning, match=r"model\.layers\.0\.mlp\.up_proj: tensor-parallel ranks"):
        apply_packing_ops(model, invariant=True)


def test_compiled_on_the_cpu_is_refused():
    model = model_of("llama")
    with pytest.warns(UserWarning, match="torch.compile makes C\\+\\+ for the CPU"):
        apply_packing_ops(torch.compile(model), invariant=True)
    apply_packing_ops(model, invariant=True)
    with pytest.raises(Exception, match="not served on the CPU"):
        torch.compile(model, fullgraph=True)(torch.randint(128, (1, 5)))
    revert_packing_ops(model)
    torch._dynamo.reset()


def test_in_one_s_own_block():
    """Without apply_packing_ops(invariant=True)."""
    model = model_of("llama", num_hidden_layers=1)
    apply_packing_ops(model)
    with po.invariant():
        claimed(model)
    assert not mode.active()


def test_nothing_is_said_of_a_model_that_is_claimed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_packing_ops(model_of("llama"), invariant=True)
