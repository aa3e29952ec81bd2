"""What vLLM calls, with stand-ins in its place: make test-vllm runs the real one."""

import copy
import gc
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from helpers.vllm_case import config
from helpers.vllm_model import BLOCK, LAYER, layer, step

import packing_ops as po
from packing_ops.integrations.vllm.refusals import refusals

pytest.importorskip("transformers")
HEADS, KV_HEADS, DIM = 4, 2, 16
LOGITS = types.SimpleNamespace  # of a model's configuration


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("heads_first", [True, False])
def test_attention_writes_and_reads_pages(vllm, device, window, heads_first):
    """Chunks of two prompts, then tokens one by one, as the documents at once."""
    dtype, lengths, tables = torch.bfloat16, (300, 140), [[3, 1, 4], [2, 5, 0]]
    q, k, v = (torch.randn(sum(lengths), heads, DIM, device=device).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS))
    shape = (6, KV_HEADS, BLOCK, 2 * DIM) if heads_first else (6, BLOCK, KV_HEADS, 2 * DIM)
    cache = torch.full(shape, float("nan"), dtype=dtype, device=device)
    cache = cache if heads_first else cache.transpose(1, 2)
    impl = vllm.backend.Impl(HEADS, DIM, DIM**-0.5, KV_HEADS, sliding_window=window)
    builder = vllm.backend.Builder(types.SimpleNamespace(block_size=BLOCK), [], config(), device)
    found, done = torch.empty_like(q), [0, 0]
    for new in [(64, 100), (200, 38), *[(1, 1)] * 2, (30, 0), *[(1, 0)] * 4]:
        metadata = builder.build(0, step(list(zip(done, new, strict=True)), tables, device, padding=3))
        rows = [sum(lengths[:i]) + at for i in (0, 1) for at in range(done[i], done[i] + new[i])]
        given = [F.pad(each[rows], (0, 0, 0, 0, 0, 3), value=1.0) for each in (q, k, v)]
        out = impl.forward(LAYER, *given, cache, metadata, torch.empty_like(given[0]))
        found[rows] = out[: len(rows)]
        done = [old + n for old, n in zip(done, new, strict=True)]
    assert done == list(lengths)
    windows = {} if window is None else {"window_size": (window - 1, 0)}
    cu_seqlens = torch.tensor([0, 300, 440], dtype=torch.int32, device=device)
    assert torch.equal(found, po.varlen_attention(q, k, v, cu_seqlens, **windows))


def test_a_graph_of_a_step_takes_the_numbers_of_the_next(vllm, device):
    """vLLM captures with made-up numbers, and writes those of each step into the same memory."""
    impl = vllm.backend.Impl(HEADS, DIM, DIM**-0.5, KV_HEADS)
    builder = vllm.backend.Builder(types.SimpleNamespace(block_size=BLOCK), [], config(), device)
    cache = torch.randn(6, KV_HEADS, BLOCK, 2 * DIM, device=device).bfloat16()
    q, k, v = (torch.randn(2, heads, DIM, device=device).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    numbers, later = (step(requests, [[3, 1], [2, 5]], device) for requests in ([(0, 1)] * 2, [(140, 1), (90, 1)]))
    wanted, expected = torch.empty_like(q), cache.clone()
    impl.forward(LAYER, q, k, v, expected, builder.build(0, later), wanted)
    out, replay = torch.empty_like(q), lambda: impl.forward(LAYER, q, k, v, cache, metadata, out)
    metadata = builder.build(0, numbers)
    if device == "cuda":
        before = cache.clone()
        replay()
        metadata, graph = builder.build(0, numbers), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            replay()
        cache.copy_(before)
        replay = graph.replay
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        getattr(numbers, name).copy_(getattr(later, name))
    replay()
    assert torch.equal(out, wanted)
    assert torch.equal(cache, expected)


def test_layers_of_a_step_share_a_plan(vllm, device, monkeypatch):
    """One for each window, in a CUDA graph too, where nothing else is kept between layers."""
    made, plan_for = [], vllm.backend.plan_for
    monkeypatch.setattr(vllm.backend, "plan_for", lambda *given: made.append(given) or plan_for(*given))
    layers = [vllm.backend.Impl(HEADS, DIM, DIM**-0.5, KV_HEADS, sliding_window=each) for each in (None, 40, None, 40)]
    builder = vllm.backend.Builder(types.SimpleNamespace(block_size=BLOCK), [], config(), device)
    cache = torch.zeros(6, KV_HEADS, BLOCK, 2 * DIM, device=device).bfloat16()
    q, k, v = (torch.randn(2, heads, DIM, device=device).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS))
    for steps in (1, 2):
        metadata = builder.build(0, step([(140, 1), (90, 1)], [[3, 1], [2, 5]], device))
        for each in layers:
            each.forward(LAYER, q, k, v, cache, metadata, torch.empty_like(q))
        assert len(made) == 2 * steps


def test_a_run_without_metadata_gives_zeros(vllm):
    impl = vllm.backend.Impl(HEADS, DIM, DIM**-0.5, KV_HEADS)
    out = impl.forward(None, None, None, None, torch.empty(0), None, torch.ones(3, HEADS, DIM))
    assert not out.any()


def run(module, *args):
    """forward of a stand-in that vLLM's __init__ did not make."""
    return type(module).forward(module, *args)


@pytest.mark.parametrize("name", ["RMSNorm", "GemmaRMSNorm"])
def test_norms_round_as_a_trainer_does(patched, name):
    x, residual, weight = torch.randn(5, 64).bfloat16(), torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    norm = layer(getattr(patched.layers, name), weight=weight, variance_epsilon=1e-6)
    total = x + residual
    if name == "RMSNorm":
        wanted = F.rms_norm(total, (64,), weight, 1e-6)
    else:
        wanted = F.rms_norm(total.float(), (64,), 1.0 + weight.float(), 1e-6).bfloat16()
    found, kept = run(norm, x, residual)
    assert torch.equal(found, wanted)
    assert torch.equal(kept, total)
    assert torch.equal(run(norm, total), wanted)
    with pytest.raises(NotImplementedError, match="over the whole row"):
        run(layer(type(norm), weight=weight, variance_size_override=32), x)


def test_activations_and_rope(patched, device):
    x = torch.randn(5, 64, device=device).bfloat16()
    gate, up = x[:, :32].contiguous(), x[:, 32:].contiguous()
    assert torch.equal(run(layer(patched.layers.SiluAndMul), x), F.silu(gate) * up)
    gelu = layer(patched.layers.GeluAndMul, approximate="tanh")
    assert torch.equal(run(gelu, x), F.gelu(gate, approximate="tanh") * up)
    cache = torch.full((50, DIM), float("nan"), device=device)  # vLLM's own table, of which the length counts
    rope = layer(patched.layers.RotaryEmbedding, cos_sin_cache=cache, head_size=DIM, rotary_dim=DIM, is_neox_style=True)
    qkv = torch.randn(5, (HEADS + 2) * DIM, device=device).bfloat16()
    positions = torch.tensor([3, 4, 0, 49, 7], device=device)
    q, k = qkv[:, : HEADS * DIM], qkv[:, HEADS * DIM :]
    angles = torch.arange(50.0)[:, None] * 10_000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float) / DIM)
    cos, sin = (each(angles.to(device)).bfloat16() for each in (torch.cos, torch.sin))
    wanted = po.apply_rotary_qk(q.reshape(5, HEADS, DIM), k.reshape(5, 2, DIM), cos, sin, positions)
    for found, right in zip(run(rope, positions, q, k), wanted, strict=True):
        assert torch.equal(found.reshape_as(right), right)
    with pytest.raises(NotImplementedError, match="rope: expected one of RotaryEmbedding"):
        run(layer(patched.layers.RotaryEmbedding, is_neox_style=False), positions, q, k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_separate_layers(patched, dtype):
    x, bias = torch.randn(37, 48).to(dtype), torch.randn(80).to(dtype)
    weight = torch.nn.Parameter(torch.randn(80, 48).to(dtype), requires_grad=False)
    of_vllm = types.SimpleNamespace(weight=weight, output_partition_sizes=[48, 16, 16])
    method = patched.layers.UnquantizedLinearMethod()
    method.process_weights_after_loading(of_vllm)
    with po.invariant():
        separate = torch.cat(
            [F.linear(x, *each) for each in zip(weight.split((48, 16, 16)), bias.split((48, 16, 16)), strict=True)], 1
        )
    assert torch.equal(method.apply(of_vllm, x, bias), separate)
    assert torch.equal(method.apply(of_vllm, x[5:6], bias), separate[5:6])


def test_few_rows_of_many_terms_have_the_bits_of_many(patched, device):
    x, weight = torch.randn(64, 4096, device=device).bfloat16(), torch.randn(48, 4096, device=device).bfloat16()
    of_vllm = types.SimpleNamespace(weight=torch.nn.Parameter(weight, requires_grad=False))
    method = patched.layers.UnquantizedLinearMethod()
    many = method.apply(of_vllm, x)
    for rows in (1, 2, 3, 17):
        assert torch.equal(method.apply(of_vllm, x[:rows].clone()), many[:rows]), rows


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"parallel_config__tensor_parallel_size": 2}, "tensor_parallel_size: expected 1, .* got 2"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size: expected 1, .* got 2"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode_context_parallel_size: expected 1, .* got 2"),
        ({"quant_config__": object()}, "quantization: expected .* got object"),
        ({"speculative_config__": object()}, "speculative_config: expected None"),
        ({"lora_config__": object()}, "enable_lora: expected False"),
        ({"cache_config__block_size": 16}, "block_size: expected a multiple of 128, got 16"),
        ({"cache_config__cache_dtype": "fp8"}, "kv_cache_dtype: expected 'auto', got 'fp8'"),
        ({"compilation_config__mode": 3}, "enforce_eager: expected True"),
        ({"device_config__device_type": "cuda", "model_config__dtype": torch.float32}, "dtype: expected bfloat16"),
        ({"model_config__hf_text_config": LOGITS(logits_scaling=8.0)}, "logits_scaling: expected 1.0, got 8"),
        ({"model_config__hf_text_config": LOGITS(logit_scale=0.25)}, "logit_scale: expected 1.0, got 0.25"),
        (
            {"model_config__hf_text_config": LOGITS(final_logit_softcapping=30.0)},
            "final_logit_softcapping: expected None, got 30",
        ),
    ],
)
def test_refusals_name_the_setting(vllm, monkeypatch, changed, named):
    assert refusals(config()) == []
    monkeypatch.setattr(vllm.backend, "get_current_vllm_config", lambda: config(**changed))
    with pytest.raises(NotImplementedError, match=named):
        vllm.backend.Impl(HEADS, DIM, DIM**-0.5, KV_HEADS)


def test_a_block_size_that_nobody_gave_is_not_refused():
    """On a GPU vLLM takes the backend's after the layers are made."""
    assert refusals(config(cache_config__block_size=16, cache_config__user_specified_block_size=False)) == []
    assert refusals(config(cache_config__block_size=16, cache_config__user_specified_block_size=True)) != []


def test_layers_that_are_not_served_are_named(vllm):
    for name, value in (("alibi_slopes", [1.0]), ("kv_sharing_target_layer_name", "layers.0"), ("block_m", 64)):
        with pytest.raises(NotImplementedError, match=f"{name}: expected None"):
            vllm.backend.Impl(HEADS, DIM, DIM**-0.5, KV_HEADS, **{name: value})
    with pytest.raises(NotImplementedError, match="attn_type: expected decoder, got encoder"):
        vllm.backend.Impl(HEADS, DIM, DIM**-0.5, KV_HEADS, attn_type="encoder")
    experts = config(compilation_config__static_forward_context={"layers.1.mlp.experts": torch.nn.Identity()})
    with pytest.raises(
        NotImplementedError, match=r"layers.1.mlp.experts: expected layers of attention alone, got Identity"
    ):
        vllm.backend.Builder(types.SimpleNamespace(block_size=BLOCK), [], experts, "cpu")
    builder = vllm.backend.Builder(types.SimpleNamespace(block_size=BLOCK), [], config(), "cpu")
    with pytest.raises(NotImplementedError, match="causal: expected True, got False"):
        builder.build(0, types.SimpleNamespace(causal=False))


def test_a_head_with_a_bias_is_refused(patched):
    head = types.SimpleNamespace(weight=torch.nn.Parameter(torch.randn(40, 48)), org_vocab_size=40)
    with pytest.raises(NotImplementedError, match="lm_head: expected no bias, got one"):
        patched.layers.UnquantizedEmbeddingMethod().apply(head, torch.randn(3, 48), torch.randn(40))


def test_with_the_last_attention_everything_goes(vllm):
    before = [vars(patch.owner).get(patch.name) for patch in vllm.layers.PATCHES]
    layers = [vllm.backend.Impl(HEADS, DIM, DIM**-0.5, KV_HEADS) for _ in range(2)]
    assert po.is_invariant()
    del layers[0]
    gc.collect()
    assert all(patch.is_applied for patch in vllm.layers.PATCHES)
    layers.clear()
    gc.collect()
    assert [vars(patch.owner).get(patch.name) for patch in vllm.layers.PATCHES] == before
    assert not po.is_invariant()


def test_register_waits_to_be_asked(vllm):
    registry = sys.modules["vllm.v1.attention.backends.registry"].AttentionBackendEnum
    platform = type(sys.modules["vllm.platforms"].current_platform)
    stock = vars(platform)["get_attn_backend_cls"]
    vllm.plugin.register()
    vllm.plugin.register()
    ours = "packing_ops.integrations.vllm.backend.Backend"
    assert platform.get_attn_backend_cls(None, None) == "cpu"
    assert platform.get_attn_backend_cls(registry.CPU_ATTN, None) == "cpu"
    assert platform.get_attn_backend_cls(registry.CUSTOM, None) == ours
    vllm.plugin.revert_registration()
    assert vars(platform)["get_attn_backend_cls"] is stock
    assert not registry.CUSTOM.is_overridden()


def test_one_variable_sets_attention_and_graphs(vllm, monkeypatch):
    """Nothing compiles and decoding steps are CUDA graphs, but for what the user chose."""
    arguments, config = sys.modules["vllm.engine.arg_utils"].EngineArgs, sys.modules["vllm.config"]
    off, compiled = config.CompilationMode.NONE, config.CompilationMode.VLLM_COMPILE
    graphs = config.CUDAGraphMode
    vllm.plugin.register()
    assert arguments().create_engine_config() == (None, False, None, None)
    monkeypatch.setenv("PACKING_OPS_VLLM", "1")
    assert arguments().create_engine_config() == ("CUSTOM", False, off, graphs.FULL_DECODE_ONLY)
    assert arguments(mode=compiled).create_engine_config()[2] is compiled  # refused by its name
    for given in (graphs.NONE, graphs.PIECEWISE, graphs.FULL):
        assert arguments(cudagraph_mode=given).create_engine_config()[3] is given
    pieces = arguments(cudagraph_mode=graphs.FULL_AND_PIECEWISE)
    of_user = pieces.compilation_config
    assert pieces.create_engine_config()[3] is graphs.FULL_DECODE_ONLY
    assert (of_user.mode, of_user.cudagraph_mode) == (None, graphs.FULL_AND_PIECEWISE)
    assert pieces.create_engine_config()[3] is graphs.FULL_DECODE_ONLY
    assert arguments(enforce_eager=True).create_engine_config()[:2] == ("CUSTOM", True)
    assert arguments(attention_backend="FLASH_ATTN").create_engine_config() == ("FLASH_ATTN", False, None, None)
    vllm.plugin.revert_registration()
    assert arguments().create_engine_config() == (None, False, None, None)


def test_register_leaves_a_backend_of_others(vllm):
    registry = sys.modules["vllm.v1.attention.backends.registry"]
    custom = registry.AttentionBackendEnum.CUSTOM
    registry.register_backend(custom, "theirs.Backend")
    vllm.plugin.register()
    vllm.plugin.revert_registration()
    assert custom.get_path() == "theirs.Backend"


# --- a rollout, and where an engine differs ---


class Model(torch.nn.Module):
    """A language model whose tokens do not see each other; in an engine and in a trainer its rows have no batch."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32)) for _ in range(2)
        )
        self.head = torch.nn.Linear(32, 64, bias=False)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def hidden(self, row):
        x = self.embed(row)
        for block in self.layers:
            x = x + block(x)
        return x

    def forward(self, row, cu_seqlens=None):
        return self.head(self.hidden(row))


class Engine:
    """A vllm.LLM, which runs prompts in parts of 30 tokens."""

    def __init__(self, model):
        self.model, self.resets = copy.deepcopy(model), 0

    def reset_prefix_cache(self):
        self.resets += 1

    def apply_model(self, function):
        return [function(self.model)]

    def generate(self, given, sampling, use_tqdm):
        for part in torch.tensor(given[0]["prompt_token_ids"]).split(30):
            self.model(part)


def a_rollout(model, *lengths):
    """Documents, and log-probabilities of all tokens but the first two of each."""
    documents = [torch.randint(64, (n,), device=model.head.weight.device) for n in lengths]
    row = torch.cat(documents)
    metadata = po.PackedMetadata.from_lengths(lengths, device=row.device)
    logps = po.token_logps(model.hidden(row), model.head.weight, row, metadata).split(lengths)
    return documents, [each[1:-1] for each in logps]


@torch.no_grad()
def test_the_first_layer_that_differs_is_named(vllm, monkeypatch):
    monkeypatch.setattr(sys.modules["vllm"], "SamplingParams", lambda **_: None, raising=False)
    model = Model()
    engine = Engine(model)
    with po.invariant():
        given = [[each.tolist() for each in part] for part in a_rollout(model, 40, 7)]
        rollout = vllm.plugin.record(engine, *given)
        found = po.check_invariance(model, model.forward, rollout=rollout)
        assert (found.packs, found.why_not()) == (True, [])
        assert [layer.rows for layer in found.layers] == [47] * 7 + [43]  # all but the model, the embeddings and ReLU
        engine.model.layers[1][0].weight[3] *= 1.01
        found = po.check_invariance(model, model.forward, rollout=vllm.plugin.record(engine, *given))
    (named,) = (layer for layer in found.layers if layer.packs)
    assert (named.name, named.kind, named.rows) == ("layers.1.0", "Linear", 47)
    assert not found
    assert found.why_not()[0].startswith("layers.1.0 (Linear): ")
    assert engine.resets == 4
    assert not any(module._forward_hooks for module in engine.model.modules())


@torch.no_grad()
def test_log_probs_of_a_rollout_are_counted():
    model = Model()
    with po.invariant():
        documents, logps = a_rollout(model, 20, 3, 9)
        found = po.check_invariance(model, model.forward, rollout=(documents, logps))
        assert [(layer.name, layer.rows, layer.packs) for layer in found.layers] == [("token_logps", 26, 0)]
        logps[0][3] += 1e-5
        found = po.check_invariance(model, model.forward, rollout=(documents, logps))
        assert [(layer.name, layer.packs) for layer in found.layers] == [("token_logps", 1)]
        assert "integrations.vllm.record" in found.why_not()[0]
        for wrong in ((documents, logps[1:]), (documents, [each.float() for each in documents])):
            with pytest.raises(ValueError, match="rollout: expected log-probabilities of the last tokens"):
                po.check_invariance(model, model.forward, rollout=wrong)
        with pytest.raises(ValueError, match="rollout: expected a model with embeddings of tokens and a head"):
            po.check_invariance(model.layers, lambda row, _: model.hidden(row), rollout=(documents, logps))


@torch.no_grad()
def test_a_rollout_of_lists_arrays_and_int32(device):
    """On the host, as record returns it, wherever the model is."""
    model = Model().to(device)
    with po.invariant():
        documents, logps = ([each.cpu() for each in part] for part in a_rollout(model, 20, 3))
        lists = [each.tolist() for each in documents], [each.tolist() for each in logps]
        int32 = [each.int() for each in documents]
        arrays = [each.numpy() for each in documents], [each.numpy() for each in logps]
        for rollout in (lists, arrays, (int32, logps), (iter(documents), iter(logps))):
            found = po.check_invariance(model, model.forward, rollout=rollout)
            assert [(layer.name, layer.rows, layer.packs) for layer in found.layers] == [("token_logps", 19, 0)]
        logps[1] = logps[1][:0]  # a prompt that was answered with nothing
        assert po.check_invariance(model, model.forward, rollout=(documents, logps)).layers[0].rows == 18


ROW, ONE = torch.arange(5), torch.zeros(1)


@pytest.mark.parametrize(
    ("rollout", "error"),
    [
        (True, "TypeError: rollout: expected (documents, log-probabilities), or these and the layers of a record, got True"),
        (([ROW],), "TypeError: rollout: expected (documents, log-probabilities), or these"),
        (([ROW], [ONE], {}, 1), "TypeError: rollout: expected (documents, log-probabilities), or these"),
        (([ROW], None), "TypeError: rollout: expected log-probabilities [tokens] of each document, got None"),
        (([None], [ONE]), "TypeError: rollout: expected token ids [tokens] of each document, got [None]"),
        (([], []), "ValueError: rollout: expected at least one log-probability or layer, got none"),
        (([ROW], [ONE[:0]]), "ValueError: rollout: expected at least one log-probability or layer, got none"),
        (([ROW.float()], [ONE]), "ValueError: rollout: expected token ids [tokens] of each document, got float32 [5]"),
        (([ROW == 0], [ONE]), "ValueError: rollout: expected token ids [tokens] of each document, got bool [5]"),
        (([ROW[None]], [ONE]), "ValueError: rollout: expected token ids [tokens] of each document, got int64 [1, 5]"),
        (([ROW], [ONE[None]]), "ValueError: rollout: expected log-probabilities [tokens] of each document, got float32 [1, 1]"),
        (([ROW], [ONE.long()]), "ValueError: rollout: expected log-probabilities [tokens] of each document, got int64 [1]"),
        (([ROW], [ONE * 1j]), "ValueError: rollout: expected log-probabilities [tokens] of each document, got complex64 [1]"),
        (([ROW - 1], [ONE]), "ValueError: rollout: expected token ids from 0 to 63, got -1 to 3"),
        (([ROW, ROW + 60], [ONE, ONE]), "ValueError: rollout: expected token ids from 0 to 63, got 0 to 64"),
        (([ROW], [torch.zeros(5)]), "ValueError: rollout: expected log-probabilities of the last tokens"),
        (([ROW[:0]], [ONE[:0]], {"head": [ROW]}), "ValueError: rollout: expected log-probabilities of the last tokens"),
        (([ROW], [ONE], [ROW]), "TypeError: rollout: expected layers by name, a tensor for each document, got [tensor("),
        (([ROW], [ONE], {"head": []}), "TypeError: rollout: expected layers by name, a tensor for each document, got {'head'"),
        (([ROW], [ONE], {"head": 3}), "TypeError: rollout: expected layers by name, a tensor for each document, got {'head'"),
    ],
)  # fmt: skip
def test_what_is_no_rollout(rollout, error):
    """Nothing is called equal that was not compared; a token beyond the vocabulary would end the process on a GPU."""
    model = Model()
    with pytest.raises((TypeError, ValueError)) as raised:
        po.check_invariance(model, model.forward, rollout=rollout)
    assert f"{raised.type.__name__}: {raised.value}".startswith(error)


def test_nothing_is_left_out_beside_a_rollout():
    for name, value in (("documents", [ROW]), ("rows", [3])):
        with pytest.raises(ValueError, match=f"{name}: expected None beside rollout"):
            po.check_invariance(Model(), rollout=([ROW], [ONE]), **{name: value})
