"""Scripts for building and releasing, and helpers that setup.py and the tests import. Not installed."""
