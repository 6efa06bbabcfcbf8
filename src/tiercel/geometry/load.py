"""From a `config.json` (path, folder or parsed content) to a `KVGeometry`.

Finds the text part of a multimodal model, looks its `model_type` up and lets that family's builder read
it. Unknown model types are refused with the list of what was found; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from tiercel.errors import GeometryError
from tiercel.geometry.digest import config_fingerprint
from tiercel.geometry.fields import Fields, shown
from tiercel.geometry.model import KVGeometry
from tiercel.geometry.registry import PER_LAYER_SHAPES, TEXT_FAMILIES, TEXT_PARTS, WRAPPERS
from tiercel.geometry.shapes import gather, max_tokens

CONFIG_BYTES_MAX = 32 * 1024 * 1024
CONFIG_NAME = "config.json"
_NESTING_MAX = 4
_SHAPE_FIELDS = {"num_key_value_heads", "head_dim", "sliding_window"}

# Stated sizes: a top-level configuration must have them, though the class behind it has defaults.
_ESSENTIAL = frozenset(
    """num_hidden_layers n_layer n_layers num_layers decoder_layers num_attention_heads n_head n_heads
    num_heads decoder_attention_heads attention_heads hidden_size n_embd n_embed d_model""".split()
)
_TELLING = (
    "architectures",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "kv_lora_rank",
    "sliding_window",
    "layer_types",
)


def read_config(source: Path | str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name for messages and content of a configuration. Raises GeometryError."""
    if isinstance(source, Mapping):
        return "config", source
    path = Path(source)
    try:
        if path.is_dir():
            path = path / CONFIG_NAME
        if path.stat().st_size > CONFIG_BYTES_MAX:
            raise GeometryError(f"{path}: {path.stat().st_size} bytes; accepted: at most {CONFIG_BYTES_MAX}")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise GeometryError(
            f"{path}: {reason}; accepted: a config.json or the folder that holds one"
        ) from None
    return str(path), config_of_text(str(path), text)


def config_of_text(source: str, text: str) -> Mapping[str, Any]:
    """The configuration that `text` is; `source` heads every message. Raises GeometryError."""
    if len(text) > CONFIG_BYTES_MAX:
        raise GeometryError(f"{source}: {len(text)} characters; accepted: at most {CONFIG_BYTES_MAX}")
    try:
        config = json.loads(text)
    except RecursionError:
        raise GeometryError(f"{source}: nested too deeply; accepted: a model's config.json") from None
    except ValueError as error:
        where = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "a number too long"
        raise GeometryError(f"{source}: {where}: not JSON; accepted: a model's config.json") from None
    if not isinstance(config, Mapping):
        raise GeometryError(f"{source}: {shown(config)}; accepted: a JSON object")
    return config


@lru_cache(maxsize=1)
def _class_defaults() -> Mapping[str, Mapping[str, Any]]:
    file = resources.files("tiercel.geometry").joinpath("defaults.json")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def text_part(source: str, config: Mapping[str, Any]) -> tuple[str, Fields]:
    """The model type and the fields of the part that holds the KV cache. Raises GeometryError."""
    outer = _model_type(source, config)
    if outer not in WRAPPERS:
        if outer not in TEXT_FAMILIES:
            _refuse_unknown(source, config, outer)
        return outer, Fields(source, config, _defaults(outer, nested=False))
    part, path = config, ""
    for _ in range(_NESTING_MAX):
        name = next((name for name in TEXT_PARTS if part.get(name) is not None), None)
        if name is None:
            break
        if not isinstance(part[name], Mapping):
            raise GeometryError(f"{source}: {path}{name}: {shown(part[name])}; accepted: an object")
        part, path = part[name], f"{path}{name}."
    inner = part.get("model_type") if path else None
    if inner is None or inner == outer or (isinstance(inner, str) and inner in WRAPPERS):
        inner = WRAPPERS[outer]
    if not isinstance(inner, str) or inner not in TEXT_FAMILIES:
        _refuse_unknown(source, part, inner, path)
    return inner, Fields(source, part, _defaults(inner, nested=bool(path)), path)


def _model_type(source: str, config: Mapping[str, Any]) -> str:
    value = config.get("model_type")
    if not isinstance(value, str) or not value:
        _refuse_unknown(source, config, value)
    return value


def _refuse_unknown(source: str, config: Mapping[str, Any], model_type: object, path: str = "") -> NoReturn:
    found = [f"{name}={shown(config[name])}" for name in _TELLING if config.get(name) is not None]
    found += [f"{name}.model_type" for name in TEXT_PARTS if isinstance(config.get(name), Mapping)]
    seen = "missing" if model_type is None else shown(model_type)
    raise GeometryError(
        f"{source}: {path}model_type: {seen}, not a known architecture; "
        f"found: {', '.join(found) or 'nothing'}; accepted: one of {len(TEXT_FAMILIES) + len(WRAPPERS)} "
        "known (llama, qwen3, deepseek_v3, gemma3 ...)"
    )


def _defaults(model_type: str, nested: bool) -> Mapping[str, Any]:
    defaults = _class_defaults().get(model_type, {})
    if nested:
        return defaults
    return {name: value for name, value in defaults.items() if name not in _ESSENTIAL}


def _refuse_per_layer_shapes(fields: Fields) -> None:
    """Refuse heads that differ by layer where the family's builder would not look at them."""
    stated = fields.raw("per_layer_config")
    entries = stated.values() if isinstance(stated, Mapping) else ()
    for entry in entries:
        if isinstance(entry, Mapping) and _SHAPE_FIELDS & entry.keys():
            fields.refuse("per_layer_config", "no KV heads or head sizes of single layers in this family")


def geometry_from_config(source: Path | str | Mapping[str, Any]) -> KVGeometry:
    """`KVGeometry.from_config`."""
    name, config = read_config(source)
    model_type, fields = text_part(name, config)
    if model_type not in PER_LAYER_SHAPES:
        _refuse_per_layer_shapes(fields)
    layers = TEXT_FAMILIES[model_type](fields)
    return KVGeometry(
        model_type=model_type,
        num_layers=len(layers),
        groups=gather(layers),
        max_tokens=max_tokens(fields),
        fingerprint=config_fingerprint(fields.values),
    )
