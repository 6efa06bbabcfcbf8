"""A command line as it was typed (`vllm serve ...`, `lmcache server ...`, or flags alone), flag by flag."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tiercel.config.connector import kv_transfer_config
from tiercel.config.values import masked
from tiercel.errors import ConfigError
from tiercel.migrate import lmcache_server, vllm
from tiercel.migrate.draft import Draft
from tiercel.migrate.given import HIDDEN, Given

_FLAG = re.compile(r"--?[A-Za-z]")
_RANKS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
# vLLM's flags that say where KV goes; ours stands in their place.
_REPLACED = ("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend")


@dataclass(frozen=True, slots=True)
class Word:
    """One word of a command line with what belongs to it; `given` is None for what is no flag."""

    words: tuple[str, ...]
    given: Given | None = None


def read_words(words: Sequence[str]) -> list[Word]:
    """Flags with their values (`--a=b`, `--a b`, `--a`), and words that are none; `--a_b` is `--a-b`."""
    found: list[Word] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not _FLAG.match(word):
            found.append(Word((word,)))
            continue
        name, equals, value = word.partition("=")
        head, dot, path = name.partition(".")
        name = head.replace("_", "-") + dot + path
        if equals:
            found.append(Word((word,), Given(name, value, "flag")))
        elif at < len(words) and not _FLAG.match(words[at]):
            found.append(Word((word, words[at]), Given(name, words[at], "flag")))
            at += 1
        else:
            found.append(Word((word,), Given(name, True, "flag")))
    return found


def translate_words(draft: Draft, words: Sequence[str], config: str, ranks: int | None = None) -> list[Given]:
    """Put a command line into the draft, and how to start instead into its commands.

    `config`: the path of the file to be. Returns LMCache's in-process options found in it (`lmcache.NAME`),
    for `lmcache.translate`. Raises ConfigError for a value that cannot be read.
    """
    read = read_words(words)
    program = [one.words[0] for one in read if one.given is None]
    flags = [one.given for one in read if one.given is not None]
    if program[:2] == ["lmcache", "server"]:
        lmcache_server.translate(draft, flags)
        draft.commands.append(f"tiercel daemon --config {shlex.quote(config)}")
        return []
    native = [one.given for one in read if one.given is not None and _replaced(one)]
    inner = vllm.translate(draft, native, ranks or ranks_in(words))
    kept = [word for one in read if not _replaced(one) for word in _harmless(one)]
    command = kept if program else ["vllm", "serve", "MODEL", *kept]
    ours = json.dumps(kv_transfer_config({"config": config}))
    draft.commands.append(shlex.join([*command, "--kv-transfer-config", ours]))
    return inner


def _harmless(word: Word) -> Iterator[str]:
    """The words as they were typed, but for what may be a secret: the command is written into a file."""
    given = word.given
    for text in word.words:
        if given is not None and given.shown == HIDDEN and text.endswith(str(given.value)):
            text = text.removesuffix(str(given.value)) + HIDDEN
        yield masked(text)


def _replaced(word: Word) -> bool:
    return word.given is not None and word.given.name.partition(".")[0] in _REPLACED


def ranks_in(words: Sequence[str]) -> int:
    """Ranks of one engine by its command line. Raises ConfigError."""
    ranks = 1
    for one in [word.given for word in read_words(words)]:
        if one is not None and one.name in _RANKS:
            if not re.fullmatch(r"[1-9][0-9]{0,3}", str(one.value)):
                raise one.fail("an integer from 1")
            ranks *= int(str(one.value))
    return ranks


def nothing_to_migrate() -> ConfigError:
    return ConfigError(
        "nothing to migrate; accepted: an LMCache file (or $LMCACHE_CONFIG_FILE), LMCACHE_... variables, or "
        "after -- the command line of vllm or lmcache server"
    )
