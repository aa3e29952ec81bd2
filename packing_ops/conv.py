"""The short causal convolution of hybrid models: each channel of a packed row, each document by itself."""

from typing import Literal, overload

import torch

from packing_ops._runtime import gate
from packing_ops._runtime.arguments import check_tensor
from packing_ops._runtime.autograd import register_recurrence
from packing_ops.metadata import PackedMetadata, cu_seqlens_of


@overload
def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: PackedMetadata | torch.Tensor, *,
    activation: str | None = None, initial_state: torch.Tensor | None = None,
    output_final_state: Literal[False] = False,
) -> tuple[torch.Tensor, None]: ...  # fmt: skip
@overload
def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cu_seqlens: PackedMetadata | torch.Tensor, *,
    activation: str | None = None, initial_state: torch.Tensor | None = None,
    output_final_state: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cu_seqlens: PackedMetadata | torch.Tensor,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Convolve each channel of a document with its taps, looking back. Differentiable.

    Token t of a document becomes ``act(bias + weight[:, W - 1] * x[t] + weight[:, W - 2] * x[t - 1] + ...)``; terms of
    tokens before the document are left out, or taken from ``initial_state``.

    Args:
        x: float32, float64 (CPU), bfloat16 or float16 ``[total, channels]``, channels next to each other, any stride
            between tokens.
        weight: ``[channels, W]``, W from 1 to 8, the tap of the token itself last (``conv1d.weight.squeeze(1)``).
        bias: ``[channels]`` or None.
        cu_seqlens: int32 or int64 ``[num_documents + 1]``, or the PackedMetadata of the row.
        activation: "silu" (or its other name "swish"), or None.
        initial_state: ``[num_documents, channels, W - 1]``, the tokens before each document's first, the newest last.
        output_final_state: also return the last W - 1 tokens of each document, in the layout of ``initial_state``.

    Returns:
        (out, final_state or None). out is ``[total, channels]``, 0 in the padding after the last document. Sums are
        float32 (float64 for float64). A token's bits depend only on its document's tokens up to it: they are the same
        in any pack, and if a document is passed in several calls, each with the final state of the one before. So one
        row for each document, with its state, is the step of decoding.

    Cost:
        Reads x and writes out once.

    Example:
        >>> x = torch.tensor([[1.0], [2.0], [3.0], [10.0]])
        >>> out, state = causal_conv1d(
        ...     x, torch.tensor([[100.0, 1.0]]), None, torch.tensor([0, 3, 4]), output_final_state=True
        ... )
        >>> out.flatten().tolist()
        [1.0, 102.0, 203.0, 10.0]
        >>> state.flatten().tolist()
        [3.0, 10.0]
        >>> step, _ = causal_conv1d(
        ...     torch.tensor([[4.0], [5.0]]),
        ...     torch.tensor([[100.0, 1.0]]),
        ...     None,
        ...     torch.tensor([0, 1, 2]),
        ...     initial_state=state,
        ... )
        >>> step.flatten().tolist()
        [304.0, 1005.0]

    Raises:
        ValueError: tensors of another dtype, device or shape than x asks for; a width over 8; another activation;
            cu_seqlens past the end of x.

    Determinism: the same bits in every call, backward too, and for a document in any pack.
    Synchronises: never.
    Memory: the results; in backward the gradients and their partial sums.
    Gradients: of x, weight, bias and initial_state, also through final_state. No second derivative, no forward mode.
    """
    check_tensor(x, "x")
    if activation not in (None, "silu", "swish"):
        raise ValueError(f'activation: expected "silu", "swish" or None, got {activation!r}')
    cu_seqlens = cu_seqlens_of(cu_seqlens, x.shape[0] if x.dim() else 1, like="x")
    out, final_state = gate.causal_conv1d(
        x, weight, bias, cu_seqlens, initial_state, activation is not None, output_final_state
    )
    return out, final_state if output_final_state else None


register_recurrence("causal_conv1d", gate.causal_conv1d_backward, tensors=5)
