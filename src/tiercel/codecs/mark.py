"""The mark of blocks that may come back nearly equal: part of their identity, so that nobody else finds them.

    int8 bfloat16:30,2,3,256,64 5      codecs (several: int4+int8 ... 4+5), what numbers a payload holds, and
                                       the codecs' numbers in record headers

Another format is another number, and so other keys: blocks in an older one are not found, nor find it.

An engine whose store has lossy tiers marks its identity before it names a block. Its blocks then have other
keys than exact ones of the same tokens, in every place. A tier, in turn, encodes with a lossy codec only what
is marked with it: a block without the mark is kept exactly, whatever the tier is set to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from tiercel.blocks import Identity
from tiercel.codecs.names import LOSSY
from tiercel.codecs.shape import BlockShape
from tiercel.errors import EngineError

# Shorter ones are versions, which other models may have too.
_DIGEST_CHARS_MIN = 32


@dataclass(frozen=True, slots=True)
class LossyTiers:
    """The lossy codecs that tiers of a store use, and for which models that was judged.

    `models` are names, or `name@revision`; None stands for all: it was accepted unseen.
    """

    codecs: tuple[str, ...] = ()
    models: tuple[str, ...] | None = None

    def allows(self, identity: Identity) -> bool:
        """Whether this model's blocks may be kept by them: its digest counts, wherever its weights lie."""
        if self.models is None:
            return True
        known = {identity.model, f"{identity.model}@{identity.revision}"}
        digest = f"@{identity.revision}" if len(identity.revision) >= _DIGEST_CHARS_MIN else None
        return any(one in known or (digest is not None and one.endswith(digest)) for one in self.models)


@dataclass(frozen=True, slots=True)
class Mark:
    """Which codecs a block may have been through, by name in order, and what it looks like to them."""

    codecs: tuple[str, ...]
    shape: BlockShape

    def __str__(self) -> str:
        return f"{'+'.join(self.codecs)} {self.shape} {_formats(self.codecs)}"

    @classmethod
    def parse(cls, text: object) -> Self | None:
        """The mark that a text is; None for anything else."""
        if not isinstance(text, str):
            return None
        names, _, rest = text.partition(" ")
        form, _, formats = rest.partition(" ")
        codecs, shape = tuple(names.split("+")), BlockShape.parse(form)
        if shape is None or not LOSSY.keys() >= set(codecs) or formats != _formats(codecs):
            return None
        return cls(codecs, shape)

    @classmethod
    def of(cls, info: Mapping[str, str | int]) -> Self | None:
        """The mark in a record's description; None of an exact one."""
        return cls.parse(info.get("lossy"))


def _formats(codecs: tuple[str, ...]) -> str:
    return "+".join(str(LOSSY[name].number) for name in codecs)


def marked(identity: Identity, lossy: LossyTiers, shape: BlockShape | None, payload_bytes: int) -> Identity:
    """The identity of an engine's blocks in a store with these tiers; unchanged where none is lossy.

    `shape` None: the engine cannot say. Raises EngineError, one line, where a codec does not fit the blocks
    or was not judged for the model.
    """
    if not lossy.codecs:
        return identity
    names = "+".join(lossy.codecs)
    if not lossy.allows(identity):
        raise EngineError(
            f"codec '{names}' changes answers and was judged for {', '.join(lossy.models or ())}, not for "
            f"model '{identity.model}'; accepted: --accept-lossy, or a report for this model"
        )
    for name in lossy.codecs:
        if shape is None or not LOSSY[name].fits(shape, payload_bytes):
            raise EngineError(
                f"codec '{name}' does not understand how blocks of model '{identity.model}' lie in memory "
                f"({shape or 'not described'}); accepted: none, lossless"
            )
    assert shape is not None
    return replace(identity, lossy=str(Mark(lossy.codecs, shape)))
