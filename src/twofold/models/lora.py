"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft."""

from __future__ import annotations

from typing import Any

from twofold.config.schema import LoraConfig
from twofold.errors import UserError
from twofold.models.load import quiet


def add_lora(model: Any, config: LoraConfig) -> Any:
    """The model with a fresh LoRA adapter; only the adapter (and `modules_to_save`) is trainable.

    Raises UserError when the targets name nothing in this model.
    """
    import peft

    adapter = peft.LoraConfig(
        task_type="SEQ_CLS" if is_classifier(model) else "CAUSAL_LM",
        r=config.r,
        lora_alpha=config.alpha if config.alpha is not None else 2 * config.r,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=config.target,
        modules_to_save=list(config.modules_to_save) or None,
    )
    try:
        with quiet():
            return peft.get_peft_model(model, adapter)
    except ValueError as error:
        if "target modules" not in str(error).lower():
            raise
        leaves = sorted(
            {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if not list(module.children())}
        )
        raise UserError(
            f"model.adapter.target: {config.target} names no module of {type(model).__name__}. "
            f"Use all-linear, or some of: {', '.join(x for x in leaves if x)}."
        ) from None


def is_classifier(model: Any) -> bool:
    return type(model).__name__.endswith("ForSequenceClassification")


def is_adapter(model: Any) -> bool:
    return hasattr(model, "get_base_model")
