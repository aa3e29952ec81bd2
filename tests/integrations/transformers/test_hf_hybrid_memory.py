"""What layers of a hybrid save for their backward, and the two ways to save less."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("transformers")

import torch._functorch.config as functorch_config
from stateful_case import packed
from stateful_models import stateful_model

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops

LENGTHS = [5, 40, 1, 18]
FAMILIES = ["qwen3_5_text", "bamba"]


def swapped(family, device):
    model = stateful_model(family, attn_implementation="sdpa", device=device)
    apply_packing_ops(model)
    return model


def loss_of(model, device):
    ids, positions, cu_seqlens = packed(device, LENGTHS)
    return model(ids, position_ids=positions, use_cache=False, **cu_seqlens).logits.square().mean()


def trained(model, device):
    loss = loss_of(model, device)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def saved_bytes(model, device):
    """Of all storages that the forward saves, but parameters and the logits."""
    kept = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    found = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in kept:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, device)
    del loss
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_memory_budget_of_compiled_layers_is_kept(family, device, fresh_compile):
    """torch's partitioner makes what the convolution and the norms return again: the ops of this library allow it."""
    found, bytes_of = [], []
    for budget in (1.0, 0.75):
        torch._dynamo.reset()
        model = swapped(family, device)
        for layer in model.model.layers:
            layer.compile(backend="aot_eager_decomp_partition", fullgraph=True)
        with functorch_config.patch(activation_memory_budget=budget):
            found.append(trained(model, device))
            bytes_of.append(saved_bytes(model, device))
    torch.testing.assert_close(*found)
    assert bytes_of[1] <= 0.8 * bytes_of[0], bytes_of


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_policy_keeps_scans_and_products(family, device):
    """The bits of full checkpointing, and at most three quarters of what the layers save without it."""
    model, other = swapped(family, device), swapped(family, device)
    plain = saved_bytes(other, device)
    other.gradient_checkpointing_enable({"use_reentrant": False})
    inputs, wanted = saved_bytes(other, device), trained(other, device)
    policy = po.checkpoint_policy(model, 2**30)
    assert all(map(torch.equal, checkpointed(model, policy, device), wanted))
    trained(model, device)  # now the products are known
    said = policy.explain()
    kept = 2 * int(said.partition(" keeps ")[2].partition(" bytes")[0].replace(",", ""))
    assert "0 of attention" not in said
    assert kept + inputs <= 0.75 * plain


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_policy_computes_no_scan_again(family, device):
    model = swapped(family, device)
    policy = po.checkpoint_policy(model, 2**30)
    checkpointed(model, policy, device)
    loss = loss_of(model, device)
    with Seen() as seen:
        loss.backward()
    scan = "mamba2_scan" if family == "bamba" else "gated_delta_rule"
    assert seen.names[f"{scan}_backward"] == 1
    assert seen.names[scan] == 0
    assert seen.names["causal_conv1d"] == 1


class Seen(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[function.__name__.partition(".")[0]] += 1
        return function(*args, **kwargs or {})


def checkpointed(model, policy, device):
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": policy})
    return trained(model, device)
