"""Models whose packed documents would get wrong positions or no boundaries in silence: each is an error that says
why.
"""

import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")


import packing_ops as po  # noqa: E402
from packing_ops.integrations.transformers import apply_packing_ops, register, revert_registration  # noqa: E402

TOLD = po.PackedMetadata.from_lengths([5, 7, 4])
COUNTS = r"got several, and {} counts positions along the row and takes none; give each document a row of its own"
COUNTING = {"bart": "BartDecoder", "pegasus": "PegasusDecoder", "roformer": "RoFormerEncoder"}

NEED_POSITIONS = {
    "bert": "BertEmbeddings",
    "bert-generation": "BertGenerationEmbeddings",
    "camembert": "CamembertEmbeddings",
    "data2vec-text": "Data2VecTextEmbeddings",
    "electra": "ElectraEmbeddings",
    "ernie": "ErnieEmbeddings",
    "openai-gpt": "OpenAIGPTModel",
    "recurrent_gemma": "RecurrentGemmaRglru",
    "reformer": "ReformerEmbeddings",
    "roberta": "RobertaEmbeddings",
}


from causal_families import class_of, config_of  # noqa: E402
from helpers import hf_families  # noqa: E402


@pytest.fixture(autouse=True)
def registered():
    register()


def model_of(family):
    torch.manual_seed(0)
    return class_of(family)._from_config(config_of(family), attn_implementation="packing_ops").eval()


def ids():
    return torch.randint(3, 60, (1, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", COUNTING)
def test_positions_that_a_model_counts_are_refused_in_packed_rows(family):
    model, positions, refused = (
        model_of(family),
        {"position_ids": TOLD.position_ids[None]},
        COUNTS.format(COUNTING[family]),
    )
    with pytest.raises(ValueError, match="position_ids: .* " + refused):
        model(ids(), use_cache=False, **positions)
    with pytest.raises(ValueError, match="cu_seq_lens_q: .* " + refused):
        model(ids(), use_cache=False, **TOLD.to_transformers())
    numbers = torch.repeat_interleave(torch.arange(1, 4), torch.tensor([5, 7, 4]))[None]
    with pytest.raises(ValueError, match="attention_mask: .* " + refused):
        model(ids(), use_cache=False, attention_mask=numbers)
    assert model(ids(), use_cache=False, attention_mask=numbers.clamp(max=1)).logits.shape == (1, 16, 64)


def test_in_a_graph(fresh_compile):
    model = torch.compile(model_of("bart").model.decoder, backend="eager")
    with pytest.raises((ValueError, RuntimeError), match="BartDecoder counts positions"):
        model(ids(), use_cache=False, position_ids=TOLD.position_ids[None])


def alone(model, rows, lengths=(5, 7, 4)):
    """The logits of each document in a separate row, of a model that is given no positions."""
    documents = [document for row in rows for document in row[None].split(list(lengths), 1)]
    return torch.cat([model(document, use_cache=False).logits for document in documents], 1).view(*rows.shape, -1)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "names", [("cu_seq_lens_q", "cu_seq_lens_k"), ("cu_seq_lens_q",), ("cu_seq_lens_k",)], ids="-".join
)
@pytest.mark.parametrize("family", NEED_POSITIONS)
@torch.no_grad()
def test_the_positions_that_a_model_needs_are_made_of_cu_seqlens(family, names, batch):
    model, rows = model_of(family), torch.cat([ids(), ids().flip(1)])[:batch]
    told = {name: po.cu_seqlens_from_lengths(torch.tensor([5, 7, 4] * batch)) for name in names}
    torch.testing.assert_close(model(rows, use_cache=False, **told).logits, alone(model, rows), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected to end at the batch's"):
        model(rows[:, 1:], use_cache=False, **told)


READ_MASKS_THEMSELVES = ("openai-gpt", "reformer")


@pytest.mark.parametrize("family", NEED_POSITIONS)
@torch.no_grad()
def test_the_positions_that_a_model_needs_are_made_of_the_numbers_of_a_mask(family):
    model, numbers = model_of(family), torch.repeat_interleave(torch.arange(1, 4), torch.tensor([5, 7, 4]))[None]
    one_in_each_row = torch.tensor([[1], [2]]).expand(-1, 16)
    assert model(ids().expand(2, -1), use_cache=False, attention_mask=one_in_each_row).logits.shape == (2, 16, 64)
    if family in READ_MASKS_THEMSELVES:
        with pytest.raises(ValueError, match="attention_mask: expected one document in each row, got several"):
            model(ids(), use_cache=False, attention_mask=numbers)
        return
    found = model(ids(), use_cache=False, attention_mask=numbers).logits
    torch.testing.assert_close(found, alone(model, ids()), rtol=1e-4, atol=1e-5)
    # Padding on the left and on the right, and a row of one document next to it
    rows = torch.zeros(2, 20, dtype=torch.long)
    rows[0, 3:19], rows[1, :9] = ids(), ids()[0, :9]
    mask = (rows != 0).long()
    mask[0, 3:19] = numbers
    found = model(rows, use_cache=False, attention_mask=mask).logits
    torch.testing.assert_close(found[:1, 3:19], alone(model, ids()), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1:, :9], model(ids()[:, :9], use_cache=False).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "opt", "recurrent_gemma"])
@torch.no_grad()
def test_rows_of_one_document_get_the_positions_of_the_model(family):
    """Of padding on the left, which OPT leaves out of its positions, and BERT counts."""
    model, mask = model_of(family), torch.ones(2, 16, dtype=torch.long)
    mask[0, :3] = 0
    rows = ids().expand(2, -1).masked_fill(mask == 0, 0)
    stock = class_of(family)._from_config(config_of(family), attn_implementation="eager").eval()
    stock.load_state_dict(model.state_dict())
    found, wanted = (each(rows, use_cache=False, attention_mask=mask).logits for each in (model, stock))
    torch.testing.assert_close(found[mask == 1], wanted[mask == 1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_whisper_takes_positions_by_its_keywords_alone():
    model, numbers = model_of("whisper"), torch.arange(1, 17)[None] // 9 + 1
    positions = torch.cat([torch.arange(8), torch.arange(8)])[None]
    for told in ({}, {"position_ids": positions}):
        found = model(ids(), use_cache=False, attention_mask=numbers, **told).logits
        torch.testing.assert_close(found, alone(model, ids(), (8, 8)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "recurrent_gemma"])
@torch.no_grad()
def test_that_positions_are_missing_beside_numbers_is_known_in_a_graph(family, fresh_compile):
    model, numbers = torch.compile(model_of(family), backend="eager"), torch.arange(1, 17)[None] // 9 + 1
    with pytest.raises((ValueError, RuntimeError), match="got None beside several documents in attention_mask"):
        model(ids(), use_cache=False, attention_mask=numbers)


@torch.no_grad()
def test_that_positions_are_missing_beside_numbers_is_read_with_the_documents(monkeypatch):
    """On a GPU each reading is a synchronisation: the one that finds the documents is the only one."""
    model, reads = model_of("bert"), []
    for name in ("__bool__", "tolist", "item"):
        stock = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, stock=stock, name=name: reads.append(name) or stock(self))
    model(ids(), attention_mask=torch.ones(1, 16, dtype=torch.long))
    assert reads == ["tolist"]


@pytest.mark.parametrize("family", NEED_POSITIONS)
@torch.no_grad()
def test_with_positions_these_models_give_each_document_what_it_gets_alone(family):
    model = model_of(family)
    logits = model(ids(), use_cache=False, position_ids=TOLD.position_ids[None], **TOLD.to_transformers()).logits
    torch.testing.assert_close(logits, alone(model, ids()), rtol=1e-4, atol=1e-5)


# --- positions that start at padding_idx + 1 ---


@pytest.mark.parametrize("told", [{}, TOLD.to_transformers()], ids=["positions", "cu_seqlens too"])
@pytest.mark.parametrize("family", ["camembert", "data2vec-text", "roberta", "xlm-roberta-xl", "xmod"])
@torch.no_grad()
def test_positions_from_0_are_raised_to_where_the_model_starts(family, told):
    model, wanted = model_of(family), None
    first, wanted = model.config.pad_token_id + 1, alone(model, ids())
    assert first > 0
    for positions in (TOLD.position_ids[None], TOLD.position_ids[None] + first):
        found = model(ids(), use_cache=False, position_ids=positions, **told).logits
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_padding_raises_no_positions():
    """Its zeros, or RoBERTa's padding_idx, are next to documents."""
    model, rows = model_of("roberta"), torch.zeros(1, 11, dtype=torch.long)
    model.config.pad_token_id = 0
    wanted = model(ids()[:, :7], use_cache=False).logits
    for start in (0, 2, 4):
        slots, rows = slice(start, start + 7), torch.zeros(1, 11, dtype=torch.long)
        rows[:, slots] = ids()[:, :7]
        positions = torch.zeros_like(rows)
        positions[:, slots] = torch.arange(1, 8)
        mask = (rows != 0).long()
        found = model(rows, use_cache=False, attention_mask=mask, position_ids=positions).logits
        torch.testing.assert_close(found[:, slots], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["gpt2", "opt", "bert", "roberta", "biogpt", "gpt_bigcode"])
@torch.no_grad()
def test_rows_may_be_longer_than_the_table_of_positions(family):
    """Documents are not."""
    lengths = [60, 3, 62]
    model, row = model_of(family), torch.randint(3, 60, (1, 125), generator=torch.Generator().manual_seed(0))
    packed, wanted = po.PackedMetadata.from_lengths(lengths), alone(model, row, lengths)
    told = [packed.to_transformers(), {"position_ids": packed.position_ids[None]}]
    for given in (*told, {"attention_mask": packed.seq_idx[None] + 1}):
        torch.testing.assert_close(model(row, use_cache=False, **given).logits, wanted, rtol=1e-4, atol=1e-5)


# Encoders whose positions start at padding_idx + 1, or at 2; the second have a separate attention.
SERVED = ["camembert", "data2vec-text", "jina_embeddings_v3", "roberta", "roberta-prelayernorm", "xlm-roberta"]
OF_THEIR_OWN = ["ibert", "mpnet", "mra", "nystromformer", "yoso"]


@pytest.mark.parametrize("family", [*SERVED, *OF_THEIR_OWN])
@torch.no_grad()
def test_encoders_get_the_positions_of_each_document_or_refuse_several(family):
    config_class, cls = hf_families.mappings()["MASKED_LM"][family]
    model, _ = hf_families.made(family, config_class, cls)
    wanted = torch.cat([model(document).logits for document in ids().split([5, 7, 4], 1)], 1)
    with warnings.catch_warnings(action="ignore"):  # what keeps its attention says so
        apply_packing_ops(model, rope=False)
    positions, told = {"position_ids": TOLD.position_ids[None]}, TOLD.to_transformers()
    for given in (positions, told, {**positions, **told}, {"attention_mask": TOLD.seq_idx[None] + 1}):
        if family in OF_THEIR_OWN:
            with pytest.raises(ValueError, match="keeps its attention"):
                model(ids(), **given)
        else:
            torch.testing.assert_close(model(ids(), **given).logits, wanted, rtol=1e-4, atol=1e-4)


def test_patches_of_bytes_are_refused_in_packed_rows():
    model = model_of("blt")
    with pytest.raises(ValueError, match=r"position_ids: .* BltModel mixes tokens beside its attention; give each"):
        model(ids(), use_cache=False, position_ids=TOLD.position_ids[None])
    assert model(ids(), use_cache=False).logits.shape == (1, 16, 64)


def test_a_model_with_a_table_of_attention_classes_is_refused_before_it_is_made():
    with pytest.raises(
        ValueError, match=r"attn_implementation: expected one of eager, .*sdpa for FalconForC.* got 'packing_ops'"
    ):
        model_of("falcon")
    revert_registration()
    with pytest.raises((KeyError, ValueError), match="packing_ops"):  # transformers' error
        model_of("falcon")


def test_a_mask_that_positions_have_made_is_taken_beside_cu_seqlens():
    """Chunks of Llama 4, which are no window: attention gets transformers' mask, of the documents that cu_seqlens
    tell.
    """
    model = model_of("llama4_text")
    positions = {"position_ids": TOLD.position_ids[None]}
    wanted = model(ids(), use_cache=False, **positions).logits
    assert torch.equal(model(ids(), use_cache=False, **positions, **TOLD.to_transformers()).logits, wanted)
    other = {"position_ids": po.PackedMetadata.from_lengths([6, 6, 4]).position_ids[None]}
    with pytest.raises(ValueError, match=r"position_ids"):
        model(ids(), use_cache=False, **other, **TOLD.to_transformers())
    whole = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="cu_seq_lens_q: expected a row of its own documents, got a mask"):
        model(ids(), use_cache=False, attention_mask=whole, **positions, **TOLD.to_transformers())
