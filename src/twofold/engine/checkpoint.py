"""Checkpoints: PyTorch's distributed format, committed by a rename, checked before they are read.

A checkpoint is written into a hidden folder, flushed to the disk and renamed to `step-00000040`: what bears
that name is complete. `latest` and `best` are links. An old checkpoint is removed only after its successor is
committed, and the one that `best` names is never removed. Weights that are not trained are not saved: they
are read from the model's own folder again.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from twofold.engine.step import TrainStep
from twofold.errors import UserError
from twofold.mesh.mesh import Mesh
from twofold.parallel.data import local_optimizer

_NAME = re.compile(r"step-(\d{8,})")
_MODEL = StateDictOptions(ignore_frozen_params=True, strict=False)
_OPTIMIZER = StateDictOptions(flatten_optimizer_state_dict=True, ignore_frozen_params=True)


@dataclass
class Progress:
    """How far a run is. units: tokens or samples seen; window: what is summed up for the next row of metrics.

    The data position is `step` alone: see `data/order.py`.
    """

    step: int = 0
    units: int = 0
    window: dict[str, Any] | None = None
    window_units: int = 0
    best_loss: float | None = None
    best_step: int | None = None


@dataclass
class Checkpoints:
    """The checkpoints of a run. keep: how many of the last ones stay, beside the best."""

    folder: Path
    mesh: Mesh
    keep: int = 2
    _last: Path | None = field(default=None, repr=False)

    def save(self, step: TrainStep, progress: Progress, facts: dict[str, Any], best: bool) -> Path:
        """Writes and commits a checkpoint of this step, links it, and removes what retention lets go.

        facts: what a resumed run must share with this one (samples, seed, batch …). Every rank must call it.
        """
        final = self.folder / f"step-{progress.step:08d}"
        work = self.folder / f".saving-{final.name}"
        if self._last != final:
            if self.mesh.is_zero:
                for unfinished in self.folder.glob(".saving-*"):  # of a run that was stopped while saving
                    shutil.rmtree(unfinished)
                work.mkdir(parents=True)
            self.mesh.barrier()
            with _quiet():
                dcp.save(_in_blocks(_state(step, self.mesh.rank)), checkpoint_id=work)
            if self.mesh.is_zero:
                _commit(
                    work,
                    final,
                    {"progress": asdict(progress), "world_size": self.mesh.world_size, "facts": facts},
                )
        if self.mesh.is_zero:
            _link(self.folder / "latest", final)
            if best:
                _link(self.folder / "best", final)
            self._retain()
        self.mesh.barrier()
        self._last = final
        return final

    def _retain(self) -> None:
        spared = {(self.folder / name).resolve() for name in ("latest", "best") if (self.folder / name).exists()}
        for old in committed(self.folder)[: -self.keep]:
            if old.resolve() not in spared:
                shutil.rmtree(old)

    def load(self, path: Path, step: TrainStep, facts: dict[str, Any]) -> Progress:
        """Puts model, optimizer, loss scale and random states back. Hyper-parameters stay those of the new
        configuration.

        Raises UserError if the checkpoint is damaged, of another layout, or of other data.
        """
        saved = verify(path)
        _same_run(path, saved, facts, self.mesh.world_size)
        model, optimizer = step.placed.model, local_optimizer(step.optimizer)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        now = _state(step, self.mesh.rank)
        state = _in_blocks(now)
        with _quiet():
            dcp.load(state, checkpoint_id=path)
        state = _laid_out_as(state, now)
        set_model_state_dict(model, state["model"], options=_MODEL)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_OPTIMIZER)
        for group, mine in zip(optimizer.param_groups, groups, strict=True):
            group.update(mine)
        step.optimizer.zero_grad(set_to_none=True)
        if step.scaler is not None:
            step.scaler.restore(state["loss_scale"])
        set_random_state(state[f"random.{self.mesh.rank}"])
        return Progress(**saved["progress"])


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns whenever a single process saves; that is no news here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _state(step: TrainStep, rank: int) -> dict[str, Any]:
    model = step.placed.model
    state = {
        "model": _trained(model),
        "optimizer": get_optimizer_state_dict(model, local_optimizer(step.optimizer), options=_OPTIMIZER),
        f"random.{rank}": random_state(),
    }
    return state if step.scaler is None else state | {"loss_scale": step.scaler.state()}


def _in_blocks(state: dict[str, Any]) -> dict[str, Any]:
    """The same with every tensor split into one block per rank: DCP would write the strided parts of a fused weight
    (gate and up of experts on the tensor axis) as if they were one block."""

    def block(x: Any) -> Any:
        if isinstance(x, dict):
            return {name: block(value) for name, value in x.items()}
        if not isinstance(x, DTensor) or not any(isinstance(p, _StridedShard) for p in x.placements):
            return x
        return x.redistribute(placements=[Shard(p.dim) if isinstance(p, _StridedShard) else p for p in x.placements])

    return {name: block(value) for name, value in state.items()}


def _laid_out_as(state: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The state with every tensor laid out as in another one of the same names."""

    def laid_out(x: Any, like: Any) -> Any:
        if isinstance(x, dict):
            return {name: laid_out(value, like[name]) for name, value in x.items()}
        if not isinstance(x, DTensor) or x.placements == like.placements:
            return x
        return x.redistribute(placements=like.placements)

    return {name: laid_out(value, other[name]) for name, value in state.items()}


def _trained(model: nn.Module) -> dict[str, Any]:
    """The trainable weights and the buffers. A frozen weight with two names (tied) is left out under both."""
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    return {name: x for name, x in get_model_state_dict(model, options=_MODEL).items() if name not in frozen}


def random_state() -> dict[str, torch.Tensor]:
    """Every random state of this process, as tensors of fixed sizes."""
    _, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    gauss = float(state["python_gauss"])
    random.setstate((3, tuple(state["python"].tolist()), None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, float(state["numpy_gauss"])))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def committed(folder: Path) -> list[Path]:
    """The committed checkpoints of a run, oldest first (by number, not by name)."""
    if not folder.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name)) and p.is_dir()]
    return [path for _, path in sorted(found)]


def _commit(work: Path, final: Path, state: dict[str, Any]) -> None:
    state["saved"] = time.strftime("%Y-%m-%dT%H:%M:%S")
    state["files"] = {p.name: [p.stat().st_size, _crc(p)] for p in sorted(work.iterdir())}
    (work / "state.json").write_text(json.dumps(state, indent=1))
    for path in work.iterdir():
        _flush(path)
    _flush(work)
    if final.is_dir():  # of a future that this run, resumed from an earlier step, has left behind
        old = final.with_name(f".replaced-{final.name}")
        final.rename(old)
        work.rename(final)
        shutil.rmtree(old)
    else:
        work.rename(final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            crc = zlib.crc32(block, crc)
    return crc


def _link(link: Path, target: Path) -> None:
    """Points a link at a sibling, atomically."""
    new = link.with_name(f".{link.name}-new")
    new.unlink(missing_ok=True)
    new.symlink_to(target.name)
    new.replace(link)


def verify(path: Path) -> dict[str, Any]:
    """The state.json of a checkpoint whose every file is there and unchanged. Raises UserError otherwise."""
    if not (path / "state.json").is_file():
        raise UserError(f"{path} is no checkpoint: it holds no state.json.{_others(path)}")
    state = json.loads((path / "state.json").read_text())
    for name, (size, crc) in state["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != size or _crc(file) != crc:
            raise UserError(f"checkpoint {path} is damaged: {name} is missing or changed.{_others(path)}")
    return state


def _others(path: Path) -> str:
    names = [p.name for p in committed(path.resolve().parent if path.exists() else path.parent) if p != path.resolve()]
    return f" Checkpoints beside it: {', '.join(names)}." if names else ""


def _same_run(path: Path, saved: dict[str, Any], facts: dict[str, Any], world_size: int) -> None:
    if saved["world_size"] != world_size:
        raise UserError(
            f"checkpoint {path} is from {saved['world_size']} rank(s) and this run has {world_size}: resuming on "
            f"another layout is not in this version yet. Set run.devices={saved['world_size']}."
        )
    for name, value in facts.items():
        if name in saved["facts"] and saved["facts"][name] != value:
            raise UserError(
                f"checkpoint {path} was trained with {name}={saved['facts'][name]} and this run has {value}: "
                f"resume with the same, or start a new run (run.name=…)."
            )


def load_weights(path: Path, model: nn.Module) -> dict[str, Any]:
    """Puts the trained weights of a checkpoint into a model of the same shape; returns the checkpoint's state."""
    saved = verify(path)
    state = {"model": _trained(model)}
    with _quiet():
        dcp.load(state, checkpoint_id=path, no_dist=True)
    set_model_state_dict(model, state["model"], options=_MODEL)
    return saved


def find(folder: Path, resume: bool | str) -> Path | None:
    """The checkpoint to resume from: a path, or the latest of `folder` (None if there is none yet)."""
    if isinstance(resume, str):
        path = Path(resume)
        if not path.is_dir():
            raise UserError(f"run.resume: there is no checkpoint folder {resume}.")
        return path.resolve()
    existing = committed(folder)
    return existing[-1] if resume and existing else None
