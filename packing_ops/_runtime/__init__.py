"""What every op shares: the compiled library, the way into an op, arguments, gradients, what is kept for a batch."""

import warnings

# torch warns at its import where NumPy is not installed. Nothing here needs NumPy.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
