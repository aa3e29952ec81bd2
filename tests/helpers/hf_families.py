"""Small models of every causal language model and encoder that the installed transformers has, made by one recipe."""

import dataclasses
import functools
import importlib
import inspect
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers.models.auto import modeling_auto

from packing_ops.integrations.transformers import (
    apply,
    apply_packing_ops,
    fused_loss,
    rms_norm,
    rope,
)
from packing_ops.integrations.transformers.states import linear_attention, stateful

SIZES = {  # by the names that configs have for them
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "intermediate_size", "intermediate_size_mlp", "ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_key_value_heads", "index_n_heads"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim", "mamba_d_state"), 8
    ),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("index_head_dim", "global_head_dim", "embedding_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(
        ("n_group", "topk_group", "first_k_dense_replace", "moe_num_shared_experts", "n_shared_experts"), 1
    ),
    **dict.fromkeys(("num_shared_experts", "mamba_n_groups"), 1),
    **dict.fromkeys(("vocab_size", "max_position_embeddings", "index_topk", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    **{"sliding_window": 4, "moe_layer_start_index": 0, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8},
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), 8),  # rows are padded to whole chunks
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "mamba_n_heads": 4, "mamba_d_head": 16},
}
OF_PARTS = {  # vision and audio
    **dict.fromkeys(("num_heads", "num_attention_heads"), 4),
    **dict.fromkeys(("depth", "num_layers", "encoder_layers", "decoder_layers", "num_global_layers"), 2),
    **{"num_codebooks": 1, "adapter_out_dim": 32},
}
_FOUR = {"num_hidden_layers": 4}  # one of them with attention
_DBRX = {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}, "ffn_config": {"ffn_hidden_size": 32}}
_SPEECH = {"decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_ffn_dim": 32, "encoder_ffn_dim": 32}
_QWEN4 = {  # attention to chosen blocks, and words of three tokens
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 64,
    "heads_per_ngram": 2,
}
_INKLING2 = {"unpadded_vocab_size": 64, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2}
MORE = {  # what the recipe does not guess
    **dict.fromkeys(("bailing_hybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text"), _FOUR),
    **dict.fromkeys(("plbart", "whisper"), _SPEECH),
    "inkling2_loop_text": {
        **_INKLING2,
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
    },
    "inkling2_text": _INKLING2,
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "blt_local_encoder": {"hidden_size_global": 32},
    "blt_local_decoder": {"hidden_size_global": 32},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    },
    "dbrx": _DBRX,
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense", "dense"], "adapter_in_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    "esmc": {"num_key_value_heads": 4},
    "luke": {"entity_vocab_size": 64},
    "squeezebert": {"embedding_size": 32},
    "esm": {"position_embedding_type": "rotary"},
    "lfm3": _FOUR,
    "llama4_text": {"attention_chunk_size": 6, "floor_scale": 4, "no_rope_layers": [1, 0]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    **{key: {"layer_types": ["linear_attention", "full_attention"]} for key in ("bailing_hybrid", "kimi_linear")},
    "longcat_flash": {"num_layers": 2, "ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "phi4_multimodal_audio": {"num_blocks": 1, "nemo_conv_channels": 32, "ext_pw_out_channel": 32},
    "qwen4_exp_text": {**_FOUR, **_QWEN4},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16, "shape_vocab_size": 64},
    "flaubert": {"emb_dim": 32},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "xlm": {"emb_dim": 32},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 0, "num_key_value_heads": 4},
    "zamba2": {
        **{"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "hybrid_layer_ids": [1]},
        **{"n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 1, "num_key_value_heads": 4},
        **{"attention_hidden_size": 64, "attention_head_dim": 16},
    },
    "zaya": {"num_experts_per_tok": 1},
}
KINDS = {"CAUSAL_LM": "Causal language models", "MASKED_LM": "Encoders"}
LARGE = 1_500_000  # parameters; beyond it a model is made without memory


def mappings() -> dict[str, dict]:
    """{kind: {model_type: (config class, model class)}}."""
    found = {}
    for kind in KINDS:
        for config, model in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING").items():
            model = model[0] if isinstance(model, (tuple, list)) else model
            found.setdefault(kind, {}).setdefault(config.model_type, (config, model))
    return found


def fields(config_class) -> set[str]:
    if dataclasses.is_dataclass(config_class):
        return {field.name for field in dataclasses.fields(config_class)}
    return {*inspect.signature(config_class).parameters}


def tiny_config(model_type, config_class, part=False, **more):
    """Small, and so are its parts: the text and the vision of a multimodal model."""
    known = fields(config_class)
    sizes = {name: size for name, size in {**SIZES, **(OF_PARTS if part else {})}.items() if name in known}
    for name, inner in parts_of(config_class).items():
        sizes[name] = tiny_config(inner.model_type, type(inner), part=True)
    if "qk_rope_head_dim" in known:  # multi-head latent attention
        sizes |= {name: value for name, value in (("head_dim", 8), ("num_key_value_heads", 4)) if name in known}
    return config_class(**{**sizes, **MORE.get(model_type, {}), **more})


def parts_of(config_class) -> dict[str, transformers.PretrainedConfig]:
    """The default ones."""
    try:
        parts = vars(config_class()) if config_class.sub_configs else {}
    except Exception:  # a draft model has no head
        return {}
    found = {name: parts.get(name) for name in config_class.sub_configs}
    return {name: inner for name, inner in found.items() if isinstance(inner, transformers.PretrainedConfig)}


def config_of_language_model(config, model_class):
    """Of a multimodal model of which only the language model is made, the text's; else itself."""
    if isinstance(config, model_class.config_class):
        return config
    return getattr(config, "decoder", None) or config.get_text_config()


def short_config(config_class):
    """The default, with few layers and experts: for a model without memory."""
    config = config_class()
    inner = (getattr(config, name, None) for name in config.sub_configs)
    for part in (config, *(each for each in inner if each is not None)):
        for name in ("num_hidden_layers", "num_layers", "n_layers", "num_local_experts", "num_experts"):
            if isinstance(vars(part).get(name), int):
                setattr(part, name, min(4, vars(part)[name]))
        for name in [name for name in vars(part) if name.endswith("layer_types")]:
            if isinstance(kinds := vars(part)[name], list):
                setattr(part, name, (list(dict.fromkeys(kinds)) * 4)[:4])
    return config


def tiny_config_of(model_type, config_class, model_class):
    return config_of_language_model(tiny_config(model_type, config_class), model_class)


def made(model_type, config_class, model_class):
    """(model, "") with random weights in all parameters, on the meta device if it is large, or (None, why not)."""
    errors = []
    for config_of in (functools.partial(tiny_config, model_type), short_config):
        try:
            config = config_of_language_model(config_of(config_class), model_class)
            with torch.device("meta"):
                model = model_class._from_config(config)
            if sum(parameter.numel() for parameter in model.parameters()) > LARGE:
                return model, ""
            torch.manual_seed(0)
            model = model_class._from_config(config).float().eval()
        except Exception as error:  # of any kind: these are configs of some 200 families
            errors.append(f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return model, ""
    return None, " / ".join(dict.fromkeys(errors))


# --- what apply_packing_ops does with them: docs/families.md ---

PAGE, NONE = Path(__file__).parents[2] / "docs" / "families.md", "-"


class Row(NamedTuple):
    """A line of the page: yes, NONE where a model has no such part, or why it is left as it is."""

    attention: str
    rope: str
    rms_norm: str
    state: str
    fused_loss: str


def row_of(model) -> Row:
    """Applies RoPE and RMSNorm on the way."""
    own, loss = apply.why_not_attention(model), fused_loss.refusal(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        applied = apply_packing_ops(model, attention=False, rms_norm=True)
    verdicts = []
    for option, count in (("rope", applied.rope), ("rms_norm", applied.rms_norm)):
        reason = applied.skipped.get(option, "")
        nothing = reason.startswith(("no rotary embedding", "it has no RMSNorm"))
        verdicts.append(NONE if nothing else (f"yes, but {reason}" if reason else "yes") if count else reason)
    attends = "yes" if stateful.attentions(model) else NONE
    layers = linear_attention.layers_in(model)
    return Row(own or attends, *verdicts, state_of(layers.values(), map(type, layers)), loss or "yes")


def state_of(reasons, classes) -> str:
    """Returns the verdict over layers, of these classes, that carry a state by functions which ours may replace."""
    reasons = [*reasons]
    served = "yes" + linear_attention.stock_rules(classes)
    return "; ".join(dict.fromkeys(filter(None, reasons))) or (served if reasons else NONE)


def formula_of_class(cls: type) -> tuple[str | None, str]:
    """As formula_of, of every module that the class makes: with each of its flags, on and off."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    flags = [parameter for parameter in parameters if isinstance(parameter.default, bool)]
    sizes = [each for each in parameters if each.default is inspect.Parameter.empty and each.kind < 2]
    others = [each for each in parameters if each not in sizes[:1] and each.kind != inspect.Parameter.VAR_KEYWORD]
    if names := [each.name for each in others if not isinstance(each.default, (bool, float))]:
        return None, f"{cls.__name__} may have another formula with {', '.join(names)}"
    found: dict[tuple[str | None, str], None] = {}  # ordered, unlike a set: the first reason is given
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        for given in ({}, *({flag.name: not flag.default} for flag in flags)):
            try:
                found[rms_norm.formula_of(cls, cls(*[rms_norm.WIDTH] * len(sizes), **given))] = None
            except Exception as error:  # whatever another library raises
                found[None, f"{cls.__name__} cannot be made for a trial: {error!r}"] = None
    formulas = {formula for formula, _ in found} - {"no_weight"}
    if len(found) == 1:
        return next(iter(found))
    if len(formulas) == 1 and None not in formulas:
        return formulas.pop(), ""
    return None, next((reason for formula, reason in found if formula is None), f"{cls.__name__} has several formulas")


def refusal_of_module(module_name: str) -> str | None:
    """Why no function of it can be served; None if one can."""
    module = importlib.import_module(module_name)
    refusals = [rope.refusal(module, name) for name in rope._names(module)]
    return None if None in refusals else next(iter(refusals), "it has no function that rotates q and k")


def row_of_module(model_class) -> Row:
    """Of a family that no recipe makes: what its modelling module has."""
    name = model_class.__module__
    classes = [value for value in vars(sys.modules[name]).values() if isinstance(value, type)]
    norms = [value for value in classes if value.__module__ == name and rms_norm.is_norm(value)]
    reasons = [reason for formula, reason in map(formula_of_class, norms) if formula is None]
    layers = [
        cls
        for cls in classes
        if cls.__module__ == name and hasattr(cls, "forward") and linear_attention.functions_called(cls)
    ]
    states = state_of(map(linear_attention.why_not_class, layers), layers)
    loss = "yes" if fused_loss._logits_feed_only_the_loss(model_class, False) else "its forward changes the logits"
    norm = "; ".join(reasons) or ("yes" if norms else NONE)
    return Row("not tried", refusal_of_module(name) or "yes", norm, states, loss)


def page_of(rows: dict[tuple[str, str], Row]) -> str:
    """The page's table, and the version that it is of."""
    lines = [f"With transformers {transformers.__version__}:", ""]
    for kind, title in KINDS.items():
        heads = ["attention", "RoPE", "RMSNorm", "state", *["fused loss"] * (kind == "CAUSAL_LM")]
        lines += [f"## {title}", "", f"| model_type | {' | '.join(heads)} |", f"|---{'|---' * len(heads)}|"]
        for (found, model_type), row in rows.items():
            if found == kind:
                cells = [cell.replace("|", "/") for cell in row[: len(heads)]]
                lines.append(f"| {model_type} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def lines_of_page() -> set[str]:
    """Its rows, or none if it is of another transformers."""
    text = PAGE.read_text()
    return {*text.splitlines()} if f"With transformers {transformers.__version__}:" in text else set()
