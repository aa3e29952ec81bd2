"""Where the documents of a batch are: computed once per forward of the model and shared by its layers.

It costs one host synchronisation at most, and zero with explicit cu_seqlens, for batches without padding or
positions, and under torch.compile, where sizes are upper bounds instead.
"""

from functools import partial

import torch
import torch.nn.functional as F

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import check_cu_seqlens, int32_cu_seqlens
from packing_ops._runtime.batch_cache import dense_cu_seqlens, is_captured, kept_with
from packing_ops.integrations.transformers.versions import code_has, constant, masking_utils, parameters_of

ROW_EACH = "give each document a row of its own (no packing, padding on the right)"  # what an error advises
LONGEST_ASSERTION = 254  # bytes of the message of an assertion on CUDA
_APART = 2**40  # more than positions differ; times the rows of a batch it still fits an int64


def one_each(name: str, why: str, advice: str = ROW_EACH) -> str:
    """Return what an error says of a row that holds several documents; name: the argument that shows them."""
    return f"{name}: expected one document in each row, got several, and {why}; {advice}"


class BatchDocuments:
    """Documents of a ``[batch, seqlen]`` batch.

    cu_seqlens: int32 ``[num_documents + 1]`` over the packed rows, of queries and of keys.
    indices: int64 ``[total]``, the real slots; None where every slot is real.
    has_interior_padding: between real slots of a row, perhaps: a window over the packed row would reach too far.
    several: whether a row has several documents, as padding says; None where nobody has looked.
    """

    def __init__(self, cu_seqlens, indices=None, has_interior_padding=False, several=None):
        self.cu_seqlens, self.indices = cu_seqlens, indices
        self.has_interior_padding, self.several = has_interior_padding, several

    def on(self, device):
        """Return the same documents on another device, for models with layers on several."""
        if self.cu_seqlens.device == device:
            return self

        def moved():
            indices = None if self.indices is None else self.indices.to(device)
            return BatchDocuments(self.cu_seqlens.to(device), indices, self.has_interior_padding, self.several)

        return kept_with([self.cu_seqlens], ("documents on", device), moved)

    def document_ids(self, batch, seqlen):
        """Return int32 ``[batch, seqlen]``: the document of each slot, -1 for padding."""
        total = batch * seqlen if self.indices is None else self.indices.numel()
        numbers = gate.seq_idx_from_cu_seqlens(self.cu_seqlens, total) + 1  # scatter_rows leaves 0 in padding
        numbers = numbers.masked_fill(numbers == self.cu_seqlens.numel(), 0)  # behind the last document
        if self.indices is not None:
            numbers = gate.scatter_rows(numbers, self.indices, batch, seqlen)
        return numbers.view(batch, seqlen) - 1


def find_documents(query, cu_seqlens=(None, None), padding=None, position_ids=None):
    """Find the documents of query ``[batch, num_heads, seqlen, ...]``: by cu_seqlens, else by padding and positions.

    padding: ``[batch, seqlen]``, 0 is padding; bool, or the number of each token's document from 1 on.
    """
    batch, seqlen = query.shape[0], query.shape[2]
    if position_ids is not None and (position_ids.dim() != 2 or position_ids.shape[1] != seqlen):
        position_ids = None  # of another row, or with an axis more (M-RoPE): they do not tell documents
    if padding is not None and padding.shape != (batch, seqlen):
        raise ValueError(f"attention_mask: expected [{batch}, {seqlen}] like the batch, got {list(padding.shape)}")
    if cu_seqlens[0] is not None or cu_seqlens[1] is not None:
        found, _ = checked_against(cu_seqlens, padding, position_ids, batch, seqlen)
        # int32 ones are not copied: a plan that is kept with them serves the next forward too.
        return BatchDocuments(int32_cu_seqlens(found))
    given = [tensor for tensor in (padding, position_ids) if tensor is not None]
    if not given:
        return BatchDocuments(dense_cu_seqlens(batch, seqlen, query, "query"))
    return kept_with(given, (batch, seqlen), partial(_from_values, batch, seqlen, padding, position_ids))


def cached_cast(dtype, mask, device):
    """Cast a 2-D mask of a call to this dtype: the same tensor for all layers of a forward, so that they share one
    layout.
    """
    is_cast = mask.dtype == dtype and mask.device == device
    return mask if is_cast else kept_with([mask], (dtype, device), lambda: mask.to(device=device, dtype=dtype))


# --- from padding and positions ---


def _from_values(batch, seqlen, padding, position_ids):
    compiling = torch.compiler.is_compiling()
    if padding is None:  # positions of each row so much smaller than the row's before that a document starts there
        rows = torch.arange(batch, device=position_ids.device)[:, None]
        positions = position_ids.expand(batch, seqlen).long() - rows * _APART
        cu_seqlens, count = gate.cu_seqlens_from_position_ids(positions.flatten())
        if not compiling:
            cu_seqlens = cu_seqlens[: int(count) + 1]
        return BatchDocuments(cu_seqlens)

    # Real slots and rows.
    real = padding != 0
    indices, cu_seqlens, _, totals = gate.unpad_layout(real, None, False)
    runs = (real[:, 1:] & ~real[:, :-1]).sum(1) + real[:, :1].sum(1)
    interior, within_rows = (runs > 1).any(), []

    # Documents within rows.
    if position_ids is not None or padding.dtype != torch.bool:
        # All slots, the real ones first; those after the last real one become one more document.
        slots, after = indices.clamp(min=0), indices < 0
        row = (slots // max(seqlen, 1)).where(~after, batch)
        first = first_tokens(padding, position_ids, batch, seqlen, slots.device)
        starts = (first.flatten()[slots] & ~after) | F.pad(row[1:] != row[:-1], (1, 0), value=True)
        # As positions: they grow by one, and fall where a document starts.
        positions = torch.arange(batch * seqlen, device=slots.device) - 2 * starts.cumsum(0)
        cu_seqlens, count = gate.cu_seqlens_from_position_ids(positions)
        wrong = wrong_in(padding, position_ids, batch, seqlen, slots.device)
        for message, is_wrong in wrong.items() if compiling else ():
            refuse_where(is_wrong, message)
        within_rows = [count.view(()), first.any(), *wrong.values()]

    # Sizes: upper bounds in a graph, else read at once, which is the one synchronisation.
    if compiling:
        return BatchDocuments(cu_seqlens, indices, has_interior_padding=True)
    read = [each.to(totals.dtype) for each in (totals[0], interior, *within_rows)]
    total, interior, *within_rows = torch.stack(read).tolist()
    several = False
    if within_rows:
        count, several, *are_wrong = within_rows
        for message, is_wrong in zip(wrong, are_wrong, strict=True):
            refuse_where(bool(is_wrong), message)
        cu_seqlens = cu_seqlens[: count - (total < batch * seqlen) + 1]  # without the document of padding
    indices = None if total == batch * seqlen else indices[:total]
    return BatchDocuments(cu_seqlens, indices, bool(interior), bool(several))


# --- explicit cu_seqlens ---


def checked_against(cu_seqlens, padding, position_ids, batch, seqlen):
    """Return (cu_seqlens, position_ids) of queries, which the keys have too. Raises ValueError if these or padding
    disagree.
    """
    cu_q, cu_k = (given if given is not None else other for given, other in (cu_seqlens, cu_seqlens[::-1]))
    check_cu_seqlens(cu_q, "cu_seq_lens_q")
    check_cu_seqlens(cu_k, "cu_seq_lens_k")
    if position_ids is not None:
        position_ids = position_ids.to(cu_q.device) if position_ids.shape[0] in (1, batch) else None
    mask = None if padding is None else _agrees_with_cu_seqlens(padding.to(cu_q.device), cu_q)
    return checked_documents(cu_q, cu_k.to(cu_q.device), mask, position_ids, batch, seqlen)


def _agrees_with_cu_seqlens(padding, cu_seqlens):
    """Return bool ``[batch, seqlen]``: False at padding, and where numbers start a document and cu_seqlens do not,
    or the reverse.

    Example:
        >>> cu_seqlens = torch.tensor([0, 2, 4])
        >>> _agrees_with_cu_seqlens(torch.tensor([[1, 1, 2, 2, 0]]), cu_seqlens).int().tolist()
        [[1, 1, 1, 1, 0]]
        >>> _agrees_with_cu_seqlens(torch.tensor([[1, 2, 2, 2, 0]]), cu_seqlens).int().tolist()  # at 1, not 2
        [[1, 0, 0, 1, 0]]
    """
    real = padding != 0
    if padding.dtype == torch.bool:
        return real
    slots = torch.arange(padding.numel(), dtype=cu_seqlens.dtype, device=padding.device)
    documents = torch.searchsorted(cu_seqlens[1:], slots, right=True).view_as(padding) + 1
    wanted, numbered = (first_tokens(ids, None, *ids.shape, ids.device) for ids in (documents, padding))
    return real & ((wanted == numbered) | ~(padding > 1).any())  # a mask of 0 and 1 carries no document ids


def checked_documents(cu_seqlens_q, cu_seqlens_k, mask, position_ids, batch, seqlen):
    """Return cu_seqlens_q and position_ids. Raises ValueError if explicit cu_seqlens, padding mask and positions
    contradict each other.

    Positions contradict where a document goes on with those before it in its row (one more than the last), or where
    they fall inside of a document and grow again. They may start anywhere. What may be padding passes: documents of
    ones at an end of a row, and zeros or ones next to a document.

    A compiled graph drops an op that gives nothing. There they are copies, and checked if the result is used.

    Args:
        cu_seqlens_q, cu_seqlens_k: int32 or int64 ``[num_documents + 1]`` over the batch's rows, one after the other.
        mask: bool ``[batch, seqlen]``, False is padding, which cannot be combined with cu_seqlens.
        position_ids: int32 or int64 ``[batch or 1, seqlen]`` of queries and keys.
    """
    given = cu_seqlens_q, cu_seqlens_k, mask, position_ids, batch, seqlen
    if not torch.compiler.is_compiling():
        gate.check_documents(*given)
        return cu_seqlens_q, position_ids
    cu_seqlens_q, copied = gate.checked_documents(*given)
    return cu_seqlens_q, position_ids if position_ids is None else copied


# --- where a row's documents start, by positions and numbers ---


def first_tokens(padding, position_ids, batch, seqlen, device) -> torch.Tensor:
    """Return bool ``[batch, seqlen]``: where a document starts behind another one of its row. Nothing waits for it.

    Example:
        >>> positions, numbers = torch.tensor([[0, 1, 0, 1, 2]]), torch.tensor([[3, 3, 7, 7, 0]])
        >>> first_tokens(None, positions, 1, 5, positions.device).int().tolist()
        [[0, 0, 1, 0, 0]]
        >>> first_tokens(numbers, None, 1, 5, numbers.device).int().tolist()  # 0 is padding
        [[0, 0, 1, 0, 0]]
    """
    real = source = None
    if padding is not None:
        real = (padding != 0).to(device)
        slots = torch.where(real, torch.arange(seqlen, device=device), -1)
        source = slots.cummax(1).values[:, :-1]  # the last real slot up to the one before
        real, source = real[:, 1:] & (source >= 0), source.clamp(min=0)

    def before(values):
        return values[:, :-1] if source is None else values.gather(1, source)

    starts = torch.zeros(batch, max(seqlen - 1, 0), dtype=torch.bool, device=device)
    if position_ids is not None:
        positions = position_ids.to(device).expand(batch, -1)
        starts = positions[:, 1:] <= before(positions)
    if padding is not None and padding.dtype != torch.bool:
        numbers = padding.to(device)
        starts = starts | (numbers[:, 1:] != before(numbers))
    return F.pad(starts if real is None else starts & real, (1, 0))


_INSIDE = (
    "position_ids: expected no restart inside of a document that attention_mask numbers, got one; they may go on from "
    "document to document, or restart where a number changes"
)


_NEGATIVE = "attention_mask: expected 0 for padding and numbers above it for documents, got a negative one"


def wrong_in(padding, position_ids, batch, seqlen, device) -> dict[str, torch.Tensor]:
    """Return {what to say: bool ``[]``, whether it is so} of a mask that numbers documents: of negative numbers, and of
    positions that restart where it goes on.
    """
    if padding is None or padding.dtype == torch.bool:
        return {}
    wrong = {_NEGATIVE: (padding < 0).any()}
    if position_ids is None:
        return wrong
    by_positions = first_tokens(padding != 0, position_ids, batch, seqlen, device)
    by_numbers = first_tokens(padding, None, batch, seqlen, device)
    numbered = (padding > 1).any().to(device)  # a mask of 0 and 1 carries no document ids
    return {_INSIDE: (by_positions & ~by_numbers).any() & numbered, **wrong}


def several_in(
    position_ids=None, padding=None, cu_seqlens=None, numbers=None, batch=1, by_slot=False
) -> torch.Tensor | None:
    """Return whether a row has several documents: bool ``[]``, None if it is unknown. Nothing waits for it.

    by_slot: return bool ``[seqlen]``, where one starts behind another in any row, unless only cu_seqlens say so.
    """
    found, dims = None, {"dim": 0} if by_slot else {}
    if is_tensor(position_ids, 2) and position_ids.shape[1] > 1:
        seqlen = position_ids.shape[1]
        real = padding != 0 if is_tensor(padding, 2) and padding.shape[1] == seqlen else None
        rows = len(position_ids if real is None else real)
        found = first_tokens(real, position_ids, rows, seqlen, position_ids.device).any(**dims)
    elif is_tensor(cu_seqlens, 1):  # with positions they were compared with them
        found = (cu_seqlens.long() * batch).remainder(cu_seqlens[-1:].clamp(min=1)).any()  # one starts inside of a row
    if numbers is not None:
        numbered = first_tokens(numbers, None, *numbers.shape, numbers.device).any(**dims)
        if found is not None and found.dim():  # of the last slots
            found = F.pad(found, (len(numbered) - len(found), 0))
        found = numbered if found is None else found | numbered.to(found.device)
    return found


def refuse_where(wrong, message) -> None:
    """Raise ValueError where a bool, also one on a device, holds. A graph cannot read it and asserts: RuntimeError
    on the CPU; on CUDA this process cannot use the GPU any more.
    """
    if isinstance(wrong, torch.Tensor) and not can_read(wrong):
        torch._assert_async(~wrong, message[:LONGEST_ASSERTION] if wrong.is_cuda else message)
    elif wrong is not None and bool(wrong):
        raise ValueError(message)


def can_read(tensor) -> bool:
    """Return whether values can be read: not in a graph, traced or captured."""
    return not torch.compiler.is_compiling() and not is_captured(tensor)


def tokens_of(args, kwargs):
    """Return the input_ids or inputs_embeds that a model was called with; None without either."""
    return next((t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args[:1]) if t is not None), None)


def rows_of(args, kwargs) -> tuple[int, int]:
    """Return (batch, seqlen) of the tokens that a model was called with; (1, 0) if nothing says."""
    return (1, 0) if (tokens := tokens_of(args, kwargs)) is None else (*tokens.shape, 0)[:2]


def is_tensor(value, dim) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == dim


# --- masks that are tensors ---


def mask_of_row(mask):
    """Return the 2-D mask in one for each kind of layer, which layers with a state get; of others the mask itself."""
    return next((each for each in mask.values() if is_tensor(each, 2)), None) if isinstance(mask, dict) else mask


def each_document_alone(mask_function, kwargs, prepared, batch, q_length, q_offset):
    """Restrict mask_function to documents. Keys of a cache without numbers belong to the first query's document.

    prepared: MaskArguments.
    """
    position_ids, numbers = prepared.position_ids, prepared.numbers
    device = (numbers if position_ids is None else position_ids).device
    # Where documents start among the queries, by positions and by numbers.
    slots, last = torch.arange(q_length, device=device), q_length - 1
    padding = prepared.padding if numbers is None else numbers
    if padding is not None:
        padding = padding.to(device)[:, (slots + q_offset).clamp(max=padding.shape[1] - 1)].expand(batch, -1)
    starts = first_tokens(padding, position_ids, batch, q_length, device)
    documents, runs = starts.cumsum(1), None
    if numbers is not None:
        for message, is_wrong in {
            **wrong_in(padding, position_ids, batch, q_length, device),
            _NEGATIVE: (numbers < 0).any(),  # of cached tokens too
        }.items():
            refuse_where(is_wrong, message)
        runs = first_tokens(numbers, None, *numbers.shape, device).cumsum(1).expand(batch, -1)

    # The mask: of two slots of one document.
    def query_index(slot):
        return (slot - q_offset).clamp(0, last)

    def together(row, head, q, k):
        same = documents[row, query_index(q)] == documents[row, query_index(k)]
        if runs is None:
            return same
        q, k = (slot.clamp(max=runs.shape[1] - 1) for slot in (q, k))  # a cache of fixed length is longer than the mask
        return same & (runs[row, q] == runs[row, k])

    chunk = getattr(kwargs.get("config"), "attention_chunk_size", None)
    plain = getattr(mask_function, "__name__", "") == "and_mask" and not kwargs.get("use_vmap")
    if chunk is None or kwargs.get("local_size") != chunk or not plain:
        return masking_utils.and_masks(mask_function, together)
    # Chunks are counted from where a document starts: the first one after the padding on the left.
    origins = (slots * starts).cummax(1).values + q_offset
    left = 0 if prepared.padding is None else (prepared.padding.cumsum(1) == 0).sum(1, keepdim=True)
    origins = torch.where(documents == 0, left, origins)

    def chunks_of_document(row, head, q, k):
        chunk_q, chunk_k = ((slot - origins[row, query_index(slot)]) // chunk for slot in (q, k))
        return (k <= q) & (chunk_q == chunk_k) & together(row, head, q, k)

    return chunks_of_document


# --- position_ids of several axes (M-RoPE): which models take them, and which documents they tell ---

# The first axis of a model's position_ids. TIME of [3, batch, seqlen], before height and width: text has one number on
# all three, and behind an image it goes on from the image's largest. SEQUENCE of [4, batch, seqlen], before an image's
# width, height and number (HunYuan-VL): it counts the tokens of a document, as positions of text do.
TIME, SEQUENCE = "time", "sequence"
_CODE = {
    TIME: r"position_ids\.(shape\[0\]|size\(0\)) == 4",
    SEQUENCE: r"position_ids\.shape\[0\] == num_mrope_axes \+ 1",
}
_MANY = 2**31  # above any position; times the slots of a row it still fits an int64


def first_axis(cls: type) -> str | None:
    """Return TIME, SEQUENCE, or None for a model of this class that takes position_ids of one axis only."""
    return next((axis for axis, code in _CODE.items() if code_has(cls.forward, code)), None)


def positions_from_axes(axes, padding):
    """Return each slot's distance to the start of its document: where all axes are 0, or where time falls to what it
    has passed.

    Example:
        >>> axes = torch.tensor([0, 1, 2, 0, 1]).expand(3, 1, 5)  # time, height and width of two documents of text
        >>> positions_from_axes(axes, None).tolist()
        [[0, 1, 2, 0, 1]]
    """
    # Time falls within a document too, from the frames of a video to the audio with them, but not to the text before
    # it.
    seqlen = axes.shape[2]
    slots, real = torch.arange(seqlen, device=axes.device), torch.ones_like(axes[0], dtype=torch.bool)
    if is_tensor(padding, 2) and padding.shape[1] >= seqlen:  # of a cache too
        real = (padding[:, padding.shape[1] - seqlen :] != 0).to(axes.device)
        last = (slots * real).cummax(1).values  # padding has any numbers: here those of the last token before it
        axes = axes.expand(3, real.shape[0], seqlen).gather(2, last.expand(3, -1, -1))
    starts, time = (axes == 0).all(0) & real, axes[0].long()
    falls = F.pad(time[:, 1:] < time[:, :-1], (1, 0))
    # What time has passed since it fell last: text, which all axes grow behind, and what is before the first token.
    stretch = (starts | falls).cumsum(1) * _MANY
    first = F.pad(stretch[:, 1:] != stretch[:, :-1], (1, 0), value=True)
    text = F.pad((axes[..., 1:] > axes[..., :-1]).all(0), (0, 1))
    passed = torch.where(text, time, torch.where(first, time - 1, -1))
    passed = (passed + stretch).cummax(1).values - stretch
    starts = starts | (falls & (time <= F.pad(passed[:, :-1], (1, 0), value=-1)))
    return slots - (slots * starts).cummax(1).values


# --- models of one document in a row: an encoder-decoder, and heads that have one result or one target for a row ---

_ENCODER = "decoder_input_ids"  # an argument of a model that has both
_OF_ROWS = ("start_positions", "end_positions", "next_sentence_label", "sentence_order_label", "mc_labels")
_ONE_RESULT = {  # in the code of a forward: what it has of each row
    r"\b\w*(SequenceClassifi|MultipleChoice|NextSentence|DoubleHeads)\w*\(": "scores one token of each row",
    r"^\s+text_embeds=": "has one embedding for each row",  # CLIP and its like
    r"\bquestion_positions\b": "scores spans by one question in each row",  # Splinter
}


def refuse_encoder_decoder(model, call, args, kwargs) -> None:
    """Raise ValueError if a row of either side has several documents: the decoder's row attends to the encoder's
    whole row.
    """
    names = parameters_of(type(model).forward)
    if call.outer is not None or not (_ENCODER in names or kwargs.get("encoder_hidden_states") is not None):
        return
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    masks = {name: given.get(name) for name in ("decoder_attention_mask", "encoder_attention_mask")}
    numbers = {name: m for name, m in masks.items() if is_tensor(m, 2) and m.dtype != torch.bool}
    batch = next((len(given[name]) for name in (_ENCODER, "input_ids") if given.get(name) is not None), 1)
    for name, several in (
        ("position_ids", several_in(call.position_ids, call.padding)),
        ("cu_seq_lens_q", several_in(cu_seqlens=call.cu_seqlens, batch=batch)),
        ("attention_mask", several_in(numbers=call.numbers)),
        ("decoder_position_ids", several_in(given.get("decoder_position_ids"), masks["decoder_attention_mask"])),
        *((name, several_in(numbers=mask)) for name, mask in numbers.items()),
    ):
        refuse_where(several, one_each(name, f"the decoder of {call.name} attends to the encoder's whole row"))


def refuse_one_result(model, call, kwargs, position_ids, batch) -> None:
    """Raise ValueError if a row has several documents, and the model has one result or one target for it."""
    targets = [name for name in _OF_ROWS if kwargs.get(name) is not None]
    has = f"takes one {targets[0]} for each row" if targets else _one_result(type(model))
    if call.outer is not None or not has:
        return
    message = one_each(
        call.named_by(),
        f"{call.name} {has}",
        f"{ROW_EACH}, or call the model inside of it, and its head with the hidden states at "
        "last_token_indices(cu_seqlens)",
    )
    if position_ids is None and call.cu_seqlens is None:  # attention finds the numbers' documents: the host then knows
        call.where_several = batch, message
    else:
        refuse_where(call.several(batch, position_ids), message)


def refuse_packed_choices(model, call, tokens, kwargs) -> None:
    """Raise ValueError as refuse_one_result for rows ``[batch, choices, seqlen]``, each of which has one score: the
    model inside gets them flat.
    """
    if call.outer is not None or tokens.dim() < 3 or not _one_result(type(model)):
        return
    for name in ("position_ids", "attention_mask"):
        rows = kwargs.get(name)
        if is_tensor(rows, 3) and rows.shape == tokens.shape[:3] and rows.dtype != torch.bool:
            rows = rows.flatten(0, 1)
            several = several_in(rows) if name == "position_ids" else several_in(numbers=rows)
            refuse_where(
                several, f"{name}: expected one document in each choice of {call.name}, got several; {ROW_EACH}"
            )


@constant
def _one_result(cls) -> str:
    """Return what its head has once for a row, or an empty string."""
    for base in cls.__mro__:
        if "forward" not in vars(base):
            continue
        if has := next((has for code, has in _ONE_RESULT.items() if code_has(base.forward, code)), ""):
            return has
        if code_has(base.forward, ".") and not code_has(base.forward, r"super\(\)\.forward\("):
            break
    return ""
