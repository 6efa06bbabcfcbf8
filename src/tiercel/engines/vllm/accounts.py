"""What became of each of vLLM's requests, told to the store once: at its first token, or when it ends before.

Kept by the scheduler's side, from what vLLM tells a connector. Times begin when the scheduler gets a request
and end with the results of the step that sampled its first token: the HTTP server's work before and after is
not in them. Computed tokens are those vLLM scheduled, the last time should the request have been preempted. A
fault in here costs a figure, never a step.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from tiercel.store.policy import ENGINE, Decision, Outcome, action_of, why

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from tiercel.engines.vllm.asker import Ask

log = logging.getLogger("tiercel")
_ENGINE = "vllm"
Given = ParamSpec("Given")
# vLLM's names for how a request ended that was not answered.
_OUTCOMES: Mapping[str, Outcome] = {"FINISHED_ABORTED": "cancelled", "FINISHED_ERROR": "failed"}


@dataclass(slots=True)
class _Account:
    """A request without its first token. Token counts; moments of the monotonic clock."""

    request: Request
    began_s: float
    explain: bool = False
    ask: Ask | None = None
    local: int = 0
    accepted: int = 0
    computed: int = 0
    preemptions: int = 0
    asking_since_s: float | None = None
    loading_since_s: float | None = None
    lookup_s: float = 0.0
    load_s: float = 0.0


def _harmless(
    note: Callable[Concatenate[Accounts, Given], None],
) -> Callable[Concatenate[Accounts, Given], None]:
    @wraps(note)
    def noting(self: Accounts, /, *args: Given.args, **kwargs: Given.kwargs) -> None:
        try:
            note(self, *args, **kwargs)
        except Exception as fault:  # noqa: BLE001 (an account that goes wrong must not end vLLM's scheduler)
            if not self.faults:
                log.warning(
                    "tiercel: requests are not accounted for as they should be: %s", type(fault).__name__
                )
            self.faults += 1

    return noting


class Accounts:
    """Belongs to the scheduler's thread. `report` must not block."""

    def __init__(
        self, report: Callable[[Decision], object], block_tokens: int, *, drops_last: bool = False
    ) -> None:
        self._report = report
        self._block_tokens = block_tokens
        self._drops_last = drops_last
        self._open: dict[str, _Account] = {}
        self._due: set[str] = set()
        self._told: dict[str, Decision] = {}
        self.faults = 0

    @_harmless
    def began(self, request: Request) -> None:
        """The scheduler got a request."""
        self._open[request.request_id] = _Account(request, time.monotonic())

    @_harmless
    def explain(self, name: str) -> None:
        """It wants to be told what was decided: see `told`."""
        self._open[name].explain = True

    @_harmless
    def waits(self, name: str) -> None:
        """It cannot be scheduled before it is known what is stored of it."""
        account = self._open.get(name)
        if account is not None and account.asking_since_s is None:
            account.asking_since_s = time.monotonic()

    @_harmless
    def matched(self, name: str, local_tokens: int, ask: Ask | None) -> None:
        """It is known: vLLM itself has `local_tokens`, the store what the answer says."""
        account = self._open.get(name)
        if account is None:
            return
        account.local, account.ask = local_tokens, ask
        if account.asking_since_s is not None:
            account.lookup_s += time.monotonic() - account.asking_since_s
            account.asking_since_s = None

    @_harmless
    def loading(self, name: str, tokens: int) -> None:
        """So many tokens are loaded for it."""
        account = self._open.get(name)
        if account is not None:
            account.accepted, account.loading_since_s = tokens, time.monotonic()

    @_harmless
    def scheduled(self, tokens: Mapping[str, int]) -> None:
        """A step begins that computes so many tokens of each; called before vLLM counts them as computed."""
        for name in self._open.keys() & tokens.keys():
            account = self._open[name]
            request = account.request
            if account.preemptions != request.num_preemptions:
                account.preemptions, account.computed = request.num_preemptions, 0
            done = request.num_computed_tokens
            account.computed += max(0, min(done + tokens[name], request.num_prompt_tokens) - done)
            if done + tokens[name] >= request.num_prompt_tokens:
                self._due.add(name)

    @_harmless
    def ended(self, loaded: Iterable[str]) -> None:
        """The results of a step are in, and these loads are over."""
        now_s = time.monotonic()
        for name in loaded:
            account = self._open.get(name)
            if account is not None and account.loading_since_s is not None:
                account.load_s += now_s - account.loading_since_s
                account.loading_since_s = None
        for name in [one for one in self._due if self._answered(one)]:
            self._settle(name, now_s)

    @_harmless
    def finished(self, request: Request) -> None:
        """vLLM forgets a request."""
        if request.request_id in self._open:
            self._settle(request.request_id, time.monotonic())

    def told(self, name: str) -> Decision | None:
        """What a request that has finished wanted to be told; once."""
        return self._told.pop(name, None)

    def _answered(self, name: str) -> bool:
        account = self._open.get(name)
        return account is None or account.request.num_output_tokens > 0

    def _settle(self, name: str, now_s: float) -> None:
        self._due.discard(name)
        account = self._open.pop(name, None)
        if account is not None:
            decision = self._decision(account, now_s)
            if account.explain:
                self._told[name] = decision
            self._report(decision)

    def _decision(self, account: _Account, now_s: float) -> Decision:
        request, size = account.request, self._block_tokens
        answered = request.num_output_tokens > 0
        hit = None if account.ask is None else account.ask.hit
        sources = () if hit is None else hit.sources
        prompt = request.num_prompt_tokens
        reused = max(0, prompt - account.computed) if answered else 0
        local = min(account.local, reused)
        loaded = min(account.accepted, reused - local)
        places = by_place(sources, size, local, loaded)
        usable = min(len(sources) - self._drops_last, (prompt - 1) // size)
        beyond = usable - local // size
        reused_tokens = places | ({ENGINE: reused - sum(places.values())} if reused > loaded else {})
        found = Counter(sources)
        return Decision(
            prompt_tokens=prompt,
            block_tokens=size,
            reason=self._reason(account, found, beyond, loaded),
            found=found,
            loaded=_blocks(places, size),
            reused_tokens=reused_tokens,
            computed_tokens=account.computed,
            choice=None if hit is None else hit.choice,
            lookup_s=account.lookup_s,
            load_s=account.load_s,
            action=action_of(beyond, -(-loaded // size)),
            outcome="answered" if answered else _OUTCOMES.get(request.status.name, "answered"),
            engine=_ENGINE,
            ttft_s=now_s - account.began_s if answered else None,
            saved_s=_saved_s(account.ask, loaded, local),
            spent_s=account.lookup_s + account.load_s,
            done=True,
        )

    def _reason(self, account: _Account, found: Mapping[str, int], beyond: int, loaded: int) -> str:
        ask = account.ask
        if ask is None or ask.hit is None:
            return (
                "all is computed but what vLLM has itself: the store was not asked, or did not answer in time"
            )
        if not found:
            return "all is computed but what vLLM has itself: nothing of it is stored"
        if beyond <= 0:
            return "vLLM has all itself that is stored"
        said = why(found, ask.hit.worth, False, ask.hit.choice)
        return said if loaded >= account.accepted else f"{said}; {loaded} tokens of {account.accepted} came"


def by_place(sources: tuple[str, ...], size: int, first: int, tokens: int) -> dict[str, int]:
    """Tokens `first..first+tokens-1` by the place they came from."""
    places: dict[str, int] = {}
    for at in range(first // size, min(len(sources), -(-(first + tokens) // size))):
        inside = min((at + 1) * size, first + tokens) - max(at * size, first)
        places[sources[at]] = places.get(sources[at], 0) + inside
    return places


def _blocks(places: Mapping[str, int], size: int) -> dict[str, int]:
    return {place: -(-tokens // size) for place, tokens in places.items()}


def _saved_s(ask: Ask | None, loaded: int, local: int) -> float | None:
    if not loaded:
        return 0.0
    return None if ask is None or ask.prompt is None else ask.prompt.cost.saved(loaded, local)
