"""Tiers by kind: openers found, checked and called; a place that does not answer; kinds of other packages."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from tiercel.config import Config, TierConfig
from tiercel.errors import TierError, TierUnreachable
from tiercel.store import open_store
from tiercel.testing.conformance import TierContract
from tiercel.testing.records import RECORD_BYTES, buffer, chain, record
from tiercel.tiers import Fate, FilesTier, Outcome, Tier, registry
from tiercel.tiers.memory import MemoryTier
from tiercel.tiers.registry import METHODS, check_tier, open_tier, tier_names
from tiercel.tiers.reopening import Reopening
from tiercel.tiers.url import TierUrl

CHAIN = chain(2)
REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "sqlite-tier"


class Tape(MemoryTier):
    """A kind of another package; what it is to do is set by each test."""

    fault: Exception | None = None
    silent = False
    opened = 0

    def __init__(self, url: TierUrl, *, name: str, deadline_s: float, slot_bytes: int) -> None:
        url.done()
        type(self).opened += 1
        if self.fault is not None:
            raise self.fault
        super().__init__(64 << 20, name=name)
        self.given = (url.host, deadline_s, slot_bytes)

    def read(self, keys, records):
        if self.silent:
            return [Outcome(Fate.FAILED, "no answer")] * len(keys)
        return super().read(keys, records)


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> type[Tape]:
    monkeypatch.setattr(Tape, "fault", None)
    monkeypatch.setattr(Tape, "silent", False)
    monkeypatch.setattr(Tape, "opened", 0)
    offer(monkeypatch, Tape)
    return Tape


def offer(monkeypatch: pytest.MonkeyPatch, opener: object) -> None:
    """Let an entry point `tape` name `opener`."""

    class Entry(EntryPoint):
        def load(self) -> object:
            return opener

    found = EntryPoints([Entry("tape", "tapes:Tape", "tiercel.tiers")])
    monkeypatch.setattr(registry, "entry_points", lambda **which: found)


def config(**more: object) -> TierConfig:
    return TierConfig(kind="tape", url="tape://library", **more)  # type: ignore[arg-type]


def test_names_are_short_and_numbered_from_the_second_on() -> None:
    kinds = ["files", "valkey", "files", "tape", "valkey", "files"]
    assert tier_names(kinds) == ["disk", "valkey", "disk2", "tape", "valkey2", "disk3"]


def test_an_opener_gets_the_url_the_name_the_deadline_and_the_size_of_a_slot(tape: type[Tape]) -> None:
    tier = open_tier(config(deadline_s=2.5), "tape2", RECORD_BYTES)
    assert isinstance(tier, Tape)
    assert (tier.name, tier.given) == ("tape2", ("library", 2.5, RECORD_BYTES))


@pytest.mark.parametrize("method", METHODS)
def test_a_class_that_lacks_a_method_is_refused_before_it_is_opened(
    tape: type[Tape], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    offer(monkeypatch, type("Lacking", (Tape,), {method: None}))
    with pytest.raises(
        TierError, match=f"tiercel.tiers: tape = tapes:Tape lacks the method '{method}'; accepted"
    ):
        open_tier(config(), "tape", RECORD_BYTES)
    assert tape.opened == 0


def test_what_a_function_opens_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, lambda url, **options: object())
    with pytest.raises(TierError, match="tier of kind 'tape': object lacks the method 'contains'"):
        open_tier(config(), "tape", RECORD_BYTES)
    nameless = MemoryTier(64 << 20)
    del nameless.name
    with pytest.raises(TierError, match="lacks the attribute 'name'"):
        check_tier(nameless, "it")
    offer(monkeypatch, "not callable")
    with pytest.raises(TierError, match="is not callable"):
        open_tier(config(), "tape", RECORD_BYTES)


def test_an_unknown_parameter_and_an_opener_that_refuses_end_the_start(tape: type[Tape]) -> None:
    with pytest.raises(TierError, match="parameter 'speed' is unknown"):
        open_tier(TierConfig(kind="tape", url="tape://library?speed=1"), "tape", RECORD_BYTES)
    tape.fault = TierError("bad credentials")
    with pytest.raises(TierError, match="bad credentials"):
        open_tier(config(), "tape", RECORD_BYTES)


@pytest.mark.parametrize(
    "fault", [ConnectionRefusedError(111, "Connection refused"), TierUnreachable("gone")]
)
def test_a_place_that_cannot_be_opened_comes_back_by_itself_unless_it_is_required(
    tape: type[Tape], fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    tape.fault = fault
    with pytest.raises(TierUnreachable, match=r"tier tape cannot be used: .*(refused|gone)"):
        open_tier(config(required=True), "tape", RECORD_BYTES)
    with caplog.at_level(logging.WARNING, "tiercel"):
        tier = open_tier(config(), "tape", RECORD_BYTES)
    assert len(caplog.records) == 1
    assert "tape: cannot be used now, going on without it" in caplog.text
    assert tier.contains(CHAIN.keys) == [False, False]
    (outcome,) = tier.write([CHAIN.keys[0]], [record(CHAIN)])
    assert outcome.fate is Fate.FAILED
    assert re.search("refused|gone", outcome.reason)
    with pytest.raises(OSError, match=r"refused|gone"):
        list(tier.scan())
    tape.fault = None
    assert tier.write([CHAIN.keys[0]], [record(CHAIN)])[0].fate is Fate.OK
    assert tier.read([CHAIN.keys[0]], [buffer()])[0].fate is Fate.OK
    tier.close()
    assert tier.read([CHAIN.keys[0]], [buffer()])[0].fate is Fate.FAILED


def test_a_tier_that_opens_but_does_not_answer_is_named_and_kept_unless_it_is_required(
    tape: type[Tape], caplog: pytest.LogCaptureFixture
) -> None:
    tape.silent = True
    with pytest.raises(TierUnreachable, match="tier tape cannot be used: tape://library: no answer"):
        open_tier(config(required=True), "tape", RECORD_BYTES)
    with caplog.at_level(logging.WARNING, "tiercel"):
        assert isinstance(open_tier(config(), "tape", RECORD_BYTES), Tape)
    assert "no answer" in caplog.text


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tiercel.tiers.objects", None)
    with pytest.raises(TierError, match=r"accepted: pip install 'tiercel\[objects\]'"):
        open_tier(TierConfig(kind="objects", url="s3://bucket/prefix"), "objects", RECORD_BYTES)
    monkeypatch.setitem(sys.modules, "tiercel.tiers.keyring", None)
    with pytest.raises(TierError, match=r"accepted: pip install 'tiercel\[encryption\]'"):
        open_tier(config(encrypt="env:KEY"), "tape", RECORD_BYTES)


def test_every_extra_that_an_error_names_exists() -> None:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {kind.extra for kind in registry._KINDS.values() if kind.extra} | {"encryption", "testing"}
    assert named <= set(extras)


def test_a_store_starts_without_a_tier_and_uses_it_once_it_is_there(tape: type[Tape], tmp_path: Path) -> None:
    tape.fault = OSError(111, "Connection refused")
    settings = {"ram.size": "64MiB", "tiers.0.kind": "tape", "tiers.0.url": "tape://library"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiercel.config.tiers.entry_points", registry.entry_points)
        loaded = Config.load(environ={}, overrides=settings)
    with open_store(loaded, 1 << 20) as store:
        assert not store.scanned(0.1)
        tape.fault = None
        assert store.scanned(20), "the scan that is tried again opened it"
        with store.begin_store(CHAIN, 0, 1, 1 << 20) as lease:
            next(iter(lease))
            lease.commit()
        assert store.flush(20)
        assert store.stats().tiers[0].counters.written_blocks == 1


def test_tiers_that_were_opened_are_closed_when_a_later_one_cannot_be(
    tape: type[Tape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    monkeypatch.setattr(FilesTier, "close", lambda self: closed.append(self.name))
    tape.fault = TierError("bad credentials")
    both = (TierConfig(path=tmp_path / "c", size_bytes=1 << 30), config())
    with pytest.raises(TierError, match="bad credentials"):
        open_store(Config(tiers=both), 1 << 20)
    assert closed == ["disk"]


class TestReopening(TierContract):
    """Once it is open it is the tier itself."""

    @pytest.fixture
    def tier(self) -> Tier:
        tier = Reopening("memory", lambda: MemoryTier(64 << 20), "not yet")
        # Who comes while it opens is turned away.
        assert tier.contains([CHAIN.keys[0]]) == [False]
        return tier


# The worked example of docs/tiers.md.


def sqlite_tier() -> Callable[..., Tier]:
    import importlib.util

    spec = importlib.util.spec_from_file_location("tiercel_sqlite_tier", EXAMPLE / "tiercel_sqlite_tier.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SqliteTier  # type: ignore[no-any-return]


class TestExample(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        url = TierUrl.parse(f"sqlite://{tmp_path}/records.db")
        return sqlite_tier()(url, name="sqlite", deadline_s=5.0, slot_bytes=RECORD_BYTES)


def test_the_command_runs_the_contract_on_a_kind_of_another_package(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    (installed / "tiercel_sqlite_tier-1.0.dist-info").mkdir(parents=True)
    (installed / "tiercel_sqlite_tier.py").write_text((EXAMPLE / "tiercel_sqlite_tier.py").read_text())
    about = installed / "tiercel_sqlite_tier-1.0.dist-info"
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tiercel-sqlite-tier\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[tiercel.tiers]\nsqlite = tiercel_sqlite_tier:SqliteTier\n")
    assert 'sqlite = "tiercel_sqlite_tier:SqliteTier"' in (EXAMPLE / "pyproject.toml").read_text()

    def check(url: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tiercel.testing", "sqlite", "--url", url],
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    done = check(f"sqlite://{tmp_path}/records.db")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "ok    what was written is read back byte for byte" in lines
    assert lines[-1] == f"{len(lines) - 1} checks passed, 0 failed"
    wrong = check("sqlite://host/records.db")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "accepted: sqlite:///path/to/file.db" in wrong.stderr

    text = (installed / "tiercel_sqlite_tier.py").read_text()
    (installed / "tiercel_sqlite_tier.py").write_text(
        text.replace("else MISSING\n\n\ndef _read", "else OK\n\n\ndef _read")
    )
    lying = check(f"sqlite://{tmp_path}/other.db")
    assert lying.returncode == 1
    assert "FAIL  answers come one per key in the order of the keys" in lying.stdout


def test_the_command_refuses_a_place_that_is_in_use(tmp_path: Path) -> None:
    FilesTier(tmp_path / "c").write([CHAIN.keys[0]], [record(CHAIN)])
    done = subprocess.run(
        [sys.executable, "-m", "tiercel.testing", "files", "--path", str(tmp_path / "c")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "holds 1 records, which the suite would delete; accepted: an empty place" in done.stderr
    assert FilesTier(tmp_path / "c").contains([CHAIN.keys[0]]) == [True]
