"""Which characters of a rendered chat are the assistant's: exact for any template, or refused.

Nothing is found by looking for text that a user could have written. The template is asked instead:

1. *Prefixes.* What comes before turn i, with the generation prompt, is `P = render(messages[:i])`; what ends with it
   is `R = render(messages[:i+1])`. Where the whole rendering starts with P and with R, the turn lies between them.
   Where only a part of the generation prompt is there (`<think>` that an earlier turn does not have), that part is P's.
2. *Marks.* Some templates render a turn differently when more follows (thinking taken out of earlier turns, the
   system text moved to the last question). Then the messages are rendered once more with private-use characters,
   absent from every message, around each content. If taking them out again gives the very same rendering, their
   places are the contents' places.

A turn that neither can locate is refused, and so is one in which the marks show another message's content. What is
trained includes the token that ends the turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from twofold.data.formats import RowError
from twofold.errors import UserError

Messages = Sequence[dict[str, Any]]
Span = tuple[int, int]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_THINKING_END = re.compile(r"</think>\s*")
_FIRST_MARK = 0xF0000  # supplementary private use area A
_OPEN, _OPEN_LATER, _CLOSE = 0, 1, 2  # the marks of a message: where it begins, where it may begin, where it ends


def has_markers(tokenizer: Any, tools: Any = None) -> bool:
    """Whether the template says itself what the assistant generates ({% generation %})."""
    return bool(tokenizer.chat_template and _GENERATION.search(tokenizer.get_chat_template(tools=tools)))


def render(tokenizer: Any, messages: Messages, tools: Any = None, generation: bool = False) -> str:
    """The text of a chat. Raises UserError without a template, RowError where the template refuses the messages."""
    return apply(tokenizer, messages, tools, tokenize=False, add_generation_prompt=generation)


def apply(tokenizer: Any, messages: Messages, tools: Any, **options: Any) -> Any:
    """`tokenizer.apply_chat_template`. Raises UserError without a template, RowError where it refuses the messages."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise UserError(
            "these rows are chats and the model's tokenizer has no chat template: set model.chat_template to a "
            ".jinja file, or use prompt/completion texts."
        )
    called = any(m.get("tool_calls") for m in messages)
    problem: Exception | None = None
    for form in (messages, _with_text_arguments(messages)) if called else (messages,):
        try:
            return tokenizer.apply_chat_template(list(form), tools=tools, **options)
        except TemplateError as error:
            raise RowError(f"the chat template refuses it: {error}") from None
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # Python's own, inside the template
            problem = problem or error
    raise RowError(f"the chat template cannot render it: {problem}")


def _with_text_arguments(messages: Messages) -> Messages:
    """The same with the arguments of tool calls as JSON text, which some templates want."""

    def text(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
            return call
        arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    return [{**m, "tool_calls": [text(c) for c in m["tool_calls"]]} if m.get("tool_calls") else m for m in messages]


@dataclass(frozen=True)
class Ends:
    """stop: the token with which the template ends a plain answer, or None; tokens: all that may end a turn, as
    number -> text; added: the texts of all tokens that are not split."""

    stop: int | None
    tokens: dict[int, str]
    added: tuple[str, ...]


def ends(tokenizer: Any) -> Ends:
    """How turns may end. Costs a rendering, once for a tokenizer and its template."""
    template = tokenizer.chat_template
    return _ends(tokenizer, template if isinstance(template, str) else repr(template), len(tokenizer))


@lru_cache(maxsize=8)
def _ends(tokenizer: Any, template: str, size: int) -> Ends:
    added = tokenizer.added_tokens_decoder
    stop = _find_stop(tokenizer, added) if tokenizer.chat_template else None
    tokens = {i: t.content for i, t in added.items() if t.special or i in (stop, tokenizer.eos_token_id)}
    if tokenizer.eos_token_id is not None:
        tokens.setdefault(tokenizer.eos_token_id, tokenizer.eos_token)
    return Ends(stop, tokens, tuple(t.content for t in added.values()))


def _find_stop(tokenizer: Any, added: dict[int, Any]) -> int | None:
    try:
        text = render(tokenizer, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    except RowError:
        return None
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    first = None
    while ids and (ids[-1] in added or tokenizer.decode(ids[-1:]).isspace()):
        last = ids.pop()
        first = last if last in added else first
    return first


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token with which the template ends an assistant's turn, or None."""
    return ends(tokenizer).stop


def assistant_spans(tokenizer: Any, messages: Messages, tools: Any = None) -> tuple[str, list[Span]]:
    """(rendered chat, the character span of each assistant turn with what ends it), in order.

    Raises RowError where a turn cannot be located.
    """
    chat = _Chat(tokenizer, messages, tools)
    spans: list[Span] = []
    for i in (i for i, m in enumerate(messages) if m["role"] == "assistant"):
        start = _start(chat, i)
        end = None if start is None else _end(chat, i, start)
        floor = spans[-1][1] if spans else 0
        if start is None or end is None or not floor <= start <= end or _others(chat, i, start, end):
            raise RowError(
                f"the chat template does not show where assistant turn {len(spans) + 1} lies. Put {{% generation %}} "
                f"markers into it (model.chat_template), or set data.train_on=all"
            )
        spans.append((start, end))
    return chat.full, spans


@dataclass
class _Chat:
    """A chat and what its template makes of it."""

    tokenizer: Any
    messages: Messages
    tools: Any

    @cached_property
    def full(self) -> str:
        return render(self.tokenizer, self.messages, self.tools)

    def until(self, count: int, generation: bool = False) -> str | None:
        """The rendering of the first messages; None where the template refuses a chat that stops there."""
        if count == len(self.messages) and not generation:
            return self.full
        try:
            return render(self.tokenizer, self.messages[:count], self.tools, generation)
        except RowError:
            return None

    @cached_property
    def marks(self) -> dict[int, int]:
        """3 * message number + kind of mark -> place in `full`; marks that the template has cut away are missing."""
        every = range(len(self.messages))
        answers = [i for i in every if self.messages[i]["role"] == "assistant"]
        # A template may look at how a question begins, and a mark there would change what it does.
        return _marks(self, every) or _marks(self, answers)


def _others(chat: _Chat, i: int, start: int, end: int) -> bool:
    """Whether another message's content lies in turn i: some templates write there what a tool has answered."""
    return any(start < at < end for mark, at in chat.marks.items() if mark // 3 != i)


def _start(chat: _Chat, i: int) -> int | None:
    """Where turn i begins in the whole: after what inference gives the model before it speaks."""
    asked, before = chat.until(i, generation=True), chat.until(i)
    if asked is not None and chat.full.startswith(asked):
        return len(asked)
    header = ""
    if asked is not None and before is not None and asked.startswith(before) and chat.full.startswith(before):
        header = _shared_header(asked[len(before) :], chat.full[len(before) :], ends(chat.tokenizer).added)
    if header:
        return len(before or "") + len(header)
    return chat.marks.get(3 * i + _OPEN, chat.marks.get(3 * i + _OPEN_LATER))


def _shared_header(asked: str, given: str, added: tuple[str, ...]) -> str:
    """What two texts begin with alike, up to a white space or an unsplit token: letters may agree by chance."""
    n = next((n for n, (a, b) in enumerate(zip(asked, given, strict=False)) if a != b), min(len(asked), len(given)))
    shared = asked[:n]
    while shared and not (shared[-1].isspace() or shared.endswith(added)):
        shared = shared[:-1]
    return shared


def _end(chat: _Chat, i: int, start: int) -> int | None:
    """Where turn i ends in the whole, with the token that ends it."""
    done = chat.until(i + 1)
    if done is not None and chat.full.startswith(done):
        return len(done)
    own, following = chat.marks.get(3 * i + _CLOSE), chat.marks.get(3 * (i + 1) + _OPEN)
    how = ends(chat.tokenizer)
    if own is not None and not chat.messages[i].get("tool_calls"):  # calls would come after the content
        rest = chat.full[own:]
        gap = len(rest) - len(rest.lstrip())
        closing = [text for text in how.tokens.values() if rest[gap:].startswith(text)] if how.stop is not None else []
        return own + gap + len(max(closing, key=len)) if closing else own
    if following is not None and how.stop is not None:
        # Between this turn's start and the next content lie this turn, its end, and a header: the last end is it.
        stop = how.tokens[how.stop]
        last = chat.full.rfind(stop, start, following)
        return last + len(stop) if last >= 0 else None
    return None


def _marks(chat: _Chat, which: Sequence[int]) -> dict[int, int]:
    """The marks of these messages, or nothing where they would change the rendering."""
    if any(ord(c) >= _FIRST_MARK for c in chat.full):
        return {}
    marked = [_marked(m, 3 * i) if i in which else m for i, m in enumerate(chat.messages)]
    try:
        text = render(chat.tokenizer, marked, chat.tools)
    except RowError:
        return {}
    places: dict[int, int] = {}
    clean: list[str] = []
    for c in text:
        mark = ord(c) - _FIRST_MARK
        if mark < 0:
            clean.append(c)
        elif places.setdefault(mark, len(clean)) != len(clean):
            return {}  # a content that stands in two places
    inside_out = any(places.get(mark + 1, at) < at for mark, at in places.items() if mark % 3 != _CLOSE)
    return places if "".join(clean) == chat.full and not inside_out else {}


def _marked(message: dict[str, Any], first: int) -> dict[str, Any]:
    """A message with marks around its content, inside of surrounding white space (which templates may strip).

    Where thinking ends there is one more: a template that cuts thinking away leaves that one.
    """
    content = message.get("content")
    if not isinstance(content, str) or not (core := content.strip()):
        return message
    at = content.index(core)
    lead, trail = content[:at], content[at + len(core) :]
    opening, later, closing = (chr(_FIRST_MARK + first + kind) for kind in (_OPEN, _OPEN_LATER, _CLOSE))
    if thinking := list(_THINKING_END.finditer(core)):
        cut = thinking[-1].end()
        if cut == len(core):  # nothing but a thought: marks behind it would keep white space from being stripped
            return message
        core = core[:cut] + later + core[cut:]
    return {**message, "content": f"{lead}{opening}{core}{closing}{trail}"}
