"""The CUDA kernels of causal_conv1d, gated_delta_rule and mamba2_scan on the CPU, from the rows to the gradients."""

import pytest
import test_conv
import test_scan
import test_scan_mamba
import torch
from emulator.build import cuda_headers
from helpers import assert_error_within, assert_same, cu_seqlens_of
from helpers import emulated_hybrid as emulated

from packing_ops.reference import conv as conv_oracle
from packing_ops.reference import scan as scan_oracle

HEADERS = cuda_headers()
pytestmark = pytest.mark.skipif(HEADERS is None, reason="needs the headers of a CUDA toolkit")
HALVES = [torch.bfloat16, torch.float16]


# Whichever thread is ahead and whenever copies arrive: races would have other bits.
ON_SCHEDULES = pytest.mark.parametrize("schedule", [(False, 0), (True, 1), (False, 2), (True, 3)], ids=str)


def assert_same_on(monkeypatch, schedule, call):
    wanted = call()
    monkeypatch.setattr(emulated, "schedule", schedule)
    assert_same(call(), wanted)


# --- causal_conv1d ---


def convolved(tensors, cu_seqlens, gradients, **options):
    tensors = [None if t is None else t.detach() for t in tensors]
    x, weight, bias, state = tensors
    found = emulated.conv(HEADERS, x, weight, bias, cu_seqlens, state, *gradients, **options)
    return [t for t in found if t is not None]


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("width", [1, 3, 4, 7])
@pytest.mark.parametrize("channels", [72, 33])
def test_convolution(dtype, width, channels):
    silu, state = width != 3, width != 4
    tensors, cu_seqlens = test_conv.inputs_of("cpu", dtype, channels, width, state=state)
    documents = len(cu_seqlens) - 1
    gradients = torch.randn_like(tensors[0]), torch.randn(documents, channels, width - 1).to(dtype)
    found = convolved(tensors, cu_seqlens, gradients, silu=silu)
    activation = "silu" if silu else None
    low = test_conv.results_of(conv_oracle.causal_conv1d, tensors, cu_seqlens, activation, gradients)
    doubled = [None if t is None else t.double() for t in tensors]
    exact = test_conv.results_of(conv_oracle.causal_conv1d, doubled, cu_seqlens, activation, gradients)
    for mine, theirs, wanted in zip(found, low, exact, strict=True):
        floor = 4 * torch.finfo(dtype).eps * wanted.abs().max().item() if wanted.numel() else 0
        assert_error_within(mine, theirs, wanted, floor=floor)


@pytest.mark.parametrize("channels", [1032, 1026])  # by vectors, and one by one
def test_convolution_of_blocks_of_channels(channels):
    (x, weight, bias, state), cu_seqlens = test_conv.inputs_of("cpu", torch.bfloat16, channels, 4, lengths=[300, 3])
    gradients = torch.randn_like(x), torch.randn_like(state)
    found = convolved((x, weight, bias, state), cu_seqlens, gradients, silu=True)
    some = slice(channels - 16, channels)
    given = x[:, some].contiguous(), weight[some], bias[some], state[:, some].contiguous()
    alone = convolved(given, cu_seqlens, [g[:, some].contiguous() for g in gradients], silu=True)
    axes = [1, 1, 1, 0, 0, 1]  # of the channels
    for mine, wanted, axis in zip(found, alone, axes, strict=True):
        assert_same(mine.narrow(axis, channels - 16, 16), wanted)


def test_convolution_has_the_bits_of_a_document_alone():
    lengths = [130, 0, 2, 300]
    (x, weight, bias, state), cu_seqlens = test_conv.inputs_of("cpu", torch.bfloat16, 16, 4, lengths=lengths)
    gradients = torch.randn_like(x), torch.randn_like(state)
    packed = convolved((x, weight, bias, state), cu_seqlens, gradients, silu=True)
    start = cu_seqlens[3]
    rows = slice(start, start + 300)
    given = x[rows].contiguous(), weight, bias, state[3:]
    alone = convolved(given, cu_seqlens_of([300]), (gradients[0][rows], gradients[1][3:]), silu=True)
    for i in (0, 2):
        assert_same(packed[i][rows], alone[i])
    for i in (1, 5):
        assert_same(packed[i][3:], alone[i])


@ON_SCHEDULES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_convolution_on_schedules(monkeypatch, schedule, dtype):
    tensors, cu_seqlens = test_conv.inputs_of("cpu", dtype, 40, 4, lengths=[130, 0, 2, 300])
    gradients = torch.randn_like(tensors[0]), torch.randn_like(tensors[3])
    assert_same_on(monkeypatch, schedule, lambda: convolved(tensors, cu_seqlens, gradients, silu=True))


# --- gated_delta_rule ---


def scanned(tensors, cu_seqlens, gradients, *, gpu="sm_90", use_qk_l2norm=True):
    """As test_scan.results_of; every argument that is given is contiguous."""
    *given, state = tensors
    scale = given[0].shape[-1] ** -0.5
    options = {"l2norm": use_qk_l2norm, "scale": scale, "gpu": gpu}
    return [t for t in emulated.scan(HEADERS, *given, cu_seqlens, state, *gradients, **options) if t is not None]


def assert_scanned(monkeypatch, *args, gpu="sm_90", **options):
    """test_scan's comparison, of the emulated kernels."""
    own = test_scan.results_of

    def results_of(rule, tensors, cu_seqlens, gradients, **options):
        if rule is test_scan.ours:
            return scanned(tensors, cu_seqlens, gradients, gpu=gpu, **options)
        return own(rule, tensors, cu_seqlens, gradients, **options)

    monkeypatch.setattr(test_scan, "results_of", results_of)
    return test_scan.assert_right(*args, **options)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("state", [False, True])
def test_scan_equals_reference(monkeypatch, dtype, state):
    tensors, cu_seqlens = test_scan.inputs_of("cpu", dtype, state=state)
    found = assert_scanned(monkeypatch, tensors, cu_seqlens, use_qk_l2norm=True)
    for i in (0, 2, 3, 4, 5, 6):
        assert not found[i][-test_scan.PADDING :].any()


@pytest.mark.parametrize(
    ("dtype", "dims", "gpu"),
    [
        (torch.bfloat16, (128, 128), "sm_90"),
        (torch.bfloat16, (128, 64), "sm_89"),
        (torch.bfloat16, (256, 64), "sm_90"),
        (torch.bfloat16, (256, 128), "sm_80"),
        (torch.bfloat16, (64, 256), "sm_89"),
        (torch.float32, (128, 64), "sm_90"),
        (torch.float32, (256, 64), "sm_90"),
    ],
    ids=str,
)
def test_scan_of_other_dims(monkeypatch, dtype, dims, gpu):
    inputs = test_scan.inputs_of("cpu", dtype, dims=dims, heads=(1, 1), lengths=[65, 3])
    assert_scanned(monkeypatch, *inputs, gpu=gpu, use_qk_l2norm=True)


@pytest.mark.parametrize("heads", [(2, 2), (1, 3), (2, 4)], ids=str)
def test_scan_of_heads(monkeypatch, heads):
    tensors, cu_seqlens = test_scan.inputs_of("cpu", torch.bfloat16, heads=heads, lengths=[70, 3])
    tensors[:2] = (scan_oracle.l2norm(t.float()).to(t.dtype) for t in tensors[:2])
    assert_scanned(monkeypatch, tensors, cu_seqlens, use_qk_l2norm=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("g", "beta"), [(0.0, 1.0), (0.0, 0.0), (-50.0, 0.5), (-1e30, 1.0)])
def test_scan_of_extreme_gates(monkeypatch, dtype, g, beta):
    tensors, cu_seqlens = test_scan.inputs_of("cpu", dtype, lengths=[130, 3])
    tensors[3], tensors[4] = torch.full_like(tensors[3], g), torch.full_like(tensors[4], beta)
    assert_scanned(monkeypatch, tensors, cu_seqlens, use_qk_l2norm=True)


def test_scan_has_the_bits_of_a_document_alone():
    lengths = [130, 0, 2, 200]
    tensors, cu_seqlens = test_scan.inputs_of("cpu", torch.bfloat16, heads=(1, 1), lengths=lengths)
    gradients = torch.randn_like(tensors[2]), torch.randn_like(tensors[5])
    packed = scanned(tensors, cu_seqlens, gradients)
    rows = slice(132, 332)
    alone = scanned(
        [t[rows] for t in tensors[:5]] + [tensors[5][3:]], cu_seqlens_of([200]), (gradients[0][rows], gradients[1][3:])
    )
    for whole, part in zip(packed, alone, strict=True):
        assert_same(whole[3:] if whole.dim() == 4 else whole[rows], part)


def test_scan_has_the_bits_of_calls_that_go_on():
    tensors, cu_seqlens = test_scan.inputs_of("cpu", torch.bfloat16, heads=(1, 1), lengths=[200], state=False)
    whole, last = scanned(tensors, cu_seqlens, (None, None))
    first, state = scanned([*(t[:128] for t in tensors[:5]), None], cu_seqlens_of([128]), (None, None))
    second, end = scanned([*(t[128:200] for t in tensors[:5]), state], cu_seqlens_of([72]), (None, None))
    assert_same(torch.cat([first, second]), whole[:200])
    assert_same(end, last)
    prefix, _ = scanned([*(t[:150] for t in tensors[:5]), None], cu_seqlens_of([150]), (None, None))
    assert_same(prefix, whole[:150])


def test_scan_keeps_nan_in_its_document():
    tensors, cu_seqlens = test_scan.inputs_of("cpu", torch.bfloat16, heads=(1, 1), lengths=[70, 66, 7])
    gradients = torch.randn_like(tensors[2]), torch.randn_like(tensors[5])
    clean = scanned(tensors, cu_seqlens, gradients)
    for i in range(3):
        broken = [t.clone() for t in tensors]
        broken[i][70:136:3], broken[i][-test_scan.PADDING :] = torch.nan, torch.inf
        found = scanned(broken, cu_seqlens, gradients)
        others = [*range(70), *range(136, tensors[0].shape[0])]
        for mine, wanted in zip(found, clean, strict=True):
            rows = [0, 2] if mine.dim() == 4 else others
            assert_same(mine[rows], wanted[rows])


@ON_SCHEDULES
@pytest.mark.parametrize(("dtype", "gpu"), [(torch.bfloat16, "sm_90"), (torch.float32, "sm_80")], ids=str)
def test_scan_on_schedules(monkeypatch, schedule, dtype, gpu):
    tensors, cu_seqlens = test_scan.inputs_of("cpu", dtype, lengths=[200, 0, 65, 3])
    gradients = torch.randn_like(tensors[2]), torch.randn_like(tensors[5])
    assert_same_on(monkeypatch, schedule, lambda: scanned(tensors, cu_seqlens, gradients, gpu=gpu))


# --- mamba2_scan ---


def mamba(tensors, cu_seqlens, gradients=(None, None), *, dt_softplus=True, dt_limit=(0.0, float("inf")), gpu="sm_90"):
    """As test_scan_mamba.results_of; every argument that is given is contiguous."""
    options = {"softplus": dt_softplus, "limit": dt_limit, "gpu": gpu}
    tensors = {name: None if t is None else t.detach() for name, t in tensors.items()}
    return emulated.mamba(HEADERS, tensors, cu_seqlens, *gradients, **options)


def assert_mamba(monkeypatch, tensors, cu_seqlens, *, gpu="sm_90", **options):
    """test_scan_mamba's comparison, of the emulated kernels."""
    own = test_scan_mamba.results_of

    def results_of(scan, *args, **options):
        return mamba(*args, gpu=gpu, **options) if scan is test_scan_mamba.ours else own(scan, *args, **options)

    monkeypatch.setattr(test_scan_mamba, "results_of", results_of)
    return test_scan_mamba.assert_right(tensors, cu_seqlens, **options)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("state", [False, True])
def test_mamba_equals_reference(monkeypatch, dtype, state):
    tensors, cu_seqlens = test_scan_mamba.inputs_of("cpu", dtype, state=state)
    found = assert_mamba(monkeypatch, tensors, cu_seqlens)
    for name in ("out", *test_scan_mamba.ROWS):
        assert not found[name][-test_scan_mamba.PADDING :].any()


@pytest.mark.parametrize(
    ("dtype", "dims", "gpu"),
    [
        (torch.bfloat16, (128, 64), "sm_90"),
        (torch.bfloat16, (128, 128), "sm_89"),
        (torch.bfloat16, (256, 64), "sm_80"),
        (torch.float32, (128, 64), "sm_90"),
        (torch.float32, (256, 64), "sm_90"),
    ],
    ids=str,
)
def test_mamba_of_other_dims(monkeypatch, dtype, dims, gpu):
    inputs = test_scan_mamba.inputs_of("cpu", dtype, dims=dims, heads=(1, 1), lengths=[65, 3])
    assert_mamba(monkeypatch, *inputs, gpu=gpu)


@pytest.mark.parametrize("heads", [(2, 2), (1, 3), (2, 4)], ids=str)
def test_mamba_of_groups(monkeypatch, heads):
    tensors, cu_seqlens = test_scan_mamba.inputs_of("cpu", torch.bfloat16, heads=heads, lengths=[70, 3])
    assert_mamba(monkeypatch, {**tensors, "D": None}, cu_seqlens)


@pytest.mark.parametrize("softplus", [False, True])
def test_mamba_at_the_limits_of_a_step(monkeypatch, softplus):
    tensors, cu_seqlens = test_scan_mamba.inputs_of("cpu", torch.float32, lengths=[70, 3])
    tensors["dt"] = tensors["dt"] * 4 + (0 if softplus else 2)
    tensors |= {"z": None, "dt_bias": None}
    assert_mamba(monkeypatch, tensors, cu_seqlens, dt_softplus=softplus, dt_limit=(0.05, 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("a", "dt"), [(0.0, 0.5), (-50.0, 0.5), (-1e30, 0.5), (-1.0, 0.0)])
def test_mamba_of_extreme_decays(monkeypatch, dtype, a, dt):
    tensors, cu_seqlens = test_scan_mamba.inputs_of("cpu", dtype, lengths=[130, 3])
    same = {"A": a, "dt": dt, "dt_bias": 0.0}
    tensors = {**tensors, **{name: torch.full_like(tensors[name], value) for name, value in same.items()}}
    assert_mamba(monkeypatch, tensors, cu_seqlens, dt_softplus=False)


def test_mamba_has_the_bits_of_a_document_alone():
    tensors, cu_seqlens = test_scan_mamba.inputs_of("cpu", torch.bfloat16, heads=(1, 1), lengths=[130, 0, 2, 200])
    dout, dfinal = test_scan_mamba.gradients_of(tensors, 4)
    packed = mamba(tensors, cu_seqlens, (dout, dfinal))
    rows = slice(132, 332)
    given = test_scan_mamba.pieces_of(tensors, cu_seqlens, 3, slice(0, 200), tensors["initial_state"][3:])
    alone = mamba(given, cu_seqlens_of([200]), (dout[rows], dfinal[3:]))
    for name in ("out", *test_scan_mamba.ROWS):
        assert_same(packed[name][rows], alone[name])
    for name in ("final_state", "initial_state"):
        assert_same(packed[name][3:], alone[name])


def test_mamba_has_the_bits_of_calls_that_go_on():
    tensors, cu_seqlens = test_scan_mamba.inputs_of("cpu", torch.bfloat16, lengths=[200], state=False)
    rows = lambda *bounds, state=None: test_scan_mamba.pieces_of(tensors, cu_seqlens, 0, slice(*bounds), state)  # noqa: E731
    whole = mamba(tensors, cu_seqlens)
    first = mamba(rows(0, 128), cu_seqlens_of([128]))
    second = mamba(rows(128, 200, state=first["final_state"]), cu_seqlens_of([72]))
    assert_same(torch.cat([first["out"], second["out"]]), whole["out"][:200])
    assert_same(second["final_state"], whole["final_state"])
    assert_same(mamba(rows(0, 150), cu_seqlens_of([150]))["out"], whole["out"][:150])


def test_mamba_keeps_nan_in_its_document():
    tensors, cu_seqlens = test_scan_mamba.inputs_of("cpu", torch.bfloat16, heads=(1, 1), lengths=[70, 66, 7])
    gradients = test_scan_mamba.gradients_of(tensors, 3)
    clean = mamba(tensors, cu_seqlens, gradients)
    others = [*range(70), *range(136, tensors["x"].shape[0])]
    for name in test_scan_mamba.ROWS:
        broken = {**tensors, name: tensors[name].clone()}
        broken[name][70:136:3], broken[name][-test_scan_mamba.PADDING :] = torch.nan, torch.inf
        found = mamba(broken, cu_seqlens, gradients)
        for row in ("out", *test_scan_mamba.ROWS):
            assert_same(found[row][others], clean[row][others])
        for document in ("final_state", "initial_state"):
            assert_same(found[document][[0, 2]], clean[document][[0, 2]])


@ON_SCHEDULES
@pytest.mark.parametrize(("dtype", "gpu"), [(torch.bfloat16, "sm_90"), (torch.float32, "sm_80")], ids=str)
def test_mamba_on_schedules(monkeypatch, schedule, dtype, gpu):
    tensors, cu_seqlens = test_scan_mamba.inputs_of("cpu", dtype, lengths=[200, 0, 65, 3])
    gradients = test_scan_mamba.gradients_of(tensors, 4)
    assert_same_on(monkeypatch, schedule, lambda: mamba(tensors, cu_seqlens, gradients, gpu=gpu))
