"""checkpoint_policy: bits, what is computed again, and the budget, in a plain loop, transformers, a graph and FSDP2."""

import functools
from collections import Counter

import pytest
import torch
from helpers.processes import spawn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import packing_ops as po
from packing_ops import checkpointing

WIDTH, HEADS, LAYERS = 32, 2, 3
ATTENTION = WIDTH * 4 + HEADS * 4  # bytes a token: out and lse
PRODUCTS = {"qkv": 3 * WIDTH * 4, "o": WIDTH * 4, "up": 4 * WIDTH * 4}  # the last one, down, is not computed again


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.o = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH, bias=False), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, metadata):
        q, k, v = (
            self.qkv(torch.nn.functional.rms_norm(x, (WIDTH,))).view(-1, 3 * HEADS, WIDTH // HEADS).split(HEADS, 1)
        )
        x = x + self.o(po.varlen_attention(q, k, v, metadata).flatten(1))
        return x + self.down(torch.nn.functional.silu(self.up(torch.nn.functional.rms_norm(x, (WIDTH,)))))


class Model(torch.nn.Module):
    """A plain loop over checkpointed layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.contexts = torch.nn.ModuleList(Layer() for _ in range(LAYERS)), {}

    def forward(self, x, metadata):
        for layer in self.layers:
            x = checkpoint(layer, x, metadata, use_reentrant=False, **self.contexts)
        return x.square().mean()


class Seen(TorchDispatchMode):
    """Counts products and attention."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function] += 1
        return function(*args, **kwargs or {})

    @property
    def products(self):
        return self.counts[torch.ops.aten.mm.default] + self.counts[torch.ops.aten.addmm.default]


def row(lengths, seed=0):
    torch.manual_seed(seed)
    metadata = po.PackedMetadata.from_lengths(lengths)
    return torch.randn(metadata.total, WIDTH), metadata


ROWS = [[5, 9, 2], [30], [7, 7], [40, 1]]


def trained(model, rows=ROWS):
    losses = []
    for seed, lengths in enumerate(rows):
        losses.append(model(*row(lengths, seed)))
        losses[-1].backward()
    gradients = [getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)() for p in model.parameters()]
    return [torch.stack(losses).detach(), *gradients]


def same(found, wanted):
    return all(map(torch.equal, found, wanted))


BUDGETS = {  # bytes a token and layer: the products that are kept
    ATTENTION: 0,
    ATTENTION + PRODUCTS["qkv"]: 1,
    ATTENTION + PRODUCTS["qkv"] + PRODUCTS["o"]: 2,
    ATTENTION + sum(PRODUCTS.values()): 3,
    2**20: 3,
}


@pytest.mark.parametrize("budget", ["auto", *BUDGETS])
def test_bits_are_those_of_full_checkpointing(budget):
    wanted, model = trained(Model()), Model()
    model.contexts["context_fn"] = po.checkpoint_policy(model, budget if budget == "auto" else 41 * LAYERS * budget)
    assert same(trained(model), wanted)


@pytest.mark.parametrize(("budget", "kept"), BUDGETS.items())
def test_what_is_kept_is_not_computed_again(budget, kept):
    model, tokens = Model(), 16
    model.contexts["context_fn"] = policy = po.checkpoint_policy(model, budget * LAYERS * tokens)
    model(*row([5, 9, 2])).backward()
    loss = model(*row([5, 9, 2]))
    with Seen() as seen:
        loss.backward()
    assert seen.counts[torch.ops.packing_ops.varlen_attention.default] == 0
    of_gradients = 2 * 4 * LAYERS - 1  # x of the first layer wants none, and it goes through qkv
    assert seen.products - of_gradients == (3 - kept) * LAYERS
    sizes = sum(list(PRODUCTS.values())[:kept]) * tokens
    assert policy.explain() == (
        f"each of 3 layers keeps {sizes + ATTENTION * tokens:,} bytes of {budget * tokens:,}: "
        f"{ATTENTION * tokens:,} of attention, {sizes:,} of {kept} of 4 products"
    )


def test_a_larger_row_stays_within_the_budget():
    """The first layer of it has the products that a smaller row had."""
    model = Model()
    model.contexts["context_fn"] = policy = po.checkpoint_policy(model, LAYERS * 41 * (ATTENTION + PRODUCTS["qkv"]))
    for lengths in ([4], [41], [4], [41]):
        model(*row(lengths)).backward()
        kept = int(policy.explain().split(" bytes of ")[0].rpartition(" ")[2].replace(",", ""))
        fits = ATTENTION + PRODUCTS["qkv"] if lengths == [41] else ATTENTION + sum(PRODUCTS.values())
        assert kept == sum(lengths) * fits


def test_kinds_of_layers_are_apart():
    """Layers with other products take turns."""
    model = Model()
    other = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, WIDTH))
    model.layers.insert(1, other)
    other.forward = lambda x, metadata, forward=other.forward: forward(x)
    wanted = trained(model)
    model.zero_grad()
    model.contexts["context_fn"] = policy = po.checkpoint_policy(model, 4 * 41 * (ATTENTION + PRODUCTS["qkv"]))
    assert same(trained(model), wanted)
    assert "of 1 of 4 products" in policy.explain()


def test_a_budget_that_is_too_small_says_what_is_needed():
    model = Model()
    needed = 16 * ATTENTION
    model.contexts["context_fn"] = po.checkpoint_policy(model, needed * LAYERS - 1)
    wanted = f"budget: expected at least {needed * LAYERS:,} bytes, {needed:,} of attention in each of 3 layers, got"
    with pytest.raises(ValueError, match=wanted):
        model(*row([5, 9, 2]))


def test_auto_without_free_memory_keeps_nothing(monkeypatch):
    wanted, model = trained(Model()), Model()
    monkeypatch.setattr(checkpointing, "SHARE_OF_FREE", 0.0)
    model.contexts["context_fn"] = policy = po.checkpoint_policy(model)
    assert same(trained(model), wanted)
    assert "keeps 0 bytes of 0" in policy.explain()


def test_auto_leaves_room_for_gradients_and_the_optimizer(monkeypatch):
    model, free = Model(), {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(checkpointing.os, "sysconf", free.__getitem__)
    model.layers[0].requires_grad_(False)
    trained_bytes = sum(p.nbytes for layer in model.layers[1:] for p in layer.parameters())
    assert checkpointing._auto(model) == (4_096_000 - 3 * trained_bytes) // 2
    model(*row([3])).backward()
    assert checkpointing._auto(model) == (4_096_000 - 2 * trained_bytes) // 2


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"budget": 0}, ValueError, 'budget: expected a positive number of bytes or "auto", got 0'),
        ({"budget": "all"}, ValueError, "budget: expected a positive number of bytes or \"auto\", got 'all'"),
        ({"budget": True}, ValueError, "budget: expected a positive number of bytes"),
        (
            {"layers": 0},
            ValueError,
            "layers: expected the number of checkpointed calls of a forward, at least 1, got 0",
        ),
        ({"layers": 1.5}, TypeError, "layers: expected an integer, got 1.5"),
        ({"layers": "3"}, TypeError, "layers: expected an integer, got '3'"),
        ({"layers": float("nan")}, TypeError, "layers: expected an integer, got nan"),
        ({"model": torch.nn.Linear(2, 2)}, ValueError, "layers: expected .* at least 1, got 0 in Linear"),
        ({"model": Model}, TypeError, "model: expected a torch.nn.Module, got type"),
    ],
)
def test_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        po.checkpoint_policy(**{"model": Model(), **arguments})


def compiled_layers(model, policy, **how):
    """The checkpoint is in each layer's graph, and the model a plain loop."""
    for layer in model.layers:

        def forward(x, metadata, stock=layer.forward):
            return checkpoint(stock, x, metadata, use_reentrant=False, context_fn=policy)

        layer.forward = forward
        layer.compile(backend="aot_eager_decomp_partition", **how)
    model.forward = lambda x, metadata: (
        functools.reduce(lambda h, layer: layer(h, metadata), model.layers, x).square().mean()
    )


@pytest.mark.parametrize(("budget", "dynamic"), [(ATTENTION, True), (2**20, None)])
def test_compiled_layers(budget, dynamic, fresh_compile):
    """One graph serves all layers, and the longest row is the first."""
    rows = ROWS[::-1]
    wanted, model = trained(Model(), rows), Model()
    policy = po.checkpoint_policy(model, budget * LAYERS * 41)
    compiled_layers(model, policy, dynamic=dynamic, fullgraph=True)
    torch.testing.assert_close(trained(model, rows), wanted)
    loss = model(*row(ROWS[0]))
    with Seen() as seen:
        loss.backward()
    assert seen.counts[torch.ops.packing_ops.varlen_attention.default] == 0
    assert f"of {0 if budget == ATTENTION else 3} of 4 products" in policy.explain()


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp2():
    """Losses and gradients with full checkpointing, with everything kept that fits, and so in compiled layers."""
    found = [trained(sharded(Model()))]
    model = Model()
    model.contexts["context_fn"] = policy = po.checkpoint_policy(model, 2**20)
    found.append(trained(sharded(model)))
    model = Model()
    auto = po.checkpoint_policy(model)
    compiled_layers(model, auto, dynamic=True)  # one graph for all rows
    found.append(trained(sharded(model)))
    return *found, policy.explain(), auto.explain()


def test_fsdp2(tmp_path):
    for wanted, kept, compiled, said, said_of_auto in spawn(fsdp2, 2, tmp_path):
        assert same(kept, wanted)
        torch.testing.assert_close(compiled, wanted)
        assert "of 3 of 4 products" in said
        assert "of 3 of 4 products" in said_of_auto
