"""What the arguments of a model's call tell of documents: position_ids, and numbers in a 2-D attention_mask."""

import torch

# 1, 1, 1, 2, 2, 0: of the documents, 0 for padding. Models multiply by their mask and count along it, so they get ones in
# place of the numbers, and those go with them to where masks are made.
NUMBERS = "_packing_ops_numbers"


def numbers_of(mask) -> torch.Tensor | None:
    """What a model's 2-D mask numbered, or itself where it came to no call of a model; None for one that cannot number."""
    if not is_tensor(mask, 2) or mask.dtype == torch.bool:
        return None
    return getattr(mask, NUMBERS, mask)


def tell_documents(position_ids, padding) -> bool:
    """Positions that do not grow from one real token of a row to the next, whatever padding lies between them."""
    if not is_tensor(position_ids, 2) or position_ids.shape[1] < 2:
        return False
    if not is_tensor(padding, 2) or padding.shape[1] != position_ids.shape[1]:
        return bool((position_ids[:, 1:] <= position_ids[:, :-1]).any())
    real = (padding != 0).to(position_ids.device)
    slots = torch.arange(real.shape[1], device=real.device)
    before = torch.where(real, slots, -1).cummax(1).values[:, :-1]  # the last real slot up to the one before
    positions = position_ids.expand(len(real), -1)
    grown = positions[:, 1:] > positions.gather(1, before.clamp(min=0))
    return bool((real[:, 1:] & (before >= 0) & ~grown).any())


def is_tensor(value, dim) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == dim


def given(name, places, args, kwargs):
    if kwargs.get(name) is None and places.get(name, len(args)) < len(args):
        return args[places[name]]
    return kwargs.get(name)
