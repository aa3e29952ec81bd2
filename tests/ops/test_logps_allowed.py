"""token_logps over the entries of the vocabulary that each token was drawn from, as a sampler with top-k or top-p has
them.
"""

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same, captured, cu_seqlens_of, lengths_strategy, non_contiguous
from helpers.logps_case import LOW, assert_outputs_and_gradients, batch, leaves
from helpers.processes import spawn
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops._runtime import gate
from packing_ops.reference import logps as oracle

ops = torch.ops.packing_ops
NAMES = ("logps", "lse", "entropy", "sum_p2", "top1")
FLOATING = NAMES[:-1]
WHOLE, FEW, ALL = range(3)  # kinds of sets: not given, some entries, every entry


def allowed_of(labels, vocab, kinds=None, dtype=torch.int64):
    """(allowed_ids, allowed_offsets) with each label among its ids, in no order, some of them twice."""
    sets = []
    for i, label in enumerate(labels.tolist()):
        kind = (WHOLE, FEW, FEW, ALL, FEW)[i % 5] if kinds is None else kinds
        few = torch.randint(0, vocab, (1 + i % 7,)).tolist()
        own = [label, label] if label >= 0 else []
        sets.append({WHOLE: [], FEW: [*few, *own, *few[:2]], ALL: torch.randperm(vocab).tolist()}[kind])
    offsets = torch.tensor([0, *map(len, sets)]).cumsum(0)
    ids = torch.tensor([each for one in sets for each in one])
    return {"allowed_ids": ids.to(labels.device, dtype), "allowed_offsets": offsets.to(labels.device, dtype)}


# --- values ---


def test_worked_values(device):
    """Logits 0, 1, 2 of which two are allowed."""
    hidden = torch.ones(3, 1, device=device)
    weight = torch.tensor([[0.0], [1.0], [2.0]], device=device)
    labels = torch.tensor([9, 0, 1], device=device)
    sets = {
        "allowed_ids": torch.tensor([2, 0, 0, 1], device=device),  # of label 1; of label 2
        "allowed_offsets": torch.tensor([0, 0, 2, 4], device=device),
    }
    cu_seqlens, bias = cu_seqlens_of([3], device), torch.zeros(3, device=device)
    labels[0] = -100
    found = po.token_logps(hidden, weight, labels, cu_seqlens, bias=bias, outputs=NAMES, **sets)
    logps, lse, entropy, sum_p2, top1 = (each.cpu() for each in found)
    p = torch.tensor([1 / (1 + torch.e**2), torch.e / (1 + torch.e)])
    torch.testing.assert_close(logps, torch.tensor([*p.log(), 0.0]))
    torch.testing.assert_close(lse, torch.tensor([2.1269280, 1.3132617, 0.0]))
    torch.testing.assert_close(entropy[:2], -(p * p.log() + (1 - p) * (1 - p).log()))
    torch.testing.assert_close(sum_p2[:2], p**2 + (1 - p) ** 2)
    assert top1.tolist() == [2, 1, -1]


@given(
    lengths=lengths_strategy,
    tail=st.integers(0, 5),
    vocab=st.integers(1, 90),
    chunk=st.integers(1, 100),
    scaled=st.booleans(),
    int32=st.booleans(),
)
def test_equals_reference_at_any_size(device, lengths, tail, vocab, chunk, scaled, int32):
    hidden, weight, labels, cu_seqlens, bias = batch(device, vocab, 7, lengths, tail)
    sets = allowed_of(labels, vocab, dtype=torch.int32 if int32 else torch.int64)
    options = {"bias": bias}
    if scaled:
        temperature = 0.3 + 2 * torch.rand(len(labels), device=device, dtype=torch.float64)
        options |= {"temperature": temperature, "scale": 1.5, "softcap": 2.0}
    expected = oracle.token_outputs(hidden, weight, labels, cu_seqlens, **options, **sets)
    found = po.token_logps(hidden, weight, labels, cu_seqlens, chunk=chunk, outputs=NAMES, **options, **sets)
    for name, actual in zip(NAMES, found, strict=True):
        torch.testing.assert_close(actual, expected[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("chunk", [None, 77])
def test_values_and_gradients(device, dtype, softcap, chunk):
    """Within twice the error of torch in that dtype, of all logits at once."""
    hidden, weight, labels, cu_seqlens, _ = batch(device, 1003, 48, [0, 40, 1, 90, 0, 120], dtype=dtype, scale=0.3)
    options = {"temperature": 1.3, "softcap": softcap, **allowed_of(labels, 1003)}
    assert_outputs_and_gradients(hidden, weight, labels, cu_seqlens, FLOATING, chunk, **options)


@pytest.mark.parametrize("more", [False, True], ids=["logps", "all outputs"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("chunk", [None, 5])
def test_gradcheck(device, more, softcap, chunk):
    hidden, weight, labels, cu_seqlens, bias = batch(device, 43, 3, [3, 0, 4], 1)
    temperature = 0.3 + 2 * torch.rand(len(labels), device=device, dtype=torch.float64)
    options = {"temperature": temperature, "softcap": softcap, "chunk": chunk, **allowed_of(labels, 43)}
    outputs = FLOATING if more else ("logps",)

    def function(h, w, b):
        return po.token_logps(h, w, labels, cu_seqlens, bias=b, outputs=outputs, **options)

    assert torch.autograd.gradcheck(function, leaves(hidden, weight, bias))


def test_only_allowed_entries_have_a_gradient(device):
    """A logit that is NaN, or larger than all others by far, is not read where it is not allowed."""
    hidden, weight, labels, cu_seqlens, bias = batch(device, 90, 4, [6, 5], 0)
    labels[:] = labels.clamp(min=0) % 40
    sets = allowed_of(labels, 40, FEW)  # of the first 40 of 90
    bias[50], bias[60] = torch.nan, 1e4
    tensors = leaves(hidden, weight, bias)
    found = po.token_logps(*tensors[:2], labels, cu_seqlens, bias=tensors[2], chunk=32, outputs=FLOATING, **sets)
    sum(each.sum() for each in found).backward()
    assert all(each.isfinite().all() for each in (*found, *(t.grad for t in tensors)))
    used = torch.zeros(90, dtype=torch.bool, device=device)
    predicted = torch.ones(len(labels), dtype=torch.bool, device=device)
    predicted[cu_seqlens[:-1].long()] = False
    counts = sets["allowed_offsets"].diff()
    used[sets["allowed_ids"][predicted.repeat_interleave(counts)]] = True
    assert 0 < used.sum() < 40
    assert_same(tensors[1].grad.any(1), used)
    assert_same(tensors[2].grad != 0, used)


def test_ratio_of_a_sampled_token_is_1(device):
    """What a sampler with top-k 5 gives its draws, and what the trainer computes."""
    hidden, weight, labels, cu_seqlens, _ = batch(device, 50, 8, [7, 9], 0)
    logits = hidden @ weight.t() / 0.8
    top = logits.topk(5)
    drawn = top.values.softmax(-1)
    choice = torch.multinomial(drawn, 1)
    sampled = top.indices.gather(1, choice)[:, 0]  # by slot: the token after it
    labels[1:] = sampled[:-1]
    ids = torch.cat([torch.zeros(5, dtype=torch.long, device=device), top.indices[:-1].flatten()])
    offsets = 5 * torch.arange(len(labels) + 1, device=device)
    ids[35:40] = labels[7]  # the first of the second document: nothing predicts it
    ids[0:5] = labels[0].clamp(min=0)
    old = drawn.gather(1, choice)[:, 0].log()
    new = po.token_logps(hidden, weight, labels, cu_seqlens, temperature=0.8, allowed_ids=ids, allowed_offsets=offsets)
    within = torch.ones(len(labels), dtype=torch.bool, device=device)
    within[[6, 15]] = False
    torch.testing.assert_close((new - old)[within].exp(), torch.ones_like(old[within]))
    plain = po.token_logps(hidden, weight, labels, cu_seqlens, temperature=0.8)
    assert (plain < new)[within].all()


# --- bits ---


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_bits_of_every_entry_are_those_of_none(device, dtype):
    """No set, a set of all entries, and no argument are one distribution."""
    hidden, weight, labels, cu_seqlens, bias = batch(device, 2100, 16, dtype=dtype)

    def results(**sets):
        tensors = leaves(hidden, weight, bias)
        found = po.token_logps(*tensors[:2], labels, cu_seqlens, bias=tensors[2], chunk=1024, outputs=NAMES, **sets)
        sum(each.sum() for each in found[:-1]).backward()
        return [*(each.detach() for each in found), *(t.grad for t in tensors)]

    plain = results()
    for kind in (WHOLE, ALL):
        for actual, expected in zip(results(**allowed_of(labels, 2100, kind)), plain, strict=True):
            assert_same(actual, expected)


@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_bits_in_any_pack_and_chunk(device, dtype):
    """Within invariant(): each document separately, any chunk, any bound, logits kept or not."""
    hidden, weight, labels, cu_seqlens, bias = batch(device, 9000, 16, dtype=dtype)
    sets = allowed_of(labels, 9000, FEW)
    grad = torch.randn(len(labels), device=device, dtype=torch.float32)

    def results(part, cu_seqlens, **options):
        (leaf,) = leaves(hidden[part])
        begin, end = (int(sets["allowed_offsets"][at]) for at in (part.start, part.stop))
        own = {
            "allowed_ids": sets["allowed_ids"][begin:end],
            "allowed_offsets": sets["allowed_offsets"][part.start : part.stop + 1] - begin,
        }
        found = po.token_logps(leaf, weight, labels[part], cu_seqlens, bias=bias, outputs=NAMES, **own, **options)
        (found[0] * grad[part]).sum().backward()
        return [*(each.detach() for each in found), leaf.grad]

    whole = slice(0, len(labels))
    with po.invariant():
        expected = results(whole, cu_seqlens)
        for options in ({"chunk": 4096}, {"chunk": 8192}, {"keep_logits": 2**40}, {"max_targets": len(labels)}):
            for actual, wanted in zip(results(whole, cu_seqlens, **options), expected, strict=True):
                assert_same(actual, wanted)
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            part = slice(start, end)
            for actual, wanted in zip(results(part, cu_seqlens_of([end - start], device)), expected, strict=True):
                assert_same(actual, wanted[part])


def test_strides_do_not_matter(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device, 301, dtype=torch.bfloat16)
    sets = allowed_of(labels, 301)
    strided = {name: non_contiguous(tensor) for name, tensor in sets.items()}
    expected = po.token_logps(hidden, weight, labels, cu_seqlens, **sets)
    assert_same(po.token_logps(hidden, weight, labels, cu_seqlens, **strided), expected)


@pytest.mark.parametrize("total", [0, 1, 2])
def test_few_slots(device, total):
    hidden, weight, labels, cu_seqlens, bias = batch(device, 5, 3, [total] if total else [], 0)
    labels[:] = 2
    sets = {
        "allowed_ids": torch.full((total,), 2, device=device),
        "allowed_offsets": torch.arange(total + 1, device=device),
    }
    tensors = leaves(hidden, weight, bias)
    logps = po.token_logps(*tensors[:2], labels, cu_seqlens, bias=tensors[2], **sets)
    assert_same(logps.detach(), torch.zeros(total, device=device, dtype=torch.float64))  # one entry has all weight
    logps.sum().backward()
    assert not any(t.grad.any() for t in tensors)


# --- other forms ---


def test_of_a_prefix_tree(device):
    """By row of the tree: as token_logps of the samples."""
    samples = [[*(5, 6, 7, 8) * 40, 1, 4], [*(5, 6, 7, 8) * 40, 2, 3], [9, 4, 2]]
    tokens = torch.tensor([t for sample in samples for t in sample], device=device)
    cu_seqlens = cu_seqlens_of([len(s) for s in samples], device)
    tree = po.pack_prefix_tree(tokens, cu_seqlens)
    tree = tree.to(device)
    hidden = torch.randn(tree.num_slots, 6, device=device, dtype=torch.float64)
    weight = torch.randn(12, 6, device=device, dtype=torch.float64)
    per_row = allowed_of(tokens[tree.token_of_slot], 12, FEW)
    sets = [part.tolist() for part in per_row["allowed_ids"].split(per_row["allowed_offsets"].diff().tolist())]
    of_samples = [sets[row] for row in tree.slot_of_token.tolist()]
    per_token = {
        "allowed_ids": torch.tensor([each for one in of_samples for each in one], device=device),
        "allowed_offsets": torch.tensor([0, *map(len, of_samples)], device=device).cumsum(0),
    }
    options = {"outputs": NAMES, "temperature": 0.7}
    rows, whole = leaves(hidden), leaves(hidden)
    found = po.prefix_token_logps(*rows, weight, tokens[tree.token_of_slot], tree, **options, **per_row)
    expected = po.token_logps(whole[0][tree.slot_of_token], weight, tokens, cu_seqlens, **options, **per_token)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted)
    found[0].sum().backward()
    expected[0].sum().backward()
    torch.testing.assert_close(rows[0].grad, whole[0].grad)


def shards_case():
    torch.manual_seed(0)
    hidden, weight, labels, cu_seqlens, bias = batch("cpu", 80, 5, [4, 0, 1, 6], 2)
    return hidden, weight, bias, labels, cu_seqlens, allowed_of(labels, 80, FEW)


def of_shard(hidden, weight, bias, labels, cu_seqlens, sets, group=None):
    tensors = leaves(hidden, weight, bias)
    found = po.token_logps(
        *tensors[:2], labels, cu_seqlens, bias=tensors[2], outputs=NAMES, chunk=16, group=group, **sets
    )
    sum(each.sin().sum() for each in found[:-1]).backward()
    return [*(each.detach() for each in found), *(t.grad for t in tensors)]


def of_a_rank():
    hidden, weight, bias, *others = shards_case()
    start = dist.get_rank() * 40
    shard = slice(start, start + 40)
    return of_shard(hidden, weight[shard], bias[shard], *others, dist.group.WORLD)


def test_shards_of_the_vocabulary(tmp_path):
    ranks = spawn(of_a_rank, 2, tmp_path)
    expected = of_shard(*shards_case())
    for actual in ranks:
        torch.testing.assert_close(actual[:6], expected[:6])
    for shards, whole in zip(zip(*(rank[6:] for rank in ranks), strict=True), expected[6:], strict=True):
        torch.testing.assert_close(torch.cat(shards), whole)


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    compiled = torch.compile(po.token_logps, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        hidden, weight, labels, cu_seqlens, bias = batch(device, lengths=lengths)
        options = {"outputs": NAMES, "chunk": 64, **allowed_of(labels, 301)}
        eager, traced = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
        for function, (h, w, b) in ((po.token_logps, eager), (compiled, traced)):
            found = function(torch.tanh(h), w, labels, cu_seqlens, bias=b, **options)
            sum(each.sum() for each in found[:-1]).backward()
        for actual, expected in zip(traced, eager, strict=True):
            torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-14)


# --- the ops ---


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    vocab=st.integers(1, 80),
    first=st.integers(0, 90),
    columns=st.integers(0, 70),
    picked=st.booleans(),
)
def test_mask_of_a_chunk(device, counts, vocab, first, columns, picked):
    offsets = torch.tensor([0, *counts]).cumsum(0)
    ids = torch.randint(0, vocab, (int(offsets[-1]),), dtype=torch.int32)
    sets = [part.tolist() for part in ids.split(counts)]
    index = [1, -1, 0, len(counts) + 3] if picked else list(range(len(counts)))
    given_index = torch.tensor(index, device=device) if picked else None
    mask = ops.logps_allowed_mask(ids.to(device), offsets.to(device), given_index, first, columns).cpu()
    assert mask.shape == (len(index), -(-columns // 32))
    bits = (mask[:, :, None] >> torch.arange(32) & 1).flatten(1)[:, :columns]
    for row, t in zip(bits.tolist(), index, strict=True):
        own = sets[t] if 0 <= t < len(sets) else []
        assert row == [int(not own or column in own) for column in range(first, first + columns)]


def op_samples(device):
    hidden, weight, labels, cu_seqlens, bias = batch(device, 40, 6, dtype=torch.float32)
    targets = ops.logps_targets(labels, cu_seqlens, -100, 40)
    sets = allowed_of(labels, 40)
    allowed = ops.logps_allowed(*sets.values(), targets, 40, 1)
    index = ops.logps_rows(targets, 30)
    options = 1.0, 0.0, 16, None
    lse, kept = ops.token_logps(hidden, weight, bias, targets, None, *options, 2**20, True, None, *allowed)[1::5]
    logits, scales = hidden @ weight.t(), torch.ones_like(lse)
    mask = ops.logps_allowed_mask(*allowed, None, 0, 40)
    state, slopes = torch.zeros(7, *targets.shape, device=device), torch.rand(5, *targets.shape, device=device)
    backward = slopes, hidden, weight, bias, targets, None, lse
    return [
        (ops.logps_allowed, (*sets.values(), targets, 40, 1)),
        (ops.logps_allowed, (sets["allowed_ids"].int(), sets["allowed_offsets"].int(), targets.clamp(max=-1), 40, 0)),
        (ops.logps_allowed_mask, (*allowed, index, 8, 31)),
        (ops.logps_allowed_mask, (*allowed, None, 0, 64)),
        (ops.logps_chunk_, (logits, bias, targets, 0, scales, 0.3, state, mask)),
        (ops.logps_chunk_backward_, (logits.clone(), None, targets, 0, scales, 0.0, lse, slopes, mask)),
        (ops.token_logps, (*leaves(hidden, weight, bias), targets, None, *options, 0, True, None, *allowed)),
        (ops.token_logps, (*leaves(hidden, weight), None, targets, None, 0.5, 0.3, None, 30, 0, False, None, *allowed)),
        (ops.token_logps_backward, (*backward, kept[:0], *options, None, True, False, True, *allowed)),
        (ops.token_logps_backward_, (*backward, kept, *options, None, True, True, True, *allowed)),
    ]


@pytest.mark.parametrize("sample", range(10))
def test_opcheck(device, sample):
    op, arguments = op_samples(device)[sample]
    torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("dtype", [torch.float64, *LOW], ids=str)
def test_rows_at_any_address(device, dtype):
    """The ops on views: heads and tails of every length around the vectors of 16 bytes."""
    rows = 4
    memory = torch.randn(rows, 80, device=device).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    bits = torch.rand(rows, 80, device=device) < 0.5
    bits[:, 0] = True
    targets = torch.zeros(rows, dtype=torch.int32, device=device)
    one, grads = torch.ones(rows, device=device, dtype=wide), torch.randn(rows, device=device, dtype=wide)
    words = torch.zeros(rows, 3 * 32, dtype=torch.int64, device=device)
    words[:, :80] = bits
    words = (words.view(rows, 3, 32) << torch.arange(32, device=device)).sum(-1).to(torch.int32)
    for start in range(9):
        for columns in (1, 2, 7, 8, 9, 16, 17, 63):
            logits, mask = memory[:, start : start + columns], words[:, : -(-columns // 32)].contiguous()
            allowed = bits[:, :columns]
            z = logits.to(wide).masked_fill(~allowed, -torch.inf)
            state = torch.zeros(7, rows, device=device, dtype=wide)
            state[0] = -torch.inf
            ops.logps_chunk_(logits, None, targets, 0, one, 0.0, state, mask)
            lse = z.logsumexp(1)
            torch.testing.assert_close(state[0] + state[1].log(), lse)
            torch.testing.assert_close(state[2], z[:, 0])
            changed = memory.clone()
            part = changed[:, start : start + columns]
            ops.logps_chunk_backward_(part, None, targets, 0, one, 0.0, lse, torch.stack([grads, grads]), mask)
            expected = -z.softmax(1) * grads[:, None]
            expected[:, 0] += grads
            torch.testing.assert_close(part, expected.to(dtype), rtol=1e-2 if dtype.itemsize == 2 else 1e-5, atol=1e-6)
            changed[:, start : start + columns] = memory[:, start : start + columns]
            assert_same(changed, memory)  # nothing but them


# --- bad input ---


def bad_calls(device):
    hidden, weight, _, cu_seqlens, _ = batch(device, 10, 4, [3, 2], 1, torch.float32)
    labels = torch.tensor([1, 2, 3, 4, 5, 6], device=device)
    ids = torch.tensor([2, 7, 3, 5], device=device)
    offsets = torch.tensor([0, 0, 2, 3, 3, 4, 4], device=device)

    def call(ids=ids, offsets=offsets, **options):
        options |= {"allowed_ids": ids, "allowed_offsets": offsets}
        return lambda: po.token_logps(hidden, weight, labels, cu_seqlens, **options)

    def changed(tensor, at, value):
        tensor = tensor.clone()
        tensor[at] = value
        return tensor

    return {
        "offsets alone": (call(ids=None), "allowed_ids: expected a tensor beside allowed_offsets, got None"),
        "ids alone": (call(offsets=None), "allowed_offsets: expected a tensor beside allowed_ids, got None"),
        "ids dtype": (call(ids=ids.float()), "allowed_ids: expected int64 or int32, got float32"),
        "ids shape": (call(ids=ids[None]), "allowed_ids: expected .*1"),
        "ids device": (call(ids=ids.to("meta")), "allowed_ids: expected .*meta"),
        "offsets dtype": (call(offsets=offsets.short()), "allowed_offsets: expected int64 or int32, got int16"),
        "offsets shape": (call(offsets=offsets[:-1]), r"allowed_offsets: expected .*\[7\], got .*\[6\]"),
        "offsets device": (call(offsets=offsets.to("meta")), "allowed_offsets: expected .*meta"),
        "mean_logit": (call(outputs=("logps", "mean_logit")), "outputs: expected no 'mean_logit' beside allowed_ids"),
        "id over": (call(ids=changed(ids, 1, 10)), "allowed_ids: .* at index 1"),
        "id below": (call(ids=changed(ids, 3, -1)), "allowed_ids: .* at index [34]"),
        "id far": (call(ids=changed(ids, 1, 2**32 + 7)), "allowed_ids: .* at index 1"),
        "offsets start": (call(offsets=changed(offsets, 0, 1)), "allowed_offsets: expected to start at 0"),
        "offsets decrease": (
            call(offsets=changed(offsets, 4, 2)),
            "allowed_offsets: expected .*never to decrease.* at index 4",
        ),
        "offsets end": (call(offsets=changed(offsets, 6, 3)), "allowed_offsets: expected "),
        "offsets past": (call(offsets=changed(offsets, 6, 2**40)), "allowed_offsets: expected .*to end at the"),
        "ids more": (call(ids=torch.cat([ids, ids])), "allowed_offsets: expected .*to end at the"),
        "label": (call(ids=changed(ids, 0, 3)), "allowed_ids: expected each label among .* at index 1"),
        "label of the second": (call(ids=changed(ids, 3, 4)), "allowed_ids: expected each label among .* at index 4"),
    }


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    with pytest.raises(ValueError, match=f"^{message}"):
        call()


def test_wrong_types_are_named(device):
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    for name in ("allowed_ids", "allowed_offsets"):
        sets = {**allowed_of(labels, 301), name: [1]}
        with pytest.raises(TypeError, match=f"^{name}: expected a tensor, got"):
            po.token_logps(hidden, weight, labels, cu_seqlens, **sets)


def test_sets_of_slots_without_a_target_do_not_matter(device):
    """Of the first token of a document, of an ignored label and of padding."""
    hidden, weight, labels, cu_seqlens, _ = batch(device)
    sets = allowed_of(labels, 301, FEW)
    expected = po.token_logps(hidden, weight, labels, cu_seqlens, **sets)
    predicted = torch.zeros(len(labels), dtype=torch.bool, device=device)
    predicted[1:] = po.shift_labels(labels, cu_seqlens)[:-1] != -100
    assert not predicted.all()
    others = ~predicted.repeat_interleave(sets["allowed_offsets"].diff())
    sets["allowed_ids"][others] = 0
    assert_same(po.token_logps(hidden, weight, labels, cu_seqlens, **sets), expected)


def test_wrong_masks_are_named(device):
    logits, targets = torch.randn(3, 40, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    one, state = torch.ones(3, device=device), torch.zeros(3, 3, device=device)
    mask = torch.zeros(3, 2, dtype=torch.int32, device=device)
    for wrong, message in (
        (mask.long(), "mask: expected int32, got int64"),
        (mask[:, :1], r"mask: expected .* = \[3, 2\], got int32 \[3, 1\]"),
        (mask.to("meta"), "mask: expected .*meta"),
        (non_contiguous(mask), "mask: expected contiguous"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            gate.logps_chunk_(logits, None, targets, 0, one, 0.0, state, wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_in_a_graph(monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    hidden, weight, labels, cu_seqlens, _ = batch("cuda", dtype=torch.bfloat16)
    sets = allowed_of(labels, 301)
    graph, found = captured(lambda: po.token_logps(hidden, weight, labels, cu_seqlens, **sets))
    hidden.copy_(hidden.flip(0))
    graph.replay()
    assert_same(found, po.token_logps(hidden, weight, labels, cu_seqlens, **sets))
