"""Layers of vLLM's models as a trainer runs them within invariant(): patches that live as long as the attention of a
model.
"""

import functools

import torch
import torch.nn.functional as F
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample import logprob
from vllm.v1.worker.gpu.sample.sampler import Sampler as SecondSampler

from packing_ops.integrations._log_probs import log_sums_of
from packing_ops.integrations._patching import PRIVATE, Patch
from packing_ops.integrations.transformers.rms_norm import FORWARDS
from packing_ops.invariance.mode import Product, ProductsByBlocks, pad_rows, whole_pairs
from packing_ops.rope import apply_rotary_qk

# --- norms, activations, RoPE ---


def _norm(formula: str):
    def make(stock):
        @functools.wraps(stock)
        def forward(self, x, residual=None):
            if getattr(self, "variance_size_override", None) is not None:
                raise NotImplementedError(
                    f"{type(self).__name__}: expected a norm over the whole row, got one over a part"
                )
            x = x if residual is None else x + residual  # rounded, as a residual stream in a trainer is
            normalised = FORWARDS["no_weight" if not getattr(self, "has_weight", True) else formula](self, x)
            return normalised if residual is None else (normalised, x)

        return forward

    return make


def _gated(activation):
    def make(stock):
        @functools.wraps(stock)
        def forward(self, x):
            gate, up = x.chunk(2, -1)
            if x.is_cpu:  # the last elements of a strided row round otherwise
                gate, up = gate.contiguous(), up.contiguous()
            return activation(self, gate) * up

        return forward

    return make


GREEDY = 1e-5  # vLLM takes lower temperatures for 1, and the largest logit
ROTARY = ("RotaryEmbedding", "Llama3RotaryEmbedding")  # whose tables are those of transformers


def _rotary(stock):
    @functools.wraps(stock)
    def forward(self, positions, query, key=None):
        if type(self).__name__ not in ROTARY or not self.is_neox_style:
            raise NotImplementedError(f"rope: expected one of {', '.join(ROTARY)}, got {type(self).__name__}")
        cos, sin = _table(self, query).chunk(2, -1)
        tokens = positions.numel()
        q, k = (each if each is None else each.view(tokens, -1, self.head_size) for each in (query, key))
        apply_rotary_qk(q, k, cos, sin, positions.flatten(), rotary_dim=self.rotary_dim, inplace=True)
        return query, key

    return forward


def _table(rope, like):
    """cos next to sin for each position, as transformers makes them: frequencies on the CPU, angles on the device.

    vLLM takes powers on a GPU, which rounds some frequencies otherwise.
    """
    table = vars(rope).get(PRIVATE + "table")
    if table is None or (table.device, table.dtype) != (like.device, like.dtype):
        with torch.device("cpu"):
            frequencies = rope._compute_inv_freq(rope.base)
        positions = torch.arange(rope.cos_sin_cache.shape[0], device=like.device)
        angles = positions[:, None].float() * frequencies.to(like.device)
        table = vars(rope)[PRIVATE + "table"] = torch.cat([angles.cos(), angles.sin()], -1).to(like.dtype)
    return table


# --- products ---


def _product(x, weight, bias=None):
    # A few sequences give few rows, which cuBLASLt has other kernels for.
    rows = x.flatten(0, -2)
    return F.linear(pad_rows(rows), weight, bias)[: len(rows)].view(*x.shape[:-1], -1)


def _linear(stock):
    @functools.wraps(stock)
    def apply(self, layer, x, bias=None):
        weight = layer.weight.data
        if not x.is_cpu:
            return _product(x, weight, bias)
        # q, k and v, or gate and up, are one weight here. On the CPU a product's bits may depend on its columns.
        sizes = getattr(layer, "output_partition_sizes", None) or [weight.shape[0]]
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        with ProductsByBlocks():
            return torch.cat([F.linear(x, *each) for each in zip(weight.split(sizes), biases, strict=True)], -1)

    return apply


def _plain_weights(stock):
    """On the CPU vLLM packs weights for kernels of its own, and drops them."""

    @functools.wraps(stock)
    def process(self, layer):
        if not layer.weight.is_cpu:
            stock(self, layer)

    return process


def _head(stock):
    @functools.wraps(stock)
    def apply(self, layer, x, bias=None):
        if bias is not None:
            raise NotImplementedError("lm_head: expected no bias, got one")
        weight = layer.weight.data[: layer.org_vocab_size]
        if not x.is_cpu:
            return _product(x, weight)
        rows, weight = whole_pairs(pad_rows(x), weight)
        return Product.apply(rows, weight.t(), None)[: x.shape[0]]

    return apply


# --- log-probabilities ---


def _log_probs(logits: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None = None) -> torch.Tensor:
    scaled = logits if scales is None else logits.float() * scales[:, None]
    return scaled - log_sums_of(logits, dtype, scales)[:, None]  # float32, as the sums


def _compute_logprobs(stock):
    return staticmethod(lambda logits: _log_probs(logits, logits.dtype))


def _forward(stock):
    """Notes the dtype of the head's logits, which are float32 from here on."""

    @functools.wraps(stock)
    def forward(self, logits, *args, **kwargs):
        vars(self)[PRIVATE + "dtype"] = logits.dtype
        return stock(self, logits, *args, **kwargs)

    return forward


def _sample(stock):
    """logprobs_mode="processed_logprobs": from the logits before the temperature, without those that vLLM hides."""

    @functools.wraps(stock)
    def sample(self, logits, sampling_metadata, logprobs_mode_override=None):
        mode = logprobs_mode_override or self.logprobs_mode
        if mode != "processed_logprobs":
            return stock(self, logits, sampling_metadata, logprobs_mode_override)
        inner, dtype = self.topk_topp_sampler, vars(self).get(PRIVATE + "dtype", logits.dtype)
        before, inner.logprobs_mode = inner.logprobs_mode, "processed_logits"
        given = logits.clone()  # vLLM divides in place
        try:
            sampled, processed = stock(self, logits, sampling_metadata, "processed_logits")
        finally:
            inner.logprobs_mode = before
        if processed is None:
            return sampled, None
        hidden, temperature = processed == -float("inf"), sampling_metadata.temperature
        scales = None if temperature is None else _scales(temperature)
        return sampled, _log_probs(given.masked_fill_(hidden, -float("inf")), dtype, scales)

    return sample


def _scales(temperature):
    return 1 / torch.where(temperature < GREEDY, 1.0, temperature)


def _second_sample(stock):
    """The same of vLLM's second model runner: its processed logits, float32, know what they were made of."""

    @functools.wraps(stock)
    def sample(self, logits, rows, *args, **kwargs):
        sampled, processed = stock(self, logits, rows, *args, **kwargs)
        vars(processed)[PRIVATE + "of"] = logits, self.sampling_states.temperature.gpu, rows
        return sampled, processed

    return sample


def _of_tokens(stock):
    @functools.wraps(stock)
    def compute(logits, token_ids):
        of_tokens = functools.partial(torch.gather, dim=-1, index=token_ids.long())
        chosen = of_tokens(logits).float()
        found = chosen - log_sums_of(logits, logits.dtype)[:, None]
        if PRIVATE + "of" not in vars(logits):
            return found
        head, temperature, rows = vars(logits)[PRIVATE + "of"]
        given, scales = head.masked_fill(logits == -float("inf"), -float("inf")), _scales(temperature[rows])
        same = of_tokens(given).float() * scales[:, None] - log_sums_of(given, given.dtype, scales)[:, None]
        # vLLM divides by the temperature. Where it did more, by penalties and the like, a trainer has other logits.
        return torch.where((found - same).abs() <= 1e-5 + 1e-6 * chosen.abs(), same, found)

    return compute


PATCHES = [
    Patch(RMSNorm, "forward", _norm("weight")),
    Patch(GemmaRMSNorm, "forward", _norm("one_plus_weight")),
    Patch(SiluAndMul, "forward", _gated(lambda self, gate: F.silu(gate))),
    Patch(GeluAndMul, "forward", _gated(lambda self, gate: F.gelu(gate, approximate=self.approximate))),
    Patch(RotaryEmbedding, "forward", _rotary),
    Patch(UnquantizedLinearMethod, "apply", _linear),
    Patch(UnquantizedLinearMethod, "process_weights_after_loading", _plain_weights),
    Patch(UnquantizedEmbeddingMethod, "apply", _head),
    Patch(Sampler, "compute_logprobs", _compute_logprobs),
    Patch(Sampler, "forward", _forward),
    Patch(Sampler, "sample", _sample),
    Patch(SecondSampler, "sample", _second_sample),
    Patch(logprob, "compute_token_logprobs", _of_tokens, imported_by="vllm"),
]
