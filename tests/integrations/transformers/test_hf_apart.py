"""Layers of nobody's family, whatever they are given and return: their documents are kept apart."""

import dataclasses

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import FAMILIES, tiny_model
from test_hf_stateful import CLOSE, Blur, Decays, alone, assert_apart, logits, packed
from test_hf_untried import averaging

from packing_ops.integrations.transformers import register


@pytest.fixture(autouse=True)
def registered():
    register()


def behind_attention(layer, call, device):
    """A Llama of one block, which ends with call(layer, hidden states)."""
    torch.manual_seed(0)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device, num_hidden_layers=1)
    first = model.model.layers[0]

    class Own(type(first)):
        def forward(self, hidden, *args, **kwargs):
            return call(self.extra, super().forward(hidden, *args, **kwargs))

    first.extra, first.__class__ = layer.to(device), Own
    return model


def assert_served(model, device, call=None):
    ids, positions, _ = packed(device)
    with torch.no_grad():
        wanted = alone(model, ids)
    found = assert_apart(model if call is None else call, ids, position_ids=positions)
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

    return Layer()


def shifted(hidden):
    return torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


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


@pytest.mark.parametrize("base", [Blur, Decays], ids=["known", "tried"])
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


class Gated(Decays):
    """Its gate is closed until it learns to open."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Parameter(torch.zeros(32))

    def forward(self, x):
        return x + self.gate * super().forward(x)


class Flagged(Decays):
    def __init__(self, on):
        super().__init__()
        self.on = on

    def forward(self, x):
        return super().forward(x) if self.on else x


def test_a_gate_that_opens_later(device):
    model = behind_attention(Gated(), lambda layer, x: layer(x), device)
    ids, positions, _ = packed(device)
    logits(model, ids, position_ids=positions)
    model.model.layers[0].extra.gate.data.fill_(1.0)
    assert_served(model, device)


@pytest.mark.parametrize("compiled", [False, True])
def test_one_layer_says_nothing_of_another_of_its_class(compiled, device, fresh_compile):
    for on in (False, True):
        model = behind_attention(Flagged(on), lambda layer, x: layer(x), device)
        call = torch.compile(model, backend="eager") if compiled else model
        assert_served(model, device, call)


def test_a_forward_put_into_a_layer(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    mlp, decays = model.model.layers[0].mlp, Decays()
    stock = mlp.forward
    mlp.forward = lambda x: decays(stock(x))
    assert_served(model, device)


class OfNumbers(torch.nn.Module):
    """An embedding of pairs of tokens."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(61, 32)

    def forward(self, ids):
        return self.table(ids) + 0.5 * shifted(self.table(ids))


def test_an_embedding_of_neighbours(device):
    torch.manual_seed(0)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    model.model.embed_tokens = OfNumbers().to(device)
    assert_served(model, device)


# --- in a graph, where layers are called by themselves ---


class Star(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


class InDict(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = averaging()

    def forward(self, x):
        return {"router": None, "out": self.layer(x)}


@pytest.mark.parametrize(
    ("layer", "call"),
    [
        (lambda: Star(averaging()), lambda layer, x: layer(x)),
        (InDict, lambda layer, x: layer(x)["out"]),
    ],
    ids=["without names", "returned in a dict"],
)
def test_in_a_graph(layer, call, device, fresh_compile):
    model = behind_attention(layer(), call, device)
    assert_served(model, device, torch.compile(model, backend="eager"))


# --- layers without a state ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_left_of_a_trial(family, dtype, device):
    model = tiny_model(family, attn_implementation="packing_ops", device=device, dtype=dtype)
    ids, positions, _ = packed(device)
    wanted = logits(model, ids, position_ids=positions)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(logits(model, ids, position_ids=positions), wanted)
