"""One request and what became of it, gathered while it is served: access line and trace are made of it.

Holds counts, times and codes; never a prompt, a token, a salt, or anything else that a client may invent.
"""

from __future__ import annotations

import logging
import time
import uuid
from dataclasses import dataclass, field
from http import HTTPMethod

from starlette.types import Scope

from tiercel.service.logs import sane_id
from tiercel.store.policy import Decision
from tiercel.web.api.answers import Answer
from tiercel.web.api.job import Job

_log = logging.getLogger("tiercel.serve")
_KEY = "tiercel.exchange"
_METHODS = frozenset(HTTPMethod)


@dataclass(slots=True)
class Generation:
    """The part of the engine in it. Times are `time.monotonic`; None: it did not come to that.

    `reused` are prompt tokens by the place their KV came from.
    """

    prompt_tokens: int
    answer_tokens: int
    reused: dict[str, int]
    begun_s: float | None
    first_token_s: float | None
    decision: Decision | None

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens whose KV was restored."""
        return sum(self.reused.values())


@dataclass(slots=True)
class Exchange:
    """One request. `outcome` is an answer's finish reason, or the code of the error that ended it.

    `traceparent` and `tracestate` are the client's headers, unchecked; `trace_id` is set once it is traced.
    """

    request_id: str
    method: str
    endpoint: str
    traceparent: str = ""
    tracestate: str = ""
    arrived_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    status: int = 0
    outcome: str = ""
    generation: Generation | None = None
    trace_id: str | None = None

    @property
    def looks(self) -> bool:
        """Whether it only looked at something, and saw it: what probes and scrapers do all the time."""
        return self.method == "GET" and self.status < 400

    def generated(self, job: Job, answer: Answer) -> None:
        """Take over what became of a job, as far as it came."""
        decision = answer.decision
        self.generation = Generation(
            prompt_tokens=answer.prompt_tokens,
            answer_tokens=answer.tokens,
            reused={} if decision is None else dict(decision.reused_tokens),
            begun_s=job.begun_s,
            first_token_s=job.first_token_s,
            decision=decision,
        )
        ended = job.failed or job.stopped
        self.outcome = (ended.code if ended is not None else answer.finish_reason) or ""

    def log(self) -> None:
        """Write the access line; of a look only where debugging is on."""
        level = logging.DEBUG if self.looks else logging.INFO
        if not _log.isEnabledFor(level):
            return
        seconds = self.ended_s - self.arrived_s
        fields: dict[str, object] = {
            "method": self.method, "endpoint": self.endpoint, "status": self.status,
            "outcome": self.outcome, "duration_s": round(seconds, 6), "request_id": self.request_id,
        }  # fmt: skip
        if self.trace_id is not None:
            fields["trace_id"] = self.trace_id
        told = f"{self.method} {self.endpoint} {self.status} {self.outcome or 'done'} after {seconds:.3f} s"
        if (engine := self.generation) is not None:
            told += f": {_words(engine, self.arrived_s)}"
            fields |= _figures(engine, self.arrived_s)
        _log.log(level, "%s", told, extra={"fields": fields})


def begin(scope: Scope, endpoint: str) -> Exchange:
    """Open the record of an HTTP request, and keep it in its scope."""
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    method = scope["method"] if scope["method"] in _METHODS else "other"
    exchange = Exchange(
        request_id=sane_id(headers.get(b"x-request-id", "")) or uuid.uuid4().hex,
        method=method,
        endpoint=endpoint,
        traceparent=headers.get(b"traceparent", ""),
        tracestate=headers.get(b"tracestate", ""),
    )
    scope[_KEY] = exchange
    return exchange


def exchange_of(scope: Scope) -> Exchange:
    """The record of a request under way."""
    found = scope[_KEY]
    assert isinstance(found, Exchange)
    return found


def _words(engine: Generation, arrived_s: float) -> str:
    places = ", ".join(f"{tokens} from {place}" for place, tokens in engine.reused.items())
    told = f"{engine.prompt_tokens} prompt tokens, {engine.reused_tokens} reused"
    told += f" ({places}), " if places else ", "
    told += f"{engine.answer_tokens} generated"
    if engine.first_token_s is None:
        return f"{told}, no first token"
    return f"{told}, first token after {engine.first_token_s - arrived_s:.3f} s"


def _figures(engine: Generation, arrived_s: float) -> dict[str, object]:
    shown: dict[str, object] = {
        "prompt_tokens": engine.prompt_tokens, "reused_tokens": engine.reused_tokens,
        "reused": engine.reused, "answer_tokens": engine.answer_tokens,
    }  # fmt: skip
    if engine.begun_s is not None:
        shown["queue_s"] = round(engine.begun_s - arrived_s, 6)
    if engine.first_token_s is not None:
        shown["ttft_s"] = round(engine.first_token_s - arrived_s, 6)
    return shown
