"""DPO over pairs that share their prompt's rows: log-probs, loss and gradients of the same pairs without sharing."""

import pytest
import torch
import torch.nn.functional as F
from helpers.hf_models import tiny_model

import packing_ops as po
from packing_ops.data import PaddingFreeDPOCollator
from packing_ops.integrations.transformers import register, revert_registration

FORWARD = ("input_ids", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "segment_parents")  # fmt: skip


@pytest.fixture(autouse=True)
def registered():
    register()
    yield
    revert_registration()


def pairs_of(device):
    """Two pairs: of a long prompt, which is part of the target only in the rejected answer, and of a short one."""
    examples = []
    for prompt, *answers in ((140, 9, 5), (6, 3, 4)):
        ids = torch.randint(3, 61, (prompt,), device=device)
        own = [torch.cat([ids, torch.randint(3, 61, (n,), device=device)]) for n in answers]
        labels = [torch.where(torch.arange(len(each), device=device) < prompt, -100, each) for each in own]
        examples.append({"chosen_input_ids": own[0], "rejected_input_ids": own[1],
                         "chosen_labels": labels[0], "rejected_labels": own[1]})  # fmt: skip
    return examples


def dpo_loss(logps, labels, cu_seqlens):
    """From the log-prob of each token's next one, documents end to end."""
    targets = po.shift_labels(labels, cu_seqlens) != -100
    of_answers = po.segment_sum(logps, cu_seqlens, mask=targets)
    chosen, rejected = of_answers.chunk(2)
    return of_answers.detach(), -F.logsigmoid(0.01 * (chosen - rejected)).sum()


def step(model, batch, logps_of):
    model.zero_grad()
    hidden = model.model(**{name: batch[name] for name in FORWARD if name in batch}, use_cache=False).last_hidden_state
    cu_seqlens = batch["sample_cu_seqlens" if "sample_cu_seqlens" in batch else "cu_seq_lens_q"]
    of_answers, loss = dpo_loss(logps_of(hidden, model.lm_head.weight), batch["labels"][0], cu_seqlens)
    loss.backward()
    return [of_answers, loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_step_is_that_of_the_pairs_without_sharing(family, device):
    model = tiny_model(family, attn_implementation="packing_ops", device=device).train()
    examples = pairs_of(device)
    batch = PaddingFreeDPOCollator(share_prompt=True, return_packed_metadata=True)(examples)
    alone = PaddingFreeDPOCollator(concatenated=True, return_seq_idx=False)(examples)
    assert batch["input_ids"].shape[1] == alone["input_ids"].shape[1] - 128
    ids, tree = batch["input_ids"], batch["prefix_tree"]
    shared = step(model, batch, lambda hidden, weight: po.prefix_token_logps(hidden, weight, ids, tree))
    unshared = step(
        model,
        alone,
        lambda hidden, weight: po.token_logps(hidden, weight, alone["input_ids"], alone["cu_seq_lens_q"]),
    )
    assert max(gradient.abs().max() for gradient in unshared[2:]) > 0.01
    for found, expected in zip(shared, unshared, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_row_of_token_takes_logits_to_the_documents(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    examples = pairs_of(device)
    batch = PaddingFreeDPOCollator(share_prompt=True)(examples)
    alone = PaddingFreeDPOCollator(concatenated=True, return_seq_idx=False)(examples)
    with torch.no_grad():
        logits, expected = (
            model(**{name: each[name] for name in FORWARD if name in each}, use_cache=False).logits[0]
            for each in (batch, alone)
        )
    torch.testing.assert_close(logits[batch["slot_of_token"]], expected, rtol=1e-4, atol=1e-4)
