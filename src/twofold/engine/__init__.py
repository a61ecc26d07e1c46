"""The engine: feed, step, loop, optimizer, precision, evaluation, checkpoints."""
