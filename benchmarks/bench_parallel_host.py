"""Sharded training on one GPU, as one rank of several that are not there: what host and kernels take of it.
python benchmarks/bench_parallel_host.py [--fake-ranks 4] [--device cuda] [--only eager compiled] [--tiny]

Collectives of torch's fake process group wait for nobody and send nothing; a gather copies this rank's part for each of
the others. What is lost against one rank alone is of the host and of kernels, so that efficiency is what no link can
exceed. Writes results/parallel-host_<device>.csv; rows of the same commit, which this run does not measure, stay.
Where no commit is known, rows without one stay.
"""

from pathlib import Path

import torch.distributed as dist
from bench_parallel import Results
from harness import bench_parser
from parallel_training import host_rows
from torch.testing._internal.distributed.fake_pg import FakeStore

LAYERS = ("eager", "compiled")


class HostResults(Results):
    """What a run before measured in another case, at the same commit, stays."""

    def __init__(self, path: Path, device: str):
        super().__init__(path, device)
        self.rows = [row for row in self.rows if self.where().items() <= row.items()]


def main(argv: list[str] | None = None) -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=LAYERS, default=LAYERS)
    parser.add_argument("--tiny", action="store_true", help="sizes for the CPU")
    parser.add_argument("--fake-ranks", type=int, metavar="N", default=4, help="this process is rank 0 of so many")
    arguments = parser.parse_args(argv)
    device = arguments.device
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=arguments.fake_ranks)
    try:
        results = HostResults(arguments.out / f"parallel-host_{device}.csv", device)
        host_rows(results, device, arguments.tiny or device == "cpu", arguments.only)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
