"""The package as a whole: public names, who may import whom, sizes, and what must not appear."""

from __future__ import annotations

import ast
import codecs
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "headrace"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

# Who may import whom (docs/architecture.md). The longest matching prefix rules. `ours` are prefixes of our modules, `theirs` top-level
# names of other packages; the standard library is free, `headrace` itself holds only the version.
VOCABULARY = {"errors", "config", "request"}
RULES: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "config": ({"errors"}, set()),
    "request": ({"errors"}, {"msgspec"}),
    "kernels": ({"errors", "_native"}, {"numpy"}),
    # Policy: no numpy, no kernels, not even indirectly (test_policy_is_pure).
    "engine": (VOCABULARY | {"engine"}, set()),
    # Executors turn a plan into their own batch and never see the scheduler.
    "executors": (VOCABULARY | {"engine.plan", "engine.executor", "executors", "models", "kernels", "_native", "threads"}, {"numpy"}),
    "executors.torch": (VOCABULARY | {"engine.plan", "engine.executor", "models"}, {"numpy", "torch"}),
    "models": (VOCABULARY - {"request"} | {"models", "kernels", "_native"}, {"numpy"}),
    "models.hub": ({"errors"}, {"huggingface_hub"}),
    "machine": (set(), set()),
    "threads": (set(), set()),
    # A GGUF file carries vocabulary and template; that reader is the one thing text needs of models.
    "text": ({"errors", "config", "text", "models.gguf"}, {"numpy", "tokenizers", "jinja2"}),
    "text.grammar": ({"errors", "text.json_grammar"}, {"llguidance"}),
    "server": (VOCABULARY | {"server", "text", "threads"}, {"starlette", "uvicorn", "msgspec", "prometheus_client", "numpy"}),
    "server.tracing": ({"errors", "server.report"}, {"opentelemetry"}),
    "server.worker": (VOCABULARY | {"engine", "executors", "models", "server", "text"}, {"msgspec", "numpy", "uvloop"}),
    # The load test talks HTTP only: of the rest it knows the forms of traces.
    "bench": ({"errors", "bench", "plan.traffic"}, {"httptools", "msgspec"}),
    "bench.report": ({"errors", "bench"}, {"rich"}),
    "bench.page": ({"errors", "bench"}, {"plotly"}),
    # Sizing drives the server's own policy, and reads files of models, never their weights.
    "plan": (VOCABULARY | {"plan", "engine", "executors.simulated", "models", "machine"}, {"yaml"}),
    "plan.page": ({"errors", "plan"}, {"plotly"}),
    "quality": (VOCABULARY | {"quality", "engine", "executors", "models", "text"}, {"numpy", "rich"}),
    # The roots wire things together.
    "__main__": ({""}, {"typer", "rich"}),
    "cli": ({""}, {"typer", "rich", "uvicorn", "uvloop", "aiohttp", "numpy", "msgspec"}),
}

MAX_LINES = 400
LONGER: dict[str, str] = {  # path below the root -> why it is longer
    "native/attention_tile.h": "one tile's arithmetic at every level, side by side: the order of operations is what makes them agree",
    "tests/test_attention.py": "the sweep of shapes, windows and levels shares one set of generators",
    "tests/test_scheduler.py": "the contracts of one class, each a few lines on the same made-up engine",
}

# Words that have no place in a public repository, kept unreadable so that this file passes its own test.
FORBIDDEN = [
    codecs.decode(word, "rot13")
    for word in (
        "jbexcynpr", "/jbex/", "/bcg/qri", "/gzc/oevrs", "/ebbg/", "clcv.bet", "clguba-ubfgrq", "naguebcvp", "punttcg", "pungtcg", "pynhqr",
        "pbcvybg", "phefbe ntrag", "guvf frffvba", "n frffvba bs", "fhontrag",
    )
]  # fmt: skip
TEXT = {".py", ".cpp", ".h", ".md", ".toml", ".txt", ".json", ".html", ".js", ".css", ".yml", ".yaml", ""}


def public_files() -> list[Path]:
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in ("src", "native", "tests", "scripts", "benchmarks", "docs", ".ci", "deploy", ".github"):
        files += (ROOT / folder).rglob("*")
    return [path for path in files if path.is_file() and "__pycache__" not in path.parts and path.suffix in TEXT]


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(), str(MODULES[module]))


@cache
def imports(module: str) -> frozenset[str]:
    """Absolute names of all modules that `module` imports anywhere, `if TYPE_CHECKING` included."""
    found: set[str] = set()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            assert node.module is not None
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            inside = {name for name in submodules if name in MODULES or name == "headrace._native"}
            found |= inside or {node.module}
    return frozenset(found)


def rule(module: str) -> tuple[set[str], set[str]]:
    name = module.removeprefix("headrace").lstrip(".")
    while name not in RULES:
        assert "." in name, f"{module}: say in RULES what it may import"
        name = name.rpartition(".")[0]
    return RULES[name]


def below(name: str, prefix: str) -> bool:
    return prefix == "" or name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("module", [name for name in MODULES if name != "headrace"])
def test_import_direction(module: str) -> None:
    ours, theirs = rule(module)
    for name in imports(module):
        top, _, rest = name.partition(".")
        if top == "headrace":
            assert not rest or any(below(rest, prefix) for prefix in ours), f"{module} may not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top in theirs, f"{module} may not import {name}"


def test_the_rules_can_fail() -> None:
    ours, theirs = rule("headrace.engine.scheduler")
    assert "numpy" not in theirs
    assert not any(below("executors.native", prefix) for prefix in ours)


def test_policy_is_pure() -> None:
    """Everything the engine package reaches, however far, is standard library, msgspec and its own policy."""
    reached, queue = set(), [name for name in MODULES if below(name, "headrace.engine")]
    while queue:
        module = queue.pop()
        reached.add(module)
        for name in imports(module):
            assert name.partition(".")[0] in sys.stdlib_module_names | {"msgspec", "headrace"}, f"{module} reaches {name}"
            assert name != "headrace._native", f"{module} reaches the kernels"
            if name in MODULES and name not in reached:
                queue.append(name)


def test_public_names() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", headrace.__version__)
    names = {name for name in vars(headrace) if not name.startswith("_")} - {name.split(".")[1] for name in MODULES if "." in name}
    assert names == set(), f"headrace exports {names}: say so here"


def test_every_package_has_an_init_and_the_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").exists()
    for path in PACKAGE.rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), path


def test_dependencies_are_imported_and_imports_are_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = {name for extra in ("report", "torch", "hub", "trace") for name in project["optional-dependencies"][extra]}
    declared = {re.match(r"[\w-]+", name).group().replace("-", "_") for name in [*project["dependencies"], *optional]}  # type: ignore[union-attr]
    declared |= {name.partition("_")[0] for name in declared if name.startswith("opentelemetry")}  # one name space of several packages
    used = {name.partition(".")[0] for module in MODULES for name in imports(module)} - sys.stdlib_module_names - {"headrace"}
    declared |= {"yaml"} if "pyyaml" in declared else set()  # the one that is imported under another name
    assert used <= declared, f"imported, not in pyproject.toml: {used - declared}"


@pytest.mark.parametrize("folder", ["src", "native", "tests", "scripts", "benchmarks"])
def test_no_file_is_too_long(folder: str) -> None:
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in {".py", ".cpp", ".h"}:
            name = str(path.relative_to(ROOT))
            lines = len(path.read_text().splitlines())
            assert lines <= MAX_LINES or name in LONGER, f"{name} has {lines} lines: split it, or give the reason in LONGER"
            assert lines > MAX_LINES or name not in LONGER, f"{name} is short again: take it out of LONGER"


def test_no_forbidden_words() -> None:
    files = public_files()
    assert ROOT / "pyproject.toml" in files
    for path in files:
        text = path.read_text(errors="replace").lower()
        for word in FORBIDDEN:
            assert word not in text, f"{path.relative_to(ROOT)} mentions {word!r}"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_dangerous_is_used(module: str) -> None:
    """No pickle, no eval, and no assert: it vanishes under -O, and an error must name what was wrong."""
    for name in imports(module):
        assert name.partition(".")[0] not in {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, f"{module} imports {name}"
    for node in ast.walk(tree(module)):
        assert not isinstance(node, ast.Assert), f"{module}:{node.lineno}: assert"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "__import__"}, f"{module}:{node.lineno}: {node.func.id}"


def test_reference_formulas_are_independent() -> None:
    """tests/reference shares no bug with the code it judges: it imports numpy and itself."""
    for path in (ROOT / "tests" / "reference").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.partition(".")[0] in sys.stdlib_module_names | {"numpy", "reference", "tests"}, f"{path.name} imports {name}"
