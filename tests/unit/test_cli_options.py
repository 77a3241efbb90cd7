from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

from floodplain.cli.options import Parser, add_dataclass_flags, add_verb, dataclass_from, resolve
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    model: str = field(metadata={"positional": True, "help": "what"})
    base_url: str = field(metadata={"help": "where"})
    policy: str = field(default="fcfs", metadata={"help": "who", "choices": ("fcfs", "cfs", "fair", "paced")})
    rate: float = field(default=1.0, metadata={"help": "how fast"})
    limit: int | None = field(default=None, metadata={"help": "how many"})
    memory: int | None = field(default=2**30, metadata={"help": "how much", "size": True})
    caching: bool = field(default=True, metadata={"help": "whether"})
    goodput: tuple[str, ...] = field(default=(), metadata={"help": "how good"})
    trace: Path | None = field(default=None, metadata={"help": "which"})
    seed: int = field(default=0, metadata={"help": "luck"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    seed: int = field(default=0, metadata={"help": "luck too"})


def sample_parser() -> Parser:
    parser = add_verb(Parser(prog="x").add_subparsers(), "verb", "A verb.")
    add_dataclass_flags(parser, Sample, "sample")
    add_dataclass_flags(parser, Other, "other")
    return parser


def parse(*argv: str, **environ: str) -> Sample:
    return dataclass_from(resolve(sample_parser(), argv, environ), Sample)


MINIMUM = ("m", "--base-url", "http://x")


def test_every_field_is_a_flag_and_comes_back() -> None:
    argv = "--policy cfs --rate 2.5 --limit 3 --memory 256MiB --no-caching --goodput a:1 b:2 --trace t --seed 7"
    assert parse(*MINIMUM, *argv.split()) == Sample(
        model="m",
        base_url="http://x",
        policy="cfs",
        rate=2.5,
        limit=3,
        memory=2**28,
        caching=False,
        goodput=("a:1", "b:2"),
        trace=Path("t"),
        seed=7,
    )


def test_what_is_not_given_is_the_dataclass_default() -> None:
    assert parse(*MINIMUM) == Sample(model="m", base_url="http://x")


@pytest.mark.parametrize("flag", [("--model", "m"), ("--model=m",)])
def test_model_may_be_given_as_a_flag(flag: tuple[str, ...]) -> None:
    assert parse(*flag, "--base-url", "http://x") == parse("--base-url", "http://x", *flag) == parse(*MINIMUM)
    with pytest.raises(UserError, match="unknown argument"):
        parse(*flag, *MINIMUM)


def test_a_flag_of_two_dataclasses_serves_both() -> None:
    args = resolve(sample_parser(), [*MINIMUM, "--seed", "5"], {})
    assert dataclass_from(args, Sample).seed == dataclass_from(args, Other).seed == 5


VALUES = {
    "model": ("m1", "m2", "m3"),
    "policy": ("cfs", "fair", "paced"),
    "rate": (2.0, 3.0, 4.0),
    "memory": (2**20, 2**21, 2**22),
    "caching": (False, True, False),
    "goodput": (("a:1",), ("b:2", "c:3"), ("d:4",)),
}


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        (name, sources)
        for name, sources in itertools.product(VALUES, itertools.product([False, True], repeat=3))
        if name != "model" or any(sources)  # a required value has no default
    ],
)
def test_flag_beats_environment_beats_file_beats_default(
    name: str, sources: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    """Every subset of the three sources, for every kind of flag."""
    in_file, in_environ, on_line = sources
    from_file, from_environ, from_line = VALUES[name]
    argv, environ = ["--base-url", "u"], {}
    if in_file:
        value = list(from_file) if isinstance(from_file, tuple) else from_file
        (tmp_path / "c.yaml").write_text(f"{name}: {value}\n")
        argv += ["--config", str(tmp_path / "c.yaml")]
    if in_environ:
        spelled = from_environ if isinstance(from_environ, tuple) else (str(from_environ),)
        environ[f"FLOODPLAIN_{name.upper()}"] = " ".join(spelled)
    if on_line:
        words = from_line if isinstance(from_line, tuple) else (str(from_line),)
        argv += ["--no-caching"] if name == "caching" else [*([] if name == "model" else [f"--{name}"]), *words]
    if name != "model":
        argv.insert(0, "m")
    got = getattr(dataclass_from(resolve(sample_parser(), argv, environ), Sample), name)
    chosen = from_line if on_line else from_environ if in_environ else from_file if in_file else None
    assert got == (next(f.default for f in fields(Sample) if f.name == name) if chosen is None else chosen)


def config_file(folder: Path, text: str) -> tuple[str, ...]:
    (folder / "c.yaml").write_text(text)
    return (*MINIMUM, "--config", str(folder / "c.yaml"))


def test_config_may_come_from_the_environment_and_keys_may_have_dashes(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("base-url: u\nmodel: m\nlimit: null\nquiet: true\n")
    args = resolve(sample_parser(), [], {"FLOODPLAIN_CONFIG": str(tmp_path / "c.yaml")})
    assert (args.model, args.base_url, args.limit, args.quiet) == ("m", "u", None, True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy: cfs", r"c.yaml: unknown key 'polcy' \(did you mean policy\?\)"),
        ("zzz: 1", "c.yaml: unknown key 'zzz'$"),
        ("policy: lottery", "c.yaml, policy: argument --policy: invalid choice: 'lottery'"),
        ("memory: -1", "c.yaml, memory: argument --memory: '-1' is no size"),
        ("caching: 3", "c.yaml, caching: write true or false, not '3'"),
        ("rate: [1, 2]", r"c.yaml, rate: \['1', '2'\] is not one value"),
        ("- 1", "must hold lines KEY: VALUE"),
        ("a: [", "c.yaml, line 2: did not find expected node content"),
        ("limit: 2026-13-45", "c.yaml, limit: argument --limit: invalid int value: '2026-13-45'"),
        (f"limit: {'9' * 5000}", "c.yaml: cannot be read .a number has too many digits"),
        (f"limit: {'[' * 20_000}", "nested deeper than 4 levels"),
        ("base-url: v\nbase_url: w", "c.yaml, line 2: 'base_url', that is 'base-url', stands in line 1 already"),
        ("caching: maybe", "c.yaml, caching: write true or false, not 'maybe'"),
        ("#" * 2**16 + "\n", "it is larger than 64KiB"),
        ("config: other.yaml", "unknown key 'config'$"),
        ("goodput: [a, --limit=3]", "c.yaml, goodput: --limit=3 looks like a flag"),
        ("limit: {a: 1}", r"c.yaml, limit: \{'a': '1'\} is not one value"),
    ],
)
def test_a_bad_file_is_named_with_its_key(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        parse(*config_file(tmp_path, text))


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (("m", "--base-url", "u", "--polcy", "cfs"), {}, r"unknown argument --polcy \(did you mean --policy\?\)"),
        (("m", "--base-url", "u", "extra"), {}, "unknown argument extra"),
        (("m", "--base-url", "u", "--pol", "cfs"), {}, "unknown argument --pol"),
        (("m", "--base-url", "u", "--memory", "4G"), {}, "argument --memory: '4G' is no size"),
        (("m", "--base-url", "u", "--limit", "x"), {}, "argument --limit: invalid int value: 'x'"),
        (("m",), {}, "needs --base-url: where"),
        (("--base-url", "u"), {}, "needs MODEL: what"),
        (MINIMUM, {"FLOODPLAIN_GOODPUT": "'a"}, "FLOODPLAIN_GOODPUT: No closing quotation"),
        (MINIMUM, {"FLOODPLAIN_RATE": "fast"}, "FLOODPLAIN_RATE: argument --rate: invalid float value: 'fast'"),
        (MINIMUM, {"FLOODPLAIN_CACHING": "perhaps"}, "FLOODPLAIN_CACHING: write true or false, not 'perhaps'"),
        ((*MINIMUM, "--config", "/nonexistent.yaml"), {}, "cannot read --config /nonexistent.yaml"),
    ],
)
def test_bad_usage_is_one_line_that_names_the_problem(
    argv: tuple[str, ...], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve(sample_parser(), argv, environ)
    assert "\n" not in str(caught.value)


def test_variables_of_other_verbs_are_left_alone() -> None:
    assert parse(*MINIMUM, FLOODPLAIN_SHARED="/x", FLOODPLAIN_PORT="1", HOME="/") == parse(*MINIMUM)


def test_an_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    empty = dict.fromkeys(("FLOODPLAIN_RATE", "FLOODPLAIN_CACHING", "FLOODPLAIN_TRACE", "FLOODPLAIN_GOODPUT"), "")
    assert parse(*MINIMUM, **empty) == parse(*MINIMUM)
    assert parse(*config_file(tmp_path, "rate: 3"), **empty).rate == 3
    with pytest.raises(UserError, match="needs MODEL: what"):
        parse("--base-url", "u", FLOODPLAIN_MODEL="")


def test_a_value_from_a_file_or_a_variable_is_never_a_flag(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: --help\n")
    assert resolve(sample_parser(), ["--base-url", "u", "--config", str(tmp_path / "c.yaml")], {}).model == "--help"
    assert resolve(sample_parser(), ["--base-url", "u"], {"FLOODPLAIN_MODEL": "--help"}).model == "--help"


def test_the_environment_may_name_a_file_with_a_space() -> None:
    assert parse(*MINIMUM, FLOODPLAIN_TRACE="a b.csv").trace == Path("a b.csv")


def test_engine_flags_are_the_engine_config() -> None:
    parser = add_verb(Parser(prog="x").add_subparsers(), "verb", "A verb.")
    add_dataclass_flags(parser, EngineConfig)
    args = resolve(parser, ["smollm2", "--kv-memory", "256MiB", "--no-enable-prefix-caching"], {})
    expected = EngineConfig(model="smollm2", kv_memory=2**28, enable_prefix_caching=False)
    assert dataclass_from(args, EngineConfig) == expected
    assert "MODEL" in parser.format_help()
    with pytest.raises(UserError, match="--block-tokens must be a whole number of at least 1"):
        dataclass_from(resolve(parser, ["m", "--block-tokens", "0"], {}), EngineConfig)


def test_a_clash_of_defaults_is_not_shared() -> None:
    @dataclass(frozen=True)
    class Clash:
        seed: int = 1

    parser = sample_parser()
    with pytest.raises(argparse.ArgumentError, match="conflicting option"):
        add_dataclass_flags(parser, Clash)


def test_a_switch_that_a_file_turns_on_can_be_turned_off_by_a_variable(tmp_path: Path) -> None:
    args = resolve(sample_parser(), config_file(tmp_path, "quiet: true"), {"FLOODPLAIN_QUIET": "0"})
    assert args.quiet is False
