"""The projects of docs/adopt: commit, tests to run, what they need, and the failures that are expected."""

from dataclasses import dataclass, field


@dataclass
class Project:
    repository: str
    commit: str
    tests: list[str]
    patches: list[str] = field(
        default_factory=list
    )  # names in docs/adopt, in the order to apply; by default <name>.patch
    flag: dict[str, str] = field(default_factory=dict)  # environment variables that turn the patched code on
    training: str = ""  # a script here that trains a tiny model on the patched code and prints its losses as JSON
    path: list[str] = field(default_factory=lambda: ["."])  # for PYTHONPATH
    stand_ins: str = ""  # packages to replace where they are not installed, space-separated
    fixes: list[str] = field(default_factory=list)  # names in pages.FIXES, which stand_ins.py applies
    versions: dict[str, str] = field(default_factory=dict)  # package: version for importlib.metadata, if not installed
    beside: dict[str, tuple[str, str]] = field(default_factory=dict)  # for PYTHONPATH: repository, commit
    only: str = ""  # pytest's -k
    kept: dict[str, str] = field(default_factory=dict)  # end of a test's name: why its failure is intended


_THE_CAPACITY = (
    "no row is longer than the capacity here: SkyRL's first placement has one of 72 or 84 slots for a capacity of 64"
)

PROJECTS = {
    "art": Project(
        repository="OpenPipe/ART",
        commit="779559fd0c68ce073cbd041447f88aacf1d9f585",
        flag={"ART_PACKING_OPS": "1"},
        training="train_art.py",
        path=["src", "."],
        tests=[],  # none there
        stand_ins=(
            "openai litellm weave polars nest_asyncio tblib setproctitle unsloth bitsandbytes vllm wandb aiohttp httpx fastapi dotenv uvicorn typer seaborn "
            "matplotlib"
        ),
    ),
    "skyrl": Project(
        repository="NovaSky-AI/SkyRL",
        commit="a9564572eb8e91076be43c1bd5e4615e3de17265",
        patches=["skyrl_packing", "skyrl_batches", "skyrl_megatron", "skyrl_fsdp", "skyrl_logps"],
        flag={"SKYRL_PACKING_OPS_BATCHES": "1", "SKYRL_PACKING_OPS_ATTENTION": "1"},
        training="train_skyrl.py",
        path=[".", "skyrl-gym"],
        tests=[
            "tests/train/test_sft_packing_collate.py",
            "tests/train/test_async_batch_collation.py",
            "tests/train/sft/test_sft_trainer.py",
            "tests/train/test_packing_round_trip.py",
            "tests/train/test_collation_vectorization_equivalence.py",
            "tests/train/test_prompt_mini_batch.py",
            "tests/backends/skyrl_train/test_train_batch.py",
            "tests/backends/skyrl_train/distributed/test_dispatch.py",
            "tests/backends/skyrl_train/distributed/test_bin_packing.py",
            "tests/backends/skyrl_train/distributed/test_packing_utils.py",
            "tests/backends/skyrl_train/distributed/test_packed_subseq_plumbing.py",
            "tests/backends/skyrl_train/distributed/test_chunked_logprob_backward_streaming.py",
            "tests/backends/skyrl_train/distributed/test_preprocess_packed_seqs_cp.py",
            "tests/backends/skyrl_train/distributed/test_preprocess_packed_seqs_multiseq.py",
            "tests/backends/skyrl_train/utils/test_ppo_utils.py",
        ],
        stand_ins=(
            "zstandard ray loguru cloudpickle omegaconf requests pybase64 httpx orjson jaxtyping tensordict torchdata "
            "tinker fastapi uvicorn aiohttp hf_transfer cloudpathlib sqlmodel polars func_timeout"
        ),
        fixes=["pydantic"],
        kept={f"test_packed_collator_bit_identical[{seed}-4-1-1-4]": _THE_CAPACITY for seed in (0, 1, 5, 6, 7)},
    ),
    "open_instruct": Project(
        repository="allenai/open-instruct",
        commit="e6c3044aa6201c8bfa4573c1b03142af599e730d",
        patches=["open_instruct", "open_instruct_grpo", "open_instruct_finetune"],
        flag={"OPEN_INSTRUCT_PACKING_OPS": "1"},
        training="train_open_instruct.py",
        tests=[
            "open_instruct/test_padding_free_collator.py",
            "open_instruct/test_rl_utils.py",
            "open_instruct/test_grpo_utils.py",
        ],
        stand_ins=(
            "parameterized deepspeed olmo_core wandb ray vllm beaker requests litellm openai nltk tiktoken langdetect "
            "absl immutabledict docker openenv aiohttp backoff"
        ),
        fixes=["tokenizer"],
    ),
    "unsloth": Project(
        repository="unslothai/unsloth",
        commit="015bdef0d94a241bcd94eec7a405b1700632180d",
        tests=[
            "tests/utils/test_packing.py",
            "tests/utils/test_attention_masks.py",
            "tests/utils/test_attn_mask_compat.py",
            "tests/utils/test_varlen_int32_overflow_guard.py",
            "tests/utils/test_attention_dispatch_dora_dtype.py",
            "tests/utils/test_xformers_capability_gate.py",
        ],
        patches=["unsloth_attention", "unsloth_rope", "unsloth_packing"],
        flag={"UNSLOTH_PACKING_OPS": "1"},
        training="train_unsloth.py",
        beside={"unsloth_zoo": ("unslothai/unsloth-zoo", "ce232d6cef9cb8cd34cd3727906131622177436b")},
        stand_ins=(
            "triton bitsandbytes hf_transfer cut_cross_entropy msgspec sentencepiece tyro requests protobuf diffusers"
        ),
        versions={"unsloth_zoo": "2099.1.1"},
    ),
    "verl": Project(
        repository="verl-project/verl",
        commit="1dda039b9c6311889a9c9a26040677e1254814f9",
        patches=["verl_balancing", "verl_padding", "verl_logps"],
        flag={"VERL_PACKING_OPS": "1"},
        training="train_verl.py",
        tests=[
            "tests/utils/test_seqlen_balancing.py",
            "tests/utils/test_padding_on_cpu.py",
            "tests/models/test_fused_kernels_ulysses_sp_on_cpu.py",
        ],
        stand_ins="tensordict ray hydra omegaconf codetiming torchdata tensorboard wandb pylatexenc",
        only="not distributed_params",  # which starts a process per GPU
    ),
    "trl": Project(
        repository="huggingface/trl",
        commit="f2cd57710ae345ea6428ae95363267fcf38a3dc8",
        flag={"TRL_PACKING_OPS": "1"},
        tests=["tests/test_data_utils.py"],
        only="PackDataset",  # the other tests download tokenizers, and none of them packs
    ),
}
for _name, _project in PROJECTS.items():
    _project.patches = _project.patches or [_name]
