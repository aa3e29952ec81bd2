"""trim_padding and iter_microbatches of packing_ops.padding_batches, which make batches before any op sees them."""

import doctest
import gc
import weakref
from collections import UserList

import numpy as np
import pytest
import torch
from helpers import MASK_DTYPES, assert_same, drawn_mask, mask_of, masks, only_generation_0
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops import padding_batches
from packing_ops.reference import padding as oracle

# --- trim_padding ---


def test_trim_worked_values(device):
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], device=device)
    batch = {"input_ids": torch.tensor([[5, 6, 0, 0], [7, 0, 0, 0]], device=device), "attention_mask": mask}
    trimmed = po.trim_padding(batch)
    assert trimmed["input_ids"].tolist() == [[5, 6], [7, 0]]
    assert trimmed["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert list(trimmed) == list(batch)
    assert po.trim_padding(batch, multiple_of=3)["input_ids"].shape == (2, 3)
    assert po.trim_padding(batch, min_length=3)["input_ids"].shape == (2, 3)
    assert po.trim_padding(batch, multiple_of=16) is batch
    flipped = {name: values.flip(1) for name, values in batch.items()}
    assert po.trim_padding(flipped, side="left")["input_ids"].tolist() == [[6, 5], [0, 7]]
    assert po.trim_padding(flipped) is flipped


@given(
    drawn=masks,
    side=st.sampled_from(["right", "left", "both"]),
    min_length=st.integers(0, 45),
    multiple_of=st.integers(1, 17),
    mask_dtype=st.sampled_from(MASK_DTYPES),
)
def test_trim_equals_reference(device, drawn, side, min_length, multiple_of, mask_dtype):
    mask = drawn_mask(drawn, device)
    batch = {
        "ids": torch.randint(0, 9, mask.shape, device=device),
        "hidden": torch.randn(*mask.shape, 3, device=device),
    }
    settings = {"side": side, "min_length": min_length, "multiple_of": multiple_of}
    trimmed = po.trim_padding(batch, mask.to(mask_dtype), **settings)
    start, end = oracle.kept_columns(mask, **settings)
    if (start, end) == (0, mask.shape[1]):
        assert trimmed is batch
        return
    for name, values in batch.items():
        assert_same(trimmed[name], values[:, start:end])
        assert trimmed[name].untyped_storage().data_ptr() == values.untyped_storage().data_ptr()


def test_trim_again_is_the_same_object(device):
    batch = {"attention_mask": mask_of("both", 4, 30, device)}
    for side in ("right", "left", "both"):
        once = po.trim_padding(batch, side=side, multiple_of=4)
        assert po.trim_padding(once, side=side, multiple_of=4) is once


def test_trim_reads_the_mask_not_the_ids(device):
    """Padding may equal the end-of-sequence token: real end tokens stay, whatever their id."""
    ids = torch.tensor([[5, 2, 2, 2]], device=device)
    mask = torch.tensor([[True, True, False, False]], device=device)
    assert po.trim_padding({"input_ids": ids}, mask)["input_ids"].tolist() == [[5, 2]]


def test_trim_passes_the_rest_on(device):
    mask = torch.tensor([[1, 0]], device=device)
    reward = torch.tensor([0.5], device=device)
    batch = {"attention_mask": mask, "reward": reward, "uid": ["p0"], "step": 3}
    trimmed = po.trim_padding(batch)
    assert trimmed["attention_mask"].shape == (1, 1)
    assert trimmed["reward"] is reward
    assert (trimmed["uid"], trimmed["step"]) == (["p0"], 3)


def test_opcheck_of_the_range(device):
    op = torch.ops.packing_ops.trim_padding_range
    for mask in (mask_of("both", 3, 9, device), mask_of("left", 3, 9, device).T, torch.zeros(2, 0, device=device)):
        for side in ("right", "left", "both"):
            torch.library.opcheck(op, (mask, side, 1, 4))


def test_gradients_flow_through_the_views(device):
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], device=device)

    def trimmed(hidden):
        return po.trim_padding({"hidden": hidden}, mask)["hidden"]

    hidden = torch.randn(2, 4, 3, dtype=torch.float64, device=device, requires_grad=True)
    assert trimmed(hidden)._base is hidden
    assert torch.autograd.gradcheck(trimmed, hidden)


def held_by(columns, mask, **settings):
    """Whether a trimmed batch still holds the memory of an array of that many columns, of which its values are
    views.
    """
    with only_generation_0():
        memory = np.zeros((2, columns), dtype=np.float32)
        x, y, z = torch.from_numpy(memory)[:, : mask.shape[1]], torch.from_numpy(memory)[:, 0], memory[:, :4]
        batch = {"x": x, "y": y, "z": z}
        alive = weakref.ref(memory)
        trimmed = po.trim_padding(batch, mask, **settings)
        assert trimmed["x"].shape == (2, int(mask.sum(1).max()))
        del memory, batch, x, y, z
        gc.collect(0)
        return alive() is not None


@pytest.mark.parametrize(("columns", "tokens"), [(4, [3, 1]), (100, [3, 1]), (100, [4, 1])])
def test_trim_can_release_the_padded_memory(columns, tokens):
    """Where nothing is to trim, too: the batch may hold views of more."""
    mask = torch.arange(4) < torch.tensor(tokens)[:, None]
    assert held_by(columns, mask)
    assert not held_by(columns, mask, own=True)


def test_trim_copies_what_is_a_part_of_more(device):
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], device=device)
    batch = {
        "ids": torch.arange(8, device=device).view(2, 4),
        "heads_first": torch.randn(2, 3, 4, device=device).transpose(1, 2),
        "positions": torch.arange(4, device=device).expand(2, 4),
        "empty": torch.zeros(2, 4, 0, device=device),
        "reward": torch.ones(2, device=device),
        "step": 3,
    }
    views, copies = po.trim_padding(batch, mask), po.trim_padding(batch, mask, own=True)
    assert [*copies] == [*batch]
    for name, value in views.items():
        if not isinstance(value, torch.Tensor) or name in ("empty", "reward"):
            assert copies[name] is batch[name] or copies[name].numel() == 0
            continue
        assert_same(copies[name], value)
        assert copies[name].untyped_storage().nbytes() == value.numel() * value.element_size()


def test_trim_copies_nothing_that_is_alone(device):
    ones = torch.ones(2, 4, device=device)
    whole = {"attention_mask": ones, "array": np.ones((2, 4, 1)), "expanded": ones[0].clone().expand(2, 4)}
    assert po.trim_padding(whole, own=True) is whole
    once = po.trim_padding({"attention_mask": torch.ones(2, 4, device=device).tril()}, own=True, side="both")
    assert po.trim_padding(once, own=True) is once


def test_gradients_flow_through_the_copies(device):
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], device=device)
    hidden = torch.randn(2, 4, 3, dtype=torch.float64, device=device, requires_grad=True)
    trimmed = po.trim_padding({"hidden": hidden}, mask, own=True)["hidden"]
    assert trimmed._base is None
    assert torch.autograd.gradcheck(lambda x: po.trim_padding({"hidden": x}, mask, own=True)["hidden"], hidden)


def test_trim_copies_tensors_of_torch_func(device):
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]], device=device)
    hidden = torch.randn(3, 2, 4, device=device)
    trimmed = torch.vmap(lambda x: po.trim_padding({"hidden": x}, mask, own=True)["hidden"])(hidden)
    assert_same(trimmed, hidden[..., :2].contiguous())


@pytest.mark.parametrize("own", [False, True])
def test_trim_under_compile(device, own):
    """Widths differ from call to call; the range is read on the host, so that the graph breaks there."""

    def step(ids, mask):
        return po.trim_padding({"ids": ids * 2}, mask, side="both", multiple_of=2, own=own)["ids"] + 1

    compiled = torch.compile(step, backend="aot_eager", dynamic=True)
    for kind in ("right", "left", "both"):
        mask = mask_of(kind, 4, 30, device)
        ids = torch.randint(0, 9, mask.shape, device=device)
        assert_same(compiled(ids, mask), step(ids, mask))


# --- iter_microbatches ---


def test_microbatches_worked_values():
    examples = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "reward": 0.5, "uid": "a"},
        {"input_ids": torch.tensor([8]), "labels": [8], "reward": torch.tensor(1.0), "uid": "b"},
        {"input_ids": [9, 4], "labels": [9, 4], "reward": 2.0, "uid": "c"},
    ]
    first, second = po.iter_microbatches(examples, 2, pad_values={"input_ids": 0, "labels": -100})
    assert first["input_ids"].tolist() == [[5, 6, 7], [8, 0, 0]]
    assert first["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]
    assert (first["attention_mask"].dtype, first["attention_mask"].tolist()) == (torch.int64, [[1, 1, 1], [1, 0, 0]])
    assert first["reward"].tolist() == [0.5, 1.0]
    assert first["uid"] == ["a", "b"]
    assert second["input_ids"].tolist() == [[9, 4]]
    assert second["attention_mask"].tolist() == [[1, 1]]


@given(lengths=st.lists(st.integers(0, 9), min_size=0, max_size=11), size=st.integers(1, 4))
def test_microbatches_equal_reference(lengths, size):
    examples = [{"ids": list(range(1, n + 1)), "labels": torch.arange(n).tolist()} for n in lengths]
    pad_values = {"ids": 0, "labels": -100}
    found = list(po.iter_microbatches(examples, size, pad_values=pad_values))
    assert [m["ids"].tolist() for m in found] == [
        m["ids"].tolist() for m in oracle.iter_microbatches(examples, size, pad_values)
    ]
    assert [m["labels"].tolist() for m in found] == [
        m["labels"].tolist() for m in oracle.iter_microbatches(examples, size, pad_values)
    ]
    assert [n for m in found for n in m["attention_mask"].sum(1).tolist()] == lengths
    assert all(po.trim_padding(m) is m for m in found)


def test_microbatches_are_read_as_needed_and_keep_their_own_mask(device):
    def examples():
        for n in (2, 1):
            yield {"attention_mask": torch.full((n,), 1.0, device=device), "hidden": torch.ones(n, 3, device=device)}
        raise RuntimeError("read too far")

    microbatches = po.iter_microbatches(examples(), 2, pad_values={"hidden": 7})
    batch = next(microbatches)
    assert batch["attention_mask"].tolist() == [[1.0, 1.0], [1.0, 0.0]]
    assert batch["hidden"][1].tolist() == [[1.0] * 3, [7.0] * 3]
    with pytest.raises(RuntimeError, match="read too far"):
        next(microbatches)


def test_rows_of_one_are_the_sequences_in_them(device):
    """[1, length], as tokenizers and OpenPipe ART have one example."""
    examples = [
        {
            "input_ids": torch.arange(1, n + 1, device=device)[None],
            "attention_mask": torch.ones(1, n, dtype=torch.int64, device=device),
            "labels": torch.full((1, n), 9, device=device),
        }
        for n in (3, 1, 2)
    ]
    pad_values = {"input_ids": 0, "labels": -100}
    flat = [{name: value[0] for name, value in example.items()} for example in examples]
    for size in (1, 2, 3):
        found = list(po.iter_microbatches(examples, size, pad_values=pad_values))
        for ours, theirs in zip(found, po.iter_microbatches(flat, size, pad_values=pad_values), strict=True):
            assert list(ours) == list(theirs)
            for name in ours:
                assert_same(ours[name], theirs[name])
    assert found[0]["labels"].tolist() == [[9, 9, 9], [9, -100, -100], [9, 9, -100]]
    (batch,) = po.iter_microbatches([{"ids": [[5, 6]]}, {"ids": [[7]]}], 2, pad_values={"ids": 0})
    assert (batch["ids"].tolist(), batch["attention_mask"].tolist()) == ([[5, 6], [7, 0]], [[1, 1], [1, 0]])


def test_a_sequence_beside_them_tells_how_long_values_of_more_dimensions_are():
    examples = [{"ids": [1] * n, "hidden": torch.ones(n, 2), "row": torch.ones(1, n)} for n in (3, 1)]
    (batch,) = po.iter_microbatches(examples[:1], 2, pad_values={"ids": 0, "hidden": 7, "row": 0})
    assert (batch["hidden"].shape, batch["row"].shape) == ((1, 3, 2), (1, 3))
    examples = [{name: e[name] for name in ("ids", "hidden")} for e in examples]
    (batch,) = po.iter_microbatches(examples, 2, pad_values={"ids": 0, "hidden": 7})
    assert batch["hidden"].tolist() == [[[1, 1]] * 3, [[1, 1], [7, 7], [7, 7]]]


def test_examples_of_the_docstrings():
    found = doctest.testmod(padding_batches, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.failed == 0 < found.attempted


def test_no_examples():
    assert list(po.iter_microbatches([], 3, pad_values={"ids": 0})) == []


# --- bad input ---


def microbatches(examples, **pad_values):
    return list(po.iter_microbatches(examples, 2, pad_values=pad_values))


def bad_calls(device):
    mask = torch.tensor([[1, 1, 0], [1, 0, 1]], device=device)
    ids = torch.arange(6, device=device).reshape(2, 3)
    batch = {"ids": ids}
    uneven = [{"a": [1], "b": [1]}, {"a": [1, 2], "b": [1]}]
    fractional = [{"a": [1]}, {"a": [1]}, {"a": []}, {"a": [1]}, {"a": [1]}, {"a": [0.5]}]
    # fmt: off
    return {
        "side": (lambda: po.trim_padding(batch, mask, side="top"), "side: expected .*got 'top'"),
        "min_length": (lambda: po.trim_padding(batch, mask, min_length=-1), "min_length: expected at least 0, got -1"),
        "multiple_of": (lambda: po.trim_padding(batch, mask, multiple_of=0), "multiple_of: expected at least 1, got 0"),
        "no mask": (lambda: po.trim_padding(batch), "attention_mask: expected one"),
        "mask rank": (lambda: po.trim_padding(batch, mask[0]), r"attention_mask: expected \[batch, seqlen\], got"),
        "shape": (lambda: po.trim_padding({"ids": ids, "wide": torch.cat([ids, ids], 1)}, mask), r"wide: expected \[batch, seqlen, ...\] = \[2, 3\] like attention_mask, got int64 \[2, 6\]"),
        "microbatch_size": (lambda: po.iter_microbatches([], 0, pad_values={"a": 0}), "microbatch_size: expected at least 1 example, got 0"),
        "no pad_values": (lambda: po.iter_microbatches([], 1, pad_values={}), "pad_values: expected a value"),
        "names differ": (lambda: microbatches([{"a": [1]}, {"b": [1]}], a=0), r"examples: expected the names \['a'\], got \['b'\] in example 1"),
        "name missing": (lambda: microbatches([{"a": [1]}], a=0, b=0), r"examples: expected \['b'\] .* in example 0"),
        "no pad value": (lambda: microbatches([{"a": [1], "b": [2]}], a=0), "pad_values: expected a value for 'b'"),
        "not a sequence": (lambda: microbatches([{"a": 3}], a=0), "a: expected a sequence .*got 3 in example 0"),
        "two rows": (lambda: microbatches([{"a": [[1, 2]]}, {"a": torch.ones(2, 5)}], a=0), r"a: expected a 1-D sequence or \[1, length\], got float32 \[2, 5\] in example 1"),
        "rows of other lengths": (lambda: microbatches([{"a": [[1, 2]], "b": [[1]]}], a=0, b=0), "b: expected 2 values like the rest of example 0, got 1"),
        "more dimensions": (lambda: microbatches([{"a": [1, 2], "b": torch.ones(3, 2)}], a=0, b=0), "b: expected 2 values like the rest of example 0, got 3"),
        "lengths differ": (lambda: microbatches(uneven, a=0, b=0), "b: expected 2 values like the rest of example 1, got 1"),
        "dtypes differ": (lambda: microbatches(fractional, a=0), r"a: expected int64 \[length\] on cpu as in the others, got float32 \[1\] on cpu in example 5"),
    }
    # fmt: on


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("values", [np.array([1, 2]), UserList([1, 2])])
def test_sequences_of_any_kind_need_a_pad_value(values):
    examples = [{"input_ids": [5, 6], "labels": values}] * 2
    with pytest.raises(
        ValueError, match="pad_values: expected a value for 'labels', a sequence in example 0, got none"
    ):
        next(po.iter_microbatches(examples, 2, pad_values={"input_ids": 0}))


@pytest.mark.parametrize("value", [None, {"a": 1}])
def test_what_is_no_number_is_named(value):
    examples = [{"input_ids": [5], "weight": 1.0}, {"input_ids": [5], "weight": value}]
    with pytest.raises(ValueError, match=r"weight: expected a number or a string, got .* in example 1"):
        next(po.iter_microbatches(examples, 2, pad_values={"input_ids": 0}))
    with pytest.raises(ValueError, match=r"input_ids: expected a sequence of numbers, got .* in example 1"):
        next(po.iter_microbatches([{"input_ids": [5]}, {"input_ids": value}], 2, pad_values={"input_ids": 0}))


def test_strings_beside_numbers_are_named():
    examples = [{"input_ids": [5], "name": "a"}, {"input_ids": [5], "name": 3}]
    with pytest.raises(ValueError, match="name: expected a number or a string as in the others, got 'a' in example 0"):
        next(po.iter_microbatches(examples, 2, pad_values={"input_ids": 0}))


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 3, 2), (1, 1, 1, 1)])
def test_more_dimensions_than_a_row_has_are_named(shape):
    """Nothing else says what their length is."""
    with pytest.raises(ValueError, match=r"input_ids: expected a 1-D sequence or \[1, length\], got"):
        next(po.iter_microbatches([{"input_ids": torch.ones(shape)}], 1, pad_values={"input_ids": 0}))
    beside = {"input_ids": torch.ones(1, 3), "logprobs": torch.ones(1, 3, 2)}
    padded = next(po.iter_microbatches([beside], 1, pad_values={"input_ids": 0, "logprobs": 0}))
    assert padded["logprobs"].shape == (1, 3, 2)


def test_examples_and_pad_values_that_are_no_dicts():
    with pytest.raises(TypeError, match="pad_values: expected a dict of values by name, got"):
        po.iter_microbatches([{"input_ids": [1]}], 1, pad_values=["input_ids"])
    for examples in ([[1, 2]], {"input_ids": [[1]]}):
        with pytest.raises(TypeError, match=r"examples: expected dicts, got .* as example 0"):
            next(po.iter_microbatches(examples, 1, pad_values={"input_ids": 0}))


def test_arrays_are_trimmed_with_the_tensors():
    batch = {"attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]), "labels": np.arange(6).reshape(2, 3)}
    assert po.trim_padding(batch)["labels"].tolist() == [[0, 1], [3, 4]]
    with pytest.raises(ValueError, match=r"labels: expected \[batch, seqlen, ...\] = \[2, 3\]"):
        po.trim_padding(batch | {"labels": np.arange(6).reshape(3, 2)})
