"""Log-probabilities, cross-entropy and divergences of tokens, without the logits of all tokens at once."""
