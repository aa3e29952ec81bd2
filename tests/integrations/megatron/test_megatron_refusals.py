"""What PackingDotProductAttention refuses, by name, and the versions of megatron-core that it fits."""

import copy
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch
from helpers import ROOT, assert_same, cu_seqlens_of

pytest.importorskip("megatron.core")

from helpers.megatron_case import (  # noqa: F401
    LENGTHS,
    assert_near,
    causal_mask,
    config_of,
    heads_of,
    module_of,
    one_process,
    thd_params,
)
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType

from packing_ops.integrations.megatron import PackingDotProductAttention

pytestmark = pytest.mark.usefixtures("megatron")


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
        module(*heads, mask[..., :1, :])  # only padding, which a causal layer of megatron-core takes for all there is
    padded = causal_mask(6, "cpu") | (torch.arange(6) == 5)
    for wrong in (causal_mask(5, "cpu"), padded[0], padded.expand(1, 4, 6, 6), padded.expand(2, 1, 6, 6)):
        with pytest.raises(NotImplementedError, match="attention_mask: expected None or a causal mask"):
            module(*heads, wrong)
    module.cp_group = types.SimpleNamespace(size=lambda: 2)
    with pytest.raises(NotImplementedError, match="attention_mask: expected no padding in sbhd under context parallel"):
        module(*heads, padded)


def test_more_keys_than_queries_in_sbhd(device):
    """What sees all keys may have any number of them, of only tokens."""
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
    for params, group in (
        (None, own),
        (thd_params(), own),
        (changed(cp_group=other), other),
        (changed(local_cp_size=1), None),
    ):
        with mock.patch.object(module, "_attend_over_ranks", return_value=torch.zeros(16, 4, 8)) as over_ranks:
            module(*heads_of(*((16,) if params else (16, 1))), None, packed_seq_params=params)
        assert [call.args[-1] for call in over_ranks.call_args_list] == ([] if group is None else [group])


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
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "ImportError: use_packing_ops needs megatron-core: pip install 'megatron-core>=0.13'" in run.stderr
