"""What every op shares: the compiled library, the way into an op, arguments, gradients, what is kept for a batch."""
