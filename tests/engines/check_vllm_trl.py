"""TRL's GRPOTrainer with vLLM in the same process: PACKING_OPS_VLLM=1 and two lines make its log-probabilities one."""

import datasets
import pytest
import torch
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

from packing_ops.integrations.transformers import apply_packing_ops
from packing_ops.integrations.trl import enable_padding_free, revert_padding_free
from packing_ops.integrations.vllm import register, revert_registration

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(500))]


def tokenizer():
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)


def reward(completions, **_):
    return [float(len(set(each.split()))) for each in completions]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampling_log_probs_are_the_trainer_s(temperature, tmp_path, monkeypatch):
    """Over steps that change the weights: TRL's metric of their difference is 0."""
    monkeypatch.setenv("PACKING_OPS_VLLM", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB: else a third of the memory
    register()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Qwen3Config(
        **sizes, vocab_size=512, head_dim=32, num_hidden_layers=3, initializer_range=0.1, max_position_embeddings=256,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    folder, tokens = str(tmp_path / "model"), tokenizer()
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokens.save_pretrained(folder)
    arguments = trl.GRPOConfig(
        **{"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128, "temperature": temperature},
        **{"output_dir": str(tmp_path), "per_device_train_batch_size": 8, "num_generations": 4, "max_steps": 3},
        **{"max_completion_length": 24, "learning_rate": 1e-3, "logging_steps": 1, "report_to": "none"},
        **{"use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "bfloat16"}, "save_strategy": "no"},
    )
    rows = [{"prompt": " ".join(WORDS[3 + i : 6 + i + 5 * (i % 4)])} for i in range(16)]
    data = datasets.Dataset.from_list(rows)
    trainer = trl.GRPOTrainer(folder, reward, args=arguments, train_dataset=data, processing_class=tokens)
    assert apply_packing_ops(trainer.model, invariant=True).skipped == {}
    enable_padding_free(trainer)
    try:
        trainer.train()
    finally:
        revert_padding_free(trainer)
        trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
        revert_registration()
    name = "sampling/sampling_logp_difference/max"
    found = [row[name] for row in trainer.state.log_history if name in row]
    assert found == [0.0] * 3
