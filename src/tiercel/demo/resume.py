"""The second process of the demo: `python -m tiercel.demo.resume`, a job on stdin, messages on stdout.

It starts with nothing but the cache directory; what it reuses was written by a process that is closed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from tiercel.demo.measure import Meter, warm_up
from tiercel.demo.messages import Advanced, Done, Failed, Job, Message, Ready, Saying, Took
from tiercel.demo.settings import LOAD_DEADLINE_S, store_config
from tiercel.errors import TiercelError


class Pipe:
    """Writes messages, one a line, at once."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def send(self, message: Message) -> None:
        self._stream.write(msgspec.json.encode(message) + b"\n")
        self._stream.flush()


def resume(job: Job, pipe: Pipe) -> None:
    """Do the job. Raises TiercelError."""
    from tiercel.engines.transformers import TransformersEngine
    from tiercel.store import open_store

    pipe.send(Saying("starting a new process and loading the model"))
    config = store_config(Path(job.cache_dir), job.ram_bytes, job.block_tokens, job.dtype)
    engine = TransformersEngine(
        job.model_dir, dtype=job.dtype, block_tokens=job.block_tokens, load_deadline_s=LOAD_DEADLINE_S
    )
    with open_store(config, engine.layout.payload_bytes) as store:
        engine.attach(store)
        warm_up(engine)
        pipe.send(Ready(time.monotonic() - job.origin_s))
        meter = Meter(
            engine,
            store,
            salt=job.salt,
            answer_tokens=job.answer_tokens,
            origin_s=job.origin_s,
            restarted=True,
            say=lambda text: pipe.send(Saying(text)),
        )
        for talk in job.talks:
            pipe.send(Took(meter.resumed(talk, lambda: pipe.send(Advanced()))))
        pipe.send(Done(meter.spans, meter.gaps, meter.notes))


def main() -> int:
    """Run as a process. Whatever a library prints goes to stderr: stdout carries messages only."""
    pipe = Pipe(os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        resume(msgspec.json.decode(sys.stdin.buffer.read(), type=Job), pipe)
    except TiercelError as error:
        pipe.send(Failed(" ".join(str(error).split())))
        return error.exit_code
    except msgspec.DecodeError as error:
        pipe.send(Failed(f"the job is not understood: {error}"))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
