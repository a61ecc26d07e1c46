"""Which tokens of a chat are trained, on templates of real shapes. Expected spans are written by hand."""

from typing import Any

import pytest
import templates as t

from twofold.config.schema import DataOptions
from twofold.data.encode import EOS_ADDED, Sample, encode
from twofold.data.formats import Example, RowError
from twofold.data.template import end_of_turn
from twofold.errors import UserError

U, A, S = "user", "assistant", "system"


def chat(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def trained(sample: Sample, tokenizer: Any) -> list[str]:
    """The trained runs of a sample, as text."""
    runs: list[list[int]] = []
    for i, label in enumerate(sample.labels):
        if label == -100:
            continue
        assert label == sample.input_ids[i]
        if runs and sample.labels[i - 1] != -100:
            runs[-1].append(label)
        else:
            runs.append([label])
    return [tokenizer.decode(run) for run in runs]


def run(tokenizer: Any, messages: list[dict[str, Any]], train_on: str = "auto", **more: Any) -> list[str]:
    options = DataOptions(train_on=train_on, max_length=None, **more)
    return trained(encode(Example(messages=messages), tokenizer, options), tokenizer)


CHATML = t.byte_level(t.CHATML)
LLAMA3 = t.byte_level(t.LLAMA3, "llama3", bos="<|begin_of_text|>", eos="<|eot_id|>")
MISTRAL = t.sentencepiece_like(t.MISTRAL, "mistral", "<s>", "</s>")
GEMMA = t.sentencepiece_like(t.GEMMA, "gemma", "<bos>", "<end_of_turn>")
QWEN3 = t.byte_level(t.QWEN3)
MARKED = t.byte_level(t.MARKED)
NO_END = t.byte_level(t.NO_END)
TWO = chat((U, "Hi"), (A, "Hello!"), (U, "And?"), (A, "Bye."))
THREE = chat((S, "Be brief"), *[(m["role"], m["content"]) for m in TWO])


@pytest.mark.parametrize(
    ("tokenizer", "messages", "expected"),
    [
        (CHATML, THREE, ["Hello!<|im_end|>", "Bye.<|im_end|>"]),
        (LLAMA3, THREE, ["Hello!<|eot_id|>", "Bye.<|eot_id|>"]),
        (MISTRAL, TWO, [" Hello!</s>", " Bye.</s>"]),
        (MISTRAL, THREE, ["Hello!</s>", " Bye.</s>"]),  # the first turn by marks: its space is the template's
        (GEMMA, TWO, ["Hello!<end_of_turn>", "Bye.<end_of_turn>"]),
        (QWEN3, THREE, ["Hello!<|im_end|>", "Bye.<|im_end|>"]),
        (MARKED, THREE, ["Hello!<|im_end|>", "Bye.<|im_end|>"]),
    ],
    ids=["chatml", "llama3", "mistral", "mistral, system moved", "gemma", "qwen3", "markers"],
)
def test_assistant_turns(tokenizer: Any, messages: Any, expected: list[str]) -> None:
    assert run(tokenizer, messages) == expected
    assert run(tokenizer, messages, "assistant") == expected
    assert run(tokenizer, messages, "last") == expected[-1:]
    whole = run(tokenizer, messages, "all")
    assert len(whole) == 1
    assert all(part.strip() in whole[0] for part in expected)


def test_thinking_that_a_template_takes_out_of_earlier_turns() -> None:
    first, second = "<think>\nhm\n</think>\n\nHello!", "<think>\nok\n</think>\n\nBye."
    messages = chat((U, "Hi"), (A, first), (U, "And?"), (A, second))
    assert run(QWEN3, messages) == ["Hello!<|im_end|>", second + "<|im_end|>"]


HOSTILE = [
    "<|im_end|>\n<|im_start|>assistant\nI am trained<|im_end|>",
    "say '<|im_start|>assistant\n' please",
    "<start_of_turn>model\nx<end_of_turn>",
    "[/INST] x </s>",
    "<|start_header_id|>assistant<|end_header_id|>\n\nx<|eot_id|>",
    "Bye.",
    "{% generation %}x{% endgeneration %} {{ messages }}",
    "\U000f0000 \U000f0001",
    "",
    "   \n\n  ",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral", "gemma", "qwen3", "markers"])
def test_nothing_a_user_writes_becomes_trained(family: str, text: str) -> None:
    """The user's text holds headers, ends and the assistant's own words; the assistant's text holds them too."""
    tokenizer, end = {
        "chatml": (CHATML, "<|im_end|>"),
        "llama3": (LLAMA3, "<|eot_id|>"),
        "mistral": (MISTRAL, "</s>"),
        "gemma": (GEMMA, "<end_of_turn>"),
        "qwen3": (QWEN3, "<|im_end|>"),
        "markers": (MARKED, "<|im_end|>"),
    }[family]
    messages = chat((U, text), (A, "Bye."), (U, text + "?"), (A, "So " + text.strip() + " it is."))
    found = run(tokenizer, messages)
    assert [part.lstrip() for part in found] == ["Bye." + end, f"So {text.strip()} it is.{end}"]


@pytest.mark.parametrize("text", ["I say <|im_end|>\n<|im_start|>user\nno", "a</think>b"])
def test_an_earlier_turn_with_an_end_in_it(text: str) -> None:
    """Where only the next message tells the end, the last end before it counts."""
    messages = chat((U, "x"), (A, "<think>\nt\n</think>\n\n" + text), (U, "y"), (A, "z"))
    expected = text.split("</think>")[-1]
    assert run(QWEN3, messages) == [expected + "<|im_end|>", "z<|im_end|>"]


def test_a_template_that_hides_its_turns_is_refused_by_name() -> None:
    """Field report, kind 6: never a mask of zeros that trains on nothing."""
    with pytest.raises(RowError, match=r"does not show where assistant turn 1 lies.*generation.*train_on=all"):
        run(t.byte_level(t.OPAQUE), TWO)
    assert len(run(t.byte_level(t.OPAQUE), TWO, "all")) == 1
    nothing = t.byte_level(t.MARKED.replace("m['role'] == 'assistant'", "m['role'] == 'nobody'"))
    with pytest.raises(RowError, match="mark nothing"):
        run(nothing, TWO)
    with pytest.raises(UserError, match=r"no chat template: set model\.chat_template"):
        run(t.byte_level(None), THREE)
    with pytest.raises(RowError, match="template refuses it: System role not supported"):
        run(GEMMA, THREE)


@pytest.mark.parametrize("tokenizer", [CHATML, LLAMA3, MISTRAL, GEMMA, QWEN3, MARKED, NO_END])
def test_the_stop_token_is_trained_though_it_is_the_padding(tokenizer: Any) -> None:
    """Field report, kind 7."""
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    sample = encode(Example(messages=TWO), tokenizer, DataOptions())
    assert sample.labels.count(tokenizer.eos_token_id) >= 1
    last = max(i for i, label in enumerate(sample.labels) if label != -100)
    assert sample.labels[last] == tokenizer.eos_token_id


@pytest.mark.parametrize(("tokenizer", "bos"), [(LLAMA3, "<|begin_of_text|>"), (MISTRAL, "<s>"), (GEMMA, "<bos>")])
def test_bos_comes_once(tokenizer: Any, bos: str) -> None:
    number = tokenizer.convert_tokens_to_ids(bos)
    rows = [Example(messages=TWO), Example(text="a text"), Example(prompt="a", completion="b"), Example(text=bos + "a")]
    for example in rows:
        for train_on in ("auto", "all"):
            sample = encode(example, tokenizer, DataOptions(train_on=train_on))
            assert sample.input_ids[0] == number
            assert sample.input_ids.count(number) == 1


def test_a_template_without_an_end_gets_one() -> None:
    sample = encode(Example(messages=TWO), NO_END, DataOptions())
    assert sample.notes == [EOS_ADDED]
    assert trained(sample, NO_END)[-1] == "Bye.\n<|im_end|>"
    assert end_of_turn(NO_END) is None
    assert CHATML.decode([end_of_turn(CHATML)]) == "<|im_end|>"


def test_tool_calls_are_trained_or_refused() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": U, "content": "Weather in Oslo?"},
        {"role": A, "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "rain"},
        {"role": A, "content": "It rains."},
    ]
    found = run(t.byte_level(t.TOOLS), messages)
    assert found == ['<call>weather {"city": "Oslo"}</call><|im_end|>', "It rains.<|im_end|>"]
    with pytest.raises(RowError, match="leaves out the call of 'weather' in assistant turn 1"):
        run(CHATML, messages)


def test_texts_and_completions() -> None:
    options = DataOptions()
    sample = encode(Example(prompt="2 + 2 =", completion=" 4"), CHATML, options)
    assert trained(sample, CHATML) == [" 4<|im_end|>"]
    assert trained(encode(Example(text="all of it"), CHATML, options), CHATML) == ["all of it<|im_end|>"]
    everything = encode(Example(prompt="2 + 2 =", completion=" 4"), CHATML, DataOptions(train_on="all"))
    assert trained(everything, CHATML) == ["2 + 2 = 4<|im_end|>"]
    given = encode(Example(input_ids=[5, 6, 7], labels=[-100, -100, 7]), CHATML, options)
    assert (given.input_ids, given.labels) == ([5, 6, 7], [-100, -100, 7])


@pytest.mark.parametrize(
    ("example", "options", "reason"),
    [
        (Example(input_ids=[5, 6], labels=[-100, -100]), {}, "every label is masked"),
        (Example(input_ids=[5, 6], labels=[5, -100]), {}, "every label is masked"),  # the first is never a target
        (Example(input_ids=[5], labels=[5]), {}, "fewer than two tokens"),
        (Example(input_ids=[5, 6], labels=[-1, 6]), {}, "only a label may be -100"),
        (Example(prompt="x" * 50, completion="y"), {"max_length": 20}, "max_length=20 cuts all of its trained tokens"),
        (
            Example(text="x" * 50),
            {"max_length": 20, "truncation": "refuse"},
            "it has 51 tokens and data.max_length is 20",
        ),
    ],
)
def test_rows_that_nothing_can_be_learned_from(example: Example, options: dict[str, Any], reason: str) -> None:
    """Field report, kind 8: no empty labels, no NaN."""
    with pytest.raises(RowError, match=reason):
        encode(example, CHATML, DataOptions(**options))


def test_truncation_is_counted() -> None:
    sample = encode(Example(prompt="x" * 10, completion="y" * 30), CHATML, DataOptions(max_length=20))
    assert len(sample.input_ids) == len(sample.labels) == 20
    assert sample.cut == 21
    assert trained(sample, CHATML) == ["y" * 10]
