"""Oracle of packing_ops.conv: torch's convolution, document by document."""

import itertools

import torch


def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, final_state); see packing_ops.causal_conv1d."""
    channels, width = weight.shape
    bounds = cu_seqlens.tolist()
    outs, states = [], []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        before = x.new_zeros(channels, width - 1) if initial_state is None else initial_state[i]
        rows = torch.cat([before, x[start:end].T], 1)
        out = (
            torch.nn.functional.conv1d(rows[None], weight[:, None], bias, groups=channels)[0]
            if end > start
            else rows[:, :0]
        )
        outs.append(out.T)
        states.append(rows[:, rows.shape[1] - (width - 1) :])
    out = torch.cat([*outs, x.new_zeros(x.shape[0] - bounds[-1], channels)])
    final_state = torch.stack(states) if states else x.new_zeros(0, channels, width - 1)
    return torch.nn.functional.silu(out) if activation else out, final_state
