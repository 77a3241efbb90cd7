"""What to simulate: the content of a YAML file. Unknown keys are refused, with their path and the known ones.

Sizes are texts like ``16GB`` or numbers of bytes, times are in seconds, and paths are relative to the file's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from floodplain.core.errors import SettingRefused, UserError
from floodplain.core.sizes import parse_size
from floodplain.cost.devices import DEVICES, Device, device_named
from floodplain.cost.link import LINKS
from floodplain.cost.model_shape import SHAPES, ModelShape, shape_named
from floodplain.files.similar import TYPO_SIMILARITY, did_you_mean
from floodplain.files.yaml_file import read_yaml_mapping
from floodplain.leases.states import NAME
from floodplain.policy.drop import MOST_STAGES, DropTimingSettings
from floodplain.policy.registry import DEFAULT_POLICY, POLICIES
from floodplain.policy.settings import FAIR_BY, SharingSettings, settings_for
from floodplain.sim.sets import is_set, states_key, with_value
from floodplain.workload.spec import WorkloadSpec

MAX_BYTES, MAX_DEPTH = 2**20, 6
INSTANCE = "instance"
"""Engines of a scenario are named after this, and their numbers."""
_NOT_A_LENDERS = ("borrow", "lenders", "coordinator", "servers", "lender", "tenants", "expansion", "relief")

TIMING = DropTimingSettings()
"""Of drops and restores, as the router has them."""


def _refuse_truth(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is no number")
    return value


Count = Annotated[int, Field(ge=1, le=2**24, strict=True)]
Number = Annotated[float, BeforeValidator(_refuse_truth), Field(allow_inf_nan=False)]
Seconds = Annotated[Number, Field(gt=0, le=1e6)]


def _bytes_of(value: Any) -> int:
    try:
        return parse_size(str(value))
    except UserError as error:
        raise ValueError(str(error)) from None


Bytes = Annotated[int, BeforeValidator(_bytes_of)]


def _link_of(value: Any) -> Any:
    if isinstance(value, str) and value not in LINKS:
        raise ValueError(f"no link is called {value!r}; there are {', '.join(LINKS)}")
    if isinstance(value, str) or (_is_number(value) and 0 < value <= 1e15):
        return value
    raise ValueError(f"{value!r} is no link: write {', '.join(LINKS)}, or bytes per second, at most 1e15")


def _factor_of(value: Any) -> Any:
    if value == "auto" or (_is_number(value) and 1 <= value <= 100):
        return value
    raise ValueError(f"{value!r} is no factor: write auto, or a number from 1 to 100")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


LinkName = Annotated[str | float, BeforeValidator(_link_of)]
Factor = Annotated[float | Literal["auto"], BeforeValidator(_factor_of)]


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
    overhead_ms: Annotated[Number, Field(ge=0, le=1e3)] | None = None


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
    line_patience: Annotated[Number, Field(ge=1, le=1000)] | None = None
    max_num_seqs: Count = 256
    max_batched_tokens: Count = 2048
    max_model_len: Count | None = None
    block_tokens: Count = 16
    prefix_cache: bool = True
    scheduling: Literal["async", "sync"] = "async"
    synchronous_swap: bool = False
    utilisation: Annotated[Number, Field(gt=0, le=1)] = 0.9
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
    busy: Annotated[Intervals, AfterValidator(_rising)] = ()


Intervals = tuple[tuple[Annotated[Number, Field(ge=0, le=1e9)], Annotated[Number, Field(ge=0, le=1e9)]], ...]


def _rising(intervals: Intervals) -> Intervals:
    times = [when for interval in intervals for when in interval]
    if any(b <= a for a, b in pairwise(times)):
        raise ValueError("times must rise: [[START, END], ...]")
    return intervals


class BorrowPart(_Part):
    """What each instance may lease of ``lenders`` for swap space, through the coordinator.

    Attributes:
        memory: The most.
        lease: Bytes of one lease.
        idle: Seconds after which a lease that no request needs is returned; 0 keeps all, as ``--lease-idle``.
    """

    memory: Bytes
    link: LinkName = "nvlink4"
    lease: Bytes = 32 * 2**20
    idle: Annotated[Number, Field(ge=0, le=1e6)] = 30.0


class CoordinatorPart(_Part):
    """The coordinator that grants leases.

    Attributes:
        ttl: Seconds of silence after which a member is considered dead.
        deadline: Seconds that a borrower gets at a recall.
        down: Intervals (start, end) in which no coordinator answers.
        pairs: For each borrower the lenders that it may borrow from; None: all may borrow from all.
    """

    ttl: Seconds = 10.0
    deadline: Seconds = 10.0
    down: Annotated[Intervals, AfterValidator(_rising)] = ()
    pairs: dict[str, tuple[str, ...]] | None = None


class ExpansionPart(_Part):
    """KV of some layers streams from host memory behind compute, as ``--kv-expansion`` of ``serve``.

    ``factor``: blocks with streamed layers over those without, the nearest that layers allow; ``auto`` decides from
    step to step.
    """

    factor: Factor = "auto"
    link: LinkName = "pcie4"


class ReliefPart(_Part):
    """Instances drop layers that others keep, serve as one pipeline, and restore them later (``--relief``).

    Attributes:
        mode: ``drop`` whenever memory is short, ``auto`` only if it costs less than to wait; ``pipeline`` for good, in
            groups of ``most_stages`` from the start.
        link: Between instances, for each of their GPUs, each way.
        overload: Seconds of shortage before a drop.
        calm: Seconds of demand below half of the pools before a restore.
        gap: Seconds between two moves, at least.
        remap_s_per_gb: Seconds for unmapping and mapping pages, for each GB (1e9 bytes).
        microbatch_tokens: The least prompt tokens of a microbatch.
        split: Microbatches of equal cost (``even``) or of equal tokens; ``halving`` is KunServe's rule by cost.
    """

    mode: Literal["drop", "auto", "pipeline"] = "drop"
    link: LinkName = "pcie4"
    most_stages: Annotated[int, Field(ge=2, le=MOST_STAGES, strict=True)] = MOST_STAGES
    restore: bool = True
    overload: Annotated[Number, Field(ge=0, lt=TIMING.window_s)] = TIMING.overload_s
    calm: Annotated[Number, Field(ge=0, le=1e6)] = TIMING.calm_s
    gap: Annotated[Number, Field(ge=0, le=1e6)] = TIMING.gap_s
    remap_s_per_gb: Annotated[Number, Field(ge=0, le=1e3)] = 0.005
    microbatch_tokens: Annotated[int, Field(ge=8, le=2**20, strict=True)] = 256
    split: Literal["even", "halving", "tokens"] = "even"


class FaultPart(_Part):
    """An instance dies at a time, or all of a server; empty ones take their places ``down`` seconds later."""

    at: Annotated[Number, Field(ge=0, le=1e9)]
    instance: Annotated[int, Field(ge=0, strict=True)] = 0
    server: Annotated[int, Field(ge=0, strict=True)] | None = None
    down: Seconds = 30.0


class _File(_Part):
    model: str
    device: str
    tensor_parallel: Annotated[int, Field(ge=1, le=64, strict=True)] = 1
    instances: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    max_concurrency: Count | None = None
    detailed: bool = True
    cost: CostPart = CostPart()
    engine: EnginePart = EnginePart()
    swap: SwapPart | None = None
    lender: LenderPart | None = None
    expansion: ExpansionPart | None = None
    relief: ReliefPart | None = None
    faults: tuple[FaultPart, ...] = ()
    borrow: BorrowPart | None = None
    lenders: dict[str, dict[str, Any]] = {}
    coordinator: CoordinatorPart = CoordinatorPart()
    servers: tuple[tuple[str, ...], ...] = ()
    workload: dict[str, Any] = {}
    tenants: dict[str, dict[str, Any]] = {}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A checked scenario.

    At most ``max_concurrency`` requests are sent at a time; None sends each when it arrives. Only a ``detailed`` result
    has lists with an entry for each request; without it memory does not grow with their tokens. ``tenants`` have a load
    each, by API key; without any, all requests are of ``workload``. ``lenders`` are scenarios of engines that lend to
    the instances. ``servers`` have the names of the engines that fail together: ``instance-0``, and ``NAME-0`` of a
    lender. ``written`` is the content as it was read, for results.
    """

    shape: ModelShape
    device: Device
    num_shards: int
    num_instances: int
    max_concurrency: int | None
    detailed: bool
    cost: CostPart
    engine: EnginePart
    swap: SwapPart | None
    lender: LenderPart | None
    expansion: ExpansionPart | None
    relief: ReliefPart | None
    faults: tuple[FaultPart, ...]
    borrow: BorrowPart | None
    lenders: Mapping[str, Scenario]
    coordinator: CoordinatorPart
    servers: tuple[tuple[str, ...], ...]
    workload: WorkloadSpec
    tenants: Mapping[str, WorkloadSpec]
    written: Mapping[str, Any]

    def alone(self) -> Scenario:
        """The scenario with one instance and nothing that disturbs it."""
        return replace(self, num_instances=1, relief=None, faults=(), lenders={})

    @property
    def engine_names(self) -> list[str]:
        """Names of all engines: those of the instances, and those of each lender."""
        groups = {INSTANCE: self, **self.lenders}
        return [f"{name}-{place}" for name, part in groups.items() for place in range(part.num_instances)]


def read_scenario(path: Path | None, sets: Sequence[str] = (), defaults: Sequence[str] = ()) -> Scenario:
    """The scenario in a file, with the values of ``sets`` (``engine.policy=fcfs``) in place of the file's.

    ``defaults`` are for keys that are not in the file. UserError, with the key's path, if the scenario is not valid.
    """
    written = {} if path is None else read_yaml_mapping(path, MAX_BYTES, MAX_DEPTH, "scenario")
    content = written
    for text in (*(each for each in defaults if not states_key(written, each)), *sets):
        content = with_value(content, text, MAX_DEPTH)
    source, folder = ("scenario", Path()) if path is None else (str(path), path.parent)
    try:
        return make_scenario(content, source, folder)
    except UserError as error:
        problem = str(error).removeprefix(f"{source}: ")
        if is_set(problem.partition(":")[0], written, sets):
            raise UserError(f"--set {problem}") from None
        raise


def make_scenario(content: Mapping[str, Any], source: str, folder: Path) -> Scenario:
    """The scenario that a mapping states; UserError, which begins with ``source``, if it is not valid."""
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        raise UserError(f"{source}: {_first_fault(error)}") from None
    try:
        _check_relief(file)
        shape, device = shape_named(file.model), device_named(file.device)
        workload = _read_workload(file.workload, folder, "workload")
        tenants = {  # with the same seed, equal loads would arrive at the same times
            name: _read_workload({"seed": workload.seed + place} | load, folder, f"tenants.{name}")
            for place, (name, load) in enumerate(file.tenants.items())
        }
        file.engine.settings  # noqa: B018 - refuses what no policy takes
    except SettingRefused as error:
        raise UserError(f"{source}: engine.{error}") from None
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    lenders = {name: _make_lender(name, content, file, source, folder) for name, content in file.lenders.items()}
    if late := [fault.instance for fault in file.faults if fault.instance >= file.instances]:
        raise UserError(f"{source}: faults: there is no instance {late[0]}: they count from 0 to {file.instances - 1}")
    heads, kv_heads, num_gpus = shape.num_heads, shape.num_kv_heads, file.tensor_parallel
    if heads % num_gpus or (kv_heads % num_gpus and num_gpus % kv_heads):
        raise UserError(f"{source}: tensor_parallel: {heads} heads and {kv_heads} KV heads do not divide evenly")
    places = {name: folder / value for name, value in file.cost if isinstance(value, Path)}
    scenario = Scenario(
        shape=shape,
        device=device,
        num_shards=file.tensor_parallel,
        num_instances=file.instances,
        max_concurrency=file.max_concurrency,
        detailed=file.detailed,
        cost=file.cost.model_copy(update=places),
        engine=file.engine,
        swap=file.swap,
        lender=file.lender,
        expansion=file.expansion,
        relief=file.relief,
        faults=file.faults,
        borrow=file.borrow,
        lenders=lenders,
        coordinator=file.coordinator,
        servers=file.servers,
        workload=workload,
        tenants=tenants,
        written=dict(content),
    )
    try:
        _check_lending(scenario)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    return scenario


def _make_lender(name: str, content: Mapping[str, Any], file: _File, source: str, folder: Path) -> Scenario:
    """The scenario of a lender; device and ``detailed`` are those of the instances if it states none."""
    where = f"{source}: lenders.{name}"
    if NAME.problem(name) is not None or name == INSTANCE:
        raise UserError(f"{where}: a lender's name has letters, digits, '.', '_' and '-', and is not {INSTANCE!r}")
    if refused := [key for key in _NOT_A_LENDERS if key in content]:
        raise UserError(f"{where}.{refused[0]}: a lender has no such key: it lends, and so it cannot borrow")
    return make_scenario({"device": file.device, "detailed": file.detailed} | dict(content), where, folder)


def _check_lending(scenario: Scenario) -> None:
    """UserError if lenders, the coordinator's pairs, servers and their faults do not fit together."""
    names, borrowers = scenario.engine_names, [f"{INSTANCE}-{place}" for place in range(scenario.num_instances)]
    if (scenario.borrow is None) != (not scenario.lenders):
        raise UserError("borrow and lenders go together: who borrows, and who lends")
    if scenario.borrow is not None and scenario.lender is not None:
        raise UserError("lender: borrow says what is lent: leave one of them out")
    for consumer, producers in (scenario.coordinator.pairs or {}).items():
        _check_names(f"coordinator.pairs.{consumer}", (consumer, *producers), names)
        if consumer not in borrowers:
            raise UserError(f"coordinator.pairs.{consumer}: it lends, and so it cannot borrow: lenders would be cyclic")
        if wrong := [name for name in producers if name in borrowers]:
            raise UserError(f"coordinator.pairs.{consumer}: {wrong[0]} borrows, and so it cannot lend")
    placed = [name for server in scenario.servers for name in server]
    for place, server in enumerate(scenario.servers):
        _check_names(f"servers.{place}", server, names)
    if twice := [name for name in placed if placed.count(name) > 1]:
        raise UserError(f"servers: {twice[0]} is on two of them")
    for place, fault in enumerate(scenario.faults):
        if fault.server is not None and "instance" in fault.model_fields_set:
            raise UserError(f"faults.{place}: an instance fails, or a server: leave one of them out")
        if fault.server is not None and fault.server >= len(scenario.servers):
            raise UserError(f"faults.{place}.server: there is no server {fault.server}: servers has them from 0 on")
    _check_downtimes(scenario)


def _check_downtimes(scenario: Scenario) -> None:
    """UserError if an engine is to fail that is down already."""
    groups = {INSTANCE: scenario, **scenario.lenders}
    faults = [(group, place, fault) for group, part in groups.items() for place, fault in enumerate(part.faults)]
    back_s: dict[str, float] = {}
    for group, place, fault in sorted(faults, key=lambda each: each[2].at):
        names = (f"{group}-{fault.instance}",) if fault.server is None else scenario.servers[fault.server]
        for name in names:
            if name in back_s and fault.at <= back_s[name]:
                path = f"faults.{place}" if group == INSTANCE else f"lenders.{group}.faults.{place}"
                raise UserError(f"{path}: {name} is still down at {fault.at:g} s: it is back at {back_s[name]:g} s")
            back_s[name] = fault.at + fault.down


def _check_names(path: str, names: Sequence[str], known: Sequence[str]) -> None:
    if wrong := [name for name in names if name not in known]:
        raise UserError(f"{path}: there is no {wrong[0]}; there are {', '.join(known)}")


def _read_workload(content: Mapping[str, Any], folder: Path, path: str) -> WorkloadSpec:
    known = [item.name for item in fields(WorkloadSpec)]
    if unknown := [key for key in content if key not in known]:
        raise UserError(f"{path}.{unknown[0]}: {_no_such_key(unknown[0], known)}")
    if wrong := [key for key, value in content.items() if isinstance(value, bool) and key != "ignore_eos"]:
        raise UserError(f"{path}.{wrong[0]}: it cannot be {str(content[wrong[0]]).lower()}")
    try:
        spec = TypeAdapter(WorkloadSpec).validate_python({"ignore_eos": True} | dict(content))
    except ValidationError as error:
        raise UserError(f"{path}.{_first_fault(error)}") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    files = {name: folder / value for name in ("trace", "lengths", "prompts") if (value := getattr(spec, name))}
    return replace(spec, **files)


def _check_relief(file: _File) -> None:
    if file.relief is None:
        return
    if file.instances < 2:
        raise UserError("relief: one instance has no other that keeps its layers: set instances to 2 or more")
    for name in ("lender", "borrow", "expansion", "faults"):
        if getattr(file, name):
            raise UserError(f"relief: it does not go with {name}: leave one of them out")


_WISHES = {
    "model_type": "Input should be a valid dictionary, of lines KEY: VALUE",
    "dict_type": "Input should be a valid dictionary, of lines KEY: VALUE",
    "tuple_type": "Input should be a list, such as [A, B]",
    "path_type": "Input should be a path",
}
"""What a value should be, by pydantic's kind of error, where its own message names a class of Python's."""


def _first_fault(error: ValidationError) -> str:
    faults = error.errors(include_url=False)
    fault = next((each for each in faults if each["type"] == "extra_forbidden"), faults[0])  # perhaps a misspelt key
    path = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "missing" and path not in ("model", "device"):
        return f"{path}: it is required"
    if fault["type"] == "missing":
        return f"{path}: say which; there are {', '.join(sorted(SHAPES if path == 'model' else DEVICES))}"
    if fault["type"] == "extra_forbidden":
        return f"{path}: {_no_such_key(str(fault['loc'][-1]), _keys_beside(fault['loc']))}"
    return f"{path}: {_WISHES.get(fault['type'], fault['msg'].removeprefix('Value error, '))}"


def _no_such_key(key: str, known: Sequence[str]) -> str:
    return "there is no such key" + (did_you_mean(key, known, TYPO_SIMILARITY) or f"; there are {', '.join(known)}")


def _keys_beside(place: tuple[int | str, ...]) -> list[str]:
    parts: dict[str, type[_Part]] = {
        "cost": CostPart, "engine": EnginePart, "swap": SwapPart, "lender": LenderPart, "expansion": ExpansionPart,
        "relief": ReliefPart, "faults": FaultPart, "borrow": BorrowPart, "coordinator": CoordinatorPart,
    }  # fmt: skip
    owner = parts.get(str(place[0]), _File) if len(place) > 1 else _File
    return list(owner.model_fields)
