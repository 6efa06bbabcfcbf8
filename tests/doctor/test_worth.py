"""Break-even: against the same sum done block by block, and its verdicts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercel.doctor import Verdict
from tiercel.doctor.speed import Speed
from tiercel.doctor.worth import Prefill, least_tokens, worth

SPEED = Speed(2 << 20, 1e9, 1e9, one_read_s=0.004, gap_s=0.002, cached=False)


@given(
    one_read_s=st.floats(1e-5, 1.0),
    gap_s=st.floats(1e-5, 0.1),
    tokens_per_s=st.floats(10, 1e5),
    block_tokens=st.sampled_from([16.0, 100.0, 256.0]),
)
def test_the_least_prefix_is_the_first_whose_loading_gains(
    one_read_s: float, gap_s: float, tokens_per_s: float, block_tokens: float
) -> None:
    speed = Speed(2 << 20, 1e9, 1e9, one_read_s, gap_s, cached=False)
    found = least_tokens(speed, tokens_per_s, block_tokens)
    blocks_max = 2000
    gains = [
        one_read_s + (blocks - 1) * gap_s < 0.98 * blocks * block_tokens / tokens_per_s
        for blocks in range(1, blocks_max)
    ]
    if found is None:
        assert True not in gains
        return
    blocks = round(found / block_tokens)
    if blocks < blocks_max - 1:
        first = gains.index(True) + 1
        # At the border rounding decides.
        assert abs(blocks - first) <= 1


def test_verdicts() -> None:
    token_bytes = 128 << 10  # 16 tokens a record: 8,000 tokens a second
    good = worth(SPEED, Prefill(1000, token_bytes, "given", "of a model"))
    assert good.verdict is Verdict.OK
    assert good.value is not None
    assert 7.9 < good.value < 8.1
    assert good.figures["least_tokens"] == 16
    assert worth(SPEED, Prefill(20_000, token_bytes, "given", "of a model")).verdict is Verdict.WARN
    assert worth(SPEED, Prefill(None, token_bytes)).verdict is Verdict.SKIP
    assert "--prefill" in worth(SPEED, Prefill(None, token_bytes)).advice
    assert "--model" in worth(SPEED, Prefill(1000, None)).advice
