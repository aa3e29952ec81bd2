"""A cache of layers with a state: which call fills one, which call may go on with it, and generation."""

import pytest
import torch
from torch.utils import checkpoint

transformers = pytest.importorskip("transformers")

from helpers.hf_models import CACHE  # noqa: E402
from helpers.hf_towers import tiny_tower_model  # noqa: E402
from stateful_case import CLOSE, LENGTHS, alone, packed  # noqa: E402
from stateful_models import MORE_HYBRIDS, SERVED, stateful_model  # noqa: E402

from packing_ops.integrations.transformers import register  # noqa: E402
from packing_ops.integrations.transformers.states.stateful_rows import CACHES  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    register()


def cache_of(outputs):
    return next((outputs[name] for name in CACHES if outputs.get(name) is not None), None)


def described(device):
    """The documents of the packed row, in each way."""
    ids, positions, cu_seqlens = packed(device)
    numbers = torch.repeat_interleave(torch.arange(1, 5, device=device), torch.tensor(LENGTHS, device=device))[None]
    ways = [{"position_ids": positions}, {"position_ids": positions, **cu_seqlens}]
    return ids, [*ways, {"attention_mask": numbers, "position_ids": positions}, {"attention_mask": numbers}]


# --- wrappers between a call and the model that makes the cache ---


class Around(transformers.PreTrainedModel):
    """A model around another one. Its forward knows no use_cache."""

    _supports_attention_backend = _supports_sdpa = _supports_flash_attn = True
    config_class = transformers.PreTrainedConfig

    def __init__(self, model):
        super().__init__(model.config)
        self.model = model

    def forward(self, input_ids, position_ids=None, attention_mask=None, **kwargs):
        return self.model(input_ids, position_ids=position_ids, attention_mask=attention_mask, **kwargs)


class Module(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, position_ids=None, attention_mask=None, **kwargs):
        return self.model(input_ids, position_ids=position_ids, attention_mask=attention_mask, **kwargs)


class Backbone(Module):
    """In place of the model under a head."""

    def forward(self, *args, use_cache=None, **kwargs):
        return self.model(*args, **kwargs)


def with_backbone(model):
    inside = model.base_model_prefix
    setattr(model, inside, Backbone(getattr(model, inside)))
    return model


def tower(model):
    """Qwen3.5 with images: the head knows no use_cache, nor do its kind before the language model."""
    model = tiny_tower_model("qwen3_5")
    model.set_attn_implementation("packing_ops")
    return model


OUTER = {"model": lambda model: model, "around": Around, "module": Module, "backbone": with_backbone}
CASES = [("granitemoehybrid", "model"), ("qwen3_5_text", "tower")]
CASES += [(family, outer) for family in ("mamba", "mamba2", "lfm2") for outer in ("around", "module", "backbone")]


def made(family, outer, device):
    model = tower(None) if outer == "tower" else OUTER[outer](stateful_model(family, device=device))
    for each in model.modules():
        if isinstance(each, transformers.PreTrainedModel):
            each.config.use_cache = True
    return model.to(device)


@pytest.mark.parametrize(("family", "outer"), CASES)
def test_packed_rows_fill_no_cache_whatever_is_around(family, outer, device):
    model = made(family, outer, device)
    ids, ways = described(device)
    for given in ways:
        for train in (True, False):
            assert cache_of(model.train(train)(ids, **given)) is None


@pytest.mark.parametrize("family", MORE_HYBRIDS)
def test_packed_rows_of_more_families_fill_none(family, device):
    model = stateful_model(family, device=device)
    model.config.use_cache = True
    ids, ways = described(device)
    for given in ways:
        for train in (True, False):
            assert cache_of(model.train(train)(ids, **given)) is None


@pytest.mark.parametrize(("family", "outer"), CASES)
@torch.no_grad()
def test_rows_of_one_document_fill_one(family, outer, device):
    model = made(family, outer, device).eval()
    ids, _, _ = packed(device)
    mask = torch.ones_like(ids)
    mask[:, :3] = 0
    ways = [{}, {"attention_mask": mask}, {"position_ids": torch.arange(16, device=device)[None]}]
    for given in ways:
        assert cache_of(model(ids, **given)) is not None


@pytest.mark.parametrize(
    ("compiled", "family", "outer"),
    [
        ("layers", "granitemoehybrid", "model"),
        ("layers", "mamba", "around"),
        ("inside", "lfm2", "backbone"),
        ("inside", "mamba", "around"),
        ("whole", "granitemoehybrid", "model"),
        ("whole", "mamba", "around"),
    ],
)
@torch.no_grad()
def test_compiled(compiled, family, outer, device, fresh_compile):
    """A whole hybrid fills a cache in a graph, which knows of no documents, and the next call refuses it."""
    model = made(family, outer, device).eval()
    one, ids, positions = torch.arange(16, device=device)[None], *packed(device)[:2]
    layers = next(each for each in model.modules() if isinstance(each, torch.nn.ModuleList))
    for each in layers if compiled == "layers" else [model] if compiled == "inside" else []:
        each.compile(backend="eager")
    run = torch.compile(model, backend="eager") if compiled == "whole" else model
    kept = cache_of(run(ids, position_ids=positions))
    if kept is not None:
        assert compiled != "layers"
        with pytest.raises(ValueError, match=f"{CACHE}: expected a cache of one document"):
            model(ids[:, :1], position_ids=positions[:, 3:4], **{CACHE: kept})
    if compiled == "layers":
        assert cache_of(run(ids, position_ids=one)) is not None


@torch.no_grad()
def test_a_compiled_model_has_documents_that_the_one_around_makes(device, fresh_compile):
    """They are not those that the model around was given: its mask, of one document, says nothing of them."""
    ids, positions, _ = packed(device)

    class Makes(Around):
        def forward(self, input_ids, attention_mask=None, documents=None):
            return self.model(input_ids, attention_mask=attention_mask, position_ids=documents)

    model = stateful_model("mamba", device=device).eval()
    model.config.use_cache = True
    wanted = alone(model, ids)
    found = Makes(torch.compile(model, backend="eager"))(ids, torch.ones_like(ids), positions)
    assert cache_of(found) is None
    torch.testing.assert_close(found.logits, wanted, **CLOSE)


@pytest.mark.parametrize("family", ["mamba", "lfm2"])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_positions_that_a_model_around_makes_beside_a_mask(padded, family, device):
    ids, positions, _ = packed(device)
    mask = torch.ones_like(ids)
    if padded:  # documents by padding alone are no others than the row's
        ids, positions = (torch.nn.functional.pad(each, (0, 2)) for each in (ids, positions))
        mask = torch.nn.functional.pad(mask, (0, 2))

    class Makes(Around):
        def forward(self, input_ids, attention_mask=None, documents=None):
            return self.model(input_ids, attention_mask=attention_mask, position_ids=documents, use_cache=False)

    model = stateful_model(family, device=device).eval()
    found = Makes(model)(ids, attention_mask=mask, documents=positions).logits[:, :16]
    torch.testing.assert_close(found, alone(model, ids[:, :16]), **CLOSE)


@torch.no_grad()
def test_a_model_around_that_asks_for_a_cache_of_states_is_refused(device):
    ids, positions, _ = packed(device)
    model = stateful_model("mamba", device=device).eval()

    class Asks(Around):
        def forward(self, input_ids, position_ids=None, by_place=()):
            return self.model(input_ids, None, None, *by_place)

    for by_place in ((None, None, None, None, True), (transformers.DynamicCache(config=model.config),)):
        with pytest.raises(ValueError, match="use_cache: expected False, and no cache, beside several documents"):
            Asks(model)(ids, position_ids=positions, by_place=by_place)


# --- checkpoints of a training loop ---


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("family", "outer"), [("granitemoehybrid", "model"), ("lfm2", "around"), ("mamba", "around")])
def test_checkpoints_by_hand_need_no_use_cache(family, outer, compiled, reentrant, device, fresh_compile):
    """A layer that runs again in the backward would find its keys in a cache."""
    models = [made(family, outer, device) for _ in range(2)]
    ids, positions, _ = packed(device)
    layers = next(each for each in models[0].modules() if isinstance(each, torch.nn.ModuleList))
    for layer in layers:
        stock = torch.compile(layer.forward, backend="eager") if compiled else layer.forward
        layer.forward = lambda hidden, *args, stock=stock, **kwargs: checkpoint.checkpoint(
            lambda each: stock(each, *args, **kwargs), hidden, use_reentrant=reentrant
        )
    for model, more in ((models[0], {}), (models[1], {"use_cache": False})):
        model(ids, position_ids=positions, **more).logits.square().mean().backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


# --- a cache that a row of several documents has filled ---


@pytest.mark.parametrize("family", ["lfm2", "granitemoehybrid"])
@pytest.mark.parametrize("length", [1, 3])
@torch.no_grad()
def test_numbers_of_cached_tokens_help_no_state(length, family, device):
    model = stateful_model(family, device=device).eval()
    ids, positions, _ = packed(device)
    kept = model(ids, position_ids=positions, use_cache=True)[CACHE]
    numbers = torch.repeat_interleave(torch.arange(1, 5), torch.tensor(LENGTHS) + torch.tensor([0, 0, 0, length]))
    with pytest.raises(ValueError, match=f"{CACHE}: expected a cache of one document"):
        model(ids[:, :length], attention_mask=numbers[None].to(device), use_cache=True, **{CACHE: kept})


@pytest.mark.parametrize("family", ["lfm2", "jamba"])
@pytest.mark.parametrize("by_kind", [True, False])
@torch.no_grad()
def test_masks_that_are_made_mark_no_cache(by_kind, family, device):
    model = stateful_model(family, device=device).eval()
    ids, positions, _ = packed(device)
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS)).to(device)
    mask = (documents[:, None] == documents).tril()[None, None]
    if by_kind:
        mask = {"full_attention": mask, "conv": None, "linear_attention": None}
    found = model(ids, position_ids=positions, attention_mask=mask)
    assert cache_of(found) is None
    torch.testing.assert_close(found.logits, alone(model, ids), **CLOSE)
    with pytest.raises(ValueError, match="use_cache: expected False, and no cache, beside several documents"):
        model(ids, position_ids=positions, attention_mask=mask, use_cache=True)


# --- generation ---


def test_a_cache_that_was_reset_is_empty(device):
    model = stateful_model("jamba", device=device).eval()
    ids, ways = described(device)
    with torch.no_grad():
        cache = model(ids, **ways[0], use_cache=True).past_key_values
        cache.reset()
        if cache.get_seq_length():  # in 5.17 its keys stay, as zeros
            with pytest.raises(ValueError, match="past_key_values: expected a cache of one document in each row"):
                model(ids[:, :5], past_key_values=cache, use_cache=True)
            return
        outputs = model(ids[:, :5], past_key_values=cache, use_cache=True)
        torch.testing.assert_close(outputs.logits[:, -1], model(ids[:, :5]).logits[:, -1], **CLOSE)


def test_a_cache_by_its_place_is_refused(device):
    """As the cache by its name: numbers of its tokens help no state."""
    model = stateful_model("jamba", device=device).eval()
    ids, ways = described(device)
    with torch.no_grad():
        cache = model(ids, **ways[0], use_cache=True).past_key_values
        numbers = ways[2]["attention_mask"]
        numbers = torch.cat([numbers, numbers[:, -1:].expand(-1, 3)], 1)
        with pytest.raises(ValueError, match="several"):
            model.model(ids[:, :3], numbers, None, cache)


@pytest.mark.parametrize("more", [{}, {"num_beams": 2}, {"cache_implementation": "static"}], ids=str)
# RWKV decodes rows one by one, xLSTM by kernels of its library; stock MiniMax counts positions of a padded row wrong.
@pytest.mark.parametrize("family", [*(e for e in SERVED if e not in ("minimax", "rwkv", "xlstm")), *MORE_HYBRIDS])
@torch.no_grad()
def test_generation_of_padded_rows_is_the_stock_models(family, more, device):
    if "num_beams" in more and family not in ("mamba", "mamba2", "jamba", "lfm2"):
        pytest.skip("some of each kind")
    ids = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(3)).to(device)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    given = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, **more}
    if "cache_implementation" in more and family == "recurrent_gemma" and transformers.__version__.startswith("5.17"):
        # Its masks are of each query and key, and do not say that what positions show is padding.
        with pytest.raises(ValueError, match="use_cache: expected False, and no cache"):
            stateful_model(family, device=device).eval().generate(ids, **given)
        return
    ours, stock = (
        stateful_model(family, attn_implementation=name, device=device).eval().generate(ids, **given)
        for name in ("packing_ops", "eager")
    )
    assert torch.equal(ours, stock)


# --- masks that are none ---


class Mask:
    pass


@pytest.mark.parametrize(
    "mask", [[[1] * 16], ([1] * 16,), torch.ones(1, 16).numpy(), Mask()], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("family", ["mamba", "mamba2", "rwkv", "lfm2", "qwen3_5_text"])
def test_masks_that_are_no_tensors_are_named(family, mask, device):
    ids, positions, _ = packed(device)
    model = stateful_model(family, device=device)
    for given in ({}, {"position_ids": positions}):
        with pytest.raises(TypeError, match=f"^attention_mask: expected a tensor, got {type(mask).__name__}"):
            model(ids, attention_mask=mask, **given)


@pytest.mark.parametrize(
    ("family", "wanted"),
    [("mamba", "a tensor"), ("rwkv", "a tensor"), ("lfm2", "one for 'conv'"), ("jamba", "one for 'linear_attention'")],
)
def test_masks_by_kind_of_layer_are_those_of_the_model(family, wanted, device):
    ids, positions, _ = packed(device)
    for given in ({}, {"position_ids": positions}):
        with pytest.raises(TypeError, match=f"^attention_mask: expected {wanted}.*, got dict of"):
            stateful_model(family, device=device)(ids, attention_mask={"full_attention": None}, **given)
