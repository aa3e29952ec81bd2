"""Tiny models, an engine of vLLM for each, and its log-probabilities next to the trainer's."""

import contextlib
import gc
import os

# Before vLLM reads them: in this process, offline.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # tests share the cores with others
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config
from vllm import LLM, SamplingParams

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops

SIZES = {
    **{"vocab_size": 5000, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1, "max_position_embeddings": 1024},
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}  # fmt: skip
WINDOWS = {"sliding_window": 100, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, tie_word_embeddings=False),
    "llama": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=True),
    "gemma": lambda: Gemma3TextConfig(**SIZES | WINDOWS, final_logit_softcapping=None),
}


def saved(kind: str, dtype: torch.dtype, folder) -> str:
    """A checkpoint of random weights."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(dtype).save_pretrained(folder)
    return str(folder)


@contextlib.contextmanager
def trainer(folder: str, dtype: torch.dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert apply_packing_ops(model, invariant=True).skipped == {}
    yield model
    revert_packing_ops(model)


@contextlib.contextmanager
def engine(folder: str, dtype: torch.dtype, **options):
    """An LLM; with the block all of it goes, and what its attention patched."""
    options = {
        "attention_backend": "CUSTOM",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 64 << 20,  # other programs may have the rest
        **options,
    }
    llm = LLM(folder, skip_tokenizer_init=True, dtype=str(dtype)[6:], **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def sample(llm, prompts: list[list[int]], tokens: int = 24, **options):
    """(prompt and answer, log-probabilities of the answer) of each prompt."""
    sampling = SamplingParams(max_tokens=tokens, logprobs=0, detokenize=False, **options)
    found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    answers = [each.outputs[0] for each in found]
    logps = [[place[t].logprob for place, t in zip(a.logprobs, a.token_ids, strict=True)] for a in answers]
    documents = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    return list(zip(documents, map(torch.tensor, logps), strict=True))


@torch.no_grad()
def trained(model, documents: list[list[int]], temperature: float) -> list[torch.Tensor]:
    """token_logps of each document's tokens, from one packed row."""
    metadata = po.PackedMetadata.from_lengths([len(document) for document in documents])
    row = torch.tensor([token for document in documents for token in document])
    of_row = {"input_ids": row[None], "position_ids": metadata.position_ids[None], **metadata.to_transformers()}
    hidden = model.model(**of_row, use_cache=False).last_hidden_state
    scaled = {"temperature": torch.full([len(row)], temperature)}  # a tensor: float32, as vLLM has it
    return list(
        po.token_logps(hidden, model.lm_head.weight, row, metadata, **scaled).split([len(d) for d in documents])
    )


def differences(model, sampled, temperature: float = 1.0) -> tuple[int, int]:
    """Log-probabilities that differ, and all of them."""
    ours = trained(model, [document for document, _ in sampled], temperature)
    pairs = [(logps, mine[-len(logps) - 1 : -1]) for (_, logps), mine in zip(sampled, ours, strict=True)]
    return sum(int((a != b).sum()) for a, b in pairs), sum(len(a) for a, _ in pairs)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5000, (n,), generator=generator).tolist() for n in lengths]
