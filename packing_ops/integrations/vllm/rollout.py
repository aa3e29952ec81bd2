"""What the layers of an engine give for documents, to be compared with those of a trainer's model."""

import functools
from collections.abc import Sequence

import torch

from packing_ops.integrations._patching import PRIVATE
from packing_ops.invariance.check import Parts, bits_of_rows

_HEARD = f"{PRIVATE}heard"


def record(llm: object, documents: Sequence[Sequence[int]], logps: Sequence[Sequence[float]]) -> Parts:
    """Run documents through an engine once more, and return them with the bits of its layers.

    Args:
        llm: a vllm.LLM. In a process of its own it needs VLLM_ALLOW_INSECURE_SERIALIZATION=1, as LLM.apply_model does.
        documents: token ids, prompt and answer.
        logps: what the engine gave for the answer, the document's last tokens.

    Returns:
        (documents, log-probabilities, layers), the ``rollout`` of check_invariance.

    Example:
        >>> rollout = record(llm, [[5, 6, 7, 8]], [[-1.5, -0.3]])  # needs vllm # doctest: +SKIP
        >>> check_invariance(model, rollout=rollout).why_not()  # needs vllm # doctest: +SKIP
        []

    Determinism: no token is sampled that counts.
    Synchronises: often: the bits go to the host.
    Memory: an integer for each token and layer.
    Gradients: none.
    """
    from vllm import SamplingParams

    once, layers = SamplingParams(max_tokens=1, detokenize=False), {}
    for document in documents:
        llm.reset_prefix_cache()
        llm.apply_model(_listen)
        try:
            llm.generate([{"prompt_token_ids": list(document)}], once, use_tqdm=False)
        finally:
            (heard,) = llm.apply_model(_heard)
        for name, rows in heard.items():
            layers.setdefault(name, []).append(rows[: len(document)])
    on_cpu = ([torch.tensor(each, device="cpu") for each in rows] for rows in (documents, logps))
    return *on_cpu, layers


def _listen(model: torch.nn.Module) -> None:
    hooks, heard = vars(model)[_HEARD] = [], {}
    for name, module in model.named_modules():
        # Without activations, which take two halves in an engine, and embeddings, which some scale elsewhere.
        if name and next(module.parameters(), None) is not None and "Embedding" not in type(module).__name__:
            hooks.append(module.register_forward_hook(functools.partial(_keep, heard.setdefault(name, []))))


def _keep(rows: list[torch.Tensor], module: torch.nn.Module, args: object, out: object) -> None:
    tensors = [each for each in (out if isinstance(out, tuple) else (out,)) if isinstance(each, torch.Tensor)]
    # A layer gives a half of its sum, and the residual: no layer of a trainer's model does.
    if tensors and (len(tensors) == 1 or next(module.children(), None) is None):
        rows.append(bits_of_rows(tensors[0]).cpu())


def _heard(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    hooks, heard = vars(model).pop(_HEARD)
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(rows) for name, rows in heard.items() if rows}
