"""Which fields of OpenAI's bodies are known, and what happens with each: nothing is ignored by accident.

A field is handled (see `body`), harmless (accepted, without effect on the answer), neutral (accepted only
with the value that asks for nothing), or refused by name with the nearest field that exists.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from tiercel.web.api.faults import ApiError, bad, show

# Labels and hints of a client that do not change what the answer is.
HARMLESS = frozenset(
    "user metadata store service_tier prompt_cache_key prompt_cache_retention safety_identifier".split()
)

# Fields of features that are not there: the values that ask for nothing, and how to say so.
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "1: one answer per request"),
    "best_of": ((1,), "1: one answer per request"),
    "echo": ((False,), "false: the prompt is not sent back"),
    "suffix": (("",), "no suffix"),
    "logprobs": ((False,), "false: no log probabilities"),
    "top_logprobs": ((0,), "0: no log probabilities"),
    "frequency_penalty": ((0,), "0: no penalties"),
    "presence_penalty": ((0,), "0: no penalties"),
    "repetition_penalty": ((1,), "1: no penalties"),
    "logit_bias": (({},), "an empty object: no biases"),
    "top_k": ((-1, 0), "0 or -1: no limit; use top_p"),
    "min_p": ((0,), "0: no limit; use top_p"),
    "tools": (([],), "an empty list: no tools"),
    "tool_choice": (("none", "auto"), "'none' or 'auto': no tools"),
    "parallel_tool_calls": ((True, False), "true or false: no tools"),
    "functions": (([],), "an empty list: no functions"),
    "function_call": (("none", "auto"), "'none' or 'auto': no functions"),
    "response_format": (({"type": "text"},), '{"type": "text"}: plain text'),
    "modalities": ((["text"],), '["text"]: text only'),
    "audio": ((), "null: text only"),
    "prediction": ((), "null: no predicted outputs"),
    "reasoning_effort": (("none",), "'none' or null: no reasoning levels"),
    "verbosity": ((), "null: no verbosity levels"),
    "web_search_options": ((), "null: no web search"),
}
# In a message that a client hands back as it got it.
NEUTRAL_IN_MESSAGE: dict[str, tuple[tuple[object, ...], str]] = {
    "name": ((), "null: the template knows roles, no names"),
    "refusal": (("",), "null"),
    "annotations": (([],), "an empty list"),
    "audio": ((), "null: text only"),
    "tool_calls": (([],), "an empty list: no tools"),
    "tool_call_id": ((), "null: no tools"),
    "function_call": ((), "null: no functions"),
}


def sift(
    given: dict[str, Any],
    handled: Iterable[str],
    neutral: dict[str, tuple[tuple[object, ...], str]],
    harmless: Iterable[str] = (),
    where: str = "",
) -> dict[str, Any]:
    """The handled fields of a JSON object; null counts as not given. Raises ApiError for what is not known.

    `where` is the path of the object in the body, with its dot (`messages[0].`).
    """
    handled, harmless = frozenset(handled), frozenset(harmless)
    kept: dict[str, Any] = {}
    for name, value in given.items():
        if name in neutral:
            accepted, words = neutral[name]
            if value is not None and not any(_same(value, one) for one in accepted):
                raise bad(
                    f"{where}{name} is {show(value)}; accepted is {words}",
                    f"{where}{name}",
                    "unsupported_value",
                )
        elif name in handled:
            if value is not None:
                kept[name] = value
        elif name not in harmless:
            raise _unknown(name, where, sorted({*handled, *harmless, *neutral}))
    return kept


def _same(value: object, accepted: object) -> bool:
    # True equals 1 in Python, and means something else in a body.
    return isinstance(value, bool) == isinstance(accepted, bool) and value == accepted


def _unknown(name: str, where: str, known: list[str]) -> ApiError:
    near = difflib.get_close_matches(name[:100], known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"accepted are {', '.join(known)}"
    shown = show(name)[1:-1]
    return bad(f"{where}{shown} is not a known field; {hint}", f"{where}{shown}", "unknown_parameter")
