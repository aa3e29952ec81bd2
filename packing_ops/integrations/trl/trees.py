"""TRL's asynchronous GRPO trainer packs samples as prefix trees: the attention of these, by packing_ops."""

import functools
import importlib
from typing import Any

import torch

from packing_ops._runtime.arguments import sides_of_keys
from packing_ops._runtime.batch_cache import kept_with
from packing_ops.integrations._patching import Patch
from packing_ops.keys import paths_of_slots
from packing_ops.varlen.attention import attend
from packing_ops.varlen.options import checked_options


def enable_tree_attention() -> None:
    """Let TRL's attention over prefix trees run on packing_ops: on the CPU and on every GPU from sm_80 on, with sinks.

    TRL's attention needs a Hub kernel of FlashAttention-3. The name ``"tree_fa3"`` stays, since the trainer asks for
    it. Call this before or after the trainer is made. A second call does nothing; revert_tree_attention reverts it.

    Example:
        >>> enable_tree_attention()
        >>> revert_tree_attention()

    Raises:
        ImportError: TRL is not installed, or has no trees (before 1.16).
    """
    _patch().apply()
    _packing().register_tree_attention()


def revert_tree_attention() -> None:
    """Revert enable_tree_attention.

    Example:
        >>> enable_tree_attention()
        >>> revert_tree_attention()

    Raises:
        ImportError: as enable_tree_attention.
    """
    _patch().revert()
    _packing().register_tree_attention()


@functools.cache
def _patch() -> Patch:
    return Patch(_packing(), "tree_attention", lambda _: tree_attention)


def _packing() -> Any:
    try:
        packing = importlib.import_module("trl.experimental.async_grpo.packing")
        packing.register_tree_attention, packing.tree_attention  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"trl: expected one whose asynchronous GRPO packs trees (pip install 'trl>=1.16'): {error}"
        ) from error
    return packing


def tree_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    tree_kv_index: torch.Tensor,
    tree_cu_seqlens_q: torch.Tensor,
    tree_cu_seqlens_k: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over a tree with TRL's arguments: heads first, ``[1, num_heads, rows, head_dim]``."""
    if dropout:
        raise NotImplementedError(f"dropout: expected 0.0 over a prefix tree, got {dropout}")
    total = key.shape[2]
    paths = kept_with(
        (tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k),
        ("paths", total),
        lambda: paths_of_slots(tree_cu_seqlens_q, tree_cu_seqlens_k, tree_kv_index, total),
    )
    options = checked_options(True, scaling, sides_of_keys(sliding_window), softcap or 0.0, sinks=s_aux)
    query, key = query.to(value.dtype), key.to(value.dtype)  # some models rotate in float32
    return attend(query, key, value, tree_cu_seqlens_q, paths, options, layout="bhsd")[0], None
