"""packing_ops attention in TRL's trainers."""

from packing_ops.integrations.trl.packing import trl_data_utils


def register(name: str = "packing_ops") -> None:
    """Make ``attn_implementation=name`` work in TRL's trainers, ``packing=True`` and ``padding_free=True`` included.

    Registers the attention with transformers and, in older TRL, in its list of implementations that keep packed
    documents apart (TRL 1.16 has no list). A second call does nothing; revert_registration reverts it.

    Example:
        >>> register()
        >>> from trl import SFTConfig, SFTTrainer
        >>> options = {"packing": True, "model_init_kwargs": {"attn_implementation": "packing_ops"}}
        >>> trainer = SFTTrainer(name, SFTConfig(**options), train_dataset=dataset)  # needs a model # doctest: +SKIP

    Raises:
        ImportError: TRL or transformers is not installed.
    """
    known = _known_to_trl()
    from packing_ops.integrations import transformers

    transformers.register(name)
    known.add(name)


def revert_registration(name: str = "packing_ops") -> None:
    """Revert register(name), in TRL and in transformers; models that have the name need another one first.

    Example:
        >>> register("my_attention")
        >>> revert_registration("my_attention")

    Raises:
        ImportError: TRL or transformers is not installed.
    """
    known = _known_to_trl()
    from packing_ops.integrations import transformers

    transformers.revert_registration(name)
    known.discard(name)


def _known_to_trl() -> set[str]:
    """Return the implementations that keep packed documents apart, as older TRL lists them."""
    trl_data_utils()
    import trl.trainer.sft_trainer as sft_trainer

    known = getattr(sft_trainer, "FLASH_ATTENTION_VARIANTS", None)
    return known if isinstance(known, set) else set()
