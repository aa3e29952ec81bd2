"""What a call of a model needs of its modules is found once, and again when a module has changed."""

import copy
import pickle

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, LlamaConfig

from packing_ops.integrations import _walks
from packing_ops.integrations.transformers import apply_packing_ops, declare, positions, revert_packing_ops

IDS, POSITIONS = torch.tensor([[1, 2, 3, 4, 5]]), torch.tensor([[0, 1, 2, 0, 1]])  # two documents


class Shift(torch.nn.Module):
    def forward(self, x):
        return x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


@pytest.fixture
def model():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=16, **sizes))
    apply_packing_ops(model)
    yield model
    revert_packing_ops(model)


@pytest.fixture
def looks(monkeypatch):
    """A list that grows with each walk for positions."""
    seen, look = [], positions.reads_text
    monkeypatch.setattr(positions, "reads_text", lambda cls: (seen.append(cls), look(cls))[1])
    return seen


def test_walks_once(model, looks):
    first = model(IDS, position_ids=POSITIONS).logits
    walked = len(looks)
    assert walked > 0
    assert torch.equal(model(IDS, position_ids=POSITIONS).logits, first)
    assert len(looks) == walked


def test_a_new_module_is_seen(model):
    model(IDS, position_ids=POSITIONS)
    model.model.norm = torch.nn.Sequential(model.model.norm, Shift())
    with pytest.raises(ValueError, match="nothing says whether Shift mixes tokens"):
        model(IDS, position_ids=POSITIONS)


def test_a_declaration_is_seen(model):
    model.model.norm = torch.nn.Sequential(model.model.norm, Shift())
    declare(Shift, mixes=False)
    try:
        mixed = model(IDS, position_ids=POSITIONS).logits
        declare(Shift, mixes=True)
        apart = model(IDS, position_ids=POSITIONS).logits
    finally:
        declare(Shift, mixes=None)
    assert torch.equal(mixed[:, :3], apart[:, :3])
    assert not torch.equal(mixed[:, 3:], apart[:, 3:])
    with pytest.raises(ValueError, match="nothing says whether Shift mixes tokens"):
        model(IDS, position_ids=POSITIONS)


@pytest.mark.parametrize("of_class", [False, True])
def test_a_forward_that_another_library_puts_in_is_seen(model, of_class, monkeypatch):
    model(IDS, position_ids=POSITIONS)
    mlp = model.model.layers[1].mlp
    stock = type(mlp).forward

    def forward(x):
        return stock(mlp, x)

    if of_class:
        monkeypatch.setattr(type(mlp), "forward", lambda self, x: stock(self, x))
    else:
        mlp.forward = forward
    with pytest.raises(ValueError, match="nothing says whether"):
        model(IDS, position_ids=POSITIONS)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_starts_without(model, copied, looks):
    first = model(IDS, position_ids=POSITIONS).logits
    other = copied(model)
    walked = len(looks)
    assert torch.equal(other(IDS, position_ids=POSITIONS).logits, first)
    assert len(looks) > walked


def test_revert_takes_it_out(model):
    model(IDS, position_ids=POSITIONS)
    assert any(_walks._KEPT in vars(module) for module in model.modules())
    revert_packing_ops(model)
    assert not any(_walks._KEPT in vars(module) for module in model.modules())
