"""SkyRL's collators and model wrappers train tiny models on the CPU: padded, packed, and document by document.

Megatron: MegatronModelWrapper and a GPTModel. FSDP: HFModelWrapper and a Llama of transformers, without FSDP around it.
run.py starts it under the patches with their flag set; the last line that it prints is JSON, the losses of each way.
"""

import json
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import stand_ins  # noqa: F401
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers.megatron_case import answers_of
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from skyrl.backends.skyrl_train.distributed.megatron.model_utils import _fused_lm_head_logprob_apply
from skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper import MegatronModelWrapper
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from skyrl.train.config.sft_config import SFTConfig, build_skyrl_config_for_sft
from skyrl.train.dataset.collators import DefaultCollator, PackedDataCollator
from transformers import LlamaConfig, LlamaForCausalLM

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


class WithOutputProcessor(GPTModel):
    """megatron-core has output_processor since later than the release that is tested here."""

    def forward(self, *args, output_processor=None, output_processor_context=None, **kwargs):
        if output_processor is None:
            return super().forward(*args, **kwargs)
        self.post_process = False
        hidden = super().forward(*args, **kwargs)
        self.post_process = True
        return output_processor(hidden_states=hidden, output_layer=self.output_layer, context=output_processor_context)


def model_of(spec):
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        attention_dropout=0.0, hidden_dropout=0.0, use_cpu_initialization=True, gradient_accumulation_fusion=False,
        masked_softmax_fusion=False, bias_dropout_fusion=False, bf16=False,
    )  # fmt: skip
    torch.manual_seed(0)
    return WithOutputProcessor(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=64, position_embedding_type="rope"
    )


def train(step, model=None):
    """The losses of STEPS steps; ``step(model)`` leaves the gradients of one and returns its loss."""
    model = model or model_of(use_packing_ops(get_gpt_layer_local_spec()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        losses.append(step(model))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def through_megatron(collator, packed, backend=None):
    """backend: of the log-probabilities from hidden states; without, they are taken from logits."""
    batch = collator(examples(), batch_size=len(examples()))
    micro = 1 if packed else 4

    def step(model):
        settings = build_skyrl_config_for_sft(SFTConfig(strategy="megatron")).trainer
        settings.remove_microbatch_padding = packed
        settings.fused_lm_head_logprob = backend is not None
        settings.fused_lm_head_logprob_backend = backend or "torch"
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
    """Megatron-core's attention on one document at a time, without padding."""
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


def llama_of(attention):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, num_hidden_layers=2, attn_implementation=attention)
    return LlamaForCausalLM(config)


def through_fsdp_wrapper(packed):
    """Rows ``[1, tokens of the batch]``, or padded rows."""
    batch = DefaultCollator(Tokenizer(), 4)(examples(), batch_size=len(examples()))
    model = llama_of("packing_ops" if packed else "sdpa")
    wrapper = HFModelWrapper(model, bf16=False, use_flash_attention_2=packed, remove_microbatch_padding=packed)
    assert wrapper.attn_implementation == model.config._attn_implementation

    def step(model):
        mask = batch["loss_mask"]
        logps = wrapper(batch["sequences"], batch.metadata["response_length"], batch["attention_mask"])
        loss = -(logps * mask).sum()  # the mask is scaled by the number of targets
        loss.backward()
        return loss.item()

    return train(step, model)


def llama_by_document(model):
    losses = []
    total = sum(sum(each["loss_mask"]) for each in examples())
    for each in examples():
        ids = torch.tensor([each["input_ids"]])
        taken = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
        losses.append(taken[-each["num_actions"] :].sum() / total)
    loss = torch.stack(losses).sum()
    loss.backward()
    return loss.item()


def backends_agree(rank, ranks, store):
    """Log-probabilities and gradients of SkyRL's backend and of packing_ops, by shards of the vocabulary."""
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(store, ranks))
    generator = torch.Generator().manual_seed(0)
    shard = VOCABULARY // ranks
    came = {}
    whole = torch.randn(VOCABULARY, 8, generator=generator)
    start = torch.randn(2, 9, 8, generator=generator)
    target = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    upstream = torch.randn(2, 9, generator=generator)
    for backend in ("torch", "packing_ops"):
        hidden, weight = (
            start.clone().requires_grad_(),
            whole[rank * shard : (rank + 1) * shard].clone().requires_grad_(),
        )
        bounds = (rank * shard, (rank + 1) * shard)
        logps = _fused_lm_head_logprob_apply(
            backend, hidden, weight, target.clone(), *bounds, 4, dist.group.WORLD, False
        )
        logps.backward(upstream)
        dist.all_reduce(hidden.grad)  # as the gather of sequence parallelism does
        came[backend] = (logps, hidden.grad, weight.grad)
    torch.testing.assert_close(came["packing_ops"], came["torch"])
    dist.destroy_process_group()


def main():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(backends_agree, args=(2, f"{folder}/store"), nprocs=2)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    parallel_state.initialize_model_parallel()
    sizes = {"tp_size": 1, "pp_size": 1, "cp_size": 1, "dp_size": 1}
    packing = PackedDataCollator(
        Tokenizer(), CAPACITY, **sizes, batch_size=len(examples()), micro_train_batch_size_per_gpu=1
    )
    with answers_of("cpu"):
        megatron = {
            "padded": through_megatron(DefaultCollator(Tokenizer(), 4), packed=False),
            "packed": through_megatron(packing, packed=True),
            "packed, log-probs from hidden states": through_megatron(packing, packed=True, backend="packing_ops"),
            "by document": train(by_document),
        }
    fsdp = {
        "padded": through_fsdp_wrapper(packed=False),
        "packed": through_fsdp_wrapper(packed=True),
        "by document": train(llama_by_document, llama_of("sdpa")),
    }
    print(json.dumps({"Megatron": megatron, "FSDP": fsdp}))


if __name__ == "__main__":
    main()
