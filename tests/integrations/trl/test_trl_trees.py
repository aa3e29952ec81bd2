"""enable_tree_attention: rows as TRL's asynchronous GRPO trainer packs them, against each sample separately."""

import pytest
import torch
from helpers.hf_models import FAMILIES, tiny_model, transformers

packing = pytest.importorskip("trl.experimental.async_grpo.packing")
if not hasattr(packing, "TreeRow"):
    pytest.skip("this TRL has no trees", allow_module_level=True)
from packing_ops.integrations.trl import enable_tree_attention, revert_tree_attention  # noqa: E402


@pytest.fixture(autouse=True)
def enabled():
    enable_tree_attention()
    yield
    revert_tree_attention()


def row_of(samples):
    row = packing.TreeRow()
    for sample in samples:
        mask = torch.arange(len(sample)) > 3
        row.add({"input_ids": sample, "completion_mask": mask, "old_log_probs": torch.zeros(len(sample)), "advantage": 1.0, "group_id": 0})  # fmt: skip
    return row, row.pack()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_are_those_of_the_samples(family, device):
    model = tiny_model(family, attn_implementation=packing.TREE_ATTENTION, device=device)
    prompt, turn = torch.randint(3, 61, (70,)), torch.randint(3, 61, (9,))
    samples = [torch.cat([prompt, turn, torch.randint(3, 61, (n,))]) for n in (1, 6, 20)] + [torch.cat([prompt, turn]), prompt[:5]]  # fmt: skip
    _, given = row_of(samples)
    given = {name: tensor.to(device) for name, tensor in given.items()}
    tree = {name: given[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    tree["tree_max_seqlen_q"], tree["tree_max_seqlen_k"] = given["tree_max_seqlens"].tolist()
    logits = model(given["input_ids"][None], position_ids=given["position_ids"][None], use_cache=False, **tree).logits[
        0
    ]
    weights = torch.randn(len(given["token_index"]), device=device)
    targets = given["shift_labels"][given["token_index"]]
    shared = logits.log_softmax(-1)[given["token_index"]].gather(1, targets[:, None])[:, 0]
    model.zero_grad()
    (shared * weights).sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model.set_attn_implementation("eager")
    model.zero_grad()
    logps = []
    for sample in (each.to(device) for each in samples):
        alone = model(sample[None], use_cache=False).logits[0].log_softmax(-1)[:-1].gather(1, sample[1:, None])[:, 0]
        logps.append(alone[3:])
    (torch.cat(logps) * weights).sum().backward()
    torch.testing.assert_close(shared, torch.cat(logps), rtol=2e-4, atol=2e-4)
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(gradients, expected, rtol=2e-3, atol=2e-3)


def test_it_is_put_in_and_taken_out():
    ours = transformers.AttentionInterface._global_mapping[packing.TREE_ATTENTION]
    enable_tree_attention()
    packing.register_tree_attention()  # as the trainer does when it is made
    assert transformers.AttentionInterface._global_mapping[packing.TREE_ATTENTION] is ours
    revert_tree_attention()
    stock = transformers.AttentionInterface._global_mapping[packing.TREE_ATTENTION]
    assert stock is not ours
    assert stock is packing.tree_attention
    assert stock.__module__ == packing.__name__


def test_dropout_is_refused(device):
    model = tiny_model(
        "llama", attn_implementation=packing.TREE_ATTENTION, device=device, attention_dropout=0.5
    ).train()
    _, given = row_of([torch.arange(5, 15), torch.arange(5, 12)])
    tree = {name: given[name].to(device) for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    with pytest.raises(NotImplementedError, match=r"dropout: expected 0\.0 over a prefix tree"):
        model(given["input_ids"][None].to(device), position_ids=given["position_ids"][None].to(device), **tree)
