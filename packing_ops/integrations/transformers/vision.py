"""Attention of vision and audio towers that takes cu_seqlens: one call for all images in place of a loop.

transformers passes cu_seqlens to attention if the name of the implementation contains "flash". Otherwise it loops over
the images, whose lengths it reads on the host. Here that loop runs once, over a row of all tokens, and the keywords
that it passes on bring the cu_seqlens of the images to our attention.
"""

import copy
import inspect
import types

import torch

from packing_ops.integrations._patching import kept_with_class, put_class, stock_of, subclass_of
from packing_ops.integrations._trial import agree, attempt, bare, numbers, quiet
from packing_ops.integrations.transformers.attention import register
from packing_ops.integrations.transformers.call import NAMES
from packing_ops.integrations.transformers.rope import HOSTS
from packing_ops.integrations.transformers.versions import parameters_of

_BEGIN = ("hidden_states", "cu_seqlens"), ("hidden_states", "attention_mask")  # of the parameters of their forward
_LENGTHS = [5, 1, 6, 2, 40, 1, 3, 1, 4]  # of the images in the trial


def one_call(self, hidden_states, *args, **kwargs):
    stock = stock_of(type(self)).forward
    given = dict(zip(parameters_of(stock)[1:], args, strict=False), **kwargs)
    cu_seqlens = given.get("cu_seqlens")  # None for one image, of which some blocks make a mask
    if cu_seqlens is None or not _fits_one_call(self, hidden_states, given.get("attention_mask")):
        return stock(self, hidden_states, *args, **kwargs)
    row = torch.tensor([0, hidden_states.shape[-2]], device="cpu")
    images = {"cu_seqlens": row, "cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    return stock(self, hidden_states, **{**given, **images})


def _fits_one_call(module, x, mask=None) -> bool:
    """Return whether x is one row that our kernels take: one call by SDPA would need a mask of all patches by all
    patches.
    """
    # A mask is of one image, for every one of them.
    if module.config._attn_implementation not in NAMES or mask is not None:
        return False
    one_row = x.dim() == 2 or (x.dim() == 3 and x.shape[0] == 1)
    return one_row and (x.is_cpu or (x.is_cuda and getattr(module, "head_dim", 8) % 8 == 0))


def _takes_cu_seqlens(module) -> bool:
    cls = stock_of(type(module))
    if not cls.__module__.startswith(HOSTS) or "forward" in vars(module) or not hasattr(module, "config"):
        return False
    names = parameters_of(cls.forward)
    return names[:2] in _BEGIN and "cu_seqlens" in names[:3]


def _layers(model) -> list[torch.nn.Module]:
    """Return attention modules, without the blocks around them, which pass cu_seqlens on."""
    found = [module for module in model.modules() if _takes_cu_seqlens(module)]
    return [module for module in found if not any(map(_takes_cu_seqlens, [*module.modules()][1:]))]


def why_not(model: torch.nn.Module) -> str | None:
    """Return why some of these modules must keep their loop over the images; None if all can be swapped."""
    reasons = {(type(module), reason): None for module in _layers(model) if (reason := _refusal(module))}
    return "; ".join(f"{stock_of(cls).__name__} {reason}" for cls, reason in reasons) or None


def apply_to_model(model: torch.nn.Module) -> None:
    """Let modules take all images in one call, while attn_implementation is ours."""
    for module in _layers(model):
        if not _refusal(module):
            put_class(module, one_call)


def count(model: torch.nn.Module) -> int:
    """Return the number of modules that take all images in one call."""
    return sum(type(module).forward is one_call for module in model.modules())


# --- the trial ---


def _refusal(module) -> str | None:
    stock = stock_of(type(module))
    attributes = tuple(each for each in sorted(vars(module).items()) if type(each[1]) in (int, float, bool, str))
    sizes = tuple((name, type(child), _width(child)) for name, child in module.named_children())
    return _tried(stock, stock.forward, attributes, sizes, type(module.config))


def _width(child) -> tuple[int, int] | None:
    """Return (in_features, out_features); (0, 0) for a norm, which computes by token or head; None for other
    modules.
    """
    if hasattr(child, "in_features"):
        return child.in_features, child.out_features
    return (0, 0) if type(child).__name__.endswith(("RMSNorm", "LayerNorm")) else None


@kept_with_class
@torch.compiler.disable
def _tried(stock, forward, attributes, children, config_class) -> str | None:
    """Return why one call does not give what the loop gives; None if it does: images of several lengths, float32, on
    the CPU.
    """
    # A module of the same class and attributes, with projections that have no weights
    if unknown := [name for name, _, width in children if width is None]:
        return f"holds {', '.join(unknown)}"
    register()  # the trial calls our attention by its name
    projections = [(name, _Projection(*width) if width[0] else torch.nn.Identity()) for name, _, width in children]
    probe = bare(subclass_of(stock, one_call), [*attributes, *projections])
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

        def result_of(implementation, ends, rows, more):
            module = copy.copy(probe)
            module.config = types.SimpleNamespace(_attn_implementation=implementation)
            return attempt(module.forward, rows, cu_seqlens=ends, **given, **more)

        # The loop, in the form that this forward takes; one call; and one image, which must differ from both
        for form in ((x, {}), (x[None], {}), (x, {"attention_mask": None}), (x[None], {"attention_mask": None})):
            wanted = result_of("sdpa", ends, *form)
            if not isinstance(wanted, Exception):
                break
        found = result_of("packing_ops", ends, *form)
        mixed = result_of("sdpa", ends[[0, -1]], *form)
    # Verdict
    for name, result in (("stock", wanted), ("ours", found)):
        if isinstance(result, Exception):
            return f"raises {result!r} in the trial of {name}"
    wanted, found, mixed = map(_hidden_states, (wanted, found, mixed))
    if agree(mixed, wanted, 64):
        return "does not keep images apart in the trial"
    return None if agree(found, wanted, 64) else "gives other values in one call"


def _hidden_states(result):
    """Return hidden_states of (hidden_states, weights) if all weights are None, as from SDPA and ours."""
    if isinstance(result, tuple) and len(result) == 2:
        weights = result[1] if isinstance(result[1], (list, tuple)) else [result[1]]
        return result[0] if all(each is None for each in weights) else None
    return result


class _Projection(torch.nn.Module):
    """In place of a linear layer in a trial: every output is an input times a number."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def forward(self, x):
        repeats = -(-self.out_features // self.in_features)
        return torch.cat([x] * repeats, -1)[..., : self.out_features] * numbers(self.out_features, start=7.0)
