"""Lossy codecs start only when somebody agreed: by saying so, or by naming a report that judges them."""

from __future__ import annotations

import json
import os
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tiercel.blocks import Identity
from tiercel.cli import run
from tiercel.codecs import LOSSY, LossyTiers
from tiercel.codecs.consent import LossyAttention, LossyChunks, lossy_attention, lossy_chunks, lossy_tiers
from tiercel.config import Config, TierConfig
from tiercel.engines.vllm.options import read_options
from tiercel.errors import ConfigError, EngineError
from tiercel.service import Daemon
from tiercel.store import open_store


def config(tmp_path: Path, codecs: list[str], accept: str | None = None) -> Config:
    given: dict[str, object] = {"ram.size": "8MiB"}
    for number, codec in enumerate(codecs):
        given |= {
            f"tiers.{number}.path": str(tmp_path / f"tier{number}"),
            f"tiers.{number}.size": "64MiB",
            f"tiers.{number}.codec": codec,
        }
    return Config.load(None, {}, given | ({"store.accept_lossy": accept} if accept else {}))


def report(tmp_path: Path, **more: object) -> str:
    rows = [{"policy": "int8", "task": "text", "kl": 0.001}, {"policy": "quest", "kl": 0.2}, "nonsense"]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"model": "SmolLM2", "rows": rows} | more))
    return str(path)


def refusal(made: Config) -> str:
    with pytest.raises(ConfigError) as caught:
        lossy_tiers(made)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_setting_knows_exactly_the_codecs_there_are() -> None:
    (setting,) = [one.metadata["setting"] for one in fields(TierConfig) if one.name == "codec"]
    assert set(setting.choices) == {"none", "lossless", *LOSSY}


def test_exact_tiers_need_nobodys_consent(tmp_path: Path) -> None:
    assert lossy_tiers(config(tmp_path, ["none", "lossless"])) == LossyTiers()


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("accept", [None, "no", "false"])
def test_a_lossy_tier_is_refused_by_name_until_it_is_accepted(
    tmp_path: Path, name: str, accept: str | None
) -> None:
    said = refusal(config(tmp_path, ["lossless", name], accept))
    assert f"tiers.1.codec = {name} changes answers" in said
    assert "accepted: --accept-lossy" in said
    assert lossy_tiers(config(tmp_path, ["lossless", name], "yes")) == LossyTiers((name,))


def test_no_store_opens_without_consent_and_nothing_is_made_on_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="changes answers"):
        open_store(config(tmp_path, ["int4"]), 1 << 20)
    assert not (tmp_path / "tier0").exists()
    with open_store(config(tmp_path, ["int4", "int8"], "yes"), 1 << 20) as store:
        assert store.lossy == LossyTiers(("int4", "int8"))
        assert store.stats().lossy == ("int4", "int8")


def test_a_report_is_consent_for_its_model_and_the_codecs_it_judges(tmp_path: Path) -> None:
    assert lossy_tiers(config(tmp_path, ["int8"], report(tmp_path))) == LossyTiers(("int8",), ("SmolLM2",))
    told = lossy_tiers(config(tmp_path, ["int8"], report(tmp_path, revision="abc")))
    assert told.models == ("SmolLM2@abc",)
    assert "says nothing of codec 'int4'" in refusal(config(tmp_path, ["int8", "int4"], report(tmp_path)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "names no model"),
        ('{"model": 3}', "names no model"),
        ("\xff", "JSON"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.json").write_bytes(text.encode("latin-1"))
    assert words in refusal(config(tmp_path, ["int8"], str(tmp_path / "r.json")))
    assert "No such file" in refusal(config(tmp_path, ["int8"], str(tmp_path / "missing.json")))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is no file" in refusal(config(tmp_path, ["int8"], str(tmp_path / "pipe")))


@pytest.mark.parametrize("budget", ["10" * 200, "1e400", "-1", '"x"', "null", "[]", "NaN"])
def test_a_budget_that_is_none_is_not_the_one_that_is_asked_for(tmp_path: Path, budget: str) -> None:
    (tmp_path / "r.json").write_text(f'{{"model": "m", "rows": [{{"policy": "h2o", "budget": {budget}}}]}}')
    given = {"attention.policy": "h2o", "attention.budget": "0.25", "store.accept_lossy": tmp_path / "r.json"}
    made = Config.load(None, {}, {name: str(value) for name, value in given.items()})
    with pytest.raises(ConfigError, match="says nothing of policy 'h2o'"):
        lossy_attention(made)


def test_a_report_is_about_its_weights_wherever_they_lie() -> None:
    digest, other = "ab" * 32, "cd" * 32
    judged = LossyTiers(("int8",), (f"folder@{digest}",))
    for name, revision, allowed in (
        ("hub/name", digest, True),
        ("folder", digest, True),
        ("folder", other, False),
    ):
        assert judged.allows(Identity(name, revision, "auto", b"g", "vllm-1", 16)) is allowed
    versions = LossyTiers(("int8",), ("folder@1",))
    assert versions.allows(Identity("folder", "1", "auto", b"g", "vllm-1", 16))
    assert not versions.allows(Identity("other", "1", "auto", b"g", "vllm-1", 16)), "a version is no digest"


def test_a_report_without_rows_judges_nothing(tmp_path: Path) -> None:
    assert "says nothing" in refusal(config(tmp_path, ["int8"], report(tmp_path, rows={"policy": "int8"})))


@pytest.mark.parametrize("command", [["serve"], ["daemon", "--socket", "SOCKET"]])
def test_commands_refuse_in_one_line_before_they_load_or_listen(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    socket = str(tmp_path / "s")
    words = [socket if word == "SOCKET" else word for word in command]
    for key, value in {"path": tmp_path / "cache", "size": "64MiB", "codec": "int4"}.items():
        words += ["--set", f"tiers.0.{key}={value}"]
    assert run(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("tiercel: error: tiers.0.codec = int4 changes answers")
    assert said.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_serve_refuses_a_policy_in_one_line_before_it_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "no-such-model", "--attention-policy", "landmark"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("tiercel: error: attention.policy = landmark changes answers; accepted: --accept")
    assert said.count("\n") == 1
    agreed = ["--accept-lossy", "--engine", "transformers", "--print-command"]
    assert run(["serve", "no-such-model", "--attention-policy", "landmark", *agreed]) == 2
    assert "--print-command: is for vLLM" in capsys.readouterr().err, "the control gets further"


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize(
    ("flag", "value", "refused"),
    [
        ("--attention-policy", "landmark", "attention.policy = landmark: vLLM has none; accepted: full"),
        ("--reuse-chunks", "16", "attention.chunks = 16: vLLM has none; accepted: no"),
        ("--kv-device-budget", "1KiB", "model.kv_device_budget = 1024: vLLM has none; accepted: not set"),
    ],
)
def test_what_vllm_has_not_is_refused_with_it(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, refused: str
) -> None:
    agreed = ["--accept-lossy", "--engine", "vllm", "--print-command"]
    assert run(["serve", "org/model", flag, value, *agreed]) == 2
    assert refused in capsys.readouterr().err
    assert run(["serve", "org/model", *agreed]) == 0, "the control"


def test_a_policys_report_counts_with_its_budget(tmp_path: Path) -> None:
    rows = [{"policy": "landmark", "budget": 0.25}, {"policy": "quest", "budget": "a lot"}, {"policy": 3}]
    told = {"store.accept_lossy": report(tmp_path, rows=rows, revision="abc"), "attention.policy": "landmark"}
    assert lossy_attention(Config.load(None, {}, {})) is None
    agreed = lossy_attention(Config.load(None, {}, told))
    assert agreed == LossyAttention("landmark", 0.25, ("SmolLM2@abc",))
    assert str(agreed) == "landmark@0.25"
    for other in ({"attention.budget": "0.3"}, {"attention.policy": "quest"}, {"attention.policy": "h2o"}):
        with pytest.raises(ConfigError, match="says nothing of policy"):
            lossy_attention(Config.load(None, {}, told | other))


def test_chunks_need_consent_to_just_what_is_set(tmp_path: Path) -> None:
    assert lossy_chunks(Config.load(None, {}, {})) is None
    asked = {"attention.chunks": "16"}
    with pytest.raises(ConfigError, match=r"attention.chunks = 16 changes answers; accepted: --accept"):
        lossy_chunks(Config.load(None, {}, asked))
    assert lossy_chunks(Config.load(None, {}, asked | {"store.accept_lossy": "yes"})) == LossyChunks("16")
    told = {"store.accept_lossy": report(tmp_path, rows=[{"policy": "chunks-16"}], revision="abc")}
    agreed = lossy_chunks(Config.load(None, {}, asked | told))
    assert agreed is not None
    assert agreed == LossyChunks("16", ("SmolLM2@abc",))
    with pytest.raises(ConfigError, match="says nothing of 'chunks-8'"):
        lossy_chunks(Config.load(None, {}, {"attention.chunks": "8"} | told))
    identity = Identity("Other", "def", "bfloat16", b"g", "layout", 16)
    with pytest.raises(EngineError, match=r"'chunks-16' changes answers .* not for model 'Other'"):
        agreed.check(identity)
    agreed.check(replace(identity, model="SmolLM2", revision="abc"))


def test_a_daemon_with_consent_listens(tmp_path: Path) -> None:
    made = config(tmp_path, ["int8"], "yes")
    daemon = Daemon(made, tmp_path / "s")
    assert (tmp_path / "s").exists()
    daemon.close()
    with pytest.raises(ConfigError, match="changes answers"):
        Daemon(config(tmp_path, ["int8"]), tmp_path / "s2")


def test_vllms_connector_refuses_too() -> None:
    extra: dict[str, object] = {"tiers": [{"path": "cache", "size": "64MiB", "codec": "int8"}]}
    with pytest.raises(
        ConfigError, match=r"kv_connector_extra_config: tiers\.0\.codec = int8 changes answers"
    ):
        read_options(extra)
    read_options(extra | {"store.accept_lossy": "yes"})
