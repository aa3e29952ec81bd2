"""MambaMixer of megatron-core over packed rows, put into a spec by use_packing_ops."""

import functools
import inspect
from typing import Any

import torch

from packing_ops.conv import causal_conv1d
from packing_ops.integrations.megatron.varlen_call import field_of
from packing_ops.scan import mamba2_scan

_STOCK = ("megatron.core.ssm.mamba_mixer", "MambaMixer")


def is_mixer(made_by: Any) -> bool:
    """Return whether this is megatron-core's MambaMixer, which cannot be imported everywhere."""
    return isinstance(made_by, type) and (made_by.__module__, made_by.__qualname__) == _STOCK


@functools.cache
def mixer_of(stock: type) -> type:
    """Return a subclass of MambaMixer that trains on packed rows by causal_conv1d and mamba2_scan; all else as it was.

    Raises:
        NotImplementedError: a MambaMixer before megatron-core 0.16, which is not given where documents are.
    """
    if "packed_seq_params" not in inspect.signature(stock._ssm_training).parameters:  # type: ignore[attr-defined]
        raise NotImplementedError(
            "MambaMixer: expected that of megatron-core 0.16 or later, got one that takes no packed_seq_params: its "
            "state goes on from one document into the next"
        )

    class PackingMambaMixer(stock):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states, *args, **kwargs):
            if getattr(kwargs.get("packed_seq_params"), "segment_parents", None) is not None:
                raise NotImplementedError(
                    "segment_parents: expected None beside MambaMixer, whose state knows no prefix trees, got a tree"
                )
            return super().forward(hidden_states, *args, **kwargs)

        def _ssm_training(self, zxBCdt, packed_seq_params=None):
            if packed_seq_params is None:
                return super()._ssm_training(zxBCdt)
            if self.D_has_hdim:
                raise NotImplementedError(
                    "D_has_hdim: expected False, mamba2_scan has a number for each head, got True"
                )
            cp, padded = self.cp, getattr(packed_seq_params, "cu_seqlens_q_padded", None)
            cu_seqlens = field_of(packed_seq_params, "cu_seqlens_q") if padded is None else padded
            heads, groups = cp.nheads_local_tpcp, cp.ngroups_local_tpcp
            of_x, of_b = heads * self.headdim, groups * self.d_state
            z, xBC, dt = zxBCdt[:, 0].split([of_x, of_x + 2 * of_b, heads], 1)
            weight, bias = cp.get_conv1d_weight().squeeze(1), cp.get_conv1d_bias()
            xBC, _ = causal_conv1d(xBC, weight, bias, cu_seqlens, activation="silu")
            x, B, C = (
                part.unflatten(1, (count, -1))
                for part, count in zip(xBC.split([of_x, of_b, of_b], 1), (heads, groups, groups), strict=True)
            )
            A = -torch.exp(cp.get_A_log().float())
            constants = {"D": cp.get_D(), "dt_bias": cp.get_dt_bias(), "dt_softplus": True}
            out, _ = mamba2_scan(x, dt, A, B, C, cu_seqlens, z=z.unflatten(1, x.shape[1:]), **constants)
            y = cp.post_conv_ssm(out.flatten(1)[:, None], packed_seq_params)
            return self.norm(y) if self.rmsnorm else y

    return PackingMambaMixer
