"""Writes the demo's data: support tickets as people type them, and the JSON a help desk would file.

`python examples/tickets/generate.py` rewrites `train.jsonl` and `test.jsonl` beside this file, the same bytes each
time (plain Python, one seed). What it promises about the test rows: their customers, order numbers and some of
their products never occur in a training row, and each test ticket has at least one sentence written from a phrasing
that no training row uses. What it costs: the tickets are made up, so a model that does well here has learned
this shop's wording, not every shop's.

A ticket is built as sentences with holes. Typos go into the running words first, then the holes are filled, so a
name or a number is always to be copied as it stands in the ticket. A hole is `{name}`, `{order}`, `{product}`, or
one of the distractors (`{other}`, `{person}`, `{money}`, `{digits}`, `{date}`).
"""

import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

SEED = 20260801
ROWS = {"train": 600, "test": 120}
SYSTEM = "Ticket to JSON: customer, order, product, issue, urgency."

Row = dict[str, list[dict[str, str]]]
Pool = tuple[list[str], list[str]]  # (phrasings for both splits, those held out for the test)


def _words(both: str, held_out: str) -> Pool:
    return both.split(), held_out.split()


FIRST: Pool = _words(
    "Mara Tom Priya Lena Carlos Aisha Jonas Emily Kenji Olga Daniel Fatima Lucas Hanna Ravi Sofia Peter "
    "Mei Omar Julia Victor Nadia Samuel Ines Erik Grace Ahmed Clara Paulo Yuki Martin Rosa Igor Amelia "
    "Noah Leila Hugo Vera Felix Anita Bruno Zoë George Tara Anton Kim Diana Oscar Irene Joel Maya "
    "Stefan Chloe Marek Alice Ken Sarah Luis Petra Adam Arthur Beatrice Caleb Dalia Edgar Farah Gloria "
    "Henry Ilse Jamal Karin Lorenzo Margot Nils Ottilie Pavel Quentin Renata Sven Tamara Ulrich Viola "
    "Wendy Xavier Yusuf Zara Alan Brigitte Cedric Deepa Elias Frida Gilbert Hilda Isaac Jana Khalid "
    "Lidia Milo Nora Orlando Pia Raul Selma Thomas Una Vikram Wilma Yvonne Zelda Abel Bella Cyrus Dora "
    "Emil Fiona Gareth Harriet Imran Joanna Kurt Lara Manuel Naomi Otto Philip Roland Sanjay Tilda Umar "
    "Vincent Willem Adele Boris Celia Derek Esther Franz Gemma Hector Ivy Jasper Kira Lionel Mona Neil "
    "Odette Patrick Rhea Silas Tessa Viktor",
    "Theo Ingrid Rashid Bianca Walter Noor Gustav Helen Mateo Sunita Conrad Elsa Dmitri Paula Leo Marta "
    "Ivan Rita Simon Yara Edwin Nina Jorge Ruth Kofi",
)
LAST: Pool = _words(
    "Lindqvist Becker Sharma Novak Mendez Khan Weber Carter Tanaka Petrov Hughes Rossi Silva Larsen "
    "Patel Costa Meyer Chen Farouk Blake Dubois Haddad Okafor Moreau Berg Walsh Nasser Vogel Lima Sato "
    "Keller Ortiz Ivanov Stone Bennett Rahimi Fischer Kowalski Hart Gupta Marino Jensen Clarke Brandt "
    "Doyle Nowak Reyes Schmidt Lopez Evans Murphy Wagner Ali Horvat Turner Park Morgan Peters Nguyen "
    "Lund Adler Arslan Bauer Bianchi Blom Bose Brennan Campos Cohen Conti Cruz Dahl Daly Delgado Dixon "
    "Eriksen Farrell Ferrari Flores Fontaine Franco Gallo Garcia Goldberg Graves Hahn Harris Hassan "
    "Herrera Holm Hussain Ito Jacobs Jung Kaplan Kaya Kimura Koch Kruger Lehmann Leroy Lowe Madsen "
    "Malik Mason Mazur Mehta Miller Moreno Mueller Nair Nielsen Novotny Ortega Osman Palmer Pereira "
    "Pham Pinto Polak Price Rao Reid Ricci Romero Roth Ruiz Ryan Saito Sanders Schulz Serrano Shaw "
    "Simpson Singh Sokolov Steiner Svensson Tan Torres Tran Vance Vidal Ward Weiss Wilson Wood Yilmaz "
    "Young Zhang Zimmer Zapata Yoon Wolff Webb Vaughn",
    "Falk Abbott Castillo Menon Richter Sorensen Mbeki Laurent Hayes Popov Duarte Iqbal Brock Santos "
    "Fowler Yamada Greco Olsen Barnes Hoffmann Quinn Vargas Lam Dietrich Shah",
)
# fmt: off
PRODUCT: Pool = (
    ["desk lamp", "espresso machine", "office chair", "laptop bag", "wireless mouse", "rain jacket", "coffee grinder",
     "yoga mat", "phone case", "air fryer", "standing desk", "bike helmet", "water bottle", "garden hose", "toaster",
     "blender", "kettle", "backpack", "headphones", "keyboard", "monitor", "printer", "tent", "suitcase", "bookshelf",
     "sofa cover", "running shoes", "winter coat", "pressure cooker", "ceiling fan", "Aero 3 speaker",
     "Lumo 200 lamp", "Pico camera", "K40 drill", "Terra rug", "smart watch", "tablet stand", "power bank",
     "vacuum cleaner", "dining table", "cutting board", "mirror", "webcam", "heater", "Volta X2 charger",
     "wool blanket", "curtain set", "soup pot", "ring light", "hair dryer", "sleeping bag", "baby monitor", "guitar",
     "wine glasses", "shower head", "lawn mower", "plant pot", "leather belt", "door lock", "Orbit 7 tracker",
     "game console", "e-reader", "frying pan", "umbrella"],
    ["rice cooker", "picture frame", "microphone", "hiking boots", "floor lamp", "lunch box", "Nova 5 router",
     "bread maker", "travel pillow", "stroller", "wall clock", "electric razor", "T80 scanner", "bath towel"],
)

# What went wrong. Phrasings with {product} are used when the ticket names one.
ISSUE: dict[str, Pool] = {
    "damaged": (
        ["The {product} arrived broken.", "My {product} came with a big crack in it.",
         "I opened the box and the {product} was in pieces.", "My new {product} is damaged on one side.",
         "The {product} is dented and scratched.", "Got the {product} but it is smashed.",
         "One part of the {product} is snapped off.", "The {product} does not switch on, it is broken.",
         "The package was crushed and the {product} is bent.", "I received a {product} with a torn seam.",
         "The {product} was faulty out of the box.", "Everything in the parcel was broken.",
         "It arrived cracked and bent.", "The item is damaged, see photo.", "What you sent me is scratched all over.",
         "The box was crushed and the contents are smashed.", "The {product} is cracked.",
         "There is a dent in my {product}.", "The {product} fell apart after one day.",
         "The {product} stopped working, it is defective.", "I found the {product} shattered in its box.",
         "One leg of the {product} is broken.", "A corner is broken off.", "It is defective and does not work."],
        ["The {product} has a deep crack and is falling apart.", "There is a hole in the {product} and it is bent.",
         "The {product} is defective, it broke on first use.", "Sadly the {product} reached me shattered.",
         "It came out of the box dented and broken.", "The item fell apart, clearly damaged in transit."],
    ),
    "delivery": (
        ["The {product} has not arrived yet.", "I am still waiting for my {product}.", "Where is my {product}?",
         "My {product} should have been here last week.", "Tracking for the {product} has not moved for days.",
         "The {product} is late.", "No sign of the {product} so far.", "The courier never delivered the {product}.",
         "It says delivered but I never got the {product}.", "The {product} seems lost in the mail.",
         "When will the {product} be delivered?", "My parcel has not come.", "Where is my package?",
         "Delivery is very late.", "The tracking page has not changed in a week.",
         "It says delivered, but nothing was at the door.", "The {product} did not show up.",
         "Has my {product} been shipped?", "The {product} was due on {date} and is overdue.",
         "I keep waiting for the {product}.", "My {product} is nowhere to be found, nothing arrived.",
         "The shipment has not arrived.", "Nothing has been delivered so far.",
         "My order was due on {date} and is still not here."],
        ["The {product} still has not shown up.", "My {product} is overdue, has it been shipped?",
         "Has the {product} been sent? Nothing arrived.", "I keep waiting, the {product} was never delivered.",
         "Still no parcel here.", "The shipment is late, where is it now?"],
    ),
    "wrong_item": (
        ["I ordered a {product} and got something else.", "You sent the wrong {product}.",
         "The {product} is the wrong color.", "The {product} you sent is the wrong size.",
         "This is not the {product} I ordered.", "Instead of the {product} there was a different item in the box.",
         "I got a different model of the {product}.",
         "The {product} is not the one from the picture, you mixed it up.",
         "I asked for the black {product} and got the white one.", "Someone packed the wrong {product}.",
         "I think my {product} went to another customer, I got theirs.", "You sent me the wrong thing.",
         "This is not what I ordered.", "The parcel holds somebody else's order.", "I received a different item.",
         "Wrong size and wrong color.", "My {product} was mixed up with some other item.",
         "Somebody swapped the {product} for another thing.", "A different {product} than ordered was in the box.",
         "I found something else in the box in place of the {product}.",
         "You shipped another item, not the {product}.", "Wrong {product} delivered.",
         "My order was swapped with another one.", "What is in the box is not what I bought.",
         "There is a different item in the box.", "You packed the wrong one."],
        ["The box had something else in it, not the {product}.",
         "My {product} turned out to be a whole different thing.",
         "You shipped a different {product} than the one I ordered.", "Wrong item: I ordered the {product}.",
         "The item in the box is not the one I ordered.", "You mixed up my order with a different one."],
    ),
    "billing": (
        ["I was charged twice for the {product}.", "The invoice for the {product} is wrong.",
         "You billed me too much for the {product}.",
         "My card was charged {money} for the {product}, that is too much.",
         "The discount is missing from my {product} bill.", "Please send a corrected invoice for the {product}.",
         "The price of the {product} on the bill is not what I paid.",
         "I paid for the {product} but you say the payment is missing.", "I was charged twice.",
         "There is an extra fee of {money} on my bill.", "My invoice shows the wrong amount.",
         "The payment went through two times.", "You charged the wrong card.",
         "The voucher was not taken off the total.", "I need an invoice with our tax number.",
         "I see a charge of {money} I do not know.", "Your bill lists the {product} twice.",
         "The amount for the {product} on my card is too high.", "There is a wrong charge for the {product}.",
         "Why did I pay {money} for the {product}?", "The total on my bill is wrong.",
         "There is a double charge on my card.", "I was billed a wrong amount.", "Why was I charged {money}?"],
        ["There are two charges for the {product} on my card.", "The bill for the {product} has the wrong total.",
         "I paid too much for the {product}, check the invoice.", "My card was billed a second time.",
         "The amount on the invoice is not right.", "Why is there a charge of {money} on my card?"],
    ),
    "return": (
        ["I want to return the {product}.", "How do I send back the {product}?",
         "I would like my money back for the {product}.", "I changed my mind about the {product}.",
         "Please send a return label for the {product}.", "The {product} is not for me, can I return it?",
         "I no longer need the {product} and want a refund.", "Can I give the {product} back?",
         "I sent the {product} back, when do I get the refund?",
         "I do not like the {product} and want to send it back.", "Please refund the {product}, I returned it.",
         "I want to return this.", "How can I send it back?", "I would like a refund.",
         "Please send me a return label.", "I changed my mind and want my money back.",
         "I am returning the {product}, what about my refund?", "Where can I drop off the {product} for a return?",
         "I decided not to keep the {product}.", "The {product} should go back to you for a refund.",
         "I do not want the {product}.", "I do not want it any more, please refund me.",
         "Where do I send it for a return?", "I decided to give it back."],
        ["The {product} goes back, please tell me how to return it.", "Can I get a refund for the {product}?",
         "I have decided to send the {product} back to you.", "I do not want the {product} any more, refund please.",
         "Where do I get the label to return it?", "I am sending it back and expect a refund."],
    ),
    "account": (
        ["I cannot log in.", "My password does not work.", "The reset email never comes.", "My account is locked.",
         "Please change the email of my account.", "I forgot my password.", "The login page shows an error.",
         "Please delete my account.", "I cannot update the address in my profile.",
         "Your app logs me out all the time.", "The login code is never accepted.",
         "I have two accounts, please merge them.", "I bought a {product} but cannot log in to see it.",
         "My account does not show the {product}.", "I cannot sign in to register my {product}.",
         "The password for my {product} account is not accepted.", "I am locked out of my account.",
         "Signing in is not possible.", "How do I change my password?", "My profile has the wrong email.",
         "The site says my login is invalid.", "I cannot close my account.", "My login for the {product} app fails.",
         "I want to register the {product} in my account, but I cannot log in."],
        ["The site does not accept my login any more.", "I am locked out of my profile.",
         "How do I reset my password?", "Signing in fails with an error.", "I want to close my account.",
         "My login fails, so I cannot register the {product}."],
    ),
}
URGENCY: dict[str, Pool] = {
    "high": (
        ["This is urgent.", "Please fix this today.", "I need it by tomorrow.", "As soon as possible please!",
         "Please hurry.", "I need an answer right now.", "This cannot wait.",
         "It is a gift for Saturday, so be quick.", "ASAP!", "I leave on Friday and need this solved before.",
         "Very urgent!!", "Please reply immediately.", "I need help now!", "Urgent, please answer today.",
         "Hurry, I need this today.", "Please act fast.", "It must be solved before Monday.",
         "Quick answer please, it is urgent.", "We need this before the weekend.", "I cannot wait any longer.",
         "Reply at once please!", "Today please, my event is tomorrow."],
        ["We need this today, it is urgent.", "Please be quick, I need it tomorrow.",
         "Get back to me immediately, it cannot wait.", "I must have this solved before the weekend.",
         "Quick help needed now!"],
    ),
    "low": (
        ["No rush.", "There is no hurry.", "Whenever you have time.", "This is not urgent.", "Take your time.",
         "It can wait.", "Next week is fine too.", "Just letting you know, no stress.", "Answer when it suits you.",
         "Not a big deal, any time is fine.", "No need to hurry.", "Not urgent at all.", "I am in no rush with this.",
         "Reply whenever you like.", "This can wait a few weeks.", "Any day is fine.", "Only when you have a moment.",
         "Low priority for me.", "Next month is fine.", "I do not mind waiting.", "You can take your time with it."],
        ["No hurry at all.", "It is not urgent, take your time.", "Any time next week is fine.",
         "This can wait, no rush."],
    ),
    "normal": (
        ["Please let me know what to do.", "Can you help?", "Looking forward to your reply.", "What should I do?",
         "Please advise.", "I hope you can fix it.", "Please check.", "How do we go on from here?", "Please help.",
         "Let me know.", "Can you sort this out?", "What do you suggest?", *[""] * 12],
        ["Could you have a look?", "What happens next?", "Please look into it.", "", "", ""],
    ),
}
GREETING: Pool = (
    ["Hi,", "Hello,", "Hi there,", "Dear support,", "Good morning,", "Hey", "Hello team,", "To whom it may concern,",
     "Dear Sir or Madam,", "Hi {person},", "Hello {person},", "", "", "", "", "", ""],
    ["Good evening,", "Dear team,", "Greetings,", "Hello support team,"],
)
ORDER: Pool = (
    ["Order {order}.", "My order number is {order}.", "Order no. {order}", "It is order {order}.", "order: {order}",
     "Order #{order}", "This is about order {order}.", "The order id is {order}.", "(order {order})", "Ref {order}.",
     "I placed order {order} on {date}.", "Regarding order {order}."],
    ["The number of my order is {order}.", "It concerns order {order}.", "See order {order}.",
     "Order number: {order}"],
)
OPENER: Pool = (
    ["This is {name}.", "My name is {name}.", "{name} here.", "I am {name}.", "{name} writing."],
    ["You are talking to {name}.", "My name: {name}."],
)
SIGNATURE: Pool = (
    ["Thanks, {name}", "Regards, {name}", "Best, {name}", "- {name}", "{name}", "Thank you! {name}",
     "Kind regards\n{name}", "Thanks\n{name}", "Cheers {name}", "Yours, {name}", "Best regards,\n{name}",
     "Sincerely, {name}"],
    ["Many thanks, {name}", "Greetings, {name}", "With thanks\n{name}", "All the best, {name}"],
)
UNSIGNED: Pool = (["Thanks", "Thank you.", "Regards", "", "", ""], ["Many thanks", "Greetings"])
DISTRACTOR: Pool = (
    ["I paid {money} for it.", "Call me at {digits}.", "Your agent {person} told me to write.",
     "I wrote on {date} already.", "My neighbor {person} saw it too.", "The {other} is fine.", "Invoice {digits}.",
     "Your colleague {person} could not help.", "My phone is {digits}.", "The {other} in the same box is good.",
     "I bought it on {date}.", "Ticket {digits} got no answer.", "It cost {money}.",
     "{person} from the shop sent me here."],
    ["You can reach me at {digits}.", "I spoke to {person} on {date}.", "I have no problem with the {other}.",
     "I have been a customer since {date}."],
)
# fmt: on
MONTHS = ["January", "March", "April", "May", "June", "August", "October", "December"]


@dataclass
class Draft:
    """A ticket on the way: `values` fill the holes; `lines` are the sentences; `fresh` counts the held-out ones."""

    values: dict[str, str]
    lines: list[str] = field(default_factory=list)
    fresh: int = 0


class Writer:
    """Writes the tickets of one split. `taken` holds the order numbers and tickets given out so far, in any split."""

    def __init__(self, split: str, rng: random.Random, taken: set[str]) -> None:
        self.rng, self.taken, self.test = rng, taken, split == "test"

    def row(self) -> Row:
        """One row of the data file; a ticket that exists already, or a test one with nothing new, is written anew."""
        while True:
            draft, answer = self._draft()
            ticket, answer = self._finish(draft, answer)
            if ticket not in self.taken and (draft.fresh or not self.test):
                self.taken.add(ticket)
                target = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
                contents = {"system": SYSTEM, "user": ticket, "assistant": target}
                return {"messages": [{"role": role, "content": text} for role, text in contents.items()]}

    def _draft(self) -> tuple[Draft, dict[str, str | None]]:
        rng = self.rng
        issue = rng.choice(list(ISSUE))
        urgency = rng.choices(["high", "low", "normal"], [32, 30, 38])[0]
        name = self._name() if rng.random() < 0.8 else None
        order = self._order() if rng.random() < 0.75 else None
        named = rng.random() < (0.25 if issue == "account" else 0.8)
        product = self._pick(PRODUCT, self.test and rng.random() < 0.4) if named else None
        draft = Draft(self._distractors(product))
        draft.values |= {key: value for key, value in (("name", name), ("order", order), ("product", product)) if value}
        self._write(draft, issue, urgency)
        return draft, {"customer": name, "order": order, "product": product, "issue": issue, "urgency": urgency}

    def _write(self, draft: Draft, issue: str, urgency: str) -> None:
        """Fills `draft.lines`: as a form now and then, else as prose with its sentences in one of several orders."""
        rng, has = self.rng, draft.values
        if rng.random() < 0.12:
            heads = [("name", "Name"), ("order", "Order"), ("product", "Product")]
            rng.shuffle(heads)
            draft.lines = [f"{title}: {{{key}}}\n" for key, title in heads if key in has]
            issues = _with(ISSUE[issue], "{product}", False)
            draft.lines += [self._say(draft, issues), self._say(draft, URGENCY[urgency])]
            return
        opened = "name" in has and rng.random() < 0.25
        middle = [self._say(draft, _with(ISSUE[issue], "{product}", "product" in has))]
        if "order" in has:
            middle.insert(rng.randrange(2), self._say(draft, ORDER))
        if rng.random() < 0.3:
            middle.append(self._say(draft, DISTRACTOR if "product" in has else _with(DISTRACTOR, "{other}", False)))
        middle.insert(len(middle) if rng.random() < 0.75 else 0, self._say(draft, URGENCY[urgency]))
        start = [self._say(draft, GREETING)] + ([self._say(draft, OPENER)] if opened else [])
        end = self._say(draft, SIGNATURE if "name" in has and not opened else UNSIGNED)
        draft.lines = [*start, *middle, *(["\n"] if rng.random() < 0.3 else []), end]

    def _say(self, draft: Draft, pool: Pool) -> str:
        """A phrasing of the pool; in the test half of them are held-out ones."""
        held_out = self.test and self.rng.random() < 0.5
        text = self._pick(pool, held_out)
        draft.fresh += held_out and text != ""
        return text

    def _finish(self, draft: Draft, answer: dict[str, str | None]) -> tuple[str, dict[str, str | None]]:
        """Typos, a shouted sentence, missing full stops, then values; all lower case comes last, values included."""
        rng = self.rng
        lines = [line for line in draft.lines if line]
        if rng.random() < 0.4:
            lines = [_mistype(line, rng) for line in lines]
        if rng.random() < 0.06:
            at = rng.randrange(len(lines))
            lines[at] = re.sub(r"(?<!\{)\b[A-Za-z]+\b(?!\})", lambda word: word[0].upper(), lines[at])
        if rng.random() < 0.08:
            lines = [line.rstrip(".!,") for line in lines]
        ticket = re.sub(r" *\n *", "\n", " ".join(lines).format(**draft.values)).strip()
        if rng.random() < 0.12:
            ticket = ticket.lower()
            answer = {key: value.lower() if value else value for key, value in answer.items()}
        return ticket, answer

    def _pick(self, pool: Pool, held_out: bool) -> str:
        return self.rng.choice(pool[held_out])

    def _name(self) -> str:
        first, last = self._pick(FIRST, self.test), self._pick(LAST, self.test)
        return self.rng.choices([f"{first} {last}", first, f"{first[0]}. {last}"], [75, 15, 10])[0]

    def _order(self) -> str:
        """An order number of one of the shop's three forms, never given out before."""
        rng = self.rng
        while True:
            digits = str(rng.randrange(10_000, 100_000))
            letters = "".join(rng.choices("ABCDEFHKLMNPRSTX", k=2))
            order = rng.choice([digits, f"{letters}-{digits}", f"{letters[0]}{digits}"])
            if digits not in self.taken:
                self.taken.add(digits)
                return order

    def _distractors(self, product: str | None) -> dict[str, str]:
        rng = self.rng
        return {
            "other": rng.choice([other for other in PRODUCT[0] if other != product]),
            "person": rng.choice(FIRST[0]),
            "money": f"{rng.choice('$€')}{rng.randrange(9, 300)}",
            "digits": str(rng.randrange(1_000, 10_000)),
            "date": f"{rng.choice(MONTHS)} {rng.randrange(1, 29)}",
        }


def _with(pool: Pool, hole: str, wanted: bool) -> Pool:
    """The phrasings of a pool that have a hole, or those that lack it."""
    both, held_out = ([text for text in texts if (hole in text) == wanted] for texts in pool)
    return both, held_out


def _mistype(line: str, rng: random.Random) -> str:
    """Swaps, drops or doubles a letter in about every eighth longer word; holes stay whole."""

    def slip(match: re.Match[str]) -> str:
        word = match[0]
        if rng.random() > 0.12:
            return word
        at = rng.randrange(1, len(word) - 1)
        first, second = word[at], word[at + 1]
        return word[:at] + rng.choice([second + first, second, first * 2 + second]) + word[at + 2 :]

    return re.sub(r"(?<![{\w])[A-Za-z]{4,}(?![}\w])", slip, line)


def rows() -> dict[str, list[Row]]:
    """The rows of both files, by split: the same ones on every call."""
    rng, taken, made = random.Random(SEED), set[str](), {}
    for split, count in ROWS.items():
        writer = Writer(split, rng, taken)
        made[split] = [writer.row() for _ in range(count)]
    return made


def main() -> None:
    """Writes both files."""
    folder = Path(__file__).parent
    for split, made in rows().items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)
        (folder / f"{split}.jsonl").write_bytes(text.encode())
        print(f"{folder / split}.jsonl: {len(made)} rows")


if __name__ == "__main__":
    main()
