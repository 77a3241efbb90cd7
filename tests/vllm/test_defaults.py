"""With vLLM's defaults, the scheduler and the connector alone work, or are refused early, in one line.

Most tests start vLLM in processes of its own, as users do; for the server's streams see ``test_server.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from floodplain.plugins.vllm.refusal import Refusal
from tests.vllm.engines import Load, make_tiny, serve_calmly

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser  # from 0.33 on
except ImportError:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser

ROOT = Path(__file__).parents[2]
NUM_TOKENS = 60
PATIENCE_S = 400.0
"""Three processes start, each with its own import of vLLM."""
CONNECTOR = {
    "kv_connector": "FloodplainConnector",
    "kv_connector_module_path": "floodplain.plugins.vllm.connector",
    "kv_role": "kv_both",
}
NATIVE = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
TRANSFER = ["--kv-transfer-config", json.dumps(CONNECTOR)]
SCHEDULER = ["--scheduler-cls", "floodplain.plugins.vllm.scheduler.FloodplainScheduler"]


def run(*words: str, seconds: float = PATIENCE_S, installed: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program in vLLM's environment, with several processes as by default.

    ``installed`` is a folder with metadata of floodplain as an installed package.
    """
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    path = os.pathsep.join(map(str, [ROOT, *([installed] if installed else [])]))
    environment |= {"PYTHONPATH": path, "VLLM_CPU_KVCACHE_SPACE": "1"}
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


@pytest.mark.timeout(PATIENCE_S + 200)
def test_scheduler_and_connector_alone_give_the_same_tokens(model: Path) -> None:
    rng = Random(8)
    prompts = [[rng.randrange(10, 40_000) for _ in range(rng.randrange(80, 125))] for _ in range(6)]
    load = Load(tuple(map(tuple, prompts)), (NUM_TOKENS,) * len(prompts))
    expected = serve_calmly(model, load)
    flags = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "num_gpu_blocks_override": 6}
    told = {"model": str(model), "prompts": prompts, "num_tokens": NUM_TOKENS, **flags}
    ended = run("-m", "tests.vllm.plain", json.dumps(told))
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(next(line for line in ended.stdout.splitlines() if line.startswith('{"tokens"')))
    assert found["preemptions"] > 1
    assert found["tokens"] == [expected[index] for index in range(len(prompts))]


def server(model: Path, *flags: str, transfer: dict[str, Any] = CONNECTOR) -> list[str]:
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--max-model-len", "512"]
    return [*words, "--port", "0", "--kv-transfer-config", json.dumps(transfer), *flags]


def expect_refused(ended: subprocess.CompletedProcess[str], line: str) -> None:
    """Check for status 2, one line of ours, and no traceback."""
    said = ended.stderr.rstrip().splitlines()
    assert ended.returncode == 2, said[-5:]
    [own] = [one for one in said if "floodplain: " in one]
    assert own.startswith("floodplain: ") and line in own
    assert "Traceback" not in ended.stderr + ended.stdout


NO_SCHEDULER = "does nothing without its scheduler: pass --scheduler-cls"


def test_a_server_refuses_before_it_starts_anything(model: Path) -> None:
    expect_refused(run(*server(model)), NO_SCHEDULER)


def refusal_of(words: list[str]) -> str:
    """The refusal of a server's command line by vLLM's own parser and configuration, in this process."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Refusal) as refusal:
        patch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
        AsyncEngineArgs.from_cli_args(args).create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([], NO_SCHEDULER),
        ([*SCHEDULER, "--disable-chunked-mm-input"], "leave --disable-chunked-mm-input out"),
        (
            [*SCHEDULER, "--speculative-config", '{"method": "ngram_gpu", "num_speculative_tokens": 2}'],
            "with ngram_gpu",
        ),
        ([*SCHEDULER, "--kv-offloading-size", "1"], "leave --kv-offloading-size out"),
        ([*SCHEDULER, "-tp", "9", "-dcp", "3"], "decode context parallelism"),
        ([*SCHEDULER, "-pp", "2"], "pipeline parallelism"),
    ],
)
def test_flags_of_a_server_are_refused_by_name(model: Path, flags: list[str], line: str) -> None:
    assert line in refusal_of(server(model, *flags)[2:])


@pytest.mark.parametrize(
    ("transfer", "line"),
    [
        (CONNECTOR | {"kv_connector_extra_config": {"policy": "lifo"}}, "policy must be one of fcfs"),
        (CONNECTOR | {"kv_connector_extra_config": {"coordinator": "http://127.0.0.1:1"}}, "leave coordinator out"),
        (
            {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
            | {"kv_connector_extra_config": {"connectors": [NATIVE, CONNECTOR]}},
            "name FloodplainConnector first",
        ),
    ],
)
def test_settings_of_a_server_are_refused_by_name(model: Path, transfer: dict[str, Any], line: str) -> None:
    assert line in refusal_of(server(model, *SCHEDULER, transfer=transfer)[2:])


def test_a_program_is_refused_in_one_line_too(model: Path) -> None:
    flags = {"disable_chunked_mm_input": True, "max_model_len": 512}
    told = {"model": str(model), "prompts": [], "num_tokens": 1, **flags}
    ended = run("-m", "tests.vllm.plain", json.dumps(told))
    expect_refused(ended, "leave --disable-chunked-mm-input out")


def install(folder: Path) -> Path:
    """Write the metadata that pip would install of floodplain, as far as vLLM reads it."""
    about = folder / "floodplain-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: floodplain\nVersion: 0\n")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    (about / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    return folder


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ([*SCHEDULER, "--additional-config", '{"floodplain": {"swap_memory": 1}}'], "which is none of policy, seed"),
        (
            [*SCHEDULER, "--disable-hybrid-kv-cache-manager", "--disable-chunked-mm-input", *TRANSFER],
            "leave --disable-chunked-mm-input out",
        ),
    ],
    ids=["no connector", "vLLM asks for no connector early"],
)
def test_the_engine_process_refuses_in_one_line_too(model: Path, tmp_path: Path, flags: list[str], line: str) -> None:
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--max-model-len", "512"]
    ended = run(*words, "--port", "0", "--no-async-scheduling", *flags, installed=install(tmp_path))
    expect_refused(ended, line)
    assert "Loading safetensors" not in ended.stderr


def test_what_only_a_loaded_model_shows_is_refused_in_one_line(tmp_path: Path) -> None:
    """Windows stand for a kind of KV that we do not know."""
    flags = make_tiny(tmp_path, ["sliding"] * 4)
    (tmp_path / "sitecustomize.py").write_text("from floodplain.plugins.vllm import compat_names as n; n._WINDOWS = {}")
    words = server(
        tmp_path, *SCHEDULER, "--load-format", flags["load_format"], "--skip-tokenizer-init", "--enforce-eager"
    )
    expect_refused(run(*words, installed=tmp_path), "this model keeps SlidingWindowSpec: serve it without floodplain")
