"""validate_batch_sizes: sizes that fit need no dummy rows, and one that does not is named."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from packing_ops import compute_prompt_mini_batch_boundaries
from packing_ops.data import stage_chunks, validate_batch_sizes


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_sizes_that_fit_need_no_dummy_row(mini_batches, ranks, micro_batches, micro_batch_size):
    rows = ranks * micro_batches * micro_batch_size
    sizes = {"dp_size": ranks, "micro_batch_size": micro_batch_size}
    assert validate_batch_sizes(mini_batches * rows, rows, **sizes) == mini_batches
    boundaries = [(i * rows, (i + 1) * rows) for i in range(mini_batches)]
    chunks = stage_chunks({"input_ids": torch.zeros(mini_batches * rows, 1)}, boundaries, ranks)
    assert [[len(chunk["input_ids"]) for chunk in each] for each in chunks] == [[rows // ranks] * ranks] * mini_batches


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ({"train_batch_size": 100}, "train_batch_size: expected a multiple of mini_batch_size=16, got 100"),
        ({"mini_batch_size": 0}, "mini_batch_size: expected at least 1 prompt, got 0"),
        ({"n_samples_per_prompt": 0}, "n_samples_per_prompt: expected at least 1"),
        ({"dp_size": 3}, "mini_batch_size: expected rows that dp_size=3 divides, got 16 prompts of 2 rows, 32 in all"),
        ({"dp_size": 0}, "dp_size: expected at least 1"),
        ({"micro_batch_size": 3}, "micro_batch_size: expected a divisor of a rank's 8 rows, got 3"),
        ({"micro_batch_size": 16}, "micro_batch_size: expected a divisor of a rank's 8 rows, got 16"),
        ({"reduction": "mean"}, "reduction: expected one of token_mean"),
        ({"reduction": "token_mean_legacy", "is_stepwise": True}, "reduction: with is_stepwise expected one that"),
    ],
)
def test_a_size_that_does_not_fit_is_named(sizes, named):
    fit = {
        "train_batch_size": 128,
        "mini_batch_size": 16,
        "n_samples_per_prompt": 2,
        "dp_size": 4,
        "micro_batch_size": 2,
    }
    assert validate_batch_sizes(**fit, reduction="token_mean_legacy") == 8
    with pytest.raises(ValueError, match=re.escape(named)):
        validate_batch_sizes(**{**fit, **sizes})


def test_steps_of_any_number_need_no_rows_that_divide():
    assert validate_batch_sizes(12, 4, dp_size=7, micro_batch_size=5, is_stepwise=True) == 3


@pytest.mark.parametrize("size", ["2", 2.0])
def test_a_number_of_prompts_that_is_no_integer_is_named(size):
    with pytest.raises(TypeError, match=r"train_batch_size: expected an integer, got "):
        compute_prompt_mini_batch_boundaries(["a", "b"], 1, size, True)
