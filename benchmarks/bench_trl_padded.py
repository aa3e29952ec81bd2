"""Training steps of TRL's DPOTrainer and GRPOTrainer: python benchmarks/bench_trl_padded.py [--only NAME ...]
[--repeats 3] [--limit 540] [--tiny] [--list]

Stock TRL 1.16 pads in both: DPOConfig's padding_free=True warns there and pads. ours: apply_packing_ops on each model,
then enable_padding_free(trainer), as docs/trl.md has it. padded has SDPA. fa2 does what transformers' FlashAttention-2
does in a padded batch: each layer takes the padding out and puts it back. It runs torch's kernel. liger: that, and
use_liger_kernel=True, whose loss TRL leaves out here; liger_sdpa: with SDPA. sorted: padded, pairs sorted by length.
compiled layers: layer.compile() on each layer of each model.

Qwen3's shapes, one GPU. Weights are random and float32. bf16=True (autocast) and gradient checkpointing are TRL's
defaults, and so is every setting that settings_of does not name. LoRA: as in bench_trl.py.

DPO: batches of 8 pairs. A chosen row is as long as a document of the sft workload. Its first third is the prompt. The
rejected answer has 0.5 to 1.5 times the length of the chosen one. Rows end at 1,024 tokens, TRL's default. The
reference model is another copy of the weights, with LoRA the model without adapters.

GRPO: batches of 32 completions, 8 of each prompt, beta=0. Prompts have lengths of the short workload. Completions have
those of the sft workload, cut at 512, TRL's default. A rollout_func gives them and no model generates: a step is
log-probs, loss, backward and optimizer.

A repeat trains a new model by trainer.train(). The first epoch warms up, and the others are timed. tokens: of an epoch,
without padding. The tokens of a prompt count in each of its rows. slots: the same with padding. grad_norm: of the last
step. GRPO's loss is the same for any model, as each ratio of probabilities is 1. Its grad_norm is not.
Rows, turns and errors are those of bench_trl.py. Needs trl and datasets, and downloads nothing.
"""

import contextlib
import os
import random
import tempfile
from collections.abc import Callable
from unittest import mock

import datasets
import torch
import transformers
import trl
from bench_trl import ADAPTERS, Clock, add_turns, compile_layers, take_turns, timed
from e2e_providers import GROUPED
from harness import bench_parser
from result_rows import lengths_of
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.attention import varlen
from transformers import modeling_flash_attention_utils as stock_flash
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from whole_cases import Case, chosen
from whole_model import random_model, shape_of, stock_modules

from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops, revert_registration
from packing_ops.integrations.trl import enable_padding_free, revert_padding_free

EPOCHS = 4  # The first warms up.
FIGURES = ("tokens_per_second_a_gpu", "peak_gib", "step_ms", "steps", "epochs", "loss", "grad_norm", "warm_up_s", "tokens",
           "slots", "error")  # fmt: skip
FA2 = "torch_padded_fa2"
ATTENTION = {"padded": "sdpa", "sorted": "sdpa", "fa2": FA2, "liger": FA2, "liger_sdpa": "sdpa", "ours": "sdpa"}
GROUP = 8  # completions of a prompt, GRPOConfig's default
SHORTER = 32  # what --tiny divides lengths by


class PaddedCase(Case):
    """A row of the table. part: the trainer, documents: what longest is of, steps: of an epoch."""

    __slots__ = ()

    @property
    def name(self) -> str:
        how = (", LoRA" if self.lora else "") + (", compiled layers" if self.compiled else "")
        return f"{self.model}, {self.part}, {self.documents}: {self.provider}, batches of {self.batch}{how}"

    def small(self) -> "PaddedCase":
        return self._replace(longest=self.longest // SHORTER, steps=2, batch=self.batch // 2)


def _cases(part: str, documents: str, **more) -> list[PaddedCase]:
    more = {"checkpointing": "full", "documents": documents, **more}
    providers = [each for each in ATTENTION if each != "sorted" or part == "DPO"]  # GRPO's groups have an order
    found = [PaddedCase(part, "Qwen3-0.6B", provider, 0, float32=True, **more) for provider in providers]
    found += [PaddedCase(part, "Qwen3-8B", provider, 0, lora=True, **more) for provider in providers]
    return [case._replace(compiled=compiled) for compiled in (False, True) for case in found]


CASES = [
    *_cases("DPO", "rows up to 1,024", longest=1024, batch=8, steps=8),
    *_cases("GRPO", "completions up to 512", longest=512, batch=32, steps=4),
]


class Count:
    """Tokens and slots of the batches that a trainer makes."""

    tokens = slots = 0

    def add(self, lengths: list[int], slots: int) -> None:
        self.tokens += sum(lengths)
        self.slots += slots


def padded_fa2(module, query, key, value, attention_mask, scaling=None, **_):
    """transformers' FlashAttention-2 of a padded batch, with the kernel in torch."""
    # Under autocast RMSNorm's weights make q and k float32.
    each = (t.to(value.dtype).transpose(1, 2) for t in (query, key, value))
    batch, _, slots, _ = query.shape
    if attention_mask is None:  # no padding
        attention_mask = torch.ones(batch, slots, dtype=torch.bool, device=query.device)
    q, k, v, places, (ends, _), (longest, _) = stock_flash._upad_input(
        *each, attention_mask, slots, stock_flash._unpad_input
    )
    documents = (ends, ends, int(longest), int(longest))
    out = varlen.varlen_attn(q, k, v, *documents, scale=scaling, window_size=(-1, 0), **GROUPED)
    return stock_flash._pad_input(out, places, batch, slots), None


def word_tokenizer(vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """A token's text is its number."""
    words = {"<pad>": 0} | {str(i): i for i in range(1, vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>")


def lengths(workload: str, count: int, tiny: bool) -> list[int]:
    found = lengths_of(workload)[:count]
    return [max(6, length // SHORTER) for length in found] if tiny else found


def words(source: random.Random, length: int, vocabulary: int) -> str:
    """Each with a space in front."""
    return "".join(f" {source.randrange(1, vocabulary)}" for _ in range(length))


def preference_pairs(case: PaddedCase, vocabulary: int, tiny: bool) -> list[dict[str, str]]:
    """DPOTrainer adds a last token to both answers."""
    source, rows = random.Random(0), []
    for length in lengths("sft", case.steps * case.batch, tiny):
        prompt = length // 3
        rejected = int((length - prompt) * source.uniform(0.5, 1.5))
        sizes = {"prompt": prompt, "chosen": length - prompt - 1, "rejected": rejected - 1}
        rows.append({name: words(source, size, vocabulary) for name, size in sizes.items()})
    return rows


def completions_of(case: PaddedCase, vocabulary: int, tiny: bool) -> dict[str, list[list[int]]]:
    """Token ids of the completions of each prompt."""
    source, count = random.Random(0), case.steps * case.batch
    sizes = iter(min(length, case.longest) for length in lengths("sft", count, tiny))
    return {
        words(source, length, vocabulary): [
            [source.randrange(1, vocabulary) for _ in range(next(sizes))] for _ in range(GROUP)
        ]
        for length in lengths("short", count // GROUP, tiny)
    }


def reward(completion_ids: list[list[int]], **_) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def settings_of(case: PaddedCase, device: str, folder: str) -> trl.DPOConfig | trl.GRPOConfig:
    longest = {"max_length" if case.part == "DPO" else "max_completion_length": case.longest}
    return {"DPO": trl.DPOConfig, "GRPO": trl.GRPOConfig}[case.part](
        folder, num_train_epochs=EPOCHS, per_device_train_batch_size=case.batch, **longest,
        **({"use_liger_kernel": True} if case.provider.startswith("liger") else {}),
        **({"train_sampling_strategy": "sequential"} if case.provider == "sorted" else {}),
        save_strategy="no", logging_strategy="epoch", report_to="none", disable_tqdm=True, use_cpu=device == "cpu",
    )  # fmt: skip


def dpo_trainer(case: PaddedCase, model: Callable, tiny: bool, count: Count, **given) -> trl.DPOTrainer:
    rows = preference_pairs(case, len(given["processing_class"]), tiny)
    if case.provider == "sorted":
        rows.sort(
            key=lambda row: len(row["prompt"].split()) + max(len(row[name].split()) for name in ("chosen", "rejected"))
        )
    reference = None if case.lora else model()
    trainer = trl.DPOTrainer(model(), ref_model=reference, train_dataset=datasets.Dataset.from_list(rows), **given)
    collate = trainer.data_collator

    def counted(examples):
        batch = collate(examples)
        count.add(batch["attention_mask"].sum(1).tolist(), batch["attention_mask"].numel())
        return batch

    trainer.data_collator = counted
    return trainer


def grpo_trainer(case: PaddedCase, model: Callable, tiny: bool, count: Count, **given) -> trl.GRPOTrainer:
    completions = completions_of(case, len(given["processing_class"]), tiny)

    def rollout(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        answers = [answer for prompt in dict.fromkeys(prompts) for answer in completions[prompt]]
        before, after = ([*map(len, each)] for each in (ids, answers))
        count.add([*before, *after], len(prompts) * (max(before) + max(after)))
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": None}

    rows = datasets.Dataset.from_list([{"prompt": prompt} for prompt in completions])
    return trl.GRPOTrainer(model(), reward, train_dataset=rows, rollout_func=rollout, **given)


@contextlib.contextmanager
def trainer_of(case: PaddedCase, device: str, tiny: bool, count: Count):
    """The trainer as a user sets it up; what was changed outside of its models is undone in the end."""
    transformers.AttentionInterface.register(FA2, padded_fa2)
    AttentionMaskInterface.register(FA2, flash_attention_mask)
    shape, dtype = shape_of(case, tiny), torch.bfloat16 if case.lora else torch.float32
    with contextlib.ExitStack() as undo:
        undo.enter_context(stock_modules())
        undo.enter_context(mock.patch.dict(os.environ, {"TRL_EXPERIMENTAL_SILENCE": "1"}))
        make = {"DPO": dpo_trainer, "GRPO": grpo_trainer}[case.part]
        trainer = make(
            case, lambda: random_model(shape, ATTENTION[case.provider], device, dtype), tiny, count,
            args=settings_of(case, device, undo.enter_context(tempfile.TemporaryDirectory())),
            processing_class=word_tokenizer(shape["vocab_size"]), peft_config=ADAPTERS if case.lora else None,
        )  # fmt: skip
        if case.provider == "ours":
            undo.callback(revert_registration)
            for model in filter(None, (trainer.model, trainer.ref_model)):
                undo.callback(revert_packing_ops, model)
                print(apply_packing_ops(model), flush=True)
            undo.callback(revert_padding_free, trainer)
            print(enable_padding_free(trainer), flush=True)
        for model in filter(None, (trainer.model, trainer.ref_model)):
            compile_layers(model, case, device)
        yield trainer


def measured(case: PaddedCase, device: str, tiny: bool) -> dict:
    """What the CSV has of a repeat beside its setting."""
    clock, count = Clock(device, EPOCHS), Count()
    with trainer_of(case, device, tiny, count) as trainer:
        trainer.add_callback(clock)
        loss = trainer.train().training_loss
        grad_norm = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry][-1]
    found = timed(clock, count.tokens // EPOCHS)
    return found | {"loss": f"{loss:.4f}", "grad_norm": f"{grad_norm:.4f}", "slots": count.slots // EPOCHS}


def main():
    parser = bench_parser(__doc__)
    add_turns(parser)
    arguments = parser.parse_args()
    take_turns(chosen(parser, arguments, CASES), arguments, "trl_padded", measured, FIGURES)


if __name__ == "__main__":
    main()
