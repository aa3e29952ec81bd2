"""Attention over packed rows: varlen_attention, other kernels behind one signature, masks, flash-attn's names."""
