"""What only a GPU can show: graphs, streams, synchronisations, poisoned outputs, a second device, 2**31 elements."""

import pytest
import torch
from helpers import assert_same, cu_seqlens_of

import packing_ops as po
from packing_ops import PackedMetadata
from packing_ops.data import count_tokens
from packing_ops.data.mini_batches import REDUCTIONS, normalize_advantages

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture
def no_sync(monkeypatch):
    """Any synchronisation that torch knows of is an error; ours in PACKING_OPS_CHECK is off, as for a user."""
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    yield
    torch.cuda.set_sync_debug_mode("default")


def inputs(seed=0):
    """One packed batch with everything that the ops below need, all of fixed size."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 60, (16,), generator=generator)
    lengths[-1] += 1024 - lengths.sum()
    mask = torch.zeros(4, 512, dtype=torch.int64)
    for row, length in enumerate([256, 200, 312, 256]):
        start = int(torch.randint(0, 512 - length, (), generator=generator))
        mask[row, start : start + length] = 1
    angles = torch.rand(1100, 32, generator=generator)
    packed = {
        "lengths": lengths,
        "mask": mask,
        "hidden": torch.randn(4, 512, 48, generator=generator),
        "labels": torch.randint(0, 99, (1024,), generator=generator),
        "values": torch.randn(1024, generator=generator),
        "uids": torch.repeat_interleave(torch.arange(8) + seed * 100, 4),
        "q": torch.randn(1024, 4, 64, generator=generator).bfloat16(),
        "k": torch.randn(1024, 2, 64, generator=generator).bfloat16(),
        "cos": angles.cos(),
        "sin": angles.sin(),
    }
    return {name: tensor.cuda() for name, tensor in packed.items()}


def step(x):
    """Every capturable op once: fixed sizes in, fixed sizes out, nothing read back."""
    ops = torch.ops.packing_ops
    cu_seqlens = po.cu_seqlens_from_lengths(x["lengths"])
    position_ids = po.position_ids_from_cu_seqlens(cu_seqlens, 1024)
    indices, layout, seqused, totals = ops.unpad_layout(x["mask"], None, False)
    packed = ops.gather_rows(x["hidden"], indices, 1024)
    q, k = po.apply_rotary_qk(x["q"], x["k"], x["cos"], x["sin"], position_ids)
    targets = ops.logps_targets(x["labels"], cu_seqlens, -100, 99)
    logits, state = x["q"].flatten(1)[:, :99].clone(), x["values"].new_zeros(7, 1024)
    scales, slopes = torch.full_like(x["values"], 0.1), x["values"].expand(5, 1024).contiguous()
    ops.logps_chunk_(logits, None, targets, 0, scales, 0.0, state)
    ops.logps_chunk_backward_(logits, None, targets, 0, scales, 0.0, state[1].log(), slopes)
    label_of_next = targets.clamp(min=0)
    allowed = ops.logps_allowed(label_of_next, torch.arange(1025, device=targets.device), targets, 99, 0)
    mask = ops.logps_allowed_mask(*allowed, None, 0, 99)
    of_allowed = torch.zeros_like(state)
    ops.logps_chunk_(logits, None, targets, 0, scales, 0.0, of_allowed, mask)
    allowed_gradient = logits.clone()
    ops.logps_chunk_backward_(allowed_gradient, None, targets, 0, scales, 0.0, of_allowed[1].log(), slopes, mask)
    heads = x["q"].flatten(1)[:, :99].clone(), None, x["q"].flatten(1)[:, 1:100], None, targets, 0.1, 0.2, 0.5
    divergence = ops.kl_rows(*heads)
    ops.kl_chunk_backward_(*heads, divergence, x["values"], heads[0])
    ops.kl_scale_kept_(heads[0].clone(), x["values"], heads[0])
    rows = x["q"].flatten(1)
    of_conv = rows, rows[:256, :4].contiguous(), None, cu_seqlens
    convolved, last_rows = ops.causal_conv1d(*of_conv, None, True, True)
    of_conv = *of_conv, last_rows, True
    convolutions = [*ops.causal_conv1d(*of_conv, True), *ops.causal_conv1d_backward(convolved, last_rows, *of_conv)]
    gates = x["values"].abs()[:, None].expand(1024, 4)
    of_rule = x["k"], x["k"], x["q"], (-gates).contiguous(), gates.sigmoid(), cu_seqlens
    scanned, states = ops.gated_delta_rule(*of_rule, None, 0.1, True, True)
    going_on = ops.gated_delta_rule(*of_rule, states, 0.1, True, True)
    gradients = ops.gated_delta_rule_backward(scanned, states, *of_rule, states, 0.1, True)
    of_mamba = x["q"], gates.contiguous(), -x["values"][:4].abs(), x["k"], x["k"], x["values"][4:8].clone(), None
    found = ops.mamba2_scan(*of_mamba, cu_seqlens, None, True, 0.0, 1.0, True)
    given = *of_mamba, cu_seqlens, found[1], True, 0.0, 1.0  # from other states, as decoding does
    of_mamba = [*found, *ops.mamba2_scan(*given, True), *ops.mamba2_scan_backward(*found, *given)]
    gated = ops.mamba2_gate(x["q"], found[0], cu_seqlens)
    of_mamba = dict(enumerate([*of_mamba, gated, *ops.mamba2_gate_backward(gated, x["q"], found[0], cu_seqlens)]))
    return {
        **{f"mamba_{i}": tensor for i, tensor in of_mamba.items()},
        "convolved": convolved,
        **{f"convolved_{i}": tensor for i, tensor in enumerate([last_rows, *convolutions])},
        "scanned": scanned,
        **{f"scanned_{i}": tensor for i, tensor in enumerate([states, *going_on, *gradients])},
        "cu_seqlens": cu_seqlens,
        "position_ids": position_ids,
        "seq_idx": po.seq_idx_from_cu_seqlens(cu_seqlens, 1024),
        "padded_cu_seqlens": po.cu_seqlens_from_position_ids(position_ids, padded=True),
        "ends": ops.prompt_end_indices(x["uids"])[0],
        "masked": po.mask_boundary_labels(x["labels"], cu_seqlens),
        "shifted": po.shift_labels(x["labels"], cu_seqlens),
        "targets": po.count_target_tokens(x["labels"], cu_seqlens),
        "sums": po.segment_sum(x["values"], cu_seqlens, x["values"] > 0, True),
        "routed": torch.cat(po.router_statistics(x["values"].view(-1, 1) * x["values"][:7], cu_seqlens, top_k=2)[:2]),
        "std": po.segment_std(x["values"], cu_seqlens, x["values"] > 0),
        "advantages": torch.stack(
            po.gae(x["values"], x["values"], cu_seqlens, gamma=0.9, lam=0.9, mask=x["values"] > 0)
        ),
        "of_documents": po.segment_broadcast(x["values"][:16], cu_seqlens, 1024),
        "of_features": po.segment_broadcast(x["values"][:32].view(16, 2), cu_seqlens, 1024),
        "of_integers": po.segment_broadcast(x["lengths"], cu_seqlens, 1024),
        "moved": po.shift_values(x["values"], cu_seqlens, fill_value=0.5),
        "visible": po.block_causal_mask(cu_seqlens, 1024, window=7),
        "indices": indices,
        "layout": layout,
        "seqused": seqused,
        "totals": totals,
        "packed": packed,
        "padded": ops.scatter_rows(packed, indices, 4, 512),
        "bins": ops.pack_ffd(x["lengths"], 1024, 1, False)[0],
        "q": q,
        "k": k,
        "logits": logits,
        "state": state,
        "rows": ops.logps_rows(targets, 1024),
        "mask": mask,
        "of_allowed": of_allowed,
        "allowed_gradient": allowed_gradient,
        "divergence": divergence,
        "kl_gradient": heads[0],
    }


def with_products(x):
    """step, and what runs cuBLAS, whose kernels compute-sanitizer does not follow."""
    ops, found = torch.ops.packing_ops, step(x)
    head = x["q"].flatten(1), x["q"][:99].flatten(1), None
    targets = ops.logps_targets(x["labels"], found["cu_seqlens"], -100, 99)
    options = 0.1, 0.0, 40, 1000
    logps, lse, entropy, *_, kept = ops.token_logps(*head, targets, None, *options, 2**20, True, None)
    slopes = torch.stack([logps, entropy])
    grad_hidden, grad_weight, _ = ops.token_logps_backward_(
        slopes, *head, targets, None, lse, kept, *options, None, True, True, False
    )
    options = 0.1, 0.2, 0.5, 40, 1000
    kl, *saved = ops.token_kl(*head, *head, targets, *options, 2**17)
    of_kl, _, _ = ops.token_kl_backward(kl, *head, *head, targets, *saved, *options, True, True, False)
    found |= {"kl": kl, "grad_of_kl": of_kl}
    return {**found, "logps": logps, "entropy": entropy, "grad_hidden": grad_hidden, "grad_weight": grad_weight}


def test_graph_replays_new_contents(no_sync):
    static = inputs(0)
    with_products(static)  # warm-up: module load, fault flag
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = with_products(static)
    for seed in (1, 2):
        fresh = inputs(seed)
        for name, tensor in static.items():
            tensor.copy_(fresh[name])
        graph.replay()
        torch.cuda.synchronize()
        for name, expected in with_products(fresh).items():
            torch.testing.assert_close(captured[name], expected, rtol=0, atol=0, msg=name)


def test_nothing_synchronises(no_sync):
    x = inputs()
    with_products(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    with_products(x)


def test_metadata_from_cpu_lengths_needs_no_synchronisation(no_sync):
    torch.cuda.set_sync_debug_mode("error")
    metadata = PackedMetadata.from_lengths([5, 0, 3], total=10, device="cuda")
    consumed = metadata.position_ids, metadata.seq_idx, metadata.lengths, metadata.to_transformers()
    told = PackedMetadata.from_cu_seqlens(metadata.cu_seqlens, total=10, max_seqlen=5, num_tokens=8).to_megatron()
    torch.cuda.set_sync_debug_mode("default")
    assert (metadata.total, metadata.max_seqlen) == (10, 5)
    assert consumed[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1]
    assert consumed[3]["cu_seq_lens_q"].tolist() == told["cu_seqlens_q"].tolist() == [0, 5, 5, 8, 10]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_advantages_need_no_synchronisation(no_sync, reduction):
    advantages, mask = torch.randn(5, 6, device="cuda"), torch.ones(5, 6, device="cuda")
    rows = {"prompt_boundaries": [(0, 1), (1, 3), (3, 4)], "max_seq_len": 6, "micro_batch_size": 1}
    torch.cuda.set_sync_debug_mode("error")
    scaled = normalize_advantages(advantages, mask, [(0, 3), (3, 4)], reduction, zscore=True, **rows)
    torch.cuda.set_sync_debug_mode("default")
    expected = normalize_advantages(advantages.cpu(), mask.cpu(), [(0, 3), (3, 4)], reduction, zscore=True, **rows)
    torch.testing.assert_close(scaled.cpu(), expected)


@pytest.mark.parametrize("kind", ["padded", "packed", "layout", "documents"])
def test_counts_need_no_synchronisation(no_sync, kind):
    ids, mask = torch.arange(10, device="cuda").view(2, 5), torch.ones(2, 5, device="cuda")
    batch = {
        "padded": {"input_ids": ids, "attention_mask": mask},
        "packed": {"input_ids": ids.view(1, 10), "cu_seq_lens_q": cu_seqlens_of([5, 5], "cuda")},
        "layout": {"input_ids": ids.view(10), "layout": PackedMetadata.from_lengths([5, 5], device="cuda")},
        "documents": {"input_ids": ids, "sub_seq_lengths": [[5], [5]]},
    }[kind]
    torch.cuda.set_sync_debug_mode("error")
    counts = torch.stack(count_tokens(batch))
    torch.cuda.set_sync_debug_mode("default")
    assert counts.tolist() == [10, 0, 2]


@pytest.mark.parametrize("source", ["lengths", "cu_seqlens", "position_ids", "attention_mask"])
def test_metadata_synchronises_at_most_once(no_sync, source, recwarn):
    cu_seqlens = cu_seqlens_of([5, 2, 3], "cuda")
    calls = {
        "lengths": lambda: PackedMetadata.from_lengths(torch.tensor([5, 2, 3], device="cuda")),
        "cu_seqlens": lambda: PackedMetadata.from_cu_seqlens(cu_seqlens),
        "position_ids": lambda: PackedMetadata.from_position_ids(po.position_ids_from_cu_seqlens(cu_seqlens, 10)),
        "attention_mask": lambda: PackedMetadata.from_attention_mask(torch.ones(2, 3, device="cuda")),
    }
    calls[source]()
    argument = calls[source]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    recwarn.clear()
    argument()
    torch.cuda.set_sync_debug_mode("default")
    made_by_test = source in {"lengths"}  # the tensor that the test itself makes
    assert sum("synchronizing" in str(w.message) for w in recwarn) <= 1 + made_by_test


def test_side_stream():
    x = inputs()
    expected = step(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # ours must wait behind this, so work on another stream would differ
        x["values"].mul_(2)
        doubled = po.segment_sum(x["values"], expected["cu_seqlens"])
    side.synchronize()
    halved = po.segment_sum(x["values"] / 2, expected["cu_seqlens"])
    assert_same(doubled, halved * 2)


def test_poisoned_outputs_are_fully_written():
    x = inputs()
    expected = {name: tensor.clone() for name, tensor in step(x).items()}
    torch.cuda.synchronize()
    # What torch hands out next was NaN, or all bits set, a moment ago.
    del expected["visible"]
    poison = [torch.full((1 << 22,), float("nan"), device="cuda") for _ in range(16)]
    poison += [
        torch.full((size,), -1, dtype=torch.int8, device="cuda") for size in (512, 4096, 16384) for _ in range(64)
    ]
    torch.cuda.synchronize()
    del poison
    for name, tensor in step(x).items():
        if name in expected:
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, msg=name)


def test_tensors_on_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = inputs()
    expected = step(x)
    with torch.cuda.device(1):
        other = step(x)
    for name, tensor in expected.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=0, msg=name)
        assert other[name].device == tensor.device


def test_wrong_values_are_raised_at_the_next_call(monkeypatch):
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    wrong = torch.tensor([0, 4, 2, 900], dtype=torch.int32, device="cuda")
    po.position_ids_from_cu_seqlens(wrong, 8)  # no error yet, nothing outside the row touched
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"cu_seqlens: expected .* index [23] \(seen on the GPU in an earlier call"):
        po.seq_idx_from_cu_seqlens(cu_seqlens_of([3, 5], "cuda"), 8)
    assert po.seq_idx_from_cu_seqlens(cu_seqlens_of([3, 5], "cuda"), 8).tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("batches", "index"), [(1, 3), (2, 8)])
def test_position_outside_the_cache_is_found_by_its_index(batches, index):
    q, cache = torch.randn(2, 3, 5, 8, device="cuda"), torch.zeros(9, 4, device="cuda")
    position_ids = torch.zeros(batches, 5, dtype=torch.int64, device="cuda")
    position_ids[-1, 3] = 9
    with pytest.raises(ValueError, match=rf"position_ids: expected every position inside .* index {index}\b"):
        po.apply_rotary_qk(q, None, cache, cache, position_ids)


@pytest.mark.slow
def test_more_than_2_31_elements():
    rows, seqlen, width = 8, 131_072, 2304  # 2.4e9 elements
    hidden = torch.empty(rows, seqlen, width, dtype=torch.bfloat16, device="cuda")
    for row in range(rows):
        hidden[row] = row + 1
    mask = torch.ones(rows, seqlen, dtype=torch.bool, device="cuda")
    mask[:, :3] = False
    packed, indices, _, _, _ = po.unpad_input(hidden, mask)
    assert packed.shape == (rows * (seqlen - 3), width)
    assert packed[-1].eq(rows).all()
    assert packed[-(seqlen - 3)].eq(rows).all()
    del hidden
    padded = po.pad_input(packed, indices, rows, seqlen)
    assert padded[-1, -1].eq(rows).all()
    assert padded[-1, 2].eq(0).all()
