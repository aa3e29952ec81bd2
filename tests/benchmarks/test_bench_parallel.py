"""Benchmarks of several GPUs: the path of the one for the host, over torch's fake group; the picture of what is
ideal.
"""

import csv

import bench_parallel
import bench_parallel_host
import parallel_training
import provenance
import pytest
import torch
import torch.distributed as dist
from parallel_wrappers import WRAPPERS

import packing_ops as po
from packing_ops.parallel import choose_attention


@pytest.mark.parametrize("commit", ["0123456789ab", ""], ids=["commit", "no checkout"])
def test_host_time_of_ranks_that_are_not_there(commit, monkeypatch, tmp_path):
    """A step of each; a second run keeps what the first one measured in other cases."""
    monkeypatch.setenv("PACKING_OPS_COMMIT", commit)
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(parallel_training, "WRAPPERS", {name: WRAPPERS[name] for name in ("one rank", "FSDP2")})
    monkeypatch.setattr(
        parallel_training, "timed_together", lambda step, *given, **options: step() or 2.0 + dist.get_rank()
    )
    monkeypatch.setattr(parallel_training, "host_milliseconds", lambda step, device: 3.0)
    metadata = po.PackedMetadata.from_lengths([40, 24])
    ids = {"input_ids": torch.arange(64)[None], "labels": torch.arange(64)[None], "num_items_in_batch": 64}
    batch = {**ids, "position_ids": metadata.position_ids[None], **metadata.to_transformers()}
    monkeypatch.setattr(parallel_training, "rows_of_rank", lambda *given: [batch])
    for ranks in ("2", "4"):
        bench_parallel_host.main(["--device", "cpu", "--only", "eager", "--fake-ranks", ranks, "--out", str(tmp_path)])
        assert not dist.is_initialized()
    with (tmp_path / "parallel-host_cpu.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = [(row["rows"], row["provider"], row["fake_ranks"], row["efficiency"], row["host_us"]) for row in rows]
    each = [("FSDP2", "2"), ("one rank", "1"), ("FSDP2", "4")]
    assert sorted(found) == sorted(("1 x 1024", *one, "1.000", "3000.0") for one in each) + sorted(
        ("1 x 2048", *one, "1.000", "3000.0") for one in each
    )


def test_the_page_names_the_attention_that_is_chosen():
    render = pytest.importorskip("render", reason="needs tomllib, of Python 3.11")
    rows = [row for row in render.loaded("parallel_cuda.csv", []) if row["name"] == "varlen_attention_over"]
    lengths_of = {name: lengths for name, lengths, _ in bench_parallel.attention_cases(65_536)}
    assert {row["documents"] for row in rows} == {*lengths_of}
    for row in rows:
        heads, kv_heads, _ = bench_parallel.HEADS
        documents = po.PackedMetadata.from_lengths(lengths_of[row["documents"]])
        chosen = choose_attention(documents, ranks=int(row["ranks"]), num_heads=heads, num_kv_heads=kv_heads)
        assert chosen.name in row["taken"].lower()
