"""What cannot be claimed for a model whatever its bits are, and why a layer differs: sentences of check_invariance."""

import sys

import torch

from packing_ops._runtime.arguments import dtype_name
from packing_ops.invariance import mode

_QUANTISED = (
    *("bitsandbytes", "torch.ao.nn", "torchao", "gptqmodel", "auto_gptq", "awq", "hqq", "optimum.quanto"),
    *("compressed_tensors", "transformers.integrations.finegrained_fp8", "transformers.integrations.bitnet"),
)
_CAPACITY = ("expert_capacity", "capacity_factor", "drop_tokens")


def refusals(model: torch.nn.Module, training: bool = False) -> dict[str, str]:
    """Return {name: a sentence} of modules that give other bits. training: also modules that act in training only,
    such as dropout.
    """
    found = {name: _refusal(module, training) for name, module in model.named_modules()}
    return {name: reason for name, reason in found.items() if reason}


def _refusal(module: torch.nn.Module, training: bool) -> str | None:
    p = getattr(module, "attention_dropout", None)
    p = module.p if isinstance(module, torch.nn.modules.dropout._DropoutNd) else p
    if isinstance(p, float) and p > 0 and (training or module.training):
        return f"dropout of {p:g} draws by the place in the batch: set it to 0"
    if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
        return "a batch norm takes its statistics from the whole batch"
    dtypes = {t.dtype for t in module.parameters(recurse=False)}
    dtypes |= {t.dtype for name, t in module.named_buffers(recurse=False) if "weight" in name}
    odd = [t for t in dtypes if not t.is_floating_point or t.itemsize == 1]
    quantised = (type(each).__module__.startswith(_QUANTISED) for each in (module, getattr(module, "weight", None)))
    if odd or any(quantised):
        what = f"{type(module).__name__} of {dtype_name(odd[0])}" if odd else type(module).__name__
        return f"a quantised layer ({what}) may scale its rows by those beside them"
    given = [name for name in _CAPACITY if getattr(module, name, None)]
    if given:
        return f"experts with a capacity ({given[0]}) drop a token for what stands beside it"
    return _tensor_parallel(module) or _compiled(module)


def _tensor_parallel(module: torch.nn.Module) -> str | None:
    tensors = sys.modules.get("torch.distributed.tensor")
    ranks = getattr(getattr(module, "config", None), "tensor_model_parallel_size", 1) or 1  # of Megatron-core
    found = (getattr(module, "_tp_size", None) or 1) > 1
    for parameter in module.parameters(recurse=False):
        names = parameter.device_mesh.mesh_dim_names if tensors and isinstance(parameter, tensors.DTensor) else ()
        found = found or any("tp" in name or "tensor" in name for name in names or ())
        found = found or (getattr(parameter, "tensor_model_parallel", False) and int(ranks) > 1)
    return "tensor-parallel ranks add parts of a sum, which has other bits than the sum of one rank" if found else None


def is_compiled(module: torch.nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _compiled(module: torch.nn.Module) -> str | None:
    if not is_compiled(module):
        return None
    first = next(iter(module.parameters()), None)
    if first is None or first.is_cpu:
        return "torch.compile makes C++ for the CPU whose sums depend on the number of rows: run it eagerly there"
    from torch._inductor import config

    if config.max_autotune or config.max_autotune_gemm:
        return "max-autotune picks a product by the number of rows: compile without it"
    names = {type(inner).__name__ for inner in module.modules() if not hasattr(inner, mode.ANY_ORDER)}
    norm = next((name for name in sorted(names) if name.endswith("Norm")), None)
    if norm is not None and not hasattr(config, "batch_invariant"):
        return (
            f"torch.compile before 2.13 sums a row of {norm} in an order that depends on the number of rows: compile "
            f"after apply_packing_ops(invariant=True), which serves RMSNorm, or wrap the forward of {norm} in "
            "torch.compiler.disable"
        )
    return None


def reason_of(module: torch.nn.Module | None, like: torch.Tensor) -> str:
    """Return why a module that is not refused gives other bits, or what to set."""
    if not mode.active():
        return "run it within packing_ops.invariant()"
    if module is not None and any(map(is_compiled, module.modules())):
        return (
            "it has compiled layers, whose kernels may depend on the number of rows: compile them after "
            "apply_packing_ops(invariant=True), or run it eagerly to see which layer differs"
        )
    weights = [] if module is None else [t for t in module.parameters(recurse=False) if t.dim() > 1]
    if like.is_cuda and weights and like.dtype == torch.float32:
        return "cuBLASLt's float32 products of up to 16 rows have other bits: use bfloat16 or float16"
    if like.is_cuda and any(size % mode.COLUMNS for t in weights for size in t.shape):
        return (
            "cuBLASLt has other kernels for few rows where a size is no multiple of 8: pad the weight, say a "
            "vocabulary, to one"
        )
    if like.is_cuda and any(t.dim() == 2 and min(t.shape) <= mode.NARROW for t in weights):
        return f"cuBLASLt has other kernels for 1 to 3 rows where a size is at most {mode.NARROW}: give it 16 rows"
    if like.is_cuda and (weights or module is None) and not mode.has_setter():
        return (
            "torch reads CUBLASLT_WORKSPACE_SIZE at its first product on a GPU: set it to 1 in the environment, or by "
            "os.environ above that product"
        )
    if not like.is_cuda and weights and like.dtype == torch.float64:
        return "products of float64 on the CPU depend on where a row stands: use float32 or bfloat16"
    if not like.is_cuda:
        return (
            "its own forward gives other bits; on the CPU exp and sigmoid round otherwise in the last elements of a "
            "thread's part: torch.set_num_threads(1) and sizes that are multiples of 32 avoid that"
        )
    return "its own forward gives other bits here; torch's mean and sum do for fewer than 16 rows, F.rms_norm does not"
