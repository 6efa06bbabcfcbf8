"""The chart, KServe's preset and llm-d's overlay: right by strict schemas, and what they start does start."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.deploy.manifests import (
    CHART,
    DEPLOY,
    Manifest,
    chart,
    chart_texts,
    container,
    documents,
    helm,
    kustomized,
    mib,
    pod_specs,
    wrong_in,
)

import tiercel
from tiercel.config import Config
from tiercel.config.schema import TIER_KINDS
from tiercel.tiers.registry import tier_names

GUIDE = Path("guides/tiered-prefix-cache/modelserver/gpu/vllm")
TIERS = [
    {"path": "/var/lib/tiercel/kv", "size": "200GB", "read_workers": 4, "required": True},
    {"kind": "valkey", "url": "valkey://valkey:6379"},
]
VALUES: list[dict[str, Any]] = [
    {},
    {"tiers": TIERS, "settings": '[store]\nadmission = "second-sight"\n', "podMonitor": {"enabled": True}},
    {
        "disk": {"hostPath": {"path": "/var/lib/tiercel", "type": "DirectoryOrCreate"}},
        "http": {"keySecret": "tiercel-key"},
        "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "nodeSelector": {"nvidia.com/gpu.present": "true"},
        "tolerations": [{"operator": "Exists"}],
        "env": [{"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "valkey", "key": "password"}}}],
    },
    {"mode": "sidecar", "tiers": TIERS[:1], "engine": {"args": ["--max-model-len=32768"]}},
    {
        "mode": "sidecar",
        "http": {"enabled": False},
        "disk": {"persistentVolumeClaim": {"claimName": "kv"}},
        "prepareHostPaths": False,
    },
]
# llm-d's own base, as far as the overlay builds on it: names, labels, image, volumes.
LLMD_BASE = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: decode}
spec:
  selector: {matchLabels: {llm-d.ai/role: both}}
  template:
    metadata: {labels: {llm-d.ai/role: both}}
    spec:
      containers:
        - name: modelserver
          image: vllm/vllm-openai:v0.23.0
          command: [vllm, serve]
          env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: llm-d-hf-token, key: HF_TOKEN}}}]
          ports: [{name: modelserver, containerPort: 8000}]
          resources: {limits: {memory: 400Gi, nvidia.com/gpu: 2}}
          volumeMounts: [{name: shm, mountPath: /dev/shm}]
      volumes: [{name: shm, emptyDir: {medium: Memory}}]
"""
LLMD_KUSTOMIZATION = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [deployment.yaml]
namePrefix: gpu-vllm-
labels:
  - pairs: {llm-d.ai/guide: tiered-prefix-cache}
    includeSelectors: true
    includeTemplates: true
"""


def llmd(folder: Path) -> Path:
    """A checkout of llm-d with the overlay copied into it. Returns the overlay's folder."""
    shutil.copytree(DEPLOY / "llm-d" / "guides", folder / "guides")
    base = folder / GUIDE / "base"
    base.mkdir()
    (base / "deployment.yaml").write_text(LLMD_BASE)
    (base / "kustomization.yaml").write_text(LLMD_KUSTOMIZATION)
    return folder / GUIDE / "tiercel" / "fs" / "base"


def kserve() -> list[Manifest]:
    return [
        one for name in ("tiercel.yaml", "sample.yaml")
        for one in documents((DEPLOY / "kserve" / name).read_text())
    ]  # fmt: skip


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = [one for one in manifests if one["kind"] == kind]
    return found


@pytest.mark.parametrize("values", VALUES, ids=["plain", "tiers", "hostPath", "sidecar", "claim"])
def test_the_chart_is_what_kubernetes_knows(values: dict[str, Any]) -> None:
    manifests = chart(values)
    workload = "Deployment" if values.get("mode") == "sidecar" else "DaemonSet"
    assert {one["kind"] for one in manifests} >= {"ConfigMap", workload}
    assert ("PodMonitor" in {one["kind"] for one in manifests}) == ("podMonitor" in values)
    assert {one["kind"]: wrong_in(one) for one in manifests if wrong_in(one)} == {}


@pytest.mark.parametrize("values", VALUES, ids=["plain", "tiers", "hostPath", "sidecar", "claim"])
def test_helm_has_nothing_to_say(values: dict[str, Any]) -> None:
    report = helm(values)["lint"]
    assert [one for one in report["messages"] if one["severity"] > 1] == []
    assert not report["errors"]


@pytest.mark.parametrize(
    "values",
    [
        {"rams": {"sizeGiB": 4}},
        {"ram": {"sizeGb": 4}},
        {"mode": "deployment"},
        {"http": {"prot": 80}},
        {"tiers": [{"path": "/tmp/kv"}]},
        {"disk": {"emptyDir": {}, "hostPath": {"path": "/kv"}}},
        {"user": {"uid": 0, "gid": 0}},
    ],
    ids=str,
)
def test_a_value_that_is_none_is_refused(values: dict[str, Any]) -> None:
    assert "values don't meet the specifications of the schema" in helm(values)["refused"]


def renamed(*path: str | int) -> Callable[[Manifest], None]:
    """Misspell the last key of a path by leaving out its second letter."""

    def change(manifest: Manifest) -> None:
        place: Any = manifest
        for key in path[:-1]:
            place = place[key]
        last = str(path[-1])
        place[last[0] + last[2:]] = place.pop(last)

    return change


def moved(manifest: Manifest) -> None:
    """Where one of KServe's own samples has it: an API server drops it there without a word."""
    manifest["spec"]["workload"] = {"kvCacheOffloading": {"cpu": "10Gi"}}


POD = ("spec", "template", "spec")


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("DaemonSet", renamed(*POD, "containers", 0, "volumeMounts")),
        ("DaemonSet", renamed(*POD, "containers", 0, "securityContext", "readOnlyRootFilesystem")),
        ("DaemonSet", renamed(*POD, "terminationGracePeriodSeconds")),
        ("DaemonSet", renamed("spec", "updateStrategy")),
        ("ConfigMap", renamed("data")),
        ("PodMonitor", renamed("spec", "podMetricsEndpoints")),
        ("PodMonitor", renamed("spec", "podMetricsEndpoints", 0, "relabelings", 0, "targetLabel")),
        ("LLMInferenceServiceConfig", renamed("spec", "template", "initContainers", 0, "restartPolicy")),
        ("LLMInferenceServiceConfig", renamed("spec", "template", "volumes", 1, "configMap")),
        ("LLMInferenceService", renamed("spec", "baseRefs")),
        ("LLMInferenceService", renamed("spec", "model", "uri")),
        ("LLMInferenceService", renamed("spec", "router", "scheduler")),
        ("LLMInferenceService", moved),
        ("PersistentVolumeClaim", renamed("spec", "accessModes")),
    ],
)
def test_the_check_finds_a_misspelt_field(kind: str, change: Callable[[Manifest], None]) -> None:
    every = [*kserve(), *chart({"podMonitor": {"enabled": True}})]
    manifest = copy.deepcopy([one for one in every if one["kind"] == kind][-1])
    assert wrong_in(manifest) == []
    change(manifest)
    assert wrong_in(manifest) != []


def test_kserve_files_are_what_kserve_knows() -> None:
    manifests = kserve()
    assert {one["kind"]: wrong_in(one) for one in manifests if wrong_in(one)} == {}
    sample, preset = (
        of_kind(manifests, "LLMInferenceService"),
        of_kind(manifests, "LLMInferenceServiceConfig"),
    )
    assert sample["spec"]["baseRefs"] == [{"name": preset["metadata"]["name"]}]
    volumes = {one["name"]: one for one in preset["spec"]["template"]["volumes"]}
    assert (
        volumes["tiercel-config"]["configMap"]["name"] == of_kind(manifests, "ConfigMap")["metadata"]["name"]
    )
    claim = of_kind(manifests, "PersistentVolumeClaim")["metadata"]["name"]
    assert volumes["tiercel-kv"]["persistentVolumeClaim"]["claimName"] == claim


def test_the_overlay_gives_what_kubernetes_knows(tmp_path: Path) -> None:
    manifests = kustomized(llmd(tmp_path))
    assert {one["kind"]: wrong_in(one) for one in manifests if wrong_in(one)} == {}
    deployment = of_kind(manifests, "Deployment")
    assert deployment["metadata"]["name"] == "gpu-vllm-decode"
    ((_, pod),) = pod_specs(deployment)
    server = container(pod, "modelserver")
    assert server["image"].startswith("registry.example.com/vllm-tiercel:")
    assert {one["name"] for one in server["ports"]} == {"modelserver", "kv-events", "kv-replay"}
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 2, "the base's"
    name = of_kind(manifests, "ConfigMap")["metadata"]["name"]
    assert name.startswith("tiercel-")
    assert {"name": "tiercel-config", "configMap": {"name": name}} in pod["volumes"]


def test_a_misspelt_field_of_the_overlay_is_found(tmp_path: Path) -> None:
    folder = llmd(tmp_path)
    patch = folder / "patch-vllm.yaml"
    patch.write_text(patch.read_text().replace("readOnlyRootFilesystem:", "readonlyRootFilesystem:"))
    assert wrong_in(of_kind(kustomized(folder), "Deployment")) != []


def deployed(tmp_path: Path) -> dict[str, tuple[Manifest, str]]:
    """Each pod that runs a daemon, with the daemon's settings."""
    found: dict[str, tuple[Manifest, str]] = {}
    for values in VALUES:
        manifests = chart(values)
        ((_, pod),) = [one for manifest in manifests for one in pod_specs(manifest)]
        found[f"chart {values}"] = pod, of_kind(manifests, "ConfigMap")["data"]["tiercel.toml"]
    preset, settings = of_kind(kserve(), "LLMInferenceServiceConfig"), of_kind(kserve(), "ConfigMap")
    found["kserve"] = preset["spec"]["template"], settings["data"]["tiercel.toml"]
    overlay = kustomized(llmd(tmp_path))
    ((_, pod),) = pod_specs(of_kind(overlay, "Deployment"))
    found["llm-d"] = pod, of_kind(overlay, "ConfigMap")["data"]["tiercel.toml"]
    return found


def test_daemons_and_engines_fit_each_other(tmp_path: Path) -> None:
    """Same user, same socket, memory for the blocks, nothing that a cluster's rules would refuse."""
    for name, (pod, settings) in deployed(tmp_path).items():
        config = tmp_path / "tiercel.toml"
        config.write_text(settings)
        read = Config.load(config, environ={})
        daemon = container(pod, "tiercel")
        security = {**pod.get("securityContext", {}), **daemon["securityContext"]}
        assert security["runAsNonRoot"] is True, name
        assert security["readOnlyRootFilesystem"] is True, name
        assert security["capabilities"] == {"drop": ["ALL"]}, name
        limit = mib(daemon["resources"]["limits"]["memory"])
        assert limit >= read.host_bytes / 2**20 + 512, name
        assert mib(daemon["resources"]["requests"]["memory"]) == limit, name
        mounts = {one["name"]: one["mountPath"] for one in daemon["volumeMounts"]}
        assert set(mounts) <= {one["name"] for one in pod["volumes"]}, name
        assert str(read.daemon.socket).rpartition("/")[0] in mounts.values(), name
        for tier in read.tiers:
            assert tier.path is None or any(str(tier.path).startswith(one) for one in mounts.values()), name
        for engine in pod["containers"]:
            if engine["name"] == "tiercel":
                continue
            its = {**pod.get("securityContext", {}), **engine.get("securityContext", {})}
            assert its["runAsUser"] == security["runAsUser"], name
            words = [*engine.get("args", ()), *(one.get("value", "") for one in engine["env"])]
            (given,) = [one[one.index('{"kv_connector"') :] for one in words if '{"kv_connector"' in one]
            assert json.JSONDecoder().raw_decode(given)[0] == {
                "kv_connector": "TiercelConnector",
                "kv_connector_module_path": "tiercel.engines.vllm",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"daemon.socket": str(read.daemon.socket)},
            }, name
            sockets = [one["mountPath"] for one in engine["volumeMounts"] if "socket" in one["name"]]
            assert sockets == [str(read.daemon.socket).rpartition("/")[0]], name


@pytest.mark.parametrize("values", [VALUES[1], VALUES[3]], ids=["daemonset", "sidecar"])
def test_what_the_chart_starts_does_start(values: dict[str, Any], tmp_path: Path) -> None:
    """The container's own words, with its mounts as folders here; its probe; its end."""
    tiers = [{**values["tiers"][0], "required": False}]
    manifests = chart({**values, "tiers": tiers, "ram": {"sizeGiB": 1, "overheadMiB": 512}})
    ((_, pod),) = [one for manifest in manifests for one in pod_specs(manifest)]
    daemon = container(pod, "tiercel")
    places = {}
    for mount in daemon["volumeMounts"]:
        places[mount["mountPath"]] = tmp_path / mount["name"]
        places[mount["mountPath"]].mkdir()

    inside = re.compile(rf"(?<![\w./])({'|'.join(places)})(?=[/\"]|$)")

    def here(text: str) -> str:
        """Inside is outside, in one pass; and any free port."""
        return inside.sub(lambda found: str(places[found[1]]), text).replace("0.0.0.0:8090", "127.0.0.1:0")

    (places["/etc/tiercel"] / "tiercel.toml").write_text(
        here(of_kind(manifests, "ConfigMap")["data"]["tiercel.toml"])
    )
    environ = {one["name"]: here(one["value"]) for one in daemon["env"] if "value" in one}
    environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["tiercel", *(here(one) for one in daemon["args"])],
        env=environ, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if "dashboard at" in line)
        probe = [here(one) for one in daemon["livenessProbe"]["exec"]["command"]]
        assert (
            subprocess.run(probe, env=environ, check=False, timeout=30, capture_output=True).returncode == 0
        )
        assert httpx.get(f"{url}metrics").status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert (
            subprocess.run(probe, env=environ, check=False, timeout=30, capture_output=True).returncode == 2
        )
    finally:
        process.kill()
        process.communicate()


def test_the_notes_do_the_sums() -> None:
    notes = chart_texts({"ram": {"sizeGiB": 64, "overheadMiB": 1024}, "tiers": TIERS})["NOTES.txt"]
    assert "64 GiB for blocks + 1024 MiB for the daemon = 66560Mi" in notes
    assert f"{64 * 2**30 // (256 * 2**10)} at 256 KiB" in notes
    assert "goes with the pod" in notes
    where = {"hostPath": {"path": "/kv"}}
    assert "goes with the pod" not in chart_texts({"tiers": TIERS, "disk": where})["NOTES.txt"]


@pytest.mark.parametrize(
    ("size", "mib_more"), [("8GiB", 8192), ("1.5 GB", 1431), ("500MB", 477), ("1TiB", 1 << 20)]
)
def test_a_tier_in_memory_is_added_to_the_memory_of_the_pod(size: str, mib_more: int) -> None:
    tiers = [*TIERS, {"kind": "memory", "size": size, "codec": "lossless"}]
    texts = chart_texts({"ram": {"sizeGiB": 64, "overheadMiB": 1024}, "tiers": tiers})
    total = 66560 + mib_more
    told = f"64 GiB for blocks + {mib_more} MiB for tiers in memory + 1024 MiB for the daemon = {total}Mi"
    assert told in texts["NOTES.txt"]
    manifests = chart({"ram": {"sizeGiB": 64, "overheadMiB": 1024}, "tiers": tiers})
    ((_, pod),) = [one for manifest in manifests for one in pod_specs(manifest)]
    assert container(pod, "tiercel")["resources"]["limits"]["memory"] == f"{total}Mi"


def test_versions_are_one() -> None:
    yaml = pytest.importorskip("yaml")
    described = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert described["appVersion"] == tiercel.__version__
    for path in DEPLOY.rglob("*"):
        if path.is_file() and path.suffix in (".yaml", ".cpu", ".cuda"):
            for found in re.findall(r"tiercel(?::|==|:0\.32\.0-)(\d+\.\d+\.\d+)$", path.read_text(), re.M):
                assert found == tiercel.__version__, path


def test_the_router_weighs_every_medium() -> None:
    """A medium that it is not told of would count as much as the GPU's."""
    yaml = pytest.importorskip("yaml")
    path = DEPLOY / "llm-d" / "guides" / "tiered-prefix-cache" / "router" / "tiercel.values.yaml"
    epp = yaml.safe_load(path.read_text())["router"]["epp"]
    plugins = yaml.safe_load(epp["pluginsCustomConfig"][epp["pluginsConfigFile"]])
    named = {one.get("name", one["type"]): one for one in plugins["plugins"]}
    producer = named["precise-prefix-cache-producer"]["parameters"]
    weights = {one["name"]: one["weight"] for one in producer["indexerConfig"]["kvCacheBackendConfigs"]}
    assert set(weights) >= {"gpu", "cpu", *(one.lower() for one in tier_names([*TIER_KINDS]))}
    assert weights["gpu"] == 1.0 > weights["cpu"] > max(weights[one] for one in tier_names([*TIER_KINDS]))
    used = [one["pluginRef"] for one in plugins["schedulingProfiles"][0]["plugins"]]
    assert set(used) <= set(named)
    # As the overlay's engine does it.
    patch = (DEPLOY / "llm-d" / GUIDE / "tiercel/fs/base/patch-vllm.yaml").read_text()
    ports = producer["kvEventsConfig"]["podDiscoveryConfig"]
    assert f"--block-size={producer['tokenProcessorConfig']['blockSizeTokens']}\n" in patch
    assert f'"endpoint":"tcp://*:{ports["socketPort"]}"' in patch
    assert f'"replay_endpoint":"tcp://*:{ports["replaySocketPort"]}"' in patch


def test_settings_in_files_are_read() -> None:
    """No setting of a file of ours is one that does not exist."""
    overlay = DEPLOY / "llm-d" / GUIDE / "tiercel" / "fs" / "base" / "tiercel.toml"
    assert Config.load(overlay, environ={}).ram.size_bytes == 100 * 2**30
    assert tomllib.loads(overlay.read_text())["daemon"]["socket"] == "/run/tiercel/s"
