"""Requests as OpenTelemetry spans, sent to an OTLP collector in the background.

    POST /v1/chat/completions          the whole request; its parent is the client's `traceparent`
      first token                      arrival to first token
        wait                           arrival to engine
        lookup  load  prefill          the engine's own figures of this prompt
      decode                           first token to the end

Spans are made from a request's record once it has ended, so that tracing costs a request nothing. They wait
in a bounded queue; a collector that is gone or hangs loses spans and holds nobody up. Nothing of a prompt is
told.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tiercel import __version__
from tiercel.errors import ConfigError
from tiercel.web.api.exchange import Exchange, Generation

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

FLAG = "--otlp-traces-endpoint"
_EXAMPLE = "http://127.0.0.1:4318/v1/traces"
_PATH = "/v1/traces"
_NEEDED = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.exporter.otlp")
_CLOSE_S = 2.0
_SERVER_FAULT = 500


class Tracing:
    """Where spans of requests to `model` go: a collector at `url`.

    The SDK's own variables hold for the rest: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_MAX_QUEUE_SIZE and so on.
    """

    def __init__(self, url: str, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        resource = Resource.create({SERVICE_VERSION: __version__})
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "tiercel"}))
        # At exit it would wait for the collector as long as that likes.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("tiercel", __version__)
        self._within, self._parent_of = set_span_in_context, TraceContextTextMapPropagator().extract
        self._server, self._failed = SpanKind.SERVER, Status(StatusCode.ERROR)
        self._model = model

    def record(self, exchange: Exchange) -> None:
        """Make the spans of a request that has ended. Does not wait."""
        if exchange.looks:
            return
        # Intervals come from the clock that never jumps; only their place on the calendar is the other's.
        epoch_s = time.time() - time.monotonic()
        headers = {"traceparent": exchange.traceparent, "tracestate": exchange.tracestate}
        root = self._tracer.start_span(
            f"{exchange.method} {exchange.endpoint}",
            context=self._parent_of({name: value for name, value in headers.items() if value}),
            kind=self._server,
            start_time=_ns(epoch_s + exchange.arrived_s),
            attributes=self._attributes(exchange),
        )
        if exchange.status >= _SERVER_FAULT:
            root.set_status(self._failed)
        if exchange.generation is not None:
            self._engine(exchange, exchange.generation, root, epoch_s)
        root.end(_ns(epoch_s + exchange.ended_s))
        exchange.trace_id = f"{root.get_span_context().trace_id:032x}"

    def close(self) -> None:
        """Send what waits, for 2 s at most."""
        # The SDK's own deadline is not one while a call to the collector is under way.
        last = threading.Thread(target=self._provider.shutdown, name="tiercel-last-spans", daemon=True)
        last.start()
        last.join(_CLOSE_S)

    def _attributes(self, exchange: Exchange) -> dict[str, AttributeValue]:
        shown: dict[str, AttributeValue] = {
            "http.request.method": exchange.method,
            "http.route": exchange.endpoint,
            "http.response.status_code": exchange.status,
            "tiercel.request_id": exchange.request_id,
            "tiercel.outcome": exchange.outcome,
        }
        if (engine := exchange.generation) is not None:
            shown |= {
                "gen_ai.operation.name": "chat" if "/chat/" in exchange.endpoint else "text_completion",
                "gen_ai.request.model": self._model,
                "gen_ai.usage.input_tokens": engine.prompt_tokens,
                "gen_ai.usage.output_tokens": engine.answer_tokens,
                "tiercel.reused_tokens": engine.reused_tokens,
            }
            if engine.decision is not None:
                shown["tiercel.reason"] = engine.decision.reason
        return shown

    def _engine(self, exchange: Exchange, engine: Generation, root: Span, epoch_s: float) -> None:
        arrived_s, whole = epoch_s + exchange.arrived_s, self._within(root)
        if engine.begun_s is None:
            self._span("wait", arrived_s, epoch_s + exchange.ended_s, whole)
            return
        begun_s = epoch_s + engine.begun_s
        if engine.first_token_s is None:
            self._span("wait", arrived_s, begun_s, whole)
            return
        first_s = epoch_s + engine.first_token_s
        first = self._tracer.start_span("first token", whole, start_time=_ns(arrived_s))
        inner = self._within(first)
        self._span("wait", arrived_s, begun_s, inner)
        if (done := engine.decision) is not None:
            # A decision is dated at its first token, and its engine's clock began just before the lookup.
            dated_s = min(done.at_s or first_s, first_s)
            lookup_s = max(begun_s, dated_s - (done.ttft_s or first_s - begun_s))
            load_s = lookup_s + done.lookup_s
            prefill_s = load_s + done.load_s
            self._span("lookup", lookup_s, load_s, inner, _places("found", done.found))
            if done.found:
                self._span("load", load_s, prefill_s, inner, _places("loaded", done.loaded))
            computed = {"tiercel.computed_tokens": done.computed_tokens} | _places("met", done.met)
            self._span("prefill", prefill_s, prefill_s + done.prefill_s, inner, computed)
        first.end(_ns(first_s))
        self._span("decode", first_s, epoch_s + exchange.ended_s, whole)

    def _span(
        self,
        name: str,
        start_s: float,
        end_s: float,
        context: Context,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=_ns(start_s))
        span.end(_ns(max(start_s, end_s)))


def _places(what: str, blocks: Mapping[str, int]) -> dict[str, AttributeValue]:
    return {f"tiercel.{what}_blocks.{place}": count for place, count in blocks.items()}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def check_endpoint(endpoint: str) -> str:
    """The URL to send to. Raises ConfigError if it is none, or without OpenTelemetry.

    Credentials belong in OTEL_EXPORTER_OTLP_HEADERS: URLs are shown.
    """
    if not all(find_spec(name) for name in _NEEDED):
        raise ConfigError(f"{FLAG}: opentelemetry is not installed; accepted: pip install 'tiercel[otel]'")
    try:
        parts = urlsplit(endpoint)
        port = parts.port
    except ValueError:
        raise ConfigError(f"{FLAG}: is no URL; accepted: such as {_EXAMPLE}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or set("@?#") & set(endpoint):
        raise ConfigError(f"{FLAG}: is no http URL without user and query; accepted: such as {_EXAMPLE}")
    return endpoint if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}{_PATH}"
