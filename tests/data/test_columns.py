"""Columns of examples next to input_ids: used, or refused by name, in every collator."""

import itertools

import numpy as np
import pytest
import torch
from helpers import ROOT
from hypothesis import given
from hypothesis import strategies as st

from packing_ops.data import PackedCollator, PaddingFreeCollator, PaddingFreeDPOCollator, _examples, select_rows

IDS, MASK = [5, 6, 7, 8, 9, 10], [0, 0, 0, 1, 1, 1]
MASKED = [-100] * 3 + IDS[3:]


def row(*examples, **options):
    return PaddingFreeCollator(**options)([{"input_ids": IDS, **example} for example in examples])


# --- what is trained on ---


@pytest.mark.parametrize("name", _examples.TARGETS)
@pytest.mark.parametrize("form", [list, torch.tensor, np.array, lambda mask: np.array(mask, dtype=np.float32)])
def test_masks_say_what_is_trained_on(name, form):
    assert row({name: form(MASK)}, {name: form([1] * 6)})["labels"].tolist() == [[*MASKED, -100, *IDS[1:]]]


def test_masks_and_labels_both_count():
    given = {"labels": [-100, 6, 7, -100, 9, 10], "completion_mask": MASK, "assistant_masks": [1, 1, 1, 1, 1, 0]}
    assert row(given)["labels"].tolist() == [[-100] * 4 + [9, -100]]


def test_num_actions_are_the_last_tokens():
    assert row({"num_actions": 3})["labels"].tolist() == [MASKED]
    assert row({"num_actions": 3, "loss_mask": [1, 0, 1]})["labels"].tolist() == [[-100] * 3 + [8, -100, 10]]
    with pytest.raises(ValueError, match="loss_mask: expected 3 values like num_actions, got 6 in example 0"):
        row({"num_actions": 3, "loss_mask": MASK})


def test_weights_are_named():
    with pytest.raises(
        ValueError, match=r"loss_mask: expected 0 and 1, since labels have no place for weights, got 0\.5"
    ):
        row({"loss_mask": [0, 0, 0.5, 1, 1, 1]})
    for name in _examples.WEIGHTS:
        for collator in (PaddingFreeCollator(), PackedCollator(8)):
            with pytest.raises(ValueError, match=f"{name}: expected no column that this collator would drop"):
                collator([{"input_ids": IDS, "num_actions": 3, name: 0.5}])


def test_masks_are_cut_with_their_tokens():
    with pytest.warns(UserWarning, match="3 of 12 tokens lost"):
        batch = row({"loss_mask": MASK}, {"loss_mask": MASK}, capacity=9, overlong="truncate")
    assert batch["labels"].tolist() == [[*MASKED, -100, -100, -100]]
    padded = row({"loss_mask": MASK}, document_multiple=4)
    assert padded["labels"].tolist() == [[*MASKED, -100, -100]]


def test_labels_of_the_tokens_themselves_keep_the_first():
    """Masked language models and tags: a document's first token has a label too."""
    tags = [{"labels": [3, 0, 0, 4, 0, 0]}] * 2
    with pytest.raises(ValueError, match=r"labels: expected -100 or the token itself .* got 3; .*separator_id=None"):
        row(*tags)
    assert row(*tags, separator_id=None)["labels"].tolist() == [[3, 0, 0, 4, 0, 0] * 2]
    assert row({}, separator_id=None)["labels"].tolist() == [IDS]


# --- where documents begin ---


def starts_of(lengths):
    """The same documents by every column that can say so."""
    ends = [0, *itertools.accumulate(lengths)]
    positions = [i for length in lengths for i in range(length)]
    return {"seq_lengths": lengths, "cu_seqlens": ends, "position_ids": positions}


@given(examples=st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=4))
def test_documents_within_examples(examples):
    tokens = [list(range(1, sum(lengths) + 1)) for lengths in examples]
    documents = [{"input_ids": [0] * length} for lengths in examples for length in lengths]
    wanted = PaddingFreeCollator()(documents)
    names = list(starts_of([1]))
    for chosen in (names[:1], names[1:2], names[2:], names):
        rows = [
            {"input_ids": ids} | {name: starts_of(own)[name] for name in chosen}
            for ids, own in zip(tokens, examples, strict=True)
        ]
        batch = PaddingFreeCollator()(rows)
        for name in ("cu_seq_lens_q", "position_ids", "seq_idx"):
            assert torch.equal(batch[name], wanted[name])
        assert batch["max_length_q"] == wanted["max_length_q"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seq_lengths": [2, 3]}, r"seq_lengths: expected the lengths of its documents, .* of 6 tokens, got \[2, 3\]"),
        ({"seq_lengths": [6, 0]}, r"seq_lengths: expected"),
        ({"cu_seqlens": [0, 7]}, "cu_seqlens: expected where its documents begin and end"),
        ({"cu_seqlens": [1, 6]}, "cu_seqlens: expected"),
        ({"cu_seqlens": [0, 4, 3, 6]}, "cu_seqlens: expected"),
        ({"position_ids": [3, 4, 5, 6, 7, 8]}, "position_ids: expected positions that count from 0 in each document"),
        ({"position_ids": [0, 1, 2, 2, 3, 4]}, "position_ids: expected"),
        ({"seq_lengths": [2, 4], "position_ids": [0, 1, 2, 0, 1, 2]}, r"position_ids: expected .* \[2, 4\] tokens, got \[3, 3\]"),
        ({"attention_mask": [1, 1, 2, 2, 2, 2]}, "attention_mask: expected no padding"),
    ],
)  # fmt: skip
def test_documents_that_do_not_fit_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        row(given)


def test_a_cut_example_keeps_its_documents():
    with pytest.warns(UserWarning, match="1 cut"):
        batch = row({"seq_lengths": [2, 4]}, {"seq_lengths": [1, 3, 2]}, capacity=9, overlong="truncate")
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 6, 7, 9]
    with pytest.raises(ValueError, match="document_multiple: expected 1 beside examples of several documents, got 4"):
        row({"seq_lengths": [2, 4]}, document_multiple=4)


# --- what goes with the tokens ---


@pytest.mark.parametrize("name", _examples.OF_TOKENS)
def test_types_go_with_their_tokens(name):
    batch = row({name: MASK}, {name: MASK[::-1]}, capacity=14)
    assert batch[name].tolist() == [[*MASK, *MASK[::-1], 0, 0]]
    with pytest.raises(ValueError, match=f"{name}: expected in every example"):
        row({name: MASK}, {})


def test_images_are_joined_in_order():
    pixels = [torch.randn(4, 3), torch.randn(8, 3)]
    examples = [
        {"pixel_values": pixels[0], "image_grid_thw": [[1, 2, 2]], "mm_token_type_ids": MASK},
        {"mm_token_type_ids": [0] * 6},
        {"pixel_values": pixels[1], "image_grid_thw": np.array([[1, 2, 2], [1, 2, 2]]), "mm_token_type_ids": MASK},
    ]
    batch = row(*examples)
    assert torch.equal(batch["pixel_values"], torch.cat(pixels))
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]] * 3
    kept = row(*examples, capacity=12, overlong="carry")
    assert torch.equal(kept["pixel_values"], pixels[0])
    with (
        pytest.raises(ValueError, match="image_grid_thw: expected examples that fit whole"),
        pytest.warns(UserWarning, match="cut"),
    ):
        row(*examples, capacity=16, overlong="truncate")
    with pytest.raises(ValueError, match="pixel_values: expected rows of one shape in all examples"):
        row(examples[0], {**examples[2], "pixel_values": torch.randn(8, 4)})


def test_fields_of_images_are_joined_along_the_axis_that_is_given():
    """Audio features of [mel, frames], and a column that only this model has; another axis for one that is known."""
    sounds = [torch.randn(1, 5, 4), torch.randn(1, 5, 7)]
    examples = [{"sounds": sounds[0], "image_sizes": [[3], [4]]}, {}, {"sounds": sounds[1], "image_sizes": [[5], [6]]}]
    batch = row(*examples, image_fields={"sounds": 2, "image_sizes": 1})
    assert torch.equal(batch["sounds"], torch.cat(sounds, 2))
    assert batch["image_sizes"].tolist() == [[3, 5], [4, 6]]
    with pytest.raises(
        ValueError, match="sounds: expected rows of one shape in all examples, joined along axis 0, got"
    ):
        row(*examples, image_fields={"sounds": 0})
    with pytest.raises(
        ValueError, match=r"sounds: expected no column that this collator would drop, .* or image_fields"
    ):
        row(*examples)
    with pytest.raises(ValueError, match="image_fields: expected columns of images, got 'labels'"):
        PaddingFreeCollator(image_fields={"labels": 0})
    with pytest.raises(TypeError, match="image_fields: expected a dict of names and axes, got"):
        PackedCollator(8, image_fields=["sounds"])
    with pytest.raises(NotImplementedError, match="image_fields: expected none for preference pairs, got"):
        PaddingFreeDPOCollator(image_fields={"sounds": 0})


def test_images_of_a_packed_collator_s_rows():
    grids = [[[1, 2, 2]], None, [[1, 2, 4]], [[1, 4, 2], [1, 2, 2]]]
    examples = [
        {"input_ids": IDS, "num_actions": 6, "mm_token_type_ids": MASK, "image_grid_thw": grid, "sounds": [[i]]}
        for i, grid in enumerate(grids)
    ]
    collator = PackedCollator(12, image_fields={"sounds": 0})
    batch = collator(examples)
    rows = [batch["order"][:2], batch["order"][2:]]
    wanted = [[grid for i in own for grid in grids[i] or ()] for own in rows]
    assert [own.tolist() for own in batch["image_grid_thw"]] == wanted
    assert batch["mm_token_type_ids"].tolist() == [MASK * 2] * 2
    second = select_rows(batch, [1])
    assert collator.model_inputs(second)["image_grid_thw"].tolist() == wanted[1]
    inputs = collator.model_inputs(batch)
    assert inputs["image_grid_thw"].tolist() == sum(wanted, [])  # noqa: RUF017
    assert inputs["sounds"].flatten().tolist() == batch["order"]
    assert torch.equal(inputs["mm_token_type_ids"], batch["mm_token_type_ids"])
    split = PackedCollator(12, cp_size=2)
    with pytest.raises(NotImplementedError, match="image_grid_thw: expected no images under context parallelism"):
        split.context_parallel_split(split([{**example, "sounds": None} for example in examples]), 0)
    text = [
        {name: v for name, v in example.items() if name not in ("image_grid_thw", "sounds")} for example in examples
    ]
    shares = [split.context_parallel_split(split(text), rank)["mm_token_type_ids"] for rank in range(2)]
    assert torch.cat(shares, 1).sum() == 4 * sum(MASK)


# --- axes of positions ---


def test_rope_index_is_asked_for_each_example():
    asked = []

    def rope_index(input_ids, mm_token_type_ids, image_grid_thw=None, attention_mask=None, **_):
        asked.append((input_ids.shape, mm_token_type_ids.tolist(), image_grid_thw))
        return torch.arange(3)[:, None, None] * 100 + torch.arange(input_ids.shape[1]), torch.zeros(1, 1)

    grid = torch.tensor([[1, 2, 2]])
    examples = [{"mm_token_type_ids": MASK, "image_grid_thw": grid}, {"mm_token_type_ids": [0] * 6}]
    batch = row(*examples, rope_index=rope_index, document_multiple=4, capacity=18)
    assert asked == [((1, 6), [MASK], grid), ((1, 6), [[0] * 6], None)]
    text = row(*examples, document_multiple=4, capacity=18)["position_ids"]
    assert batch["position_ids"].shape == (4, 1, 18)
    assert torch.equal(batch["position_ids"][0], text)
    for axis, offset in enumerate((0, 100, 200)):
        own = batch["position_ids"][1 + axis, 0]
        assert own[[*range(6), *range(8, 14)]].tolist() == [*range(offset, offset + 6)] * 2
        assert torch.equal(own[[6, 7, 14, 15, 16, 17]], text[0, [6, 7, 14, 15, 16, 17]])  # without a token: the text's
    with pytest.warns(UserWarning, match="1 cut"):
        cut = row(examples[1], examples[1], rope_index=rope_index, capacity=9, overlong="truncate")
    assert cut["position_ids"][1:, 0, 6:].tolist() == [[0, 1, 2], [100, 101, 102], [200, 201, 202]]


def test_axes_that_do_not_fit_are_named():
    def wrong(input_ids):
        return input_ids

    with pytest.raises(ValueError, match=r"rope_index: expected \[axes, 1, 6\] for example 0, got int64 \[1, 6\]"):
        row({}, rope_index=wrong)
    with pytest.raises(ValueError, match="rope_index: expected one document in each example, got several in example 1"):
        row({"seq_lengths": [6]}, {"seq_lengths": [2, 4]}, rope_index=wrong)
    with pytest.raises(NotImplementedError, match="rope_index: expected none for preference pairs"):
        PaddingFreeDPOCollator(rope_index=wrong)


# --- what is refused, and what is no column of a model ---


@pytest.mark.parametrize("name", ["labels", "completion_mask", "assistant_masks", "seq_lengths"])
def test_packed_collator_drops_nothing(name):
    examples = [{"input_ids": IDS, "num_actions": 3, name: MASK if name != "seq_lengths" else [2, 4]}]
    with pytest.raises(ValueError, match=f"{name}: expected no column that this collator would drop"):
        PackedCollator(8)(examples)
    with pytest.raises(ValueError, match="position_ids: expected one document in each example, got 2 in example 0"):
        PackedCollator(8)([{"input_ids": IDS, "num_actions": 3, "position_ids": [0, 1, 0, 1, 2, 3]}])


def test_unknown_values_of_tokens_are_refused():
    for values in ([0.1] * 6, torch.randn(6), np.arange(6), [[0.5, 1.5]] * 2, torch.zeros(2, 3, 4)):
        for collator in (PaddingFreeCollator(), PackedCollator(8)):
            with pytest.raises(ValueError, match="old_logps: expected no column that this collator would drop"):
                collator([{"input_ids": IDS, "num_actions": 2, "old_logps": values}])


def test_what_says_nothing_of_tokens_is_left_out():
    beside = {"text": "abcdef", "id": 7, "messages": [{"role": "user"}] * 6, "tokens": list("abcdef"), "none": None}
    assert row(beside).keys() == row({}).keys()
    assert PackedCollator(8)([{"input_ids": IDS, "num_actions": 2, **beside}])["order"] == [0]


def test_sides_of_pairs():
    pair = {"chosen_input_ids": IDS, "rejected_input_ids": IDS[:4]}
    masks = {"chosen_loss_mask": MASK, "rejected_loss_mask": MASK[:4]}
    batch = PaddingFreeDPOCollator()([pair | masks])
    assert batch["chosen_labels"].tolist() == [MASKED]
    assert batch["rejected_labels"].tolist() == [[-100] * 3 + [8]]
    both = PaddingFreeDPOCollator(concatenated=True)([pair | masks])
    assert both["labels"].tolist() == [[*MASKED, -100, -100, -100, 8]]
    tree = PaddingFreeDPOCollator(share_prompt=True)([pair | masks])
    assert tree["labels"].tolist() == both["labels"].tolist()
    for more, message in (
        ({"prompt_input_ids": [1, 2]}, "prompt_input_ids: expected no column .* begin with"),
        ({"weight": 2.0}, "weight: expected no column that this collator would drop"),
        ({"chosen_logps": [0.5] * 6}, "chosen_logps: expected no column"),
        ({"pixel_values": torch.zeros(4, 3)}, "pixel_values: expected no column"),
        ({"chosen_pixel_values": torch.zeros(4, 3)}, "chosen_pixel_values: expected no column"),
        ({"chosen_position_ids": [0, 1, 2, 0, 1, 2]}, "position_ids: expected one document on each side of a pair"),
    ):
        with pytest.raises(ValueError, match=message):
            PaddingFreeDPOCollator()([pair | more])
    with pytest.raises(ValueError, match="loss_mask: expected on both sides of a pair, got it on one"):
        PaddingFreeDPOCollator(concatenated=True)([pair | {"chosen_loss_mask": MASK}])


@pytest.mark.parametrize("wrong", [[1.5, 2], ["5"], [5, None]])
def test_the_wrong_column_and_example_are_named(wrong):
    pair = {"chosen_input_ids": IDS, "rejected_input_ids": IDS}
    for options in ({}, {"concatenated": True}, {"share_prompt": True}):
        with pytest.raises(ValueError, match=r"rejected_input_ids: expected a 1-D sequence of integers, .* example 1"):
            PaddingFreeDPOCollator(**options)([pair, pair | {"rejected_input_ids": wrong}])


def test_arrays_of_any_order():
    forms = [
        np.array(IDS, dtype=">u2"),
        np.array(IDS[::-1])[::-1],
        np.repeat(IDS, 2)[::2],
        np.array(IDS, dtype=">i8")[::-1][::-1],
    ]
    for ids in forms:
        assert PaddingFreeCollator()([{"input_ids": ids}])["input_ids"].tolist() == [IDS]
        assert PackedCollator(8)([{"input_ids": ids, "num_actions": 1}])["sequences"].tolist() == [IDS]


def test_the_page_names_every_column():
    page = (ROOT / "docs" / "columns.md").read_text()
    names = ["input_ids", "labels", "attention_mask", "num_actions", *_examples.TARGETS, *_examples.OF_TOKENS]
    names += [*_examples.STARTS, *_examples.OF_IMAGES, *_examples.WEIGHTS, "index", "prompt_input_ids"]
    assert [name for name in names if f"`{name}`" not in page] == []
