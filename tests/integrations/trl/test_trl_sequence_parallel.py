"""A packed SFTTrainer under accelerate's sp_size: what reaches DeepSpeed's sharding, and what is refused."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl")
accelerate_utils = pytest.importorskip("accelerate.utils")
from helpers.hf_models import tiny_model  # noqa: E402
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling  # noqa: E402

from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops  # noqa: E402
from packing_ops.integrations.trl import enable_sequence_parallel, revert_sequence_parallel  # noqa: E402

if not hasattr(accelerate_utils, "DeepSpeedSequenceParallelConfig"):
    pytest.skip("accelerate before 1.12 has no sp_size", allow_module_level=True)
ROWS = [{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [2, 3]}]


def trainer_of(**sizes):
    """What enable_sequence_parallel reads of an SFTTrainer, which is made only on several ranks."""
    config = accelerate_utils.ParallelismConfig(**sizes)
    collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True, pad_to_multiple_of=2)
    accelerator = SimpleNamespace(parallelism_config=config)
    return SimpleNamespace(model=tiny_model("llama"), data_collator=collator, accelerator=accelerator)


def test_batches_that_deepspeed_shards():
    trainer = trainer_of(sp_size=2)
    apply_packing_ops(trainer.model)
    stock = trainer.data_collator(ROWS)
    assert stock["cu_seq_lens_q"].dim() == 1  # else there is nothing to take away
    handler = trainer.accelerator.parallelism_config.sp_handler
    for _ in range(2):
        enable_sequence_parallel(trainer)
    batch = trainer.data_collator(ROWS)
    assert handler.sp_attn_implementation == "packing_ops"
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert all(value.shape == (1, 6) and torch.equal(value, stock[name]) for name, value in batch.items())
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0]]
    for _ in range(2):
        revert_sequence_parallel(trainer)
    assert handler.sp_attn_implementation is None
    assert trainer.data_collator(ROWS).keys() == stock.keys()


def test_refusals():
    trainer = trainer_of(sp_size=2)
    with pytest.raises(ValueError, match=r"attn_implementation='packing_ops', got 'eager'; call apply_packing_ops"):
        enable_sequence_parallel(trainer)
    apply_packing_ops(trainer.model)
    revert_packing_ops(trainer.model)
    for sizes, words in (({}, "expected sp_size above 1"), ({"cp_size": 2}, "set cp_size=1 and sp_size")):
        with pytest.raises(ValueError, match=words):
            enable_sequence_parallel(trainer_of(**sizes))


def test_batches_that_are_not_of_packed_rows_are_refused():
    """Else padding, or images, would be left out in silence."""
    trainer = trainer_of(sp_size=2)
    trainer.data_collator = DataCollatorForLanguageModeling(pad_token_id=0)
    apply_packing_ops(trainer.model)
    enable_sequence_parallel(trainer)
    with pytest.raises(
        ValueError, match=r"data_collator: expected .* of packed rows, got .*attention_mask.*packing=True"
    ):
        trainer.data_collator([{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6]}])


def test_deepspeed_takes_the_batches():
    """DeepSpeed's loader, on one rank; TRL's batches end it in an IndexError."""
    ulysses = pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp")
    import torch.distributed as dist

    trainer = trainer_of(sp_size=2)
    apply_packing_ops(trainer.model)
    enable_sequence_parallel(trainer)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ulysses.dist.init_distributed("gloo")
    try:
        loader = torch.utils.data.DataLoader(ROWS, collate_fn=trainer.data_collator)
        (shard,) = ulysses.UlyssesSPDataLoaderAdapter(loader, 0, None, 1, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert shard["shift_labels"].tolist() == [[6, -100, 8, 9, -100, -100]]
    assert shard["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0]]
