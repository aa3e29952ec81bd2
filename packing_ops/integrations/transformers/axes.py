"""position_ids of several axes (M-RoPE): which models take them, and which documents they tell."""

import functools
import inspect
import re

import torch
import torch.nn.functional as F

from packing_ops.integrations.transformers.document_checks import is_tensor

# The first axis of a model's position_ids. TIME of [3, batch, seqlen], before height and width: text has one number on all
# three, and behind an image it goes on from the image's largest. SEQUENCE of [4, batch, seqlen], before an image's width,
# height and number (HunYuan-VL): it counts the tokens of a document, as positions of text do.
TIME, SEQUENCE = "time", "sequence"
_CODE = {
    TIME: r"position_ids\.(shape\[0\]|size\(0\)) == 4",
    SEQUENCE: r"position_ids\.shape\[0\] == num_mrope_axes \+ 1",
}
_MANY = 2**31  # above any position; times the slots of a row it still fits an int64


@functools.cache
def first_axis(cls: type) -> str | None:
    """TIME, SEQUENCE, or None for a model of this class that takes position_ids of one axis only."""
    try:
        source = inspect.getsource(inspect.unwrap(cls.forward))
    except (OSError, TypeError):  # no source
        return None
    return next((axis for axis, code in _CODE.items() if re.search(code, source)), None)


def are_axes(position_ids, axis) -> bool:
    """Of several axes and no text positions in front, which such a model takes apart itself.

    Time, height and width of any model: Qwen3-VL of 4.57 gives mask and layers the time, which stands still in an image.
    """
    return is_tensor(position_ids, 3) and (position_ids.shape[0] == 3 or axis == SEQUENCE)


def positions_of_axes(call, shape):
    """``[batch or 1, seqlen]`` that restart with each document, of a call's position_ids with several axes; else None.

    None beside cu_seq_lens_q where time is the first axis: a model that makes its axes itself counts them along the row.
    """
    axes, (batch, seqlen) = call.position_ids, shape
    if call.first_axis is None or not is_tensor(axes, 3) or tuple(axes.shape[1:]) not in ((batch, seqlen), (1, seqlen)):
        return None
    if call.positions_of_axes is None:  # one tensor for masks and layers with a state, which look at its values once
        if call.first_axis == SEQUENCE and axes.shape[0] > 3:
            call.positions_of_axes = axes[0]
        elif call.first_axis == TIME and axes.shape[0] == 3 and call.cu_seqlens is None:
            call.positions_of_axes = _since_start(axes, call.padding)
    return call.positions_of_axes


def _since_start(axes, padding):
    """Each slot's distance to the start of its document: where all axes are 0, or where time falls to what it has passed.

    Time falls within a document too, from the frames of a video to the audio beside them, but not to the text before it.
    """
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
