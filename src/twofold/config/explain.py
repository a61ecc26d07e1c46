"""Pydantic's complaints about one group, as one sentence a key: what was expected, what was found.

`expected an integer, got 'lots'.` · `must be greater than 0, got -1.` · `missing. The model: a folder, …`
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from twofold.config.names import hint_for_argument
from twofold.config.schema import members
from twofold.config.tree import show

_NAMES: dict[Any, tuple[str, str]] = {
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", "true or false"),
    type(None): ("null", "nulls"),
}
_BOUNDS = ("greater_than", "less_than", "multiple_of", "finite_number")


def explain(model: type[BaseModel], error: ValidationError, given: Mapping[str, Any]) -> dict[str, str]:
    """A sentence for each key of the group that is wrong; the key "" stands for the group itself."""
    by_key: dict[str, list[ErrorDetails]] = {}
    sentences: dict[str, str] = {}
    for one in error.errors(include_url=False):
        key = str(one["loc"][0]) if one["loc"] else ""
        if one["type"] == "extra_forbidden":
            name, known = str(one["loc"][-1]), _fields_around(model, one["loc"])
            sentences[".".join(map(str, one["loc"]))] = f"unknown key. {hint_for_argument(name, known)}".strip()
        else:
            by_key.setdefault(key, []).append(one)
    return sentences | {key: _sentence(model, key, errors, given.get(key)) for key, errors in by_key.items()}


def _fields_around(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    """The keys of the group in which the last part of `loc` stands."""
    for part in loc[:-1]:
        field = model.model_fields.get(str(part))
        arms = members(field.annotation) if field else []
        model = next((arm for arm in arms if isinstance(arm, type) and issubclass(arm, BaseModel)), model)
    return list(model.model_fields)


def _sentence(model: type[BaseModel], key: str, errors: list[ErrorDetails], value: Any) -> str:
    """One sentence about one key. A bound that is broken says more than a type that does not fit."""
    bound = next((one for one in errors if one["type"].startswith(_BOUNDS)), None)
    own = next((one for one in errors if one["type"] in ("value_error", "assertion_error")), None)
    if own is not None:
        return str(own.get("ctx", {}).get("error", own["msg"]))
    if key not in model.model_fields:  # refused by a model that is not ours to ask
        return f"{errors[0]['msg'][0].lower()}{errors[0]['msg'][1:]}."
    field = model.model_fields[key]
    if errors[0]["type"] == "missing" and len(errors[0]["loc"]) == 1:
        return f"missing. {field.description or ''}".strip()
    if bound is not None:
        return f"must be {bound['msg'].removeprefix('Input should be ')}, got {show(bound['input'])}."
    if any(one["type"] in ("string_too_short", "too_short") for one in errors) and value in ("", []):
        return "must not be empty."
    return f"expected {describe(field.annotation)}, got {show(value)}.{_remedy(field.annotation, value)}"


def describe(annotation: Any) -> str:
    """What a field accepts, in words: "an integer or 'auto'"."""
    words: list[str] = []
    for one in members(annotation):
        if get_origin(one) is Literal:
            numbers = {str(option) for option in get_args(one) if not isinstance(option, str)}
            words += [show(option) for option in get_args(one) if option not in numbers]
        elif get_origin(one) is list:
            words.append(f"a list of {_plural(get_args(one)[0])}")
        elif get_origin(one) is dict:
            words.append("a group of keys")
        elif get_origin(one) is tuple:
            words.append(f"a list of {len(get_args(one))} {_plural(get_args(one)[0])}")
        else:
            words.append(_NAMES.get(one, (f"a {getattr(one, '__name__', one)}", ""))[0])
    return join_or(words)


def join_or(words: list[str]) -> str:
    """ "a, b or c"."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def sentence_for_kind(kind: Any, arms: Iterable[str]) -> str:
    """The kinds that there are, the nearest one first."""
    close = get_close_matches(str(kind), list(arms), n=1, cutoff=0.5)
    return f"{f'Did you mean {close[0]!r}? ' if close else ''}Kinds: {', '.join(sorted(arms)) or 'none'}."


def _plural(annotation: Any) -> str:
    return _NAMES.get(members(annotation)[0], ("", "values"))[1]


def _remedy(annotation: Any, value: Any) -> str:
    accepted = members(annotation)
    options = [option for one in accepted if get_origin(one) is Literal for option in get_args(one)]
    words = [option for option in options if isinstance(option, str)]
    if isinstance(value, str) and (close := get_close_matches(value, words, n=1, cutoff=0.5)):
        return f" Did you mean {close[0]!r}?"
    if str in accepted and isinstance(value, bool | int | float):
        return f" Put it in quotes to make it text: '{show(value)}'."
    return ""
