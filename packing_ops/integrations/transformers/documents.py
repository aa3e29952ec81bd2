"""Where the documents of a batch lie: computed once per forward of the model and shared by its layers.

It costs one host synchronisation at most. It costs none with explicit cu_seqlens, for batches without padding or
positions, and under torch.compile, where sizes are upper bounds instead.
"""

import torch
import torch.nn.functional as F

from packing_ops import _ops
from packing_ops._arguments import check_cu_seqlens, int32_cu_seqlens
from packing_ops._batch_cache import dense_cu_seqlens, kept_with
from packing_ops._checks import checked_documents

_APART = 2**40  # more than positions differ, and times the slots of a batch an int64


class BatchDocuments:
    """Documents of a ``[batch, seqlen]`` batch.

    cu_seqlens_q, cu_seqlens_k: int32 ``[num_documents + 1]`` over the packed rows.
    indices: int64 ``[total]``, the real slots; None where every slot is real.
    holes: padding may lie between real slots of a row; two tokens are then nearer in the packed row than in the batch,
        and a window would reach too far.
    """

    def __init__(self, cu_seqlens_q, cu_seqlens_k, indices=None, holes=False):
        self.cu_seqlens_q, self.cu_seqlens_k = cu_seqlens_q, cu_seqlens_k
        self.indices, self.holes = indices, holes
        self.device, self.copies = cu_seqlens_q.device, {}

    def on(self, device):
        """The same documents on another device, for models with layers on several."""
        if self.device == device:
            return self
        if device not in self.copies:
            moved = [t if t is None else t.to(device) for t in (self.cu_seqlens_q, self.cu_seqlens_k, self.indices)]
            self.copies[device] = BatchDocuments(*moved, self.holes)
        return self.copies[device]

    def document_ids(self, batch, seqlen):
        """int64 ``[batch, seqlen]``: the document of each slot, -1 for padding."""
        slots = torch.arange(batch * seqlen, device=self.cu_seqlens_q.device)
        total = slots.numel() if self.indices is None else self.indices.numel()
        documents = torch.searchsorted(self.cu_seqlens_q[1:], slots[:total].int(), right=True)
        documents = documents.masked_fill(documents == self.cu_seqlens_q.numel() - 1, -1)
        if self.indices is not None:
            # One slot more takes the rows that have none.
            target = self.indices.where(self.indices >= 0, batch * seqlen)
            documents = documents.new_full((batch * seqlen + 1,), -1).scatter(0, target, documents)[:-1]
        return documents.view(batch, seqlen)


def find_documents(query, cu_seqlens=(None, None), padding=None, position_ids=None, layer=None, checked=None):
    """The documents of query ``[batch, num_heads, seqlen, head_dim]``: by cu_seqlens, else by padding and positions.

    Args:
        cu_seqlens: for queries and for keys, int32 or int64 ``[num_documents + 1]``.
        padding: ``[batch, seqlen]``, 0 is padding; bool, or the number of each token's document from 1 on.
        position_ids: ``[batch or 1, seqlen]``; a document starts in each row and where they stop growing.
        layer: number of the layer that asks, None for the first of a forward.
        checked: (cu_seqlens for queries, for keys, checked cu_seqlens for queries): the first two were compared with
            position_ids already; if they are those given here, the third is used without another check.
    """
    batch, _, seqlen, _ = query.shape
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != seqlen):
        position_ids = None  # of another row, or with an axis of their own (M-RoPE): they do not tell documents
    if padding is not None and padding.shape != (batch, seqlen):
        raise ValueError(f"attention_mask: expected [{batch}, {seqlen}] like the batch, got {list(padding.shape)}")
    if cu_seqlens[0] is not None or cu_seqlens[1] is not None:
        return _explicit(batch, seqlen, cu_seqlens, padding, position_ids, checked)
    given = [tensor for tensor in (padding, position_ids) if tensor is not None]
    if not given:
        cu_q = dense_cu_seqlens(batch, seqlen, query, "query")
        return BatchDocuments(cu_q, cu_q)
    return kept_with(given, (batch, seqlen), lambda: _from_values(batch, seqlen, padding, position_ids), layer=layer)


def as_bool(mask, device):
    """The bool form of a 2-D mask: the same tensor for all layers of a forward, so that they share one layout."""
    if mask.dtype == torch.bool and mask.device == device:
        return mask
    return kept_with([mask], ("bool", device), lambda: mask.to(device=device, dtype=torch.bool))


def on_device(mask, device):
    return mask if mask.device == device else kept_with([mask], (device,), lambda: mask.to(device))


def runs_of(numbers):
    """int64 ``[batch, slots]``: each row's documents, counted from 0; padding belongs to the document before it."""
    slots = torch.arange(numbers.shape[1], device=numbers.device)
    last = (slots * (numbers != 0)).cummax(1).values
    number = numbers.clamp(min=1).gather(1, last)
    return F.pad(number[:, 1:] != number[:, :-1], (1, 0)).cumsum(1)


# --- from padding and positions ---


def _from_values(batch, seqlen, padding, position_ids):
    compiling = torch.compiler.is_compiling()
    if padding is None:
        starts = _row_starts(position_ids.expand(batch, seqlen))
        cu_seqlens, count = _ops.cu_seqlens_from_position_ids(starts.flatten())
        if not compiling:
            cu_seqlens = cu_seqlens[: int(count) + 1]
        return BatchDocuments(cu_seqlens, cu_seqlens)
    real, numbered = padding != 0, padding.dtype != torch.bool and seqlen > 0
    indices, rows, _, totals = _ops.unpad_layout(real, None, False)
    runs = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, 0] if seqlen else real.sum(1)
    holes = (runs > 1).any()
    cu_seqlens, count = rows, totals[:1]
    if position_ids is not None or numbered:
        # All slots, the real ones first; those after the last real one become a document of their own.
        slots = indices.clamp(min=0)
        row, after, every = slots // max(seqlen, 1), indices < 0, torch.arange(batch * seqlen, device=slots.device)
        first = F.pad(row[1:] != row[:-1], (1, 0), value=True)
        if numbered:
            run = runs_of(padding).flatten()[slots]
            first |= F.pad(run[1:] != run[:-1], (1, 0), value=True)
        positions = every
        if position_ids is not None:
            positions = position_ids.expand(batch, seqlen).flatten().long()[slots].where(~after, every)
        first |= after & F.pad(~after[:-1], (1, 0), value=False)
        cu_seqlens, count = _ops.cu_seqlens_from_position_ids(positions - first.cumsum(0) * _APART)
    if compiling:
        return BatchDocuments(cu_seqlens, cu_seqlens, indices, holes=True)
    total, count, has_holes = torch.stack([totals[0], count[0], holes.to(totals.dtype)]).tolist()
    if cu_seqlens is not rows:
        cu_seqlens = cu_seqlens[: count + (total == batch * seqlen)]
    return BatchDocuments(cu_seqlens, cu_seqlens, None if total == batch * seqlen else indices[:total], bool(has_holes))


def _row_starts(position_ids):
    """position_ids, those of each row so much smaller than the row's before that a document starts there."""
    rows = torch.arange(position_ids.shape[0], device=position_ids.device)
    return position_ids.long() - rows[:, None] * _APART


# --- explicit cu_seqlens ---


def _explicit(batch, seqlen, cu_seqlens, padding, position_ids, checked):
    if checked is not None and cu_seqlens[0] is checked[0] and cu_seqlens[1] is checked[1]:
        cu_seqlens, position_ids = (checked[2], None if cu_seqlens[1] is cu_seqlens[0] else cu_seqlens[1]), None
    else:
        checked = None
    cu_q, cu_k = (given if given is not None else other for given, other in (cu_seqlens, cu_seqlens[::-1]))
    for name, tensor in (("cu_seq_lens_q", cu_q), ("cu_seq_lens_k", cu_k)):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}: expected an int32 tensor [num_documents + 1], got {tensor!r}")
        check_cu_seqlens(tensor, name)
    if position_ids is not None:
        position_ids = position_ids.to(cu_q.device) if position_ids.shape[0] in (1, batch) else None
    same = cu_k is cu_q
    if checked is None or padding is not None:
        mask = None if padding is None else _marked_alike(padding.to(cu_q.device), cu_q)
        cu_q, _ = checked_documents(cu_q, cu_k.to(cu_q.device), mask, position_ids, batch, seqlen)
    # int32 ones are not copied: a plan that is kept with them serves the next forward too.
    int32_q = int32_cu_seqlens(cu_q)
    return BatchDocuments(int32_q, int32_q if same else int32_cu_seqlens(cu_k))


def _marked_alike(padding, cu_seqlens):
    """bool ``[batch, seqlen]``: False at padding, and where numbers start a document and cu_seqlens do not, or the reverse.

    Ones alone are no numbers. Rows start documents either way.
    """
    real = padding != 0
    if padding.dtype == torch.bool:
        return real
    slots = torch.arange(padding.numel(), dtype=cu_seqlens.dtype, device=padding.device)
    documents = torch.searchsorted(cu_seqlens[1:], slots, right=True).view_as(padding)
    goes_on, numbered_on = (ids[:, 1:] == ids[:, :-1] for ids in (documents, padding))
    agree = (goes_on == numbered_on) | ~(padding > 1).any()
    return real & F.pad(agree, (1, 0), value=True)
