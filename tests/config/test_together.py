"""Settings that do not go together are refused when the configuration is read, before any model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercel.config import Config
from tiercel.config.export import exported
from tiercel.errors import ConfigError


def read(**settings: str) -> Config:
    return Config.load(None, {}, {key.replace("__", "."): value for key, value in settings.items()})


def refused(**settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"attention__policy": "landmark"}, "attention.policy = landmark"),
        ({"model__kv_device_budget": "256MiB"}, "model.kv_device_budget = 256MiB"),
        (
            {"attention__policy": "h2o", "model__kv_device_budget": "1GiB"},
            "attention.policy = h2o and model.kv_device_budget = 1GiB",
        ),
    ],
)
def test_chunks_go_with_neither_a_policy_nor_a_device_budget(other: dict[str, str], named: str) -> None:
    assert refused(attention__chunks="16", **other) == (
        f"flag: attention.chunks: '16' does not go with {named}, for chunks are moved where all KV is at "
        "hand; accepted: attention.chunks = no, or neither a policy nor a device budget"
    )
    assert read(attention__chunks="no", **other).attention.chunks == "no"
    assert read(attention__chunks="16").attention.chunks == "16"


def test_a_budget_without_a_policy_says_so(tmp_path: Path) -> None:
    said = refused(attention__budget="0.1")
    assert said.startswith("flag: attention.budget: 0.1 says nothing without attention.policy; accepted: ")
    with pytest.raises(ConfigError, match=r"^environment: TIERCEL_ATTENTION_BUDGET: 0\.25 says nothing"):
        Config.load(None, {"TIERCEL_ATTENTION_BUDGET": "0.25"})
    assert read(attention__budget="0.1", attention__policy="h2o").attention.budget == 0.1


def test_who_says_that_attention_is_full_need_not_clear_a_budget(tmp_path: Path) -> None:
    """A file's policy is switched off by a flag; a daemon gets every setting from who starts it."""
    file = tmp_path / "tiercel.toml"
    file.write_text('[attention]\npolicy = "h2o"\nbudget = 0.1\n')
    assert Config.load(file, {}, {"attention.policy": "full"}).attention.policy == "full"
    assert Config.load(None, exported(Config(), {})) == Config()
