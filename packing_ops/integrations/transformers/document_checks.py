"""Whether a model's call has several documents in a row: by its position_ids, or by numbers in a 2-D attention_mask."""

import torch

from packing_ops._batch_cache import is_captured

# 1, 1, 1, 2, 2, 0: of the documents, 0 for padding. Models multiply by their mask and count along it, so they get ones in
# place of the numbers, and those go with them to where masks are made.
NUMBERS = "_packing_ops_numbers"


def numbers_of(mask) -> torch.Tensor | None:
    """What a model's 2-D mask numbered, or itself where it came to no call of a model; None for one that cannot number."""
    if not is_tensor(mask, 2) or mask.dtype == torch.bool:
        return None
    return getattr(mask, NUMBERS, mask)


def positions_restart(position_ids, padding) -> torch.Tensor | None:
    """Whether positions do not grow from one real token of a row to the next, whatever padding lies between: bool ``[]``.

    None where they say nothing.
    """
    if not is_tensor(position_ids, 2) or position_ids.shape[1] < 2:
        return None
    if not is_tensor(padding, 2) or padding.shape[1] != position_ids.shape[1]:
        return (position_ids[:, 1:] <= position_ids[:, :-1]).any()
    real = (padding != 0).to(position_ids.device)
    slots = torch.arange(real.shape[1], device=real.device)
    before = torch.where(real, slots, -1).cummax(1).values[:, :-1]  # the last real slot up to the one before
    positions = position_ids.expand(len(real), -1)
    grown = positions[:, 1:] > positions.gather(1, before.clamp(min=0))
    return (real[:, 1:] & (before >= 0) & ~grown).any()


def several_in(position_ids, padding, cu_seqlens, numbers, batch) -> torch.Tensor | None:
    """Whether a row has several documents: bool ``[]``, None where nothing says. Nothing waits for it."""
    found = [positions_restart(position_ids, padding)]
    if found[0] is None and is_tensor(cu_seqlens, 1):  # beside positions they were held against them
        found.append((cu_seqlens.diff() > 0).sum() > batch)
    if numbers is not None:
        found.append((numbers > 1).any())
    found = [each for each in found if each is not None]
    return None if not found else found[0] if len(found) == 1 else found[0] | found[1].to(found[0].device)


def refuse_where(wrong, message) -> None:
    """ValueError where the bool ``wrong`` holds, None is False. A graph cannot read it and asserts: RuntimeError on the CPU,
    on CUDA the end of this process's use of the GPU."""
    if wrong is None:
        return
    if not can_read(wrong):
        torch._assert_async(~wrong, message)
    elif bool(wrong):
        raise ValueError(message)


def can_read(tensor) -> bool:
    """Not in a graph, traced or captured."""
    return not torch.compiler.is_compiling() and not is_captured(tensor)


def is_tensor(value, dim) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == dim


def argument(name, indices, args, kwargs):
    if kwargs.get(name) is None and indices.get(name, len(args)) < len(args):
        return args[indices[name]]
    return kwargs.get(name)
