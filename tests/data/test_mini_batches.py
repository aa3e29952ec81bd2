"""Prompt mini-batches: chunks for every rank, and advantages whose masked sum is the reduction."""

import pickle
from itertools import chain, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
import packing_ops.data
from packing_ops.data import normalize_advantages, stage_chunks

UNIFORM = ["p0"] * 2 + ["p1"] * 2 + ["p2"] * 2 + ["p3"] * 2
TURNS = {"p0": [3, 2], "p1": [1, 4], "p2": [2, 1], "p3": [1, 1]}


def uids_of(turns):
    return [prompt for prompt, samples in turns.items() for _ in range(sum(samples))]


def batch_of(rows, seqlen=3, device="cpu"):
    return {
        "input_ids": torch.arange(rows * seqlen, device=device).view(rows, seqlen),
        "loss_mask": torch.ones(rows, seqlen, device=device),
        "uids": [f"row{i}" for i in range(rows)],
    }


# --- which rows share a step ---


def test_uniform_groups_give_the_fixed_slices():
    assert po.compute_prompt_mini_batch_boundaries(UNIFORM, 2, 4, False, 2) == [(0, 4), (4, 8)]


def test_turns_of_the_issue():
    ends = po.compute_prompt_end_indices(uids_of(TURNS))
    assert po.compute_prompt_mini_batch_boundaries(ends, 2) == [(0, 10), (10, 15)]
    assert po.compute_prompt_mini_batch_boundaries(uids_of(TURNS), 2, 4, True, 2) == [(0, 10), (10, 15)]


def test_uid_that_comes_back_is_named():
    with pytest.raises(ValueError, match="'p0' comes back at index 2"):
        po.compute_prompt_boundaries(["p0", "p1", "p0"])


# --- stage_chunks ---


def test_seven_rows_for_two_ranks(device):
    batch = batch_of(7, device=device)
    chunks = stage_chunks(batch, [(0, 3), (3, 7)], 2)
    assert [[chunk["uids"] for chunk in ranks] for ranks in chunks] == [
        [["row0", "row1"], ["row2", "row0"]],
        [["row3", "row4"], ["row5", "row6"]],
    ]
    assert [chunk["loss_mask"].sum(1).tolist() for ranks in chunks for chunk in ranks] == [
        [3, 3],
        [3, 0],
        [3, 3],
        [3, 3],
    ]
    assert torch.equal(chunks[0][1]["input_ids"], batch["input_ids"][[2, 0]])
    assert batch["loss_mask"].sum() == 21, "the batch itself is untouched"


def test_uniform_groups_need_no_padding_and_no_copy():
    batch = batch_of(8)
    boundaries = po.compute_prompt_mini_batch_boundaries(UNIFORM, 2, 4, False, 2)
    chunks = stage_chunks(batch, boundaries, 2)
    rows = [chunk["input_ids"] for ranks in chunks for chunk in ranks]
    assert torch.equal(torch.cat(rows), batch["input_ids"])
    assert [len(row) for row in rows] == [2, 2, 2, 2]
    assert rows[3].untyped_storage().data_ptr() == batch["input_ids"].untyped_storage().data_ptr()


def test_fewer_rows_than_ranks():
    (ranks,) = stage_chunks(batch_of(1), [(0, 1)], 4)
    assert [chunk["uids"] for chunk in ranks] == [["row0"]] * 4
    assert [chunk["loss_mask"].sum().item() for chunk in ranks] == [3, 0, 0, 0]


@st.composite
def rollouts(draw):
    """Turns per sample of every prompt, prompts per mini-batch, ranks."""
    turns = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=6))
    return turns, draw(st.integers(1, 4)), draw(st.integers(1, 4))


@given(rollouts())
def test_every_row_is_staged_once_and_steps_depend_on_prompts_alone(drawn):
    turns, prompts_per_step, dp_size = drawn
    uids = uids_of(dict(enumerate(turns)))
    ends = po.compute_prompt_end_indices(uids)
    boundaries = po.compute_prompt_mini_batch_boundaries(ends, prompts_per_step)
    chunks = stage_chunks(batch_of(len(uids)), boundaries, dp_size)
    assert len(chunks) == -(-len(turns) // prompts_per_step)
    real = []
    for ranks, (start, end) in zip(chunks, boundaries, strict=True):
        assert len(ranks) == dp_size
        assert {len(chunk["input_ids"]) for chunk in ranks} == {-(-(end - start) // dp_size)}
        for chunk in ranks:
            kept = chunk["loss_mask"].any(dim=1).tolist()
            assert [f"row{i}" for i in (chunk["input_ids"][:, 0] // 3).tolist()] == chunk["uids"]
            real += [uid for uid, is_real in zip(chunk["uids"], kept, strict=True) if is_real]
    assert real == [f"row{i}" for i in range(len(uids))]


def test_put_gets_every_chunk_once_with_memory_of_its_own():
    batch = batch_of(512, 64) | {"metadata": {"rewards": torch.zeros(512, 64)}}
    order = []

    def put(chunk):
        order.append(chunk["uids"][0])
        return pickle.dumps(chunk)

    chunks = stage_chunks(batch, [(0, 256), (256, 512)], 2, put=put)
    assert order == ["row0", "row128", "row256", "row384"]
    pickles = [data for ranks in chunks for data in ranks]
    assert sum(map(len, pickles)) < 1.1 * len(pickle.dumps(batch))
    assert torch.equal(torch.cat([pickle.loads(data)["input_ids"] for data in pickles]), batch["input_ids"])


def test_dummy_rows_of_chunks_are_filled():
    batch = {"labels": torch.arange(6).view(3, 2), "experts": torch.tensor([[5, 3]] * 3), "uids": ["a", "b", "c"]}
    fill = {
        "experts": lambda rows: torch.arange(2).expand_as(rows),
        "uids": lambda rows: [f"pad{i}" for i in range(len(rows))],
    }
    (chunks,) = stage_chunks(batch, [(0, 3)], 5, fill=fill)
    assert [chunk["uids"] for chunk in chunks] == [["a"], ["b"], ["c"], ["pad0"], ["pad1"]]
    assert [chunk["experts"].tolist() for chunk in chunks] == [[[5, 3]]] * 3 + [[[0, 1]]] * 2
    assert [chunk["labels"].tolist() for chunk in chunks] == [
        [[0, 1]],
        [[2, 3]],
        [[4, 5]],
        [[-100, -100]],
        [[-100, -100]],
    ]


def test_no_mini_batches_of_an_empty_batch():
    assert stage_chunks(batch_of(0), [], 2) == []


@pytest.mark.parametrize(
    "boundaries", [[], [(0, 3), (4, 7)], [(0, 4), (3, 7)], [(1, 7)], [(0, 3), (3, 3), (3, 7)], [(0, 8)]]
)
def test_boundaries_that_lose_or_repeat_rows(boundaries):
    message = r"boundaries: expected \(start, end\) pairs .* from 0 to at most 7, got \["
    with pytest.raises(ValueError, match=message):
        stage_chunks(batch_of(7), boundaries, 2)
    with pytest.raises(ValueError, match=message):
        normalize_advantages(torch.ones(7, 3), torch.ones(7, 3), boundaries, "token_mean")


def test_no_ranks():
    with pytest.raises(ValueError, match="dp_size: expected at least 1 rank, got 0"):
        stage_chunks(batch_of(7), [(0, 7)], 0)


# --- normalize_advantages ---

ADVANTAGES = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
REDUCTIONS = ["token_mean", "sequence_mean", "seq_mean_token_sum_norm", "prompt_mean"]


@pytest.mark.parametrize(
    ("reduction", "options", "value"),
    [
        ("token_mean", {}, 3.6),
        ("sequence_mean", {}, (1.5 + 5) / 2),
        ("seq_mean_token_sum_norm", {"max_seq_len": 3}, (3 + 15) / 3 / 2),
        ("prompt_mean", {"prompt_boundaries": [(0, 1), (1, 2)]}, (1.5 + 5) / 2),
        ("prompt_mean", {"prompt_boundaries": [(0, 2)]}, 3.6),
    ],
)
@pytest.mark.parametrize("mask_dtype", [torch.float32, torch.int64, torch.bool])
def test_worked_values(reduction, options, value, mask_dtype, device):
    advantages, mask = ADVANTAGES.to(device), MASK.to(device, mask_dtype)
    scaled = normalize_advantages(advantages, mask, [(0, 2)], reduction, **options)
    assert (scaled * mask).sum().item() == pytest.approx(value)
    assert scaled.dtype == torch.float32
    assert scaled[0, 2] == 0
    assert torch.equal(advantages.cpu(), ADVANTAGES)


@pytest.mark.parametrize(
    ("reduction", "value", "counted"),
    [
        # SkyRL's cases, then one more row that is masked altogether, and what it makes of that.
        ("token_mean_legacy", ((2 + 4 + 6) / 3 + (10 + 12 + 14 + 16) / 4) / 2, 17 / 3),
        ("prompt_mean", (4 + 13) / 2, 17 / 3),
        ("sequence_mean", (3 + 6 + 11 + 15) / 4, 35 / 6),
        ("seq_mean_token_sum_norm", (6 + 6 + 22 + 30) / 2 / 4, 32 / 6),
        ("token_mean", 64 / 7, 64 / 7),
    ],
)
def test_rows_without_loss_tokens_count_where_that_is_asked_for(reduction, value, counted, device):
    advantages = torch.tensor(
        [[2.0, 4.0], [6.0, 8.0], [10.0, 12.0], [14.0, 16.0], [1.0, 1.0], [1.0, 1.0]], device=device
    )
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [0, 0], [0, 0]], device=device)
    options = {"micro_batch_size": 2, "max_seq_len": 2}

    def summed(rows, **count):
        prompts = [(start, start + 2) for start in range(0, rows, 2)]
        scaled = normalize_advantages(
            advantages[:rows], mask[:rows], [(0, rows)], reduction, prompt_boundaries=prompts, **options, **count
        )
        return (scaled * mask[:rows]).sum().item()

    assert summed(4) == summed(4, count_masked_rows=True) == pytest.approx(value)
    assert summed(6) == pytest.approx(value)
    assert summed(6, count_masked_rows=True) == pytest.approx(counted)


def test_one_masked_row_of_eight():
    """A sample that is masked altogether makes the mean 0.2237 of what is 0.2556 without it."""
    torch.manual_seed(0)
    advantages, mask = torch.full((8, 6), 0.2556), (torch.rand(8, 6) < 0.7).float()
    mask[3] = 0
    for count, mean in ((False, 0.2556), (True, 0.2237)):
        scaled = normalize_advantages(advantages, mask, [(0, 8)], "sequence_mean", count_masked_rows=count)
        assert (scaled * mask).sum().item() == pytest.approx(mean, abs=5e-5)


def test_every_micro_batch_has_its_own_mean(device):
    """token_mean_legacy is what a mean per micro-batch and gradient accumulation give."""
    advantages, mask = torch.randn(10, 5, device=device), (torch.rand(10, 5, device=device) < 0.5).float()
    mask[:, 0] = 1
    scaled = normalize_advantages(advantages, mask, [(0, 4), (4, 10)], "token_mean_legacy", micro_batch_size=2)
    for start, end in [(0, 4), (4, 10)]:
        means = [(advantages[i : i + 2] * mask[i : i + 2]).sum() / mask[i : i + 2].sum() for i in range(start, end, 2)]
        torch.testing.assert_close((scaled * mask)[start:end].sum(), sum(means) / len(means))


@pytest.mark.parametrize("zscore", [False, True])
@pytest.mark.parametrize("reduction", [*REDUCTIONS, "token_mean_legacy"])
def test_rows_after_the_last_boundary_are_in_no_statistic(reduction, zscore, device):
    """Boundaries of 7 rows, and then the batch was padded; whatever is in those rows, and in their mask."""
    advantages, mask = torch.randn(9, 5, device=device), (torch.rand(9, 5, device=device) < 0.7).float()
    advantages[7], advantages[8] = torch.nan, 1e30
    mask[7:] = 1
    boundaries, prompts = [(0, 3), (3, 7)], [(0, 1), (1, 3), (3, 7)]
    options = {"max_seq_len": 5, "micro_batch_size": 1, "zscore": zscore, "count_masked_rows": True}
    wanted = normalize_advantages(advantages[:7], mask[:7], boundaries, reduction, prompt_boundaries=prompts, **options)
    for more in ([], [(7, 8)], [(7, 9)]):
        got = normalize_advantages(advantages, mask, boundaries, reduction, prompt_boundaries=prompts + more, **options)
        assert torch.equal(got[:7], wanted)
        assert got.shape == (9, 5)
        assert not got[7:].any()
    (first, second) = stage_chunks({"ids": torch.arange(9), "loss_mask": mask}, boundaries, 2)
    assert [chunk["ids"].tolist() for chunk in first + second] == [[0, 1], [2, 0], [3, 4], [5, 6]]


def plain_reduction(advantages, mask, reduction, prompts, max_seq_len):
    """By its definition, row by row in plain Python; mask values are weights."""
    rows = [
        [(a, m) for a, m in zip(*row, strict=True) if m > 0]
        for row in zip(advantages.tolist(), mask.tolist(), strict=True)
    ]

    def token_mean(tokens):
        return sum(a * m for a, m in tokens) / sum(m for _, m in tokens)

    def mean(values):
        return sum(values) / len(values) if values else 0.0

    if reduction == "token_mean":
        tokens = list(chain(*rows))
        return token_mean(tokens) if tokens else 0.0
    if reduction == "sequence_mean":
        return mean([token_mean(row) for row in rows if row])
    if reduction == "seq_mean_token_sum_norm":
        return mean([sum(a * m for a, m in row) / max_seq_len for row in rows if row])
    groups = [list(chain(*rows[start:end])) for start, end in prompts]
    return mean([token_mean(group) for group in groups if group])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@given(drawn=rollouts(), seed=st.integers(0, 99), weights=st.booleans())
def test_masked_sum_of_every_mini_batch_is_the_reduction(reduction, drawn, seed, weights):
    turns, prompts_per_step, _ = drawn
    torch.manual_seed(seed)
    uids = uids_of(dict(enumerate(turns)))
    prompts = po.compute_prompt_boundaries(uids)
    boundaries = po.compute_prompt_mini_batch_boundaries([end for _, end in prompts], prompts_per_step)
    advantages = torch.randn(len(uids), 4, dtype=torch.float64)
    mask = (torch.rand(len(uids), 4) < 0.6).double()
    if weights:
        mask *= torch.rand(len(uids), 4, dtype=torch.float64)
    options = {"prompt_boundaries": prompts, "max_seq_len": 9}
    scaled = normalize_advantages(advantages, mask, boundaries, reduction, **options)
    for start, end in boundaries:
        inside = [(a - start, b - start) for a, b in prompts if start <= a < end]
        wanted = plain_reduction(advantages[start:end], mask[start:end], reduction, inside, 9)
        assert (scaled * mask)[start:end].sum().item() == pytest.approx(wanted, rel=1e-12, abs=1e-12)
        # A policy loss summed over micro-batches of one row is the same number.
        by_row = sum((scaled[i] * mask[i]).sum().item() for i in range(start, end))
        assert by_row == pytest.approx(wanted, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("zscore", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padding_rows_take_no_part(reduction, zscore, device):
    advantages, mask = torch.randn(4, 5), (torch.rand(4, 5) < 0.7).float()
    mask[:, 0] = 1
    options = {"prompt_boundaries": [(0, 1), (1, 3), (3, 4)], "max_seq_len": 5, "zscore": zscore}
    wanted = normalize_advantages(advantages, mask, [(0, 3), (3, 4)], reduction, **options)
    rows = [0, 1, 2, 0, 3, 0]  # each mini-batch padded to 2 rows, then 4
    padded, padded_mask = advantages[rows].clone(), mask[rows].clone()
    padded_mask[[3, 5]] = 0
    padded[3], padded[5] = torch.nan, torch.inf
    options["prompt_boundaries"] = [(0, 1), (1, 3), (3, 4), (4, 5), (5, 6)]
    got = normalize_advantages(padded.to(device), padded_mask.to(device), [(0, 4), (4, 6)], reduction, **options).cpu()
    torch.testing.assert_close(got[[0, 1, 2, 4]], wanted)
    assert not got[[3, 5]].any()


def test_staged_chunks_sum_to_the_reduction():
    batch = batch_of(7) | {"advantages": torch.randn(7, 3)}
    boundaries = [(0, 3), (3, 7)]
    batch["advantages"] = normalize_advantages(batch["advantages"], batch["loss_mask"], boundaries, "sequence_mean")
    for ranks, (start, end) in zip(stage_chunks(batch, boundaries, 2), boundaries, strict=True):
        summed = sum((chunk["advantages"] * chunk["loss_mask"]).sum() for chunk in ranks)
        torch.testing.assert_close(summed, batch["advantages"][start:end].sum())


def test_zscore_over_all_mini_batches(device):
    torch.manual_seed(0)
    advantages, mask = 5 + 3 * torch.randn(6, 50, device=device), (torch.rand(6, 50, device=device) < 0.5).float()
    scaled = normalize_advantages(advantages, mask, [(0, 2), (2, 6)], "token_mean", zscore=True)
    tokens = [mask[:2].sum(), mask[2:].sum()]
    scores = torch.cat([scaled[:2] * tokens[0], scaled[2:] * tokens[1]])[mask > 0]
    kept = advantages[mask > 0].double()
    torch.testing.assert_close(scores.double(), (kept - kept.mean()) / kept.std(unbiased=False), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mask_value", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zscore_of_equal_advantages_is_0(mask_value, dtype):
    """Also where the mean is off by a rounding."""
    advantages, mask = torch.full((40, 33), 0.7, dtype=dtype), torch.full((40, 33), mask_value)
    assert not normalize_advantages(advantages, mask, [(0, 40)], "token_mean", zscore=True).any()


@pytest.mark.parametrize("zscore", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nothing_to_learn_from(reduction, zscore):
    options = {"prompt_boundaries": [(0, 2)], "max_seq_len": 3, "zscore": zscore}
    assert not normalize_advantages(ADVANTAGES, torch.zeros(2, 3), [(0, 2)], reduction, **options).any()
    options["prompt_boundaries"] = []
    assert normalize_advantages(torch.ones(0, 3), torch.ones(0, 3), [], reduction, **options).shape == (0, 3)


def test_boundaries_as_tensors(device):
    uids = torch.tensor([4, 4, 9], device=device)
    prompts = po.compute_prompt_boundaries(uids)
    advantages, mask = torch.randn(3, 4, device=device), torch.ones(3, 4, device=device)
    got = normalize_advantages(advantages, mask, torch.tensor([[0, 3]]), "prompt_mean", prompt_boundaries=prompts)
    torch.testing.assert_close(got.sum(), (advantages[:2].mean() + advantages[2].mean()) / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_rounded_once(dtype):
    """And counted in more: a bfloat16 sum of ones stops at 256."""
    advantages, mask = torch.randn(8, 300).to(dtype), torch.ones(8, 300, dtype=dtype)
    scaled = normalize_advantages(advantages, mask, [(0, 8)], "token_mean")
    assert scaled.dtype == dtype
    exact = advantages.double() / 2400
    error = (scaled.double() - exact).abs() / exact.abs().clamp(min=torch.finfo(dtype).tiny)
    assert error.max() <= 1.001 * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize(("rows", "seqlen"), [(3, 70_000), (200, 700), (4, 0)])
def test_weights_are_added_in_float64(rows, seqlen, device):
    """Whatever part of the rows is added at a time."""
    mask = torch.ones(rows, seqlen, device=device)
    mask[:, :1] = 2**25  # a float32 next to which a 1 is lost
    ends = [0, rows // 2, rows]
    scaled = normalize_advantages(torch.ones_like(mask), mask, list(pairwise(ends)), "token_mean")
    for start, end in pairwise(ends):
        wanted = mask[start:end].double().sum().reciprocal().float()
        assert (scaled[start:end] == wanted).all()


def test_infinite_weight_leaves_nothing_to_the_others(device):
    mask = torch.tensor([[1.0, torch.inf, -1.0], [1.0, 1.0, 0.0]], device=device)
    scaled = normalize_advantages(torch.ones_like(mask), mask, [(0, 1), (1, 2)], "token_mean")
    assert scaled.tolist() == [[0, 0, 0], [0.5, 0.5, 0]]


def test_what_the_mask_leaves_out_may_be_anything(device):
    advantages = torch.tensor([[1.0, torch.nan, torch.inf, 3.0]], device=device)
    for dtype in (torch.bool, torch.int32, torch.float64):
        mask = torch.tensor([[1, 0, 0, 1]], device=device, dtype=dtype)
        assert normalize_advantages(advantages, mask, [(0, 1)], "token_mean").tolist() == [[0.5, 0, 0, 1.5]]
    mask = torch.tensor([[1.0, torch.nan, -1.0, 1.0]], device=device)
    assert normalize_advantages(advantages, mask, [(0, 1)], "token_mean").tolist() == [[0.5, 0, 0, 1.5]]


def test_only_mask_values_over_0_count():
    mask = torch.tensor([[1.0, 1.0, -5.0], [1.0, 1.0, torch.nan]])
    for zscore in (False, True):
        got = normalize_advantages(ADVANTAGES, mask, [(0, 2)], "token_mean", zscore=zscore)
        wanted = normalize_advantages(ADVANTAGES, (mask > 0).float(), [(0, 2)], "token_mean", zscore=zscore)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"reduction": "mean"}, "reduction: expected one of token_mean, .*, got 'mean'"),
        (
            {"reduction": "prompt_mean"},
            "prompt_boundaries: expected the rows of each prompt for 'prompt_mean', got None",
        ),
        (
            {"reduction": "prompt_mean", "prompt_boundaries": [(0, 1), (1, 3)], "boundaries": [(0, 2), (2, 3)]},
            "boundaries: expected whole prompts, got a mini-batch that ends inside one, at row 2",
        ),
        (
            {"reduction": "prompt_mean", "prompt_boundaries": [(0, 2)]},
            r"prompt_boundaries: expected .* from 0 to at least 3, the end of boundaries, got \[\(0, 2\)\]",
        ),
        ({"reduction": "seq_mean_token_sum_norm"}, "max_seq_len: expected at least 1 token .*, got None"),
        (
            {"reduction": "seq_mean_token_sum_norm", "max_seq_len": 0},
            "max_seq_len: expected at least 1 token .*, got 0",
        ),
        (
            {"reduction": "token_mean_legacy"},
            "micro_batch_size: expected at least 1 row for 'token_mean_legacy', got None",
        ),
        (
            {"reduction": "token_mean_legacy", "micro_batch_size": 2},
            "micro_batch_size: expected to divide the rows of every mini-batch, got 2 for the 3 rows 0 to 3",
        ),
        ({"loss_mask": torch.ones(3, 1)}, r"loss_mask: expected \[3, 2\] on cpu like advantages, got \[3, 1\]"),
        ({"advantages": torch.ones(3)}, r"advantages: expected floating \[rows, seqlen\], got float32 \[3\]"),
        ({"advantages": torch.ones(3, 2).long()}, r"advantages: expected floating .*, got int64 \[3, 2\]"),
    ],
)
def test_errors(changed, message):
    arguments = {
        "advantages": torch.ones(3, 2),
        "loss_mask": torch.ones(3, 2),
        "boundaries": [(0, 3)],
        "reduction": "token_mean",
    }
    with pytest.raises(ValueError, match=message):
        normalize_advantages(**arguments | changed)
