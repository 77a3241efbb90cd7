"""What to simulate, as a YAML file says it. Unknown keys are refused, with their path and what there is instead.

Sizes are texts like ``16GB`` or numbers of bytes, times are in seconds, and paths are relative to the file's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from floodplain.core.errors import SettingRefused, UserError
from floodplain.core.sizes import parse_size
from floodplain.cost.devices import DEVICES, Device, device_named
from floodplain.cost.link import LINKS
from floodplain.cost.model_shape import SHAPES, ModelShape, shape_named
from floodplain.files.yaml_file import parse_yaml, read_yaml_mapping
from floodplain.policy.registry import DEFAULT_POLICY, POLICIES
from floodplain.policy.settings import FAIR_BY, SharingSettings, settings_for
from floodplain.workload.spec import WorkloadSpec

MAX_BYTES, MAX_DEPTH = 2**20, 4
MAX_SWEEP = 1000
"""The most runs of a sweep."""

Count = Annotated[int, Field(ge=1, le=2**24, strict=True)]
Seconds = Annotated[float, Field(gt=0, le=1e6)]


def _bytes_of(value: Any) -> int:
    try:
        return parse_size(str(value))
    except UserError as error:
        raise ValueError(str(error)) from None


Bytes = Annotated[int, BeforeValidator(_bytes_of)]


LinkName = str | Annotated[float, Field(gt=0, le=1e15)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CostPart(_Part):
    """Where a step's time comes from: kernel tables, a step profile, else a fit that ships, else the data sheet.

    Attributes:
        kernels: A folder with ``dense.csv``, ``attention.csv`` and ``per_sequence.csv`` (``cost.kernels``).
        steps: The JSON of ``floodplain profile step``.
        overhead_ms: Added to each step; None is the device's own for kernels, fits and data sheets, else 0.
    """

    kernels: Path | None = None
    steps: Path | None = None
    overhead_ms: Annotated[float, Field(ge=0, le=1e3)] | None = None


class EnginePart(_Part):
    """The engine of the instance: flags of ``floodplain serve``, and what vLLM does otherwise.

    Attributes:
        policy: ``fcfs`` is vLLM's own rule.
        scheduling: ``async`` plans a step while the one before it runs, as vLLM; ``sync`` after it, as our engine.
        synchronous_swap: AQUA's switch (a baseline): nothing computes while KV of preempted requests is copied.
        utilisation: Part of the device's memory for weights, activations and KV.
        kv_blocks: KV blocks for requests; None predicts them from the memory.
    """

    policy: Literal[POLICIES] = DEFAULT_POLICY  # type: ignore[valid-type]
    slice: Count | None = None
    ttft_goal: Seconds | None = None
    tpot_goal: Seconds | None = None
    max_gap: Seconds | None = None
    fair_by: Literal[FAIR_BY] | None = None  # type: ignore[valid-type]
    line_patience: Annotated[float, Field(ge=1, le=1000)] | None = None
    max_num_seqs: Count = 256
    max_batched_tokens: Count = 2048
    max_model_len: Count | None = None
    block_tokens: Count = 16
    prefix_cache: bool = True
    scheduling: Literal["async", "sync"] = "async"
    synchronous_swap: bool = False
    utilisation: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_blocks: Count | None = None

    @property
    def settings(self) -> SharingSettings:
        """The settings of the policy."""
        flags = {
            "slice_steps": self.slice, "ttft_goal_s": self.ttft_goal, "tpot_goal_s": self.tpot_goal,
            "max_gap_s": self.max_gap, "line_patience": self.line_patience, "fair_by": self.fair_by,
            "is_synchronous": self.synchronous_swap,
        }  # fmt: skip
        return settings_for(self.policy, **{name: value for name, value in flags.items() if value is not None})


class SwapPart(_Part):
    """Swap space: its size, and the link to it, by name (``cost.link``) or in bytes per second."""

    memory: Bytes
    link: LinkName = "pcie4"


class LenderPart(_Part):
    """A neighbour GPU that lends memory for swap space, except in the intervals of ``busy`` (start, end)."""

    memory: Bytes
    link: LinkName = "nvlink4"
    busy: tuple[tuple[Annotated[float, Field(ge=0, le=1e9)], Annotated[float, Field(ge=0, le=1e9)]], ...] = ()

    @field_validator("busy")
    @classmethod
    def _rises(cls, busy: Any) -> Any:
        times = [when for interval in busy for when in interval]
        if any(b <= a for a, b in pairwise(times)):
            raise ValueError("times must rise: [[START, END], ...]")
        return busy


class ExpansionPart(_Part):
    """KV of some layers streams from host memory behind compute, as ``--kv-expansion`` of ``serve``.

    Attributes:
        factor: Blocks with streamed layers over those without, the nearest that layers allow; ``auto`` decides from
            step to step.
        link: To host memory.
    """

    factor: Annotated[float, Field(ge=1, le=100)] | Literal["auto"] = "auto"
    link: LinkName = "pcie4"


class FaultPart(_Part):
    """An instance dies at a time, and an empty one takes its place ``down`` seconds later."""

    at: Annotated[float, Field(ge=0, le=1e9)]
    instance: Annotated[int, Field(ge=0, strict=True)] = 0
    down: Seconds = 30.0


class _File(_Part):
    model: str
    device: str
    tensor_parallel: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    instances: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    cost: CostPart = CostPart()
    engine: EnginePart = EnginePart()
    swap: SwapPart | None = None
    lender: LenderPart | None = None
    expansion: ExpansionPart | None = None
    faults: tuple[FaultPart, ...] = ()
    workload: dict[str, Any] = {}
    tenants: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A checked scenario.

    ``tenants`` have a load each, by API key; without any, all requests are of ``workload``. ``written`` is the content
    as it was read, for results.
    """

    shape: ModelShape
    device: Device
    num_shards: int
    num_instances: int
    cost: CostPart
    engine: EnginePart
    swap: SwapPart | None
    lender: LenderPart | None
    expansion: ExpansionPart | None
    faults: tuple[FaultPart, ...]
    workload: WorkloadSpec
    tenants: Mapping[str, WorkloadSpec]
    written: Mapping[str, Any]

    def alone(self) -> Scenario:
        """The scenario with one instance and nothing that disturbs it."""
        return replace(self, num_instances=1, faults=())


def read_scenario(path: Path | None, sets: Sequence[str] = (), defaults: Sequence[str] = ()) -> Scenario:
    """The scenario in a file, with the values of ``sets`` (``engine.policy=fcfs``) in place of the file's.

    ``defaults`` are values for keys that the file does not state. UserError, with the key's path, if the scenario is
    not valid.
    """
    content = {} if path is None else read_yaml_mapping(path, MAX_BYTES, MAX_DEPTH, "scenario")
    for text in (*(each for each in defaults if not _states(content, each)), *sets):
        content = _with(content, text)
    return make_scenario(content, "scenario" if path is None else str(path), Path() if path is None else path.parent)


def make_scenario(content: Mapping[str, Any], source: str, folder: Path) -> Scenario:
    """The scenario that a mapping states; UserError, which begins with ``source``, if it is not valid."""
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{source}: {_first_fault(error)}") from None
    try:
        _check_links(file)
        shape, device = shape_named(file.model), device_named(file.device)
        workload = _read_workload(file.workload, folder, "workload")
        tenants = {name: _read_workload(load, folder, f"tenants.{name}") for name, load in file.tenants.items()}
        file.engine.settings  # noqa: B018 - refuses what no policy takes
    except SettingRefused as error:
        raise UserError(f"{source}: engine.{error}") from None
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    if late := [fault.instance for fault in file.faults if fault.instance >= file.instances]:
        raise UserError(f"{source}: faults: there is no instance {late[0]}: they count from 0 to {file.instances - 1}")
    if shape.num_kv_heads % file.tensor_parallel and file.tensor_parallel % shape.num_kv_heads:
        raise UserError(f"{source}: tensor_parallel: {shape.num_kv_heads} KV heads do not divide evenly")
    places = {name: folder / value for name, value in file.cost if isinstance(value, Path)}
    return Scenario(
        shape=shape,
        device=device,
        num_shards=file.tensor_parallel,
        num_instances=file.instances,
        cost=file.cost.model_copy(update=places),
        engine=file.engine,
        swap=file.swap,
        lender=file.lender,
        expansion=file.expansion,
        faults=file.faults,
        workload=workload,
        tenants=tenants,
        written=dict(content),
    )


def sweep_of(texts: Sequence[str]) -> list[tuple[str, ...]]:
    """The ``sets`` of each run of ``--sweep key=a,b``: all combinations, the last key fastest; one without any."""
    runs: list[tuple[str, ...]] = [()]
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not all(values.split(",")):
            raise UserError(f"--sweep {text!r} must read KEY=A,B,C")
        runs = [(*run, f"{key}={value}") for run in runs for value in values.split(",")]
        if len(runs) > MAX_SWEEP:
            raise UserError(f"--sweep asks for more than {MAX_SWEEP} runs")
    return runs


def _states(content: Mapping[str, Any], text: str) -> bool:
    """Whether the content has the key of ``KEY=VALUE``."""
    place: Any = content
    for name in text.partition("=")[0].split("."):
        if not isinstance(place, Mapping) or name not in place:
            return False
        place = place[name]
    return True


def _with(content: Mapping[str, Any], text: str) -> dict[str, Any]:
    """The content with one value changed: ``a.b=1``, the value read as YAML."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UserError(f"--set {text!r} must read KEY=VALUE")
    changed: dict[str, Any] = dict(content)
    place, names = changed, key.split(".")
    for name in names[:-1]:
        inner = place.get(name) or {}
        if not isinstance(inner, Mapping):
            raise UserError(f"--set {key}: {name} has no keys")
        place[name] = dict(inner)
        place = place[name]
    place[names[-1]] = parse_yaml(value, f"--set {key}", MAX_DEPTH)
    return changed


def _read_workload(content: Mapping[str, Any], folder: Path, path: str) -> WorkloadSpec:
    known = [item.name for item in fields(WorkloadSpec)]
    if unknown := [key for key in content if key not in known]:
        raise UserError(f"{path}.{unknown[0]}: there is no such key; there are {', '.join(known)}")
    try:
        spec = TypeAdapter(WorkloadSpec).validate_python({"ignore_eos": True} | dict(content))
    except ValidationError as error:
        raise UserError(f"{path}.{_first_fault(error)}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    files = {name: folder / value for name in ("trace", "lengths", "prompts") if (value := getattr(spec, name))}
    return replace(spec, **files)


def _check_links(file: _File) -> None:
    for name, part in (("swap", file.swap), ("lender", file.lender), ("expansion", file.expansion)):
        if part is not None and isinstance(part.link, str) and part.link not in LINKS:
            raise UserError(f"{name}.link: no link is called {part.link!r}; there are {', '.join(LINKS)}")


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing":
        return f"{path}: say which; there are {', '.join(sorted(SHAPES if path == 'model' else DEVICES))}"
    if fault["type"] == "extra_forbidden":
        return f"{path}: there is no such key; there are {', '.join(_keys_beside(fault['loc']))}"
    return f"{path}: {fault['msg'].removeprefix('Value error, ')}"


def _keys_beside(place: tuple[int | str, ...]) -> list[str]:
    parts: dict[str, type[_Part]] = {
        "cost": CostPart, "engine": EnginePart, "swap": SwapPart, "lender": LenderPart, "expansion": ExpansionPart,
        "faults": FaultPart,
    }  # fmt: skip
    owner = parts.get(str(place[0]), _File) if len(place) > 1 else _File
    return list(owner.model_fields)
