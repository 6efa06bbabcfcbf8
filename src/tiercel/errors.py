"""Every error Tiercel raises on purpose, in one small hierarchy.

A `TiercelError` is the user's to read: its text is one line that names the thing, the value seen
and what is accepted. The command line prints that line and exits; it never shows a traceback.
Faults of a tier are not errors: they are `tiercel.tiers.Fate` values, one per key, and cost a miss.
"""

from __future__ import annotations


class TiercelError(Exception):
    """Base of all errors a user can cause and mend."""

    exit_code = 2


class ConfigError(TiercelError):
    """A setting (file, environment, flag) is unknown, malformed or contradicts another."""


class GeometryError(TiercelError):
    """A model configuration is unreadable, incomplete, contradictory or of an unknown architecture."""


class MemoryLimitError(TiercelError):
    """The arena asked for does not fit the host, its cgroup or its shared-memory file system."""


class TierError(TiercelError):
    """A tier cannot be opened: missing directory, no permission, foreign format, bad endpoint."""


class DaemonError(TiercelError):
    """A daemon cannot be started, reached or agreed with: socket taken, other version, block too large."""


class TierUnreachable(TierError):
    """A tier's place does not answer now, though it is named properly; it may answer later."""


class ModelError(TiercelError):
    """A model folder is missing, unreadable or of a kind the engine cannot run."""


class EngineError(TiercelError):
    """An inference engine's version, model or flag is not supported by its connector."""


class RequestError(TiercelError):
    """A request cannot be served as asked: prompt too long, bad parameter, malformed body."""


class TraceError(TiercelError):
    """A trace cannot be used: missing, unreadable, or a line of it is not a request."""
