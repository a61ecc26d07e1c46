"""The demo's data: it is what its page says, the test rows are really held out, and scoring is strict."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "tickets"
FIELDS = ["customer", "order", "product", "issue", "urgency"]
ISSUES = {"damaged", "delivery", "wrong_item", "billing", "return", "account"}


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tickets_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(split: str) -> list[tuple[str, dict[str, str | None]]]:
    """The tickets of a committed file with their answers."""
    rows = [json.loads(line) for line in (FOLDER / f"{split}.jsonl").read_text("utf-8").splitlines()]
    return [(row["messages"][1]["content"], json.loads(row["messages"][2]["content"])) for row in rows]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    return load("generate")


@pytest.fixture(scope="module")
def score() -> ModuleType:
    return load("score")


@pytest.fixture(scope="module")
def train() -> list[tuple[str, dict[str, str | None]]]:
    return read("train")


@pytest.fixture(scope="module")
def test() -> list[tuple[str, dict[str, str | None]]]:
    return read("test")


def words(text: str) -> set[str]:
    return set(re.findall(r"[^\W_]+", text.lower()))


def values(rows, field: str) -> set[str]:
    return {answer[field] for _, answer in rows if answer[field] is not None}


def test_generator_rewrites_the_committed_bytes(generate, tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "__file__", str(tmp_path / "generate.py"))
    generate.main()
    for split in ("train", "test"):
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (FOLDER / f"{split}.jsonl").read_bytes()


def test_sizes_and_shape(train, test):
    assert (len(train), len(test)) == (600, 120)
    for split in ("train", "test"):
        for line in (FOLDER / f"{split}.jsonl").read_text("utf-8").splitlines():
            messages = json.loads(line)["messages"]
            assert [message["role"] for message in messages] == ["system", "user", "assistant"]
            assert all(field in messages[0]["content"] for field in FIELDS)
    for ticket, answer in train + test:
        assert list(answer) == FIELDS
        assert answer["issue"] in ISSUES
        assert answer["urgency"] in {"low", "normal", "high"}
        assert len(ticket) <= 400


def test_every_value_stands_in_its_ticket(train, test):
    for ticket, answer in train + test:
        for field in ("customer", "order", "product"):
            assert answer[field] is None or answer[field] in ticket
        assert "{" not in ticket


def test_no_ticket_twice(train, test):
    tickets = [" ".join(ticket.lower().split()) for ticket, _ in train + test]
    assert len(set(tickets)) == len(tickets)


def test_customers_and_orders_of_the_test_are_new(train, test):
    seen = set().union(*(words(ticket) for ticket, _ in train))
    for name in values(test, "customer"):
        assert all(word not in seen for word in words(name) if len(word) > 1), name
    for order in values(test, "order"):
        digits = re.sub(r"\D", "", order)
        assert not any(digits in ticket for ticket, _ in train), order


def test_phrasings_held_out_for_the_test_occur_in_no_training_ticket(generate, train, test):
    """And most test tickets show one as it is written (in the others a typo sits in it)."""
    pools = [*generate.ISSUE.values(), *generate.URGENCY.values(), generate.GREETING, generate.ORDER,
             generate.OPENER, generate.SIGNATURE, generate.UNSIGNED, generate.DISTRACTOR]  # fmt: skip
    fresh = {pattern(text) for pool in pools for text in pool[1] if text}
    assert not fresh & {pattern(text) for pool in pools for text in pool[0] if text}
    assert not [(ticket, held) for ticket, _ in train for held in fresh if re.search(held, ticket)]
    assert sum(any(re.search(held, ticket) for held in fresh) for ticket, _ in test) >= 0.8 * len(test)


def pattern(phrasing: str) -> str:
    """What finds a phrasing in a ticket, whatever fills its holes, in any case, with or without its full stop."""
    parts = [re.escape(part) for part in re.split(r"\{\w+\}", phrasing.rstrip(".!,"))]
    return r"(?i)(?<!\w)" + r"[^.!?]+?".join(parts) + r"(?!\w)"


def test_no_test_skeleton_occurs_in_train(train, test):
    seen = {skeleton(ticket, answer) for ticket, answer in train}
    assert not [ticket for ticket, answer in test if skeleton(ticket, answer) in seen]


def skeleton(ticket: str, answer: dict[str, str | None]) -> str:
    """A ticket's running words: its values taken out, without case, numbers and punctuation."""
    for field in ("customer", "order", "product"):
        if value := answer[field]:
            ticket = ticket.replace(value, f"<{field}>")
    return " ".join(re.findall(r"[a-z]+", ticket.lower()))


def test_variety(train, test):
    """Every label is common enough to learn, every copied field is missing often enough to matter."""
    for rows in (train, test):
        for field, least in (("issue", 0.07), ("urgency", 0.2)):
            for label in values(rows, field):
                assert sum(answer[field] == label for _, answer in rows) >= least * len(rows)
        for field in ("customer", "order", "product"):
            assert 0.1 < sum(answer[field] is None for _, answer in rows) / len(rows) < 0.4
    assert len(values(train, "customer")) > 400
    assert len(values(train, "product")) > 50
    assert values(test, "product") - values(train, "product")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        (' \n{"a":null}\n', {"a": None}),
        ("{}", {}),
        ("", None),
        ("null", None),
        ('["a"]', None),
        ('"a"', None),
        ('{"a": 1', None),
        ("{'a': 1}", None),
        ('{"a": 1}{"a": 1}', None),
        ('Here it is: {"a": 1}', None),
        ('{"a": 1} I hope this helps!', None),
        ('```json\n{"a": 1}\n```', None),
        ('{"a": 1, "a": 2}', None),
        ('{"a": {"b": 1, "b": 1}}', None),
        ('{"a": NaN}', None),
        ("[" * 100_000, None),
    ],
)
def test_parse_is_strict(score, text, expected):
    assert score.parse(text) == expected


def reference(**changes: str | None) -> str:
    answer = {"customer": "Mara Falk", "order": "A1", "product": None, "issue": "billing", "urgency": "low"}
    return json.dumps(answer | changes)


def test_score_by_hand(score):
    outputs = [
        '{"urgency":"low","issue":"billing","product":null,"order":"A1","customer":"Mara Falk"}',  # exact, any order
        reference(urgency="high"),  # one field wrong
        '{"customer": "Mara Falk", "order": "A1", "issue": "billing", "urgency": "low"}',  # product absent, not null
        reference()[:-1] + ', "note": null}',  # all five right, one too many: not exact
        "Sure! " + reference(),  # not JSON: wrong everywhere
    ]
    assert score.score(outputs, [reference()] * 5) == {
        "valid_json": 4 / 5,
        "exact": 1 / 5,
        "fields": {"customer": 4 / 5, "order": 4 / 5, "product": 3 / 5, "issue": 4 / 5, "urgency": 3 / 5},
    }


def test_score_compares_in_order(score):
    one, two = reference(order="A1"), reference(order="B2")
    assert score.score([one, two], [one, two])["exact"] == 1.0
    assert score.score([two, one], [one, two])["exact"] == 0.0


@pytest.mark.parametrize(
    ("outputs", "references"),
    [([], []), (["{}"], []), (["{}"], ["not json"]), (["{}"], ['{"customer": "Mara"}'])],
)
def test_score_refuses_what_it_cannot_compare(score, outputs, references):
    with pytest.raises(ValueError, match=r"score|reference"):
        score.score(outputs, references)


def test_references_score_full_marks_against_themselves(score, test):
    texts = [json.dumps(answer) for _, answer in test]
    result = score.score(texts, texts)
    assert (result["valid_json"], result["exact"], set(result["fields"].values())) == (1.0, 1.0, {1.0})
