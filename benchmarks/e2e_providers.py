"""The ways to train a Qwen3 model of transformers that bench_e2e.py compares: attention, RoPE, norm, compilation."""

import contextlib
import inspect
from dataclasses import dataclass

import torch
from torch.nn.attention import varlen

from packing_ops.integrations.transformers import apply_packing_ops, register, revert_packing_ops


@dataclass
class Provider:
    """How the model is set up: its attention, what is swapped, and how rows reach it."""

    attention: str
    padded: bool = False
    explicit: bool = True  # cu_seqlens passed along; else position_ids alone tell the documents
    swaps: dict | None = None  # arguments of apply_packing_ops
    compiled_rope: dict | None = None  # arguments of torch.compile
    fused_norm: bool = False
    compiled: str = ""  # "layers": each layer, they share graphs; "model": as a whole
    checkpointing: bool = False
    capacities: int = 1  # a row is as long as so many
    cuda_only: bool = False
    runs: int = 3  # of the whole step; a slow one is timed once
    profiled: bool = False
    on_request: bool = False  # by --only

    def compiled_calls(self, layers: int) -> int:
        """How often a forward of the model has to enter compiled code."""
        by_layer = self.compiled_rope is not None or self.compiled == "layers" or self.attention == "flex_attention"
        return layers if by_layer else int(self.compiled == "model")


def ours(**options) -> Provider:
    return Provider("packing_ops", **{"swaps": {"rms_norm": False}, **options})


# Nothing about dynamic shapes: rows have one length, which is compiled in, and what differs between the first batches
# (the number of documents, the longest) is a variable from the second on. Under dynamic=True head_dim is a variable
# too, by which the kernels of RoPE divide for each element, and they cannot load more than one at a time.
COMPILE = {"fullgraph": True}  # an error where it cannot, also at the limit of recompilations

FLASH, EACH_LAYER = "packed, torch FlashAttention-2", "torch.compile of each layer"
# Those that the goals are about first: a run that is cut short has them. The first is what the others' losses must
# equal.
PROVIDERS = {
    "packing_ops": ours(profiled=True),
    "packing_ops, rms_norm=True": ours(swaps={"rms_norm": True}, profiled=True),
    "padded batches of 8, sdpa": Provider("sdpa", padded=True),
    FLASH: Provider("torch_fa2", cuda_only=True),
    f"{FLASH}, compiled rope": Provider("torch_fa2", compiled_rope={}, cuda_only=True),
    f"{FLASH}, compiled rope, F.rms_norm": Provider(
        "torch_fa2", compiled_rope={}, fused_norm=True, cuda_only=True
    ),
    "packed, flex_attention": Provider("flex_attention", explicit=False, cuda_only=True),
    "packing_ops, rows of twice the capacity": ours(capacities=2),
    "packing_ops, gradient checkpointing": ours(checkpointing=True),
    f"{FLASH}, gradient checkpointing": Provider("torch_fa2", checkpointing=True, cuda_only=True),
    "packed, sdpa mask": Provider("sdpa", explicit=False, runs=1),
    f"packing_ops, {EACH_LAYER}": ours(compiled="layers"),
    f"{FLASH}, {EACH_LAYER}": Provider("torch_fa2", compiled="layers", cuda_only=True),
    f"{FLASH}, F.rms_norm, {EACH_LAYER}": Provider("torch_fa2", compiled="layers", fused_norm=True, cuda_only=True),
    "packing_ops, torch.compile of the model": ours(compiled="model", on_request=True),
    f"{FLASH}, rope compiled for any shape": Provider(
        "torch_fa2", compiled_rope={"dynamic": True}, cuda_only=True, on_request=True
    ),
}  # fmt: skip


# Since torch 2.12 grouped heads have to be announced.
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}


def torch_fa2(module, query, key, value, attention_mask, scaling=None, cu_seq_lens_q=None, max_length_q=None, **_):
    """torch's built-in FlashAttention-2 over the row's documents."""
    # Under autocast RMSNorm's weights make q and k float32.
    q, k, v = (t.to(value.dtype).transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    documents = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    out = varlen.varlen_attn(q, k, v, *documents, scale=scaling, window_size=(-1, 0), **GROUPED)
    return out[None], None


@contextlib.contextmanager
def model_of(provider: Provider, shape: dict, device: str):
    """The model in training mode, bf16 on CUDA; what was changed outside of it is undone in the end."""
    from transformers import AttentionInterface, Qwen3Config, Qwen3ForCausalLM
    from transformers.models.qwen3 import modeling_qwen3

    register()
    AttentionInterface.register("torch_fa2", torch_fa2)
    torch.manual_seed(0)
    config = Qwen3Config(**shape, max_position_embeddings=40_960, use_cache=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa", dtype=dtype).train()
    with contextlib.ExitStack() as undo:
        undo.callback(revert_packing_ops, model)
        if provider.swaps is not None:
            apply_packing_ops(model, **provider.swaps)
        else:
            model.set_attn_implementation(provider.attention)
        if provider.fused_norm:
            apply_packing_ops(model, rope=False, attention=False, rms_norm=True)
        if provider.compiled_rope is not None:
            stock = modeling_qwen3.apply_rotary_pos_emb
            modeling_qwen3.apply_rotary_pos_emb = torch.compile(stock, **COMPILE, **provider.compiled_rope)
            undo.callback(setattr, modeling_qwen3, "apply_rotary_pos_emb", stock)
        if provider.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for module in {"": [], "layers": model.model.layers, "model": [model]}[provider.compiled]:
            module.compile(**COMPILE)
        yield model
