"""flash_attn.layers: rotary only."""
