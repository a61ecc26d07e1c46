"""Models: loading, adapters, log-probabilities, generation, export."""
