"""PackingDotProductAttention in real models of megatron-core: thd and sbhd, on the CPU and on a GPU."""

import copy
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, cu_seqlens_of
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron_case import LENGTHS, VOCABULARY, assert_near, config_of, has_fields, one_process, thd_params, tiny_gpt  # noqa: F401

from packing_ops import _recent
from packing_ops.integrations.megatron import PackingDotProductAttention, use_packing_ops
from packing_ops.integrations.megatron import layout as layouts
from packing_ops.reference.attention import varlen_attention as reference

HEADS = (4, 2, 8)  # query heads, key heads, head_dim of SHAPE
pytestmark = pytest.mark.usefixtures("megatron")


def packing_spec():
    return use_packing_ops(get_gpt_layer_local_spec())


def causal_mask(seqlen, device):
    """What megatron-core's own attention needs where it would ask CUDA for one."""
    return torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu(1)[None, None]


def results(model, batches):
    """Of batches one after the other: logits and losses of all their tokens, and every gradient of the losses' sum."""
    model.zero_grad()
    logits, losses = [], []
    for inputs, labels in batches:
        with torch.no_grad():
            logits.append(model(**inputs).flatten(0, 1))
        loss = model(**inputs, labels=labels)
        loss.sum().backward()
        losses.append(loss.detach().flatten())
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return torch.cat(logits), torch.cat(losses), gradients


def batch_of(ids, packed_seq_params=None, mask=None):
    inputs = {"input_ids": ids, "position_ids": None, "attention_mask": mask, "packed_seq_params": packed_seq_params}
    return inputs, ids.roll(-1, 1)


def documents_of(lengths, device):
    return [torch.randint(0, VOCABULARY, (1, length), device=device) for length in lengths]


@pytest.mark.parametrize("slots", [None, [8, 4, 8]])
def test_thd_equals_document_by_document(slots, device):
    """Logits, loss and every gradient of stock megatron-core, one document at a time; padding gets no say."""
    documents = documents_of(LENGTHS, device)
    alone = [batch_of(ids, mask=causal_mask(ids.shape[1], device)) for ids in documents]
    expected = results(tiny_gpt(device=device), alone)

    model, params = tiny_gpt(packing_spec(), device), thd_params(LENGTHS, device, slots=slots)
    sizes = slots or LENGTHS
    rows = [F.pad(ids, (0, size - ids.shape[1]), value=3) for ids, size in zip(documents, sizes, strict=True)]
    real = torch.cat([torch.arange(size) < length for size, length in zip(sizes, LENGTHS, strict=True)]).to(device)
    labels = torch.cat([F.pad(y, (0, r.shape[1] - y.shape[1])) for r, (_, y) in zip(rows, alone, strict=True)], 1)
    inputs, _ = batch_of(torch.cat(rows, 1), params)
    logits = model(**inputs)[0][real]
    losses = model(**inputs, labels=labels)[0][real]
    losses.sum().backward()
    assert_near(logits, expected[0])
    assert_near(losses, expected[1])
    for name, parameter in model.named_parameters():
        assert_near(parameter.grad, expected[2][name])


def test_without_boundaries_the_result_differs(device):
    """Negative control: one document of all tokens is another batch."""
    ids, model = torch.cat(documents_of(LENGTHS, device), 1), tiny_gpt(packing_spec(), device)
    apart = model(**batch_of(ids, thd_params(LENGTHS, device))[0])[0]
    together = model(**batch_of(ids, thd_params([sum(LENGTHS)], device))[0])[0]
    assert_near(together[: LENGTHS[0]], apart[: LENGTHS[0]])
    assert (together - apart)[LENGTHS[0] :].abs().amax(1).min() > 1e-3


def test_sbhd_equals_dot_product_attention(device):
    ids = torch.randint(0, VOCABULARY, (3, 7), device=device)
    batches = [batch_of(ids, mask=causal_mask(7, device).expand(3, 1, 7, 7))]
    expected, found = (results(tiny_gpt(spec, device), batches) for spec in (None, packing_spec()))
    assert_near(found[0], expected[0])
    assert_near(found[1], expected[1])
    for name, gradient in found[2].items():
        assert_near(gradient, expected[2][name])


# --- the module alone ---


def module_of(kind=PackingDotProductAttention, mask=AttnMaskType.causal, *, device="cpu", **more):
    own = {key: more.pop(key) for key in ("layer_number", "softmax_scale", "attention_dropout") if key in more}
    torch.manual_seed(0)
    return kind(config=config_of(**more), attn_mask_type=mask, attention_type="self", **{"layer_number": 1, **own}).to(
        device
    )


def heads_of(*rows, device="cpu", requires_grad=True):
    shapes = ((*rows, heads, HEADS[2]) for heads in (HEADS[0], HEADS[1], HEADS[1]))
    return [torch.randn(shape, device=device).requires_grad_(requires_grad) for shape in shapes]


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("softmax_scale", [None, 0.2])
def test_module_equals_dot_product_attention(softmax_type, softmax_scale, device):
    options = {"softmax_scale": softmax_scale, "device": device}
    if softmax_type != "vanilla":
        options["softmax_type"] = softmax_type
    ours, theirs = module_of(**options), module_of(DotProductAttention, **options)
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    ours.load_state_dict(theirs.state_dict())
    found = []
    for module in (ours, theirs):
        torch.manual_seed(1)
        heads = heads_of(6, 2, device=device)
        out = module(*heads, causal_mask(6, device).expand(2, 1, 6, 6), AttnMaskType.causal)
        found.append([out, *torch.autograd.grad(out, [*heads, *module.parameters()], torch.randn_like(out))])
    for actual, expected in zip(*found, strict=True):
        assert_near(actual, expected)


KINDS = (PackingDotProductAttention, DotProductAttention)
PADDING = {  # slots of three columns, True for padding
    "right": torch.arange(6) >= torch.tensor([[6], [4], [1]]),
    "left": torch.arange(6) < torch.tensor([[0], [2], [5]]),
    "anywhere": torch.tensor([[0, 1, 0, 0, 1, 0], [1] * 6, [0, 0, 1, 1, 1, 0]]).bool(),
}


@pytest.mark.parametrize("form", ["keys", "keys and queries", "padding alone"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("side", PADDING)
def test_padding_in_sbhd(side, causal, form, device):
    """Tokens as in megatron-core's own attention, which takes the whole mask; padding has out 0 and gradient 0."""
    padding = PADDING[side].to(device)
    row = padding[:, None, None]
    whole = (row | (causal_mask(6, device) if causal else False)).expand(3, 1, 6, 6)
    given = {"keys": whole, "keys and queries": whole | row.mT, "padding alone": row}[form]
    kinds = {True: ("causal", "padding_causal"), False: ("no_mask", "padding")}[causal]
    mask_type = AttnMaskType[kinds[form == "padding alone"]]
    options = {"softmax_type": "learnable"} if has_fields({"softmax_type"}) else {}
    weights, found = torch.randn(6, 3, 32, device=device) * ~padding.T[..., None], []
    modules = [module_of(kind, mask_type, device=device, **options) for kind in KINDS]
    modules[0].load_state_dict(modules[1].state_dict())
    for module, mask in zip(modules, (given, whole), strict=True):
        torch.manual_seed(1)
        heads = heads_of(6, 3, device=device)
        out = module(*heads, mask, mask_type)
        found.append([out * (weights != 0), *torch.autograd.grad(out, heads, weights)])
    assert_same(out.isfinite(), torch.ones_like(out, dtype=torch.bool))
    for actual, expected in zip(*found, strict=True):
        assert_near(actual, expected)
    ours = module_of(mask=mask_type, device=device)(*heads, given)
    assert_same(ours[padding.T], torch.zeros_like(ours[padding.T]))
    assert ours.is_contiguous()


def test_a_padded_batch_in_a_model(device):
    """Logits and gradients of the tokens as in stock megatron-core."""
    ids = torch.randint(0, VOCABULARY, (3, 6), device=device)
    padding = PADDING["right"].to(device)
    mask = causal_mask(6, device) | padding[:, None, None]
    found = []
    for spec in (packing_spec(), None):
        model = tiny_gpt(spec, device)
        inputs, labels = batch_of(ids, mask=mask)
        losses = model(**inputs, labels=labels)[~padding]
        losses.sum().backward()
        found.append([losses.detach(), *(parameter.grad for parameter in model.parameters())])
    for actual, expected in zip(*found, strict=True):
        assert_near(actual, expected)


def test_key_scaling_by_layer_changes_nothing(device):
    heads = heads_of(5, 1, device=device)
    scaled = module_of(DotProductAttention, layer_number=3, apply_query_key_layer_scaling=True, device=device)
    expected = scaled(*heads, causal_mask(5, device))
    ours = module_of(layer_number=3, apply_query_key_layer_scaling=True, device=device)
    assert_near(ours(*heads, None), expected)


MASKS = {
    "causal": (AttnMaskType.causal, True),
    "padding_causal": (AttnMaskType.padding_causal, True),
    "no_mask": (AttnMaskType.no_mask, False),
    "padding": (AttnMaskType.padding, False),
}


@pytest.mark.parametrize("window", [None, (2, 0), (2, -1)])
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_windows_in_thd(name, window, device):
    mask_type, causal = MASKS[name]
    heads = heads_of(sum(LENGTHS), device=device)
    module = module_of(mask=mask_type, window_size=window, device=device)
    out = module(*heads, None, packed_seq_params=thd_params(LENGTHS, device))
    assert out.shape == (sum(LENGTHS), HEADS[0] * HEADS[2])
    wide = (t.double() for t in heads)
    causal = causal or window == (2, 0)
    expected, _ = reference(*wide, cu_seqlens_of(LENGTHS), causal=causal, window_size=window or (-1, -1))
    assert_near(out, expected.flatten(1).to(out))


def test_windows_skip_the_layers_that_the_config_names(device):
    """window_attn_skip_freq 2: layers 2, 4, ... see everything."""
    heads = heads_of(8, device=device)
    options = {"window_size": (2, 0), "window_attn_skip_freq": 2, "device": device}
    first, second = (module_of(layer_number=n, **options) for n in (1, 2))
    params = thd_params([8], device)
    outs = [module(*heads, None, packed_seq_params=params) for module in (first, second)]
    assert_near(outs[1], module_of(device=device)(*heads, None, packed_seq_params=params))
    assert_near(outs[0][:3], outs[1][:3])
    assert (outs[0] - outs[1])[3:].abs().amax() > 1e-3


def test_sinks_in_thd_and_a_tensor_parallel_part_of_them(device):
    """Heads 2 and 3 of 4 on the second of two ranks."""
    options = {"softmax_type": "learnable", "softmax_scale": 0.4, "device": device}
    heads, params = heads_of(sum(LENGTHS), device=device), thd_params(LENGTHS, device)
    whole = module_of(**options)
    out = whole(*heads, None, packed_seq_params=params)
    sinks = whole.softmax_offset.detach()
    assert sinks.std() > 0.1
    wide = (t.double() for t in heads)
    expected, _ = reference(*wide, cu_seqlens_of(LENGTHS), softmax_scale=0.4, sinks=sinks.double())
    assert_near(out, expected.flatten(1).to(out))
    two = types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 2))
    config = config_of(softmax_type="learnable")
    part = PackingDotProductAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=0.4, pg_collection=two).to(
        device
    )
    part.load_state_dict({"softmax_offset": sinks[2:]})
    own = [t[:, t.shape[1] // 2 :] for t in heads]
    assert_near(part(*own, None, packed_seq_params=params), out[:, 16:])


documents = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=6)


@given(documents, st.integers(0, 3), st.booleans())
def test_padding_between_documents(device, sizes, after, causal):
    """Any lengths in any slots: out 0 and gradient 0 in padding, whatever lies there; the rest as without padding."""
    lengths, slots = [length for length, _ in sizes], [length + more for length, more in sizes]
    total = sum(slots) + after
    real = [torch.arange(size) < length for size, length in zip(slots, lengths, strict=True)]
    real = torch.cat([*real, torch.zeros(after, dtype=torch.bool)]).to(device)
    heads = heads_of(total, device=device, requires_grad=False)
    for tensor in heads:
        tensor[~real] = float("nan")
        tensor.requires_grad_()
    params = thd_params(lengths, device, slots=slots)
    mask = AttnMaskType.padding_causal if causal else AttnMaskType.padding
    out = module_of(mask=mask, device=device)(*heads, None, packed_seq_params=params)
    out.square().sum().backward()
    alone = [tensor.detach()[real].requires_grad_() for tensor in heads]
    expected, _ = reference(*alone, cu_seqlens_of(lengths), causal=causal)
    expected.square().sum().backward()
    assert_same(out[~real], torch.zeros_like(out[~real]))
    assert_near(out[real], expected.flatten(1))
    for tensor, compact in zip(heads, alone, strict=True):
        assert_same(tensor.grad[~real], torch.zeros_like(tensor.grad[~real]))
        assert_near(tensor.grad[real], compact.grad)


def test_empty_batches(device):
    heads = heads_of(3, device=device)
    out = module_of(device=device)(*heads, None, packed_seq_params=thd_params([], device, slots=[]))
    assert_same(out, torch.zeros_like(out))
    out.sum().backward()
    assert not any(tensor.grad.any() for tensor in heads)


def test_value_may_be_narrower(device):
    """As in multi-latent attention: the output has value's head_dim."""
    q, k, v = heads_of(5, device=device)
    out = module_of(device=device)(q, k, v[..., :6], None, packed_seq_params=thd_params([5], device))
    whole = module_of(device=device)(q, k, v, None, packed_seq_params=thd_params([5], device))
    assert_near(out, whole.unflatten(1, (4, 8))[..., :6].flatten(1))


# --- once per batch ---


def test_layout_is_made_once_per_batch(device, monkeypatch):
    """Two layers, two forwards and a backward: one layout; changed lengths make another."""
    made = []
    cumulated = layouts._cumulated
    monkeypatch.setattr(layouts, "_cumulated", lambda *lengths: made.append(1) or cumulated(*lengths))
    model = tiny_gpt(packing_spec(), device)
    params = thd_params([5, 3, 7], device, slots=[5, 3, 8])
    ids = torch.cat(documents_of([16], device), 1)
    inputs, labels = batch_of(ids, params)
    before = model(**inputs).detach()
    model(**inputs, labels=labels).sum().backward()
    assert len(made) == 2  # of queries and of keys
    params.cu_seqlens_q[2:] -= 1
    after = model(**inputs).detach()
    assert len(made) == 4
    assert (after - before)[0, 5:].abs().max() > 1e-3
    params.cu_seqlens_q_padded[1:3] += 1  # of keys too, it is one tensor
    model(**inputs)
    assert len(made) == 6


@pytest.mark.parametrize("slots", [None, [5, 3, 8]])
def test_nothing_is_kept_longer_than_its_batch(slots, device):
    kept = len(_recent._kept)
    params = thd_params([5, 3, 7], device, slots=slots)
    out = module_of(device=device)(*heads_of(16, device=device), None, packed_seq_params=params)
    # A layout where there is one to work out, and on CUDA the plan.
    assert len(_recent._kept) == kept + (slots is not None) + (device == "cuda")
    out.sum().backward()
    del params, out
    assert len(_recent._kept) == kept


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_layers_do_not_synchronise():
    module, heads = module_of(device="cuda"), heads_of(16, device="cuda")
    params = thd_params([5, 3, 7], "cuda", slots=[5, 3, 8])
    module(*heads, None, packed_seq_params=params)
    torch.cuda.set_sync_debug_mode("error")
    try:
        module(*heads, None, packed_seq_params=params).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# --- bad input ---


def thd_call(params, rows=16, **more):
    module = module_of(**more)
    return module(*heads_of(rows), None, packed_seq_params=params)


SLOTS = {"cu_seqlens_q_padded": cu_seqlens_of(LENGTHS)}


def changed(**fields):
    params = copy.copy(thd_params())
    for name, value in fields.items():
        setattr(params, name, value)
    return params


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"qkv_format": "thd_sbhd"}, "qkv_format: expected 'thd' or 'sbhd' for all of q, k and v, got 'thd_sbhd'"),
        ({"qkv_format": None}, "qkv_format: expected .* got None"),
        ({"qkv_format": "sbhd"}, r"query: expected \[seqlen, batch, num_heads, head_dim\] for qkv_format sbhd"),
        ({"cu_seqlens_q": None}, "packed_seq_params.cu_seqlens_q: expected int32 .* got None"),
        ({"cu_seqlens_kv": None}, "packed_seq_params.cu_seqlens_kv: expected int32 .* got None"),
        ({"cu_seqlens_kv": cu_seqlens_of([4, 4, 8])}, "cu_seqlens_kv: expected the lengths of cu_seqlens_q"),
        ({"cu_seqlens_kv": cu_seqlens_of([8, 8])}, "cu_seqlens_kv: expected 4 entries like cu_seqlens_q, got 3"),
        ({"cu_seqlens_q_padded": cu_seqlens_of([5, 2, 9])}, "cu_seqlens_q_padded: expected no fewer slots than tokens"),
        ({"cu_seqlens_q_padded": cu_seqlens_of([16])}, "cu_seqlens_q_padded: expected 4 entries like cu_seqlens_q"),
        ({"cu_seqlens_q": cu_seqlens_of([5, 3, 9])}, "cu_seqlens_kv: expected the lengths of cu_seqlens_q"),
        ({"cu_seqlens_q": cu_seqlens_of(LENGTHS).float()}, r"cu_seqlens_q: expected int32 .* got float32 \[4\]"),
        ({"cu_seqlens_kv_padded": [0, 5, 8, 16]}, r"cu_seqlens_kv_padded: expected int32 .* got \[0, 5, 8, 16\]"),
        ({"cu_seqlens_q": cu_seqlens_of([4, 3, 8]) + 1, **SLOTS}, "cu_seqlens_q: expected to start at 0"),
        ({"cu_seqlens_q_padded": cu_seqlens_of(LENGTHS) + 1}, "cu_seqlens_q_padded: expected to start at 0"),
        ({"cu_seqlens_q": cu_seqlens_of([5, -1, 8]), **SLOTS}, "cu_seqlens_q: expected never to decrease"),
    ],
)
def test_bad_packed_seq_params(params, message):
    with pytest.raises(ValueError, match=message):
        thd_call(changed(**params))


def test_documents_past_the_rows_are_refused():
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        thd_call(thd_params(), rows=15)


def test_mixed_dimensions_are_refused():
    q, k, v = heads_of(16)
    with pytest.raises(ValueError, match=r"key: expected \[total, num_heads, head_dim\] for qkv_format thd, got"):
        module_of()(q, k[:, None], v, None, packed_seq_params=thd_params())


def test_a_version_without_a_field_is_named():
    with pytest.raises(AttributeError, match=r"SimpleNamespace.cu_seqlens_kv: needed, megatron-core .* does not have"):
        thd_call(types.SimpleNamespace(qkv_format="thd", cu_seqlens_q=cu_seqlens_of(LENGTHS)))


def test_fields_that_a_version_may_lack():
    """megatron-core 0.13 has neither cp_group nor local_cp_size; newer fields are not looked at."""
    cu_seqlens, heads = cu_seqlens_of(LENGTHS), heads_of(16)
    fewer = types.SimpleNamespace(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)
    found, expected = (module_of()(*heads, None, packed_seq_params=params) for params in (fewer, thd_params()))
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"attention_dropout": 0.1}, NotImplementedError, "attention_dropout: expected 0.0, .* got 0.1"),
        ({"qk_clip": True}, NotImplementedError, "qk_clip: expected False"),
        ({"mask": AttnMaskType.arbitrary}, NotImplementedError, "attn_mask_type: expected one of causal, .*arbitrary"),
        ({"window_size": (2, 1)}, ValueError, r"window_size: expected no keys to the right under causal, got \(2, 1\)"),
    ],
)
def test_unserved_options(more, error, message):
    with pytest.raises(error, match=message):
        thd_call(thd_params(), **more)


def test_bias_and_other_masks_are_refused():
    module, heads = module_of(), heads_of(6, 1)
    with pytest.raises(NotImplementedError, match="attention_bias: expected None"):
        module(*heads, None, attention_bias=torch.zeros(6, 6))
    mask = causal_mask(6, "cpu").clone()
    module(*heads, mask)
    mask[..., 5, 0] = True
    with pytest.raises(NotImplementedError, match="attention_mask: expected None or a causal mask, with padding"):
        module(*heads, mask)
    with pytest.raises(NotImplementedError, match="attention_mask: expected None or a causal mask"):
        module(*heads, mask[..., :1, :])  # padding alone, which a causal layer of megatron-core takes for all there is
    padded = causal_mask(6, "cpu") | (torch.arange(6) == 5)
    for wrong in (causal_mask(5, "cpu"), padded[0], padded.expand(1, 4, 6, 6), padded.expand(2, 1, 6, 6)):
        with pytest.raises(NotImplementedError, match="attention_mask: expected None or a causal mask"):
            module(*heads, wrong)
    module.cp_group = types.SimpleNamespace(size=lambda: 2)
    with pytest.raises(NotImplementedError, match="attention_mask: expected no padding in sbhd under context parallel"):
        module(*heads, padded)


def test_more_keys_than_queries_in_sbhd(device):
    """What sees all keys may have any number of them, of tokens alone."""
    q, k, v = heads_of(6, 2, device=device)
    module = module_of(mask=AttnMaskType.no_mask, device=device)
    assert_near(module(q[2:], k, v, torch.zeros(1, 1, 4, 6, device=device).bool()), module(q, k, v, None)[2:])
    with pytest.raises(NotImplementedError, match="attention_mask: expected None or a mask that hides nothing"):
        module(q[2:], k, v, torch.arange(6, device=device)[None, None, None] == 5, AttnMaskType.padding)
    for name in {"causal", "causal_bottom_right"} & {*AttnMaskType.__members__}:  # the second since 0.15
        with pytest.raises(ValueError, match="key: expected the 4 rows of query under a causal mask, got 6"):
            module(q[2:], k, v, None, AttnMaskType[name])


def test_heads_that_tensor_parallelism_does_not_divide():
    group = types.SimpleNamespace(size=lambda: 4)
    for name, more in (("num_attention_heads", {"num_attention_heads": 6}), ("num_query_groups", {})):
        config = config_of(kv_channels=8, **more)
        with pytest.raises(ValueError, match=f"{name}: expected a multiple of the tensor parallel size 4, got"):
            PackingDotProductAttention(
                config, 1, AttnMaskType.causal, "self", pg_collection=types.SimpleNamespace(tp=group)
            )


def test_a_batch_may_bring_its_own_ranks():
    """Dynamic context parallelism: cp_group of the batch, or none of this batch."""
    module, own, other = module_of(), *(types.SimpleNamespace(size=lambda: 2) for _ in range(2))
    module.cp_group = own
    assert module._cp_group(None) is own
    assert module._cp_group(thd_params()) is own
    assert module._cp_group(changed(cp_group=other)) is other
    assert module._cp_group(changed(local_cp_size=1)) is None


def test_groups_under_their_older_name():
    groups = types.SimpleNamespace(tp=parallel_state.get_tensor_model_parallel_group())
    module = PackingDotProductAttention(config_of(), 1, AttnMaskType.causal, "self", model_comm_pgs=groups)
    assert module.tp_group is groups.tp


def test_missing_megatron_names_the_extra():
    """And importing the module, or packing_ops, imports no megatron."""
    code = (
        "import sys, packing_ops.integrations.megatron as m; assert 'megatron' not in sys.modules;"
        "sys.modules['megatron'] = None; m.use_packing_ops"
    )
    root = Path(__file__).parent.parent
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert "ImportError: use_packing_ops needs megatron-core: pip install packing_ops[megatron]" in run.stderr
