"""SkyRL's collators and MegatronModelWrapper train a tiny GPTModel on the CPU: padded, packed, and document by document.

run.py starts it under the patch with its flag set; the last line that it prints is JSON, the losses of each way.
"""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import stand_ins  # noqa: F401
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_case import answers_of
from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper
from skyrl.train.config.sft_config import SFTConfig, build_skyrl_config_for_sft
from skyrl.train.dataset.collators import DefaultCollator, PackedDataCollator

from packing_ops.integrations.megatron import use_packing_ops

STEPS, VOCABULARY, CAPACITY = 4, 64, 48


class Tokenizer:
    pad_token_id = 0


def examples():
    generator = torch.Generator().manual_seed(0)
    made = []
    for length in (19, 5, 11, 30, 7, 2, 23, 14):
        ids = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
        response = max(length // 2, 1)
        made.append({"input_ids": ids, "attention_mask": [1] * length, "num_actions": response})
        made[-1]["loss_mask"] = [1] * response
    return made


def model_of(spec):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bf16=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=64, position_embedding_type="rope")


def train(step):
    """The losses of STEPS steps; ``step(model)`` leaves the gradients of one and returns its loss."""
    model = model_of(use_packing_ops(get_gpt_layer_local_spec()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        losses.append(step(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def through_skyrl(collator, packed):
    batch = collator(examples(), batch_size=len(examples()))
    micro = 1 if packed else 4

    def step(model):
        settings = build_skyrl_config_for_sft(SFTConfig(strategy="megatron")).trainer
        settings.remove_microbatch_padding = packed
        wrapper = MegatronModelWrapper(settings, [model])
        batches = [micro_batch(batch[at : at + micro], len(batch) // micro) for at in range(0, len(batch), micro)]
        width = batch["sequences"].shape[1]
        came = wrapper.forward_backward_mini_batch(batches, width, micro, loss_fn="cross_entropy")
        return sum(each["loss"] for each in came)

    return train(step)


def micro_batch(rows, count):
    mask = rows["attention_mask"]
    names = ("old_action_log_probs", "base_action_log_probs", "advantages", "rollout_action_logprobs")
    return {
        "sequences": rows["sequences"],
        "attention_mask": mask,
        "position_ids": (mask.long().cumsum(-1) - 1).clamp(min=0),
        "num_actions": rows.metadata["response_length"],
        "loss_mask": rows["loss_mask"],
        "sub_seq_lengths": rows.get("sub_seq_lengths"),
        "num_microbatches": count,
        "rollout_expert_indices": None,
        **dict.fromkeys(names),
    }


def by_document(model):
    """Megatron-core's own attention on one document at a time, without padding."""
    own = model_of(get_gpt_layer_local_spec())
    own.load_state_dict(model.state_dict())
    total = sum(sum(each["loss_mask"]) for each in examples())
    losses = []
    for each in examples():
        ids = torch.tensor([each["input_ids"]])
        causal = torch.ones(1, 1, ids.shape[1], ids.shape[1]).triu(1).bool()
        logits = own(ids, torch.arange(ids.shape[1])[None], causal)[0, :-1]
        taken = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        losses.append(taken[-each["num_actions"] :].sum() / total)
    loss = torch.stack(losses).sum()
    loss.backward()
    for mine, theirs in zip(model.parameters(), own.parameters(), strict=True):
        mine.grad = theirs.grad
    return loss.item()


def main():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    sizes = {"tp_size": 1, "pp_size": 1, "cp_size": 1, "dp_size": 1}
    packing = PackedDataCollator(
        Tokenizer(), CAPACITY, **sizes, batch_size=len(examples()), micro_train_batch_size_per_gpu=1
    )
    with answers_of("cpu"):
        losses = {
            "padded": through_skyrl(DefaultCollator(Tokenizer(), 4), packed=False),
            "packed": through_skyrl(packing, packed=True),
            "by document": train(by_document),
        }
    print(json.dumps({"Megatron": losses}))


if __name__ == "__main__":
    main()
