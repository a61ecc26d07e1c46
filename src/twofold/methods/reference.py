"""The reference of preference methods: log-probabilities under a model that does not change.

They are computed once, before the first step, on the run's own layout and in evaluation mode (no dropout), and kept
with a fingerprint of the model's weights, the rows and how they are encoded (template included); or in every step, by a
second model or by the model itself with its adapter switched off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from zipfile import BadZipFile

import numpy as np
from pydantic import Field

from twofold.config.schema import Group
from twofold.errors import UserError
from twofold.methods.common import LanguageTask, LanguageTrainer, as_causal_lm, sequence_sums, torch_dtype
from twofold.parallel import Parallel
from twofold.trainer import Extras

if TYPE_CHECKING:
    from torch import Tensor

    from twofold.data.tokens import TokenDataset
    from twofold.engine.predict import Predict
    from twofold.models.causal_lm import CausalLM
    from twofold.parallel.placed import Placed


class ReferenceOptions(Group):
    """Which model the trained one is compared with, and when that is computed."""

    reference: Literal["precompute", "live", "none"] = Field(
        default="precompute",
        description="The reference's log-probabilities: computed once before training, in every step (live: by "
        "reference_model, or by the model with its adapter off), or none = reference-free.",
    )
    reference_model: str | None = Field(
        default=None,
        min_length=1,
        description="The reference: a folder or a name. null = the model as training begins.",
    )
    reference_folder: str | None = Field(
        default=None,
        min_length=1,
        description="Where precomputed log-probabilities are kept; refused if they are of another model, template or "
        "rows. null = the cache.",
    )


class ReferenceTask(LanguageTask):
    """Has the reference's log-probabilities of each sequence: in the batch, from the model's output, or 0."""

    def sums(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """(model, reference): the sums of log-probabilities of each sequence, fp64 [sequences]."""
        policy = sequence_sums(output[0], batch)
        if "reference" in batch:
            return policy, batch["reference"]
        if len(output) > 2:
            return policy, sequence_sums(output[2], batch)
        return policy, policy.detach() * 0


class ReferenceTrainer(LanguageTrainer):
    """A trainer whose options derive from `ReferenceOptions`. views: the batches in a batch whose sequences, in turn,
    make up a sample."""

    views: ClassVar[Sequence[Callable[[Any], Any]]] = (lambda batch: batch,)

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        if self.args.reference != "live":
            return
        from twofold.models.referenced import ReferencedLM

        second = None if self.args.reference_model is None else self._second_model()
        self.model = ReferencedLM(self.model, second)

    def check(self, model: Any, layout: Parallel) -> None:
        options = self.args
        if options.reference_model is not None and options.reference == "none":
            raise UserError("method.reference=none has no reference: remove method.reference_model.")
        if options.reference == "live":
            if options.reference_model is None and options.adapter is None:
                raise UserError(
                    "method.reference=live needs method.reference_model or an adapter to switch off: choose "
                    "precompute, or set one of them."
                )
            if layout.pipeline > 1:
                raise UserError("method.reference=live runs on no pipeline (pp): use method.reference=precompute.")
        if options.reference_model is not None:
            from twofold.models.load import load_shape

            try:
                load_shape(options.reference_model, options.trust_remote_code)
            except UserError as error:
                raise UserError(str(error).replace("model.path", "method.reference_model", 1)) from None
        super().check(model, layout)

    def extras(self) -> Extras:
        from dataclasses import replace

        extras, how = super().extras(), self.args.reference
        which = self.args.reference_model or "the model as training begins"
        if how == "live" and self.args.reference_model is None:
            which = "the model with its adapter off"
        words = {"precompute": f"{which}, computed once", "live": f"{which}, in every step", "none": "none"}
        extras = replace(extras, info={**(extras.info or {}), "reference": words[how]})
        if how != "precompute":
            return extras
        return replace(extras, before=self._precompute)

    def _load_model(self, model: Any) -> CausalLM:
        from twofold.models.load import load_model

        if isinstance(model, str | Path):
            model = load_model(str(model), torch_dtype(self.args.dtype), self.args.trust_remote_code)
        if self.args.reference == "precompute" and self.args.reference_model is None:
            self._weights = weights_digest(model)  # before an adapter that changes nothing yet, and before it is cut
        return super()._load_model(model)

    def _second_model(self) -> CausalLM:
        from twofold.models.load import load_model

        path = self.args.reference_model
        model = load_model(path, torch_dtype(self.args.dtype), self.args.trust_remote_code)
        return as_causal_lm(model, self.args.attention, self.tokenizer, path)

    def _precompute(self, predict: Predict) -> None:
        """Gives every data set its column `reference`, computed where it is not kept already."""
        second, placed = None, None
        if self.args.reference_model is not None:
            second = self._second_model().to(next(predict.placed.model.parameters()).dtype)
            self._weights = weights_digest(second)
        for name, data in (("train", self.train_dataset), ("eval", self.eval_dataset)):
            if data is None:
                continue
            key = _key(data, self._weights, self.trainer.run_config.precision)
            path = self._kept(key, name)
            values = predict.mesh.broadcast_object(self._read(path, key, name))  # rank 0 decides whether to compute
            if values is None:
                predict.say(f"reference  log-probabilities of {len(data):,} {name} samples, kept in {path}")
                placed = placed or (predict.place(second) if second is not None else None)
                found = [self._one_pass(predict, name, view, placed) for view in self.views]
                values = np.array([x for parts in zip(*found, strict=True) for part in parts for x in part])
                if predict.mesh.is_zero:
                    _write(path, key, values)
            data.columns["reference"] = values

    def _one_pass(
        self, predict: Predict, name: str, view: Callable[[Any], Any], placed: Placed | None
    ) -> list[list[float]]:
        """Each sample's log-probabilities of one view, one number for each of its sequences."""

        def values(output: Any, batch: Any) -> list[list[float]]:
            sums = iter(sequence_sums(output[0], view(batch)).tolist())
            return [[next(sums) for _ in range(count)] for count in view(batch)["counts"]]

        return predict(name, values, placed, lambda batch: predict.task.inputs(view(batch)))

    def _kept(self, key: str, name: str) -> Path:
        from twofold.data.prepare import cache_folder

        folder = self.args.reference_folder
        return (Path(folder) if folder else cache_folder() / "reference" / key) / f"{name}.npz"

    def _read(self, path: Path, key: str, name: str) -> np.ndarray | None:
        """Kept values; None where there are none. Raises UserError where the user's folder has others."""
        try:
            with np.load(path) as kept:
                found, values = str(kept["key"]), np.asarray(kept["values"])
        except (OSError, ValueError, KeyError, EOFError, BadZipFile):  # not there, or unreadable
            return None
        if found != key:
            raise UserError(
                f"method.reference_folder: {path} was computed with another model, template or precision, or for other "
                f"{name} rows: remove it, or choose another folder."
            )
        return values


def weights_digest(model: Any) -> str:
    """Of every parameter and kept buffer of a model: names, types and values."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in model.state_dict().items():
        whole = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _key(data: TokenDataset, weights: str, precision: Any) -> str:
    return hashlib.sha256(f"{data.fingerprint} {weights} {precision}".encode()).hexdigest()[:20]


def _write(path: Path, key: str, values: np.ndarray) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = path.with_suffix(".writing.npz")
        np.savez(work, key=np.array(key), values=values)
        work.replace(path)
    except OSError:  # no place for them: they are computed again next time
        pass
