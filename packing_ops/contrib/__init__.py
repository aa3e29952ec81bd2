"""Adapters that carry the names of one project each, and leave packing_ops when that project has what it needs.

Three rules, which tests/project/test_contrib.py holds:

One way: a file here imports the names that ``__all__`` of packing_ops, its data, parallel and integrations, or
packing_ops.integrations.adapters shows, and nothing of packing_ops imports it but its old name in
packing_ops.integrations.
Owner: who changes packing_ops.integrations.adapters mends what is here; what nobody mends in a release leaves with the
next.
Removal: ``LEAVES`` says of each when it leaves, at the latest.
"""

from packing_ops._runtime.lazy import lazy_modules

LEAVES = {  # {module: (the version that has it no more, or what ends it before)}
    "open_instruct": ("0.4.0", "open-instruct imports packing_ops.data's collators itself"),
    "ring_flash_attn": ("0.4.0", "no host imports ring_flash_attn"),
    "unsloth": ("0.4.0", "Unsloth takes the patches of docs/adopt"),
}
__getattr__, __dir__ = lazy_modules(globals(), dict.fromkeys(LEAVES, "torch"))
