"""What calls keep for each other: made once, made anew when the values change, gone with the tensors."""

import gc

import torch
from helpers import cu_seqlens_of

from packing_ops import _recent


def geometry(window=-1, total=9):
    """Of attention_plan: rows, heads, head_dim, causal, window."""
    return total, total, 4, 2, 64, True, window, 0


def kept():
    gc.collect()
    return len(_recent._kept)


def test_layers_of_alternating_windows_share_two_plans(device):
    cu_seqlens = cu_seqlens_of([5, 4], device)
    first, other = (_recent.plan_of(cu_seqlens, cu_seqlens, geometry(window)) for window in (-1, 2))
    assert first is not other
    for _ in range(3):
        assert _recent.plan_of(cu_seqlens, cu_seqlens, geometry()) is first
        assert _recent.plan_of(cu_seqlens, cu_seqlens, geometry(2)) is other


def test_keys_of_their_own_have_plans_of_their_own(device):
    cu_seqlens, keys = cu_seqlens_of([5, 4], device), cu_seqlens_of([4, 5], device)
    own, cross = (_recent.plan_of(cu_seqlens, cu_k, geometry()) for cu_k in (cu_seqlens, keys))
    assert _recent.plan_of(cu_seqlens, cu_seqlens, geometry()) is own
    assert _recent.plan_of(cu_seqlens, keys, geometry()) is cross
    assert _recent.plan_of(cu_seqlens, keys.clone(), geometry()) is not cross
    keys[1] = 3
    assert _recent.plan_of(cu_seqlens, keys, geometry()) is not cross


def test_a_buffer_written_each_step_keeps_one_step(device):
    cu_seqlens = cu_seqlens_of([5, 4], device)
    before = kept()
    for total in range(9, 30):
        cu_seqlens[2] = total
        plan = _recent.plan_of(cu_seqlens, cu_seqlens, geometry(total=total))
        assert _recent.plan_of(cu_seqlens, cu_seqlens, geometry(total=total)) is plan
    assert kept() == before + 1
    assert len(_recent._kept[id(cu_seqlens)][2]) == 1
    del cu_seqlens
    assert kept() == before


def test_what_was_made_can_be_trained_with(device):
    values = torch.ones(3, device=device)
    with torch.inference_mode(), torch.no_grad():
        made = _recent.kept_with([values], ("twice",), lambda: values * 2)
    assert not made.is_inference()
    assert _recent.kept_with([values], ("twice",), lambda: None) is made
