"""What an attacker, a typo or a full node would find first: users, file systems, peers, probes, values."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from tests.deploy.manifests import DEPLOY, Manifest, chart, chart_texts, container, helm, mib, wrong_in
from tests.deploy.test_manifests import deployed, kserve, of_kind, renamed

from tiercel.cli import load_command
from tiercel.config.schema import TIERS, entries

PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
PROFILE = DEPLOY / "llm-d/llm-d-benchmark/workload/profiles/inference-perf/tiercel_tiers.yaml.in"


def policy(**values: Any) -> Manifest:
    return of_kind(
        chart({**values, "networkPolicy": {"enabled": True, **values.pop("networkPolicy", {})}}),
        "NetworkPolicy",
    )


# ---- who reaches the pods


def test_there_is_no_policy_unless_asked_for() -> None:
    assert "NetworkPolicy" not in {one["kind"] for one in chart()}
    assert wrong_in(policy()) == []


def test_an_empty_list_is_nobody() -> None:
    """A rule without `from` would let everybody in."""
    spec = policy()["spec"]
    assert spec["policyTypes"] == ["Ingress"]
    assert "ingress" not in spec
    for values in ({"metricsFrom": [PEER]}, {"metricsFrom": [PEER], "apiFrom": [{"podSelector": {}}]}):
        rules = policy(mode="sidecar", networkPolicy=values)["spec"]["ingress"]
        assert len(rules) == len(values)
        assert all(rule["from"] and rule["ports"] for rule in rules)


def test_peers_reach_what_is_theirs() -> None:
    values = {"metricsFrom": [PEER], "apiFrom": [{"podSelector": {}}]}
    found = policy(mode="sidecar", http={"port": 9999}, networkPolicy=values)
    assert wrong_in(found) == []
    ports = {rule["ports"][0]["port"]: rule["from"] for rule in found["spec"]["ingress"]}
    assert ports == {9999: [PEER], 8000: [{"podSelector": {}}]}
    daemonset = policy(networkPolicy=values)["spec"]["ingress"]
    assert [rule["ports"][0]["port"] for rule in daemonset] == [8090], "no engine of the chart's there"
    pods = of_kind(chart({"networkPolicy": {"enabled": True}}), "DaemonSet")["spec"]["template"]["metadata"][
        "labels"
    ]
    assert daemonset
    assert policy()["spec"]["podSelector"]["matchLabels"].items() <= pods.items()


@pytest.mark.parametrize(
    "path", [("spec", "podSelector"), ("spec", "policyTypes"), ("spec", "ingress", 0, "ports")]
)
def test_a_misspelt_field_of_the_policy_is_found(path: tuple[str | int, ...]) -> None:
    found = copy.deepcopy(policy(networkPolicy={"metricsFrom": [PEER]}))
    renamed(*path)(found)
    assert wrong_in(found) != []


# ---- as whom, and with what


def test_every_container_is_locked(tmp_path: Path) -> None:
    """All but the one that prepares hostPaths run as a user without rights that can get none."""
    seen = 0
    for name, (pod, _) in deployed(tmp_path).items():
        for one in [*pod.get("initContainers", ()), *pod["containers"]]:
            security = {**pod.get("securityContext", {}), **one.get("securityContext", {})}
            assert security["allowPrivilegeEscalation"] is False, (name, one["name"])
            if one["name"] == "prepare":
                assert security["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
                continue
            assert security["runAsNonRoot"] is True, (name, one["name"])
            assert security["runAsUser"] >= 10000, (name, one["name"])
            assert not one.get("securityContext", {}).get("privileged")
            seen += 1
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys(), name
        assert pod["enableServiceLinks"] is False, name
    assert seen >= 8


def test_what_a_locked_daemon_writes_to_is_mounted(tmp_path: Path) -> None:
    """Its root file system is read-only: socket, cache directory and tiers must be volumes, and writable."""
    for name, (pod, settings) in deployed(tmp_path).items():
        daemon = container(pod, "tiercel")
        writable = [one["mountPath"] for one in daemon["volumeMounts"] if not one.get("readOnly")]
        environ = {one["name"]: one.get("value") for one in daemon["env"]}
        written = [environ["TIERCEL_CACHE_DIR"], *re.findall(r'^(?:socket|path) = "(.+)"$', settings, re.M)]
        for path in written:
            assert any(str(path).startswith(f"{one}/") for one in writable), (name, path)
        assert "/tmp" in writable, name


def test_sockets_have_short_paths(tmp_path: Path) -> None:
    for name, (_, settings) in deployed(tmp_path).items():
        (path,) = re.findall(r'^socket = "(.+)"$', settings, re.M)
        assert len(path) < 100, name


def test_volumes_belong_to_the_group(tmp_path: Path) -> None:
    for name, (pod, _) in deployed(tmp_path).items():
        security = {**pod["securityContext"], **container(pod, "tiercel")["securityContext"]}
        assert pod["securityContext"]["fsGroup"] == security["runAsGroup"], name
        # A claim of terabytes is not gone through at every start.
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch", name


def test_memory_that_is_a_volume_is_bounded(tmp_path: Path) -> None:
    """An emptyDir in memory without a limit may take half of a node."""
    for name, (pod, _) in deployed(tmp_path).items():
        for volume in pod["volumes"]:
            if "emptyDir" in volume and volume["name"] != "shm":
                inside = volume["emptyDir"] or {}
                assert inside.get("medium") != "Memory" or inside["sizeLimit"], (name, volume["name"])
    pod = of_kind(chart({"mode": "sidecar", "engine": {"shmSize": "4Gi"}}), "Deployment")["spec"]["template"][
        "spec"
    ]
    (shm,) = [one for one in pod["volumes"] if one["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
    assert mib("4Gi") < mib(container(pod, "engine")["resources"]["limits"]["memory"])


def test_kserves_shm_is_sized_and_told_of() -> None:
    template = of_kind(kserve(), "LLMInferenceServiceConfig")["spec"]["template"]
    (dshm,) = [one for one in template["volumes"] if one["name"] == "dshm"]
    assert mib(dshm["emptyDir"]["sizeLimit"]) >= 2048
    page = (DEPLOY.parent / "docs" / "kserve.md").read_text()
    assert "`/dev/shm`" in page
    assert "spec.workload" in page, "the note on KServe's own sample"


def test_probes_are_commands_that_there_are(tmp_path: Path) -> None:
    """Their words parse, they ask the daemon's own socket, and a slow answer is not the end at once."""
    for name, (pod, settings) in deployed(tmp_path).items():
        daemon = container(pod, "tiercel")
        for kind in ("startupProbe", "livenessProbe"):
            program, *words = daemon[kind]["exec"]["command"]
            assert program == "tiercel"
            with pytest.raises(click.exceptions.Exit) as ended:
                load_command(words[0]).make_context("tiercel", [*words[1:-1], "--help"])
            assert ended.value.exit_code == 0, name
            assert words[-1] == "status"
            assert f'socket = "{words[words.index("--socket") + 1]}"' in settings, name
        assert daemon["livenessProbe"]["timeoutSeconds"] >= 10, name
        start = daemon["startupProbe"]
        assert start["periodSeconds"] * start["failureThreshold"] >= 300, name


# ---- values


def test_the_schema_knows_the_settings_of_tiers() -> None:
    """So that a misspelt one is refused by helm, before a pod starts and fails."""
    schema = json.loads((DEPLOY / "helm" / "tiercel" / "values.schema.json").read_text())
    known = schema["properties"]["tiers"]["items"]["properties"]
    assert set(known) == {one.name for one in entries() if one.section == TIERS}
    for one in entries():
        if one.section == TIERS and one.setting.choices:
            assert known[one.name]["enum"] == list(one.setting.choices)


@pytest.mark.parametrize(
    "values",
    [
        {"tiers": [{"path": "/var/lib/tiercel/kv", "sise": "1GB"}]},
        {"tiers": [{"path": "/var/lib/tiercel/kv", "size": "1G"}]},
        {"tiers": [{"kind": "valkey", "url": "valkey"}]},
        {"networkPolicy": {"enabled": True, "metricsFrom": [{}]}},
        {"networkPolicy": {"enabled": True, "metricFrom": [PEER]}},
        {"networkPolicy": {"metricsFrom": [{"podSelectr": {}}]}},
        {"engine": {"shmSize": "2GB"}},
        {"engine": {"shmsize": "2Gi"}},
        {"cpu": "two"},
        {"podMonitor": {"enable": True}},
    ],
    ids=str,
)
def test_a_misspelt_value_is_refused(values: dict[str, Any]) -> None:
    assert "values don't meet the specifications of the schema" in helm(values)["refused"]


def test_a_monitor_of_nothing_is_refused() -> None:
    said = helm({"podMonitor": {"enabled": True}, "http": {"enabled": False}})["refused"]
    assert "podMonitor.enabled needs http.enabled" in said


def test_the_notes_of_a_sidecar_speak_of_both() -> None:
    notes = chart_texts({"mode": "sidecar", "ram": {"sizeGiB": 16, "overheadMiB": 512}})["NOTES.txt"]
    assert "16 GiB for blocks + 512 MiB for the daemon = 16896Mi" in notes
    assert "stays as it is (32Gi); its /dev/shm (2Gi) counts within it" in notes


def test_the_chart_starts_an_image_with_tiercel_in_it() -> None:
    pod = of_kind(chart({"mode": "sidecar"}), "Deployment")["spec"]["template"]["spec"]
    assert "tiercel" in container(pod, "engine")["image"]


# ---- llm-d's benchmark

# What a profile of inference-perf may say, as far as ours does.
FIELDS = {
    "load": {"type", "interval", "stages"},
    "api": {"type", "streaming"},
    "server": {"type", "model_name", "base_url", "ignore_eos"},
    "tokenizer": {"pretrained_model_name_or_path"},
    "data": {"type", "shared_prefix"},
    "report": {"request_lifecycle"},
    "storage": {"local_storage"},
}
PREFIX = {
    "num_groups", "num_prompts_per_group", "system_prompt_len", "question_len", "output_len",
    "enable_multi_turn_chat",
}  # fmt: skip


def wrong_in_profile(profile: dict[str, Any]) -> list[str]:
    wrong = [name for name in profile if name not in FIELDS]
    wrong += [
        f"{name}.{key}" for name, keys in FIELDS.items() for key in profile.get(name, {}) if key not in keys
    ]
    wrong += [f"missing {name}" for name in FIELDS if name not in profile]
    wrong += [key for key in profile.get("data", {}).get("shared_prefix", {}) if key not in PREFIX]
    wrong += [
        str(one) for one in profile.get("load", {}).get("stages", ()) if set(one) != {"rate", "duration"}
    ]
    return wrong


def test_the_benchmark_profile_has_the_guides_shape() -> None:
    yaml = pytest.importorskip("yaml")
    text = PROFILE.read_text()
    profile = yaml.safe_load(text)
    assert wrong_in_profile(profile) == []
    assert set(re.findall(r"REPLACE_ENV_\w+", text)) == {
        "REPLACE_ENV_LLMDBENCH_DEPLOY_CURRENT_MODEL", "REPLACE_ENV_LLMDBENCH_HARNESS_STACK_ENDPOINT_URL",
    }  # fmt: skip
    assert profile["data"]["type"] in profile["data"], "the generator's own section"
    asked = sum(stage["rate"] * stage["duration"] for stage in profile["load"]["stages"])
    prefix = profile["data"]["shared_prefix"]
    assert asked > 2 * prefix["num_groups"] * prefix["num_prompts_per_group"], "each comes back"
    assert prefix["num_groups"] * prefix["system_prompt_len"] * 256 * 2**10 == pytest.approx(1.7e12, rel=0.02)
    assert "1.7 TB at 256 KiB a token" in text
    for change in ("shared_prefix", "stages", "streaming", "tokenizer"):
        assert wrong_in_profile(yaml.safe_load(text.replace(f"{change}:", f"{change}s:"))) != []
