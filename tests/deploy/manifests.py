"""What is deployed, as a cluster sees it: rendered by Helm and kustomize, held against strict schemas."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCHEMAS = Path(__file__).parent / "schemas"
CHART = DEPLOY / "helm" / "tiercel"
KUBERNETES = "1.37"
CUSTOM = {
    "PodMonitor": "podmonitor.json",
    "LLMInferenceService": "kserve.json",
    "LLMInferenceServiceConfig": "kserve.json",
}

Manifest = dict[str, Any]


def documents(text: str) -> list[Manifest]:
    yaml = pytest.importorskip("yaml")
    return [one for one in yaml.safe_load_all(text) if one]


@functools.cache
def _helm(values: str) -> dict[str, Any]:
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("helm-python-sdk is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.deploy.render", str(CHART)],
        cwd=ROOT, input=values, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def helm(values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What Helm says of the chart with `values`: `files`, `lint`, or `refused`."""
    return _helm(json.dumps(dict(values or {})))


def chart_texts(values: Mapping[str, Any] | None = None) -> dict[str, str]:
    """The chart's files as Helm renders them, by name."""
    said = helm(values)
    assert "refused" not in said, said
    return {name.removeprefix("tiercel/templates/"): text for name, text in said["files"].items()}


def chart(values: Mapping[str, Any] | None = None) -> list[Manifest]:
    texts = chart_texts(values)
    return [one for name, text in texts.items() if name.endswith(".yaml") for one in documents(text)]


def kubectl() -> str:
    """kubectl of the environment, else of the machine."""
    found = shutil.which("kubectl", path=str(Path(sys.executable).parent)) or shutil.which("kubectl")
    if found is None:
        pytest.skip("kubectl is not installed")
    return found


def kustomized(folder: Path) -> list[Manifest]:
    done = subprocess.run(
        [kubectl(), "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return documents(done.stdout)


def wrong_in(manifest: Manifest) -> list[str]:
    """What a cluster that knows every field would refuse, or silently leave out."""
    kind = str(manifest.get("kind"))
    if kind not in CUSTOM:
        return _wrong_in_built_in(manifest)
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((SCHEMAS / CUSTOM[kind]).read_text())
    found = [
        f"{'.'.join(map(str, one.absolute_path))}: {one.message}"
        for one in jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    ]
    for where, spec in pod_specs(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
        found += [f"{where}: {one}" for one in _wrong_in_built_in(pod)]
    return found


def _wrong_in_built_in(manifest: Manifest) -> list[str]:
    validate = pytest.importorskip("kubernetes_validate")
    try:
        validate.validate(manifest, KUBERNETES, strict=True)
    except validate.ValidationError as fault:
        return [f"{'.'.join(map(str, fault.absolute_path))}: {fault.message[:200]}"]
    return []


def pod_specs(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Pod":
        yield "spec", spec
    elif manifest["kind"] in CUSTOM:
        for name in ("template", "worker"):
            if isinstance(spec.get(name), dict):
                yield f"spec.{name}", spec[name]
    elif isinstance(spec.get("template"), dict):
        yield "spec.template.spec", spec["template"]["spec"]


def container(pod: Manifest, name: str) -> Manifest:
    every = [*pod.get("initContainers", ()), *pod["containers"]]
    (found,) = [one for one in every if one["name"] == name]
    return dict(found)


def mib(quantity: str) -> int:
    """Kubernetes' and compose's sizes, in MiB."""
    match = re.fullmatch(r"(\d+)(Mi|Gi|g)", quantity)
    assert match is not None, quantity
    return int(match[1]) * (1 if match[2] == "Mi" else 1024)
