"""Layers that run documents as rows, and run again in the backward of a checkpoint, when the model's call is over."""

import copy
import functools
import pickle

import pytest
import torch
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils import checkpoint as torch_checkpoint

transformers = pytest.importorskip("transformers")

from checkpoint_case import by_hand, layers_of  # noqa: E402
from stateful_case import Blur, assert_apart, in_llama, packed  # noqa: E402
from stateful_models import stateful_model  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.integrations.transformers import (  # noqa: E402
    apply_packing_ops,
    call,
    checkpoints,
    register,
    revert_registration,
)
from packing_ops.integrations.transformers.states import stateful  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    register()


# --- checkpoints that a training loop puts around layers ---


class RunsAgain(torch.autograd.Function):
    """A checkpoint of another library."""

    @staticmethod
    def forward(ctx, function, hidden):
        ctx.function = function
        ctx.save_for_backward(hidden)
        with torch.no_grad():
            return function(hidden)

    @staticmethod
    def backward(ctx, gradient):
        hidden = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(hidden)
        torch.autograd.backward(out, gradient)
        return None, hidden.grad


AROUND = {
    "reentrant": lambda layer: by_hand(layer, functools.partial(torch_checkpoint.checkpoint, use_reentrant=True)),
    "non-reentrant": lambda layer: by_hand(layer, functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)),
    "wrapper": checkpoint_wrapper,
    "reentrant wrapper": functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
    "composable": composable_checkpoint,
    "another library's": lambda layer: by_hand(layer, RunsAgain.apply),
}
OF_TORCH = [each for each in AROUND if each != "another library's"]


def checkpointed(model, around):
    layers = layers_of(model)
    for index, layer in enumerate(layers):
        layers[index] = AROUND[around](layer)
    return model


def model_of(family, device):
    """Jamba as apply_packing_ops leaves it, the others by their attn_implementation alone."""
    if family != "jamba":
        return stateful_model(family, device=device)
    model = stateful_model(family, attn_implementation="eager", device=device)
    apply_packing_ops(model, rope=False)
    return model


def train(models, device, rows=((5, 7, 1, 3),)):
    """All forwards, then the backward."""
    for model in models:
        losses = [model(ids, position_ids=positions, labels=ids, use_cache=False).loss
                  for ids, positions, _ in (packed(device, lengths) for lengths in rows)]  # fmt: skip
        torch.stack(losses).sum().backward()


def assert_same_gradients(ours, theirs):
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize("family", ["jamba", "lfm2", "mamba"])
@pytest.mark.parametrize("around", OF_TORCH)
def test_gradients_of_layers_that_a_loop_checkpoints(around, family, device):
    """Two rows, before either runs again: each with its documents, the third row with one."""
    models = [model_of(family, device) for _ in range(2)]
    checkpointed(models[0], around)
    train(models, device, [(5, 7, 1, 3), (2, 9, 5), (16,)])
    assert_same_gradients(*models)


CONV = {"num_hidden_layers": 1, "layer_types": ["conv"]}


@pytest.mark.parametrize("around", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("compiled", ["inside", "outside"])
def test_gradients_of_compiled_layers_that_a_loop_checkpoints(compiled, around, device, fresh_compile):
    """The checkpoint inside of the compiled layer, as examples/full_sft.py puts it, and around it."""
    models = [stateful_model("lfm2", device=device, **CONV) for _ in range(2)]
    for layer in models[0].model.layers:
        if compiled == "inside":
            layer.compile(backend="aot_eager")
        else:
            layer.forward = torch.compile(layer.forward, backend="aot_eager")
        AROUND[around](layer)
    train(models, device, [(5, 7, 1, 3), (2, 9, 5)])
    assert_same_gradients(*models)


def test_a_policy_in_a_loop(device):
    models = [model_of("jamba", device) for _ in range(2)]
    policy = po.checkpoint_policy(models[0], budget=2**14)
    for layer in layers_of(models[0]):
        by_hand(layer, functools.partial(torch_checkpoint.checkpoint, use_reentrant=False, context_fn=policy))
    train(models, device, [(5, 7, 1, 3), (2, 9, 5)])
    assert_same_gradients(*models)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_whole_model(reentrant, device):
    models = [in_llama(Blur(), device)]
    models.append(copy.deepcopy(models[0]))
    ids, positions, _ = packed(device)
    embeds = models[0].model.embed_tokens(ids).detach().requires_grad_()

    def run(embeds):
        return models[0](inputs_embeds=embeds, position_ids=positions).logits

    torch_checkpoint.checkpoint(run, embeds, use_reentrant=reentrant).square().sum().backward()
    models[1](inputs_embeds=embeds, position_ids=positions).logits.square().sum().backward()
    for ours, theirs in zip(*(model.model.layers.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_checkpoint_that_does_not_take_the_documents_along_is_refused(device):
    """One document in each row needs none, until the layer has seen several."""
    models = [model_of("jamba", device) for _ in range(2)]
    checkpointed(models[0], "another library's")
    train(models, device, [(16,)])
    assert_same_gradients(*models)
    with pytest.raises(
        RuntimeError, match=r"checkpoint: expected torch\.utils\.checkpoint around JambaMambaMixer, whose"
    ):
        train(models[:1], device)


def train_plain(model, device, rows=()):
    """A row without position_ids, then these; one backward."""
    ids = packed(device, (9,))[0]
    loss = model(ids, labels=ids, use_cache=False).loss
    for lengths in rows:
        ids, positions, _ = packed(device, lengths)
        loss = loss + model(ids, position_ids=positions, labels=ids, use_cache=False).loss
    loss.backward()


COPIES = {"copied": copy.deepcopy, "unpickled": lambda model: pickle.loads(pickle.dumps(model))}


@pytest.mark.parametrize("family", ["jamba", "lfm2", "mamba"])
@pytest.mark.parametrize("around", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("made", COPIES)
@pytest.mark.parametrize("attention", ["eager", "packing_ops"])
def test_a_copy_of_a_model_that_packed_rows_trains_in_torchs_checkpoints(attention, made, around, family, device):
    """As in a process that has packed no row before the copy's plain one."""
    packs = stateful_model(family, device=device)
    train([packs], device)
    models = [COPIES[made](packs) for _ in range(2)]
    stateful.revert()
    checkpointed(models[0], around)
    for model in models:
        model.zero_grad()
        model.set_attn_implementation(attention)
        train_plain(model, device, [(5, 7, 1, 3)] if attention == "packing_ops" else [])
    assert_same_gradients(*models)


@pytest.mark.parametrize("before", ["trained with another attention", "evaluated", "trained as a copy"])
def test_plain_rows_in_another_librarys_checkpoint_behind_packed_ones(before, device):
    models = [stateful_model("jamba", device=device) for _ in range(2)]
    for index, model in enumerate(models):
        if before == "evaluated":
            assert_apart(model, *packed(device)[:1], position_ids=packed(device)[1])
        else:
            train([model], device)
        if before == "trained as a copy":
            models[index] = copy.deepcopy(model)
        elif before != "evaluated":
            model.set_attn_implementation("eager")
    checkpointed(models[0], "another library's")
    for model in models:
        model.zero_grad()
        train_plain(model, device)
    assert_same_gradients(*models)
    models[0].set_attn_implementation("packing_ops")
    with pytest.raises(RuntimeError, match=r"checkpoint: expected torch\.utils\.checkpoint around JambaMambaMixer"):
        train_plain(models[0], device, [(5, 7, 1, 3)])


def test_another_librarys_checkpoint_inside_of_torchs_is_refused(device):
    """Its backward runs inside of torch's."""
    model = stateful_model("mamba", device=device)
    for around in ("another library's", "reentrant"):
        checkpointed(model, around)
    with pytest.raises(RuntimeError, match=r"checkpoint: expected torch\.utils\.checkpoint around MambaMixer"):
        train([model], device)


@pytest.mark.parametrize("around", ["reentrant", "non-reentrant"])
def test_torchs_checkpoint_under_other_names_is_refused(around, device, monkeypatch):
    """As under a torch whose checkpoints begin in functions that are not known."""
    for patch in checkpoints.PATCHES:
        patch.revert()
    monkeypatch.setattr(checkpoints, "PATCHES", ())
    model = checkpointed(stateful_model("mamba", device=device), around)
    with pytest.raises(RuntimeError, match=r"checkpoint: expected torch\.utils\.checkpoint around MambaMixer"):
        train([model], device)


def test_a_model_that_got_another_attention_trains_on(device):
    models = [checkpointed(model_of("jamba", device), "reentrant"), model_of("jamba", device)]
    for model in models:
        train([model], device)
        model.set_attn_implementation("eager")
        train([model], device, rows=((16,),))  # of one document: others are refused
    assert_same_gradients(*models)


def test_torchs_functions_are_put_back(device):
    others = [name for name in call.NAMES if name != "packing_ops"]
    call.NAMES.difference_update(others)  # the last, whatever others left
    try:
        revert_registration()
        held = torch_checkpoint._CheckpointFrame, torch_checkpoint.CheckpointFunction
        before = [dict(vars(each)) for each in held]
        register()
        assert [dict(vars(each)) for each in held] != before
        revert_registration()
        assert [dict(vars(each)) for each in held] == before
    finally:
        register()
        call.NAMES.update(others)


# --- checkpoints of a compiled model ---


@pytest.mark.parametrize("checkpointing", ["non-reentrant", "reentrant", "selective", "around"])
def test_compiled_and_checkpointed(checkpointing, device, fresh_compile):
    """A graph that breaks inside a checkpoint would save other tensors than the layer that runs again."""
    ids, positions, _ = packed(device)
    models = [stateful_model("lfm2", device=device, **CONV) for _ in range(2)]
    if checkpointing == "around":
        for index, layer in enumerate(models[0].model.layers):
            models[0].model.layers[index] = checkpoint_wrapper(layer)
    else:
        options = {"use_reentrant": checkpointing == "reentrant"}
        if checkpointing == "selective":
            products = [torch.ops.aten.mm.default]
            options["context_fn"] = functools.partial(torch_checkpoint.create_selective_checkpoint_contexts, products)
        models[0].gradient_checkpointing_enable(options)
    models[0].compile(backend="aot_eager")
    for _ in range(2):
        for model in models:
            model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
