"""The transformers engine: any Hugging Face causal language model with plain caches, on CPU or CUDA."""

from __future__ import annotations

from tiercel.engines.transformers.answer import Stopped
from tiercel.engines.transformers.batch import Batch, Member
from tiercel.engines.transformers.engine import TransformersEngine
from tiercel.engines.transformers.opening import open_engine
from tiercel.engines.transformers.prefilled import Prefill
from tiercel.engines.transformers.request import Delta, Event, Request, Result, Timing

__all__ = [
    "Batch",
    "Delta",
    "Event",
    "Member",
    "Prefill",
    "Request",
    "Result",
    "Stopped",
    "Timing",
    "TransformersEngine",
    "open_engine",
]
