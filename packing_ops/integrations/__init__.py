"""Adapters for other libraries (hosts), a folder or module each. Nothing is imported here.

Public is what the folder's ``__init__.py`` names in ``__all__``; its other modules are private. Modules with an
underscore serve several hosts: whatever replaces an attribute of a host's module or class is a Patch of _patching.py.
"""
