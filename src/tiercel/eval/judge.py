"""One sample under all settings: the context read once, then one forward per setting, compared token by
token.

Figures are over the tokens of the answers, each predicted from the right tokens before it (teacher-forced):
greedy decoding gives the answer exactly where every token of it is the most likely one, so nothing is
generated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from tiercel.errors import RequestError
from tiercel.eval.samples import Sample
from tiercel.eval.text2json import score_objects

if TYPE_CHECKING:
    import torch

    from tiercel.attention.running import Prompt, Setting, TeacherForced


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One sample under one setting.

    kl             nats per answer token, of full attention's distribution against this one's
    agreement      share of answer tokens whose most likely token is the same as with full attention
    accuracy       share of answers of which every token is the most likely one; None: not asked for
    score          text2json's score; None for other tasks
    nll            nats per answer token
    read_share     share of the context's KV that a query attends to, mean over layers, heads and queries
    acts           whether the policy decided for any layer; those with a window of the model's own it leaves
    *_bytes        by the policy's definition, for the whole context; fetched: per new token
    answer_s       how long the judged forward took here; it says nothing about serving
    """

    kl: float
    agreement: float
    accuracy: float | None
    score: float | None
    nll: float
    tokens: int
    answers: int
    read_share: float
    device_bytes: float
    host_bytes: float
    fetched_bytes: float
    full_bytes: float
    context_tokens: int
    answer_s: float
    acts: bool = True


@dataclass(frozen=True, slots=True)
class Encoded:
    """A sample as token ids; `spans` are the answers' places (begin, end) in `new`."""

    context: tuple[int, ...]
    new: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def encode(sample: Sample, tokenizer: Any, context_max: int | None) -> Encoded:
    """Tokenize a sample, each part by itself. Answers of which nothing is predicted have no place.

    Raises RequestError when the model's context is too small, or no answer is left.
    """
    context = tuple(tokenizer(sample.context)["input_ids"])
    new: list[int] = []
    spans = []
    for turn in sample.turns:
        new += tokenizer(turn.question, add_special_tokens=False)["input_ids"] if turn.question else []
        answer = tokenizer(turn.answer, add_special_tokens=False)["input_ids"]
        # Nothing predicts the first token behind the context.
        begin, end = max(len(new), 1), len(new) + len(answer)
        if begin < end:
            spans.append((begin, end))
        new += answer
    if context_max is not None and len(context) + len(new) > context_max:
        raise RequestError(
            f"a sample has {len(context) + len(new)} tokens; accepted by this model: {context_max}"
        )
    if not spans:
        raise RequestError(
            "a sample's answer is one token behind its context, which nothing predicts; accepted: a question"
        )
    return Encoded(context, tuple(new), tuple(spans))


def judge(
    forced: TeacherForced,
    tokenizer: Any,
    sample: Sample,
    settings: Sequence[Setting],
    context_max: int | None,
) -> tuple[list[Outcome], float]:
    """The outcome of each setting, the first of which must be full attention, and the prefill's seconds."""
    import torch

    encoded = encode(sample, tokenizer, context_max)
    begun = time.perf_counter()
    ids, special, punctuation = context_of(encoded, tokenizer, forced.device)
    prompt = forced.prefill(ids, settings, special=special, punctuation=punctuation)
    prefill_s = time.perf_counter() - begun
    outcomes: list[Outcome] = []
    reference: torch.Tensor | None = None
    new = torch.tensor([encoded.new], device=ids.device)
    for number in range(len(settings)):
        begun = time.perf_counter()
        answer = forced.answer(prompt, number, new)
        seconds = time.perf_counter() - begun
        at = [place - 1 for begin, end in encoded.spans for place in range(begin, end)]
        logs = answer.logits[0, at].float().log_softmax(-1)
        if reference is None:
            reference = logs
        outcomes.append(
            _outcome(logs, reference, encoded, sample, tokenizer, prompt, number, answer.read_share, seconds)
        )
    return outcomes, prefill_s


def context_of(
    encoded: Encoded, tokenizer: Any, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The context's ids [1, tokens], and which are special tokens or punctuation."""
    import torch

    from tiercel.attention.marks import marks_of

    special, punctuation = marks_of(tokenizer, encoded.context)
    ids = torch.tensor([encoded.context], device=device)
    return ids, special.to(device), punctuation.to(device)


def _outcome(
    logs: torch.Tensor, reference: torch.Tensor, encoded: Encoded, sample: Sample, tokenizer: Any,
    prompt: Prompt, number: int, read_share: float, answer_s: float,
) -> Outcome:  # fmt: skip
    import torch

    right = torch.tensor([encoded.new[place] for begin, end in encoded.spans for place in range(begin, end)])
    kl = (reference.exp() * (reference - logs)).sum(-1).mean()
    best = logs.argmax(-1)
    lengths = [end - begin for begin, end in encoded.spans]
    hits = [bool(part.all()) for part in torch.split(best.cpu() == right, lengths)]
    where = prompt.bytes_of(number)
    return Outcome(
        kl=max(float(kl), 0.0),
        agreement=float((best == reference.argmax(-1)).float().mean()),
        accuracy=sum(hits) / len(hits) if sample.scored else None,
        score=_score(sample, [tokenizer.decode(part) for part in torch.split(best, lengths)]),
        nll=float(-logs.gather(-1, right.to(logs.device)[:, None]).mean()),
        tokens=len(right),
        answers=len(hits),
        read_share=read_share,
        device_bytes=where.device,
        host_bytes=where.host,
        fetched_bytes=where.fetched,
        full_bytes=prompt.full_bytes,
        context_tokens=len(encoded.context),
        answer_s=answer_s,
        acts=bool(prompt.prepared[number]),
    )


def _score(sample: Sample, said: Sequence[str]) -> float | None:
    """Text2JSON's score of the values that the model would write, its brackets and keys given."""
    if not any(turn.field for turn in sample.turns):
        return None
    found: list[dict[str, object]] = []
    right: list[dict[str, object]] = []
    for turn, text in zip(sample.turns, said, strict=True):
        if turn.field == "name":
            found.append({})
            right.append({})
        found[-1][turn.field], right[-1][turn.field] = text, turn.answer
    return score_objects(found, right)
