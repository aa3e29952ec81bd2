"""transformers' continuous batching under our attention: the tokens and log-probs of generate and of packed rows."""

import importlib
import itertools

import pytest
import torch
from helpers.hf_models import tiny_model

import packing_ops as po

transformers = pytest.importorskip("transformers")
from packing_ops.integrations.transformers import (  # noqa: E402
    apply_packing_ops,
    attention,
    continuous_batching,
    info,
    register,
    revert_packing_ops,
    revert_registration,
)
from packing_ops.integrations.transformers.attention import packing_ops_attention  # noqa: E402
from packing_ops.integrations.transformers.call import NAMES  # noqa: E402
from packing_ops.keys import KeyPages  # noqa: E402

if not continuous_batching.PATCHES:
    pytest.skip(f"transformers {transformers.__version__} batches in another way", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")
BATCHING = "transformers.generation.continuous_batching"
VOCAB = 260
# Prompts beyond a step's tokens are prefilled in chunks, while others are decoded.
LENGTHS = (5, 1, 40, 17, 150, 90)


def prompts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS]


def options(new_tokens=12, **more):
    return transformers.GenerationConfig(max_new_tokens=new_tokens, pad_token_id=0, eos_token_id=-1, **more)


def generated(model, texts, page_size=16, batch_tokens=64, graphs=False, **more):
    """(tokens, log-probs) of each request."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    config = ContinuousBatchingConfig(
        num_blocks=4096 // page_size,
        page_size=page_size,
        max_batch_tokens=batch_tokens,
        return_logprobs=True,
        auto_switch_to_flash=False,
        use_cuda_graph=graphs,
    )
    out = model.generate_batch(
        texts, generation_config=options(**more), continuous_batching_config=config, progress_bar=False
    )
    assert all(request.error is None for request in out.values())
    return [(request.generated_tokens, torch.tensor(request.logprobs)) for request in out.values()]


class Steps:
    """The queries and keys of every attention call, [(cu_seqlens_q, cu_seqlens_k)], and calls with keys in pages."""

    def __init__(self, monkeypatch):
        self.seen, self.in_pages, stock = [], 0, attention.attend

        def attend(q, k, v, cu_seqlens_q, keys, *rest, **more):
            if isinstance(keys, KeyPages):
                self.in_pages += 1
            else:
                self.seen.append((cu_seqlens_q.tolist(), keys.tolist()))
            return stock(q, k, v, cu_seqlens_q, keys, *rest, **more)

        monkeypatch.setattr(attention, "attend", attend)

    def kinds(self):
        """Whether there was a step of prefill alone, one next to decoding, a chunk after another one, and decoding
        alone.
        """
        found = set()
        for queries, keys in self.seen:
            q, k = (torch.tensor(each).diff() for each in (queries, keys))
            found.add("chunk" if ((q > 1) & (k > q)).any() else "")
            decoding, prefill = bool(((q == 1) & (k > 1)).any()), bool((q > 1).any())
            found.add("mixed" if decoding and prefill else "decoding" if decoding else "prefill")
        return found - {""}


FAMILIES = [
    ("llama", 16),
    ("llama", 128),
    ("qwen3", 256),
    ("mistral", 16),
    ("gemma2", 16),
    ("gemma3", 128),
    ("gpt_oss", 16),
]


@pytest.mark.parametrize(("family", "page_size"), FAMILIES)
def test_tokens_are_those_of_generate(family, page_size, device, monkeypatch):
    """Windows of 5 are crossed by prompts and chunks. No step has a dense mask. Decoding reads keys from whole tiles in
    their pages, unless a sliding window has another cache."""
    model = tiny_model(family, vocab_size=VOCAB, device=device).eval()
    model.set_attn_implementation("sdpa" if family in ("llama", "qwen3", "gemma3") else "eager")
    wanted = [
        model.generate(torch.tensor([text], device=device), generation_config=options(do_sample=False), use_cache=True)
        for text in prompts()
    ]
    assert apply_packing_ops(model).attention == 2
    masks, steps = importlib.import_module(f"{BATCHING}.input_outputs"), Steps(monkeypatch)
    monkeypatch.setattr(masks, "build_attention_mask", None)
    found = generated(model, prompts(), page_size=page_size, do_sample=False)
    for text, tokens, (ours, logps) in zip(prompts(), wanted, found, strict=True):
        assert ours == tokens[0, len(text) :].tolist()
        assert len(logps) == 12
    if family in ("llama", "qwen3") and page_size % 128 == 0:
        assert steps.kinds() == {"prefill", "mixed", "chunk"}
        assert steps.in_pages > 0
    else:
        assert steps.kinds() == {"prefill", "mixed", "chunk", "decoding"}
        assert steps.in_pages == 0
    assert "found by cache" in info(model)


def packed_logps(model, documents):
    """Of each document's next tokens, from one packed row."""
    ids = torch.tensor([*itertools.chain(*documents)], device=model.device)
    told = po.PackedMetadata.from_lengths([len(document) for document in documents], device=model.device)
    row = {"input_ids": ids[None], "position_ids": told.position_ids[None], **told.to_transformers()}
    hidden = model.model(**row, use_cache=False).last_hidden_state
    logps = po.token_logps(hidden, model.lm_head.weight, ids, told)
    return logps.cpu().split([len(document) for document in documents])


CASES = [("llama", VOCAB, 16, 64), ("qwen3", VOCAB, 7, 33), ("qwen3", 5001, 128, 512)]


@pytest.mark.parametrize(("family", "vocab", "page_size", "batch_tokens"), CASES)
@torch.no_grad()
def test_log_probs_have_the_bits_of_a_packed_row(family, vocab, page_size, batch_tokens, device):
    """In the mode, whatever the chunks, pages and neighbours of a step; sampled, so that every token counts."""
    vocab = vocab if device == "cpu" else -(-vocab // 8) * 8  # on a GPU the mode claims no other
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    # Sizes that are multiples of 32: with AVX-512 exp rounds otherwise in the last elements of others.
    model = tiny_model(family, vocab_size=vocab, intermediate_size=64, device=device, dtype=dtype).eval()
    assert apply_packing_ops(model, invariant=True).skipped == {}
    torch.manual_seed(1)
    found = generated(model, prompts(), page_size=page_size, batch_tokens=batch_tokens, new_tokens=20, do_sample=True)
    documents = [text + tokens for text, (tokens, _) in zip(prompts(), found, strict=True)]
    for text, row, (_, logps) in zip(prompts(), packed_logps(model, documents), found, strict=True):
        assert torch.equal(row[len(text) - 1 : -1], logps)
    revert_packing_ops(model)


@torch.no_grad()
def test_log_probs_of_adapters_have_the_bits_of_a_packed_row(device):
    """LoRA beside the weights, in the sampler as in the trainer."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = tiny_model("qwen3", vocab_size=264, intermediate_size=64, device=device, dtype=dtype).eval()
    model = peft.get_peft_model(model, config).get_base_model()
    assert apply_packing_ops(model, invariant=True).skipped == {}
    found = generated(model, prompts(), page_size=7, batch_tokens=33, new_tokens=20, do_sample=True)
    documents = [text + tokens for text, (tokens, _) in zip(prompts(), found, strict=True)]
    for text, row, (_, logps) in zip(prompts(), packed_logps(model, documents), found, strict=True):
        assert torch.equal(row[len(text) - 1 : -1], logps)
    revert_packing_ops(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: the CPU has no CUDA graphs")
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize(("family", "dtype"), [("llama", torch.bfloat16), ("gemma3", torch.float32)])
def test_cuda_graphs_give_the_same_tokens(family, dtype, page_size, monkeypatch):
    """Steps of many sizes are padded, captured and replayed with other lengths; transformers then batches in two
    streams.
    """
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")  # as for a user: nothing can wait in a capture
    model = tiny_model(family, vocab_size=VOCAB, device="cuda", dtype=dtype).eval()
    assert apply_packing_ops(model, invariant=family == "llama").skipped == {}
    runner, captures = importlib.import_module(f"{BATCHING}.model_runner").ModelRunner, []
    stock = runner._capture_graph
    monkeypatch.setattr(runner, "_capture_graph", lambda *args: captures.append(stock(*args)))
    wanted = generated(model, prompts(), page_size=page_size, new_tokens=30, do_sample=False)
    assert not captures
    found = generated(model, prompts(), page_size=page_size, new_tokens=30, do_sample=False, graphs=None)
    assert captures  # by default, as for flash-attn
    for (tokens, logps), (ours, our_logps) in zip(wanted, found, strict=True):
        assert ours == tokens
        torch.testing.assert_close(our_logps, logps)
    revert_packing_ops(model)


def test_sequences_that_pad_a_step_write_where_no_request_reads(device):
    """They have no keys, and no page in the block table."""
    from packing_ops.integrations.transformers.continuous_batching import pages_of_requests

    table = torch.tensor([[3, -1, -1], [5, 9, -1], [7, -1, -1], [-1, -1, -1]], dtype=torch.int32, device=device)
    lengths = torch.tensor([1, 130, 128, 0], device=device)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    pages, rows = pages_of_requests(table, cu_seqlens, 128)
    assert rows.tolist() == [3 * 128, 9 * 128 + 1, 7 * 128 + 127, 0]
    assert pages.seqused_k.tolist() == lengths.tolist()
    assert pages.block_table is table


@torch.no_grad()
def test_log_probs_of_sliding_windows_are_close(device):
    """Their cache forgets the keys before a window: tiles of keys start elsewhere, and sums have another order."""
    model = tiny_model("gemma3", vocab_size=VOCAB, device=device).eval()
    apply_packing_ops(model)
    found = generated(model, prompts(), do_sample=True)
    documents = [text + tokens for text, (tokens, _) in zip(prompts(), found, strict=True)]
    for text, row, (_, logps) in zip(prompts(), packed_logps(model, documents), found, strict=True):
        torch.testing.assert_close(row[len(text) - 1 : -1], logps, rtol=1e-5, atol=1e-5)


def test_log_probs_of_processed_logits(device):
    """With a temperature they are those of what is sampled from, as without our attention."""
    torch.manual_seed(1)
    model = tiny_model("llama", vocab_size=VOCAB, device=device).eval()
    apply_packing_ops(model)
    found = generated(model, prompts(), do_sample=True, temperature=0.7)
    documents = [text + tokens for text, (tokens, _) in zip(prompts(), found, strict=True)]
    with torch.no_grad():
        model.lm_head.weight.div_(0.7)
        for text, row, (_, logps) in zip(prompts(), packed_logps(model, documents), found, strict=True):
            torch.testing.assert_close(row[len(text) - 1 : -1], logps, rtol=1e-5, atol=1e-5)


def test_what_a_paged_cache_cannot_have(device):
    model = tiny_model("llama", vocab_size=VOCAB, device=device).eval()
    apply_packing_ops(model)
    heads = torch.zeros(1, 2, 3, 8, device=device)
    with pytest.raises(
        NotImplementedError, match=r"cache: expected a call that varlen attention serves .* got dropout 0\.1"
    ):
        packing_ops_attention(model.model.layers[0].self_attn, *[heads] * 3, None, dropout=0.1, write_index=[])


@pytest.mark.parametrize("in_pages", [False, True])
def test_keys_that_the_layer_has_given_to_the_cache(in_pages, device):
    """From transformers 5.24 on attention gets what the cache has made of them, and no cache."""
    lengths, queries, page_size = torch.tensor([5, 130], device=device), torch.tensor([0, 1, 2], device=device), 128
    cu_seqlens_k, last = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), lengths.cumsum(0) - 1
    q, k, v = (torch.randn(rows, heads, 16, device=device) for rows, heads in ((2, 4), (135, 2), (135, 2)))
    expected = po.varlen_attention(q, k, v, queries.int(), cu_seqlens_k=cu_seqlens_k)
    given = {"cu_seq_lens_q": queries.int(), "cu_seq_lens_k": cu_seqlens_k, "write_index": [], "read_index": []}
    if in_pages:  # all but the last key of each request
        table = torch.tensor([[3, -1], [1, 4]], dtype=torch.int32, device=device)
        given |= {"block_table": table, "k_cache": torch.zeros(6, page_size, 2, 16, device=device)}
        given["v_cache"] = given["k_cache"].clone()
        for name, rows in (("k_cache", k), ("v_cache", v)):
            given[name][3, :4], given[name][1], given[name][4, :1] = rows[:4], rows[5:133], rows[133:134]
        k, v = k[last], v[last]
    heads = [rows.transpose(0, 1)[None] for rows in (q, k, v)]
    layer = tiny_model("llama", device=device).model.layers[0].self_attn
    found, _ = packing_ops_attention(layer, *heads, None, **given)
    torch.testing.assert_close(found[0], expected)


def test_unregister_gives_back_what_continuous_batching_asks():
    """Of names that are not ours nothing changes, while ours are registered and after."""
    modules = [importlib.import_module(f"{BATCHING}.{name}") for name in ("cache", "continuous_api", "initialization")]
    runner = importlib.import_module(f"{BATCHING}.model_runner").ModelRunner
    others = [name for name in NAMES if name != "packing_ops"]
    NAMES.difference_update(others)
    register()
    try:
        for module in modules:
            asked = module.is_flash_attention_requested
            assert asked(requested_attention_implementation="packing_ops")
            assert asked(requested_attention_implementation="flash_attention_2")
            assert not asked(requested_attention_implementation="sdpa")
            assert not asked(requested_attention_implementation=None)
        revert_registration()
        stock = importlib.import_module("transformers.utils.generic").is_flash_attention_requested
        assert [module.is_flash_attention_requested for module in modules] == [stock] * 3
        assert runner._sample.__module__ == runner.__module__
        assert not hasattr(runner._sample, "__wrapped__")
    finally:
        NAMES.update(others)
        register()


def test_log_probs_of_a_head_in_another_dtype_are_its_own():
    """Logits of a float32 head over a half-precision model are not rounded to the model's dtype."""
    register()
    model = tiny_model("llama", vocab_size=VOCAB).bfloat16().eval()
    model.set_attn_implementation("packing_ops")
    model.lm_head.float().register_forward_pre_hook(lambda _, given: (given[0].float(),))
    ((tokens, logps),) = generated(model, [list(range(3, 43))])
    ids = torch.tensor([[*range(3, 43), *tokens]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, 39:-1]
    expected = logits.log_softmax(-1).gather(1, ids[0, 40:, None])[:, 0]
    torch.testing.assert_close(logps, expected, rtol=0, atol=2e-3)
    rounded = logits.bfloat16().float().log_softmax(-1).gather(1, ids[0, 40:, None])[:, 0]
    assert (logps - expected).abs().max() < (logps - rounded).abs().max() / 4


def test_log_probs_of_a_float64_model():
    register()
    model = tiny_model("llama", vocab_size=VOCAB).double().eval()
    model.set_attn_implementation("packing_ops")
    ((tokens, logps),) = generated(model, [list(range(3, 20))])
    ids = torch.tensor([[*range(3, 20), *tokens]])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[0, 16:-1].log_softmax(-1).gather(1, ids[0, 17:, None])[:, 0]
    torch.testing.assert_close(logps, expected.float(), rtol=1e-5, atol=1e-5)
