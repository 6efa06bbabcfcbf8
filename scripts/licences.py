"""The licence of every package that an installation of Tiercel brings along, from the packages' own metadata.

    python -m scripts.licences                       all extras but those for development
    python -m scripts.licences dashboard objects     these extras

Prints one line a package. Ends with 1 if a licence is neither on the list of those that may be passed on with
Apache-2.0 code nor settled by hand below. Looks at what is installed here; asks no server.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

NOT_SHIPPED = {"dev", "testing", "vllm"}
FINE = {
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "HPND", "ISC",
    "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib",
    # File by file; used as it is.
    "MPL-2.0",
}  # fmt: skip
# What packages write that have no SPDX expression, and classifiers.
SAID = {
    "apache": "Apache-2.0", "apache 2.0": "Apache-2.0", "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0", "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0", "apache-2.0 license": "Apache-2.0", "apache2": "Apache-2.0",
    "bsd": "BSD-3-Clause", "bsd license": "BSD-3-Clause", "3-clause bsd license": "BSD-3-Clause",
    "new bsd": "BSD-3-Clause", "isc license": "ISC", "isc license (iscl)": "ISC",
    "mit license": "MIT", "the mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0", "python software foundation license": "PSF-2.0",
    "psf": "PSF-2.0", "the unlicense (unlicense)": "Unlicense",
    "historical permission notice and disclaimer (hpnd)": "HPND",
}  # fmt: skip
# Whose metadata says nothing; from the licence file in the package.
BY_HAND = {"setuptools": "MIT"}


@dataclass(frozen=True, slots=True)
class Found:
    """A package and what it says of its licence; `said` is empty where it is not installed."""

    name: str
    version: str
    said: str
    fine: bool


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def said_by(metadata: Distribution) -> str:
    """SPDX expression, else the licence field if it is short, else the classifiers."""
    told = metadata.metadata
    if expression := told.get("License-Expression"):
        return str(expression)
    field = str(told.get("License") or "").strip()
    if field and "\n" not in field and len(field) < 60:
        return field
    classifiers = [str(one) for one in told.get_all("Classifier") or () if str(one).startswith("License ::")]
    return " AND ".join(one.rpartition(" :: ")[2] for one in classifiers)


def is_fine(said: str) -> bool:
    """Whether everything that must hold at once is fine, of alternatives one. An unknown word is not."""
    if said in FINE or SAID.get(said.lower()) in FINE:
        return True
    for joiner, judge in ((" AND ", all), (" and ", all), (" OR ", any), ("/", any)):
        parts = [one.strip(" ()") for one in said.split(joiner)]
        if len(parts) > 1:
            return judge(is_fine(one) for one in parts)
    bare = said.strip(" ()").partition(" WITH ")[0]
    return bare != said and is_fine(bare)


def closure(extras: Sequence[str]) -> Iterator[Found]:
    """Tiercel's dependencies with these extras, and theirs."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    told: set[str] = {"tiercel"}
    waiting: list[tuple[str, tuple[str, ...]]] = [("tiercel", tuple(extras))]
    while waiting:
        name, wanted = waiting.pop()
        if (plain(name), wanted) in seen:
            continue
        seen.add((plain(name), wanted))
        try:
            package = distribution(name)
        except PackageNotFoundError:
            if plain(name) not in told:
                told.add(plain(name))
                yield Found(plain(name), "", "", False)
            continue
        if plain(name) not in told:
            told.add(plain(name))
            said = said_by(package) or BY_HAND.get(plain(name), "says nothing")
            yield Found(plain(name), package.version, said, is_fine(said))
        for one in map(Requirement, package.requires or ()):
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in wanted or ("",)):
                waiting.append((one.name, tuple(sorted(one.extras))))


def main(arguments: Sequence[str]) -> int:
    offered = set(distribution("tiercel").metadata.get_all("Provides-Extra") or ())
    extras = list(arguments) or sorted(offered - NOT_SHIPPED)
    if unknown := set(extras) - offered:
        print(f"unknown extra {sorted(unknown)[0]}; accepted: {', '.join(sorted(offered))}", file=sys.stderr)
        return 2
    found = sorted(closure(extras), key=lambda one: one.name)
    for one in found:
        mark = "  " if one.fine else "??" if one.said else "--"
        print(f"{mark} {one.name} {one.version}  {one.said or 'not installed here: not looked at'}")
    wrong = [one.name for one in found if one.said and not one.fine]
    print(f"{len(found)} packages" + (f"; to be looked at: {', '.join(wrong)}" if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
