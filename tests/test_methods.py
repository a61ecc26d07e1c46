"""Every method from a YAML file, and a new one in a single file."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import reference
import templates as t
import yaml

import twofold
from twofold import cli, methods
from twofold.methods import export_run, method_options

EXAMPLES = Path(__file__).parent.parent / "examples" / "preferences"
CONFIGS = sorted(EXAMPLES.parent.glob("*/*.yaml"))
TOKENIZER = t.byte_level(t.CHATML)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with its tokenizer, saved as a folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    reference.tiny_model("llama", vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id).save_pretrained(
        folder
    )
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))


def train(config: Path, base: Path, folder: Path, name: str, *more: str) -> list[dict[str, Any]]:
    """The rows of metrics of three steps by the command line."""
    settings = ["train.max_steps=3", "train.logging_steps=1", "train.eval_steps=3", "train.global_batch_size=4"]
    where = ["run.devices=1", "run.strategy=single", f"run.folder={folder}", f"run.name={name}", "run.progress=off"]
    assert cli.main(["train", str(config), f"model.path={base}", *settings, *where, *more]) == 0
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def kind_of(path: Path) -> str:
    method = yaml.safe_load(path.read_text())["method"]
    return method if isinstance(method, str) else method["kind"]


def test_every_method_has_an_example() -> None:
    shown = {kind_of(path) for path in CONFIGS}
    assert shown == set(method_options())


@pytest.mark.parametrize("path", CONFIGS, ids=kind_of)
def test_examples(path: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each runs, evaluates, and exports from its checkpoint; `twofold data` shows its rows."""
    rows = train(path, base, tmp_path, "run")
    assert [row["split"] for row in rows] == ["train"] * 3 + ["eval"]
    if path.parent == EXAMPLES:
        assert {"loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies"} <= rows[-1].keys()
    assert (export_run(tmp_path / "run", tmp_path / "out", merge=True) / "model.safetensors").is_file()
    assert cli.main(["data", str(path), f"model.path={base}"]) == 0
    assert "0 cannot be trained" in capsys.readouterr().out


def test_the_examples_data_is_what_its_generator_writes() -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from generate import files  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(EXAMPLES))
        sys.modules.pop("generate", None)
    for name, content in files().items():
        assert (EXAMPLES / name).read_text(encoding="utf-8") == content


NEW = '''
"""Sequence likelihood calibration: a margin between log-probabilities (arXiv 2305.10425, eq. 9)."""

from typing import Literal

from twofold.config.schema import Group
from twofold.methods.common import LanguageConfig, LanguageTask, LanguageTrainer, commands, sequence_sums
from twofold.task import Loss


class Options(Group):
    """A margin."""

    kind: Literal["slic"] = "slic"
    margin: float = 1.0


class SLiCConfig(Options, LanguageConfig):
    pass


class SLiC(LanguageTask):
    margin = 1.0

    def loss(self, output, batch):
        logps = sequence_sums(output[0], batch)
        return Loss.of((self.margin - logps[0::2] + logps[1::2]).clamp(min=0).sum(), len(batch["counts"]))


class SLiCTrainer(LanguageTrainer):
    config_class = SLiCConfig
    rows = "preference"

    def task(self):
        task = SLiC(self.model, self.pad)
        task.margin = self.args.margin
        return task


run, preview, export = commands(SLiCTrainer)
'''


def test_a_new_method_is_one_file(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found by the command line, the schema and `twofold.*`, and runs on layouts nobody told it of."""
    (tmp_path / "plus").mkdir()
    (tmp_path / "plus" / "slic.py").write_text(NEW)
    monkeypatch.setattr(methods, "__path__", [*methods.__path__, str(tmp_path / "plus")])
    try:
        assert method_options()["slic"].model_fields.keys() == {"kind", "margin"}
        assert twofold.SLiCTrainer.config_class is twofold.SLiCConfig  # type: ignore[attr-defined]
        config = tmp_path / "slic.yaml"
        content = yaml.safe_load((EXAMPLES / "dpo.yaml").read_text()) | {"method": {"kind": "slic", "margin": 2.0}}
        content["data"] |= {key: str(EXAMPLES / content["data"][key]) for key in ("train", "eval")}
        config.write_text(yaml.safe_dump(content))
        one = train(config, base, tmp_path, "one")
        cut = train(config, base, tmp_path, "cut", "train.micro_batch_size=1")
        assert one[0]["loss"] > 0
        assert [r["loss"] for r in cut] == pytest.approx([r["loss"] for r in one], rel=1e-5)
    finally:
        sys.modules.pop("twofold.methods.slic", None)
