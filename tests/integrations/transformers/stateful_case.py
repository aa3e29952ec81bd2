"""What tests of layers with a state share: a packed row, what shows that its documents are apart, layers to put in."""

import torch
from helpers import cu_seqlens_of
from helpers.hf_models import tiny_model

LENGTHS = [5, 7, 1, 3]
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def packed(device, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (1, sum(lengths)), generator=generator).to(device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    cu_seqlens = cu_seqlens_of(lengths, device)
    return ids, positions, {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}


def others_of(ids, first):
    """The same row, other tokens in its first document."""
    changed = ids.clone()
    changed[:, :first] = (ids[:, :first] + 11) % 50 + 3
    return changed


def logits(model, ids, **given):
    with torch.no_grad():
        return model(ids, use_cache=False, **given).logits


def assert_apart(model, ids, first=LENGTHS[0], **given):
    one, other = (logits(model, each, **given) for each in (ids, others_of(ids, first)))
    assert not torch.equal(one[:, :first], other[:, :first])
    assert torch.equal(one[:, first:], other[:, first:])
    return one


def alone(model, ids, lengths=LENGTHS):
    return torch.cat([model(row, use_cache=False).logits for row in ids.split(lengths, 1)], 1)


# --- layers of nobody's family ---


def in_llama(layer, device="cpu"):
    """A Llama of one block, whose MLP is followed by this layer."""
    torch.manual_seed(0)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device, num_hidden_layers=1)
    first = model.model.layers[0]
    first.mlp = torch.nn.Sequential(first.mlp, layer.to(device))
    return model


class Blur(torch.nn.Module):
    """Knows nobody's words."""

    def __init__(self):
        super().__init__()
        self.taps = torch.nn.Conv1d(32, 32, 3, padding=2, groups=32)

    def forward(self, x):
        return self.taps(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class Decays(torch.nn.Module):
    """A state in nobody's words: its code has none of a recurrence."""

    def forward(self, x):
        steps = torch.arange(x.shape[1], device=x.device)
        weights = (0.5 ** (steps[:, None] - steps).clamp(min=0)).tril()
        return weights.to(x.dtype) @ x


def behind_attention(layer, call, device):
    """A Llama of one block, which ends with call(layer, hidden states)."""
    torch.manual_seed(0)
    model = tiny_model("llama", attn_implementation="packing_ops", device=device, num_hidden_layers=1)
    first = model.model.layers[0]

    class Own(type(first)):
        def forward(self, hidden, *args, **kwargs):
            return call(self.extra, super().forward(hidden, *args, **kwargs))

    first.extra, first.__class__ = layer.to(device), Own
    return model
