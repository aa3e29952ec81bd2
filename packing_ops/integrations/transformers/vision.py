"""Attention of vision and audio towers that takes cu_seqlens: one call for all images in place of a loop.

transformers passes cu_seqlens to attention if the name of the implementation contains "flash". Otherwise it loops over
the images, whose lengths it reads on the host. Here that loop runs once, over a row of all tokens, and the keywords
that it passes on bring the cu_seqlens of the images to our attention.
"""

import copy
import functools
import inspect

import torch

from packing_ops.integrations._patching import put_class, stock_of, subclass_of
from packing_ops.integrations._trial import agree, attempt, numbers, quiet
from packing_ops.integrations.transformers.attention import register
from packing_ops.integrations.transformers.call import NAMES
from packing_ops.integrations.transformers.rope import HOSTS

_LENGTHS = [5, 1, 6, 2, 40, 1, 3, 1, 4]  # of the images in the trial


def one_call(self, hidden_states, cu_seqlens, *args, **kwargs):
    stock = stock_of(type(self)).forward
    if args or not _fits_one_call(self, hidden_states, kwargs.get("attention_mask")):  # by name, as in transformers
        return stock(self, hidden_states, cu_seqlens, *args, **kwargs)
    row, images = _as_images(hidden_states, cu_seqlens)
    return stock(self, hidden_states, row, *args, **{**kwargs, **images})


def one_call_behind_mask(self, hidden_states, attention_mask=None, cu_seqlens=None, **kwargs):
    """For attention that gets cu_seqlens if there are several images, and otherwise may get a mask."""
    stock = stock_of(type(self)).forward
    if cu_seqlens is None or not _fits_one_call(self, hidden_states, attention_mask):
        return stock(self, hidden_states, attention_mask, cu_seqlens, **kwargs)
    row, images = _as_images(hidden_states, cu_seqlens)
    return stock(self, hidden_states, None, row, **{**kwargs, **images})


_FORWARDS = {("hidden_states", "cu_seqlens"): one_call, ("hidden_states", "attention_mask"): one_call_behind_mask}


def _as_images(x, cu_seqlens):
    row = torch.tensor([0, x.shape[-2]], device="cpu")
    return row, {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}


def _fits_one_call(module, x, mask=None) -> bool:
    """Whether x is one row that our kernels take: one call by SDPA would need a mask of all patches by all patches.

    mask: of one image; the loop passes it on for every image.
    """
    if module.config._attn_implementation not in NAMES or mask is not None:
        return False
    one_row = x.dim() == 2 or (x.dim() == 3 and x.shape[0] == 1)
    return one_row and (x.is_cpu or (x.is_cuda and getattr(module, "head_dim", 8) % 8 == 0))


def _takes_cu_seqlens(module) -> bool:
    cls = stock_of(type(module))
    if not cls.__module__.startswith(HOSTS) or "forward" in vars(module) or not hasattr(module, "config"):
        return False
    return _forward_for(cls) is not None


def _forward_for(cls):
    """Our forward for this class; None if it takes no cu_seqlens."""
    names = [*inspect.signature(cls.forward).parameters][1:4]
    return _FORWARDS.get(tuple(names[:2])) if "cu_seqlens" in names else None


def _layers(model) -> list[torch.nn.Module]:
    """Attention modules, without the blocks around them, which pass cu_seqlens on."""
    return [module for module in model.modules() if _takes_cu_seqlens(module) and not _passes_on(module)]


def _passes_on(module) -> bool:
    return any(_takes_cu_seqlens(inner) for inner in module.modules() if inner is not module)


def why_not(model: torch.nn.Module) -> str | None:
    """Why some of these modules must keep their loop over the images; None if all can be swapped."""
    reasons = {(type(module), reason): None for module in _layers(model) if (reason := _refusal(module))}
    return "; ".join(f"{stock_of(cls).__name__} {reason}" for cls, reason in reasons) or None


def apply_to_model(model: torch.nn.Module) -> int:
    """Returns the number of modules that take all images in one call, while attn_implementation is ours."""
    found = [module for module in _layers(model) if not _refusal(module)]
    for module in found:
        put_class(module, _forward_for(stock_of(type(module))))
    return len(found)


# --- the trial ---


def _refusal(module) -> str | None:
    stock = stock_of(type(module))
    numbers_of_it = {
        name: value for name, value in sorted(vars(module).items()) if type(value) in (int, float, bool, str)
    }
    sizes = tuple((name, type(child), _width(child)) for name, child in module.named_children())
    return _tried(stock, stock.forward, tuple(numbers_of_it.items()), sizes, type(module.config))


def _width(child) -> tuple[int, int] | None:
    """(in_features, out_features); (0, 0) for a norm, which computes by token or head; None for other modules."""
    if hasattr(child, "in_features"):
        return child.in_features, child.out_features
    return (0, 0) if type(child).__name__.endswith(("RMSNorm", "LayerNorm")) else None


@functools.cache
@torch.compiler.disable
def _tried(stock, forward, attributes, children, config_class) -> str | None:
    """Why one call does not give what the loop gives; None if it does: images of several lengths, float32, on the CPU.

    The trial makes a module of the same class and attributes, with projections that have no weights. Cached by forward
    and by everything that this module is made of.
    """
    # The module of the trial
    if unknown := [name for name, _, width in children if width is None]:
        return f"holds {', '.join(unknown)}"
    register()  # the trial calls our attention by its name
    ours = subclass_of(stock, _forward_for(stock))
    probe = ours.__new__(ours)
    torch.nn.Module.__init__(probe)
    for name, value in attributes:
        setattr(probe, name, value)
    for name, _, width in children:
        setattr(probe, name, _Projection(*width) if width[0] else torch.nn.Identity())
    probe.config = _Config()
    width = max(in_features for _, _, (in_features, _) in children) if children else 0
    needed = [
        name
        for name, parameter in list(inspect.signature(forward).parameters.items())[3:]
        if parameter.default is inspect.Parameter.empty and parameter.kind < 2
    ]
    with quiet():
        # Arguments of its forward
        total, ends = sum(_LENGTHS), torch.tensor([0, *_LENGTHS], device="cpu").cumsum(0, dtype=torch.int32)
        x = numbers(total, width)
        given = {"max_seqlen": max(_LENGTHS)} if "max_seqlen" in needed else {}
        if "position_embeddings" in inspect.signature(forward).parameters:
            head_dim = getattr(probe, "head_dim", 0)
            given["position_embeddings"] = numbers(total, head_dim, start=1.0), numbers(total, head_dim, start=2.0)
        if unknown := [name for name in needed if name not in ("cu_seqlens", *given)]:
            return f"takes {', '.join(unknown)}"
        # The loop, in the form that this forward takes; one call; and one image, which must differ from both
        for rows, more in ((x, {}), (x[None], {}), (x, {"attention_mask": None}), (x[None], {"attention_mask": None})):
            wanted = attempt(_with(probe, "sdpa").forward, rows, cu_seqlens=ends, **given, **more)
            if not isinstance(wanted, Exception):
                break
        found = attempt(_with(probe, "packing_ops").forward, rows, cu_seqlens=ends, **given, **more)
        mixed = attempt(_with(probe, "sdpa").forward, rows, cu_seqlens=ends[[0, -1]], **given, **more)
    # Verdict
    for name, result in (("stock", wanted), ("ours", found)):
        if isinstance(result, Exception):
            return f"raises {result!r} in the trial of {name}"
    wanted, found, mixed = map(_hidden_states, (wanted, found, mixed))
    if agree(mixed, wanted, 64):
        return "does not keep images apart in the trial"
    return None if agree(found, wanted, 64) else "gives other values in one call"


def _hidden_states(result):
    """hidden_states of (hidden_states, weights) if all weights are None, as from SDPA and ours."""
    if isinstance(result, tuple) and len(result) == 2:
        weights = result[1] if isinstance(result[1], (list, tuple)) else [result[1]]
        return result[0] if all(each is None for each in weights) else None
    return result


class _Config:
    _attn_implementation = "sdpa"


def _with(probe, implementation):
    probe = copy.copy(probe)
    probe.config = _Config()
    probe.config._attn_implementation = implementation
    return probe


class _Projection(torch.nn.Module):
    """In place of a linear layer in a trial: every output is an input times a number."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x):
        repeats = -(-self.out_features // self.in_features)
        return torch.cat([x] * repeats, -1)[..., : self.out_features] * numbers(self.out_features, start=7.0)
