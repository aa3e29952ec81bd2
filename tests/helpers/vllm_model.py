"""A Qwen3 as vLLM has it, over stand-ins: one product for q, k and v, one for gate and up, norms of the residual."""

import types

import torch
import torch.nn.functional as F

from helpers.vllm_case import config

BLOCK = 128
LAYER = types.SimpleNamespace(_k_scale=None, _v_scale=None)  # vLLM's Attention


def layer(cls, **attributes):
    """A layer of a stand-in's class, without the __init__ of vLLM's."""
    made = cls.__new__(cls)
    torch.nn.Module.__init__(made)
    vars(made).update(attributes)
    return made


def step(requests, tables, device, padding=0):
    """CommonAttentionMetadata of (keys before, new ones) of each request; ``padding`` tokens have the slot -1."""
    slots = [
        tables[i][at // BLOCK] * BLOCK + at % BLOCK
        for i, (old, new) in enumerate(requests)
        for at in range(old, old + new)
    ]
    starts = F.pad(torch.tensor([new for _, new in requests]).cumsum(0), (1, 0))
    return types.SimpleNamespace(
        causal=True,
        num_reqs=len(requests),
        num_actual_tokens=len(slots) + padding,
        query_start_loc=starts.int().to(device),
        seq_lens=torch.tensor([old + new for old, new in requests], dtype=torch.int32, device=device),
        block_table_tensor=torch.tensor(tables, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor([*slots, *[-1] * padding], device=device),
    )


class Qwen3:
    """The weights of a transformers Qwen3 in vLLM's layers, and a cache of pages for some sequences."""

    def __init__(self, vllm, model, sequences, longest):
        self.config, self.model, self.layers = model.config, model, vllm.layers
        self.device, self.dtype, c = model.device, model.dtype, model.config
        self.method, self.sampler = vllm.layers.UnquantizedLinearMethod(), vllm.layers.Sampler()
        self.sizes = [c.num_attention_heads * c.head_dim, *[c.num_key_value_heads * c.head_dim] * 2]
        heads = c.num_attention_heads, c.head_dim, c.head_dim**-0.5, c.num_key_value_heads
        self.attention = [vllm.backend.Impl(*heads) for _ in model.model.layers]
        self.act = layer(vllm.layers.SiluAndMul)
        pages = -(-longest // BLOCK)
        shape = sequences * pages + 1, c.num_key_value_heads, BLOCK, 2 * c.head_dim
        self.tables = (1 + torch.randperm(sequences * pages)).view(sequences, pages).tolist()
        self.caches = [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in self.attention]
        self.builder = vllm.backend.Builder(types.SimpleNamespace(block_size=BLOCK), [], config(), self.device)
        of_rope = {"head_size": c.head_dim, "rotary_dim": c.head_dim, "is_neox_style": True}
        of_rope |= {"cos_sin_cache": torch.empty(longest, c.head_dim), "_compute_inv_freq": lambda _: frequencies}
        frequencies = model.model.rotary_emb.inv_freq.cpu()
        self.rope = layer(vllm.layers.RotaryEmbedding, **of_rope)
        self.fused = [self._fused(each) for each in model.model.layers]

    def _fused(self, hf):
        attention, mlp = hf.self_attn, hf.mlp
        parts = {"qkv": [attention.q_proj, attention.k_proj, attention.v_proj], "o": [attention.o_proj]}
        parts |= {"gate_up": [mlp.gate_proj, mlp.up_proj], "down": [mlp.down_proj]}
        found = {}
        for name, linears in parts.items():
            weight = torch.nn.Parameter(torch.cat([each.weight for each in linears]), requires_grad=False)
            sizes = [len(each.weight) for each in linears]
            found[name] = types.SimpleNamespace(weight=weight, output_partition_sizes=sizes)
        return found

    def _norm(self, hf, *given):
        norm = layer(self.layers.RMSNorm, weight=hf.weight, variance_epsilon=hf.variance_epsilon)
        return norm(*given)

    @torch.no_grad()
    def __call__(self, tokens, requests):
        """Log-probabilities ``[tokens, vocab]`` after new tokens of (keys before, new ones) of each sequence."""
        metadata = self.builder.build(0, step(requests, self.tables, self.device))
        positions = torch.cat([torch.arange(old, old + new) for old, new in requests]).to(self.device)
        x, residual = self.model.model.embed_tokens(tokens), None
        for hf, fused, attention, cache in zip(
            self.model.model.layers, self.fused, self.attention, self.caches, strict=True
        ):
            if residual is None:
                residual, x = x, self._norm(hf.input_layernorm, x)
            else:
                x, residual = self._norm(hf.input_layernorm, x, residual)
            q, k, v = (
                each.unflatten(1, (-1, self.config.head_dim))
                for each in self.method.apply(fused["qkv"], x).split(self.sizes, 1)
            )
            q, k = (
                self._norm(norm, each).flatten(1) for norm, each in ((hf.self_attn.q_norm, q), (hf.self_attn.k_norm, k))
            )
            q, k = (each.view(len(tokens), -1, self.config.head_dim) for each in self.rope(positions, q, k))
            out = attention.forward(LAYER, q, k, v, cache, metadata, torch.empty_like(q))
            x, residual = self._norm(
                hf.post_attention_layernorm, self.method.apply(fused["o"], out.flatten(1)), residual
            )
            x = self.method.apply(fused["down"], self.act(self.method.apply(fused["gate_up"], x)))
        hidden, _ = self._norm(self.model.model.norm, x, residual)
        head = types.SimpleNamespace(weight=self.model.lm_head.weight, org_vocab_size=self.config.vocab_size)
        return self.sampler.compute_logprobs(self.layers.UnquantizedEmbeddingMethod().apply(head, hidden))


def sampled(engine, prompts, tokens, budget=100):
    """(document, log-probabilities of its last ``tokens`` tokens) for each prompt, in chunks that decode others too."""
    documents, logps = [prompt.tolist() for prompt in prompts], [[] for _ in prompts]
    ends, done = [len(prompt) + tokens for prompt in prompts], [0] * len(prompts)
    while any(len(logp) < tokens for logp in logps):
        left, requests = budget, []
        for i, document in enumerate(documents):
            new = min(len(document) - done[i], max(left, 0)) if len(logps[i]) < tokens else 0
            requests.append((done[i], new))
            left -= new
        row = [t for document, (old, new) in zip(documents, requests, strict=True) for t in document[old : old + new]]
        found = engine(torch.tensor(row, device=engine.device), requests)
        last = 0
        for i, (old, new) in enumerate(requests):
            last, done[i] = last + new, old + new
            if new and done[i] == len(documents[i]) < ends[i]:
                token = int(found[last - 1].exp().multinomial(1))
                documents[i].append(token)
                logps[i].append(float(found[last - 1, token]))
    return [(torch.tensor(document), torch.tensor(logp)) for document, logp in zip(documents, logps, strict=True)]
