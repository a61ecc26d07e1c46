"""Reading a configuration: what is accepted, and the exact line for each kind of mistake."""

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from twofold.config.load import load, load_with_origins
from twofold.config.schema import Config, Group, RunConfig, TrainConfig
from twofold.errors import UserError


class Sft(Group):
    kind: Literal["sft"] = "sft"
    label_smoothing: float = Field(default=0.0, ge=0, lt=1, description="Smoothing.")


class Dpo(Group):
    kind: Literal["dpo"] = "dpo"
    beta: float = Field(default=0.1, gt=0, description="Strength.")
    loss: str = Field(default="sigmoid", description="Which loss.")


METHODS: dict[str, Any] = {"sft": Sft, "dpo": Dpo}
GOOD = """\
version: 1
method: sft
model: {path: tiny, adapter: {kind: lora, r: 16}}
data: {train: train.jsonl, eval: eval.jsonl, max_length: 512}
train: {global_batch_size: 16, max_steps: 60, lr: 5.0e-4, eval_steps: 20}
run: {accelerator: auto, devices: 2, strategy: ddp, precision: 32}
"""
TRAIN_KEYS = f"Keys here: {', '.join(sorted(TrainConfig.model_fields))}."
RUN_KEYS = f"Keys here: {', '.join(sorted(RunConfig.model_fields))}."
TOP_KEYS = "Keys here: data, method, model, run, train, version."
LORA_KEYS = "Keys here: alpha, dropout, kind, modules_to_save, r, target."


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(text: str, *overrides: str) -> Config:
    Path("c.yaml").write_text(text, encoding="utf-8")
    return load("c.yaml", list(overrides), METHODS)


def refused(text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        read(text, *overrides)
    return str(caught.value).split("\n")


def test_the_example_of_the_design_page_is_read(here: Path) -> None:
    config = read(GOOD)
    assert config.method == Sft()
    assert (config.model.path, config.model.adapter.r, config.model.adapter.alpha) == ("tiny", 16, None)
    assert (config.data.train, config.data.eval, config.data.max_length) == ("train.jsonl", "eval.jsonl", 512)
    assert (config.train.global_batch_size, config.train.max_steps, config.train.lr) == (16, 60, 0.0005)
    assert (config.run.devices, config.run.strategy, config.run.precision) == (2, "ddp", 32)
    assert config.train.betas == (0.9, 0.999)


WRONG_IN_FILE = [
    # what the line says instead, its number, the message
    ("model: {path: tiny, dtyp: float32}", 3, "model.dtyp: unknown key. Did you mean 'dtype'? Keys here: adapter, "
     "attention, chat_template, dtype, path, trust_remote_code."),
    ("model: {path: tiny, adapter: {rr: 4}}", 3, f"model.adapter.rr: unknown key. Did you mean 'r'? {LORA_KEYS}"),
    ("model: {path: tiny, lr: 4}", 3, "model.lr: unknown key. It exists as 'train.lr'. Keys here: adapter, "
     "attention, chat_template, dtype, path, trust_remote_code."),
    ("train: {learning_rate: 1}", 5, f"train.learning_rate: unknown key. Here it is 'train.lr'. {TRAIN_KEYS}"),
    ("train: {num_train_epochs: 1}", 5,
     f"train.num_train_epochs: unknown key. Here it is 'train.max_epochs'. {TRAIN_KEYS}"),
    ("train: {per_device_train_batch_size: 1}", 5,
     "train.per_device_train_batch_size: unknown key. Here it is 'train.global_batch_size' (the samples of one "
     f"optimizer step over all ranks; Twofold cuts it into micro-batches by itself). {TRAIN_KEYS}"),
    ("train: {output_dir: x}", 5, "train.output_dir: unknown key. Here it is 'run.folder' (the run leaves everything "
     f"in run.folder/run.name). {TRAIN_KEYS}"),
    ("train: {packing: true}", 5, "train.packing: unknown key. Samples are never padded where the model allows it; "
     f"remove the line. {TRAIN_KEYS}"),
    ("train: {foo: 1}", 5, f"train.foo: unknown key. {TRAIN_KEYS}"),
    ("lr: 1", 5, f"lr: unknown key. It exists as 'train.lr'. {TOP_KEYS}"),
    ("trian: {lr: 1}", 5, f"trian: unknown key. Did you mean 'train'? {TOP_KEYS}"),
    ("hyper: {lr: 1}", 5, f"hyper: unknown key. 'lr' in it: it exists as 'train.lr'. {TOP_KEYS}"),
    ("max_step: 1", 5, f"max_step: unknown key. Did you mean 'train.max_steps'? {TOP_KEYS}"),
    ("train: {max_steps: lots}", 5, "train.max_steps: expected an integer or null, got 'lots'."),
    ("train: {global_batch_size: lots}", 5, "train.global_batch_size: expected an integer, got 'lots'."),
    ("train: {global_batch_size: 1.5}", 5, "train.global_batch_size: expected an integer, got 1.5."),
    ("train: {global_batch_size: true}", 5, "train.global_batch_size: expected an integer, got true."),
    ("train: {global_batch_size: }", 5, "train.global_batch_size: expected an integer, got null."),
    ("train: {global_batch_size: [1, 2]}", 5, "train.global_batch_size: expected an integer, got [1, 2]."),
    ("train: {global_batch_size: 0}", 5, "train.global_batch_size: must be greater than 0, got 0."),
    ("train: {max_steps: -1}", 5, "train.max_steps: must be greater than 0, got -1."),
    ("train: {lr: -1.0e-4}", 5, "train.lr: must be greater than or equal to 0, got -0.0001."),
    ("train: {lr: .nan}", 5, "train.lr: must be a finite number, got nan."),
    ("train: {warmup_ratio: 1}", 5, "train.warmup_ratio: must be less than 1, got 1."),
    ("train: {betas: [0.9, 1.0]}", 5, "train.betas: must be less than 1, got 1.0."),
    ("train: {betas: [0.9]}", 5, "train.betas: expected a list of 2 numbers, got [0.9]."),
    ("train: {warmup_ratio: 0.1, warmup_steps: 3}", 5,
     "train: warmup_steps and warmup_ratio are both set. Keep one of them."),
    ("train: 5", 5, f"train: expected a group of keys, got 5. {TRAIN_KEYS}"),
    ("train: {schedule: cosin}", 5,
     "train.schedule: expected 'linear', 'cosine' or 'constant', got 'cosin'. Did you mean 'cosine'?"),
    ("train: {shuffle: maybe}", 5, "train.shuffle: expected true or false, got 'maybe'."),
    ("model: {path: tiny, adapter: {r: 0}}", 3, "model.adapter.r: must be greater than 0, got 0."),
    ("model: {path: tiny, adapter: {target: []}}", 3, "model.adapter.target: must not be empty."),
    ("model: {path: tiny, adapter: lora2}", 3,
     "model.adapter: unknown kind 'lora2'. Did you mean 'lora'? Kinds: lora."),
    ("model: {path: ''}", 3, "model.path: must not be empty."),
    ("model: {dtype: float32}", 3,
     "model.path: missing. The model: a folder, a name on the hub, or a known short name."),
    ("method: sftt", 2, "method: unknown kind 'sftt'. Did you mean 'sft'? Kinds: dpo, sft."),
    ("method: {kind: 3}", 2, "method: unknown kind 3. Kinds: dpo, sft."),
    ("method: ", 2, "method: missing. Kinds: dpo, sft."),
    ("method: {kind: sft, beta: 0.1}", 2,
     "method.beta: unknown key. It belongs to kind 'dpo'. Keys here: kind, label_smoothing."),
    ("method: {beta: 0.1}", 2, "method: needs a kind (dpo | sft). 'kind: dpo' has these keys."),
    ("run: {precision: fp8}", 6, "run.precision: expected 32, 16, 'bf16', 'bf16-mixed', 'bf16-true' or '16-mixed', "
     "got 'fp8'."),
    ("run: {devices: 0}", 6, "run.devices: must be greater than 0, got 0."),
    ("run: {devices: all}", 6, "run.devices: expected an integer, -1, 'auto' or a list of integers, got 'all'."),
    ("run: {name: 42}", 6, "run.name: expected text or null, got 42. Put it in quotes to make it text: '42'."),
    ("run: {name: true}", 6, "run.name: expected text or null, got true. Put it in quotes to make it text: 'true'."),
    ("version: 2", 1, "version: expected 1, got 2."),
]  # fmt: skip


@pytest.mark.parametrize(("line", "number", "message"), WRONG_IN_FILE, ids=[line for line, _, _ in WRONG_IN_FILE])
def test_a_mistake_in_the_file_has_its_line(here: Path, line: str, number: int, message: str) -> None:
    lines = GOOD.splitlines()
    lines[number - 1] = line
    assert refused("\n".join(lines)) == [f"c.yaml:{number}: {message}"]


def test_all_mistakes_are_said_at_once_in_the_order_of_the_file(here: Path) -> None:
    text = "method: sft\nmodel:\n  path: tiny\n  dtyp: float32\ntrain:\n  lr: fast\n  lr: 1e-4\ndata: {}\n"
    assert refused(text, "run.device=2", "train.seed=x") == [
        "c.yaml: version: missing. Add the line 'version: 1'.",
        "c.yaml:4: model.dtyp: unknown key. Did you mean 'dtype'? Keys here: adapter, attention, chat_template, "
        "dtype, path, trust_remote_code.",
        "c.yaml:7: train.lr: given twice, first in line 6. Remove one of them.",
        "c.yaml:8: data.train: missing. Rows to train on: a .jsonl/.json/.csv/.parquet/.txt file or a folder.",
        f"'run.device=2': run.device: unknown key. Did you mean 'devices'? {RUN_KEYS}",
        "'train.seed=x': train.seed: expected an integer, got 'x'.",
    ]


def test_an_empty_file_says_all_that_is_needed(here: Path) -> None:
    assert [line.split(". ")[0] for line in refused("")] == [
        "c.yaml: version: missing",
        "c.yaml: method: missing",
        "c.yaml: model.path: missing",
        "c.yaml: data.train: missing",
    ]


def test_evaluating_without_rows_is_refused(here: Path) -> None:
    text = GOOD.replace("eval: eval.jsonl, ", "")
    assert refused(text) == ["c.yaml:5: train.eval_steps: nothing to evaluate on. Set data.eval, or remove this key."]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.lrr=1", f"train.lrr: unknown key. Did you mean 'lr'? {TRAIN_KEYS}"),
        ("--train.learning-rate=1", f"train.learning_rate: unknown key. Here it is 'train.lr'. {TRAIN_KEYS}"),
        ("lr=1", f"lr: unknown key. It exists as 'train.lr'. {TOP_KEYS}"),
        ("optimization.lr=1", f"optimization: unknown key. 'lr' in it: it exists as 'train.lr'. {TOP_KEYS}"),
        ("run.devices=lots", "run.devices: expected an integer, -1, 'auto' or a list of integers, got 'lots'."),
        ("train.lr.x=1", "train.lr is 0.0005, not a group of keys."),
        ("method=spo", "method: unknown kind 'spo'. Did you mean 'dpo'? Kinds: dpo, sft."),
        ("method.beta=1", "method.beta: unknown key. It belongs to kind 'dpo'. Keys here: kind, label_smoothing."),
        ("train", "expected KEY=VALUE, for example train.lr=1e-4."),
        ("train..lr=1", "expected KEY=VALUE, for example train.lr=1e-4."),
        ("data.train=", "data.train: expected text, got null."),
        ("model.adapter.target=[a", "the value is not valid YAML: expected ',' or ']', but got '<stream end>'. Is a "
         "bracket or a quote left open, or a line indented otherwise than its neighbours?"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_override_names_the_override(here: Path, override: str, message: str) -> None:
    assert refused(GOOD, override)[-1] == f"'{override}': {message}"


def test_overrides(here: Path) -> None:
    config = read(GOOD, "train.lr=1e-5", "--run.devices=4", "data.train-on=last", "run.name=42", "train.max-steps=null")
    assert config.train.lr == 0.00001
    assert (config.run.devices, config.data.train_on, config.run.name) == (4, "last", "42")
    assert config.train.max_steps is None
    assert read(GOOD, "train.lr=1", "train.lr=2").train.lr == 2
    assert read(GOOD, "run.name=2024-01-01").run.name == "2024-01-01"
    assert read(GOOD, "run.name=007").run.name == "007"
    assert read(GOOD, "model.adapter.target=[q_proj, v_proj]").model.adapter.target == ["q_proj", "v_proj"]
    assert read(GOOD, "model.path=a: b").model.path == "a: b"


@pytest.mark.parametrize("value", ["null", "none", "None", "~", ""])
def test_none(here: Path, value: str) -> None:
    assert read(GOOD, f"model.adapter={value}").model.adapter is None
    assert read(GOOD, f"train.max_grad_norm={value}").train.max_grad_norm is None
    assert read(GOOD.replace("max_length: 512", f"max_length: {value}")).data.max_length is None
    assert read(GOOD.replace("{kind: lora, r: 16}", value)).model.adapter is None


def test_kinds_join_and_replace(here: Path) -> None:
    same = read(GOOD, "model.adapter.dropout=0.1").model.adapter
    assert (same.kind, same.r, same.dropout) == ("lora", 16, 0.1)
    assert read(GOOD, "model.adapter={dropout: 0.1}").model.adapter.r == 16
    smooth = GOOD.replace("method: sft", "method: {kind: sft, label_smoothing: 0.1}")
    assert read(smooth, "method=sft").method == Sft(label_smoothing=0.1)
    assert read(smooth, "method=dpo").method == Dpo()
    assert read(smooth, "method.kind=dpo").method == Dpo()
    assert read(smooth, "method.beta=0.5", "method=dpo").method == Dpo(beta=0.5)
    assert read(smooth, "method={kind: dpo, beta: 0.2}").method == Dpo(beta=0.2)
    assert read(GOOD.replace("method: sft", "method: {label_smoothing: 0.1}")).method == Sft(label_smoothing=0.1)
    assert read(GOOD.replace("{kind: lora, r: 16}", "lora"), "model.adapter.r=8").model.adapter.r == 8
    assert read(GOOD.replace("{kind: lora, r: 16}", "none"), "model.adapter.r=8").model.adapter.r == 8
    assert read(GOOD.replace("{kind: lora, r: 16}", "{}")).model.adapter.r == 16
    assert read(GOOD.replace(", adapter: {kind: lora, r: 16}", ""), "model.adapter=lora").model.adapter.r == 16


@pytest.mark.parametrize(
    ("written", "lr"),
    [("1e-5", 0.00001), ("1E-5", 0.00001), ("5.e-4", 0.0005), (".5", 0.5), ("'1e-5'", 0.00001), ("1", 1.0)],
)
def test_numbers_as_people_write_them(here: Path, written: str, lr: float) -> None:
    assert read(GOOD.replace("5.0e-4", written)).train.lr == lr


def test_words_that_yaml_1_1_bends(here: Path) -> None:
    text = GOOD.replace("run: {", "run: {progress: off, name: no, resume: yes, folder: 1:30, ")
    config = read(text, "train.shuffle=off", "model.trust_remote_code=Yes")
    assert (config.run.progress, config.run.name, config.run.resume) == ("off", "no", True)
    assert config.run.folder == "1:30"
    assert (config.train.shuffle, config.model.trust_remote_code) == (False, True)
    assert read(GOOD, "run.resume=runs/a/checkpoints/b").run.resume == "runs/a/checkpoints/b"
    assert read(GOOD, "train.max_steps=1e3").train.max_steps == 1000


def test_anchors_and_merges(here: Path) -> None:
    text = GOOD.replace("data: {", "data: {<<: &base {max_length: 8, train_on: all}, ")
    assert (read(text).data.max_length, read(text).data.train_on) == (512, "all")
    looped = GOOD + "x: &x [*x]\n"
    assert refused(looped) == ["c.yaml:7:4: not valid YAML: an alias contains itself."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 1\nmodel:\n  path: a: b\n", "c.yaml:3:10: not valid YAML: mapping values are not allowed here. "
         "Is it a text with ': ' in it (put it in quotes), or a line that is indented too far?"),
        ("version: 1\nmethod: @sft\n", "c.yaml:2:9: not valid YAML: found character '@' that cannot start any token. "
         "Put the value in quotes."),
        ("version: 1\nmodel:\n\tpath: a\n", "c.yaml:3:1: not valid YAML: found character '\\t' that cannot start any "
         "token. Indent with spaces, not with tabs."),
        ("version: 1\nmodel: {path: a\nrun: {}\n", "c.yaml:3:4: not valid YAML: expected ',' or '}', but got ':'. Is a "
         "bracket or a quote left open, or a line indented otherwise than its neighbours?"),
        ("version: 1\nmodel: !!python/object:os.system {}\n", "c.yaml:2:8: not valid YAML: unknown tag "
         "'tag:yaml.org,2002:python/object:os.system'."),
        ("version: 1\nmodel: !!python/name:os.system x\n", "c.yaml:2:8: not valid YAML: could not determine a "
         "constructor for the tag 'tag:yaml.org,2002:python/name:os.system'."),
        ("- version: 1\n", "c.yaml: expected keys, such as 'version: 1', got [{version: 1}]."),
        ("just text", "c.yaml: expected keys, such as 'version: 1', got 'just text'."),
    ],
)  # fmt: skip
def test_broken_yaml_is_one_line_with_line_and_column(here: Path, text: str, message: str) -> None:
    assert refused(text) == [message]


def test_a_missing_file_names_what_is_there(here: Path) -> None:
    Path("train.yaml").touch()
    Path("other.yml").touch()
    Path("rows.jsonl").touch()
    with pytest.raises(UserError) as caught:
        load("trian.yaml", [], METHODS)
    assert str(caught.value) == (
        f"trian.yaml: there is no such file. Did you mean 'train.yaml'? YAML files in {here}: other.yml, train.yaml."
    )
    with pytest.raises(UserError, match=r"^nowhere/c.yaml: there is no such file. Nor is there a folder nowhere.$"):
        load("nowhere/c.yaml", [], METHODS)
    Path("folder").mkdir()
    with pytest.raises(UserError, match=r"^folder: is a folder, not a YAML file. There are no YAML files in "):
        load("folder", [], METHODS)
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"^binary.yaml: is not text in UTF-8 \(byte 0\)"):
        load("binary.yaml", [], METHODS)


def test_data_paths_are_found_here_first_then_beside_the_file(here: Path) -> None:
    recipes = here / "recipes"
    recipes.mkdir()
    (recipes / "c.yaml").write_text(GOOD)
    (recipes / "train.jsonl").touch()
    config = load("recipes/c.yaml", [], METHODS)
    assert config.data.train == str(Path("recipes", "train.jsonl"))
    assert config.data.eval == "eval.jsonl"  # in neither place: as it is written
    Path("train.jsonl").touch()
    assert load("recipes/c.yaml", [], METHODS).data.train == "train.jsonl"
    assert load("recipes/c.yaml", [f"data.train={here}/x"], METHODS).data.train == f"{here}/x"


def test_origins(here: Path) -> None:
    Path("c.yaml").write_text(GOOD)
    _, origins = load_with_origins("c.yaml", ["train.lr=1e-5", "model.adapter=null"], METHODS)
    assert origins["train.lr"] == "'train.lr=1e-5'"
    assert origins["train.max_steps"] == "c.yaml:5"
    assert origins["model.adapter"] == "'model.adapter=null'"
    assert "train.seed" not in origins
