"""The documents that conversations are about: the user's own files, or long texts every machine has.

The built-in ones are read where they lie, never copied: the Python language reference that comes with the
interpreter (`pydoc_data.topics`), and licence texts of the system where it keeps them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiercel.errors import ConfigError

CHARS_MAX = 4_000_000
# Generous: more characters than any tokenizer puts into one token on average.
CHARS_PER_TOKEN_MAX = 16
# A built-in document may be a little shorter than asked for.
_LENGTH_SHARE_MIN = 0.8
_LICENCES = Path("/usr/share/common-licenses")


@dataclass(frozen=True, slots=True)
class Document:
    """A text with a name and three questions about it, asked in this order, one per turn."""

    name: str
    source: str
    text: str
    questions: tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    name: str
    place: str  # a topic of pydoc_data, or a file of _LICENCES with its slash
    questions: tuple[str, str, str]


_ANY_QUESTIONS = (
    "What is this document about? Answer in one sentence.",
    "Name one thing that it explains in detail.",
    "Which part of it should a newcomer read first?",
)

# Ordered so that the first ones differ most in kind.
_BUILT_IN = (
    _BuiltIn(
        "Python: compound statements", "compound",
        ("What is a clause of a compound statement made of?",
         "Which statement handles exceptions?",
         "What does the with statement do?"),
    ),
    _BuiltIn(
        "GNU GPL version 3", "/GPL-3",
        ("What freedoms does this license protect?",
         "What must I do when I convey the work as a binary?",
         "Does the program come with a warranty?"),
    ),
    _BuiltIn(
        "Python: special method names", "specialnames",
        ("What is a special method, and what is it for?",
         "When is the method __new__ called?",
         "What does the method __repr__ return?"),
    ),
    _BuiltIn(
        "Python: format strings", "formatstrings",
        ("How are replacement fields written in a format string?",
         "How is a number aligned to the right?",
         "How is a percentage formatted?"),
    ),
    _BuiltIn(
        "Python: the standard type hierarchy", "types",
        ("Which value means that there is no value?",
         "What is the difference between a list and a tuple?",
         "What is a code object?"),
    ),
    _BuiltIn(
        "Python: string methods", "string-methods",
        ("Which method makes the first character a capital?",
         "How are the parts of a string joined?",
         "What does the method strip remove?"),
    ),
    _BuiltIn(
        "GNU LGPL version 2.1", "/LGPL-2.1",
        ("For which kind of software is this license meant?",
         "What may a user of the library do with it?",
         "Is there a warranty?"),
    ),
    _BuiltIn(
        "Python: sequence types", "typesseq",
        ("Which operations do most sequence types support?",
         "What is a range?",
         "How is a list sorted?"),
    ),
    _BuiltIn(
        "Mozilla Public License 1.1", "/MPL-1.1",
        ("What is a contributor under this license?",
         "What must be made available together with a modification?",
         "How does the license end?"),
    ),
    _BuiltIn(
        "Python: the debugger", "debugger",
        ("How is the debugger started?",
         "Which command continues until the next line?",
         "How is a breakpoint removed?"),
    ),
    _BuiltIn(
        "GNU Free Documentation License 1.3", "/GFDL-1.3",
        ("What is the purpose of this license?",
         "What is an invariant section?",
         "May copies be sold?"),
    ),
)  # fmt: skip


def built_in_documents() -> list[Document]:
    """The built-in documents that this machine has, in order."""
    return list(_found())


def _found() -> Iterator[Document]:
    topics = _python_topics()
    for one in _BUILT_IN:
        if one.place.startswith("/"):
            path = _LICENCES / one.place[1:]
            source, text = str(path), _text_or_nothing(path)
        else:
            source = f"Python language reference (pydoc_data.topics['{one.place}'])"
            text = topics.get(one.place, "")
        if text:
            yield Document(one.name, source, text, one.questions)


def _python_topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave the package out
        return {}
    return dict(topics)


def _text_or_nothing(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def user_document(path: Path, flag: str = "--document") -> Document:
    """Read a text file of the user's, which `flag` named. Raises ConfigError for what is no readable text."""
    try:
        raw = path.read_bytes()[: CHARS_MAX * 4 + 1] if path.is_file() else None
    except OSError as error:
        raise ConfigError(f"{flag}: '{path}' cannot be read: {error.strerror or error}") from None
    if raw is None:
        what = "is not a file" if path.exists() else "does not exist"
        raise ConfigError(f"{flag}: '{path}' {what}; accepted: a text file in UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{flag}: '{path}' is not text; accepted: a text file in UTF-8") from None
    if "\0" in text:
        raise ConfigError(f"{flag}: '{path}' is not text (it holds NUL); accepted: a text file in UTF-8")
    if not text.strip():
        raise ConfigError(f"{flag}: '{path}' is empty; accepted: a text file in UTF-8")
    if len(text) > CHARS_MAX:
        raise ConfigError(f"{flag}: '{path}' is larger than the {CHARS_MAX:,} characters accepted")
    return Document(path.name, str(path), text, _ANY_QUESTIONS)


def choose_documents(
    files: Sequence[Path], conversations: int, tokens: int, block_tokens: int, count: Callable[[str], int]
) -> list[Document]:
    """The user's `files` first, then built-in documents of nearly `tokens` tokens; `conversations` in all.

    `count` says how many tokens a text has. Raises ConfigError for a bad file, or too few documents.
    """
    if len(files) > conversations:
        raise ConfigError(
            f"{len(files)} documents for {conversations} conversations; accepted: one --document each at most"
        )
    chosen = [user_document(path) for path in files]
    for document in chosen:
        if (found := count(document.text[: block_tokens * CHARS_PER_TOKEN_MAX])) < block_tokens:
            raise ConfigError(
                f"--document: '{document.source}' has {found} tokens; accepted: {block_tokens} or more "
                "(one block, the unit of reuse)"
            )
    for document in built_in_documents() if len(chosen) < conversations else ():
        if len(chosen) == conversations:
            break
        if count(document.text) >= tokens * _LENGTH_SHARE_MIN:
            chosen.append(document)
    if len(chosen) < conversations:
        raise ConfigError(
            f"--conversations {conversations}: this machine has {len(chosen)} documents of that length; "
            "name more with --document FILE, or ask for fewer or shorter ones"
        )
    return list(_with_own_names(chosen))


def _with_own_names(documents: Sequence[Document]) -> Iterator[Document]:
    """Number the names that occur again: rows and lanes are told apart by them."""
    seen: Counter[str] = Counter()
    for document in documents:
        seen[document.name] += 1
        again = seen[document.name] > 1
        yield replace(document, name=f"{document.name} ({seen[document.name]})") if again else document


def cut_to_tokens(text: str, tokens_max: int, count: Callable[[str], int]) -> str:
    """The longest beginning of `text`, whole lines, that has at most about `tokens_max` tokens.

    `count` says how many tokens a text has. A text without line breaks is cut anywhere.
    """
    text = text[: tokens_max * CHARS_PER_TOKEN_MAX]  # no need to tokenise a whole book
    low, high = 0, len(text)
    if count(text) <= tokens_max:
        return text
    while high - low > 64:
        middle = (low + high) // 2
        if count(text[:middle]) <= tokens_max:
            low = middle
        else:
            high = middle
    at = text.rfind("\n", low // 2, low)
    return text[: at if at > 0 else low]
