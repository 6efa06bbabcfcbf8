"""From the bytes of a request body to what was asked for, checked; every mistake is named with its field.

It knows no model: whether a prompt fits is decided when its tokens are known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from tiercel.engines.transformers.chunks import Span
from tiercel.engines.transformers.request import Request
from tiercel.errors import RequestError
from tiercel.store.policy import HintError, Hints, parse_hints, parse_session, parse_ttl
from tiercel.web.api.faults import ApiError, bad, show
from tiercel.web.api.fields import HARMLESS, NEUTRAL, NEUTRAL_IN_MESSAGE, sift

# `developer` is OpenAI's newer name of the system role; templates know the older one.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEMPERATURE_MAX = 2.0
_STOPS_MAX = 16
_STOP_CHARS_MAX = 1024
_SEED_MAX = 2**63 - 1
_SALT_CHARS_MAX = 4096
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_PIN_S = 600.0
_AT = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?", re.DOTALL)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against traffic analysis: asking for it changes no answer


class Sampling(msgspec.Struct, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] = msgspec.field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    tiercel: Any = None


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Part]


class ChatBody(Sampling, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None


class CompletionBody(Sampling, kw_only=True):
    prompt: str | list[str | int | list[int]]


class TargetBody(msgspec.Struct, kw_only=True):
    """What the endpoints under /v1/cache take: one prompt, by itself or by its session."""

    model: str | None = None
    prompt: str | list[str | int | list[int]] | None = None
    messages: list[dict[str, Any]] | None = None
    session: Any = None
    cache_salt: str | None = None
    ttl: Any = None


B = TypeVar("B", ChatBody, CompletionBody)


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked body. `prompt` is a text, token ids, or the messages of a conversation."""

    prompt: str | tuple[int, ...] | tuple[Mapping[str, str], ...]
    chat: bool
    sampling: Sampling
    answer_tokens: int | None
    stop: tuple[str, ...]
    hints: Hints

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        options = self.sampling.stream_options
        return options is not None and options.include_usage

    def request(self, tokens: list[int], chunks: tuple[Span, ...], answer_tokens_max: int) -> Request:
        """The engine's request for this prompt's `tokens`, of which `chunks` are chunks. Raises ApiError."""
        wanted = self.answer_tokens
        one = self.sampling
        try:
            return Request(
                tokens,
                max_new_tokens=answer_tokens_max if wanted is None else wanted,
                temperature=one.temperature,
                top_p=one.top_p,
                seed=one.seed,
                stop=self.stop,
                salt=one.cache_salt,
                hints=self.hints,
                chunks=chunks,
            )
        except RequestError as error:
            raise bad(str(error)) from None


def parse_chat(raw: bytes, answer_tokens_max: int) -> Asked:
    """What a body of /v1/chat/completions asks for. Raises ApiError."""
    body = _convert(_read(raw), ChatBody)
    messages = _messages(body.messages)
    limits = {"max_tokens": body.max_tokens, "max_completion_tokens": body.max_completion_tokens}
    given_limits = {name: limit for name, limit in limits.items() if limit is not None}
    if len(set(given_limits.values())) > 1:
        raise bad(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {body.max_completion_tokens}; "
            "accepted is one of them",
            "max_tokens",
        )
    for name, limit in given_limits.items():
        _check_answer_tokens(name, limit, answer_tokens_max)
    wanted = next(iter(given_limits.values()), None)
    return Asked(messages, True, body, wanted, _check_sampling(body), _hints(body))


def parse_completion(raw: bytes, answer_tokens_max: int) -> Asked:
    """What a body of /v1/completions asks for. Raises ApiError."""
    body = _convert(_read(raw), CompletionBody)
    if body.max_tokens is not None:
        _check_answer_tokens("max_tokens", body.max_tokens, answer_tokens_max)
    wanted = min(_COMPLETION_TOKENS, answer_tokens_max) if body.max_tokens is None else body.max_tokens
    return Asked(_prompt(body.prompt), False, body, wanted, _check_sampling(body), _hints(body))


@dataclass(frozen=True, slots=True)
class Target:
    """Which prompt a call under /v1/cache is about: as asked for in a request, or a session's."""

    asked: Asked | None
    session: str | None
    model: str | None
    salt: str | None
    ttl_s: float


def parse_target(raw: bytes, *, ttl: bool, session: bool) -> Target:
    """What a body under /v1/cache names; `ttl` and `session`: it may have these. Raises ApiError."""
    names = [field.name for field in msgspec.structs.fields(TargetBody)]
    unfit = {name for name, fits in (("ttl", ttl), ("session", session)) if not fits}
    body = _typed(sift(_read(raw), [name for name in names if name not in unfit], {}), TargetBody, "")
    given = [name for name in ("prompt", "messages", "session") if getattr(body, name) is not None]
    if len(given) != 1:
        accepted = "prompt, messages or session" if session else "prompt or messages"
        told = " and ".join(given) or "nothing"
        raise bad(f"{told} is given; accepted is one of {accepted}", given[1] if given else "prompt")
    _check_salt(body.cache_salt)
    asked = None
    if body.session is None:
        sampling = Sampling(cache_salt=body.cache_salt)
        prompt = _prompt(body.prompt) if body.prompt is not None else _messages(body.messages or [])
        asked = Asked(prompt, body.messages is not None, sampling, 1, (), Hints(sure=True))
    try:
        named = None if body.session is None else parse_session(body.session, "session")
        ttl_s = _PIN_S if body.ttl is None else parse_ttl(body.ttl, "ttl")
    except HintError as error:
        raise bad(str(error), error.param) from None
    return Target(asked, named, body.model, body.cache_salt, ttl_s)


def _read(raw: bytes) -> dict[str, Any]:
    try:
        read = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(read, dict):
        raise bad(f"the body is {show(read)}; accepted is a JSON object", code="invalid_json")
    return read


def _convert(given: dict[str, Any], kind: type[B]) -> B:
    names = [field.name for field in msgspec.structs.fields(kind)]
    return _typed(sift(given, names, NEUTRAL, HARMLESS), kind, "")


T = TypeVar("T")


def _typed(given: object, kind: type[T], where: str) -> T:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise _mistyped(str(error), where) from None


def _mistyped(text: str, where: str) -> ApiError:
    """An ApiError for msgspec's "Expected `int`, got `str` - at `$.seed`"."""
    found = _AT.fullmatch(text)
    assert found is not None
    what, path = found["what"], found["path"] or ""
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        param = f"{where}{path}{'.' if path else ''}{missing[1]}"
        return bad(f"{param} is missing", param, "missing_required_parameter")
    param = f"{where}{path}".rstrip(".")
    return bad(f"{param}: {what[:1].lower()}{what[1:]}", param, "invalid_type")


def _messages(given: list[dict[str, Any]]) -> tuple[Mapping[str, str], ...]:
    if not given:
        raise bad("messages is empty; accepted is one message or more", "messages")
    return tuple(_message(one, index) for index, one in enumerate(given))


def _hints(body: Sampling) -> Hints:
    try:
        return parse_hints(body.tiercel)
    except HintError as error:
        raise bad(str(error), error.param) from None


def _message(given: dict[str, Any], index: int) -> dict[str, str]:
    where = f"messages[{index}]."
    kept = sift(given, ("role", "content"), NEUTRAL_IN_MESSAGE, where=where)
    message = _typed(kept, Message, where)
    if message.role not in ROLES:
        raise bad(f"{where}role is {show(message.role)}; accepted are {', '.join(ROLES)}", f"{where}role")
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(_text(part, f"{where}content[{at}]") for at, part in enumerate(content))
    return {"role": ROLES[message.role], "content": content}


def _text(part: Part, where: str) -> str:
    if part.type != "text":
        raise bad(
            f'{where}.type is {show(part.type)}; accepted is "text": the model reads text only',
            f"{where}.type",
            "unsupported_value",
        )
    if part.text is None:
        raise bad(f"{where}.text is missing", f"{where}.text", "missing_required_parameter")
    return part.text


def _prompt(given: str | list[str | int | list[int]]) -> str | tuple[int, ...]:
    if isinstance(given, str):
        if not given:
            raise bad("prompt is empty; accepted is a text or a list of token ids", "prompt")
        return given
    if len(given) == 1 and not isinstance(given[0], int):  # a batch of one
        only = given[0]
        return _prompt(only if isinstance(only, str) else list(only))
    tokens = tuple(one for one in given if isinstance(one, int))
    if len(tokens) != len(given):
        raise bad(f"prompt is a list of {len(given)} prompts; accepted is one prompt per request", "prompt")
    if not tokens:
        raise bad("prompt is empty; accepted is a text or a list of token ids", "prompt")
    return tokens


def _check_answer_tokens(name: str, limit: int, answer_tokens_max: int) -> None:
    if not 1 <= limit <= answer_tokens_max:
        raise bad(f"{name} is {show(limit)}; accepted here is 1 to {answer_tokens_max}", name)


def _check_salt(salt: str | None) -> None:
    if salt is not None and not 1 <= len(salt) <= _SALT_CHARS_MAX:
        # An empty salt is most likely a variable that was not set, and would share what was to be kept apart.
        raise bad(f"cache_salt has {len(salt)} characters; accepted are 1 to {_SALT_CHARS_MAX}", "cache_salt")


def _check_sampling(body: Sampling) -> tuple[str, ...]:
    """Refuse values out of range; returns the stop strings."""
    if not 0.0 <= body.temperature <= _TEMPERATURE_MAX:
        raise bad(
            f"temperature is {show(body.temperature)}; accepted is 0 to {_TEMPERATURE_MAX:g}", "temperature"
        )
    if not 0.0 < body.top_p <= 1.0:
        raise bad(f"top_p is {show(body.top_p)}; accepted is above 0 and up to 1", "top_p")
    if body.seed is not None and not 0 <= body.seed <= _SEED_MAX:
        raise bad(f"seed is {show(body.seed)}; accepted is 0 to {_SEED_MAX}", "seed")
    if body.stream_options is not None and not body.stream:
        raise bad("stream_options is given without stream; accepted is both or none", "stream_options")
    _check_salt(body.cache_salt)
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if len(stop) > _STOPS_MAX:
        raise bad(f"stop has {len(stop)} strings; accepted are up to {_STOPS_MAX}", "stop")
    for one in stop:
        if not 1 <= len(one) <= _STOP_CHARS_MAX:
            raise bad(
                f"stop has a string of {len(one)} characters; accepted are 1 to {_STOP_CHARS_MAX}", "stop"
            )
    return stop
