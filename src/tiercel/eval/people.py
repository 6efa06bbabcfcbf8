"""Made-up people and what is to be known about them, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

FIRST = (
    "Ada Bruno Clara Dmitri Elena Farid Greta Hugo Irene Jonas Katya Liam Mira Nils Olga Pavel Quentin Rosa "
    "Stefan Tara Ulrich Vera Walter Xenia Yusuf Zoe Anton Bella Carlos Diana Emil Fiona"
).split()
LAST = (
    "Abbott Becker Castro Dalton Eriksen Fischer Garcia Hansen Ivanov Jensen Keller Larsen Moreau Novak "
    "Olsen Parker Quinn Rossi Schmidt Turner Ueda Varga Weber Young Zimmer Archer Bishop "
    "Cooper Draper Fletcher"
).split()
JOBS = (
    "baker carpenter dentist electrician farmer gardener historian jeweller lawyer musician nurse optician "
    "painter plumber sailor tailor teacher translator waiter writer butcher pilot chemist judge"
).split()
CITIES = (
    "Athens Berlin Cairo Dublin Edinburgh Florence Geneva Helsinki Istanbul Jakarta Kyoto Lisbon Madrid "
    "Nairobi Oslo Prague Quito Rome Seville Tokyo Utrecht Vienna Warsaw Zurich"
).split()


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody with a job and a city."""

    name: str
    job: str
    city: str


def full_names(random_: random.Random, count: int) -> list[str]:
    """`count` different names."""
    every = [f"{first} {last}" for first in FIRST for last in LAST]
    return random_.sample(every, count)


def people(random_: random.Random, count: int) -> list[Person]:
    """`count` people of different names."""
    return [Person(name, random_.choice(JOBS), random_.choice(CITIES)) for name in full_names(random_, count)]


def unlike(random_: random.Random, count: int) -> list[Person]:
    """`count` people, 24 at most, no two of whom share a first name, a job or a city."""
    parts = (random_.sample(words, count) for words in (FIRST, LAST, JOBS, CITIES))
    return [Person(f"{first} {last}", job, city) for first, last, job, city in zip(*parts, strict=True)]
