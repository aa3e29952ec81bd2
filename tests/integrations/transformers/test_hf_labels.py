"""Labels of documents' first tokens: also of models that compute their loss themselves, and given by position."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from helpers.hf_models import tiny_model  # noqa: E402

import packing_ops as po  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops  # noqa: E402

LENGTHS = [5, 3, 7]
PACKED = po.PackedMetadata.from_lengths(LENGTHS)
IDS = torch.randint(3, 50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
TOLD = {
    "position_ids": {"position_ids": PACKED.position_ids[None]},
    "cu_seq_lens_q": PACKED.to_transformers(),
    "attention_mask": {"attention_mask": PACKED.seq_idx[None] + 1},
}
TEXT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


class OfItself(transformers.LlamaForCausalLM):
    """As older models and code from the Hub have it: the forward shifts labels itself."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **kwargs):
        output = super().forward(input_ids, attention_mask, position_ids, **kwargs)
        if labels is not None:
            shift_labels = labels[..., 1:].contiguous()
            logits = output.logits[..., :-1, :]
            output.loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())
        return output


def of_itself():
    torch.manual_seed(0)
    return OfItself(transformers.LlamaConfig(**TEXT))


def qwen2_audio():
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "num_mel_bins": 8}
    torch.manual_seed(0)
    config = transformers.Qwen2AudioConfig(
        audio_config={**audio, "max_source_positions": 20},
        text_config={**TEXT, "model_type": "qwen2"},
        audio_token_index=60,
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("make", [of_itself, qwen2_audio])
def test_a_forward_that_shifts_labels_itself_counts_no_first_token(make, kind):
    model = make()
    ones = torch.ones_like(IDS)
    losses = [
        model(input_ids=ids, labels=ids, attention_mask=ones[:, : ids.shape[1]]).loss * (ids.shape[1] - 1)
        for ids in IDS.split(LENGTHS, 1)
    ]
    apply_packing_ops(model)
    loss = model(**{"input_ids": IDS, "labels": IDS, "attention_mask": ones, **TOLD[kind]}).loss
    torch.testing.assert_close(loss, sum(losses) / (IDS.numel() - len(LENGTHS)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", TOLD)
def test_labels_given_by_position(kind):
    model = tiny_model("llama")
    apply_packing_ops(model)
    by_name = model(IDS, labels=IDS, **TOLD[kind]).loss
    given = TOLD[kind].get("attention_mask"), TOLD[kind].get("position_ids"), None, None, IDS
    of_call = TOLD[kind] if kind == "cu_seq_lens_q" else {}
    torch.testing.assert_close(model(IDS, *given, **of_call).loss, by_name)


def test_labels_given_by_position_beside_a_tree():
    tree = po.pack_prefix_tree(IDS[0], PACKED.cu_seqlens)
    given = po.PackedMetadata.from_prefix_tree(tree).to_transformers()
    ids, model = IDS[:, tree.token_of_slot], tiny_model("llama")
    apply_packing_ops(model)
    with pytest.raises(ValueError, match="labels: expected None beside segment_parents"):
        model(ids, None, tree.position_ids[None], None, None, ids, **given)
