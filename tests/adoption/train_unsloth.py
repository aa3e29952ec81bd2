"""Unsloth's attention, dispatch and RoPE train a tiny Llama, Mistral and Gemma 2 on the CPU: padded and packed.

run.py starts it under the patches with their flag set; the last line that it prints is JSON, the losses of each way.
Unsloth's Triton kernels (norms, MLP, loss) need a GPU: those parts of the model are transformers'.
"""

import json
import os
from types import MethodType, SimpleNamespace
from unittest import mock

os.environ["UNSLOTH_ALLOW_CPU"] = "1"

import stand_ins  # noqa: F401
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from unsloth import device_type
from unsloth.models.gemma2 import Gemma2Attention_fast_forward
from unsloth.models.llama import LlamaAttention_fast_forward, original_apply_o, original_apply_qkv
from unsloth.models.mistral import MistralAttention_fast_forward
from unsloth.utils import attention_dispatch
from unsloth.utils.packing import enable_sample_packing, mask_packed_boundary_labels
from unsloth.utils.prefix_grouper_kernel import _make_mask_mod, build_seg_info_multigroup

STEPS, VOCABULARY, LONGEST, WINDOW = 4, 64, 128, 6
LENGTHS = [19, 5, 11, 30, 7, 2, 23, 14]


def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


FAST_FORWARD = {
    LlamaForCausalLM: LlamaAttention_fast_forward,
    MistralForCausalLM: MistralAttention_fast_forward,
    Gemma2ForCausalLM: Gemma2Attention_fast_forward,
}


def model_of(kind, window=WINDOW):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": VOCABULARY, "num_hidden_layers": 2}
    if kind == "Llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    if kind == "Gemma 2":  # its softcap is of attention and of the logits
        sizes |= {"head_dim": 8, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 2.0, "sliding_window": window}
        return Gemma2ForCausalLM(Gemma2Config(**sizes, attn_implementation="eager"))
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=window))


def with_unsloths_attention(model, batch):
    """``batch`` has the row's fields, as Unsloth's model forward hands them to each layer."""
    fast_forward = FAST_FORWARD[type(model)]
    frequencies = model.model.rotary_emb.inv_freq
    angles = torch.outer(torch.arange(LONGEST).float(), frequencies).repeat(1, 2)

    tables = angles.cos(), angles.sin()
    cache = SimpleNamespace(get_cached=lambda *_: tables, extend_rope_embedding=lambda *_, **__: None)
    cache.multi_gpu_cos_cached, cache.multi_gpu_sin_cached = ({None: table} for table in tables)

    def forward(self, hidden_states, **kwargs):
        out, weights, _ = fast_forward(self, hidden_states, **batch, use_sliding_window=self.layer_idx % 2 == 0)
        return out, weights

    for layer in model.model.layers:
        attention = layer.self_attn
        attention.apply_qkv, attention.apply_o = original_apply_qkv, original_apply_o
        attention.rotary_emb = cache
        attention.forward = MethodType(forward, attention)
    return model


def train(model, inputs, labels):
    """The losses of STEPS steps; labels are raw, -100 where nothing is learnt."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        logits = model(**inputs).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def padded(kind, with_attention=False):
    batch = DataCollatorForLanguageModeling(pad_token_id=0)([{"input_ids": ids} for ids in documents()])
    # Unsloth gives Gemma 2's window to flash-attn as it is: one key more than transformers sees.
    model = model_of(kind, WINDOW + (kind == "Gemma 2"))
    if with_attention:
        with_unsloths_attention(model, {"attention_mask": batch["attention_mask"]})
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return train(model, inputs, batch["labels"])


def packed(kind):
    """One row of all documents, by Unsloth's collator of packed rows, through the backend of packing_ops."""
    backend = attention_dispatch.select_attention_backend(use_varlen=True)
    assert backend == attention_dispatch.PACKING_OPS, f"expected UNSLOTH_PACKING_OPS=1, got the backend {backend}"
    model = model_of(kind)
    trainer = SimpleNamespace(data_collator=DataCollatorForLanguageModeling(pad_token_id=0))
    enable_sample_packing(model, trainer)
    row = {"input_ids": [token for ids in documents() for token in ids], "seq_lengths": LENGTHS}
    batch = trainer.data_collator.torch_call([row])
    labels = mask_packed_boundary_labels(batch["labels"], batch["packed_seq_lengths"])
    fields = {name: batch[name] for name in ("packed_seq_lengths", "position_ids")}
    return train(with_unsloths_attention(model, fields), {"input_ids": batch["input_ids"]}, labels)


def the_host_keeps(capability):
    """The flag leaves a host's GPUs alone where one of them is older than the kernels."""
    ask = mock.patch.object(torch.cuda, "get_device_capability", return_value=capability)
    with mock.patch.object(device_type, "DEVICE_COUNT", 1), ask:
        return not device_type.use_packing_ops()


def float32_is_the_hosts():
    """DoRA's float32 projections become the dtype of the others, as for flash-attn; all float32 stays float32."""
    dtypes = []
    for projected in (torch.bfloat16, torch.float32):
        Q, K, V = (torch.zeros(1, 2, 4, 8, dtype=dtype) for dtype in (torch.float32, projected, projected))
        options = {"backend": attention_dispatch.PACKING_OPS, "n_kv_heads": 2, "n_groups": 1}
        layout = torch.tensor([4]), torch.tensor([0, 4], dtype=torch.int32), 4
        context = attention_dispatch.AttentionContext(1, 4, 4, 2, 8, False, layout, None, None)
        config = attention_dispatch.AttentionConfig(**options)
        dtypes.append(attention_dispatch.run_attention(config=config, context=context, Q=Q, K=K, V=V).dtype)
    return dtypes == [torch.bfloat16, torch.float32]


def prefixes_are_the_hosts():
    """A stream of PrefixGrouper through run_attention, against SDPA under the mask of Unsloth's FlexAttention."""
    seg, _ = build_seg_info_multigroup([(5, [3, 4]), (2, [1, 6, 2])], torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    Q, K, V = (torch.randn(1, heads, seg.T, 16, generator=generator).requires_grad_() for heads in (4, 2, 2))
    config = attention_dispatch.AttentionConfig(backend=attention_dispatch.SDPA, n_kv_heads=2, n_groups=2)
    context = attention_dispatch.AttentionContext(1, seg.T, seg.T, 4, 16, True, None, None, None, None, seg)
    ours = attention_dispatch.run_attention(config=config, context=context, Q=Q, K=K, V=V)
    at = torch.arange(seg.T)
    mask = _make_mask_mod(seg.group_of_kv, seg.is_prefix, seg.suffix_of_kv)(0, 0, at[:, None], at)
    theirs = torch.nn.functional.scaled_dot_product_attention(Q, K, V, mask, enable_gqa=True).transpose(1, 2)
    upstream = torch.randn(ours.shape, generator=generator)
    came = [torch.autograd.grad(out, (Q, K, V), upstream) for out in (ours, theirs)]
    pairs = [(ours, theirs), *zip(*came, strict=True)]
    return all(torch.allclose(mine, other, atol=1e-5) for mine, other in pairs)


def main():
    assert prefixes_are_the_hosts()
    assert the_host_keeps((7, 5)), "expected a T4 to keep Unsloth's own code"
    assert not the_host_keeps((8, 0)), "expected the flag to be on since sm_80"
    assert float32_is_the_hosts()
    stock = "padded, all of it transformers'"
    runs = {
        "Llama": {"padded": padded("Llama", with_attention=True)},
        f"Mistral, window of {WINDOW}": {},
        f"Gemma 2, window of {WINDOW}": {},
    }
    for name, ways in runs.items():
        kind = name.partition(",")[0]
        ways |= {"packed": packed(kind), stock: padded(kind)}
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
