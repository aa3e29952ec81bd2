"""Buffers that are filled anew for each step, unnoticed by torch: a model sees the documents that are there now."""

import numpy as np
import pytest
import torch

import packing_ops as po

transformers = pytest.importorskip("transformers")

from packing_ops.integrations.transformers import apply_packing_ops  # noqa: E402

OLD, NEW = [5, 5], [3, 7]
SIZES = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 97}


def model_on(device, dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(num_key_value_heads=2, max_position_embeddings=64, **SIZES)
    model = transformers.LlamaForCausalLM(config).to(device, dtype).eval()
    assert apply_packing_ops(model)
    return model


def row(lengths, device="cpu"):
    metadata = po.PackedMetadata.from_lengths(lengths, device=device)
    return metadata.position_ids[None].contiguous(), metadata.cu_seqlens


def logits(model, position_ids, **documents):
    input_ids = torch.arange(position_ids.numel(), device=position_ids.device)[None]
    return model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **documents).logits


@torch.no_grad()
def test_position_ids_in_a_numpy_buffer():
    model, buffer = model_on("cpu"), row(OLD)[0].numpy()
    position_ids = torch.from_numpy(buffer)
    before = logits(model, position_ids)
    buffer[:] = row(NEW)[0].numpy()
    expected = logits(model, row(NEW)[0])
    assert not torch.equal(before, expected)
    torch.testing.assert_close(logits(model, position_ids), expected, rtol=0, atol=0)


@torch.no_grad()
def test_a_padding_mask_in_a_numpy_buffer():
    model, buffer = model_on("cpu"), np.array([[1] * 8 + [0] * 2, [1] * 10])
    input_ids, mask = torch.arange(20).view(2, 10), torch.from_numpy(buffer)
    model(input_ids=input_ids, attention_mask=mask, use_cache=False)
    buffer[0, 5:] = 0
    found = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
    expected = model(input_ids=input_ids, attention_mask=mask.clone(), use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@torch.no_grad()
def test_explicit_cu_seqlens_in_a_numpy_buffer():
    model, (position_ids, cu_seqlens) = model_on("cpu"), row(OLD)
    names = ("cu_seq_lens_q", "cu_seq_lens_k")
    logits(model, position_ids, **dict.fromkeys(names, cu_seqlens))
    new_positions, new = row(NEW)
    position_ids.numpy()[:], cu_seqlens.numpy()[:] = new_positions.numpy(), new.numpy()
    found = logits(model, position_ids, **dict.fromkeys(names, cu_seqlens))
    torch.testing.assert_close(found, logits(model, new_positions), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@torch.no_grad()
def test_a_captured_model_replays_with_other_documents(monkeypatch):
    """Warmed up on another stream and captured; the replay has other lengths in the same buffers."""
    monkeypatch.setenv("PACKING_OPS_CHECK", "0")
    model = model_on("cuda", torch.bfloat16)
    position_ids, cu_seqlens = row([20, 44], "cuda")
    documents = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 64, "max_length_k": 64}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        logits(model, position_ids, **documents)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = logits(model, position_ids, **documents)
    for lengths in ([20, 44], [50, 14], [64, 0]):
        new_positions, new = row(lengths, "cuda")
        position_ids.copy_(new_positions)
        cu_seqlens.copy_(new)
        graph.replay()
        torch.testing.assert_close(captured, logits(model, new_positions, cu_seq_lens_q=new), rtol=0, atol=0)
    cu_seqlens.copy_(row([30, 34], "cuda")[1])  # and position_ids are not those
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="position_ids: expected to restart where cu_seq_lens_q"):
        logits(model, *row([64], "cuda")[:1])
