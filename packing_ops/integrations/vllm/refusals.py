"""What vLLM may be asked for that this attention does not serve, or that cannot have a trainer's bits: sentences."""

from collections.abc import Iterator

import torch

BLOCK = 128  # tokens: the pages of the cache are a multiple of it


def refusals(config) -> list[str]:
    """Returns a sentence for each setting of a VllmConfig that is not served; an empty list where all are."""
    return [f"{setting}: expected {wanted}, got {found}" for setting, wanted, found in _found(config)]


def _found(config) -> Iterator[tuple[str, str, object]]:
    parallel, cache, model = config.parallel_config, config.cache_config, config.model_config
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        if (ranks := getattr(parallel, name, 1)) > 1:
            yield name, "1, since ranks add parts of a sum", ranks
    if config.quant_config is not None:
        yield "quantization", "weights that are not quantised", type(config.quant_config).__name__
    if config.speculative_config is not None:
        yield "speculative_config", "None, since drafts are verified by other kernels", "one"
    if config.lora_config is not None:
        yield "enable_lora", "False: merge adapters into the weights", True
    # Else vLLM takes the backend's, once the layers are there.
    if getattr(cache, "user_specified_block_size", True) and cache.block_size is not None and cache.block_size % BLOCK:
        yield "block_size", f"a multiple of {BLOCK}", cache.block_size
    if cache.cache_dtype not in ("auto", str(model.dtype).rpartition(".")[2]):
        yield "kv_cache_dtype", "'auto'", repr(cache.cache_dtype)
    compilation = config.compilation_config
    if getattr(compilation.mode, "value", compilation.mode):
        yield "enforce_eager", "True, or mode 0 in compilation_config: compiled layers sum in other orders", False
    if model.dtype == torch.float32 and config.device_config.device_type == "cuda":
        yield "dtype", "bfloat16 or float16 on a GPU", "float32"
    yield from _of_model(model.hf_text_config)


def _of_model(config) -> Iterator[tuple[str, str, object]]:
    """Of logits that are changed after the head in their own dtype, which a trainer does in float32."""
    for name, neutral in (("final_logit_softcapping", None), ("logit_scale", 1.0), ("logits_scaling", 1.0)):
        value = getattr(config, name, None)
        if value is not None and value != neutral:
            yield name, str(neutral), value


def refuse_layers(layers: dict[str, object], served: type) -> None:
    """NotImplementedError for layers of vLLM's forward context that are no attention: experts, states of linear
    attention.
    """
    for name, layer in layers.items():
        if not isinstance(layer, served):
            raise NotImplementedError(f"{name}: expected layers of attention alone, got {type(layer).__name__}")
