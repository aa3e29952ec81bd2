"""The trials that tell which rotation and which RMSNorm a function of a modelling module computes."""

import importlib
import inspect
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers.hf_families import formula_of_class  # noqa: E402

from packing_ops.integrations._rope_trial import Rotation, rotation_of  # noqa: E402
from packing_ops.integrations.transformers import rms_norm, rope, versions  # noqa: E402


def half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def every_two(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def turned(x, cos, sin, rotate=half):
    """The first elements of the head, as many as the tables have entries."""
    width = cos.shape[-1]
    return torch.cat((x[..., :width] * cos + rotate(x[..., :width]) * sin, x[..., width:]), -1)


def whole(x, cos, sin, rotate=half):
    return x * cos + rotate(x) * sin


def of(one, tables=lambda table: table):
    """A function of q and k as modelling modules have it."""

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = tables(cos).unsqueeze(unsqueeze_dim), tables(sin).unsqueeze(unsqueeze_dim)
        return one(q, cos, sin), one(k, cos, sin)

    return apply_rotary_pos_emb


def first_half_twice(table):
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)


def to_halves(x, cos, sin):
    return whole(torch.cat((x[..., ::2], x[..., 1::2]), -1), cos, sin)


FORMS = {  # (function, tables, interleaved, to_halves, partial)
    "half-split": (of(whole), "elements", False, False, False),
    "part of the head": (of(turned), "elements", False, False, True),
    "interleaved": (of(lambda x, c, s: whole(x, c, s, every_two)), "elements", True, False, False),
    "GLM": (of(lambda x, c, s: turned(x, c, s, every_two), first_half_twice), "first half", True, False, True),
    "half tables": (of(whole, lambda t: torch.cat((t, t), -1)), "pairs", False, False, False),
    "interleaved half tables": (
        of(lambda x, c, s: whole(x, c, s, every_two), lambda t: t.repeat_interleave(2, -1)), "pairs", True, False, False
    ),
    "DeepSeek": (
        of(to_halves, lambda t: t[..., : t.shape[-1] // 2].repeat(*[1] * (t.dim() - 1), 2)),
        "first half", True, True, False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_told(form):
    function, *expected = FORMS[form]
    rotation = rotation_of(function)
    assert isinstance(rotation, Rotation), rotation
    assert [rotation.tables, rotation.interleaved, rotation.to_halves, rotation.partial] == expected


def test_sections_of_an_image():
    """As Qwen2-VL took its angles from three axes."""

    def apply_multimodal_rotary_pos_emb(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
        cos, sin = (
            torch.cat([part[i % 3] for i, part in enumerate(t.split(mrope_section * 2, -1))], -1).unsqueeze(
                unsqueeze_dim
            )
            for t in (cos, sin)
        )
        return whole(q, cos, sin), whole(k, cos, sin)

    rotation = rotation_of(apply_multimodal_rotary_pos_emb)
    assert isinstance(rotation, Rotation), rotation
    q, k = torch.randn(2, 2, 4, 5, 16).unbind()
    tables = torch.randn(2, 3, 2, 5, 16).unbind()
    found = rotation.serve(None, (q, k, *tables, [2, 3, 3]), {})
    torch.testing.assert_close(found, apply_multimodal_rotary_pos_emb(q, k, *tables, [2, 3, 3]))


def test_complex_tables_and_one_tensor():
    def apply_rotary_emb(xq, xk, freqs_cis):
        def one(x):
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * freqs_cis[:, :, None]).flatten(3).type_as(x)

        return one(xq), one(xk)

    def apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=1):
        return whole(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))

    rotation = rotation_of(apply_rotary_emb)
    assert (rotation.tables, rotation.unsqueeze_dim) == ("complex", 2)  # heads after tokens, as the table is shaped
    q, k, x = torch.randn(3, 1, 5, 2, 8).unbind()
    freqs = torch.polar(torch.ones(1, 5, 4), torch.randn(1, 5, 4))
    torch.testing.assert_close(rotation.serve(None, (q, k, freqs), {}), apply_rotary_emb(q, k, freqs))
    rotation, (cos, sin) = rotation_of(apply_rotary_pos_emb), torch.randn(2, 1, 5, 8)
    expected = apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(rotation.serve(None, (x, cos), {"sin": sin, "unsqueeze_dim": 2}), expected)


def takes_sin_first(q, k, sin, cos):
    return of(whole)(q, k, cos, sin)


def raises(q, k, cos, sin, unsqueeze_dim=1):
    raise KeyError("no kernel")


def writes(q, k, cos, sin, unsqueeze_dim=1):
    found = of(whole)(q, k, cos, sin, unsqueeze_dim)
    return q.copy_(found[0]), k.copy_(found[1])


def but(change):
    """The usual rotation, and what ``change`` makes of its q."""

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        found = of(whole)(q, k, cos, sin, unsqueeze_dim)
        return change(found[0]), found[1]

    return apply_rotary_pos_emb


OTHERWISE = "otherwise in long rows"
REFUSED = {
    "half the gradient": (but(lambda x: x.detach() + 0.5 * (x - x.detach())), OTHERWISE),
    "with gradients": (but(lambda x: 2 * x if torch.is_grad_enabled() else x), OTHERWISE),
    "behind 100 tokens": (but(lambda x: torch.cat((x[:, :, :100], 0 * x[:, :, 100:]), 2)), OTHERWISE),
    "wide heads": (but(lambda x: 2 * x if x.shape[-1] > 24 else x), OTHERWISE),
    "larger batches": (but(lambda x: 2 * x if len(x) > 2 else x), OTHERWISE),
    "float16": (but(lambda x: 2 * x if x.dtype == torch.float16 else x), OTHERWISE),
    "bounds": (but(lambda x: x.clamp(-9, 9)), OTHERWISE),
    "the other way round": (of(lambda x, c, s: whole(x, c, -s)), "none of the formulas"),
    "a little longer": (of(lambda x, c, s: 1.0001 * whole(x, c, s)), "none of the formulas"),
    "in float32": (of(lambda x, c, s: whole(x.float(), c.float(), s.float())), "none of the formulas"),
    "last elements": (
        of(lambda x, c, s: torch.cat((x[..., : -c.shape[-1]], whole(x[..., -c.shape[-1] :], c, s)), -1)),
        "another part of the head",
    ),
    "k as it is": (
        lambda q, k, cos, sin, unsqueeze_dim=1: (of(whole)(q, k, cos, sin, unsqueeze_dim)[0], k),
        "none of the",
    ),
    "parameters": (takes_sin_first, r"parameters \(q, k, sin, cos\)"),
    "an error": (raises, "raises KeyError"),
    "writes into q": (writes, "none of the formulas"),
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_disagrees_is_refused(function):
    reason = rotation_of(REFUSED[function][0])
    assert isinstance(reason, str)
    assert re.search(REFUSED[function][1], reason), reason


def test_tables_of_a_width_that_was_not_tried_go_to_the_stock_function():
    rotation, seen = rotation_of(of(whole)), []
    q, tables = torch.randn(1, 2, 5, 16), torch.randn(2, 1, 5, 8)
    assert rotation.serve(lambda *args, **named: seen.append(args) or "stock", (q, q, *tables), {}) == "stock"
    assert len(seen) == 1


def test_rows_of_other_strides_are_rotated():
    """Zaya's queries are the result of a convolution with their tokens last."""
    stock = importlib.import_module("transformers.models.llama.modeling_llama").apply_rotary_pos_emb
    q, k = (torch.randn(1, heads, 8, 5).transpose(2, 3) for heads in (4, 2))
    cos, sin = torch.randn(2, 1, 5, 8)
    for found, wanted in zip(rotation_of(stock).serve(stock, (q, k, cos, sin), {}), stock(q, k, cos, sin), strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_function_in_place_of_another_is_tried_anew(monkeypatch):
    module = importlib.import_module("transformers.models.granite.modeling_granite")
    assert rope.refusal(module, "apply_rotary_pos_emb") is None
    monkeypatch.setattr(module, "apply_rotary_pos_emb", raises)
    assert "raises KeyError" in rope.refusal(module, "apply_rotary_pos_emb")


def test_tables_are_a_tensor_to_whoever_computes():
    cos = torch.randn(1, 5, 8)
    tables = rope.Tables(cos)
    for found in (-tables, tables * 2, 2 * tables, tables + 1, torch.cat([tables, tables]), tables.unsqueeze(1)):
        assert type(found) is torch.Tensor
    torch.testing.assert_close(torch.cat([tables, cos * tables]), torch.cat([cos, cos * cos]))
    assert tables.shape == cos.shape
    for kept in (tables[:, :3], tables.to(torch.float64)):  # still those of a swapped model
        assert type(kept) is rope.Tables
    q, k = torch.randn(2, 1, 2, 5, 8)
    torch.testing.assert_close(of(whole)(q, k, tables, tables), of(whole)(q, k, cos, cos))


def test_a_rotary_embedding_of_another_form_is_left():
    """Its tables are in a dict; with fp32_cos_sin it still finds the row's length in what it is given."""
    outputs = {"full": torch.ones(2)}
    assert rope._tag(torch.nn.Linear(1, 1), (), outputs) is outputs
    assert rope._ask_for_fp32(None, (torch.zeros(2, 5, 8, dtype=torch.bfloat16),))[0].shape == (2, 5, 8)


# --- RMSNorm ---


class Norm(torch.nn.Module):
    """The usual one; subclasses below change what they are named for."""

    def __init__(self, width=8, weight=True):
        super().__init__()
        if weight:
            self.weight = torch.nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def normed(self, x):
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon)

    def forward(self, x):
        return self.weight * self.normed(x).to(x.dtype)


class InFp32(Norm):
    def forward(self, x):
        return (self.weight * self.normed(x)).to(x.dtype)


class OnePlus(Norm):
    def forward(self, x):
        return ((1 + self.weight.float()) * self.normed(x)).to(x.dtype)


class Bare(Norm):
    def __init__(self):
        super().__init__(weight=False)

    def forward(self, x):
        return self.normed(x).to(x.dtype)


class Centred(Norm):
    def forward(self, x):
        return super().forward(x - x.mean(-1, keepdim=True))


class OtherEps(Norm):
    def normed(self, x):
        return x.float() / (x.float().square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class WithFlag(Norm):
    """Two formulas, by an attribute."""

    def __init__(self, plus):
        super().__init__()
        self.plus = plus

    def forward(self, x):
        return ((self.plus + self.weight.float()) * self.normed(x)).to(x.dtype)


class Grouped(Norm):
    """Normalised in groups of elements, of which the trial must have several."""

    def __init__(self, width, group):
        super().__init__(width)
        self.group = group

    def normed(self, x):
        return super().normed(x.unflatten(-1, (-1, self.group))).flatten(-2)


class Gated(Norm):
    def forward(self, x, gate=None):
        return super().forward(x)


class Biased(Norm):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(8))


def but_norm(change):
    """The usual norm, and what ``change`` makes of it and its results."""

    class Other(Norm):
        def forward(self, x):
            return change(self, super().forward(x))

    return Other


class OfHeads(Norm):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 8))


class OneNumber(Norm):
    def __init__(self):
        super().__init__(1)


class Detached(Norm):
    def normed(self, x):
        return x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.variance_epsilon).detach()


class BoundedWeight(Norm):
    def forward(self, x):
        return self.weight.clamp(-1.5, 1.5) * self.normed(x).to(x.dtype)


class TakesMore(Norm):
    def forward(self, x, **more):
        return super().forward(x)


FORMULAS = {Norm: "weight", InFp32: "weight_in_fp32", OnePlus: "one_plus_weight", Bare: "no_weight"}


@pytest.mark.parametrize("cls", FORMULAS)
def test_each_formula_is_told(cls):
    assert rms_norm.formula_of(cls, cls()) == (FORMULAS[cls], "")


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (but_norm(lambda _, y: 2 * y if y.requires_grad else y), "none of the"),
        (but_norm(lambda self, y: y if self.training else 2 * y), "none of the"),
        (but_norm(lambda _, y: 2 * y if y.shape[-2] > 100 else y), "none of the"),
        (but_norm(lambda _, y: 2 * y if y.dim() != 3 else y), "none of the"),
        (but_norm(lambda _, y: 2 * y if y.dtype == torch.float16 else y), "none of the"),
        (Detached, "none of the"), (BoundedWeight, "none of the"), (TakesMore, "takes x and **more"),
        (OfHeads, "a weight of shape [4, 8]"), (OneNumber, "a weight of shape [1]"),
        (Centred, "none of the formulas"), (OtherEps, "none of the formulas"), (Gated, "takes x and gate"), (Biased, "holds bias"),
    ],
)  # fmt: skip
def test_other_norms_are_refused(cls, why):
    formula, reason = rms_norm.formula_of(cls, cls())
    assert formula is None
    assert reason.startswith(cls.__name__)
    assert why in reason


def test_modules_of_one_class_are_told_apart_by_their_attributes():
    assert [rms_norm.formula_of(WithFlag, WithFlag(plus))[0] for plus in (0, 1, 2)] == [
        "weight_in_fp32", "one_plus_weight", None,
    ]  # fmt: skip


def test_groups_of_elements_are_not_the_whole():
    for width, group, formula in ((16, 8, None), (8, 8, "weight"), (16, 16, "weight"), (64, 8, None)):
        assert rms_norm.formula_of(Grouped, Grouped(width, group))[0] == formula
    unknown = Grouped(16, 8)
    unknown.weight = torch.nn.Parameter(torch.empty(0))
    assert "no weight that has its width" in rms_norm.formula_of(Grouped, unknown)[1]


def test_a_class_whose_modules_differ_is_refused():
    for cls, formula in ((Norm, None), (InFp32, None), (Grouped, None)):  # width=8 and weight=True: not of all modules
        assert formula_of_class(cls)[0] == formula
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    assert formula_of_class(llama.LlamaRMSNorm) == ("weight", "")


def test_the_trial_reads_no_weights():
    """Of another device, of no size (as sharded ones are), or not a number."""
    for weight in (torch.full((8,), torch.nan), torch.empty(0), torch.empty(8, device="meta")):
        norm = Norm()
        norm.weight = torch.nn.Parameter(weight)
        assert rms_norm.formula_of(Norm, norm) == ("weight", "")


def test_a_norm_that_is_farther_from_float64_is_not_swapped(monkeypatch):
    """By only the trial's word: torch's norm rounds once."""
    cls = transformers.models.llama.modeling_llama.LlamaRMSNorm
    rounds_once = rms_norm.FORWARDS["weight"]

    def farther(self, x):
        return (rounds_once(self, x).float() * (1 + 2**-6)).to(torch.promote_types(x.dtype, self.weight.dtype))

    rms_norm._formula.cache_clear()
    assert rms_norm.formula_of(cls, cls(24))[0] == "weight"
    monkeypatch.setattr(rms_norm, "agree", lambda *given: True)
    monkeypatch.setattr(rms_norm, "alike", lambda *given: True)
    monkeypatch.setattr(rms_norm, "FORWARDS", {"weight": farther, "no_weight": farther})
    rms_norm._formula.cache_clear()
    assert rms_norm.formula_of(cls, cls(24))[0] is None
    rms_norm._formula.cache_clear()


def test_source_is_read_once(monkeypatch):
    """For all patterns that are looked for in the same code."""
    read, getsource = [], inspect.getsource
    monkeypatch.setattr(inspect, "getsource", lambda code: read.append(code) or getsource(code))
    assert versions.code_has(every_two, r"flatten\(")
    assert not versions.code_has(every_two, r"chunk\(")
    assert read == [every_two]
