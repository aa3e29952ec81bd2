"""Linear attention with a state, over packed rows: the gated delta rule of Qwen3-Next, Qwen3.5 and OLMo-Hybrid, and the
scan of Mamba-2, Bamba, Falcon-H1, Granite 4, Nemotron-H and Zamba2."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, overload

import torch
from torch.nn.functional import pad
from typing_extensions import Unpack

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import (
    FLOATS,
    check_cu_seqlens,
    check_cumulated,
    check_tensor,
    described,
    number,
    refuse_gradient,
    sum_dtype,
    wrong_type,
)
from packing_ops._runtime.autograd import (
    call_below_autograd,
    register_autograd,
    register_no_autograd,
    register_recurrence,
)
from packing_ops.metadata import PackedMetadata, cu_seqlens_of

KERNEL_DIMS = (64, 128, 256)  # of heads, on CUDA
CHUNK = 64  # tokens that are multiplied together, counted from a document's first


@overload
def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor, *, scale: float | None = None, initial_state: torch.Tensor | None = None,
    output_final_state: Literal[False] = False, use_qk_l2norm: bool = False,
) -> tuple[torch.Tensor, None]: ...  # fmt: skip
@overload
def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor, *, scale: float | None = None, initial_state: torch.Tensor | None = None,
    output_final_state: Literal[True], use_qk_l2norm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read a state with each query, after it has forgotten and learned its key's value. Differentiable.

    The state of a head is a matrix ``S [head_dim, head_dim_v]``, 0 before a document's first token. A token makes of it

        S = exp(g) S
        S = S + k (beta (v - S^T k))^T
        out = scale S^T q

    Args:
        q, k: float32, float64 (CPU), bfloat16 or float16 ``[total, num_heads, head_dim]``. On CUDA head_dim is at
            most 256, and what is not 64, 128 or 256 is padded with zeros.
        v: ``[total, num_v_heads, head_dim_v]`` of the same dtype; num_v_heads is a multiple of num_heads, and head h of
            v has head ``h // (num_v_heads // num_heads)`` of q and k.
        g: ``[total, num_v_heads]``, the logarithm of the decay, at most 0 in every model; read in float32.
        beta: like g, how much of the old value a key's new one replaces, 0 to 1 in most models.
        cu_seqlens: int32 or int64 ``[num_documents + 1]``, or the PackedMetadata of the row.
        scale: of the queries; ``head_dim ** -0.5`` by default.
        initial_state: float32 (float64 for float64) ``[num_documents, num_v_heads, head_dim, head_dim_v]``.
        output_final_state: also return the states after each document's last token.
        use_qk_l2norm: divide q and k by their norms first: ``x * rsqrt(sum(x ** 2) + 1e-6)``.

    Returns:
        (out, final_state or None). out is ``[total, num_v_heads, head_dim_v]`` in the dtype of v, 0 in the padding
        after the last document; final_state is like initial_state. States and sums are float32 (float64 for float64).

        On CUDA a document is walked in chunks of 64 tokens, counted from its first. A token's bits depend only on its
        document's tokens up to it: they are the same in any pack, and if a document is passed in several calls that
        begin at multiples of 64, each with the final state of the one before. To decode with these bits, keep the state
        at the start of the open chunk, and run the tokens since then again. NaN and infinity stay in their document.

    Cost:
        Grows with the number of tokens, whatever the documents' lengths. The backward makes the states again and holds
        one for each chunk: ``2 * head_dim * head_dim_v * num_v_heads`` numbers of v's dtype for 64 tokens.

    Example:
        A key whose value is read back, and then overwritten:

        >>> k = torch.eye(2)[[0, 1, 0]][:, None]
        >>> v = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])[:, None]
        >>> g, beta = torch.zeros(3, 1), torch.ones(3, 1)
        >>> out, state = gated_delta_rule(k, k, v, g, beta, torch.tensor([0, 3]), scale=1.0, output_final_state=True)
        >>> out[:, 0].tolist()
        [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
        >>> state[0, 0].tolist()
        [[5.0, 6.0], [3.0, 4.0]]

    Raises:
        ValueError: tensors of another dtype, device or shape than q and v ask for; cu_seqlens past the end of q; on
            CUDA a head_dim over 256.

    Source:
        Yang, Kautz, Hatamizadeh, Gated Delta Networks, arXiv:2412.06464.

    Determinism: the same bits in every call, backward too, and for a document in any pack.
    Synchronises: never.
    Memory: scratch for each chunk of 64 tokens; in backward the states of all chunks (see Cost).
    Gradients: of q, k, v, g, beta and initial_state, also through final_state. No second derivative, no forward mode.
    """
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        check_tensor(tensor, name)
    if isinstance(scale, torch.Tensor):
        refuse_gradient(scale, "scale", "a number or a tensor")
    cu_seqlens = cu_seqlens_of(cu_seqlens, q.shape[0] if q.dim() else 1, like="q")
    sums = sum_dtype(v.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None and q.dim() else scale
    options = scale, use_qk_l2norm, output_final_state
    g, beta = _in_sums(g, "g", sums), _in_sums(beta, "beta", sums)
    given = [q, k, v, g, beta, cu_seqlens, initial_state, *options]
    widen = q.is_cuda and q.dim() == k.dim() == v.dim() == 3
    out, final_state = _widened(gate.gated_delta_rule, given, *DELTA) if widen else gate.gated_delta_rule(*given)
    return out, final_state if output_final_state else None


class MambaKeywords(TypedDict, total=False):
    """Names the options of mamba2_scan for its overloads."""

    D: torch.Tensor | None
    z: torch.Tensor | None
    dt_bias: torch.Tensor | None
    dt_softplus: bool
    dt_limit: tuple[float, float]
    initial_state: torch.Tensor | None


@overload
def mamba2_scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor, *, output_final_state: Literal[False] = False,
    **options: Unpack[MambaKeywords],
) -> tuple[torch.Tensor, None]: ...  # fmt: skip
@overload
def mamba2_scan(
    x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor, *, output_final_state: Literal[True], **options: Unpack[MambaKeywords],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    cu_seqlens: PackedMetadata | torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Read a state with C, after it has forgotten and learned x times B: Mamba-2's scan (SSD). Differentiable.

    The state of a head is a matrix ``S [head_dim, state_dim]``, 0 before a document's first token. A token makes of it

        step = clamp(softplus(dt + dt_bias), *dt_limit)
        S = exp(step A) S + step x B^T
        out = S C + D x
        out = out silu(z), with z

    Args:
        x: float32, float64 (CPU), bfloat16 or float16 ``[total, num_heads, head_dim]``. On CUDA head_dim and state_dim
            are at most 256, and what is not 64, 128 or 256 is padded with zeros.
        dt: ``[total, num_heads]``; read in float32.
        A: ``[num_heads]``, below 0 in every model; read in float32, as D and dt_bias are.
        B, C: ``[total, num_groups, state_dim]`` of x's dtype; num_groups divides num_heads, and head h has group
            ``h // (num_heads // num_groups)``.
        cu_seqlens: int32 or int64 ``[num_documents + 1]``, or the PackedMetadata of the row.
        D: ``[num_heads]``, how much of x is added to the output.
        z: like x, a gate of the output; where a norm follows, it comes after the gate. Without z there is none.
        dt_bias: ``[num_heads]``.
        dt_softplus: take the softplus of dt + dt_bias, as every model does.
        dt_limit: least and greatest step.
        initial_state: float32 (float64 for float64) ``[num_documents, num_heads, head_dim, state_dim]``.
        output_final_state: also return the states after each document's last token.

    Returns:
        (out, final_state or None). out is like x, 0 in the padding after the last document; final_state is like
        initial_state. Sums, steps and states are float32 (float64 for float64). With z the output is rounded to
        x's dtype before the gate and after it.

        Bits are as in gated_delta_rule: those of a document in a row without others, in chunks of 64 tokens counted
        from its first on CUDA. NaN and infinity stay in their document.

    Cost:
        Grows with the number of tokens, whatever the documents' lengths. The backward makes the states again and holds
        one for each chunk: ``2 * head_dim * state_dim * num_heads`` numbers of x's dtype for 64 tokens. z is a pass of
        its own, and its backward another.

    Example:
        A state of one number that forgets half at each token:

        >>> x, one = torch.tensor([8.0, 0.0, 0.0])[:, None, None], torch.ones(3, 1, 1)
        >>> A = torch.tensor([0.5]).log()
        >>> out, state = mamba2_scan(x, one[:, 0], A, one, one, torch.tensor([0, 3]), output_final_state=True)
        >>> out[:, 0, 0].tolist()
        [8.0, 4.0, 2.0]
        >>> state.tolist()
        [[[[2.0]]]]

    Raises:
        TypeError: something else than a tensor, or than a pair of numbers for dt_limit.
        ValueError: tensors of another dtype, device or shape than x asks for; cu_seqlens past the end of x; dt_limit
            whose first is above its second, or that wants a gradient; on CUDA a head_dim or state_dim over 256.

    Source:
        Dao, Gu, Transformers are SSMs, arXiv:2405.21060.

    Determinism: the same bits in every call, backward too, and for a document in any pack.
    Synchronises: never.
    Memory: scratch for each chunk of 64 tokens; in backward the states of all chunks (see Cost).
    Gradients: of x, dt, A, B, C, D, z, dt_bias and initial_state, also through final_state; 0 for a step at its limit.
        No second derivative, no forward mode.
    """
    for name, tensor in {"x": x, "B": B, "C": C, **({} if z is None else {"z": z})}.items():
        check_tensor(tensor, name)
    if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2:
        raise TypeError(f"dt_limit: expected a pair (min, max), got {dt_limit!r}")
    cu_seqlens = cu_seqlens_of(cu_seqlens, x.shape[0] if x.dim() else 1, like="x")
    sums = sum_dtype(x.dtype)
    dt, A = _in_sums(dt, "dt", sums), _in_sums(A, "A", sums)
    D, dt_bias = (
        None if each is None else _in_sums(each, name, sums) for name, each in (("D", D), ("dt_bias", dt_bias))
    )
    options = dt_softplus, *(number(limit, "dt_limit") for limit in dt_limit), output_final_state
    given = [x, dt, A, B, C, D, dt_bias, cu_seqlens, initial_state, *options]
    widen = x.is_cuda and x.dim() == B.dim() == C.dim() == 3
    out, final_state = _widened(gate.mamba2_scan, given, *MAMBA) if widen else gate.mamba2_scan(*given)
    out = out if z is None else gate.mamba2_gate(out, z, cu_seqlens)
    return out, final_state if output_final_state else None


class OpenChunk:
    """Decode ``gated_delta_rule`` or ``mamba2_scan`` with the bits of one call over the whole sequence.

    A recurrence of single tokens rounds otherwise than the forward, which multiplies chunks of 64 tokens. The state at
    the start of each sequence's open chunk is kept, with the rows since then, and each step runs these rows again.

    Args:
        scan: called as ``scan(*rows, cu_seqlens, initial_state=..., output_final_state=True)``: gated_delta_rule or
            a functools.partial of it; a function of x, dt, B and C that calls mamba2_scan.
        rows: its tensors of tokens, each ``[total, ...]``: the prompts, packed.
        cu_seqlens: int32 or int64 ``[num_sequences + 1]``, or the PackedMetadata of the row. A prompt may be empty.
        initial_state: before each prompt, as ``scan`` takes it; 0 by default.

    Attributes:
        out: ``[total, heads, dim]``, what ``scan`` returns for the prompts.
        state: ``[num_sequences, heads, ...]`` at the start of the open chunks.
        length: int64 ``[num_sequences]``, the rows of each open chunk.

    Cost:
        Memory of 64 rows a sequence beside the state. A step computes 64 rows a sequence. No gradient, no
        synchronisation; buffers stay where they are, so that a step can be in a CUDA graph.

    Example:
        >>> q, k, v = (torch.randn(70, 1, 8) for _ in range(3))
        >>> g, beta = -torch.rand(70, 1), torch.rand(70, 1)
        >>> whole, _ = gated_delta_rule(q, k, v, g, beta, torch.tensor([0, 70]))
        >>> chunk = OpenChunk(gated_delta_rule, [x[:60] for x in (q, k, v, g, beta)], torch.tensor([0, 60]))
        >>> steps = [chunk.step(*(x[t : t + 1] for x in (q, k, v, g, beta))) for t in range(60, 70)]
        >>> torch.equal(torch.cat([chunk.out, *steps]), whole)
        True

    Raises:
        TypeError: something else than tensors in rows.
        ValueError: rows of other lengths than the first; wrong cu_seqlens; initial_state of another number of prompts;
            in ``step``, rows of another number, dtype, shape or device; in ``select``, no int64 ``[n]``; what ``scan``
            raises.
    """

    @torch.no_grad()
    def __init__(
        self,
        scan: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        rows: Sequence[torch.Tensor],
        cu_seqlens: PackedMetadata | torch.Tensor,
        *,
        initial_state: torch.Tensor | None = None,
    ):
        if not isinstance(rows, (list, tuple)) or not rows:
            raise wrong_type("rows", "tensors in a list or tuple", rows)
        for i, each in enumerate(rows):
            check_tensor(each, f"rows[{i}]")
            if each.dim() < 2 or each.shape[0] != rows[0].shape[0]:
                raise ValueError(f"rows[{i}]: expected [{len(rows[0])}, ...] as rows[0], got {list(each.shape)}")
        self.scan = scan
        total = rows[0].shape[0]
        cu_seqlens = cu_seqlens_of(cu_seqlens, total, like="rows[0]")
        check_cu_seqlens(cu_seqlens)
        if cu_seqlens.is_cpu:  # here: the scan's errors have the numbers of chunks
            check_cumulated(cu_seqlens)
        start, end = cu_seqlens[:-1], cu_seqlens[1:]
        opened = start + (end - start) // CHUNK * CHUNK

        # Full chunks and open ones as documents of their own: the first give the states, the second run again below.
        if initial_state is not None:
            check_tensor(initial_state, "initial_state")
            if initial_state.shape[:1] != start.shape:
                raise ValueError(
                    f"initial_state: expected [{len(start)}, ...], one for each prompt, got {described(initial_state)}"
                )
            initial_state = initial_state.repeat_interleave(2, 0, output_size=2 * initial_state.shape[0])
        parts = torch.cat([torch.stack([start, opened], 1).flatten(), cu_seqlens[-1:]])
        out, states = scan(*rows, parts, initial_state=initial_state, output_final_state=True)
        self.state, self.length = states[::2].clone(), (end - opened).long()

        places = torch.arange(CHUNK, device=start.device)
        slots = torch.where(places < self.length[:, None], opened[:, None] + places, total).flatten()
        self.rows = [_with_zeros(each).index_select(0, slots).unflatten(0, (-1, CHUNK)) for each in rows]
        self._number()
        again, _ = self._run()
        self.out = _with_zeros(out).index_copy(0, slots, again.flatten(0, 1))[:-1]

    @torch.no_grad()
    def step(self, *rows: torch.Tensor) -> torch.Tensor:
        """Return ``[num_sequences, heads, dim]`` of the next token of each sequence, and keep it.

        rows: as in the constructor, each ``[num_sequences, ...]`` of the prompts' dtype.
        """
        if len(rows) != len(self.rows):
            raise ValueError(f"rows: expected {len(self.rows)} tensors as the prompts have, got {len(rows)}")
        for i, (kept, new) in enumerate(zip(self.rows, rows, strict=True)):
            check_tensor(new, f"rows[{i}]")
            like = kept[:, 0]
            if (new.dtype, new.shape, new.device) != (like.dtype, like.shape, like.device):
                wanted, got = (f"{described(each)} on {each.device}" for each in (like, new))
                raise ValueError(f"rows[{i}]: expected {wanted}, got {got}")
            kept[self._sequences, self.length] = new
        out, states = self._run()
        found = out[self._sequences, self.length]
        full = self.length == CHUNK - 1
        self.state.copy_(torch.where(_like(full, states), states, self.state))
        self.length.copy_((self.length + 1) % CHUNK)
        for kept in self.rows:
            kept.masked_fill_(_like(full, kept), 0)
        return found

    @torch.no_grad()
    def select(self, sequences: torch.Tensor) -> "OpenChunk":
        """Return the open chunks of these sequences, int64 ``[n]``: of those that go on, or of chosen beams. No
        ``out``.
        """
        check_tensor(sequences, "sequences")
        if sequences.dim() != 1 or sequences.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"sequences: expected int64 [n], got {described(sequences)}")
        found = object.__new__(OpenChunk)
        found.scan, found.out = self.scan, self.out[:0]
        found.state, found.length = self.state[sequences], self.length[sequences]
        found.rows = [each[sequences] for each in self.rows]
        found._number()
        return found

    def _number(self) -> None:
        count, device = self.length.shape[0], self.length.device
        self._sequences = torch.arange(count, device=device)
        self._cu_seqlens = CHUNK * torch.arange(count + 1, device=device, dtype=torch.int32)

    def _run(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out of all rows ``[num_sequences, 64, ...]``, of which the first ``length`` count, and the states."""
        flat = [each.flatten(0, 1) for each in self.rows]
        out, states = self.scan(*flat, self._cu_seqlens, initial_state=self.state, output_final_state=True)
        return out.unflatten(0, (-1, CHUNK)), states


def _in_sums(tensor: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return an argument that is read in the dtype of sums; ValueError for one of no floating dtype."""
    check_tensor(tensor, name)
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{name}: expected float32, float64, bfloat16 or float16, got {described(tensor)}")
    return tensor.to(dtype)


def _with_zeros(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])


def _like(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    return mask.view(-1, *[1] * (tensor.dim() - 1))


def _widened(
    op: Callable[..., Any], given: list[Any], axes: dict[int, int], initial: int, of_out: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a scan for heads that its kernels do not have, with columns of zeros up to those that they have: they add
    nothing. Results are contiguous: layers of transformers take views of them.

    Args:
        given: the op's arguments, the last one is output_final_state.
        axes: {place of a tensor with heads: the axis of a state that its columns are}.
        initial: the place of initial_state.
        of_out: the axis of a state that out's columns are.
    """
    sizes = [next(given[place].shape[-1] for place in axes if axes[place] == axis) for axis in (0, 1)]
    more, more_1 = [next((n for n in KERNEL_DIMS if n >= size), size) - size for size in sizes]
    if not (more or more_1):
        return op(*given)
    for place, axis in axes.items():
        given[place] = pad(given[place], (0, more_1 if axis else more))
    if given[initial] is not None:
        given[initial] = pad(given[initial], (0, more_1, 0, more))
    out, final_state = op(*given)
    out = out[..., : sizes[of_out]].contiguous()
    return out, final_state[..., : sizes[0], : sizes[1]].contiguous() if given[-1] else final_state


# Of _widened, as the ops have them.
DELTA = {0: 0, 1: 0, 2: 1}, 6, 1
MAMBA = {0: 0, 3: 1, 4: 1}, 8, 0


# --- gradients ---


def _mamba_gradients(
    tensors: Sequence[torch.Tensor | None],
    dx: torch.Tensor,
    ddt: torch.Tensor,
    to_dA: torch.Tensor,
    *found: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    (dB, dC, to_dD), (*_, D, dt_bias, _, _) = found, tensors
    dD, ddt_bias = (None if t is None else each.sum(0) for t, each in ((D, to_dD), (dt_bias, ddt)))
    return dx, ddt, to_dA.sum(0), dB, dC, dD, ddt_bias


register_recurrence("gated_delta_rule", gate.gated_delta_rule_backward, tensors=7, like=2)
register_recurrence("mamba2_scan", gate.mamba2_scan_backward, tensors=9, gradients=_mamba_gradients)


def _gate_backward(ctx: Any, dout: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    gradients = 2 * [None] if dout is None else call_below_autograd(gate.mamba2_gate_backward, dout, *ctx.saved_tensors)
    return *gradients, None


register_autograd("mamba2_gate", _gate_backward, setup_context=lambda ctx, inputs, _: ctx.save_for_backward(*inputs))
register_no_autograd("mamba2_gate_backward", of="mamba2_gate")
