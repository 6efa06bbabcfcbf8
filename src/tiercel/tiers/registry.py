"""From a configured tier to an open one: finds what opens its kind, and keeps one that does not answer yet.

An opener is `open_X(url, *, name, deadline_s, slot_bytes) -> Tier`, a function or a class. It raises
`TierError` for what its operator has to mend (a bad parameter, refused credentials) and `TierUnreachable` or
`OSError` for a place that does not answer now. Other packages add kinds as entry points `tiercel.tiers`.
Nothing of a kind is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import logging
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any

from tiercel.blocks import BlockKey
from tiercel.blocks.chain import KEY_BYTES
from tiercel.blocks.record import HEADER_BYTES
from tiercel.config import TierConfig, human_bytes
from tiercel.config.schema import FILES, MEMORY, MIB
from tiercel.config.tiers import TIER_ENTRY_POINTS, tier_kinds
from tiercel.errors import MemoryLimitError, TierError, TierUnreachable
from tiercel.tiers.base import Fate, Tier
from tiercel.tiers.files import FilesTier
from tiercel.tiers.reopening import Reopening
from tiercel.tiers.url import TierUrl

if TYPE_CHECKING:
    from tiercel.tiers.keyring import KeyRing

log = logging.getLogger("tiercel")

# Any: the entry point of another package may be anything until it was checked.
Opener = Callable[..., Any]

METHODS = tuple(name for name in vars(Tier) if not name.startswith("_") and name != "name")
# No record has it: a chain's keys are hashes behind the tag of a scope.
_NOBODYS_KEY = BlockKey(bytes(KEY_BYTES))


@dataclass(frozen=True, slots=True)
class _Kind:
    module: str
    opener: str
    extra: str | None = None


_KINDS = {
    "valkey": _Kind("tiercel.tiers.valkey", "open_valkey"),
    "objects": _Kind("tiercel.tiers.objects", "open_objects", "objects"),
    "mooncake": _Kind("tiercel.tiers.mooncake", "open_mooncake", "mooncake"),
}


def open_tier(config: TierConfig, name: str, slot_bytes: int, *, create: bool = True) -> Tier:
    """Open the tier that `config` describes; `slot_bytes` is the most that one record has.

    With `create` false a directory is only looked at: it is neither made nor tidied, and must be a cache.
    Blocks for the tier's deadline at most, as far as its opener keeps to it. One that does not answer is
    returned nevertheless, with a warning, and answers FAILED until it does; with `required` it raises.
    Raises `TierError`, one line; `MemoryLimitError` for a tier in memory that does not fit the host.
    """
    keys = None if config.encrypt is None else _keys(config.encrypt)
    if config.kind == FILES:
        tier = _open_files(config, name, create)
    elif config.kind == MEMORY:
        tier = _open_memory(config, name, slot_bytes)
    else:
        tier = _open_remote(config, name, slot_bytes)
    if keys is None:
        return tier
    from tiercel.tiers.encrypted import encrypted

    return encrypted(tier, keys)


def _keys(source: str) -> KeyRing:
    try:
        from tiercel.tiers.keyring import KeyRing
    except ImportError as fault:
        raise TierError(
            f"encrypt needs the package '{fault.name}', which is not installed; "
            "accepted: pip install 'tiercel[encryption]'"
        ) from None
    return KeyRing.load(source)


def tier_names(kinds: list[str]) -> list[str]:
    """A short name for each: `disk` for a directory, else its kind; the second of a kind is `disk2`."""
    names: list[str] = []
    for kind in kinds:
        base = "disk" if kind == FILES else kind
        names.append(base if base not in names else f"{base}{1 + kinds[: len(names)].count(kind)}")
    return names


def check_tier(found: object, what: str) -> None:
    """Raise `TierError` naming the first method of the `Tier` protocol that a class or an object lacks."""
    for method in METHODS:
        if not callable(getattr(found, method, None)):
            raise TierError(f"{what} lacks the method '{method}'; accepted: all of {', '.join(METHODS)}")
    if not isinstance(found, type) and not isinstance(getattr(found, "name", None), str):
        raise TierError(f"{what} lacks the attribute 'name'; accepted: a short text")


def _open_files(config: TierConfig, name: str, create: bool) -> Tier:
    if config.path is None:
        raise TierError(f"tier {name}: no directory is given; accepted: path = DIR")
    return FilesTier(config.path, name=name, create=create)


def _open_memory(config: TierConfig, name: str, slot_bytes: int) -> Tier:
    if config.size_bytes is None:
        raise TierError(f"tier {name}: no size is given; accepted: size = SIZE")
    if config.size_bytes < slot_bytes:
        raise MemoryLimitError(
            f"tier {name}: size = {human_bytes(config.size_bytes)} holds no block of "
            f"{human_bytes(slot_bytes)}; accepted is {-(-slot_bytes // MIB)}MiB or more"
        )
    from tiercel.tiers.memory import MemoryTier

    return MemoryTier(config.size_bytes, name=name)


def _open_remote(config: TierConfig, name: str, slot_bytes: int) -> Tier:
    if config.url is None:
        raise TierError(f"tier {name}: no place is given; accepted: url = URL")
    url = TierUrl.parse(config.url)
    opener = _opener(config.kind)
    opening = partial(
        _open, opener, config.kind, url, name=name, deadline_s=config.deadline_s, slot_bytes=slot_bytes
    )
    try:
        tier = opening()
    except TierUnreachable as fault:
        return _not_answering(Reopening(name, opening, str(fault)), str(fault), config.required)
    if reason := _silence(tier):
        return _not_answering(tier, f"{url}: {reason}", config.required)
    return tier


def _open(opener: Opener, kind: str, url: TierUrl, **options: object) -> Tier:
    """Call an opener and check what it gives. Raises `TierError`, as `TierUnreachable` where that is it."""
    try:
        tier = opener(url, **options)
    except OSError as fault:
        raise TierUnreachable(f"{url} does not answer: {fault.strerror or fault}") from fault
    except ImportError as fault:
        raise _missing(kind, fault) from None
    check_tier(tier, f"tier of kind '{kind}': {type(tier).__name__}")
    return tier  # type: ignore[no-any-return]  # (checked above; Any is what a foreign opener returns)


def _silence(tier: Tier) -> str:
    """Why a tier that was opened does not answer, or nothing if it does."""
    (outcome,) = tier.read([_NOBODYS_KEY], [memoryview(mmap.mmap(-1, HEADER_BYTES))])
    return (outcome.reason or "no reason given") if outcome.fate is Fate.FAILED else ""


def _not_answering(tier: Tier, reason: str, required: bool) -> Tier:
    if required:
        tier.close()
        raise TierUnreachable(f"tier {tier.name} cannot be used: {reason}")
    log.warning(
        "%s: cannot be used now, going on without it: %s",
        tier.name,
        reason,
        extra={"kind": f"{tier.name}.absent"},
    )
    return tier


def _opener(kind: str) -> Opener:
    """What opens a kind of tier, loaded and, if it is a class, checked."""
    ours = _KINDS.get(kind)
    if ours is not None:
        try:
            return getattr(importlib.import_module(ours.module), ours.opener)  # type: ignore[no-any-return]
        except ImportError as fault:
            raise _missing(kind, fault) from None
    found = list(entry_points(group=TIER_ENTRY_POINTS, name=kind))
    if not found:
        raise TierError(f"'{kind}' is no kind of tier; accepted: {', '.join(tier_kinds())}")
    return _foreign(kind, found[0])


def _foreign(kind: str, entry: EntryPoint) -> Opener:
    what = f"entry point {TIER_ENTRY_POINTS}: {entry.name} = {entry.value}"
    try:
        opener = entry.load()
    except (ImportError, AttributeError) as fault:
        raise TierError(f"{what} cannot be loaded: {fault}") from None
    if isinstance(opener, type):
        check_tier(opener, what)
    if not callable(opener):
        raise TierError(f"{what} is not callable; accepted: a class or a function that opens a tier")
    return opener  # type: ignore[no-any-return]


def _missing(kind: str, fault: ImportError) -> TierError:
    extra = _KINDS[kind].extra if kind in _KINDS else None
    what = f"a tier of kind '{kind}' needs the package '{fault.name}', which is not installed"
    return TierError(f"{what}; accepted: pip install 'tiercel[{extra}]'" if extra else f"{what} ({fault})")
