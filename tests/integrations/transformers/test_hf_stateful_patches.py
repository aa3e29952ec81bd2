"""The two functions of torch.utils.checkpoint that take documents along, in programs that fork, run threads, move or
copy models, replace their parameters, capture graphs, or have another default device.
"""

import contextlib
import copy
import functools
import multiprocessing
import os
import pickle
import signal
import threading

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils import checkpoint as torch_checkpoint

pytest.importorskip("transformers")

from helpers import captured
from stateful_case import packed
from stateful_models import stateful_model

from packing_ops.integrations.transformers import register
from packing_ops.integrations.transformers.states import stateful_rows

FORMS = {"reentrant": CheckpointImpl.REENTRANT, "non-reentrant": CheckpointImpl.NO_REENTRANT}
FAMILIES = ["jamba", "lfm2", "mamba"]
LENGTHS = (5, 7, 1, 3)
both_forms = pytest.mark.parametrize("form", FORMS)
all_families = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(autouse=True)
def registered():
    register()


def layers_of(model):
    return model.backbone.layers if hasattr(model, "backbone") else model.model.layers


def model_of(family, form=None, device="cpu", seed=0):
    model = stateful_model(family, device=device, seed=seed)
    layers = layers_of(model)
    for index, layer in enumerate(layers if form else ()):
        layers[index] = checkpoint_wrapper(layer, checkpoint_impl=FORMS[form])
    return model


def loss_of(model, lengths=LENGTHS, device="cpu"):
    ids, positions, _ = packed(device, lengths)
    return model(ids, position_ids=positions, labels=ids, use_cache=False).loss


def gradients(model):
    named = {name.replace("_checkpoint_wrapped_module.", ""): each.grad for name, each in model.named_parameters()}
    return {name: None if grad is None else grad.clone() for name, grad in named.items()}


def expected(family, rows=(LENGTHS,), device="cpu", seed=0):
    """Of a model without checkpoints."""
    return _expected(family, tuple(rows), device, seed)


@functools.cache
def _expected(family, rows, device, seed):
    model = model_of(family, device=device, seed=seed)
    sum(loss_of(model, lengths, device) for lengths in rows).backward()
    return gradients(model)


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        torch.testing.assert_close(found[name], grad, msg=lambda text, name=name: f"{name}: {text}")


def test_a_checkpoint_that_loses_documents_changes_these_gradients():
    """Or the tests below would compare nothing."""
    for family in FAMILIES:
        model = model_of(family)
        loss_of(model, (16,)).backward()
        found, wanted = gradients(model), expected(family)
        assert not all(torch.allclose(found[name], grad, rtol=1e-2) for name, grad in wanted.items())


# --- forks ---


def in_a_fork(how, function, path):
    """What the function returns in a child of this process."""

    def run():
        signal.alarm(120)  # a child that waits for a thread of its parent
        torch.set_num_threads(1)
        torch.save(function(), path)

    if how == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=run)
        child.start()
        child.join()
        status = child.exitcode
    else:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                run()
                os._exit(0)
            os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0
    return torch.load(path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd starts threads for GPUs, which a fork has not")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(("how", "trained_before"), [("os.fork", False), ("multiprocessing", True)])
@both_forms
@all_families
def test_a_backward_in_a_fork(family, form, how, trained_before, tmp_path):
    """Of a forward of the parent, which runs its own behind it; then a whole step of both."""
    model = model_of(family, form)
    if trained_before:
        loss_of(model, (9, 4)).backward()
        model.zero_grad()
    loss = loss_of(model)

    def backward():
        loss.backward()
        first = gradients(model)
        model.zero_grad()
        loss_of(model, (2, 9, 5)).backward()
        return first, gradients(model)

    for first, second in (in_a_fork(how, backward, tmp_path / "child.pt"), backward()):
        assert_same(first, expected(family))
        assert_same(second, expected(family, [(2, 9, 5)]))


# --- threads ---


def at_once(*functions):
    """The results of functions in a thread each."""
    results, raised = [None] * len(functions), []

    def run(index):
        try:
            results[index] = functions[index]()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize(
    "forms", [("reentrant", "non-reentrant"), ("reentrant",) * 2, ("non-reentrant",) * 2], ids=" ".join
)
@pytest.mark.parametrize("crossed", [False, True], ids=["own backward", "the other's backward"])
@all_families
def test_two_models_in_two_threads(family, crossed, forms, device):
    """Each layer waits for the other model's, when it runs and, on the CPU, when it runs again: a GPU has one thread
    for all backwards.
    """
    rows, barrier, seen = [(5, 7, 1, 3), (2, 9, 5)], threading.Barrier(2, timeout=60), []
    models = [model_of(family, form, device, seed) for seed, form in enumerate(forms)]
    losses = at_once(*(functools.partial(loss_of, *each, device) for each in zip(models, rows, strict=True)))

    def meet(layer, _):
        if device == "cpu" or torch._C._current_graph_task_id() == -1:
            barrier.wait()
        seen.append(layer)

    for model in models:
        for layer in layers_of(model):
            layer._checkpoint_wrapped_module.register_forward_pre_hook(meet)
    later = at_once(*(functools.partial(loss_of, *each, device) for each in zip(models, rows[::-1], strict=True)))
    losses = [first + second for first, second in zip(losses, later, strict=True)]
    assert len(seen) == 2 * len(layers_of(models[0]))
    at_once(*(loss.backward for loss in (losses[::-1] if crossed else losses)))
    assert len(seen) == 6 * len(layers_of(models[0]))
    for seed, model in enumerate(models):
        assert_same(gradients(model), expected(family, rows, device, seed))


# --- copies ---


COPIES = {
    "copied": copy.deepcopy,
    "unpickled": lambda model: pickle.loads(pickle.dumps(model)),
}


@pytest.mark.parametrize("made", COPIES)
@both_forms
@all_families
def test_copies_of_checkpointed_models(made, form, family, device):
    """Made before a packed row, between its forward and its backward, and behind it."""
    model = model_of(family, form, device)
    models = [COPIES[made](model)]
    loss = loss_of(model, device=device)
    models.append(COPIES[made](model))
    loss.backward()
    models += [COPIES[made](model), model]
    for each in models:
        each.zero_grad()
        loss_of(each, (2, 9, 5), device).backward()
        assert_same(gradients(each), expected(family, [(2, 9, 5)], device))


# --- torch.func ---


def functional_loss(model, parameters, lengths=LENGTHS, device="cpu"):
    ids, positions, _ = packed(device, lengths)
    given = {"position_ids": positions, "labels": ids, "use_cache": False}
    return torch.func.functional_call(model, parameters, (ids,), given).loss


@pytest.mark.parametrize("form", [None, "non-reentrant"])
@all_families
def test_functional_call(form, family, device):
    """A layer that runs again behind the call finds the module's parameters, which have the same values here."""
    model = model_of(family, form, device)
    parameters = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
    functional_loss(model, parameters, device=device).backward()
    found = {name.replace("_checkpoint_wrapped_module.", ""): each.grad for name, each in parameters.items()}
    assert_same(found, expected(family, device=device))
    assert not any(each.grad is not None for each in model.parameters())


@pytest.mark.parametrize("seen", [False, True], ids=["the first row", "a later row"])
@all_families
def test_func_grad(seen, family, device):
    model = model_of(family, None, device)
    if seen:
        loss_of(model, (9, 4), device).backward()
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    found = torch.func.grad(lambda each: functional_loss(model, each, device=device))(parameters)
    assert_same(found, expected(family, device=device))


@both_forms
def test_func_grad_of_checkpoints_is_torchs_error(form, device):
    """With and without documents: torch has none of them."""
    model = model_of("jamba", form, device)
    loss_of(model, device=device)
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    for lengths in (LENGTHS, (16,)):
        with pytest.raises(RuntimeError, match=r"torch\.func|setup_context"):
            torch.func.grad(lambda each, n=lengths: functional_loss(model, each, n, device))(parameters)


# --- another default device ---


@contextlib.contextmanager
def default_device(name):
    before = torch.get_default_device()
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(before if before.type != "cpu" else None)


DEFAULTS = {"set_default_device": default_device, "with torch.device": torch.device}


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("form", [None, *FORMS])
@all_families
def test_another_default_device(family, form, default, device):
    """Around the forward and the backward; the first row, of which the layers are tried, too."""
    model = model_of(family, form, device)
    ids, positions, _ = packed(device)
    with DEFAULTS[default]("meta"):
        model(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    assert_same(gradients(model), expected(family, device=device))


# --- CUDA graphs ---

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_gpu
@both_forms
def test_checkpoints_in_a_cuda_graph(form):
    """As without packing_ops, when a packed row has put the functions into torch."""
    loss_of(model_of("jamba", form, "cuda"), device="cuda").backward()
    for method in (torch_checkpoint._CheckpointFrame.__init__, torch_checkpoint.CheckpointFunction.forward):
        assert method.__module__.startswith("packing_ops.")
    layer, inputs = torch.nn.Linear(8, 8, device="cuda"), torch.randn(4, 8, device="cuda", requires_grad=True)

    def run(inputs):
        return torch_checkpoint.checkpoint(
            lambda x: layer(x).sin(), inputs, use_reentrant=form == "reentrant", preserve_rng_state=False
        )

    def step():
        return torch.autograd.grad(run(inputs).square().sum(), (inputs, *layer.parameters()))

    if form == "reentrant":  # which takes no torch.autograd.grad

        def step():
            inputs.grad = layer.weight.grad = layer.bias.grad = None
            run(inputs).square().sum().backward()
            return inputs.grad, layer.weight.grad, layer.bias.grad

    graph, found = captured(step)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            inputs.copy_(torch.randn(4, 8))
        graph.replay()
        wanted = torch.autograd.grad(layer(inputs).sin().square().sum(), (inputs, *layer.parameters()))
        for each, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(each, other)


@torch.no_grad()
def test_several_documents_in_a_capture_are_refused(monkeypatch):
    """As a GPU would say of the capture."""
    monkeypatch.setattr(stateful_rows, "is_captured", lambda _: True)
    model, (ids, positions, documents) = model_of("mamba"), packed("cpu")
    for given in (documents, {"position_ids": positions}):
        with pytest.raises(
            NotImplementedError, match=r"cu_seq_lens_q: expected one document in each row in a CUDA graph"
        ):
            model(ids, use_cache=False, **given)
    model(ids, use_cache=False)


@pytest.mark.gpu
@needs_gpu
@all_families
def test_packed_rows_in_a_cuda_graph_are_refused(family):
    """The lengths of documents are needed on the host. The model goes on behind it."""
    model = model_of(family, device="cuda")
    ids, positions, documents = packed("cuda")
    given = {"position_ids": positions, "use_cache": False, **documents, "max_length_q": 7, "max_length_k": 7}
    with torch.no_grad():
        wanted = model(ids, **given).logits
        with pytest.raises(
            NotImplementedError, match=r"cu_seq_lens_q: expected one document in each row in a CUDA graph"
        ):
            captured(lambda: model(ids, **given).logits, before=lambda: model(ids, **given))
        torch.cuda.synchronize()
        torch.testing.assert_close(model(ids, **given).logits, wanted)
