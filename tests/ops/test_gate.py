"""packing_ops._runtime.gate: mistakes found in C++ have one class and our text, whatever torch makes of them."""

import re
import threading

import numpy as np
import pytest
import torch
from helpers import ROOT, assert_same, cu_seqlens_of
from torch._subclasses.fake_tensor import FakeTensorMode

import packing_ops as po
from packing_ops._runtime import gate, library

CU_SEQLENS = cu_seqlens_of([2, 3])
LABELS = torch.arange(5)
HEADS = torch.randn(5, 2, 8)
PAST = cu_seqlens_of([9])
PAST_THE_END = "cu_seqlens: expected to end at most at total=5, got 9"


def raised(call, *args):
    with pytest.raises(Exception) as caught:
        call(*args)
    return caught.value


# --- one class ---


def test_mistakes_are_value_errors_with_our_text_alone():
    error = raised(po.shift_labels, LABELS, PAST)
    assert type(error) is ValueError
    assert str(error) == PAST_THE_END


def test_what_torch_throws_stays_where_an_argument_with_a_default_is_left_out():
    with torch.inference_mode():
        metadata = po.PackedMetadata.from_cu_seqlens(CU_SEQLENS.clone())
    error = raised(po.varlen_attention, HEADS.clone().requires_grad_(), HEADS, HEADS, metadata)
    assert type(error) is RuntimeError
    assert str(error).startswith("Inference tensors cannot be saved for backward")


def test_ops_alone_keep_the_class_of_torch_and_our_text():
    error = raised(torch.ops.packing_ops.shift_labels, LABELS, PAST, -100)
    assert isinstance(error, (ValueError, RuntimeError))
    assert PAST_THE_END in str(error)


@pytest.mark.parametrize(
    ("thrown", "wanted", "text"),
    [
        (RuntimeError("q: expected 3 dimensions, got 2"), ValueError, "q: expected 3 dimensions, got 2"),
        (RuntimeError("batch, seqlen: expected 0 or more, got -1 and 3"), ValueError, "batch, seqlen: expected"),
        (ValueError("q: expected 3 dimensions, got 2"), ValueError, "q: expected 3 dimensions, got 2"),
        (RuntimeError("packing_ops was built without CUDA"), RuntimeError, "packing_ops was built without CUDA"),
        (RuntimeError("CUDA error: expected"), RuntimeError, "CUDA error: expected"),
        (NotImplementedError("q: expected a CPU"), NotImplementedError, "q: expected a CPU"),
        (torch.OutOfMemoryError("CUDA out of memory."), torch.OutOfMemoryError, "CUDA out of memory"),
        (IndexError("index 5"), IndexError, "index 5"),
    ],
    ids=str,
)
def test_what_torch_may_throw(thrown, wanted, text):
    class Op:
        _schema = torch.ops.packing_ops.shift_labels.default._schema

        def __call__(self, *args):
            raise thrown

    error = raised(gate._gate(Op()), LABELS, PAST, -100)
    assert type(error) is wanted
    assert str(error).startswith(text)


def test_both_attempts_make_value_errors():
    """Integers of NumPy are converted for a second one."""

    class Op:
        _schema = torch.ops.packing_ops.shift_labels.default._schema
        calls = 0

        def __call__(self, labels, cu_seqlens, ignore_index):
            self.calls += 1
            if not isinstance(ignore_index, int):
                raise RuntimeError(
                    "packing_ops::shift_labels() Expected a value of type 'int' for argument 'ignore_index'"
                )
            raise RuntimeError(PAST_THE_END)

    for value, attempts in ((-100, 1), (np.int64(-100), 2)):
        op = Op()
        error = raised(gate._gate(op), LABELS, PAST, value)
        assert (type(error), str(error), op.calls) == (ValueError, PAST_THE_END, attempts)


def test_every_mistake_in_csrc_starts_with_the_names_of_arguments():
    """That is what tells it from torch's errors."""
    started = re.compile(r'\b(?:fail\(|check\([^;"]*?,\s*)(\w+, )?"([^"]*)"')
    texts = [
        (name or "", text)
        for path in (ROOT / "csrc").rglob("*.cpp")
        for name, text in started.findall(path.read_text())
    ]
    assert len(texts) > 60
    for name, text in texts:
        assert gate._MISTAKE.match(("name" if name else "") + text), (name, text)


def test_backward_and_threads():
    """An error of a thread of the autograd engine, which knows nothing of the call."""
    q = HEADS.clone().requires_grad_()
    out = po.varlen_attention(q, q, q, CU_SEQLENS)
    CU = CU_SEQLENS.clone()
    out = po.varlen_attention(q, q, q, CU)
    with torch.no_grad():
        CU.data.fill_(7)  # which torch does not see
    assert type(raised(out.sum().backward)) is ValueError
    errors = []
    thread = threading.Thread(target=lambda: errors.append(raised(po.shift_labels, LABELS, PAST)))
    thread.start()
    thread.join()
    assert type(errors[0]) is ValueError


def test_torch_func_and_forward_mode():
    values = torch.randn(5)
    for call in (
        lambda: torch.func.grad(lambda v: po.segment_sum(v, PAST).sum())(values),
        lambda: torch.func.jvp(lambda v: po.segment_sum(v, PAST), (values,), (values,)),
    ):
        error = raised(call)
        assert type(error) is ValueError
        assert str(error) == PAST_THE_END


# --- nothing in the way ---


def test_only_the_gate_calls_ops():
    """A module that called torch.ops itself would raise what torch makes of a mistake."""
    runtime = ROOT / "packing_ops" / "_runtime"
    allowed = {runtime / f"{name}.py" for name in ("gate", "autograd", "flops", "library")}
    for path in (ROOT / "packing_ops").rglob("*.py"):
        if path not in allowed:
            assert not re.search(r"= torch\.ops\.packing_ops|torch\.ops\.packing_ops\.\w+\(", path.read_text()), path


def test_every_op_has_a_gate():
    for name in library.op_names():
        assert getattr(gate, name).__name__ == name


def test_compiles_fullgraph_and_exports(fresh_compile):
    def step(labels, cu_seqlens):
        return po.shift_labels(labels, cu_seqlens)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert_same(compiled(LABELS, CU_SEQLENS), step(LABELS, CU_SEQLENS))

    class Module(torch.nn.Module):
        forward = staticmethod(step)

    for strict in (False, True):
        program = torch.export.export(Module(), (LABELS, CU_SEQLENS), strict=strict)
        assert_same(program.module()(LABELS, CU_SEQLENS), step(LABELS, CU_SEQLENS))


def test_gates_do_not_share_the_recompilations_of_each_other():
    codes = [getattr(gate, name).__code__ for name in library.op_names()]
    assert len(set(map(id, codes))) == len(codes)
    assert len({code.co_name for code in codes}) == len(codes)


def test_fake_tensors():
    with FakeTensorMode() as mode:
        fake = po.shift_labels(mode.from_tensor(LABELS), mode.from_tensor(CU_SEQLENS))
    assert fake.shape == LABELS.shape


# --- what is no tensor or number to the schema ---

NOT_TAKEN = {
    "list of cu_seqlens": (lambda: po.shift_labels(LABELS, [0, 2, 5]), r"cu_seqlens: expected PackedMetadata or its cu_seqlens, got \[0, 2, 5\] \(list\)"),
    "list of cu_seqlens alone": (lambda: po.position_ids_from_cu_seqlens([0, 5]), r"cu_seqlens: expected a tensor, got \[0, 5\]"),
    "list of labels": (lambda: po.shift_labels([1, 2], CU_SEQLENS), r"labels: expected a tensor, got \[1, 2\] \(list\)"),
    "list of masked labels": (lambda: po.mask_boundary_labels([1], lengths=[1]), "labels: expected a tensor"),
    "list of values": (lambda: po.segment_sum([1.0, 2.0], CU_SEQLENS), r"values: expected a tensor, got \[1.0, 2.0\] \(list\)"),
    "list of a mask": (lambda: po.segment_sum(HEADS, CU_SEQLENS, [1] * 5), "mask: expected a tensor"),
    "list of positions": (lambda: po.cu_seqlens_from_position_ids([0, 1]), "position_ids: expected a tensor"),
    "list of q": (lambda: po.varlen_attention([1.0], HEADS, HEADS, CU_SEQLENS), r"q: expected a tensor, got \[1.0\]"),
    "list of k": (lambda: po.varlen_attention(HEADS, [1.0], HEADS, CU_SEQLENS), r"k: expected a tensor, got \[1.0\]"),
    "list of an attention's cu_seqlens": (
        lambda: po.varlen_attention(HEADS, HEADS, HEADS, [0, 5]),
        r"cu_seqlens_q: expected PackedMetadata or its cu_seqlens, got \[0, 5\]",
    ),
    "list of sinks": (lambda: po.varlen_attention(*[HEADS] * 3, CU_SEQLENS, sinks=[0.0]), "sinks: expected a tensor"),
    "list of cos": (lambda: po.apply_rotary_qk(HEADS, None, [1.0], [0.0]), r"cos: expected a tensor, got \[1.0\]"),
    "list of a padded batch": (lambda: po.unpad_input([[1]], torch.ones(1, 1)), "hidden_states: expected a tensor"),
    "list of an attention_mask": (lambda: po.unpad_input(HEADS, [[1]]), r"attention_mask: expected a tensor, got \[\[1\]\]"),
    "list of packed rows": (lambda: po.pad_input([1], LABELS, 1, 5), "packed: expected a tensor"),
    "list in a dict": (lambda: po.pad_inputs({"ids": [1]}, LABELS, 1, 5), "ids: expected a tensor"),
    "list of a device's lengths": (lambda: po.pack_ffd([3, 4], 8), r"lengths: expected a tensor, got \[3, 4\]"),
    "None as the only tensor": (lambda: po.position_ids_from_cu_seqlens(None, 5), "cu_seqlens: expected a tensor, got None"),
    "None for lengths": (lambda: po.pack_ffd(None, 8), "lengths: expected a tensor, got None"),
    "fraction of total": (lambda: po.position_ids_from_cu_seqlens(CU_SEQLENS, 5.5), "total: expected an integer, got 5.5"),
    "fraction of ignore_index": (lambda: po.shift_labels(LABELS, CU_SEQLENS, ignore_index=0.5), "ignore_index: expected an integer"),
    "text of average": (lambda: po.segment_sum(HEADS, CU_SEQLENS, None, "x"), "average: expected True or False, got 'x'"),
    "text of softcap": (lambda: po.varlen_attention(*[HEADS] * 3, CU_SEQLENS, softcap="x"), "softcap: expected a number, got 'x'"),
    "number of window_size": (
        lambda: po.varlen_attention(*[HEADS] * 3, CU_SEQLENS, window_size=2),
        r"window_size: expected \(left, right\) keys, -1 for all, got 2 \(int\)",
    ),
    "text of dtype": (lambda: po.block_causal_mask(CU_SEQLENS, 5, dtype="float32"), "dtype: expected a torch.dtype"),
    "long list": (lambda: po.shift_labels(list(range(99)), CU_SEQLENS), r"labels: expected a tensor, got \[0, 1, .*\.\.\.\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_what_is_not_taken_is_named(case):
    call, message = NOT_TAKEN[case]
    error = raised(call)
    assert type(error) is TypeError
    assert re.match(message, str(error)), error
    assert "Declaration" not in str(error)


def test_integers_of_other_libraries():
    pa = pytest.importorskip("pyarrow")
    wanted = po.position_ids_from_cu_seqlens(CU_SEQLENS, 5)
    for total in (np.int64(5), np.uint8(5), np.array(5), torch.tensor(5), pa.scalar(5), pa.scalar(5, pa.uint8())):
        assert_same(po.position_ids_from_cu_seqlens(CU_SEQLENS, total), wanted)
        assert_same(po.shift_labels(LABELS, CU_SEQLENS, ignore_index=total)[[1, 4]], torch.tensor([5, 5]))
        assert po.pack_sequences([3, 4], total).bins == po.pack_sequences([3, 4], 5).bins
        assert po.pack_ffd(torch.tensor([3, 4]), total)[0].tolist() == po.pack_ffd(torch.tensor([3, 4]), 5)[0].tolist()
    out = po.varlen_attention(*[HEADS] * 3, CU_SEQLENS, window_size=(np.int64(1), pa.scalar(0)), softcap=np.float32(2))
    assert_same(out, po.varlen_attention(*[HEADS] * 3, CU_SEQLENS, window_size=(1, 0), softcap=2.0))


@pytest.mark.parametrize("on_meta", [0, 1])
def test_values_and_meta_tensors_together_are_named(on_meta):
    """torch runs the fake for both, whose result would be memory that nobody wrote."""
    given = [LABELS, CU_SEQLENS]
    given[on_meta] = given[on_meta].to("meta")
    names = ("labels", "cu_seqlens")
    with pytest.raises(ValueError, match=f"{names[on_meta]}: expected .* device of {names[1 - on_meta]}, got .* meta"):
        po.shift_labels(*given)
    assert po.shift_labels(LABELS.to("meta"), CU_SEQLENS.to("meta")).is_meta
