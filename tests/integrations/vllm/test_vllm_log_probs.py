"""Log-probabilities of both of vLLM's model runners, with stand-ins in its place."""

import sys
import types

import pytest
import torch

import packing_ops as po
from packing_ops.integrations._log_probs import log_sums_of

pytest.importorskip("transformers")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("logprobs_mode", "temperature"), [("raw_logprobs", 1.0), ("processed_logprobs", 1.0), ("processed_logprobs", 0.7)]
)
def test_log_probs_are_those_of_token_logps(patched, dtype, logprobs_mode, temperature):
    hidden, weight = torch.randn(40, 48).to(dtype), torch.randn(5056, 48).to(dtype)  # vLLM pads the vocabulary
    head = types.SimpleNamespace(weight=torch.nn.Parameter(weight, requires_grad=False), org_vocab_size=5000)
    sampler = patched.layers.Sampler()
    sampler.logprobs_mode = logprobs_mode
    logits = patched.layers.UnquantizedEmbeddingMethod().apply(head, hidden[5:25])
    assert logits.shape == (20, 5000)
    of_tokens = sys.modules["vllm.v1.worker.gpu.sample.logprob"].compute_token_logprobs
    tokens = logits.argmax(1)
    by_tokens = of_tokens(logits, torch.stack([tokens, tokens], 1))[:, 1]
    sampled, logps = sampler(logits, types.SimpleNamespace(temperature=torch.full([20], temperature)))
    labels = torch.zeros(40, dtype=torch.long)
    labels[6:26] = sampled
    arguments = hidden, weight[:5000], labels, torch.tensor([0, 40], dtype=torch.int32)
    with po.invariant():
        wanted = po.token_logps(*arguments, temperature=torch.full([40], temperature))[5:25]
        plain = po.token_logps(*arguments)[5:25]
    assert torch.equal(logps.gather(1, sampled[:, None])[:, 0], wanted)
    assert torch.equal(by_tokens, plain)
    assert sampler.topk_topp_sampler.logprobs_mode == "raw_logprobs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processed_log_probs_of_the_second_runner(patched, dtype, device):
    """Of logits in float32, after the temperature of each row; without those that are hidden."""
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("a GPU's engine has half types")
    hidden, weight = torch.randn(40, 48, device=device).to(dtype), torch.randn(5000, 48, device=device).to(dtype)
    rows, temperature = torch.arange(19, -1, -1, device=device), torch.rand(20, device=device) + 0.5
    temperature[3:6], temperature[7], temperature[8] = 1.0, 0.0, 0.01
    head = types.SimpleNamespace(weight=torch.nn.Parameter(weight, requires_grad=False), org_vocab_size=5000)
    logits = patched.layers.UnquantizedEmbeddingMethod().apply(head, hidden[5:25])
    of_tokens = sys.modules["vllm.v1.worker.gpu.sample.logprob"].compute_token_logprobs
    sampled, processed = patched.layers.SecondSampler(temperature).sample(logits, rows, return_logprobs=True)
    labels, of_slots = torch.zeros(40, dtype=torch.long, device=device), torch.ones(40, device=device)
    labels[6:26], of_slots[5:25] = sampled, temperature.where(temperature > 0, 1.0)[rows]
    shown = (processed > -float("inf")).nonzero()[:, 1].view(20, -1)  # all but one
    offsets = torch.zeros(41, dtype=torch.long, device=device)
    offsets[7:27] = torch.arange(1, 21, device=device) * shown.shape[1]
    offsets[27:] = offsets[26]
    allowed = {"allowed_ids": shown.flatten(), "allowed_offsets": offsets}
    with po.invariant():
        cu_seqlens = torch.tensor([0, 40], dtype=torch.int32, device=device)
        wanted = po.token_logps(hidden, weight, labels, cu_seqlens, temperature=of_slots, **allowed)[5:25]
    found = of_tokens(processed, torch.stack([sampled, sampled], 1))
    assert torch.equal(found, wanted[:, None].expand(-1, 2))
    penalties = torch.linspace(0, 1, 5000, device=device)
    sampled, processed = patched.layers.SecondSampler(temperature, penalties).sample(logits, rows)
    found = of_tokens(processed, sampled[:, None])[:, 0]
    torch.testing.assert_close(found, processed.log_softmax(-1).gather(-1, sampled[:, None])[:, 0])


def test_sums_do_not_depend_on_where_logits_lie(device):
    """Columns of a wider row, rows that start anywhere, and vocabularies of odd sizes."""
    logits = torch.randn(7, 5056, device=device).bfloat16()
    for vocab in (5000, 5003):
        dense = logits[:, :vocab].contiguous()
        moved = torch.cat([dense.new_zeros(1), dense.flatten()])[1:].view(7, vocab)
        wanted = torch.stack([log_sums_of(row[None].clone(), torch.bfloat16)[0] for row in dense])
        for given in (dense, logits[:, :vocab], moved, dense.float()):
            assert torch.equal(log_sums_of(given, torch.bfloat16), wanted)
