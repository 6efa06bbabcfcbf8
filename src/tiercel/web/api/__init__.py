"""The OpenAI-compatible HTTP server: one model, one generation loop, a bounded queue in front of it.

    app -> body (what was asked) -> queue (one request at a time) -> answers (what goes back, whole or as SSE)

It decides nothing about caching; the engine and its store do. Neither prompts nor answers are ever logged.
"""

from __future__ import annotations
