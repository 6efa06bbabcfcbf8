"""The built-in tasks: seeded facts between real text, and questions about them.

Those called dense ask for many facts of one context, which is what lossy methods lose first; the needle task
asks for one and is a smoke test: nearly everything passes it. Contexts have 1,000 to 2,000 tokens.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

from tiercel.errors import ConfigError
from tiercel.eval.people import CITIES, full_names, people, unlike
from tiercel.eval.samples import Filler, Sample, Task, Turn

_PIECE_TOKENS = 300


def kv_list(seed: int, filler: Filler) -> Sample:
    """A hundred lines `name: code`, and eight of them asked again in another order."""
    chance = random.Random(f"kv-list {seed}")
    codes = {name: f"{chance.randrange(10_000, 100_000)}" for name in full_names(chance, 100)}
    lines = "\n".join(f"{name}: {code}" for name, code in codes.items())
    asked = chance.sample(sorted(codes), 8)
    return Sample(
        f"Access codes\n\n{lines}\n\nThe same codes again, for some of them:\n",
        tuple(Turn(f"\n{name}:", f" {codes[name]}") for name in asked),
    )


def json_records(seed: int, filler: Filler) -> Sample:
    """24 one-line JSON records scattered in real text; job and city of twelve of them are asked."""
    chance = random.Random(f"json-records {seed}")
    records = unlike(chance, 24)
    rows = [json.dumps({"name": one.name, "job": one.job, "city": one.city}) for one in records]
    parts = []
    for at in range(0, 24, 6):
        parts += [*rows[at : at + 6], "", filler(seed * 4 + at // 6, _PIECE_TOKENS // 2), ""]
    turns = []
    for one in chance.sample(records, 12):
        turns += [
            Turn(f'\n{{"name": "{one.name}", "job": "', one.job),
            Turn('", "city": "', one.city + '"}'),
        ]
    return Sample("\n".join(parts) + "\nSome of the records again:\n", tuple(turns))


def needle(seed: int, filler: Filler) -> Sample:
    """One number hidden in 1,900 tokens of real text."""
    return _needles("needle", seed, filler, count=1, tokens=1800)


def multi_needle(seed: int, filler: Filler) -> Sample:
    """Eight numbers hidden in real text, all asked."""
    return _needles("multi-needle", seed, filler, count=8, tokens=1500)


def _needles(task: str, seed: int, filler: Filler, *, count: int, tokens: int) -> Sample:
    chance = random.Random(f"{task} {seed}")
    secrets = {city: f"{chance.randrange(10_000, 100_000)}" for city in chance.sample(CITIES, count)}
    lines = filler(seed, tokens).split("\n")
    # Never at the very end, where a window would have it.
    places = sorted(chance.sample(range(len(lines) * 3 // 4), min(count, len(lines) * 3 // 4)), reverse=True)
    for place, (city, number) in zip(places, secrets.items(), strict=False):
        lines.insert(place, f"The secret number of {city} is {number}.")
    asked = chance.sample(sorted(secrets), count)
    return Sample(
        "\n".join(lines) + "\n",
        tuple(Turn(f"\nThe secret number of {city} is", f" {secrets[city]}") for city in asked),
    )


def text2json(seed: int, filler: Filler) -> Sample:
    """Prose about twelve people between real text, to be written out as a JSON list."""
    chance = random.Random(f"text2json {seed}")
    told = people(chance, 12)
    sentences = [
        chance.choice(("{name} is a {job} who lives in {city}.", "In {city} lives {name}, a {job}.",
                       "The {job} {name} has a house in {city}."))
        .format(name=one.name, job=one.job, city=one.city)
        for one in told
    ]  # fmt: skip
    parts = []
    for at in range(0, 12, 3):
        parts += [*sentences[at : at + 3], "", filler(seed * 4 + at // 3, _PIECE_TOKENS), ""]
    turns, opening = [], '\n[{"name": "'
    for one in told:
        turns += [
            Turn(opening, one.name, "name"),
            Turn('", "job": "', one.job, "job"),
            Turn('", "city": "', one.city, "city"),
        ]
        opening = '"}, {"name": "'
    heading = "\nEverybody named above as a JSON list, with job and city, in the order of the text:\n"
    return Sample("\n".join(parts) + heading, tuple(turns))


def text_nll(seed: int, filler: Filler) -> Sample:
    """Real text, and how likely its next 250 tokens are."""
    text = filler(seed, 1750)
    cut = text.rfind(" ", 0, int(len(text) * 6 / 7))
    return Sample(text[:cut], (Turn("", text[cut:]),), scored=False)


TASKS = {
    one.name: one
    for one in (
        Task("json-records", "records scattered in text, 24 facts asked", True, json_records),
        Task("kv-list", "a list of 100 codes, 8 asked", True, kv_list),
        Task("text2json", "prose about 12 people, as a JSON list", True, text2json),
        Task("multi-needle", "8 numbers hidden in text, all asked", True, multi_needle),
        Task("needle", "one number hidden in text", False, needle),
        Task("text-nll", "likelihood of how a text goes on", False, text_nll),
    )
}


def tasks_named(names: Iterable[str]) -> list[Task]:
    """Each name's task, in order. Raises ConfigError for an unknown name."""
    found = []
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"--tasks: '{name}' is unknown; accepted: {', '.join(TASKS)}")
        found.append(TASKS[name])
    return found
