"""What a run of the demo is asked to do, and the checks that need no model."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tiercel.config import Config, format_bytes
from tiercel.errors import ConfigError
from tiercel.report.files import check_output

# The store is asked to keep everything: the demo must never evict what somebody else stored in a directory.
_NO_CAP_BYTES = 1 << 50
RESTARTED_MAX: Final = 2
# Longer than anybody should wait for a prefix: on a busy machine the demo is to show loads, not deadlines.
LOAD_DEADLINE_S: Final = 60.0
# Tokens a question and the template's words around it take at most.
QUESTION_TOKENS: Final = 64
TURNS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """One run. `tokens` is per document; `ram_bytes` None means half of what the conversations need.

    `salt` makes a run's blocks its own, so that what an earlier run left can never make a first turn warm.
    """

    conversations: int = 4
    tokens: int = 5000
    answer_tokens: int = 24
    block_tokens: int = 256
    ram_bytes: int | None = None
    cache_dir: Path | None = None
    keep: bool = False
    documents: tuple[Path, ...] = ()
    model: Path | None = None
    dtype: str = "auto"
    json: Path | None = None
    html: Path | None = Path("tiercel-demo.html")
    salt: str = field(default_factory=lambda: f"tiercel-demo-{secrets.token_hex(8)}")

    def __post_init__(self) -> None:
        if self.tokens < self.block_tokens:
            raise ConfigError(
                f"--tokens {self.tokens} is less than one block; accepted: {self.block_tokens} or more"
            )
        for flag, path in (("--json", self.json), ("--html", self.html)):
            check_output(flag, path)

    @property
    def restarted(self) -> int:
        """How many conversations the second process resumes."""
        return min(RESTARTED_MAX, self.conversations)

    @property
    def rows_expected(self) -> int:
        """How many turns are to be resumed and compared."""
        return self.conversations + self.restarted

    @property
    def growth_tokens(self) -> int:
        """The most tokens that a conversation's last prompt and answer have beyond its document."""
        return TURNS * (QUESTION_TOKENS + self.answer_tokens) + QUESTION_TOKENS


def store_config(cache_dir: Path, ram_bytes: int, block_tokens: int, dtype: str) -> Config:
    """The demo's configuration, the same for both processes. Raises ConfigError, as for any setting."""
    return Config.load(
        environ={},
        overrides={
            "ram.size": format_bytes(ram_bytes),
            "tiers.0.path": str(cache_dir),
            "tiers.0.size": format_bytes(_NO_CAP_BYTES),
            "model.dtype": dtype,
            "model.block_tokens": block_tokens,
        },
    )
