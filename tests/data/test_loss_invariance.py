"""Loss and gradients do not depend on how the examples were cut: padded, packed, in micro-batches, over ranks."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed
import torch.nn.functional as F
from helpers import cu_seqlens_of
from helpers.processes import spawn

import packing_ops as po
from packing_ops.data import (
    PackedCollator,
    iter_microbatches,
    masked_loss,
    pad_batch_to_multiple,
    sequence_logps,
    slice_batch,
    token_budget_microbatches,
)

VOCAB, HIDDEN, HEADS = 19, 16, 2
LENGTHS = [5, 1, 12, 7, 2, 9, 4, 11, 3]


def precision(device):
    """(dtype, relative tolerance): the attention of a GPU knows no float64."""
    return (torch.float64, 1e-6) if device == "cpu" else (torch.float32, 1e-3)


class TinyLM(torch.nn.Module):
    """One layer of attention over tokens and their positions; ``attend`` says who sees whom."""

    def __init__(self, device):
        super().__init__()
        options = {"device": device, "dtype": precision(device)[0]}
        self.embed = torch.nn.Embedding(VOCAB, HIDDEN, **options)
        self.positions = torch.nn.Embedding(max(LENGTHS), HIDDEN, **options)
        self.qkv = torch.nn.Linear(HIDDEN, 3 * HIDDEN, **options)
        self.head = torch.nn.Linear(HIDDEN, VOCAB, **options)

    def forward(self, input_ids, position_ids, attend):
        hidden = self.embed(input_ids) + self.positions(position_ids)
        q, k, v = self.qkv(hidden).unflatten(-1, (3, HEADS, HIDDEN // HEADS)).unbind(-3)
        return self.head(torch.tanh(hidden + attend(q, k, v).flatten(-2)))


def dense(mask):
    """Plain torch over ``[batch, seqlen]``: causal, real keys only."""
    seqlen = mask.shape[1]
    causal = torch.ones(seqlen, seqlen, dtype=torch.bool, device=mask.device).tril()
    # A slot of padding sees itself, so that no row is empty.
    visible = causal & mask[:, None, :].bool() | torch.eye(seqlen, dtype=torch.bool, device=mask.device)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None]).transpose(1, 2)

    return attend


def make_examples(device):
    """Some tokens are prompt, one example is nothing but prompt."""
    made = []
    for i, length in enumerate(LENGTHS):
        input_ids = torch.randint(0, VOCAB, (length,), device=device)
        labels = input_ids.clone()
        labels[: length if i == 4 else i % 4] = -100
        made.append({"input_ids": input_ids, "labels": labels})
    return made


@pytest.fixture
def examples(device):
    return make_examples(device)


@pytest.fixture
def model(device):
    return TinyLM(device)


def target_counts(examples):
    counts = [int((example["labels"][1:] != -100).sum()) for example in examples]
    return {"token_mean": sum(counts), **dict.fromkeys(["sequence_mean", "dpo"], sum(count > 0 for count in counts))}


# --- what is compared: a micro-batch's share of each loss, padded or packed ---


def share(kind, logits, labels, num_items, dp_size=1, **layout):
    """``layout``: cu_seqlens of a packed row, attention_mask of padded ones."""
    if kind == "dpo":
        logps = sequence_logps(logits, labels, **layout)
        counted = sequence_logps(torch.zeros_like(logits), labels, **layout) != 0
        return masked_loss(-F.logsigmoid(0.1 * logps), counted, num_items_in_batch=num_items[kind], dp_size=dp_size)
    cu_seqlens = layout.get("cu_seqlens")
    if cu_seqlens is None:
        # The first real token of a row is no target.
        labels = labels.masked_fill(layout["attention_mask"].cumsum(1) <= 1, -100)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
    else:
        targets = po.shift_labels(labels, cu_seqlens)
    each = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=-100)
    return masked_loss(
        each.view(targets.shape),
        targets != -100,
        num_items_in_batch=num_items[kind],
        cu_seqlens=cu_seqlens,
        reduction=kind,
        dp_size=dp_size,
    )


def packed_share(model, kind, group, num_items, dp_size=1):
    """One packed row, with a tail of padding whose labels look real."""
    cu_seqlens = cu_seqlens_of([len(example["input_ids"]) for example in group], group[0]["input_ids"].device)
    tail = 3
    input_ids = F.pad(torch.cat([example["input_ids"] for example in group]), (0, tail), value=7)
    labels = F.pad(torch.cat([example["labels"] for example in group]), (0, tail), value=7)
    positions = po.position_ids_from_cu_seqlens(cu_seqlens, len(input_ids))
    logits = model(input_ids, positions, lambda q, k, v: po.varlen_attention(q, k, v, cu_seqlens))
    return share(kind, logits[None], labels[None], num_items, dp_size, cu_seqlens=cu_seqlens)


def padded_share(model, kind, batch, num_items, dp_size=1):
    mask = batch["attention_mask"]
    logits = model(batch["input_ids"], (mask.cumsum(1) - 1).clamp(min=0), dense(mask))
    return share(kind, logits, batch["labels"], num_items, dp_size, attention_mask=mask)


def groups_of(examples, size):
    return [examples[i : i + size] for i in range(0, len(examples), size)]


def padded_groups(examples, size, side="right"):
    for batch in iter_microbatches(examples, size, pad_values={"input_ids": 0, "labels": -100}):
        if side == "left":
            mask = batch["attention_mask"]
            order = (torch.arange(mask.shape[1], device=mask.device) + mask.sum(1, keepdim=True)) % mask.shape[1]
            batch = {name: value.gather(1, order) for name, value in batch.items()}
        yield batch


def loss_and_gradients(model, shares):
    """Summed over micro-batches, as gradient accumulation does it."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for part in shares:
        part.backward()
        total += part.item()
    return total, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_equal_loss(actual, expected, tolerance):
    assert abs(actual[0] - expected[0]) <= tolerance * abs(expected[0])
    for name, gradient in expected[1].items():
        assert gradient.abs().max() > 0
        assert (actual[1][name] - gradient).abs().max() <= tolerance * gradient.abs().max(), name


@pytest.fixture(params=["token_mean", "sequence_mean", "dpo"])
def kind(request):
    return request.param


def each_alone(model, kind, examples):
    """Each example separately, by plain torch, and the mean as its definition says it."""
    model.zero_grad(set_to_none=True)
    per_example = []
    for example in examples:
        input_ids, labels = example["input_ids"][None], example["labels"][None]
        mask = torch.ones_like(input_ids)
        logits = model(input_ids, mask.cumsum(1) - 1, dense(mask))
        logps = logits[0, :-1].log_softmax(-1).gather(1, example["input_ids"][1:, None])[:, 0]
        per_example.append(logps[labels[0, 1:] != -100])
    total = {
        "token_mean": lambda: -torch.cat(per_example).mean(),
        "sequence_mean": lambda: -torch.stack([logps.mean() for logps in per_example if len(logps)]).mean(),
        "dpo": lambda: -F.logsigmoid(0.1 * torch.stack([logps.sum() for logps in per_example if len(logps)])).mean(),
    }[kind]()
    total.backward()
    return total.item(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def expected(model, kind, examples):
    return each_alone(model, kind, examples)


# --- any way of cutting ---


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_padded_in_any_micro_batch_size(device, model, kind, examples, expected, size, side):
    num_items = target_counts(examples)
    shares = (padded_share(model, kind, batch, num_items) for batch in padded_groups(examples, size, side))
    assert_equal_loss(loss_and_gradients(model, shares), expected, precision(device)[1])


@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_packed_in_any_micro_batch_size(device, model, kind, examples, expected, size):
    num_items = target_counts(examples)
    shares = (packed_share(model, kind, group, num_items) for group in groups_of(examples, size))
    assert_equal_loss(loss_and_gradients(model, shares), expected, precision(device)[1])


@pytest.mark.parametrize("strategy", ["ffd", "bfd", "next_fit", "balanced"])
def test_packed_into_rows(device, model, kind, examples, expected, strategy):
    num_items = target_counts(examples)
    rows = po.pack_sequences(LENGTHS, 16, strategy=strategy).bins
    shares = (packed_share(model, kind, [examples[i] for i in row], num_items) for row in rows)
    assert_equal_loss(loss_and_gradients(model, shares), expected, precision(device)[1])


@pytest.mark.parametrize("dp_size", [1, 2, 3, 5, 12])
def test_any_number_of_ranks_by_a_token_budget(device, model, kind, examples, expected, dp_size):
    """Every rank's gradients summed over its steps, then averaged over ranks, as DistributedDataParallel does it."""
    num_items = target_counts(examples)
    unused = {**examples[0], "labels": torch.full_like(examples[0]["labels"], -100)}
    ranks = token_budget_microbatches(LENGTHS, 16, dp_size=dp_size)
    results = []
    for steps in ranks:
        groups = ([examples[i] for i in step] or [unused] for step in steps)
        shares = (packed_share(model, kind, group, num_items, dp_size) for group in groups)
        results.append(loss_and_gradients(model, shares))
    mean = {name: sum(gradients[name] for _, gradients in results) / dp_size for name in results[0][1]}
    assert_equal_loss((sum(loss for loss, _ in results) / dp_size, mean), expected, precision(device)[1])


@pytest.mark.parametrize("multiple", [2, 4, 16])
def test_dummy_rows_change_nothing(device, model, kind, examples, expected, multiple):
    num_items = target_counts(examples)
    (batch,) = padded_groups(examples, len(examples))
    batch["loss_mask"] = (batch["labels"] != -100).long()
    padded = pad_batch_to_multiple(batch, multiple)
    labels = padded["labels"].masked_fill(padded["loss_mask"] == 0, -100)
    shares = [padded_share(model, kind, {**padded, "labels": labels}, num_items)]
    assert_equal_loss(loss_and_gradients(model, shares), expected, precision(device)[1])


# --- what PackedCollator makes: its weights are shares of the whole batch, so there is nothing left to count ---


def as_rollouts(examples):
    return [
        {
            "input_ids": example["input_ids"],
            "num_actions": len(example["input_ids"]),
            "loss_mask": (example["labels"] != -100).long(),
        }
        for example in examples
    ]


def packed_rows_share(model, collator, batch, dp_size=1):
    """Some rows of a collated batch, each a separate forward."""
    device, total = next(model.parameters()).device, 0.0
    for input_ids, weights, lengths in zip(
        batch["sequences"].to(device), batch["loss_mask"].to(device), batch["sub_seq_lengths"], strict=True
    ):
        slots = [-(-length // collator.alignment) * collator.alignment for length in lengths]
        cu_seqlens = cu_seqlens_of(slots, device)
        positions = po.position_ids_from_cu_seqlens(cu_seqlens, len(input_ids)).clamp(max=max(LENGTHS) - 1)
        logits = model(input_ids, positions, partial(po.varlen_attention, cu_seqlens_q=cu_seqlens))
        each = F.cross_entropy(logits[:-1], input_ids[1:], reduction="none")
        total = total + masked_loss(each, weights, num_items_in_batch=1, dp_size=dp_size)
    return total


@pytest.mark.parametrize("kind", ["token_mean"])
@pytest.mark.parametrize("sizes", [{}, {"dp_size": 3}, {"tp_size": 4}, {"cp_size": 2, "dp_size": 2}, {"fp8": True}])
@pytest.mark.parametrize("strategy", ["ffd", "next_fit"])
def test_rows_of_packed_collator(device, model, kind, examples, expected, sizes, strategy):
    collator = PackedCollator(32, pad_token_id=3, strategy=strategy, **sizes)
    batch = collator(as_rollouts(examples))
    rows = len(batch["sequences"])
    assert 1 < rows < len(examples)
    shares = (packed_rows_share(model, collator, slice_batch(batch, row, row + 1)) for row in range(rows))
    assert_equal_loss(loss_and_gradients(model, shares), expected, precision(device)[1])
    # Dummy rows to a multiple of the micro-batch size count in nothing.
    padded = pad_batch_to_multiple(batch, rows + 1)
    shares = [packed_rows_share(model, collator, padded)]
    assert_equal_loss(loss_and_gradients(model, shares), expected, precision(device)[1])


def check_a_rank():
    torch.manual_seed(0)
    model, examples = TinyLM("cpu"), make_examples("cpu")
    expected = each_alone(model, "token_mean", examples)
    actual = data_parallel_loss_and_gradients(model, examples, torch.distributed.get_rank(), 2)
    assert_equal_loss(actual, expected, 1e-6)


def data_parallel_loss_and_gradients(model, examples, rank, world_size):
    """This rank's contiguous rows, one backward each; DistributedDataParallel averages over the ranks."""
    collator = PackedCollator(16, dp_size=world_size)
    batch = collator(as_rollouts(examples))
    steps = len(batch["sequences"]) // world_size
    assert steps > 1
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(rank * steps, (rank + 1) * steps):
        with nullcontext() if row == (rank + 1) * steps - 1 else parallel.no_sync():
            loss = packed_rows_share(parallel, collator, slice_batch(batch, row, row + 1), world_size)
            loss.backward()
        total += loss.detach()
    torch.distributed.all_reduce(total)
    return total.item() / world_size, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_two_processes_and_distributed_data_parallel(tmp_path):
    spawn(check_a_rank, 2, tmp_path)


# --- the functions themselves ---


def test_sequence_logps_by_hand(device):
    probabilities = torch.tensor([[[0.25, 0.75], [0.5, 0.5], [0.125, 0.875]]], device=device, dtype=torch.float64)
    labels = torch.tensor([[0, 1, 0]], device=device)
    torch.testing.assert_close(
        sequence_logps(probabilities.log(), labels).exp(),
        torch.tensor([0.75 * 0.5], device=device, dtype=torch.float64),
    )
    torch.testing.assert_close(
        sequence_logps(probabilities.log(), labels, average=True).exp(),
        torch.tensor([(0.75 * 0.5) ** 0.5], device=device, dtype=torch.float64),
    )
    two = sequence_logps(probabilities.log(), labels, cu_seqlens_of([1, 2], device)).exp()
    torch.testing.assert_close(two, torch.tensor([1.0, 0.5], device=device, dtype=torch.float64))
    nothing = sequence_logps(probabilities.log(), torch.full_like(labels, -100), average=True)
    assert nothing.tolist() == [0.0]
    # Left padding: the slot before the first real token predicts nothing.
    mask = torch.tensor([[0, 1, 1]], device=device)
    assert sequence_logps(probabilities.log(), labels, attention_mask=mask).exp().tolist() == [0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_is_summed_in_float32(device, dtype):
    logits = torch.randn(1, 50, VOCAB, device=device).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (1, 50), device=device)
    logps = sequence_logps(logits, labels)
    assert logps.dtype == torch.float32
    assert torch.autograd.grad(logps.sum(), logits)[0].dtype == dtype
    loss = masked_loss(
        torch.full((1, 300), 1.0, device=device, dtype=dtype),
        torch.full((1, 300), 1 / 300, device=device),
        num_items_in_batch=1,
    )
    torch.testing.assert_close(loss, torch.tensor(1.0, device=device))


def test_masked_slots_may_hold_anything(device):
    values = torch.tensor([[1.0, float("nan"), 3.0], [float("inf"), 5.0, 6.0]], device=device, requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]], device=device)
    for reduction, items, loss in (("token_mean", 4, 15 / 4), ("sequence_mean", 2, (2 + 5.5) / 2)):
        found = masked_loss(values, mask, num_items_in_batch=items, reduction=reduction)
        assert found.item() == loss
        (gradient,) = torch.autograd.grad(found, values)
        assert torch.equal(gradient, mask / 4)


def test_a_count_that_is_no_number_is_seen(device):
    values = torch.ones(2, 3, device=device)
    one = torch.tensor([6], device=device)
    assert masked_loss(values, values, num_items_in_batch=one).shape == ()
    with pytest.raises(ValueError, match=r"num_items_in_batch: expected one number, got int64 \[2\]"):
        masked_loss(values, values, num_items_in_batch=one.expand(2))
    with pytest.raises(ValueError, match="num_items_in_batch: expected at least 0, got nan"):
        masked_loss(values, values, num_items_in_batch=torch.nan)
    assert masked_loss(values, values, num_items_in_batch=torch.tensor(torch.nan, device=device)).isnan()


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_nothing_to_learn_is_a_loss_of_0(device, reduction):
    values = torch.ones(2, 3, device=device, requires_grad=True)
    for none in (0, torch.tensor(0, device=device)):
        loss = masked_loss(values, torch.zeros(2, 3, device=device), num_items_in_batch=none, reduction=reduction)
        assert loss.item() == 0
        assert not torch.autograd.grad(loss, values)[0].any()


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e30, 1e38])
def test_weights_as_small_and_as_large_as_they_come(device, reduction, scale):
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device, requires_grad=True)
    weights = torch.full((2, 2), scale, device=device)
    items = 4 * weights[0, 0].double() if reduction == "token_mean" else 2
    for count in (items, float(items)):
        loss = masked_loss(values, weights, num_items_in_batch=count, reduction=reduction)
        assert loss.item() == 2.5
        assert (torch.autograd.grad(loss, values)[0] == 0.25).all()


def test_masks_that_are_already_divided(device):
    """What PackedCollator makes: weights that sum to 1 over the batch."""
    values, counted = torch.rand(2, 8, device=device), torch.rand(2, 8, device=device) < 0.5
    counted[0, 0] = True
    weights = counted / counted.sum()
    expected = masked_loss(values, counted, num_items_in_batch=counted.sum())
    torch.testing.assert_close(masked_loss(values, weights, num_items_in_batch=1), expected)
    torch.testing.assert_close(expected, values[counted].mean())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sequence_logps(torch.ones(1, 4, 3), torch.ones(1, 3).long()), r"labels: expected \[1, 4\] like logits, got \[1, 3\]"),
        (
            lambda: sequence_logps(
                torch.ones(1, 4, 3), torch.ones(1, 4).long(), cu_seqlens_of([4]), attention_mask=torch.ones(1, 4)
            ),
            "attention_mask: expected None beside cu_seqlens",
        ),
        (
            lambda: sequence_logps(torch.ones(1, 4, 3), torch.ones(1, 4).long(), attention_mask=torch.ones(4)),
            r"attention_mask: expected \[1, 4\] like labels, got \[4\]",
        ),
        (lambda: masked_loss(torch.ones(4), torch.ones(3), num_items_in_batch=1), r"loss_mask: expected \[4\] like losses"),
        (
            lambda: masked_loss(torch.ones(4), torch.ones(4), num_items_in_batch=1, reduction="mean"),
            "reduction: expected 'token_mean' or 'sequence_mean', got 'mean'",
        ),
        (lambda: masked_loss(torch.ones(4), torch.ones(4), num_items_in_batch=-1), "num_items_in_batch: expected at least 0"),
        (
            lambda: masked_loss(torch.ones(4), torch.ones(4), num_items_in_batch=1, dp_size=0),
            "dp_size: expected at least 1 rank, got 0",
        ),
        (lambda: masked_loss(torch.ones(4), torch.ones(4), num_items_in_batch=1, cu_seqlens=cu_seqlens_of([5])), "cu_seqlens"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
