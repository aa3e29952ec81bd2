"""benchmarks/render.py and regions.toml: the tables of README and docs, made of the result files."""

import csv
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


@pytest.fixture
def results(tmp_path, monkeypatch):
    """An empty folder of results, and what writes a CSV there."""
    monkeypatch.setattr(result_rows, "RESULTS", tmp_path)

    def write(name, rows):
        rows = [{"dtype": "bfloat16", "device": "GPU", "torch": "2", "commit": "abcdef012345", **row} for row in rows]
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, {name: "" for row in rows for name in row})
            writer.writeheader()
            writer.writerows(rows)

    return write


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


# What the rows of a model in whole_cuda.csv share.
WHOLE = {
    "case": "", "part": "8b", "model": "Qwen3-8B", "wrapper": "FSDP2", "ranks": "2", "lora": "0", "documents": "sft",
    "loss": "12.1", "error": "", "mfu": "0.5", "kept": "",
}  # fmt: skip
IN_SFT_TRAINER = [
    WHOLE | {
        "case": f"{provider}, batches of {batch}, {compiled}, {checkpointing}", "provider": provider, "compiled": compiled,
        "row": "16384", "checkpointing": checkpointing, "repeat": "2", "steps": "5", "epochs": "3",
        "tokens_per_second_a_gpu": speed, "peak_gib": "9",
    }
    for provider, compiled, checkpointing, speed, batch in (
        ("padded", "0", "full", "1000", 8), ("sorted", "0", "full", "1200", 8),
        ("padded", "0", "full", "750", 32), ("sorted", "0", "full", "1500", 32),
        ("ours", "0", "full", "3000", 1), ("fa2", "0", "full", "2000", 1), ("liger", "0", "full", "2500", 1),
        ("ours", "1", "full", "3300", 1), ("fa2", "1", "full", "3000", 1),
        ("ours", "0", "", "4000", 1), ("fa2", "0", "", "2500", 1), ("liger", "0", "", "5000", 1),
        ("ours", "1", "", "5000", 1), ("fa2", "1", "", "4000", 1),
    )
]  # fmt: skip


def test_whole_models_are_told_by_model(results):
    """The fastest row of each way in the first screen; what failed and what lost stays in the table."""
    for name in ("whole", "checkpointing", "headline", "memory"):
        assert made(name) == "Not run yet: `benchmarks/bench_whole.py`."
    row = WHOLE | {"peak_gib": "99", "device": "a GPU", "torch": "2.11", "commit": "1234567"}
    rows = [
        row | {"provider": provider, "row": "8192", "compiled": "1", "checkpointing": kept, "tokens_per_second_a_gpu": speed}
        for provider, kept, speed in (
            ("ours", "full", "9000"), ("ours", "48", "12000"), ("fa2", "", "8000"), ("fa2", "full", "6000"), ("liger", "", "")
        )
    ]  # fmt: skip
    rows[1] |= {
        "kept": "each of 2 layers keeps 8 bytes of 9: 1,073,741,824 of attention, 536,870,912 of 6 of 7 products"
    }
    rows[-1] |= {"error": "torch.OutOfMemoryError: no memory"}
    results("whole_cuda", rows)
    results("trl_cuda", IN_SFT_TRAINER)
    said = made("whole")
    partial = "rows of 8,192, compiled layers, partial checkpointing (checkpoint_policy, budget 48 GiB)"
    assert f"| {partial} | 12.0k | 0.500 | 99.0 |" in said
    assert "torch's FlashAttention-2 | rows of 8,192, compiled layers, no checkpointing | out of memory |" in said
    unlike = next(line for line in said.splitlines() if "no checkpointing | 8.0k" in line)
    assert unlike.split(" | ")[5:] == ["– |"]  # no ratio of equal rows where none are equal
    said = made("checkpointing")
    assert "full checkpointing | its input | 9.0k | 1.00 | 0.500 | 99.0 |" in said
    assert "48 GiB) | 1.00 GiB of attention, 0.50 GiB of 6 of 7 matrix products | 12.0k | 1.33 | 0.500 | 99.0 |" in said
    said = made("headline")
    lines = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| pa")]
    assert [" ".join(line[1:]) for line in lines] == ["3.0x –", "1.50x –", "1.10x 1.50x", "– –", "1.20x –"]
    said = " ".join(said.split())
    assert "compiling the layers gives 1.50x, packing_ops without it 1.50x, both 1.65x." in said
    assert "1.20x in the worst pair of runs; 0.80x without checkpointing." in said
    assert "Little to gain" not in said  # without a loop of 0.6B
    ladder = " ".join(made("ladder").split())
    assert "not compiled | 2.0k | 3.0k | 1.50 | 9 / 9 | | and compiled layers | 3.0k | 3.3k | 1.10 | 9 / 9 |" in ladder
    assert "is no faster than" in ladder


def test_a_worst_pair_of_runs_below_1_is_level(results):
    (liger,) = (row for row in IN_SFT_TRAINER if row["provider"] == "liger" and not row["checkpointing"])
    more = [liger | {"repeat": "3", "tokens_per_second_a_gpu": speed} for speed in ("3500", "3000")]
    results("trl_cuda", [*IN_SFT_TRAINER, *more])
    row = {"provider": "ours", "compiled": "1", "row": "8192", "checkpointing": "", "tokens_per_second_a_gpu": "1"}
    results("whole_cuda", [WHOLE | row | {"peak_gib": "9"}])
    assert "in the worst pair of runs; level without checkpointing." in " ".join(made("headline").split())
    assert "kernels | 1.20 | 1.14 |" in made("short")
    assert "1.20 with checkpointing and 0.80 without." in " ".join(made("short").split())


def test_which_runs_fit_a_smaller_gpu(results):
    row = WHOLE | {"part": "one", "ranks": "1", "row": "8192", "compiled": "1", "tokens_per_second_a_gpu": "9000"}
    results("whole_cuda", [
        row | {"provider": provider, "checkpointing": kept, "peak_gib": gib}
        for provider, kept, gib in (
            ("ours", "", "100"), ("fa2_liger_loss", "", "99"), ("ours", "full", "70"), ("fa2", "full", "90"), ("ours", "auto", "75")
        )
    ])  # fmt: skip
    lines = [line.strip("| ").split(" | ") for line in made("eighty").splitlines() if ", rows of" in line]
    assert [line[:5] for line in lines] == [
        ["all weights, rows of 8,192, full checkpointing", "yes / no", "70", "90", "–"],
        ["all weights, rows of 8,192, no checkpointing", "no / –", "100", "–", "99"],
    ]


def test_rows_at_equal_settings_are_compared(results):
    """Each way is compared with our row of its settings."""
    row = WHOLE | {"compiled": "1", "row": "8192"}
    results("whole_cuda", [
        row | {"provider": provider, "checkpointing": kept, "tokens_per_second_a_gpu": speed, "peak_gib": gib}
        for provider, kept, speed, gib in (
            ("ours", "48", "12000", "95"), ("fa2", "", "8000", "80"), ("ours", "", "10000", "60")
        )
    ])  # fmt: skip
    results("trl_cuda", IN_SFT_TRAINER)
    lines = [line.split(" | ") for line in made("whole").splitlines() if " | rows of 8,192" in line]
    assert [(line[0], line[2], *line[5:]) for line in lines] == [
        ("| packing_ops, fused_loss", "12.0k", "– |"),
        ("| packing_ops, fused_loss", "10.0k", "– |"),
        ("| packed, torch's FlashAttention-2", "8.0k", "1.25 |"),
    ]
    assert "both compile the layers | 1.10x | 1.25x |" in made("headline")


def test_each_way_to_train_has_its_speedup(results):
    """Each beside a run of the same settings."""
    results("trl_cuda", IN_SFT_TRAINER)
    row = WHOLE | {"part": "small", "row": "16384", "compiled": "1", "checkpointing": "", "repeat": ""}
    row |= {"model": "Qwen3-0.6B", "ranks": "1", "wrapper": ""}
    large = {"part": "8b", "row": "8192", "model": "Qwen3-8B", "ranks": "2"}
    results("whole_cuda", [
        row | {"provider": provider, "tokens_per_second_a_gpu": speed, "peak_gib": gib} | more
        for provider, speed, gib, more in (
            ("ours", "50000", "3", {}), ("fa2", "40000", "4", {}),
            ("ours", "22000", "9", large), ("fa2", "20000", "10", large),
            ("ours", "23000", "8", large | {"part": "one", "ranks": "1"}), ("fa2", "20000", "10", large | {"part": "one", "ranks": "1"}),
            ("ours", "24000", "7", large | {"part": "lora", "ranks": "1", "lora": "1"}), ("fa2", "20000", "10", large | {"part": "lora", "ranks": "1", "lora": "1"}),
        )
    ])  # fmt: skip
    said = " ".join(made("headline").split())
    assert "already: 1.10 to 1.25x in SFTTrainer and 1.25x in a loop with 0.6B, 1.10x with 8B" in said
    tables = made("answers").split("\n\n")
    assert [(title.strip("*"), *table.splitlines()[2:]) for title, table in zip(*[iter(tables)] * 2, strict=True)] == [
        ("0.6B, one GPU", "| FlashAttention-2, compiled layers* | **1.25** | 50.0k / 40.0k | 3 / 4 | 0.50 / 0.50 |"),
        (
            "8B, two GPUs, FSDP2; tokens/s and GiB of each",
            "| FlashAttention-2, compiled layers* | **1.10** | 22.0k / 20.0k | 9 / 10 | 0.50 / 0.50 |",
        ),
        (
            "8B, one GPU",
            "| FlashAttention-2, compiled layers* | **1.15** | 23.0k / 20.0k | 8 / 10 | 0.50 / 0.50 |",
            "| LoRA; FlashAttention-2, compiled layers* | **1.20** | 24.0k / 20.0k | 7 / 10 | 0.50 / 0.50 |",
        ),
    ]


def test_repeats_of_a_trainer_are_one_line_with_their_spread(results):
    """Of each setting the median of its repeats; speedups at equal checkpointing, and of our fastest row."""
    assert made("trl") == "Not run yet: `benchmarks/bench_trl.py`."
    row = WHOLE | {"model": "Qwen3-0.6B", "part": "trl", "trl": "1", "transformers": "5"}
    row |= {"tokens": "2000", "steps": "4", "epochs": "3"}
    repeats = [
        row | {
            "case": f"{provider}, {kept}", "provider": provider, "row": "16384", "compiled": "0" if kept else "1",
            "checkpointing": kept, "repeat": str(repeat), "tokens_per_second_a_gpu": str(speed * 1000), "peak_gib": "9",
            "warm_up_s": str(20 / repeat),
        }
        for repeat in (1, 2, 3)
        for provider, kept, speed in (
            ("ours", "full", 28 + repeat), ("fa2", "full", 19 + repeat % 3), ("fa2", "", 40), ("ours", "", 60)
        )
    ]  # fmt: skip
    failed = row | {"case": "liger", "provider": "liger", "repeat": "1", "row": "16384", "error": "ImportError"}
    results("trl_cuda", [*repeats, failed | {"compiled": "0", "checkpointing": ""}])
    said = made("trl")
    full, none = (
        [
            [cell.strip() for cell in line.split("|")[2:-1]]
            for line in part.splitlines()
            if re.match(r"\| \W*packed", line)
        ]
        for part in said.split("**No checkpointing")
    )
    assert full == [
        ["not compiled", "30.0k (29.0k to 31.0k)", "9.0", "–"],
        ["not compiled", "20.0k (19.0k to 21.0k)", "9.0", "1.50 (1.38)"],
    ]
    assert none == [
        ["not compiled", "failed", "–", "–"],
        ["compiled layers", "60.0k (60.0k)", "9.0", "–"],
        ["compiled layers", "40.0k (40.0k)", "9.0", "1.50 (1.50)"],
    ]
    said = " ".join(said.split())
    assert "Each run is 12 steps of packed rows" in said
    assert "those of a line differ by up to 1.11 times." in said
    assert "From TRL's defaults with FlashAttention-2 (20.0k) that leads to 40.0k, and with ours to 60.0k." in said
    repeats[0]["tokens_per_second_a_gpu"] = "20500"
    results("trl_cuda", repeats)
    assert "| 1.50 (0.98) |" in made("trl")  # our slowest run over the fastest of FlashAttention-2


def test_repeats_of_a_loop_are_one_line_with_their_spread(results):
    """The run in the middle stands for a case, also where it is compared; what ran once says so."""
    results("trl_cuda", IN_SFT_TRAINER)
    row = WHOLE | {
        "model": "Qwen3-0.6B", "part": "small", "ranks": "1", "row": "16384", "compiled": "1", "checkpointing": "", "peak_gib": "9"
    }  # fmt: skip
    speeds = {"ours": (90, 110, 100), "fa2": (80, 81), "fa2_liger_loss": (95, 30, 60), "liger": (50,)}
    rows = [
        row | {"case": name, "provider": name, "repeat": str(repeat), "tokens_per_second_a_gpu": str(speed * 1000)}
        for name, each in speeds.items()
        for repeat, speed in enumerate(each, 1)
    ]
    rows[-1]["repeat"] = ""  # of before there were repeats
    failed = row | {"case": "liger_fa4", "provider": "liger_fa4", "repeat": "1", "error": "ImportError", "mfu": ""}
    mixed = row | {"part": "float32", "repeat": "1"}
    mixed = [
        mixed | {"case": f"{name}, float32 weights", "provider": name, "tokens_per_second_a_gpu": speed}
        for name, speed in (("ours", "120"), ("fa2", "100"), ("fa2_liger_loss", "80"))
    ]
    results("whole_cuda", [*rows, failed, *mixed])
    lines = [line.strip("| ").split(" | ") for line in made("whole").splitlines() if line.startswith("| pack")]
    assert [(*line[2:4], line[-1]) for line in lines[:5]] == [
        ("100.0k", "90.0k to 110.0k", "–"),
        ("80.0k", "80.0k to 81.0k", "1.25"),
        ("60.0k", "30.0k to 95.0k", "1.67"),
        ("50.0k", "–", "2.00"),
        ("fails", "–", "–"),
    ]
    said = " ".join(made("whole").split())
    assert "**Qwen3-0.6B, float32 weights, one GPU, sft documents**" in said
    assert "A line ran 3 times (median) or 2 times (median) or once." in said
    answers = [
        line.split(" | ")[:2] for line in made("answers").splitlines() if line.startswith(("| Flash", "| float"))
    ]
    assert answers == [
        ["| FlashAttention-2, compiled layers", "**1.25**"],
        ["| FlashAttention-2 and Liger's loss, compiled layers", "**1.67**"],
        ["| float32 weights, FlashAttention-2, compiled layers*", "**1.20**"],
        ["| float32 weights, FlashAttention-2 and Liger's loss, compiled layers*", "**1.50**"],
    ]
    assert "differ by up to 216.7%." in " ".join(made("answers").split())
    said = " ".join(made("headline").split())
    assert "both compile the layers | 1.10x | 1.25x |" in said
    assert "| the same with float32 weights, TRL's default | as above | as above | 1.20 |" in made("short")
    assert "Liger's loss; both compile the layers | – | 1.67x |" in said
    assert "| the same with float32 weights | – | – | 1.50 |" in made("short")
    assert "| 0.6B | 9 | 9 | 9 |" in said


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


def test_padding_of_batches(monkeypatch):
    monkeypatch.setattr(result_rows, "lengths_of", lambda name: [1, 9] * 8)
    (found,) = result_rows.sft_lengths()
    assert found == {
        "documents": 16, "shortest": 1, "longest": 9, "median": 5, "mean": 5, "padding": 1 - 80 / 144, "padding_sorted": 0,
        "padding_32": 1 - 80 / 144, "padding_sorted_32": 1 - 80 / 144, "slots": pytest.approx(144 / 80),
    }  # fmt: skip


@pytest.mark.parametrize("stem", ["whole_cuda", "parallel_cuda"])
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
