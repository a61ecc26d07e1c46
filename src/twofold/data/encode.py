"""From an example to a sample: tokens, and labels that say which of them are trained.

A text is tokenised once, as a whole; a token belongs to a span by its place in the text (offsets), never by what it
is. So the token that ends a turn is trained although it may also be the padding token, and BOS comes once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twofold.config.schema import DataOptions
from twofold.data.formats import Example, RowError
from twofold.data.template import Ends, Messages, Span, apply, assistant_spans, ends, has_markers, render
from twofold.errors import UserError

IGNORE = -100
EOS_ADDED = "the chat template ends the last turn with no special token: the end-of-text token is added and trained"
ANSWER_CHANGED = "the chat template changes what some last answers say (thinking left out?): look at the preview"
TOOLS_UNUSED = "the chat template leaves out the tools that a row offers: answers are trained without them"
SHARED_TOKEN = (
    "in some rows one token holds the end of the prompt and the start of the completion, and is not trained: end "
    "prompts with a new line, or begin completions with a space"
)


class TooLong(RowError):
    """A row over max_length that is to be skipped."""


@dataclass
class Sample:
    """input_ids, labels: of one length; labels[i] is input_ids[i] where it is trained, else -100. cut: tokens
    taken away by max_length; notes: what was done that the user should know."""

    input_ids: list[int]
    labels: list[int]
    cut: int = 0
    notes: list[str] = field(default_factory=list)


def encode(example: Example, tokenizer: Any, options: DataOptions) -> Sample:
    """The sample of an example. Raises RowError where nothing could be learned from it.

    Raises UserError where no row can be encoded this way: no chat template, a tokenizer without offsets, or a
    `train_on` that these rows do not have.
    """
    if example.input_ids is not None:
        _auto_only(options, ("all", "assistant", "last"), "rows with input_ids bring their own labels")
        sample = Sample(example.input_ids, list(example.labels or []))
        _check_given(sample, len(tokenizer))
    elif example.text is not None:
        _auto_only(options, ("assistant", "last"), "plain texts have no assistant turns")
        sample = _text(tokenizer, example.text, 0)
    elif example.steps is not None:
        sample = _steps(tokenizer, example.prompt or "", example.steps)
    elif example.messages is not None and (tokenizer.chat_template or example.prompt is None):
        sample = _chat(example, tokenizer, options.train_on)
    else:
        prompt = example.prompt or ""
        start = 0 if options.train_on == "all" else len(prompt)
        sample = _text(tokenizer, prompt + (example.completion or ""), start)
    _check(sample)
    return _fit(sample, options)


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """The tokens of a plain prompt as inference gets it: BOS where the tokenizer puts one, and no EOS."""
    ids = list(tokenizer(text, add_special_tokens=_adds_special(tokenizer, text))["input_ids"])
    added = len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token)
    return ids[:-1] if added else ids


def _auto_only(options: DataOptions, refused: Sequence[str], why: str) -> None:
    if options.train_on in refused:
        raise UserError(f"data.train_on={options.train_on}: {why}. Leave it at auto.")


def _chat(example: Example, tokenizer: Any, train_on: str) -> Sample:
    messages, how = example.messages or [], ends(tokenizer)
    text = render(tokenizer, messages, example.tools)
    if train_on == "all":
        ids, _ = _tokens(tokenizer, text, special_tokens=False)
        sample, to_the_end = Sample(ids, list(ids)), True
    else:
        ids, runs = _turns(example, tokenizer, how)
        chosen = _chosen(example, runs, train_on)
        labels = [IGNORE] * len(ids)
        for start, end in chosen:
            labels[start:end] = ids[start:end]
        sample, to_the_end = Sample(ids, labels), runs[-1] in chosen
    sample.notes += _left_out(example, text)
    if to_the_end and sample.input_ids and messages[-1]["role"] == "assistant":
        _end(sample, tokenizer, how)
    return sample


def _turns(example: Example, tokenizer: Any, how: Ends) -> tuple[list[int], list[Span]]:
    """(tokens, the token span of each assistant turn): by the template's own markers, or else by asking it."""
    messages = example.messages or []
    if has_markers(tokenizer, example.tools):
        ids, runs = _marked_by_template(tokenizer, messages, example.tools, how)
    else:
        text, spans = assistant_spans(tokenizer, messages, example.tools)
        ids, offsets = _tokens(tokenizer, text, special_tokens=False)
        runs = _runs(_belongs(text, offsets, spans))
        if len(runs) < len(spans):
            raise RowError("an assistant turn has no token of its own")
    runs = [_closed(tokenizer, how, ids, run) for run in runs]
    if len(runs) == sum(m["role"] == "assistant" for m in messages):
        _calls_are_shown(messages, [tokenizer.decode(ids[start:end]) for start, end in runs])
    return ids, runs


def _chosen(example: Example, runs: list[Span], train_on: str) -> list[Span]:
    """The turns to train: those of the completion (auto), all (assistant), the last; never one with `train: false`."""
    turns = [(i, m) for i, m in enumerate(example.messages or []) if m["role"] == "assistant"]
    if len(turns) != len(runs):  # markers that mark otherwise than by turns
        if example.learn_from or any(not m.get("train", True) for _, m in turns):
            raise RowError("the template's generation markers are not one for each turn, so turns cannot be left out")
        return runs[-1:] if train_on == "last" else runs
    first = example.learn_from if train_on == "auto" else 0
    wanted = list(zip(turns, runs, strict=True))[-1 if train_on == "last" else 0 :]
    return [run for (i, message), run in wanted if i >= first and message.get("train", True)]


def _calls_are_shown(messages: Messages, turns: Sequence[str]) -> None:
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


def _left_out(example: Example, text: str) -> list[str]:
    """Notes on what the row has and the rendered chat has not."""
    last = next(m for m in reversed(example.messages or []) if m["role"] == "assistant").get("content")
    changed = isinstance(last, str) and "".join(last.split()) not in "".join(text.split())
    tools = [t.get("function", t) for t in example.tools or [] if isinstance(t, dict)]
    unused = any(isinstance(t, dict) and str(t.get("name", "")) not in text for t in tools)
    return [ANSWER_CHANGED] * changed + [TOOLS_UNUSED] * unused


def _closed(tokenizer: Any, how: Ends, ids: list[int], run: Span) -> Span:
    """A turn up to the token that ends it, without the white space or the end of the whole text that may follow."""
    start, end = run
    rest = end
    while rest > start + 1 and (ids[rest - 1] in how.tokens or tokenizer.decode([ids[rest - 1]]).isspace()):
        rest -= 1
    closing = [i for i in range(rest, end) if ids[i] in how.tokens]
    stops = [i for i in closing if ids[i] == how.stop]
    return start, (stops or closing or [end - 1])[-1] + 1


def _runs(belongs: Sequence[int]) -> list[Span]:
    """The spans of equal numbers above 0."""
    runs: list[Span] = []
    for i, number in enumerate(belongs):
        if number and runs and runs[-1][1] == i and belongs[i - 1] == number:
            runs[-1] = (runs[-1][0], i + 1)
        elif number:
            runs.append((i, i + 1))
    return runs


def _tokens(tokenizer: Any, text: str, special_tokens: bool) -> tuple[list[int], list[Span]]:
    """(tokens, the characters of each)."""
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} is a slow tokenizer without offsets: use a fast one.")
    encoded = tokenizer(text, add_special_tokens=special_tokens, return_offsets_mapping=True, verbose=False)
    return list(encoded["input_ids"]), encoded["offset_mapping"]


def _belongs(text: str, offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """The number of the span that each token belongs to, from 1; 0 for none.

    A token across a span's start belongs to it only if what lies before the start is white space.
    """
    belongs = [0] * len(offsets)
    number = 0
    for i, (start, end) in enumerate(offsets):
        while number < len(spans) and start >= spans[number][1]:
            number += 1
        if number == len(spans):
            break
        first, last = spans[number]
        if end > start and end > first and start < last and (start >= first or text[start:first].isspace()):
            belongs[i] = number + 1
    return belongs


def _marked_by_template(tokenizer: Any, messages: Messages, tools: Any, how: Ends) -> tuple[list[int], list[Span]]:
    """(tokens, spans) by the template's own generation markers, with the end of turn that follows directly."""
    encoded = apply(tokenizer, messages, tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ids, runs = list(encoded["input_ids"]), _runs(encoded["assistant_masks"])
    if not runs:
        raise RowError("the chat template's generation markers mark nothing in it")
    return ids, [(start, end + (end < len(ids) and ids[end] == how.stop)) for start, end in runs]


def _end(sample: Sample, tokenizer: Any, how: Ends) -> None:
    """Makes sure that the last turn ends with a special token that is trained: adds eos where there is none."""
    ids, labels, eos = sample.input_ids, sample.labels, tokenizer.eos_token_id
    last = end = max(i for i, label in enumerate(labels) if label != IGNORE)
    while end and tokenizer.decode([ids[end]]).isspace():
        end -= 1
    if ids[end] in how.tokens or eos is None:
        return
    sample.input_ids, sample.labels = [*ids[: last + 1], eos], [*labels[: last + 1], eos]
    sample.notes.append(EOS_ADDED)


def _adds_special(tokenizer: Any, text: str) -> bool:
    """Whether the tokenizer should add its own BOS: not where the text has it already."""
    return not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))


def _text(tokenizer: Any, text: str, start: int) -> Sample:
    """A text trained from a character on, with BOS where the tokenizer puts one, and a trained EOS at its end."""
    eos = tokenizer.eos_token_id
    ids, offsets = _tokens(tokenizer, text, _adds_special(tokenizer, text))
    belongs = _belongs(text, offsets, [(start, len(text))])
    labels = [i if inside else IGNORE for i, inside in zip(ids, belongs, strict=True)]
    shared = any(first < start < last and text[first:start].strip() for first, last in offsets)
    if eos is not None:
        if ids and ids[-1] == eos:  # the tokenizer has put it there itself
            labels[-1] = eos
        else:
            ids, labels = [*ids, eos], [*labels, eos]
    return Sample(ids, labels, notes=[SHARED_TOKEN] * shared)


def _steps(tokenizer: Any, prompt: str, steps: Sequence[tuple[str, int]]) -> Sample:
    """A text of lines; the number of each step is the label of the token after the last one of its line."""
    text, ends = f"{prompt}\n", []
    for step, _ in steps:
        text += f"{step}\n"
        ends.append(len(text) - 1)
    ids, offsets = _tokens(tokenizer, text, _adds_special(tokenizer, text))
    if tokenizer.eos_token_id is not None and (not ids or ids[-1] != tokenizer.eos_token_id):
        ids, offsets = [*ids, tokenizer.eos_token_id], [*offsets, (len(text), len(text))]
    labels = [IGNORE] * len(ids)
    for (_, number), end in zip(steps, ends, strict=True):
        at = next(i for i, (first, last) in enumerate(offsets) if first <= end < last)
        if at + 1 == len(ids) or labels[at + 1] != IGNORE:
            raise RowError("a step has no token of its own, or nothing follows it")
        labels[at + 1] = number
    return Sample(ids, labels)


def _check_given(sample: Sample, vocabulary: int) -> None:
    ids, labels = sample.input_ids, sample.labels
    if any(i < 0 for i in ids) or any(label < 0 and label != IGNORE for label in labels):
        raise RowError("input_ids and labels must be token numbers; only a label may be -100 (not trained)")
    if max(ids, default=0) >= vocabulary:
        raise RowError(f"token {max(ids)} is none of the tokenizer's {vocabulary}: was it made with another tokenizer?")
    for place, (i, label) in enumerate(zip(ids, labels, strict=True), 1):
        if label not in (i, IGNORE):
            raise RowError(
                f"label {place} is {label} and token {place} is {i}: a label is the token in the same place (not "
                f"shifted), or -100"
            )


def _check(sample: Sample) -> None:
    if len(sample.input_ids) < 2:
        raise RowError("it has fewer than two tokens: nothing can be predicted")
    if all(label == IGNORE for label in sample.labels[1:]):
        raise RowError("every label is masked: nothing in it is trained")


def _fit(sample: Sample, options: DataOptions) -> Sample:
    """Applies max_length."""
    most, length = options.max_length, len(sample.input_ids)
    if most is None or length <= most:
        return sample
    if options.truncation in ("error", "skip"):
        kind = TooLong if options.truncation == "skip" else RowError
        raise kind(f"it has {length} tokens and data.max_length is {most} (data.truncation=keep_start would cut it)")
    kept = slice(0, most) if options.truncation == "keep_start" else slice(length - most, length)
    ids, labels = sample.input_ids[kept], sample.labels[kept]
    if all(label == IGNORE for label in labels[1:]):
        raise RowError(f"data.max_length={most} cuts all of its trained tokens away: it has {length} tokens")
    return Sample(ids, labels, length - most, sample.notes)
