"""token_kl that keeps d(logits) from forward to backward."""

import contextlib
import math

import pytest
import torch
from helpers import assert_error_within, assert_same, products_by_pairs
from helpers.logps_case import LENGTHS, LOW, leaves
from test_logps_kept import ALL, products
from test_logps_kl import BETAS, as_dtype, ours, result_and_gradients, theirs, two_heads
from torch.utils.checkpoint import checkpoint

import packing_ops as po
from packing_ops._runtime import gate

CHUNK = 64  # of 301 entries


def kept_of(kl):
    """What the graph of kl holds of d(logits): [rows, chunks, columns]."""
    return kl.grad_fn.saved_tensors[-1]


def randn_like_labels(labels):
    return torch.randn(labels.shape[0], device=labels.device, dtype=torch.float64)


# --- values ---


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("chunks", [0.9, 2, 100])
def test_gradients_equal_reference_in_double(device, beta, chunks):
    given = two_heads(device)
    grad, keep = randn_like_labels(given[2]), int(chunks * given[2].shape[0] * CHUNK * 8)
    options = {"beta": beta, "temperature": 1.3, "teacher_temperature": 0.8}
    found = result_and_gradients(ours, *given, grad, chunk=CHUNK, keep_logits=keep, **options)
    expected = result_and_gradients(theirs, *given, grad, **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(device, beta):
    student, teacher, labels, cu_seqlens = two_heads(device, 13, 3, 2, lengths=[3, 0, 4], tail=1)
    for keep in (600, ALL):
        options = {"beta": beta, "temperature": 0.6, "chunk": 8, "keep_logits": keep}
        assert torch.autograd.gradcheck(
            lambda *heads, options=options: ours(heads, teacher, labels, cu_seqlens, **options), leaves(*student)
        )


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("mode", [False, True])
def test_bits_of_kept_and_remade(device, dtype, beta, mode):
    """Within invariant(): elsewhere products of blocks of rows may have other bits than those of all rows."""
    given = two_heads(device, 9001, 24, 16, dtype=dtype)
    grad = randn_like_labels(given[2])
    bound = None if device == "cpu" else int((given[2] != -100).sum())
    with po.invariant() if mode else torch.enable_grad():
        found = [
            result_and_gradients(
                ours, *given, grad, beta=beta, temperature=0.7, chunk=4096, keep_logits=keep, max_targets=bound
            )
            for keep in (0, 48 * 4096 * dtype.itemsize, ALL)
        ]
    for kept in found[1:]:
        for actual, expected in zip(kept, found[0], strict=True):
            if mode:
                assert_same(actual, expected)
            else:
                torch.testing.assert_close(
                    actual, expected, **({} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.02})
                )


def assert_errors_within(heads, labels, cu_seqlens, grad, **options):
    """Twice those of torch in that dtype, of all logits at once, whatever is kept. A divergence is a sum of differences
    of logarithms of probabilities, which float32 rounds.
    """
    exact = [as_dtype(torch.float64, head) for head in heads]
    exact = result_and_gradients(theirs, *exact, labels, cu_seqlens, grad.double(), **options)
    low = result_and_gradients(theirs, *heads, labels, cu_seqlens, grad, **options)
    for keep in (0, ALL):
        found = result_and_gradients(ours, *heads, labels, cu_seqlens, grad, keep_logits=keep, **options)
        sizes = [math.log(heads[0][1].shape[0]), *(each.abs().max().item() for each in exact[1:])]
        for each, size in zip(zip(found, low, exact, strict=True), sizes, strict=True):
            assert_error_within(*each, floor=4 * torch.finfo(torch.float32).eps * size)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_errors_of_half_types(device, dtype, beta, scale):
    *heads, labels, cu_seqlens = two_heads(device, 1003, 48, lengths=[0, 40, 1, 90, 0, 120], dtype=dtype, scale=0.3)
    grad = scale * torch.randn(labels.shape[0], device=device)
    assert_errors_within(heads, labels, cu_seqlens, grad, temperature=1.3, beta=beta)


@pytest.mark.parametrize("beta", BETAS)
def test_small_gradients_of_float16_under_a_loss_scale(device, beta):
    """Where heads are near each other and no entry is likely, d(logits) alone is too small for float16."""
    student, _, labels, cu_seqlens = two_heads(device, 60_001, 32, lengths=[64], dtype=torch.float16, scale=0.1)
    student = (*student[:2], None)
    teacher = [None if t is None else t + 0.03 * t * torch.randn_like(t) for t in student]
    assert_errors_within(
        (student, teacher), labels, cu_seqlens, torch.full(labels.shape, 64.0, device=device), beta=beta
    )


@pytest.mark.parametrize("keep", [0, ALL])
@pytest.mark.parametrize(("loss_scale", "size"), [(65_536.0, 1.0), (1024.0, 64.0)])
def test_a_loss_scale_times_hidden_may_leave_the_range_of_float16(device, loss_scale, size, keep):
    hidden = torch.full((3, 2), size, dtype=torch.float16, device=device)
    weight = torch.tensor([[0.5, 0.0], [0.0, 0.25]], dtype=torch.float16, device=device)
    teacher = hidden, weight + torch.tensor([[0.01, 0.0], [0.0, 0.0]], dtype=torch.float16, device=device), None
    given = (
        (hidden, weight, None),
        teacher,
        torch.zeros(3, dtype=torch.int64, device=device),
        torch.tensor([0, 3], device=device),
    )
    grad = torch.full((3,), loss_scale, device=device)
    exact = result_and_gradients(
        theirs, *(as_dtype(torch.float64, head) for head in given[:2]), *given[2:], grad.double()
    )
    for found, expected in zip(result_and_gradients(ours, *given, grad, keep_logits=keep), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("keep", [0, ALL])
def test_a_reverse_divergence_may_have_slopes_above_the_range_of_float16(device, keep):
    """A small gradient brings them back into it."""
    hidden, weight = (torch.ones(2, 1, dtype=torch.float16, device=device) for _ in range(2))
    teacher = hidden, torch.tensor([[0.0], [-5000.0]], dtype=torch.float16, device=device), None
    given = (hidden, weight, None), teacher, None, torch.tensor([0, 2], device=device)
    grad, options = torch.tensor([1e-3, 0.0], device=device), {"beta": 1.0, "teacher_temperature": 0.01}
    _, _, of_weight = result_and_gradients(ours, *given, grad, keep_logits=keep, **options)
    torch.testing.assert_close(of_weight, torch.tensor([[-125.0], [125.0]], dtype=torch.float16, device=device))


# --- rows that do not count ---


@pytest.mark.parametrize("by_pairs", [False, True])
@pytest.mark.parametrize("keep", [0, ALL])
@pytest.mark.parametrize("beta", BETAS)
def test_a_row_that_is_not_finite_needs_a_gradient_to_show(monkeypatch, device, beta, keep, by_pairs):
    """A NaN of the teacher: no trace where the row's gradient is 0, else in its hidden's and all of weight's and
    bias's.
    """
    if by_pairs:
        products_by_pairs(monkeypatch)
    student, teacher, _, cu_seqlens = two_heads(device, dtype=torch.bfloat16)
    teacher[0][8] = torch.nan
    grad = torch.ones(student[0].shape[0], device=device)
    grad[8] = 0
    options = {"beta": beta, "chunk": CHUNK, "keep_logits": keep}
    kl, *without = result_and_gradients(ours, student, teacher, None, cu_seqlens, grad.clone(), **options)
    assert kl[8].isnan()
    assert all(t.isfinite().all() for t in without)
    assert not without[0][8].any()
    grad[8] = 1
    _, hidden, *others = result_and_gradients(ours, student, teacher, None, cu_seqlens, grad, **options)
    assert hidden[8].isnan().all()
    others_rows = torch.arange(len(grad), device=device) != 8
    assert_same(hidden[others_rows], without[0][others_rows])
    assert all(t.isnan().all() for t in others)


@pytest.mark.parametrize("keep", [0, ALL])
def test_gradients_where_the_divergence_is_infinite(device, keep):
    """Forward: what the student shuts, has the gradient 0 - Q all the same. Reverse: NaN, but where nothing is asked
    for.
    """
    student, teacher, labels, cu_seqlens = two_heads(device, 40)
    shut = student[2].clone()
    shut[3] = -torch.inf
    options, grad = {"chunk": 16, "keep_logits": keep}, torch.ones(labels.shape[0], device=device)
    kl, _, _, of_bias = result_and_gradients(
        ours, (*student[:2], shut), teacher, labels, cu_seqlens, grad, beta=0, **options
    )
    counted = kl != 0
    logits = [torch.nn.functional.linear(*head) for head in ((*student[:2], shut), teacher)]
    p, q = (t[counted].softmax(1) for t in logits)
    assert kl[counted].isposinf().all()
    torch.testing.assert_close(of_bias, (p - q).sum(0))
    grad[1:] = 0
    for beta in BETAS[1:]:
        found = result_and_gradients(
            ours, student, (*teacher[:2], shut), labels, cu_seqlens, grad, beta=beta, **options
        )
        assert found[1][1:].count_nonzero() == 0
        assert found[1].isfinite().all() == (beta < 1 or not counted[0])


@pytest.mark.parametrize("keep", [0, ALL])
def test_gradients_of_slots_that_do_not_count_are_not_read(device, keep):
    student, teacher, labels, cu_seqlens = two_heads(device)
    kl = ours(leaves(*student), teacher, labels, cu_seqlens)
    grad = torch.where(kl.detach() == 0, torch.nan, 1)
    bound = int((kl != 0).sum()) + 3
    for options in ({}, {"max_targets": bound}):
        given = leaves(*student)
        kl = ours(given, teacher, labels, cu_seqlens, keep_logits=keep, chunk=CHUNK, **options)
        for found in torch.autograd.grad(kl, given, grad):
            assert found.isfinite().all()
        assert_same(
            torch.autograd.grad(ours(given, teacher, labels, cu_seqlens, keep_logits=keep), given[0], grad)[0].any(1),
            kl != 0,
        )


# --- what is kept ---


@pytest.mark.parametrize(("keep", "chunks"), [(0, 0), (1, 0), (2, 2), (ALL, 5)])
def test_whole_chunks_that_fit(device, keep, chunks):
    student, teacher, labels, cu_seqlens = two_heads(device, dtype=torch.bfloat16)
    rows = labels.shape[0]
    keep = 2 * rows * CHUNK * 2 + 99 if keep == 2 else keep
    kl = ours(leaves(*student), teacher, labels, cu_seqlens, chunk=CHUNK, keep_logits=keep)
    assert kept_of(kl).shape == ((rows, chunks, CHUNK) if keep else (0, 0, 0))


def test_products_of_a_backward(device, monkeypatch):
    """The logits of both heads, of each chunk that was not kept, and weight's gradient; hidden's are addmm's."""
    student, teacher, labels, cu_seqlens = two_heads(device, dtype=torch.bfloat16)
    for keep, wanted in ((0, 15), (2 * labels.shape[0] * CHUNK * 2, 11), (ALL, 5)):
        loss = ours(leaves(*student), teacher, labels, cu_seqlens, chunk=CHUNK, keep_logits=keep).sum()
        assert products(monkeypatch, loss.backward) == wanted


def test_products_are_counted(device):
    from torch.utils.flop_counter import FlopCounterMode

    student, teacher, _, cu_seqlens = two_heads(device, vocab=320)
    rows = sum(n - 1 for n in LENGTHS if n) if device == "cpu" else student[0].shape[0]
    of_student, of_teacher = (2 * rows * head[1].numel() for head in (student, teacher))
    po.register_flop_formulas()
    for keep, again in ((ALL, 0), (2 * student[0].shape[0] * CHUNK * 8, 0.6)):
        with FlopCounterMode(display=False) as counter:
            ours(leaves(*student), teacher, None, cu_seqlens, chunk=CHUNK, keep_logits=keep).sum().backward()
        assert counter.get_total_flops() == (3 + again) * of_student + (1 + again) * of_teacher


def test_nothing_is_kept_without_a_gradient(device):
    student, teacher, labels, cu_seqlens = two_heads(device)
    student, seen = leaves(*student), []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        ours(student, teacher, labels, cu_seqlens, keep_logits=ALL)
    assert not seen
    targets = gate.logps_targets(labels, cu_seqlens, -100, 301)
    assert gate.token_kl(*student, *teacher, targets, 1.0, 1.0, 0.5, None, None, 0)[2].numel() == 0


def test_auto_keeps_nothing_on_the_cpu():
    student, teacher, labels, cu_seqlens = two_heads("cpu")
    assert kept_of(ours(leaves(*student), teacher, labels, cu_seqlens, keep_logits="auto")).numel() == 0


@pytest.mark.gpu
def test_auto_keeps_what_fits():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    student, teacher, labels, cu_seqlens = two_heads("cuda", dtype=torch.bfloat16)
    kl = ours(leaves(*student), teacher, labels, cu_seqlens, keep_logits="auto", chunk=CHUNK)
    assert kept_of(kl).shape == (labels.shape[0], 5, CHUNK)


@pytest.mark.gpu
def test_memory_with_all_kept():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    student, teacher, _, cu_seqlens = two_heads("cuda", 65_536, 256, lengths=[4096], tail=0, dtype=torch.bfloat16)
    student = leaves(*student[:2])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours((*student, None), teacher, None, cu_seqlens, chunk=2048, keep_logits=ALL).sum().backward()
    kept, of_gradients = 4096 * 65_536 * 2, 2 * sum(t.numel() for t in student)
    assert torch.cuda.max_memory_allocated() - before < kept + of_gradients + 2 * 4096 * 2048 * 2 + (16 << 20)


def test_a_second_backward_reads_it_again(device):
    student, teacher, labels, cu_seqlens = two_heads(device, dtype=torch.bfloat16)
    given = leaves(*student)
    kl = ours(given, teacher, labels, cu_seqlens, chunk=CHUNK, keep_logits=ALL)
    before, grad = kept_of(kl).clone(), torch.randn_like(kl)
    first = torch.autograd.grad(kl, given, grad, retain_graph=True)
    assert torch.equal(kept_of(kl).view(torch.int16), before.view(torch.int16))
    for actual, expected in zip(torch.autograd.grad(kl, given, grad), first, strict=True):
        assert_same(actual, expected)


# --- inside torch ---


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(hidden, weight, bias, teacher, labels, cu_seqlens, keep):
        kl = ours(
            (torch.tanh(hidden), weight, bias), teacher, labels, cu_seqlens, beta=0.5, chunk=CHUNK, keep_logits=keep
        )
        return kl.exp().sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        student, teacher, labels, cu_seqlens = two_heads(device, lengths=lengths)
        eager, traced = leaves(*student), leaves(*student)
        step(*eager, teacher, labels, cu_seqlens, 0).backward()
        with torch._functorch.config.patch(donated_buffer=False):
            found = compiled(*traced, teacher, labels, cu_seqlens, ALL)
            found.backward(retain_graph=True)
            found.backward()
        for actual, expected in zip(traced, eager, strict=True):
            torch.testing.assert_close(actual.grad, 2 * expected.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_under_torch_func(device):
    student, teacher, labels, cu_seqlens = two_heads(device)

    def loss(hidden, keep=ALL):
        return ours((hidden, *student[1:]), teacher, labels, cu_seqlens, keep_logits=keep).sum()

    torch.testing.assert_close(torch.func.grad(loss)(student[0]), torch.func.grad(lambda h: loss(h, 0))(student[0]))
    several = torch.stack([student[0], 2 * student[0]])
    found = torch.func.vmap(torch.func.grad(loss))(several)
    torch.testing.assert_close(found[1], torch.func.grad(loss)(several[1]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(device, reentrant):
    student, teacher, labels, cu_seqlens = two_heads(device)
    plain, again = leaves(*student), leaves(*student)
    ours(plain, teacher, labels, cu_seqlens, keep_logits=ALL).sum().backward()

    def function(*head):
        return ours(head, teacher, labels, cu_seqlens, keep_logits=ALL)

    checkpoint(function, *again, use_reentrant=reentrant).sum().backward()
    for actual, expected in zip(again, plain, strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


@pytest.mark.parametrize("chunk", [None, 1000, 5000])
@pytest.mark.parametrize("within", ["forward", "backward"])
def test_a_backward_in_another_mode_makes_it_again(within, chunk):
    """The mode has other chunks and rows: what was kept does not fit."""
    student, teacher, labels, cu_seqlens = two_heads("cpu", 9000, 8, 8, dtype=torch.float32)
    student = leaves(*student)
    expected = torch.autograd.grad(ours(student, teacher, labels, cu_seqlens).sum(), student)
    mode = {True: po.invariant, False: contextlib.nullcontext}
    with mode[within == "forward"]():
        loss = ours(student, teacher, labels, cu_seqlens, chunk=chunk, keep_logits=ALL).sum()
    with mode[within == "backward"]():
        torch.testing.assert_close(torch.autograd.grad(loss, student), expected)


def test_a_graph_with_its_backward_in_another_mode_is_refused():
    student, teacher, labels, cu_seqlens = two_heads("cpu", 9000, 8, 8, dtype=torch.float32)
    targets, numbers = gate.logps_targets(labels, cu_seqlens, -100, 9000), (1.0, 1.0, 0.5, 1000, None)
    kl, *saved = gate.token_kl(*student, *teacher, targets, *numbers, ALL)
    with po.invariant(), pytest.raises(ValueError, match="keep_logits: expected forward and backward both inside"):
        gate.token_kl_backward(kl, *student, *teacher, targets, *saved, *numbers, True, True, True)


@pytest.mark.parametrize("total", [0, 3])
def test_no_slot_that_counts(device, total):
    student, teacher, labels, cu_seqlens = two_heads(device, 16, 8, lengths=[total] if total else [], tail=0)
    student = leaves(*student)
    loss = ours(student, teacher, torch.full_like(labels, -100), cu_seqlens, keep_logits=ALL, max_targets=0).sum()
    loss.backward(retain_graph=True)
    loss.backward()  # the first has written over nothing that is kept
    assert loss == 0
    assert all(t.grad.count_nonzero() == 0 for t in student)


@pytest.mark.parametrize(("keep", "got"), [(-1, "at least 0 bytes, got -1"), ("all", "bytes or 'auto', got 'all'")])
def test_bad_bytes_are_named(device, keep, got):
    *heads, labels, cu_seqlens = two_heads(device)
    with pytest.raises(ValueError, match=f"^keep_logits: expected {got}"):
        ours(*heads, labels, cu_seqlens, keep_logits=keep)
