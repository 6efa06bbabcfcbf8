"""What went wrong at an object store, in words of ours: the library's texts quote answers and addresses.

Only the status and the kind of fault are taken from them, never anything that could be a secret.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from tiercel.tiers.base import MISSING, Fate, Outcome

# What obstore raises of its own accord; a missing object is a FileNotFoundError.
FAULTS = (BaseError, OSError)

# The first of each in the text is the library's own; what a server sent comes behind.
_STATUS = re.compile(r"status code: (\d{3})")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>|bucket does not exist")
_ASKED = re.compile(r"Error performing [A-Za-z ]*?(?:GET|PUT|POST) (\S+) in ")
_CREDENTIALS = re.compile(
    r"https?://(169\.254\.|metadata\.google|oauth2\.|sts\.|login\.microsoft|[^/]+/(oauth2|token|latest/api/token"
    r"|latest/meta-data|computeMetadata|metadata/identity)\b)"
)
# Of a deletion of many the answer is 200, with a code for each that stays.
_NOT_DELETED = re.compile(r"Generic \w+ error: DeleteObjects request failed.*\(code: (\w+)\)\n")
_NO_BULK = "Generic S3 error: Got invalid DeleteObjects response"
_CODES = {"AccessDenied": 403, "SlowDown": 503, "InternalError": 500}
_SLOW_STATUS = (429, 503)
_ELSEWHERE_STATUS = (301, 307, 400)
_DENIED = "access denied{}: check the credentials, and that they may get, put, delete and list"
_FULL_STATUS = 507
_AGAIN_STATUS = (408, 500, 502, 504)
_KINDS = {
    "Connect": "no connection",
    "Timeout": "timed out",
    "Interrupted": "connection broke",
    "Decode": "malformed answer",
}
RANGE_STATUS = 416


@dataclass(frozen=True, slots=True)
class Fault:
    """A failed request. `again`: worth another try; `slow`: the place asked us to slow down; `mend`: whoever
    set it up has to do something.
    """

    outcome: Outcome
    again: bool = False
    slow: bool = False
    mend: bool = False
    status: int | None = None


def fault_of(error: BaseException) -> Fault:
    """Sort an exception of the library."""
    text = str(error)
    status = _status(text)
    if status in (None, 404) and _NO_BUCKET.search(text):
        return Fault(_failed("bucket does not exist"), mend=True)
    if isinstance(error, FileNotFoundError):
        return Fault(MISSING, status=status)
    if _asked_for_credentials(text):
        return Fault(_failed("no credentials found (environment, profile, instance metadata)"), mend=True)
    if status is not None:
        return _by_status(status)
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return Fault(_failed(_DENIED.format("")), mend=True)
    kind = _KIND.search(text)
    refused = _NOT_DELETED.match(text)
    if refused is not None:
        return _by_status(_CODES.get(refused[1], 400))
    if kind is not None:
        # Time that ran out once leaves none for another try of the same length; the caller sees to that.
        return Fault(_failed(_KINDS.get(kind[1], "request failed")), again=True)
    if text.startswith(_NO_BULK):
        return Fault(_failed("malformed answer to a deletion of many: bulk_delete=no may help"))
    return Fault(_failed("malformed answer"))


def is_whole_instead(error: BaseException) -> bool:
    """Whether a server answered a request for a range with the whole object."""
    return "Received non-partial response" in str(error)


def _by_status(status: int) -> Fault:
    if status in (401, 403):
        return Fault(_failed(_DENIED.format(f" ({status})")), mend=True, status=status)
    if status in _ELSEWHERE_STATUS:
        return Fault(_failed(f"answered {status}: check region and endpoint"), mend=True, status=status)
    if status in _SLOW_STATUS:
        return Fault(_failed(f"asked to slow down ({status})"), again=True, slow=True, status=status)
    if status == _FULL_STATUS:
        return Fault(Outcome(Fate.FULL, f"no space left there ({status})"), status=status)
    return Fault(_failed(f"answered {status}"), again=status in _AGAIN_STATUS, status=status)


def _status(text: str) -> int | None:
    found = _STATUS.search(text)
    return int(found[1]) if found else None


def _asked_for_credentials(text: str) -> bool:
    """Whether the request that failed was not to the store but to where credentials come from."""
    asked = _ASKED.search(text)
    return asked is not None and _CREDENTIALS.match(asked[1]) is not None


def _failed(reason: str) -> Outcome:
    return Outcome(Fate.FAILED, reason)
