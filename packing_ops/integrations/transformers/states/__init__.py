"""Layers that carry a state along the sequence: each document from a fresh state."""
