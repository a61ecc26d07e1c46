"""`Trainer`: any task, on any layout, from Python. It puts the parts together; the loop runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from twofold.config.dump import dump_groups
from twofold.config.load import validate_kwargs
from twofold.config.schema import RunConfig, TrainConfig
from twofold.errors import UserError, show_plainly
from twofold.mesh.cluster import count_nodes, join_step, this_node
from twofold.mesh.devices import indices, keep_freed_memory, resolve
from twofold.mesh.launch import ensure_workers, is_worker
from twofold.monitor.callback import Callback
from twofold.monitor.run_folder import RunFolder, default_name
from twofold.monitor.status import close_status
from twofold.parallel import DATA_AXES, Parallel, parse
from twofold.task import Task

if TYPE_CHECKING:
    from twofold.data.order import Cut
    from twofold.engine.feed import Feed
    from twofold.engine.loop import Loop, Result
    from twofold.engine.predict import Predict
    from twofold.engine.source import Source
    from twofold.mesh.mesh import Mesh

show_plainly()
_OWN_ARGUMENTS = ("callbacks", "config_text", "check")


@dataclass(frozen=True)
class Extras:
    """What a method adds to a run: how micro-batches are cut, the start table's rows, evaluation samples
    (model, count -> samples), what writes the export (model, folder -> lines that say how to use it), what a resumed
    run must share with the saved one, what the user should be told, loader processes, and whether the model keeps the
    dtypes it was loaded with whatever `precision` says. before: called with the model as it is at the start, placed,
    and a `Predict` (`engine/predict.py`), before a checkpoint is loaded."""

    cut: Cut | None = None
    lengths: Sequence[int] | None = None
    eval_lengths: Sequence[int] | None = None
    info: Mapping[str, str] | None = None
    samples: Callable[[Any, int], list[dict[str, Any]]] | None = None
    export: Callable[[Any, Path], list[str]] | None = None
    facts: Mapping[str, Any] | None = None
    warnings: Sequence[str] = ()
    workers: int = 0
    keep_dtype: bool = False
    before: Callable[[Predict], None] | None = None


class Trainer:
    """Runs a task: `Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=3).fit(task, rows)`.

    accelerator: auto | cpu | gpu; devices: how many, on each of num_nodes machines; strategy: auto | single |
    ddp | zero1 | zero2 | fsdp | hsdp | tp, several as in "fsdp:2,tp:2", or a `Parallel`; precision: 32 | 16-mixed |
    bf16-mixed | bf16-true; callbacks: `Callback`s of your own;
    config_text: what the run folder's config.yaml says (default: these settings);
    check: called with the layout before any worker starts, to refuse what the model cannot do;
    settings: any field of `TrainConfig` and `RunConfig` (lr, max_steps, global_batch_size, eval_steps, name …).

    With devices > 1 in a plain script, making a Trainer starts the script again once for every device and
    waits: code after it runs in those workers, and their first one's exit code becomes the script's. Under
    torchrun it joins. Raises UserError for what cannot be, before any worker starts.
    """

    def __init__(
        self,
        accelerator: str = "auto",
        devices: int | str | Sequence[int] = "auto",
        num_nodes: int = 1,
        strategy: str | Parallel = "auto",
        precision: int | str = 32,
        callbacks: Sequence[Callback] = (),
        config_text: str | None = None,
        check: Callable[[Parallel], None] | None = None,
        **settings: Any,
    ) -> None:
        where = {"accelerator": accelerator, "devices": devices, "num_nodes": num_nodes, "precision": precision}
        if isinstance(strategy, str):
            where["strategy"] = strategy
        self.config, self.run_config = validate_kwargs((TrainConfig, RunConfig), where | settings, _OWN_ARGUMENTS)
        self.callbacks = list(callbacks)
        join_step()
        self._drives_ray = self.run_config.launcher == "ray" and not is_worker()
        if self._drives_ray:
            from twofold.mesh import on_ray

            (self.device_type, self.devices), machines = on_ray.resolve(accelerator, devices), num_nodes
        else:
            (self.device_type, self.devices), machines = resolve(accelerator, devices), count_nodes(num_nodes)
        self.layout = parse(strategy, self.devices * machines, machines)
        _check_batch(self.layout, self.config.global_batch_size)
        _check_precision(precision)
        _check_plugins(self.layout, self.config, self.run_config)
        if self.run_config.resume is True and self.run_config.name is None:
            raise UserError("run.resume=true needs run.name: which run of the folder is to go on?")
        self._config_text = config_text or dump_groups(train=self.config, run=self.run_config)
        self._made_by_agent = RunFolder.from_agent()
        name = self.run_config.name or default_name("run")
        given = self._made_by_agent
        self.folder = RunFolder(_from_here(given.path) if given else Path(self.run_config.folder) / name)
        if check is not None and not is_worker():
            check(self.layout)
        self._start()

    def _start(self) -> None:
        """In the process that the user started: refuses what cannot be; starts the workers if there are to be some."""
        run = self.run_config
        if self._drives_ray:
            self._drive_ray()
        node = this_node(run.num_nodes)
        is_first = not is_worker() and (node is None or node.rank == 0)  # of the machines: the run folder is its own
        if is_first:
            self.folder.check(resume=bool(run.resume))
            if self.devices > 1 or node is not None:
                self._create_folder()
        where = self.device_type, self.devices, run.num_nodes
        try:
            ensure_workers(*where, self.folder.logs, run.threads, run.affinity, indices(run.devices))
        except SystemExit as end:
            if end.code and is_first:
                close_status(self.folder.status, f"ended with exit code {end.code}")
            raise

    def _drive_ray(self) -> NoReturn:
        from twofold.mesh import on_ray

        run = self.run_config
        self.folder.check(resume=bool(run.resume))
        where = self.device_type, self.devices, run.num_nodes
        code = on_ray.launch(*where, run.threads, run.backend, Path(run.folder))
        if code and run.name:
            close_status(self.folder.status, f"ended with exit code {code}")
        sys.exit(code)

    def _create_folder(self) -> None:
        layout = {"parallel": str(self.layout), "ranks": self.layout.world_size, "device": self.device_type}
        self.folder.create(self._config_text, layout, resume=bool(self.run_config.resume))

    def fit(self, task: Task, train: Any, eval: Any = None, extras: Extras | None = None) -> Result:
        """Trains `task` on `train`, evaluating on `eval`.

        train, eval: anything with len and [i] (a list of rows, a torch or `datasets` data set), or a
        DataLoader, whose data set, batch size, shuffling and collate function are taken over (its batch size
        is then the global one). The task's `collate` makes batches of samples. Returns a `Result`.
        """
        from twofold.mesh.guard import guard
        from twofold.mesh.mesh import Mesh

        _check_task(task)
        extras = extras or Extras()
        with guard(self.folder.logs):
            mesh = Mesh.join(self.device_type, indices(self.run_config.devices), self.run_config.backend)
            mesh.arrange(self.layout.sizes, self.layout.timeouts, self.layout.backends)
            if self.device_type == "cpu":
                keep_freed_memory()
            self.folder = RunFolder(_from_here(mesh.broadcast_object(self.folder.path.absolute())))
            return self._run(self._loop(task, train, eval, extras, mesh), extras)

    def _loop(self, task: Task, train: Any, eval: Any, extras: Extras, mesh: Mesh) -> Loop:
        """Everything that the loop needs, from the settings."""
        from twofold.engine.checkpoint import Checkpoints, Progress, find
        from twofold.engine.loop import Loop
        from twofold.engine.optim import build_optimizer
        from twofold.engine.precision import Precision
        from twofold.engine.predict import Predict
        from twofold.engine.scaler import LossScale
        from twofold.engine.source import count_steps, mover, open_source, seed_everything
        from twofold.engine.step import TrainStep
        from twofold.parallel.hooks import find_hook
        from twofold.parallel.place import place
        from twofold.parallel.whole import Whole

        run = self.run_config
        precision = Precision.parse(run.precision)
        if not extras.keep_dtype:
            task.model.to(precision.parameter_dtype)
        parts = Whole(task.model) if self.layout.splits_weights else None
        hook = find_hook(run.comm_hook, run.comm_hook_options) if run.comm_hook else None
        placed = place(task.model, mesh, self.layout, hook)
        optimizer = build_optimizer(task.model, self.config, placed.optimizer)
        scaler = LossScale(mesh.device) if precision.scales_loss else None
        autocast, to_device = precision.autocast(mesh.device.type), mover(mesh.device)
        step = TrainStep(task, placed, optimizer, mesh, autocast, to_device, self.config.max_grad_norm, scaler)
        feed = self._feed(open_source(train, task, self.config, "train"), extras.lengths, extras, mesh)
        evaluation = None
        if eval is not None:
            evaluation = self._feed(open_source(eval, task, self.config, "eval"), extras.eval_lengths, extras, mesh)
        if extras.before is not None:
            feeds = {"train": feed} if evaluation is None else {"train": feed, "eval": evaluation}
            again = partial(place, mesh=mesh, layout=self.layout)
            extras.before(Predict(task, placed, mesh, feeds, autocast, to_device, again, self._say(mesh)))
        checkpoints = Checkpoints(self.folder.checkpoints, mesh, self.config.save_total_limit)
        order = feed.order
        facts: dict[str, Any] = {
            "samples": order.samples,
            "global_batch_size": order.global_batch_size,
            "seed": order.seed,
        }
        facts |= {"shuffle": order.shuffle, "layout": str(self.layout), **(extras.facts or {})}
        seed_everything(self.config.seed + mesh.coordinate("pipeline", "context", *DATA_AXES))
        progress, resumed = Progress(), find(checkpoints.folder, run.resume)
        if resumed is not None:
            progress = checkpoints.load(resumed, step, facts)
        loop = Loop(
            task=task,
            train=feed,
            evaluation=evaluation,
            step=step,
            mesh=mesh,
            config=self.config,
            max_steps=count_steps(self.config, order),
            checkpoints=checkpoints,
            progress=progress,
            facts=facts,
            callbacks=self._watchers(),
            autocast=autocast,
            samples=extras.samples,
            parts=parts,
        )
        self._open_run(loop, extras)
        return loop

    def _feed(self, source: Source, lengths: Sequence[int] | None, extras: Extras, mesh: Mesh) -> Feed:
        from twofold.data.order import Cut, Order
        from twofold.engine.feed import Feed

        if lengths is None and self.config.micro_batch_tokens is not None:
            raise UserError(
                "train.micro_batch_tokens needs samples of tokens: for this task set train.micro_batch_size."
            )
        _check_batch(self.layout, source.global_batch_size)
        order = Order(len(source.data), source.global_batch_size, self.config.seed, source.shuffle)
        cut = extras.cut or Cut(self.config.micro_batch_tokens, self.config.micro_batch_size)
        pin, workers = mesh.device.type == "cuda", source.workers or extras.workers
        mine, ranks = mesh.coordinate(*DATA_AXES), mesh.size(*DATA_AXES)
        least, multiple = self.layout.micro_batches
        return Feed(source.data, lengths, source.collate, order, cut, mine, ranks, least, multiple, workers, pin)

    def _say(self, mesh: Mesh) -> Callable[[str], None]:
        """Tells the user something before the run has begun."""
        return print if mesh.is_zero and self.run_config.progress != "off" else lambda text: None

    def _watchers(self) -> list[Callback]:
        """What writes the run folder and the console, then the user's own callbacks."""
        from twofold.monitor.console import Console
        from twofold.monitor.metrics import MetricsFile
        from twofold.monitor.status import Status

        own = [MetricsFile(self.folder.metrics), Status(self.folder.status), Console(self.run_config.progress)]
        return [*own, *self.callbacks]

    def _open_run(self, loop: Loop, extras: Extras) -> None:
        """Makes the run folder, where the agent has not, then tells everyone that the run starts."""
        from twofold.monitor.logs import setup_logging

        if self._made_by_agent is None and loop.mesh.is_zero:
            self._create_folder()
        loop.mesh.barrier()
        setup_logging(self.folder.logs, loop.mesh.rank)
        loop.tell("on_start", _info(self, loop, extras))
        for text in (*extras.warnings, *_warnings(self, loop)):
            loop.tell("on_warning", text)

    def _run(self, loop: Loop, extras: Extras) -> Result:
        """Runs the loop and tells the callbacks how it ended."""
        try:
            result = loop.run()
            result.run_folder = self.folder.path
            following: list[str] = []
            if extras.export is not None:
                result.export, model = self.folder.export, loop.whole()
                following = extras.export(model, result.export) if model is not None else []
            loop.mesh.barrier()
        except BaseException as error:
            loop.tell("on_error", error, loop.progress.step)
            raise
        loop.tell("on_end", _summary(result, following))
        return result


def _check_precision(precision: int | str) -> None:
    from twofold.engine.precision import Precision

    Precision.parse(precision)


def _check_plugins(layout: Parallel, config: TrainConfig, run: RunConfig) -> None:
    """Parts that are named in the settings are there, and take what they are given."""
    from twofold.engine.optim import optimizer_class
    from twofold.mesh.mesh import use_backend
    from twofold.parallel.hooks import find_hook

    optimizer_class(config)
    if run.backend:
        use_backend(run.backend)
    for axis, backend in layout.backends.items():
        use_backend(backend, f"Parallel: backends['{axis}']")
    if run.comm_hook_options and not run.comm_hook:
        raise UserError("run.comm_hook_options are for a run.comm_hook, and there is none: set it, or remove them.")
    if run.comm_hook:
        find_hook(run.comm_hook, run.comm_hook_options)
        if layout.splits_weights:
            raise UserError(f"run.comm_hook works with whole copies of a model (ddp, zero1), and not on {layout}.")


def _check_batch(layout: Parallel, samples: int) -> None:
    """A schedule of the pipeline needs some micro-batches, and a micro-batch a sample."""
    least, ranks = layout.micro_batches[0], prod(layout.sizes[axis] for axis in DATA_AXES)
    if samples < least * ranks:
        raise UserError(
            f"strategy {layout} needs {least} micro-batches a step on each of {ranks} data rank(s), and a step has "
            f"{samples} samples: set train.global_batch_size={least * ranks} or more, a smaller pp, or gpipe."
        )


def _check_task(task: Any) -> None:
    for name in ("inputs", "loss", "collate", "weights"):
        if not callable(getattr(task, name, None)):
            raise UserError(
                f"{type(task).__name__} is no Task: it has no method '{name}'. Derive it from twofold.Task."
            )
    if not hasattr(task, "model"):
        raise UserError(f"{type(task).__name__} sets no `model`: assign an nn.Module to self.model in __init__.")


def _info(trainer: Trainer, loop: Loop, extras: Extras) -> dict[str, Any]:
    """The start table, row by row, and where the run begins and ends."""
    config, mesh, model = trainer.config, loop.mesh, loop.task.model
    whole = model if loop.parts is None else loop.parts.shape
    every = sum(p.numel() for p in whole.parameters())
    trained = sum(p.numel() for p in whole.parameters() if p.requires_grad)
    order = loop.train.order
    epochs = loop.max_steps / order.steps_per_epoch
    plan = f"{loop.max_steps} steps · {epochs:.1f} epochs · {config.optimizer}, {config.schedule} lr {config.lr:.1e}"
    if config.eval_steps and loop.evaluation is not None:
        plan += f" · evaluation every {config.eval_steps}"
    table = {
        "model": type(model).__name__,
        "parameters": f"{_count(every)} · {_count(trained)} trainable ({100 * trained / every:.2f} %)",
        "data": f"{order.samples:,} samples",
        "batch": f"{order.global_batch_size} samples a step over {mesh.size(*DATA_AXES)} rank(s)",
        "plan": plan,
        "layout": f"{trainer.layout} on {trainer.device_type} · precision {trainer.run_config.precision}",
        "run": str(trainer.folder.path),
    }
    return table | dict(extras.info or {}) | {"max_steps": loop.max_steps, "start_step": loop.progress.step}


def _warnings(trainer: Trainer, loop: Loop) -> list[str]:
    """What the user should know before the first step."""
    from torch.nn.modules.batchnorm import _BatchNorm

    told = []
    if trainer.run_config.resume and loop.progress.step == 0:
        told.append(f"there is no checkpoint to resume in {loop.checkpoints.folder}: the run starts from step 0")
    if any(isinstance(module, _BatchNorm) for module in loop.task.model.modules()):
        told.append(
            "batch normalisation takes its statistics from each micro-batch of each rank: results depend on how a step "
            "is cut. Layer or group normalisation do not."
        )
    return told


def _from_here(path: Path) -> Path:
    """A path as the user would write it: relative where it lies below the current folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _count(n: int) -> str:
    return f"{n:,}" if n < 100_000 else f"{n / 1e6:,.2f} M"


def _summary(result: Result, following: list[str]) -> dict[str, Any]:
    return {
        "steps": result.steps,
        "seconds": result.seconds,
        "loss": result.loss,
        "best_loss": result.best_loss,
        "best_step": result.best_step,
        "export": str(result.export) if result.export else None,
        "run": str(result.run_folder),
        "next": following,
    }
