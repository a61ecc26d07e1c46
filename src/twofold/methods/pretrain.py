"""Pre-training on plain texts: every token is learned, in blocks of full length.

    loss = - sum over tokens of log p(token | what comes before it in its document and its block) / their number

Documents follow each other in the order of the data, each with its end-of-text token, and are cut every
`data.max_length` tokens; a sample is such a block. In a block every document attends to itself alone, with positions of
its own (arXiv 2407.21783, section 3.2): packing changes how many samples a step has, and of what a token sees only the
cuts. The first token of a document, and of a block, is not predicted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from twofold.config.schema import DataOptions, Group
from twofold.errors import UserError
from twofold.methods.common import LanguageConfig, LanguageTask, LanguageTrainer, commands, data_options
from twofold.task import Loss

if TYPE_CHECKING:
    from twofold.data.tokens import TokenDataset


class Options(Group):
    """Pre-training on plain texts."""

    kind: Literal["pretrain"] = "pretrain"


class PretrainConfig(Options, LanguageConfig):
    """Options of `PretrainTrainer`: the data options (max_length: tokens of a block), and how the model is loaded."""


class Pretrain(LanguageTask):
    """Blocks of documents; the weight is the number of predicted tokens."""

    def loss(self, output: Any, batch: Any) -> Loss:
        return Loss.of(-output[0].sum(), len(output[0]))

    def weights(self, batch: Any) -> dict[str, Any]:
        return {"loss": len(batch["targets"])}


class PretrainTrainer(LanguageTrainer):
    """`PretrainTrainer(model="smollm2-135m-instruct", train_dataset="texts.jsonl", max_steps=100).train()`.

    The arguments are those of `LanguageTrainer`; rows: texts; args: a `PretrainConfig` or a dict of its fields.
    """

    config_class = PretrainConfig

    def task(self) -> Pretrain:
        task = Pretrain(self.model, self.pad)
        task.share_prompts = False  # documents that begin alike are still their own
        return task

    @classmethod
    def encoding(cls, args: Any) -> DataOptions:
        if args.max_length is None:
            raise UserError("data.max_length is the length of a block of pre-training: set it to a number.")
        return data_options(args).model_copy(update={"max_length": None})

    def arrange(self, data: TokenDataset, what: str) -> TokenDataset:
        return in_blocks(data, self.args.max_length)


def in_blocks(data: TokenDataset, length: int) -> TokenDataset:
    """The tokens of all samples, one after the other, in blocks of `length`; the last may be shorter. A piece of a
    sample of which nothing is predicted (one token) stays, to keep blocks full."""
    from twofold.data.tokens import TokenDataset

    ends = data.ends
    cuts = np.arange(length, int(ends[-1]), length)
    pieces = np.union1d(ends, cuts)
    starts = np.concatenate([[0], pieces[:-1]])
    firsts = np.flatnonzero(starts % length == 0)
    rows = np.array(data.row_numbers)[np.searchsorted(ends, starts[firsts], side="right")]
    note = f"{len(data):,} documents in {len(firsts):,} blocks of {length} tokens: a step's samples are blocks"
    report = replace(data.report, notes=[*data.report.notes, note], samples=len(firsts))
    made = TokenDataset(data.tokens, data.labels, pieces, rows, report, firsts)
    made.fingerprint = f"{data.fingerprint}-blocks-{length}"
    return made


run, preview, export = commands(PretrainTrainer)
