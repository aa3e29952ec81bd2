"""Oracle of packing_ops.attention: each document separately, every score in memory, gradients by autograd."""

import itertools
import math
from typing import Any

import torch


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    visible_end: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) in the dtype of the inputs; give float64 for an oracle."""
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    outs, lses = [], []
    spans = [itertools.pairwise(cu.tolist()) for cu in (cu_seqlens_q, cu_seqlens_k)]
    for (q_start, q_end), (k_start, k_end) in zip(*spans, strict=True):
        end = None if visible_end is None else visible_end[q_start:q_end]
        seen = visible(q_end - q_start, k_end - k_start, causal, window_size, q.device, visible_end=end)
        out, lse = _document(q[q_start:q_end], k[k_start:k_end], v[k_start:k_end], seen, softmax_scale, softcap, sinks)
        outs.append(out)
        lses.append(lse)
    rest = q[int(cu_seqlens_q[-1]) :]
    outs.append(rest.new_zeros(*rest.shape[:2], v.shape[-1]))
    lses.append(torch.full_like(rest[..., 0].T, -math.inf))
    return torch.cat(outs), torch.cat(lses, dim=1)


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) over the keys of pages [num_pages, page_size, num_kv_heads, head_dim], put end to end."""
    page_size, used = k.shape[1], seqused_k.tolist()
    tables = [row[: -(-keys // page_size)].long() for row, keys in zip(block_table, used, strict=True)]

    def end_to_end(pages: torch.Tensor) -> torch.Tensor:
        rows = [pages[table].flatten(0, 1)[:keys] for table, keys in zip(tables, used, strict=True)]
        return torch.cat([*rows, pages.new_empty(0, *pages.shape[2:])])

    cu_seqlens_k = torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).int()
    return varlen_attention(q, end_to_end(k), end_to_end(v), cu_seqlens_q, cu_seqlens_k, **options)


def prefix_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    parents: torch.Tensor,
    *,
    softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) over a prefix tree whose segments are cu_seqlens, by one mask of the whole row."""
    seen = visible_in_tree(cu_seqlens, parents, q.shape[0], window_size[0])
    out, lse = _document(q, k, v, seen, softmax_scale, softcap, sinks)
    padding = torch.arange(q.shape[0], device=q.device) >= cu_seqlens[-1]
    return out.masked_fill(padding[:, None, None], 0.0), lse.masked_fill(padding, -math.inf)


def visible_in_tree(cu_seqlens: torch.Tensor, parents: torch.Tensor, total: int, window_left: int) -> torch.Tensor:
    """Return bool [total, total]: a token sees its segment's ancestors, and the segment up to itself."""
    seen = torch.zeros(total, total, dtype=torch.bool, device=cu_seqlens.device)
    paths: list[list[int]] = []
    for (start, end), parent in zip(itertools.pairwise(cu_seqlens.tolist()), parents.tolist(), strict=True):
        before = paths[parent] if parent >= 0 else []
        paths.append(before + list(range(start, end)))
        for row in range(start, end):
            path = before + list(range(start, row + 1))
            seen[row, path if window_left < 0 else path[-window_left - 1 :]] = True
    return seen


def visible(
    num_q: int,
    num_k: int,
    causal: bool,
    window_size: tuple[int, int],
    device: torch.device | str | None = None,
    *,
    visible_end: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return bool [num_q, num_k]: query i is at key i + num_k - num_q. visible_end [num_q] replaces causality."""
    key_pos = torch.arange(num_q, device=device)[:, None] + num_k - num_q
    key = torch.arange(num_k, device=device)[None, :]
    left, right = window_size
    seen = torch.ones(num_q, num_k, dtype=torch.bool, device=device)
    if visible_end is not None:
        seen &= key < visible_end[:, None]
    elif causal:
        seen &= key <= key_pos
    if left >= 0:
        seen &= key >= key_pos - left
    if right >= 0:
        seen &= key <= key_pos + right
    return seen


def _document(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    softmax_scale: float | None,
    softcap: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    num_q, num_heads, _ = q.shape
    num_k = k.shape[0]
    group = num_heads // k.shape[1]
    keys, values = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = scale * torch.einsum("qhd,khd->hqk", q, keys)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    # One more column: the sink, or nothing at all.
    last = q.new_full((num_heads,), -math.inf) if sinks is None else sinks.to(q.dtype)
    scores = torch.cat([scores.masked_fill(~seen, -math.inf), last[:, None, None].expand(-1, num_q, 1)], dim=-1)
    # A row with no finite score has no softmax: it is set apart so that its gradient is 0 and not NaN.
    empty = (scores == -math.inf).all(-1)
    scores = scores.masked_fill(empty[..., None], 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty, -math.inf)
    weights = scores.softmax(-1)[..., :num_k].masked_fill(empty[..., None], 0.0)
    return torch.einsum("hqk,khd->qhd", weights, values), lse


# --- visible_end: int [tokens] of each document, one after the other, zeros in the padding ---


def visible_end_from_blocks(block_ids: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    ids, ends = block_ids.tolist(), [0] * len(block_ids)
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        for t in range(start, end):
            last = t
            while ids[t] and last + 1 < end and ids[last + 1] == ids[t]:
                last += 1
            ends[t] = last + 1 - start
    return torch.tensor(ends, dtype=torch.int32, device=block_ids.device)


def visible_end_from_prefix_lengths(prefix_lengths: torch.Tensor, cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    ends = torch.zeros(total, dtype=torch.int32, device=cu_seqlens.device)
    documents = zip(itertools.pairwise(cu_seqlens.tolist()), prefix_lengths.tolist(), strict=True)
    for (start, end), prefix in documents:
        for t in range(start, end):
            ends[t] = max(t + 1 - start, min(prefix, end - start))
    return ends


def visible_end_from_causal(causal: torch.Tensor, cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    lengths = cu_seqlens.diff().where(~causal, 0)
    return visible_end_from_prefix_lengths(lengths, cu_seqlens, total)
