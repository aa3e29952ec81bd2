"""A training step of a hybrid model: python benchmarks/bench_hybrid.py [--model bamba] [--only checkpoint_policy]
[--tiny]

The model has the shape of Qwen3.5's text, three of four layers gated delta nets, or that of Bamba-9B in 8 layers, seven
of them Mamba-2. Rows of the second go to hybrid_bamba_cuda.csv.

Documents of the sft workload in one row of 16,384 tokens, forward and backward: tokens that are not padding per second,
and the most memory held. The losses of all tokens are compared with those of the run's first provider. A provider that
fails (out of memory, say) has its error in place of a time. Needs transformers.
"""

import contextlib
import warnings

import torch
import torch._functorch.config
from bench_e2e import release, step
from e2e_batches import by_document, documents_of, packed_rows, padded_batches, token_losses
from harness import bench_parser, measured_on, read_rows, seconds, write_csv

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops, revert_packing_ops

ROW = 16_384
SHAPE = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_value_heads": 16,
         "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
         "tie_word_embeddings": True}  # fmt: skip
TINY_ROW = 512
TINY = {**SHAPE, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16,
        "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16}  # fmt: skip
BAMBA = {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 8,
         "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_indices": [4], "mamba_n_heads": 128,
         "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}  # fmt: skip
TINY_BAMBA = {**BAMBA, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
              "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [2], "mamba_n_heads": 4,
              "mamba_d_head": 32, "mamba_d_state": 16}  # fmt: skip
MODELS = {"qwen3_5_text": (SHAPE, TINY), "bamba": (BAMBA, TINY_BAMBA)}
LESS = 0.75  # of what a compiled layer saves for its backward: torch's partitioner makes cheap tensors again
PROVIDERS = {  # arguments of apply_packing_ops, and how the layers run: a key of ways_to_run
    "packing_ops": ({"rms_norm": False}, "eager"),
    "packing_ops, rms_norm=True": ({"rms_norm": True}, "eager"),
    "packing_ops, torch.compile of each layer": ({}, "compiled"),
    "packing_ops, fused_loss=True, torch.compile of each layer": ({"fused_loss": True}, "compiled"),
    "packing_ops, fused_loss=True, torch.compile, activation_memory_budget": ({"fused_loss": True}, "compiled, less"),
    "packing_ops, fused_loss=True, checkpoint_policy": ({"fused_loss": True}, "policy"),
    "packing_ops, linear_attention=False": ({"linear_attention": False, "rms_norm": False}, "eager"),
    "padded batches of 8, sdpa": (None, "eager"),
}
POLICY_BYTES = 12 << 30  # for checkpoint_policy
COLUMNS = ("provider", "layers", "tokens", "documents", "tokens_per_second", "peak_gib", "token_loss_difference", "error",
           "device", "torch", "commit")  # fmt: skip
RUNS = 3


def run_as(model, way: str) -> None:
    """Compile or checkpoint the layers of a model."""
    torch._functorch.config.activation_memory_budget = LESS if way == "compiled, less" else 1.0
    torch._dynamo.reset()
    if way == "policy":
        policy = po.checkpoint_policy(model, POLICY_BYTES)
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": policy})
    for layer in model.model.layers if way.startswith("compiled") else ():
        layer.compile()


@contextlib.contextmanager
def model_of(swaps: dict | None, way: str, shape: dict, device: str):
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    family = "bamba" if "mamba_n_heads" in shape else "qwen3_5_text"
    config = AutoConfig.for_model(family, **shape, use_cache=False)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).train()
    if swaps is not None:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "apply_packing_ops")  # a swap that this model cannot have
            apply_packing_ops(model, **swaps)
    run_as(model, way)
    yield model
    revert_packing_ops(model)


def logits_of(model, batch: dict) -> torch.Tensor:
    """Returns the logits, which a fused loss does not make beside labels."""
    return model(**{name: value for name, value in batch.items() if name != "labels"}).logits


def measured(swaps: dict | None, way: str, documents: list, shape: dict, device: str, reference: list) -> dict:
    made = padded_batches(documents) if swaps is None else packed_rows(documents, sum(map(len, documents)), True)
    batches = [{k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()} for batch in made.batches]
    with model_of(swaps, way, shape, device) as model:
        with torch.no_grad():
            losses = torch.cat([token_losses(logits_of(model, batch), batch) for batch in batches])
        losses = by_document(losses, made.order, documents)
        reference[:] = reference or [losses]
        for _ in range(2):
            step(model, batches, made.shares)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = sorted(seconds(lambda: step(model, batches, made.shares), device) for _ in range(RUNS))
        peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {
        "tokens_per_second": f"{sum(map(len, documents)) / times[RUNS // 2]:.0f}",
        "peak_gib": f"{peak:.2f}",
        "token_loss_difference": f"{float((losses - reference[0]).square().mean().sqrt()):.2g}",
    }


def providers_of(model: str, only: str) -> dict:
    """Return those whose name contains only. Bamba's forward scales the logits, which a fused loss does not."""
    without = {"fused_loss"} if model == "bamba" else set()
    return {name: how for name, how in PROVIDERS.items() if only in name and without.isdisjoint(how[0] or ())}


def main():
    parser = bench_parser(__doc__)
    parser.add_argument("--model", default="qwen3_5_text", choices=list(MODELS))
    parser.add_argument(
        "--only", default="", help="providers whose name contains this; the CSV keeps its rows of the others"
    )
    parser.add_argument("--tiny", action="store_true", help="a small model and few tokens, to see that it runs")
    arguments = parser.parse_args()
    device = arguments.device
    shape, row = MODELS[arguments.model][arguments.tiny], TINY_ROW if arguments.tiny else ROW
    name = "hybrid" if arguments.model == "qwen3_5_text" else f"hybrid_{arguments.model}"
    documents, reference, path = documents_of(row, row, shape["vocab_size"]), [], arguments.out / f"{name}_{device}.csv"
    chosen = providers_of(arguments.model, arguments.only)
    rows = (
        [each for each in read_rows(path) if each["provider"] not in chosen] if arguments.only and path.exists() else []
    )
    where = measured_on(device)
    about = {"layers": shape["num_hidden_layers"], "tokens": sum(map(len, documents)), "documents": len(documents)}
    for provider, (swaps, way) in chosen.items():
        try:
            found = measured(swaps, way, documents, shape, device, reference)
        except Exception as error:  # one that cannot run here says nothing about the others
            found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"}
        rows.append({**dict.fromkeys(COLUMNS, ""), "provider": provider, **about, **found, **where})
        print(provider, found, flush=True)
        write_csv(path, rows, show=False)
        release(device)


if __name__ == "__main__":
    main()
