"""Images, compose file and unit: what can be said of them without building one."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.manifests import DEPLOY, ROOT, mib

from tiercel.config import Config, parse_bytes

DOCKER = DEPLOY / "docker"
COMPOSE = DEPLOY / "compose" / "compose.yaml"
DOCKERFILES = ["Dockerfile.cpu", "Dockerfile.cuda"]


def instructions(name: str) -> list[tuple[str, str]]:
    """Each instruction of a Dockerfile and its words, continued lines joined."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / name).read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(one.split(None, 1)[0], one.split(None, 1)[1]) for one in lines if one.strip()]


def pinned_in_tests() -> dict[str, str]:
    lines = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    return dict(one.split("==") for one in lines if "==" in one and not one.startswith("#"))


@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint_has_nothing_to_say(name: str) -> None:
    found = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if found is None:
        pytest.skip("hadolint is not installed")
    command = [found, "--no-color", str(DOCKER / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout
    worse = (
        (DOCKER / name)
        .read_text()
        .replace("xxhash==4.1.0", "xxhash")
        .replace(" hatchling==1.32.4", " hatchling")
    )
    done = subprocess.run([found, "-"], input=worse, capture_output=True, text=True, check=False, timeout=60)
    assert "DL3013" in done.stdout, "the control"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_what_is_copied_is_there_and_not_ignored(name: str) -> None:
    ignore = (DOCKER / f"{name}.dockerignore").read_text().split()
    taken = [one[1:] for one in ignore if one.startswith("!")]
    copied = [
        source
        for what, words in instructions(name)
        if what == "COPY" and "--from" not in words
        for source in words.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        assert any(source == one or source.startswith(f"{one}/") for one in taken), source
    assert ignore[0] == "*"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_it_runs_as_the_user_of_all_files(name: str) -> None:
    assert [words for what, words in instructions(name) if what == "USER"] == ["10001:10001"]
    chart = (DEPLOY / "helm" / "tiercel" / "values.yaml").read_text()
    assert re.search(r"uid: 10001\n\s+gid: 10001\n", chart)


def test_versions_in_images_are_those_of_the_tests() -> None:
    tested = pinned_in_tests()
    lines = (DOCKER / "requirements.txt").read_text().splitlines()
    wanted = [one for one in lines if not one.startswith("#")]
    for line in wanted:
        assert re.fullmatch(r"[\w.-]+==[\w.]+", line), line
        name, version = line.split("==")
        assert tested[name] == version
    assert f"xxhash=={tested['xxhash']}" in (DOCKER / "Dockerfile.cuda").read_text()
    for path in [*(DOCKER / one for one in DOCKERFILES), COMPOSE]:
        for image in re.findall(r"^\s*(?:FROM|image:)\s+(\S+)", path.read_text(), re.MULTILINE):
            assert re.search(r":(v?\d+\.\d+\.\d+|\$\{\w+\})", image), image


def test_requirements_are_all_that_the_daemon_needs() -> None:
    """The closure of tiercel with three extras, as the packages themselves say it."""
    from importlib.metadata import PackageNotFoundError, distribution

    requirement = pytest.importorskip("packaging.requirements").Requirement

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    needed: set[str] = set()
    waiting = [("tiercel", ("dashboard", "objects", "encryption"))]
    while waiting:
        name, extras = waiting.pop()
        if plain(name) in needed:
            continue
        needed.add(plain(name))
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            pytest.fail(f"{name} is not installed")
        for one in map(requirement, lines):
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras or ("",)):
                waiting.append((one.name, tuple(one.extras)))
    lines = (DOCKER / "requirements.txt").read_text().splitlines()
    given = {plain(one.split("==")[0]) for one in lines if "==" in one}
    # Of Python 3.11 alone; the image has 3.12.
    assert needed - {"tiercel", "typing-extensions"} <= given
    assert given <= needed | {"typing-extensions"}


def composed(text: str) -> Any:
    spec = pytest.importorskip("compose_spec")
    made = spec.PyCompose.from_yaml(text)
    made.validate()
    return made


def test_the_compose_file_is_one() -> None:
    made = composed(COMPOSE.read_text())
    assert set(made.service_names()) == {"tiercel", "vllm", "valkey", "prometheus", "grafana"}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("mem_limit: 17g", "mem_limt: 17g"),
        ("interval: 30s", "intervall: 30s"),
        ("dockerfile:", "dockerfil:"),
        ("condition: service_healthy", "condition: service_helthy"),
    ],
)
def test_a_misspelt_field_of_it_is_found(right: str, wrong: str) -> None:
    text = COMPOSE.read_text()
    assert right in text
    with pytest.raises(ValueError):
        composed(text.replace(right, wrong))


def test_its_services_fit_each_other(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    document = yaml.safe_load(COMPOSE.read_text())
    services = document["services"]
    for service in services.values():
        if "build" in service:
            assert (COMPOSE.parent / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        for mount in service.get("volumes", ()):
            source = mount.split(":")[0]
            there = (
                (COMPOSE.parent / source).is_file()
                if source.startswith(".")
                else source in document["volumes"]
            )
            assert there, mount
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), port
    daemon, engine = services["tiercel"], services["vllm"]
    assert daemon["user"] == engine["user"]
    settings = dict(
        one.removeprefix("--set=").split("=", 1) for one in daemon["command"] if one.startswith("--set=")
    )
    config = Config.load(None, {}, settings)
    assert mib(daemon["mem_limit"]) >= config.ram.size_bytes / 2**20 + 512
    assert "socket:/run/tiercel" in daemon["volumes"]
    assert "socket:/run/tiercel" in engine["volumes"]
    assert '"daemon.socket":"/run/tiercel/s"' in engine["command"][-1]
    assert "--socket=/run/tiercel/s" in daemon["command"]
    limit = services["valkey"]["command"]
    assert (
        parse_bytes(limit[limit.index("--maxmemory") + 1].upper())
        < mib(services["valkey"]["mem_limit"]) * 2**20
    )
    scraped = yaml.safe_load((COMPOSE.parent / "prometheus.yml").read_text())
    targets = {one["job_name"]: one["static_configs"][0]["targets"][0] for one in scraped["scrape_configs"]}
    assert targets["tiercel"] == "tiercel:8090"
    assert "--http=0.0.0.0:8090" in daemon["command"]
    assert {one.split(":")[0] for one in targets.values()} <= set(services)


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """As it is but for the path of the command, which must be there to be checked."""
    found = shutil.which("systemd-analyze")
    if found is None:
        pytest.skip("systemd-analyze is not installed")
    text = (DEPLOY / "systemd" / "tiercel.service").read_text()
    assert "Type=notify\n" in text
    here = tmp_path / "tiercel.service"
    here.write_text(text.replace("/usr/local/bin/tiercel", str(Path(sys.executable).parent / "tiercel")))
    done = subprocess.run(
        [found, "verify", str(here)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "tiercel" not in done.stderr
    here.write_text(here.read_text().replace("TimeoutStopSec", "TimeoutStopSek"))
    done = subprocess.run(
        [found, "verify", str(here)], capture_output=True, text=True, check=False, timeout=60
    )
    assert "TimeoutStopSek" in done.stderr, "the control"
