"""Packed rows through a forward_step of megatron-core, one process on the CPU: python
examples/first/megatron_step.py
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from packing_ops.integrations.megatron import next_token_targets, patch_rope, preprocess_packed_seqs, use_packing_ops

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
parallel_state.initialize_model_parallel()
torch.cuda.current_device = lambda: "cpu"  # megatron-core puts tensors there; leave this out on a GPU machine

patch_rope()  # before the config
config = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=128,
    attention_dropout=0.0, hidden_dropout=0.0, apply_rope_fusion=True, use_cpu_initialization=True,
    gradient_accumulation_fusion=False, masked_softmax_fusion=False, bias_dropout_fusion=False,  # no Apex here
)  # fmt: skip
spec = use_packing_ops(get_gpt_layer_local_spec())
model = GPTModel(config, spec, vocab_size=32, max_sequence_length=16, position_embedding_type="rope")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

# A padded batch, as a data loader makes it: right-padded rows and their mask.
ids = torch.randint(3, 32, (4, 16), generator=torch.Generator().manual_seed(0))
mask = torch.arange(16) < torch.tensor([[16], [5], [9], [3]])


def forward_step(batches, model):
    ids, mask = next(batches)
    row, params = preprocess_packed_seqs(ids, mask)
    targets, loss_mask = next_token_targets(ids, params, mask, total=row.shape[1])
    losses = model(row, None, None, labels=targets, packed_seq_params=params)  # [1, total]

    def loss_of(losses):
        loss = (losses * loss_mask).sum() / loss_mask.sum()
        return loss, {"loss": loss.detach()}

    return losses, loss_of


for _ in range(3):
    # In a training script get_forward_backward_func() does this; megatron-core's schedules need a GPU.
    losses, loss_of = forward_step(iter([(ids, mask)]), model)
    loss, _ = loss_of(losses)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.4f}")
