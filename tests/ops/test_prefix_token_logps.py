"""prefix_token_logps: token_logps of the samples, each in a separate row, from the rows of their tree."""

import pytest
import torch
from helpers import cu_seqlens_of

import packing_ops as po

VOCAB = 11


def drawn(device, dtype=torch.float64, size=6):
    """A prompt with three answers, two of them equal, one the beginning of another; a sample without a token; two
    others.
    """
    prompt, other = torch.randint(VOCAB, (130,)), torch.randint(VOCAB, (5,))
    answers = [torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]), torch.tensor([1, 2]), torch.tensor([7])]
    samples = [torch.cat([prompt, answer]) for answer in answers] + [
        torch.tensor([], dtype=torch.long),
        other,
        other[:1],
    ]
    cu_seqlens = cu_seqlens_of([len(sample) for sample in samples], "cpu")
    tokens = torch.cat(samples)
    tree = po.pack_prefix_tree(tokens, cu_seqlens)
    hidden = torch.randn(tree.num_slots, size, dtype=dtype, device=device)
    weight = torch.randn(VOCAB, size, dtype=dtype, device=device)
    return tokens.to(device), cu_seqlens.to(device), tree.to(device), hidden, weight


def both(tokens, cu_seqlens, tree, hidden, weight, **options):
    """(shared, unshared) results of token_logps."""
    shared = po.prefix_token_logps(hidden, weight, tokens[tree.token_of_slot], tree, **options)
    return shared, po.token_logps(hidden[tree.slot_of_token], weight, tokens, cu_seqlens, **options)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "chunk": 4}, {"entropy": True}], ids=str)
def test_values_and_gradients_are_those_of_the_samples(device, options):
    tokens, cu_seqlens, tree, hidden, weight = drawn(device, torch.float64 if device == "cpu" else torch.float32)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    results = [torch.stack(each) if options.get("entropy") else each for each in both(tokens, cu_seqlens, tree, *leaves, **options)]  # fmt: skip
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if device == "cpu" else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(*results, **tolerance)
    # Weights of slots differ between the samples that share a row: advantages and loss masks.
    grad = torch.randn_like(results[0]) * torch.randint(2, results[0].shape, device=device)
    shared, unshared = (torch.autograd.grad(each, leaves, grad) for each in results)
    torch.testing.assert_close(shared, unshared, **tolerance)


def test_bias_and_a_batch_of_one(device):
    tokens, _, tree, hidden, weight = drawn(device, torch.float32)
    bias = torch.randn(VOCAB, device=device)
    plain = po.prefix_token_logps(hidden, weight, tokens[tree.token_of_slot], tree, bias=bias)
    batch = po.prefix_token_logps(hidden[None], weight, tokens[tree.token_of_slot][None], tree, bias=bias)
    assert torch.equal(plain, batch)
    assert not torch.equal(plain, po.prefix_token_logps(hidden, weight, tokens[tree.token_of_slot], tree))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_mode_s_bits_are_those_of_each_sample_alone(device, dtype):
    tokens, cu_seqlens, tree, hidden, weight = drawn(device, dtype, size=64)
    with po.invariant():
        shared = po.prefix_token_logps(hidden, weight, tokens[tree.token_of_slot], tree)
        spans = list(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True))
        for start, end in spans:
            alone = po.token_logps(
                hidden[tree.slot_of_token[start:end]], weight, tokens[start:end], cu_seqlens_of([end - start], device)
            )
            assert torch.equal(shared[start:end], alone)
        with torch.no_grad():
            assert torch.equal(shared, po.prefix_token_logps(hidden, weight, tokens[tree.token_of_slot], tree))


def test_no_row_is_multiplied_twice(device, monkeypatch):
    tokens, _, tree, hidden, weight = drawn(device, torch.float32)
    rows = []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **given: (rows.append(a.shape[0]), real(a, b, **given))[1])
    po.prefix_token_logps(hidden, weight, tokens[tree.token_of_slot], tree)
    predicted = int((tree.slots_before >= 0).sum())
    assert rows == [predicted if device == "cpu" else tree.num_slots]
    rows.clear()
    po.prefix_token_logps(hidden, weight, tokens[tree.token_of_slot], tree, max_targets=predicted)
    assert rows[0] < tree.num_slots or tree.num_slots - predicted < 128
    assert tree.num_slots < tree.num_tokens / 3


def test_labels_that_are_ignored(device):
    tokens, _, tree, hidden, weight = drawn(device, torch.float32, size=64)
    labels = tokens[tree.token_of_slot].index_fill(0, torch.arange(130, device=device), -100)  # the prompt
    with po.invariant():
        masked, whole = (
            po.prefix_token_logps(hidden, weight, each, tree) for each in (labels, tokens[tree.token_of_slot])
        )
    ignored = labels[tree.slot_of_token].roll(-1) == -100
    assert not masked[ignored].any()
    assert torch.equal(masked[~ignored], whole[~ignored])


def test_rows_before(device):
    _, _, tree, _, _ = drawn(device)
    before, rows = tree.slots_before, tree.slot_of_token
    starts = tree.position_ids[rows] == 0
    assert torch.equal(before[rows][~starts], rows.roll(1)[~starts])
    assert bool((before[rows][starts] == -1).all())


def test_no_tokens(device):
    tree = po.pack_prefix_tree(torch.tensor([], dtype=torch.long), [0]).to(device)
    hidden, weight = torch.zeros(0, 2, device=device), torch.zeros(3, 2, device=device)
    ids = torch.zeros(0, dtype=torch.long, device=device)
    assert po.prefix_token_logps(hidden, weight, ids, tree).shape == (0,)


def test_compiles_fullgraph(device, fresh_compile):
    tokens, _, tree, hidden, weight = drawn(device, torch.float32)

    def step(hidden, weight, tokens, tree):
        return po.prefix_token_logps(hidden, weight, tokens[tree.token_of_slot], tree).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, weight, tokens, tree), step(hidden, weight, tokens, tree))


def test_bad_input(device):
    tokens, _, tree, hidden, weight = drawn(device, torch.float32)
    ids = tokens[tree.token_of_slot]
    for changed, message in (
        ({"hidden": hidden[1:]}, "hidden: expected"),
        ({"labels": ids[1:]}, "labels: expected"),
        ({"labels": ids + VOCAB}, "labels: expected"),
        ({"labels": ids.float()}, "labels: expected"),
        ({"temperature": 0}, "temperature: expected a number above 0"),
        ({"weight": weight[:, 1:]}, "weight: expected"),
    ):
        given = {"hidden": hidden, "weight": weight, "labels": ids, "tree": tree, **changed}
        with pytest.raises(ValueError, match=message):
            po.prefix_token_logps(**given)
    with pytest.raises(TypeError, match="labels: expected a tensor"):
        po.prefix_token_logps(hidden, weight, ids.tolist(), tree)
