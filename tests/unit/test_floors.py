"""Imports run downwards only: the table of docs/architecture.md, checked on the source and in fresh interpreters."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import floodplain

ROOT = Path(floodplain.__file__).parent

FLOORS = [
    ["core"],
    ["leases", "cost", "files", "workload", "observe", "web", "live"],
    ["policy", "memory", "model"],
    ["runtime"],
    ["lending"],
    ["coordinator", "engine", "plugins", "sim"],
    ["server", "bench", "cluster", "planner", "profiler", "papers"],
    ["demo"],
    ["cli"],
]
CLUSTER_ROOMS = ["wire", "state", "launch", "bulk", "pipeline", "instance", "groups", "migration", "router"]
"""Subpackages of ``cluster``, lowest first."""
FLOOR_OF = {place: floor for floor, places in enumerate(FLOORS, start=1) for place in places}
TOP = len(FLOORS) + 1

PURE = ["core", "leases", "policy", "runtime", "cost"]
PURE_IMPORTS = {
    "__future__", "abc", "array", "bisect", "collections", "collections.abc", "dataclasses", "enum", "functools",
    "heapq", "itertools", "math", "operator", "types", "typing",  # data and arithmetic
    "hashlib",  # content keys
    "fractions", "re",  # parsing of sizes
}  # fmt: skip
"""Standard modules that pure code may import; of ``random`` only the type ``Random``, not its global state."""

BARE_GPU_IMAGE = {"torch", "numpy"}
KERNELS = {"floodplain.memory.cuda.triton_copy", "floodplain.model.attention.paged_decode"}
"""Files of Triton kernels: imported inside the functions that run on CUDA, so no other module may need them."""

MEMBER = {f"floodplain.lending.{name}" for name in ("agent", "client", "membership", "wire")}
"""Modules with which an engine calls the coordinator."""


def modules(*places: str) -> list[str]:
    files = (file for place in places for file in sorted((ROOT / place).rglob("*.py")))
    return [".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__") for file in files]


@cache
def imports_of(source: str) -> list[tuple[str, str]]:
    """(module, name) of every import at any depth; name is empty for ``import module``."""
    imports: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imports += ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            imports += ((node.module or "", alias.name) for alias in node.names)
    return imports


def upward_imports(place: str, source: str) -> list[str]:
    """Imports from above ``place``, including the package's own names (``from floodplain import LLM``)."""
    return [other for other in imported_places(source) if FLOOR_OF.get(other, TOP) > FLOOR_OF[place]]


def imported_places(source: str) -> list[str]:
    """The parts of the package that a file imports from, in the order of the file."""
    parts = [[*module.split("."), name] for module, name in imports_of(source)]
    return [part[1] for part in parts if part[0] == "floodplain" and part[1] not in ("", "__version__")]


def impure_imports(place: str, source: str) -> list[str]:
    """Imports that pure code must not have: clocks, threads, the network, third-party packages."""
    allowed = PURE_IMPORTS | ({"numpy"} if place == "cost" else set())
    return [
        module
        for module, name in imports_of(source)
        if module.split(".")[0] != "floodplain" and module not in allowed and (module, name) != ("random", "Random")
    ]


def run(script: str, *arguments: str) -> list[str]:
    """Return the JSON list that a script prints in a fresh, isolated interpreter."""
    command = [sys.executable, "-I", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout)
    return names


# -- the source --------------------------------------------------------------------------------------------------------


def test_every_place_has_a_floor() -> None:
    places = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert places <= set(FLOOR_OF)


def test_the_architecture_has_a_line_for_every_room() -> None:
    text = (ROOT.parent / "docs/architecture.md").read_text()
    told = {room: int(floor) for room, floor in re.findall(r"(?m)^\| `(\w+)` \| .* \| (\d) \|$", text)}
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert told == {room: FLOOR_OF[room] for room in rooms}


def test_no_file_imports_a_floor_above_its_own() -> None:
    for place in FLOOR_OF:  # without the package's own __init__, which imports the public API on first use
        for file in sorted((ROOT / place).rglob("*.py")):
            assert upward_imports(place, file.read_text()) == [], file


def test_neighbours_on_a_floor_do_not_import_each_other_in_a_circle() -> None:
    for places in FLOORS:
        needs = {
            place: {other for file in (ROOT / place).rglob("*.py") for other in imported_places(file.read_text())}
            & set(places) - {place}
            for place in places
        }
        list(TopologicalSorter(needs).static_order())  # raises CycleError


def upward_rooms(room: str, source: str) -> list[str]:
    """Imported subpackages of ``cluster`` that are above ``room``."""
    parts = [module.split(".") for module, _ in imports_of(source)]
    rooms = [part[2] for part in parts if part[:2] == ["floodplain", "cluster"] and len(part) > 3]
    return [other for other in rooms if CLUSTER_ROOMS.index(other) > CLUSTER_ROOMS.index(room)]


def test_rooms_of_the_cluster_import_lower_ones_only() -> None:
    rooms = {path.name for path in (ROOT / "cluster").iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(CLUSTER_ROOMS)
    for room in CLUSTER_ROOMS:
        for file in sorted((ROOT / "cluster" / room).rglob("*.py")):
            assert upward_rooms(room, file.read_text()) == [], file
    assert upward_rooms("wire", "from floodplain.cluster.router.router import Router") == ["router"]  # control


def test_the_plug_in_needs_no_engine_of_ours() -> None:
    for file in sorted((ROOT / "plugins").rglob("*.py")):
        assert "engine" not in imported_places(file.read_text()), file
    assert "engine" in imported_places("def f():\n    from floodplain.engine.config import EngineConfig")  # control


def test_modules_import_each_other_in_no_circle() -> None:
    """Excludes the plug-in, which has two: modules that vLLM loads by name import modules that need vLLM."""
    places = [place for place in FLOOR_OF if place != "plugins"]
    names = set(modules(*places))
    needs = {}
    for name in names:
        file = ROOT.parent.joinpath(*name.split("."))
        source = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text()
        asked = {other for module, part in imports_of(source) for other in (module, f"{module}.{part}")}
        needs[name] = asked & names - {name}
    list(TopologicalSorter(needs).static_order())  # raises CycleError


KINDS = {"cpu", "cuda"}
TELLS_KINDS_APART = {
    "memory/backend_choice.py": "the one place for what lies below the model",
    "model/network/load.py": "the same for attention",
    "model/attention/paged_prefill.py": "FlashInfer is for CUDA alone",
    "model/native/ops.py": "so are our C++ kernels for CPUs",
    "model/network/linear.py": "so are oneDNN's products",
    "profiler/meters.py": "what is profiled need not be an engine of ours: no backend is opened for it",
    "engine/config.py": "links are emulated on CPUs alone, and ``check_early`` comes before torch",
    "cluster/engine_flags.py": "each of several instances has a GPU of its own",
    "cluster/pipeline/device_link.py": "NCCL connects GPUs alone",
    "plugins/vllm/cache_blocks.py": "vLLM runs on other devices, too",
}


def kinds_told_apart(source: str) -> list[str]:
    """Comparisons with a device kind, and ``startswith`` calls with one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        is_asking = isinstance(node, ast.Compare) or (
            isinstance(node, ast.Call) and "startswith" in ast.dump(node.func)
        )
        names = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)} if is_asking else set()
        found += [ast.unparse(node)] if names & KINDS else []
    return found


def test_kinds_of_devices_are_distinguished_where_a_backend_is_chosen() -> None:
    telling = {str(file.relative_to(ROOT)) for file in ROOT.rglob("*.py") if kinds_told_apart(file.read_text())}
    assert telling == set(TELLS_KINDS_APART)


def test_a_question_for_the_kind_of_a_device_is_found() -> None:
    for source in (
        "x = device.type == 'cuda'",
        "if 'cpu' != kind: pass",
        "name.startswith('cuda')",
        "t in ('cpu', 'b')",
    ):
        assert len(kinds_told_apart(source)) == 1, source
    assert kinds_told_apart("torch.device('cuda', 0)") == []


def test_pure_code_imports_no_clock_no_threads_no_network() -> None:
    for place in PURE:
        for file in sorted((ROOT / place).rglob("*.py")):
            assert impure_imports(place, file.read_text()) == [], file


def raised_flags(source: str) -> list[str]:
    """``raise`` statements whose message names a flag."""
    raised = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Raise)]
    return [text for text in raised if "--" in text]


def test_pure_code_names_no_flags() -> None:
    """Each front end has its own names for settings."""
    for place in PURE:
        for file in sorted((ROOT / place).rglob("*.py")):
            assert raised_flags(file.read_text()) == [], file
    assert len(raised_flags("if x:\n    raise UserError(f'--pace must be above 0, not {x}')")) == 1  # control


@pytest.mark.parametrize(
    ("place", "source", "found"),
    [
        ("core", "from floodplain.policy.base import Policy", ["policy"]),
        ("policy", "def f():\n    import floodplain.runtime.loop", ["runtime"]),
        ("policy", "from floodplain import engine", ["engine"]),
        ("cli", "from floodplain import LLM", ["LLM"]),
        ("engine", "from floodplain.runtime.loop import Loop\nfrom floodplain.engine.llm import LLM", []),
    ],
)
def test_an_upward_import_is_found_wherever_it_stands(place: str, source: str, found: list[str]) -> None:
    assert upward_imports(place, source) == found


@pytest.mark.parametrize(
    "source",
    ["import time", "def f():\n    from datetime import datetime", "import random", "import numpy", "import os, math"],
)
def test_an_impure_import_is_found_wherever_it_stands(source: str) -> None:
    assert len(impure_imports("policy", source)) == 1
    assert impure_imports("policy", "from random import Random") == []
    assert impure_imports("cost", "import numpy") == []


# -- fresh interpreters ------------------------------------------------------------------------------------------------

IMPORT_ALL = """
import importlib, json, sys
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""

IMPORT_ON_A_BARE_IMAGE = """
import importlib, json, sys

ALLOWED = set(sys.argv[1].split(","))

class OnlyWhatIsInstalled:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ALLOWED or top == "floodplain" or top in sys.stdlib_module_names:
            return None
        frame = sys._getframe(1)
        while frame is not None:  # who asks? torch may import what it finds
            asker = frame.f_globals.get("__name__", "").partition(".")[0]
            if asker in ALLOWED:
                return None
            if asker == "floodplain":
                raise ModuleNotFoundError(f"{frame.f_globals['__name__']} imports {name}", name=name)
            frame = frame.f_back
        return None

sys.meta_path.insert(0, OnlyWhatIsInstalled())
for name in sys.argv[2:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""

BANNED = {
    "asyncio", "concurrent", "datetime", "http", "multiprocessing", "numpy", "queue", "sched", "select", "selectors",
    "signal", "socket", "ssl", "subprocess", "threading", "torch", "urllib",
}  # fmt: skip


def test_pure_floors_bring_nothing_but_themselves() -> None:
    """Excludes ``cost``, which may import numpy: numpy imports banned modules."""
    brought = {name.partition(".")[0] for name in run(IMPORT_ALL, *modules("core", "leases", "policy", "runtime"))}
    assert brought & BANNED == set()
    assert {name for name in brought if name not in sys.stdlib_module_names} == {"floodplain"}


def test_prices_bring_numpy_at_most() -> None:
    brought = {name.partition(".")[0] for name in run(IMPORT_ALL, *modules("cost"))}
    assert "torch" not in brought
    assert {name for name in brought if name not in sys.stdlib_module_names} <= {"floodplain", "numpy"}


@pytest.mark.slow
def test_the_data_plane_imports_on_a_bare_gpu_image() -> None:
    names = [name for name in modules("memory", "model", "lending", "engine") if name not in KERNELS]
    brought = run(IMPORT_ON_A_BARE_IMAGE, ",".join(BARE_GPU_IMAGE), *names)
    assert {"transformers", "tokenizers", "gguf", "safetensors", "fastapi", "triton"}.isdisjoint(brought)
    assert KERNELS.isdisjoint(brought)
    assert set(names) | MEMBER <= set(brought)
    assert not [name for name in brought if name.startswith("floodplain.coordinator")]


def test_modules_of_a_member_need_only_the_standard_library() -> None:
    brought = run(IMPORT_ON_A_BARE_IMAGE, "", *sorted(MEMBER))
    assert set(brought) >= MEMBER
    assert {"torch", "numpy", "pydantic", "sqlalchemy", "asyncio"}.isdisjoint(brought)


@pytest.mark.parametrize(("present", "missing"), [("torch", "numpy"), ("numpy", "torch")])
def test_the_data_plane_does_not_import_without_torch_or_numpy(present: str, missing: str) -> None:
    with pytest.raises(AssertionError, match=f"imports {missing}"):
        run(IMPORT_ON_A_BARE_IMAGE, present, "floodplain.model.sampler", *modules("memory"))


def test_the_package_itself_is_light() -> None:
    assert {n for n in run(IMPORT_ALL, "floodplain") if n.startswith("floodplain")} == {"floodplain"}
    assert {n.partition(".")[0] for n in run(IMPORT_ALL, "floodplain")} & BANNED == set()


def test_every_public_name_is_found_on_first_use() -> None:
    assert all(getattr(floodplain, name) is not None for name in floodplain.__all__)
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        floodplain.LMM  # noqa: B018
