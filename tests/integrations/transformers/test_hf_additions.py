"""What PEFT and NEFTune add to a row in front of the model: refused with several documents, or made by document."""

import importlib
import inspect
import math
import sys
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from helpers.hf_models import tiny_model  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.integrations.transformers import (  # noqa: E402
    apply_packing_ops,
    register,
    revert_packing_ops,
    revert_registration,
)

LENGTHS = [5, 3, 7]
PACKED = po.PackedMetadata.from_lengths(LENGTHS)
IDS = torch.randint(3, 50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
NUMBERS = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(LENGTHS))[None]
FORMS = {
    "position_ids": {"position_ids": PACKED.position_ids[None]},
    "cu_seq_lens_q": PACKED.to_transformers(),
    "attention_mask": {"attention_mask": NUMBERS},
}

# --- PEFT ---

PROMPTS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
}


def adapted(config, apply_to="outer"):
    base = tiny_model("llama").eval()
    if apply_to == "before":
        apply_packing_ops(base)
    model = peft.get_peft_model(base, config).eval()
    if apply_to != "before":
        apply_packing_ops(base if apply_to == "base" else model)
    return model


@pytest.mark.parametrize("apply_to", ["outer", "base", "before"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", PROMPTS)
@torch.no_grad()
def test_virtual_tokens_beside_several_documents_are_refused(name, form, apply_to):
    model = adapted(PROMPTS[name](), apply_to)
    refused = rf"{form}: expected one document in each row, got several, and PEFT's \w+ puts virtual tokens in front"
    with pytest.raises(ValueError, match=refused):
        model(IDS, **FORMS[form])
    with pytest.raises(ValueError, match=refused):
        model(input_ids=IDS, labels=IDS, **FORMS[form])
    with model.disable_adapter():  # the model inside, which keeps them apart
        packed = model(IDS, **FORMS["position_ids"]).logits
        alone = torch.cat([model(each).logits for each in IDS.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PROMPTS)
@torch.no_grad()
def test_rows_of_one_document_stay(name):
    model = adapted(PROMPTS[name]())
    logits = model(IDS, attention_mask=torch.ones_like(IDS)).logits
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # position_ids are dropped
        torch.testing.assert_close(model(IDS, position_ids=torch.arange(15)[None]).logits, logits, rtol=1e-4, atol=1e-4)
    revert_packing_ops(model)
    torch.testing.assert_close(model(IDS, attention_mask=torch.ones_like(IDS)).logits, logits, rtol=1e-4, atol=1e-4)


OF_A_ROW = {
    "activated LoRA": (
        lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[7, 8]),
        "LoraConfig with alora_invocation_tokens looks for",
    ),
    "Lily": (
        lambda: peft.LilyConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]),
        "LilyConfig takes the mean of its experts over all tokens",
    ),
    "Shadow": (
        lambda: peft.ShadowConfig(task_type="CAUSAL_LM"),
        "ShadowConfig runs a network beside the model",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OF_A_ROW)
@torch.no_grad()
def test_adapters_that_look_at_the_whole_row_are_refused(name, form):
    make, why = OF_A_ROW[name]
    with pytest.raises(ValueError, match=f"{form}: .* PEFT's {why}"):
        adapted(make())(input_ids=IDS, **FORMS[form])


@pytest.mark.parametrize("apply_to", ["outer", "before"])
@torch.no_grad()
def test_layers_that_peft_has_copied_are_swapped_and_put_back(apply_to):
    """They hold copies of the config, which set_attn_implementation does not reach."""
    layers = [[0, 2], [0, 2]]
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], layer_replication=layers)
    stock = peft.get_peft_model(tiny_model("llama").eval(), config)
    alone = torch.cat([stock(each, use_cache=False).logits for each in IDS.split(LENGTHS, 1)], 1)
    model = adapted(config, apply_to)
    for arguments in FORMS.values():
        torch.testing.assert_close(model(IDS, use_cache=False, **arguments).logits, alone, rtol=1e-4, atol=1e-4)
    revert_packing_ops(model)
    implementations = {module.config._attn_implementation for module in model.modules() if hasattr(module, "layer_idx")}
    assert implementations == {"eager"}


WANTED = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "num_virtual_tokens": 4, "r": 4}
MORE = {  # sizes that fit the tiny model
    "ADALORA": {"total_step": 9},
    "ADAPTION_PROMPT": {"target_modules": None, "adapter_len": 3, "adapter_layers": 1},
    "C3A": {"block_size": 8},
    "FROD": {"target_modules": ["q_proj"]},
    "OFT": {"r": 0, "oft_block_size": 4},
    "ROAD": {"group_size": 8},
    "SHADOW": {"target_modules": None},
    "TRAINABLE_TOKENS": {"target_modules": None, "token_indices": [3, 4]},
    "VBLORA": {"vector_length": 8, "num_vectors": 16},
    "WAVEFT": {"n_frequency": 8},
}
# Those of several tasks or adapters, those of prompts, which are refused above, and BOFT, which builds a library first.
LEFT_OUT = {"BOFT", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "XLORA"}
REFUSED = {"CARTRIDGE", "CPT", "LILY", "SHADOW"}
ADAPTERS = sorted({*map(str.upper, vars(peft.PeftType)["_member_names_"])} - LEFT_OUT)


@pytest.mark.parametrize("kind", ADAPTERS)
@torch.no_grad()
def test_every_adapter_of_peft_is_apart_or_refused(kind):
    cls = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    known = inspect.signature(cls).parameters
    sizes = {name: value for name, value in {**WANTED, **MORE.get(kind, {})}.items() if name in known}
    try:
        model = peft.get_peft_model(tiny_model("llama").eval(), cls(**sizes)).eval()
    except ImportError as error:
        pytest.skip(str(error))
    numbers = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter += 0.3 * torch.randn(parameter.shape, generator=numbers)
    alone = torch.cat([model(input_ids=each).logits for each in IDS.split(LENGTHS, 1)], 1)
    apply_packing_ops(model, rope=False)  # adaption prompts rotate q and k themselves
    for arguments in FORMS.values():
        if kind in REFUSED:
            with pytest.raises(ValueError, match="expected one document in each row"):
                model(input_ids=IDS, **arguments)
        else:
            # RandLoRA's products amplify rounding to 3e-4 of logits up to 7; a mix changes them by 7.
            torch.testing.assert_close(model(input_ids=IDS, **arguments).logits, alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("compiled", [False, True])
@torch.no_grad()
def test_lora_is_served(compiled, fresh_compile):
    model = adapted(peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False))
    call = torch.compile(model, backend="eager") if compiled else model
    alone = torch.cat([model(each).logits for each in IDS.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(call(IDS, **FORMS["position_ids"]).logits, alone, rtol=1e-4, atol=1e-4)


def test_peft_that_is_imported_late_is_watched_from_its_first_call(monkeypatch):
    base = tiny_model("llama").eval()
    revert_registration()
    for name in [name for name in sys.modules if name.partition(".")[0] == "peft"]:
        monkeypatch.delitem(sys.modules, name)
    apply_packing_ops(base)
    base(IDS, **FORMS["position_ids"])
    late = importlib.import_module("peft")
    assert late is not peft
    model = late.get_peft_model(base, late.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    with pytest.raises(ValueError, match=r"position_ids: expected one document .* PEFT's \w+ puts virtual tokens"):
        model(IDS, **FORMS["position_ids"])
    revert_registration()
    assert "__call__" not in vars(late.PeftModel)


def test_unregister_leaves_peft_as_it_was():
    register()
    assert "__call__" in vars(peft.PeftModel)
    revert_registration()
    assert "__call__" not in vars(peft.PeftModel)


# --- NEFTune ---

ALPHA = 5.0


def noisy(how="apply"):
    """A model whose embeddings have transformers' hook, and what each forward added to them."""
    from transformers.integrations.neftune import activate_neftune

    model = tiny_model("llama")
    if how == "apply":
        apply_packing_ops(model)
    activate_neftune(model, ALPHA)
    if how == "apply afterwards":
        apply_packing_ops(model)
    return model, seen_by(model)


def seen_by(model):
    embeddings, noise = model.get_input_embeddings(), []

    def keep(module, args, out):
        noise.append((out - torch.nn.functional.embedding(args[0], module.weight)).detach())

    embeddings.register_forward_hook(keep)
    return noise


def largest(length):
    return ALPHA / math.sqrt(length * 32)


@pytest.mark.parametrize("how", ["apply", "apply afterwards"])
@pytest.mark.parametrize("form", FORMS)
def test_noise_is_that_of_each_document_alone(form, how):
    model, noise = noisy(how)
    model.train()(IDS, use_cache=False, **FORMS[form])
    for length, of_document in zip(LENGTHS, noise[-1][0].split(LENGTHS), strict=True):
        assert 0.9 * largest(length) < of_document.abs().max() <= largest(length) * 1.0001
    model.eval()(IDS, use_cache=False, **FORMS[form])
    assert not noise[-1].any()


@pytest.mark.parametrize("padded", [False, True])
def test_noise_of_rows_of_one_document_is_the_stock_one(padded):
    model, noise = noisy()
    stock, of_stock = noisy(how="stock")
    mask = torch.ones_like(IDS)
    mask[0, 9:] = 1 - padded
    for each in (model, stock):
        torch.manual_seed(3)
        each.train()(IDS, attention_mask=mask, use_cache=False)
    assert torch.equal(noise[0], of_stock[0])


def test_noise_beside_a_prefix_tree_is_refused():
    model, _ = noisy()
    tokens = torch.tensor([3, 4, 5, 3, 4, 6])
    tree = po.pack_prefix_tree(tokens, po.cu_seqlens_from_lengths(torch.tensor([3, 3])))
    metadata = po.PackedMetadata.from_prefix_tree(tree)
    with pytest.raises(ValueError, match="neftune_noise_alpha: expected None beside segment_parents"):
        model.train()(
            tokens[tree.token_of_slot][None],
            position_ids=metadata.position_ids[None],
            use_cache=False,
            **metadata.to_transformers(),
        )


def test_noise_in_a_graph(fresh_compile):
    """A first call in a graph finds transformers' hook, whose noise goes by the row."""
    model, noise = noisy()
    compiled = torch.compile(model.train(), backend="eager")
    with pytest.raises((ValueError, RuntimeError), match="neftune_noise_alpha: expected None in a graph"):
        compiled(IDS, use_cache=False, **FORMS["position_ids"])
    torch._dynamo.reset()
    model(IDS, use_cache=False, **FORMS["position_ids"])
    compiled(IDS, use_cache=False, **FORMS["position_ids"])
    assert noise[-1][0, 5:8].abs().max() > 0.9 * largest(3)


def test_noise_after_revert_is_the_stock_one():
    model, noise = noisy()
    model.train()(IDS, use_cache=False, **FORMS["position_ids"])
    revert_packing_ops(model)
    model(IDS, use_cache=False)
    assert 0.9 * largest(15) < noise[-1].abs().max() <= largest(15) * 1.0001
