"""The shape of a configuration: its models, its dump, its JSON schema, and the arguments of the Python API."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from test_config_load import GOOD, METHODS, Dpo, Sft

from twofold.config.load import dump, json_schema, load, load_with_origins, validate_kwargs
from twofold.config.names import ELSEWHERE, NOT_NEEDED
from twofold.config.schema import (
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    all_keys,
)
from twofold.errors import UserError

GROUPS: list[type[BaseModel]] = [Config, ModelConfig, LoraConfig, DataConfig, TrainConfig, RunConfig]


def test_every_field_says_what_it_is() -> None:
    for group in GROUPS:
        for name, field in group.model_fields.items():
            assert field.description, f"{group.__name__}.{name}"


def test_names_of_other_tools_lead_to_keys_that_exist() -> None:
    keys = all_keys(METHODS)
    assert {target for target, _ in ELSEWHERE.values()} <= set(keys)
    ours = {key.rpartition(".")[2] for key in keys}
    assert not ours & {*ELSEWHERE, *NOT_NEEDED}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    file = tmp_path / "c.yaml"
    file.write_text(GOOD)
    awkward = ['model.chat_template="{% for x in y %}\\n é\\t# no comment"', "run.name='on'", "method=dpo"]
    return load(file, awkward, METHODS)


def test_dump_is_read_back_the_same(config: Config, tmp_path: Path) -> None:
    (tmp_path / "again.yaml").write_text(dump(config), encoding="utf-8")
    again = load(tmp_path / "again.yaml", [], METHODS)
    assert again == config
    assert again.method == Dpo()
    assert again.model.chat_template == "{% for x in y %}\n é\t# no comment"
    assert "#" not in dump(config).replace("# no comment", "")


def test_dump_with_origins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(GOOD)
    config, origins = load_with_origins("c.yaml", ["train.lr=1e-5"], METHODS)
    text = dump(config, origins)
    lines = {line.split("#")[0].strip(): line.partition("# ")[2] for line in text.splitlines()}
    assert lines["lr: 1.0e-05"] == "'train.lr=1e-5'"
    assert lines["kind: sft"] == "c.yaml:2"
    assert lines["r: 16"] == "c.yaml:3"
    assert lines["seed: 42"] == "default"
    Path("again.yaml").write_text(text)
    assert load("again.yaml", [], METHODS) == config


def test_json_schema_describes_everything() -> None:
    schema = json_schema(METHODS)
    assert schema["required"] == ["version", "method", "model", "data"]
    assert schema["properties"]["method"]["anyOf"][0] == {"enum": ["sft", "dpo"]}
    for name in ("ModelConfig", "DataConfig", "TrainConfig", "RunConfig", "LoraConfig", "Sft", "Dpo"):
        group = schema["$defs"][name]
        assert group["additionalProperties"] is False
        assert all("description" in field or name == "kind" for name, field in group["properties"].items())
    json.dumps(schema)


def test_json_schema_accepts_good_files_and_refuses_bad_ones(config: Config) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    import yaml

    schema = json_schema(METHODS)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert not list(validator.iter_errors(yaml.safe_load(GOOD)))
    assert not list(validator.iter_errors(yaml.safe_load(dump(config))))
    for line in ("lr: 1", "train: {lrr: 1}", "train: {max_steps: 0}", "method: spo", "run: {precision: fp8}"):
        key = line.split(":")[0]
        assert list(validator.iter_errors({**yaml.safe_load(GOOD), key: yaml.safe_load(line)[key]})), line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lrr": 1}, "unknown argument 'lrr'. Did you mean 'lr'?"),
        ({"learning_rate": 1}, "unknown argument 'learning_rate'. Here it is 'lr'."),
        ({"train_datset": 1}, "unknown argument 'train_datset'. Did you mean 'train_dataset'?"),
        ({"zzz": 1}, "unknown argument 'zzz'."),
        ({"packing": True}, "unknown argument 'packing'. Samples are never padded where the model allows it; "
         "remove it."),
        ({"lr": "fast"}, "lr: expected a number, got 'fast'."),
        ({"max_steps": True}, "max_steps: expected an integer or null, got true."),
        ({"devices": 0}, "devices: must be greater than 0, got 0."),
        ({"lrr": 1, "max_steps": 0}, "unknown argument 'lrr'. Did you mean 'lr'?\n"
         "max_steps: must be greater than 0, got 0."),
    ],
)  # fmt: skip
def test_python_arguments_are_checked_like_keys(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        validate_kwargs([TrainConfig, RunConfig], arguments, also=("train_dataset", "model"))
    assert str(caught.value) == message


def test_python_arguments_are_shared_out() -> None:
    train, run = validate_kwargs([TrainConfig, RunConfig], {"lr": 1e-3, "devices": 2, "precision": "bf16"})
    assert (train.lr, run.devices, run.precision) == (0.001, 2, "bf16")
    (model,) = validate_kwargs([ModelConfig], {"path": "x", "adapter": LoraConfig(r=4)})
    assert model.adapter.r == 4
    with pytest.raises(UserError, match=r"^adapter.rr: unknown key. Did you mean 'r'\?$"):
        validate_kwargs([ModelConfig], {"path": "x", "adapter": {"rr": 4}})


def test_method_registry_finds_sft_without_torch() -> None:
    code = (
        "import sys; from twofold.methods import method_options; print(sorted(method_options())); "
        "print([name for name in ('torch', 'transformers', 'peft', 'datasets', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kinds, heavy = done.stdout.splitlines()
    assert "'sft'" in kinds
    assert heavy == "[]"


def test_run_and_preview_reach_the_method(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    from twofold import methods

    seen: list[Any] = []
    module = types.ModuleType("twofold.methods.sft")
    module.run = lambda config: seen.append(("run", config))  # type: ignore[attr-defined]
    module.preview = lambda config, rows: seen.append(("preview", config, rows))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "twofold.methods.sft", module)
    sft = config.model_copy(update={"method": Sft()})
    methods.run_method(sft)
    methods.preview_method(sft, rows=2)
    assert seen == [("run", sft), ("preview", sft, 2)]
