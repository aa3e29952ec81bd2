"""transformers' "flash_attention_2" over a group, as ring_flash_attn substitutes it.

apply_packing_ops(model, sequence_group=group) does the same for one model, with every option of its attention, and
without state of the process; these functions are for code that is written for ring_flash_attn.
"""

from typing import Any

import torch
import torch.distributed as dist

from packing_ops.contrib.ring_flash_attn.llama3 import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
)
from packing_ops.integrations.adapters import sides_of_keys

_NAME = "flash_attention_2"
# Until revert_hf_flash_attn: "stock", what transformers had, once it is substituted; "prepared" and "group", the
# documents and the ranks of the row that the models run on.
_kept: dict[str, Any] = {}


def update_ring_flash_attn_params(cu_seqlens: torch.Tensor, process_group: dist.ProcessGroup) -> None:
    """Tell the documents of the next row, before each forward; they stay until the next call, for recomputation too.

    Args:
        cu_seqlens: int32 ``[num_documents + 1]`` of the whole row, whose end is a multiple of the ranks.
        process_group: the ranks, each of which holds the part of the row that its rank counts.

    Example:
        >>> update_ring_flash_attn_params(cu_seqlens, group)  # needs several processes # doctest: +SKIP

    Raises:
        ValueError: as llama3_flash_attn_prepare_cu_seqlens.
    """
    prepared = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, process_group.rank(), process_group.size())
    _kept.update(prepared=prepared, group=process_group)


def substitute_hf_flash_attn(process_group: dist.ProcessGroup, heads_k_stride: int = 1) -> None:
    """Let every model with attn_implementation "flash_attention_2" attend over the group. Reverted by
    revert_hf_flash_attn.

    Models must be able to choose "flash_attention_2": where flash-attn is not installed, install_flash_attn_alias
    first.

    Args:
        process_group: the ranks that share each row.
        heads_k_stride: not needed; all heads are gathered at once.

    Example:
        >>> substitute_hf_flash_attn(group, heads_k_stride=1)  # needs several processes # doctest: +SKIP

    Raises:
        ImportError: transformers is missing.
        ValueError: in the forward, without update_ring_flash_attn_params before it; rows of a batch above 1.
        NotImplementedError: in the forward: attention that is not causal, dropout.
    """
    table = _table()
    _kept.setdefault("stock", table._global_mapping.get(_NAME))
    table.register(_NAME, flash_attention_forward)


def revert_hf_flash_attn() -> None:
    """Revert substitute_hf_flash_attn, and forget the row. A second call does nothing.

    Example:
        >>> revert_hf_flash_attn()
    """
    if "stock" in _kept:
        table, stock = _table(), _kept["stock"]
        if table._global_mapping.get(_NAME) is flash_attention_forward:
            table._global_mapping.pop(_NAME)
            if stock is not None:
                table.register(_NAME, stock)
    _kept.clear()


def _table() -> Any:
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ImportError as error:
        raise ImportError("substitute_hf_flash_attn needs transformers: pip install 'transformers>=5.17'") from error
    return ALL_ATTENTION_FUNCTIONS


def flash_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend: query ``[1, num_heads, rows, head_dim]`` -> (``[1, rows, num_heads, head_dim]``, None)."""
    if "prepared" not in _kept:
        raise ValueError("cu_seqlens: expected update_ring_flash_attn_params before the forward, got none")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise NotImplementedError("is_causal: expected True under substitute_hf_flash_attn, got False")
    if query.shape[0] != 1:
        raise ValueError(f"query: expected one packed row, got a batch of {query.shape[0]}")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    cu_q, cu_k, max_q, max_k, keys = _kept["prepared"]
    out = llama3_flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, max_q, max_k, 1, keys, dropout, scaling, True,
        sides_of_keys(sliding_window), group=_kept["group"], softcap=softcap or 0.0, sinks=s_aux,
    )  # fmt: skip
    return out[None], None
