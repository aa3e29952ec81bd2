"""MambaMixer in specs: packed rows by our ops. megatron-core's class needs mamba_ssm and a GPU; a stand-in has its
parts.
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import cu_seqlens_of

pytest.importorskip("megatron.core")

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec

from packing_ops.integrations.megatron import use_packing_ops
from packing_ops.reference import conv as conv_oracle
from packing_ops.reference import scan as scan_oracle

HEADS, GROUPS, HEAD_DIM, STATE, TAPS = 4, 2, 8, 16, 4
LENGTHS = [5, 70, 1, 3]
CHANNELS = HEADS * HEAD_DIM + 2 * GROUPS * STATE


class MambaMixer(torch.nn.Module):
    """As megatron-core 0.16's from the projection on."""

    __module__, __qualname__ = "megatron.core.ssm.mamba_mixer", "MambaMixer"
    headdim, d_state, D_has_hdim, rmsnorm = HEAD_DIM, STATE, False, True

    def __init__(self):
        super().__init__()
        self.numbers = torch.nn.ParameterDict(
            {
                "conv1d_weight": torch.randn(CHANNELS, 1, TAPS),
                "conv1d_bias": torch.randn(CHANNELS),
                "A_log": torch.rand(HEADS),
                "D": torch.randn(HEADS),
                "dt_bias": torch.randn(HEADS),
            }
        )
        self.cp = SimpleNamespace(
            nheads_local_tpcp=HEADS,
            ngroups_local_tpcp=GROUPS,
            post_conv_ssm=lambda y, params: 2 * y,
            **{f"get_{name}": lambda name=name: self.numbers[name] for name in self.numbers},
        )

    def norm(self, y):
        return y + 1

    def forward(self, hidden_states, inference_context=None, *, packed_seq_params=None):
        return self._ssm_training(hidden_states, packed_seq_params)

    def _ssm_training(self, zxBCdt, packed_seq_params=None):
        return "stock"


class Older(MambaMixer):
    __module__, __qualname__ = "megatron.core.ssm.mamba_mixer", "MambaMixer"

    def _ssm_training(self, zxBCdt):
        return "stock"


def spec_of(mixer):
    """A hybrid's: a layer of attention next to a MambaMixer."""
    return ModuleSpec(torch.nn.Module, submodules={"mixer": ModuleSpec(mixer), "attention": get_gpt_layer_local_spec()})


def mixer_of():
    torch.manual_seed(0)
    return use_packing_ops(spec_of(MambaMixer)).submodules["mixer"].module()


def expected(mixer, rows, cu_seqlens):
    """The formula in float64."""
    numbers = {name: value.detach().double() for name, value in mixer.numbers.items()}
    of_x, of_b = HEADS * HEAD_DIM, GROUPS * STATE
    z, xBC, dt = rows.double().split([of_x, CHANNELS, HEADS], 1)
    weight = numbers["conv1d_weight"].squeeze(1)
    xBC, _ = conv_oracle.causal_conv1d(xBC, weight, numbers["conv1d_bias"], cu_seqlens, activation="silu")
    x, B, C = xBC.split([of_x, of_b, of_b], 1)
    out, _ = scan_oracle.mamba2_scan(
        x.unflatten(1, (HEADS, -1)),
        dt,
        -numbers["A_log"].exp(),
        B.unflatten(1, (GROUPS, -1)),
        C.unflatten(1, (GROUPS, -1)),
        cu_seqlens,
        D=numbers["D"],
        dt_bias=numbers["dt_bias"],
        dt_softplus=True,
    )
    return 2 * out.flatten(1) * torch.nn.functional.silu(z) + 1


@pytest.mark.parametrize("padded", [False, True])
def test_packed_rows_are_those_of_each_document(padded):
    mixer, cu_seqlens = mixer_of(), cu_seqlens_of(LENGTHS)
    rows = torch.randn(sum(LENGTHS), 1, HEADS * HEAD_DIM + CHANNELS + HEADS, requires_grad=True)
    params = SimpleNamespace(cu_seqlens_q=cu_seqlens_of([1]) if padded else cu_seqlens, cu_seqlens_q_padded=None)
    if padded:
        params.cu_seqlens_q_padded = cu_seqlens
    found = mixer(rows, packed_seq_params=params)
    torch.testing.assert_close(
        found[:, 0].double(), expected(mixer, rows.detach()[:, 0], cu_seqlens), rtol=1e-4, atol=1e-4
    )
    found.sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in [rows, *mixer.parameters()])


def test_batches_are_stock():
    assert mixer_of()(torch.randn(7, 2, 3)) == "stock"
    assert isinstance(mixer_of(), MambaMixer)


def test_what_is_refused():
    mixer = mixer_of()
    tree = SimpleNamespace(segment_parents=torch.tensor([-1, 0]))
    with pytest.raises(NotImplementedError, match=r"segment_parents: expected None beside MambaMixer"):
        mixer(torch.randn(7, 1, 3), packed_seq_params=tree)
    mixer.D_has_hdim = True
    with pytest.raises(NotImplementedError, match="D_has_hdim: expected False"):
        mixer(torch.randn(7, 1, 3), packed_seq_params=SimpleNamespace(cu_seqlens_q=cu_seqlens_of([7])))
    with pytest.raises(NotImplementedError, match=r"MambaMixer: expected that of megatron-core 0\.16"):
        use_packing_ops(spec_of(Older))
