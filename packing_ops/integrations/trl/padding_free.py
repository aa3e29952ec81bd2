"""TRL's trainers without padding: their models run each padded batch as one packed row.

TRL's collators, losses and metrics stay as they are: they see padded rows of results. Of TRL's modules only the fused
LM head is replaced, within invariant().
"""

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import packing_ops as po
from packing_ops.integrations._patching import PACKS_ROWS, put_around, take_out_function
from packing_ops.integrations.trl import fused_logps

_TRAINERS = (
    "DPOTrainer",
    "KTOTrainer",
    "RewardTrainer",
    "GRPOTrainer",
    "RLOOTrainer",
    "DistillationTrainer",
    "GKDTrainer",
)
# These call the model under the LM head themselves.
_CALL_BACKBONES = ("DistillationTrainer",)
_MODELS = ("model", "ref_model", "teacher_model")


def enable_padding_free(trainer: Any) -> tuple[str, ...]:
    """Run the models of a DPO, KTO, reward, GRPO, RLOO, distillation or GKD trainer without padding.

    TRL 1.16 has no padding-free form of these trainers (DPOConfig's ``padding_free`` falls back to padding). After this
    call a padded batch of the trainer reaches its model, ref_model and teacher_model as one packed row with cu_seqlens.
    Results of tokens return to their places of the padded batch, so TRL's losses and metrics stay as they are:
    log-probs and entropies of GRPO and RLOO, with their temperature, are those of TRL's fused LM head, of the tokens
    that are there. Within invariant() they have the bits of token_logps, which a rollout in the mode has too. A call
    with a KV cache, as generate makes it, is left as it is, and so is a row that is packed already (cu_seq_lens_q,
    seq_idx, packed_seq_lengths). Without ``use_cache=True`` no cache is returned, whatever the model's config says.
    Position ids are made from the mask: a row's tokens are at 0, 1, ..., wherever its padding is. position_ids next
    to the mask must grow from token to token, as those that trainers make do; their values are not used.

    A reward model reads its score at each document's last token (last_token_indices). The padded trainer reads it at
    the last token that is not the pad token, which differs where documents end with the pad token.

    Args:
        trainer: after it is made, before train(). Its models need packing_ops' attention.

    A second call changes nothing; revert_padding_free reverts it, and revert_packing_ops for one model. A model that is
    given another attention afterwards runs with padding. Each forward of a model waits for the GPU once.
    ``info(model)`` shows it.

    Returns:
        The trainer's models that run without padding from now on: "model", "ref_model", "teacher_model".

    Example:
        >>> enable_padding_free(trainer)  # needs a DPOTrainer # doctest: +SKIP
        ('model', 'ref_model')

    Raises:
        TypeError: another trainer.
        ValueError: a model with another attention; a dataset with images; an adapter of PEFT that looks at a whole row
            (prompt tuning, activated LoRA, Lily, Shadow). In training: images in a batch; a row of only padding that is
            to be scored; a batch without tokens; an attention_mask with document numbers, or beside position_ids that
            restart in a row; a model that scores the first token of a row (BERT).
    """
    if not any(cls.__name__ in _TRAINERS for cls in type(trainer).__mro__):
        got = type(trainer).__name__
        raise TypeError(f"trainer: expected {', '.join(_TRAINERS[:-1])} or {_TRAINERS[-1]} of TRL, got {got}")
    if getattr(trainer, "_is_vision_dataset", False):
        raise ValueError(f"trainer: expected text alone, got a dataset with images; {_IMAGES}")
    for model in [_module_called(_checked_host(model), trainer) for model in _models_of(trainer)]:
        for head in fused_logps.patches():
            head.apply(model)
        vars(model)[PACKS_ROWS] = _packs
        if not _is_under_accelerate(model):
            put_around(model, "forward", _packed)
            functools.wraps(type(model).forward)(model.forward)  # generate and Trainer read its parameters
    return tuple(name for name in _MODELS if getattr(trainer, name, None) is not None)


def revert_padding_free(trainer: Any) -> None:
    """Revert enable_padding_free: the trainer's models are called with padding again. A second call does nothing.

    Example:
        >>> revert_padding_free(trainer)  # needs a DPOTrainer # doctest: +SKIP
    """
    from packing_ops.integrations.transformers.apply import hosts

    for model in _models_of(trainer):
        called = _module_called(hosts(model)[0], trainer)
        vars(called).pop(PACKS_ROWS, None)
        if not _is_under_accelerate(called):  # else ours stays inside, and only passes calls on
            take_out_function(called, _packed)
        for head in fused_logps.patches():
            head.revert(called)


_IMAGES = (
    "images are rows of their own size, which TRL's batches do not tell apart without padding: train on batches of "
    "PaddingFreeCollator with position_ids [4, batch, seqlen] or cu_seq_lens_q (docs/transformers-models.md, Images), "
    "or leave this trainer padded"
)


def _models_of(trainer: Any) -> list[Any]:
    return [model for name in _MODELS if (model := getattr(trainer, name, None)) is not None]


def _module_called(host: Any, trainer: Any) -> Any:
    """Return the module of a model of transformers that the trainer calls: itself, or the one under its LM head."""
    return host.base_model if any(cls.__name__ in _CALL_BACKBONES for cls in type(trainer).__mro__) else host


def _checked_host(model: Any) -> Any:
    """Return the model of transformers in a trainer's model. Raise ValueError if it cannot run without padding."""
    from packing_ops.integrations._additions import why_one_row
    from packing_ops.integrations.transformers.apply import NAMES, hosts

    found = hosts(model)
    if not found:
        raise ValueError(f"trainer: expected a model of transformers, got {type(model).__name__}")
    for config in getattr(model, "peft_config", {}).values():
        if why := why_one_row(config):
            raise ValueError(f"trainer: expected adapters that take each token by itself, got one of rows: {why}")
    attention = found[0].config._attn_implementation
    if attention not in NAMES:
        raise ValueError(
            f"trainer: expected models with attn_implementation='packing_ops', got {attention!r} of "
            f"{type(found[0]).__name__}; call apply_packing_ops(trainer.model), and for its ref_model or "
            "teacher_model, first"
        )
    return found[0]


def _is_under_accelerate(model: Any) -> bool:
    """Return whether accelerate has put the forward of its mixed precision around _packed."""
    return getattr(model.__dict__.get("_original_forward"), "func", None) is _packed


def _packs(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether _packed makes one row of this call's batch."""
    mask, input_ids = kwargs.get("attention_mask"), kwargs.get("input_ids")
    return not (
        args
        or kwargs.get("use_cache")
        or any(kwargs.get(name) is not None for name in _LEAVE)
        or input_ids is None
        or not isinstance(mask, torch.Tensor)
        or mask.shape != input_ids.shape
    )


# Rows of a call with one of these stay: a cache (transformers 5.24: cache) holds padded ones; the others say where
# documents are in rows that are packed already.
_LEAVE = (
    "past_key_values",
    "cache",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "segment_parents",
    "seq_idx",
    "packed_seq_lengths",
)


def _packed(model: Any, before: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a model; padded rows of text go through it as one row, as long as its attention is ours."""
    from packing_ops.integrations.transformers.attention import CALLS, NAMES
    from packing_ops.integrations.transformers.call import check_form
    from packing_ops.integrations.transformers.documents import ROW_EACH, one_each, refuse_where, several_in

    stock = before or functools.partial(type(model).forward, model)
    if PACKS_ROWS not in vars(model) or model.config._attn_implementation not in NAMES or not _packs(args, kwargs):
        return stock(*args, **kwargs)
    mask, input_ids, positions = kwargs["attention_mask"], kwargs["input_ids"], kwargs.get("position_ids")
    batch, seqlen = input_ids.shape
    check_form(positions)
    for name, value in kwargs.items():
        others = ((1, seqlen),) if name == "position_ids" else ()
        if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape not in ((batch, seqlen), *others):
            raise ValueError(
                f"{name}: expected text of shape {[batch, seqlen]} alone, got {list(value.shape)}; {_IMAGES}"
            )
    refuse_where(batch * seqlen == 0, f"input_ids: expected at least one token, got {[batch, seqlen]}")
    scored = hasattr(model, "score")
    refuse_where(
        scored and kwargs.get("labels") is not None,
        "labels: expected None, got labels of whole documents, whose loss TRL's trainer computes",
    )

    # The layout: the only wait for the GPU. What is refused arrives before it, in the order of the stream.
    empty = (mask == 0).all(1).to("cpu", non_blocking=True) if scored else None
    found = (mask > 1).any(), several_in(positions if positions is None else positions.to(mask.device), mask)
    numbers, restarts = (each if each is None else each.to("cpu", non_blocking=True) for each in found)
    metadata = po.PackedMetadata.from_attention_mask(mask)
    refuse_where(numbers, f"attention_mask: expected 0 and 1, got numbers of documents; {ROW_EACH}")
    refuse_where(
        restarts,
        one_each(
            "position_ids",
            "enable_padding_free makes one of each row beside an attention_mask",
            f"leave attention_mask out where rows are packed already, or {ROW_EACH}",
        ),
    )
    if empty is not None and empty.any():
        raise ValueError(
            "attention_mask: expected a token in each row, whose last one is scored, got rows "
            f"{empty.nonzero().flatten().tolist()} of padding alone"
        )
    if metadata.total == 0:
        # Of only padding no row is left. What the padded model makes of it counts nowhere, and other ranks may wait for
        # its gradients.
        return stock(*args, **kwargs)

    # The packed row, in place of the padded ones.
    rows = {name: value for name, value in kwargs.items() if getattr(value, "shape", None) == (batch, seqlen)}
    columns = {name: metadata.unpad(value) for name, value in rows.items() if name not in _MADE_HERE}
    if "labels" in columns:
        columns["labels"] = po.mask_boundary_labels(columns["labels"], metadata)
    columns["position_ids"] = metadata.position_ids
    # config.use_cache may be True. A later call would take this row's cache for that of the padded rows.
    options = {name: value for name, value in kwargs.items() if name not in {*rows, *_OF_ROWS}} | {"use_cache": False}
    options |= {name: value[None] for name, value in columns.items()} | metadata.to_transformers()

    # The call. Of a reward model the scores of all tokens: it returns one for the whole row. Other threads may run the
    # same head.
    scores = threading.local()
    hook = model.score.register_forward_hook(lambda *call: setattr(scores, "found", call[-1])) if scored else None
    # Masks and layers find the documents in a call of the model. One of a reward model would refuse several documents.
    run = stock if scored else functools.partial(CALLS.make(lambda _, **row: stock(**row)), model)
    with hook or contextlib.nullcontext():
        outputs = run(**options)

    # Its results, in their places of the padded batch.
    for name, value in list(outputs.items()):
        layers = [_padded(each, metadata) for each in (value if isinstance(value, tuple) else (value,))]
        outputs[name] = tuple(layers) if isinstance(value, tuple) else layers[0]
    keep = kwargs.get("logits_to_keep", 0)
    if "logits" in outputs and scored:
        outputs["logits"] = scores.found[0].index_select(0, metadata.cu_seqlens[1:].long() - 1)
    elif "logits" in outputs and not (isinstance(keep, int) and keep == 0):
        outputs["logits"] = outputs["logits"][:, slice(-keep, None) if isinstance(keep, int) else keep]
    return outputs.to_tuple() if kwargs.get("return_dict") is False else outputs


_MADE_HERE = ("attention_mask", "position_ids")
# What picks from the results of padded rows.
_OF_ROWS = ("logits_to_keep", "return_dict")


def _padded(value: Any, metadata: po.PackedMetadata) -> Any:
    """Pad: ``[1, total, ...]`` -> ``[batch, seqlen, ...]``; ``[1, total - 1, ...]``, of the token after each, ->
    ``[batch, seqlen - 1, ...]``. Return anything else as it is.
    """
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[0] != 1:
        return value
    missing = metadata.total - value.shape[1]
    if missing == 1:
        return metadata.pad(F.pad(value[0], (0, 0) * (value.dim() - 2) + (1, 0)))[:, 1:]
    return value if missing else metadata.pad(value[0])
