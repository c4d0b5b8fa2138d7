"""deploy/: what operators copy is valid, and names only what exists."""

from __future__ import annotations

import ast
import itertools
import json
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from paged import EngineConfig
from paged.protocol.endpoints import MONITORED
from paged.ranks.__main__ import main as probe
from paged.ranks.heartbeat import DIRECTORY_PREFIX, HeartbeatFile
from paged.scheduler.stats import EngineStats
from paged.server.options import ServeOptions
from paged.server.telemetry.families import METRIC_FAMILIES
from paged.server.telemetry.metrics import ServerMetrics
from tests.support import unit_limits
from tests.support.crd_schemas import SOURCES, crd_schema
from tests.support.scheduler_cases import new_scheduler

DEPLOY = Path(__file__).parents[2] / "deploy"
# The oldest that the files are for, and the newest that kubernetes-validate knows.
KUBERNETES = ("1.30", "1.37")
# Fields with keys of the user.
FREE = ("annotations", "labels", "matchLabels", "limits", "requests", "nodeSelector", "rayStartParams")
METRIC = re.compile(r"\bpaged:\w+")
SKIPPED = "needs {} of Debian's package {}; make check-deploy installs it"


def manifests() -> dict[str, dict[str, Any]]:
    """Return the objects for Kubernetes by the names of their files."""
    folder = DEPLOY / "kubernetes"
    return {
        file.relative_to(folder).as_posix(): yaml.safe_load(file.read_text())
        for file in sorted(folder.rglob("*.yaml"))
    }


def checker(name: str, package: str) -> Any:
    """Skip a test without a program."""
    return pytest.mark.skipif(shutil.which(name) is None, reason=SKIPPED.format(name, package))


def passes(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def exported() -> set[str]:
    """Return the names of all samples at /metrics."""
    metrics = ServerMetrics("m", EngineConfig("demo"), max_model_len=100, routes=["/health"])
    text = metrics.render({0: EngineStats.of(new_scheduler())}).decode()
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    assert len(types) >= len(METRIC_FAMILIES)
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    return {f"{name}{suffix}" for name, kind in types.items() for suffix in suffixes[kind]}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return group["rules"]


def test_every_metric_of_alerts_and_dashboard_exists():
    known = exported()
    names = {
        metric.removesuffix(suffix) for metric in known for suffix in ("_bucket", "_sum", "_count", "_total")
    }
    for rule in rules():
        assert set(METRIC.findall(rule["expr"])) <= known, rule["alert"]
        assert set(METRIC.findall(str(rule["annotations"]))) <= known | names, rule["alert"]
    panels = json.loads((DEPLOY / "dashboard.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(expressions) > 30
    for expression in expressions:
        found = set(METRIC.findall(expression))
        assert found, expression
        assert found <= known, expression
    (adapter,) = yaml.safe_load((DEPLOY / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert set(METRIC.findall(str(adapter))) <= known
    (metric,) = manifests()["autoscaling.yaml"]["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == adapter["name"]["as"]


def test_each_alert_is_tested_and_says_what_to_do():
    tested = (DEPLOY / "alerts_test.yaml").read_text()
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "action"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert f"alertname: {rule['alert']}," in tested
        assert f'alertname="{rule["alert"]}"' in tested


def test_panels_of_the_dashboard_lie_beside_each_other():
    dashboard = json.loads((DEPLOY / "dashboard.json").read_text())
    places = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & places, panel["title"]
        places |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def options_of(words: list[str]) -> None:
    """Assert that the flags among these words are options of `paged serve`."""
    known = {name.replace("_", "-") for name in (*ServeOptions.__dataclass_fields__, "config")}
    assert {word.removeprefix("--") for word in words if word.startswith("--")} <= known


def drain_s(words: list[str]) -> float:
    """Return how long the server may take to end."""
    given = dict(itertools.pairwise(words))
    return float(given["--drain-delay"]) + float(given["--drain-timeout"])


def validate(manifest: dict[str, Any], version: str) -> None:
    """Raise what kubernetes-validate does for an object that an API server of this version refuses."""
    if manifest["kind"] in SOURCES:
        jsonschema.Draft202012Validator(crd_schema(manifest["kind"])).validate(manifest)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


def changed(value: Any, kind: str | None = None) -> Iterator[Any]:
    """Yield copies of a value, each with one fault: a field that is unknown, or a value of a wrong type."""
    if isinstance(value, dict):
        if kind not in FREE:
            yield {**value, "selectr": {}}
        for key, each in value.items():
            yield from ({**value, key: wrong} for wrong in changed(each, key))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from ([*value[:i], wrong, *value[i + 1 :]] for wrong in changed(each))
    else:
        yield [{}]


@pytest.mark.parametrize("file", sorted(manifests()))
def test_manifests_match_the_published_schemas(file):
    manifest = manifests()[file]
    for version in KUBERNETES:
        validate(manifest, version)
    names = {name: manifest.pop(name) for name in ("apiVersion", "kind")}
    unknown = ({**names, name: f"{names[name]}beta1", **manifest} for name in names)
    for wrong in (*unknown, *({**names, **each} for each in changed(manifest))):
        with pytest.raises((jsonschema.ValidationError, kubernetes_validate.SchemaNotFoundError)):
            validate(wrong, KUBERNETES[-1])


def test_the_deployment_fits_the_server():
    found = manifests()
    deployment = found["deployment.yaml"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    labels = deployment["template"]["metadata"]["labels"]
    for selector in (
        deployment["selector"]["matchLabels"],
        found["service.yaml"]["spec"]["selector"],
        found["poddisruptionbudget.yaml"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector == labels
    args = container["args"]
    options_of(args)
    given = dict(itertools.pairwise(args))
    assert pod["terminationGracePeriodSeconds"] > drain_s(args)
    assert float(given["--drain-delay"]) >= 2 * container["readinessProbe"]["periodSeconds"]
    monitored = {endpoint.path for endpoint in MONITORED}
    ports = {port["name"] for port in container["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[kind]["httpGet"]
        assert probe["path"] in monitored
        assert probe["port"] in ports
    assert found["service.yaml"]["spec"]["ports"][0]["targetPort"] in ports
    assert deployment["template"]["metadata"]["annotations"]["prometheus.io/port"] == given["--metrics-port"]
    assert (
        found["autoscaling.yaml"]["spec"]["scaleTargetRef"]["name"]
        == found["deployment.yaml"]["metadata"]["name"]
    )


def test_the_ranks_fit_the_server(tmp_path, monkeypatch, capsys):
    found = manifests()
    group = found["ranks/leaderworkerset.yaml"]["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[name] for name in ("leaderTemplate", "workerTemplate"))
    (serving,), (following,) = (pod["spec"]["containers"] for pod in (leader, worker))
    command = serving["command"]
    assert following["command"] == command
    server = command[command.index("serve") :]
    given = dict(word.removeprefix("--").split("=") for word in command if "=" in word)
    options = ServeOptions.__dataclass_fields__.keys() | EngineConfig.__dataclass_fields__.keys()
    assert {word.split("=")[0].removeprefix("--").replace("-", "_") for word in server[2:]} <= options
    assert int(given["pipeline-parallel-size"]) == group["size"] * int(given["nproc-per-node"])
    drain = float(given["drain-delay"]) + float(given["drain-timeout"])
    for pod in (leader, worker):
        assert drain < float(given["shutdown-timeout"]) < pod["spec"]["terminationGracePeriodSeconds"]
    for selector, pods in (("service.yaml", [leader]), ("networkpolicy.yaml", [leader, worker])):
        spec = found[f"ranks/{selector}"]["spec"]
        wanted = spec.get("selector") or spec["podSelector"]["matchLabels"]
        for pod in (leader, worker):
            assert (wanted.items() <= pod["metadata"]["labels"].items()) == (pod in pods)
    # The probe of a worker: no rank, one that loads, and one whose process has ended.
    python, flag, module, *arguments = following["livenessProbe"]["exec"]["command"]
    assert (python, flag, module) == ("python", "-m", "paged.ranks")
    assert following["startupProbe"]["exec"] == following["livenessProbe"]["exec"]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert probe(arguments) == 1
    (folder := tmp_path / f"{DIRECTORY_PREFIX}x").mkdir()
    HeartbeatFile(folder, 1, 30)
    assert probe(arguments) == 0
    monkeypatch.setattr(HeartbeatFile, "_write", lambda _: None)
    file = next(folder.glob("*.json"))
    file.write_text(json.dumps({**json.loads(file.read_text()), "timeout_s": 1, "time": 0}))
    assert probe(arguments) == 1
    assert "has written nothing" in capsys.readouterr().out


def test_the_rayservice_fits_ray_serve():
    """What paged.ray.serve.app takes; without Ray its arguments are compared with its source."""
    spec = manifests()["ray/rayservice.yaml"]["spec"]
    (application,) = yaml.safe_load(spec["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    tree = ast.parse((DEPLOY.parent / f"{module.replace('.', '/')}.py").read_text())
    defined = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
    assert len(defined[name].args.args) == 1  # which Serve asks of what it calls
    app = defined["app"].args
    own = {each.arg for each in (*app.args, *app.kwonlyargs)}
    assert application["args"].keys() <= own | EngineConfig.__dataclass_fields__.keys()
    assert application["args"].get("server", {}).keys() <= ServeOptions.__dataclass_fields__.keys()
    cluster = spec["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    pins = (DEPLOY.parent / "constraints.txt").read_text()
    assert f"ray=={cluster['rayVersion']}\n" in pins
    (workers,) = cluster["workerGroupSpecs"]
    (worker,) = workers["template"]["spec"]["containers"]
    # One replica of the application fits a worker.
    assert application["args"]["num_threads"] < int(worker["resources"]["limits"]["cpu"])
    assert application["args"]["deployment"]["num_replicas"] == workers["replicas"]


def test_compose_mounts_what_is_there():
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    services = compose["services"]
    named = set()
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_file(), source
            else:
                named.add(source)
    assert named == compose["volumes"].keys()
    build = services["paged"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    port = services["paged"]["environment"]["PAGED_METRICS_PORT"]
    assert job["static_configs"] == [{"targets": [f"paged:{port}"]}]
    assert f'up{{job="{job["job_name"]}"}}' in next(
        rule["expr"] for rule in rules() if rule["alert"] == "PagedDown"
    )
    environment = services["paged"]["environment"]
    # What is not set where compose runs is not set in the container: the server refuses an empty key.
    assert not any(":-}" in (value or "") for value in environment.values())
    names = {name.removeprefix("PAGED_").lower() for name in environment if "PAGED" in name}
    assert names <= ServeOptions.__dataclass_fields__.keys()
    dashboards = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert any(
        dashboards["providers"][0]["options"]["path"] in volume for volume in services["grafana"]["volumes"]
    )
    assert source["url"] == "http://prometheus:9090"


def test_each_file_is_in_the_documentation():
    text = (DEPLOY.parent / "docs" / "serving.md").read_text()
    files = [file.relative_to(DEPLOY) for file in DEPLOY.rglob("*") if file.is_file()]
    assert not [file for file in files if f"(../deploy/{file}" not in text]


def test_the_image_is_made_of_what_is_there():
    text = (DEPLOY / "Dockerfile").read_text()
    root = DEPLOY.parent
    allowed = [
        line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    copied = [
        word for line in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for word in line.split()
    ]
    assert sorted(copied) == sorted(allowed)
    assert all((root / name).exists() for name in copied)
    assert re.search(r"^USER \d+$", text, re.MULTILINE)  # a number, which runAsNonRoot can check
    uid = re.search(r"--uid (\d+)", text)[1]
    assert f"USER {uid}\n" in text
    assert manifests()["deployment.yaml"]["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == int(
        uid
    )
    for name in re.findall(r"PAGED_(\w+)=", text):
        assert name.lower() in ServeOptions.__dataclass_fields__
    # torch comes first, from the index for CPUs, so that nothing later takes the build for CUDA.
    assert text.index("${TORCH}") < text.index('".[${EXTRAS}]"')
    extras = {extra for line in re.findall(r"EXTRAS=(\S+)", text) for extra in line.split(",")}
    assert (
        extras
        <= tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    )


def test_the_unit_waits_for_the_drain():
    text = (DEPLOY / "paged.service").read_text()
    command = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)[1].split()
    options_of(command)
    stop_s = float(re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[1])
    assert stop_s > drain_s(command)
    assert "Type=notify\n" in text


@checker("systemd-analyze", "systemd")
def test_systemd_takes_the_unit(tmp_path):
    unit = tmp_path / "paged.service"
    unit.write_text((DEPLOY / "paged.service").read_text().replace("/opt/paged/bin/paged", "/bin/true"))
    assert passes("systemd-analyze", "verify", "--man=no", unit) == ""


@checker("promtool", "prometheus")
def test_prometheus_takes_the_rules():
    passes("promtool", "check", "rules", DEPLOY / "alerts.yaml")
    passes("promtool", "test", "rules", DEPLOY / "alerts_test.yaml")
    passes("promtool", "check", "config", "--syntax-only", DEPLOY / "prometheus.yml")


@pytest.mark.skipif(
    platform.machine() not in unit_limits.CALLS, reason="knows no number of the call socket here"
)
def test_a_divided_model_runs_within_the_limits_of_the_unit():
    """Its address families, and its system calls where systemd-analyze and libseccomp are installed."""
    limited = [sys.executable, "-m", "tests.support.unit_limits", DEPLOY / "paged.service"]
    command = ["-m", "paged", "generate", "x", "-pp", "2", "--num-blocks", "8", "--max-tokens", "1"]
    assert "rank 1 (stage 0 of 2" in passes(*limited, sys.executable, *command)
