"""Calls that go on with a cache, in models with layers that carry a state: each row as it is alone, or an error."""

import copy
import inspect
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers import cu_seqlens_of  # noqa: E402
from helpers.hf_models import CACHE  # noqa: E402
from stateful_case import CLOSE  # noqa: E402
from stateful_models import MORE_HYBRIDS, SERVED, stateful_model  # noqa: E402

from packing_ops.integrations.transformers import apply_packing_ops, register  # noqa: E402
from packing_ops.integrations.transformers.states import cached, linear_attention  # noqa: E402
from packing_ops.integrations.transformers.states.stateful_rows import CACHES  # noqa: E402

ALL = [*SERVED, *MORE_HYBRIDS]
ANEW = ["jamba", "mamba", "recurrent_gemma"]  # a state of zero before a call of several tokens
READ_NO_MASK = ["recurrent_gemma", "rwkv", "xlstm"]  # their layers with a state
# xLSTM's cache needs kernels of its library.
IN_CHUNKS = [each for each in ALL if each not in (*ANEW, *READ_NO_MASK)]
IN_STEPS = [each for each in ALL if each not in READ_NO_MASK]
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0, 1, 1, 1, 1, 1, 1, 1, 1]])
IDS = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def registered():
    register()


@pytest.fixture(params=["packing_ops", "applied"])
def how(request):
    return request.param


def model_of(family, how, device, **more):
    name = "packing_ops" if how == "packing_ops" else "eager"
    model = stateful_model(family, attn_implementation=name, device=device, **more).eval()
    if how == "applied":
        swapped = linear_attention.why_not(model) is None
        with warnings.catch_warnings():  # that Mamba and RWKV have no attention of ours
            warnings.simplefilter("ignore")
            apply_packing_ops(model, rope=False, linear_attention=swapped)
    return model


def stock_of(family, device):
    return stateful_model(family, attn_implementation="eager", device=device).eval()


def positions_of(mask):
    return (mask.cumsum(1) - 1).clamp(min=0)


def cache_of(model, outputs):
    """The cache as an argument of the next call: in 5.24 it has several names in the outputs."""
    known = [name for name in inspect.signature(type(model).forward).parameters if name in CACHES]
    return {name: outputs[name] for name in known if outputs.get(name) is not None}


def in_calls(model, mask, sizes, *, grows=True, positions=None, ids=IDS):
    """The logits of calls of so many tokens, each with the cache of the one before."""
    found, at, given = [], 0, {}
    ids, mask = ids.to(model.device), mask.to(model.device)
    if model.config.model_type == "recurrent_gemma":  # returns none
        given = {CACHE: transformers.DynamicCache(config=model.config)}
    for size in sizes:
        end, more = at + size, {}
        if grows is True or (grows == "later" and at):
            more["attention_mask"] = mask[:, :end]
        if positions is not None:
            more["position_ids"] = positions.to(model.device)[:, at:end]
        outputs = model(ids[:, at:end], use_cache=True, **more, **given)
        given = cache_of(model, outputs) or given
        found.append(outputs.logits)
        at = end
    return torch.cat(found, 1)


def assert_alone(found, stock, mask, ids=IDS):
    """Each row's tokens have the logits of the row without padding in a call without a cache."""
    for row, real, logits in zip(ids.to(found.device), mask.bool().to(found.device), found, strict=True):
        if real.any():
            wanted = stock(row[None, real], use_cache=False).logits[0]
            torch.testing.assert_close(logits[real], wanted, rtol=1e-4, atol=1e-4)


def generated(model, ids, mask, steps=4, **more):
    given = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more}
    return model.generate(ids.to(model.device), attention_mask=mask.to(model.device), **given)[:, -steps:]


def assert_generated(found, stock, ids, mask):
    """Each token is the most likely one behind those before it, by a call without a cache: what greedy search gives."""
    for row, real, tokens in zip(ids.to(found.device), mask.bool().to(found.device), found, strict=True):
        logits = stock(torch.cat([row[real], tokens])[None, :-1], use_cache=False).logits[0, -len(tokens) :]
        assert tokens.tolist() == logits.argmax(-1).tolist()


# --- a prompt in several calls ---


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("family", IN_CHUNKS)
@torch.no_grad()
def test_a_padded_prompt_in_chunks(family, positions, how, device):
    model, stock = model_of(family, how, device), stock_of(family, device)
    for sizes in ([2, 2, 2, 3], [5, 4]):
        given = {"positions": positions_of(LEFT)} if positions else {}
        assert_alone(in_calls(model, LEFT, sizes, **given), stock, LEFT)


@pytest.mark.parametrize("family", [each for each in IN_CHUNKS if each not in ("mamba2", "minimax")])
@torch.no_grad()
def test_generate_with_prefill_chunks(family, how, device):
    model, stock = model_of(family, how, device), stock_of(family, device)
    for size in (2, 3, 4):
        assert_generated(generated(model, IDS, LEFT, prefill_chunk_size=size), stock, IDS, LEFT)
    assert_generated(generated(model, IDS[1:2], LEFT[1:2], prefill_chunk_size=3), stock, IDS[1:2], LEFT[1:2])


@pytest.mark.parametrize("family", ANEW)
@torch.no_grad()
def test_layers_that_start_anew_take_one_token_at_a_time(family, how, device):
    """Their chunks would forget the cache without a word, as in transformers."""
    model = model_of(family, how, device)
    with pytest.raises(
        ValueError,
        match=r"^(cache\w*|past_key_values): expected one token of each row behind a filled cache, got 4, and",
    ):
        in_calls(model, LEFT, [5, 4])


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "mamba2", "minimax"])
@torch.no_grad()
def test_a_mask_of_later_calls_alone(family, how, device):
    """Ones, or padding behind the last token of a row. Padding in the cache is what a state has taken for tokens."""
    model, stock = model_of(family, how, device), stock_of(family, device)
    ended = LEFT.flip(1)
    for mask in (torch.ones_like(LEFT), ended):
        assert_alone(in_calls(model, mask, [5, 4], grows="later"), stock, mask)
    with pytest.raises(ValueError, match=r"attention_mask: expected the padding that .* was filled with, got another"):
        in_calls(model, LEFT, [5, 4], grows="later")


# --- one token after the other ---


@pytest.mark.parametrize("family", IN_STEPS)
@torch.no_grad()
def test_steps_by_hand(family, how, device):
    """Also where the stock model counts from 0 in each (Bamba, MiniMax), or reads a mask as long as the row (Mamba)."""
    model, stock = model_of(family, how, device), stock_of(family, device)
    found = in_calls(model, LEFT, [5, 1, 1, 1, 1])
    if family == "zamba2":  # its step does not clamp what its scan clamps
        torch.testing.assert_close(found, in_calls(stock, LEFT, [5, 1, 1, 1, 1]), **CLOSE)
        return
    assert_alone(found, stock, LEFT)


@pytest.mark.parametrize(
    "mask", [[[0, 0, 1], [1, 1, 1], [0, 1, 1]], [[1], [1], [1]], [[0, 1], [1, 1], [0, 1]]], ids=str
)
@pytest.mark.parametrize("family", IN_STEPS)
@torch.no_grad()
def test_prompts_shorter_than_the_taps(family, mask, how, device):
    model, stock, mask = model_of(family, how, device), stock_of(family, device), torch.tensor(mask)
    ids = IDS[:, : mask.shape[1]]
    assert_generated(generated(model, ids, mask), stock, ids, mask)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "granitemoehybrid"])
@torch.no_grad()
def test_a_short_row_of_several_documents_beside_a_cache(family, how, device):
    model, stock = model_of(family, how, device), stock_of(family, device)
    ids = IDS[:1, :3].to(device)
    found = model(ids, position_ids=torch.tensor([[0, 1, 0]], device=device), use_cache=True).logits
    wanted = torch.cat([stock(each, use_cache=False).logits for each in ids.split([2, 1], 1)], 1)
    torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "mamba2", "minimax", "jamba"])
@torch.no_grad()
def test_more_of_generate(family, how, device):
    model, stock = model_of(family, how, device), stock_of(family, device)
    embeds = model.get_input_embeddings()(IDS.to(device))
    found = model.generate(inputs_embeds=embeds, attention_mask=LEFT.to(device), max_new_tokens=4, do_sample=False,
                           eos_token_id=None, pad_token_id=0)  # fmt: skip
    assert_generated(found[:, -4:], stock, IDS, LEFT)
    beams = {"num_beams": 3, "num_return_sequences": 2}
    found = generated(model, IDS, LEFT, **beams)
    rows = [generated(stock, row[None, real], torch.ones_like(row[None, real]), **beams)
            for row, real in zip(IDS, LEFT.bool(), strict=True)]  # fmt: skip
    assert torch.equal(found, torch.cat(rows))
    if family not in ("minimax", "mamba2"):
        given = {"return_dict_in_generate": True, "max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
        first = model.generate(IDS.to(device), attention_mask=LEFT.to(device), pad_token_id=0, **given)
        mask = torch.nn.functional.pad(LEFT, (0, 2), value=1)
        rest = generated(model, first.sequences, mask, 2, **{CACHE: first[CACHE]})
        assert_generated(torch.cat([first.sequences[:, -2:], rest], 1), stock, IDS, LEFT)


@torch.no_grad()
def test_generate_of_minimax_with_its_cache_runs_the_prompt_again(device):
    """It asks the cache of the first layer, a linear one, how much of the prompt is there."""
    model = stateful_model("minimax", device=device).eval()
    given = {"return_dict_in_generate": True, "max_new_tokens": 2, "do_sample": False, "eos_token_id": None}
    for mask in (LEFT, LEFT | 1):
        first = model.generate(IDS.to(device), attention_mask=mask.to(device), pad_token_id=0, **given)
        with pytest.raises(ValueError, match=r"(of the|got) 10 tokens"):
            generated(
                model, first.sequences, torch.nn.functional.pad(mask, (0, 2), value=1), 2, **{CACHE: first[CACHE]}
            )


# --- documents ---


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "lfm2", "qwen3_next"])
@torch.no_grad()
def test_documents_without_a_token_are_none_beside_a_cache(family, how, device):
    model, stock = model_of(family, how, device), stock_of(family, device)
    ids, cu_seqlens = IDS[1:2].to(device), cu_seqlens_of([5, 0, 0], device)
    given = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "use_cache": True}
    outputs = model(ids[:, :5], **given)
    kept = cache_of(model, outputs)
    found = [outputs.logits, *(model(each, use_cache=True, **kept).logits for each in ids[:, 5:].split(1, 1))]
    assert_alone(torch.cat(found, 1), stock, LEFT[1:2], IDS[1:2])


def another(kind, device):
    """What says that a document starts behind five tokens of one."""
    return {
        "position of 0": {"position_ids": torch.arange(4)[None]},
        "number": {"attention_mask": torch.tensor([[1] * 5 + [2] * 4])},
        "number in the call": {"attention_mask": torch.tensor([[1] * 7 + [2] * 2])},
        "positions": {"position_ids": torch.tensor([[5, 6, 0, 1]])},
    }[kind]


@pytest.mark.parametrize("kind", ["position of 0", "number", "number in the call", "positions"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "mamba2", "minimax"])
@torch.no_grad()
def test_another_document_is_refused(family, kind, how, device):
    if family == "mamba2" and "position" in kind:
        pytest.skip("takes none")
    model, ids = model_of(family, how, device), IDS[1:2].to(device)
    outputs = model(ids[:, :5], use_cache=True)
    kept = cache_of(model, outputs)
    given = {name: value.to(device) for name, value in another(kind, device).items()}
    for again in (kept, copy.deepcopy(kept)):
        with pytest.raises(ValueError, match="expected an empty cache beside several documents in a row, got"):
            model(ids[:, 5:], use_cache=True, **given, **again)
    if kind == "number":
        with pytest.raises(ValueError, match="several documents"):
            model(ids[:, 5:6], attention_mask=given["attention_mask"][:, :6], use_cache=True, **kept)


# --- padding that a state has taken for tokens ---


@pytest.mark.parametrize("sizes", [[5, 4], [5, 1, 1, 1, 1], [2, 3, 4]], ids=str)
@pytest.mark.parametrize("family", IN_CHUNKS)
@torch.no_grad()
def test_padding_behind_a_token_is_refused_where_the_row_goes_on(family, sizes, how, device):
    model, stock = model_of(family, how, device), stock_of(family, device)
    right = torch.tensor([[1, 1, 1, 1, 0, 1, 1, 1, 1], [1] * 9, [1, 1, 0, 0, 0, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"attention_mask: expected padding beside .* on the left of a row alone"):
        in_calls(model, right, sizes)
    if family != "zamba2" or 1 not in sizes:  # see above
        ended = right * torch.tensor([1, 1, 1, 1, 0, 0, 0, 0, 0])
        ended[1] = 1
        assert_alone(in_calls(model, ended, sizes), stock, ended)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "lfm2", "jamba"])
@torch.no_grad()
def test_generate_of_rows_with_padding_on_the_right_is_refused(family, how, device):
    model, mask = model_of(family, how, device), LEFT.flip(1)
    with pytest.raises(ValueError, match=r"attention_mask: expected padding beside .* on the left of a row alone"):
        generated(model, IDS, mask)


@pytest.mark.parametrize("sizes", [[1, 4, 4], [2, 1, 1, 5]], ids=str)
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "mamba2"])
@torch.no_grad()
def test_a_call_of_one_token_takes_padding_for_one(family, sizes, how, device):
    with pytest.raises(ValueError, match=r"attention_mask: expected the padding that .* was filled with, got another"):
        in_calls(model_of(family, how, device), LEFT, sizes)


@pytest.mark.parametrize("family", ["lfm2", "minimax"])
@torch.no_grad()
def test_a_mask_without_the_cached_tokens_is_refused(family, how, device):
    model, ids = model_of(family, how, device), IDS.to(device)
    kept = model(ids[:, :5], use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=r"attention_mask: expected \[3, 9\], of the 5 tokens in .* too, got \[3, 4\]"):
        model(ids[:, 5:], attention_mask=torch.ones_like(ids[:, 5:]), use_cache=True, **{CACHE: kept})


@torch.no_grad()
def test_a_cache_that_is_reset_or_of_other_rows_has_another_mask(how, device):
    model, stock, ids = model_of("lfm2", how, device), stock_of("lfm2", device), IDS.to(device)
    kept = model(ids, attention_mask=LEFT.to(device), use_cache=True)[CACHE]
    kept.reset()
    if kept.get_seq_length() == 0:  # in 5.17 its keys stay
        found = [model(each, use_cache=True, **{CACHE: kept}).logits for each in ids.split([5, 4], 1)]
        assert_alone(torch.cat(found, 1), stock, torch.ones_like(LEFT))
    kept = model(ids[1:2, :5], attention_mask=LEFT[1:2, :5].to(device), use_cache=True)[CACHE]
    kept.reorder_cache(torch.tensor([0, 0], device=device))
    found = model(ids[1:2, 5:].expand(2, -1), attention_mask=torch.ones(2, 9, device=device), **{CACHE: kept}).logits
    wanted = stock(ids[1:2], use_cache=False).logits[:, 5:]
    torch.testing.assert_close(found, wanted.expand(2, -1, -1), **CLOSE)


@pytest.mark.parametrize("sizes", [[5, 4], [5, 1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "kimi_linear"])
@torch.no_grad()
def test_rows_in_another_order_go_on_with_their_padding(family, sizes, how, device):
    model, stock, order = model_of(family, how, device), stock_of(family, device), torch.tensor([2, 0, 1])
    ids, mask = IDS.to(device), LEFT.to(device)
    kept = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)[CACHE]
    kept.reorder_cache(order.to(device))
    ids, mask, end, found = ids[order], mask[order], 5, []
    for size in sizes[1:]:
        new, end = slice(end, end + size), end + size
        found.append(model(ids[:, new], attention_mask=mask[:, :end], use_cache=True, **{CACHE: kept}).logits)
    wanted = [stock(row[real != 0][None], use_cache=False).logits[0, -4:] for row, real in zip(ids, mask, strict=True)]
    torch.testing.assert_close(torch.cat(found, 1), torch.stack(wanted), **CLOSE)
    other, kept = mask.clone(), model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)[CACHE]
    other[:, :2] = 0  # as no row has it
    with pytest.raises(ValueError, match=r"attention_mask: expected the padding that .* was filled with, got another"):
        model(ids[:, 5:], attention_mask=other, use_cache=True, **{CACHE: kept})


@torch.no_grad()
def test_rows_of_another_number_behind_padding_on_the_right_are_refused(how, device):
    model, ids = model_of("lfm2", how, device), IDS.to(device)
    kept = model(ids[:2, :5], attention_mask=LEFT.flip(1)[:2, 4:].to(device), use_cache=True)[CACHE]
    kept.reorder_cache(torch.tensor([0, 0, 1], device=device))
    with pytest.raises(ValueError, match=r"attention_mask: expected padding beside .* on the left of a row alone"):
        model(ids[:, 5:], use_cache=True, **{CACHE: kept})


@torch.no_grad()
def test_a_mask_that_is_written_in_place_is_another_one(how, device):
    model, ids, mask = model_of("lfm2", how, device), IDS.to(device), torch.ones_like(IDS).to(device)
    kept = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)[CACHE]
    mask[0, :2] = 0
    with pytest.raises(ValueError, match=r"attention_mask: expected the padding that .* was filled with, got another"):
        model(ids[:, 5:], attention_mask=mask, use_cache=True, **{CACHE: kept})


@torch.no_grad()
def test_a_captured_call_leaves_the_padding_unknown(how, device, monkeypatch):
    """Its mask is of the graph's memory, which other replays write."""
    model, stock, ids, mask = model_of("lfm2", how, device), stock_of("lfm2", device), IDS.to(device), LEFT.to(device)
    with monkeypatch.context() as captured:
        captured.setattr(cached, "can_read", lambda _: False)
        first = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
    second = model(ids[:, 5:], attention_mask=mask, use_cache=True, **{CACHE: first[CACHE]})
    assert_alone(torch.cat([first.logits, second.logits], 1), stock, mask)


@torch.no_grad()
def test_padding_that_is_cropped_is_gone(how, device):
    model, stock, ids = model_of("lfm2", how, device), stock_of("lfm2", device), IDS[1:2].to(device)
    kept = transformers.DynamicCache(config=model.config)
    model(ids[:, :5], use_cache=True, **{CACHE: kept})
    layers = [each for each in kept.layers if hasattr(each, "activate_past_recording")]
    if not layers:
        pytest.skip("this transformers crops no states")
    for layer in layers:
        layer.activate_past_recording()
    model(ids[:, 5:8], attention_mask=torch.tensor([[1] * 6 + [0, 0]], device=device), **{CACHE: kept})
    kept.crop(-2)
    found = model(ids[:, 6:], use_cache=True, **{CACHE: kept}).logits
    torch.testing.assert_close(found, stock(ids, use_cache=False).logits[:, 6:], **CLOSE)


@pytest.mark.parametrize("axes", [3, 4])
@torch.no_grad()
def test_another_document_on_several_axes_is_refused(axes, how, device):
    model, ids = model_of("qwen3_5_text", how, device), IDS[1:2].to(device)
    for new in (4, 1):
        kept = model(ids[:, :5], use_cache=True)[CACHE]
        positions = torch.arange(new, device=device).expand(axes, 1, new)
        with pytest.raises(ValueError, match="expected an empty cache beside several documents in a row, got"):
            model(ids[:, 5 : 5 + new], position_ids=positions, use_cache=True, **{CACHE: kept})
    kept = model(ids[:, :5], use_cache=True)[CACHE]
    found = model(ids[:, 5:], position_ids=torch.arange(5, 9, device=device).expand(axes, 1, 4), **{CACHE: kept})
    wanted = stock_of("qwen3_5_text", device)(ids, use_cache=False).logits[:, 5:]
    torch.testing.assert_close(found.logits, wanted, **CLOSE)


@pytest.mark.parametrize("sizes", [[5, 4], [5, 1, 1, 1, 1]], ids=str)
@torch.no_grad()
def test_positions_of_bamba_go_on_in_a_static_cache(sizes, how, device):
    model, ids = model_of("bamba", how, device), IDS[1:2].to(device)
    kept = transformers.StaticCache(config=model.config, max_cache_len=16)
    found = [model(each, use_cache=True, **{CACHE: kept}).logits for each in ids.split(sizes, 1)]
    wanted = stock_of("bamba", device)(ids, use_cache=False).logits
    torch.testing.assert_close(torch.cat(found, 1), wanted, **CLOSE)


# --- layers that do not go on ---


@torch.no_grad()
def test_chunks_behind_a_cache_that_knows_no_states_are_refused(how, device):
    """RecurrentGemma keeps them in its layers."""
    if transformers.__version__.startswith("5.17"):
        pytest.skip("its layers take no cache that was made without a config")
    model, ids, kept = model_of("recurrent_gemma", how, device), IDS[1:2].to(device), transformers.DynamicCache()
    model(ids[:, :5], use_cache=True, **{CACHE: kept})
    with pytest.raises(ValueError, match="expected one token of each row behind a filled cache, got 4"):
        model(ids[:, 5:], use_cache=True, **{CACHE: kept})


@torch.no_grad()
def test_rows_of_rwkv_are_decoded_one_by_one(how, device):
    """In a step its layers give each row the states of all, as in transformers."""
    model, stock, ids = model_of("rwkv", how, device), stock_of("rwkv", device), IDS[1:2]
    with pytest.raises(ValueError, match="state: expected one row in a call of one token, got 3, of which Rwkv"):
        generated(model, IDS, torch.ones_like(IDS))
    assert_generated(generated(model, ids, torch.ones_like(ids)), stock, ids, torch.ones_like(ids))


# A convolution both ways; a delta rule that is ours, a scan that is transformers'.
IN_A_GRAPH = [("lfm2", "packing_ops"), ("lfm2", "applied"), ("qwen3_next", "applied")]
IN_A_GRAPH += [("granitemoehybrid", "packing_ops")]


@pytest.mark.parametrize(("family", "how"), IN_A_GRAPH)
@torch.no_grad()
def test_chunks_in_a_graph(family, how, device, fresh_compile):
    """Which does not know what the cache was filled with."""
    model, stock = model_of(family, how, device), stock_of(family, device)
    run = torch.compile(model, backend="eager")
    ids, mask = IDS.to(device), LEFT.to(device)
    kept = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)[CACHE]
    found = run(ids[:, 5:], attention_mask=mask, use_cache=True, **{CACHE: kept}).logits
    for row, real, logits in zip(ids, mask.bool(), found, strict=True):
        torch.testing.assert_close(logits, stock(row[None, real], use_cache=False).logits[0, -4:], **CLOSE)
