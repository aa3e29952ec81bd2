"""The cases of bench_whole.py: which model, trained how, on how many GPUs. And how a command line chooses cases."""

import argparse
from typing import NamedTuple

SHAPES = {
    "Qwen3-0.6B": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
    "Qwen3-30B-A3B": {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151_936, "tie_word_embeddings": False,
    },
}  # fmt: skip
# What --tiny replaces.
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "moe_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2}  # fmt: skip


# Of each provider the attention of transformers: torch_fa2 is torch's FlashAttention-2. The first is ours. liger has
# Liger's kernels beside attention, fa2_liger_loss of them only the fused linear cross-entropy. sdpa has packed rows,
# padded and sorted have none: sorted pads documents of about equal length.
ATTENTION = {
    "ours": "sdpa",
    "fa2": "torch_fa2",
    "fa2_liger_loss": "torch_fa2",
    "liger": "torch_fa2",
    "liger_fa4": "flash_attention_4",
    "sdpa": "sdpa",
    "padded": "sdpa",
    "sorted": "sdpa",
}
# Arguments of Liger's patch, which by default has all of its kernels.
LIGER = {"liger": {}, "liger_fa4": {}, "fa2_liger_loss": {"rope": False, "rms_norm": False, "swiglu": False}}


ERROR = 160  # characters of one in a row


class Case(NamedTuple):
    """A row of the table."""

    part: str
    model: str
    provider: str  # a key of ATTENTION
    row: int  # slots of a packed row; of padded batches 0
    compiled: bool = True  # each layer
    checkpointing: float | str = ""  # "full", or of a checkpoint_policy: GiB or "auto"
    lora: bool = False
    wrapper: str = "one rank"
    ranks: int = 1
    documents: str = "sft"
    tokens: int = 32_768  # of a rank and step
    longest: int = 8192  # rows that the documents fill; a case with longer ones has the same documents
    steps: int = 3
    warm_ups: int = 2
    dynamic: bool = False  # compiled for any sizes from the first
    vocabulary: int = 0  # in place of the shape's
    fused_loss: bool = True  # of ours
    batch: int = 8  # documents of a padded batch
    float32: bool = False  # weights, gradients and AdamW's states; they compute in bfloat16, by autocast or FSDP2

    @property
    def name(self) -> str:
        how = ["float32 weights"] if self.float32 else []
        how += ["LoRA"] if self.lora else []
        how += ["compiled layers"] if self.compiled else []
        how += ["dynamic=True"] if self.dynamic else []
        how += ["logits kept"] if self.provider == "ours" and not self.fused_loss else []
        how += [f"vocabulary of {self.vocabulary:,}"] if self.vocabulary else []
        if self.checkpointing:
            budget = self.checkpointing if self.checkpointing == "auto" else f"{self.checkpointing} GiB"
            how.append("full checkpointing" if self.checkpointing == "full" else f"checkpoint_policy, {budget}")
        where = "" if self.ranks == 1 else f", {self.wrapper} x{self.ranks}"
        rows = f"rows of {self.row:,}" if self.row else f"batches of {self.batch}"
        return f"{self.model}{where}, {self.documents} documents: {self.provider}, {', '.join([rows, *how])}"

    def small(self) -> "Case":
        """What --tiny makes of it."""
        return self._replace(tokens=1024, longest=256, row=self.row // 32, steps=1)


def _full(provider: str, row: int, **more) -> Case:
    return Case("8b", "Qwen3-8B", provider, row, wrapper="FSDP2", ranks=2, **more)


def _alone(provider: str, row: int, **more) -> Case:
    """As _full, where one GPU has the model, its gradients and the optimizer: 61 GiB."""
    return Case("one", "Qwen3-8B", provider, row, **more)


def _lora(provider: str, row: int, **more) -> Case:
    return Case("lora", "Qwen3-8B", provider, row, lora=True, **more)


def _small(provider: str, row: int = 16_384, part: str = "small", **more) -> Case:
    return Case(part, "Qwen3-0.6B", provider, row, **{"tokens": 65_536, **more})


PADDED = {"compiled": False, "checkpointing": "full", "steps": 1, "warm_ups": 1}


def _sweep() -> list[Case]:
    """What a user gets beside torch's FlashAttention-2, and by what: fused_loss, rows, dynamic=True, the vocabulary."""
    both = [
        _small(provider, 8192, "sweep", vocabulary=vocabulary, dynamic=dynamic, fused_loss=False)
        for vocabulary, dynamic in ((32_000, True), (32_000, False), (0, False), (0, True))
        for provider in ("ours", "fa2")
    ]
    ours = (8192, {}), (16_384, {"fused_loss": False}), (8192, {"vocabulary": 32_000, "dynamic": True})
    return both + [_small("ours", row, "sweep", **more) for row, more in ours]


# The most wanted first: a run that is cut short has them.
CASES = [
    _full("ours", 16_384, checkpointing=48),
    _full("fa2", 8192),
    _full("liger", 8192, compiled=False),
    _full("padded", 0, **PADDED),
    _full("liger", 8192),
    _full("liger_fa4", 8192, compiled=False),
    _full("ours", 8192, documents="4,096-token"),
    _full("fa2", 8192, documents="4,096-token"),
    _full("fa2_liger_loss", 8192, documents="4,096-token"),
    _full("fa2_liger_loss", 8192),
    _full("ours", 8192),
    _full("fa2", 16_384, checkpointing="full"),
    _full("ours", 16_384, checkpointing="full"),
    _alone("ours", 16_384, checkpointing="auto"),
    _alone("ours", 16_384, checkpointing="full"),
    _alone("fa2", 16_384, checkpointing="full"),
    _alone("ours", 8192),
    _alone("fa2", 8192),
    _alone("fa2_liger_loss", 8192),
    _alone("liger_fa4", 8192, compiled=False),
    Case("moe", "Qwen3-30B-A3B", "ours", 8192, compiled=False, checkpointing="full", lora=True),
    Case("moe", "Qwen3-30B-A3B", "fa2", 8192, compiled=False, checkpointing="full", lora=True),
    _lora("ours", 8192),
    _lora("fa2", 8192),
    _lora("ours", 16_384, checkpointing=48),
    _lora("ours", 16_384, checkpointing=8),
    _lora("ours", 16_384, checkpointing="full"),
    _lora("fa2", 16_384, checkpointing="full"),
    _lora("liger", 8192, compiled=False),
    _lora("padded", 0, **PADDED),
    _small("ours"),
    _small("fa2"),
    _small("fa2_liger_loss"),
    _small("ours", compiled=False),
    _small("fa2", compiled=False),
    _small("liger", compiled=False),
    _small("liger"),
    _small("liger_fa4", compiled=False),
    _small("padded", 0, compiled=False),
    _small("sorted", 0, compiled=False),
    *(_small(provider, part="float32", float32=True) for provider in ("ours", "fa2", "fa2_liger_loss")),
    *(_full(provider, 8192, float32=True) for provider in ("ours", "fa2", "fa2_liger_loss")),
    *_sweep(),
    _small("ours", part="ranks", wrapper="DDP", ranks=2),
    _small("ours", part="ranks", wrapper="FSDP2", ranks=2),
    _small("ours", part="ranks", wrapper="FSDP2, layers not resharded", ranks=2),
    _small("ours", part="ranks", wrapper="FSDP2, 7 layers together", ranks=2),
    _small("ours", part="ranks", wrapper="FSDP2, 7 layers together, not resharded", ranks=2),
]
PARTS = tuple(dict.fromkeys(case.part for case in CASES))


def add_options(parser: argparse.ArgumentParser, repeats: int) -> None:
    """Those of a command line that measures cases."""
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        help="the case of this name, else all whose names contain it; the CSV keeps the others",
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and measure none")
    parser.add_argument("--repeats", type=int, default=repeats, help="of each case, in turns")
    parser.add_argument("--limit", type=float, default=540, help="seconds for all")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")


def chosen(parser: argparse.ArgumentParser, arguments: argparse.Namespace, cases: list[Case]) -> list[Case]:
    """The cases that --only names, in their order, none with --list. Ends the program if a name is of no case."""
    found = [] if arguments.only else list(cases)
    for name in arguments.only or ():
        named = [case for case in cases if case.name == name] or [case for case in cases if name in case.name]
        if not named:
            parser.error(f"--only: expected a name that --list prints, or a part of one, got {name!r}")
        found += named
    found = [case for case in cases if case in found]
    if arguments.list:
        print("\n".join(case.name for case in found))
    return [] if arguments.list else found
