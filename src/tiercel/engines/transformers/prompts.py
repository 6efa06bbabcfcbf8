"""From what a caller gives to token ids that a model takes: text, conversations, and the checks on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from tiercel.engines.transformers.chunks import SPANS_MAX, Span
from tiercel.engines.transformers.model import LoadedModel
from tiercel.errors import ModelError, RequestError


def encode(model: LoadedModel, text: str) -> list[int]:
    """Token ids of plain `text`. Raises ModelError when the model folder has no tokenizer."""
    return [int(one) for one in _tokenizer(model)(text)["input_ids"]]


def chat_prompt(model: LoadedModel, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a conversation, ready for the assistant's next answer, by the model's chat template.

    Raises RequestError for messages that the template refuses, ModelError without a template.
    """
    return [int(one) for one in _templated(model, messages, tokenize=True)]


def cut(
    model: LoadedModel, prompt: str | Sequence[Mapping[str, Any]], separator: str
) -> tuple[list[int], tuple[Span, ...]]:
    """Token ids of a text or a conversation, and the spans of its chunks: what stands between two separators.

    Every piece, separators too, is tokenized by itself, so that it has the same tokens wherever it stands.
    Raises as `encode` and `chat_prompt` do, and RequestError for too many pieces.
    """
    text = prompt if isinstance(prompt, str) else str(_templated(model, prompt, tokenize=False))
    if (count := text.count(separator)) > SPANS_MAX:
        raise RequestError(f"the separator of chunks comes {count} times; accepted is up to {SPANS_MAX}")
    first, *others = text.split(separator)
    # A template has put in what begins a text.
    tokens = encode(model, first) if isinstance(prompt, str) else _piece(model, first)
    between = _piece(model, separator)
    chunks = []
    for number, piece in enumerate(others, 1):
        tokens += between
        start = len(tokens)
        tokens += _piece(model, piece)
        if start < len(tokens) and number < len(others):
            chunks.append((start, len(tokens)))
    return tokens, tuple(chunks)


def _piece(model: LoadedModel, text: str) -> list[int]:
    return [int(one) for one in _tokenizer(model)(text, add_special_tokens=False)["input_ids"]]


def _templated(model: LoadedModel, messages: Sequence[Mapping[str, Any]], *, tokenize: bool) -> Any:
    tokenizer = _tokenizer(model)
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer in {model.folder} has no chat template")
    try:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=tokenize, return_dict=False
        )
    except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"the model's chat template refuses these messages: {reason}") from None


def check_tokens(model: LoadedModel, tokens: Sequence[int], *, room: int) -> None:
    """Raise RequestError unless the model takes `tokens` and has `room` for so many more."""
    context = model.context_tokens
    if not tokens:
        raise RequestError("the prompt is empty; accepted is one token or more")
    if context is not None and len(tokens) + room > context:
        raise RequestError(
            f"the prompt has {len(tokens)} tokens; {model.name} accepts up to {context - room}"
            + (" and at least one for the answer" if room else "")
        )
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= model.vocab_tokens:
        wrong = low if low < 0 else high
        raise RequestError(f"token id {wrong} is outside the model's 0..{model.vocab_tokens - 1}")


def _tokenizer(model: LoadedModel) -> Any:
    if model.tokenizer is None:
        raise ModelError(f"model folder {model.folder} has no tokenizer")
    return model.tokenizer
