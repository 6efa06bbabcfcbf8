"""Wheel and sdist are built, installed where nothing else is, and used; and what is in them is listed.

Needs a package index; where there is none it is skipped, saying so.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from tests.deploy.manifests import ROOT

import tiercel

pytestmark = pytest.mark.soak


def run(*words: str | Path, **more: object) -> str:
    done = subprocess.run(
        [str(one) for one in words], capture_output=True, text=True, check=False, timeout=500, **more
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def environment(folder: Path, *packages: str) -> Path:
    """A fresh environment. Returns its folder of commands."""
    venv.create(folder, with_pip=True)
    if packages:
        command = [folder / "bin" / "pip", "install", "--quiet", *packages]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
        if done.returncode:
            pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1][:80]}")
    return folder / "bin"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of this checkout."""
    folder = tmp_path_factory.mktemp("built")
    tools = environment(folder / "tools", "hatchling==1.32.4")
    run(tools / "python", "-m", "hatchling", "build", "-d", folder / "dist", cwd=ROOT)
    return folder / "dist"


def test_everything_is_in_them(built: Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name == f"tiercel-{tiercel.__version__}-py3-none-any.whl"
    tracked = run("git", "ls-files", "src/tiercel", cwd=ROOT).split()
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    assert {one.removeprefix("src/") for one in tracked} <= names
    assert any(one.endswith("LICENSE") for one in names)
    assert not any(one.startswith("tests") for one in names)
    with tarfile.open(sdist) as content:
        inside = {one.partition("/")[2] for one in content.getnames()}
    assert {*tracked, "README.md", "LICENSE", "pyproject.toml"} <= inside
    assert not any(one.startswith((".venv", ".cache", "build")) for one in inside)


def test_the_wheel_alone_is_enough(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    commands = environment(tmp_path / "fresh", f"{wheel}[dashboard,objects,encryption,migrate]")
    away = {"cwd": tmp_path, "env": {"PATH": "/usr/bin:/bin", "TIERCEL_CACHE_DIR": str(tmp_path / "c")}}
    assert tiercel.__version__ in run(commands / "tiercel", "--version", **away)
    config = ROOT / "tests" / "geometry" / "fixtures" / "Qwen--Qwen3-8B.json"
    assert "147,456 B/token" in run(commands / "tiercel", "size", config, **away)
    (tmp_path / "lmcache.yaml").write_text("max_local_cpu_size: 3\n")
    assert 'size = "3GiB"' in run(commands / "tiercel", "migrate", "lmcache.yaml", **away)
    run(commands / "pip", "check", **away)
    sbom = environment(tmp_path / "sbom", "cyclonedx-bom==7.5.0")
    run(
        sbom / "cyclonedx-py",
        "environment",
        "--output-file",
        tmp_path / "sbom.json",
        commands / "python",
        **away,
    )
    parts = {one["name"]: one for one in json.loads((tmp_path / "sbom.json").read_text())["components"]}
    assert {"tiercel", "numpy", "starlette", "obstore", "cryptography"} <= set(parts)
    assert parts["tiercel"]["version"] == tiercel.__version__


@pytest.mark.model
def test_the_demo_runs_from_the_wheel(built: Path, model_dir: Path, tmp_path: Path) -> None:
    """Torch and transformers are this environment's, tiercel the wheel's: found first, and alone."""
    (wheel,) = built.glob("*.whl")
    commands = environment(tmp_path / "fresh")
    run(commands / "pip", "install", "--quiet", "--no-deps", wheel)
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(run(commands / "python", "-c", script).strip())
    (own / "base.pth").write_text(run(sys.executable, "-c", script))
    away = {"cwd": tmp_path, "env": {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                                     "TIERCEL_CACHE_DIR": str(tmp_path / "c")}}  # fmt: skip
    assert str(own) in run(commands / "python", "-c", "import tiercel; print(tiercel.__file__)", **away)
    demo = run(commands / "tiercel", "demo", "--quick", "--model", model_dir, "--json", "rows.json", **away)
    assert "Resumed conversations" in demo
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 4
