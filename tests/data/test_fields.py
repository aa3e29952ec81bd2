"""Fields next to the tokens: experts, allowed ids and log-probs of each token, advantages and weights of each
document.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.data import PackedCollator, PackedStream, PaddingFreeCollator, PaddingFreeDPOCollator, select_rows
from packing_ops.parallel.sharding import shard_of

LAYERS, K, VOCAB = 3, 2, 50
FIELDS = {"token_fields": ("routed_experts", "old_logps", "turn"), "document_fields": ("advantage", "weight")}


def example_of(number, length, as_lists=False):
    draw = torch.Generator().manual_seed(number)
    made = {
        "input_ids": torch.randint(0, VOCAB, (length,), generator=draw),
        "routed_experts": torch.randint(0, 128, (length, LAYERS, K), generator=draw),
        "old_logps": -torch.rand(length, generator=draw),
        "turn": torch.randint(1, 5, (length,), generator=draw),
        "advantage": number - 1.5,
        "weight": number + 1,
        "num_actions": 1,
    }
    return {name: v.tolist() if as_lists and isinstance(v, torch.Tensor) else v for name, v in made.items()}


LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8)


@given(
    lengths=LENGTHS, as_lists=st.booleans(), document_multiple=st.sampled_from([1, 4]), row=st.sampled_from([None, 120])
)
def test_values_follow_their_tokens(lengths, as_lists, document_multiple, row):
    examples = [example_of(i, length, as_lists) for i, length in enumerate(lengths)]
    options = {"document_multiple": document_multiple, "capacity": row}
    batch = PaddingFreeCollator(**FIELDS, **options)(examples)
    edges = batch["cu_seq_lens_q"].tolist()
    is_token = torch.zeros(batch["input_ids"].shape[1], dtype=torch.bool)
    for i, length in enumerate(lengths):
        own = slice(edges[i], edges[i] + length)
        is_token[own] = True
        for name in ("input_ids", *FIELDS["token_fields"]):
            wanted = torch.as_tensor(examples[i][name])
            assert torch.equal(batch[name][0, own], wanted.to(batch[name].dtype)), name
    assert batch["routed_experts"].dtype == torch.int16
    assert (batch["routed_experts"][0, ~is_token] == -1).all()
    assert (batch["old_logps"][0, ~is_token] == 0).all()
    padding = [0.0] * (len(edges) - 1 - len(lengths))
    assert batch["advantage"].tolist() == [i - 1.5 for i in range(len(lengths))] + padding
    assert batch["weight"].tolist() == [i + 1.0 for i in range(len(lengths))] + padding
    spread = po.segment_broadcast(batch["advantage"], batch["cu_seq_lens_q"])
    assert spread.shape == (batch["input_ids"].shape[1],)


@pytest.mark.filterwarnings("ignore:capacity")
@pytest.mark.parametrize(("overlong", "kept"), [("truncate", [7, 5]), ("drop", [7, 3]), ("carry", [7])])
def test_values_of_examples_that_are_cut_or_left_out(overlong, kept):
    examples = [example_of(i, length) for i, length in enumerate([7, 9, 3])]
    batch = PaddingFreeCollator(capacity=12, overlong=overlong, **FIELDS)(examples)
    chosen = [examples[i] for i in ((0, 2) if overlong == "drop" else (0, 1))]
    start = 0
    for example, length in zip(chosen, kept, strict=False):
        own = slice(start, start + length)
        assert torch.equal(batch["routed_experts"][0, own].long(), example["routed_experts"][:length])
        start += length
    assert batch["advantage"].tolist() == [e["advantage"] for e in chosen[: len(kept)]] + [0.0] * (start < 12)


@given(lengths=st.lists(st.integers(1, 12), min_size=4, max_size=10))
def test_rows_of_a_packed_collator(lengths):
    examples = [example_of(i, length) for i, length in enumerate(lengths)]
    collator = PackedCollator(32, cp_size=2, dp_size=2, **FIELDS)
    batch = collator(examples)
    order = iter(batch["order"])
    for r, row in enumerate(batch["sub_seq_lengths"]):
        start = 0
        for i, length in enumerate(row):
            example = examples[next(order)]
            for name in FIELDS["token_fields"]:
                assert torch.equal(batch[name][r, start : start + length].to(example[name].dtype), example[name])
            assert batch["advantage"][r][i] == example["advantage"]
            start += -(-length // 4) * 4
    is_token = batch["attention_mask"].bool()
    assert (batch["routed_experts"][~is_token] == -1).all()
    second = select_rows(batch, [1])
    assert torch.equal(second["routed_experts"], batch["routed_experts"][1:2])
    assert second["weight"] == batch["weight"][1:2]
    for rank in range(2):
        share = collator.context_parallel_split(batch, rank)
        assert share["routed_experts"].shape[1] == share["sequences"].shape[1]
        assert torch.equal((share["routed_experts"][..., 0, 0] >= 0).long(), share["attention_mask"])


def test_shards_of_a_row():
    examples = [example_of(i, length) for i, length in enumerate([5, 4])]
    batch = PaddingFreeCollator(**FIELDS, return_packed_metadata=True)(examples)
    whole = torch.cat([shard_of(batch, ranks=2, rank=rank)["routed_experts"] for rank in range(2)], 1)
    assert torch.equal(whole[:, :9], batch["routed_experts"])
    assert (whole[:, 9:] == -1).all()


def test_a_stream_carries_the_fields():
    examples = [example_of(i, length) for i, length in enumerate([9, 30, 5, 8])]
    rows = list(PackedStream(examples, 20, overlong="truncate", seed=None))
    batches = [PaddingFreeCollator(**FIELDS)(row) for row in rows]
    assert sum(batch["routed_experts"].shape[1] for batch in batches) == 9 + 20 + 5 + 8
    assert [n for batch in batches for n in batch["weight"].tolist()] == [row["weight"] for r in rows for row in r]


# --- allowed ids ---


@given(lengths=LENGTHS, flat=st.booleans(), row=st.sampled_from([None, 120]))
def test_allowed_ids_are_those_of_token_logps(lengths, flat, row):
    draw = torch.Generator().manual_seed(0)
    examples = [{"input_ids": torch.randint(0, VOCAB, (length,), generator=draw)} for length in lengths]
    for example in examples:
        sets = [[int(t), (int(t) + 7) % VOCAB][: 2 * (i % 2)] for i, t in enumerate(example["input_ids"])]
        example["allowed_ids"] = sum(sets, []) if flat else sets  # noqa: RUF017
        if flat:
            example["allowed_offsets"] = torch.tensor([0, *map(len, sets)]).cumsum(0)
    collator = PaddingFreeCollator(token_fields=["allowed_ids"], capacity=row)
    batch = collator(examples)
    sets = {name: batch[name] for name in ("allowed_ids", "allowed_offsets")}
    hidden = torch.randn(batch["input_ids"].shape[1], 4, generator=draw)
    weight = torch.randn(VOCAB, 4, generator=draw)
    found = po.token_logps(hidden, weight, batch["labels"][0], batch["cu_seq_lens_q"], **sets)
    start = 0
    for example in examples:
        own = PaddingFreeCollator(token_fields=["allowed_ids"])([example])
        end = start + len(example["input_ids"])
        alone = po.token_logps(
            hidden[start:end],
            weight,
            own["labels"][0],
            own["cu_seq_lens_q"],
            allowed_ids=own["allowed_ids"],
            allowed_offsets=own["allowed_offsets"],
        )
        torch.testing.assert_close(found[start:end], alone)
        start = end


def test_allowed_ids_of_a_packed_collator_s_rows():
    draw = torch.Generator().manual_seed(1)
    examples = [{"input_ids": torch.randint(0, VOCAB, (n,), generator=draw), "num_actions": n} for n in (7, 5, 9)]
    for example in examples:
        example["allowed_ids"] = [
            [int(t), (int(t) + 7) % VOCAB][: 2 * (i % 2)] for i, t in enumerate(example["input_ids"])
        ]
    collator = PackedCollator(16, cp_size=2, token_fields=["allowed_ids"])
    batch = collator(examples)
    assert len(batch["sequences"]) == 2
    metadata = collator.packed_metadata(batch)
    sets = {name: batch[name] for name in ("allowed_ids", "allowed_offsets")}
    hidden = torch.randn(batch["sequences"].numel(), 4, generator=draw)
    weight = torch.randn(VOCAB, 4, generator=draw)
    labels = torch.where(batch["attention_mask"] == 1, batch["sequences"], -100).flatten()
    found = po.token_logps(hidden, weight, labels, metadata.cu_seqlens, **sets)
    start, documents = 0, iter(batch["order"])
    for slots, tokens in zip(metadata.lengths.tolist(), metadata.document_tokens.tolist(), strict=True):
        if tokens:
            own = PaddingFreeCollator(token_fields=["allowed_ids"], document_multiple=4)
            row = own([{k: v for k, v in examples[next(documents)].items() if k != "num_actions"}])
            sets = {name: row[name] for name in ("allowed_ids", "allowed_offsets")}
            part = slice(start, start + slots)
            alone = po.token_logps(hidden[part], weight, row["labels"][0], row["cu_seq_lens_q"], **sets)
            torch.testing.assert_close(found[part][:tokens], alone[:tokens])
        start += slots


def test_documents_of_one_example_have_its_number():
    example = {"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 3], "advantage": 0.5}
    batch = PaddingFreeCollator(document_fields=["advantage"], capacity=12)([example, {**example, "advantage": -1}])
    assert batch["cu_seq_lens_q"].tolist() == [0, 2, 5, 7, 10, 12]
    assert batch["advantage"].tolist() == [0.5, 0.5, -1.0, -1.0, 0.0]


# --- what is refused ---


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"old_logps": [0.5]}, r"old_logps: expected \[length\] with length=3 like input_ids, got float32 \[1\] in example 1"),
        ({"routed_experts": [[0, 1]] * 3}, r"routed_experts: expected \[length, layers, k\] with length=3"),
        ({"routed_experts": torch.zeros(3, LAYERS, K + 1)}, r"routed_experts: expected \[length, layers, k\]"),
        ({"routed_experts": torch.full((3, LAYERS, K), -2)}, r"routed_experts: expected experts from -1 \(not known\) to 32767"),
        ({"routed_experts": torch.full((3, LAYERS, K), 2**15)}, r"routed_experts: expected experts from -1"),
        ({"routed_experts": torch.zeros(3, LAYERS, K)}, r"routed_experts: expected experts from -1"),
        ({"advantage": float("nan")}, "advantage: expected a finite number, got nan in example 1"),
        ({"advantage": "much"}, "advantage: expected a number"),
        ({"allowed_ids": [[1], [2]]}, "allowed_ids: expected sets for 3 tokens, got 2 in example 1"),
    ],
)  # fmt: skip
def test_bad_fields_are_named(changed, message):
    sets = [{"allowed_ids": [[]] * length} for length in (2, 3)]
    examples = [{**example_of(i, i + 2), **own} for i, own in enumerate(sets)]
    examples[1].update(changed)
    collator = PaddingFreeCollator(
        token_fields=(*FIELDS["token_fields"], "allowed_ids"), document_fields=FIELDS["document_fields"]
    )
    with pytest.raises((ValueError, TypeError), match=f"^{message}"):
        collator(examples)


def test_a_field_that_some_examples_lack_and_names_that_are_none():
    examples = [{"input_ids": [1, 2], "old_logps": [0.5, 1.5]}, {"input_ids": [1]}]
    with pytest.raises(ValueError, match=r"^old_logps: expected in every example"):
        PaddingFreeCollator(token_fields=["old_logps"])(examples)
    weighted = [{"input_ids": [1, 2], "num_actions": 0, "weight": 2.0}, {"input_ids": [1], "num_actions": 0}]
    with pytest.raises(ValueError, match=r"^weight: expected in every example"):
        PackedCollator(9, document_fields=["weight"])(weighted)
    with pytest.raises(TypeError, match=r"^token_fields: expected names in a tuple, got 'old_logps'"):
        PaddingFreeCollator(token_fields="old_logps")
    with pytest.raises(ValueError, match=r"^document_fields: expected columns that the collator does not make itself"):
        PackedCollator(9, document_fields=["labels"])
    with pytest.raises(NotImplementedError, match=r"^token_fields: expected none for preference pairs"):
        PaddingFreeDPOCollator(token_fields=["old_logps"])
    collator = PackedCollator(8, cp_size=2, token_fields=["allowed_ids"])
    batch = collator([{"input_ids": [1, 2], "num_actions": 1, "allowed_ids": [[], []]}])
    with pytest.raises(NotImplementedError, match=r"^token_fields: expected no allowed_ids under context parallelism"):
        collator.context_parallel_split(batch, 0)


@pytest.mark.parametrize("name", [*FIELDS["token_fields"], *FIELDS["document_fields"]])
@pytest.mark.parametrize("as_lists", [False, True])
def test_without_its_name_a_field_is_refused(name, as_lists):
    """Dropped, a weight would count as 1."""
    example = {key: value for key, value in example_of(0, 3, as_lists).items() if key in ("input_ids", name)}
    with pytest.raises(ValueError, match=f"^{name}: expected no column that this collator would drop"):
        PaddingFreeCollator()([example])
