"""A default device that the caller sets is the caller's: every tensor of ours names where it lives."""

import ast
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
import torch
from helpers import ROOT, assert_same, cu_seqlens_of
from helpers.report_case import RECORDS, write_lines

import packing_ops as po
from packing_ops import data
from packing_ops.reference import boundaries as boundaries_oracle
from packing_ops.reference import padding as padding_oracle
from packing_ops.report import make_report

# Functions of torch whose result is on the default device; torch.frombuffer's does not.
FACTORIES = {"arange", "as_nested_tensor", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty"}
FACTORIES |= {"empty_permuted", "empty_quantized", "empty_strided", "eye", "fftfreq", "from_file", "full"}
FACTORIES |= {"hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "nested_tensor", "ones"}
FACTORIES |= {"rand", "randint", "randn", "randperm", "range", "rfftfreq", "scalar_tensor", "sparse_compressed_tensor"}
FACTORIES |= {"sparse_coo_tensor", "sparse_csr_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}
SOURCES = sorted((ROOT / "packing_ops").rglob("*.py"))


def factories_without_a_device(source):
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = [ast.unparse(call.func).split(".") for call in calls]
    return [
        f"line {call.lineno}: {ast.unparse(call)}"
        for call, name in zip(calls, names, strict=True)
        if name[0] == "torch" and name[-1] in FACTORIES and not any(word.arg == "device" for word in call.keywords)
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_factory_names_its_device(path):
    assert factories_without_a_device(path.read_text()) == []


def test_a_factory_without_a_device_is_seen():
    source = "torch.ones(3)\ntorch.zeros(2, device=d)\nnp.ones(3)\ntorch.nested.as_nested_tensor([t])\nt.new_ones(3)"
    seen = factories_without_a_device(source)
    assert seen == ["line 1: torch.ones(3)", "line 4: torch.nested.as_nested_tensor([t])"]


# --- everything that makes tensors, under another default device ---

LENGTHS = [5, 0, 3, 7]
CU_SEQLENS = cu_seqlens_of(LENGTHS)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
EXAMPLES = [
    {"input_ids": [1] * 5, "num_actions": 3, "loss_mask": [1.0, 1.0, 0.0]},
    {"input_ids": [2] * 7, "num_actions": 4, "loss_mask": [1, 1, 0, 1]},
]
ARRAYS = [{name: np.array(values) for name, values in example.items()} for example in EXAMPLES]
TENSORS = [{name: torch.tensor(values) for name, values in example.items()} for example in EXAMPLES]
PAIRS = [{"chosen_input_ids": [5, 6], "rejected_input_ids": [5, 7, 8], "index": i} for i in range(2)]
BATCH = {"ids": torch.arange(6).view(3, 2), "loss_mask": torch.ones(3, 2), "uids": ["a", "b", "c"]}
RAGGED = {"ids": torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)}
LABELS = torch.arange(15)
VALUES = torch.randn(15, generator=torch.Generator().manual_seed(0))
LOGITS = torch.randn(15, 15, generator=torch.Generator().manual_seed(1))
HEADS = torch.randn(15, 2, 16, generator=torch.Generator().manual_seed(2))
TABLE = torch.rand(8, 8, generator=torch.Generator().manual_seed(3))


def metadata(made):
    return made, made.position_ids, made.seq_idx, made.lengths, made.to_transformers(), made.to_megatron()


def padded_and_back(made):
    padded = made.pad(torch.arange(made.total, device="cpu"))
    return padded, made.unpad(padded)


def attention(call):
    q = HEADS.detach().requires_grad_()
    out = call(q)
    out.backward(out.detach())
    return out.detach(), q.grad


def collate(examples, **options):
    collator = data.PackedCollator(16, cp_size=2, **options)
    batch = collator(examples)
    return batch, [collator.context_parallel_split(batch, rank) for rank in range(2)]


CALLS = {
    "PackedCollator": lambda: collate(EXAMPLES),
    "PackedCollator, arrays": lambda: collate(ARRAYS),
    "PackedCollator, tensors": lambda: collate(TENSORS, dp_size=2),
    "PaddingFreeCollator": lambda: data.PaddingFreeCollator(capacity=20)(EXAMPLES),
    "PaddingFreeCollator, arrays": lambda: data.PaddingFreeCollator()(ARRAYS),
    "PaddingFreeDPOCollator": lambda: data.PaddingFreeDPOCollator(concatenated=True)(PAIRS),
    "token_budget_microbatches": lambda: data.token_budget_microbatches(LENGTHS, 8, dp_size=2),
    "stage_chunks": lambda: data.stage_chunks(BATCH, [(0, 1), (1, 3)], 2, put=lambda chunk: chunk),
    "normalize_advantages": lambda: data.normalize_advantages(
        *(torch.stack([VALUES, VALUES]), torch.ones_like(LOGITS[:2]), [(0, 1), (1, 2)], "prompt_mean"),
        prompt_boundaries=[(0, 1), (1, 2)],
        zscore=True,
    ),
    "batches": lambda: [data.select_rows(BATCH, [2, 0]), data.pad_batch_to_multiple(BATCH, 2)],
    "ragged batches": lambda: list(data.select_rows(RAGGED, [1, 0])["ids"].unbind()),
    "sequence_logps": lambda: [
        data.sequence_logps(LOGITS, LABELS, CU_SEQLENS),
        data.sequence_logps(LOGITS[None], LABELS[None], attention_mask=torch.ones_like(LABELS[None])),
    ],
    "model_inputs": lambda: data.PackedCollator(16).model_inputs(data.PackedCollator(16)(EXAMPLES)),
    "empty_like_batch": lambda: [
        data.empty_like_batch(data.PaddingFreeCollator()(EXAMPLES)),
        data.empty_like_batch(
            {"input_ids": LABELS, "cu_seqlens": CU_SEQLENS, "x": po.PackedMetadata.from_lengths([15])}
        ),
        data.empty_like_batch(BATCH),
    ],
    "PackedBatchSampler": lambda: list(data.PackedBatchSampler(LENGTHS, 8, 1, 2)),
    "prefetch": lambda: list(
        data.prefetch([[0], [1]], lambda bin: data.PaddingFreeCollator()([EXAMPLES[i] for i in bin]))
    ),
    "masked_loss": lambda: data.masked_loss(VALUES[None], (VALUES > 0)[None], num_items_in_batch=3.0),
    "parallel": lambda: [
        data.thd_inverse_indices(4 * CU_SEQLENS, 2),
        data.thd_partition_indices(CU_SEQLENS, 1, 0),
    ],
    "iter_microbatches": lambda: list(
        data.iter_microbatches([{"x": [1, 2], "y": 0.5}, {"x": [], "y": 1.5}], 2, pad_values={"x": 0})
    ),
    "trim_padding": lambda: data.trim_padding({"attention_mask": MASK}),
    "pack_sequences": lambda: [
        po.pack_sequences(LENGTHS, 10, strategy=strategy, bins_multiple_of=2, overlong="split")
        for strategy in ("ffd", "bfd", "next_fit", "first_fit", "balanced")
    ],
    "pack_sequences, nothing": lambda: po.pack_sequences([], 10),
    "pack_ffd": lambda: po.pack_ffd(CU_SEQLENS, 16),
    "pack_prefix_tree": lambda: [
        (tree, tree.bin(1)) for tree in [po.pack_prefix_tree(LABELS, CU_SEQLENS, groups=[0, 1, 2, 1], capacity=8)]
    ],
    "prefix_tree_metadata": lambda: metadata(po.prefix_tree_metadata([4, 4, 5, 6], [4, 4, 4, 5])),
    "from_lengths": lambda: metadata(po.PackedMetadata.from_lengths(LENGTHS, total=17)),
    "from_lengths, none": lambda: metadata(po.PackedMetadata.from_lengths([])),
    "from_cu_seqlens": lambda: metadata(po.PackedMetadata.from_cu_seqlens(CU_SEQLENS)),
    "from_position_ids": lambda: metadata(po.PackedMetadata.from_position_ids(LABELS[None] % 4)),
    "from_attention_mask": lambda: metadata(po.PackedMetadata.from_attention_mask(MASK)),
    "boundaries": lambda: [
        po.cu_seqlens_from_lengths(LENGTHS),
        po.cu_seqlens_from_position_ids(LABELS % 4),
        po.mask_boundary_labels(LABELS, lengths=LENGTHS),
        po.mask_boundary_labels_shifted_(LABELS.clone(), lengths=LENGTHS),
        po.shift_labels(LABELS, CU_SEQLENS),
        po.segment_sum(VALUES, CU_SEQLENS),
        po.count_target_tokens(LABELS[None]),
        po.block_causal_mask(CU_SEQLENS, 16, dtype=torch.float32, window=2),
    ],
    "segments": lambda: [
        po.shift_values(VALUES, CU_SEQLENS, fill_value=0.5),
        po.segment_std(VALUES, CU_SEQLENS, VALUES > 0),
        po.gae(VALUES, VALUES, CU_SEQLENS, gamma=0.9, lam=0.9, mask=VALUES > 0),
        po.segment_broadcast(VALUES[:4], CU_SEQLENS),
        po.segment_broadcast(VALUES[:8].view(4, 2), CU_SEQLENS, 16),
        po.segment_broadcast(LABELS[:4], CU_SEQLENS, 16),
    ],
    "unpad and pad": lambda: [
        padded_and_back(po.PackedMetadata.from_attention_mask(MASK)),
        padded_and_back(po.PackedMetadata.from_lengths(LENGTHS, total=17)),
    ],
    "prompts": lambda: [
        po.compute_prompt_boundaries(LABELS // 4),
        po.compute_prompt_mini_batch_boundaries(torch.tensor([2, 3], device="cpu"), 1),
    ],
    "padding": lambda: [
        po.unpad_input(MASK, MASK),
        po.unpad_input(MASK, MASK, lengths=[3, 2]),
        po.unpad_inputs({"mask": MASK, "rows": MASK.float()}, MASK, total=6),
        po.pad_input(LABELS[:5], LABELS[:5] + 1, 2, 4),
    ],
    "varlen_attention": lambda: attention(lambda q: po.varlen_attention(q, HEADS, HEADS, CU_SEQLENS, causal=True)),
    "flash_attn_func": lambda: attention(lambda q: po.flash_attn_func(q[None], HEADS[None], HEADS[None])),
    "token_kl": lambda: po.token_kl(LOGITS, LOGITS, 2 * LOGITS, LOGITS, None, CU_SEQLENS, beta=0.5),
    "token_logps": lambda: [
        *po.token_logps(LOGITS, LOGITS.repeat(3, 1), LABELS, CU_SEQLENS, entropy=True),
        po.chunked_cross_entropy(LOGITS, LOGITS.repeat(3, 1), LABELS, CU_SEQLENS),
    ],
    "apply_rotary_qk": lambda: po.apply_rotary_qk(HEADS, None, TABLE, TABLE, LABELS % 8),
    "oracles": lambda: [
        boundaries_oracle.position_ids_from_cu_seqlens(CU_SEQLENS, 16),
        boundaries_oracle.seq_idx_from_cu_seqlens(CU_SEQLENS, 16),
        *padding_oracle.iter_microbatches([{"x": [1, 2]}, {"x": [1]}], 2, {"x": 0}),
    ],
}
DEVICES = ["meta", *(["cuda"] if torch.cuda.is_available() else [])]  # meta: as good as a GPU that is not there


def assert_equal(actual, expected):
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert_same(actual, expected)
    elif isinstance(expected, dict):
        assert list(actual) == list(expected)
        assert_equal(list(actual.values()), list(expected.values()))
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_equal(ours, theirs)
    elif is_dataclass(expected):
        assert_equal(*({f.name: getattr(each, f.name) for f in fields(each)} for each in (actual, expected)))
    else:
        assert actual == expected


@pytest.mark.parametrize("default", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_without_a_default_device(name, default):
    expected = CALLS[name]()
    with torch.device(default):
        actual = CALLS[name]()
    assert_equal(actual, expected)


@pytest.mark.parametrize("default", DEVICES)
def test_report(tmp_path, default):
    file = write_lines(tmp_path / "a.jsonl", *RECORDS)
    expected = make_report([file], dp=2)
    with torch.device(default):
        assert make_report([file], dp=2) == expected


@pytest.mark.parametrize("default", DEVICES)
def test_integrations(default):
    pytest.importorskip("megatron.core")
    from packing_ops.contrib.unsloth import enable_packing
    from packing_ops.integrations.megatron import preprocess_packed_seqs

    def pad(examples):
        return {"input_ids": MASK, "attention_mask": MASK}

    def calls():
        ids, params = preprocess_packed_seqs(MASK, MASK, sub_seq_lengths=[[2, 1], [2]])
        examples = [{"input_ids": [1] * n} for n in (3, 2)]
        return [ids, params.cu_seqlens_q, enable_packing(pad)(examples)]

    expected = calls()
    with torch.device(default):
        actual = calls()
    assert_equal(actual, expected)
