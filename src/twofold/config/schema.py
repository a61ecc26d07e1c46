"""What a configuration may hold: one pydantic model per group, every field described and bounded.

Promises: an unknown key, a wrong type or a value out of bounds is refused, never dropped or bent; the same
models serve YAML, the command line and the Python arguments. Costs: importing this file imports pydantic.
The `method` group is any model with a `kind`: the kinds themselves live on a higher floor (`methods/`) and
are handed to `config.load` as an argument.
"""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SerializeAsAny, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

from twofold.config import plugins
from twofold.errors import UserError

OPTIMIZERS = {"adamw": "torch.optim:AdamW", "sgd": "torch.optim:SGD"}
COMM_HOOKS = {name: f"twofold.parallel.hooks:{name}" for name in ("bf16", "fp16", "powersgd")}

WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def members(annotation: Any) -> list[Any]:
    """The types that a field accepts: `int | Literal["auto"]` gives [int, Literal["auto"]]."""
    if get_origin(annotation) is Annotated:
        return members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [one for arm in get_args(annotation) for one in members(arm)]
    return [annotation]


def plugin(kind: str, own: dict[str, str]) -> AfterValidator:
    """Refuses a name that can be no plug-in of this kind."""

    def checked(name: str) -> str:
        try:
            plugins.check(kind, name, own)
        except UserError as error:
            raise ValueError(str(error)) from error
        return name

    return AfterValidator(checked)


class Group(BaseModel):
    """A group of keys. Method options should derive from it: it refuses unknown keys and disguised values."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Reads `none`, `yes`, `off` … where they are meant, and keeps true/false out of numbers."""
        accepted = members(cls.model_fields[str(info.field_name)].annotation)
        if isinstance(value, str):
            word = value.lower()
            if word in ("none", "null") and type(None) in accepted:
                return None
            return WORDS[word] if word in WORDS and bool in accepted else value
        if isinstance(value, bool) and bool not in accepted:
            raise PydanticCustomError("wrong_type", "true and false are no value here")
        return value


class LoraConfig(Group):
    """A low-rank adapter: only r * (in + out) numbers of each targeted linear layer are trained."""

    kind: Literal["lora"] = Field(default="lora", description="The kind of adapter.")
    r: int = Field(default=16, gt=0, description="Rank of the adapter.")
    alpha: float | None = Field(default=None, gt=0, description="Scale: the update counts alpha / r. null = 2 * r.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target: str | Annotated[list[str], Field(min_length=1)] = Field(
        default="all-linear", description="Layers to adapt: 'all-linear' (all but the output head), or names."
    )
    modules_to_save: list[str] = Field(
        default_factory=list, description="Names of modules to train and save whole, beside the adapter."
    )


class ModelConfig(Group):
    """The model to train, and what is added to it."""

    path: str = Field(min_length=1, description="The model: a folder, a name on the hub, or a known short name.")
    adapter: LoraConfig | None = Field(default=None, description="Train an adapter only. null = all parameters.")
    dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="Type in which the weights are loaded. null = as run.precision asks."
    )
    chat_template: str | None = Field(
        default=None, description="A .jinja file or the template itself, in place of the tokenizer's own."
    )
    attention: Literal["auto", "padded"] = Field(
        default="auto",
        description="auto = without padding where the model allows it; padded = always padded batches.",
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")


class DataOptions(Group):
    """How rows become samples."""

    format: str = Field(default="auto", description="Format of the rows. auto = found by their columns.")
    max_length: int | None = Field(default=2048, gt=1, description="Most tokens of a sample. null = no limit.")
    truncation: Literal["keep_start", "keep_end", "skip", "error"] = Field(
        default="keep_start",
        description="A sample over max_length: keep its first or its last tokens, skip it, or stop with an error.",
    )
    train_on: Literal["auto", "all", "assistant", "last"] = Field(
        default="auto",
        description="Tokens that are learned. auto = completions and assistant turns, the whole text of "
        "`text` rows; all = every token; assistant = all assistant turns; last = the last one.",
    )
    on_bad_row: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="A row that cannot be trained: stop with an error, or skip and count it.",
    )
    eval_split: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the training rows that is held out to evaluate on, without eval."
    )
    num_workers: int = Field(default=0, ge=0, description="Processes that load batches ahead. 0 = none.")


class DataConfig(DataOptions):
    """The rows to train and evaluate on."""

    train: str = Field(
        min_length=1, description="Rows to train on: a .jsonl/.json/.csv/.parquet/.txt file or a folder."
    )
    eval: str | None = Field(default=None, min_length=1, description="Rows to evaluate on, in the same formats.")


class TrainConfig(Group):
    """What a step is and how many there are. Nothing here depends on where it runs, except micro_batch_*."""

    global_batch_size: int = Field(default=8, gt=0, description="Samples of one optimizer step, over all ranks.")
    micro_batch_tokens: int | None = Field(
        default=None, gt=0, description="Most tokens of a micro-batch on one rank. null = chosen by itself."
    )
    micro_batch_size: int | None = Field(default=None, gt=0, description="Most samples of a micro-batch on one rank.")
    max_steps: int | None = Field(default=None, gt=0, description="Stop after this many optimizer steps.")
    max_epochs: int | None = Field(default=None, gt=0, description="Stop after this many passes over the data.")
    optimizer: Annotated[str, plugin("optimizers", OPTIMIZERS)] = Field(
        default="adamw", description="The optimizer: adamw, sgd, a plug-in's name, or a dotted path to a class."
    )
    optimizer_options: dict[str, Any] = Field(
        default_factory=dict, description="What else the optimizer's class takes, by its names."
    )
    lr: float = Field(default=1e-4, ge=0, description="Highest learning rate of the schedule.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Weight decay of matrices and embeddings; not of biases and norms."
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), description="Decay of the first and second moment (AdamW and its kin)."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to the denominator (AdamW and its kin).")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum (SGD and its kin).")
    schedule: Literal["linear", "cosine", "constant"] = Field(
        default="linear", description="How the learning rate falls after the warm-up."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Optimizer steps over which the learning rate rises.")
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1, description="The same as a share of all steps.")
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="Clip gradients to this global norm. null = never."
    )
    shuffle: bool = Field(default=True, description="Shuffle the samples in each epoch.")
    seed: int = Field(default=42, ge=0, description="Seed of the data order, new weights and dropout.")
    eval_steps: int | None = Field(default=None, gt=0, description="Evaluate every so many steps.")
    eval_samples: int = Field(default=0, ge=0, description="Generated samples shown at each evaluation.")
    logging_steps: int = Field(default=10, gt=0, description="Write a row of metrics every so many steps.")
    save_steps: int | None = Field(default=None, gt=0, description="Write a checkpoint every so many steps.")
    save_total_limit: int = Field(default=2, gt=0, description="Last checkpoints to keep, beside the best one.")

    @model_validator(mode="after")
    def _one_warmup(self) -> "TrainConfig":
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("warmup_steps and warmup_ratio are both set. Keep one of them.")
        return self


class RunConfig(Group):
    """Where and how it runs. Nothing here changes what is computed, up to the rounding of `precision`."""

    name: str | None = Field(default=None, min_length=1, description="Name of the run. null = method and time.")
    folder: str = Field(default="runs", min_length=1, description="The run leaves everything in folder/name.")
    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = Field(default="auto", description="Kind of device.")
    devices: Annotated[int, Field(gt=0)] | Literal[-1, "auto"] | list[Annotated[int, Field(ge=0)]] = Field(
        default="auto", description="Workers of each node. -1 = every GPU; [0, 2] = these GPUs."
    )
    num_nodes: int = Field(default=1, gt=0, description="Number of machines.")
    strategy: str = Field(default="auto", min_length=1, description="How the work is spread: ddp, fsdp, fsdp:2,tp:2 …")
    precision: Literal[32, 16, "32", "16", "bf16", "bf16-mixed", "bf16-true", "16-mixed"] = Field(
        default=32, description="Number format of the computation; 16 = 16-mixed, bf16 = bf16-mixed."
    )
    resume: bool | str = Field(
        default=False,
        description="true = go on from the run's latest checkpoint; or the path of a checkpoint.",
    )
    progress: Literal["auto", "rich", "plain", "off"] = Field(default="auto", description="What the console shows.")
    launcher: Literal["auto", "ray"] = Field(
        default="auto",
        description="Who starts the workers: auto = this process, or what has started it; ray = Ray Train.",
    )
    threads: int | None = Field(default=None, gt=0, description="CPU threads of each worker. null = a fair share.")
    affinity: Literal["none", "cores", "numa"] = Field(
        default="none", description="CPUs of each worker: cores of its own, or those of one NUMA node (its GPU's)."
    )

    backend: str | None = Field(
        default=None, min_length=1, description="Backend of exchanges: a plug-in's or one of torch's. null = by device."
    )
    comm_hook: Annotated[str, plugin("comm_hooks", COMM_HOOKS)] | None = Field(
        default=None,
        description="With ddp, how gradients travel: bf16, fp16, powersgd, a plug-in's name, or a dotted path.",
    )
    comm_hook_options: dict[str, Any] = Field(
        default_factory=dict, description="What the hook's class takes, by its names."
    )


class Config(Group):
    """The whole configuration. `method` is one of the kinds that `config.load` was given."""

    version: Literal[1] = Field(default=1, description="Version of this format.")
    method: SerializeAsAny[BaseModel] = Field(description="What is learned: the method and its options.")
    model: ModelConfig = Field(description="The model to train.")
    data: DataConfig = Field(description="The rows to train and evaluate on.")
    train: TrainConfig = Field(default_factory=TrainConfig, description="What a step is.")
    run: RunConfig = Field(default_factory=RunConfig, description="Where and how it runs.")


Methods = dict[str, type[BaseModel]]
DEFAULT_KIND = {"method": "sft", "adapter": "lora"}


def kinds(name: str, field: FieldInfo, methods: Methods) -> Methods:
    """The models that the group `name` may be, by kind. A group without kinds has the key ""; a value: {}."""
    if name == "method":
        return methods
    arms = [one for one in members(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
    return {str(arm.model_fields["kind"].default) if "kind" in arm.model_fields else "": arm for arm in arms}


def all_keys(methods: Methods, model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every key of the configuration as a dotted path, of all kinds, in order, without repeats."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for arm in kinds(name if not prefix else "", field, methods).values():
            keys += all_keys(methods, arm, f"{prefix}{name}.")
    return list(dict.fromkeys(keys))
