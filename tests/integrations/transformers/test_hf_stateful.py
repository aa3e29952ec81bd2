"""Models with layers that carry a state: no document of a packed row sees another, or an error says why."""

import copy
import functools
import pickle
import sys
import threading

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers import fresh_process  # noqa: E402
from helpers.hf_models import CACHE, tiny_model  # noqa: E402
from stateful_case import CLOSE, LENGTHS, Blur, alone, assert_apart, behind_attention, in_llama, logits, packed  # noqa: E402
from stateful_models import SERVED, stateful_model  # noqa: E402

from packing_ops.integrations.transformers import (  # noqa: E402
    apply_packing_ops,
    call,
    register,
    revert_packing_ops,
    revert_registration,
)
from packing_ops.integrations.transformers.states import stateful  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    register()


# --- every kind of layer ---


@pytest.mark.parametrize("family", SERVED)
def test_documents_are_apart_to_the_bit_and_as_alone(family, device):
    model, stock = (
        stateful_model(family, device=device),
        stateful_model(family, attn_implementation="eager", device=device),
    )
    ids, positions, told = packed(device)
    wanted = alone(stock, ids)
    numbers = {"attention_mask": torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))[None].to(device)}
    if family == "recurrent_gemma":  # needs positions: its state starts at 0
        numbers["position_ids"] = positions
    for given in ({"position_ids": positions}, {"position_ids": positions, **told}, numbers):
        torch.testing.assert_close(assert_apart(model, ids, **given), wanted, **CLOSE)


@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpointing", "reentrant"])
@pytest.mark.parametrize("family", SERVED)
def test_loss_and_gradients_are_those_of_each_document_alone(family, checkpointing, device):
    if checkpointing is not None and family not in ("qwen3_next", "jamba", "recurrent_gemma"):
        pytest.skip("one layer that is given keywords, one that is not, and one that gets them by position")
    model, stock = (
        stateful_model(family, device=device),
        stateful_model(family, attn_implementation="eager", device=device),
    )
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    ids, positions, _ = packed(device)
    weights = torch.randn(1, sum(LENGTHS), 61, device=device)
    found = model(ids, position_ids=positions, use_cache=False).logits
    wanted = alone(stock, ids)
    torch.testing.assert_close(found, wanted, **CLOSE)
    for each in (found, wanted):
        (each * weights).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), stock.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            scale = theirs.grad.abs().max().item()
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7, msg=name)


# --- one of them ---


@pytest.mark.parametrize("family", ["lfm2", "jamba"])
def test_several_rows_with_padding(family, device):
    """Two documents and padding on both sides, one document, nothing but padding."""
    model, stock = (
        stateful_model(family, device=device),
        stateful_model(family, attn_implementation="eager", device=device),
    )
    ids = torch.randint(3, 60, (3, 8), generator=torch.Generator().manual_seed(2)).to(device)
    mask = torch.tensor([[0, 1, 1, 1, 2, 2, 0, 0], [1] * 8, [0] * 8], device=device)
    found = logits(model, ids, attention_mask=mask)
    for row, tokens in ((0, slice(1, 4)), (0, slice(4, 6)), (1, slice(0, 8))):
        torch.testing.assert_close(found[row, tokens], logits(stock, ids[row : row + 1, tokens])[0], **CLOSE)
    changed = ids.clone()
    changed[0, 1:4] += 1
    assert torch.equal(logits(model, changed, attention_mask=mask)[0, 4:6], found[0, 4:6])


def test_one_document_in_each_row_runs_the_stock_layer(device, monkeypatch):
    model, stock = (
        stateful_model("lfm2", device=device),
        stateful_model("lfm2", attn_implementation="eager", device=device),
    )
    monkeypatch.setattr(stateful, "run_in_rows", None)
    ids = torch.randint(3, 60, (2, 6), device=device)
    positions = torch.arange(6, device=device)[None]
    for given in ({}, {"position_ids": positions}, {"attention_mask": torch.ones_like(ids)}):
        torch.testing.assert_close(logits(model, ids, **given), logits(stock, ids, **given), **CLOSE)


def test_a_cache_goes_on_with_one_document_only(device):
    model = stateful_model("lfm2", device=device).eval()
    ids, positions, _ = packed(device)
    cache = model(ids, position_ids=positions, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=f"{CACHE}: expected a cache of one document"):
        model(ids[:, :1], **{CACHE: cache})
    cache = model(ids[:, :5], use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=rf"{CACHE}: expected an empty cache beside several documents .* got 5 tokens"):
        model(ids[:, 5:], position_ids=positions[:, 5:], **{CACHE: cache})


def test_generation_is_the_stock_models(device):
    ids = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(3)).to(device)
    models = [
        stateful_model("lfm2", attn_implementation=name, device=device).eval() for name in ("packing_ops", "eager")
    ]
    ours, stock = (model.generate(ids, max_new_tokens=4, do_sample=False) for model in models)
    assert torch.equal(ours, stock)


def test_compiled(device, fresh_compile):
    """Also a model that was never called before; how many documents a row has breaks the graph at each of its
    layers.
    """
    ids, positions, _ = packed(device)
    wanted = logits(stateful_model("lfm2", device=device), ids, position_ids=positions)
    model = torch.compile(stateful_model("lfm2", device=device), backend="eager")
    torch.testing.assert_close(assert_apart(model, ids, position_ids=positions), wanted, **CLOSE)
    one = torch.arange(16, device=device)[None]
    stock = stateful_model("lfm2", attn_implementation="eager", device=device)
    torch.testing.assert_close(logits(model, ids, position_ids=one), logits(stock, ids), **CLOSE)


@pytest.mark.parametrize("compiled", ["layers", "model"])
def test_compiled_in_two_threads_at_once(compiled, device, fresh_compile):
    """Layers of both run when both calls have begun, and both have found their documents. Their graphs are there
    before: torch cannot trace beside another thread, stock models neither.
    """
    lengths = [LENGTHS, [9, 4, 3]]
    models, inputs = (
        [stateful_model("lfm2", device=device) for _ in lengths],
        [packed(device, each) for each in lengths],
    )
    found, waits, both = {}, [], threading.Barrier(2)

    @torch.compiler.disable
    def meet(*_):
        if waits:
            both.wait(60)

    def run(i):
        return logits(models[i], inputs[i][0], position_ids=inputs[i][1])

    wanted = [run(i) for i in range(2)]
    for model in models:
        model.model.layers[0].register_forward_pre_hook(meet)
        for part in model.model.layers if compiled == "layers" else [model]:
            part.compile(backend="eager")
    for i in range(2):
        run(i)
    waits.append(True)
    threads = [threading.Thread(target=lambda i=i: found.update({i: run(i)})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, each in enumerate(wanted):
        torch.testing.assert_close(found[i], each, **CLOSE)


def test_compiled_to_one_graph_is_an_error(device, fresh_compile):
    ids, positions, _ = packed(device)
    model = torch.compile(stateful_model("lfm2", device=device), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="packing_ops: how many documents a row has"):
        model(ids, position_ids=positions, use_cache=False)
    assert model(ids, use_cache=False).logits.shape == (1, 16, 61)  # one document in each row


# --- wrapped, copied, reverted ---


@pytest.mark.parametrize("checkpointing", [False, True])
def test_in_fsdp(checkpointing, device, one_rank):
    if device != "cpu":
        pytest.skip("gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ids, positions, _ = packed(device)
    model, plain = stateful_model("jamba"), stateful_model("jamba")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_apart(model, ids, position_ids=positions)
    for each in (model, plain):
        each(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-5, msg=name)


def in_fsdp1(model):
    from torch.distributed.fsdp import FullyShardedDataParallel, wrap

    layers = {type(layer) for layer in model.model.layers}
    policy = functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls=layers)
    one = {"use_orig_params": True, "device_id": torch.device("cpu")}
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **one)


WRAPPERS = {
    "FSDP1": in_fsdp1,
    "DDP": torch.nn.parallel.DistributedDataParallel,
    "DataParallel": torch.nn.DataParallel,
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.filterwarnings("ignore:.*Fully ?Sharded ?Data ?Parallel:FutureWarning")
def test_in_a_wrapper(wrapper, device, one_rank):
    if device != "cpu" or (wrapper == "DataParallel" and torch.cuda.is_available()):
        pytest.skip("gloo, and DataParallel takes every GPU")
    ids, positions, _ = packed(device)
    model, plain = stateful_model("lfm2"), stateful_model("lfm2")
    wrapped = WRAPPERS[wrapper](model)
    assert_apart(wrapped, ids, position_ids=positions)
    for each in (wrapped, plain):
        each(ids, position_ids=positions, labels=ids, use_cache=False).loss.backward()
    for (name, theirs), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", ["mamba", "lfm2"])
def test_a_call_inside_of_another_has_its_documents(family, device):
    """A wrapper calls one model with two rows of one length that hold other documents."""
    model = stateful_model(family, device=device)
    (first, positions, _), (second, others, _) = packed(device, [5, 7, 4]), packed(device, [2, 9, 5])

    class Twice(transformers.PreTrainedModel):
        _supports_attention_backend = _supports_sdpa = True
        config_class = type(model.config)

        def __init__(self):
            super().__init__(model.config)
            self.model = model

        def forward(self, input_ids, position_ids=None, other=None, other_positions=None):
            rows = (input_ids, position_ids), (other, other_positions)
            return [self.model(ids, position_ids=where, use_cache=False).logits for ids, where in rows]

    found = Twice()(first, position_ids=positions, other=second, other_positions=others)
    for logits_of, (row, where) in zip(found, ((first, positions), (second, others)), strict=True):
        assert torch.equal(logits_of, model(row, position_ids=where, use_cache=False).logits)


def test_applied_copied_and_reverted(device):
    model = stateful_model("jamba", attn_implementation="eager", device=device)
    ids, positions, _ = packed(device)
    before = logits(model, ids, position_ids=positions)
    with pytest.warns(UserWarning, match="rope of JambaForCausalLM"):
        apply_packing_ops(model)
    wanted = assert_apart(model, ids, position_ids=positions)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(assert_apart(other, ids, position_ids=positions), wanted)
        other.model.layers[0].mamba.conv1d.weight.data.zero_()  # of the other model
    assert torch.equal(logits(model, ids, position_ids=positions), wanted)
    revert_packing_ops(model)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(logits(model, ids, position_ids=positions), before)


def test_unregister_puts_every_layer_back(device):
    others = [name for name in call.NAMES if name != "packing_ops"]
    call.NAMES.difference_update(others)  # the last, whatever others left
    model = stateful_model("lfm2", attn_implementation="packing_ops", device=device)
    ids, positions, _ = packed(device)
    logits(model, ids, position_ids=positions)
    assert any("forward" in module.__dict__ for module in model.modules())
    revert_registration()
    try:
        assert not any("forward" in module.__dict__ for module in model.modules())
    finally:
        register()
        call.NAMES.update(others)


# --- found by what they are ---


class Remembers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.GRU(32, 32, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


class ByPlace(Blur):
    """Its hidden states have no name."""

    def forward(self, *args):
        return super().forward(*args)


class OnlyByPlace(Remembers):
    def forward(self, x, /):
        return super().forward(x)


class NumbersFirst(Blur):
    """Hidden states are not the first of its tensors."""

    def forward(self, numbers, x):
        return super().forward(x) * numbers[..., None]


def given_numbers(hidden):
    return torch.ones(hidden.shape[:2], dtype=torch.int64, device=hidden.device), hidden


@pytest.mark.parametrize("layer", [Blur, Remembers, ByPlace, OnlyByPlace])
def test_layers_that_nobody_named(layer, device):
    model = in_llama(layer(), device)
    ids, positions, _ = packed(device)
    found = assert_apart(model, ids, position_ids=positions)
    with torch.no_grad():
        torch.testing.assert_close(found, alone(model, ids), **CLOSE)


def test_hidden_states_behind_other_tensors(device):
    model = in_llama(NumbersFirst(), device)
    mlp, layer = model.model.layers[0].mlp
    model.model.layers[0].mlp.forward = lambda hidden: layer(*given_numbers(mlp(hidden)))
    ids, positions, _ = packed(device)
    found = assert_apart(model, ids, position_ids=positions)
    with torch.no_grad():
        torch.testing.assert_close(found, alone(model, ids), **CLOSE)


class Ahead(Blur):
    """Reads the next token too: rows of other lengths would see their padding."""

    def forward(self, x):
        return torch.nn.functional.conv1d(x.transpose(1, 2), self.taps.weight, padding=1, groups=32).transpose(1, 2)


def test_layers_that_read_ahead_are_refused(device):
    ids, positions, _ = packed(device)
    with pytest.raises(
        ValueError, match=r"position_ids: .* got several, and Ahead carries .* reads tokens ahead; give each"
    ):
        in_llama(Ahead(), device)(ids, position_ids=positions)
    assert in_llama(Ahead(), device)(ids).logits.shape == (1, 16, 61)


def test_attention_with_a_convolution_inside_is_refused(device):
    model = in_llama(torch.nn.Identity(), device)
    attention = model.model.layers[0].self_attn
    attention.shift = torch.nn.Conv1d(32, 32, 2, device=device)
    ids, positions, _ = packed(device)
    message = (
        "got several, and LlamaAttention carries a state along the sequence and calls attention inside, .*; give each"
    )
    with pytest.raises(ValueError, match=message):
        model(ids, position_ids=positions)
    assert model(ids).logits.shape == (1, 16, 61)


def test_attention_alone_is_left_alone(device):
    """What it looks for is in none of it, and nothing is put in."""
    for family in ("llama", "gemma3", "gpt_oss"):
        model = tiny_model(family, attn_implementation="packing_ops", device=device)
        assert stateful.layers_of(model) == {}
        ids, positions, _ = packed(device)
        logits(model, ids, position_ids=positions)
        assert not any("forward" in module.__dict__ for module in model.modules())


class Pools(Blur):
    """One vector for the row."""

    def forward(self, x):
        return super().forward(x).mean(1)


def test_a_layer_without_results_by_token_is_refused(device):
    model = behind_attention(Pools(), lambda layer, x: x + layer(x)[:, None], device)
    ids, positions, _ = packed(device)
    with pytest.raises(
        ValueError, match=r"position_ids: .* Pools carries a state .* returns nothing for each token; give"
    ):
        model(ids, position_ids=positions)


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_attention_of_its_own_follows_a_mask_that_there_is(family, device):
    """Without a mask it is refused, see causal_families.json."""
    import causal_families

    model = causal_families.model_of(family, "packing_ops").to(device)
    ids, _, _ = packed(device)
    numbers = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS))[None].to(device)
    assert_apart(model, ids % 47 + 3, attention_mask=numbers)


# --- kernels that take documents ---

CAUSAL_CONV1D = '''
import torch

calls = []


def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None):
    """[batch, dim, seqlen], as the package of this name has it."""
    calls.append(seq_idx)
    out = 0
    for back in range(weight.shape[1]):
        tap = torch.nn.functional.pad(x, (back, 0))[..., : x.shape[-1]] * weight[:, -1 - back, None]
        if seq_idx is not None:
            tap = tap * (torch.nn.functional.pad(seq_idx, (back, 0), value=-1)[:, None, : x.shape[-1]] == seq_idx[:, None])
        out = out + tap
    out = out if bias is None else out + bias[:, None]
    return torch.nn.functional.silu(out) if activation == "silu" else out


def causal_conv1d_update(*args):
    raise NotImplementedError
'''
WITH_KERNELS = """
import causal_conv1d, torch
import stateful_case as case
from stateful_models import stateful_model
from packing_ops.integrations.transformers import register
from packing_ops.integrations.transformers.states import stateful
register()
ids, positions, told = case.packed("cpu")
model = stateful_model("lfm2")
wanted = case.alone(model, ids)
assert causal_conv1d.calls and all(each is None for each in causal_conv1d.calls)
case.assert_apart(model, ids, position_ids=positions)
causal_conv1d.calls.clear()
run_in_rows = stateful.run_in_rows
stateful.run_in_rows = None  # one call of the kernel, for all documents
torch.testing.assert_close(case.logits(model, ids, position_ids=positions), wanted, **case.CLOSE)
assert [each.tolist() for each in causal_conv1d.calls] == [[[0] * 5 + [1] * 7 + [2] + [3] * 3]]
stateful.run_in_rows = run_in_rows
found = case.logits(stateful_model("jamba"), ids, position_ids=positions)  # its scan takes no boundaries
torch.testing.assert_close(found, case.alone(stateful_model("jamba"), ids), **case.CLOSE)
"""


def test_kernels_that_take_boundaries_get_them(tmp_path):
    (tmp_path / "causal_conv1d.py").write_text(CAUSAL_CONV1D)
    fresh_process.run("-c", WITH_KERNELS, folder=tmp_path, paths=[tmp_path, *sys.path])


def test_arguments_of_a_layer_keep_their_places():
    from packing_ops.integrations.transformers.states.stateful_rows import by_name

    class Layer:
        def forward(self, hidden_states, mask=None, *more, scale=1):
            return hidden_states, mask, more, scale

    layer = Layer()
    run, named = by_name(layer, layer.forward, (1, 2, 3), {"scale": 4})
    assert run(**named) == (1, 2, (3,), 4)
    with pytest.raises(
        TypeError, match="hidden_states: expected one value for Layer, got one by place and one by name"
    ):
        by_name(layer, layer.forward, (1,), {"hidden_states": 2})
