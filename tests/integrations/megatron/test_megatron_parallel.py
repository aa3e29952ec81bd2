"""Context, tensor and data parallel losses and gradients with PackingDotProductAttention: as on one rank."""

import pytest
import torch
import torch.distributed as dist
from helpers import cu_seqlens_of
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.torch_version import TorchVersion

pytest.importorskip("megatron.core")

import megatron.core
from helpers.megatron_case import (
    VOCABULARY,
    assert_near,
    config_of,
    has_fields,
    parallel,
    spawn,
    tensor_parallel_part,
    thd_params,
    tiny_gpt,
)
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnMaskType

from packing_ops import varlen_attention
from packing_ops.integrations.megatron import (
    PackingDotProductAttention,
    context_parallel_attention,
    patch_rope,
    thd_partition_indices,
    use_packing_ops,
)
from packing_ops.integrations.megatron.varlen_call import DocumentSpans, varlen_call_of

WORLD = 4


# --- a rank's layout, all ranks in one process ---


batches = st.tuples(
    st.integers(2, 4),  # ranks
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 100)), max_size=5
    ),  # chunk of each document, percent of padding
    st.integers(0, 2),  # pairs of rows of no document on each rank
)


def documents_of(batch, device):
    cp_size, sizes, after = batch
    slots = [2 * cp_size * chunk for chunk, _ in sizes]
    lengths = [size * (100 - percent) // 100 for size, (_, percent) in zip(slots, sizes, strict=True)]
    real, places = (cu_seqlens_of(each, device) for each in (lengths, slots))
    return DocumentSpans(real, real, places, places), sum(slots) // cp_size + 2 * after


@given(batches, st.booleans())
def test_a_rank_s_layout(device, batch, causal):
    """Its queries over the gathered keys: the rows of attention over the whole batch; so are their gradients."""
    cp_size = batch[0]
    documents, rows = documents_of(batch, device)
    assume(rows)
    q, k, v = (torch.randn(cp_size * rows, heads, 8, device=device).requires_grad_() for heads in (4, 2, 2))
    cu_seqlens_q, cu_seqlens_k = varlen_call_of(documents, cp_size * rows, causal=causal)
    expected = varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal)
    parts = [thd_partition_indices(documents.q_slots, cp_size, rank, total=cp_size * rows) for rank in range(cp_size)]
    row_of = torch.cat(parts)
    outs = []
    for rank, own in enumerate(parts):
        layout = varlen_call_of(documents, rows, causal=causal, cp_rank=rank, cp_size=cp_size)
        keys, values = (each[row_of][layout.key_index] for each in (k, v))
        outs.append(varlen_attention(q[own], keys, values, layout.cu_seqlens_q, layout.cu_seqlens_k, causal=causal))
        gathered = k.detach()[row_of].requires_grad_()
        gradient = torch.randn_like(keys)
        gradient[layout.cu_seqlens_k[-1] :] = 0  # keys of no document
        gathered[layout.key_index].backward(gradient)
        assert_near(gradient[layout.key_positions].sum(0), gathered.grad)
    out = torch.cat(outs)
    assert_near(out, expected[row_of])
    weights = torch.randn_like(out)
    found, wanted = (torch.autograd.grad((o * weights).sum(), (q, k, v)) for o in (out, expected[row_of]))
    for actual, gradient in zip(found, wanted, strict=True):
        assert_near(actual, gradient)


def test_bad_lengths_under_context_parallelism():
    def layout(lengths, rows, other=None, slots=None):
        real = cu_seqlens_of(lengths)
        keys = real if other is None else cu_seqlens_of(other)
        places = (real, keys) if slots is None else (cu_seqlens_of(slots),) * 2
        return varlen_call_of(DocumentSpans(real, keys, *places), rows, causal=True, cp_rank=0, cp_size=2)

    layout([8, 4], 6)
    with pytest.raises(ValueError, match=r"cu_seqlens_q: expected multiples of 2 \* context parallel size 2 = 4, got"):
        layout([8, 6], 7)
    with pytest.raises(ValueError, match="cu_seqlens_q: expected at most the 10 rows of 2 ranks"):
        layout([8, 4], 5)
    with pytest.raises(ValueError, match="cu_seqlens_kv: expected the lengths of cu_seqlens_q under context parallel"):
        layout([8, 4], 6, [4, 8])
    with pytest.raises(ValueError, match="cu_seqlens_q: expected never to decrease"):
        layout([8, -3], 6, slots=[8, 4])


def test_window_of_all_sides_under_context_parallelism():
    with pytest.raises(NotImplementedError, match=r"window_size: expected \(-1, -1\) without a causal mask"):
        context_parallel_attention(None, None, None, None, None, causal=False, window_size=(5, -1))


# --- four processes ---

LENGTHS, SLOTS = [11, 3, 20, 0, 8], [16, 8, 24, 8, 8]
MODELS = {  # sizes that megatron-core is given; sequence and pipeline parallel: test_megatron_training.py
    "context 4": {"context_parallel_size": 4},
    "context 2, data 2": {"context_parallel_size": 2},
    "tensor 2, data 2": {"tensor_model_parallel_size": 2},
    "tensor 2, context 2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2},
}
if TorchVersion(megatron.core.__version__) >= "0.16":  # ranks that share a query group
    MODELS["tensor 4, of 2 query groups"] = {"tensor_model_parallel_size": 4}
MODULES = {  # name: (mask, config)
    "causal": (AttnMaskType.causal, {}),
    "no mask": (AttnMaskType.no_mask, {}),
    "window": (AttnMaskType.causal, {"window_size": (5, 0)}),
    "window without a mask": (AttnMaskType.no_mask, {"window_size": (5, 0)}),
    "learnable sink": (AttnMaskType.causal, {"softmax_type": "learnable"}),
}
MODULES = {name: (mask, more) for name, (mask, more) in MODULES.items() if has_fields(more.keys())}


def loss_and_gradients(alone, **sizes):
    """Of all documents: by only this process, or summed over the parts of the batch; a model's part has its slice."""
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(0, VOCABULARY, (slots,), generator=generator) for slots in SLOTS]
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = range(len(SLOTS))[slice(None) if alone else slice(rank, None, size)]
    ids = torch.cat([tokens[i] for i in mine])
    real = torch.cat([torch.arange(SLOTS[i]) < LENGTHS[i] for i in mine])
    params = thd_params([LENGTHS[i] for i in mine], slots=[SLOTS[i] for i in mine])
    own = zigzag(params.cu_seqlens_q_padded, len(ids), parallel_state.get_context_parallel_group())
    model = tiny_gpt(use_packing_ops(get_gpt_layer_local_spec()), **sizes)
    losses = model(ids[None, own], None, None, labels=ids.roll(-1)[None, own], packed_seq_params=params)[0]
    loss = (losses * real[own]).sum()
    loss.backward()
    sums = {"loss": loss.detach(), **{name: parameter.grad for name, parameter in model.named_parameters()}}
    if not alone:
        for each in sums.values():
            dist.all_reduce(each, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    split = {name: p.partition_dim for name, p in model.named_parameters() if getattr(p, "tensor_model_parallel", 0)}
    return sums, split


def zigzag(cu_seqlens, total, group):
    """This rank's rows of the batch."""
    return thd_partition_indices(cu_seqlens, group.size(), group.rank(), total=total)


def model_case(name, expected):
    """Pairs of what this process has and of its slice of what one that holds everything has."""
    found, split = loss_and_gradients(False, **MODELS[name], apply_rope_fusion="context" in name)
    for each, dim in split.items():
        expected = {**expected, each: tensor_parallel_part(expected[each], dim, found[each].shape[dim])}
    return {each: (found[each], expected[each]) for each in found}


def module_outputs(name, qkv_format, **sizes):
    """Of the module: this rank's rows of the output and of the gradients, and the gradient of a sink."""
    mask, more = MODULES[name]
    shape, cu_slots, params = (16, 2), cu_seqlens_of([16]), None
    if qkv_format == "thd":
        shape, cu_slots, params = (sum(SLOTS),), cu_seqlens_of(SLOTS), thd_params(LENGTHS, slots=SLOTS)
    own = zigzag(cu_slots, shape[0], dist.group.WORLD)
    rows = own if sizes else slice(None)
    torch.manual_seed(0)
    module = PackingDotProductAttention(config_of(**sizes, **more), 1, mask, "self", softmax_scale=0.5)
    heads = [torch.randn(*shape, heads, 8)[rows].requires_grad_() for heads in (4, 2, 2)]
    out = module(*heads, None, packed_seq_params=params)
    gradients = torch.autograd.grad(out, [*heads, *module.parameters()], torch.randn(*shape, 32)[rows])
    kept = [tensor if sizes else tensor[own] for tensor in (out.detach(), *gradients[:3])]
    for sink in gradients[3:]:
        if sizes:
            dist.all_reduce(sink)
        kept.append(sink)
    return kept


CASES = [*MODELS, *((name, qkv_format) for name in MODULES for qkv_format in ("thd", "sbhd"))]


def every_case():
    with parallel():
        model, _ = loss_and_gradients(True)
        modules = {case: module_outputs(*case) for case in CASES if case not in MODELS}
    found = {}
    patch_rope()
    for name, sizes in MODELS.items():
        with parallel(**sizes):
            found[name] = model_case(name, model)
            if name == "context 4":
                for case, expected in modules.items():
                    found[case] = dict(enumerate(zip(module_outputs(*case, **sizes), expected, strict=True)))
    return found


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory):
    """What each of the four processes got and should have got, case by case."""
    return spawn(every_case, WORLD, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_parallel_equals_one_rank(case, by_rank):
    """Loss and every gradient of a model, and the module's outputs, on every rank; its RoPE fused, of one rank
    not.
    """
    for found in by_rank:
        assert len(found[case]) >= 4
        for actual, expected in found[case].values():
            assert expected.abs().max() > 1e-3
            assert_near(actual, expected)
