"""Attention over packed rows that are spread over several ranks of a torch.distributed group.

sharding.py     A packed row over the ranks, and back; the loss over all ranks' targets.
ulysses.py      All-to-all to whole documents with a part of the heads: the bits of one GPU.
gathered.py     Queries stay, the keys that they need are sent: any number of heads. key_layout.py says which keys.
overlap.py      How many parts the heads travel in, and whether received keys are kept.
choose.py       Both as functions, and which of the two, by heads and ranks, and why.
plan.py         Which documents of a step go over which ranks.
states.py       Layers with a state: that of a document which goes on travels to the next rank.
agreement.py    Under PACKING_OPS_CHECK, ranks that call with other options or lengths are named.
collectives.py  The collectives of torch.distributed that these are made of.
"""

from packing_ops.parallel.choose import (
    Choice,
    choose_attention,
    gathered_attention,
    ulysses_attention,
    varlen_attention_over,
)
from packing_ops.parallel.plan import Share, StepPlan, plan_step
from packing_ops.parallel.sharding import count_targets, shard_indices, shard_of, shard_packed, sharded_loss, unshard

__all__ = [
    "Choice",
    "Share",
    "StepPlan",
    "choose_attention",
    "count_targets",
    "gathered_attention",
    "plan_step",
    "shard_indices",
    "shard_of",
    "shard_packed",
    "sharded_loss",
    "ulysses_attention",
    "unshard",
    "varlen_attention_over",
]
