"""packing_ops.losses.kl inside torch: compiled, checkpointed, under autocast, counted; its ops themselves."""

import pytest
import torch
from helpers import assert_same
from helpers.logps_case import FLOATS, LENGTHS, leaves
from test_logps_kl import BETAS, ours, two_heads
from torch.utils.checkpoint import checkpoint

import packing_ops as po

ops = torch.ops.packing_ops


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def step(hidden, weight, bias, teacher, labels, metadata):
        student = torch.tanh(hidden), weight, bias
        kl = ours(student, teacher, labels, metadata, beta=0.5, temperature=0.8)
        return kl.exp().sum() + ours(student, teacher, labels >= 0, metadata, chunk=64).sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        student, teacher, labels, cu_seqlens = two_heads(device, lengths=lengths)
        metadata = po.PackedMetadata.from_cu_seqlens(cu_seqlens, total=labels.shape[0])
        eager, traced = leaves(*student), leaves(*student)
        step(*eager, teacher, labels, metadata).backward()
        compiled(*traced, teacher, labels, metadata).backward()
        for actual, expected in zip(traced, eager, strict=True):
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-14)


def test_checkpointed(device):
    student, teacher, labels, cu_seqlens = two_heads(device)
    plain, again = leaves(*student), leaves(*student)
    ours(plain, teacher, labels, cu_seqlens).sum().backward()
    checkpoint(lambda *head: ours(head, teacher, labels, cu_seqlens), *again, use_reentrant=False).sum().backward()
    for actual, expected in zip(again, plain, strict=True):
        assert_same(actual.grad, expected.grad)


def test_autocast(device):
    """As linear layers: products of half types for both heads, gradients of the parameters' dtype."""
    student, teacher, labels, cu_seqlens = two_heads(device, dtype=torch.float32)
    leaf = leaves(*student)
    with torch.autocast(device, dtype=torch.bfloat16):
        kl = ours(leaf, teacher, labels, cu_seqlens, beta=0.5)
        kl.sum().backward()
    half = [[t.bfloat16() for t in head] for head in (student, teacher)]
    assert_same(kl.detach(), ours(*half, labels, cu_seqlens, beta=0.5))
    assert all(t.grad.dtype == torch.float32 for t in leaf)


def test_inference_and_no_gradient(device):
    student, teacher, labels, cu_seqlens = two_heads(device)
    expected = ours(student, teacher, labels, cu_seqlens)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert_same(ours(leaves(*student), teacher, labels, cu_seqlens), expected)


@pytest.mark.parametrize("beta", BETAS)
def test_products_are_counted(device, beta):
    """By FlopCounterMode: forward one of each head, backward those again and one for each gradient, for any beta."""
    from torch.utils.flop_counter import FlopCounterMode

    student, teacher, _, cu_seqlens = two_heads(device)
    rows = sum(n - 1 for n in LENGTHS if n) if device == "cpu" else student[0].shape[0]  # with targets, where counted
    of_student, of_teacher = (2 * rows * head[1].numel() for head in (student, teacher))
    po.register_flop_formulas()
    for needed, products in (((True, True), 4), ((True, False), 3), ((False, False), 1)):
        head = [t.requires_grad_(need) for t, need in zip(leaves(*student[:2]), needed, strict=True)]
        with FlopCounterMode(display=False) as counter:
            loss = ours((*head, None), teacher, None, cu_seqlens, beta=beta, chunk=50).sum()
            if any(needed):
                loss.backward()
        assert counter.get_total_flops() == products * of_student + (1 + any(needed)) * of_teacher


def test_second_derivatives_are_refused(device):
    student, teacher, labels, cu_seqlens = two_heads(device)
    (leaf,) = leaves(student[0])
    kl = ours((leaf, *student[1:]), teacher, labels, cu_seqlens)
    (grad,) = torch.autograd.grad(kl.sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"token_kl.*second derivative"):
        grad.sum().backward()
    with pytest.raises(NotImplementedError, match=r"token_kl has no forward-mode derivative.*hidden"):
        torch.func.jvp(lambda h: ours((h, *student[1:]), teacher, labels, cu_seqlens), (leaf,), (leaf,))


def op_samples(device):
    student, teacher, labels, cu_seqlens = two_heads(device, 40, 6, 5, dtype=torch.float32)
    targets = ops.logps_targets(labels, cu_seqlens, -100, 40)
    logits, teacher_logits = student[0] @ student[1].t(), teacher[0] @ teacher[1].t()
    found = ops.kl_rows(logits, None, teacher_logits, None, targets, 1.0, 1.0, 0.5)
    kl, stats = found[0].clone(), found
    heads, out = (logits, student[2], teacher_logits, teacher[2]), torch.empty_like(logits)
    kept_dz, every = out.new_zeros(35, 2, 16), torch.zeros_like(targets)  # what is kept of others is anything
    return [
        (ops.kl_rows, (*heads, targets, 1.0, 0.5, 0.5)),
        (ops.kl_rows, (logits[:, 1:8], None, teacher_logits[:, 3:10], None, targets, 1.0, 1.0, 1.0)),
        (ops.kl_chunk_backward_, (*heads, targets, 1.0, 0.5, 0.5, stats, kl, out)),
        (ops.kl_chunk_backward_, (logits, None, *heads[2:], targets, 1.0, 1.0, 0.0, stats, None, out)),
        (ops.kl_scale_kept_, (logits[:, 1:8], kl, out[:, :7])),
        (ops.token_kl, (*leaves(*student), *teacher, every, 1.0, 1.0, 0.5, 16, None, 5000)),
        (ops.token_kl, (*leaves(*student[:2]), None, *teacher, targets, 0.5, 1.0, 0.0, None, 33, 0)),
        (
            ops.token_kl_backward,
            (kl, *student, *teacher, targets, stats, kept_dz, 1.0, 1.0, 0.5, 16, 30, True, False, True),
        ),
    ]


@pytest.mark.parametrize("sample", range(8))
def test_opcheck(device, sample):
    op, arguments = op_samples(device)[sample]
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("change", ["shape", "dtype", "stats", "beta", "scales", "out", "teacher", "overlap"])
def test_ops_name_what_does_not_fit(device, change):
    logits, other = torch.randn(3, 8, device=device), torch.randn(3, 8, device=device)
    targets, stats = torch.zeros(3, dtype=torch.int32, device=device), torch.zeros(4, 3, device=device)
    given, message = {
        "shape": (
            (logits, None, other[:, 1:], None, targets, 1.0, 1.0, 0.5, stats, None, logits),
            r"teacher_logits: .*\[3, 8\]",
        ),
        "dtype": (
            (logits, None, other.double(), None, targets, 1.0, 1.0, 0.5, stats, None, logits),
            "teacher_logits: ",
        ),
        "stats": ((logits, None, other, None, targets, 1.0, 1.0, 0.5, stats[:2], None, logits), "stats: "),
        "beta": (
            (logits, None, other, None, targets, 1.0, 1.0, 2.0, stats, None, logits),
            "beta: expected 0 to 1, got 2",
        ),
        "scales": (
            (logits, None, other, None, targets, 1.0, 1.0, 0.5, stats, stats[0, :2], logits),
            r"scales: .*\[3\]",
        ),
        "out": ((logits, None, other, None, targets, 1.0, 1.0, 0.5, stats, None, logits.double()), "out: "),
        "teacher": (
            (logits, None, other, None, targets, 1.0, 1.0, 0.5, stats, None, other),
            "out: .*of teacher_logits's",
        ),
        "overlap": (
            (
                logits[1:],
                None,
                other[1:],
                None,
                targets[1:],
                1.0,
                1.0,
                0.5,
                stats[:, 1:].contiguous(),
                None,
                logits[:2],
            ),
            "out: .*of logits's",
        ),
    }[change]
    from packing_ops._runtime import gate

    with pytest.raises(ValueError, match=f"^{message}"):
        gate.kl_chunk_backward_(*given)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_rows_at_any_address(device, dtype, beta):
    """The ops themselves on views: both heads' rows at any distance from whole vectors of 16 bytes."""
    rows, wide = 5, torch.float64 if dtype == torch.float64 else torch.float32
    memory, teacher_memory, other = (torch.randn(rows, 80, device=device).to(dtype) for _ in range(3))
    bias = torch.randn(80, device=device, dtype=wide)
    targets = torch.tensor([-1, 0, 2, 5, 12], dtype=torch.int32, device=device)
    near = {"rtol": 1e-2 if dtype.itemsize == 2 else 1e-4, "atol": 2e-6}
    for start, teacher_start in ((0, 0), (1, 1), (3, 3), (8, 8), (0, 1), (5, 2)):
        for columns in (1, 2, 7, 8, 9, 16, 17, 63):
            logits = memory[:, start : start + columns]
            of_teacher = teacher_memory[:, teacher_start : teacher_start + columns]
            z = ((logits.to(wide) + bias[:columns]) * 0.5).requires_grad_()
            logp, logq = z.log_softmax(1), (of_teacher.to(wide) * 2).log_softmax(1)
            mixture = (beta * logq.exp() + (1 - beta) * logp.exp()).log()
            of_student = (logp.exp() * (logp - (logq if beta == 1 else mixture))).sum(1)
            of_q = (logq.exp() * (logq - (logp if beta == 0 else mixture))).sum(1)
            expected = {0: of_q, 1: of_student}.get(beta, beta * of_q + (1 - beta) * of_student)
            kept = targets >= 0
            found = ops.kl_rows(logits, bias[:columns], of_teacher, None, targets, 0.5, 2.0, beta)
            torch.testing.assert_close(found[0], torch.where(kept, expected, 0).detach(), rtol=1e-4, atol=2e-6)
            given = bias[:columns], of_teacher, None, targets, 0.5, 2.0, beta, found, torch.full_like(found[0], 3)
            (dz,) = torch.autograd.grad(expected, z, kept.to(wide))
            changed = memory.clone()
            part, out = changed[:, start : start + columns], other[:, teacher_start : teacher_start + columns]
            ops.kl_chunk_backward_(logits, *given, out)
            ops.kl_chunk_backward_(part, *given, part)  # in place
            torch.testing.assert_close(part, (3 * dz).to(dtype), **near)
            assert_same(out, part)
            changed[:, start : start + columns] = memory[:, start : start + columns]
            assert_same(changed, memory)  # nothing but them


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_rows_of_a_wide_vocabulary(device, dtype, beta):
    """More columns than a pass of a block takes, sorted and not; -inf in both heads, in every third column and in a
    pass.
    """
    columns, rows = 20_003, 7
    spread = torch.tensor([0.01, 1, 1, 5, 20, 60, 200], device=device, dtype=dtype)[:, None]
    logits, of_teacher = (spread * torch.randn(rows, columns, device=device, dtype=dtype) for _ in range(2))
    logits[1], of_teacher[2] = logits[1].sort().values, of_teacher[2].sort(descending=True).values
    of_teacher[3] = logits[3]  # equal heads
    for both in (logits, of_teacher):
        both[4, 1024:9216] = both[5, :8192] = -torch.inf
        both[5, ::3] = -torch.inf
    targets = torch.zeros(rows, dtype=torch.int32, device=device)
    found = ops.kl_rows(logits, None, of_teacher, None, targets, 1.0, 1.0, beta)
    logp, logq = logits.double().log_softmax(1), of_teacher.double().log_softmax(1)
    weights = torch.tensor([beta, 1 - beta], device=device, dtype=torch.float64).log()
    mixture = torch.logaddexp(logq + weights[0], logp + weights[1])
    of_teacher_kl, of_student_kl = (
        (log.exp() * (log - of)).nan_to_num(nan=0).sum(1)  # NaN: -inf in both heads
        for log, of in ((logq, logp if beta == 0 else mixture), (logp, logq if beta == 1 else mixture))
    )
    expected = {0: of_teacher_kl, 1: of_student_kl}.get(beta, beta * of_teacher_kl + (1 - beta) * of_student_kl)
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(found[0].double(), expected, **near)
    assert found[0, 3] == 0 or 0 < beta < 1
    torch.testing.assert_close(found[1].double(), logits.double().logsumexp(1), **near)
    torch.testing.assert_close(found[2].double(), of_teacher.double().logsumexp(1), **near)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_scale_kept(device, dtype):
    """One rounding, at any address, in place, and nothing but the columns."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scales = torch.tensor([0.0, -3.0, torch.nan, 1e-3], device=device, dtype=wide)
    for start, out_start, columns in ((0, 0, 4099), (8, 8, 64), (3, 3, 30), (0, 5, 1000), (1, 0, 7), (0, 0, 0)):
        memory, out = torch.randn(4, 4200, device=device).to(dtype), torch.ones(4, 4200, device=device, dtype=dtype)
        x = memory[:, start : start + columns]
        expected = out.clone()
        expected[:, out_start : out_start + columns] = (x.to(wide) * scales[:, None]).to(dtype)
        ops.kl_scale_kept_(x, scales, out[:, out_start : out_start + columns])
        assert_same(out, expected)
        ops.kl_scale_kept_(x, scales, x)
        assert_same(x, expected[:, out_start : out_start + columns])
        ops.kl_scale_kept_(
            x[:1], scales[:1], x[:1].as_strided((1, columns), (1, 1))
        )  # of one row the stride says nothing


def test_scale_kept_names_what_does_not_fit(device):
    from packing_ops._runtime import gate

    x, scales = torch.ones(3, 8, device=device), torch.ones(3, device=device)
    for given, message in (
        ((x, scales[:2], x), r"scales: .*\[3\]"),
        ((x, scales.double(), x), "scales: "),
        ((x, scales, x.double()), "out: "),
        ((x, scales, x[:, :7]), r"out: .*\[3, 8\]"),
        ((x[1:], scales[1:], x[:2]), "out: .*of dz's"),
        ((x, x.view(-1)[:3], x), "out: .*of scales's"),
        ((x.t(), torch.ones(8, device=device), x.t()), "dz: "),
        ((x.int(), scales, x), "dz: "),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            gate.kl_scale_kept_(*given)


def test_scales_may_lie_beside_what_they_scale_but_not_in_it(device):
    """In one buffer, at every distance: scales that are shorter than a row of out, and longer."""
    for rows, columns in ((3, 16), (16, 3)):
        for start in range(64):
            memory = torch.ones(160, device=device)
            out, scales = memory[50 : 50 + rows * columns].view(rows, columns), memory[start : start + rows]
            x = torch.ones_like(out)
            if start + rows <= 50 or start >= 50 + rows * columns:
                ops.kl_scale_kept_(x, scales, out)
            else:
                with pytest.raises(ValueError, match=r"out: .*of scales's"):
                    ops.kl_scale_kept_(x, scales, out)
                assert_same(memory, torch.ones_like(memory))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_what_has_no_weight_beside_what_is_left_out(device, dtype, beta):
    """-inf in the other head counts where its head has weight in the whole row, not in a part of it."""
    real = torch.float64 if dtype == torch.float64 else torch.float32
    spread = 100 if dtype == torch.float64 else 10
    weighs, other = ((spread * 3 * torch.randn(6, 12_000, device=device)).to(dtype) for _ in range(2))
    weighs[:, 11_999] = weighs.amax(1)
    weighs[:3, 5], other[:3, 5] = weighs.amax(1)[:3] - 13 * spread, -torch.inf  # e^-130, e^-1300
    weighs[:3, :5] = weighs[:3, 6:40] = weighs[:3, 5:6]
    other[1, :40] = -torch.inf
    weighs[3, 77], other[3, 77] = weighs.amax(1)[3], -torch.inf
    heads = (other, weighs) if beta == 0 else (weighs, other)
    targets = torch.zeros(6, dtype=torch.int32, device=device)
    found = ops.kl_rows(heads[0], None, heads[1], None, targets, 1.0, 1.0, beta)[0]
    logw, logo = weighs.to(real).log_softmax(1), other.to(real).log_softmax(1)
    terms = torch.where(logw.exp() == 0, 0, logw.exp() * (logw - logo))
    torch.testing.assert_close(found, terms.sum(1), rtol=1e-5, atol=1e-5)
    assert found.isfinite().tolist() == [True, True, True, False, True, True]
