"""A model whose rows are spread over several ranks: attention runs over the group, everything else on the slots of this
rank.
"""

import torch

from packing_ops._runtime.arguments import check_cu_seqlens, one_of
from packing_ops._runtime.batch_cache import kept_with
from packing_ops.data.context_parallel import SCHEMES
from packing_ops.integrations.transformers.documents import can_read, refuse_where
from packing_ops.integrations.transformers.versions import models_in

STATE = "_packing_ops_sequence_group"
_LONG_ROPE = ("dynamic", "longrope")


class SequenceGroup:
    """The ranks that share a row. Kept in a model, its sub-models and its attention modules; copies share it."""

    def __init__(self, group, scheme: str):
        # Imported here, since a torch without torch.distributed cannot; not in attend_over_ranks, since torch.compile
        # traces no import inside a forward.
        from packing_ops.parallel.choose import attend_over
        from packing_ops.parallel.collectives import planned, process_group
        from packing_ops.parallel.states import documents_on_rank

        one_of(scheme, SCHEMES, "scheme")
        self._group, self.scheme = process_group(group), scheme
        self.attend_over, self._planned, self._documents = attend_over, planned, documents_on_rank

    @property
    def group(self):
        """Return the group of a plan's step, inside of its group_for; else the given one."""
        return self._planned[-1] if self._planned else self._group

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError(
            "sequence_group: expected a model without one to be pickled, got one with it; call "
            "revert_packing_ops(model) first, or save its state_dict()"
        )

    def check_call(self, model: str, positions: object, mask: object, kwargs: dict) -> None:
        """Raise ValueError if the arguments of a model's call are not those that shard_packed gives."""
        cu_seqlens = kwargs.get("cu_seq_lens_q")
        if not isinstance(cu_seqlens, torch.Tensor):
            raise ValueError(
                f"cu_seq_lens_q: expected int32 [num_documents + 1] of the whole row in a call of {model} with a "
                "sequence_group (shard_packed keeps it), got None"
            )
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.shape[0] != 1:
            got = "None" if positions is None else str(list(getattr(positions, "shape", [])))
            raise ValueError(
                f"position_ids: expected [1, rows] of this rank's slots in a call of {model} with a sequence_group "
                f"(shard_packed gives them), got {got}"
            )
        self._check_end(cu_seqlens, positions.shape[1])
        if mask is not None:
            raise ValueError(
                "attention_mask: expected None with a sequence_group, which finds documents by cu_seq_lens_q"
            )
        needed = {
            "shift_labels": "shard_packed gives them",
            "num_items_in_batch": "count_targets counts them on all ranks",
        }
        for name, what in needed.items() if kwargs.get("labels") is not None else ():
            if kwargs.get(name) is None:
                raise ValueError(f"{name}: expected beside labels with a sequence_group, {what}, got None")

    def _check_end(self, cu_seqlens: torch.Tensor, rows: int) -> None:
        """Raise ValueError for documents of another row: a batch that was not sharded, or only this rank's part."""
        check_cu_seqlens(cu_seqlens, "cu_seq_lens_q")
        ranks = self.group.size()
        total = ranks * rows
        message = (
            f"cu_seq_lens_q: expected to end at {max(total - ranks + 1, 0)} to {total}, the row of {rows} slots on "
            f"each of {ranks} ranks (shard_packed gives it)"
        )
        if not can_read(cu_seqlens):
            end = cu_seqlens[-1]
            return refuse_where((end > total) | (end <= total - ranks), message)
        end = kept_with((cu_seqlens,), ("end",), lambda: int(cu_seqlens[-1]))
        if not 0 <= total - end < ranks:
            raise ValueError(f"{message}, got {end}")

    def documents(self, cu_seqlens: torch.Tensor, rows: int):
        """Return the RankDocuments of a row, of which this rank has ``rows`` slots."""
        return self._documents(cu_seqlens, rows, self.group)

    def attend_over_ranks(self, heads, mask, cu_seqlens, options, refused=""):
        """Return ``[1, rows, num_heads, head_dim]`` of heads-first query, key and value of this rank."""
        # What attention over a group does not do
        if refused:
            raise NotImplementedError(f"sequence_group: expected attention that runs over several ranks, got {refused}")
        if mask is not None:
            raise NotImplementedError(
                f"attention_mask: expected causal or full attention or their sliding windows with a sequence_group, "
                f"got a mask of {mask.dim()} dimensions: the model reads its masks, or adds to them"
            )
        query, key, _ = heads
        if query.shape[0] != 1 or key.shape[2] != query.shape[2]:
            raise ValueError(
                f"query: expected one row of as many keys with a sequence_group, got {list(query.shape)} and "
                f"{list(key.shape)}"
            )
        if not isinstance(cu_seqlens, torch.Tensor):
            raise ValueError("cu_seq_lens_q: expected to reach attention with a sequence_group, the model drops it")
        # Attention of [rows, num_heads, head_dim]
        q, k, v = (tensor[0].transpose(0, 1) for tensor in heads)
        out, _, _ = self.attend_over(q, k, v, cu_seqlens, self.group, self.scheme, options)
        return out[None]


def of(module) -> SequenceGroup | None:
    return module.__dict__.get(STATE)


def check(model, without: str | None) -> None:
    """Raise ValueError if rows cannot be spread over ranks, or for this reason: attention on this rank only would be
    wrong.
    """
    reasons = [without] if without else []
    for module in models_in(model):
        rope = getattr(module.config, "rope_parameters", None) or getattr(module.config, "rope_scaling", None) or {}
        kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
        if any(kind.get("rope_type", kind.get("type")) in _LONG_ROPE for kind in kinds):
            reasons.append(
                f"{type(module).__name__} scales RoPE by the longest position, which every rank has another of"
            )
        if getattr(module.config, "vision_config", None) is not None:
            reasons.append(f"{type(module).__name__} puts images among its tokens")
    if reasons:
        raise ValueError(f"sequence_group: expected a model whose attention runs over several ranks, got {reasons[0]}")


def apply_to_model(model, attentions, group, scheme: str) -> None:
    """Put the group into the models, their sub-models and their attention modules."""
    sequence = SequenceGroup(group, scheme)
    for module in (*models_in(model), *attentions):
        module.__dict__[STATE] = sequence
