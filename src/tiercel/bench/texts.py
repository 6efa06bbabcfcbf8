"""Long real texts in pieces of a wanted length: the user's files, or those every machine has.

A piece is found by its number, always the same one. Where more pieces are asked for than there are documents,
later ones begin further inside them: what makes prompts differ is their heading, not the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiercel.bench.documents import Document, built_in_documents, user_document
from tiercel.errors import ConfigError

FILES_MAX = 1000
TEXT_SUFFIXES = (
    ".txt",
    ".md",
    ".rst",
    ".py",
    ".c",
    ".h",
    ".cpp",
    ".go",
    ".rs",
    ".java",
    ".js",
    ".ts",
    ".tex",
)
# Where in a document its first, second, … piece begins, as a share of it.
_BEGINS = (0.0, 0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875)
# Until a server has told how it counts: what English text usually has.
CHARS_PER_TOKEN = 4.0


class Texts:
    """Pieces of `documents`. `chars_per_token` is what the server's tokenizer makes of such text."""

    def __init__(self, documents: Sequence[Document], chars_per_token: float = CHARS_PER_TOKEN) -> None:
        self.documents = tuple(documents)
        self.chars_per_token = chars_per_token
        self._begins: list[int] = []
        parts, at = [], 0
        for one in self.documents:
            self._begins.append(at)
            parts.append(one.text.rstrip() + "\n\n")
            at += len(parts[-1])
        self._joined = "".join(parts)

    @property
    def sources(self) -> list[str]:
        """Where the texts come from."""
        return [one.source for one in self.documents]

    def questions(self, number: int) -> tuple[str, ...]:
        """What may be asked about piece `number`."""
        return self.documents[number % len(self.documents)].questions

    def piece(self, number: int, tokens: int) -> str:
        """About `tokens` tokens of text; it goes on with the next document where one is too short."""
        which, again = number % len(self.documents), number // len(self.documents)
        begin = self._begins[which]
        begin += int(len(self.documents[which].text) * _BEGINS[again % len(_BEGINS)])
        chars = int(tokens * self.chars_per_token)
        rounds = -(-(begin + chars) // len(self._joined))
        text = (self._joined * rounds)[begin : begin + chars]
        # Begin with a whole line where there is one.
        line = text.find("\n") + 1 if again % len(_BEGINS) else 0
        return text[line if line < len(text) // 2 else 0 :]


def find_texts(folder: Path | None) -> list[Document]:
    """The text files of `folder` and below, else what every machine has. Raises ConfigError for none."""
    if folder is None:
        if not (found := built_in_documents()):
            raise ConfigError("this machine has no long texts of its own; accepted: --texts DIR")
        return found
    if not folder.is_dir():
        raise ConfigError(f"--texts: '{folder}' is not a directory; accepted: one with text files")
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in TEXT_SUFFIXES)
    paths = [path for path in paths if path.is_file() and path.stat().st_size][:FILES_MAX]
    if not paths:
        raise ConfigError(
            f"--texts: '{folder}' holds no text files; accepted: files ending in {', '.join(TEXT_SUFFIXES)}"
        )
    return [user_document(path, "--texts") for path in paths]
