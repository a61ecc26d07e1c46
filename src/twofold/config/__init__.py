"""Typed configuration: what may be written (`schema`), reading it (`load`), writing it (`dump`).

Names are imported when they are first used, so that the command line can answer `--help` without pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOME = {"json_schema": "dump", "load_with_origins": "load", "validate_kwargs": "load"}
__all__ = ["json_schema", "load_with_origins", "validate_kwargs"]

if TYPE_CHECKING:
    from twofold.config.dump import json_schema
    from twofold.config.load import load_with_origins, validate_kwargs


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module 'twofold.config' has no attribute '{name}'")
