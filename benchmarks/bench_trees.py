"""python benchmarks/bench_trees.py [--device cpu|cuda]: attention over prefix trees, forward and backward, beside the
same samples each with its prompt, and training steps of a whole model.

On a GPU also beside torch's FlashAttention-2 with k and v gathered along the paths, and FlexAttention with the tree's
mask. The model has the shape of Qwen3-0.6B with half the layers, so that the samples fit in one GPU's memory in one
row.
"""

import functools

import torch
from attention_peers import heads_first
from harness import Case, run

import packing_ops as po

GATHERED, FLEX = "torch FlashAttention-2, k and v gathered", "FlexAttention, the tree's mask"
# Of one prompt: answers, tokens of the prompt, tokens of an answer.
GROUPS = {
    "cuda": [(8, 8192, 1024), (8, 2048, 2048), (8, 1024, 8192), (64, 512, 512)],
    "cpu": [(8, 1024, 128), (8, 256, 256), (8, 128, 1024)],
}
MODEL_GROUPS = {"cuda": [(8, 8192, 1024), (8, 2048, 2048)], "cpu": [(8, 256, 32)]}
MODELS = {
    "cuda": {
        **{"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 14, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936},
    },
    "cpu": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000},
    },
}
HEADS = {"cuda": (32, 8, 128), "cpu": (8, 2, 64)}  # of q, of k and v, head_dim
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


class Tree:
    """One prompt with its answers: rows of the tree, and the same samples end to end."""

    def __init__(self, answers, prompt, answer, device):
        shared, length = torch.arange(prompt), prompt + answer
        own = torch.arange(prompt, prompt + answers * answer).split(answer)
        tokens = torch.cat([torch.cat([shared, each]) for each in own])
        self.tree = po.pack_prefix_tree(tokens, torch.arange(answers + 1) * length)
        self.metadata = po.PackedMetadata.from_prefix_tree(self.tree, device=device)
        self.samples = po.PackedMetadata.from_lengths([length] * answers, device=device)
        self.slot_of_token = self.tree.slot_of_token.to(device)
        heads, kv_heads, dim = HEADS[device]
        rows = self.tree.num_slots
        new = functools.partial(torch.randn, dtype=DTYPES[device], device=device)
        self.q, self.dout = new(rows, heads, dim), new(rows, heads, dim)
        self.k, self.v = new(rows, kv_heads, dim), new(rows, kv_heads, dim)
        sizes = f"T={self.tree.num_tokens} rows={rows} heads={heads}/{kv_heads} D={dim} causal"
        self.shape = f"answers={answers} prompt={prompt} answer={answer}: {sizes}"

    def of_samples(self, tensor):
        return tensor[self.slot_of_token]


def calls(attend, inputs, dout):
    """(forward, backward)"""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = attend(*leaves)
    return (
        torch.no_grad()(lambda: attend(*inputs)),
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
    )


def gathered(tree):
    """torch's FlashAttention-2 over keys along the paths; index_select's backward adds them up."""
    from e2e_providers import GROUPED
    from torch.nn.attention import varlen

    paths, longest = tree.metadata.paths, tree.metadata.max_seqlen
    segments = int(tree.metadata.lengths.max())

    def attend(q, k, v):
        k, v = (t.index_select(0, paths.slot_of_key) for t in (k, v))
        documents = tree.metadata.cu_seqlens, paths.cu_seqlens, segments, longest
        return varlen.varlen_attn(q, k, v, *documents, window_size=(-1, 0), **GROUPED)

    return calls(attend, (tree.q, tree.k, tree.v), tree.dout)


def flex(tree):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device, rows = tree.q.device, tree.tree.num_slots
    segment = tree.metadata.seq_idx
    parents = tree.tree.parents.tolist()
    ends = list(range(1, len(parents) + 1))  # one past the last segment of each subtree
    for i in reversed(range(len(parents))):
        if parents[i] >= 0:
            ends[parents[i]] = max(ends[parents[i]], ends[i])
    end = tree.tree.cu_seqlens[ends].to(device)[segment]  # of each key, one past the last row that sees it

    def visible(b, h, q_idx, k_idx):
        return (k_idx <= q_idx) & (q_idx < end[k_idx])

    torch._functorch.config.donated_buffer = False  # its backward runs again and again over the same forward
    mask = create_block_mask(visible, None, None, rows, rows, device=device)
    attend = torch.compile(functools.partial(flex_attention, block_mask=mask, enable_gqa=True))
    return calls(lambda *given: heads_first(attend(*map(heads_first, given))), (tree.q, tree.k, tree.v), tree.dout)


def case_of(answers, prompt, answer, device):
    tree = Tree(answers, prompt, answer, device)
    inputs = tree.q, tree.k, tree.v
    providers = {
        "packing_ops": calls(lambda *given: po.varlen_attention(*given, tree.metadata), inputs, tree.dout),
        "packing_ops, each sample with its prompt": calls(
            lambda *given: po.varlen_attention(*given, tree.samples),
            [tree.of_samples(t) for t in inputs],
            tree.of_samples(tree.dout),
        ),
    }
    if device == "cuda":
        providers |= {GATHERED: gathered(tree), FLEX: flex(tree)}
    for name, (forward, _) in providers.items():
        expected = tree.of_samples(providers["packing_ops"][0]()) if "sample" in name else providers["packing_ops"][0]()
        error = float((forward().float() - expected.float()).norm() / expected.float().norm())
        if not error < 0.02:
            raise ValueError(f"{name}: results apart by {error:.3f}")
    for i, op in enumerate(("prefix_attention", "prefix_attention_backward")):
        yield Case(op, tree.shape, str(DTYPES[device])[6:], {name: each[i] for name, each in providers.items()}, runs=7)


def whole_model(answers, prompt, answer, device):
    """A training step, forward and backward of the answers' log-probabilities: the tree's row, and the samples' row."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from packing_ops.integrations.transformers import apply_packing_ops

    torch.manual_seed(0)
    made = Tree(answers, prompt, answer, device)
    model = Qwen3ForCausalLM._from_config(Qwen3Config(**MODELS[device], use_cache=False), dtype=DTYPES[device]).to(
        device
    )
    apply_packing_ops(model)
    tokens = torch.randint(MODELS[device]["vocab_size"], (made.tree.num_slots,), device=device)
    trained = (made.samples.position_ids >= prompt - 1) & (made.samples.position_ids < prompt + answer - 1)

    def step(input_ids, metadata, logps_of, others):
        model.zero_grad(set_to_none=True)
        hidden = model.model(
            input_ids=input_ids[None], position_ids=metadata.position_ids[None], **metadata.to_transformers()
        ).last_hidden_state
        loss = -logps_of(hidden, model.lm_head.weight, input_ids, others)[trained].mean()
        loss.backward()
        return loss.detach()

    of_tree = made.tree.to(device)
    providers = {
        "packing_ops": lambda: step(tokens, made.metadata, po.prefix_token_logps, of_tree),
        "packing_ops, each sample with its prompt": lambda: step(
            made.of_samples(tokens), made.samples, po.token_logps, made.samples
        ),
    }
    ours, other = (float(provider()) for provider in providers.values())
    if not abs(ours - other) < 0.02 * abs(other):
        raise ValueError(f"losses apart: {ours} of the tree, {other} of the samples")
    sizes = f"hidden={MODELS[device]['hidden_size']} layers={MODELS[device]['num_hidden_layers']}"
    yield Case("training_step", f"{made.shape.split(' heads')[0]} {sizes}", str(DTYPES[device])[6:], providers, runs=5)


def nothing_shared(device):
    """Documents as trees of one segment, beside the same documents."""
    heads, kv_heads, dim = HEADS[device]
    lengths = [(4096 if device == "cuda" else 512) // 2] * 16
    documents = po.PackedMetadata.from_lengths(lengths, device=device)
    tree = po.pack_prefix_tree(torch.arange(sum(lengths)), documents.cu_seqlens.cpu())
    metadata = po.PackedMetadata.from_prefix_tree(tree, device=device)
    new = functools.partial(torch.randn, dtype=DTYPES[device], device=device)
    q, k, v = (new(sum(lengths), count, dim) for count in (heads, kv_heads, kv_heads))
    shape = f"nothing shared: T={sum(lengths)} docs=16 heads={heads}/{kv_heads} D={dim} causal"
    providers = {
        "packing_ops": calls(lambda *given: po.varlen_attention(*given, metadata), (q, k, v), torch.ones_like(q)),
        "packing_ops, plain documents": calls(
            lambda *given: po.varlen_attention(*given, documents), (q, k, v), torch.ones_like(q)
        ),
    }
    for i, op in enumerate(("prefix_attention", "prefix_attention_backward")):
        yield Case(op, shape, str(DTYPES[device])[6:], {name: each[i] for name, each in providers.items()}, runs=7)


def cases(device):
    for group in GROUPS[device]:
        yield from case_of(*group, device)
    yield from nothing_shared(device)
    for group in MODEL_GROUPS[device]:
        yield from whole_model(*group, device)


if __name__ == "__main__":
    run("trees", cases)
