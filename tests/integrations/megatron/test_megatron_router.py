"""packing_ops.load_balancing_loss against Megatron-core's own, of scores and a routing_map."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss, switch_load_balancing_loss_func

import packing_ops as po

TOP_K, EXPERTS = 2, 6


def of_one_sequence(logits):
    """Megatron's loss of a sequence alone: its sequence-wise loss with a batch of one."""
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, TOP_K, "softmax")
    return switch_load_balancing_loss_func(scores, routing_map.sum(0), len(logits), TOP_K, EXPERTS, 1.0)


def test_sequence_wise_loss_of_a_packed_row(device):
    """The packed row is one sequence to Megatron; by document the loss is the mean over them."""
    lengths, tail = [5, 1, 11], 3
    logits = torch.randn(sum(lengths) + tail, EXPERTS, device=device, requires_grad=True)
    metadata = po.PackedMetadata.from_lengths(lengths, total=len(logits), device=device)
    documents = logits[: sum(lengths)].split(lengths)
    expected = torch.stack([of_one_sequence(document) for document in documents])
    (wanted,) = torch.autograd.grad(expected.mean(), logits, retain_graph=True)

    routing_map, scores = compute_routing_scores_for_aux_loss(logits, TOP_K, "softmax")
    losses = po.load_balancing_loss(scores, metadata, routed=routing_map, by_document=True) / TOP_K
    torch.testing.assert_close(losses, expected)
    (found,) = torch.autograd.grad(losses.mean(), logits)
    torch.testing.assert_close(found, wanted)
    assert not torch.isclose(of_one_sequence(logits), expected.mean())


def test_loss_of_all_tokens_without_the_padding(device):
    lengths, tail = [5, 1, 11], 3
    logits = torch.randn(sum(lengths) + tail, EXPERTS, device=device)
    routing_map, scores = compute_routing_scores_for_aux_loss(logits, TOP_K, "softmax")
    metadata = po.PackedMetadata.from_lengths(lengths, total=len(logits), device=device)
    loss = po.load_balancing_loss(scores, metadata, routed=routing_map) / TOP_K
    torch.testing.assert_close(loss, of_one_sequence(logits[: sum(lengths)]))
