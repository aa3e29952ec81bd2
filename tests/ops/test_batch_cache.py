"""What calls keep for each other: made once, made anew when the values change, gone with the tensors."""

import gc

import numpy as np
import pytest
import torch
from helpers import cu_seqlens_of, only_generation_0

import packing_ops as po
from packing_ops._runtime import batch_cache
from packing_ops.keys import plan_of


def geometry(window=-1, total=9):
    """Of attention_plan: rows, heads, head_dim, causal, window."""
    return total, total, 4, 2, 64, True, window, 0


def kept():
    gc.collect(0)
    return len(batch_cache._tensor_caches)


def test_layers_of_alternating_windows_share_two_plans(device):
    cu_seqlens = cu_seqlens_of([5, 4], device)
    first, other = (plan_of(cu_seqlens, cu_seqlens, geometry(window)) for window in (-1, 2))
    assert first is not other
    for _ in range(3):
        assert plan_of(cu_seqlens, cu_seqlens, geometry()) is first
        assert plan_of(cu_seqlens, cu_seqlens, geometry(2)) is other


def test_keys_of_their_own_have_plans_of_their_own(device):
    cu_seqlens, keys = cu_seqlens_of([5, 4], device), cu_seqlens_of([4, 5], device)
    own, cross = (plan_of(cu_seqlens, cu_k, geometry()) for cu_k in (cu_seqlens, keys))
    assert plan_of(cu_seqlens, cu_seqlens, geometry()) is own
    assert plan_of(cu_seqlens, keys, geometry()) is cross
    assert plan_of(cu_seqlens, keys.clone(), geometry()) is not cross
    keys[1] = 3
    assert plan_of(cu_seqlens, keys, geometry()) is not cross


def test_a_buffer_written_each_step_keeps_one_step(device):
    with only_generation_0():
        cu_seqlens = cu_seqlens_of([5, 4], device)
        before = kept()
        for total in range(9, 30):
            cu_seqlens[2] = total
            plan = plan_of(cu_seqlens, cu_seqlens, geometry(total=total))
            assert plan_of(cu_seqlens, cu_seqlens, geometry(total=total)) is plan
        assert kept() == before + 1
        assert len(batch_cache._tensor_caches[id(cu_seqlens)].entries) == 1
        del cu_seqlens
        assert kept() == before


def test_what_was_made_can_be_trained_with(device):
    values = torch.ones(3, device=device)
    with torch.inference_mode(), torch.no_grad():
        made = batch_cache.kept_with([values], ("twice",), lambda: values * 2)
    assert not made.is_inference()
    assert batch_cache.kept_with([values], ("twice",), lambda: None) is made


# --- writes that torch does not count ---

UNCOUNTED = {
    "numpy": lambda tensor, values: tensor.numpy().__setitem__(slice(None), values),
    "data.copy_": lambda tensor, values: tensor.data.copy_(torch.tensor(values)),
    "data =": lambda tensor, values: setattr(tensor, "data", torch.tensor(values, dtype=tensor.dtype)),
    "dlpack": lambda tensor, values: np.from_dlpack(tensor).__setitem__(slice(None), values),
}


@pytest.mark.parametrize("write", UNCOUNTED.values(), ids=UNCOUNTED)
def test_uncounted_writes_are_noticed_on_the_cpu(write):
    values = torch.tensor([1.0, 2.0, 3.0])
    version = values._version

    def twice():
        return batch_cache.kept_with([values], ("twice",), lambda: values * 2)

    first = twice()
    assert twice() is first
    write(values, [1.0, 2.0, 5.0])
    assert values._version == version, "a write that torch counts shows nothing here"
    assert twice().tolist() == [2.0, 4.0, 10.0]


# --- how much and for whom ---


def test_what_is_kept_of_a_tensor_is_bounded(device):
    cu_seqlens = cu_seqlens_of([5, 4], device)
    plans = [plan_of(cu_seqlens, cu_seqlens, geometry(window)) for window in range(3 * batch_cache.MOST_KEPT)]
    assert len(batch_cache._tensor_caches[id(cu_seqlens)].entries) == batch_cache.MOST_KEPT
    newest = 3 * batch_cache.MOST_KEPT - 1
    assert plan_of(cu_seqlens, cu_seqlens, geometry(newest)) is plans[newest]
    assert plan_of(cu_seqlens, cu_seqlens, geometry(0)) is not plans[0]


def test_nothing_fake_is_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    cu_seqlens = cu_seqlens_of([5, 4], "cpu")
    dense = torch.zeros(2, 41, 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        batch_cache.kept_with([cu_seqlens], ("twice",), lambda: cu_seqlens * 2)
        batch_cache.dense_cu_seqlens(*dense.shape[:2], dense, "q")
    assert type(batch_cache.kept_with([cu_seqlens], ("twice",), lambda: cu_seqlens * 2)) is torch.Tensor
    assert type(batch_cache.dense_cu_seqlens(*dense.shape[:2], dense, "q")) is torch.Tensor


class Forward:
    """As a call of a model: an object that lives as long."""


def test_layers_of_a_forward_share_and_the_next_forward_looks_again():
    values = torch.tensor([1.0, 2.0])
    first, second = Forward(), Forward()

    def ask(forward):
        return batch_cache.kept_with([values], ("twice",), lambda: values * 2, forward=forward)

    assert ask(first) is ask(first)
    values.numpy()[1] = 7.0  # within a forward nobody writes, and nobody looks
    assert ask(first).tolist() == [2.0, 4.0]
    assert ask(second).tolist() == [2.0, 14.0]
    assert ask(second) is ask(first) is ask(second)
    values.numpy()[1] = 8.0
    assert ask(None).tolist() == [2.0, 16.0]


def test_layers_of_two_stages_in_one_process_do_not_pass_for_one_forward():
    """A pipeline's second stage gets another batch in the same buffer, right after the first stage had the one
    before.
    """
    mask = torch.zeros(1, 1, 4, 4, dtype=torch.bool)
    mask[..., 3] = True
    query = key = torch.zeros(4, 1, 2, 8)
    tokens_of = pytest.importorskip("packing_ops.integrations.megatron.core_attention").tokens_of
    indices, _ = tokens_of(mask, query, key, "padding")
    assert indices.tolist() == [0, 1, 2]
    mask.numpy()[..., 2] = True  # as torch.distributed writes it
    indices, _ = tokens_of(mask, query, key, "padding")
    assert indices.tolist() == [0, 1]


def test_metadata_follows_its_cu_seqlens(device):
    """What PackedMetadata works out is of the values that cu_seqlens has, whatever wrote them."""
    metadata = po.PackedMetadata.from_lengths([2, 3], device=device)
    padded = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]], device=device)
    assert metadata.unpad(padded).tolist() == [1, 2, 5, 6, 7]
    assert metadata.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert metadata.seq_idx.tolist() == [0, 0, 1, 1, 1]
    if device == "cpu":
        metadata.cu_seqlens.numpy()[1] = 4
    else:
        metadata.cu_seqlens[1] = 4
    assert metadata.position_ids.tolist() == [0, 1, 2, 3, 0]
    assert metadata.seq_idx.tolist() == [0, 0, 0, 0, 1]
    assert metadata.unpad(padded).tolist() == [1, 2, 3, 4, 5]


def test_a_result_that_somebody_has_written_into_is_made_again(device):
    values = torch.tensor([1.0, 7.0], device=device)

    def ask():
        return batch_cache.kept_with([values], ("twice",), lambda: values * 2)

    ask().add_(100)
    assert ask().tolist() == [2.0, 14.0]
    assert ask() is ask()
