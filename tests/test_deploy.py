"""What deploy/ says fits what the server does: its flags, its probes, its times and its metrics. Its form is checked by `make lint`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command

from headrace.cli.app import app
from headrace.server.metrics import Metrics, exposition

DEPLOY = Path(__file__).parents[1] / "deploy"
OBJECTS: dict[str, Any] = {
    each["kind"]: each for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())
}
POD = OBJECTS["Deployment"]["spec"]["template"]
CONTAINER = POD["spec"]["containers"][0]
UNIT = (DEPLOY / "headrace.service").read_text()
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def options(arguments: list[str]) -> dict[str, Any]:
    """What `headrace serve` makes of a command line; it ends the test where it refuses it."""
    command = get_command(app)
    name, *rest = arguments
    context = command.commands[name].make_context(name, rest, resilient_parsing=False)  # type: ignore[attr-defined]
    return dict(context.params)


def unit_arguments() -> list[str]:
    line = re.search(r"(?m)^ExecStart=(.*)$", UNIT)
    assert line is not None
    return shlex.split(line[1])[1:]


def image_arguments() -> list[str]:
    line = re.search(r"(?m)^CMD (\[.*\])$", DOCKERFILE)
    assert line is not None
    found = yaml.safe_load(line[1])
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("arguments", [CONTAINER["args"], unit_arguments(), image_arguments()], ids=["kubernetes", "systemd", "image"])
def test_the_flags_are_the_servers(arguments: list[str]) -> None:
    told = options(arguments)
    assert told["shutdown_timeout"] == 30
    assert told["log_format"].value == "json"


def test_a_pod_has_the_time_to_drain() -> None:
    before = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["spec"]["terminationGracePeriodSeconds"] >= before + options(CONTAINER["args"])["shutdown_timeout"] + 5
    stop = re.search(r"(?m)^TimeoutStopSec=(\d+)$", UNIT)
    assert stop is not None
    assert int(stop[1]) >= options(unit_arguments())["shutdown_timeout"] + 5
    assert "RestartPreventExitStatus=2" in UNIT
    assert "KillMode=mixed" in UNIT


def test_probes_ask_what_they_should() -> None:
    """Alive while a restart would not help; ready only when requests are taken. Neither needs a key."""
    paths = {name: CONTAINER[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/ready", "livenessProbe": "/health", "readinessProbe": "/ready"}
    assert "/health" in DOCKERFILE
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert all(CONTAINER[name]["httpGet"]["port"] in ports for name in paths)
    assert OBJECTS["Service"]["spec"]["ports"][0]["targetPort"] in ports
    assert ports["http"] == options(CONTAINER["args"])["port"] == 8000


def test_it_scales_by_a_metric_there_is() -> None:
    wanted = OBJECTS["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert f"\n{wanted}{{" in exposition(Metrics(), "m", "")[0].decode()
    target = OBJECTS["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", OBJECTS["Deployment"]["metadata"]["name"])


def test_labels_meet() -> None:
    labels = POD["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert OBJECTS[kind]["spec"]["selector"]["matchLabels"] == labels
    assert OBJECTS["Service"]["spec"]["selector"] == labels


def test_nothing_runs_as_root_or_writes() -> None:
    assert re.search(r"(?m)^USER 10001:10001$", DOCKERFILE)
    assert POD["spec"]["securityContext"]["runAsNonRoot"]
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    for line in ("DynamicUser=yes", "NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet="):
        assert f"\n{line}\n" in UNIT


def test_the_image_copies_what_there_is() -> None:
    for sources in re.findall(r"(?m)^COPY ((?!--from).*) \S+$", DOCKERFILE):
        for source in sources.split():
            assert (DEPLOY.parent / source).exists(), source
    assert re.search(r'(?m)^ENTRYPOINT \["headrace"\]$', DOCKERFILE)
