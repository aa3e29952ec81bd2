"""Speedups of whole models: the tables of README, docs/performance.md and docs/performance-models.md, made of rows."""

import re

import pytest

pytest.importorskip("tomllib")  # of Python 3.11

from render import made

# What the rows of a model in whole_cuda.csv share.
WHOLE = {
    "case": "", "part": "8b", "model": "Qwen3-8B", "wrapper": "FSDP2", "ranks": "2", "lora": "0", "documents": "sft",
    "loss": "12.1", "error": "", "mfu": "0.5", "kept": "", "dynamic": "0", "vocabulary": "", "tokens": "9",
}  # fmt: skip
IN_SFT_TRAINER = [
    WHOLE | {
        "case": f"{provider}, batches of {batch}, {compiled}, {checkpointing}", "provider": provider, "compiled": compiled,
        "row": "16384", "checkpointing": checkpointing, "repeat": "2", "steps": "5", "epochs": "3", "dynamic": "0",
        "part": "trl", "vocabulary": "", "tokens_per_second_a_gpu": speed, "peak_gib": "9",
    }
    for provider, compiled, checkpointing, speed, batch in (
        ("padded", "0", "full", "1000", 8), ("sorted", "0", "full", "1200", 8),
        ("padded", "0", "full", "750", 32), ("sorted", "0", "full", "1500", 32), ("sdpa", "0", "full", "1100", 1),
        ("ours", "0", "full", "3000", 1), ("fa2", "0", "full", "2000", 1), ("liger", "0", "full", "2500", 1),
        ("ours", "1", "full", "3300", 1), ("fa2", "1", "full", "3000", 1),
        ("ours", "0", "", "4000", 1), ("fa2", "0", "", "2500", 1), ("liger", "0", "", "5000", 1),
        ("ours", "1", "", "5000", 1), ("fa2", "1", "", "4000", 1),
    )
]  # fmt: skip
IN_DDP = [
    row | {"wrapper": "DDP", "tokens_per_second_a_gpu": "2400" if row["provider"] == "ours" else "3000"}
    for row in IN_SFT_TRAINER
    if row["compiled"] == "1" and row["checkpointing"]
]
PADDED = [
    WHOLE | {
        "case": f"{part}: {provider}, batches of 8, {compiled}", "part": part, "provider": provider, "documents": "rows", "repeat": "1",
        "tokens_per_second_a_gpu": speed, "slots": "2", "tokens": "1", "compiled": compiled, "checkpointing": "full",
        "peak_gib": "9", "row": "0",
    }
    for part in ("DPO", "GRPO")
    for provider, compiled, speed in (
        ("ours", "0", "3000"), ("padded", "0", "1500"), ("liger", "0", "2000"), ("ours", "1", "3300"), ("padded", "1", "2750"),
        ("sorted", "1", "6600"),
    )
]  # fmt: skip
OURS_ALONE = WHOLE | {"provider": "ours", "compiled": "1", "row": "8192", "checkpointing": "", "tokens_per_second_a_gpu": "1", "peak_gib": "9"}  # fmt: skip


def test_whole_models_are_told_by_model(results):
    """The fastest row of each way in the first screen; what failed and what lost stays in the table."""
    for name in ("whole", "checkpointing", "memory"):
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
    assert (
        "Liger's kernels with FlashAttention-2 | rows of 8,192, compiled layers, no checkpointing | out of memory |"
        in said
    )
    unlike = next(line for line in said.splitlines() if "no checkpointing | 8.0k" in line)
    assert unlike.split(" | ")[5:] == ["– |"]  # no speedup where no run of ours has these settings
    said = made("checkpointing")
    assert "full checkpointing | its input | 9.0k | 1.00 | 0.500 | 99.0 |" in said
    assert "48 GiB) | 1.00 GiB of attention, 0.50 GiB of 6 of 7 matrix products | 12.0k | 1.33 | 0.500 | 99.0 |" in said


def test_what_to_do_by_what_one_has(results):
    """README has a line for each trainer; a cell without rows is a dash, and what is missing says how to run it."""
    results("whole_cuda", [OURS_ALONE])
    results("trl_cuda", IN_SFT_TRAINER)
    assert made("headline") == "Not run yet: `benchmarks/bench_trl.py`."
    results("trl_ranks_cuda", IN_DDP)
    assert made("headline") == "Not run yet: `benchmarks/bench_trl_padded.py`."
    results("trl_padded_cuda", PADDED)
    lines = [line.strip("| ").split(" | ") for line in made("headline").splitlines() if re.match(r"\| (SFT|TRL)", line)]
    assert lines == [
        ["SFTTrainer, 0.6B", "3.30x\\*", "1.65x\\*", "1.10x\\*: FlashAttention-2, compiled"],
        [
            "SFTTrainer, 0.6B, two GPUs (DDP), ours not compiled",
            "–",
            "–",
            "0.80x (slower)\\*: FlashAttention-2, compiled",
        ],
        [
            "TRL's GRPO, 0.6B, without generation",
            "2.20x\\* (not compiled: 2.00x\\*)",
            "–",
            "0.50x (slower)\\*: pairs sorted by length, compiled",
        ],
        [
            "TRL's DPO, 0.6B",
            "2.20x\\* (not compiled: 2.00x\\*)",
            "–",
            "0.50x (slower)\\*: pairs sorted by length, compiled",
        ],
    ]
    said = " ".join(made("headline").split())
    assert "Over sorted batches of 32 it is 2.20x, over `packing=True` alone (SDPA) 3.00x." in said
    assert "**Memory**" not in said  # without a loop
    said = " ".join(made("fastest").split())
    assert "| packed, FlashAttention-2, compiled | 1.10\\* | 1.25\\* |" in said
    assert "| packed, FlashAttention-2, compiled | 0.80 (slower)\\* |" in said
    said = " ".join(made("what_to_do").split())
    assert "| padded batches of 8 | pack, and compile with either | 3.00x | 3.30x | 3.00x |" in said
    assert "| packed, FlashAttention-2 | compile with either | 1.50x | 1.65x | 1.50x |" in said
    assert "| the same, compiled | leave packing_ops out | 0.80x (slower) | 0.80x (slower) | yours now |" in said
    said = " ".join(made("what_to_do_in_rl").split())
    calls = "[two calls](trl.md), and compile"
    ways = "2.00x\\* | 2.20x\\* | 4.40x\\*: sort and compile |"
    assert f"| GRPO, 8B, padded | {calls} | {ways}" in said
    assert f"without us | {ways}" in said
    assert "Liger's | 1.50x\\* | 1.65x\\* | 3.30x\\*: without Liger's, sort and compile |" in said
    assert "compiled | nothing | 0.45x (slower)\\* | 0.50x (slower)\\* | yours now |" in said
    said = " ".join(made("verdict").split())
    assert "in DDP compile, without packing_ops: 0.80x (slower)\\*." in said
    assert "**TRL's GRPO**" not in said  # without LoRA
    lines = [line.strip("| ").split(" | ") for line in made("not_faster").splitlines()[2:]]
    assert [line[2:4] for line in lines] == [["0.80\\*", "0.80"]] * 2


def test_where_ours_is_faster_in_every_case_none_is_slower(results):
    faster = [row for row in IN_SFT_TRAINER if row["provider"] != "liger"]
    results("trl_cuda", faster)
    results("trl_ranks_cuda", [row for row in IN_DDP if row["provider"] == "ours"])
    results("whole_cuda", [OURS_ALONE])
    assert made("not_faster") == "None of the cases."
    assert "leave packing_ops out" not in made("what_to_do")
    assert "slower" not in made("headline")


@pytest.mark.parametrize(("fastest", "sign"), [("3280", " (level)"), ("3200", "")])
def test_less_than_2_percent_in_the_worst_pair_of_runs_is_level(fastest, sign, results):
    """Ours has 3300 tokens/s, FlashAttention-2 3000 in two runs, and one that is faster."""
    (fa2,) = (row for row in IN_SFT_TRAINER if (row["provider"], row["tokens_per_second_a_gpu"]) == ("fa2", "3000"))
    more = [
        fa2 | {"repeat": repeat, "tokens_per_second_a_gpu": speed} for repeat, speed in (("3", fastest), ("4", "3000"))
    ]
    results("trl_cuda", [*IN_SFT_TRAINER, *more])
    results("trl_ranks_cuda", IN_DDP)
    results("trl_padded_cuda", PADDED)
    results("whole_cuda", [OURS_ALONE])
    assert f"| packed, FlashAttention-2, compiled | 1.10{sign}\\* |" in made("fastest")
    said = " ".join(made("headline").split())
    assert (f"| 1.10\\* | {3300 / int(fastest):.2f} |" in made("not_faster")) == bool(sign)
    assert f"1.10x{sign}\\*: FlashAttention-2, compiled |" in said


def test_which_runs_fit_a_smaller_gpu(results):
    row = WHOLE | {"part": "one", "ranks": "1", "row": "8192", "compiled": "1", "tokens_per_second_a_gpu": "9000"}
    results("whole_cuda", [
        row | {"provider": provider, "checkpointing": kept, "peak_gib": gib}
        for provider, kept, gib in (
            ("ours", "", "100"), ("fa2_liger_loss", "", "99"), ("ours", "full", "70"), ("fa2", "full", "90"), ("ours", "auto", "75")
        )
    ])  # fmt: skip
    lines = [line.strip("| ").split(" | ") for line in made("eighty").splitlines() if ", rows of" in line]
    assert lines == [
        ["all weights, rows of 8,192, full checkpointing", "yes", "no", "70", "90", "–"],
        ["all weights, rows of 8,192, no checkpointing", "no", "–", "100", "–", "99"],
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
    lines = [line.split(" | ") for line in made("whole").splitlines() if " | rows of 8,192" in line]
    assert [(line[0], line[2], *line[5:]) for line in lines] == [
        ("| **packed rows, packing_ops**", "12.0k", "– |"),
        ("| **packed rows, packing_ops**", "10.0k", "– |"),
        ("| packed rows, FlashAttention-2", "8.0k", "1.25 |"),
    ]


def test_each_way_to_train_has_its_speedup(results):
    """Of its fastest run, compiled or not, and of our fastest."""
    results("trl_cuda", IN_SFT_TRAINER)
    results("trl_ranks_cuda", IN_DDP)
    row = WHOLE | {"part": "small", "row": "16384", "compiled": "1", "checkpointing": "", "repeat": ""}
    row |= {"model": "Qwen3-0.6B", "ranks": "1", "wrapper": ""}
    large, plain = {"part": "8b", "row": "8192", "model": "Qwen3-8B", "ranks": "2"}, {"compiled": "0"}
    results("whole_cuda", [
        row | {"provider": provider, "tokens_per_second_a_gpu": speed, "peak_gib": gib, "case": f"{provider}, {more}"} | more
        for provider, speed, gib, more in (
            ("ours", "50000", "3", {}), ("fa2", "40000", "4", {}),
            ("ours", "30000", "3", plain), ("liger", "25000", "5", plain), ("liger", "20000", "4", {}),
            ("ours", "22000", "9", large), ("fa2", "20000", "10", large),
        )
    ])  # fmt: skip
    one, two, _ = made("fastest").split("\n\n")
    assert one.splitlines()[-2:] == [
        "| packed, FlashAttention-2, compiled | 1.10\\* | 1.25\\* | 1.25\\* |",
        "| packed, Liger's kernels with FlashAttention-2 | 1.32\\* | 1.00 (level)\\* | 2.00\\* |",
    ]
    assert two.splitlines()[2:] == ["| packed, FlashAttention-2, compiled | 0.80 (slower)\\* | 1.10\\* |"]
    one, two = made("absolute").split("\n\n")
    assert one.splitlines()[-5:] == [
        "| packed, FlashAttention-2, compiled | 3.0k, 9 GiB | 4.0k, 9 GiB | 40.0k, 4 GiB |",
        "| packed, Liger's kernels with FlashAttention-2 | 2.5k, 9 GiB | 5.0k, 9 GiB | 25.0k, 5 GiB |",
        "| packed, Liger's kernels with FlashAttention-2, compiled | – | – | 20.0k, 4 GiB |",
        "| **packed, packing_ops** | 3.0k, 9 GiB | 4.0k, 9 GiB | 30.0k, 3 GiB |",
        "| **packed, packing_ops**, compiled | 3.3k, 9 GiB | 5.0k, 9 GiB | 50.0k, 3 GiB |",
    ]  # fmt: skip
    assert two.splitlines()[2:] == [
        "| packed, FlashAttention-2, compiled | 3.0k, 9 GiB | 20.0k, 10 GiB |",
        "| **packed, packing_ops**, compiled | 2.4k, 9 GiB | 22.0k, 9 GiB |",
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
        ["not compiled", "3 times", "3 x 4", "30.0k", "29.0k to 31.0k", "9.0", "–", "–", "abcdef0"],
        ["not compiled", "3 times", "3 x 4", "20.0k", "19.0k to 21.0k", "9.0", "1.50", "1.38", "abcdef0"],
    ]
    assert none == [
        ["not compiled", "once", "3 x 4", "fails", "–", "–", "–", "–", "abcdef0"],
        ["compiled layers", "3 times", "3 x 4", "60.0k", "60.0k", "9.0", "–", "–", "abcdef0"],
        ["compiled layers", "3 times", "3 x 4", "40.0k", "40.0k", "9.0", "1.50", "1.50", "abcdef0"],
    ]
    said = " ".join(said.split())
    assert "Runs of a setting differ by up to 11%." in said
    assert "**Liger's kernels**" not in said  # none with compiled layers
    repeats[0]["tokens_per_second_a_gpu"] = "20500"
    results("trl_cuda", repeats)
    assert "| 0.98 | abcdef0 |" in made("trl")  # our slowest run over the fastest of FlashAttention-2


def test_repeats_of_a_loop_are_one_line_with_their_spread(results):
    """The run in the middle stands for a case, also where it is compared; what ran once says so."""
    results("trl_cuda", IN_SFT_TRAINER)
    results("trl_ranks_cuda", IN_DDP)
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
    lines = [line.strip("| ").split(" | ") for line in made("whole").splitlines() if "packed rows" in line]
    assert [(*line[2:4], line[-1]) for line in lines[:5]] == [
        ("100.0k", "90.0k to 110.0k", "–"),
        ("80.5k", "80.0k to 81.0k", "1.24"),
        ("60.0k", "30.0k to 95.0k", "1.67"),
        ("50.0k", "–", "2.00"),
        ("fails", "–", "–"),
    ]
    said = " ".join(made("whole").split())
    assert "**Qwen3-0.6B, float32 weights, one GPU, sft documents**" in said
    assert "Each setting ran 3 times or 2 times or once; medians are shown." in said
    table, *_ = made("fastest").split("\n\n")
    assert [line.strip("| ").split(" | ")[-2:] for line in table.splitlines() if ", compiled |" in line] == [
        ["1.20\\*", "1.24"],
        ["1.50\\*", "1.67 (level)"],
        ["–", "2.00\\*"],
    ]
    assert "**Memory**" not in made("headline")  # without 8B
