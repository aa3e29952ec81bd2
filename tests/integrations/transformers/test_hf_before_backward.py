"""What changes between a forward and the backward of its checkpoints, which run layers again."""

import copy
import functools
import gc
import types
import weakref

import pytest
import torch
from torch.utils import checkpoint as torch_checkpoint

transformers = pytest.importorskip("transformers")

from checkpoint_case import by_hand, layers_of  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402
from stateful_case import packed  # noqa: E402
from stateful_models import stateful_model  # noqa: E402

from packing_ops.integrations.transformers import (  # noqa: E402
    apply_packing_ops,
    register,
    revert_packing_ops,
    revert_registration,
)
from packing_ops.integrations.transformers.call import NAMES  # noqa: E402
from packing_ops.integrations.transformers.states import stateful  # noqa: E402

# No attention of ours is set in Mamba; its layers run documents as rows.
pytestmark = pytest.mark.filterwarnings("ignore:apply_packing_ops. attention of Mamba")


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    register()


@pytest.fixture
def the_last_name():
    """No other name, whatever other tests left: while there is one, a revert leaves the wrappers of layers."""
    others = NAMES - {"packing_ops"}
    NAMES.difference_update(others)
    yield
    NAMES.update(others)


# Layers with a state run documents as rows ("rows"), or by ops that know them ("ops").
MODELS = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "mamba, rows": ("mamba", {}),
    "jamba, rows": ("jamba", {}),
    "lfm2, rows": ("lfm2", {"linear_attention": False}),
    "qwen3.5, rows": ("qwen3_5_text", {"linear_attention": False}),
    "qwen3.5, ops": ("qwen3_5_text", {"linear_attention": True}),
    "bamba, ops": ("bamba", {"linear_attention": True}),
}


def model_of(kind, device, attn_implementation="eager"):
    family, options = MODELS[kind]
    make = tiny_model if family in ("llama", "qwen3") else stateful_model
    model = make(family, attn_implementation=attn_implementation, device=device)
    apply_packing_ops(model, rope=False, rms_norm=False, **options)
    return model


def selective():
    return torch_checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


def of_loop(model, **options):
    for layer in layers_of(model):
        by_hand(layer, functools.partial(torch_checkpoint.checkpoint, **options))


def of_transformers(model, **options):
    model.gradient_checkpointing_enable(options)


CHECKPOINTS = {
    "transformers', reentrant": functools.partial(of_transformers, use_reentrant=True),
    "transformers'": functools.partial(of_transformers, use_reentrant=False),
    "transformers', selective": functools.partial(of_transformers, use_reentrant=False, context_fn=selective),
    "a loop's, reentrant": functools.partial(of_loop, use_reentrant=True),
    "a loop's": functools.partial(of_loop, use_reentrant=False),
}
REENTRANT = [name for name in CHECKPOINTS if "reentrant" in name]
BOTH = [*REENTRANT[:1], "a loop's"]


def loss_of(model, device, **documents):
    ids, positions, _ = packed(device)
    documents = documents or {"position_ids": positions}
    return model(ids, labels=ids, use_cache=False, **documents).loss


def assert_same_gradients(ours, theirs):
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def assert_trains_as_without(kind, checkpoints, device, train):
    """Two equal models, the first of which has checkpoints, have the same gradients after train(model, whether)."""
    models = [model_of(kind, device) for _ in range(2)]
    CHECKPOINTS[checkpoints](models[0])
    for model in models:
        train(model, model is models[0])
    assert_same_gradients(*models)


# --- a revert ---

REVERTS = {
    "revert_packing_ops": revert_packing_ops,
    "revert_registration": lambda model: revert_registration(),
    "another attention": lambda model: model.set_attn_implementation("eager"),
}
REVERTED = r"backward: expected to run before \w+ForCausalLM is reverted or gets another attention, got one after it"


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_revert_is_refused(kind, checkpoints, device):
    model = model_of(kind, device)
    CHECKPOINTS[checkpoints](model)
    loss = loss_of(model, device)
    revert_packing_ops(model)
    with pytest.raises(RuntimeError, match=REVERTED):
        loss.backward()


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("kind", [kind for kind in MODELS if "," in kind])
def test_a_revert_that_leaves_the_name_of_the_attention_is_refused(kind, checkpoints, device):
    """Its layers with a state would run again without documents, beside attention that has them."""
    model = model_of(kind, device, attn_implementation="packing_ops")
    CHECKPOINTS[checkpoints](model)
    loss = loss_of(model, device)
    revert_packing_ops(model)
    with pytest.raises(RuntimeError, match=REVERTED):
        loss.backward()


@pytest.mark.parametrize("checkpoints", BOTH)
@pytest.mark.parametrize("reverted", REVERTS)
@pytest.mark.parametrize("kind", ["llama", "jamba, rows", "qwen3.5, ops"])
def test_every_revert_is_refused(kind, reverted, checkpoints, device):
    model = model_of(kind, device)
    CHECKPOINTS[checkpoints](model)
    loss = loss_of(model, device)
    REVERTS[reverted](model)
    with pytest.raises(RuntimeError, match=REVERTED):
        loss.backward()


@pytest.mark.parametrize("checkpoints", BOTH)
def test_a_revert_of_the_registration_that_is_made_again_is_refused(checkpoints, device, the_last_name):
    model = model_of("mamba, rows", device)
    CHECKPOINTS[checkpoints](model)
    loss = loss_of(model, device)
    revert_registration()
    register()
    with pytest.raises(RuntimeError, match=REVERTED):
        loss.backward()


def trl_packs(model):
    """enable_padding_free and its revert, as of a trainer."""
    trl = pytest.importorskip("packing_ops.integrations.trl")
    trainer = type("DPOTrainer", (), {"model": model})()
    trl.enable_padding_free(trainer)
    trl.revert_padding_free(trainer)


def in_front(model, wrap):
    """Put a function of the user in front of ours, in every module that has one."""
    for module in [module for module in model.modules() if "forward" in vars(module)]:
        module.forward = wrap(module.forward)


class Logs:
    def __init__(self, function):
        self.function = function

    def run(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def hooked(model):
    """As accelerate moves what layers get, before and after others of its hooks."""
    hooks = pytest.importorskip("accelerate.hooks")
    for _ in range(2):
        for module in [module for module in model.modules() if "forward" in vars(module)]:
            hooks.add_hook_to_module(module, hooks.ModelHook(), append=True)


UNFELT = {
    "a function in front": lambda model: in_front(model, lambda old: lambda *args, **kwargs: old(*args, **kwargs)),
    "functools in front": lambda model: in_front(model, lambda old: functools.wraps(old)(functools.partial(old))),
    "a method in front": lambda model: in_front(model, lambda old: Logs(old).run),
    "hooks of accelerate": hooked,
    # RoPE and RMSNorm save other tensors, which torch refuses in its checkpoints that are not reentrant.
    "other options": lambda model: apply_packing_ops(model, rope=False, rms_norm=False, fused_loss=True),
    "padding-free": trl_packs,
    "a copy that is reverted": lambda model: revert_packing_ops(copy.deepcopy(model)),
    "another forward": lambda model: loss_of(model, next(model.parameters()).device, position_ids=None),
}


@pytest.mark.filterwarnings("ignore:apply_packing_ops")
@pytest.mark.parametrize("checkpoints", BOTH)
@pytest.mark.parametrize("change", UNFELT)
@pytest.mark.parametrize("kind", ["llama", "lfm2, rows", "qwen3.5, rows", "qwen3.5, ops"])
def test_what_layers_do_not_feel(kind, change, checkpoints, device):
    models = [model_of(kind, device) for _ in range(2)]
    CHECKPOINTS[checkpoints](models[0])
    for model in models:
        loss = loss_of(model, device)
        if model is models[0]:
            UNFELT[change](model)
        loss.backward()
    assert_same_gradients(*models)


@pytest.mark.parametrize("checkpoints", BOTH)
def test_attention_that_a_revert_leaves(checkpoints, device):
    """Of a model that was loaded with it: layers run again as they ran."""
    models = [model_of("llama", device, attn_implementation="packing_ops") for _ in range(2)]
    CHECKPOINTS[checkpoints](models[0])
    for model in models:
        loss = loss_of(model, device)
        revert_packing_ops(model)
        loss.backward()
    assert_same_gradients(*models)


@pytest.mark.parametrize("checkpoints", BOTH)
def test_a_forward_in_place_of_ours_is_refused(checkpoints, device):
    model = model_of("mamba, rows", device)
    CHECKPOINTS[checkpoints](model)
    loss = loss_of(model, device)
    for module in [module for module in model.modules() if "forward" in vars(module)]:
        module.forward = types.MethodType(type(module).forward, module)
    with pytest.raises(RuntimeError, match=REVERTED):
        loss.backward()


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("checkpoints", BOTH)
def test_layers_are_looked_at_once_in_a_backward(checkpoints, micro_batches, device, monkeypatch):
    """Not by each checkpoint: all layers each time."""
    looked_at, stock = [], stateful._is_prepared
    monkeypatch.setattr(stateful, "_is_prepared", lambda layer: looked_at.append(layer) or stock(layer))
    model = stateful_model("mamba", device=device, num_hidden_layers=5)
    CHECKPOINTS[checkpoints](model)
    losses = [loss_of(model, device) for _ in range(micro_batches)]
    looked_at.clear()
    sum(losses).backward()
    assert len(looked_at) == 5 * 2 * micro_batches  # of the model, and of the one inside


# --- a tensor that is written in place ---

OTHERS = [2, 7, 2, 5]


def documents_by(name, device):
    """Return (the model's arguments, the same tensor with other documents)."""
    _, positions, given = packed(device)
    _, other_positions, other_given = packed(device, OTHERS)
    if name == "cu_seq_lens_q":
        return given, other_given[name]
    if name == "position_ids":
        return {name: positions}, other_positions
    numbers, others = ((each == 0).cumsum(1) for each in (positions, other_positions))
    return {name: numbers}, others


WRITTEN = r"{}: expected the values of the forward of \w+ until its backward, .* got a tensor that was written in place"


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize("kind", MODELS)
def test_cu_seqlens_that_are_written_are_refused(kind, checkpoints, device):
    model = model_of(kind, device)
    CHECKPOINTS[checkpoints](model)
    given, others = documents_by("cu_seq_lens_q", device)
    loss = loss_of(model, device, **given)
    given["cu_seq_lens_q"].copy_(others)
    with pytest.raises(RuntimeError, match=WRITTEN.format("cu_seq_lens_q")):
        loss.backward()


def test_without_a_checkpoint_torch_notices(device):
    model = model_of("llama", device)
    given, others = documents_by("cu_seq_lens_q", device)
    loss = loss_of(model, device, **given)
    given["cu_seq_lens_q"].copy_(others)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
@pytest.mark.parametrize("checkpoints", BOTH)
@pytest.mark.parametrize("kind", ["llama", "mamba, rows", "qwen3.5, ops"])
def test_other_tensors_may_be_written(kind, checkpoints, name, device):
    """A loss that edits the mask, or the next batch in the same buffer: no layer of these reads them again."""

    def train(model, has_checkpoints):
        given, others = documents_by(name, device)
        loss = loss_of(model, device, **given)
        if has_checkpoints:
            given[name].copy_(others)
        loss.backward()

    assert_trains_as_without(kind, checkpoints, device, train)


@pytest.mark.parametrize("checkpoints", BOTH)
def test_a_write_beside_a_mask_of_the_same_storage(checkpoints, device):
    """The masks of micro-batches in one tensor, whose views have one version."""

    def train(model, _):
        masks = torch.ones(2, 16, dtype=torch.long, device=device)
        loss = loss_of(model, device, attention_mask=masks[:1])
        masks[1, :3] = 0
        loss.backward()

    assert_trains_as_without("llama", checkpoints, device, train)


@pytest.mark.parametrize("checkpoints", BOTH)
def test_a_tensor_that_is_written_before_the_layers(checkpoints, device):
    """By the model's code, say: they have only seen what is there now."""

    def train(model, _):
        given, _ = documents_by("position_ids", device)
        model.model.rotary_emb.register_forward_pre_hook(lambda *_: given["position_ids"].add_(0))
        loss_of(model, device, **given).backward()

    assert_trains_as_without("llama", checkpoints, device, train)


@pytest.mark.parametrize("checkpoints", BOTH)
def test_a_tensor_of_inference_mode_has_no_version(checkpoints, device):
    with torch.inference_mode():
        given, _ = documents_by("cu_seq_lens_q", device)
    assert_trains_as_without(
        "mamba, rows", checkpoints, device, lambda model, _: loss_of(model, device, **given).backward()
    )


# --- checkpoints around a whole model, and in one another ---


def whole(model, reentrant, device, **documents):
    """A checkpoint around the call of a model, which begins and ends in it."""
    embeds = model.get_input_embeddings()(packed(device)[0]).detach().requires_grad_()

    def run(embeds):
        return model(inputs_embeds=embeds, use_cache=False, **documents).logits

    return torch_checkpoint.checkpoint(run, embeds, use_reentrant=reentrant).square().sum()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mamba, rows", "qwen3.5, ops"])
def test_a_revert_of_a_model_in_a_checkpoint_is_refused(kind, reentrant, device):
    model = model_of(kind, device)
    loss = whole(model, reentrant, device, position_ids=packed(device)[1])
    revert_packing_ops(model)
    with pytest.raises(RuntimeError, match=REVERTED):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["llama", "mamba, rows"])
def test_a_model_in_a_checkpoint_reads_cu_seqlens_again(kind, reentrant, device):
    model = model_of(kind, device)
    given, others = documents_by("cu_seq_lens_q", device)
    loss = whole(model, reentrant, device, **given)
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    given["cu_seq_lens_q"].copy_(others)
    with pytest.raises(RuntimeError, match=WRITTEN.format("cu_seq_lens_q")):
        loss.backward()


@pytest.mark.parametrize("kind", ["llama", "mamba, rows"])
@pytest.mark.parametrize(("outer", "inner"), [("a loop's, reentrant", "a loop's"), ("a loop's", "a loop's")])
def test_a_checkpoint_in_a_checkpoint(inner, outer, kind, device):
    models = [model_of(kind, device) for _ in range(2)]
    for checkpoints in (inner, outer):
        CHECKPOINTS[checkpoints](models[0])
    for model in models:
        loss_of(model, device).backward()
    assert_same_gradients(*models)
    loss = loss_of(models[0], device)
    revert_packing_ops(models[0])
    with pytest.raises(RuntimeError, match=REVERTED):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_in_a_checkpoint_is_freed(reentrant, device):
    gc.collect()
    gc.disable()
    try:
        model = model_of("lfm2, rows", device)
        whole(model, reentrant, device, position_ids=packed(device)[1]).backward()
        layer = weakref.ref(layers_of(model)[0])
        del model
        assert layer() is None
    finally:
        gc.enable()
