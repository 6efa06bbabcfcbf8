"""The one configuration object, put together from file < environment < flags, checked as a whole.

Loading is pure but for reading the file: it creates nothing, opens nothing and prints nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiercel.config.schema import (
    MEMORY,
    SECTIONS,
    TIERS,
    AttentionConfig,
    DaemonConfig,
    ModelConfig,
    RamConfig,
    ServeConfig,
    StoreConfig,
    TierConfig,
    public_name,
)
from tiercel.config.sources import CONFIG_VARIABLE, Assignment, from_environ, from_file, from_flags
from tiercel.config.tiers import by_kind, check_tiers
from tiercel.config.together import check_attention
from tiercel.config.values import accepted, convert, text_of
from tiercel.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Row:
    """One effective setting as text: its dotted key, its value and where it was set."""

    key: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting, typed and checked. `origins` says for each dotted key that was set where it was set."""

    ram: RamConfig = field(default_factory=RamConfig)
    tiers: tuple[TierConfig, ...] = ()
    store: StoreConfig = field(default_factory=StoreConfig)
    daemon: DaemonConfig = field(default_factory=DaemonConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        environ: Mapping[str, str] = os.environ,
        overrides: Mapping[str, object] | None = None,
    ) -> Config:
        """Return the configuration of `path`, overridden by `environ`, overridden by `overrides`.

        Without `path` the file named by `$TIERCEL_CONFIG` is read, if any. `overrides` are flags as dotted
        keys (`{"ram.size": "4GiB", "tiers.0.path": "/cache"}`), values as in a file; None means not given.
        Raises ConfigError, one line naming where the value stood, the value and what is accepted.
        """
        file = path or environ.get(CONFIG_VARIABLE)
        assigned: dict[str, Assignment] = {}
        for source in (
            from_file(Path(file)) if file else (),
            from_environ(environ),
            from_flags(overrides or {}),
        ):
            assigned.update((assignment.key, assignment) for assignment in source)
        sections = {name: _build(section, name, assigned) for name, section in SECTIONS.items()}
        tiers = tuple(
            by_kind(_build(TierConfig, prefix, assigned), prefix, assigned)
            for prefix in _tier_prefixes(assigned)
        )
        config = cls(**sections, tiers=tiers, origins={k: _origin(a) for k, a in assigned.items()})
        check_tiers(tiers, assigned)
        check_attention(config.attention, config.model, assigned)
        return config

    @property
    def host_bytes(self) -> int:
        """Memory of its own that a store takes: RAM, and tiers of kind memory."""
        return self.ram.size_bytes + sum(tier.size_bytes or 0 for tier in self.tiers if tier.kind == MEMORY)

    def describe(self) -> list[str]:
        """Return the effective configuration, a line per setting: `ram.size = 4GiB  (where it was set)`."""
        rows = [(f"{row.key} = {row.value}", row.origin) for row in self.rows()]
        width = max(len(text) for text, _ in rows)
        return [f"{text:<{width}}  ({origin})" for text, origin in rows]

    def rows(self) -> Iterator[Row]:
        """Yield every setting as it would be written in a file, with where it was set; no passwords."""
        parts = [(name, getattr(self, name)) for name in SECTIONS]
        parts[1:1] = [(f"{TIERS}.{i}", tier) for i, tier in enumerate(self.tiers)]
        for prefix, part in parts:
            for item in dataclasses.fields(part):
                key = f"{prefix}.{public_name(item.name)}"
                text = text_of(item.metadata["setting"], getattr(part, item.name))
                yield Row(key, text, self.origins.get(key, "default"))


def _origin(assignment: Assignment) -> str:
    if assignment.origin == "environment":
        return f"environment {assignment.label}"
    return assignment.origin


def _tier_prefixes(assigned: Mapping[str, Assignment]) -> list[str]:
    """Return `tiers.0`, `tiers.1`, ...; refuses a gap, which would be a tier misnumbered or forgotten."""
    firsts: dict[int, Assignment] = {}
    for key, assignment in assigned.items():
        if key.startswith(f"{TIERS}."):
            firsts.setdefault(int(key.split(".")[1]), assignment)
    for expected, index in enumerate(sorted(firsts)):
        if index != expected:
            raise firsts[index].fail(
                f"sets tier {index}, but there is no tier {expected}; number them from 0"
            )
    return [f"{TIERS}.{index}" for index in sorted(firsts)]


def _build(section: type[Any], prefix: str, assigned: Mapping[str, Assignment]) -> Any:
    """Return an instance of a section's class; Any because the class is chosen by the caller."""
    values: dict[str, object] = {}
    for item in dataclasses.fields(section):
        setting = item.metadata["setting"]
        key = f"{prefix}.{public_name(item.name)}"
        assignment = assigned.get(key)
        if assignment is None:
            if item.default is dataclasses.MISSING:
                sibling = next(a for k, a in assigned.items() if k.startswith(f"{prefix}."))
                raise ConfigError(f"{sibling.origin}: {key}: is missing; accepted: {accepted(setting)}")
            continue
        try:
            values[item.name] = convert(setting, assignment.raw, assignment.base)
        except ConfigError as error:
            raise assignment.fail(str(error)) from None
    return section(**values)
