"""RMSNorm of compiled layers in the mode invariant=True: sums over a row that torch.compile may take in any order."""

import gc
import random

import pytest
import torch
from helpers import assert_error_within, assert_same, cu_seqlens_of, non_contiguous
from helpers.hf_models import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd

import packing_ops as po
import packing_ops.invariance.api as invariance_api
from packing_ops.invariance.mode import ANY_ORDER, rms_norm_in_any_order

transformers = pytest.importorskip("transformers")
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops  # noqa: E402
from packing_ops.integrations.transformers import rms_norm as rms_norm_patch  # noqa: E402

norm_of = rms_norm_in_any_order
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def the_mode_ends(one_thread):
    yield
    if po.is_invariant():  # a model in a reference cycle may hold the mode
        gc.collect()
    assert not po.is_invariant()


def model_of(family="qwen3", **more):
    return tiny_model(
        family, **{"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "vocab_size": 128, **more}
    )


def norms_of(family, invariant=True):
    """One of each formula and width of a family, as apply_packing_ops leaves it."""
    model = model_of(family)
    assert apply_packing_ops(model, rms_norm=True, invariant=invariant).skipped == {}
    found = [module for module in rms_norm_patch._formulas(model) if rms_norm_patch._is_ours(module.forward)]
    assert found
    assert all(hasattr(module, ANY_ORDER) == invariant for module in found)
    chosen = {(type(module), module.weight.numel()): module for module in found}
    return model, [*chosen.values()]


def graphs_of(function, *args):
    """The graphs, forward and backward, that torch.compile would hand to inductor, run without it."""
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, decompositions=torch._inductor.decomposition.decompositions
    )
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    return compiled, graphs


def sums_over_a_row(graphs):
    """Names of the reductions of the last dimension that an order changes, and of those that it does not."""
    ordered, free = set(), set()
    for graph in graphs:
        for node in graph.graph.nodes:
            name = str(node.target).removeprefix("aten.").partition(".")[0]
            if name not in ("sum", "mean", "var", "var_mean", "amax", "max", "linalg_vector_norm"):
                continue
            dims = node.args[1] if len(node.args) > 1 else None
            kind = node.args[0].meta["val"]
            last = dims is None or any(dim % kind.dim() == kind.dim() - 1 for dim in dims)
            if last and (name in ("amax", "max") or not kind.dtype.is_floating_point):
                free.add(name)
            elif last:
                ordered.add(name)
    return ordered, free


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("invariant", [True, False])
def test_the_graph_has_no_sum_that_an_order_changes(family, invariant, fresh_compile):
    """Forward and backward, with dynamic sizes and without a break; without the mode torch's formula."""
    import torch._inductor.decomposition

    model, modules = norms_of(family, invariant)
    for module in modules:
        torch._dynamo.reset()
        compiled, graphs = graphs_of(module)
        for rows in (30, 7, 2):
            x = torch.randn(1, rows, module.weight.numel(), requires_grad=True)
            grad = torch.randn_like(x)
            traced = compiled(x)
            traced.backward(grad)
            gradient, x.grad = x.grad, None
            eager = module(x)
            eager.backward(grad)
            torch.testing.assert_close(traced, eager)
            torch.testing.assert_close(gradient, x.grad)
            x.grad = None
        assert len(graphs) == 2, "a forward and a backward for all sizes"
        ordered, free = sums_over_a_row(graphs)
        assert (ordered, free) == ((set(), {"sum", "amax"}) if invariant else ({"mean", "sum"}, set()))
    revert_packing_ops(model)


def test_a_graph_has_the_stock_formula():
    """The compiler fuses it. In eager code ours runs, which rounds once."""
    model, _ = norms_of("qwen3")
    revert_packing_ops(model)
    norm, x = model.model.norm.bfloat16(), torch.randn(64, model.config.hidden_size).bfloat16()
    torch.nn.init.normal_(norm.weight)
    stock = norm(x)
    apply_packing_ops(model)
    assert not torch.equal(norm(x), stock)
    assert torch.equal(torch.compile(norm, backend="eager", fullgraph=True)(x), stock)
    norm.__class__ = type(f"FSDP{type(norm).__name__}", (type(norm),), {})  # as fully_shard does
    assert torch.equal(torch.compile(norm, backend="eager", fullgraph=True)(x), stock)


def test_the_attribute_goes_with_revert():
    model, modules = norms_of("qwen3")
    revert_packing_ops(model)
    assert not any(hasattr(module, ANY_ORDER) for module in model.modules())
    assert modules
    apply_packing_ops(model, rms_norm=True)
    assert not any(hasattr(module, ANY_ORDER) for module in model.modules())
    revert_packing_ops(model)


def test_eager_code_keeps_rms_norm():
    model, (module, *_) = norms_of("qwen3")
    x = torch.randn(5, module.weight.numel())
    wanted = torch.nn.functional.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)
    assert_same(module(x), wanted)
    revert_packing_ops(model)


def test_rows_compiled_for_the_cpu_have_equal_bits(fresh_compile):
    """inductor's kernels: of a fixed number of rows, of any, of one; in one graph for each, of float32 and bfloat16."""
    found = [norms_of("qwen3") for _ in DTYPES[:2]]
    modules = [module.to(dtype) for (_, (module, *_)), dtype in zip(found, DTYPES, strict=False)]
    compiled = torch.compile(lambda *rows: [*map(torch.nn.Module.__call__, modules, rows)], fullgraph=True)
    x, grad = ([torch.randn(1, 300, m.weight.numel()).to(m.weight.dtype) for m in modules] for _ in range(2))
    first = None
    for rows in (300, 20, 130, 1):
        leaves = [each[:, :rows].clone().requires_grad_() for each in x]
        outs = compiled(*leaves)
        torch.autograd.backward(outs, [each[:, :rows] for each in grad])
        results = [*(out.detach() for out in outs), *(leaf.grad for leaf in leaves)]
        assert [each.dtype for each in results] == DTYPES[:2] * 2
        first = first or results
        for each, wanted in zip(results, first, strict=True):
            assert_same(each, wanted[:, :rows])
    for model, _ in found:
        revert_packing_ops(model)


# --- the formula ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [True, False])
@given(rows=st.integers(0, 20), size=st.sampled_from([7, 64, 128, 1000, 4096]), scale=st.sampled_from([1e-9, 1, 1e4]))
@settings(max_examples=10)
def test_errors_are_those_of_rms_norm(device, dtype, weighted, rows, size, scale):
    """Of the output and of all gradients."""
    x = (torch.randn(rows, size, device=device) * scale).to(dtype)
    weight = torch.randn(size, device=device).to(dtype) if weighted else None
    given = x, weight, torch.randn(rows, size, device=device).to(dtype)
    exact = derivatives(rms_norm, *(None if t is None else t.double() for t in given))
    for ours, theirs, oracle in zip(derivatives(norm_of, *given), derivatives(rms_norm, *given), exact, strict=True):
        assert ours.dtype == dtype
        floor = torch.finfo(dtype).eps * (oracle.abs().amax().item() if oracle.numel() else 0)
        assert_error_within(ours, theirs, oracle, floor=floor)


def rms_norm(x, weight, eps):
    return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)


def derivatives(function, x, weight, grad):
    leaves = [t.clone().requires_grad_() for t in (x, weight) if t is not None]
    out = function(leaves[0], leaves[1] if weight is not None else None, 1e-6)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("weighted", [True, False])
def test_gradcheck(device, weighted):
    x = torch.randn(3, 7, dtype=torch.float64, device=device, requires_grad=True)
    weight = torch.randn(7, dtype=torch.float64, device=device, requires_grad=True) if weighted else None
    assert torch.autograd.gradcheck(lambda x, w: norm_of(x, w, 1e-6), (x, weight))


@pytest.mark.parametrize("weighted", [True, False])
def test_compiles_without_a_weight_and_without_rows(device, weighted, fresh_compile):
    weight = torch.randn(16, device=device) if weighted else None
    compiled = torch.compile(norm_of, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 2, 0):
        given = torch.randn(rows, 16, device=device), weight, torch.randn(rows, 16, device=device)
        for ours, wanted in zip(derivatives(compiled, *given), derivatives(norm_of, *given), strict=True):
            torch.testing.assert_close(ours, wanted)


def test_strided_rows(device):
    x, weight = torch.randn(5, 16, device=device), torch.randn(16, device=device)
    wanted = norm_of(x, weight, 1e-6)
    for same in (non_contiguous(x), x.t().contiguous().t()):
        assert_same(norm_of(same, weight, 1e-6), wanted)


def test_a_width_that_is_not_the_weight_s(fresh_compile):
    """As in eager code an error, not a broadcast."""
    model, (module, *_) = norms_of("qwen3")
    for call in (module, torch.compile(module, backend="eager")):
        for width in (1, module.weight.numel() // 2):
            with pytest.raises(Exception, match=r"shape|size"):
                call(torch.randn(4, width))
    revert_packing_ops(model)


def test_the_check_compiles_beyond_torch_s_limit(monkeypatch, fresh_compile):
    """Its first row too: what is past the limit runs eagerly from then on."""
    monkeypatch.setattr(invariance_api, "refusals", lambda model: {})  # of compiled layers on the CPU
    model = model_of()
    apply_packing_ops(model, invariant=True)
    for layer in model.model.layers:
        layer.input_layernorm.compile(backend="eager")  # products that are compiled are an error on the CPU
    model(torch.randint(128, (1, 7)))
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        assert po.check_invariance(model, rows=[2, 5]).packs
    revert_packing_ops(model)


# --- on a GPU ---

LENGTHS = [1, 7, 12, 33, 300, 547, 1000, 1500, 2600]
ROWS = {1: 1, 20: 3, 900: 6, 6000: 9}  # tokens of a row: how many documents


def states_and_gradients(model, documents, grads, order):
    """Of each document of a row, in that order: its hidden states and the gradient of its embeddings."""
    embeds = torch.cat([documents[i] for i in order])[None].requires_grad_()
    lengths = [len(documents[i]) for i in order]
    cu_seqlens, longest = cu_seqlens_of(lengths, embeds.device), max(lengths)
    told = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": longest, "max_length_k": longest}
    positions = po.position_ids_from_cu_seqlens(cu_seqlens, sum(lengths))[None]
    hidden = model.model(inputs_embeds=embeds, position_ids=positions, **told).last_hidden_state
    hidden.backward(torch.cat([grads[i] for i in order])[None])
    parts = zip(hidden.detach()[0].split(lengths), embeds.grad[0].split(lengths), strict=True)
    return dict(zip(order, parts, strict=True))


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.compile is not served on the CPU")
@pytest.mark.parametrize("hidden_size", [1024, 4096])
@pytest.mark.parametrize("reverse", [False, True])
def test_documents_of_compiled_layers(hidden_size, reverse, fresh_compile):
    """The first row is compiled with its sizes, the next with dynamic ones, a row of one token by itself."""
    model = model_of(
        **{
            "hidden_size": hidden_size,
            "head_dim": 128,
            "intermediate_size": 3 * hidden_size,
            "initializer_range": 0.02,
        },
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 8192},
        **{"device": "cuda", "dtype": torch.bfloat16},
    )
    assert apply_packing_ops(model, invariant=True).skipped == {}
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    draw = random.Random(0)
    documents, grads = (
        [torch.randn(n, hidden_size, device="cuda", dtype=torch.bfloat16) for n in LENGTHS] for _ in range(2)
    )
    sizes = sorted(ROWS, reverse=not reverse)
    rows = [range(ROWS[size]) for size in sizes]
    rows += [draw.sample(range(len(LENGTHS)), draw.randint(1, len(LENGTHS))) for _ in range(6)]
    first, differ, compared = {}, {}, 0
    for number, row in enumerate(rows):
        order = draw.sample([*row], len(row))
        for i, found in states_and_gradients(model, documents, grads, order).items():
            if i not in first:
                first[i] = found
                continue
            compared += 1
            for what, ours, wanted in zip(("hidden", "gradient"), found, first[i], strict=True):
                if count := int((ours != wanted).any(1).sum()):
                    differ[number, i, what] = count
    assert compared > 20
    assert differ == {}, f"(row, document, what): tokens, of documents of {LENGTHS} tokens"
    found = po.check_invariance(model)
    assert found.packs, found.why_not()
    revert_packing_ops(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: torch.compile is not served on the CPU")
def test_with_and_without_a_graph_on_a_gpu(fresh_compile):
    """Rollouts run under no_grad, updates do not: two graphs of the same layer."""
    model = model_of(
        **{"hidden_size": 1024, "head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"initializer_range": 0.02, "device": "cuda", "dtype": torch.bfloat16, "max_position_embeddings": 8192},
    )
    assert apply_packing_ops(model, invariant=True).skipped == {}
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    for tokens in (700, 33, 1):
        ids = torch.randint(128, (1, tokens), device="cuda")
        with torch.no_grad():
            without = model.model(ids).last_hidden_state
        assert_same(model.model(ids).last_hidden_state.detach(), without)
    revert_packing_ops(model)
