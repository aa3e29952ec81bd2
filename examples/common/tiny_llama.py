"""A small Llama-shaped causal LM in plain torch; RoPE and packed attention are packing_ops calls."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import packing_ops as po


@dataclass
class Config:
    vocab_size: int = 258
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    max_positions: int = 4096
    rope_theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def rope_cache(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [max_positions, head_dim / 2]."""
    exponent = torch.arange(0, config.head_dim, 2) / config.head_dim
    angles = torch.arange(config.max_positions)[:, None] / config.rope_theta**exponent
    return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        heads = config.num_heads + 2 * config.num_kv_heads
        self.qkv = nn.Linear(config.hidden_size, heads * config.head_dim, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x, cos, sin, position_ids, cu_seqlens):
        config = self.config
        heads = self.qkv(x).unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=-2)
        if cu_seqlens is None:  # padded [batch, seqlen, heads, head_dim]; right padding needs no mask but causality
            q, k = po.apply_rotary_qk(q, k, cos, sin, position_ids, unsqueeze_dim=2)
            rows = (t.transpose(1, 2) for t in (q, k, v))
            mixed = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True).transpose(1, 2)
        else:  # packed [total, heads, head_dim]
            q, k = po.apply_rotary_qk(q, k, cos, sin, position_ids)
            mixed = po.varlen_attention(q, k, v, cu_seqlens, causal=True)
        return self.out(mixed.flatten(-2))


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        hidden = config.hidden_size
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention = Attention(config)
        self.gate_up = nn.Linear(hidden, 2 * 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x, *context):
        x = x + self.attention(self.attention_norm(x), *context)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class TinyLlama(nn.Module):
    """Logits of padded [batch, seqlen] ids, or of packed [total] ids when ``cu_seqlens`` is given."""

    def __init__(self, config: Config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        cos, sin = rope_cache(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, input_ids, position_ids, cu_seqlens=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin, position_ids, cu_seqlens)
        return self.head(self.norm(x))
