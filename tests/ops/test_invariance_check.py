"""check_invariance: it names the layer that gives other bits, and what cannot be claimed."""

import itertools
import types

import pytest
import torch
from torch import nn

import packing_ops as po
from packing_ops.invariance import mode as _invariant
from packing_ops.invariance.check import bits_of_rows, recorded
from packing_ops.invariance.refusals import reason_of, refusals

LENGTHS = (1, 5, 7, 16, 40)


class Normalised(nn.Module):
    """Takes its mean from all rows, as nothing should."""

    def forward(self, x):
        return x - x.mean(0)


class Causal(nn.Module):
    """A running mean in each document, which a prefix does not change."""

    def __init__(self, by_length=False):
        super().__init__()
        self.inner, self.by_length = nn.Linear(24, 24), by_length

    def forward(self, x, cu_seqlens):
        x, ends = self.inner(x), cu_seqlens.tolist()
        parts = [x[a:b] for a, b in itertools.pairwise(ends)]
        return torch.cat([p.cumsum(0) * (1 + len(p) * self.by_length) for p in parts])


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, cu_seqlens):
        for layer in self.layers:
            x = layer(x, cu_seqlens) if isinstance(layer, Causal) else layer(x)
        return x


def documents(dtype=torch.float32):
    return [torch.randn(n, 24, dtype=dtype) for n in LENGTHS]


def check(*layers, mode=True, **options):
    model = Model(*layers)
    found = {}
    given = options.pop("documents", None) or documents()
    if mode:
        with po.invariant():
            found = po.check_invariance(model, model, documents=given, **options)
    else:
        found = po.check_invariance(model, model, documents=given, **options)
    return found


def broken(found):
    return {layer.name for layer in found.layers if layer.packs or layer.prefixes}


def test_equal_bits():
    found = check(nn.Linear(24, 24), nn.RMSNorm(24), Causal(), nn.ReLU())
    assert found
    assert found.packs
    assert found.prefixes
    assert found.active
    assert found.why_not() == []
    assert [layer.name for layer in found.layers][:3] == ["", "layers.0", "layers.1"]
    assert "layers.2.inner" in [layer.name for layer in found.layers]
    whole = sum(LENGTHS)
    assert {layer.rows for layer in found.layers} == {3 * whole + 2 * 40 + sum(LENGTHS[:-1])}


def test_a_layer_that_mixes_rows_is_named_and_no_other():
    found = check(nn.Linear(24, 24), Normalised(), nn.Linear(24, 24))
    assert not found
    assert not found.packs
    assert broken(found) == {"layers.1"}
    (line,) = found.why_not()
    assert line.startswith("layers.1 (Normalised): ")
    assert "its own forward" in line


def test_a_prefix_may_differ_where_packs_do_not():
    found = check(Causal(by_length=True))
    assert found
    assert found.packs
    assert not found.prefixes
    assert broken(found) == {"layers.0"}  # not the linear layer in it


def test_without_the_mode_the_products_are_named():
    found = check(nn.Linear(24, 64), nn.Linear(64, 24), mode=False)
    assert not found.active
    assert "layers.0" in broken(found)
    assert "packing_ops.invariant()" in found.why_not()[0]


def test_training_mode_and_gradients_of_parameters_stay():
    model = nn.Sequential(nn.Linear(24, 24))
    po.check_invariance(model, lambda row, cu_seqlens: model(row), documents=documents())
    assert model.training
    assert model[0].weight.grad is None
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_hooks_go_after_an_error():
    model = Model(nn.Linear(3, 3))
    with pytest.raises(RuntimeError):
        po.check_invariance(model, model, documents=documents())
    assert not model.layers[0]._forward_hooks
    assert not model.layers[0]._forward_pre_hooks


REFUSED = {
    "dropout": (nn.Dropout(0.1), "dropout of 0.1"),
    "batch norm": (nn.BatchNorm1d(24), "whole batch"),
}


@pytest.mark.parametrize(("layer", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(layer, words):
    found = check(nn.Linear(24, 24), layer)
    assert not found
    assert not found.layers
    assert set(found.refused) == {"layers.1"}
    assert words in found.why_not()[0]


def test_what_has_no_effect_is_not_refused():
    assert check(nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.Linear(24, 24))


def test_refused_by_what_a_module_holds():
    experts = nn.Linear(24, 24)
    experts.expert_capacity = 64
    assert "capacity" in check(experts).refused["layers.0"]
    quantised = nn.Module()
    quantised.register_buffer("weight", torch.zeros(4, 4, dtype=torch.int8))
    assert "quantised" in check(quantised).refused["layers.0"]
    parallel = nn.Linear(24, 24)
    parallel._tp_size = 2
    assert "tensor-parallel" in check(parallel).refused["layers.0"]
    attention = nn.Linear(24, 24)
    attention.attention_dropout = 0.2
    assert "dropout of 0.2" in check(attention).refused["layers.0"]


def test_refused_where_it_is_compiled_for_the_cpu():
    found = check(torch.compile(nn.Linear(24, 24)))
    assert "torch.compile" in next(iter(found.refused.values()))
    compiled = nn.Linear(24, 24)
    compiled.compile()
    assert "torch.compile" in check(compiled).refused["layers.0"]


class RowsNorm(nn.Module):
    """By its name a sum over a row."""


def test_compiled_sums_over_a_row_are_refused_where_torch_cannot_fix_their_order(monkeypatch):
    """Parameters on meta: they represent those of a GPU."""
    from torch._inductor import config

    def found(*layers, batch_invariant=False):
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), *layers)).to("meta")
        model[1].compile()
        with monkeypatch.context() as patch:
            fake = types.SimpleNamespace(max_autotune=False, max_autotune_gemm=False)
            if batch_invariant:
                fake.batch_invariant = True
            patch.setattr(torch._inductor, "config", fake)
            return refusals(model)

    assert config is torch._inductor.config
    assert found() == {}
    refused = found(nn.LayerNorm(4), RowsNorm())
    assert set(refused) == {"1"}
    assert "sums a row of LayerNorm in an order" in refused["1"]
    assert "sums a row of RowsNorm" in found(RowsNorm())["1"]
    ours = RowsNorm()
    vars(ours)[_invariant.ANY_ORDER] = True
    assert found(ours) == {}
    assert found(nn.LayerNorm(4), batch_invariant=True) == {}


def test_no_hook_is_put_into_a_compiled_layer():
    """With hooks its graph would be another one than the one that trains."""
    model = nn.Sequential(nn.Linear(24, 24), nn.Sequential(nn.Linear(24, 24), nn.ReLU()), nn.ReLU())
    model[1].compile(backend="eager")
    with recorded(model, 5) as calls:
        model(torch.randn(5, 24))
        assert not any(module._forward_hooks for module in model[1].modules())
    assert set(calls) == {"", "0", "2"}
    with po.invariant():
        assert "it has compiled layers" in reason_of(model, model[0].weight)
        assert "compiled" not in reason_of(model[0], model[0].weight)


def test_bad_input():
    with pytest.raises(TypeError, match=r"^model: expected a torch\.nn\.Module, got function"):
        po.check_invariance(check)
    model = nn.Linear(24, 24)
    with pytest.raises(ValueError, match=r"^documents: expected some for a model without get_input_embeddings"):
        po.check_invariance(model)
    with pytest.raises(ValueError, match=r"^documents: expected some, none of them empty, got 0"):
        po.check_invariance(model, documents=[])
    with pytest.raises(ValueError, match=r"^documents: .*empty, got 2"):
        po.check_invariance(model, documents=[torch.zeros(1, 24), torch.zeros(0, 24)])
    for rows in ([], [0], [3, -1], ["3"]):
        with pytest.raises(ValueError, match=r"^rows: expected lengths of documents, above 0"):
            po.check_invariance(model, rows=rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool], ids=str)
def test_bits_of_rows_see_one_bit(dtype):
    x = torch.randn(6, 5, 7).to(dtype)
    before = bits_of_rows(x)
    assert torch.equal(bits_of_rows(x[2:4]), before[2:4])
    other = x.clone()
    flat = other.view(torch.uint8 if dtype == torch.bool else torch.int16).reshape(6, -1)
    flat[3, -1] ^= 1
    assert (bits_of_rows(other) != before).tolist() == [False, False, False, True, False, False]
    swapped = x.clone()
    swapped[1] = swapped[1].flip(0)
    if dtype != torch.bool:
        assert bits_of_rows(swapped)[1] != before[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: the CPU's products take any size")
def test_a_size_that_is_no_multiple_of_8_is_named_on_a_gpu():
    model = Model(nn.Linear(24, 5001)).to("cuda", torch.float16)
    given = [document.cuda() for document in documents(torch.float16)]
    with po.invariant():
        found = po.check_invariance(model, model, documents=given)
    assert "no multiple of 8" in " ".join(found.why_not())
