"""tests/gpus.py: the processes of make test-gpu spread over the GPUs, and each sees all of them."""

import collections

from helpers.gpus import rotated, slow_first


def test_processes_take_turns_and_see_all():
    lists = [rotated("0,1,2,3", f"gw{process}").split(",") for process in range(8)]
    assert collections.Counter(gpus[0] for gpus in lists) == dict.fromkeys("0123", 2)
    assert all(sorted(gpus) == list("0123") for gpus in lists)


def test_one_gpu_and_names_of_gpus_stay():
    assert rotated("3", "gw7") == "3"
    assert rotated("GPU-a,GPU-b", "gw1") == "GPU-b,GPU-a"


def test_slow_tests_begin_the_shares_of_the_workers():
    """In the shares of xdist's worksteal: `left // workers that are left` tests for one after the other."""
    items = [*range(23)]
    slow = [3, 20, 21, 22, 7]
    ordered = slow_first(items, slow, 4)
    assert sorted(ordered) == items
    assert [ordered[first] for first in (0, 1, 5, 11, 17)] == [3, 7, 20, 21, 22]
    assert [each for each in ordered if each not in slow] == [each for each in items if each not in slow]
    assert sorted(slow_first(items, items, 4)) == items
    assert slow_first(items, [], 1) == items
    assert slow_first([], [], 2) == []
