"""Hybrid models whose convolutions and gated delta rules are ours: each document as in a separate row, nothing found in
the layers.
"""

import copy
import functools
import gc
import inspect
import itertools
import pickle
import sys
import types

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers import cu_seqlens_of  # noqa: E402
from stateful_case import CLOSE, LENGTHS, alone, assert_apart, logits, packed  # noqa: E402
from stateful_models import COMMON, MORE_HYBRIDS, passes_keywords, stateful_model  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.integrations._trial import attempt  # noqa: E402
from packing_ops.integrations.transformers import (  # noqa: E402
    apply,
    apply_packing_ops,
    info,
    revert_packing_ops,
    rms_norm,
)
from packing_ops.integrations.transformers.states import linear_attention, stateful, stateful_rows  # noqa: E402
from packing_ops.invariance import few_rows  # noqa: E402
from packing_ops.keys import prefix_paths  # noqa: E402

MAMBA2 = ["bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2", "mamba2"]
WITHOUT_ROPE = {"granitemoehybrid", "kimi_linear", "nemotron_h", "zamba2", "mamba2"}  # that is ours
FAMILIES = ["qwen3_next", "qwen3_5_text", "olmo_hybrid", "lfm2", "kimi_linear", *MAMBA2]


def hybrid(family, device="cpu", **more):
    """(a model with ours, the stock model with the same weights)."""
    if not passes_keywords(family):
        pytest.skip("its layers pass no keywords on")
    model, stock = (stateful_model(family, attn_implementation="eager", device=device, **more) for _ in range(2))
    applied = apply_packing_ops(model, rope=family not in WITHOUT_ROPE)
    assert applied.linear_attention == linear_attention.counts(model)[1] > 0
    assert applied.skipped == {}
    return model, stock


def forms(device):
    """Every way to say where the documents of packed() are."""
    _, positions, cu_seqlens = packed(device)
    numbers = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))[None].to(device)
    return [
        {"position_ids": positions},
        {"position_ids": positions, **cu_seqlens},
        {"attention_mask": numbers, "position_ids": positions},
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_are_apart_to_the_bit_and_as_alone(family, device):
    model, stock = hybrid(family, device)
    ids, _, _ = packed(device)
    wanted = alone(stock, ids)
    for given in forms(device):
        torch.testing.assert_close(assert_apart(model, ids, **given), wanted, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_layer_runs_documents_as_rows(family, device, monkeypatch):
    model, _ = hybrid(family, device)
    ids, _, _ = packed(device)
    monkeypatch.setattr(stateful, "_apart", None)  # it would split the row
    for given in forms(device):
        logits(model, ids, **given)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_both_sides_changes_nothing(family, device):
    model, stock = hybrid(family, device)
    ids, positions, _ = packed(device)
    numbers = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))[None].to(device)
    given = {"attention_mask": numbers, "position_ids": positions}
    given = {name: torch.nn.functional.pad(value, (2, 3)) for name, value in given.items()}
    found = logits(model, torch.nn.functional.pad(ids, (2, 3)), **given)
    torch.testing.assert_close(found[:, 2:-3], alone(stock, ids), **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant"])
def test_gradients_are_those_of_each_document_alone(family, checkpointing, device):
    model, stock = hybrid(family, device)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    ids, _, _ = packed(device)
    weights = torch.randn(1, sum(LENGTHS), 61, device=device)
    for outputs in (model(ids, use_cache=False, **forms(device)[1]).logits, alone(stock, ids)):
        (outputs * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            scale = theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=name)


@pytest.mark.parametrize(
    ("family", "whole"),
    [
        *((family, False) for family in FAMILIES if family not in ("kimi_linear", "qwen3_next", "bamba")),
        ("qwen3_next", True),
        ("lfm2", True),
        ("bamba", True),
    ],
    ids=lambda value: value if isinstance(value, str) else "whole model" if value else "layers",
)
def test_compiled_without_a_break(family, whole, device, fresh_compile):
    """Whole models hold the same layers: a delta rule, a convolution and a scan are enough. The first layer of a family
    has a state, the other attention; the other of zamba2 both. test_hf_hybrid_around.py has the delta rule and the scan
    under AOTAutograd.
    """
    model, stock = hybrid(family, device)
    ids, _, _ = packed(device)
    layers = getattr(model, model.base_model_prefix).layers
    part = model if whole else layers[-1] if family == "zamba2" else layers[0]
    part.compile(backend="aot_eager" if family == "lfm2" else "eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(logits(model, ids, **forms(device)[1]), alone(stock, ids), **CLOSE)


# Segments, their parents, and the paths from a root to each leaf: those with children have a multiple of 128 tokens.
SEGMENTS, PARENTS, PATHS = [128, 128, 4, 70, 1, 128, 6], [-1, 0, 1, 1, 0, -1, 5], [(0, 1, 2), (0, 1, 3), (0, 4), (5, 6)]


def tree_of(device):
    """(ids, what a call is given, the slots of each path)."""
    ids = torch.randint(3, 60, (1, sum(SEGMENTS)), generator=torch.Generator().manual_seed(1)).to(device)
    slots = torch.arange(sum(SEGMENTS), device=device).split(SEGMENTS)
    paths = [torch.cat([slots[i] for i in path]) for path in PATHS]
    positions = torch.zeros_like(ids)
    for path in paths:
        positions[0, path] = torch.arange(len(path), device=device)
    cu_seqlens = cu_seqlens_of(SEGMENTS, device)
    parents = torch.tensor(PARENTS, dtype=torch.int32, device=device)
    given = {"position_ids": positions, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    return ids, {**given, "segment_parents": parents}, paths


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant"])
def test_branches_of_a_tree_begin_with_the_state_of_their_parent(family, checkpointing, device, monkeypatch):
    model, stock = hybrid(family, device)
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    monkeypatch.setattr(stateful, "_apart", None)  # it would run whole paths
    ids, given, paths = tree_of(device)
    weights = torch.randn(1, ids.shape[1], 61, device=device)
    found = model(ids, use_cache=False, **given).logits
    wanted = torch.empty_like(found)
    for path in paths:
        wanted[:, path] = stock(ids[:, path], use_cache=False).logits
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()
    for outputs in (found, wanted):
        (outputs * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        if theirs.grad is not None:
            assert (ours.grad - theirs.grad).norm() <= 1e-3 * theirs.grad.norm() + 1e-6, name


def test_bits_of_a_branch_are_those_of_its_path_alone(device):
    total, (_, given, paths) = sum(SEGMENTS), tree_of(device)
    q, k, v = (torch.randn(total, 1, 64, device=device) for _ in range(3))
    rows = [q, k, v, -torch.rand(total, 1, device=device), torch.rand(total, 1, device=device)]
    tree = prefix_paths(given["cu_seq_lens_q"], given["segment_parents"], total)
    rule = functools.partial(po.gated_delta_rule, use_qk_l2norm=True)
    out, states = linear_attention._over_tree(rule, rows, tree)
    for path, segments in zip(paths, PATHS, strict=True):
        ends = cu_seqlens_of([len(path)], device)
        wanted, state = rule(*(each[path] for each in rows), ends, output_final_state=True)
        assert torch.equal(out[path], wanted)
        assert torch.equal(states[segments[-1]], state[0])


def test_levels_are_of_all_tensors_of_the_paths(device):
    rows = [torch.randn(9, 4, device=device), torch.randn(4, 3, device=device)]
    paths = prefix_paths(cu_seqlens_of([5, 4], device), torch.tensor([-1, -1], dtype=torch.int32, device=device), 9)
    other = cu_seqlens_of([3, 6], device)

    def conv(x, cu_seqlens, **states):
        return po.causal_conv1d(x, rows[1], None, cu_seqlens, **states)

    for each in (paths, paths._replace(segments=other, cu_seqlens=other)):
        found, _ = linear_attention._over_tree(conv, rows[:1], each)
        assert torch.equal(found, conv(rows[0], each.segments)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_padded_rows_and_generate_as_before(family, device):
    model, stock = hybrid(family, device)
    model, stock = model.eval(), stock.eval()
    ids = torch.randint(3, 60, (2, 9), device=device)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    found, wanted = (logits(each, ids, attention_mask=mask) for each in (model, stock))
    torch.testing.assert_close(found[mask == 1], wanted[mask == 1], **CLOSE)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))


def test_a_cache_is_left_with_the_last_document_of_its_row(device):
    model, _ = hybrid("qwen3_next", device)
    ids, positions, cu_seqlens = packed(device)
    cache = model.eval()(ids, position_ids=positions, use_cache=True, **cu_seqlens).past_key_values
    last = model(ids[:, -LENGTHS[-1] :], use_cache=True).past_key_values
    for found, wanted in zip(cache.layers, last.layers, strict=True):
        if hasattr(found, "recurrent_states"):
            torch.testing.assert_close(found.recurrent_states[0], wanted.recurrent_states[0])


def states_of(model, ids, mask=None):
    """The recurrent states, [layers, batch, ...], that a cache holds after these rows."""
    with torch.no_grad():
        outputs = model.eval()(ids, attention_mask=mask, use_cache=True)
    cache = next(outputs[name] for name in stateful_rows.CACHES if outputs.get(name) is not None)
    states = [each.recurrent_states for each in cache.layers if hasattr(each, "recurrent_states")]
    return torch.stack([each[0] for each in states])


# Delta rules of two kinds, Mamba-2 next to attention and without.
@pytest.mark.parametrize("family", ["qwen3_next", "kimi_linear", "granitemoehybrid", "mamba2"])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4], [1, 0], [1], [1, 1]], ids=str)
def test_a_cache_holds_the_states_of_padded_rows_alone(family, rows, device):
    """A row of padding alone has a state of zeros, one with padding on the right that of its last token."""
    model, stock = hybrid(family, device)
    mask = torch.tensor([[1] * 5, [0] * 5, [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0]], device=device)[rows]
    ids = torch.randint(3, 60, (5, 5), generator=torch.Generator().manual_seed(1)).to(device)[rows]
    for row, real, found in zip(ids, mask.bool(), states_of(model, ids, mask).unbind(1), strict=True):
        wanted = states_of(stock, row[None, real])[:, 0] if real.any() else torch.zeros_like(found)
        torch.testing.assert_close(found, wanted, **CLOSE)
    assert logits(model, ids, attention_mask=mask).isfinite().all()


@pytest.mark.parametrize("family", ["qwen3_5_text", "kimi_linear", "zamba2"])
def test_a_prefill_in_chunks_whose_first_is_padding(family, device):
    model, stock = (each.eval() for each in hybrid(family, device))
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    given = {"attention_mask": mask, "prefill_chunk_size": 5, "max_new_tokens": 3, "do_sample": False}
    given |= {"eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    found, wanted = (torch.stack(each.generate(ids, **given).logits) for each in (model, stock))
    torch.testing.assert_close(found, wanted, **CLOSE)


def test_left_as_it_is_on_request(device):
    model = stateful_model("qwen3_next", attn_implementation="eager", device=device)
    assert apply_packing_ops(model, linear_attention=False).linear_attention == 0
    assert "stock in 1 module" in info(model)
    assert apply_packing_ops(model).linear_attention == 1
    assert "linear_attention: packing_ops in 1 module" in info(model)


def test_mamba2_under_autocast_and_with_frozen_weights(device):
    """As LoRA leaves them: the parameters of the scan want no gradient."""
    model, stock = hybrid("bamba", device)
    ids, _, _ = packed(device)
    for each in (model, stock):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("in_proj" in name)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        outputs = model(ids, use_cache=False, **forms(device)[1]).logits, alone(stock, ids)
    ours, theirs = (each.float() for each in outputs)
    assert (ours - theirs).norm() <= 0.02 * theirs.norm()
    for each in (ours, theirs):
        each.square().sum().backward()
    for layer, other in zip(model.model.layers, stock.model.layers, strict=True):
        if hasattr(layer, "mamba"):
            found, wanted = (each.mamba.in_proj.weight.grad for each in (layer, other))
            assert (found - wanted).norm() <= 0.05 * wanted.norm()


@pytest.mark.parametrize("family", MAMBA2)
def test_mamba2_in_bfloat16(family, device):
    """Packed it is as near to float32 as the stock model is with each document separately."""
    model, stock = hybrid(family, device)
    ids, _, _ = packed(device)
    wanted = alone(stock, ids)
    model, stock = model.to(torch.bfloat16), stock.to(torch.bfloat16)
    found, theirs = assert_apart(model, ids, **forms(device)[1]), alone(stock, ids)
    errors = [(each.float() - wanted).norm().item() for each in (found, theirs)]
    assert errors[0] <= 1.5 * errors[1], errors


def test_the_omni_form_of_nemotron_h(device):
    """Its text model is in a model with towers."""
    module = pytest.importorskip("transformers.models.nemotron_h_omni.modeling_nemotron_h_omni")
    text = {**COMMON, **MORE_HYBRIDS["nemotron_h"], "model_type": "nemotron_h"}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    vision = {"model_type": "radio", "video_temporal_patch_size": 2, **sizes}
    torch.manual_seed(0)
    cls = module.NemotronH_Omni_Reasoning_V3
    config = cls.config_class(
        text_config=text, vision_config=vision, vision_hidden_size=32, projector_hidden_size=32, force_image_size=64
    )
    model = cls(config).to(device).train()
    for parameter in model.language_model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    stock = copy.deepcopy(model)
    assert apply_packing_ops(model, rope=False).linear_attention == 1
    ids, _, _ = packed(device)
    for given in forms(device)[:2]:
        torch.testing.assert_close(assert_apart(model, ids, **given), alone(stock, ids), **CLOSE)


@pytest.mark.parametrize("family", MAMBA2)
def test_stock_layers_do_not_keep_documents_apart(family, device):
    """Without mamba_ssm they refuse seq_idx, or take it and go on from one document into the next."""
    model, stock = hybrid(family, device)
    ids, positions, cu_seqlens = packed(device)
    seq_idx = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None].int().to(device)
    given = {"position_ids": positions, "seq_idx": seq_idx, **cu_seqlens}
    wanted = alone(stock, ids)
    torch.testing.assert_close(logits(model, ids, **given), wanted, **CLOSE)
    found = attempt(logits, stock, ids, **given)
    if isinstance(found, ValueError):
        assert "can't keep packed sequences apart" in str(found)
    else:
        assert not torch.allclose(found, wanted, **CLOSE)


@pytest.fixture
def no_other_models():
    """Those of earlier tests would keep the functions of their family swapped."""
    gc.collect()


def test_reverted_to_the_bit(no_other_models, device):
    model, stock = hybrid("qwen3_next", device)
    home = linear_attention.importlib.import_module(type(model).__module__)
    assert hasattr(home.causal_conv1d_fn, "__wrapped__")
    ids, _, _ = packed(device)
    revert_packing_ops(model)
    assert torch.equal(logits(model, ids), logits(stock, ids))
    assert not any(patch.is_applied for patch in linear_attention.patches_of(home.__name__).values())
    assert not any("_packing_ops" in name for module in model.modules() for name in vars(module))


@pytest.mark.parametrize("called", [False, True])
def test_functions_go_with_the_last_swapped_layer_of_a_model(called, no_other_models, device):
    """Parts are reverted, and the models around them, which were applied to and called, live on."""
    model, _ = hybrid("qwen3_next", device)
    home = type(model).__module__
    if called:
        model(torch.tensor([[1, 2, 3]], device=device), use_cache=False)
    revert_packing_ops(model.model if not called else model.model.layers)
    assert not any(patch.is_applied for patch in linear_attention.patches_of(home).values())


def test_a_stock_model_of_the_family_keeps_its_functions(device):
    model, stock = hybrid("qwen3_next", device)
    ids, _, _ = packed(device)
    while_swapped = logits(stock, ids)
    revert_packing_ops(model)
    assert torch.equal(while_swapped, logits(stock, ids))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_run_ours(copied, device):
    model, _ = hybrid("qwen3_next", device)
    ids, _, _ = packed(device)
    wanted = logits(model, ids, **forms(device)[1])
    made = copied(model)
    revert_packing_ops(model)
    assert torch.equal(logits(made, ids, **forms(device)[1]), wanted)


def test_a_rule_that_is_transformers_is_named(device):
    model, _ = hybrid("kimi_linear", device)
    assert "linear_attention: packing_ops in 1 module, but chunk_kimi_delta_attention is transformers'" in info(model)


def test_a_rule_of_another_meaning_is_left(monkeypatch):
    """One that forgets where its gate is 0, as padding has it."""
    model = stateful_model("kimi_linear", attn_implementation="eager")
    home = sys.modules[type(model).__module__]
    stock = inspect.unwrap(home.chunk_kimi_delta_attention)

    def other(query, key, value, g, beta, **options):
        return stock(query, key, value, g - 1, beta, **options)

    assert stateful_rows.keeps_apart(stock)
    assert not stateful_rows.keeps_apart(other)


@pytest.mark.parametrize(
    ("cu_seqlens", "total"), [([0, 3, 3, 8, 12], 14), ([0], 0), ([0], 3), ([0, 0], 2), ([0, 0, 5, 5], 5)], ids=str
)
@pytest.mark.parametrize("with_state", [False, True])
def test_rules_in_rows_with_empty_documents_and_padding(cu_seqlens, total, with_state, device):
    home = sys.modules[type(stateful_model("kimi_linear")).__module__]
    rule = inspect.unwrap(home.chunk_kimi_delta_attention)
    rows = [torch.randn(total, 2, 8, device=device, requires_grad=True) for _ in range(4)]
    rows[3:] = [-rows[3].abs(), torch.rand(total, 2, device=device)]
    states = torch.randn(len(cu_seqlens) - 1, 2, 8, 8, device=device) if with_state else None
    out, final = stateful_rows.in_rows(rule, *rows, torch.tensor(cu_seqlens, device=device).int(), states, True)
    wanted, rest = torch.zeros(total, 2, 8, device=device), torch.zeros(len(cu_seqlens) - 1, 2, 8, 8, device=device)
    for i, (start, end) in enumerate(itertools.pairwise(cu_seqlens)):
        state = None if states is None else states[i : i + 1]
        rest[i] = 0 if state is None else state[0]
        if end > start:
            of_document = [each[None, start:end] for each in rows]
            found, state = rule(*of_document, initial_state=state, output_final_state=True)
            wanted[start:end], rest[i] = found[0], state[0]
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(final, rest)


def test_layers_of_another_recurrence_say_why(device):
    model = stateful_model("jamba", attn_implementation="eager", device=device)
    applied = apply_packing_ops(model, rope=False)
    assert applied.linear_attention == 0
    assert "documents run as rows of a batch, slower: JambaMambaMixer calls" in info(model)


@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid", "nemotron_h", "zamba2", "mamba2", "qwen3_5_text"])
@pytest.mark.parametrize("rows", [1, 5, 15, 16, 40])
def test_gated_norms_have_16_rows_in_the_mode(family, rows, device, monkeypatch):
    """With fewer, torch sums in another order on a GPU."""
    model = stateful_model(family, attn_implementation="eager", device=device)
    norm = next(each for each in model.modules() if rms_norm.is_gated(each))
    width, cls, seen = norm.weight.shape[0], type(norm), []
    hidden, gate = (torch.randn(1, rows, width, device=device, requires_grad=True) for _ in range(2))
    wanted = norm(hidden, gate)
    stock = cls.forward
    monkeypatch.setattr(
        cls, "forward", lambda self, x, *args, **given: seen.append(x) or stock(self, x, *args, **given)
    )
    found = few_rows.in_enough_rows(norm, None, hidden, gate)
    assert seen[0].numel() // width >= few_rows.LEAST_ROWS
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(found)
    gradients = [torch.autograd.grad((out * weights).sum(), [hidden, gate]) for out in (found, wanted)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid", "nemotron_h"])
def test_the_mode_is_claimed_and_reverted(family):
    """On a GPU it is not claimed in float32, whose products of few rows have other bits."""
    model = stateful_model(family, attn_implementation="sdpa", intermediate_size=64)
    assert "invariant" not in apply_packing_ops(model, invariant=True, rope=family not in WITHOUT_ROPE).skipped
    assert any(rms_norm.is_gated(each) for each in model.modules())
    revert_packing_ops(model)
    assert not any("_packing_ops" in name for module in model.modules() for name in vars(module))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid"])
def test_the_mode_of_a_delta_rule_is_not_claimed_on_the_cpu(family, monkeypatch):
    """softplus and sigmoid there have other bits by an element's place, which a trial of a few rows may not meet."""
    monkeypatch.setattr(apply, "check_invariance", lambda *_, **__: types.SimpleNamespace(packs=True))
    model = stateful_model(family, attn_implementation="sdpa")
    with pytest.warns(UserWarning, match="is not claimed: .*linear_attn"):
        applied = apply_packing_ops(model, invariant=True)
    assert "linear_attn: rows that were tried agree" in applied.skipped["invariant"]
    assert "invariant: on, but not claimed" in info(model)
    revert_packing_ops(model)
