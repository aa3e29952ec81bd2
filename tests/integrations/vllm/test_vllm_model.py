"""A whole model with vLLM's layers, over stand-ins, beside transformers: the log-probabilities of what it samples."""

import gc

import pytest
import torch
from helpers.vllm_model import Qwen3, sampled

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops

transformers = pytest.importorskip("transformers")
TINY = {
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "max_position_embeddings": 1024},
}
QWEN3_0_6B = {
    **{"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True},
}


def differ(vllm, sizes, lengths, tokens, budget, device):
    """(log-probabilities of an engine that differ from the trainer's, all of them)."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**sizes), dtype=torch.bfloat16)
    model.to(device)
    prompts = [torch.randint(sizes["vocab_size"], (n,)) for n in lengths]
    engine = Qwen3(vllm, model, len(lengths), max(lengths) + tokens)
    rollout = sampled(engine, prompts, tokens, budget)
    del engine
    gc.collect()
    assert apply_packing_ops(model, invariant=True).skipped == {}
    found = []
    for part in range(0, len(rollout), 32):
        documents, logps = zip(*rollout[part : part + 32], strict=True)
        metadata = po.PackedMetadata.from_lengths([len(each) for each in documents], device=device)
        row = torch.cat(documents).to(device)
        of_row = {"input_ids": row[None], "position_ids": metadata.position_ids[None], **metadata.to_transformers()}
        with torch.no_grad():
            hidden = model.model(**of_row, use_cache=False).last_hidden_state
            ours = po.token_logps(hidden, model.lm_head.weight, row, metadata).cpu().split([len(d) for d in documents])
        found += [(mine[-tokens - 1 : -1] != theirs) for mine, theirs in zip(ours, logps, strict=True)]
    revert_packing_ops(model)
    return int(torch.cat(found).sum()), sum(map(len, found))


def test_log_probs_of_a_model_are_the_trainer_s(vllm, device):
    lengths = (1, 7, 130, 260, 33)
    assert differ(vllm, TINY, lengths, 12, 100, device) == (0, 12 * len(lengths))


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_log_probs_of_qwen3_0_6b_s_shape(vllm):
    """A hundred thousand; a minute."""
    lengths = torch.randint(1, 600, (256,)).tolist()
    assert differ(vllm, QWEN3_0_6B, lengths, 400, 8192, "cuda") == (0, 400 * 256)
