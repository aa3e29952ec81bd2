"""packing_ops in Megatron-core: packed (thd) training without TransformerEngine."""
