"""Policies by the names that people write: `full`, `streaming`, `landmark`, …; a file and a row each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from tiercel.attention.fastgen import FastGen
from tiercel.attention.heavy import HeavyHitters
from tiercel.attention.landmark import FOUR_BITS, Landmark
from tiercel.attention.oracle import Oracle
from tiercel.attention.policy import Policy
from tiercel.attention.quest import Quest
from tiercel.attention.scissorhands import Scissorhands
from tiercel.attention.snapkv import SnapKV
from tiercel.attention.stored import Stored
from tiercel.attention.window import Full, SlidingWindow, Streaming
from tiercel.codecs.names import LOSSY
from tiercel.errors import ConfigError

# In the order of a table: the reference, what drops, what only skips.
POLICIES: dict[str, Callable[[], Policy]] = {
    "full": Full,
    "window": SlidingWindow,
    "streaming": Streaming,
    "streaming-rerotated": lambda: Streaming(rerotate=True, name="streaming-rerotated"),
    "h2o": HeavyHitters,
    "scissorhands": Scissorhands,
    "fastgen": FastGen,
    "snapkv": SnapKV,
    "quest": Quest,
    "landmark": Landmark,
    "landmark-4bit": lambda: Landmark(stored=FOUR_BITS, name="landmark-4bit"),
    "oracle": Oracle,
    # What a tier's lossy codec gives back.
    **{name: partial(Stored, codec) for name, codec in LOSSY.items()},
}


def policy_named(name: str) -> Policy:
    """The policy with its usual parameters. Raises ConfigError for a name that is none."""
    if name not in POLICIES:
        raise ConfigError(f"policy '{name}' is unknown; accepted: {', '.join(POLICIES)}")
    return POLICIES[name]()


def servable_policy(name: str) -> Policy:
    """The policy of that name, for serving. Raises ConfigError for a name that is none, or a codec's."""
    if name not in POLICIES or name in LOSSY:
        what = "a codec of tiers" if name in LOSSY else "unknown"
        accepted = ", ".join(one for one in POLICIES if one not in LOSSY)
        raise ConfigError(f"policy '{name}' is {what}; accepted: {accepted}")
    return POLICIES[name]()


def policies_named(names: Iterable[str]) -> list[Policy]:
    """Each name's policy, in order. Raises ConfigError for an unknown name."""
    return [policy_named(name) for name in names]
