"""cu_seq_lens_q next to the positions of a mask: compared with each other once in a forward, compiled or not."""

import itertools

import pytest
import torch
from helpers import cu_seqlens_of

transformers = pytest.importorskip("transformers")

from helpers.gpu_asserts import asserting, refused  # noqa: E402
from helpers.hf_models import tiny_model  # noqa: E402

from packing_ops._runtime import arguments, gate  # noqa: E402
from packing_ops.integrations.transformers import register  # noqa: E402

LENGTHS = [5, 7, 4]
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register()
    arguments.warned.clear()


@pytest.fixture
def checks(monkeypatch):
    """Counts the calls of the op that checks."""
    seen, check = [], gate.check_documents
    monkeypatch.setattr(gate, "check_documents", lambda *given: seen.append(given) or check(*given))
    return seen


def packed(device, lengths=LENGTHS):
    """input_ids, and positions and cu_seqlens of its documents."""
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    return torch.randint(3, 60, (1, sum(lengths)), device=device), positions, cu_seqlens_of(lengths, device)


def tell(cu_seqlens, keys=None):
    return {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens if keys is None else keys}


def tiny(family, device, implementation="packing_ops"):
    config = getattr(transformers, f"{family}Config")(**SIZES)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(device)


# --- once ---


@pytest.mark.parametrize("family", ["llama", "gemma3"])  # one mask, and one for each kind of layer
@pytest.mark.parametrize("keys", ["the same tensor", "another"])
def test_one_check_for_a_forward(family, keys, device, checks):
    model = tiny_model(family, attn_implementation="packing_ops", device=device)
    ids, positions, cu_seqlens = packed(device)
    told = tell(cu_seqlens, None if keys == "the same tensor" else cu_seqlens.clone())
    for calls in (1, 2):
        found = model(ids, position_ids=positions, **told).logits
        assert len(checks) == calls
    torch.testing.assert_close(found, model(ids, position_ids=positions).logits, **CLOSE)
    assert len(checks) == 2


def test_what_each_tells_is_still_checked(device):
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    ids, positions, cu_seqlens = packed(device)
    told, real = tell(cu_seqlens), torch.ones_like(ids)
    real[:, 3] = 0
    for given, message in (
        ({"position_ids": torch.arange(16, device=device)[None], **told}, "position_ids: expected to restart where"),
        ({"position_ids": positions, **tell(cu_seqlens_of([16], device))}, "position_ids: expected to restart where"),
        ({"position_ids": positions, **tell(cu_seqlens[:-1])}, "cu_seq_lens_q: expected to end at the batch's"),
        (
            {"position_ids": positions, **tell(cu_seqlens, cu_seqlens_of([5, 4, 7], device))},
            "cu_seq_lens_k: expected the",
        ),
        ({"position_ids": positions, **told, "attention_mask": real}, "attention_mask: expected no padding beside"),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, **given)


@pytest.mark.parametrize(
    ("how", "family"),  # gemma2: a mask for each of its two kinds of layers
    [*itertools.product(["plain", "dropout", "cache"], ["llama", "gemma2"]), ("compiled", "gemma2")],
)
def test_numbers_of_a_mask_are_checked_too(how, family, device, fresh_compile):
    """Of two rows; a mask of ones numbers nothing."""
    ids = torch.randint(3, 60, (2, 6), device=device)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5]], device=device)
    model = tiny_model(family, attn_implementation="packing_ops", device=device)
    for module in model.modules() if how == "dropout" else ():
        module.attention_dropout = 1e-9
    model.train(how == "dropout")
    call = compiled_forward(model) if how == "compiled" else model
    given = {"position_ids": positions, **tell(cu_seqlens_of([3, 3, 6], device)), "use_cache": how == "cache"}
    wanted = call(ids, **given).logits
    for rows in ([[1] * 6] * 2, [[1] * 3 + [2] * 3, [1] * 6], [[7] * 3 + [5] * 3, [9] * 6]):
        mask = torch.tensor(rows, device=device)
        torch.testing.assert_close(call(ids, attention_mask=mask, **given).logits, wanted, **CLOSE)
    both = "attention_mask: expected no padding beside cu_seq_lens_q, .* and no numbers of other documents"
    for rows in ([[1] * 2 + [2] * 4, [1] * 6], [[1] * 6, [1] * 5 + [2]], [[2] * 6] * 2):
        with pytest.raises((ValueError, RuntimeError), match=both):
            call(ids, attention_mask=torch.tensor(rows, device=device), **given)


@pytest.mark.parametrize(
    ("how", "family"),
    [
        *itertools.product(["plain", "cache"], ["llama", "gemma2"]),
        ("masks of 4 dimensions", "doge"),
        asserting("compiled", "gemma2"),
    ],
)
def test_positions_that_restart_inside_of_a_numbered_document(how, family, device, fresh_compile, capfd):
    """They may go on through the row, or restart where a number changes."""
    if family == "doge":
        model = tiny("Doge", device)
    else:
        model = tiny_model(family, attn_implementation="packing_ops", device=device)
    call = compiled_forward(model) if how == "compiled" else model
    ids, positions, _ = packed(device)
    numbers = torch.repeat_interleave(torch.arange(1, 4, device=device), torch.tensor(LENGTHS, device=device))[None]
    given = {"use_cache": how == "cache"}
    for right in (positions, torch.arange(16, device=device)[None], positions + 7):
        call(ids, position_ids=right, attention_mask=numbers, **given)
        call(ids, position_ids=right, attention_mask=torch.ones_like(ids), **given)
    later = torch.cat([torch.arange(n, device=device) for n in (6, 6, 4)])[None]
    with refused("position_ids: expected no restart inside of a document that", capfd):
        call(ids, position_ids=later, attention_mask=numbers, **given)


@pytest.mark.parametrize("positions", [torch.arange(16), list(range(16)), torch.tensor(3)], ids=["1-D", "list", "0-D"])
def test_positions_of_another_form_are_named(positions, device):
    """In a model that is swapped, as in one that keeps its attention: tables of RoPE would fit 1-D ones."""
    positions = positions.to(device) if isinstance(positions, torch.Tensor) else positions
    model = tiny_model("llama", attn_implementation="packing_ops", device=device)
    with pytest.raises(ValueError, match=r"position_ids: expected a tensor \[1 or batch, seqlen\], .* got"):
        model(packed(device)[0], position_ids=positions)


# --- compiled ---


def compiled(model):
    return torch.compile(model, fullgraph=True, backend="aot_eager")


def compiled_forward(model):
    """Without a backward, whose graphs would be traced too."""
    return torch.no_grad()(compiled(model))


@pytest.mark.parametrize("family", ["StableLm", "Nemotron"])
def test_compiled_models_whose_layers_are_not_given_them(family, device, fresh_compile):
    """Positions are made of cu_seqlens: counted along the row, those in the mask would make one document of all."""
    ids, positions, cu_seqlens = packed(device)
    model = compiled_forward(tiny(family, device))
    stock = tiny(family, device, "eager")
    wanted = torch.cat([stock(row).logits for row in ids.split(LENGTHS, 1)], 1)
    for told in ({}, {"position_ids": positions}):
        found = model(ids, **told, **tell(cu_seqlens), use_cache=False).logits
        torch.testing.assert_close(found, wanted, **CLOSE)
    with pytest.raises(
        (ValueError, RuntimeError), match="position_ids: expected to restart where cu_seq_lens_q starts"
    ):
        model(ids, position_ids=torch.arange(16, device=device)[None], **tell(cu_seqlens), use_cache=False)


def test_a_compiled_model_refuses_what_contradicts(device, fresh_compile):
    """Whose layers are given them: what was checked is what they read, in a later call with other values too."""
    model = tiny_model("llama", attn_implementation="packing_ops", device=device, num_hidden_layers=1)
    ids, positions, cu_seqlens = packed(device)
    wanted = model(ids, position_ids=positions, **tell(cu_seqlens)).logits
    model = compiled(model)
    torch.testing.assert_close(model(ids, position_ids=positions, **tell(cu_seqlens)).logits, wanted, **CLOSE)
    with pytest.raises((ValueError, RuntimeError), match="position_ids: expected to restart where"):
        model(ids, position_ids=torch.arange(16, device=device)[None], **tell(cu_seqlens))
    with pytest.raises((ValueError, RuntimeError), match="position_ids: expected to restart where"):
        model(ids, position_ids=positions, **tell(cu_seqlens_of([3, 9, 4], device)))


def test_a_compiled_model_that_tells_no_attention(device, fresh_compile):
    config = transformers.DebertaV2Config(**SIZES)
    model = transformers.AutoModel.from_config(config, attn_implementation="packing_ops").eval().to(device)
    ids, _, cu_seqlens = packed(device)
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected one document in each row"):
        torch.compile(model, backend="eager")(ids, **tell(cu_seqlens))
    torch.compile(model, backend="eager")(ids, **tell(cu_seqlens[[0, -1]]))


def test_a_compiled_encoder_whose_layers_are_given_them(device, fresh_compile):
    config = transformers.BertConfig(**SIZES)
    model = transformers.AutoModel.from_config(config, attn_implementation="packing_ops").eval().to(device)
    ids, positions, cu_seqlens = packed(device)
    told = {**tell(cu_seqlens), "position_ids": positions}
    torch.testing.assert_close(compiled_forward(model)(ids, **told)[0], model(ids, **told)[0], **CLOSE)


class ReadsMasks(transformers.LlamaModel):
    """transformers makes it 4-D masks, of the positions of its call."""

    _supports_flash_attn = _supports_flex_attn = False


def test_cu_seqlens_beside_a_tensor_of_the_same_documents(device):
    torch.manual_seed(0)
    model = ReadsMasks._from_config(transformers.LlamaConfig(**SIZES), attn_implementation="packing_ops").to(device)
    ids, positions, cu_seqlens = packed(device)
    wanted = torch.cat([model(row)[0] for row in ids.split(LENGTHS, 1)], 1)
    told = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    torch.testing.assert_close(model(ids, position_ids=positions, **told)[0], wanted, **CLOSE)
    torch.testing.assert_close(model(ids, **told)[0], wanted, **CLOSE)
