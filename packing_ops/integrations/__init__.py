"""Adapters for other libraries, a module or folder each. Nothing is imported here; the rest of packing_ops needs none."""
