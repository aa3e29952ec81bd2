"""MaskPattern: what the layers of a forward get in place of a mask tensor.

transformers asks for a mask once per forward and kind of layer. The answer here is a MaskPattern where varlen attention
can follow it, and transformers' own 4-D mask where it cannot, or where the model reads masks itself (see model_call).
"""

import copy

import torch
import torch.nn.functional as F

from packing_ops.integrations.transformers import model_call
from packing_ops.integrations.transformers.blocks import blocks_of, ends_of_blocks
from packing_ops.integrations.transformers.document_checks import is_tensor
from packing_ops.integrations.transformers.documents import find_documents, runs_of
from packing_ops.integrations.transformers.imports import masking_utils


class MaskPattern:
    """Causal or not, the window, and where the documents are: found by the first layer, read by all.

    axes: layers get position_ids of one axis of an image, which do not tell documents.
    checked: see find_documents.
    blocks: [batch, slots], tokens of one number from 0 on see each other, beside causality; or None.
    last: how many queries there are, the last ones of the row; None for all.
    shape: that of the 4-D mask. Its values are in no tensor, but models look whether it is one of two dimensions.
    """

    def __init__(self, causal, window, length, padding, position_ids, checked=None, axes=False, blocks=None, batch=1):
        self.causal, self.window, self.length, self.axes = causal, window, length, axes
        self.padding, self.position_ids, self.checked, self.blocks = padding, position_ids, checked, blocks
        self.shape, self.ndim, self.last = torch.Size((batch, 1, length, length)), 4, None
        self._documents = self._given = self._ends = None

    def dim(self):
        return self.ndim

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def documents(self, query, cu_seqlens, position_ids):
        if self._documents is None or self._given[0] is not cu_seqlens[0] or self._given[1] is not cu_seqlens[1]:
            position_ids = position_ids if self.position_ids is None and not self.axes else self.position_ids
            mark_used(*cu_seqlens, position_ids)
            self._documents = find_documents(query, cu_seqlens, self.padding, position_ids, checked=self.checked)
            self._given = cu_seqlens
        return self._documents

    def visible_end(self, documents):
        """(that of varlen_attention for the packed rows or None, why it cannot be told or "")."""
        if self.blocks is None:
            return None, ""
        if self._ends is None or self._ends[0] is not documents:
            self._ends = documents, ends_of_blocks(documents, self.blocks)
        ends = self._ends[1]
        return ends, "" if ends is not None else "blocks of a mask that are no runs of neighbours"

    def _refuse(self, *_):
        raise TypeError(_READ)

    def _has_none(self):
        raise AttributeError(_READ)

    # What a model may ask of a mask tensor, by name: __getattr__ would slow the look-ups of the layers.
    dtype = to = masked_fill = property(_has_none)
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = _refuse

    def __getitem__(self, index):
        """All of it or its last queries, which Gemma 4 takes for layers that share keys; no other part of it."""
        if isinstance(index, tuple) and all(isinstance(each, slice) for each in index):
            queries = index[2] if len(index) > 2 else slice(None)
            if all(each in _WHOLE for each in (*index[:2], *index[3:])) and queries.step is queries.stop is None:
                first = queries.start or 0
                return self if first == 0 or first <= -self.shape[2] else self._ending(-first)
        raise TypeError(_READ)

    def _ending(self, queries):
        if queries < 0:
            raise TypeError(_READ)
        part = copy.copy(self)
        part.last, part.shape = queries, torch.Size((*self.shape[:2], queries, self.length))
        return part

    @classmethod
    def __torch_function__(cls, *_):
        raise TypeError(_READ)


_MADE_FOR = "_packing_ops_cu_seqlens"
_WHOLE = slice(None), slice(0, None)
_READ = (
    "attention_mask: expected to reach attention as it is, got read by the model on the way: "
    "load it with another attn_implementation"
)


def mark_used(*tensors):
    """A mask or an attention has read these tensors, which say where documents are; None for those not given."""
    call = model_call.call_to_mark()
    if call is not None and any(tensor is not None for tensor in tensors):
        call.mark_used()


def note(causal_and_window):
    """Keeps what a mask of this call says, for refuse_dropped_mask; None: more than (causal, window) can say."""
    call = model_call.current()
    if call is not None:
        call.masks.add(causal_and_window)


class Carrier:
    """Takes the place of the 2-D mask on its way to the mask function, with what transformers does not pass to that.

    numbers: [batch, slots], each token's document from 1 on, 0 for padding; or None.
    position_ids: [batch or 1, q_length], or None.
    mask_form: see model_call. checked: see find_documents. axes: see MaskPattern.
    stock: make transformers' own 4-D mask: keys of another sequence (cross-attention), or of a cache of fixed length.
    """

    def __init__(
        self,
        padding,
        position_ids=None,
        mask_form=model_call.PATTERN,
        stock=False,
        numbers=None,
        checked=None,
        axes=False,
    ):
        self.padding, self.position_ids, self.mask_form, self.stock = padding, position_ids, mask_form, stock
        self.numbers, self.checked, self.axes = numbers, checked, axes


def packing_ops_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    **kwargs,
):
    """The mask function of AttentionMaskInterface: a MaskPattern, or a 4-D mask (None for one query over all)."""
    carrier = attention_mask if isinstance(attention_mask, Carrier) else model_call.collect(attention_mask)
    if carrier is None:
        # A bidirectional mask may be one of cross-attention; without a carrier that is not known.
        carrier = Carrier(attention_mask, stock="allow_is_bidirectional_skip" in kwargs)
    free = carrier.mask_form == model_call.PATTERN and not carrier.stock
    pattern, blocks = _pattern_of(mask_function, kwargs) if free else None, None
    if free and pattern is None:
        pattern, blocks = blocks_of(mask_function, batch_size, q_length)
    start = isinstance(q_offset, int) and q_offset == 0 and isinstance(kv_offset, int) and kv_offset == 0
    if pattern is not None and start and q_length == kv_length:
        padding = carrier.padding if carrier.numbers is None else carrier.numbers
        told = padding, carrier.position_ids, carrier.checked, carrier.axes, blocks
        note(None if blocks is not None else pattern)
        return MaskPattern(*pattern, q_length, *told, batch=batch_size)
    note(None)
    apart = q_length > 1 and not (carrier.position_ids is None and carrier.numbers is None)
    if apart:
        mask_function = _each_document_alone(mask_function, kwargs, carrier, batch_size, q_length, q_offset)
    # Without a mask the layer could not tell causal from full; one query that attends to every key is both.
    skip = kwargs.pop("allow_is_causal_skip", True) and q_length == 1
    kwargs["allow_is_bidirectional_skip"] = False
    make = masking_utils.eager_mask if carrier.mask_form == model_call.ADDITIVE else masking_utils.sdpa_mask
    mask = make(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=carrier.padding,
        allow_is_causal_skip=skip,
        **kwargs,
    )
    if apart and carrier.checked is not None and mask is not None:
        setattr(mask, _MADE_FOR, carrier.checked[0])
    return mask


def has_documents_of(cu_seqlens, mask) -> bool:
    """Whether this tensor was made by position_ids that were found to agree with these cu_seqlens."""
    return cu_seqlens is not None and getattr(mask, _MADE_FOR, None) is cu_seqlens


def _each_document_alone(mask_function, kwargs, carrier, batch, q_length, q_offset):
    """mask_function within documents. Keys of a cache without numbers belong to the first query's document."""
    device = (carrier.numbers if carrier.position_ids is None else carrier.position_ids).device
    starts, runs, last = torch.zeros(batch, q_length, dtype=torch.bool, device=device), None, q_length - 1
    if carrier.position_ids is not None:
        positions, slots = carrier.position_ids.expand(batch, -1), torch.arange(q_length, device=device)
        if is_tensor(carrier.padding, 2):  # has any positions: here those of the last token before it
            real = carrier.padding.to(device)[:, (slots + q_offset).clamp(max=carrier.padding.shape[1] - 1)] != 0
            positions = positions.gather(1, (slots * real).cummax(1).values)
            starts = F.pad((positions[:, 1:] <= positions[:, :-1]) & real[:, 1:], (1, 0))
        else:
            starts = F.pad(positions[:, 1:] <= positions[:, :-1], (1, 0))
    if carrier.numbers is not None:
        runs = runs_of(carrier.numbers).to(device).expand(batch, -1)
        runs_of_queries = runs[:, (torch.arange(q_length, device=device) + q_offset).clamp(max=runs.shape[1] - 1)]
        starts = starts | F.pad(runs_of_queries[:, 1:] != runs_of_queries[:, :-1], (1, 0))
    documents = starts.cumsum(1)

    def query_index(slot):
        return (slot - q_offset).clamp(0, last)

    def together(row, q, k):
        same = documents[row, query_index(q)] == documents[row, query_index(k)]
        if runs is None:
            return same
        q, k = (slot.clamp(max=runs.shape[1] - 1) for slot in (q, k))  # a cache of fixed length is longer than the mask
        return same & (runs[row, q] == runs[row, k])

    def same_document(row, head, q, k):
        return mask_function(row, head, q, k) & together(row, q, k)

    chunk = getattr(kwargs.get("config"), "attention_chunk_size", None)
    plain = getattr(mask_function, "__name__", "") == "and_mask" and not kwargs.get("use_vmap")
    if chunk is None or kwargs.get("local_size") != chunk or not plain:
        return same_document
    # Chunks are counted from where a document starts: the first one after the padding on the left.
    slots = torch.arange(q_length, device=device)
    origins = (slots * starts).cummax(1).values + q_offset
    left = 0 if carrier.padding is None else (carrier.padding.cumsum(1) == 0).sum(1, keepdim=True)
    origins = torch.where(documents == 0, left, origins)

    def chunks_of_document(row, head, q, k):
        chunk_q, chunk_k = ((slot - origins[row, query_index(slot)]) // chunk for slot in (q, k))
        return (k <= q) & (chunk_q == chunk_k) & together(row, q, k)

    return chunks_of_document


def _pattern_of(mask_function, kwargs):
    """(causal, window), or None for a pattern other than causal, full and their sliding windows."""
    name = getattr(mask_function, "__name__", "")
    if kwargs.get("use_vmap"):  # the model adds a mask function of its own
        return None
    local_size, config = kwargs.get("local_size"), kwargs.get("config")
    full = "allow_is_bidirectional_skip" in kwargs  # only the makers of bidirectional masks pass it
    if local_size is None:
        expected = "bidirectional_mask_function" if full else "causal_mask_function"
        return (not full, (-1, -1)) if name == expected else None
    sliding = getattr(config, "sliding_window", None) == local_size
    if name != "and_mask" or not sliding or getattr(config, "attention_chunk_size", None) is not None:
        return None
    return (False, (local_size, local_size)) if full else (True, (local_size - 1, 0))
