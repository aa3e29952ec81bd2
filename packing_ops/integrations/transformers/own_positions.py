"""Models that count positions along the row and take none: packed documents after the first would get others than alone.

Recognised by an embedding of positions in a module of a text model whose forward is given no positions (BART's decoders).
"""

import inspect
import re
import weakref

import torch

from packing_ops.integrations.transformers.document_checks import refuse_where, several_in
from packing_ops.integrations.transformers.imports import PreTrainedModel
from packing_ops.integrations.transformers.stateful_kinds import class_name, module_of, reads_text

_EMBEDDING = re.compile(r"(^|_)(pos|position|positions)(_|$)|^wpe$")
_RELATIVE = re.compile(r"rotary|rope|relative|bias", re.IGNORECASE)  # the same wherever a document stands
_found: "weakref.WeakKeyDictionary[torch.nn.Module, str]" = weakref.WeakKeyDictionary()


def refuse(model, call, position_ids, batch) -> None:
    """ValueError if a row of this call has several documents and the model counts through them."""
    name = _traced_owner(id(model)) if torch.compiler.is_compiling() else _owner(model)
    if name:
        several = several_in(position_ids, call.padding, call.cu_seqlens, call.numbers, batch)
        lost = "position_ids" if position_ids is not None else "cu_seq_lens_q"
        lost = "attention_mask" if position_ids is None and call.cu_seqlens is None else lost
        refuse_where(
            several,
            f"{lost}: expected one document in each row, got several, and {name} counts positions along the "
            "row and takes none; give each document a row of its own (no packing, padding on the right)",
        )


def _owner(model) -> str:
    """The class of the module that counts, or nothing. Once for each model."""
    if model not in _found:
        _found[model] = _counting(model, False)
    return _found[model]


@torch.compiler.assume_constant_result
def _traced_owner(model_id) -> str:
    return _owner(module_of(model_id))


def _counting(module, of_text) -> str:
    cls = type(module)
    if isinstance(module, PreTrainedModel):
        of_text = reads_text(cls)
    takes = any("position" in name for name in inspect.signature(cls.forward).parameters)
    if of_text and not takes and any(map(_embeds_positions, module._modules.items())):
        return class_name(module)
    return next(
        filter(None, (_counting(child, of_text) for child in module._modules.values() if child is not None)), ""
    )


def _embeds_positions(named) -> bool:
    name, child = named
    words = f"{name} {type(child).__name__}"
    return child is not None and _EMBEDDING.search(name) is not None and _RELATIVE.search(words) is None
