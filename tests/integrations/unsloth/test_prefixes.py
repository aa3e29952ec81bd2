"""prefix_attention: in a stream of Unsloth's PrefixGrouper each answer is as after a prompt of its own."""

from types import SimpleNamespace

import pytest
import torch
from helpers import assert_same

from packing_ops import prefix_tree_metadata, varlen_attention
from packing_ops.contrib.unsloth import prefix_attention

GROUPS = [(5, [3, 4]), (2, [1, 6, 2])]  # tokens of a prompt and of its answers


def stream(device, padding=0):
    """What Unsloth keeps of a stream: labels, and -99 for the padding behind it."""
    group, is_prefix, suffix, answers = [], [], [], 0
    for number, (prompt, lengths) in enumerate(GROUPS):
        labels = [(-1, prompt), *enumerate(lengths, answers)]
        answers += len(lengths)
        for label, length in labels:
            group += [number] * length
            is_prefix += [label < 0] * length
            suffix += [label] * length
    total, pad = len(group), [-99] * padding
    return total, SimpleNamespace(
        group_of_kv=torch.tensor(group + pad, device=device),
        is_prefix=torch.tensor(is_prefix + [False] * padding, device=device),
        suffix_of_kv=torch.tensor(suffix + pad, device=device),
    )


def inputs(total, device):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, total, 16, generator=generator).to(device).requires_grad_() for heads in (4, 2, 2)]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_an_answer_sees_its_prompt_and_itself(device, padding, scale):
    total, labels = stream(device, padding)
    Q, K, V = inputs(total, device)
    out = prefix_attention(Q, K, V, labels, softmax_scale=scale)
    assert out.shape == (1, total, 4, 16)
    upstream = torch.randn_like(out)
    expected, base = torch.zeros_like(out), 0
    for prompt, lengths in GROUPS:
        start = base + prompt
        for length in lengths:
            alone = torch.tensor([*range(base, base + prompt), *range(start, start + length)], device=device)
            q, k, v = (t[0, :, alone].transpose(0, 1) for t in (Q, K, V))
            cu_seqlens = torch.tensor([0, len(alone)], dtype=torch.int32, device=device)
            came = varlen_attention(q, k, v, cu_seqlens, causal=True, softmax_scale=scale)
            expected = expected.index_copy(1, alone, came[None])
            start += length
        base = start
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(each, (Q, K, V), upstream) for each in (out, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


def test_a_layout_of_groups_and_parents_is_taken_as_it_is(device):
    total, labels = stream(device)
    prompts = -1 - labels.group_of_kv
    metadata = prefix_tree_metadata(prompts.where(labels.is_prefix, labels.suffix_of_kv), prompts)
    given = inputs(total, device)
    assert_same(prefix_attention(*given, metadata), prefix_attention(*given, labels))


def test_what_is_no_stream_is_named(device):
    total, labels = stream(device)
    Q, K, V = inputs(total, device)
    with pytest.raises(ValueError, match=r"Q: expected \[1, num_heads, total, head_dim\], got \[4, 23, 16\]"):
        prefix_attention(Q[0], K, V, labels)
    shorter = [t[:, :, 1:] for t in (Q, K, V)]
    with pytest.raises(ValueError, match=r"prefix_seg_info: expected a stream of 22 tokens like Q, got 23"):
        prefix_attention(*shorter, prefix_tree_metadata([0] * 23, [0] * 23))


def test_labels_that_change_beside_the_same_groups_are_seen(device):
    total, labels = stream(device)
    Q, K, V = inputs(total, device)
    before = prefix_attention(Q, K, V, labels)
    longer = labels.suffix_of_kv.clone()
    longer[8] = 0  # of answer 1
    labels.suffix_of_kv = longer
    expected = prefix_attention(Q, K, V, SimpleNamespace(**{n: t.clone() for n, t in vars(labels).items()}))
    assert_same(prefix_attention(Q, K, V, labels), expected)
    assert not torch.equal(before, expected)
