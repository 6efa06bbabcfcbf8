"""Two OpenAI-compatible servers, one with a lossy setting and one without, asked the same questions.

Nothing is seen of their probabilities, so there is no KL: what counts is whether answers are right, and
whether both servers say the same. Every question is a completion of its own (`/v1/completions`, temperature
0) behind the context and the right answers to the questions before it. Texts go to the servers named and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import TypeVar

import httpx
import msgspec

from tiercel.errors import RequestError
from tiercel.eval.figures import interval
from tiercel.eval.results import EndpointRow
from tiercel.eval.samples import Filler, Sample, Task

# More than any tokenizer needs for an answer of so many characters.
_TOKENS_MORE = 4
_CHARS_SHOWN = 200


class Endpoint:
    """One server. Use it as a context; every call ends within `deadline_s`."""

    def __init__(self, url: str, model: str | None, api_key: str | None, deadline_s: float) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # No proxy of the environment: it would be asked for this host's own addresses too.
        self._http = httpx.Client(base_url=url, headers=headers, timeout=deadline_s, trust_env=False)
        self.model = model

    def __enter__(self) -> Endpoint:
        if self.model is None:
            listed = _decoded(self._call("GET", "/v1/models", None), _Models)
            if not listed.data:
                raise RequestError(f"{self.url}: lists no model; accepted: --name")
            self.model = listed.data[0].id
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def complete(self, prompt: str, tokens_max: int) -> str:
        """What the server writes behind `prompt`. Raises RequestError when it does not answer."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens_max, "temperature": 0}
        choices = _decoded(self._call("POST", "/v1/completions", body), _Completion).choices
        if not choices:
            raise RequestError(f"{self.url}: answered without a completion")
        return choices[0].text

    def _call(self, method: str, path: str, body: object) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.HTTPError as fault:
            raise RequestError(f"{self.url}: does not answer ({type(fault).__name__})") from None
        if response.status_code != httpx.codes.OK:
            said = " ".join(response.text.split())[:_CHARS_SHOWN]
            raise RequestError(f"{self.url}{path}: HTTP {response.status_code}: {said}")
        return response


def compare_endpoints(
    server: Endpoint, baseline: Endpoint, tasks: Sequence[Task], seeds: Sequence[int], filler: Filler,
    progress: Callable[[str, int], None] = lambda task, seed: None,
) -> list[EndpointRow]:  # fmt: skip
    """A row per task with right answers; tasks without are left out. Raises RequestError."""
    rows = []
    for task in tasks:
        texts: list[tuple[float, float, float, int]] = []
        for seed in seeds:
            sample = task.make(seed, filler)
            if not sample.scored:
                break
            progress(task.name, seed)
            texts.append(_asked(server, baseline, sample))
        if texts:
            rows.append(_row(task, texts))
    return rows


def _asked(server: Endpoint, baseline: Endpoint, sample: Sample) -> tuple[float, float, float, int]:
    """(right, right without, same) as shares of the answers, and their number."""
    right, right_without, same = [], [], []
    text = sample.context
    for turn in sample.turns:
        text += turn.question
        tokens = len(turn.answer) + _TOKENS_MORE
        said, said_without = (one.complete(text, tokens) for one in (server, baseline))
        wanted = turn.answer.strip()
        right.append(said.strip().startswith(wanted))
        right_without.append(said_without.strip().startswith(wanted))
        same.append(said == said_without)
        text += turn.answer
    return fmean(right), fmean(right_without), fmean(same), len(right)


def _row(task: Task, texts: Sequence[tuple[float, float, float, int]]) -> EndpointRow:
    drops = [without - mine for mine, without, _, _ in texts]
    low, high = interval(drops)
    return EndpointRow(
        task=task.name,
        accuracy=fmean(one[0] for one in texts),
        accuracy_baseline=fmean(one[1] for one in texts),
        accuracy_drop=fmean(drops),
        accuracy_drop_low=low,
        accuracy_drop_high=high,
        same=fmean(one[2] for one in texts),
        seeds=len(texts),
        answers=sum(one[3] for one in texts),
    )


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


class _Choice(msgspec.Struct, frozen=True):
    text: str


class _Completion(msgspec.Struct, frozen=True):
    choices: list[_Choice]


T = TypeVar("T", _Models, _Completion)


def _decoded(response: httpx.Response, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError(f"{response.url}: answers with something else than OpenAI's API does") from None
