"""packing_ops in Hugging Face transformers: attention by name, and kernels swapped into a model.

attn_implementation="packing_ops":
    attention.py            register, and the function that every layer calls: what varlen attention serves, and which
                            rows; SDPA, for calls that it does not serve.
    call.py                 One call of a model, from its start to its end: what it was given that tells its documents.
    other_attention.py      A model that this package has seen, while its attention is another one: its packed rows are
                            served or refused.
    layer_documents.py      The documents of one layer: by its mask, its arguments, or rows that Ulysses gathered.
    documents.py            Where the documents of a batch are, and whether a row has several.
    positions.py            The positions that a model gets, and what in it looks at the whole row instead.
    masks.py                MaskPattern, which layers get in place of a mask tensor, and where masks are made.
    continuous_batching.py  generate_batch over a paged cache.
    versions.py             The transformers that is served, and what this folder uses of it.
    checkpoints.py          Layers that run again in backward: what they find then is what the forward found.
    states/                 Layers that carry a state along the sequence: each document from a fresh state.
        stateful.py         Which layers these are, and declare; stateful_rows.py: documents as rows of a batch.
        linear_attention.py Convolutions, delta rules and scans of hybrid models, which get the documents of the rows.
        cached.py           Calls that go on with a state of their cache: what a state cannot go on with is refused.
apply_packing_ops(model):
    apply.py                Apply and revert, Applied, which is what they say, and a model's attn_implementation.
    summary.py              info: what runs in a model, line by line.
    advice_callback.py      The line of the log on padding, for runs without this attention.
    sequence_group.py       A model whose rows are spread over several ranks, by packing_ops.parallel.
    rope.py, rms_norm.py, vision.py, fused_loss.py   How each of these is put into a model.
    _rope_trial.py, one folder up: which rotation a module's functions compute: they are run next to ours.
    _advice.py, one folder up: lines of the log on padding and logits.
    _router_replay.py, one folder up: replay_routing, experts that another program has chosen.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and docs/api read
    from packing_ops.integrations._router_replay import replay_routing
    from packing_ops.integrations.transformers.advice_callback import PackingAdviceCallback
    from packing_ops.integrations.transformers.apply import Applied, apply_packing_ops, revert_packing_ops
    from packing_ops.integrations.transformers.attention import register, revert_registration
    from packing_ops.integrations.transformers.states.stateful import declare
    from packing_ops.integrations.transformers.summary import info

from packing_ops._runtime.lazy import lazy_names

_MODULES = {
    "Applied": "apply",
    "PackingAdviceCallback": "advice_callback",
    "apply_packing_ops": "apply",
    "declare": "states.stateful",
    "info": "summary",
    "register": "attention",
    "replay_routing": "fused_loss",
    "revert_packing_ops": "apply",
    "revert_registration": "attention",
}
__all__ = [
    "Applied",
    "PackingAdviceCallback",
    "apply_packing_ops",
    "declare",
    "info",
    "register",
    "replay_routing",
    "revert_packing_ops",
    "revert_registration",
]
__getattr__, __dir__ = lazy_names(
    globals(),
    _MODULES,
    "transformers",
    "needs transformers: pip install 'transformers>=5.17'",
    {"unregister": "revert_registration"},
)
