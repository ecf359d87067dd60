"""/openapi.json says what there is, and whatever is made from it, right or wrong, is answered without an error of the server's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
from scripted_engine import ENVIRONMENT, ServerProcess
from starlette.routing import Route

from headrace.server.app import Application, ServerSettings
from headrace.server.messages import EngineSettings
from headrace.server.openapi import OPERATIONS, describe
from headrace.server.protocol import HARMLESS, ChatRequest
from headrace.server.worker import Worker


def test_every_route_is_described() -> None:
    app = Application(ServerSettings(("m",)), Worker(EngineSettings("")))
    routes = {
        (method.lower(), route.path.replace(":path", ""))
        for route in app._router.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert routes == {(operation.method, operation.path) for operation in OPERATIONS}


def test_bodies_are_the_types() -> None:
    document = describe()
    schema = document["components"]["schemas"]["ChatRequest"]
    assert set(schema["properties"]) == {field.name for field in msgspec.structs.fields(ChatRequest)} | set(HARMLESS)
    assert schema["required"] == ["messages"]
    assert {"minimum": 0, "maximum": 2, "type": "number"} in schema["properties"]["temperature"]["anyOf"]
    error = document["paths"]["/v1/models"]["get"]["responses"]["default"]["content"]["application/json"]["schema"]
    assert error == {"$ref": "#/components/schemas/Error"}


def test_fuzzed_requests_are_no_error_of_the_server(tmp_path: Path) -> None:
    checks = "not_a_server_error,content_type_conformance,response_schema_conformance,negative_data_rejection,unsupported_method"
    with ServerProcess("--step-ms", "0.1") as server:
        fuzz = subprocess.run(
            [
                sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", checks, "--seed", "1",
                "--phases", "fuzzing", "--max-examples", "20", "--no-color", "--request-timeout", "20",
                "--generation-database", "none", "--suppress-health-check", "all",
            ],
            capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, timeout=120, check=False,
        )  # fmt: skip
        assert fuzz.returncode == 0, fuzz.stdout[-6000:] + fuzz.stderr[-2000:]
        assert server.metric("requests_total", endpoint="chat") >= 20
    assert "Traceback" not in server.said()
