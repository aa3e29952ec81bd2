"""What the Hugging Face examples share: a model, documents in its tokens, and Trainer batches of them."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, TrainingArguments

import packing_ops as po
from packing_ops.integrations.transformers import apply_packing_ops

from .text_data import BOS, EOS, IGNORE, VOCAB_SIZE, Document, load_documents

CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n{% endfor %}"


def one_pass(arguments, folder: str, **more) -> TrainingArguments:
    """Settings of a Trainer whose examples are groups of documents: one pass in order, nothing saved or reported."""
    return TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=1,  # one group: a padded batch or a packed row
        num_train_epochs=1,
        learning_rate=arguments.learning_rate,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=arguments.device == "cpu",
        dataloader_pin_memory=arguments.device != "cpu",
        seed=arguments.seed,
        **more,
    )


def new_model(path: Path | None, max_positions: int, seed: int):
    """The model at ``path``, or a tiny Llama of two layers over bytes with the weights of ``seed``."""
    # use_cache: with one, sdpa does not look for documents in position_ids.
    if path is not None:  # sdpa too, where transformers has it for the model
        return AutoModelForCausalLM.from_pretrained(path, use_cache=False)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_positions,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        use_cache=False,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def swap(model) -> None:
    """packing_ops attention and RoPE in the model; attention alone, after a warning, where its RoPE is not known."""
    apply_packing_ops(model)


def documents_for(path: Path | None, data: Path | None, limit: int, max_length: int) -> tuple[list[Document], int]:
    """Documents in bytes, or in the tokens of the model at ``path``; and how many were cut."""
    if path is None:
        return load_documents(data, limit, max_length)
    tokenizer = AutoTokenizer.from_pretrained(path)

    def encode_pieces(pieces):
        ids, labels = [], []
        if tokenizer.bos_token_id is not None:
            ids, labels = [tokenizer.bos_token_id], [IGNORE]
        for text, is_target in [*pieces, (tokenizer.eos_token or "", True)]:
            tokens = tokenizer.encode(text, add_special_tokens=False)
            ids += tokens
            labels += tokens if is_target else [IGNORE] * len(tokens)
        return Document(torch.tensor(ids), torch.tensor(labels))

    return load_documents(data, limit, max_length, encode_pieces)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """The bytes of text_data as a Hugging Face tokenizer with a chat template; nothing is downloaded."""
    ids = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<s>": BOS, "</s>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **special)


def padded_inputs(documents: list[Document]) -> dict:
    """``[batch, seqlen]``, padded on the right to the longest document."""
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([d.input_ids for d in documents], batch_first=True),
        "labels": pad([d.labels for d in documents], batch_first=True, padding_value=IGNORE),
        "attention_mask": pad([torch.ones_like(d.input_ids) for d in documents], batch_first=True),
    }


def packed_inputs(documents: list[Document]) -> dict:
    """``[1, total]``: the documents one after another; the model is told where they end."""
    metadata = po.PackedMetadata.from_lengths([len(d) for d in documents])
    labels = po.mask_boundary_labels(torch.cat([d.labels for d in documents]), metadata.cu_seqlens)
    return {
        "input_ids": torch.cat([d.input_ids for d in documents])[None],
        "labels": labels[None],
        "position_ids": metadata.position_ids[None],
        **metadata.to_transformers(),
    }
