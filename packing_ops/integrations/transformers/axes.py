"""position_ids of three axes, time, height and width (M-RoPE): which models take them, and which documents they tell."""

import functools
import inspect
import re

import torch

from packing_ops.integrations.transformers.document_checks import is_tensor


@functools.cache
def takes_axes(cls: type) -> bool:
    """Whether a model of this class takes position_ids of time, height and width with text positions in front."""
    try:
        source = inspect.getsource(inspect.unwrap(cls.forward))
    except (OSError, TypeError):  # no source
        return False
    return re.search(r"position_ids\.(shape\[0\]|size\(0\)) == 4", source) is not None


def text_positions(call, shape):
    """``[batch, seqlen]`` that restart with each document, of a call's position_ids ``[3, batch or 1, seqlen]``; else None.

    A document starts where all axes are 0: text goes on behind the largest position of an image, and no two patches of
    one have the same. None beside cu_seq_lens_q, which go first: a model that makes its axes itself counts them along
    the row.
    """
    axes, (batch, seqlen) = call.position_ids, shape
    if not call.takes_axes or call.cu_seqlens is not None or axes is None or axes.dim() != 3:
        return None
    if call.text_positions is None and tuple(axes.shape) in ((3, batch, seqlen), (3, 1, seqlen)):
        # One tensor for masks and layers with a state, which look at its values once.
        call.text_positions = _positions(axes, call.padding)
    return call.text_positions


def _positions(axes, padding):
    starts, seqlen = (axes == 0).all(0), axes.shape[2]
    if is_tensor(padding, 2) and padding.shape[1] >= seqlen:  # of a cache too; models give padding zeros
        starts = starts & (padding[:, padding.shape[1] - seqlen :] != 0).to(starts.device)
    slots = torch.arange(seqlen, device=starts.device)
    return slots - (slots * starts).cummax(1).values
