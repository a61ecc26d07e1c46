"""What the methods that score whole sequences share: a head of scores, read at each sequence's last token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twofold.methods.common import LanguageTask, LanguageTrainer, torch_dtype
from twofold.trainer import Extras

if TYPE_CHECKING:
    from twofold.models.causal_lm import CausalLM


class ScoreTask(LanguageTask):
    """The model's output for a batch: (scores [sequences, labels], None)."""

    def collate(self, samples: Any) -> dict[str, Any]:
        from twofold.data.collate import at_ends

        return at_ends(super().collate(samples))


class ScoreTrainer(LanguageTrainer):
    """A trainer of such a model."""

    @classmethod
    def labels(cls, args: Any) -> list[str]:
        """What the scores of a sequence are."""
        return ["reward"]

    @classmethod
    def build(cls, model: Any, args: Any, seed: int, tokenizer: Any, name: str) -> CausalLM:
        from twofold.engine.source import seed_everything
        from twofold.models.load import load_classifier
        from twofold.models.lora import add_lora
        from twofold.models.scorer import Scorer, examine_scorer

        seed_everything(seed)  # a new head is the same on every rank
        if isinstance(model, str | Path):
            model = load_classifier(str(model), cls.labels(args), torch_dtype(args.dtype), args.trust_remote_code)
        abilities = examine_scorer(model)
        if args.adapter is not None:
            model = add_lora(model, args.adapter)
        return Scorer(model, abilities, packed=args.attention == "auto")

    def extras(self) -> Extras:
        from dataclasses import replace

        extras = super().extras()
        info = {**(extras.info or {}), "attention": (extras.info or {})["attention"].replace("labels", "last tokens")}
        return replace(extras, samples=None, info=info)
