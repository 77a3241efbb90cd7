"""A base install serves, and a command that needs an extra names it in one line before any work."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from floodplain.coordinator.store import Store
from floodplain.core.errors import UserError
from floodplain.files.extras import EXTRAS, require
from floodplain.model.fast_tokenizer import read_folder
from tests.support.refusals import Refuse
from tests.support.waiting import HANG_S

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROGRAM = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

MISSING = set(sys.argv.pop(1).split(","))
sys.meta_path.insert(0, NotInstalled())
from floodplain.cli.main import main
sys.exit(main())
"""


def _closure(requirements: list[str]) -> set[str]:
    """Names of the distributions that these requirements install here, with their dependencies."""
    names: set[str] = set()
    waiting = [Requirement(one) for one in requirements]
    while waiting:
        requirement = waiting.pop()
        extras = [*requirement.extras, ""]
        if requirement.marker is not None and not any(requirement.marker.evaluate({"extra": one}) for one in extras):
            continue
        name = canonicalize_name(requirement.name)
        if name not in names:
            names.add(name)
            waiting += [Requirement(one) for one in _requirements_of(name)]
    return names


def _requirements_of(name: str) -> list[str]:
    try:
        return [one for one in requires(name) or () if "extra ==" not in one]
    except PackageNotFoundError:
        return []


def missing_modules() -> set[str]:
    """Modules here that a base install does not bring."""
    installed = _closure(PROJECT["dependencies"]) | {"floodplain"}
    modules = packages_distributions().items()
    return {
        module
        for module, owners in modules
        if module.isidentifier() and installed.isdisjoint(map(canonicalize_name, owners))
    }


@pytest.mark.slow
def test_a_base_install_serves() -> None:
    missing = missing_modules()
    assert {"matplotlib", "highspy", "sqlalchemy", "alembic", "transformers", "gguf", "diffusers"} <= missing
    assert {"torch", "fastapi", "tokenizers", "httpx2"}.isdisjoint(missing)
    command = [sys.executable, "-c", PROGRAM, ",".join(missing), "serve", "dummy:tiny-llama"]
    flags = ["--port", "0", "--format", "json", "-q", "--kv-memory", "1MiB"]
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            assert line, process.stderr.read()
            ready = json.loads(line)
            body = {"model": ready["model"], "prompt": "the river", "max_tokens": 3}
            answer = httpx.post(f"{ready['url']}/v1/completions", json=body, timeout=HANG_S)
            assert answer.json()["usage"]["completion_tokens"] == 3, answer.text
            process.send_signal(signal.SIGTERM)
            assert process.wait(HANG_S) == 0
        finally:
            process.kill()


def test_every_extra_is_one_of_the_package_and_brings_its_module() -> None:
    extras = PROJECT["optional-dependencies"]
    for module, extra in EXTRAS.items():
        named = " ".join(extras[extra])
        assert module.replace(".", "-") in named, (module, extra)
    brought = " ".join(extras["all"])
    assert all(extra in brought for extra in set(EXTRAS.values()) - {"gpu", "cluster"})


PLACE = "place needs HiGHS, which is not installed: pip install 'floodplain[place]'"
STORE = "coordinator needs %s, which is not installed: pip install 'floodplain[coordinator]'"
PLOT = "%s needs matplotlib, which is not installed: pip install 'floodplain[plot]'"
SERVE = ["serve", "dummy:tiny-llama", "--port", "0"]
EXPORTER = "opentelemetry.exporter.otlp.proto.http"
TRACES = (
    "--otlp-traces-endpoint needs opentelemetry-exporter-otlp-proto-http, which is not installed:"
    " pip install 'floodplain[otel]'"
)


@pytest.mark.parametrize(
    ("argv", "module", "line"),
    [
        (["place", "cluster.yaml"], "highspy", PLACE),
        (["coordinator"], "sqlalchemy", STORE % "SQLAlchemy"),
        (["coordinator"], "alembic", STORE % "alembic"),
        (["demo"], "matplotlib", PLOT % "demo"),
        (["place", "c.yaml", "--plot", "a.svg"], "matplotlib", PLOT % "--plot"),
        (["simulate", "s.yaml", "--out", "a.json", "--plot"], "matplotlib", PLOT % "--plot"),
        (["bench", "offline", "m", "--out", "a.json", "--plot"], "matplotlib", PLOT % "--plot"),
        (["profile", "show", "p.json", "--plot", "a.svg"], "matplotlib", PLOT % "--plot"),
        (["reproduce", "aqua-13", "--out", "page"], "matplotlib", PLOT % "--out"),
        ([*SERVE, "--otlp-traces-endpoint", "http://h:4318/v1/traces"], EXPORTER, TRACES),
    ],
)
def test_a_command_names_the_extra_that_it_lacks(
    argv: list[str], module: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    assert refuse(*argv) == line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", sorted(EXTRAS))
def test_what_is_missing_is_one_line_with_its_extra(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in {module.partition(".")[0], module}:  # another test may have loaded the module
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"^m\.bin needs .+, which is not installed: pip install 'floodplain\[\w+\]'$"):
        require("m.bin", module)
    require("m.bin")


def test_a_driver_that_cannot_be_loaded_names_its_fault_and_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "psycopg.py").write_text("raise ImportError('libpq is not there')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "psycopg"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as error:
        Store.open("postgresql://host/leases")
    assert str(error.value) == (
        "a store in PostgreSQL needs psycopg, which cannot be loaded (libpq is not there):"
        " pip install 'floodplain[postgres]'"
    )


def test_packages_that_share_its_namespace_are_not_the_exporter(tmp_path: Path) -> None:
    for other in ("prometheus", "otlp/proto/grpc"):
        (tmp_path / "opentelemetry" / "exporter" / other).mkdir(parents=True)
        (tmp_path / "opentelemetry" / "exporter" / other / "__init__.py").touch()
    modules = [name for name, extra in EXTRAS.items() if extra == "otel"]
    program = (
        "import sys; sys.path += sys.argv[1:3]\n"
        "from floodplain.files.extras import _is_installed\n"
        "print([name for name in sys.argv[3:] if _is_installed(name)])"
    )
    other = "opentelemetry.exporter.otlp.proto.grpc"
    command = [sys.executable, "-S", "-c", program, str(ROOT), str(tmp_path), *modules, other]  # -S: without packages
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert found.stdout == f"{[other]}\n"


def test_a_tokenizer_that_transformers_must_read_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UserError, match=r"^m: this tokenizer needs transformers, .*'floodplain\[transformers\]'$"):
        read_folder(tmp_path, Path("m"))
