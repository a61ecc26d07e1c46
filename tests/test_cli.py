"""The command line: what is said, on which stream, with which exit code, and how quickly help answers."""

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_config_load import GOOD, TRAIN_KEYS

from twofold import __version__, cli, methods
from twofold.cli import main
from twofold.errors import UserError

COMMANDS = ("train", "data", "generate", "export", "doctor", "config")


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=cwd)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text(GOOD)
    return tmp_path


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What reached the methods instead of training."""
    seen: list[Any] = []
    monkeypatch.setattr(methods, "run_method", seen.append)
    monkeypatch.setattr(methods, "preview_method", lambda config, rows: seen.append((config, rows)))
    return seen


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Callable[..., Any]) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from twofold.cli import main; code = main(['--help']); "
        "heavy = {'torch', 'transformers', 'pydantic', 'yaml', 'numpy', 'rich', 'peft'} & set(sys.modules); "
        "print('heavy:', heavy, 'code:', code)"
    )
    done = python("-c", code)
    assert done.stdout.splitlines()[-1] == "heavy: set() code: 0"
    assert all(f"\n    {command} " in done.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", [*([one] for one in COMMANDS), ["config", "show"], ["config", "schema"]])
def test_each_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: twofold {' '.join(command)}")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"twofold {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("trian c.yaml", "unknown command 'trian'. Did you mean 'train'? "
         "Known: config, data, doctor, export, generate, train."),
        ("config shwo", "unknown command 'shwo'. Did you mean 'show'? Known: schema, show."),
        ("--verson", "unknown option '--verson'. Did you mean '--version'? Options: --help, --version, -h."),
        ("train", "the following arguments are required: CONFIG. See: twofold train --help"),
        ("train c.yaml --resum", "unknown option '--resum'. Did you mean '--resume'? Options: --help, --resume, -h."),
        ("train c.yaml --lr 1", "unknown option '--lr'. Options: --help, --resume, -h."),
        ("train c.yaml --lr=1", "'--lr=1': lr: unknown key. It exists as 'train.lr'. "
         "Keys here: data, method, model, run, train, version."),
        ("data c.yaml --row=1", "unknown option '--row'. Did you mean '--rows'? Options: --help, --rows, -h."),
        ("train c.yaml --train.lr", "'--train.lr' has no value. Write it as train.lr=VALUE"),
        ("train c.yaml other.yaml", "'other.yaml': expected KEY=VALUE, for example train.lr=1e-4."),
        ("train run.devices=2 c.yaml", "the CONFIG file comes first, then 'run.devices=2'. "
         "Usage: twofold train CONFIG [key=value …] [--resume]"),
        ("data c.yaml --rows 0", "argument --rows: expected an integer above 0, got '0'. See: twofold data --help"),
        ("doctor now", "unexpected argument 'now'. Usage: twofold doctor"),
        ("export runs/x --checkpoint bst", "unknown value of --checkpoint 'bst'. Did you mean 'best'? "
         "Known: best, latest."),
        ("generate m --prompt a --input b", "argument --input: not allowed with argument --prompt. "
         "See: twofold generate --help"),
        ("config show missing.yaml", "missing.yaml: there is no such file. YAML files in {folder}: c.yaml."),
        ("train c.yaml train.lrr=1 run.devices=0",
         f"'train.lrr=1': train.lrr: unknown key. Did you mean 'lr'? {TRAIN_KEYS}\n"
         "       'run.devices=0': run.devices: must be greater than 0, got 0."),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_on_stderr_and_ends_with_2(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.err == f"error: {message.replace('{folder}', str(folder))}\n"
    assert said.out == ""


def test_train_hands_the_configuration_to_the_method(folder: Path, configs: list[Any]) -> None:
    assert main(["train", "c.yaml", "train.lr=1e-5", "--resume", "run.devices=1", "--run.name=x"]) == 0
    assert main(["train", "c.yaml"]) == 0
    first, second = configs
    assert (first.train.lr, first.run.devices, first.run.name, first.run.resume) == (0.00001, 1, "x", True)
    assert (second.train.lr, second.run.devices, second.run.name, second.run.resume) == (0.0005, 2, None, False)
    assert first.method.kind == "sft"


def test_data_asks_for_rows(folder: Path, configs: list[Any]) -> None:
    assert main(["data", "c.yaml", "--rows", "7", "data.max_length=9"]) == 0
    config, rows = configs[0]
    assert (config.data.max_length, rows) == (9, 7)


def test_config_show_and_schema(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "c.yaml", "--train.lr=1e-5"]) == 0
    shown = capsys.readouterr().out
    assert "  lr: 1.0e-05" in shown
    assert "# '--train.lr=1e-5'" in shown
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out)["required"] == ["version", "method", "model", "data"]


def test_generate(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    tokenizer = types.SimpleNamespace(chat_template="{{ messages }}")

    def generate_texts(model: Any, tokenizer: Any, prompts: list[Any], max_new_tokens: int) -> list[str]:
        asked.append((model, prompts, max_new_tokens))
        return [f"answer {number}" for number in range(len(prompts))]

    fake_module(
        monkeypatch,
        "twofold.models.generate",
        load_for_generation=lambda path: (path, tokenizer),
        generate_texts=generate_texts,
    )
    assert main(["generate", "runs/x", "--prompt", "Hi", "--max-new-tokens", "5"]) == 0
    assert capsys.readouterr().out == "answer 0\n"
    assert asked.pop() == ("runs/x", [[{"role": "user", "content": "Hi"}]], 5)
    assert main(["generate", "runs/x", "--prompt", "Hi", "--raw"]) == 0
    assert asked.pop() == ("runs/x", ["Hi"], 128)
    tokenizer.chat_template = ""
    assert main(["generate", "runs/x", "--prompt", "Hi"]) == 0
    assert asked.pop() == ("runs/x", ["Hi"], 128)
    capsys.readouterr()

    user, assistant = {"role": "user", "content": "é"}, {"role": "assistant", "content": "b"}
    rows = [{"prompt": "Q"}, {"prompt": [user]}, {"messages": [user, assistant]}]
    Path("in.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    assert main(["generate", "m", "--input", "in.jsonl"]) == 0
    assert asked.pop() == ("m", ["Q", [user], [user]], 128)
    out = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert out[0] == {"prompt": "Q", "output": "answer 0"}
    assert out[2] == {"prompt": [user], "output": "answer 2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'in.jsonl: is empty. It should have lines such as {"prompt": "Hello"}.'),
        ('{"prompt": "a"}\n\n{"prompt": \n', "in.jsonl:3: not valid JSON: Expecting value (column 12)."),
        ('{"text": "a", "id": 1}', "in.jsonl:1: a row needs a `prompt` (a text or messages) or `messages`. "
         "Found: text, id."),
        ("[]", "in.jsonl:1: a row needs a `prompt` (a text or messages) or `messages`. Found none."),
        ('{"prompt": ""}', "in.jsonl:1: a row needs a `prompt` (a text or messages) or `messages`. Found: prompt."),
    ],
)  # fmt: skip
def test_bad_prompts_are_named_before_the_model_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    Path("in.jsonl").write_text(text)
    assert main(["generate", "no-such-model", "--input", "in.jsonl"]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_missing_prompts_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "m", "--input", "no.jsonl"]) == 2
    assert capsys.readouterr().err == "error: no.jsonl: cannot be read: No such file or directory.\n"


def test_export(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def export_run(run_folder: str, **options: Any) -> Path:
        calls.append((run_folder, options))
        return Path("there")

    monkeypatch.setattr("twofold.methods.export_run", export_run)
    assert main(["export", "runs/x"]) == 0
    assert main(["export", "runs/x", "--merge", "--output", "o", "--checkpoint", "latest"]) == 0
    assert calls == [
        ("runs/x", {"output": None, "merge": False, "checkpoint": None}),
        ("runs/x", {"output": "o", "merge": True, "checkpoint": "latest"}),
    ]
    assert capsys.readouterr().out == "there\nthere\n"


@pytest.mark.parametrize(
    ("raised", "code", "stderr"),
    [
        ("twofold.errors.UserError('rows missing.\\nPut some in.')", 2, "error: rows missing.\n       Put some in.\n"),
        ("KeyboardInterrupt()", 130, "interrupted\n"),
        ("SystemExit(7)", 7, ""),
    ],
)
def test_exit_codes_of_the_process(folder: Path, raised: str, code: int, stderr: str) -> None:
    done = python("-c", _process(raised), "train", "c.yaml")
    assert (done.returncode, done.stderr, done.stdout) == (code, stderr, "")


def test_a_failure_of_ours_shows_its_traceback_and_ends_with_1(folder: Path) -> None:
    done = python("-c", _process("RuntimeError('broken')"), "train", "c.yaml")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert done.stderr.endswith("RuntimeError: broken\n")


def _process(raised: str) -> str:
    """A program like the installed command, whose method raises."""
    return (
        "import sys, twofold.errors, twofold.methods\n"
        f"def fail(config): raise {raised}\n"
        "twofold.methods.run_method = fail\n"
        "from twofold.cli import main\n"
        "sys.exit(main())\n"
    )


def test_module_and_installed_command(folder: Path) -> None:
    done = python("-m", "twofold", "config", "show", "c.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("version: 1")
    command = subprocess.run([Path(sys.executable).with_name("twofold"), "trian"], capture_output=True, text=True)
    assert (command.returncode, command.stdout) == (2, "")
    assert command.stderr.startswith("error: unknown command 'trian'. Did you mean 'train'?")


def test_a_closed_pipe_is_no_failure(folder: Path) -> None:
    line = f"'{sys.executable}' -m twofold config schema | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_in_a_worker_the_agent_tells(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard around a worker must see the error itself, or the agent could not name the root cause."""
    from twofold.mesh.guard import LOG_DIR_VARIABLE

    monkeypatch.setenv(LOG_DIR_VARIABLE, str(folder))
    with pytest.raises(UserError, match=r"^missing.yaml: there is no such file"):
        cli.main(["train", "missing.yaml"])
