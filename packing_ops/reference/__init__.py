"""Plain torch oracles, one file per family: any device, any dtype, written to be read, not to be fast."""
