"""Numbers as callers have them: NumPy's are taken like Python's, a fraction is named and never cut."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import packing_ops as po
from packing_ops import data
from packing_ops.contrib.unsloth import PackingCollator
from packing_ops.report import make_report

LENGTHS = [3, 0, 2]
FORMS = {
    "array": np.array(LENGTHS),
    "int32 array": np.array(LENGTHS, dtype=np.int32),
    "uint8 array": np.array(LENGTHS, dtype=np.uint8),
    "big-endian array": np.array(LENGTHS, dtype=">i8"),
    "every second of an array": np.array([3, 9, 0, 9, 2, 9])[::2],
    "list of an array's": list(np.array(LENGTHS)),
    "tuple of tensors": tuple(torch.tensor(LENGTHS)),
    "pandas column": pd.Series(LENGTHS, index=[7, 5, 0]),
    "pandas column that may lack some": pd.Series(LENGTHS, dtype="Int64"),
    "pandas index": pd.Index(LENGTHS),
    "pyarrow column": pa.chunked_array([LENGTHS[:1], LENGTHS[1:]]),
    "pyarrow array": pa.array(LENGTHS, pa.uint16()),
    "list of a pyarrow array's": list(pa.array(LENGTHS)),
}
MASK = torch.tensor([[1, 1, 1], [0, 0, 0], [1, 1, 0]])
BATCH = {"ids": torch.arange(3)[:, None], "loss_mask": torch.ones(3, 1)}
TAKES_LENGTHS = {
    "pack_sequences": lambda lengths: po.pack_sequences(lengths, 4).bins,
    "token_budget_microbatches": lambda lengths: data.token_budget_microbatches(lengths, 4, dp_size=2),
    "from_lengths": lambda lengths: po.PackedMetadata.from_lengths(lengths).cu_seqlens.tolist(),
    "mask_boundary_labels": lambda lengths: po.mask_boundary_labels(torch.arange(5), lengths=lengths).tolist(),
    "unpad_input": lambda lengths: po.unpad_input(MASK, MASK, lengths=lengths)[0].tolist(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TAKES_LENGTHS)
def test_lengths_of_numpy(name, form):
    assert TAKES_LENGTHS[name](FORMS[form]) == TAKES_LENGTHS[name](LENGTHS)


WRONG_LENGTHS = {
    "fraction": ([3, 0.0, 2], r"lengths: expected integers, got 0\.0 \(float\)"),
    "array of fractions": (np.array([3.0, 0.0, 2.0]), r"lengths: expected integers, got 3\.0 \(float\)"),
    "tensor of a fraction": ([torch.tensor(1.5), 0, 2], r"lengths: expected integers, got tensor\(1\.5000\)"),
    "two dimensions": (np.array([[3, 0, 2]]), r"lengths(\[0\])?: expected integers, got \[3, 0, 2\] \(list\)"),
    "text": (["3", "0", "2"], "lengths: expected integers, got '3'"),
    "a number": (3, "lengths: expected a sequence of integers, got 3"),
    "pyarrow column with a null": (pa.array([3, None, 2]), r"lengths: expected integers, got None \(NoneType\)"),
    "pandas column with a null": (pd.Series([3, None, 2]), r"lengths: expected integers, got 3\.0 \(float\)"),
    "one number of an array": (np.array(3), "lengths: expected a sequence of integers, got array"),
}


@pytest.mark.parametrize("case", WRONG_LENGTHS)
@pytest.mark.parametrize("name", TAKES_LENGTHS)
def test_lengths_that_are_none_are_named(name, case):
    lengths, message = WRONG_LENGTHS[case]
    if (name, case) == ("pack_sequences", "two dimensions"):  # which are sides
        lengths = lengths[None]
    with pytest.raises(TypeError, match=message):
        TAKES_LENGTHS[name](lengths)


COLUMNS = {
    "pandas": lambda values: pd.Series(values, index=range(9, 9 + len(values))),
    "pyarrow": pa.array,
    "pyarrow chunks": lambda values: pa.chunked_array([values]),
    "pyarrow list": lambda values: pa.array([values])[0],
    "numpy": np.array,
    "numpy, read only": lambda values: np.frombuffer(np.array(values).tobytes(), dtype=np.int64),
}


@pytest.mark.parametrize("form", COLUMNS)
def test_columns_of_examples(form, recwarn):
    as_column = COLUMNS[form]
    rows = [[5, 6, 7], [8]]
    examples = [{"input_ids": as_column(row)} for row in rows]
    padded = [m["input_ids"].tolist() for m in data.iter_microbatches(examples, 2, pad_values={"input_ids": 0})]
    assert padded == [[[5, 6, 7], [8, 0, 0]]]
    packed = data.PaddingFreeCollator()(examples)["input_ids"]
    assert packed.tolist() == data.PaddingFreeCollator()([{"input_ids": row} for row in rows])["input_ids"].tolist()
    assert po.compute_prompt_end_indices(as_column([4, 4, 9])) == [2, 3]
    assert po.compute_prompt_mini_batch_boundaries(as_column([2, 3]), 1) == [(0, 2), (2, 3)]
    assert not [w for w in recwarn if "writ" in str(w.message)]


def pad(value, rows=([1, 2], [1])):
    (micro_batch,) = data.iter_microbatches([{"x": row} for row in rows], 2, pad_values={"x": value})
    return micro_batch["x"]


def packed_row(lengths):
    collator = PackingCollator(lambda examples: {"input_ids": torch.arange(5)[None]})
    return collator([{"input_ids": [0] * 5, "seq_lengths": lengths}])


FRACTIONS = {
    "prompt ends": (lambda: po.compute_prompt_mini_batch_boundaries([1.5, 2, 3], 1), "prompt_end_indices"),
    "prompt ends in a tensor": (
        lambda: po.compute_prompt_mini_batch_boundaries(torch.tensor([1.0, 2.0]), 1),
        "prompt_end_indices",
    ),
    "mini_batch_size": (lambda: po.compute_prompt_mini_batch_boundaries([1, 2, 3], 1.5), "mini_batch_size"),
    "boundaries": (
        lambda: data.normalize_advantages(torch.ones(3, 1), torch.ones(3, 1), [(0, 1.5), (1.5, 3)], "token_mean"),
        "boundaries",
    ),
    "boundaries in a tensor": (lambda: data.stage_chunks(BATCH, torch.tensor([[0.0, 3.0]]), 1), "boundaries"),
    "dp_size of chunks": (lambda: data.stage_chunks(BATCH, [(0, 3)], 1.5), "dp_size"),
    "dp_size of a loss": (
        lambda: data.masked_loss(torch.ones(1, 1), torch.ones(1, 1), num_items_in_batch=1, dp_size=1.5),
        "dp_size",
    ),
    "slice": (lambda: data.slice_batch(BATCH, 0, 1.5), "end"),
    "capacity": (lambda: data.PaddingFreeCollator(capacity=7.5), "capacity"),
    "separator_id": (lambda: data.PaddingFreeCollator(separator_id=-0.5), "separator_id"),
    "separator_id of a call": (
        lambda: data.PaddingFreeCollator()([{"input_ids": [1]}], separator_id=-0.5),
        "separator_id",
    ),
    "total": (lambda: po.PackedMetadata.from_lengths([3], total=4.5), "total"),
    "max_seqlen": (
        lambda: po.PackedMetadata.from_cu_seqlens(torch.tensor([0, 3], dtype=torch.int32), max_seqlen=3.5),
        "max_seqlen",
    ),
    "multiple_of": (lambda: data.trim_padding({"attention_mask": MASK}, multiple_of=1.5), "multiple_of"),
    "min_length": (lambda: data.trim_padding({"attention_mask": MASK}, min_length=1.5), "min_length"),
    "microbatch_size": (lambda: data.iter_microbatches([], 1.5, pad_values={"x": 0}), "microbatch_size"),
    "seq_lengths": (lambda: packed_row([2.5, 3]), "seq_lengths"),
    "report": (lambda: make_report([], batch_size=1.5), "batch_size"),
}


@pytest.mark.parametrize("case", FRACTIONS)
def test_a_fraction_is_named(case):
    call, name = FRACTIONS[case]
    with pytest.raises(TypeError, match=rf"{name}: expected an integer, got -?\d\.\d"):
        call()


def test_pad_values_that_the_dtype_does_not_hold():
    assert pad(-100.0).tolist() == [[1, 2], [1, -100]]
    assert pad(0.5, [torch.ones(2), torch.ones(1)]).tolist() == [[1, 1], [1, 0.5]]
    assert pad(float("-inf"), [torch.ones(2), torch.ones(1)])[1, 1] == float("-inf")
    assert pad(True, [torch.zeros(2, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)])[1, 1]
    int32, uint8, flags = (torch.zeros(2, dtype=dtype) for dtype in (torch.int32, torch.uint8, torch.bool))
    for value, rows, message in [
        (0.5, ([1, 2], [1]), r"pad_values: expected a value of int64 for 'x', got 0\.5"),
        (float("nan"), ([1, 2], [1]), "pad_values: expected a value of int64 for 'x', got nan"),
        (2**40, (int32, int32[:1]), "pad_values: expected a value of int32 for 'x', got 1099511627776"),
        (2**63, ([1, 2], [1]), "pad_values: expected a value of int64 for 'x', got 9223372036854775808"),
        (-1, (uint8, uint8[:1]), "pad_values: expected a value of uint8 for 'x', got -1"),
        (2, (flags, flags[:1]), "pad_values: expected a value of bool for 'x', got 2"),
        (1e300, (torch.ones(2), torch.ones(1)), r"pad_values: expected a value of float32 for 'x', got 1e\+300"),
        (2**53 + 1, ([1, 2], [1]), "pad_values: expected a value of int64 for 'x', got 9007199254740993"),
        (None, ([1, 2], [1]), "pad_values: expected a value of int64 for 'x', got None"),
    ]:
        with pytest.raises(ValueError, match=message):
            pad(value, rows)
