"""Routers, adapters and gated norms in the mode invariant=True: at least 16 rows."""

import pytest
import torch
from helpers import assert_same

transformers = pytest.importorskip("transformers")
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops  # noqa: E402
from packing_ops.invariance import few_rows  # noqa: E402


class Router(torch.nn.Module):
    def __init__(self, across=False):
        super().__init__()
        self.weight, self.across = torch.nn.Parameter(torch.randn(8, 24)), across

    def forward(self, hidden_states):
        scores = torch.nn.functional.linear(hidden_states.reshape(-1, 24), self.weight)
        return (scores.t(), scores) if self.across else (scores, *scores.topk(2))


@pytest.mark.parametrize(
    "shape", [(24,), (1, 24), (15, 24), (16, 24), (1, 3, 24), (2, 3, 24), (2, 9, 24), (0, 24)], ids=str
)
def test_a_narrow_linear(shape, device):
    module = torch.nn.Linear(24, 8, device=device)
    seen = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randn(shape, device=device, requires_grad=True)
    found = few_rows.in_enough_rows(module, lambda x: module(x), x)
    rows = seen[0].numel() // 24
    assert rows >= few_rows.LEAST_ROWS or x.dim() == 1 or x.numel() == 0
    assert rows == x.numel() // 24 or x.numel() // 24 < few_rows.LEAST_ROWS
    torch.testing.assert_close(found, torch.nn.functional.linear(x, module.weight, module.bias))
    weights = torch.randn_like(found)
    gradients = [
        torch.autograd.grad((out * weights).sum(), x)[0]
        for out in (found, torch.nn.functional.linear(x, module.weight, module.bias))
    ]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shape", [(3, 24), (1, 3, 24), (2, 3, 24), (40, 24)], ids=str)
@pytest.mark.parametrize("across", [False, True], ids=["by rows", "rows elsewhere"])
def test_a_router(shape, across):
    """Results whose rows lie elsewhere are those of the rows as they came."""
    module, x = Router(across), torch.randn(shape)
    for found, wanted in zip(few_rows.in_enough_rows(module, None, x), module(x), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("module", "more"),
    [
        (torch.nn.Linear(4096, 64), True),
        (torch.nn.Linear(16, 4096), True),
        (torch.nn.Linear(128, 128), False),
        (torch.nn.Embedding(512, 16), False),
        (torch.nn.LayerNorm(16), False),
        (Router(), True),
    ],
    ids=lambda value: str(value),
)
def test_which(module, more):
    assert few_rows.is_narrow(module) is more


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: the CPU has 16 rows in each product")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_routers_and_adapters_of_few_rows(dtype, compiled, fresh_compile):
    """4,096 terms in 24 and 32 columns: cuBLASLt sums those of 1 to 3 rows in another order. A compiled router's
    softmax is a kernel of torch.compile, which may sum as the number of rows says: there the product alone is compared.
    """
    peft = pytest.importorskip("peft")
    sizes = {"hidden_size": 4096, "intermediate_size": 128, "num_attention_heads": 32, "num_key_value_heads": 8}
    experts = {"num_local_experts": 24, "num_experts_per_tok": 2, "vocab_size": 256, "num_hidden_layers": 1}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **experts, head_dim=128))
    model = model.to("cuda", dtype)
    options = {"r": 32, "target_modules": ["q_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(model, peft.LoraConfig(**options), autocast_adapter_dtype=False)
    inner = model.get_base_model()
    applied = apply_packing_ops(inner, invariant=True)
    assert applied.skipped == {}
    narrow = [module for module in inner.modules() if few_rows.is_narrow(module)]
    assert len(narrow) == 3  # the router, and the two of an adapter
    hidden = torch.randn(64, 4096, device="cuda", dtype=dtype)
    for module in narrow:
        of = hidden[:, : module.weight.shape[1]]
        run = torch.compile(module, fullgraph=True) if compiled else module
        whole = run(of)
        for rows in (1, 2, 3, 4, 15, 16, 17):
            pairs = list(zip(as_tuple(run(of[:rows])), as_tuple(whole), strict=True))
            for found, wanted in pairs[:1] if compiled else pairs:
                assert_same(found, wanted[:rows])
    revert_packing_ops(inner)
    assert not any("forward" in vars(module) for module in inner.modules())


def as_tuple(out):
    return out if isinstance(out, tuple) else (out,)


def test_around_a_product_not_around_what_holds_one():
    """An adapter's layer shows its base's weight. Rows added around both would add the gradients in another order."""
    peft = pytest.importorskip("peft")
    model = torch.nn.Sequential(torch.nn.Linear(24, 8))
    layer = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["0"])).base_model.model[0]
    assert layer.weight.shape == (8, 24)
    assert not few_rows.is_narrow(layer)
    assert few_rows.is_narrow(layer.base_layer)
