"""Twofold trains PyTorch models: change where it runs, never what it computes.

Names are imported when they are first used, so `import twofold` is quick and imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "Trainer": "twofold.trainer",
    "Task": "twofold.task",
    "Loss": "twofold.task",
    "Callback": "twofold.monitor.callback",
    "Parallel": "twofold.parallel",
    "UserError": "twofold.errors",
}
__all__ = [  # the keys of _HOME and the methods' classes, as literals for linters and type checkers
    "Callback",
    "Loss",
    "Parallel",
    "SFTConfig",
    "SFTTrainer",
    "Task",
    "Trainer",
    "UserError",
    "__version__",
]

if TYPE_CHECKING:
    from twofold.errors import UserError
    from twofold.methods.sft import SFTConfig, SFTTrainer
    from twofold.monitor.callback import Callback
    from twofold.parallel import Parallel
    from twofold.task import Loss, Task
    from twofold.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name.endswith(("Trainer", "Config")):
        from twofold.methods import find_class

        found = find_class(name)
        if found is not None:
            return found
    raise AttributeError(f"module 'twofold' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
