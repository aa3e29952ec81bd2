"""A Trainer with model_init: train() calls it once more, and what was applied to the model before is not in the new."""

import copy
import inspect
import pickle
import re
import sys
import types

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import causal_families  # noqa: E402
import stateful_models  # noqa: E402
from accelerate.state import GradientState  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402

from packing_ops.data import PaddingFreeCollator  # noqa: E402
from packing_ops.integrations.transformers import (  # noqa: E402
    apply_packing_ops,
    register,
    revert_packing_ops,
    revert_registration,
    versions,
)
from packing_ops.optim import keep_float32  # noqa: E402

LOST = r"was made by model_init without packing_ops, .*: call apply_packing_ops in model_init, before it returns"


def qwen3():
    return tiny_model("qwen3", vocab_size=258, num_hidden_layers=1, intermediate_size=64)  # of 32s, for the mode


def mamba2():
    return stateful_models.stateful_model("mamba2", attn_implementation="eager", vocab_size=258)


@pytest.fixture
def trainer_of(tmp_path):
    """A function of model_init: its Trainer takes steps of two documents in a row."""

    def make(model_init, cls=transformers.Trainer, callbacks=(), rows=2):
        settings = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=rows,
            max_steps=2,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        examples = [{"input_ids": [5, 6, 7]}] * 4
        return cls(
            args=settings,
            model_init=model_init,
            data_collator=PaddingFreeCollator(),
            train_dataset=examples,
            callbacks=[*callbacks],
        )

    return make


@pytest.mark.parametrize("where", ["trainer.model", "model_init", "reverted", "nowhere"])
def test_a_model_that_train_makes_again(where, trainer_of):
    made = []

    def model_init():
        made.append(qwen3())
        if where == "model_init":
            apply_packing_ops(made[-1])
        return made[-1]

    trainer = trainer_of(model_init)
    if where in ("trainer.model", "reverted"):
        apply_packing_ops(trainer.model)
    if where == "reverted":
        revert_packing_ops(trainer.model)
    if where == "trainer.model":
        with pytest.raises(ValueError, match=LOST):
            trainer.train()
    else:
        trainer.train()
    assert trainer.model is made[-1] is not made[0]
    assert (trainer.model.config._attn_implementation == "packing_ops") == (where == "model_init")


@pytest.fixture
def told(monkeypatch):
    """What is logged of a model that has lost packing_ops."""
    messages = []
    monkeypatch.setattr(versions, "log_once", lambda message: messages.append(message))
    return lambda: [message for message in messages if re.search(LOST, message)]


@pytest.mark.usefixtures("one_thread")  # the mode claims no activations over several
@pytest.mark.parametrize("option", ["attention", "fused_loss", "invariant"])
def test_rows_of_one_document_train_after_a_warning(option, trainer_of, told):
    trainer = trainer_of(qwen3, rows=1)
    apply_packing_ops(trainer.model, **{option: True})
    trainer.model(torch.arange(3)[None])
    assert not told()
    trainer.train()
    assert trainer.state.global_step == 2
    assert told()


class AppliesToEach(transformers.Trainer):
    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        apply_packing_ops(model)
        return model


class AppliesWhenItBegins(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        apply_packing_ops(model)


class SetsWhenItBegins(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.set_attn_implementation("packing_ops")


@pytest.mark.parametrize(
    ("cls", "callbacks"),
    [
        (AppliesToEach, []),
        (transformers.Trainer, [AppliesWhenItBegins]),
        (transformers.Trainer, [SetsWhenItBegins]),
    ],
)
def test_who_applies_to_each_model_trains(cls, callbacks, trainer_of, told):
    """In an override, which gets the model of the stock method, or when training begins."""
    trainer = trainer_of(qwen3, cls, callbacks)
    apply_packing_ops(trainer.model)
    for _ in range(2):
        trainer.train()
        assert trainer.model.config._attn_implementation == "packing_ops"
    assert not told()


@pytest.mark.filterwarnings("ignore:apply_packing_ops")
@pytest.mark.parametrize("family", ["mamba2", "bamba", "lfm2"])
def test_layers_with_a_state(family, trainer_of):
    """A model without attention keeps documents apart as before; one with attention, beside convolutions or scans,
    does not.
    """
    trainer = trainer_of(lambda: stateful_models.stateful_model(family, attn_implementation="eager", vocab_size=258))
    apply_packing_ops(trainer.model)
    if family != "mamba2":
        with pytest.raises(ValueError, match=LOST):
            trainer.train()
        return
    trainer.train()
    model, document = trainer.model.eval(), torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        packed = model(document.repeat(1, 2), position_ids=torch.arange(3).repeat(2)[None], use_cache=False).logits
        alone = model(document, use_cache=False).logits
    torch.testing.assert_close(packed, alone.repeat(1, 2, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:apply_packing_ops")
def test_the_error_for_documents_that_mix_is_not_lost(trainer_of):
    """GPT-J keeps its attention: rows of several documents were an error before."""
    trainer = trainer_of(lambda: causal_families.model_of("gptj", None))
    assert "attention" in apply_packing_ops(trainer.model).skipped
    with pytest.raises(ValueError, match=LOST):
        trainer.train()


@pytest.mark.parametrize("ours", [apply_packing_ops, lambda model: model.set_attn_implementation("packing_ops")])
def test_a_trainer_that_is_imported_after_register(ours, trainer_of, monkeypatch):
    revert_registration()
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "transformers.trainer")
        register()
    trainer = trainer_of(qwen3)
    ours(trainer.model)
    with pytest.raises(ValueError, match=LOST):
        trainer.train()


def test_the_wrapper_looks_like_the_stock_method_and_is_reverted():
    revert_registration()
    assert "__setattr__" not in vars(transformers.Trainer)
    register()
    ours = transformers.Trainer.__setattr__
    stock = inspect.unwrap(ours)
    assert ours is not stock
    assert ours.__doc__ == stock.__doc__
    assert inspect.signature(ours) == inspect.signature(stock)
    revert_registration()
    assert "__setattr__" not in vars(transformers.Trainer)


class MakesItsModels(transformers.Trainer):
    def call_model_init(self, trial=None):
        return self.model_init()


@pytest.mark.filterwarnings("ignore:apply_packing_ops")
@pytest.mark.parametrize("way", ["an override", "an attribute", "without a model", "unpickled", "registered again"])
@pytest.mark.parametrize("model_init", [qwen3, mamba2])
def test_ways_in_which_train_gets_the_new_model(way, model_init, trainer_of, told):
    """Stock Mamba 2 mixes documents. The new one keeps them apart, and says that the rest is lost."""
    GradientState._reset_state()  # a training that failed leaves a weak reference to its data here
    trainer = trainer_of(model_init, MakesItsModels if way == "an override" else transformers.Trainer)
    apply_packing_ops(trainer.model)
    if way == "an attribute":
        trainer.call_model_init = lambda trial=None: trainer.model_init()
    if way in ("without a model", "unpickled"):  # as Ray's trials get it
        trainer.model = None
    if way == "unpickled":
        data = pickle.dumps(trainer)
        revert_registration()
        trainer = pickle.loads(data)
    if way == "registered again":
        revert_registration()
        register()
    if model_init is qwen3:
        with pytest.raises(ValueError, match=LOST):
            trainer.train()
    else:
        trainer.train()
        first, second = torch.tensor([[9, 1, 4]]), torch.tensor([[5, 6, 7]])
        with torch.no_grad():
            packed = trainer.model.eval()(torch.cat([first, second], 1), position_ids=torch.arange(3).repeat(2)[None])
            alone = [trainer.model(document).logits for document in (first, second)]
        torch.testing.assert_close(packed.logits, torch.cat(alone, 1), rtol=1e-4, atol=1e-5)
    assert told()


def test_a_trainer_without_a_model_for_a_while(trainer_of):
    trainer = trainer_of(qwen3)
    apply_packing_ops(trainer.model)
    model, trainer.model = trainer.model, None
    trainer.model = model
    revert_packing_ops(model)
    trainer.train()
    assert trainer.state.global_step == 2


def test_a_model_that_is_set_outside_of_train_keeps_its_attention(trainer_of):
    """It may be a checkpoint, for evaluation: train() makes another one."""
    trainer = trainer_of(qwen3)
    apply_packing_ops(trainer.model)
    trainer.model = qwen3()
    assert trainer.model(torch.arange(6)[None], position_ids=torch.arange(3).repeat(2)[None]).logits.shape[:2] == (1, 6)


class KeepsFloat32(transformers.Trainer):
    def create_optimizer(self, *args):
        return keep_float32(super().create_optimizer(*args))


def half():
    model = qwen3().bfloat16()
    apply_packing_ops(model)
    return model


def test_float32_copies_of_an_optimizer_that_train_drops_are_an_error(trainer_of):
    trainer = trainer_of(half)
    keep_float32(trainer.create_optimizer())
    for _ in range(2):
        with pytest.raises(ValueError, match=r"call keep_float32 in an override of create_optimizer"):
            trainer.train()


def test_float32_copies_in_create_optimizer(trainer_of):
    trainer = trainer_of(half, KeepsFloat32)
    for _ in range(2):
        trainer.train()
        weights = [*trainer.model.parameters()]
        assert {*map(id, weights)} == {*map(id, trainer.optimizer.state)}
        assert all("float32_copy" in trainer.optimizer.state[weight] for weight in weights)


def test_an_optimizer_that_was_made_before_train_is_no_error(trainer_of):
    trainer = trainer_of(half, KeepsFloat32)
    trainer.create_optimizer()
    trainer.train()
    assert all("float32_copy" in trainer.optimizer.state[weight] for weight in trainer.model.parameters())


def test_without_model_init_an_optimizer_may_be_dropped(trainer_of):
    trainer = trainer_of(half)
    trainer.model_init = None
    keep_float32(trainer.create_optimizer())
    trainer.is_in_train = True  # as an error in train() leaves it
    trainer.optimizer = None
    trainer.model = torch.nn.Linear(1, 1)
    trainer.train_dataset = None
    assert trainer.optimizer is None


class TwoTrials:
    """A backend that needs no package. Like Optuna's with catch=(ValueError,), a trial that fails does not end it."""

    def ensure_available(self):
        pass

    def default_hp_space(self, trial):
        return trial.params

    def run(self, trainer, n_trials, direction):
        results = []
        for number in range(n_trials):
            try:
                trainer.train(trial=types.SimpleNamespace(number=number, params={"learning_rate": 1e-3}))
                results.append(trainer.model)
            except ValueError as error:
                results.append(str(error))
        return results


@pytest.mark.parametrize("where", ["trainer.model", "model_init"])
def test_hyperparameter_search(where, trainer_of, monkeypatch):
    backends = sys.modules["transformers.trainer"].ALL_HYPERPARAMETER_SEARCH_BACKENDS
    monkeypatch.setitem(backends, next(key for key in backends if key.value == "optuna"), TwoTrials)
    monkeypatch.setattr("transformers.integrations.hp_params", lambda trial: trial.params)

    def model_init():
        model = qwen3()
        if where == "model_init":
            apply_packing_ops(model)
        return model

    trainer = trainer_of(model_init)
    apply_packing_ops(trainer.model)
    first, second = trainer.hyperparameter_search(backend="optuna", n_trials=2)
    if where == "trainer.model":
        assert re.search(LOST, first)
        assert re.search(LOST, second)
    else:
        assert first is not second
        assert {each.config._attn_implementation for each in (first, second)} == {"packing_ops"}


def test_a_copy_of_a_trainer(trainer_of):
    trainer = trainer_of(qwen3)
    apply_packing_ops(trainer.model)
    with pytest.raises(ValueError, match=LOST):
        copy.deepcopy(trainer).train()


def test_a_trainer_from_a_pickle(trainer_of):
    """Its process may have no model with this attention but that one."""
    GradientState._reset_state()  # a training that failed leaves a weak reference to its data here
    trainer = trainer_of(qwen3)
    apply_packing_ops(trainer.model)
    data = pickle.dumps(trainer)
    revert_registration()
    stock = transformers.Trainer.__setattr__
    unpickled = pickle.loads(data)
    assert transformers.Trainer.__setattr__ is not stock
    with pytest.raises(ValueError, match=LOST):
        unpickled.train()


def test_a_trial_without_the_model_of_the_one_before(trainer_of):
    """hyperparameter_search may free it."""
    register()
    trainer = trainer_of(qwen3)
    trainer.model = None
    trainer.train()
