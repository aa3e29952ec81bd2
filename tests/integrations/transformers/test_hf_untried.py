"""Layers whose code says nothing of a state, where they cannot be tried on a packed row: no silent leak.

In a graph, in compiled layers, beside padding, and with weights on other ranks.
"""

import pytest
import torch

pytest.importorskip("transformers")

from test_hf_stateful import CLOSE, LENGTHS, alone, assert_apart, in_llama, logits, one_rank, packed  # noqa: F401

from packing_ops.integrations.transformers import register, stateful_layers


@pytest.fixture(autouse=True)
def registered():
    register()


def averaging():
    """A layer of a class that was never tried: each token gets a mean of those before it, and a mixture of channels."""

    class Averages(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Linear(32, 32)

        def forward(self, x):
            steps = torch.arange(x.shape[1], device=x.device)
            weights = (0.5 ** (steps[:, None] - steps).clamp(min=0)).tril()
            return self.mix(weights.to(x.dtype) @ x)

    return Averages()


def test_in_a_graph(device, fresh_compile):
    torch.manual_seed(0)
    model, (ids, positions, _) = in_llama(averaging(), device), packed(device)
    found = assert_apart(torch.compile(model, backend="eager"), ids, position_ids=positions)
    torch.testing.assert_close(found, alone(model, ids), **CLOSE)


def test_a_compiled_layer(device, fresh_compile):
    torch.manual_seed(0)
    model, (ids, positions, _) = in_llama(averaging(), device), packed(device)
    model.model.layers[0].mlp.compile(backend="eager")
    found = assert_apart(model, ids, position_ids=positions)
    torch.testing.assert_close(found, alone(model, ids), **CLOSE)


def test_beside_padding(device):
    torch.manual_seed(0)
    model = in_llama(averaging(), device)
    ids, _, _ = packed(device)
    mask = torch.repeat_interleave(torch.tensor([1, 2, 3, 0]), torch.tensor(LENGTHS))[None].to(device)
    with torch.no_grad():
        found = model(ids, attention_mask=mask, use_cache=False).logits[:, :-3]
        torch.testing.assert_close(found, alone(model, ids)[:, :-3], **CLOSE)


def in_fsdp2(model, layer):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    fully_shard(layer.mix, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def in_fsdp1(model, layer):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@pytest.mark.parametrize("sharded", [in_fsdp1, in_fsdp2])
@pytest.mark.filterwarnings("ignore:.*Fully ?Sharded ?Data ?Parallel:FutureWarning")
def test_weights_on_other_ranks(sharded, device, one_rank):  # noqa: F811
    if device != "cpu":
        pytest.skip("gloo")
    torch.manual_seed(0)
    layer = averaging()
    model, (ids, positions, _) = in_llama(layer), packed(device)
    for parameter in model.model.layers[0].mlp.first.parameters():
        torch.nn.init.normal_(parameter, std=0.02)  # as new models have it: the layer's own bias hides what it mixes
    wanted = alone(model, ids).detach()
    model = sharded(model, layer)
    torch.testing.assert_close(assert_apart(model, ids, position_ids=positions), wanted, **CLOSE)


def test_what_cannot_be_called_alone_is_refused_in_a_graph(device, fresh_compile, monkeypatch):
    """Until it was tried on a packed row."""
    torch.manual_seed(0)
    monkeypatch.setattr(stateful_layers, "settle", lambda *_: False)
    model, (ids, positions, _) = in_llama(averaging(), device), packed(device)
    call = torch.compile(model, backend="eager")
    logits(call, ids, position_ids=torch.arange(16, device=device)[None])
    if device == "cpu":  # on CUDA a device-side assertion
        with pytest.raises(
            RuntimeError, match=r"got several, and whether Followed carries .* call the model once with"
        ):
            logits(call, ids, position_ids=positions)
    wanted = assert_apart(model, ids, position_ids=positions)
    torch._dynamo.reset()
    torch.testing.assert_close(assert_apart(call, ids, position_ids=positions), wanted, **CLOSE)


def test_a_compiled_layer_that_cannot_be_called_alone_is_refused(device, monkeypatch):
    monkeypatch.setattr(stateful_layers, "settle", lambda *_: False)
    model, (ids, positions, _) = in_llama(averaging(), device), packed(device)
    model.model.layers[0].mlp.compile(backend="eager")
    logits(model, ids)
    with pytest.raises(ValueError, match=r"position_ids: .* got several, and whether Followed carries a state"):
        logits(model, ids, position_ids=positions)
