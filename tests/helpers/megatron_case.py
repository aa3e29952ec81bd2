"""Megatron-core on the machine at hand: a process group, tiny GPT models, and processes that hold a part each."""

import contextlib
import dataclasses
import functools
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from helpers import processes

pytest.importorskip("megatron.core")

import megatron.core
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from packing_ops.integrations.megatron import PackingDotProductAttention

SHAPE = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.3,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
}
HEADS = (4, 2, 8)  # query heads, key heads, head_dim of SHAPE
VOCABULARY = 64
LENGTHS = [5, 3, 8]
_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RECOMPUTED = {
    "full, uniform": _FULL,
    "full, one layer": {**_FULL, "recompute_method": "block"},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
}


def has_fields(names):
    """Of TransformerConfig, in this version of megatron-core."""
    return names <= {field.name for field in dataclasses.fields(TransformerConfig)}


def config_of(**more):
    if not has_fields(more.keys()):
        pytest.skip(f"megatron-core {megatron.core.__version__} has not all of {', '.join(more)}")
    return TransformerConfig(**{**SHAPE, **more})


def tiny_gpt(spec=None, device="cpu", *, rotary=True, **more):
    """Random weights, the same in every process; a tensor-parallel part has its slice of them, its biases are 0."""
    torch.manual_seed(0)
    model = GPTModel(
        config_of(**more),
        spec or get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=256,
        position_embedding_type="rope" if rotary else "none",
        share_embeddings_and_output_weights=False,
    )
    for parameter in model.parameters():
        if parameter.dim() == 1 and not getattr(parameter, "tensor_model_parallel", False):
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model.to(device)


def causal_mask(seqlen, device):
    """What megatron-core's attention needs where it would ask CUDA for one."""
    return torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu(1)[None, None]


def module_of(kind=PackingDotProductAttention, mask=AttnMaskType.causal, *, device="cpu", **more):
    own = {key: more.pop(key) for key in ("layer_number", "softmax_scale", "attention_dropout") if key in more}
    torch.manual_seed(0)
    return kind(config=config_of(**more), attn_mask_type=mask, attention_type="self", **{"layer_number": 1, **own}).to(
        device
    )


def heads_of(*rows, device="cpu", requires_grad=True):
    shapes = ((*rows, heads, HEADS[2]) for heads in (HEADS[0], HEADS[1], HEADS[1]))
    return [torch.randn(shape, device=device).requires_grad_(requires_grad) for shape in shapes]


def assert_near(actual, expected):
    """fp32 1e-5 of the largest value."""
    scale = max(1.0, expected.abs().max().item() if expected.numel() else 0.0)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * scale)


def thd_params(lengths=LENGTHS, device="cpu", *, slots=None):
    """PackedSeqParams of these documents; ``slots``: the places that each one takes, when they are more."""

    def cumulated(sizes):
        return torch.tensor([0, *sizes], device=device).cumsum(0).int()

    cu_seqlens = cumulated(lengths)
    padded = {}
    if slots is not None:
        padded = dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), cumulated(slots))
    longest = max(slots or lengths, default=0)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **padded,
    )


class _OnCpu(TorchFunctionMode):
    """megatron-core's schedules and optimizers say ``device="cuda"`` outright, and ``.cuda()``."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@contextlib.contextmanager
def answers_of(device):
    """What megatron-core asks of CUDA, answered for ``device``; dropout draws from torch's generator."""
    with contextlib.ExitStack() as patches:
        if torch.device(device).type == "cpu":
            if torch.cuda.is_available():  # torch.compile would take "cpu" for the number of a GPU
                patches.enter_context(torch._dynamo.config.patch(disable=True))
            patches.enter_context(_OnCpu())
            patches.enter_context(mock.patch("torch.cuda.current_device", return_value="cpu"))
            patches.enter_context(mock.patch("torch.cuda.synchronize"))
            for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
                patches.enter_context(mock.patch.object(tensor_parallel.random, name, return_value=None))
        tracker = mock.Mock(fork=contextlib.nullcontext, use_cudagraphable_rng=False)
        for module in (tensor_parallel, tensor_parallel.random):
            patches.enter_context(mock.patch.object(module, "get_cuda_rng_tracker", return_value=tracker))
        yield


@contextlib.contextmanager
def parallel(**sizes):
    """megatron-core's groups over the processes there are: ``tensor_model_parallel_size=2``, say."""
    parallel_state.initialize_model_parallel(**sizes)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


@pytest.fixture(name="megatron")
def one_process(device, tmp_path):
    """megatron-core's groups of only this process."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with answers_of(device), parallel():
            yield
    finally:
        torch.distributed.destroy_process_group()


def tensor_parallel_part(whole, dim, size):
    """This rank's ``size`` rows of dimension ``dim``."""
    return whole.narrow(dim, parallel_state.get_tensor_model_parallel_rank() * size, size)


def spawn(worker, world_size, folder):
    """processes.spawn, with CUDA answered for the CPU."""
    return processes.spawn(functools.partial(_on_cpu, worker), world_size, folder)


def _on_cpu(worker):
    with answers_of("cpu"):
        return worker()
