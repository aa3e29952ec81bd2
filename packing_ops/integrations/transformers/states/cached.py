"""Calls that go on with a cache, of models with layers that carry a state.

A cache holds one state for each row, and goes on with tokens of the same document. No layer would notice another
document, nor padding that a state has taken for tokens: such calls are refused here. All others run as in transformers,
where a state is zero behind padding on the left.
"""

from collections.abc import Mapping

import torch
from torch.nn.functional import pad

from packing_ops.integrations._walks import kept_with_model
from packing_ops.integrations.transformers.documents import can_read, is_tensor, refuse_where, several_in
from packing_ops.integrations.transformers.states.stateful_rows import CACHES
from packing_ops.integrations.transformers.versions import cached_length, class_name, code_has, parameters_of

# In a cache: (the mask of the tokens that calls have filled it with, or None; whether a step with it was looked at).
_SEEN = "_packing_ops_seen"
# In the code of a layer: a recurrence that is zero before every call of several tokens, what would give it a state, and
# a step whose sum has the states of all rows in each (RWKV).
_STARTS_ANEW, _GOES_ON = r"mamba_selective_scan\(|position_ids\.shape\[1\] != 1", r"\binitial_states?="
_MIXES_ROWS = r"shifted = state\[1\]\[:, :, self\.layer_id\]"


def named(model, args, kwargs) -> dict:
    """Return the arguments of a call, those without a name too, by their names."""
    return {**dict(zip(parameters_of(type(model).forward), args, strict=False)), **kwargs}


def caches_in(given) -> dict:
    """Return the caches among such arguments, or in what a model returned, by name."""
    return {name: given[name] for name in sorted(CACHES.intersection(given)) if given[name] is not None}


def goes_on(model, call, caches, tokens) -> bool:
    """Return whether a call goes on with a state in one of its caches. Raise ValueError where that is of another
    document or of padding.
    """
    # Of layers that start anew the state may be in themselves.
    caches = {name: each for name, each in caches.items() if state_in(each, bool(_layers_of(call, model)[0]))}
    if not caches or call.on_ranks:
        return False
    (name, cache), around = next(iter(caches.items())), call.outer
    call.saw_state = True
    if around is not None and around.saw_state and not call.says_others_than(around):
        return True
    (batch, seqlen), traced = tokens.shape[:2], torch.compiler.is_compiling()
    _refuse_layers(call, model, name, batch, seqlen)
    mask, seen = call.mask if is_tensor(call.mask, 2) else None, None if traced else getattr(cache, _SEEN, None)
    if mask is not None and mask.shape[1] > seqlen and not _counts(cache):
        call.mask_of_tokens = call.padding[:, -seqlen:]
    # generate gives every step a mask: on CUDA the first step alone waits. A graph reads nothing.
    if seqlen == 1 and (traced or (tokens.is_cuda and seen is not None and seen[1])):
        return True
    length = cached_length(cache) if hasattr(cache, "get_seq_length") and _counts(cache) else None
    if mask is not None and not call.masks_made and isinstance(length, int) and mask.shape[1] < length + seqlen:
        raise ValueError(
            f"attention_mask: expected {[batch, length + seqlen]}, of the {length} tokens in {name} too, got "
            f"{list(mask.shape)}"
        )
    if seen is not None and seen[0] is not None and isinstance(length, int):
        seen = seen[0][:, :length], seen[1]  # cropped as the cache was
    whole = _of_whole_row(None if seen is None else seen[0], mask, batch, seqlen)
    title, got = class_name(model), "a filled one" if length is None else f"{length} tokens"
    wrong = {
        f"{name}: expected an empty cache beside several documents in a row, got {got}, whose state the layers of "
        f"{title} would go on with": _several(call, mask, whole, batch, seqlen),
        f"attention_mask: expected padding beside {name} on the left of a row alone, got some behind a token, and "
        f"layers of {title} go on with a state that has taken it for tokens": _pads_inside(whole, seqlen),
        f"attention_mask: expected the padding that {name} was filled with, got another, and layers of {title} go on "
        "with a state of that (a call of one token takes padding for a token)": _differs(seen, mask, seqlen),
    }  # fmt: skip
    _refuse(wrong)
    if not traced:
        whole = whole if seqlen > 1 or seen is None else seen[0]
        _keep(cache, None if whole is None or len(whole) != batch else whole, seqlen == 1)
    if not _counts(cache):  # without attention: what the call says of documents has arrived
        for each in (call, *call.outers):
            each.unconsumed.clear()
    return True


def note(call, kwargs, outputs) -> None:
    """Keep in a cache that a call has filled which of its tokens are padding."""
    if call.saw_state or call.traced:
        return
    of_outputs = caches_in(outputs) if isinstance(outputs, Mapping) else {}
    for cache in {**caches_in(kwargs), **of_outputs}.values():
        if state_in(cache):
            # A call of one token takes padding for one.
            _keep(cache, call.mask if is_tensor(call.mask, 2) and call.mask.shape[1] > 1 else None, False)
            for each in call.outers:  # whose mask may be of other tokens
                each.saw_state = True


def _keep(cache, mask, looked):
    if hasattr(cache, "__dict__"):  # RWKV's is a list
        # A copy: the caller may write into the mask. In a captured graph it would be of the graph's memory: not known.
        is_known = mask is None or can_read(mask)
        setattr(cache, _SEEN, (mask if mask is None else mask.clone(), looked) if is_known else None)


def _refuse_layers(call, model, name, batch, seqlen) -> None:
    """Raise ValueError for layers of transformers that do not go on with such a call."""
    anew, mixes = _layers_of(call, model)
    if anew and seqlen > 1:
        raise ValueError(
            f"{name}: expected one token of each row behind a filled cache, got {seqlen}, and the state of {anew} is "
            "zero before every call of several; give all of a prompt in the call that fills the cache"
        )
    if mixes and seqlen == 1 < batch:
        raise ValueError(
            f"{name}: expected one row in a call of one token, got {batch}, of which {mixes} mixes the states; decode "
            "rows one by one"
        )


@kept_with_model
def _layers_of(model) -> tuple[str, str]:
    """Return the classes of layers (whose state is zero before every call of several tokens, that mix the states of
    rows), each empty if there is none.
    """
    anew = (each for each in model.modules() if code_has(type(each), _STARTS_ANEW))
    anew = next((class_name(each) for each in anew if not code_has(type(each), _GOES_ON)), "")
    return anew, next((class_name(each) for each in model.modules() if code_has(type(each), _MIXES_ROWS)), "")


# --- what a cache holds ---


def state_in(cache, in_layers: bool = False) -> bool:
    """Return whether a cache has a state to go on with. One of attention alone has none, unless layers keep theirs."""
    if isinstance(cache, list):  # RWKV's
        return bool(cache) and all(isinstance(each, torch.Tensor) for each in cache)
    filled = [each.has_previous_state for each in getattr(cache, "layers", ()) if hasattr(each, "has_previous_state")]
    if any(any(each.values()) for each in filled):
        return True
    if filled or in_layers or hasattr(cache, "linear_cache"):  # RecurrentGemma's are in layers, MiniMax's beside them
        length = cached_length(cache) if _counts(cache) else 0
        return isinstance(length, int) and length > 0
    return not getattr(cache, "rnn_state_initial", True)  # xLSTM's


def _counts(cache) -> bool:
    """Return whether a layer of a cache, one of attention, counts its tokens."""
    return any(hasattr(each, "get_seq_length") for each in getattr(cache, "layers", ()))


# --- what a call says of its rows ---


def _of_whole_row(before, mask, batch, seqlen):
    """Return the mask of the tokens in the cache and those of the call; None where nothing masks any of them. Without a
    mask it has the rows that filled the cache, of which it may hold others now.
    """
    if mask is not None and mask.shape[1] > seqlen:
        return mask
    if mask is None:
        return None if before is None else pad(before, (0, seqlen), value=1)
    before = mask.new_ones(batch, 1) if before is None or len(before) != batch else before.to(mask)
    return torch.cat([before, mask], 1)


def _several(call, mask, whole, batch, seqlen):
    """Return whether a document starts among the tokens of the call, behind another one: bool ``[]``."""
    found = several_in(
        call.row_positions(batch, seqlen),
        None if mask is None else mask[:, -seqlen:],
        call.cu_seqlens,
        call.numbers,
        batch,
    )
    positions = call.position_ids.amax(0) if is_tensor(call.position_ids, 3) else call.position_ids
    if not is_tensor(positions, 2) or positions.shape[1] != seqlen:
        return found
    # A position of 0, on all axes, behind a token in the cache
    starts = positions == 0
    if whole is not None and len(whole) == batch:
        before, real = (whole != 0).to(starts.device).split([whole.shape[1] - seqlen, seqlen], 1)
        starts = starts & real & before.any(1, keepdim=True)
    return starts.any() if found is None else found | starts.any().to(found.device)


def _pads_inside(mask, seqlen):
    """Return whether padding is between two tokens of a row, the second of which is among the last ``seqlen``: bool
    ``[]``.
    """
    if mask is None:
        return None
    real = mask != 0
    behind = (~real & (real.cumsum(1) > 0)).cumsum(1) > 0
    return (behind & real)[:, -seqlen:].any()


def _differs(seen, mask, seqlen):
    """Return whether a mask of all tokens says of cached ones what the calls with them said of no row, in a row that
    goes on: bool ``[]``. reorder_cache may have put rows in another order.
    """
    if seen is None or mask is None or mask.shape[1] <= seqlen:
        return None
    cached, more = (mask != 0).split([mask.shape[1] - seqlen, seqlen], 1)
    before = torch.ones_like(cached) if seen[0] is None else (seen[0] != 0).to(cached.device)[:, : cached.shape[1]]
    before = pad(before, (0, cached.shape[1] - before.shape[1]), value=True)
    return (~(before == cached[:, None]).all(2).any(1) & more.any(1)).any()


def _refuse(wrong) -> None:
    """Raise ValueError with the first message that is so: {what to say: bool ``[]`` or None}."""
    wrong = {message: found for message, found in wrong.items() if found is not None}
    if all(map(can_read, wrong.values())):  # one wait for all
        device = next((each.device for each in wrong.values()), None)
        found = torch.stack([each.to(device) for each in wrong.values()]).tolist() if wrong else []
        wrong = dict(zip(wrong, found, strict=True))
    for message, found in wrong.items():
        refuse_where(found, message)
