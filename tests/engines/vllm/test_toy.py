"""Cold equals warm, byte for byte, through vLLM's real scheduler: the stories of the promises."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engines.vllm.toy import BLOCK, Toy, prompt, toy_store


@pytest.mark.parametrize("units", [1, 3])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 47, 48, 49, 63, 64, 65, 160, 161])
def test_a_prompt_comes_back_whatever_its_length(tmp_path: Path, length: int, units: int) -> None:
    with Toy(tmp_path, toy_store(), units=units).start() as engine:
        tokens = prompt(length)
        engine.run("cold", tokens, 20)
        engine.forget()
        warm = engine.run("warm", tokens, 20)
        size = BLOCK * units
        assert engine.cached(warm) == (length - 1) // size * size
        engine.settled()
