"""Layers of nobody's family, whatever they are given and return: documents are apart in known and in declared ones."""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from helpers.hf_models import FAMILIES, tiny_model
from stateful_case import CLOSE, Blur, Decays, alone, assert_apart, behind_attention, logits, packed

from packing_ops.integrations.transformers import declare, register


@pytest.fixture(autouse=True)
def registered():
    register()


def assert_served(model, device):
    ids, positions, _ = packed(device)
    with torch.no_grad():
        wanted = alone(model, ids)
    found = assert_apart(model, ids, position_ids=positions)
    torch.testing.assert_close(found, wanted, **CLOSE)


@dataclasses.dataclass
class Carried:
    hidden: torch.Tensor
    scale: float = 2.0


class Plain:
    def __init__(self, hidden):
        self.hidden = hidden


def with_a_state(base, before, after=lambda result, given: result):
    """A layer with the state of ``base``, given and returning its hidden states in another way."""

    class Layer(base):
        def forward(self, *given, **named):
            return after(base.forward(self, before(*given, **named)), given)

    if base is Decays:
        declare(Layer, mixes=True)
    return Layer()


FORMS = {  # what the layer makes of its arguments, how it is called, what it returns
    "behind a vector": (lambda scale, x: x * scale, lambda f, x: f(torch.linspace(0.5, 1, 32).to(x.device), x), None),
    "behind a number": (lambda scale, x: x * scale, lambda f, x: f(torch.tensor(0.5).to(x.device), x), None),
    "behind others of each token": (lambda gate, x: x * gate, lambda f, x: f(x.sigmoid(), x), None),
    "in a tuple": (lambda pair: pair[0], lambda f, x: f((x, 1)), None),
    "in a list": (lambda pair: pair[1], lambda f, x: f([None, x]), None),
    "in a dict": (lambda given: given["x"], lambda f, x: f({"x": x, "more": {"y": None}}), None),
    "in a dataclass": (lambda given: given.hidden * given.scale, lambda f, x: f(Carried(x)), None),
    "by keyword": (lambda x: x, lambda f, x: f(x=x), None),
    "returned in a dict": (lambda x: x, lambda f, x: f(x)["out"], lambda out, given: {"out": out}),
    "returned in a dataclass": (lambda x: x, lambda f, x: f(x).hidden, lambda out, given: Carried(out)),
    "returned behind others": (lambda x: x, lambda f, x: f(x)[1], lambda out, given: (given[0].flatten(0, 1), out)),
    "beside an object": (lambda x, more: x, lambda f, x: f(x, Plain(None)), None),
    "beside a dtype": (lambda x, dtype: x.to(dtype), lambda f, x: f(x, torch.float32), None),
    "beside a mask": (lambda x, mask: x, lambda f, x: f(x, torch.ones(1, 1, x.shape[1], x.shape[1])), None),
    "flat": (lambda x: x[None], lambda f, x: f(x.flatten(0, 1)).view_as(x), lambda out, given: out[0]),
    "sequence first": (
        lambda x: x.transpose(0, 1),
        lambda f, x: f(x.transpose(0, 1)).transpose(0, 1),
        lambda out, given: out.transpose(0, 1),
    ),
    "channels first": (
        lambda x: x.transpose(1, 2),
        lambda f, x: f(x.transpose(1, 2)).transpose(1, 2),
        lambda out, given: out.transpose(1, 2),
    ),
}


@pytest.mark.parametrize("base", [Blur, Decays], ids=["known", "declared"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_served(form, base, device):
    before, call, after = FORMS[form]
    layer = with_a_state(base, before, after or (lambda out, given: out))
    assert_served(behind_attention(layer, call, device), device)


def test_two_rows_of_a_sequence_first_layer(device):
    before, call, after = FORMS["sequence first"]
    model = behind_attention(with_a_state(Decays, before, after), call, device)
    ids = torch.randint(3, 60, (2, 8), generator=torch.Generator().manual_seed(4)).to(device)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 2]], device=device)
    found = logits(model, ids, position_ids=positions)
    for row, start, end in ((0, 0, 3), (0, 3, 8), (1, 0, 5), (1, 5, 8)):
        torch.testing.assert_close(found[row, start:end], logits(model, ids[row : row + 1, start:end])[0], **CLOSE)


# --- layers without a state ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_put_into_them(family, dtype, device):
    model = tiny_model(family, attn_implementation="packing_ops", device=device, dtype=dtype)
    ids, positions, _ = packed(device)
    wanted = logits(model, ids, position_ids=positions)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(logits(model, ids, position_ids=positions), wanted)
