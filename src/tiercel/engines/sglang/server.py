"""What this SGLang process was started with, as far as it names the engine or changes numbers in its KV."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from tiercel.blocks.framing import frame
from tiercel.engines.weights import adapter_digest, hub_folder, model_revision
from tiercel.errors import EngineError

# Arguments whose names say that they may change numbers in the KV, or their last bits, for the same weights
# and tokens. One too many costs a miss after that argument was changed, one too few a wrong answer.
_COMPUTES = re.compile(
    r"dtype|quant|precision|fp[48]|tf32|speculative|draft|override|model_impl|model_config|context_length|attention"
    r"|attn|moe|expert|gemm|fus|reduce|determin|rl_on_policy|compile|swa|mamba|linear|dsa|qsa|dsv4|_cp|cp_|kernel"
    r"|dllm|lora_backend|weight_loader|checkpoint|^device$|batch_overlap|layernorm|sparse"
)
# One that names a file with scales of quantised KV.
_SCALES_FILE = "quantization_param_path"
# Adapters named at the start: their ids, in the names of pages, are made of names and paths alone.
_ADAPTERS, _WITH_ADAPTERS = "lora_paths", "enable_lora"
_DRAFT = "speculative_draft_model_path"


@dataclass(frozen=True, slots=True)
class Server:
    """`computes` digests the arguments that change the KV; `engine` tells engines of a host apart.

    `model` and `draft` are (folder, file or name; revision) of weights to load.
    """

    model: tuple[str, str | None] | None
    draft: tuple[str, str | None] | None
    load_format: str
    computes: bytes
    releases: str
    engine: str

    def weights(self, named: str | None) -> str:
        """The weights version: as `named` by the user, else a digest of the weight files.

        Raises EngineError or ModelError when neither is to be had.
        """
        if named is not None:
            return f"named:{named}"
        if self.model is None:
            raise EngineError(
                "the model's weights are not known to this process; accepted: set 'revision' in "
                "hicache-storage-backend-extra-config to a text that names them"
            )
        own = model_revision(*self.model, self.load_format)
        if self.draft is None or self.draft == self.model:
            return own
        return f"{own}+{model_revision(*self.draft, self.load_format)}"


def this_server(version: str) -> Server:
    """The arguments this process goes by; without any (a test, a tool) most is left open.

    Reads scales and adapters. Raises EngineError for one that cannot be read.
    """
    names, value = _arguments()
    told = [f"{name}={value(name)}" for name in sorted(names) if _COMPUTES.search(name)]
    computes = frame(*told, _scales(value(_SCALES_FILE)), *_adapters(value))
    torch_release = ".".join(torch.__version__.split(".")[:2])
    return Server(
        model=_weights(value, "model_path", "revision"),
        draft=_weights(value, _DRAFT, "speculative_draft_model_revision"),
        load_format=str(value("load_format") or "auto"),
        computes=blake2b(computes, digest_size=32, person=b"tiercel-sgl-args").digest(),
        releases=f"torch{torch_release}+sglang{version}",
        engine=f"port {value('port')}" if value("port") else f"parent {os.getppid()}",
    )


def _arguments() -> tuple[tuple[str, ...], Callable[[str], Any]]:
    """The names of SGLang's arguments, and what each has come to be here; none where none are kept."""
    try:
        from sglang.srt.arg_groups.overrides import (  # type: ignore[import-not-found]  # optional
            resolution_result,
        )
        from sglang.srt.runtime_context import get_server_args  # type: ignore[import-not-found]  # optional

        args = get_server_args()
    except (ImportError, ValueError):
        return (), lambda _: None
    return tuple(type(args).__struct_fields__), lambda name: resolution_result(args, name)


def _weights(value: Callable[[str], Any], path: str, revision: str) -> tuple[str, str | None] | None:
    if (named := value(path)) is None:
        return None
    return str(named), None if value(revision) is None else str(value(revision))


def _scales(path: object) -> bytes:
    if path is None:
        return b""
    try:
        return blake2b(Path(str(path)).read_bytes(), digest_size=32).digest()
    except OSError as fault:
        raise EngineError(f"{_SCALES_FILE} '{path}' cannot be read: {fault.strerror}") from None


def _adapters(value: Callable[[str], Any]) -> list[bytes]:
    digests = []
    for named in _adapter_paths(value(_ADAPTERS)) if value(_WITH_ADAPTERS) is not False else ():
        path = Path(named)
        digest = adapter_digest(path if path.is_dir() else hub_folder(named, None))
        if digest is None:
            raise EngineError(f"adapter '{path}' cannot be read; accepted is a folder of its files")
        digests.append(digest)
    return digests


def _adapter_paths(given: Any) -> list[str]:
    """Where they are, in each of the forms that SGLang takes or makes of them."""
    paths = []
    for one in given.values() if isinstance(given, Mapping) else given or ():
        path = one["lora_path"] if isinstance(one, Mapping) else getattr(one, "lora_path", one)
        paths.append(str(path).split("=", 1)[-1] if path is one else str(path))
    return paths
