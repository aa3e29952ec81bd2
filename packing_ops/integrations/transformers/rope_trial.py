"""Which rotation a function of a modelling module does: told by its parameters, then tried against apply_rotary_qk."""

import functools
import inspect
from typing import NamedTuple

import torch

from packing_ops.integrations.transformers.trial import agree, attempt, numbers, quiet
from packing_ops.rope import apply_rotary_qk

# What these functions take first, by the names that they give it.
_BOTH, _ONE, _COMPLEX = ("q", "k", "cos", "sin"), ("x", "cos", "sin"), ("xq", "xk", "freqs_cis")
# What they may take after it. position_ids are read by none that is served: tables come gathered.
_MORE = frozenset(("position_ids", "unsqueeze_dim", "mrope_section"))
_MROPE, _SECTIONS = "mrope_section", [1, 2, 1]


class Rotation(NamedTuple):
    """How apply_rotary_qk does what a stock function does.

    parameters: all of its names, in order; the first ones are _BOTH, _ONE or _COMPLEX.
    tables: "elements" have an entry per element of a head, "first half" too, of which only the first half is read,
        "pairs" have one per pair, "complex" one complex number per pair.
    interleaved: pairs are elements 2i and 2i + 1.
    to_halves: interleaved pairs that come out as elements i and i + rotary_dim / 2.
    partial: tables for a part of the head rotate its first elements; otherwise they are none of ours.
    unsqueeze_dim: where the heads are, if the caller does not say.
    """

    parameters: tuple[str, ...]
    tables: str
    interleaved: bool
    to_halves: bool
    partial: bool
    unsqueeze_dim: int

    @property
    def leading(self) -> tuple[str, ...]:
        return next(names for names in (_BOTH, _ONE, _COMPLEX) if self.parameters[: len(names)] == names)

    @property
    def table(self) -> str:
        return "freqs_cis" if self.leading is _COMPLEX else "cos"

    def __call__(self, q, k, cos, sin, unsqueeze_dim=None, sections=None):
        """(q, k) rotated; NotImplemented for tables of a width that was not tried."""
        entries, head_dim = cos.shape[-1], q.shape[-1]
        rotary_dim = entries * 2 if self.tables in ("pairs", "complex") else entries
        if rotary_dim != head_dim and not (self.partial and rotary_dim < head_dim):
            return NotImplemented
        if self.tables == "first half":
            cos, sin = cos[..., : entries // 2], sin[..., : entries // 2]
        layout = {"interleaved": self.interleaved, "rotary_dim": rotary_dim, "sections": sections}
        layout["unsqueeze_dim"] = self.unsqueeze_dim if unsqueeze_dim is None else unsqueeze_dim
        q, k = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        q, k = apply_rotary_qk(q, k, cos, sin, **layout)
        return (_to_halves(q, rotary_dim), _to_halves(k, rotary_dim)) if self.to_halves else (q, k)

    def serve(self, stock, args, named):
        """What stock(*args, **named) returns, whose cos may be Tables."""
        given = dict(zip(self.parameters, args)) | named  # noqa: B905  as many as were given
        if self.leading is _ONE:
            q, k, cos, sin = given.get("x"), None, given.get("cos"), given.get("sin")
        elif self.leading is _BOTH:
            q, k, cos, sin = (given.get(name) for name in _BOTH)
        else:
            q, k, table = (given.get(name) for name in _COMPLEX)
            cos, sin = table.real, table.imag
        if q is None or cos is None or sin is None or (k is None and self.leading is not _ONE):
            return stock(*args, **named)
        found = self(q, k, cos, sin, given.get("unsqueeze_dim"), given.get("mrope_section"))
        if found is NotImplemented:
            return stock(*args, **named)
        return found[0] if self.leading is _ONE else found


def _to_halves(x, rotary_dim):
    if x is None:
        return None
    turned = x[..., :rotary_dim].unflatten(-1, (rotary_dim // 2, 2)).transpose(-1, -2).flatten(-2)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), -1)


@functools.cache
@torch.compiler.disable
def rotation_of(stock) -> Rotation | str:
    """The rotation, or why there is none. Kept by the function itself, so that one put in its place is tried anew."""
    try:
        parameters = inspect.signature(stock).parameters
    except (TypeError, ValueError):
        return "its parameters cannot be read"
    names = tuple(parameters)
    leading = next((each for each in (_BOTH, _ONE, _COMPLEX) if names[: len(each)] == each), None)
    if leading is None or not _MORE.issuperset(names[len(leading) :]):
        return f"its parameters ({', '.join(names)}) are not known"
    if any(parameters[name].default is inspect.Parameter.empty for name in names[len(leading) :] if name != _MROPE):
        return f"it needs more than {', '.join(leading)}"
    tables = ("complex",) if leading is _COMPLEX else ("elements", "first half", "pairs")
    default = parameters["unsqueeze_dim"].default if "unsqueeze_dim" in names else None
    errors = []
    with quiet():
        for kind in tables:
            for pairs in ((True, False),) if kind == "complex" else ((False, False), (True, False), (True, True)):
                for dim in (1, 2) if default is None else (default,):
                    rotation = Rotation(names, kind, *pairs, False, dim)
                    if all(rotation_agrees(stock, rotation, errors=errors, **case) for case in _cases(rotation)):
                        if _in_a_model(stock, rotation):
                            return _tried_on_parts(stock, rotation)
                        return "it rotates otherwise in long rows, wide heads or float16, or has another gradient"
    return f"it raises {errors[0]!r}" if errors else "it rotates by none of the formulas of apply_rotary_qk"


def _tried_on_parts(stock, rotation) -> Rotation | str:
    """Tables for 8 of 24 elements: the stock function rotates the first ones, or raises, or is not served."""
    partial, errors = rotation._replace(partial=True), []
    if all(rotation_agrees(stock, partial, 24, errors=errors, any_error=True, **case) for case in _cases(rotation)):
        return partial
    return rotation if errors else "it rotates another part of the head than its first elements"


def _cases(rotation) -> list[dict]:
    cases = [{"batch": 1}, {"batch": 2}, {"dtype": torch.bfloat16}]
    if "unsqueeze_dim" in rotation.parameters:
        cases += [{"unsqueeze_dim": 1}, {"unsqueeze_dim": 2}]
    if "position_ids" in rotation.parameters:
        cases.append({"position_ids": torch.arange(5, device="cpu").flip(0).expand(2, 5)})
    return cases


def rotation_agrees(stock, rotation, head_dim=8, batch=1, dtype=torch.float32, errors=None, any_error=False, **options):
    """Whether both give the same for a batch of 2, 5 tokens, 4 heads of q and 2 of k, and tables of ``batch`` rows."""
    args, more = _arguments(rotation, head_dim, batch, dtype, dim=options.get("unsqueeze_dim"))
    options |= more
    copies = [each.clone() for each in args]
    wanted = attempt(stock, *args, **options)
    if isinstance(wanted, Exception) and (any_error or not isinstance(wanted, (RuntimeError, ValueError))):
        errors.append(wanted)  # those two are of shapes: another form may be the right one
    if not all(torch.equal(each, copy) for each, copy in zip(args, copies, strict=True)):
        return False  # it writes into its arguments
    return _same(rotation, attempt(rotation.serve, _refuse, args, options), wanted)


def _arguments(rotation, head_dim, batch, dtype, dim=None, *, rows=2, tokens=5, heads=(4, 2), width=8):
    """(q, k and the tables of ``width`` elements, or what this rotation takes of them; other arguments)."""
    dim = rotation.unsqueeze_dim if dim is None else dim
    shapes = [(rows, count, tokens, head_dim) if dim == 1 else (rows, tokens, count, head_dim) for count in heads]
    q, k = (numbers(*shape, dtype=dtype, start=i) for i, shape in enumerate(shapes))
    entries = width if rotation.tables in ("elements", "first half") else width // 2
    axes = (3,) if _MROPE in rotation.parameters else ()
    cos, sin = (numbers(*axes, batch, tokens, entries, dtype=dtype, start=start) for start in (2.0, 3.0))
    options = {_MROPE: [each * width // 8 for each in _SECTIONS]} if axes else {}
    if rotation.leading is _COMPLEX:
        return (q, k, torch.complex(cos.float(), sin.float())), options
    return ((q, cos, sin) if rotation.leading is _ONE else (q, k, cos, sin)), options


def _same(rotation, found, wanted, terms=4) -> bool:
    if rotation.leading is _ONE:
        return agree(found, wanted, terms)
    pairs = type(found) is type(wanted) is tuple and len(wanted) == 2
    return pairs and all(agree(ours, theirs, terms) for ours, theirs in zip(found, wanted, strict=True))


_IN_MODELS = [(torch.float32, 1, 300, 64), (torch.float16, 3, 3, 128), (torch.float32, 3, 2, 16)]


def _in_a_model(stock, rotation) -> bool:
    """As models call it: a long row, a larger batch, wide heads, large values, in float16, and with gradients."""
    one = rotation.leading is _ONE
    for dtype, rows, tokens, width in _IN_MODELS:
        sizes = {"rows": rows, "tokens": tokens, "heads": (2, 2), "width": width}
        (*heads, last), options = _arguments(rotation, width, rows, dtype, **sizes)
        tables = [last] if rotation.leading is _COMPLEX else [heads.pop(), last]
        results = []
        for function in (lambda args, named: stock(*args, **named), functools.partial(rotation.serve, _refuse)):
            with torch.enable_grad():
                given = [(100.0 * x).requires_grad_() for x in heads]
                out = attempt(function, (*given, *tables), options)
                outs = [out] if one else list(out) if type(out) is tuple else []
                if len(outs) != len(given) or not all(isinstance(each, torch.Tensor) for each in outs):
                    return False
                loss = sum((each * numbers(*each.shape, start=4.0)).sum() for each in outs)
                if attempt(loss.backward) is not None or any(x.grad is None for x in given):
                    return False
            results.append([*(each.detach() for each in outs), *(x.grad for x in given)])
        if not all(agree(found, wanted, 8) for wanted, found in zip(*results, strict=True)):
            return False
    return True


def _refuse(*_, **__):
    raise ValueError("not served")
