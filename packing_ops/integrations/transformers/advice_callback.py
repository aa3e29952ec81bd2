"""The advice on padding for runs with any attention."""

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packing_ops._runtime.batch_cache import is_real
from packing_ops.integrations._advice import BATCHES, Padding, is_step
from packing_ops.integrations.transformers.call import NAMES
from packing_ops.integrations.transformers.versions import models_in


class PackingAdviceCallback(TrainerCallback):
    """A callback of Trainer, and of TRL's trainers, that logs in one line how much padding the run has.

    It counts the attention_mask of the first 20 training batches. It logs nothing where less than a tenth is padding,
    or where batches have no 2-D attention_mask, as packed ones. Models with attn_implementation="packing_ops" log it
    themselves.

    Example:
        >>> from transformers import Trainer
        >>> trainer = Trainer(model, callbacks=[PackingAdviceCallback()])  # needs a model # doctest: +SKIP

    On CUDA it waits for the GPU once, after the last of these batches.
    """

    def __init__(self) -> None:
        self.padding = Padding()
        self.hook: torch.utils.hooks.RemovableHandle | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: torch.nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        """Trainer calls it."""
        if model is None or self.hook is not None or self.padding.batches == BATCHES:
            return
        if not any(each.config._attn_implementation in NAMES for each in models_in(model)):
            self.hook = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Trainer calls it."""
        self._leave()

    def _leave(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = None

    def _count(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask")
        if not is_step(model) or not isinstance(mask, torch.Tensor) or mask.dim() != 2 or not is_real(mask):
            return
        self.padding.add(model, mask.numel(), mask.count_nonzero())
        if self.padding.batches == BATCHES:
            self._leave()
