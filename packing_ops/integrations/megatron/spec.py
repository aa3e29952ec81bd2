"""``use_packing_ops``: our core attention in a layer or block spec of megatron-core."""

import copy
import dataclasses
import functools
import inspect
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec

from packing_ops.conv import causal_conv1d
from packing_ops.integrations.megatron.core_attention import PackingDotProductAttention
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

    class PackingMambaMixer(stock):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if getattr(kwargs.get("packed_seq_params"), "segment_parents", None) is not None:
                raise NotImplementedError(
                    "segment_parents: expected None beside MambaMixer, whose state knows no prefix trees, got a tree"
                )
            return super().forward(hidden_states, *args, **kwargs)

        def _ssm_training(self, zxBCdt: torch.Tensor, packed_seq_params: Any = None) -> torch.Tensor:
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


# --- MambaMixer ---


def use_packing_ops(spec: Any) -> Any:
    """Return a copy of ``spec`` with PackingDotProductAttention for core attention; all else as it was.

    In hybrid models MambaMixer is replaced too: packed rows train by causal_conv1d and mamba2_scan.

    Args:
        spec: ModuleSpec of a layer or a block, or submodules of one: local, TransformerEngine, mixture of experts,
            multi-latent attention, layers that differ. Or a function that makes one, as ``transformer_layer_spec``
            of Megatron-Bridge's providers.

    Returns:
        The copy; ``spec`` itself is not changed. For a function, a function with its signature.

    Example:
        >>> from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        >>> spec = use_packing_ops(get_gpt_layer_local_spec())
        >>> spec.submodules.self_attention.submodules.core_attention.__name__
        'PackingDotProductAttention'

    Raises:
        ValueError: no core attention in ``spec``.
        NotImplementedError: core attention that is neither megatron-core's DotProductAttention nor TransformerEngine's
            TEDotProductAttention: a subclass or another class may compute anything (Megatron-Bridge's of Gemma 2 caps
            scores). Core attention with submodules (DeepSeek sparse attention, say). A MambaMixer before megatron-core
            0.16, which is not given where documents are.
    """
    if callable(spec) and not isinstance(spec, (ModuleSpec, type)):
        return functools.wraps(spec)(lambda *args, **kwargs: use_packing_ops(spec(*args, **kwargs)))
    replaced: list[Any] = []
    copied = _copied(spec, replaced)
    if not replaced:
        raise ValueError(f"spec: expected a layer or block spec with core_attention in it, got {spec!r:.200}")
    return copied


def _copied(part: Any, replaced: list[Any]) -> Any:
    """Copy the containers. What they hold (classes, functions, numbers) is not copied."""
    if isinstance(part, dict):
        return {key: _copied(value, replaced) for key, value in part.items()}
    if isinstance(part, (list, tuple)):
        return type(part)(_copied(each, replaced) for each in part)
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    new = copy.copy(part)
    for name in (field.name for field in dataclasses.fields(part)):
        old = getattr(part, name)
        if name == "core_attention" and old is not None:
            replaced.append(old)
            setattr(new, name, _core_attention(old))
        elif is_mixer(old):
            setattr(new, name, mixer_of(old))
        else:
            setattr(new, name, _copied(old, replaced))
    return new


# Whose softmax attention ours computes, by the module that defines it: TransformerEngine's is not always there.
_SERVED = (
    ("megatron.core.transformer.dot_product_attention", "DotProductAttention"),
    ("megatron.core.extensions.transformer_engine", "TEDotProductAttention"),
    (PackingDotProductAttention.__module__, PackingDotProductAttention.__name__),
)


def _core_attention(old: Any) -> Any:
    if getattr(old, "submodules", None) is not None:
        raise NotImplementedError(f"core_attention: expected one without submodules, got {old.module}")
    # A class or a builder, which may compute more; a pair is where ModuleSpec imports it from.
    is_partial, is_spec = isinstance(old, functools.partial), isinstance(old, ModuleSpec)
    made_by = old.func if is_partial else old.module if is_spec else old
    named = tuple(getattr(made_by, at, "") for at in ("__module__", "__qualname__"))
    found = made_by if isinstance(made_by, tuple) else named
    if found not in _SERVED:
        served = " or ".join(name for _, name in _SERVED)
        got = ".".join(found) if all(found) else repr(made_by)
        raise NotImplementedError(f"core_attention: expected {served}, which ours computes, got {got}")
    if is_partial:
        return functools.partial(PackingDotProductAttention, *old.args, **old.keywords)
    return ModuleSpec(PackingDotProductAttention, dict(old.params)) if is_spec else PackingDotProductAttention
