"""Which rotation a function computes: its parameters give a guess, a run next to apply_rotary_qk confirms it."""

import inspect
import itertools
from typing import NamedTuple

import torch

from packing_ops.integrations._patching import kept_with_class
from packing_ops.integrations._trial import alike, attempt, numbers, quiet, tensors_of, with_gradients
from packing_ops.rope import apply_rotary_qk

# The first parameters of these functions.
_BOTH, _ONE, _COMPLEX = ("q", "k", "cos", "sin"), ("x", "cos", "sin"), ("xq", "xk", "freqs_cis")
# Parameters that may follow. Functions that read position_ids are not served: tables are already gathered.
_MORE = frozenset(("position_ids", "unsqueeze_dim", "mrope_section"))
_MROPE, _SECTIONS = "mrope_section", [1, 2, 1]


class Rotation(NamedTuple):
    """How to call apply_rotary_qk for what a stock function computes.

    tables: "elements" have an entry per element of a head; "first half" too, and only the first half is read; "pairs"
        have an entry per pair; "complex" have a complex number per pair.
    tokens: also without a batch, as vision towers call it: q ``[tokens, heads, head_dim]``, tables
        ``[tokens, entries]``.
    """

    parameters: tuple[str, ...]  # names of all, in order; the first ones are _BOTH, _ONE or _COMPLEX
    tables: str
    interleaved: bool  # pairs are elements 2i and 2i + 1
    to_halves: bool  # interleaved pairs are returned as elements i and i + rotary_dim / 2
    partial: bool  # tables narrower than a head rotate its first elements; otherwise they are not served
    unsqueeze_dim: int  # of heads, if the caller does not pass it
    tokens: bool = False

    @property
    def takes_one(self) -> bool:
        return self.parameters[0] == _ONE[0]

    @property
    def table(self) -> str:
        return "freqs_cis" if self.tables == "complex" else "cos"

    def serve(self, stock, args, named):
        """Return what stock(*args, **named) returns, whose cos may be Tables; from stock for shapes that no trial
        covers.
        """
        given = dict(zip(self.parameters, args)) | named  # noqa: B905  as many as were given
        if self.tables == "complex":
            q, k, table = (given.get(name) for name in _COMPLEX)
            cos, sin = table.real, table.imag
        else:
            q, k, cos, sin = (given.get(name) for name in (self.parameters[0], "k", "cos", "sin"))
        if q is None or cos is None or sin is None or (k is None and not self.takes_one):
            return stock(*args, **named)
        entries, head_dim = cos.shape[-1], q.shape[-1]
        rotary_dim = entries * 2 if self.tables in ("pairs", "complex") else entries
        fits = rotary_dim == head_dim or (self.partial and rotary_dim < head_dim)
        if not fits or (q.dim() == 3 and not self.tokens):
            return stock(*args, **named)
        if self.tables == "first half":
            cos, sin = cos[..., : entries // 2], sin[..., : entries // 2]
        dim, sections = given.get("unsqueeze_dim"), given.get(_MROPE)
        layout = {"interleaved": self.interleaved, "rotary_dim": rotary_dim, "sections": sections}
        layout["unsqueeze_dim"] = self.unsqueeze_dim if dim is None else dim
        q, k = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k))
        q, k = apply_rotary_qk(q, k, cos, sin, **layout)
        if self.to_halves:
            q, k = _to_halves(q, rotary_dim), _to_halves(k, rotary_dim)
        return q if self.takes_one else (q, k)


def _to_halves(x, rotary_dim):
    if x is None:
        return None
    turned = x[..., :rotary_dim].unflatten(-1, (rotary_dim // 2, 2)).transpose(-1, -2).flatten(-2)
    return turned if rotary_dim == x.shape[-1] else torch.cat((turned, x[..., rotary_dim:]), -1)


@kept_with_class
@torch.compiler.disable
def rotation_of(stock) -> Rotation | str:
    """Return the rotation of a stock function, or why it is not served. Another function in its place has another
    entry.
    """
    # Parameters
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
    # Trials of every form of tables, pairs and dimensions
    is_complex = leading is _COMPLEX
    tables = ("complex",) if is_complex else ("elements", "first half", "pairs")
    pairs = ((True, False),) if is_complex else ((False, False), (True, False), (True, True))
    dims = (parameters["unsqueeze_dim"].default,) if "unsqueeze_dim" in names else (1, 2)
    errors = []
    with quiet():
        for kind, of_pairs, dim in itertools.product(tables, pairs, dims):
            rotation = Rotation(names, kind, *of_pairs, False, dim)
            if not all(_agrees(stock, rotation, case, errors) for case in _cases(names)):
                continue
            if not all(_agrees(stock, rotation, case) for case in _IN_MODELS):
                return "it rotates otherwise in long rows, wide heads or float16, or has another gradient"
            of_tokens = rotation._replace(tokens=True)
            rotation = rotation._replace(tokens=all(_agrees(stock, of_tokens, case) for case in _OF_TOKENS))
            # Tables for 8 of 24 elements: the first ones rotate, or the stock function raises, or it is not served.
            partial, errors = rotation._replace(partial=True), []
            cases = [case._replace(head_dim=24) for case in _cases(names)]
            if all(_agrees(stock, partial, case, errors, any_error=True) for case in cases):
                return partial
            return rotation if errors else "it rotates another part of the head than its first elements"
    return f"it raises {errors[0]!r}" if errors else "it rotates by none of the formulas of apply_rotary_qk"


class _Case(NamedTuple):
    """Arguments of a trial. batch: of the tables; width: the elements of a head that rotate; heads: of q and k.

    in_model: large values, whose gradients agree too. tokens_alone: without a batch, as vision towers have them.
    """

    head_dim: int = 8
    batch: int = 1
    rows: int = 2
    tokens: int = 5
    width: int = 8
    heads: tuple[int, int] = (4, 2)
    dtype: torch.dtype = torch.float32
    options: tuple = ()  # keywords, as (name, value)
    in_model: bool = False
    tokens_alone: bool = False


def _cases(names) -> list[_Case]:
    cases = [_Case(), _Case(batch=2), _Case(dtype=torch.bfloat16)]
    if "unsqueeze_dim" in names:
        cases += [_Case(options=(("unsqueeze_dim", dim),)) for dim in (1, 2)]
    if "position_ids" in names:
        cases.append(_Case(options=(("position_ids", torch.arange(5, device="cpu").flip(0).expand(2, 5)),)))
    return cases


def _agrees(stock, rotation, case, errors=None, any_error=False) -> bool:
    """Return whether both give the same. errors: gets what the stock function raises; shapes that do not fit without
    any_error do not count, since another form may fit.
    """
    args, options = _arguments(rotation, case)
    copies = [each.clone() for each in args]
    wanted = attempt(stock, *args, **options)
    counts = any_error or not isinstance(wanted, (RuntimeError, ValueError))
    if errors is not None and isinstance(wanted, Exception) and counts:
        errors.append(wanted)
    if not all(torch.equal(each, copy) for each, copy in zip(args, copies, strict=True)):
        return False  # it writes into its arguments
    if not case.in_model:
        return alike(tensors_of(attempt(rotation.serve, _refuse, args, options)), tensors_of(wanted), 4)
    inputs, tables = args[: 1 if rotation.takes_one else 2], args[1 if rotation.takes_one else 2 :]
    found = with_gradients(lambda *heads: rotation.serve(_refuse, (*heads, *tables), options), inputs)
    return alike(found, with_gradients(lambda *heads: stock(*heads, *tables, **options), inputs), 8)


def _arguments(rotation, case):
    """Return (positional arguments of the stock function, keywords)."""
    rows, tokens, dtype, options = case.rows, case.tokens, case.dtype, dict(case.options)
    dim = 2 if case.tokens_alone else options.get("unsqueeze_dim", rotation.unsqueeze_dim)
    shapes = [(rows, heads, tokens) if dim == 1 else (rows, tokens, heads) for heads in case.heads]
    q, k = (numbers(*shape, case.head_dim, dtype=dtype, start=i) for i, shape in enumerate(shapes))
    q, k = (100.0 * q, 100.0 * k) if case.in_model else (q, k)
    entries = case.width if rotation.tables in ("elements", "first half") else case.width // 2
    axes = (3,) if _MROPE in rotation.parameters else ()
    cos, sin = (numbers(*axes, case.batch, tokens, entries, dtype=dtype, start=start) for start in (2.0, 3.0))
    if axes:
        options[_MROPE] = [each * case.width // 8 for each in _SECTIONS]
    if rotation.tables == "complex":
        args = q, k, torch.complex(cos.float(), sin.float())
    else:
        args = (q, cos, sin) if rotation.takes_one else (q, k, cos, sin)
    return tuple(each.squeeze(0) for each in args) if case.tokens_alone else args, options


_IN_MODELS = [  # as models call it: a long row; a larger batch and wide heads; as many heads of q as of k
    _Case(head_dim=64, width=64, rows=1, tokens=300, in_model=True),
    _Case(head_dim=128, width=128, rows=3, batch=3, tokens=3, dtype=torch.float16, in_model=True),
    _Case(head_dim=16, width=16, rows=3, batch=3, tokens=2, heads=(2, 2), in_model=True),
]


_OF_TOKENS = [_Case(rows=1, dtype=dtype, tokens_alone=True) for dtype in (torch.float32, torch.bfloat16)]


def _refuse(*_, **__):
    raise ValueError("not served")
