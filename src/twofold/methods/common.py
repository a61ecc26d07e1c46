"""What the methods for language models share: one file of a method is its options, its loss and little else.

A method derives from `LanguageTrainer`, names its configuration class and the kind of rows it learns from, and makes
its task from the loaded model. `commands` gives the file the functions that the command line calls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from twofold.config.load import validate_kwargs
from twofold.config.schema import Config, DataOptions, LoraConfig
from twofold.errors import UserError
from twofold.monitor.run_folder import default_name
from twofold.parallel import Parallel
from twofold.task import Task
from twofold.trainer import Extras, Trainer

if TYPE_CHECKING:
    from torch import Tensor

    from twofold.data.tokens import TokenDataset
    from twofold.engine.loop import Result
    from twofold.models.causal_lm import CausalLM

MODEL_INPUTS = ("input_ids", "position_ids", "attention_mask", "sample_lengths", "predict_at", "targets")
_MICRO_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}


class LanguageConfig(DataOptions):
    """How the rows are read, and how the model is loaded and adapted."""

    adapter: LoraConfig | None = Field(None, description="Train a LoRA adapter only. None = all parameters.")
    dtype: Literal["float32", "bfloat16"] | None = Field(None, description="Type in which the weights are loaded.")
    chat_template: str | None = Field(None, description="A .jinja file or the template itself.")
    attention: Literal["auto", "padded"] = Field("auto", description="padded = never without padding.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")


class LanguageTask(Task):
    """A task on the log-probabilities that a `CausalLM` gives to the labelled tokens of token samples.

    pad: the token that fills padded batches (never trained, never attended to); share_prompts: what sequences of a
    sample begin with is computed once.
    """

    model: CausalLM

    def __init__(self, model: CausalLM, pad: int = 0) -> None:
        self.model = model
        self.pad = pad
        self.share_prompts = True

    def collate(self, samples: Any) -> dict[str, Any]:
        from twofold.data.collate import grouped, packed, padded

        make = packed if self.model.packed else partial(padded, pad=self.pad)
        if "sequences" not in samples[0]:
            return make(samples)
        return grouped(samples, make, as_trees=self.share_prompts and self.model.packed)

    def inputs(self, batch: Any) -> dict[str, Any]:
        return {key: batch[key] for key in MODEL_INPUTS if key in batch}


class LanguageTrainer:
    """Fine-tunes a language model.

    model: a Hugging Face model, a folder or a name; train_dataset, eval_dataset: a path, a list of rows or a
    `datasets` object, in any of the method's formats (`twofold.data.formats`); args: a `config_class` or a dict of
    its fields; tokenizer: needed beside a model object, else loaded with the model; trainer_arguments: any
    argument of `Trainer`. Raises UserError for bad arguments and untrainable rows, before any worker starts.

    A method sets `config_class`, `rows` (the kind of rows it learns from, see `twofold.data.formats`) and `task`.
    """

    config_class: ClassVar[type[Any]]
    rows: ClassVar[str] = "single"

    def __init__(
        self,
        model: Any,
        train_dataset: Any,
        eval_dataset: Any = None,
        args: Any = None,
        tokenizer: Any = None,
        config_text: str | None = None,
        **trainer_arguments: Any,
    ) -> None:
        self.args = self._as_config(args)
        self.model_name = str(model) if isinstance(model, str | Path) else type(model).__name__
        self.tokenizer = tokenizer or self._load_tokenizer(model)
        self._prepare(train_dataset, eval_dataset)
        if trainer_arguments.get("name") is None and not trainer_arguments.get("resume"):
            trainer_arguments["name"] = default_name(self.args.kind)
        # With devices > 1 the workers start here.
        self.trainer = Trainer(config_text=config_text, check=partial(self.check, model), **trainer_arguments)
        self.model = self._load_model(model)

    def task(self) -> LanguageTask:
        """What is learned, from `self.model`, `self.args` and `self.tokenizer`."""
        raise NotImplementedError(f"{type(self).__name__} must define task()")

    def train(self) -> Result:
        """Trains, and leaves the model in the run folder's export/. Returns the engine's `Result`."""
        task = self.task()
        if self.trainer.layout.context > 1:
            task.share_prompts = False  # a row is in pieces, and so would be a prompt
        return self.trainer.fit(task, self.train_dataset, self.eval_dataset, self.extras())

    def check(self, model: Any, layout: Parallel) -> None:
        """Refuses, before workers start, a layout that the model cannot be put on."""
        if layout.tensor == layout.pipeline == layout.expert == 1:
            return
        from twofold.models.layout_check import check_layout
        from twofold.models.load import load_shape

        check_layout(
            load_shape(str(model), self.args.trust_remote_code) if isinstance(model, str | Path) else model, layout
        )

    @property
    def pad(self) -> int:
        """The token that fills padded batches."""
        return self.tokenizer.pad_token_id or 0

    @classmethod
    def _as_config(cls, args: Any) -> Any:
        kind = cls.config_class
        if isinstance(args, kind):
            return args
        if args is None or isinstance(args, dict):
            return validate_kwargs((kind,), args or {})[0]
        name = f"{kind.__name__} or a dict of its fields"
        raise UserError(f"{cls.__name__}: args must be a {name}, not {type(args).__name__}.")

    def _load_tokenizer(self, model: Any) -> Any:
        from twofold.models.load import load_tokenizer

        source = model if isinstance(model, str | Path) else getattr(model, "name_or_path", "")
        if not source:
            raise UserError(f"{type(self).__name__}: a model object without a folder needs tokenizer=… beside it.")
        return load_tokenizer(str(source), self.args.chat_template, self.args.trust_remote_code)

    def _prepare(self, train: Any, evaluation: Any) -> None:
        """Sets train_dataset and eval_dataset, which may be held out of the training rows."""
        from twofold.data.prepare import held_out, prepare

        options = self.encoding(self.args)
        data, held = prepare(train, self.tokenizer, options, "train", kind=self.rows), None
        if evaluation is not None:
            held = prepare(evaluation, self.tokenizer, options, "eval", kind=self.rows)
        elif options.eval_split:
            data, held, evaluation = held_out(data, train, options.eval_split)
        self.train_dataset = self.arrange(data, "train")
        self.eval_dataset = None if held is None else self.arrange(held, "eval")
        self._eval_source = evaluation

    @classmethod
    def encoding(cls, args: Any) -> DataOptions:
        """How rows are encoded."""
        return data_options(args)

    def arrange(self, data: TokenDataset, what: str) -> TokenDataset:
        """What the method makes of its encoded rows. what: "train" or "eval"."""
        return data

    def _load_model(self, model: Any) -> CausalLM:
        return self.build(model, self.args, self.trainer.config.seed, self.tokenizer, self.model_name)

    @classmethod
    def build(cls, model: Any, args: Any, seed: int, tokenizer: Any, name: str) -> CausalLM:
        """The model with its adapter, ready for the task. model: a Hugging Face model, or a folder or a name."""
        from twofold.models.load import load_model

        if isinstance(model, str | Path):
            model = load_model(str(model), torch_dtype(args.dtype), args.trust_remote_code)
        return build_model(model, args, seed, tokenizer, name)

    def extras(self) -> Extras:
        """What the run gets beside the task and the data."""
        from twofold.data.order import Cut

        config, packed = self.trainer.config, self.model.packed
        tokens = config.micro_batch_tokens
        if tokens is None and config.micro_batch_size is None:
            tokens = _MICRO_BATCH_TOKENS[self.trainer.device_type]
        report = self.train_dataset.report
        warnings = []
        if not packed and self.args.attention == "auto":
            warnings.append(f"batches are padded: {self.model.abilities.why}. Slower, and just as correct.")
        return Extras(
            cut=Cut(tokens, config.micro_batch_size, padded=not packed),
            lengths=self.train_dataset.lengths,
            eval_lengths=self.eval_dataset.lengths if self.eval_dataset is not None else None,
            info=self._info(packed),
            samples=self._samples if self.eval_dataset is not None else None,
            export=self._export,
            facts={"data": self.train_dataset.fingerprint},
            warnings=[*warnings, *report.notes],
            workers=self.args.num_workers,
            keep_dtype=self.args.dtype is not None,
        )

    def _info(self, packed: bool) -> dict[str, str]:
        """Rows of the start table."""
        from twofold.models.causal_lm import bare

        how = "no padding, each sample by itself" if packed else "padded"
        return {
            "model": f"{self.model_name} ({type(bare(self.model.hf)).__name__})",
            "data": self.train_dataset.report.summary(),
            "attention": f"{how} · output head at labels only",
        }

    def _samples(self, model: CausalLM, count: int) -> list[dict[str, Any]]:
        from twofold.data.prepare import prompts
        from twofold.models.generate import generate_tokens

        options = DataOptions(format=self.args.format)
        chosen = prompts(self._eval_source, self.tokenizer, options, count, kind=self.rows)
        outputs = generate_tokens(model.hf, self.tokenizer, [p.input_ids for p in chosen])
        decode = self.tokenizer.decode
        return [
            {
                "prompt": decode(p.input_ids),
                "output": decode(o, skip_special_tokens=True),
                "reference": p.reference,
            }
            for p, o in zip(chosen, outputs, strict=True)
        ]

    def _export(self, model: CausalLM, folder: Path) -> list[str]:
        from twofold.models.export import export, how_to_use

        export(model.hf, self.tokenizer, folder)
        return how_to_use(folder, model.hf)

    # The command line

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """The trainer of a configuration file."""
        from twofold.config.dump import dump

        return cls(**cls.arguments(config), config_text=dump(config))

    @classmethod
    def arguments(cls, config: Config) -> dict[str, Any]:
        """A configuration file's content as this trainer's arguments."""
        data = config.data.model_dump(exclude={"train", "eval"})
        model = config.model.model_dump(exclude={"path"})
        return {
            "model": config.model.path,
            "train_dataset": config.data.train,
            "eval_dataset": config.data.eval,
            "args": cls.config_class(**config.method.model_dump(), **data, **model),
            **config.train.model_dump(),
            **config.run.model_dump(),
        }

    @classmethod
    def preview(cls, config: Config, rows: int) -> None:
        """Prints rows as they are trained, and what the data holds."""
        from twofold.data.preview import preview
        from twofold.models.load import load_tokenizer

        tokenizer = load_tokenizer(config.model.path, config.model.chat_template, config.model.trust_remote_code)
        preview(config.data.train, tokenizer, cls.encoding(config.data), rows, kind=cls.rows)

    @classmethod
    def export(cls, config: Config, checkpoint: Path, output: Path, merge: bool) -> None:
        """Writes the model with a checkpoint's weights."""
        from twofold.engine.checkpoint import load_weights
        from twofold.models import export as exports
        from twofold.models.load import load_tokenizer

        args, path = cls.arguments(config)["args"], config.model.path
        tokenizer = load_tokenizer(path, args.chat_template, args.trust_remote_code)
        model = cls.build(path, args, 0, tokenizer, path)
        saved = load_weights(checkpoint, model)
        exports.export(
            model.hf, tokenizer, output, merge, {"step": saved["progress"]["step"], "checkpoint": checkpoint.name}
        )


def commands(trainer: type[LanguageTrainer]) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(run, preview, export) of a method, as the command line calls them."""
    return lambda config: trainer.from_config(config).train(), trainer.preview, trainer.export


def data_options(holder: Any) -> DataOptions:
    """The data options among the fields of a larger configuration."""
    return DataOptions(**{name: getattr(holder, name) for name in DataOptions.model_fields})


def build_model(model: Any, args: LanguageConfig, seed: int, tokenizer: Any, name: str) -> CausalLM:
    """A Hugging Face model with its adapter (initialised by `seed`, alike on every rank), ready for a task."""
    from twofold.engine.source import seed_everything
    from twofold.models.lora import add_lora

    adapt = None if args.adapter is None else partial(add_lora, config=args.adapter)
    seed_everything(seed)
    return as_causal_lm(model, args.attention, tokenizer, name, adapt)


def as_causal_lm(
    model: Any, attention: str, tokenizer: Any, name: str, adapt: Callable[[Any], Any] | None = None
) -> CausalLM:
    """The same with what `adapt` makes of the model. Raises UserError if it is no causal language model, or not the
    tokenizer's."""
    from twofold.models.causal_lm import CausalLM, NotCausalLM, examine

    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens and {name} has {rows} embeddings: they do not belong together."
        )
    try:
        abilities = examine(model)
    except NotCausalLM as error:
        raise UserError(f"model.path: {error}.") from None
    return CausalLM(adapt(model) if adapt else model, abilities, packed=attention == "auto")


def sequence_sums(logp: Tensor, batch: Any) -> Tensor:
    """The log-probability of each sequence: sums of its labelled tokens' logp, fp64 [sequences]."""
    sums = logp.new_zeros(sum(batch["counts"]), dtype=torch_dtype("float64"))
    return sums.index_add(0, batch["sample_of"], logp.double())


def torch_dtype(name: str | None) -> Any:
    import torch

    return getattr(torch, name) if name else None
