"""Pictures of benchmarks and of the demo: who is shown, who loses, and that a page has room for them."""

import itertools
import json
import struct
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("tomllib")  # of Python 3.11

import harness
import render_pictures
import result_rows
from common.report_packed import save_picture, shown_documents


def size_of(path):
    return struct.unpack(">II", path.read_bytes()[16:24])


def rows_of(op, **ratios):
    names = {"copy": result_rows.COPY, "in_place": "packing_ops in place", "part": "torch index_select"}
    case = {"op": op, "shape": "T=8", "dtype": "float32", "device": "GPU"}
    return [
        {**case, "provider": names.get(name, name), "ratio_to_ours": ratio}
        for name, ratio in {"packing_ops": 1, **ratios}.items()
    ]


def test_the_fastest_other_is_the_one_compared_with_also_where_it_wins():
    rows = [
        *rows_of("wins", eager=3, compiled=1.5, copy=0.5),
        *rows_of("loses", eager=3, compiled=0.4, in_place=0.1, part=0.2),
        *rows_of("alone", in_place=0.5, copy=0.9),
        *rows_of("a part only", part=0.1),
    ]
    wins, loses = render_pictures.comparisons(rows)
    assert (wins["op"], wins["fastest"], wins["speeds"]) == ("wins", "compiled", {"eager": 3, "compiled": 1.5})
    assert (loses["op"], loses["fastest"], loses["speed"]) == ("loses", "compiled", 0.4)
    assert render_pictures.title_of("a_cpu", "GPU", [wins, loses]).endswith("\n2 cases: ahead in 1, behind in 1")


def test_a_plain_loop_is_not_drawn_and_a_mask_only_where_no_peer_is():
    rows = [
        *rows_of("loop", **{"padded loop in torch": 14209}),
        *rows_of("mask", **{"torch SDPA block mask": 35}),
        *rows_of("both", **{"torch SDPA block mask": 35, "eager": 2}),
    ]
    drawn = {case["op"]: case["speeds"] for case in render_pictures.comparisons(rows)}
    assert drawn == {"mask": {"torch SDPA block mask": 35}, "both": {"eager": 2}}


def test_a_title_says_the_finding_and_a_label_ends_in_no_comma():
    cases = render_pictures.comparisons([*rows_of("op, forward and backward,", eager=2), *rows_of("b", eager=0.5)])
    title = render_pictures.title_of("attention_cuda", "NVIDIA H100 80GB HBM3", cases)
    assert title.splitlines()[0] == "Attention on H100 80GB: 0.50 to 2.00 times the speed of the fastest other"
    common = ["T=8", "float32"]
    assert render_pictures.label_of(cases[0], common, with_op=True) == "op, fwd + bwd"
    case = cases[0] | {"shape": "long16k: T=65536 docs=4 heads=32/8 D=128 float32"}
    assert render_pictures.label_of(case, ["float32"], with_op=False) == "long16k, heads=32/8 D=128"


def test_one_device_a_picture(monkeypatch):
    seen = []
    monkeypatch.setattr(render_pictures, "_draw", lambda axis, cases, styles: seen.extend(case["op"] for case in cases))
    rows = [
        *rows_of("a", eager=2),
        *rows_of("b", eager=2),
        *({**row, "device": "other"} for row in rows_of("c", eager=2)),
    ]
    assert render_pictures.picture(rows, "a_cuda")
    assert seen == ["a", "b"]


def test_nobody_else_no_picture():
    assert render_pictures.picture(rows_of("alone", copy=0.9), "a_cpu") is None


@pytest.mark.parametrize("name", ["attention_cuda", "padding_cuda"])  # the ones with most cases
def test_a_page_has_room_for_a_picture(name):
    figure = render_pictures.picture(result_rows.read_rows(result_rows.RESULTS / f"{name}.csv"), name)
    width, height = (inches * render_pictures.DPI for inches in figure.get_size_inches())
    assert width <= 1600
    assert height <= 1600


@pytest.mark.parametrize("path", sorted(result_rows.RESULTS.glob("*.csv")), ids=lambda path: path.stem)
def test_a_colour_is_one_provider(path):
    rows = result_rows.read_rows(path)
    if "ratio_to_ours" in rows[0]:
        styles = render_pictures.styles_of(render_pictures.comparisons(rows))
        assert len({color for color, _ in styles.values()}) == len(styles)


def test_a_copy_of_the_same_bytes_is_timed_on_any_device():
    work = torch.zeros(1 << 20)
    case = harness.Case("op", "shape", "float32", {"packing_ops": work.sum}, bytes=1 << 20, runs=3)
    rows = {row["provider"]: row for row in harness.rows_of(case, "cpu")}
    ours, copy = rows["packing_ops"], rows[result_rows.COPY]
    assert float(copy["ratio_to_ours"]) == pytest.approx(float(copy["p50_us"]) / float(ours["p50_us"]), rel=0.05)


def test_the_demo_shows_its_documents_padded_and_packed(tmp_path):
    lengths = [10 + 37 * i % 200 for i in range(70)]
    shown = shown_documents(lengths, SimpleNamespace(batch_size=8, capacity=256, seed=0))
    assert len(shown["lengths"]) == 16
    assert {*shown["lengths"]} <= {*lengths}
    assert sorted(itertools.chain(*shown["rows"])) == list(range(16))
    assert all(sum(shown["lengths"][i] for i in row) <= 256 for row in shown["rows"])
    runs = [
        {"mode": mode, "losses": [3.0, 2.0], "seconds_seen": [1.0, 2.0], "padding_waste": 0.5}
        for mode in ("padded", "packed")
    ]
    save_picture(tmp_path / "demo.png", json.loads(json.dumps({"shown": shown, "runs": runs})))
    width, height = size_of(tmp_path / "demo.png")
    assert width <= 1600
    assert height < width


def test_few_documents_are_shown_too():
    shown = shown_documents([5, 3], SimpleNamespace(batch_size=8, capacity=8, seed=0))
    assert (sorted(shown["lengths"]), shown["rows"]) == ([3, 5], [[0, 1]] if shown["lengths"][0] == 5 else [[1, 0]])
