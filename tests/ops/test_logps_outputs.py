"""What token_logps returns next to log-probabilities, and what it makes of the logits before: against torch in
float64.
"""

import pytest
import torch
from helpers import assert_same, lengths_strategy
from helpers.logps_case import LOW, assert_outputs_and_gradients, batch, leaves
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import logps as oracle

NAMES = ("logps", "lse", "entropy", "sum_p2", "mean_logit", "top1")
FLOATING = NAMES[:-1]
SCALINGS = {
    "": {},
    "temperature": {"temperature": 0.7},
    "temperatures": {"temperature": "each"},
    "scale": {"scale": 2.5},
    "softcap": {"softcap": 3.0},
    "all": {"temperature": "each", "scale": 1.5, "softcap": 2.0},
}


def scaled(name, total, device):
    options = dict(SCALINGS[name])
    if options.get("temperature") == "each":
        options["temperature"] = 0.3 + 2 * torch.rand(total, device=device, dtype=torch.float64)
    return options


@pytest.mark.parametrize("scaling", SCALINGS)
@given(lengths=lengths_strategy, vocab=st.integers(1, 90), chunk=st.integers(1, 100), biased=st.booleans())
def test_equals_reference_at_any_size(device, scaling, lengths, vocab, chunk, biased):
    hidden, weight, labels, cu_seqlens, bias = batch(device, vocab, 7, lengths)
    options = {"bias": bias if biased else None, **scaled(scaling, hidden.shape[0], device)}
    expected = oracle.token_outputs(hidden, weight, labels, cu_seqlens, **options)
    found = po.token_logps(hidden, weight, labels, cu_seqlens, chunk=chunk, outputs=NAMES, **options)
    for name, actual in zip(NAMES, found, strict=True):
        torch.testing.assert_close(actual, expected[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("chunk", [None, 77])
def test_values_and_gradients(device, dtype, scaling, chunk):
    """Within twice the error of torch in that dtype. A bias would be rounded elsewhere: test_logps.py has it."""
    hidden, weight, labels, cu_seqlens, _ = batch(device, 1003, 48, [0, 40, 1, 90, 0, 120], dtype=dtype, scale=0.3)
    options = scaled(scaling, hidden.shape[0], device)
    assert_outputs_and_gradients(hidden, weight, labels, cu_seqlens, FLOATING, chunk, **options)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_gradcheck(device, scaling):
    hidden, weight, labels, cu_seqlens, bias = batch(device, 13, 3, [3, 0, 4], 1)
    options = scaled(scaling, hidden.shape[0], device)

    def function(h, w, b):
        return po.token_logps(h, w, labels, cu_seqlens, bias=b, chunk=5, outputs=FLOATING, **options)

    assert torch.autograd.gradcheck(function, leaves(hidden, weight, bias))


@pytest.mark.parametrize("name", FLOATING)
def test_gradient_of_one_alone(device, name):
    hidden, weight, labels, cu_seqlens, _ = batch(device, 40)
    ours, theirs = leaves(hidden, weight), leaves(hidden, weight)
    (found,) = po.token_logps(*ours, labels, cu_seqlens, outputs=(name,))
    found.square().sum().backward()
    oracle.token_outputs(*theirs, labels, cu_seqlens)[name].square().sum().backward()
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


def test_names_and_their_order(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    entropy, top1, logps = po.token_logps(hidden, weight, labels, cu_seqlens, outputs=["entropy", "top1", "logps"])
    plain, of_entropy = po.token_logps(hidden, weight, labels, cu_seqlens, entropy=True)
    assert_same(entropy, of_entropy)
    assert_same(logps, plain)
    assert top1.dtype == torch.int64
    assert not top1.requires_grad
    (alone,) = po.token_logps(hidden, weight, labels, cu_seqlens, outputs=("logps",))
    torch.testing.assert_close(alone, logps)
    again = po.token_logps(hidden, weight, labels, cu_seqlens, outputs=("logps", "logps"))
    assert len(again) == 2


def test_slots_without_a_target(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    (leaf,) = leaves(hidden)
    found = po.token_logps(leaf, weight, labels, cu_seqlens, outputs=NAMES)
    empty = po.shift_labels(labels, cu_seqlens) == -100
    for name, values in zip(NAMES, found, strict=True):
        assert (values[empty] == (-1 if name == "top1" else 0)).all()
    sum(values.sum() for values in found[:-1]).backward()
    assert_same(leaf.grad.any(1), ~empty)


def test_first_of_equal_logits(device):
    hidden, labels = torch.ones(4, 2, device=device), torch.zeros(4, dtype=torch.long, device=device)
    cu_seqlens = torch.tensor([0, 4], dtype=torch.int32, device=device)
    weight = torch.zeros(5000, 2, device=device)
    weight[[3001, 7, 4999]] = 1
    for chunk in (None, 5, 100):
        (top1,) = po.token_logps(hidden, weight, labels, cu_seqlens, outputs=("top1",), chunk=chunk)
        assert top1.tolist() == [7, 7, 7, -1]


def test_nan_and_shut_entries(device):
    """NaN where a logit is NaN, only in its row; entries of -inf have no weight, and their mean is -inf."""
    hidden, weight, labels, cu_seqlens, bias = batch(device, 40)
    labels[:] = labels.clamp(min=0)
    hidden[7] = torch.nan
    found = po.token_logps(hidden, weight, labels, cu_seqlens, outputs=NAMES, chunk=8)
    for values in found[:-1]:
        assert values.isnan().nonzero().tolist() == [[7]]
    assert found[-1][7] == -1
    hidden[7] = 1
    bias[8:24] = -torch.inf
    labels[(labels >= 8) & (labels < 24)] = 3
    for softcap in (0.0, 5.0):
        options = {"bias": bias, "softcap": softcap}
        expected = oracle.token_outputs(hidden, weight, labels, cu_seqlens, **options)
        for chunk in (None, 8):
            found = po.token_logps(hidden, weight, labels, cu_seqlens, outputs=NAMES, chunk=chunk, **options)
            for name, actual in zip(NAMES, found, strict=True):
                torch.testing.assert_close(actual, expected[name])


def test_softcap_of_large_logits(device):
    for dtype in LOW:
        hidden, weight, labels, cu_seqlens, _ = batch(device, 300, dtype=dtype, scale=100.0)
        found = po.token_logps(hidden, weight, labels, cu_seqlens, softcap=30.0, outputs=FLOATING)
        expected = oracle.token_outputs(hidden, weight, labels, cu_seqlens, softcap=30.0)
        for name, actual in zip(FLOATING, found, strict=True):
            torch.testing.assert_close(actual, expected[name], rtol=1e-3, atol=1e-3)


def test_no_softcap(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    for softcap in (0, float("inf")):
        assert_same(
            po.token_logps(hidden, weight, labels, cu_seqlens, softcap=softcap),
            po.token_logps(hidden, weight, labels, cu_seqlens),
        )


def test_equal_temperatures_are_one_temperature(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device, dtype=torch.float32)
    one = po.token_logps(hidden, weight, labels, cu_seqlens, temperature=0.7)
    for each in (torch.full_like(hidden[:, 0], 0.7), torch.full_like(hidden[None, :, 0], 0.7), torch.tensor(0.7)):
        torch.testing.assert_close(po.token_logps(hidden, weight, labels, cu_seqlens, temperature=each), one)


def test_temperature_matters_where_there_is_a_target(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    temperature = torch.ones_like(hidden[:, 0])
    targets = po.shift_labels(labels, cu_seqlens) != -100
    temperature[~targets] = 0
    assert_same(
        po.token_logps(hidden, weight, labels, cu_seqlens, temperature=temperature),
        po.token_logps(hidden, weight, labels, cu_seqlens, temperature=1.0),
    )
    wrong = int(targets.nonzero()[2])
    for value in (0.0, -1.0, float("nan"), float("inf")):
        temperature[wrong] = value

        def calls():
            found = po.token_logps(hidden, weight, labels, cu_seqlens, temperature=temperature)
            assert found.isnan().nonzero().tolist() == [[wrong]]
            po.token_logps(hidden, weight, labels, cu_seqlens)

        with pytest.raises(ValueError, match=r"temperature: expected numbers above 0.* at index "):
            calls()


def test_entries_that_float32_does_not_count(device):
    hidden, weight = torch.ones(2, 1, device=device), torch.ones(2**24 + 1, 1, device=device)
    labels, cu_seqlens = torch.tensor([0, 1], device=device), torch.tensor([0, 2], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="outputs: expected no 'top1' of more than 16777216 entries"):
        po.token_logps(hidden, weight, labels, cu_seqlens, outputs=("top1",))


def test_loss_with_softcap_and_temperatures(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    options = scaled("all", hidden.shape[0], device)
    expected = oracle.token_outputs(hidden, weight, labels, cu_seqlens, **options)["logps"]
    loss = po.chunked_cross_entropy(hidden, weight, labels, cu_seqlens, reduction="sum", **options)
    torch.testing.assert_close(loss, -expected.sum())


def test_label_smoothing(device):
    """As torch's, from lse and mean_logit."""
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    logps, lse, mean = po.token_logps(hidden, weight, labels, cu_seqlens, outputs=("logps", "lse", "mean_logit"))
    loss = 0.9 * -logps + 0.1 * (lse - mean)
    expected = torch.nn.functional.cross_entropy(
        hidden @ weight.t(), po.shift_labels(labels, cu_seqlens), reduction="none", label_smoothing=0.1
    )
    torch.testing.assert_close(loss, expected)


def test_compiles_with_temperatures(device, fresh_compile):
    compiled = torch.compile(po.token_logps, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        hidden, weight, labels, cu_seqlens, _ = batch(device, lengths=lengths)
        options = {"outputs": NAMES, **scaled("all", hidden.shape[0], device)}
        ours, eager = leaves(hidden, weight), leaves(hidden, weight)
        sum(each.sum() for each in compiled(*ours, labels, cu_seqlens, **options)[:-1]).backward()
        sum(each.sum() for each in po.token_logps(*eager, labels, cu_seqlens, **options)[:-1]).backward()
        for actual, expected in zip(ours, eager, strict=True):
            torch.testing.assert_close(actual.grad, expected.grad)


@pytest.mark.parametrize("softcap", [30.0, 1e3, 1e6, 1e30])
def test_a_large_softcap_keeps_float32_s_precision(softcap):
    hidden, weight, labels, cu_seqlens, _ = batch("cpu", 50, 4, dtype=torch.float32)
    ours = po.token_logps(hidden, weight, labels, cu_seqlens, softcap=softcap)
    exact = po.token_logps(hidden.double(), weight.double(), labels, cu_seqlens, softcap=softcap)
    torch.testing.assert_close(ours.double(), exact, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["scale", "softcap", "temperature"])
def test_a_number_that_wants_a_gradient_is_refused(name):
    hidden, weight, labels, cu_seqlens, _ = batch("cpu", 50, 4, dtype=torch.float32)
    wrong = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(ValueError, match=rf"^{name}: expected .*without requires_grad"):
        po.token_logps(hidden, weight, labels, cu_seqlens, **{name: wrong})


@pytest.mark.parametrize("items", [-1, float("nan"), torch.tensor(3j)])
def test_wrong_counts_of_items_are_named(items):
    hidden, weight, labels, cu_seqlens, _ = batch("cpu", 50, 4, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"^num_items_in_batch: expected a"):
        po.chunked_cross_entropy(hidden, weight, labels, cu_seqlens, num_items_in_batch=items)


@pytest.mark.parametrize("items", [0, torch.tensor(0)])
def test_no_target_in_the_batch_is_a_loss_of_0(items):
    hidden, weight, labels, cu_seqlens, _ = batch("cpu", 50, 4, dtype=torch.float32)
    labels = torch.full_like(labels, -100)
    assert po.chunked_cross_entropy(hidden, weight, labels, cu_seqlens, num_items_in_batch=items) == 0
