"""Stand-ins for the parts of vLLM that the integration takes hold of, under vLLM's names."""

import enum
import types

import torch


def _modules():
    """{name: module}. Classes have what the integration reads of vLLM's, and raise where it must not call theirs."""

    class Base:
        def __init__(self, *_):
            pass

    class Layer(torch.nn.Module):
        def forward(self, *_):
            raise AssertionError("vLLM's own forward")

    def layer(name):
        return type(name, (Layer,), {})

    class Method:
        def apply(self, *_):
            raise AssertionError("vLLM's own product")

        process_weights_after_loading = apply

    class Rotary(Layer):
        base = 10_000.0

        def _compute_inv_freq(self, base):
            return base ** -(torch.arange(0, self.rotary_dim, 2, dtype=torch.float) / self.rotary_dim)

    class Sampler(torch.nn.Module):
        """It samples the largest logit."""

        logprobs_mode = "raw_logprobs"
        topk_topp_sampler = types.SimpleNamespace(logprobs_mode="raw_logprobs")

        def forward(self, logits, metadata=None):
            raw = self.compute_logprobs(logits)
            sampled, processed = self.sample(logits.to(torch.float32), metadata)
            return sampled, raw if processed is None else processed

        def sample(self, logits, sampling_metadata, logprobs_mode_override=None):
            logits.div_(sampling_metadata.temperature[:, None])
            processed = logits if self.topk_topp_sampler.logprobs_mode == "processed_logits" else None
            return logits.argmax(-1), processed

        @staticmethod
        def compute_logprobs(logits):
            raise AssertionError("vLLM's own sums")

    class SecondSampler:
        """It hides the smallest logit, and samples the largest."""

        def __init__(self, temperature, penalties=0.0):
            self.sampling_states = types.SimpleNamespace(temperature=types.SimpleNamespace(gpu=temperature))
            self.penalties = penalties

        def sample(self, logits, rows, return_logprobs=False):
            temperature = self.sampling_states.temperature.gpu[rows]
            processed = (logits.float() - self.penalties) / temperature.where(temperature > 0, 1.0)[:, None]
            processed.scatter_(-1, processed.argmin(-1, keepdim=True), -float("inf"))
            return processed.argmax(-1), processed

    class Backends(enum.Enum):
        CUSTOM, CPU_ATTN = "", "cpu"

        def is_overridden(self):
            return self in overrides

        def get_path(self):
            return overrides.get(self, self.value)

        def clear_override(self):
            overrides.pop(self)

    overrides = {}

    class Platform:
        @classmethod
        def get_attn_backend_cls(cls, selected_backend, *_):
            return "cpu"

        def is_cpu(self):
            return True

    class EngineArgs:
        attention_backend, enforce_eager, attention_config = None, False, types.SimpleNamespace(backend=None)

        def __init__(self, mode=None, cudagraph_mode=None, **others):
            self.compilation_config = types.SimpleNamespace(mode=mode, cudagraph_mode=cudagraph_mode)
            vars(self).update(others)

        def create_engine_config(self):
            chosen = self.compilation_config
            return self.attention_backend, self.enforce_eager, chosen.mode, chosen.cudagraph_mode

    def write_pages(key, value, k_pages, v_pages, slots, *_):
        """A key without a slot goes where it changes nothing."""
        page, row = slots.clamp(min=0) // k_pages.shape[1], slots.clamp(min=0) % k_pages.shape[1]
        for pages, new in ((k_pages, key), (v_pages, value)):
            kept = pages[page, row]
            pages.index_put_((page, row), torch.where(slots[:, None, None] < 0, kept, new[: len(slots)]))

    graphs = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    of_compiler = {
        "CompilationMode": enum.IntEnum("CompilationMode", {"NONE": 0, "VLLM_COMPILE": 3}),
        "CUDAGraphMode": enum.Enum("CUDAGraphMode", graphs),
    }
    layers = "vllm.model_executor.layers"
    contents = {
        "vllm._custom_ops": {"reshape_and_cache_flash": write_pages},
        "vllm.config": {"get_current_vllm_config": config, **of_compiler},
        f"{layers}.attention": {"Attention": layer("Attention")},
        f"{layers}.activation": {"SiluAndMul": layer("SiluAndMul"), "GeluAndMul": layer("GeluAndMul")},
        f"{layers}.layernorm": {"RMSNorm": layer("RMSNorm"), "GemmaRMSNorm": layer("GemmaRMSNorm")},
        f"{layers}.linear": {"UnquantizedLinearMethod": type("UnquantizedLinearMethod", (Method,), dict(vars(Method)))},
        f"{layers}.rotary_embedding.base": {"RotaryEmbedding": type("RotaryEmbedding", (Rotary,), {})},
        f"{layers}.vocab_parallel_embedding": {"UnquantizedEmbeddingMethod": type("Embedding", (Method,), {})},
        "vllm.platforms": {"current_platform": Platform()},
        "vllm.v1.attention.backend": {
            "AttentionBackend": Base,
            "AttentionCGSupport": types.SimpleNamespace(UNIFORM_SINGLE_TOKEN_DECODE=1),
            "AttentionImpl": type("AttentionImpl", (Base,), {}),
            "AttentionMetadataBuilder": type("AttentionMetadataBuilder", (Base,), {}),
            "AttentionType": types.SimpleNamespace(DECODER="decoder"),
            "CommonAttentionMetadata": types.SimpleNamespace,
            "MultipleOf": int,
        },
        "vllm.v1.attention.backends.registry": {
            "AttentionBackendEnum": Backends,
            "register_backend": overrides.__setitem__,
        },
        "vllm.v1.sample.sampler": {"Sampler": Sampler},
        "vllm.v1.worker.gpu.sample.sampler": {"Sampler": SecondSampler},
        "vllm.v1.worker.gpu.sample.logprob": {"compute_token_logprobs": Sampler.compute_logprobs},
        "vllm.engine.arg_utils": {"EngineArgs": EngineArgs},
    }
    modules = {}
    for name, attributes in contents.items():
        for i in range(1, name.count(".") + 2):
            parent = ".".join(name.split(".")[:i])
            modules.setdefault(parent, types.ModuleType(parent))
        vars(modules[name]).update(attributes)
    return modules


def config(**changed):
    """A VllmConfig that is served; changed: {part__name: value}."""
    parts = {
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "cache_config": {"block_size": 128, "cache_dtype": "auto"},
        "model_config": {"dtype": torch.bfloat16, "hf_text_config": types.SimpleNamespace()},
        "compilation_config": {"mode": 0, "static_forward_context": {}},
        "device_config": {"device_type": "cpu"},
    }
    for name, value in changed.items():
        part, _, field = name.partition("__")
        parts.setdefault(part, {})[field] = value
    found = {part: types.SimpleNamespace(**fields) for part, fields in parts.items() if "" not in fields}
    alone = dict.fromkeys(("quant_config", "speculative_config", "lora_config"))
    alone |= {part: fields[""] for part, fields in parts.items() if "" in fields}
    return types.SimpleNamespace(**alone, **found)


def install(monkeypatch):
    """``import vllm`` gives the stand-ins until the test ends; so does what this package made of them."""
    import sys

    for name in [name for name in sys.modules if name.startswith("packing_ops.integrations.vllm")]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in _modules().items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
