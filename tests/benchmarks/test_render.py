"""benchmarks/render.py and regions.toml: the tables of README and docs, made of the result files."""

import re
import sys

import pytest

pytest.importorskip("tomllib")  # of Python 3.11

import render
import result_rows
from render import made

REPORT = render.ROOT / "docs" / "report.md"


def test_every_table_stands_somewhere_once():
    found = [match[2] for page in render.PAGES for match in render.REGION.finditer(page.read_text())]
    assert sorted(found) == sorted(render.SPEC["regions"])


def test_another_figure_is_noticed_and_put_right():
    right = REPORT.read_text()
    wrong = right.replace("| packed, ffd | 816 |", "| packed, ffd | 815 |")
    assert wrong != right
    assert render.rewritten(wrong, REPORT) == (right, ["docstrings"])


@pytest.mark.parametrize("check", [True, False])
def test_check_changes_nothing_and_fails(check, tmp_path, monkeypatch, capsys):
    page = tmp_path / "docs" / "report.md"
    page.parent.mkdir()
    page.write_text(REPORT.read_text().replace("| packed, ffd | 816 |", "| packed, ffd | 815 |"))
    monkeypatch.setattr(render, "ROOT", tmp_path)
    monkeypatch.setattr(render, "PAGES", [page])
    monkeypatch.setattr(sys, "argv", ["render.py", *(["--check"] if check else [])])
    if check:
        with pytest.raises(SystemExit, match="make readme writes them again"):
            render.main()
    else:
        render.main()
    assert capsys.readouterr().out == f"docs/report.md: {'stale' if check else 'rewritten'}: docstrings\n"
    assert ("| packed, ffd | 815 |" in page.read_text()) == check


def test_attention_shows_who_was_measured_and_where_ours_is_behind(results):
    long16k, tiny = "long16k: T=65536 docs=4 heads=32/8 D=128 causal", "tiny: T=512 docs=4 heads=32/8 D=128 causal"
    figures = [
        (
            "varlen_attention",
            long16k,
            {"packing_ops": 1, "torch FlashAttention-2": 1.03, "FlashAttention-3": 0.56},
        ),
        ("varlen_attention_backward", long16k, {"packing_ops": 1, "torch FlashAttention-2": 1.07}),
        ("varlen_attention", tiny, {"packing_ops": 1, "torch FlashAttention-2": 0.96}),
        ("varlen_attention_backward", tiny, {"packing_ops": 1}),
    ]
    results("attention_cuda", [
        {"op": op, "shape": shape, "provider": provider, "p50_us": 1000, "ratio_to_ours": ratio, "sm_mhz": 1500 + i}
        for i, (op, shape, providers) in enumerate(figures) for provider, ratio in providers.items()
    ])  # fmt: skip
    table = made("attention")
    assert "| long16k: 4 x 16,384 | 1.00 | 1.03 | 0.56 |\n\n| backward" in table
    assert "| long16k: 4 x 16,384 | 1.00 | 1.07 |\n" in table
    assert "Flex" not in table
    assert "GPU, torch 2, multiprocessors at 1,500 to 1,501 MHz" in " ".join(table.split())
    forward, backward = made("attention-slower").split("\n\n")
    assert forward.splitlines()[2:] == ["| tiny, 512 tokens, 32/8 heads, D=128 | 1.00 | 0.96 |"]
    assert backward.splitlines()[2:] == ["| tiny, 512 tokens, 32/8 heads, D=128 | 1.00 |"]


def test_rows_of_a_step_are_compared_with_our_default_and_with_compiled_layers(results):
    ours, flash = "packing_ops", "packed, torch FlashAttention-2"
    layers = "torch.compile of each layer"
    speeds = {ours: 80, f"{ours}, rms_norm=True": 90, flash: 60, f"{ours}, {layers}": 110, f"{flash}, {layers}": 100}
    speeds[f"{flash}, gradient checkpointing"] = 30
    results("e2e_cuda", [
        {"provider": name, "tokens": 10, "documents": 2, "vocabulary": 100, "tokens_per_second": speed, "peak_gib": 1, "loss": 5}
        for name, speed in speeds.items()
    ])  # fmt: skip
    rows = [line.strip("| ").split(" | ") for line in made("e2e").split("\n\n")[0].splitlines()[2:]]
    assert [(row[0].split(",")[-1].strip(), *row[3:]) for row in rows] == [
        ("gradient checkpointing", "–", "–"),
        ("FlashAttention-2", "1.50", "1.83"),
        ("`rms_norm=False`", "1.12", "1.38"),
        ("our default** (RMSNorm in one kernel)", "–", "1.22"),
        ("compiled layers", "–", "1.10"),
        ("compiled layers**", "–", "–"),
    ]


def test_percent_of_copy_is_one_thing_everywhere(results):
    def case(op, shape, **times):
        names = {"copy": result_rows.COPY, "host": "copy and pack_sequences", "core": "megatron-core unfused"}
        ratios = {name: time / times["packing_ops"] for name, time in times.items()}
        # As an old file says it: against the rate of a copy of another size.
        more = {"op": op, "shape": shape, "copy_rate_percent": 33}
        return [
            {**more, "provider": names.get(name, name), "p50_us": time, "ratio_to_ours": ratios[name]}
            for name, time in times.items()
        ]

    rope = case("forward", "S=65536 H=32+8 D=128", packing_ops=100, copy=87)
    hook = case("RoPE hook", "T=65536", packing_ops=100, copy=87, core=1000)
    kernels = {
        "torch FlashAttention-2": 200,
        "FlashAttention-3": 90,
        "FlashAttention-4": 110,
        "megatron-core, padded": 900,
    }
    seam = [
        *case("core attention forward", "T=65536", packing_ops=100, varlen_attention=100, **kernels),
        *case("core attention forward + backward", "T=65536", packing_ops=100, varlen_attention=100, **kernels),
    ]
    results("rope_cuda", rope)
    results("megatron_cuda", [*seam, *hook])
    results("megatron-context-parallel_cuda", [{"ranks": 2, "efficiency": 1, "shape": "docs=1"}])
    results("packing_cuda", [{**row, "dtype": "int64"} for row in case("pack_ffd", "n=4096", packing_ops=60, host=10)])
    for name in ("padding_cuda", "boundaries_cuda", "profile_cuda"):
        results(name, [{"op": "", "shape": "", "provider": ""}])
    said = made("ops")
    assert "| 100.0 us | 87% |" in said
    assert (
        "| pack_ffd on the device, 4,096 lengths | 60.0 us | – | copied to the host and packed there | 0.17 |" in said
    )
    assert "takes 6.0 times as long as a copy" in " ".join(said.split())
    assert said.count("Percent of copy: ") == 1
    assert "at 87% of copy" in " ".join(made("megatron").split())


def test_training_without_a_link(results):
    assert made("parallel_host") == "Not run yet: `benchmarks/bench_parallel_host.py`."
    times = {"one rank": (100_000, 60_000), "FSDP2": (125_000, 124_000)}
    results("parallel-host_cuda", [
        {"provider": name, "layers": "eager", "rows": "4 x 16384", "fake_ranks": 1 if name == "one rank" else 4, "p50_us": us,
         "host_us": host, "gpu_busy_us": 99_000, "efficiency": 100_000 / us, "tokens_per_second": 5000, "model": "tiny"}
        for name, (us, host) in times.items()
    ])  # fmt: skip
    table = made("parallel_host")
    assert "training, eager layers" in table
    assert "| one rank | 4 x 16384 | 100 | 99 | 5,000 |  |" in table
    assert "| FSDP2 | 4 x 16384 | 125 | 99 | 5,000 | 0.80 |" in table
    assert "one GPU simulates rank 0 of 4" in " ".join(table.split())


def test_a_page_says_where_its_figures_come_from(results, tmp_path, monkeypatch):
    """A line for each file, with every section that shows it."""
    row = {"op": "forward", "shape": "T=1", "provider": "packing_ops", "p50_us": 1, "peak_mib": 1}
    results("scan_cuda", [row, row | {"commit": "1234567890"}])
    results("conv_cuda", [row | {"device": "another"}])
    region = "<!-- results: {} -->\n<!-- end -->\n"
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text(
        "# Figures\n\n## A scan, in short\n" + region.format("scan") + "### More\n" + region.format("conv")
        + "## Again\n" + region.format("scan") + region.format("sources-performance")
    )  # fmt: skip
    monkeypatch.setattr(render, "ROOT", tmp_path)
    lines = [line.strip("| ").split(" | ") for line in made("sources-performance").splitlines()[2:]]
    assert lines == [
        ["[scan_cuda.csv](benchmarks/results/scan_cuda.csv)", "[A scan, in short](performance.md#a-scan-in-short), [Again](performance.md#again)",
         "GPU, torch 2", "abcdef0, 1234567"],
        ["[conv_cuda.csv](benchmarks/results/conv_cuda.csv)", "[A scan, in short](performance.md#a-scan-in-short)", "another, torch 2", "abcdef0"],
    ]  # fmt: skip


def test_commits_are_in_tables():
    pages = [page for page in render.PAGES if "<!-- results: sources-" in page.read_text()]
    assert len(pages) == 6
    for page in pages:
        prose = "\n".join(line for line in page.read_text().splitlines() if not line.startswith("|"))
        assert re.findall(r"\bcommit [0-9a-f]{7}\b", prose) == []


def test_ours_differs_from_flashattention_2_no_more_than_its_rerun():
    """docs/performance.md says so over the table of the curve."""
    rows = render.loaded("curve_cuda.csv", [])
    ours, again = (
        sorted(float(row["apart_from_fa2"]) for row in rows if row["provider"] == name)
        for name in ("ours", "fa2_again")
    )
    assert len(ours) == len(again) > 100
    assert ours[-1] <= again[-1]
    assert ours[len(ours) // 2] <= again[len(again) // 2]


def test_padding_of_batches(monkeypatch):
    monkeypatch.setattr(result_rows, "lengths_of", lambda name: [1, 9] * 8)
    (found,) = result_rows.sft_lengths()
    assert found == {
        "documents": 16, "shortest": 1, "longest": 9, "median": 5, "mean": 5, "padding": 1 - 80 / 144, "padding_sorted": 0,
        "padding_32": 1 - 80 / 144, "padding_sorted_32": 1 - 80 / 144, "slots": pytest.approx(144 / 80),
    }  # fmt: skip


@pytest.mark.parametrize("stem", ["whole_cuda", "parallel_cuda", "trl_cuda"])
def test_a_picture_of_bars(stem, results):
    pytest.importorskip("matplotlib")
    from render_pictures import DPI, PICTURES, bars

    rows = result_rows.read_rows(render.ROOT / "benchmarks" / "results" / f"{stem}.csv")
    results(stem, [row for row in rows if row["ranks"] == "1" and row.get("provider") != "ours"])
    assert bars(PICTURES["bars"][stem]) is None
    results(stem, rows)
    assert max(bars(PICTURES["bars"][stem]).get_size_inches()) * DPI <= 1600


def test_every_key_of_a_region_is_explained_and_read():
    """render.py passes over a key that it does not know: a filter would be missing."""
    code = (render.ROOT / "benchmarks" / "render.py").read_text()
    head = (render.ROOT / "benchmarks" / "regions.toml").read_text().partition("\n[commands]")[0]
    blocks = [
        *render.SPEC["shapes"].values(),
        *(block for region in render.SPEC["regions"].values() for block in region),
    ]
    for block in blocks:
        parts = [each for name in ("cells", "line_cells", "figures", "stats") for each in block.get(name, {}).values()]
        parts += [*block.get("note", []), *block.get("caption", []), block]
        for key in {key for part in parts if isinstance(part, dict) for key in part}:
            assert f'"{key}"' in code, key
            assert re.search(rf"\b{key}\b", head), key


def test_a_column_that_is_no_more_is_named(results):
    results("vllm_cuda", [{"provider": "vLLM", "requests": 1, "tokens_per_second": 5, "log_probs": 2}])
    with pytest.raises(KeyError, match=r"regions\.toml, vllm: 'log_probs_differ'"):
        made("vllm")


@pytest.mark.parametrize("padded", ["5000", ""])
def test_a_way_to_train_without_padded_batches_has_no_speedup(results, padded):
    same = {"layers": "8", "tokens": "16384", "documents": "16", "peak_gib": "30"}
    error = {} if padded else {"error": "OutOfMemoryError: no room"}
    rows = [
        {"provider": "packing_ops", "tokens_per_second": "20000", **same},
        {"provider": "padded batches of 8, sdpa", "tokens_per_second": padded, **same, "error": "", **error},
    ]
    results("hybrid_bamba_cuda", rows)
    table = made("hybrid_bamba")
    assert f"| packing_ops, rms_norm=False | 20.0k | 30.0 GiB |{' 4.0 |' if padded else ''}\n" in table
    assert ("speedup over padded batches" in table) == bool(padded)
    assert ("out of memory" in table) == (not padded)


def test_a_case_that_a_provider_did_not_run_has_a_dash(results):
    both = {"op": "forward", "shape": "T=1", "peak_mib": 1024}
    results("scan_cuda", [
        {**both, "provider": "packing_ops", "p50_us": 500},
        {**both, "provider": result_rows.COPY, "p50_us": 20},
        {**both, "op": "backward", "provider": "packing_ops", "p50_us": 2000},
    ])  # fmt: skip
    times, memory, _ = made("scan").split("\n\n")
    assert times.splitlines()[::2] == [
        "| time in ms, T=1 | packing_ops | copy of the same bytes |",
        "| forward | 0.50 | 0.02 |",
    ]
    assert times.endswith("| backward | 2.00 | – |")
    assert memory.splitlines()[2:] == ["| forward | 1,024 |", "| backward | 1,024 |"]


def test_a_table_that_nobody_measured_names_its_command(results):
    assert made("scan_mamba") == "Not run yet: `benchmarks/bench_scan_mamba.py`."
    assert made("hybrid_bamba") == "Not run yet: `benchmarks/bench_hybrid.py --model bamba`."


@pytest.mark.parametrize("most", [None, "rate"])
def test_a_second_row_of_the_same_key_is_an_error_or_chosen(most):
    rows = [{"model": "a", "who": who, "rate": rate} for who, rate in (("ours", "4"), ("ours", "2"), ("other", "2"))]
    cell = {"of": "rate", "at": {"who": "ours"}, "per": "rate", "same": ["model"]} | ({"most": most} if most else {})
    if most:
        assert [*render.compared(rows, cell)] == [1, 2, 2]
    else:
        with pytest.raises(ValueError, match=r"at = .* finds several rows of one .*; add most"):
            [*render.compared(rows, cell)]
