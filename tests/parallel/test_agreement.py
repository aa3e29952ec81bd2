"""Ranks that call with other options: named under PACKING_OPS_CHECK, and without it no collective more than
attention's.
"""

import os

import pytest
import torch
import torch.distributed as dist
from helpers.processes import message_of, spawn

import packing_ops as po
from packing_ops._runtime.arguments import checks_each_call
from packing_ops.parallel import ulysses_attention

VALUES = {None: False, "": False, "0": False, "1": True, "true": True, "2": True, "no": True}


def ranks_that_differ():
    """{PACKING_OPS_CHECK: messages of two calls with causal on all ranks, and on only rank 0}"""
    metadata = po.PackedMetadata.from_lengths([4 * dist.get_world_size()])
    q, k, v = (torch.randn(4, heads, 8) for heads in (8, 4, 4))
    found = {}
    for value in VALUES:
        os.environ.pop("PACKING_OPS_CHECK", None)
        if value is not None:
            os.environ["PACKING_OPS_CHECK"] = value
        calls = (True, True), (True, dist.get_rank() == 0)
        found[value] = [
            message_of(lambda c=causal: ulysses_attention(q, k, v, metadata, causal=c)) for _, causal in calls
        ]
    return found


@pytest.mark.parametrize("value", VALUES)
def test_it_is_on_where_the_library_s_own_check_is(value, monkeypatch):
    """As check_each_call of csrc/host/launch.cpp: anything but empty and 0."""
    monkeypatch.delenv("PACKING_OPS_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("PACKING_OPS_CHECK", value)
    assert checks_each_call() == VALUES[value]


def test_ranks_that_differ_after_they_agreed(tmp_path):
    """Without the check every rank makes attention's exchanges, and no other: a check on one rank would meet these."""
    for found in spawn(ranks_that_differ, 2, tmp_path):
        for value, checked in VALUES.items():
            same, other = found[value]
            assert same == "no error"
            wanted = "ValueError: causal: expected True on all 2 ranks as on rank 0, got False on rank 1 of the group"
            assert other == (wanted if checked else "no error"), value


NO_NUMBERS = ("x", [1.0], (1.0, 2.0), {}, 1j)


def calls_without_a_number():
    """{softcap: messages of calls with it on all ranks, and on only rank 1}"""
    os.environ["PACKING_OPS_CHECK"] = "1"
    metadata = po.PackedMetadata.from_lengths([8])
    q, k, v = (torch.randn(4, 4, 8) for _ in range(3))

    def message(softcap):
        return message_of(lambda: ulysses_attention(q, k, v, metadata, softcap=softcap))

    return {repr(each): (message(each), message(each if dist.get_rank() else 0.0)) for each in NO_NUMBERS}


def test_a_softcap_that_is_no_number_is_named(tmp_path):
    for found in spawn(calls_without_a_number, 2, tmp_path):
        for value in NO_NUMBERS:
            same, other = found[repr(value)]
            assert same == f"TypeError: softcap: expected a number, got {value!r} ({type(value).__name__})"
            wanted = "softcap: expected 0 on all 2 ranks as on rank 0, got no number on rank 1 of the group"
            assert other == f"ValueError: {wanted}"


def calls_that_one_rank_refuses():
    """{case: message} of values that are right on rank 0; rank 1 refuses its values, or would exchange lse too"""
    os.environ["PACKING_OPS_CHECK"] = "1"
    q, k, v = (torch.randn(4, 4, 8) for _ in range(3))

    def message(total=8, **options):
        metadata = po.PackedMetadata.from_lengths([3, 3], total=total)
        return message_of(lambda: ulysses_attention(q, k, v, metadata, **options))

    right = torch.zeros(4)
    if dist.get_rank() == 0:
        return {"shape": message(sinks=right), "dtype": message(sinks=right), "total": message(), "lse": message()}
    return {
        "shape": message(sinks=right[:3]),
        "dtype": message(sinks=right.double()),
        "total": message(total=6),
        "lse": message(return_lse=True),
    }


def test_what_one_rank_refuses_is_named_on_all(tmp_path):
    """Else one would wait for the other."""
    wanted = {
        "shape": "sinks: expected float32 [4] on all 2 ranks as on rank 0, got float32 [3]",
        "dtype": "sinks: expected float32 [4] on all 2 ranks as on rank 0, got float64 [4]",
        "lse": "return_lse: expected False on all 2 ranks as on rank 0, got True",
        "total": "cu_seqlens (total): expected 8 on all 2 ranks as on rank 0, got 6",
    }
    for found in spawn(calls_that_one_rank_refuses, 2, tmp_path):
        assert found == {case: f"ValueError: {message} on rank 1 of the group" for case, message in wanted.items()}
