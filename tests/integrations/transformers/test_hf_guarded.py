"""Models whose attention no attn_implementation names: after apply_packing_ops packed rows are served, or an error."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")


import causal_families  # noqa: E402
import stateful_models  # noqa: E402
from causal_families import APART, REFUSED  # noqa: E402
from causal_families import SHORT as LENGTHS  # noqa: E402
from helpers import hf_images  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.integrations.transformers import (  # noqa: E402
    apply_packing_ops,
    info,
    register,
    revert_packing_ops,
    revert_registration,
)
from packing_ops.integrations.transformers.apply import why_not_attention  # noqa: E402

FAMILIES = [
    "bloom", "codegen", "deepseek_v32", "falcon", "falcon_mamba", "git", "gpt_neo", "gptj", "mamba", "mamba2", "mpt",
    "roformer", "rwkv", "xlnet",
]  # fmt: skip
SERVED = {"mamba", "mamba2", "falcon_mamba", "rwkv"}  # by layers with a state, whichever way
TABLES = {"falcon", "git", "gpt_neo", "gptj"}  # choose among classes of attention: refused when they are made
DOCUMENTS = po.PackedMetadata.from_lengths(LENGTHS)
POSITIONS = {"position_ids": DOCUMENTS.position_ids[None]}
ROWS = {"position_ids": POSITIONS, "cu_seq_lens_q": DOCUMENTS.to_transformers()}
NUMBERS = torch.repeat_interleave(torch.arange(1, len(LENGTHS) + 1), torch.tensor(LENGTHS))[None]
IDS = torch.randint(3, 50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))


def applied(family):
    model = causal_families.model_of(family, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_packing_ops(model)
    return model


def named(family):
    register()
    return causal_families.model_of(family, "packing_ops")


def alone(stock):
    """Logits of each document by itself."""
    takes = "position_ids" in inspect.signature(stock.forward).parameters
    found = [
        stock(
            input_ids=ids,
            use_cache=False,
            **({"position_ids": torch.arange(ids.shape[1])[None]} if takes else {}),
        ).logits
        for ids in IDS.split(LENGTHS, 1)
    ]
    return torch.cat(found, 1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("way", [applied, named])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_rows_are_served_or_an_error(family, way, rows):
    stock = causal_families.model_of(family, "eager")
    own = why_not_attention(stock) is not None  # GPT-J's and CodeGen's are in the table since transformers 5.24
    if way is named and family in TABLES and own:
        with pytest.raises(ValueError, match="attn_implementation: expected one of"):
            named(family)
        return
    model = way(family)
    model.load_state_dict(stock.state_dict())
    seen = causal_families.seen_by(model, IDS, alone(stock), ROWS[rows], LENGTHS[0])
    if family in SERVED:
        assert seen == APART
    else:
        assert seen.startswith(REFUSED) if way is applied and own else causal_families.is_told(seen)


@pytest.mark.parametrize("rows", [*ROWS, "attention_mask"])
def test_the_error_says_why_and_goes_with_revert(rows):
    model = causal_families.model_of("gpt_neo", None)
    given = ROWS.get(rows, {"attention_mask": NUMBERS})
    with pytest.warns(
        UserWarning, match="own, which no attn_implementation of ours reaches; rows of several documents are an error"
    ):
        apply_packing_ops(model, rope=False)
    assert "documents: one in each row" in info(model)
    for guarded in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(
            ValueError, match=f"^{rows}: expected one document in each row.* keeps its attention: GPTNeoFor"
        ):
            guarded(input_ids=IDS, use_cache=False, **given)
    one_row_each = {"input_ids": IDS, "use_cache": False, "attention_mask": torch.ones_like(IDS)}
    wanted = model(**one_row_each).logits
    revert_packing_ops(model)
    torch.testing.assert_close(model(**one_row_each).logits, wanted, rtol=0, atol=0)
    if rows != "attention_mask":
        model(input_ids=IDS, use_cache=False, **given)
    assert not [name for module in model.modules() for name in vars(module) if "packing" in name]


def test_an_unpickled_model_is_guarded_after_unregister():
    """As in a process that has never applied: it registers."""
    saved = pickle.dumps(applied("gpt_neo"))
    revert_registration()
    model = pickle.loads(saved)
    with pytest.raises(ValueError, match="position_ids: expected one document in each row"):
        model(input_ids=IDS, use_cache=False, **POSITIONS)


def test_attention_that_is_not_asked_for_is_not_guarded():
    """Its attention keeps documents apart, says who passes attention=False: so says the warning that names it."""
    model = causal_families.model_of("gpt_neo", None)
    with pytest.warns(
        UserWarning, match="With attention=False they are none: the model's own attention must then keep"
    ):
        apply_packing_ops(model, rope=False)
    revert_packing_ops(model)
    apply_packing_ops(model, attention=False, rope=False)
    model(input_ids=IDS, use_cache=False, **POSITIONS)


def test_a_guarded_model_generates():
    model = applied("gpt_neo")
    mask = torch.ones_like(IDS).expand(2, -1).clone()
    mask[1, :4] = 0  # padding on the left
    wanted = causal_families.model_of("gpt_neo", None).generate(
        IDS.expand(2, -1), attention_mask=mask, max_new_tokens=3
    )
    assert model.generate(IDS.expand(2, -1), attention_mask=mask, max_new_tokens=3).equal(wanted)


def test_in_a_graph_it_asserts(fresh_compile):
    model = applied("gpt_neo")
    compiled = torch.compile(model, backend="aot_eager")
    compiled(input_ids=IDS, use_cache=False, position_ids=torch.arange(IDS.shape[1])[None])
    with pytest.raises((RuntimeError, ValueError), match="position_ids: expected one document in each row"):
        compiled(input_ids=IDS, use_cache=False, **POSITIONS)


def test_another_attention_in_a_graph(fresh_compile):
    """There transformers numbers documents where there is one, too."""
    model = causal_families.model_of("llama", "eager").eval()
    set_without_apply(model)
    wanted = alone(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for given in (POSITIONS, {**POSITIONS, **ROWS["cu_seq_lens_q"]}):
        torch.testing.assert_close(compiled(input_ids=IDS, use_cache=False, **given).logits, wanted)
    counted = {"position_ids": torch.arange(IDS.shape[1])[None]}
    part = DOCUMENTS.position_ids[None].clone()  # of several documents, but not of all
    part[:, : sum(LENGTHS[:2])] = torch.arange(sum(LENGTHS[:2]))
    others = [{"position_ids": part, **ROWS["cu_seq_lens_q"]}, {"attention_mask": NUMBERS}]
    for given in (ROWS["cu_seq_lens_q"], {**counted, **ROWS["cu_seq_lens_q"]}, *others):
        with pytest.raises(
            (RuntimeError, ValueError), match=r"(position_ids|attention_mask|cu_seq_lens_q): expected"
        ) as raised:
            compiled(input_ids=IDS, use_cache=False, **given)
        assert (type(raised.value) is RuntimeError) == ("attention_mask" in given)  # the graph's assertion, of values


def of_one_config(model):
    """As two models are made of one config; the other one is reverted, whose attention is that of both."""
    other = type(model)(model.config)
    for each in (other, model):
        apply_packing_ops(each)
    revert_packing_ops(other)


def set_later(model):
    apply_packing_ops(model)
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("rows", [*ROWS, "attention_mask"])
@pytest.mark.filterwarnings("ignore:apply_packing_ops")
@pytest.mark.parametrize("take", [of_one_config, set_later])
@pytest.mark.parametrize("family", ["lfm2", "jamba", "qwen3_5_text", "minimax", "mamba2"])
@torch.no_grad()
def test_layers_with_a_state_beside_another_attention_than_ours(family, take, rows):
    model = stateful_models.stateful_model(family, attn_implementation="eager").eval()
    single = model(input_ids=IDS, use_cache=False).logits
    wanted = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in IDS.split(LENGTHS, 1)], 1)
    take(model)
    given = ROWS.get(rows, {"attention_mask": NUMBERS})
    torch.testing.assert_close(model(input_ids=IDS, use_cache=False).logits, single, rtol=2e-4, atol=2e-5)
    assert model.generate(IDS, max_new_tokens=2, min_new_tokens=2, do_sample=False).shape == (1, sum(LENGTHS) + 2)
    if family == "mamba2":  # has no attention: documents are apart as before
        found = model(input_ids=IDS, use_cache=False, **given).logits
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)
        return
    assert "documents: one in each row" in info(model)
    with pytest.raises(ValueError, match=f"^{rows}: expected one document in each row.*not packing_ops' any more"):
        model(input_ids=IDS, use_cache=False, **given)
    apply_packing_ops(model)
    found = model(input_ids=IDS, use_cache=False, **given).logits
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)
    revert_packing_ops(model)
    assert not [name for module in model.modules() for name in vars(module) if "packing" in name]


# --- attention that is another one than ours by now, in models that keep documents apart by nothing else ---


def set_in_the_config(model):
    apply_packing_ops(model)
    model.config._attn_implementation = "eager"


def set_to_sdpa(model):
    apply_packing_ops(model)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


def set_without_apply(model):
    register()
    model.set_attn_implementation("packing_ops")
    model.set_attn_implementation("eager")


def of_a_copy(model):
    set_later(model)
    model.__dict__.update(vars(copy.deepcopy(model)))


SET = [of_one_config, set_later, set_in_the_config, set_to_sdpa, set_without_apply, of_a_copy]
NUMBERED = {"attention_mask": NUMBERS}
MIXED = {
    "cu_seq_lens_q": {**ROWS["cu_seq_lens_q"], "use_cache": True},
    "attention_mask": {**NUMBERED, "use_cache": False},
    "numbers and positions": {**NUMBERED, **POSITIONS, "use_cache": False},
    "position_ids beside a mask": {**POSITIONS, "attention_mask": torch.ones_like(IDS), "use_cache": False},
    "position_ids beside a cache": {**POSITIONS, "use_cache": True},
}
BLOCKS = torch.block_diag(*(torch.ones(n, n) for n in LENGTHS)).tril()[None, None].log()  # eager attention adds it
# What transformers keeps apart, or has one document in each row.
LEGAL = {
    "position_ids": {**POSITIONS, "use_cache": False},
    "both": {**POSITIONS, **ROWS["cu_seq_lens_q"], "use_cache": False},
    "a 4-D mask": {**POSITIONS, "attention_mask": BLOCKS},
}
ONE = {
    "nothing": {},
    "a mask": {"attention_mask": torch.ones_like(IDS)},
    "position_ids": {"position_ids": torch.arange(IDS.shape[1])[None], "use_cache": False},
    "one document": {**po.PackedMetadata.from_lengths([sum(LENGTHS)]).to_transformers(), "use_cache": False},
    "attentions": {"output_attentions": True},
}


@pytest.mark.filterwarnings("ignore:apply_packing_ops. rope of GPT2")
@pytest.mark.parametrize("take", SET)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_another_attention_than_ours(family, take):
    model = causal_families.model_of(family, "eager").eval()
    single = model(input_ids=IDS, use_cache=False).logits
    wanted = alone(model)
    take(model)
    for name, given in MIXED.items():
        with pytest.raises(ValueError, match=r"expected one document in each row.* not packing_ops' any more"):
            pytest.fail(f"{name}: {model(input_ids=IDS, **given).logits}")
    for given in LEGAL.values():
        torch.testing.assert_close(model(input_ids=IDS, **given).logits, wanted, rtol=2e-4, atol=2e-5)
    for given in ONE.values():
        torch.testing.assert_close(model(input_ids=IDS, **given).logits, single, rtol=2e-4, atol=2e-5)
    assert model.generate(IDS, max_new_tokens=2, min_new_tokens=2, do_sample=False).shape == (1, sum(LENGTHS) + 2)
    assert "several are an error" in info(model)
    apply_packing_ops(model)
    for given in (*ROWS.values(), NUMBERED):
        found = model(input_ids=IDS, use_cache=False, **given).logits
        torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)
    revert_packing_ops(model)
    assert not [name for module in model.modules() for name in vars(module) if "packing" in name]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_every_family_keeps_apart_or_refuses(attention):
    """By position_ids, which GPT-OSS gives no mask."""
    for family in ("gpt_oss", "gemma3_text", "mistral", "phi3", "modernbert-decoder", "opt", "granitemoe"):
        model = causal_families.model_of(family, "eager").eval()
        wanted = alone(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            apply_packing_ops(model)
        model.set_attn_implementation(attention if model._supports_sdpa else "eager")
        seen = causal_families.seen_by(model, IDS, wanted, POSITIONS, LENGTHS[0])
        assert seen == APART or seen.startswith(f"{REFUSED}position_ids: expected one document in each row"), family


def test_another_attention_has_the_loss_of_transformers():
    """Its labels too are as they are, of a first token of a document."""
    model, given = causal_families.model_of("llama", "eager"), {"input_ids": IDS, "labels": IDS, "use_cache": False}
    wanted = model(**given, **POSITIONS).loss
    set_later(model)
    torch.testing.assert_close(model(**given, **POSITIONS).loss, wanted)


@pytest.mark.parametrize("kind", ["batch", "document"])
def test_another_attention_beside_a_balance_loss(kind):
    """transformers' is of all tokens; of documents there is none."""
    model = causal_families.model_of("mixtral", "eager")
    given = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "output_router_logits": True}
    wanted = model(**given).aux_loss
    apply_packing_ops(model, balance_loss=kind)
    model.set_attn_implementation("eager")
    if kind == "batch":
        torch.testing.assert_close(model(**given).aux_loss, wanted)
        return
    with pytest.raises(ValueError, match=r"balance_loss: expected an attention over .* or another attention"):
        model(**given)


def test_another_attention_below_a_head_of_one_result():
    """transformers keeps the documents apart, and scores one token of the row."""
    model = transformers.LlamaForSequenceClassification(causal_families.model_of("llama", "eager").config).eval()
    rows = {"input_ids": IDS.view(2, -1), "attention_mask": torch.ones_like(IDS.view(2, -1))}
    wanted = model(**rows).logits
    set_later(model)
    torch.testing.assert_close(model(**rows).logits, wanted)
    for given in (POSITIONS, {**POSITIONS, **ROWS["cu_seq_lens_q"]}, NUMBERED):
        with pytest.raises(ValueError, match="expected one document in each row, got several"):
            model(input_ids=IDS, use_cache=False, **given)


def test_positions_that_are_others_than_cu_seqlens():
    model = causal_families.model_of("llama", "eager")
    set_later(model)
    others = po.PackedMetadata.from_lengths(LENGTHS[::-1]).to_transformers()
    with pytest.raises(ValueError, match="position_ids: expected"):
        model(input_ids=IDS, use_cache=False, **POSITIONS, **others)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_one_document_in_each_of_several_rows(attention):
    """By cu_seq_lens_q, of which that attention reads nothing."""
    model = causal_families.model_of("llama", attention).eval()
    ids, n = IDS.expand(3, -1), sum(LENGTHS)
    wanted = model(input_ids=ids, use_cache=False).logits
    apply_packing_ops(model)
    model.set_attn_implementation(attention)
    for lengths in ([n] * 3, [n] * 3 + [0]):
        given = po.PackedMetadata.from_lengths(lengths).to_transformers()
        torch.testing.assert_close(model(input_ids=ids, use_cache=False, **given).logits, wanted)
    # More documents than rows; as many, one of which starts inside of a row; those of one row, as many as the rows.
    for lengths in ([*LENGTHS, n, n], [n - 1, n + 1, n], [3 * n - 1, 1], [n // 3] * 3):
        given = po.PackedMetadata.from_lengths(lengths).to_transformers()
        with pytest.raises(ValueError, match=r"^cu_seq_lens_q: expected one document in each row"):
            model(input_ids=ids, use_cache=False, **given)


def test_attention_that_reads_documents_itself():
    """As FlashAttention, or one that the user has registered."""

    def theirs(module, query, key, value, mask, cu_seq_lens_q=None, **kwargs):
        seen.append(cu_seq_lens_q)
        return query.transpose(1, 2), None

    seen = []
    transformers.AttentionInterface.register("theirs", theirs)
    try:
        model = causal_families.model_of("llama", "eager")
        apply_packing_ops(model)
        model.set_attn_implementation("theirs")
        model(input_ids=IDS, use_cache=False, **ROWS["cu_seq_lens_q"])
        model(input_ids=IDS, use_cache=False, **POSITIONS)
        assert seen[0] is ROWS["cu_seq_lens_q"]["cu_seq_lens_q"]
        counted = {"position_ids": torch.arange(IDS.shape[1])[None]}
        for given in (NUMBERED, {**NUMBERED, **POSITIONS}, {**NUMBERED, **counted}):
            with pytest.raises(ValueError, match=r"attention_mask: expected one document in each row"):
                model(input_ids=IDS, use_cache=False, **given)
        # Of several rows transformers' FlashAttention looks at no positions; it takes cu_seq_lens_q with three others.
        with pytest.raises(ValueError, match=r"position_ids: expected one document in each row"):
            model(IDS.expand(2, -1), position_ids=POSITIONS["position_ids"].expand(2, -1), use_cache=False)
        alone = {name: value for name, value in ROWS["cu_seq_lens_q"].items() if not name.startswith("max_")}
        with pytest.raises(ValueError, match=r"cu_seq_lens_q: expected one document in each row"):
            model(input_ids=IDS, use_cache=False, **alone)
    finally:
        transformers.AttentionInterface._global_mapping.pop("theirs")


@pytest.mark.filterwarnings("ignore:apply_packing_ops. rope of Jamba")
@pytest.mark.parametrize("take", [set_later, set_in_the_config])
@pytest.mark.parametrize("family", ["lfm2", "jamba", "qwen3_5_text"])
@torch.no_grad()
def test_layers_with_a_state_beside_a_mask_of_pairs(family, take):
    """Attention reads the mask, these layers do not."""
    model = stateful_models.stateful_model(family, attn_implementation="eager").eval()
    take(model)
    model(input_ids=IDS, use_cache=False, attention_mask=BLOCKS)
    with pytest.raises(ValueError, match=r"^position_ids: expected one document in each row"):
        model(input_ids=IDS, use_cache=False, attention_mask=BLOCKS, **POSITIONS)


def test_a_prefix_tree_beside_another_attention():
    model = causal_families.model_of("llama", "eager")
    set_later(model)
    tree = po.prefix_tree_metadata([0, 0, 1, 1, 2], [0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="segment_parents: expected"):
        model(IDS[:, :5], position_ids=tree.position_ids[None], use_cache=False, **tree.to_transformers())


class Refusing(torch.nn.Module):
    """A model beside one whose attention cannot be set."""

    def __init__(self, model):
        super().__init__()
        self.model, self.other = model, causal_families.model_of("bloom", None)


@pytest.mark.filterwarnings("ignore:apply_packing_ops")
def test_a_model_that_keeps_ours_is_guarded_after_an_apply_that_fails():
    model = causal_families.model_of("llama", "eager").eval()
    apply_packing_ops(model)
    with pytest.raises(ValueError, match="attention"):
        apply_packing_ops(Refusing(model), strict=True)
    assert model.config._attn_implementation == "packing_ops"
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="expected one document in each row"):
        model(input_ids=IDS, use_cache=False, **ROWS["cu_seq_lens_q"])


def test_a_model_that_was_loaded_with_ours_is_guarded_after_a_revert():
    register()
    model = causal_families.model_of("llama", "packing_ops").eval()
    apply_packing_ops(model)
    revert_packing_ops(model)
    assert model.config._attn_implementation == "packing_ops"
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="expected one document in each row"):
        model(input_ids=IDS, use_cache=False, **ROWS["cu_seq_lens_q"])


# --- the attention of a config that models share ---


def test_a_revert_leaves_what_was_set_between_two_models_of_a_config():
    first = causal_families.model_of("llama", "sdpa")
    apply_packing_ops(first)
    first.set_attn_implementation("eager")
    second = type(first)(first.config)
    apply_packing_ops(second)
    revert_packing_ops(second)
    assert first.config._attn_implementation == "eager"


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("before", ["eager", "sdpa", "packing_ops"])
def test_the_last_revert_leaves_a_shared_config_as_it_was(before, first):
    register()
    models = [causal_families.model_of("llama", before)]
    models.append(type(models[0])(models[0].config))
    for _ in range(2):
        for model in (*models, models[0]):
            apply_packing_ops(model)
        for model in (models[first], models[1 - first]):
            revert_packing_ops(model)
        assert models[0].config._attn_implementation == before


def test_a_config_inside_of_another_is_left_as_it_was():
    whole = hf_images.tiny_image_model("gemma3")
    text = transformers.Gemma3ForCausalLM(whole.config.text_config)
    for order in ((whole, text), (text, whole)):
        before = [config._attn_implementation for config in (whole.config, text.config, whole.config.vision_config)]
        for model in (*order, *order[::-1]):
            apply_packing_ops(model)
        for model in order:
            revert_packing_ops(model)
        assert before == [
            config._attn_implementation for config in (whole.config, text.config, whole.config.vision_config)
        ]


@pytest.mark.parametrize("parts", [{"text_config": "eager"}, {"": "eager"}, "eager"])
@torch.no_grad()
def test_another_attention_of_a_part(parts):
    """Of the text of a model that reads images too, or of the model around it."""
    model = hf_images.tiny_image_model("gemma3")
    wanted = torch.cat([model(input_ids=ids, use_cache=False).logits for ids in IDS.split(LENGTHS, 1)], 1)
    apply_packing_ops(model)
    model.set_attn_implementation(parts)
    for given in (*MIXED.values(), LEGAL["both"]):
        given = {name: value for name, value in given.items() if name != "use_cache"}
        seen = causal_families.seen_by(model, IDS, wanted, given, LENGTHS[0])
        assert seen == APART or (seen.startswith(REFUSED) and "expected one document in each row" in seen)
    for given in ROWS.values() if parts == {"": "eager"} else (POSITIONS,):
        assert causal_families.seen_by(model, IDS, wanted, given, LENGTHS[0]) == APART
