"""Oracle of packing_ops.scan: the gated delta rule and Mamba-2's scan token by token, and in chunks as models have them
in plain torch.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import silu, softplus


def l2norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _documents(cu_seqlens: torch.Tensor) -> Iterator[slice]:
    return itertools.starmap(slice, itertools.pairwise(cu_seqlens.tolist()))


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
    use_qk_l2norm: bool = False,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, final_state); see packing_ops.gated_delta_rule. With ``chunk`` it goes in chunks of that many
    tokens, whose products are in the dtype of v. Everything else is in the dtype of g, which the states have too.
    """
    heads = v.shape[1] // q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = (x.to(g.dtype) for x in (q, k))
    if use_qk_l2norm:
        q, k = l2norm(q), l2norm(k)
    q, k = (x.repeat_interleave(heads, 1) for x in (q * scale, k))
    out, states = torch.zeros_like(v), []
    for i, rows in enumerate(_documents(cu_seqlens)):
        shape = v.shape[1], q.shape[-1], v.shape[-1]
        state = g.new_zeros(shape) if initial_state is None else initial_state[i]
        given = q[rows], k[rows], v[rows].to(g.dtype), g[rows], beta[rows]
        found, state = _by_token(given, state) if chunk is None else _by_chunk(given, state, chunk, v.dtype)
        out = torch.cat([out[: rows.start], found.to(v.dtype), out[rows.stop :]])
        states.append(state)
    final_state = torch.stack(states) if states else g.new_zeros(0, v.shape[1], q.shape[-1], v.shape[-1])
    return out, final_state


Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v, g, beta of a document


def _by_token(given: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outs = [given[2][:0]]
    for q, k, v, g, beta in zip(*given, strict=True):
        state = state * g.exp()[:, None, None]
        residual = v - torch.einsum("hkv,hk->hv", state, k)
        state = state + torch.einsum("hk,hv->hkv", k, beta[:, None] * residual)
        outs.append(torch.einsum("hkv,hk->hv", state, q)[None])
    return torch.cat(outs), state


def _products_in(dtype: torch.dtype, of_state: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda a, b: (a.to(dtype) @ b.to(dtype)).to(of_state)


def _decays(g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (from the chunk's start to each token, ``[heads, tokens]``; from token j to token i, 0 for j > i)."""
    decay = g.cumsum(-1)
    lower = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool, device=g.device).tril()
    return decay, (decay[..., None] - decay[..., None, :]).masked_fill(~lower, 0).exp() * lower


def _by_chunk(given: Tokens, state: torch.Tensor, chunk: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the formula of transformers' torch_chunk_gated_delta_rule, its products in ``dtype``."""
    product, outs = _products_in(dtype, state.dtype), [given[2][:0]]
    for start in range(0, given[2].shape[0], chunk):
        q, k, v, g, beta = (x[start : start + chunk].transpose(0, 1) for x in given)
        decay, between = _decays(g)
        corrections = product(k * beta[..., None], k.mT).mul(between).tril(-1)
        identity = torch.eye(v.shape[1], dtype=g.dtype, device=v.device)
        inverse = torch.linalg.solve_triangular(identity + corrections, identity.expand_as(corrections), upper=False)
        keys = product(inverse, k * (beta * decay.exp())[..., None])
        new = product(inverse, v * beta[..., None]) - product(keys, state)
        scores = product(q, k.mT) * between
        outs.append((product(q * decay.exp()[..., None], state) + product(scores, new)).transpose(0, 1))
        left = (decay[:, -1:] - decay).exp()[..., None]
        state = state * decay[:, -1].exp()[:, None, None] + product((k * left).mT, new)
    return torch.cat(outs), state


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_state: torch.Tensor | None = None,
    chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, final_state); see packing_ops.mamba2_scan. With ``chunk`` it goes in chunks of that many tokens,
    whose products are in the dtype of x. Everything else is in the dtype of dt, which the states have too; z
    is multiplied as models do after the scan, in the dtype of x.
    """
    heads = x.shape[1] // B.shape[1]
    step = dt if dt_bias is None else dt + dt_bias
    step = (softplus(step) if dt_softplus else step).clamp(*dt_limit)
    B, C = (t.to(dt.dtype).repeat_interleave(heads, 1) for t in (B, C))
    wide, out, states = x.to(dt.dtype), torch.zeros_like(x), []
    for i, rows in enumerate(_documents(cu_seqlens)):
        state = dt.new_zeros(*x.shape[1:], B.shape[-1]) if initial_state is None else initial_state[i]
        given = C[rows], B[rows], wide[rows], step[rows] * A, step[rows]
        if chunk is None:
            found, state = _scan_by_token(given, state)
        else:
            found, state = _scan_by_chunk(given, state, chunk, x.dtype)
        found = found if D is None else found + D[:, None] * wide[rows]
        found = found.to(x.dtype) if z is None else found.to(x.dtype) * silu(z[rows])
        out = torch.cat([out[: rows.start], found, out[rows.stop :]])
        states.append(state)
    return out, torch.stack(states) if states else dt.new_zeros(0, *x.shape[1:], B.shape[-1])


def _scan_by_token(given: Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outs = [given[2][:0]]
    for C, B, x, g, step in zip(*given, strict=True):
        state = g.exp()[:, None, None] * state + torch.einsum("hp,hn->hpn", step[:, None] * x, B)
        outs.append(torch.einsum("hpn,hn->hp", state, C)[None])
    return torch.cat(outs), state


def _scan_by_chunk(
    given: Tokens, state: torch.Tensor, chunk: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the formula of transformers' mamba2_chunk_scan, its products in ``dtype`` as mamba_ssm's are."""
    product, outs = _products_in(dtype, state.dtype), [given[2][:0]]
    for start in range(0, given[2].shape[0], chunk):
        C, B, x, g, step = (t[start : start + chunk].transpose(0, 1) for t in given)
        decay, between = _decays(g)
        new, scores = x * step[..., None], product(C, B.mT) * between
        outs.append((product(C * decay.exp()[..., None], state.mT) + product(scores, new)).transpose(0, 1))
        left = (decay[:, -1:] - decay).exp()[..., None]
        state = state * decay[:, -1].exp()[:, None, None] + product(new.mT, B * left)
    return torch.cat(outs), state
