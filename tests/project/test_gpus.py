"""tests/gpus.py: the processes of make test-gpu spread over the GPUs, and each sees all of them."""

import collections

from helpers.gpus import rotated


def test_processes_take_turns_and_see_all():
    lists = [rotated("0,1,2,3", f"gw{process}").split(",") for process in range(8)]
    assert collections.Counter(gpus[0] for gpus in lists) == dict.fromkeys("0123", 2)
    assert all(sorted(gpus) == list("0123") for gpus in lists)


def test_one_gpu_and_names_of_gpus_stay():
    assert rotated("3", "gw7") == "3"
    assert rotated("GPU-a,GPU-b", "gw1") == "GPU-b,GPU-a"
