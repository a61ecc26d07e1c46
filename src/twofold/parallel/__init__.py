"""How a model is spread over ranks. `strategy.py` names the axes; each axis is one file; `place.py` puts a model on
them all: tensor first, then shard or replicate."""

from twofold.parallel.strategy import DATA_AXES, Parallel, parse

__all__ = ["DATA_AXES", "Parallel", "parse"]
