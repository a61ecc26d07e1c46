"""Pure tensor functions: attention over concatenated samples, log-probabilities in chunks."""
