"""Adapters for other libraries, a module or folder each. Nothing is imported here; the rest of packing_ops needs none.

What a host's module or folder names in ``__all__`` is public, every other module of its folder is private. Modules with
an underscore serve several hosts.
"""
