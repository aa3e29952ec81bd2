"""A KV cache that was filled with several documents in a row is no prefix of any of them."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from helpers import cu_seqlens_of

transformers = pytest.importorskip("transformers")

from helpers.gpu_asserts import refused  # noqa: E402
from helpers.hf_models import CACHE, tiny_model  # noqa: E402
from stateful_case import packed  # noqa: E402
from stateful_models import SERVED, stateful_model  # noqa: E402

import packing_ops  # noqa: E402
from packing_ops._runtime import arguments  # noqa: E402
from packing_ops.integrations.transformers import register  # noqa: E402
from packing_ops.integrations.transformers.states.stateful_rows import CACHES  # noqa: E402

LENGTHS = [5, 7, 4]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
REFUSED = f"{CACHE}: expected a cache of one document in each row"


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register()
    arguments.warned.clear()


def prompts(kind, device):
    """What fills the cache: a packed row, described in several ways, or rows of one document each."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    given = {
        "positions": {"position_ids": positions},
        "cu_seqlens": {"position_ids": positions, "cu_seq_lens_q": cu_seqlens_of(LENGTHS)},
        "numbers": {"attention_mask": torch.repeat_interleave(torch.arange(1, 4), torch.tensor(LENGTHS))[None]},
        "one document": {"position_ids": torch.arange(16)[None]},
        "nothing": {},
        "padding": {"attention_mask": (torch.arange(16) >= 4).long()[None], "position_ids": torch.arange(16)[None] - 4},
    }[kind]
    if kind == "padding":
        given["position_ids"] = given["position_ids"].clamp(min=0)
    ids = torch.randint(3, 60, (1, 16), generator=torch.Generator().manual_seed(1))
    return {name: value.to(device) for name, value in {"input_ids": ids, **given}.items()}


def filled(model, kind, cache="dynamic", device="cpu"):
    kept = transformers.DynamicCache(config=model.config)
    if cache == "static":
        kept = transformers.StaticCache(config=model.config, max_cache_len=32)
    model(**prompts(kind, device), **{CACHE: kept}, use_cache=True)
    return kept


def more(model, kept, kind="positions", length=1, call=None):
    device = model.device
    given = {"position_ids": torch.arange(4, 4 + length, device=device)[None]}
    if kind == "padding":
        given = {"attention_mask": (torch.arange(16 + length, device=device) >= 4).long()[None]}
    ids = torch.arange(5, 5 + length, device=device)[None]
    return (model if call is None else call)(ids, **{CACHE: kept}, use_cache=True, **given).logits


@pytest.mark.parametrize(
    ("kind", "cache"),
    [
        ("positions", "dynamic"),
        ("cu_seqlens", "dynamic"),
        ("numbers", "dynamic"),
        ("positions", "static"),
        ("numbers", "static"),
    ],
)
@pytest.mark.parametrize("length", [1, 3])
@torch.no_grad()
def test_it_is_refused(kind, cache, length, device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    kept = filled(model, kind, cache, device)
    for _ in range(2):
        with pytest.raises(ValueError, match=REFUSED):
            more(model, kept, length=length)
    with pytest.raises(ValueError, match=REFUSED):
        more(model, copy.deepcopy(kept), length=length)
    with pytest.raises(ValueError, match=REFUSED):
        more(model, kept, length=length, call=model.forward)
    kept.reset()
    if kept.get_seq_length() == 0:  # transformers 5.17 sets the keys of a growing cache to zero, and keeps them
        more(model, kept, length=4)
        more(model, kept)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_a_negative_number_of_a_cached_token_is_refused(cache, device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    kept, mask = filled(model, "nothing", cache, device), torch.ones(1, 19, dtype=torch.long, device=device)
    mask[0, 2] = -1
    with pytest.raises(ValueError, match=r"attention_mask: expected 0 for padding .* got a negative one"):
        model(torch.tensor([[5, 6, 7]], device=device), **{CACHE: kept}, use_cache=True, attention_mask=mask)


@pytest.mark.parametrize("kind", ["one document", "nothing", "padding"])
@pytest.mark.parametrize(("family", "cache"), [("llama", "dynamic"), ("llama", "static"), ("gemma3", "dynamic")])
@torch.no_grad()
def test_one_document_goes_on(kind, family, cache, device):
    model = tiny_model(family, attn_implementation="packing_ops", device=device)
    stock = tiny_model(family, device=device)
    kept, wanted = filled(model, kind, cache, device), filled(stock, kind, cache, device)
    for length in (1, 3, 1):
        torch.testing.assert_close(more(model, kept, kind, length), more(stock, wanted, kind, length), **CLOSE)


@torch.no_grad()
def test_a_cache_has_one_attribute_of_ours(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    kept = filled(model, "padding", device=device)
    more(model, kept, "padding")
    assert len([name for name in vars(kept) if "packing_ops" in name]) == 1


@torch.no_grad()
def test_masks_of_several_kinds_in_one_forward(device):
    """The documents that start next to the cache are asked about in the next forward, not in the second mask of this
    one.
    """
    model = tiny_model("gemma3", attn_implementation="packing_ops", device=device)
    kept = filled(model, "one document", device=device)
    ids = torch.arange(3, 9, device=device)[None]
    given = {"position_ids": torch.tensor([[16, 17, 0, 1, 2, 3]], device=device), "use_cache": True}
    model(ids, **{CACHE: kept}, **given)
    with pytest.raises(ValueError, match=REFUSED):
        model(ids, **{CACHE: kept}, **given)


@pytest.mark.parametrize("kind", ["positions", "cu_seqlens", "cu_seqlens alone", "positions and a mask"])
@pytest.mark.parametrize(("family", "cache"), [("llama", "dynamic"), ("llama", "static"), ("gemma3", "dynamic")])
@torch.no_grad()
def test_documents_that_start_behind_cached_tokens_are_refused(kind, family, cache, device):
    """The first of them would see the cached tokens, and count its positions from 0."""
    model = tiny_model(family, attn_implementation="packing_ops", device=device)
    kept, given = filled(model, "one document", cache, device), prompts(kind.split()[0], device)
    if kind == "cu_seqlens alone":
        del given["position_ids"]
    if kind == "positions and a mask":
        given["attention_mask"] = torch.ones(1, 32, dtype=torch.long, device=device)
    with pytest.raises(
        ValueError, match=f"{CACHE}: expected an empty cache, got a filled one beside several documents"
    ):
        model(**given, **{CACHE: kept}, use_cache=True)


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", "positions"), ("llama", "one document"), ("llama", "padding"), ("shared keys", "positions")],
)
@torch.no_grad()
def test_a_cache_made_of_the_tensors_of_another(family, kind, length, device, reads):
    """Nothing says what filled it. It holds other documents if position_ids count fewer tokens than it has."""
    if family == "shared keys":
        model = sharing("packing_ops", device)
    else:
        model = tiny_model(family, attn_implementation="packing_ops", device=device)
    kept = filled(model, kind, device=device)
    made = transformers.DynamicCache([layer[:2] for layer in kept])
    if kind == "positions":
        for _ in range(2):
            with pytest.raises(ValueError, match=REFUSED):
                more(model, made, length=length)
        return
    given = {"position_ids": torch.arange(16, 16 + length, device=device)[None]}
    if kind == "padding":
        mask = (torch.arange(16 + length, device=device) >= 4).long()[None]
        given = {"attention_mask": mask, "position_ids": given["position_ids"] - 4}
    ids = torch.arange(5, 5 + length, device=device)[None]
    found, wanted = (model(ids, **{CACHE: each}, use_cache=True, **given).logits for each in (made, kept))
    torch.testing.assert_close(found, wanted)
    reads.clear()
    more(model, made)
    assert len(reads) == (length > 1)  # several tokens are asked about, as in every cache


@pytest.mark.parametrize("kind", ["positions", "cu_seqlens", "numbers"])
@torch.no_grad()
def test_a_cropped_cache_goes_on_with_one_document(kind, device, reads):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    kept, first = filled(model, kind, device=device), transformers.DynamicCache(config=model.config)
    kept.crop(-LENGTHS[2])
    for length in (1, 3):
        with pytest.raises(ValueError, match=REFUSED):
            more(model, kept, length=length)
    kept.crop(-LENGTHS[1])
    model(prompts(kind, device)["input_ids"][:, : LENGTHS[0]], **{CACHE: first}, use_cache=True)
    for length in (1, 3, 1):
        wanted = more(model, first, length=length)
        reads.clear()
        torch.testing.assert_close(more(model, kept, length=length), wanted, **CLOSE)
        assert len(reads) <= 1
    model(**prompts("one document", device), **{CACHE: kept}, use_cache=True)


@torch.no_grad()
def test_a_cropped_cache_of_layers_with_a_state_is_refused(device):
    """Their state is of all that filled it."""
    model = stateful_model("lfm2", device=device).eval()
    ids, positions, _ = packed(device)
    kept = model(ids, position_ids=positions, use_cache=True)[CACHE]
    for layer in kept.layers:
        if hasattr(layer, "get_seq_length"):
            layer.crop(-11)
    assert kept.get_seq_length() == 5
    with pytest.raises(ValueError, match=REFUSED):
        model(ids[:, :1], **{CACHE: kept}, position_ids=torch.tensor([[5]], device=device))


@pytest.fixture
def reads(monkeypatch):
    """An entry for each value that packing_ops asked a tensor for."""
    found, read, ours = [], torch.Tensor.__bool__, str(Path(packing_ops.__file__).parent)

    def counted(tensor):
        if sys._getframe(1).f_code.co_filename.startswith(ours):
            found.append(tensor)
        return read(tensor)

    monkeypatch.setattr(torch.Tensor, "__bool__", counted)
    return found


@torch.no_grad()
def test_the_values_are_read_once(device, reads):
    """Decoding waits for the GPU no more than before."""
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    kept = filled(model, "one document", device=device)
    reads.clear()
    for _ in range(3):
        more(model, kept)
    assert len(reads) <= 1


@torch.no_grad()
@pytest.mark.parametrize("prompt", [1, 6])
def test_generate_with_a_mask_reads_them_once(prompt, device, reads):
    """generate gives every step a mask of 0 and 1, which could number documents: read there, on CUDA in the first
    step.
    """
    model, steps = tiny_model("llama", attn_implementation="packing_ops", device=device), 8
    ids = torch.randint(3, 60, (2, prompt), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(ids)
    mask[0, : prompt // 3] = 0
    given = {"attention_mask": mask, "use_cache": True, "do_sample": False}
    model.generate(ids, **given, min_new_tokens=steps + 1, max_new_tokens=steps + 1)
    assert len(reads) <= 1 + (1 if device == "cuda" else steps)


@pytest.mark.asserts_on_gpu
@torch.no_grad()
def test_a_compiled_model_refuses_it(device, fresh_compile, capfd):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device, num_hidden_layers=1)
    step = torch.compile(model, fullgraph=True, backend="aot_eager")
    for kind in ("one document", "positions"):
        kept = filled(model, kind, "static", device)
        torch._dynamo.mark_static_address(kept.layers[0].keys)
        if kind == "positions":
            with refused(REFUSED, capfd):
                more(model, kept, call=step)
        else:
            wanted = more(model, copy.deepcopy(kept))
            torch.testing.assert_close(more(model, kept, call=step), wanted, **CLOSE)


@torch.no_grad()
def test_a_cache_that_a_compiled_model_made(device, fresh_compile):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device, num_hidden_layers=1)
    fill = torch.compile(model, fullgraph=True, backend="aot_eager")
    kept = fill(**prompts("positions", device), use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=REFUSED):
        more(model, kept)


# --- layers with a state, whose cache would hold one for the whole row ---


def cache_of(outputs):
    return next((outputs[name] for name in CACHES if outputs.get(name) is not None), None)


@pytest.mark.parametrize("family", [*SERVED, "mamba2", "falcon_h1"])
def test_packed_rows_fill_no_cache_that_nobody_asks_for(family, device):
    model = stateful_model(family, device=device)
    model.config.use_cache = True
    ids, positions, _ = packed(device)
    numbers = torch.repeat_interleave(torch.arange(1, 5, device=device), torch.tensor([5, 7, 1, 3], device=device))[
        None
    ]
    for given in ({"position_ids": positions}, {"attention_mask": numbers, "position_ids": positions}):
        for train in (True, False):
            found = model.train(train)(ids, **given)
            assert cache_of(found) is None
            torch.testing.assert_close(found.logits, model(ids, **given, use_cache=False).logits)


@pytest.mark.parametrize("family", ["lfm2", "mamba", "mamba2"])
@torch.no_grad()
def test_rows_of_one_document_fill_a_cache(family, device):
    model = stateful_model(family, device=device).eval()
    model.config.use_cache = True
    ids, _, _ = packed(device)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    for given in ({}, {"position_ids": torch.arange(16, device=device)[None]}, {"attention_mask": mask}):
        assert cache_of(model(ids, **given)) is not None


@pytest.mark.parametrize(
    ("family", "whole", "masked"),
    [("lfm2", True, False), ("jamba", False, True), ("mamba", False, False)],
)
@torch.no_grad()
def test_a_compiled_model_keeps_the_cache_of_one_document(family, whole, masked, device, fresh_compile):
    """A graph cannot know that there is one."""
    layers = {"num_hidden_layers": 1} if family == "mamba" else {}
    fills, model = (stateful_model(family, device=device, **layers).eval() for _ in range(2))
    fills.config.use_cache = True
    ids, positions, _ = packed(device, [2, 2, 1])
    row, step, one = ids[:, :4], ids[:, 4:], torch.arange(4, device=device)[None]
    wanted = model(ids, use_cache=False).logits[:, -1:]
    if not whole:
        fills.compile(backend="eager")
    fill = torch.compile(fills, backend="eager") if whole else fills
    found = fill(row, position_ids=one, **({"attention_mask": torch.ones_like(one)} if masked else {}))
    name = next(name for name in CACHES if found.get(name) is not None)
    torch.testing.assert_close(model(step, **{name: found[name]}, use_cache=True).logits, wanted, **CLOSE)
    kept = cache_of(fill(row, position_ids=positions[:, :4]))
    if kept is not None:  # a whole model in a graph
        with pytest.raises(ValueError, match=REFUSED):
            model(step, **{CACHE: kept}, position_ids=torch.tensor([[2]], device=device))


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
@torch.no_grad()
def test_a_cache_of_states_alone_is_refused(family, device):
    """No attention would refuse it in the next call."""
    model = stateful_model(family, device=device).eval()
    ids, positions, _ = packed(device)
    with pytest.raises(ValueError, match=r"use_cache: expected False, .* of which a cache of Mamba"):
        model(ids, position_ids=positions, use_cache=True)
    assert cache_of(model(ids, use_cache=True)) is not None
    assert model.generate(ids[:, :4], max_new_tokens=3).shape == (1, 7)


# --- layers that share the keys of others ---


def sharing(implementation, device):
    """Gemma 4: in a prefill, layers with the keys of others run for only the last tokens, and take a part of the
    mask.
    """
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Gemma 4")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16, "sliding_window": 5}
    sizes |= {"vocab_size": 61, "vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 8, "pad_token_id": 0}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
    config = transformers.Gemma4TextConfig(**sizes, **heads, **kinds, initializer_range=0.3)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return model.to(device).eval()


@torch.no_grad()
def test_generation_with_shared_keys_is_the_stock_models(device):
    models = [sharing(name, device) for name in ("packing_ops", "eager")]
    ids = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(3)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    given = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    for options in ({}, {"attention_mask": mask}):
        ours, stock = (model.generate(ids, **options, **given) for model in models)
        assert torch.equal(ours.sequences, stock.sequences)
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(stock.logits), **CLOSE)


@pytest.mark.parametrize("keep", [1, 6, 16, 20])
@torch.no_grad()
def test_the_last_logits_of_a_packed_row_with_shared_keys(keep, device):
    """Also those of more than one document: the last one has four tokens, and the window five."""
    model, given = sharing("packing_ops", device), prompts("positions", device)
    wanted = model(**given, use_cache=False).logits[:, -keep:]
    torch.testing.assert_close(model(**given, use_cache=False, logits_to_keep=keep).logits, wanted, **CLOSE)
