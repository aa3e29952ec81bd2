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
    *(
        "bloom",
        "codegen",
        "deepseek_v32",
        "falcon",
        "falcon_mamba",
        "git",
        "gpt_neo",
        "gptj",
        "mamba",
        "mamba2",
        "mpt",
        "roformer",
    ),
    *("rwkv", "xlnet"),
]
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
    with pytest.raises(ValueError, match=f"^{rows}: expected one document in each row.*no longer the 'packing_ops'"):
        model(input_ids=IDS, use_cache=False, **given)
    apply_packing_ops(model)
    found = model(input_ids=IDS, use_cache=False, **given).logits
    torch.testing.assert_close(found, wanted, rtol=2e-4, atol=2e-5)
    revert_packing_ops(model)
    assert not [name for module in model.modules() for name in vars(module) if "packing" in name]
