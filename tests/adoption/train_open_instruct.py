"""open-instruct's SFT collator and GRPO packs train a tiny Llama of transformers on the CPU: packed and padded.

run.py starts it under the patches with their flag set; the last line that it prints is JSON, the losses of each way.
The loops are of this script: finetune.py and grpo_fast.py need GPUs.
"""

import json
import os

import numpy as np
import stand_ins  # noqa: F401
import torch
from open_instruct import grpo_utils, rl_utils
from open_instruct.data_loader import prepare_collated_data_for_workers
from open_instruct.padding_free_collator import TensorDataCollatorWithFlattening
from transformers import LlamaConfig, LlamaForCausalLM

from packing_ops.data import PackedBatchSampler
from packing_ops.integrations.transformers import register

STEPS, VOCABULARY, PACK, RANKS = 4, 64, 40, 3
LENGTHS = [19, 5, 11, 30, 7, 2, 23, 14, 9, 6]


def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def train(attention, loss_of):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, num_hidden_layers=2, attn_implementation=attention)
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sft_packed():
    examples = [{"input_ids": ids, "labels": ids.clone()} for ids in documents()]
    batch = TensorDataCollatorWithFlattening()(examples)
    return train("packing_ops", lambda model: model(**batch).loss)


def sft_rows():
    """Rows of at most PACK tokens, as --pack_to_max_seq_length makes them; the mean over all targets."""
    examples = [{"input_ids": ids, "labels": ids.clone()} for ids in documents()]
    rows = list(PackedBatchSampler(LENGTHS, PACK, seed=0))
    batches = [TensorDataCollatorWithFlattening()([examples[i] for i in row]) for row in rows]
    assert len(rows) > 1
    assert all(batch["input_ids"].shape[1] <= PACK for batch in batches)
    targets = [(batch["labels"] != -100).sum() for batch in batches]

    def loss_of(model):
        return sum(model(**batch).loss * count for batch, count in zip(batches, targets, strict=True)) / sum(targets)

    return train("packing_ops", loss_of)


def sft_padded():
    ids = torch.nn.utils.rnn.pad_sequence(documents(), batch_first=True)
    mask = (ids > 0).long()
    return train("sdpa", lambda model: model(ids, attention_mask=mask, labels=ids.where(mask > 0, -100)).loss)


def responses():
    """Queries, responses and an advantage for each; two tokens of a document are its query, or one."""
    queries = [ids[: min(2, len(ids) - 1)].tolist() for ids in documents()]
    return queries, [ids[len(query) :].tolist() for ids, query in zip(documents(), queries, strict=True)]


def advantages():
    return np.linspace(-1, 1, len(LENGTHS), dtype=np.float32)


def grpo(flag):
    """A policy loss over the packs of all ranks, as DataPreparationActor makes and grpo_fast.py scores them."""
    os.environ["OPEN_INSTRUCT_PACKING_OPS"] = "1" if flag else "0"
    queries, answers = responses()
    packed = rl_utils.pack_sequences(
        queries, answers, [[1] * len(each) for each in answers], PACK, 0, [[-1.0] * len(each) for each in answers],
        min_num_batches=RANKS,
    )  # fmt: skip
    lookup = np.concatenate([np.zeros(1, np.float32), advantages()])
    packed.advantages = [torch.tensor(lookup[mask]) for mask in packed.response_masks]
    packed.response_masks = [mask.bool() for mask in packed.response_masks]
    ranks = prepare_collated_data_for_workers(packed, RANKS, 1, 0, pin_memory=False)
    trained = sum(int(mask.sum()) for rank in ranks for mask in rank.response_masks)
    assert trained == sum(map(len, answers)), "expected every response in a pack that a rank trains on"

    def loss_of(model):
        total = 0
        for rank in ranks:
            rows = zip(rank.query_responses, rank.position_ids, rank.response_masks, rank.advantages, strict=True)
            for ids, positions, mask, advantage in rows:
                logps, _ = grpo_utils.forward_for_logprobs(model, ids, None, positions, 0, 1.0)
                total = total - (logps * advantage[:, 1:] * mask[:, 1:]).sum()
        return total / trained

    return len(packed.query_responses), train("packing_ops", loss_of)


def grpo_by_document():
    queries, answers = responses()
    tokens = sum(map(len, answers))

    def loss_of(model):
        total = 0
        for query, answer, advantage in zip(queries, answers, advantages(), strict=True):
            ids = torch.tensor([query + answer])
            logps = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
            total = total - float(advantage) * logps[len(query) - 1 :].sum()
        return total / tokens

    return train("sdpa", loss_of)


def main():
    assert os.environ["OPEN_INSTRUCT_PACKING_OPS"] == "1"
    register()
    sft = {"padded": sft_padded(), "packed": sft_packed(), f"rows of up to {PACK} tokens": sft_rows()}
    packs, losses = grpo(flag=True)
    assert packs % RANKS == 0
    ways = {"by document": grpo_by_document(), f"{packs} packs for {RANKS} ranks": losses}
    print(json.dumps({"SFT": sft, "GRPO": ways}))


if __name__ == "__main__":
    main()
