"""Which GPU a process of pytest-xdist takes first. It imports nothing: torch must not have looked at the GPUs
before.
"""


def rotated(visible: str, worker: str) -> str:
    """Returns the GPUs of `visible` so that the process `worker` starts with another one than its neighbour.

    >>> rotated("0,1,2,3", "gw5")
    '1,2,3,0'
    """
    gpus = visible.split(",")
    first = int(worker.removeprefix("gw")) % len(gpus)
    return ",".join(gpus[first:] + gpus[:first])
