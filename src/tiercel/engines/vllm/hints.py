"""Hints of a request under vLLM: `kv_transfer_params = {"tiercel": {...}}`, taken as far as they are right.

A connector cannot refuse a request and must never fail one. So what is no hint is left out, counted, and told
of in the log once a minute, by its name alone. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiercel.engines.vllm.stats import Tally
from tiercel.store.faults import FaultLog
from tiercel.store.policy import Decision, Hints, as_json, sift_hints

FIELD = "tiercel"
_WHERE = f"kv_transfer_params.{FIELD}"
_NONE = Hints()
_log = FaultLog()


def read_hints(params: object, tally: Tally) -> Hints:
    """What a request's `kv_transfer_params` say to us. Never raises."""
    if not isinstance(params, Mapping) or params.get(FIELD) is None:
        return _NONE
    hints, refused = sift_hints(params[FIELD], _WHERE)
    if refused:
        tally.add("hints_ignored", len(refused))
        _log.note("hints", f"{refused[0].param} is not accepted as a hint and was left out; see docs/vllm.md")
        _log.emit()
    return hints


def explained(decision: Decision) -> dict[str, Any]:
    """The `kv_transfer_params` of an answer whose request has the hint `explain`."""
    shown = as_json(decision)
    # The store's to give, and not known here.
    del shown["number"], shown["at_s"]
    return {FIELD: shown}
