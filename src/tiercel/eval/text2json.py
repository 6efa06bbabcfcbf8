"""The score of a JSON list of objects against the right one, between 0 and 1.

    objects are matched by `name`; names that occur twice in the right list are left out
    a matched object starts at 1; a missing key costs 1/2, a wrong value 1/4
    the score is their sum over the number of names in either list

A text must hold exactly one `[ … ]` that is a JSON list, else it scores 0. The rule is that of the Text2JSON
task (arXiv 2604.08426); the texts are our own.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

Object = Mapping[str, object]
_MISSING, _WRONG = 0.5, 0.25


def score_text(text: str, right: Sequence[Object]) -> float:
    """Score what a model wrote."""
    begin, end = text.find("["), text.rfind("]")
    if begin < 0 or end < begin:
        return 0.0
    try:
        found = json.loads(text[begin : end + 1])
    except (ValueError, RecursionError):
        return 0.0
    if not isinstance(found, list):
        return 0.0
    return score_objects([one for one in found if isinstance(one, dict)], right)


def score_objects(found: Sequence[Object], right: Sequence[Object]) -> float:
    """Score objects. Of several found with one name the first counts."""
    often = Counter(str(one.get("name")) for one in right)
    wanted = {str(one["name"]): one for one in right if "name" in one and often[str(one["name"])] == 1}
    given: dict[str, Object] = {}
    for one in found:
        if "name" in one and (name := str(one["name"])) not in given and often[name] <= 1:
            given[name] = one
    names = wanted.keys() | given.keys()
    if not names:
        return 0.0
    return sum(_object(given[name], wanted[name]) for name in wanted.keys() & given.keys()) / len(names)


def _object(found: Object, right: Object) -> float:
    score = 1.0
    for key, value in right.items():
        if key not in found:
            score -= _MISSING
        elif found[key] != value:
            score -= _WRONG
    return max(score, 0.0)
