"""From an example to a sample: tokens, and labels that say which of them are trained.

A text is tokenised once, as a whole; a token belongs to a span by its place in the text (offsets), never by what it
is. So the token that ends a turn is trained although it may also be the padding token, and BOS comes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from twofold.config.schema import DataOptions
from twofold.data.formats import Example, RowError
from twofold.data.template import Span, assistant_spans, has_markers, render
from twofold.errors import UserError

IGNORE = -100
EOS_ADDED = "the chat template ends the last turn with no special token: the end-of-text token is added and trained"
ALPACA = "Below is an instruction that describes a task. Write a response.\n\n### Instruction:\n{}\n\n### Response:\n"


@dataclass
class Sample:
    """input_ids, labels: of one length; labels[i] is input_ids[i] where it is trained, else -100. cut: tokens
    taken away by max_length; note: what was done that the user should know."""

    input_ids: list[int]
    labels: list[int]
    cut: int = 0
    note: str = ""


def encode(example: Example, tokenizer: Any, options: DataOptions) -> Sample:
    """The sample of an example. Raises RowError where nothing could be learned from it."""
    if example.input_ids is not None:
        sample = Sample(example.input_ids, list(example.labels or []))
    elif example.messages is not None:
        sample = _chat(example, tokenizer, options.train_on)
    elif example.text is not None:
        sample = _text(tokenizer, example.text, 0)
    else:
        prompt = example.prompt or ""
        start = 0 if options.train_on == "all" else len(prompt)
        sample = _text(tokenizer, prompt + (example.completion or ""), start)
    _check(sample)
    return _fit(sample, options)


def _chat(example: Example, tokenizer: Any, train_on: str) -> Sample:
    messages = example.messages or []
    if not tokenizer.chat_template and len(messages) == 2 and messages[0]["role"] == "user":
        prompt = ALPACA.format(messages[0]["content"])  # a base model: the text that Alpaca itself was trained with
        return _text(tokenizer, prompt + messages[1]["content"], 0 if train_on == "all" else len(prompt))
    if train_on == "all":
        text = render(tokenizer, messages, example.tools)
        ids, trained = _tokens(tokenizer, text, [(0, len(text))], special_tokens=False)
        return Sample(ids, [i if t else IGNORE for i, t in zip(ids, trained, strict=True)])
    if has_markers(tokenizer):
        ids, runs = _marked_by_template(tokenizer, messages, example.tools)
    else:
        text, spans = assistant_spans(tokenizer, messages, example.tools)
        _calls_are_shown(messages, [text[start:end] for start, end in spans])
        ids, runs = _runs(tokenizer, text, spans)
    if train_on == "last":
        runs = runs[-1:]
    labels = [IGNORE] * len(ids)
    for start, end in runs:
        labels[start:end] = ids[start:end]
    sample = Sample(ids, labels)
    return _ended(sample, tokenizer) if messages[-1]["role"] == "assistant" else sample


def _calls_are_shown(messages: Sequence[dict[str, Any]], turns: Sequence[str]) -> None:
    """A template that leaves tool calls out would train the model to say nothing in their place."""
    calling = [m.get("tool_calls") or [] for m in messages if m["role"] == "assistant"]
    for number, (calls, text) in enumerate(zip(calling, turns, strict=True), 1):
        for call in calls:
            name = call.get("function", call).get("name", "")
            if name not in text:
                raise RowError(
                    f"the chat template leaves out the call of '{name}' in assistant turn {number}: set "
                    f"model.chat_template to one that renders tool calls, or write calls into the content"
                )


def _runs(tokenizer: Any, text: str, spans: Sequence[Span]) -> tuple[list[int], list[Span]]:
    """(tokens, the token span of each character span), without white space after the token that ends a turn."""
    ids, trained = _tokens(tokenizer, text, spans, special_tokens=False)
    special = tokenizer.added_tokens_decoder
    runs = []
    for number in range(1, len(spans) + 1):
        inside = [i for i, t in enumerate(trained) if t == number]
        if not inside:
            raise RowError(f"assistant turn {number} has no token of its own")
        last = len(inside)
        while last > 1 and tokenizer.decode([ids[inside[last - 1]]]).isspace():
            last -= 1
        keep = last if ids[inside[last - 1]] in special else len(inside)
        runs.append((inside[0], inside[keep - 1] + 1))
    return ids, runs


def _tokens(tokenizer: Any, text: str, spans: Sequence[Span], special_tokens: bool) -> tuple[list[int], list[int]]:
    """(tokens, the number of the span each belongs to, from 1; 0 for none).

    A token across a span's start belongs to it only if what lies before the start is white space.
    """
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} is a slow tokenizer without offsets: use a fast one.")
    encoded = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True, verbose=False)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    belongs = [0] * len(ids)
    number = 0
    for i, (start, end) in enumerate(offsets):
        while number < len(spans) and start >= spans[number][1]:
            number += 1
        if number == len(spans):
            break
        first, last = spans[number]
        if end > start and end > first and start < last and (start >= first or text[start:first].isspace()):
            belongs[i] = number + 1
    return ids, belongs


def _marked_by_template(tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Any) -> tuple[list[int], list[Span]]:
    """(tokens, spans) by the template's own generation markers, with the end of turn that follows directly."""
    encoded = tokenizer.apply_chat_template(
        list(messages), tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, mask = list(encoded["input_ids"]), list(encoded["assistant_masks"])
    special = tokenizer.added_tokens_decoder
    runs: list[Span] = []
    for i, inside in enumerate(mask):
        if inside and runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        elif inside:
            runs.append((i, i + 1))
    if not runs:
        raise RowError("the chat template's generation markers mark nothing in it")
    ended = []
    for start, end in runs:
        outside = end < len(ids) and ids[end] in special and ids[end - 1] not in special
        ended.append((start, end + 1 if outside else end))
    return ids, ended


def _ended(sample: Sample, tokenizer: Any) -> Sample:
    """Makes sure that the last turn ends with a special token that is trained: adds eos where there is none."""
    last = max((i for i, label in enumerate(sample.labels) if label != IGNORE), default=None)
    if last is None or sample.input_ids[last] in tokenizer.added_tokens_decoder or tokenizer.eos_token_id is None:
        return sample
    eos = [tokenizer.eos_token_id]
    return Sample(sample.input_ids[: last + 1] + eos, sample.labels[: last + 1] + eos, note=EOS_ADDED)


def _text(tokenizer: Any, text: str, start: int) -> Sample:
    """A text trained from a character on, with BOS where the tokenizer puts one, and a trained EOS at its end."""
    bos, eos = tokenizer.bos_token, tokenizer.eos_token_id
    special_tokens = not (bos and text.startswith(bos))
    ids, trained = _tokens(tokenizer, text, [(start, len(text))], special_tokens)
    labels = [i if t else IGNORE for i, t in zip(ids, trained, strict=True)]
    if eos is not None:
        if ids and ids[-1] == eos:  # the tokenizer has put it there itself
            labels[-1] = eos
        else:
            ids, labels = [*ids, eos], [*labels, eos]
    return Sample(ids, labels)


def _check(sample: Sample) -> None:
    if len(sample.input_ids) < 2:
        raise RowError("it has fewer than two tokens: nothing can be predicted")
    if all(label == IGNORE for label in sample.labels[1:]):
        raise RowError("every label is masked: nothing in it is trained")
    if any(label < 0 and label != IGNORE for label in sample.labels) or min(sample.input_ids) < 0:
        raise RowError("input_ids and labels must be token numbers; only a label may be -100 (not trained)")


def _fit(sample: Sample, options: DataOptions) -> Sample:
    """Applies max_length."""
    most, length = options.max_length, len(sample.input_ids)
    if most is None or length <= most:
        return sample
    if options.truncation == "refuse":
        raise RowError(f"it has {length} tokens and data.max_length is {most} (data.truncation=end would cut it)")
    ids, labels = sample.input_ids[:most], sample.labels[:most]
    if all(label == IGNORE for label in labels[1:]):
        raise RowError(f"data.max_length={most} cuts all of its trained tokens away: it has {length} tokens")
    return Sample(ids, labels, cut=length - most, note=sample.note)
