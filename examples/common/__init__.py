"""What the examples share: options, text, models, batches, runs and what is written of them."""
