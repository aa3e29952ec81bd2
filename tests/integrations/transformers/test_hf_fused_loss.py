"""The loss of transformers models from hidden states (fused_loss.py): the stock loss and gradients."""

import copy
import pickle
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import cu_seqlens_of

pytest.importorskip("transformers")

from helpers.hf_models import tiny_model, transformers

from packing_ops.data import PaddingFreeCollator
from packing_ops.integrations.transformers import apply_packing_ops, fused_loss, info, revert_packing_ops

SERVED = ["llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_oss"]


def rows(device, batch=2, seqlen=9):
    ids = torch.randint(3, 61, (batch, seqlen), device=device)
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}


def loss_and_gradients(model, inputs):
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return output, grads


def fused(model):
    assert fused_loss.refusal(model) is None
    fused_loss.apply_to_model(model)
    return model


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("items", [None, 11])
def test_loss_and_gradients_are_the_stock_ones(device, family, items):
    model, inputs = tiny_model(family, device=device), rows(device)
    if items:
        inputs["num_items_in_batch"] = torch.tensor(items, device=device)
    wanted, wanted_grads = loss_and_gradients(model, inputs)
    output, grads = loss_and_gradients(fused(model), inputs)
    assert output.logits is None
    torch.testing.assert_close(output.loss, wanted.loss)
    assert grads.keys() == wanted_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[name], msg=name)


def test_packed_documents_do_not_reach_each_other(device):
    """With cu_seq_lens_q the first label of a document is no target, masked or not."""
    model = fused(tiny_model("llama", device=device))
    inputs = rows(device, 1, 12)
    inputs["labels"] = inputs["input_ids"].clone()
    cu_seqlens = cu_seqlens_of([5, 7], device)
    packed = {**inputs, "position_ids": torch.tensor([[*range(5), *range(7)]], device=device)}
    documents = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 7, "max_length_k": 7}
    unmasked = model(**packed, **documents).loss
    packed["labels"] = packed["labels"].clone()
    packed["labels"][0, [0, 5]] = -100
    masked = model(**packed, **documents).loss
    torch.testing.assert_close(unmasked, masked, rtol=0, atol=0)
    torch.testing.assert_close(masked, model(**packed).loss)  # only masking labels does the same


@pytest.mark.parametrize("family", SERVED)
def test_rows_that_are_not_trained_on_are_not_multiplied(device, monkeypatch, family):
    """Their number is in the collator's batch."""
    ids = torch.randint(3, 61, (2, 200)).tolist()
    examples = [{"input_ids": each, "labels": [-100] * 150 + each[150:]} for each in ids]
    batch = PaddingFreeCollator()(examples)
    batch = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    model = tiny_model(family, device=device)
    apply_packing_ops(model)
    wanted, wanted_grads = loss_and_gradients(model, batch)
    rows, real = [], torch.mm
    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", lambda a, b, **given: (rows.append(a.shape[0]), real(a, b, **given))[1])
        output, grads = loss_and_gradients(fused(model), batch)
    assert batch["num_targets"] == 100
    assert rows[0] == (100 if device == "cpu" else 128)
    torch.testing.assert_close(output.loss, wanted.loss)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted_grads[name], msg=name)


def test_stock_where_logits_are_wanted(device):
    model, inputs = tiny_model("qwen3", device=device), rows(device)
    model.eval()
    wanted = model(**inputs)
    fused(model)
    for actual in (model(**inputs), model.train()(**{**inputs, "shift_labels": inputs["labels"].roll(-1, 1)})):
        assert actual.logits.shape == (2, 9, 61)
    model.eval()
    torch.testing.assert_close(model(**inputs).loss, wanted.loss, rtol=0, atol=0)
    assert model.train()(input_ids=inputs["input_ids"]).logits.shape == (2, 9, 61)
    assert model(**inputs, logits_to_keep=9).logits.shape == (2, 9, 61)
    assert model(**inputs).logits is None


def test_tuples(device):
    """Without the logits, wherever they are."""
    inputs = {**rows(device), "return_dict": False}
    (loss,) = fused(tiny_model("llama", device=device))(**inputs)
    assert loss.dim() == 0
    loss, of_experts, _ = fused(tiny_model("gpt_oss", device=device))(**inputs, output_router_logits=True)
    assert loss.dim() == of_experts.dim() == 0


def test_revert(device):
    model, inputs = tiny_model("llama", device=device), rows(device)
    before = [dict(vars(module)) for module in model.modules()]
    fused(fused(model))
    revert_packing_ops(model)
    assert [vars(module) for module in model.modules()] == before
    assert model(**inputs).logits is not None
    revert_packing_ops(model)


def test_copies_and_pickles_keep_it(device):
    model, inputs = fused(tiny_model("llama", device=device)), rows(device)
    wanted = model(**inputs).loss
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with torch.no_grad():
            model.lm_head.weight.mul_(2)  # theirs is another
        output = other(**inputs)
        assert output.logits is None
        torch.testing.assert_close(output.loss, wanted, rtol=0, atol=0)
        with torch.no_grad():
            model.lm_head.weight.mul_(0.5)


def test_threads(device, monkeypatch):
    """Two of them, each with its rows, inside of the same model at the same time."""
    model, both = fused(tiny_model("llama", device=device)), threading.Barrier(2, timeout=20)
    batches = [rows(device, seqlen=seqlen) for seqlen in (9, 12)]
    wanted = [loss_and_gradients(model, batch) for batch in batches]
    head = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda hidden: (head(hidden), both.wait())[0])
    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(lambda batch: model(**batch), batches))
    for output, (expected, grads) in zip(outputs, wanted, strict=True):
        assert output.logits is None
        torch.testing.assert_close(output.loss, expected.loss)
        model.zero_grad()
        output.loss.backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name], msg=name)


def test_an_error_leaves_nothing_behind(device):
    model, inputs = fused(tiny_model("llama", device=device)), rows(device)
    with pytest.raises(ValueError, match="labels: "):
        model(**{**inputs, "labels": inputs["labels"] + 100})
    assert model(input_ids=inputs["input_ids"]).logits.shape == (2, 9, 61)


def test_refusals():
    def reason(family="llama", change=lambda model: None, **config):
        model = tiny_model(family, **config)
        change(model)
        return fused_loss.refusal(model)

    assert "changes the logits" in reason("gemma2")
    assert reason("gemma2", final_logit_softcapping=None) is None
    assert "changes the logits" in reason("gemma3", final_logit_softcapping=3.0)
    assert "lm_head" in reason(change=lambda model: setattr(model, "lm_head", torch.nn.Identity()))
    assert "loss_function" in reason(change=lambda model: setattr(model, "loss_function", lambda *args, **kwargs: 0))
    assert "wrapped" in reason(change=lambda model: setattr(model, "forward", model.forward))


def test_logits_that_are_read_for_more_are_refused():
    """Bamba's z-loss, and Florence-2's labels, which are shifted already."""
    assert not fused_loss._logits_feed_only_the_loss(transformers.BambaForCausalLM, False)
    assert not fused_loss._logits_feed_only_the_loss(transformers.Florence2ForConditionalGeneration, False)


def test_logits_that_are_cast_to_float(device):
    config = transformers.MambaConfig(vocab_size=61, hidden_size=16, state_size=4, num_hidden_layers=1, use_cache=False)
    torch.manual_seed(0)
    model = transformers.MambaForCausalLM(config).to(device, torch.bfloat16).train()
    inputs = {**rows(device), "return_dict": False}
    wanted = model(**inputs)[0]
    (loss,) = fused(model)(**inputs)
    torch.testing.assert_close(loss, wanted)


@pytest.mark.parametrize("vocab", [61, 32], ids=["", "as many entries as hidden"])
def test_a_head_that_is_another_since(device, vocab):
    model = fused(tiny_model("llama", device=device, vocab_size=vocab))
    ids = torch.randint(3, vocab, (2, 9), device=device)
    stock = tiny_model("llama", device=device, vocab_size=vocab)
    for each in (model, stock):
        torch.manual_seed(1)
        each.lm_head = torch.nn.Linear(32, vocab, bias=False, device=device)
    wanted = stock(ids, labels=ids)
    with pytest.warns(UserWarning, match="loss of LlamaForCausalLM is the stock one: its lm_head was swapped after"):
        output = model(ids, labels=ids)
    torch.testing.assert_close(output.loss, wanted.loss, rtol=0, atol=0)
    assert output.logits.shape == (2, 9, vocab)
    assert "loss: stock: its lm_head was swapped after" in info(model)
    output = fused(model)(ids, labels=ids)
    torch.testing.assert_close(output.loss, wanted.loss)
    assert output.logits is None
    revert_packing_ops(model)
    assert "forward" not in vars(model.lm_head)


def test_a_cap_that_is_set_since(device):
    model, inputs = fused(tiny_model("gemma2", device=device, final_logit_softcapping=None)), rows(device)
    model.config.final_logit_softcapping = 3.0
    with pytest.warns(UserWarning, match="its final_logit_softcapping was set after"):
        loss = model(**inputs).loss
    torch.testing.assert_close(loss, tiny_model("gemma2", device=device, final_logit_softcapping=3.0)(**inputs).loss)


def test_a_head_whose_weight_is_there_during_its_call_alone(device):
    """As FSDP and ZeRO have it."""
    model, inputs = fused(tiny_model("llama", device=device)), rows(device)
    whole = model.lm_head.weight.data
    with torch.no_grad():
        wanted = model(**inputs).loss
        model.lm_head.weight.data = whole.new_empty(0)
        model.lm_head.register_forward_pre_hook(lambda head, _: setattr(head.weight, "data", whole))
        model.lm_head.register_forward_hook(lambda head, *_: setattr(head.weight, "data", whole.new_empty(0)))
        torch.testing.assert_close(model(**inputs).loss, wanted, rtol=0, atol=0)
    assert "hooks" in fused_loss.refusal(tiny_with_hook())


def tiny_with_hook():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


def test_compiles(device, fresh_compile):
    model, inputs = tiny_model("llama", device=device), rows(device)
    wanted, wanted_grads = loss_and_gradients(model, inputs)
    fused(model)
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    output = compiled(**inputs)
    output.loss.backward()
    torch.testing.assert_close(output.loss, wanted.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted_grads[name], msg=name)


def test_applied_and_reverted_with_the_rest(device):
    model, inputs = tiny_model("llama", device=device), rows(device)
    wanted, _ = loss_and_gradients(model, inputs)
    applied = apply_packing_ops(model, fused_loss=True)
    assert (applied.attention, applied.rope, applied.fused_loss, applied.skipped) == (2, 2, 1, {})
    assert "loss: packing_ops" in info(model)
    output, _ = loss_and_gradients(model, inputs)
    assert output.logits is None
    torch.testing.assert_close(output.loss, wanted.loss)
    revert_packing_ops(model)
    again, _ = loss_and_gradients(model, inputs)
    torch.testing.assert_close(again.logits, wanted.logits, rtol=0, atol=0)
    assert "loss: stock; apply_packing_ops(model, fused_loss=True) swaps it" in info(model)


def test_what_cannot_have_it_is_told():
    with pytest.warns(UserWarning, match=r"fused_loss of .* was not swapped: its forward changes the logits"):
        applied = apply_packing_ops(tiny_model("gemma2"), fused_loss=True)
    assert applied.fused_loss == 0
    assert "changes the logits" in applied.skipped["fused_loss"]
    with pytest.raises(ValueError, match=r"strict: .*fused_loss: its forward changes the logits"):
        apply_packing_ops(tiny_model("gemma2"), fused_loss=True, strict=True)


# --- what is in front of the model's forward ---


def loss_line(model):
    (line,) = [line for line in info(model).splitlines() if line.startswith("loss: ")]
    return line


def test_info_of_a_loss_that_trl_computes():
    utils = pytest.importorskip("trl.trainer.utils")
    if not hasattr(utils, "add_fused_lm_head"):
        pytest.skip("this TRL has no fused head")
    model = tiny_model("qwen3")
    apply_packing_ops(model, fused_loss=True)
    assert loss_line(model) == "loss: packing_ops, from hidden states, in training with labels"
    utils.add_fused_lm_head(model)
    assert loss_line(model).startswith("loss: TRL's, whose fused LM head is in front")


def test_info_of_a_loss_behind_another_forward():
    model = tiny_model("qwen3")
    apply_packing_ops(model, fused_loss=True)
    ours, ids = model.forward, torch.ones(1, 4, dtype=torch.long)

    def forward(*args, **kwargs):
        return ours(*args, **kwargs)

    model.forward = forward
    assert model.train()(ids, labels=ids).logits is None
    passes_on = f"in training with labels, in calls that {__name__} in front of it passes on"
    assert loss_line(model) == f"loss: packing_ops, from hidden states, {passes_on}"


def test_info_of_a_loss_whose_forward_was_set_again():
    """The stock loss runs, in a model and in its copies."""
    model, ids = tiny_model("qwen3"), torch.ones(1, 4, dtype=torch.long)
    apply_packing_ops(model, fused_loss=True)
    model.forward = types.MethodType(type(model).forward, model)
    for each in (model, copy.deepcopy(model)):
        assert each.train()(ids, labels=ids).logits is not None
        assert loss_line(each) == (
            "loss: stock: its forward was set after apply_packing_ops(model, fused_loss=True), and does not call ours"
        )
        assert apply_packing_ops(each).fused_loss == 0
        with pytest.warns(UserWarning, match="fused_loss of .* was not swapped: its forward is wrapped already"):
            assert apply_packing_ops(each, fused_loss=True).fused_loss == 0
