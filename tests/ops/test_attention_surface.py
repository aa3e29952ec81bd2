"""What callers see of packing_ops.attention: flash-attn's name, the choice of a backend, errors."""

import inspect
import warnings

import pytest
import torch
from helpers import assert_same, cu_seqlens_of, non_contiguous
from helpers.attention_case import OPEN, Case
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import packing_ops as po
from packing_ops._runtime import arguments as _arguments
from packing_ops._runtime import library
from packing_ops.keys import plan_of
from packing_ops.reference import attention as oracle
from packing_ops.varlen import backends

# --- flash-attn's name and the other backends ---


@pytest.mark.parametrize("call", [po.varlen_attention, po.attention])
@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_flash_attn_s_max_seqlen_by_position_is_named(call, name, device):
    q, cu_seqlens = torch.randn(5, 2, 8, device=device), cu_seqlens_of([2, 3], device)
    given = (512,) if name == "cu_seqlens_q" else (cu_seqlens, 512)
    with pytest.raises(
        TypeError, match=rf"{name}: .* got 512 \(int\): varlen_attention takes no max_seqlen, leave it out"
    ):
        call(q, q, q, *given)
    with pytest.raises(
        TypeError, match=r"max_seqlen_q: expected at most 5 arguments by position, .* got 7: .* leave it out"
    ):
        call(q, q, q, cu_seqlens, cu_seqlens, 3, 3)
    out = po.flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 3, 3, causal=True)
    assert_same(out, call(q, q, q, cu_seqlens))


def test_flash_attn_varlen_func(device):
    case = Case([9, 30], [40, 12], heads=(4, 2), device=device)
    arguments = (case.q, case.k, case.v, *case.cu_seqlens)
    expected, lse = po.varlen_attention(*arguments, causal=False, window_size=(7, 2), softcap=3.0, return_lse=True)
    call = po.flash_attn_varlen_func
    assert_same(call(*arguments, 30, 40, window_size=(7, 2), softcap=3.0), expected)
    # flash-attn's order of the optional arguments: dropout_p, softmax_scale, causal, window_size, softcap, ...
    given = call(*arguments, 30, 40, 0.0, None, False, (7, 2), 3.0, None, True, True)
    assert_same(given[0], expected)
    assert_same(given[1], lse)
    assert given[2] is None
    assert_same(call(*arguments, 99, 99, causal=True), po.varlen_attention(*arguments))
    assert inspect.signature(call).parameters["causal"].default is False


@pytest.mark.parametrize("name", ["dropout_p", "alibi_slopes"])
def test_flash_attn_features_that_are_not_there(name):
    case = Case([3])
    value = 0.1 if name == "dropout_p" else torch.zeros(2)
    with pytest.raises(NotImplementedError, match=f"{name}: expected"):
        po.flash_attn_varlen_func(case.q, case.k, case.v, *case.cu_seqlens, 3, 3, **{name: value})


@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=4),
    causal=st.booleans(),
    window=st.sampled_from([OPEN, (4, 0), (0, -1), (3, 5)]),
    tail=st.integers(0, 2),
)
def test_sdpa_backend_equals_ours(lengths, causal, window, tail):
    window = (window[0], min(window[1], 0)) if causal else window
    lengths = list(zip(*lengths, strict=True))
    case = Case(*lengths, heads=(4, 2), dtype=torch.float64, tail=tail, causal=causal, window_size=window)
    given = [t.requires_grad_() for t in (case.q, case.k, case.v)]
    results = []
    for backend in ("packing_ops", "sdpa"):
        out = po.attention(*given, *case.cu_seqlens, backend=backend, **case.options)
        results.append([out, *torch.autograd.grad(out, given, case.dout)])
    for ours, sdpa in zip(*results, strict=True):
        torch.testing.assert_close(sdpa, ours)


WRONG_CALLS = {
    "past the rows": {"cu_seqlens_q": [0, 9]},
    "past the keys": {"cu_seqlens_k": [0, 9]},
    "decreasing": {"cu_seqlens_q": [0, 3, 1]},
    "decreasing keys": {"cu_seqlens_q": [0, 1, 4], "cu_seqlens_k": [0, 3, 1]},
    "not from 0": {"cu_seqlens_q": [1, 4]},
    "keys not from 0": {"cu_seqlens_k": [1, 4]},
    "below 0": {"cu_seqlens_q": [-1, 4]},
    "not of int32": {"cu_seqlens_q": [0, 2**32 + 4]},
    "other documents": {"cu_seqlens_q": [0, 2, 4], "cu_seqlens_k": [0, 4]},
    "half a key": {"window_size": (1.5, 0)},
    "half a key to the right": {"window_size": (1, 1.5), "causal": False},
    "left window": {"window_size": (-2, 0)},
    "right window": {"window_size": (0, -2)},
    "right window of causal": {"window_size": (0, 1)},
    "scale nan": {"softmax_scale": float("nan")},
    "scale inf": {"softmax_scale": float("-inf")},
    "scale past float32": {"softmax_scale": 1e60},
    "causal": {"causal": "no"},
    "k without heads": {"k": torch.zeros(4, 8)},
    "v with a batch": {"v": torch.zeros(1, 4, 4, 8)},
    "k of other width": {"k": torch.zeros(4, 4, 16)},
    "k of other dtype": {"k": torch.zeros(4, 4, 8).double()},
    "heads of k": {"k": torch.zeros(4, 3, 8), "v": torch.zeros(4, 3, 8)},
    "rows of v": {"v": torch.zeros(3, 4, 8)},
    "no tensor": {"v": [1.0]},
}


@pytest.mark.parametrize("wrong", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_sdpa_refuses_what_ours_refuses(wrong):
    """By the same class, about the same argument."""
    errors = []
    for backend in ("packing_ops", "sdpa"):
        given = dict.fromkeys("qkv", torch.randn(4, 4, 8)) | {"cu_seqlens_q": [0, 4], "backend": backend} | wrong
        given |= {name: torch.tensor(value) for name, value in given.items() if name.startswith("cu_seqlens")}
        with pytest.raises((ValueError, TypeError), match=": expected ") as error:
            po.attention(**given)
        name = str(error.value).partition(":")[0]
        errors.append((error.type, {"window_left": "window_size", "window_right": "window_size"}.get(name, name)))
    assert errors[0] == errors[1]


def test_sdpa_sees_wrong_cu_seqlens_in_a_graph_too():
    q = torch.randn(4, 2, 8)
    call = torch.compile(
        lambda cu_seqlens: po.attention(q, q, q, cu_seqlens, backend="sdpa"), fullgraph=True, backend="aot_eager"
    )
    expected = po.attention(q, q, q, cu_seqlens_of([1, 3]), backend="sdpa")
    torch.testing.assert_close(call(cu_seqlens_of([1, 3])), expected)
    with pytest.raises(ValueError, match="expected to end at most at total=4, got 9"):
        call(cu_seqlens_of([1, 8]))


def test_backend_selection():
    q = torch.zeros(8, 4, 64)
    assert po.select_attention_backend(q) == "packing_ops"
    name, reasons = po.select_attention_backend(q, explain=True)
    assert name == "packing_ops"
    assert reasons == {
        "packing_ops": "",
        "torch_varlen": "needs a CUDA tensor, got cpu",
        "sdpa": "",
        "kernels": "forward: cpu, backward: cpu",
    }
    assert po.select_attention_backend(torch.zeros(8, 4, 520)) == "sdpa"
    name, reasons = po.select_attention_backend(q.to("meta"), explain=True)
    assert (name, reasons["packing_ops"]) == ("sdpa", "has no kernel for meta")
    assert "kernels" not in reasons
    with pytest.raises(NotImplementedError, match=r"no attention backend .*meta.*sdpa: has no softcap and lse"):
        po.select_attention_backend(q.to("meta"), softcap=5.0, return_lse=True)


def test_kernels_are_asked_for_by_heads_that_fit():
    with pytest.raises(ValueError, match=r"num_kv_heads: expected a number that divides num_heads \(4\), got 3"):
        po.select_attention_backend(torch.zeros(8, 4, 64), torch.zeros(8, 3, 64), explain=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 64)])
def test_kernels_of_this_gpu_are_those_that_run(dtype, head_dim):
    q = torch.randn(129, 2, head_dim, dtype=dtype, device="cuda")
    kernels = po.select_attention_backend(q, explain=True)[1]["kernels"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        po.varlen_attention(q, q, q, torch.tensor([0, 129], dtype=torch.int32, device="cuda"))
        torch.cuda.synchronize()
    names = " ".join(event.key for event in trace.key_averages())
    assert ("sm90" in names, "fp32" in names) == ("forward: sm90" in kernels, "forward: fp32" in kernels)


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says it is on a GPU."""

    is_cuda = True
    device = torch.device("cuda", 0)


@pytest.fixture
def gpu_of(monkeypatch):
    """The GPU that OnCuda's are on, in a library that has kernels for it."""
    monkeypatch.setattr(library, "without_cuda_kernel", set())
    _arguments.warned.clear()

    def use(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    return use


@pytest.mark.parametrize(
    ("dtype", "capability", "head_dim", "expected", "why"),
    [
        (torch.bfloat16, (8, 0), 64, "packing_ops", ""),
        (torch.float32, (9, 0), 64, "packing_ops", ""),
        (torch.float64, (9, 0), 64, "sdpa", "has float32, bfloat16, float16 on cuda, got float64"),
        (torch.float16, (7, 5), 64, "sdpa", "needs a GPU of sm_80 or later, got sm_75"),
        (torch.float32, (7, 0), 64, "sdpa", "needs a GPU of sm_80 or later, got sm_70"),
        (torch.float16, (9, 0), 60, "sdpa", "has head_dim in multiples of 8 for float16 on cuda, got 60"),
        (torch.float32, (9, 0), 60, "packing_ops", ""),
    ],
)
def test_backend_of_dtype_and_gpu(gpu_of, monkeypatch, dtype, capability, head_dim, expected, why):
    gpu_of(*capability)
    q = torch.zeros(8, 4, head_dim, dtype=dtype).as_subclass(OnCuda)
    asked = []
    monkeypatch.setattr(backends, "kernels_of", lambda *call: asked.append(call) or "these")
    name, reasons = po.select_attention_backend(q, torch.zeros(8, 2, head_dim), explain=True)
    assert (name, reasons["packing_ops"]) == (expected, why)
    half = dtype != torch.float32
    assert asked == ([] if why else [(half, 4, 2, head_dim, 0, head_dim)])
    assert reasons.get("kernels") == (None if why else "these")


def test_kernels_are_asked_for_with_vs_head_dim(gpu_of, monkeypatch):
    gpu_of(9, 0)
    q = torch.zeros(8, 4, 192, dtype=torch.bfloat16).as_subclass(OnCuda)
    asked = []
    monkeypatch.setattr(backends, "kernels_of", lambda *call: asked.append(call) or "these")
    po.select_attention_backend(q, v=q[..., :128], explain=True)
    assert asked == [(True, 4, 4, 192, 0, 128)]


@pytest.mark.parametrize(
    ("dtype", "capability", "why"),
    [(torch.float64, (9, 0), "has .* got float64"), (torch.float32, (7, 5), "needs .* got sm_75")],
)
def test_attention_runs_by_sdpa_where_packing_ops_does_not_and_says_so_once(gpu_of, dtype, capability, why):
    gpu_of(*capability)
    case = Case([9, 30, 0, 4], heads=(4, 2), dtype=dtype)
    rows = case.q, case.k, case.v
    with pytest.warns(UserWarning, match=f"packing_ops.attention runs by sdpa here: packing_ops {why}"):
        out = po.attention(*(t.as_subclass(OnCuda) for t in rows), *case.cu_seqlens)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), po.varlen_attention(*rows, *case.cu_seqlens))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        po.attention(*(t.as_subclass(OnCuda) for t in rows), *case.cu_seqlens)
        po.attention(*(t.as_subclass(OnCuda) for t in rows), *case.cu_seqlens, backend="sdpa")


def test_a_dtype_that_no_backend_of_ours_has():
    assert po.select_attention_backend(torch.zeros(8, 4, 64, dtype=torch.int32)) == "sdpa"


@pytest.mark.parametrize("head_dim", [16, 520])
def test_attention_compiles_fullgraph(device, head_dim, fresh_compile, monkeypatch):
    _arguments.warned.clear()
    case = Case([9, 4], heads=(4, 2), dim=head_dim, device=device)

    def attend(q, k, v, cu_seqlens):
        return po.attention(q, k, v, cu_seqlens)

    given = case.q, case.k, case.v, case.cu_seqlens[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = torch.compile(attend, fullgraph=True, backend="eager")(*given)
    told = [w for w in caught if "runs by sdpa" in str(w.message)]
    assert len(told) == (head_dim > 512)
    assert_same(found, attend(*given))


@pytest.mark.parametrize("backend", [None, "sdpa"])
def test_a_wrong_softcap_is_named(backend):
    q, cu_seqlens = torch.randn(5, 2, 8), cu_seqlens_of([2, 3], "cpu")
    with pytest.raises(TypeError, match=r"softcap: expected a number, got '3' \(str\)"):
        po.attention(q, q, q, cu_seqlens, backend=backend, softcap="3")
    wanted = ValueError if backend is None else NotImplementedError  # SDPA would leave it out
    with pytest.raises(wanted, match="softcap"):
        po.attention(q, q, q, cu_seqlens, backend=backend, softcap=-1.0)


def test_backend_errors():
    case = Case([3])
    arguments = (case.q, case.k, case.v, case.cu_seqlens[0])
    with pytest.raises(ValueError, match="backend: expected packing_ops, torch_varlen or sdpa, got 'flash'"):
        po.attention(*arguments, backend="flash")
    with pytest.raises(NotImplementedError, match="backend: torch_varlen needs a CUDA tensor, got cpu"):
        po.attention(*arguments, backend="torch_varlen")
    with pytest.raises(NotImplementedError, match="backend: sdpa has no sinks"):
        po.attention(*arguments, backend="sdpa", sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="window_size: expected nothing to the right"):
        po.attention(*arguments, backend="sdpa", window_size=(1, 1))


@pytest.mark.gpu
def test_other_backends_on_a_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    case = Case([70, 0, 33], heads=(4, 4), dim=64, dtype=torch.bfloat16, device="cuda", tail=5)
    given = [t.requires_grad_() for t in (case.q, case.k, case.v)]
    for options in ({"causal": True}, {"causal": False}, {"window_size": (9, 0)}):
        exact = oracle.varlen_attention(*(t.double() for t in given), *case.cu_seqlens, **options)[0]
        expected = [exact, *torch.autograd.grad(exact, given, case.dout.double())]
        for backend in ("torch_varlen", "sdpa"):
            out = po.attention(*given, *case.cu_seqlens, backend=backend, **options)
            found = [out, *torch.autograd.grad(out, given, case.dout)]
            for actual, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(actual.double(), wanted.double(), rtol=3e-2, atol=3e-2)


# --- what surrounds a call ---


@pytest.mark.parametrize("call", ["varlen_attention", "sdpa", "flash_attn", "planned"])
def test_int64_cu_seqlens_are_taken(device, call):
    case = Case([9, 0, 4], heads=(4, 2), device=device)
    rows, cu_seqlens = (case.q, case.k, case.v), case.cu_seqlens[0]
    geometry = {"total_q": 13, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    attend = {
        "varlen_attention": lambda cu: po.varlen_attention(*rows, cu),
        "sdpa": lambda cu: po.attention(*rows, cu, backend="sdpa"),
        "flash_attn": lambda cu: po.flash_attn_varlen_func(*rows, cu, cu, 9, 9),
        "planned": lambda cu: po.varlen_attention(*rows, cu, plan=po.attention_plan(cu, **geometry)),
    }[call]
    results = []
    for cu in (cu_seqlens, cu_seqlens.long()):
        leaves = rows = [t.clone().requires_grad_() for t in rows]
        out = attend(cu)
        results.append([out, *torch.autograd.grad(out, leaves, case.dout)])
    for actual, wanted in zip(*results, strict=True):
        (torch.testing.assert_close if call == "sdpa" else assert_same)(actual, wanted)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_no_bit(device, use_reentrant):
    case = Case([70, 0, 33], heads=(4, 2), dim=24, device=device, sinks=True, window_size=(20, 0))
    calls = []

    def block(*leaves):
        calls.append(1)
        q, k, v, sinks = (leaf.tanh() for leaf in leaves)
        return po.varlen_attention(q, k, v, *case.cu_seqlens, sinks=sinks, return_lse=True, **case.options)

    results = []
    for call in (block, lambda *leaves: checkpoint(block, *leaves, use_reentrant=use_reentrant)):
        leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v, case.sinks)]
        out, lse = call(*leaves)
        torch.autograd.backward([out, lse], [case.dout, case.dlse])
        results.append([out, lse, *(leaf.grad for leaf in leaves)])
    assert len(calls) == 3  # once plainly, once under the checkpoint and once more in its backward
    for checkpointed, plain in zip(*reversed(results), strict=True):
        assert_same(checkpointed, plain)


def test_inference_mode(device):
    """cu_seqlens made there have no version; those made before are trained with afterwards."""
    case = Case([9, 4], heads=(2, 1), device=device)
    expected = case.ours()
    geometry = (13, 13, 2, 1, 16, True, -1, -1)
    case.cu_seqlens = tuple(t.clone() for t in case.cu_seqlens)  # which have no plan yet
    with torch.inference_mode():
        made_here = [t.clone() for t in case.cu_seqlens]
        for cu_seqlens in (case.cu_seqlens, made_here):
            out = po.varlen_attention(case.q, case.k, case.v, *cu_seqlens)
            assert_same(out, expected["out"])
            plan = plan_of(*cu_seqlens, geometry)
            assert plan.is_inference() == (cu_seqlens is made_here)
    for name, value in case.ours().items():
        assert_same(value, expected[name])


# --- bad input ---


def bad_calls(device):
    case = Case([2, 3], heads=(4, 2), device=device)
    q, k, v, cu_seqlens = case.q, case.k, case.v, case.cu_seqlens[0]

    def call(*, q=q, k=k, v=v, cu_q=cu_seqlens, cu_k=None, **options):
        return lambda: po.varlen_attention(q, k, v, cu_q, cu_k, **options)

    return {
        "q rank": (call(q=q[0]), r"q: expected \[total_q, num_q_heads, head_dim\] or .*, got float32 \[4, 16\]"),
        "k rank": (call(k=k[0]), r"k: expected \[total_k, num_kv_heads, head_dim\] like q, got float32 \[2, 16\]"),
        "q dtype": (call(q=q.int()), "q: expected float32, bfloat16, float16 or float64, got int32"),
        "k dtype": (call(k=k.double()), "k: expected float32 like q, got float64"),
        "v dtype": (call(v=v.half()), "v: expected float32 like q, got float16"),
        "heads": (call(q=q[:, :3]), "k: expected a number of heads that divides the 3 heads of q"),
        "no heads": (call(k=k[:, :0], v=v[:, :0]), "k: expected a number of heads"),
        "v heads": (
            call(v=v[:, :1]),
            r"v: expected \[total_k, .*\] with the rows and heads of k \(float32 \[5, 2, 16\]",
        ),
        "v rows": (call(v=v[:4]), "v: expected .* with the rows and heads of k"),
        "k head_dim": (call(k=k[..., :8]), r"k: expected head_dim 16 like q, got float32 \[5, 2, 8\]"),
        "head_dim": (call(*[], **dict.fromkeys("qkv", q.new_zeros(5, 4, 513))), "q: expected a head_dim of 1 to 512"),
        "no head_dim": (call(**dict.fromkeys("qkv", q[..., :0])), "q: expected a head_dim of 1 to 512"),
        "v head_dim": (call(v=v.new_zeros(5, 2, 513)), "v: expected a head_dim of 1 to 512, got float32"),
        "no v head_dim": (call(v=v[..., :0]), "v: expected a head_dim of 1 to 512"),
        "q strided": (call(q=non_contiguous(q)), r"q: expected a contiguous last dimension \(stride 1\), got stride 2"),
        "k strided": (call(k=non_contiguous(k)), "k: expected a contiguous last dimension"),
        "cu_seqlens_q dtype": (call(cu_q=cu_seqlens.float()), "cu_seqlens_q: expected int32 or int64, got float32"),
        "cu_seqlens_q rank": (call(cu_q=cu_seqlens[None]), "cu_seqlens_q: expected 1 dimensions"),
        "cu_seqlens_q start": (call(cu_q=cu_seqlens + 1), "cu_seqlens_q: expected to start at 0"),
        "cu_seqlens_q end": (call(q=q[:4]), "cu_seqlens_q: expected to end at most at total=4, got 5"),
        "cu_seqlens_k end": (call(k=k[:4], v=v[:4]), "cu_seqlens_k: expected to end at most at total=4, got 5"),
        "cu_seqlens_k order": (
            call(cu_k=torch.tensor([0, 3, 2], dtype=torch.int32, device=device)),
            "cu_seqlens_k: expected never to decrease",
        ),
        "documents": (
            call(cu_k=cu_seqlens_of([5], device)),
            r"cu_seqlens_k: expected as many documents as cu_seqlens_q \(2\), got 1",
        ),
        "causal window": (call(window_size=(4, 2)), r"window_size: .* with causal=True, got \(4, 2\)"),
        "window": (call(window_size=(-2, 0)), r"window_size: expected -1 \(open\) .*, got \(-2, 0\)"),
        "softmax_scale": (call(softmax_scale=float("nan")), "softmax_scale: expected a finite number, got nan"),
        "softmax_scale beyond float32": (
            call(softmax_scale=1e39),
            "softmax_scale: expected a finite number, got 1e\\+39",
        ),
        "softcap": (call(softcap=-1.0), "softcap: expected 0 .* got -1"),
        "sinks shape": (
            call(sinks=torch.zeros(2, device=device)),
            r"sinks: expected \[num_q_heads\] = \[4\], got float32 \[2\]",
        ),
        "complex sinks": (
            call(sinks=torch.zeros(4, dtype=torch.complex64, device=device)),
            r"sinks: expected float32, got complex64 \[4\]",
        ),
        "sinks dtype": (call(sinks=torch.zeros(4, dtype=torch.float64, device=device)), "sinks: expected float32"),
    }


# Values of cu_seqlens, which a GPU reports under one name for q and k, and whichever it meets first.
FOUND_ON_THE_DEVICE = {f"cu_seqlens_{what}" for what in ("q start", "q end", "k end", "k order")}


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    if device == "cuda" and case in FOUND_ON_THE_DEVICE:
        message = "cu_seqlens: expected .* got a wrong value at index"
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_mixed_devices_are_named():
    case = Case([2], device="cuda")
    with pytest.raises(ValueError, match="k: expected on cuda:0 like q"):
        po.varlen_attention(case.q, case.k.cpu(), case.v, case.cu_seqlens[0])


@pytest.mark.parametrize("backend", ["packing_ops", "sdpa"])
def test_padding_may_hold_anything(backend):
    """NaN in rows past the last document, as memory that nobody wrote has, reaches no document and no gradient."""
    case = Case([9, 0, 4], heads=(4, 2), tail=3)
    rows = [t.detach().clone() for t in (case.q, case.k, case.v)]
    results = []
    for fill in (0.0, torch.nan):
        given = [t.index_fill(0, torch.arange(13, 16), fill).requires_grad_() for t in rows]
        out = po.attention(*given, *case.cu_seqlens, backend=backend)
        results.append([out, *torch.autograd.grad(out, given, case.dout)])
    for clean, filled in zip(*results, strict=True):
        torch.testing.assert_close(filled, clean, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"is_causal": True}, r"is_causal: expected causal="),
        ({"scale": 0.5}, r"scale: expected softmax_scale="),
        ({"dropout_p": 0.1}, r"dropout_p: expected nothing: there is no dropout"),
        ({"max_seqlen_q": 4}, r"max_seqlen_q: expected nothing"),
        ({"causl": True}, r"unexpected keyword argument 'causl'"),
    ],
)
def test_a_keyword_of_others_is_answered_with_ours(given, wanted):
    q = torch.randn(5, 2, 8)
    with pytest.raises(TypeError, match=wanted):
        po.varlen_attention(q, q, q, torch.tensor([0, 5], dtype=torch.int32), **given)


@pytest.mark.parametrize("as_metadata", [True, False])
def test_heads_before_tokens_are_told_about_layout(as_metadata):
    q = torch.randn(2, 5, 8)
    documents = po.PackedMetadata.from_lengths([2, 3])
    with pytest.raises(
        ValueError, match=r"q: expected \[total_q, num_q_heads, head_dim\], got \[2, 5, 8\] .*layout='bhsd'"
    ):
        po.varlen_attention(q, q, q, documents if as_metadata else documents.cu_seqlens)
    out = po.varlen_attention(q[None], q[None], q[None], documents, layout="bhsd")
    alone = po.varlen_attention(*[q.transpose(0, 1)] * 3, documents)
    assert torch.equal(out[0], alone)
