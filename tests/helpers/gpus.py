"""Which GPU, and which tests, a process of pytest-xdist takes first. It imports no torch, which must not have looked at
the GPUs before.
"""

import itertools


def rotated(visible: str, worker: str) -> str:
    """Returns the GPUs of `visible` so that the process `worker` starts with another one than its neighbour.

    >>> rotated("0,1,2,3", "gw5")
    '1,2,3,0'
    """
    gpus = visible.split(",")
    first = int(worker.removeprefix("gw")) % len(gpus)
    return ",".join(gpus[first:] + gpus[:first])


def slow_first(items: list, slow: list, workers: int) -> list:
    """Returns the items so that the slow ones begin the shares that `--dist worksteal` hands to the workers. A test of
    minutes that begins last would be waited for by all.

    >>> slow_first([*"abcdeXY"], [*"XY"], 2)
    ['X', 'a', 'b', 'Y', 'c', 'd', 'e']
    """
    others = iter([item for item in items if item not in slow])
    ordered, left = [], len(items)
    for worker in range(workers):
        size = left // (workers - worker)
        first = slow[worker::workers]
        ordered += [*first, *itertools.islice(others, max(size - len(first), 0))]
        left -= size
    return [*ordered, *others]
