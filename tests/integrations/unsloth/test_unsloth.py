"""Unsloth's seams: layouts, masks and rope against plain torch, collators of the real hosts."""

import importlib.util
import pickle
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, cu_seqlens_of, lengths_strategy
from hypothesis import given

from packing_ops import PackedMetadata, varlen_attention
from packing_ops.contrib.unsloth import (
    PackingCollator,
    enable_packing,
    fast_rope_embedding,
    packed_attention,
    packed_metadata,
    sdpa_mask,
    xformers_mask,
)

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
transformers_installed = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)
trl_installed = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs TRL")

# --- metadata and masks ---


@given(lengths=lengths_strategy)
def test_packed_seq_lengths_in_and_out(device, lengths):
    total = sum(lengths) + 3
    for given_lengths in (
        lengths,
        torch.tensor(lengths, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int64, device=device),
    ):
        batch = {"packed_seq_lengths": given_lengths, "input_ids": torch.zeros(1, total)}
        metadata = packed_metadata(batch, device)
        assert metadata.cu_seqlens.device.type == device
        assert (metadata.cu_seqlens.tolist(), metadata.total) == (cu_seqlens_of(lengths).tolist(), total)
        back = metadata.to_unsloth()["packed_seq_lengths"]
        assert (back.dtype, back.tolist()) == (torch.int32, lengths)


def test_layers_share_one_layout_until_the_lengths_change(device):
    lengths = torch.tensor([2, 3], dtype=torch.int32, device=device)
    first = packed_metadata({"packed_seq_lengths": lengths})
    assert packed_metadata({"packed_seq_lengths": lengths}) is first
    assert packed_metadata({"packed_seq_lengths": lengths, "position_ids": torch.zeros(1, 6)}).total == 6
    assert packed_metadata({"packed_seq_lengths": lengths}).total == 5
    lengths += 1
    assert packed_metadata({"packed_seq_lengths": lengths}).cu_seqlens.tolist() == [0, 3, 7]
    with torch.inference_mode():
        unversioned = torch.tensor([1, 1], device=device)
        assert packed_metadata({"packed_seq_lengths": unversioned}).total == 2
        in_inference = packed_metadata({"packed_seq_lengths": lengths})
    assert not in_inference.cu_seqlens.is_inference()  # inference tensors cannot be saved for backward
    assert packed_metadata({"packed_seq_lengths": lengths}) is in_inference
    assert packed_metadata({"packed_seq_lengths": None}) is None
    with pytest.raises(ValueError, match="total: expected at least the 7 tokens of the documents, got 6"):
        packed_metadata({"packed_seq_lengths": lengths, "input_ids": torch.zeros(1, 6)})


@pytest.mark.parametrize("window", [None, -1, 0, 2])
def test_sdpa_mask_makes_sdpa_equal_to_packed_attention(device, window):
    metadata = PackedMetadata.from_lengths([3, 1, 4], total=10, device=device)
    q, k, v = torch.randn(3, 10, 2, 8, device=device)
    mask = sdpa_mask(metadata, dtype=torch.float32, sliding_window=window)
    assert mask.shape == (1, 1, 10, 10)
    out = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), attn_mask=mask)
    lengths = cu_seqlens_of([3, 1, 4, 2], device)  # the padding sees itself, so that softmax has something
    expected = varlen_attention(q, k, v, lengths, window_size=(window - 1, 0) if (window or 0) > 0 else (-1, -1))
    torch.testing.assert_close(out[0].transpose(0, 1), expected, **CLOSE)
    assert_same(sdpa_mask(metadata, sliding_window=window), mask == 0)


def test_xformers_mask(monkeypatch):
    metadata = PackedMetadata.from_lengths([2, 0, 3], total=6)
    monkeypatch.setitem(sys.modules, "xformers.ops.fmha.attn_bias", None)
    assert xformers_mask(metadata) is None

    class Bias(tuple):  # the two calls of xformers that are made
        from_seqlens = staticmethod(lambda lengths: Bias(lengths))
        make_local_attention = lambda self, window: ("local", window, *self)  # noqa: E731

    for name in ("xformers", "xformers.ops", "xformers.ops.fmha", "xformers.ops.fmha.attn_bias"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["xformers.ops.fmha.attn_bias"].BlockDiagonalCausalMask = Bias
    assert xformers_mask(metadata) == xformers_mask(metadata, sliding_window=-1) == (2, 3, 1)
    assert xformers_mask(metadata, sliding_window=4) == ("local", 4, 2, 3, 1)


@pytest.mark.parametrize("window", [None, 0, 1, 3])
def test_mask_of_xformers_itself_shows_what_sdpa_mask_shows(window):
    pytest.importorskip("xformers.ops.fmha.attn_bias", exc_type=ImportError)
    metadata = PackedMetadata.from_lengths([3, 0, 1, 4], total=10)
    bias = xformers_mask(metadata, sliding_window=window)
    assert_same(bias.materialize((10, 10)) == 0, sdpa_mask(metadata, sliding_window=window)[0, 0])


# --- attention ---


def case_of_attention(device, lengths, *, batch=1, dtype=torch.float32):
    """Q, K, V as models make them, heads after tokens in memory, and Unsloth's seq_info."""
    total = sum(lengths) // batch
    heads = [torch.randn(batch, total, n, 8, device=device, dtype=dtype).transpose(1, 2) for n in (4, 2, 2)]
    info = torch.tensor(lengths, dtype=torch.int32, device=device), cu_seqlens_of(lengths, device), max(lengths)
    return [t.requires_grad_() for t in heads], info


@pytest.mark.parametrize("options", [{}, {"sliding_window": 2}, {"softmax_scale": 0.3}], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_attention_is_sdpa_under_the_packed_mask(device, options, batch):
    (Q, K, V), info = case_of_attention(device, [3, 1, 4, 8], batch=batch)
    out = packed_attention(Q, K, V, info, dropout_p=0.0, **options)
    assert out.shape == (batch, 16 // batch, 4, 8)
    metadata = PackedMetadata.from_lengths([3, 1, 4, 8], device=device)
    mask = sdpa_mask(metadata, sliding_window=options.get("sliding_window"))
    row = [t.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for t in (Q, K, V)]
    sdpa = F.scaled_dot_product_attention(*row, mask, scale=options.get("softmax_scale"), enable_gqa=True)
    expected = sdpa[0].transpose(0, 1).reshape(out.shape)
    dout = torch.randn_like(out)
    for ours, theirs in zip(
        (out, *torch.autograd.grad(out, (Q, K, V), dout)),
        (expected, *torch.autograd.grad(expected, (Q, K, V), dout)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **CLOSE)


def test_packed_attention_of_layers_that_share_a_batch(device):
    (Q, K, V), info = case_of_attention(device, [3, 5])
    assert_same(packed_attention(Q, K, V, info), packed_attention(Q, K, V, info))
    longer = torch.zeros(1, 4, 10, 8, device=device)
    assert not packed_attention(longer, longer, longer + 1, info)[0, 8:].any()  # padding after the documents


def test_packed_attention_names_what_it_does_not_take(device):
    (Q, K, V), info = case_of_attention(device, [3, 5])
    with pytest.raises(NotImplementedError, match=r"dropout_p: expected 0\.0, .* got 0\.1"):
        packed_attention(Q, K, V, info, dropout_p=0.1)
    with pytest.raises(ValueError, match=r"Q: expected \[batch, num_heads, seqlen, head_dim\], got \[4, 8, 8\]"):
        packed_attention(Q[0], K, V, info)
    with pytest.raises(TypeError, match=r"sliding_window: expected an integer, got 1.5"):
        packed_attention(Q, K, V, info, sliding_window=1.5)


def test_windows_as_flash_attn_takes_them(device):
    """Gemma 2's layers give (w, w) for rows longer than the window; no window is None, 0, or less."""
    given, info = case_of_attention(device, [9, 7])
    for window in ((3, 3), (3, 0)):
        assert_same(
            packed_attention(*given, info, window_size=window), packed_attention(*given, info, sliding_window=4)
        )
    for keys in (0, -1):
        assert_same(packed_attention(*given, info, sliding_window=keys), packed_attention(*given, info))


# --- rope ---


def half_split(x, cos, sin, positions):
    cos, sin = (table[positions].unsqueeze(-3) for table in (cos, sin))
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("full", [True, False], ids=["cat(freqs, freqs)", "freqs"])
@pytest.mark.parametrize("indices", ["none", "batch", "flat", "row"])
def test_fast_rope_embedding(device, full, indices):
    Q = torch.randn(2, 5, 4, 8, device=device).transpose(1, 2).requires_grad_()
    K = torch.randn(2, 2, 5, 8, device=device, requires_grad=True)
    angles = torch.randn(12, 4, device=device)
    cos, sin = angles.cos(), angles.sin()
    given_indices, positions = {
        "none": (None, torch.arange(5)),
        "batch": (torch.arange(10, dtype=torch.int32).view(2, 5), torch.arange(10).view(2, 5)),
        "flat": (torch.arange(10), torch.arange(10).view(2, 5)),
        "row": (torch.tensor([[3, 0, 1, 0, 11]]), torch.tensor([3, 0, 1, 0, 11])),
    }[indices]
    tables = [(torch.cat([t, t], -1) if full else t)[None, None] for t in (cos, sin)]
    actual = fast_rope_embedding(Q, K, *tables, given_indices)
    expected = [half_split(t, cos, sin, positions.to(device)) for t in (Q, K)]
    douts = [torch.randn_like(t) for t in expected]
    for ours, theirs in zip(
        (*actual, *torch.autograd.grad(actual, (Q, K), douts)),
        (*expected, *torch.autograd.grad(expected, (Q, K), douts)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **CLOSE)


@pytest.mark.parametrize("indices", [None, torch.tensor([[3, 0, 1, 0, 2], [0, 1, 2, 3, 4]])], ids=["none", "batch"])
def test_fast_rope_embedding_in_place(device, indices):
    """The same values and gradients in the memory of the projections, which no autograd of theirs misses."""
    hidden = torch.randn(2, 5, 6, device=device, requires_grad=True)
    weights = [torch.randn(heads * 8, 6, device=device, requires_grad=True) for heads in (4, 2)]
    angles = torch.randn(6, 4, device=device)
    found = []
    for inplace in (False, True):
        Q, K = (F.linear(hidden, w).view(2, 5, -1, 8).transpose(1, 2) for w in weights)
        rotated = fast_rope_embedding(Q, K, angles.cos(), angles.sin(), indices, inplace=inplace)
        assert [out.data_ptr() == t.data_ptr() for out, t in zip(rotated, (Q, K), strict=True)] == [inplace] * 2
        loss = sum((out.sin() * (1 + at)).sum() for at, out in enumerate(rotated))
        found.append((*rotated, *torch.autograd.grad(loss, (hidden, *weights))))
    for plain, in_place in zip(*found, strict=True):
        assert_same(plain, in_place)
    Q = F.linear(hidden, weights[0]).exp().view(2, 5, -1, 8).transpose(1, 2)  # exp keeps its result for backward
    Q, _ = fast_rope_embedding(Q, K.detach(), angles.cos(), angles.sin(), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Q.sum().backward()


def test_fast_rope_embedding_names_what_does_not_fit(device):
    Q, cos = torch.zeros(2, 4, 5, 8, device=device), torch.zeros(4, 4, device=device)
    with pytest.raises(ValueError, match=r"cos: expected rows for 5 positions, got \[4, 4\]"):
        fast_rope_embedding(Q, Q, cos, cos)
    with pytest.raises(ValueError, match=r"rope_embedding_indices: expected \[batch=2, seqlen=5\], got \[3\]"):
        fast_rope_embedding(Q, Q, cos, cos, torch.zeros(3, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match=r"position_ids: expected .*index"):
        fast_rope_embedding(Q, Q, cos, cos, torch.arange(5, device=device))
    with pytest.raises(ValueError, match=r"cos: expected \[max_positions, head_dim or head_dim / 2\], got \[2, 4, 4\]"):
        fast_rope_embedding(Q, Q, cos.expand(2, 4, 4), cos)
    with pytest.raises(ValueError, match=r"Q: expected \[batch, num_heads, seqlen, head_dim\], got \[4, 5, 8\]"):
        fast_rope_embedding(Q[0], Q[0], cos, cos)


# --- enable_packing ---

EXAMPLES = [{"input_ids": [5, 6, 7]}, {"input_ids": [8]}, {"input_ids": [9, 4]}]
PACKED = {"input_ids": [[5, 6, 7, 8, 9, 4]], "position_ids": [[0, 1, 2, 0, 0, 1]], "packed_seq_lengths": [3, 1, 2]}


def padded(examples):
    """Rows padded on the right, as most collators do."""
    longest = max(len(e["input_ids"]) for e in examples)
    ids, mask = torch.zeros(2, len(examples), longest, dtype=torch.int64)
    for row, example in enumerate(examples):
        ids[row, : len(example["input_ids"])] = torch.tensor(example["input_ids"])
        mask[row, : len(example["input_ids"])] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "kind": "text"}


def one_row(examples):
    return {"input_ids": torch.tensor([[token for example in examples for token in example["input_ids"]]])}


def lists(batch, names=PACKED):
    return {name: batch[name].tolist() for name in names}


@pytest.mark.parametrize("collator", [padded, one_row])
def test_batches_become_one_row(collator):
    batch = enable_packing(collator)(EXAMPLES)
    assert lists(batch) == PACKED
    assert "attention_mask" not in batch
    assert (batch["packed_seq_lengths"].dtype, batch["position_ids"].dtype) == (torch.int32, torch.int64)
    if collator is padded:
        assert batch["labels"].tolist() == [[-100, 6, 7, -100, -100, 4]]
        assert batch["kind"] == "text"


class TorchCallAlone:
    """All that Unsloth asks of a collator."""

    def torch_call(self, examples):
        return padded(examples)


class ByFramework(TorchCallAlone):
    """transformers' mixin: a call asks the method of the framework."""

    return_tensors = "pt"

    def __call__(self, features, return_tensors=None):
        assert (return_tensors or self.return_tensors) == "pt"
        return self.torch_call(features)

    def numpy_call(self, examples):
        return {name: value.numpy() for name, value in padded(examples).items() if name != "kind"}


@pytest.mark.parametrize("collator", [padded, TorchCallAlone(), ByFramework()])
def test_every_way_into_a_collator_packs(collator):
    packing = enable_packing(types.SimpleNamespace(data_collator=collator)).data_collator
    ways = {
        "call": packing,
        "torch_call": packing.torch_call,
        "by keyword": lambda examples: packing(features=examples, return_tensors="pt"),
        "as transformers' trainers": lambda examples: packing(examples, "pt"),
        "pickled": pickle.loads(pickle.dumps(packing)).torch_call,
    }
    for way, collate in ways.items():
        batch = collate(EXAMPLES)
        assert lists(batch) == PACKED, way
        assert batch["labels"].tolist() == [[-100, 6, 7, -100, -100, 4]], way
    for framework in ("np", "tf"):
        with pytest.raises(ValueError, match=f'return_tensors: expected "pt" or None, got {framework!r}'):
            packing(EXAMPLES, return_tensors=framework)
    assert not hasattr(packing, "numpy_call"), "arrays would be unpacked"
    with pytest.raises(AttributeError, match="numpy_call: a collator that packs gives tensors alone"):
        packing.numpy_call(EXAMPLES)


def test_a_collator_of_arrays_is_named():
    with pytest.raises(TypeError, match=r"input_ids: expected a tensor, got array.* \(ndarray\)"):
        enable_packing(ByFramework().numpy_call)(EXAMPLES)


def test_who_wraps_torch_call_wraps_the_call_too():
    """As Unsloth does it, on the collator that it finds."""
    packing = enable_packing(TorchCallAlone())
    inner = packing.torch_call
    packing.torch_call = lambda examples: {**inner(examples), "wrapped": True}
    assert packing(EXAMPLES)["wrapped"]
    assert packing._unsloth_padding_free_lengths_wrapped, "nothing is left for it to add"


def test_what_a_trainer_sets_reaches_the_collator_inside():
    collator = ByFramework()
    packing = enable_packing(collator)
    packing.return_tensors = "np"
    assert (collator.return_tensors, packing.return_tensors) == ("np", "np")
    packing.sequence_lengths_key = "documents"
    assert not hasattr(collator, "sequence_lengths_key")


def test_rows_without_padding_and_lengths_of_packed_examples():
    examples = [{"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}, {"input_ids": [4, 5, 6]}]
    batch = enable_packing(padded)(examples)
    expected = {
        "input_ids": [[1, 2, 3, 4, 5, 6]],
        "position_ids": [[0, 0, 1, 0, 1, 2]],
        "packed_seq_lengths": [1, 2, 3],
    }
    assert lists(batch) == expected
    examples = [{"input_ids": [1, 2, 3], "documents": torch.tensor([1, 2])}]
    assert enable_packing(one_row, sequence_lengths_key="documents")(examples)["packed_seq_lengths"].tolist() == [1, 2]


def test_twice_is_once_and_pickles():
    collator = enable_packing(padded)
    assert enable_packing(collator) is collator
    assert lists(pickle.loads(pickle.dumps(collator))(EXAMPLES)) == PACKED
    wrapped_by_unsloth = type("Collator", (), {"__call__": one_row, "_unsloth_packing_wrapped": True})()
    assert enable_packing(wrapped_by_unsloth) is wrapped_by_unsloth
    with pytest.raises(
        TypeError, match="trainer_or_collator: expected data_collator, or a callable or torch_call, got int"
    ):
        enable_packing(3)


def test_padding_after_the_last_document_is_one_more():
    def with_tail(examples):
        row = one_row(examples)["input_ids"]
        return {"input_ids": F.pad(row, (0, 2)), "labels": F.pad(row, (0, 2), value=-100)}

    batch = enable_packing(with_tail)(EXAMPLES)
    assert batch["packed_seq_lengths"].tolist() == [3, 1, 2, 2]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, -100, 4, -100, -100]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda b: {"input_ids": b["input_ids"][:, :-1]},
            r"seq_lengths: expected lengths .* row of 5 tokens, got 6 tokens",
        ),
        (lambda b: {"input_ids": F.pad(b["input_ids"], (0, 1))}, "row of 7 tokens, got 6 tokens in 3 documents"),
        (lambda b: b | {"position_ids": torch.zeros(3, 1, 6)}, r"position_ids: expected \[1, 6\] like input_ids"),
        (lambda b: b | {"attention_mask": torch.ones(1, 1, 6, 6)}, r"attention_mask: expected \[1, 6\] like input_ids"),
    ],
    ids=["cut", "longer", "multimodal", "4-D mask"],
)
def test_rows_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        enable_packing(lambda examples: change(one_row(examples)))(EXAMPLES)


def test_a_trainer_gets_its_collator_replaced():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model[1].max_seq_length = 4
    args = types.SimpleNamespace(remove_unused_columns=True)
    trainer = types.SimpleNamespace(data_collator=padded, args=args, model=model)
    assert enable_packing(trainer) is trainer
    assert isinstance(trainer.data_collator, PackingCollator)
    assert args.remove_unused_columns is False
    assert model[1]._unsloth_allow_packed_overlength
    assert not hasattr(model[0], "_unsloth_allow_packed_overlength")
    collator = trainer.data_collator
    assert enable_packing(trainer).data_collator is collator
    assert lists(trainer.data_collator(EXAMPLES)) == PACKED  # 6 tokens, more than the 4 of max_seq_length


@trl_installed
@pytest.mark.parametrize("multiple", [None, 8])
def test_collator_of_trl(multiple):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    collator = enable_packing(DataCollatorForLanguageModeling(pad_token_id=0, pad_to_multiple_of=multiple))
    assert collator.padding_free
    examples = [{"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}, {"input_ids": [4, 5], "seq_lengths": [2]}]
    batch = collator(examples)
    tail = [3] if multiple else []
    assert batch["packed_seq_lengths"].tolist() == [1, 2, 2, *tail]
    assert (
        batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == cu_seqlens_of([1, 2, 2, *tail]).tolist()
    )
    assert batch["seq_idx"].tolist() == [[0, 1, 1, 2, 2, *[3] * sum(tail)]]
    assert batch["labels"].tolist() == [[-100, -100, 3, -100, 5, *[-100] * sum(tail)]]
    assert "attention_mask" not in batch


def plain(batch):
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@pytest.fixture
def unsloth_packing():
    """Unsloth's file; the package around it imports nowhere without a GPU."""
    found = importlib.util.find_spec("unsloth")
    if found is None:
        pytest.skip("needs Unsloth")
    path = f"{found.submodule_search_locations[0]}/utils/packing.py"
    spec = importlib.util.spec_from_file_location("unsloth_packing", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@trl_installed
@pytest.mark.parametrize("packed", [True, False])
def test_batches_are_those_of_unsloth_itself_and_it_reads_ours(unsloth_packing, packed):
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    def trainer():
        collator, args = DataCollatorForLanguageModeling(pad_token_id=0), types.SimpleNamespace()
        return types.SimpleNamespace(data_collator=collator, args=args, model=torch.nn.Linear(1, 1))

    examples = [{"input_ids": [1, 2, 3], "seq_lengths": [1, 2]}, {"input_ids": [4, 5], "seq_lengths": [2]}]
    examples = examples if packed else EXAMPLES
    theirs, ours = trainer(), enable_packing(trainer())
    unsloth_packing.enable_sample_packing(theirs.model, theirs)
    expected, batch = theirs.data_collator(examples), ours.data_collator(examples)
    assert plain(batch) == plain(expected)
    unsloth_packing.enable_sample_packing(ours.model, ours)  # which finds it packing already
    assert plain(ours.data_collator(examples)) == plain(expected)
    assert enable_packing(theirs.data_collator) is theirs.data_collator

    _, cu_seqlens, longest = info = unsloth_packing.get_packed_info_from_kwargs(batch, torch.device("cpu"))
    metadata = packed_metadata(batch)
    assert_same(cu_seqlens, metadata.cu_seqlens)
    assert longest == metadata.max_seqlen
    for window in (None, 2):
        mask = {"dtype": torch.float32, "sliding_window": window}
        theirs = unsloth_packing.build_sdpa_packed_attention_mask(info, device=torch.device("cpu"), **mask)
        assert_same(sdpa_mask(metadata, **mask), theirs)


@transformers_installed
def test_trainer_and_model_of_transformers(tmp_path):
    """The batches reach a model whose attention reads them from position_ids; the loss is the one of the documents."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=10, attn_implementation="sdpa", **sizes))
    arguments = TrainingArguments(tmp_path, per_device_train_batch_size=3, report_to=[], use_cpu=True)
    trainer = enable_packing(Trainer(model, arguments, data_collator=padded, train_dataset=EXAMPLES))
    batch = next(iter(trainer.get_train_dataloader()))
    assert sorted(batch["packed_seq_lengths"].tolist()) == [1, 2, 3]
    batch.pop("kind")
    ours = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], labels=batch["labels"]).loss
    stock = padded(EXAMPLES)
    stock.pop("kind")
    torch.testing.assert_close(ours, model(**stock).loss, **CLOSE)


def test_padded_rows_without_a_mask_are_no_row_of_documents():
    """Which slots are padding nobody says: labels that are masked at the end of the last example are not."""

    def pad(examples):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(e["input_ids"]) for e in examples], batch_first=True)
        labels = torch.tensor([[3, -100, -100], [1, -100, -100]])
        return {"input_ids": ids, "labels": labels}

    with pytest.raises(ValueError, match="attention_mask: expected beside 2 rows of 3 slots for 4 tokens, got none"):
        enable_packing(pad)([{"input_ids": [3]}, {"input_ids": [1, 2, 4]}])
