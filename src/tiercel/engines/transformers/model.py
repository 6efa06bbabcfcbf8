"""A model folder made ready to run: checked, loaded, and probed for what its cache really holds.

Whatever is wrong with a folder ends here as one ModelError line. Nothing is fetched from a hub, no code from
the folder is run, no pickle is read.
"""

from __future__ import annotations

import inspect
import json
import logging
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from tiercel.config.paths import cache_dir
from tiercel.engines.device import resolve_device
from tiercel.engines.transformers.attention import use_grouped_attention
from tiercel.engines.transformers.layout import LayerShape
from tiercel.engines.weights import readable, weights_revision
from tiercel.errors import ConfigError, GeometryError, ModelError
from tiercel.geometry import KVGeometry
from tiercel.geometry.registry import TEXT_FAMILIES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Their rotary frequencies change with the length reached, so KV is a function of its prefix only below this.
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_REASON_CHARS_MAX = 300


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A causal language model with the facts the engine needs. `context_tokens` None: no limit of its own."""

    folder: Path
    name: str
    revision: str
    module: Any  # a transformers model; its class is only known at run time
    tokenizer: Any | None  # None: the folder has none, only token ids can be used
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    attention: str
    shapes: tuple[LayerShape, ...]
    vocab_tokens: int
    context_tokens: int | None
    eos_ids: frozenset[int]
    keeps_last_logits: bool


def load_model(
    model_dir: str | Path, *, dtype: str = "auto", device: str = "auto", attention: str | None = None
) -> LoadedModel:
    """Load the model in folder `model_dir` and run one token through it to see its cache.

    `dtype`: auto (the weights' own), float32, bfloat16 or float16. `attention`: transformers' name of an
    attention implementation. Blocks while it reads and hashes the weights. Raises ModelError.
    """
    folder = _existing_folder(Path(model_dir))
    where = resolve_device(device)
    config = _read_config(folder)
    _check_kind(folder, config)
    revision = weights_revision(folder, _memo_dir())
    module = _load_module(folder, _torch_dtype(dtype), attention).to(where)
    if attention is None:
        use_grouped_attention(module)
    text_config = config.get_text_config(decoder=True)
    shapes, kv_dtype = _probe(folder, module, where)
    tokenizer = _load_tokenizer(folder)
    return LoadedModel(
        folder=folder,
        name=readable(Path(folder.resolve().name)),
        revision=revision,
        module=module,
        tokenizer=tokenizer,
        device=where,
        dtype=module.dtype,
        kv_dtype=kv_dtype,
        attention=str(module.config._attn_implementation),
        shapes=shapes,
        vocab_tokens=int(module.get_input_embeddings().weight.shape[0]),
        context_tokens=_context_tokens(text_config),
        eos_ids=_eos_ids(folder, text_config, tokenizer),
        keeps_last_logits="logits_to_keep" in inspect.signature(module.forward).parameters,
    )


def sliding_windows(module: Any) -> tuple[int | None, ...]:
    """How far back each layer sees, as transformers' own cache and masks have it (None: all)."""
    layers: list[Any] = list(DynamicCache(config=module.config).layers)
    return tuple(int(one.sliding_window) if one.is_sliding else None for one in layers)


def _existing_folder(given: Path) -> Path:
    """The folder itself, with its config.json seen to be one."""
    try:
        folder = given.expanduser()
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except RuntimeError:
        raise ModelError(f"model folder {given}: its home directory is not known; give a full path") from None
    except FileNotFoundError:
        raise ModelError(f"model folder {given} does not exist") from None
    except OSError as error:
        raise ModelError(f"cannot read model folder {given}: {error.strerror or error}") from None
    if not is_folder:
        raise ModelError(f"model folder {given} is not a folder")
    _check_config(folder)
    return folder


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"model folder {folder} has no config.json") from None
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from None
    if not isinstance(parsed, dict) or not isinstance(parsed.get("model_type"), str):
        raise ModelError(f"{path} does not name a model_type")


def _read_config(folder: Path) -> Any:
    with _translated(f"cannot read {folder / 'config.json'}"):
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _check_kind(folder: Path, config: Any) -> None:
    """Refuse what is not a causal language model with plain attention caches, before its weights are read."""
    if config.is_encoder_decoder:
        raise ModelError(f"{folder} holds an encoder-decoder ({config.model_type}); accepted are causal LMs")
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    architectures = config.architectures or [causal.get(config.model_type, "")]
    if config.model_type not in causal or not set(architectures) & set(causal.values()):
        named = ", ".join(name for name in architectures if name) or config.model_type
        raise ModelError(f"{folder} holds {named}, which is not a causal language model")
    _check_sizes(folder / "config.json", config.model_type)
    with _translated(f"{folder / 'config.json'} describes no cache that can be reused"):
        layers = DynamicCache(config=config).layers
    _check_layers(folder, layers)


def _check_sizes(path: Path, model_type: str) -> None:
    """Refuse a config of a known family that lacks a size or has an absurd one.

    transformers would fill in the sizes of some large model, and take minutes and gigabytes to notice.
    """
    if model_type not in TEXT_FAMILIES:
        return
    try:
        KVGeometry.from_config(path)
    except GeometryError as error:
        raise ModelError(str(error)) from None


def _check_layers(folder: Path, layers: list[Any]) -> None:
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ModelError(
                f"{folder}: layer {index} keeps a {type(layer).__name__}; accepted are models whose layers "
                "all keep plain keys and values (no recurrent or compressed state)"
            )


def _load_module(folder: Path, dtype: torch.dtype | str, attention: str | None) -> Any:
    with _translated(f"cannot load the model in {folder}"), _quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    module, info = loaded
    if missing := sorted(info["missing_keys"]):
        # transformers would run with random numbers in their place.
        raise ModelError(f"{folder} lacks {len(missing)} of its weights, among them {missing[0]}")
    return module.eval()


@torch.inference_mode()
def _probe(folder: Path, module: Any, device: torch.device) -> tuple[tuple[LayerShape, ...], torch.dtype]:
    """Run one token and return each layer's shape, and the dtype of its keys and values."""
    cache = DynamicCache(config=module.config)
    with _translated(f"the model in {folder} does not run"):
        module(
            input_ids=torch.zeros((1, 1), dtype=torch.long, device=device),
            past_key_values=cache,
            use_cache=True,
        )
    layers: list[Any] = list(cache.layers)
    _check_layers(folder, layers)
    shapes: list[LayerShape] = []
    for index, layer in enumerate(layers):
        keys, values = layer.keys, layer.values
        if keys is None or values is None or keys.ndim != 4 or keys.shape[2] != 1:
            raise ModelError(
                f"{folder}: layer {index} keeps no keys and values, so there is nothing to reuse"
            )
        if keys.dtype != values.dtype or keys.dtype != layers[0].keys.dtype:
            raise ModelError(f"{folder}: layer {index} keeps keys and values of different dtypes")
        shapes.append(LayerShape(int(keys.shape[1]), int(keys.shape[3]), int(values.shape[3])))
    if not shapes:
        raise ModelError(
            f"{folder}: {type(module).__name__} keeps no keys and values, so there is nothing to reuse"
        )
    return tuple(shapes), layers[0].keys.dtype


def _load_tokenizer(folder: Path) -> Any | None:
    if not any(
        (folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    ):
        return None
    with _translated(f"cannot load the tokenizer in {folder}"), _quiet():
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _context_tokens(config: Any) -> int | None:
    limit = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for kind in kinds:
        if kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = kind.get("original_max_position_embeddings") or limit
            limit = min(original, limit) if limit and original else original or limit
    return int(limit) if limit else None


def _eos_ids(folder: Path, config: Any, tokenizer: Any | None) -> frozenset[int]:
    """Every token that ends an answer: the generation config's (one or a list), and the tokenizer's own."""
    declared = config.eos_token_id
    if (folder / "generation_config.json").exists():
        with _translated(f"cannot read {folder / 'generation_config.json'}"), _quiet():
            declared = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    ids = declared if isinstance(declared, list | tuple) else [declared]
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(int(one) for one in [*ids, own] if one is not None)


def _torch_dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return "auto"
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is unknown; accepted are auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _memo_dir() -> Path | None:
    try:
        return cache_dir() / "weights"
    except ConfigError:
        return None


@contextmanager
def _translated(what: str) -> Iterator[None]:
    """The one place where what transformers raises about a folder becomes a ModelError line."""
    try:
        yield
    except Exception as error:  # damaged folders make transformers raise anything
        reason = " ".join(str(error).split())[:_REASON_CHARS_MAX]
        if "ignore_mismatched_sizes" in reason:  # it refers to a report that nobody saw
            reason = "its weights have other shapes than its config.json says"
        elif isinstance(error, LookupError) or not reason:  # a bare key says nothing without its kind
            reason = f"{type(error).__name__} {reason}".strip()
        raise ModelError(f"{what}: {reason}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and loading reports off the user's screen; errors still raise."""
    screen: Any = transformers_logging
    level, bars = screen.get_verbosity(), screen.is_progress_bar_enabled()
    screen.set_verbosity(logging.ERROR)
    screen.disable_progress_bar()
    try:
        yield
    finally:
        screen.set_verbosity(level)
        if bars:
            screen.enable_progress_bar()
