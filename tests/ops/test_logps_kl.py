"""packing_ops.losses.kl against packing_ops.reference.distillation."""

import dataclasses

import pytest
import torch
from helpers import assert_error_within, assert_same, cu_seqlens_of, lengths_strategy, non_contiguous
from helpers.logps_case import LENGTHS, LOW, batch, leaves
from hypothesis import example, given, settings
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import distillation as oracle

ops = torch.ops.packing_ops
BETAS = [0.0, 0.3, 1.0]  # forward, a mixture, reverse


def two_heads(device, vocab=301, size=24, teacher_size=17, **options):
    """The student's hidden, weight and bias, the teacher's, labels and cu_seqlens."""
    hidden, weight, labels, cu_seqlens, bias = batch(device, vocab, size, **options)
    teacher_hidden, teacher_weight, _, _, teacher_bias = batch(device, vocab, teacher_size, **options)
    return (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias), labels, cu_seqlens


def ours(student, teacher, labels, cu_seqlens, **options):
    return po.token_kl(
        *student[:2], *teacher[:2], labels, cu_seqlens, bias=student[2], teacher_bias=teacher[2], **options
    )


def theirs(student, teacher, labels, cu_seqlens, **options):
    return oracle.token_kl(
        *student[:2], *teacher[:2], labels, cu_seqlens, bias=student[2], teacher_bias=teacher[2], **options
    )


def result_and_gradients(function, student, teacher, labels, cu_seqlens, grad, **options):
    student = leaves(*student)
    kl = function(student, teacher, labels, cu_seqlens, **options)
    (kl * grad).sum().backward()
    return [kl.detach(), *(t.grad for t in student if t is not None)]


def as_dtype(dtype, tensors):
    return [None if t is None else t.to(dtype) for t in tensors]


# --- values ---


def test_worked_values(device):
    """Two entries: the student is even, the teacher says the second with 3/4."""
    hidden, weight = torch.zeros(2, 1, device=device), torch.ones(2, 1, device=device)
    teacher_hidden = torch.ones(2, 1, device=device)
    teacher_weight = torch.tensor([[0.0], [3.0]], device=device).log1p()  # log 1, log 4
    teacher_weight[1] = torch.tensor(3.0).log()
    cu_seqlens = cu_seqlens_of([2], device)
    expected = {
        0.0: 0.25 * torch.tensor(0.5).log() + 0.75 * torch.tensor(1.5).log(),
        1.0: 0.5 * torch.tensor(2.0).log() + 0.5 * torch.tensor(2 / 3).log(),
    }
    mixture = torch.tensor([0.375, 0.625])
    of_teacher = (torch.tensor([0.25, 0.75]) * (torch.tensor([0.25, 0.75]) / mixture).log()).sum()
    expected[0.5] = (of_teacher + (0.5 * (0.5 / mixture).log()).sum()) / 2
    for beta, wanted in expected.items():
        kl = po.token_kl(hidden, weight, teacher_hidden, teacher_weight, None, cu_seqlens, beta=beta)
        torch.testing.assert_close(kl.cpu(), torch.stack([wanted, torch.tensor(0.0)]))


@given(
    lengths=lengths_strategy,
    tail=st.integers(0, 5),
    vocab=st.integers(1, 90),
    chunk=st.integers(1, 100),
    beta=st.sampled_from([0, 0.01, 0.5, 1]),
)
@settings(deadline=None)
def test_equals_reference_at_any_size(device, lengths, tail, vocab, chunk, beta):
    student, teacher, labels, cu_seqlens = two_heads(device, vocab, 7, 5, lengths=lengths, tail=tail)
    temperatures = {"temperature": 0.7, "teacher_temperature": 1.2, "beta": beta}
    expected = theirs(student, teacher, labels, cu_seqlens, **temperatures)
    metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=labels.shape[0])
    actual = ours(student, teacher, labels, metadata, chunk=chunk, **temperatures)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    rows = [t[None] for t in (student[0], teacher[0])]
    as_rows = ours(
        (rows[0], *student[1:]), (rows[1], *teacher[1:]), labels[None].int(), cu_seqlens, chunk=chunk, **temperatures
    )
    assert_same(as_rows, actual)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("chunk", [None, 50, 3])
def test_gradients_equal_reference_in_double(device, beta, chunk):
    given = two_heads(device)
    grad = torch.randn(given[2].shape[0], device=device, dtype=torch.float64)
    actual = result_and_gradients(ours, *given, grad, beta=beta, temperature=1.3, chunk=chunk)
    expected = result_and_gradients(theirs, *given, grad, beta=beta, temperature=1.3)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("chunk", [None, 77])
def test_values_and_gradients(device, dtype, beta, chunk):
    """Within twice the error of torch in that dtype, of all logits at once."""
    student, teacher, labels, cu_seqlens = two_heads(
        device, 1003, 48, lengths=[0, 40, 1, 90, 0, 120], dtype=dtype, scale=0.3
    )
    grad = torch.randn(labels.shape[0], device=device)
    options = {"temperature": 1.3, "beta": beta}
    exact = [as_dtype(torch.float64, head) for head in (student, teacher)]
    exact = result_and_gradients(theirs, *exact, labels, cu_seqlens, grad.double(), **options)
    low = result_and_gradients(theirs, student, teacher, labels, cu_seqlens, grad, **options)
    found = result_and_gradients(ours, student, teacher, labels, cu_seqlens, grad, chunk=chunk, **options)
    assert [t.dtype for t in found] == [torch.float32, dtype, dtype, dtype]
    for each in zip(found, low, exact, strict=True):
        assert_error_within(*each, floor=4 * torch.finfo(torch.float32).eps * each[2].abs().max().item())


@pytest.mark.parametrize("beta", BETAS)
def test_gradcheck(device, beta):
    student, teacher, labels, cu_seqlens = two_heads(device, 13, 3, 2, lengths=[3, 0, 4], tail=1)
    for chunk in (None, 5):
        assert torch.autograd.gradcheck(
            lambda *heads, chunk=chunk: ours(
                heads, teacher, labels, cu_seqlens, beta=beta, temperature=0.6, chunk=chunk
            ),
            leaves(*student),
        )


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_only_the_gradient_that_is_asked_for(device, needed):
    student, teacher, labels, cu_seqlens = two_heads(device)
    whole, alone = leaves(*student), [t.detach().clone().requires_grad_(i == needed) for i, t in enumerate(student)]
    for head in (whole, alone):
        ours(head, teacher, labels, cu_seqlens, beta=0.5).sum().backward()
    assert_same(alone[needed].grad, whole[needed].grad)
    assert [t.grad is not None for t in alone] == [i == needed for i in range(3)]


def test_the_teacher_is_constant(device):
    """Also where it is the student's head."""
    student, teacher, labels, cu_seqlens = two_heads(device)
    teacher = leaves(*teacher)
    assert not ours(student, teacher, labels, cu_seqlens).requires_grad
    tied, plain = leaves(*student), leaves(*student)
    moved = student[0] + 0.1
    ours(tied, (moved, *tied[1:]), labels, cu_seqlens).sum().backward()
    ours(plain, (moved, *student[1:]), labels, cu_seqlens).sum().backward()
    assert all(t.grad is None for t in teacher)
    for one, other in zip(tied, plain, strict=True):
        assert_same(one.grad, other.grad)


@pytest.mark.parametrize("beta", BETAS)
def test_no_distance_of_a_head_from_itself(device, beta):
    student, _, labels, cu_seqlens = two_heads(device)
    given = leaves(*student)
    kl = ours(given, student, labels, cu_seqlens, beta=beta)
    kl.sum().backward()
    torch.testing.assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-13)
    for t in given:
        torch.testing.assert_close(t.grad, torch.zeros_like(t), rtol=0, atol=1e-12)


# --- which slots count ---


def test_labels_masks_and_none(device):
    student, teacher, labels, cu_seqlens = two_heads(device)
    every = theirs(student, teacher, torch.zeros_like(labels), cu_seqlens)
    torch.testing.assert_close(ours(student, teacher, None, cu_seqlens), every)
    by_labels = ours(student, teacher, labels, cu_seqlens)
    for mask in (labels != -100, (labels != -100)[None]):
        assert_same(ours(student, teacher, mask, cu_seqlens), by_labels)
    counted = po.shift_labels(labels, cu_seqlens) != -100
    assert 0 < counted.sum() < counted.numel()
    assert_same(by_labels != 0, counted)
    other = ours(student, teacher, torch.where(labels == -100, 7, 8), cu_seqlens, ignore_index=7)
    assert_same(other, by_labels)


def test_slots_that_do_not_count_have_no_gradient(device):
    student, teacher, labels, cu_seqlens = two_heads(device)
    student = leaves(*student)
    kl = ours(student, teacher, labels, cu_seqlens)
    kl.sum().backward()
    assert_same(student[0].grad.any(1), kl.detach() != 0)
    starts = [start for start, length in zip(cu_seqlens.tolist(), LENGTHS, strict=False) if length]
    changed = labels.clone()
    changed[starts] = torch.where(changed[starts] == -100, 5, -100)  # a document's first token is nobody's next one
    assert_same(ours(student, teacher, changed, cu_seqlens), kl)


def test_one_vocabulary_entry_and_a_mask(device):
    """An entry that no label below 1 could name."""
    student, teacher, labels, cu_seqlens = two_heads(device, vocab=1)
    assert not ours(student, teacher, labels != -100, cu_seqlens).any()


# --- numbers that are not ordinary ---


@pytest.mark.parametrize("beta", BETAS)
def test_logits_far_from_zero_and_shut_entries(device, beta):
    """Entries that a bias of -inf shuts in both heads weigh nothing, whole chunks of them."""
    student, teacher, labels, cu_seqlens = two_heads(device, 40, scale=30.0)
    for _, _, bias in (student, teacher):
        bias[8:24] = -torch.inf
    for chunk in (None, 8):
        given = leaves(*student)
        kl = ours(given, teacher, labels, cu_seqlens, beta=beta, chunk=chunk)
        torch.testing.assert_close(kl, theirs(student, teacher, labels, cu_seqlens, beta=beta))
        kl.sum().backward()
        assert all(t.grad.isfinite().all() for t in given)


def test_what_one_head_shuts_and_the_other_does_not(device):
    """Infinite where the definition says so; the mixture's is finite."""
    student, teacher, _, cu_seqlens = two_heads(device, 40)
    shut = student[2].clone()
    shut[3] = -torch.inf
    counted = po.shift_labels(torch.zeros(student[0].shape[0], dtype=torch.int64, device=device), cu_seqlens) == 0
    student_shut, teacher_shut = (*student[:2], shut), (*teacher[:2], shut)
    assert ours(student_shut, teacher, None, cu_seqlens, beta=0)[counted].isposinf().all()
    assert ours(student, teacher_shut, None, cu_seqlens, beta=1)[counted].isposinf().all()
    assert ours(student_shut, teacher, None, cu_seqlens, beta=1).isfinite().all()
    assert ours(student, teacher_shut, None, cu_seqlens, beta=0).isfinite().all()
    mixed = ours(student_shut, teacher, None, cu_seqlens, beta=0.5)
    torch.testing.assert_close(mixed, theirs(student_shut, teacher, counted.long(), cu_seqlens, beta=0.5))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("of_teacher", [False, True])
def test_nan_stays_in_its_row(device, beta, of_teacher):
    student, teacher, _, cu_seqlens = two_heads(device)
    (teacher if of_teacher else student)[0][7] = torch.nan
    kl = ours(student, teacher, None, cu_seqlens, beta=beta)
    assert kl.isnan().nonzero().tolist() == [[7]]
    biased = (teacher if of_teacher else student)[2]
    biased[5] = torch.nan  # one entry of the vocabulary: every slot that counts
    counted = ours(student, teacher, None, cu_seqlens, beta=beta).isnan()
    assert counted.sum() == sum(max(n - 1, 0) for n in LENGTHS)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_small_differences_are_not_negative_noise(device, dtype):
    """Of two heads that are almost equal the divergence is almost 0, on both sides of it."""
    student, _, labels, cu_seqlens = two_heads(device, 2003, 48, dtype=dtype, scale=0.2)
    teacher = (student[0].clone(), student[1], student[2])
    for beta in BETAS:
        assert ours(student, teacher, labels, cu_seqlens, beta=beta).abs().max() < 2e-6


# --- shapes, strides, runs ---


def test_strided(device):
    student, teacher, labels, cu_seqlens = two_heads(device)
    grad = torch.randn(labels.shape[0], device=device, dtype=torch.float64)
    expected = result_and_gradients(ours, student, teacher, labels, cu_seqlens, grad, beta=0.5)
    for stride in (non_contiguous, lambda t: t.t().contiguous().t()):

        def strided(student, teacher, labels, cu_seqlens, stride=stride, **options):
            student = stride(student[0]), stride(student[1]), non_contiguous(student[2])
            teacher = stride(teacher[0]), stride(teacher[1]), non_contiguous(teacher[2])
            return ours(student, teacher, non_contiguous(labels), cu_seqlens, **options)

        found = result_and_gradients(strided, student, teacher, labels, cu_seqlens, grad, beta=0.5)
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize("total", [0, 1, 2])
@pytest.mark.parametrize("mode", [False, True])
def test_few_slots(device, total, mode):
    student, teacher, _, cu_seqlens = two_heads(device, 5, 3, lengths=[total] if total else [], tail=0)
    student = leaves(*student)
    with po.invariant() if mode else torch.enable_grad():
        kl = ours(student, teacher, None, cu_seqlens, beta=0.5)
        kl.sum().backward()
    assert kl.shape == (total,)
    assert kl.count_nonzero() == max(total - 1, 0)
    assert [t.grad.shape for t in student] == [t.shape for t in student]
    assert total == 2 or not any(t.grad.any() for t in student)


def test_runs_are_equal_to_the_bit(device):
    given = two_heads(device, 1003, dtype=torch.bfloat16)
    grad = torch.ones(given[2].shape[0], device=device)
    first, second = (result_and_gradients(ours, *given, grad, beta=0.5, chunk=100) for _ in range(2))
    assert_same(first, second)


packs = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=4), min_size=1, max_size=3)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@given(packs=packs, chunk=st.sampled_from([None, 1, 4096, 5000]), beta=st.sampled_from(BETAS), masked=st.booleans())
@example(packs=[[10], [3, 32, 24], [1]], chunk=None, beta=0.0, masked=False)  # products of few rows
@example(packs=[[1], [2], [3], [40, 33]], chunk=1, beta=0.0, masked=False)
@example(packs=[[35, 33], [21, 32]], chunk=5000, beta=0.3, masked=False)
@settings(max_examples=8, deadline=None)
def test_the_same_bits_in_any_pack_and_chunk(device, dtype, packs, chunk, beta, masked):
    lengths = [n for pack in packs for n in pack]
    # Rows of whole 16 bytes.
    student, teacher, labels, _ = two_heads(device, 9001, 24, 16, lengths=lengths, tail=0, dtype=dtype)
    labels = labels if masked else None

    def run(first, last, chunk):
        """Of documents first to last, backwards: values and gradients of hidden, by document in their order."""
        slots = torch.arange(sum(lengths)).split(lengths)[first:last][::-1]
        index, sizes = torch.cat(slots).to(device), [len(s) for s in slots]
        hidden = student[0][index].requires_grad_()
        heads = (hidden, *student[1:]), (teacher[0][index], *teacher[1:])
        counted = None if labels is None else labels[index]
        kl = ours(*heads, counted, cu_seqlens_of(sizes, device), beta=beta, chunk=chunk)
        scale = torch.cat([torch.arange(n, device=device) - 3.0 for n in sizes])
        (kl * scale).sum().backward()
        return [*zip(kl.detach().split(sizes), hidden.grad.split(sizes), strict=True)][::-1]

    with po.invariant():
        whole, start = run(0, len(lengths), None), 0
        for pack in packs:
            rows = run(start, start + len(pack), chunk)
            for found, wanted in zip(rows, whole[start:], strict=False):
                for a, b in zip(found, wanted, strict=True):
                    assert_same(a, b)
            start += len(pack)


# --- memory ---


def test_logits_of_one_chunk_in_memory(device):
    """No tensor of the forward or the backward is larger than the chunk, but for what has the size of an argument."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from packing_ops.losses import kl as module

    student, teacher, _, cu_seqlens = two_heads(device, 4000, 8, lengths=[900, 100], tail=0, dtype=torch.float32)
    chunk, largest, total = 100, 0, 1000
    targets = ops.logps_targets(torch.zeros(total, dtype=torch.int64, device=device), cu_seqlens, -100, 4000)

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.untyped_storage().nbytes() // 4)
            return out

    with Largest():  # below the op, where its products are seen
        kl, *saved = module._token_kl(*student, *teacher, targets, 1.0, 1.0, 0.5, chunk, None, 0)
        module._token_kl_backward(kl, *student, *teacher, targets, *saved, 1.0, 1.0, 0.5, chunk, None, True, True, True)
    blocks = 32 * 4000  # 25 rows of the whole vocabulary are as many logits as a chunk has: by whole 16
    assert total * 100 <= largest <= max(blocks, total * 104, student[1].numel() * 4)
    assert largest < total * 4000 // 10


def test_chunk_by_default():
    """512 MiB of logits, 64 MiB on the CPU, for both heads."""
    from packing_ops.losses.chunks import Rows
    from packing_ops.losses.kl import _block_of, _heads

    head = torch.empty(1024, 1), torch.empty(151_936, 1), None
    rows = Rows(torch.zeros(1024, dtype=torch.int32), None)
    student, teacher = _heads(rows, head, head, None, None, torch.empty(0, 0, 0))
    assert student.chunk == teacher.chunk == 8064  # 19, where 8,192 would fit: whole 128
    assert _block_of(student) == 64
    assert 2 * 4 * max(1024 * student.chunk, 64 * 151_936) <= 76 << 20


def test_a_bound_of_the_slots(device):
    """Enough: the same values, on CUDA by fewer rows. From the metadata too, but not for another count."""
    student, teacher, labels, cu_seqlens = two_heads(device)
    count = int((po.shift_labels(labels, cu_seqlens) != -100).sum())
    expected = ours(student, teacher, labels, cu_seqlens, beta=0.5)
    for bound in (count, count + 3, 10_000):
        found = ours(student, teacher, labels, cu_seqlens, beta=0.5, max_targets=bound)
        torch.testing.assert_close(found, expected)
    metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=labels.shape[0])
    counted = dataclasses.replace(metadata, num_targets=count)
    torch.testing.assert_close(ours(student, teacher, labels, counted, beta=0.5), expected)
    every = ours(student, teacher, None, metadata, beta=0.5)
    torch.testing.assert_close(ours(student, teacher, None, counted, beta=0.5), every)


@pytest.mark.gpu
def test_memory_on_the_gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    student, teacher, labels, cu_seqlens = two_heads("cuda", 32_768, 64, lengths=[4096], tail=0, dtype=torch.bfloat16)
    student = leaves(*student)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ours(student, teacher, labels, cu_seqlens, beta=0.5, chunk=1024).sum().backward()
    of_logits = 4096 * 32_768 * 2
    assert torch.cuda.max_memory_allocated() - before < of_logits // 4


# --- bad input ---


def bad_calls(device):
    student, teacher, labels, cu_seqlens = two_heads(device, 10, 4, 3, lengths=[3, 2], tail=1, dtype=torch.float32)
    (hidden, weight, bias), (teacher_hidden, teacher_weight, teacher_bias) = student, teacher

    def call(student=student, teacher=teacher, labels=labels, cu_seqlens=cu_seqlens, **options):
        return lambda: ours(student, teacher, labels, cu_seqlens, **options)

    wrong = labels.clone()
    wrong[2] = 10
    return {
        "hidden": (call((hidden.long(), weight, bias)), "hidden: expected float32.*got int64"),
        "weight": (call((hidden, weight.t(), bias)), r"weight: expected \[vocab, hidden=4\], got float32 \[4, 10\]"),
        "bias": (call((hidden, weight, bias[:-1])), r"bias: expected \[vocab=10\] like weight"),
        "teacher dtype": (
            call(teacher=[t.double() for t in teacher]),
            "teacher_hidden: expected dtype torch.float32 like hidden, got torch.float64",
        ),
        "teacher device": (
            call(teacher=[t.to("meta") for t in teacher]),
            "teacher_hidden: expected device .* got meta",
        ),
        "teacher rank": (
            call(teacher=(teacher_hidden[None, None], teacher_weight, teacher_bias)),
            "teacher_hidden: expected float32",
        ),
        "teacher total": (
            call(teacher=(teacher_hidden[:-1], teacher_weight, teacher_bias)),
            r"teacher_hidden: expected \[total=6, hidden\] like hidden, got float32 \[5, 3\]",
        ),
        "teacher weight": (
            call(teacher=(teacher_hidden, teacher_weight.t(), teacher_bias)),
            r"teacher_weight: expected \[vocab, hidden=3\]",
        ),
        "vocabularies": (
            call(teacher=(teacher_hidden, teacher_weight[:-1], None)),
            r"teacher_weight: expected \[vocab=10, hidden\] like weight, got float32 \[9, 3\]",
        ),
        "teacher bias": (
            call(teacher=(teacher_hidden, teacher_weight, teacher_bias.double())),
            "teacher_bias: expected float32",
        ),
        "no vocabulary": (
            call((hidden, weight[:0], None), (teacher_hidden, teacher_weight[:0], None)),
            "weight: expected 1 to .* got 0",
        ),
        "labels shape": (call(labels=labels[:-1]), r"labels: expected \[total=6\] or \[1, total\] like hidden"),
        "labels dtype": (call(labels=labels.float()), "labels: expected int64 or int32, got float32"),
        "labels device": (call(labels=labels.to("meta")), "labels: expected on .* like hidden, got int64 .6. on meta"),
        "label": (call(labels=wrong), "labels: .* at index 2"),
        "cu_seqlens": (call(cu_seqlens=cu_seqlens + 1), "cu_seqlens: expected to start at 0"),
        "metadata": (call(cu_seqlens=po.PackedMetadata.from_lengths([3, 2])), "cu_seqlens: expected total=6"),
        "beta": (call(beta=1.5), "beta: expected 0 to 1, got 1.5"),
        "beta nan": (call(beta=float("nan")), "beta: expected 0 to 1, got nan"),
        "temperature": (call(temperature=0.0), "temperature: expected a number above 0, got 0.0"),
        "teacher_temperature": (call(teacher_temperature=-1.0), "teacher_temperature: expected a number above 0"),
        "max_targets": (call(max_targets=-1), "max_targets: expected at least 0, got -1"),
        "too few": (call(labels=None, max_targets=1), "max_targets: expected"),
        "chunk": (call(chunk=0), "chunk: expected at least 1 entry of the vocabulary, got 0"),
    }


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    if device == "cuda" and case == "too few":
        pytest.skip("rows go by whole tiles there: all six are multiplied")
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_wrong_types_are_named(device):
    (hidden, weight, _), (teacher_hidden, teacher_weight, _), labels, cu_seqlens = two_heads(device)
    tensors = {
        "hidden": hidden,
        "weight": weight,
        "teacher_hidden": teacher_hidden,
        "teacher_weight": teacher_weight,
        "labels": labels,
        "teacher_bias": None,
    }
    for name in tensors:
        with pytest.raises(TypeError, match=f"^{name}: expected a tensor"):
            po.token_kl(**{**tensors, name: [1.0]}, cu_seqlens=cu_seqlens)
    with pytest.raises(TypeError, match=r"cu_seqlens: expected PackedMetadata or its cu_seqlens, got \[0, 3\]"):
        po.token_kl(**tensors, cu_seqlens=[0, 3])
    for name in ("beta", "temperature", "teacher_temperature"):
        with pytest.raises(TypeError, match=f"^{name}: expected a number, got "):
            po.token_kl(**tensors, cu_seqlens=cu_seqlens, **{name: "1"})
