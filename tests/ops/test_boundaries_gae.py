"""gae against packing_ops.reference, and against the padded loop that PPO trainers have."""

import pytest
import torch
from helpers import MASK_DTYPES, assert_error_within, assert_same, cu_seqlens_of, lengths_strategy, non_contiguous
from hypothesis import given
from hypothesis import strategies as st

import packing_ops as po
from packing_ops.reference import segments as oracle

ops = torch.ops.packing_ops
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
NAN = float("nan")


def row_of(lengths, device, tail=0):
    total = sum(lengths) + tail
    return torch.randn(total, device=device), torch.randn(total, device=device), cu_seqlens_of(lengths, device)


def padded_loop(rewards, values, response_mask, gamma, lam):
    """[batch, seqlen]: slot by slot from the right, slots of mask 0 pass on what follows them."""
    next_values = next_advantages = torch.zeros_like(rewards[:, 0])
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        keep = response_mask[:, t] == 1
        next_advantages = torch.where(keep, delta + gamma * lam * next_advantages, next_advantages)
        next_values = torch.where(keep, values[:, t], next_values)
        advantages[:, t] = next_advantages
    return advantages, advantages + values


def test_gamma_and_lam_by_position(device):
    """In the order of every trainer."""
    rewards, values, cu_seqlens = row_of([3, 4], device)
    by_position = po.gae(rewards, values, cu_seqlens, 0.99, 0.95)
    for ours, named in zip(by_position, po.gae(rewards, values, cu_seqlens, gamma=0.99, lam=0.95), strict=True):
        assert_same(ours, named)


def test_worked_values(device):
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0, 1.0, 9.0], device=device)
    values = torch.tensor([0.5, 0.5, 0.5, 0.25, 0.5, 9.0], device=device)
    cu_seqlens = cu_seqlens_of([3, 0, 2], device)
    advantages, returns = po.gae(rewards, values, cu_seqlens, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [0.125, 0.25, 0.5, 0.5, 0.5, 0]
    assert returns.tolist() == [0.625, 0.75, 1.0, 0.75, 1.0, 0]
    mask = torch.tensor([1, 0, 1, 1, 1, 1], device=device)
    advantages, returns = po.gae(rewards, values, cu_seqlens, gamma=1.0, lam=0.5, mask=mask)
    assert advantages.tolist() == [0.25, 0, 0.5, 0.5, 0.5, 0]
    assert returns.tolist() == [0.75, 0, 1.0, 0.75, 1.0, 0]
    cut_off = torch.tensor([0.0, 7.0, 2.0], device=device)
    advantages, returns = po.gae(rewards, values, cu_seqlens, gamma=0.5, lam=0.0, bootstrap=cut_off)
    assert returns.tolist() == [0.25, 0.25, 1.0, 0.25, 2.0, 0]


@given(
    lengths=lengths_strategy,
    tail=st.integers(0, 5),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    masked=st.booleans(),
    cut_off=st.booleans(),
)
def test_equals_reference(device, lengths, tail, gamma, lam, masked, cut_off):
    rewards, values, cu_seqlens = row_of(lengths, device, tail)
    options = {"gamma": gamma, "lam": lam}
    options["mask"] = torch.rand(rewards.shape, device=device) > 0.4 if masked else None
    options["bootstrap"] = torch.randn(len(lengths), device=device) if cut_off else None
    wanted = oracle.gae(rewards, values, cu_seqlens, **options)
    found = po.gae(rewards, values, cu_seqlens, **options)
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, exact.float(), rtol=1e-5, atol=5e-5)
    assert_same(po.gae(rewards, values, cu_seqlens.long(), **options), found)
    in_double = po.gae(rewards.double(), values, cu_seqlens, **options)
    for ours, exact in zip(in_double, wanted, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("gamma_lam", [(1.0, 1.0), (0.99, 0.95), (1.0, 0.95)])
@pytest.mark.parametrize("masked", [False, True])
def test_long_documents(device, dtype, gamma_lam, masked):
    """Of a warp's tile and a slot more, of a block's, and of many."""
    lengths = [1, 128, 129, 512, 513, 2048, 2049, 0, 20_000]
    rewards, values, cu_seqlens = row_of(lengths, device, 3)
    rewards, values = rewards.to(dtype), values.to(dtype)
    options = dict(zip(("gamma", "lam"), gamma_lam, strict=True))
    options["mask"] = torch.rand(rewards.shape, device=device) > 0.4 if masked else None
    found = po.gae(rewards, values, cu_seqlens, **options)
    for ours, exact in zip(found, oracle.gae(rewards, values, cu_seqlens, **options), strict=True):
        assert ours.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        # 20,000 additions in a row, were they made one after the other, would lose more.
        assert_error_within(ours, exact, exact, floor=64 * torch.finfo(ours.dtype).eps * exact.abs().max().item())


@pytest.mark.parametrize("response_mask", ["padding", "tools"])
def test_equals_the_padded_loop_of_ppo_trainers(device, response_mask):
    """Bootstrapped by nothing, over [batch, seqlen] with padding on the right, as verl and TRL have it."""
    metadata = po.PackedMetadata.from_lengths([5, 1, 7, 3], device=device)
    kept = metadata.pad(torch.ones(16, device=device))
    if response_mask == "tools":
        kept *= torch.rand(kept.shape, device=device) > 0.4
    rewards, values = torch.randn(2, *kept.shape, device=device)
    padded = padded_loop(rewards, values, kept, 0.99, 0.95)
    found = po.gae(
        metadata.unpad(rewards), metadata.unpad(values), metadata, gamma=0.99, lam=0.95, mask=metadata.unpad(kept)
    )
    for ours, theirs in zip(found, padded, strict=True):
        torch.testing.assert_close(metadata.pad(ours), theirs * kept)


def test_a_document_has_the_same_bits_alone_and_packed(device):
    for length in (100, 777, 5000):
        rewards, values, alone = row_of([length], device)
        packed = [
            torch.cat([torch.full((13,), NAN, device=device), x, torch.ones(9, device=device)])
            for x in (rewards, values)
        ]
        found = po.gae(*packed, cu_seqlens_of([13, length, 5], device), gamma=0.99, lam=0.95)
        wanted = po.gae(rewards, values, alone, gamma=0.99, lam=0.95)
        assert_same([x[13 : 13 + length] for x in found], list(wanted))


def test_slots_that_are_left_out_may_hold_anything(device):
    rewards = torch.tensor([NAN, 1.0, float("inf"), 2.0], device=device)
    values = torch.tensor([float("inf"), 0.5, NAN, 0.5], device=device)
    mask = torch.tensor([False, True, False, True], device=device)
    advantages, returns = po.gae(rewards, values, cu_seqlens_of([4], device), gamma=1.0, lam=1.0, mask=mask)
    assert advantages.tolist() == [0, 2.5, 0, 1.5]
    assert returns.tolist() == [0, 3, 0, 2]


@pytest.mark.parametrize("dtype", MASK_DTYPES, ids=str)
def test_masks_of_any_kind_and_rows_with_a_batch_of_one(device, dtype):
    rewards, values, cu_seqlens = row_of([4, 3], device)
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 1], device=device)
    wanted = po.gae(rewards, values, cu_seqlens, gamma=1, lam=0.5, mask=mask == 1)
    assert_same(po.gae(rewards, values, cu_seqlens, gamma=1, lam=0.5, mask=mask.to(dtype)), wanted)
    row = po.gae(rewards[None], values[None], cu_seqlens, gamma=1, lam=0.5, mask=mask[None].to(dtype))
    assert_same(row, tuple(x[None] for x in wanted))
    strided = (non_contiguous(x) for x in (rewards, values))
    assert_same(po.gae(*strided, cu_seqlens, gamma=1, lam=0.5, mask=non_contiguous(mask)), wanted)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [1, 0, 1]], ids=str)
def test_edges(device, lengths):
    rewards, values, cu_seqlens = row_of(lengths, device)
    advantages, returns = po.gae(rewards, values, cu_seqlens, gamma=0.9, lam=0.9)
    assert_same(advantages, rewards - values)
    assert_same(returns, rewards)


def test_many_documents_of_one_token(device):
    rewards, values, cu_seqlens = row_of([1] * 100_000, device)
    assert_same(po.gae(rewards, values, cu_seqlens, gamma=0.9, lam=0.9)[0], rewards - values)


def test_mixed_dtypes_are_of_the_wider(device):
    rewards, values, cu_seqlens = row_of([4, 3], device)
    half = values.to(torch.bfloat16)
    assert_same(
        po.gae(rewards, half, cu_seqlens, gamma=1, lam=1), po.gae(rewards, half.float(), cu_seqlens, gamma=1, lam=1)
    )
    assert po.gae(rewards, values.double(), cu_seqlens, gamma=1, lam=1)[0].dtype == torch.float64


def test_a_gradient_is_refused_and_constants_need_none(device):
    rewards, values, cu_seqlens = row_of([4, 3], device)
    values.requires_grad_()
    advantages, _ = po.gae(rewards, values, cu_seqlens, gamma=1, lam=1)
    with pytest.raises(NotImplementedError, match=r"packing_ops::gae has no gradient.*detach rewards and values"):
        advantages.sum().backward()
    assert not po.gae(rewards, values.detach(), cu_seqlens, gamma=1, lam=1)[0].requires_grad
    with torch.no_grad():
        assert not po.gae(rewards, values, cu_seqlens, gamma=1, lam=1)[0].requires_grad


@pytest.mark.parametrize("masked", [False, True])
def test_opcheck(device, masked):
    rewards, values, cu_seqlens = row_of([2, 0, 3], device, 1)
    mask = torch.tensor([1, 0, 1, 1, 1, 0], dtype=torch.bool, device=device) if masked else None
    bootstrap = torch.randn(3, device=device) if masked else None
    torch.library.opcheck(ops.gae, (rewards, non_contiguous(values), cu_seqlens, mask, bootstrap, 0.99, 0.95))


def test_compiles_fullgraph_with_dynamic_sizes(device, fresh_compile):
    def advantages(rewards, values, cu_seqlens, mask):
        found, returns = po.gae(rewards - 1, values.bfloat16(), cu_seqlens, gamma=0.99, lam=0.95, mask=mask)
        return found * 2 + returns

    compiled = torch.compile(advantages, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ([3, 5], [2, 9, 4], [1, 1, 1, 20]):
        rewards, values, cu_seqlens = row_of(lengths, device)
        mask = torch.arange(len(rewards), device=device) % 3
        assert_same(compiled(rewards, values, cu_seqlens, mask), advantages(rewards, values, cu_seqlens, mask))


def bad_calls(device):
    rewards, values, cu_seqlens = row_of([2, 3], device)
    metadata = po.PackedMetadata.from_lengths([2, 4], device=device)

    def call(rewards=rewards, values=values, cu_seqlens=cu_seqlens, gamma=1.0, lam=1.0, **options):
        return lambda: po.gae(rewards, values, cu_seqlens, gamma=gamma, lam=lam, **options)

    return {
        "integers": (call(rewards=rewards.long()), r"rewards: expected float32, .* or float16, got int64 \[5\]"),
        "integer values": (call(values=values.int()), r"values: expected float32, .*, got int32 \[5\]"),
        "list": (call(rewards=[1.0]), r"rewards: expected a tensor, got \[1.0\] \(list\)"),
        "padded batch": (call(rewards=rewards.expand(2, 5)), r"rewards: expected \[total\] or \[1, total\], got float32 \[2, 5\]"),
        "short values": (call(values=values[1:]), r"values: expected \[total\] like rewards = \[5\], got float32 \[4\]"),
        "short": (call(rewards[1:], values[1:]), "cu_seqlens: expected to end at most at total"),
        "metadata": (call(cu_seqlens=metadata), "cu_seqlens: expected total=5 like rewards, got PackedMetadata with total=6"),
        "lengths": (call(cu_seqlens=[2, 3]), r"cu_seqlens: expected PackedMetadata or its cu_seqlens, got \[2, 3\] \(list\)"),
        "gamma": (call(gamma=1.5), "gamma: expected 0 to 1, got 1.5"),
        "lam": (call(lam=NAN), "lam: expected 0 to 1, got -?nan"),
        "mask": (call(mask=rewards[1:] > 0), r"mask: expected \[total\] like .* = \[5\], got bool \[4\]"),
        "bootstrap": (call(bootstrap=values), r"bootstrap: expected \[num_documents\] = \[2\], got float32 \[5\]"),
        "integer bootstrap": (call(bootstrap=cu_seqlens[1:]), "bootstrap: expected float32, .*, got int32"),
    }  # fmt: skip


@pytest.mark.parametrize("case", bad_calls("cpu"))
def test_bad_input_is_named(device, case):
    call, message = bad_calls(device)[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_another_device_is_named(device):
    rewards, values, cu_seqlens = row_of([2, 3], device)
    if device == "cpu":
        pytest.skip("needs a second device")
    others = {"values": values, "cu_seqlens": cu_seqlens, "mask": values > 0, "bootstrap": values[:2]}
    for name, tensor in others.items():
        arguments = {"values": values, "mask": None, "bootstrap": None, "cu_seqlens": cu_seqlens, name: tensor.cpu()}
        with pytest.raises(ValueError, match=f"{name}: expected on cuda:0 like rewards, got"):
            po.gae(rewards, arguments.pop("values"), arguments.pop("cu_seqlens"), gamma=1, lam=1, **arguments)
