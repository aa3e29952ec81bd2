"""PackingDotProductAttention in real models of megatron-core: thd and sbhd, on the CPU and on a GPU."""

import types

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, cu_seqlens_of
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("megatron.core")

from helpers.megatron_case import (  # noqa: F401
    HEADS,
    LENGTHS,
    VOCABULARY,
    assert_near,
    causal_mask,
    config_of,
    has_fields,
    heads_of,
    module_of,
    one_process,
    thd_params,
    tiny_gpt,
)
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from packing_ops import PackedMetadata
from packing_ops._runtime import batch_cache
from packing_ops.integrations.megatron import PackingDotProductAttention, core_attention, use_packing_ops
from packing_ops.integrations.megatron import varlen_call as layouts
from packing_ops.reference.attention import varlen_attention as reference

pytestmark = pytest.mark.usefixtures("megatron")


def packing_spec():
    return use_packing_ops(get_gpt_layer_local_spec())


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


@pytest.mark.parametrize("padding", [0, 3])
def test_packed_metadata_in_place_of_packed_seq_params(padding, device):
    """For who calls the module by itself."""
    metadata = PackedMetadata.from_lengths(LENGTHS, total=sum(LENGTHS) + padding, device=device)
    attention = module_of(device=device)
    heads = [torch.randn(metadata.total, 4, 8, device=device) for _ in range(3)]
    wanted = attention(*(t[: sum(LENGTHS)] for t in heads), None, packed_seq_params=thd_params(LENGTHS, device))
    found = attention(*heads, None, packed_seq_params=metadata)
    assert_same(found[: sum(LENGTHS)], wanted)
    assert not found[sum(LENGTHS) :].any()


def test_sbhd_equals_dot_product_attention(device):
    ids = torch.randint(0, VOCABULARY, (3, 7), device=device)
    batches = [batch_of(ids, mask=causal_mask(7, device).expand(3, 1, 7, 7))]
    expected, found = (results(tiny_gpt(spec, device), batches) for spec in (None, packing_spec()))
    assert_near(found[0], expected[0])
    assert_near(found[1], expected[1])
    for name, gradient in found[2].items():
        assert_near(gradient, expected[2][name])


# --- the module without a model ---


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
    """Tokens as in megatron-core's attention, which takes the whole mask; padding has out 0 and gradient 0."""
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


@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_windows_in_sbhd(mask, device):
    """As megatron-core's, which has windows since 0.15 and takes them to be all that is hidden."""
    pytest.importorskip("megatron.core", minversion="0.15")
    heads = heads_of(7, 2, device=device)
    modules = [module_of(kind, AttnMaskType[mask], window_size=(2, 0), device=device) for kind in KINDS]
    padding = torch.arange(7, device=device) == 5
    for attention_mask in (None, causal_mask(7, device) | padding):
        found, expected = (module(*heads, attention_mask) for module in modules)
        assert_near(found, expected)
    assert (found - module_of(device=device)(*heads, None))[3:].abs().max() > 1e-3


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


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_distributed_checkpoints_hold_what_theirs_hold(softmax_type):
    options = {} if softmax_type == "vanilla" else {"softmax_type": softmax_type}
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    parts = [module_of(kind, **options).sharded_state_dict("a.", (), metadata) for kind in KINDS]
    ours, theirs = (
        {key: (part.key, part.global_shape, part.axis_fragmentations) for key, part in each.items()} for each in parts
    )
    assert ours == theirs
    assert bool(ours) == (softmax_type == "learnable")


documents = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 5)), min_size=1, max_size=6)


@given(documents, st.integers(0, 3), st.booleans())
def test_padding_between_documents(device, sizes, after, causal):
    """Any lengths in any slots: out 0 and gradient 0 in padding, whatever is there; the rest as without padding."""
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


@pytest.mark.parametrize("width", [6, 16])
def test_value_may_have_another_head_dim(device, width, monkeypatch):
    """As in multi-latent attention: the op gets value as it is, and the output has its head_dim."""
    widths = []
    attend = core_attention.attend
    monkeypatch.setattr(
        core_attention,
        "attend",
        lambda *heads, **named: widths.append(heads[2].shape[-1]) or attend(*heads, **named),
    )
    q, k, _ = heads_of(8, device=device)
    v = torch.randn(8, *k.shape[1:2], width, device=device, requires_grad=True)
    module, results = module_of(device=device), []
    for split in ([8], [5, 3]):  # 5 and 3 tokens, as thd and each as sbhd
        given = [t.detach().requires_grad_() for t in (q, k, v)]
        if len(split) == 1:
            out = module(*given, None, packed_seq_params=thd_params([5, 3], device))
        else:
            rows = zip(*(t.split(split) for t in given), strict=True)
            out = torch.cat([module(*(t[:, None] for t in row), None)[:, 0] for row in rows])
        results.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for one, other in zip(*results, strict=True):
        assert_near(one, other)
    expected = reference(q, k, v, cu_seqlens_of([5, 3], device))[0]
    assert_near(results[0][0], expected.flatten(1))
    assert set(widths) == {width}


# --- once per batch ---


def test_layout_is_made_once_per_batch(device, monkeypatch):
    """Two layers, two forwards and a backward: one layout; changed lengths make another."""
    made = []
    cumulated = layouts.cumulated
    monkeypatch.setattr(layouts, "cumulated", lambda *lengths: made.append(1) or cumulated(*lengths))
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
    kept = len(batch_cache._tensor_caches)
    params = thd_params([5, 3, 7], device, slots=slots)
    out = module_of(device=device)(*heads_of(16, device=device), None, packed_seq_params=params)
    # A layout if there is one to work out, and on CUDA the plan.
    assert len(batch_cache._tensor_caches) == kept + (slots is not None) + (device == "cuda")
    out.sum().backward()
    del params, out
    assert len(batch_cache._tensor_caches) == kept


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
