"""From the options that an engine passes on to the one configuration: the same settings, dotted or nested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tiercel.codecs.consent import lossy_tiers
from tiercel.config import Config
from tiercel.errors import ConfigError

_FILE = "config"


def read_options(extra: Mapping[str, object], where: str) -> Config:
    """Load the configuration of a connector: `{"ram.size": "4GiB"}` or `{"ram": {"size": "4GiB"}}`.

    `config` names a TOML file. Environment variables count as everywhere; options override them. `where` is
    the engine's name for these options. Raises ConfigError with the nearest setting for one that does not
    exist, and for a lossy codec that nobody accepted.
    """
    options = dict(_flat(extra))
    file = options.pop(_FILE, None)
    if file is not None and not isinstance(file, str):
        raise ConfigError(f"{where}: {_FILE}: {file!r} is not a path")
    try:
        config = Config.load(file, overrides=options)
        lossy_tiers(config)
        return config
    except ConfigError as fault:
        raise ConfigError(f"{where}: {str(fault).removeprefix('flag: ')}") from None


def _flat(options: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in options.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
            for number, one in enumerate(value):
                yield from _flat(one, f"{key}.{number}.")
        else:
            yield key, value
