"""Which characters of a rendered chat are the assistant's: exact for any template, or refused.

Nothing is found by looking for text that a message could contain. A template is asked instead:

1. *Prefixes.* What comes before turn i, with the generation prompt, is `P = render(messages[:i])`; what ends with it
   is `R = render(messages[:i+1])`. Where the whole rendering starts with P and with R, the turn lies between them.
2. *Marks.* Some templates render a turn differently when more follows (thinking taken out of earlier turns, the
   system text moved to the last question). Then all messages are rendered once more with private-use characters,
   absent from every message, around each content. If taking them out again gives the very same rendering, their
   places are the contents' places.

A turn that neither can locate is refused. What is trained includes the token that ends the turn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from twofold.data.formats import RowError
from twofold.errors import UserError

Messages = Sequence[dict[str, Any]]
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FIRST_MARK = 0xF0000  # supplementary private use area A


def has_markers(tokenizer: Any) -> bool:
    """Whether the template says itself what the assistant generates ({% generation %})."""
    return bool(_GENERATION.search(tokenizer.chat_template or ""))


def render(tokenizer: Any, messages: Messages, tools: Any = None, generation: bool = False) -> str:
    """The text of a chat. Raises UserError without a template, RowError where the template refuses the messages."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UserError(
            "these rows are chats and the model's tokenizer has no chat template: set model.chat_template to a "
            ".jinja file, or use prompt/completion texts."
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=tools, tokenize=False, add_generation_prompt=generation
        )
    except TemplateError as error:
        raise RowError(f"the chat template refuses it: {error}") from None


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token with which the template ends an assistant's turn, or None."""
    if not tokenizer.chat_template:
        return None
    text = render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    special = tokenizer.added_tokens_decoder
    tail = []
    while ids and (ids[-1] in special or tokenizer.decode(ids[-1:]).isspace()):
        tail.append(ids.pop())
    ends = [i for i in reversed(tail) if i in special]
    return ends[0] if ends else None


def assistant_spans(tokenizer: Any, messages: Messages, tools: Any = None) -> tuple[str, list[Span]]:
    """(rendered chat, the character span of each assistant turn with what ends it), in order.

    Raises RowError where a turn cannot be located.
    """
    full = render(tokenizer, messages, tools)
    marks: dict[int, Span] | None = None
    spans: list[Span] = []
    for i in (i for i, m in enumerate(messages) if m["role"] == "assistant"):
        start, end = _by_prefixes(tokenizer, messages, tools, full, i)
        if start is None or end is None:
            marks = _marks(tokenizer, messages, tools, full) if marks is None else marks
            start, end = _by_marks(tokenizer, full, marks, i, start, end)
        if start is None or end is None or start > end or (spans and start < spans[-1][1]):
            raise RowError(
                f"the chat template does not show where assistant turn {len(spans) + 1} lies. Put {{% generation %}} "
                f"markers into it (model.chat_template), or set data.train_on=all"
            )
        spans.append((start, end))
    return full, spans


def _by_prefixes(tokenizer: Any, messages: Messages, tools: Any, full: str, i: int) -> tuple[int | None, int | None]:
    """(start, end) of turn i as far as prefixes tell."""
    try:
        before = render(tokenizer, messages[:i], tools, generation=True)
        after = full if i == len(messages) - 1 else render(tokenizer, messages[: i + 1], tools)
    except RowError:  # some templates refuse a chat that stops here
        return None, None
    start = len(before) if full.startswith(before) else None
    return start, len(after) if full.startswith(after) else None


def _marks(tokenizer: Any, messages: Messages, tools: Any, full: str) -> dict[int, Span]:
    """Message number -> the span of its content in `full`; -1 for an end that the template has cut away."""
    if any(ord(c) >= _FIRST_MARK for c in full):
        return {}
    marked = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, str) and (core := content.strip()):
            lead = content[: content.index(core)]
            trail = content[len(lead) + len(core) :]
            content = f"{lead}{chr(_FIRST_MARK + 2 * i)}{core}{chr(_FIRST_MARK + 2 * i + 1)}{trail}"
        marked.append({**message, "content": content})
    try:
        text = render(tokenizer, marked, tools)
    except RowError:
        return {}
    places: dict[int, list[int]] = {}
    clean: list[str] = []
    for c in text:
        if ord(c) >= _FIRST_MARK:
            places.setdefault(ord(c) - _FIRST_MARK, []).append(len(clean))
        else:
            clean.append(c)
    if "".join(clean) != full or any(len(p) > 1 for p in places.values()):
        return {}
    found = {mark // 2 for mark in places}
    spans = {i: (places.get(2 * i, [-1])[0], places.get(2 * i + 1, [-1])[0]) for i in found}
    turned_around = any(0 <= end < start for start, end in spans.values())
    return {} if turned_around else spans


def _by_marks(
    tokenizer: Any, full: str, marks: dict[int, Span], i: int, start: int | None, end: int | None
) -> tuple[int | None, int | None]:
    """(start, end) of turn i, where prefixes have not told, from the marks of its content and of what follows."""
    own = marks.get(i, (-1, -1))
    stop = end_of_turn(tokenizer)
    stop_text = tokenizer.decode([stop]) if stop is not None else ""
    if start is None and own[0] >= 0:
        start = own[0]
    if end is None and own[1] >= 0:
        rest = full[own[1] :]
        gap = len(rest) - len(rest.lstrip())
        end = own[1] + (gap + len(stop_text) if stop_text and rest[gap:].startswith(stop_text) else 0)
    following = marks.get(i + 1, (-1, -1))[0]
    if end is None and start is not None and following >= 0 and stop_text:
        # Between this turn's start and the next content lie this turn, its end, and a header: the last end is it.
        last = full.rfind(stop_text, start, following)
        end = last + len(stop_text) if last >= 0 else None
    return start, end
