"""Models that take one document in each row: encoder-decoders, and heads that have one result or one target for a
row.
"""

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")


import packing_ops as po  # noqa: E402
from packing_ops._runtime import arguments  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops, register  # noqa: E402

LENGTHS = [5, 3, 7]
PACKED = po.PackedMetadata.from_lengths(LENGTHS)
NUMBERS = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(LENGTHS))[None]
FORMS = {
    "position_ids": {"position_ids": PACKED.position_ids[None]},
    "cu_seq_lens_q": PACKED.to_transformers(),
    "both": {"position_ids": PACKED.position_ids[None], **PACKED.to_transformers()},
    "attention_mask": {"attention_mask": NUMBERS},
}
IDS = torch.randint(3, 50, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
pytestmark = pytest.mark.filterwarnings("ignore:apply_packing_ops")

# --- encoder-decoders ---

_T5 = {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "pad_token_id": 0}
_T5 |= {"decoder_start_token_id": 0, "dropout_rate": 0.0}
_BART = {"vocab_size": 50, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
_BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 64}
_GEMMA = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
_GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER_DECODERS = {
    "T5ForConditionalGeneration": ("T5Config", _T5),
    "MT5ForConditionalGeneration": ("MT5Config", _T5),
    "LongT5ForConditionalGeneration": ("LongT5Config", _T5),
    "BartForConditionalGeneration": ("BartConfig", _BART),
    "T5GemmaForConditionalGeneration": ("T5GemmaConfig", {"encoder": _GEMMA, "decoder": _GEMMA}),
}


def applied(name, config, **sizes):
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()
    apply_packing_ops(model)
    return model


def encoder_decoder(name):
    config, sizes = ENCODER_DECODERS[name]
    if config == "T5GemmaConfig":
        sizes = {side: transformers.T5GemmaModuleConfig(**of_side) for side, of_side in sizes.items()}
    return applied(name, config, **sizes)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ENCODER_DECODERS)
@torch.no_grad()
def test_several_documents_of_the_encoder_are_refused(name, form):
    model, calls = encoder_decoder(name), []
    model.get_encoder().register_forward_pre_hook(lambda *_: calls.append(1))
    refused = (
        rf"{'position_ids' if form == 'both' else form}: expected one document in each row, got several, .* {name}"
    )
    with pytest.raises(ValueError, match=refused):
        model(IDS, decoder_input_ids=IDS[:, :3], **FORMS[form])
    assert calls == []  # before anything is computed


@pytest.mark.parametrize("name", ENCODER_DECODERS)
@torch.no_grad()
def test_several_documents_of_the_decoder_are_refused(name):
    model = encoder_decoder(name)
    given = {"input_ids": IDS, "decoder_input_ids": IDS[:, :3]}
    with pytest.raises(ValueError, match="decoder_position_ids: expected one document in each row, got several"):
        model(**given, decoder_position_ids=torch.tensor([[0, 1, 0]]))
    with pytest.raises(ValueError, match="decoder_attention_mask: expected one document in each row, got several"):
        model(**given, decoder_attention_mask=torch.tensor([[1, 1, 2]]))
    named = {**given, "decoder_attention_mask": torch.tensor([[1, 1, 2]])}
    in_order = [named.get(name) for name in [*inspect.signature(model.forward).parameters][:5]]
    with pytest.raises(ValueError, match="decoder_attention_mask: expected one document in each row, got several"):
        model(*in_order)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
@torch.no_grad()
def test_rows_of_one_document_stay(name):
    model, rows = encoder_decoder(name), torch.cat([IDS, IDS.flip(1)])
    mask = torch.ones_like(rows)
    mask[0, 9:] = 0
    decoder = {"decoder_input_ids": rows[:, :4], "decoder_attention_mask": mask[:, 8:12]}
    logits = model(rows, mask, **decoder).logits
    alone = model(rows[:1, :9], decoder_input_ids=rows[:1, :1]).logits
    torch.testing.assert_close(logits[:1, :1], alone, rtol=1e-4, atol=1e-4)


def test_a_decoder_beside_another_sequence():
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    model = applied("BertLMHeadModel", "BertConfig", **sizes, is_decoder=True, add_cross_attention=True)
    model(IDS, position_ids=FORMS["position_ids"]["position_ids"])
    with pytest.raises(
        ValueError, match=r"position_ids: expected one document in each row, .* of BertLMHeadModel attends"
    ):
        model(IDS, **FORMS["position_ids"], encoder_hidden_states=torch.zeros(1, 4, 32))


# --- heads ---

_LLAMA = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
_LLAMA |= {"pad_token_id": 0, "num_labels": 3}
_GEMMA3 = {**_LLAMA, "num_key_value_heads": 2, "head_dim": 8}
_GPT2 = {"vocab_size": 50, "n_embd": 32, "n_layer": 1, "n_head": 4, "pad_token_id": 0}
_MODERN = {**_LLAMA, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
HEADS = {
    "LlamaForSequenceClassification": ("LlamaConfig", _LLAMA),
    "Gemma3TextForSequenceClassification": ("Gemma3TextConfig", _GEMMA3),
    "GPT2ForSequenceClassification": ("GPT2Config", _GPT2),
    "BertForSequenceClassification": ("BertConfig", _LLAMA),
    "BertForNextSentencePrediction": ("BertConfig", _LLAMA),
    "ModernBertForSequenceClassification": ("ModernBertConfig", _MODERN),
}


_CLIP = {**_LLAMA, "projection_dim": 16, "bos_token_id": 1, "eos_token_id": 2}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 8, "patch_size": 4}
OF_ROWS = {
    "CLIPTextModelWithProjection": ("CLIPTextConfig", _CLIP, "has one embedding for each row"),
    "ClapTextModelWithProjection": ("ClapTextConfig", _CLIP, "has one embedding for each row"),
    "CLIPModel": ("CLIPConfig", {"text_config": _CLIP, "vision_config": _VISION}, "has one embedding for each row"),
    "SplinterForQuestionAnswering": ("SplinterConfig", _LLAMA, "scores spans by one question in each row"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OF_ROWS)
@torch.no_grad()
def test_a_head_that_looks_at_the_whole_row_is_refused(name, form):
    config, sizes, why = OF_ROWS[name]
    model, more = applied(name, config, **sizes), {}
    if name == "CLIPModel":
        more = {"pixel_values": torch.zeros(1, 3, 8, 8)}
    with pytest.raises(ValueError, match=rf"expected one document in each row, .*{name} {why}|, got None"):
        model(input_ids=IDS, **more, **FORMS[form])
    model(input_ids=IDS, attention_mask=torch.ones_like(IDS), **more)


def mllama():
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": 8, "patch_size": 4, "max_num_tiles": 1, "vision_output_dim": 32}
    vision |= {"intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
    text = {**_LLAMA, "num_hidden_layers": 3, "num_key_value_heads": 2, "cross_attention_layers": [1]}
    model = applied("MllamaForConditionalGeneration", "MllamaConfig", vision_config=vision, text_config=text)
    for name, parameter in model.named_parameters():
        if "gate" in name:
            parameter.data.fill_(0.7)
    return model


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_images_that_every_document_of_a_row_would_see(form):
    """15 tokens, and 3 images of 5 patches: also a sequence as long as the row is another one."""
    model, images = mllama(), torch.randn(1, 3, 1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    sizes = {"aspect_ratio_ids": torch.ones(1, 3).long(), "aspect_ratio_mask": torch.ones(1, 3, 1).long()}
    given = {"pixel_values": images, "use_cache": False, **sizes}
    with pytest.raises(
        ValueError, match=r"expected one document .* MllamaTextCrossAttention attends to another sequence"
    ):
        model(IDS, **given, **FORMS[form])
    model(IDS, **given)
    owner = torch.nn.functional.one_hot(NUMBERS - 1)[..., None]  # each document its image
    packed = model(IDS, cross_attention_mask=owner, **given, **FORMS[form]).logits
    alone = [
        model(ids, pixel_values=images[:, [i]], use_cache=False, cross_attention_mask=torch.ones(1, ids.shape[1], 1, 1).long(),
              **{name: size[:, [i]] for name, size in sizes.items()}).logits
        for i, ids in enumerate(IDS.split(LENGTHS, 1))
    ]  # fmt: skip
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_a_head_that_scores_one_token_of_a_row_is_refused(name, form):
    config, sizes = HEADS[name]
    model = applied(name, config, **sizes)
    with pytest.raises(
        ValueError,
        match=rf"expected .*{name} scores one token of each row; .* last_token_indices|, got None",
    ):
        model(IDS, use_cache=False, **FORMS[form])
    rows, mask = torch.cat([IDS, IDS.flip(1)]), torch.ones(2, IDS.shape[1], dtype=torch.long)
    rows[0, 9:] = mask[0, 9:] = 0
    torch.testing.assert_close(
        model(rows, attention_mask=mask).logits[:1], model(rows[:1, :9]).logits, rtol=1e-4, atol=1e-5
    )


@torch.no_grad()
def test_as_many_documents_as_rows():
    """They may start inside of a row all the same."""
    model = applied("LlamaForSequenceClassification", "LlamaConfig", **_LLAMA)
    rows, length = IDS.expand(2, -1), IDS.shape[1]
    model(rows, use_cache=False, **po.PackedMetadata.from_lengths([length, length]).to_transformers())
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected one document in each row"):
        model(rows, use_cache=False, **po.PackedMetadata.from_lengths([length - 1, length + 1]).to_transformers())


@torch.no_grad()
def test_scores_of_packed_documents_by_their_last_tokens():
    """What the error advises."""
    model = applied("LlamaForSequenceClassification", "LlamaConfig", **_LLAMA)
    hidden = model.model(IDS, **FORMS["both"]).last_hidden_state[0]
    scores = model.score(hidden[po.last_token_indices(PACKED.cu_seqlens)])
    alone = torch.cat([model(each).logits for each in IDS.split(LENGTHS, 1)])
    torch.testing.assert_close(scores, alone, rtol=1e-4, atol=1e-5)


class Overridden(transformers.LlamaForSequenceClassification):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OfEachDocument(transformers.LlamaForSequenceClassification):
    def forward(self, input_ids, cu_seq_lens_q, **kwargs):
        hidden = self.model(input_ids, cu_seq_lens_q=cu_seq_lens_q, **kwargs).last_hidden_state[0]
        return self.score(hidden[po.last_token_indices(cu_seq_lens_q)])


@torch.no_grad()
def test_subclasses():
    register()
    config = transformers.LlamaConfig(**_LLAMA, attn_implementation="packing_ops")
    with pytest.raises(ValueError, match="Overridden scores one token of each row"):
        Overridden(config)(IDS, **FORMS["both"])
    assert OfEachDocument(config)(IDS, **FORMS["both"]).shape == (3, 3)


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("BertForQuestionAnswering", ["start_positions", "end_positions"]),
        ("BertForPreTraining", ["next_sentence_label"]),
    ],
)
@torch.no_grad()
def test_targets_of_a_row_are_refused(name, targets):
    model = applied(name, "BertConfig", **{**_LLAMA, "num_labels": 2})
    model(IDS, **FORMS["position_ids"])  # a result for each token
    more = {"labels": IDS} if name == "BertForPreTraining" else {}
    with pytest.raises(ValueError, match=rf"position_ids: .* {name} takes one {targets[0]} for each row; give"):
        model(IDS, **FORMS["position_ids"], **more, **dict.fromkeys(targets, torch.zeros(1, dtype=torch.long)))
    assert model(IDS, **more, **dict.fromkeys(targets, torch.zeros(1, dtype=torch.long))).loss > 0


@pytest.mark.parametrize("form", ["position_ids", "attention_mask"])
@torch.no_grad()
def test_choices_of_several_documents_are_refused(form):
    """Rows [batch, choices, seqlen], which the model inside gets flat."""
    model, choices = applied("BertForMultipleChoice", "BertConfig", **_LLAMA), IDS[None].expand(1, 2, -1)
    with pytest.raises(ValueError, match=f"{form}: expected one document in each choice of BertForMultipleChoice"):
        model(choices, **{form: FORMS[form][form][None].expand(1, 2, -1)})
    mask = torch.ones_like(choices)
    mask[0, 1, 9:] = 0
    alone = torch.stack([model(IDS[None, :, :length]).logits for length in (15, 9)], 1).flatten()
    torch.testing.assert_close(model(choices, attention_mask=mask).logits.flatten(), alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_in_a_graph(fresh_compile):
    model = applied("LlamaForSequenceClassification", "LlamaConfig", **_LLAMA)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises((ValueError, RuntimeError), match="scores one token of each row"):
        compiled(IDS, use_cache=False, **FORMS["position_ids"])
    assert compiled(IDS, use_cache=False, position_ids=torch.arange(15)[None]).logits.shape == (1, 3)


# --- a result of one token of the row beside those of all tokens ---

_BERT = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
POOLED = {  # BERT's first token, SigLIP's last one, the largest id of CLIP's
    "BertModel": ("BertConfig", _BERT),
    "SiglipTextModel": ("SiglipTextConfig", {**_BERT, "projection_size": 32}),
    "CLIPTextModel": ("CLIPTextConfig", {**_BERT, "eos_token_id": 2}),
}


# BERT and SigLIP count positions by themselves, and refuse the others.
@pytest.mark.parametrize("form", ["position_ids", "both"])
@pytest.mark.parametrize("name", POOLED)
@torch.no_grad()
def test_pooled_rows_of_several_documents_are_none(name, form, caplog):
    arguments.warned.clear()
    transformers.utils.logging.enable_propagation()
    config, sizes = POOLED[name]
    model = applied(name, config, **sizes)
    alone = [model(each) for each in IDS.split(LENGTHS, 1)]
    assert all(each.pooler_output.shape == (1, 32) for each in alone)
    rows, mask = torch.cat([IDS, IDS.flip(1)]), torch.ones(2, IDS.shape[1], dtype=torch.long)
    mask[0, 9:] = 0
    assert model(rows, attention_mask=mask).pooler_output.shape == (2, 32)
    packed = model(IDS, **FORMS[form])
    assert packed.pooler_output is packed["pooler_output"] is None
    assert f"pooler_output of {name} is None" in caplog.text
    wanted = torch.cat([each.last_hidden_state for each in alone], 1)
    torch.testing.assert_close(packed.last_hidden_state, wanted, rtol=1e-4, atol=1e-5)
