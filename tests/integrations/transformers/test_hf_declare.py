"""Layers whose code says nothing of a state: packed rows are refused until declare() says whether tokens mix."""

import functools
import re

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers import gpu_asserts  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402
from stateful_case import (  # noqa: E402
    CLOSE,
    LENGTHS,
    Blur,
    Decays,
    alone,
    assert_apart,
    behind_attention,
    in_llama,
    logits,
    packed,
)

from packing_ops.integrations.transformers import apply_packing_ops, declare, documents, register  # noqa: E402
from packing_ops.integrations.transformers.states import stateful  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    register()


def refused(layer, argument="position_ids"):
    """The whole sentence, for pytest.raises."""
    return (
        rf"{argument}: expected one document in each row, got several, and nothing says whether {layer} mixes tokens; "
        r"call packing_ops\.integrations\.transformers\.declare\(cls, mixes=\.\.\.\) \(False: each token by itself\), "
        r"or give each document a row of its own"
    )


def of_its_own(base=Decays, **members):
    """A class that nobody has declared."""
    return type("Own", (base,), members)


class Linear(torch.nn.Module):
    """Each token by itself."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(32, 32)

    def forward(self, x):
        return self.inner(x)


def assert_served(model, device, call=None):
    ids, positions, _ = packed(device)
    with torch.no_grad():
        wanted = alone(model, ids)
    found = assert_apart(model if call is None else call, ids, position_ids=positions)
    torch.testing.assert_close(found, wanted, **CLOSE)


def assert_refused(model, device, name="Own"):
    ids, positions, boundaries = packed(device)
    numbers = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))[None].to(device)
    for argument, given in {
        "position_ids": {"position_ids": positions},
        "cu_seq_lens_q": boundaries,
        "attention_mask": {"attention_mask": numbers},
    }.items():
        with pytest.raises(ValueError, match=refused(name, argument)):
            logits(model, ids, **given)
    one = torch.arange(16, device=device)[None]
    assert logits(model, ids, position_ids=one).shape == (1, 16, 61)  # a document in each row


# --- refused, and served once it is declared ---


def test_a_layer_that_mixes(device):
    cls = of_its_own()
    model = in_llama(cls(), device)
    assert_refused(model, device)
    declare(cls, mixes=True)
    assert_served(model, device)


def test_the_advice_fits_an_assertion_on_cuda():
    with pytest.raises(ValueError) as caught:
        logits(in_llama(of_its_own()(), "cpu"), packed("cpu")[0], position_ids=packed("cpu")[1])
    assert re.match(refused("Own"), str(caught.value)[: documents.LONGEST_ASSERTION])


def test_a_layer_that_does_not(device):
    cls = of_its_own(Linear)
    model = in_llama(cls(), device)
    assert_refused(model, device)
    declare(cls, mixes=False)
    assert_served(model, device)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_declared_again_and_taken_back(device):
    """Next to another layer with a state, for which the model's call has its documents."""
    cls = of_its_own()
    model = in_llama(torch.nn.Sequential(Blur(), cls()), device)
    ids, positions, _ = packed(device)
    declare(cls, mixes=False)  # a wrong word: tokens of one document reach the next
    wrong = logits(model, ids, position_ids=positions)
    declare(cls, mixes=True)
    assert_served(model, device)
    declare(cls, mixes=False)
    assert torch.equal(logits(model, ids, position_ids=positions), wrong)
    declare(cls, mixes=None)
    assert_refused(model, device)
    declare(cls, mixes=None)


def test_all_classes_are_named_at_once(device):
    first, second = of_its_own(), type("Second", (Linear,), {})
    model = in_llama(torch.nn.Sequential(first(), second(), first()), device)
    ids, positions, _ = packed(device)
    with pytest.raises(ValueError, match=refused("Own, Second")):
        logits(model, ids, position_ids=positions)


def test_subclasses_inherit_it_until_they_are_declared(device):
    base = of_its_own()
    inherits = type("Inherits", (base,), {})
    declare(base, mixes=True)
    assert_served(in_llama(inherits(), device), device)
    declare(inherits, mixes=False)
    assert stateful.layers_of(in_llama(inherits(), device)) == {}


def test_a_recurrence_inside_is_found_all_the_same(device):
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Blur()

        def forward(self, x):
            return self.inner(x)

    declare(Around, mixes=False)
    assert_served(in_llama(Around(), device), device)


def test_a_convolution_of_a_declared_class_is_its_own(device):
    """Over channels, say: what is declared counts."""
    cls = of_its_own(Blur)
    assert stateful.layers_of(in_llama(cls(), device)) != {}
    declare(cls, mixes=False)
    assert stateful.layers_of(in_llama(cls(), device)) == {}


def test_a_declared_layer_that_reads_ahead_is_refused(device):
    cls = of_its_own(forward=lambda self, x: x.flip(1))
    declare(cls, mixes=True)
    ids, positions, _ = packed(device)
    with pytest.raises(
        ValueError, match="got several, and Own mixes tokens by code of its own, which reads tokens ahead"
    ):
        logits(in_llama(cls(), device), ids, position_ids=positions)


def test_a_declared_layer_with_attention_inside_is_refused(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    block = model.model.layers[0]
    block.__class__ = type("Own", (type(block),), {})
    declare(type(block), mixes=True)
    ids, positions, _ = packed(device)
    with pytest.raises(ValueError, match=r"got several, and Own mixes .* which calls attention inside"):
        logits(model, ids, position_ids=positions)


@pytest.mark.parametrize(
    ("cls", "mixes", "error", "message"),
    [
        ("Linear", True, TypeError, "cls: expected a subclass of torch.nn.Module, got 'Linear'"),
        (int, True, TypeError, "cls: expected a subclass of torch.nn.Module, got <class 'int'>"),
        (Linear, 1, TypeError, "mixes: expected True, False or None, got 1"),
        (Linear, "no", TypeError, "mixes: expected True, False or None, got 'no'"),
        (torch.nn.Module, False, ValueError, "cls: expected the class of a layer, got Module"),
        (transformers.LlamaForCausalLM, False, ValueError, "cls: expected the class of a layer, got LlamaForCausalLM"),
    ],
)
def test_what_cannot_be_declared(cls, mixes, error, message):
    with pytest.raises(error, match=message):
        declare(cls, mixes=mixes)


# --- wherever such a layer is ---


def test_a_gate_that_is_closed(device):
    """It lets nothing through yet: no trial would have seen that it mixes."""

    class Own(Decays):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Parameter(torch.zeros(32))

        def forward(self, x):
            return x + self.gate * super().forward(x)

    model = behind_attention(Own(), lambda layer, x: layer(x), device)
    assert_refused(model, device)
    declare(Own, mixes=True)
    assert_served(model, device)
    model.model.layers[0].extra.gate.data.fill_(1.0)
    assert_served(model, device)


def test_a_forward_put_into_a_layer(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    mlp, decays = model.model.layers[0].mlp, Decays()
    stock = mlp.forward
    mlp.forward = lambda x: decays(stock(x))
    assert_refused(model, device, "LlamaMLP")
    mlp.forward = functools.wraps(stock)(lambda x: decays(stock(x)))
    assert_refused(model, device, "LlamaMLP")
    mlp.forward = stock
    assert_served(model, device)


def test_an_embedding_of_neighbours(device):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(61, 32)

        def forward(self, ids):
            found = self.table(ids)
            return found + 0.5 * torch.nn.functional.pad(found, (0, 0, 1, 0))[:, :-1]

    torch.manual_seed(0)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    model.model.embed_tokens = Own().to(device)
    assert_refused(model, device)
    declare(Own, mixes=True)
    assert_served(model, device)


def test_inside_of_a_layer_of_transformers(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    cls = of_its_own()
    model.model.layers[0].mlp.act_fn = cls()
    assert_refused(model, device)


def test_layers_of_libraries_that_replace_linear_ones(device):
    peft = pytest.importorskip("peft")
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    targets = ["q_proj", "down_proj", "embed_tokens"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, modules_to_save=["lm_head"]))
    assert_served(adapted, device)


# --- graphs, checkpoints, shards ---


def in_graphs(compiled, cls, device):
    """(Its model, a call of it)."""
    model = in_llama(cls(), device)
    if compiled == "layer":
        model.model.layers[0].mlp.compile(backend="eager")
    return model, torch.compile(model, backend="eager") if compiled == "model" else model


@pytest.mark.parametrize("compiled", [gpu_asserts.asserting("model"), "layer"])
def test_refused_in_graphs(compiled, device, fresh_compile, capfd):
    (_, call), (ids, positions, _) = in_graphs(compiled, of_its_own(), device), packed(device)
    logits(call, ids, position_ids=torch.arange(16, device=device)[None])
    with gpu_asserts.refused(refused("Own"), capfd):
        logits(call, ids, position_ids=positions)


@pytest.mark.parametrize("compiled", ["model", "layer"])
def test_served_in_graphs(compiled, device, fresh_compile):
    """Declared after a call that was traced."""
    cls = of_its_own()
    model, call = in_graphs(compiled, cls, device)
    logits(call, packed(device)[0], position_ids=torch.arange(16, device=device)[None])
    torch._dynamo.reset()
    declare(cls, mixes=True)
    assert_served(model, device, call)


def test_one_graph_where_nothing_mixes(device, fresh_compile):
    cls = of_its_own(Linear)
    declare(cls, mixes=False)
    model = in_llama(cls(), device)
    assert_served(model, device, torch.compile(model, backend="eager", fullgraph=True))


def test_beside_padding(device):
    cls = of_its_own()
    model, (ids, _, _) = in_llama(cls(), device), packed(device)
    mask = torch.repeat_interleave(torch.tensor([1, 2, 3, 0]), torch.tensor(LENGTHS))[None].to(device)
    with pytest.raises(ValueError, match=refused("Own", "attention_mask")):
        logits(model, ids, attention_mask=mask)
    declare(cls, mixes=True)
    with torch.no_grad():
        torch.testing.assert_close(logits(model, ids, attention_mask=mask)[:, :-3], alone(model, ids)[:, :-3], **CLOSE)


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
@pytest.mark.filterwarnings("ignore:.*Fully ?Sharded ?Data ?Parallel:FutureWarning")
def test_weights_on_other_ranks(sharding, device, one_rank):
    """FSDP2 gives the layer a separate class, which is named by the one behind it."""
    if device != "cpu":
        pytest.skip("gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    class Own(Linear):
        def forward(self, x):
            return super().forward(x) + Decays()(x)

    model, (ids, positions, _) = in_llama(Own()), packed(device)
    wanted = alone(model, ids).detach()
    if sharding == "fsdp2":
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model.model.layers[0].mlp[1], mesh=mesh)
        call = fully_shard(model, mesh=mesh)
    else:
        call = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match=refused("Own")):
        logits(call, ids, position_ids=positions)
    declare(Own, mixes=True)
    torch.testing.assert_close(assert_apart(call, ids, position_ids=positions), wanted, **CLOSE)


def test_a_recurrence_that_is_a_shard_is_found(device, one_rank):
    """By the code of the class behind FSDP2's."""
    if device != "cpu":
        pytest.skip("gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    class Own(Linear):
        def forward(self, x):
            return self.selective_scan(super().forward(x))

        def selective_scan(self, x):
            return Decays()(x)

    model, (ids, positions, _) = in_llama(Own()), packed(device)
    wanted = alone(model, ids).detach()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.model.layers[0].mlp[1], mesh=mesh)
    call = fully_shard(model, mesh=mesh)
    torch.testing.assert_close(assert_apart(call, ids, position_ids=positions), wanted, **CLOSE)


def test_rows_on_several_ranks_need_layers_that_are_known(device, one_rank):
    if device != "cpu":
        pytest.skip("gloo")
    group, cls = torch.distributed.group.WORLD, of_its_own()
    model = in_llama(cls(), device)
    with pytest.raises(ValueError, match=r"sequence_group: .* got Own, of which nothing says .* declare\(cls, mixes"):
        apply_packing_ops(model, sequence_group=group)
    declare(cls, mixes=True)
    with pytest.raises(ValueError, match=r"sequence_group: .* got Own carries a state"):
        apply_packing_ops(model, sequence_group=group)
    declare(cls, mixes=False)
    apply_packing_ops(model, sequence_group=group)
