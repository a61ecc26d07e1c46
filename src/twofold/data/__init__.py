"""Data: formats, templates, samples, their order, batches."""
