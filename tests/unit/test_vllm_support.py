"""vLLM settings that the plug-in refuses, each by name in one line, and those it accepts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from floodplain.core.cache_groups import CacheGroup, CacheKind
from floodplain.core.errors import UserError
from floodplain.plugins.vllm.compat_names import count_block_bytes, find_groups
from floodplain.plugins.vllm.refusal import Refusal, refusals_in_one_line
from floodplain.plugins.vllm.register import CONNECTOR, CONNECTOR_MODULE, NATIVE, SCHEDULER
from floodplain.plugins.vllm.support import (
    CACHE_DTYPES,
    DRAFTERS,
    expect_supported,
    names_connector,
    names_scheduler,
)
from tests.support.waiting import HANG_S

DEFAULTS = {
    "scheduler_config": {
        "async_scheduling": False, "enable_chunked_prefill": True, "disable_chunked_mm_input": False,
        "scheduler_cls": SCHEDULER, "disable_hybrid_kv_cache_manager": True,
    },
    "parallel_config": {
        "pipeline_parallel_size": 1, "tensor_parallel_size": 1, "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1, "distributed_executor_backend": "uni",
    },
    "model_config": {
        "is_encoder_decoder": False, "runner_type": "generate", "is_diffusion": False, "is_hybrid": False,
        "is_attention_free": False, "enable_sleep_mode": False,
    },
    "cache_config": {"cache_dtype": "auto", "kv_offloading_size": None},
    "aux_output_config": {"enabled": False},
    "kv_transfer_config": {
        "kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {},
    },
}  # fmt: skip
"""vLLM's configuration of an engine with only our scheduler and connector."""


def make_config(**changes: Any) -> SimpleNamespace:
    """``DEFAULTS`` with changes: ``section__name=value``, or a whole section."""
    sections: dict[str, Any] = {name: dict(values) for name, values in DEFAULTS.items()}
    sections |= {"speculative_config": None, "lora_config": None, "ec_transfer_config": None}
    for path, value in changes.items():
        section, _, name = path.partition("__")
        if name:
            sections[section][name] = value
        else:
            sections[section] = value
    return SimpleNamespace(
        **{name: SimpleNamespace(**found) if isinstance(found, dict) else found for name, found in sections.items()}
    )


def several(*names: str, kv_role: str = "kv_both") -> dict[str, Any]:
    """vLLM's setting with several connectors."""
    connectors = [{"kv_connector": name, "kv_role": kv_role} for name in names]
    return {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"connectors": connectors},
    }  # fmt: skip


Ours = type("FloodplainScheduler", (), {"__module__": SCHEDULER.rpartition(".")[0]})
Heir = type("Heir", (Ours,), {})
Stranger = type("FloodplainScheduler", (), {})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"parallel_config__tensor_parallel_size": 2, "parallel_config__distributed_executor_backend": "mp"},
        {"kv_transfer_config__kv_load_failure_policy": "recompute"},
        {"scheduler_config__scheduler_cls": Heir},
        {"scheduler_config__async_scheduling": True},
        {"kv_transfer_config": several(CONNECTOR, "NixlConnector")},
        *({"cache_config__cache_dtype": dtype} for dtype in CACHE_DTYPES),
        *({"speculative_config": SimpleNamespace(method=method)} for method in DRAFTERS),
    ],
)
def test_what_is_supported_is_let_in(changes: dict[str, Any]) -> None:
    expect_supported(make_config(**changes), borrows=False, pins=False, follows_sleep=False)


def test_kv_is_not_kept_for_sessions_beside_drafts() -> None:
    with pytest.raises(UserError, match="leave pin_sessions out, or --speculative-config"):
        config = make_config(speculative_config=SimpleNamespace(method="ngram"))
        expect_supported(config, borrows=False, pins=True, follows_sleep=False)
    expect_supported(make_config(), borrows=False, pins=True, follows_sleep=False)


def test_borrowing_and_sleep_are_let_in_where_vllm_has_what_they_need() -> None:
    expect_supported(make_config(model_config__enable_sleep_mode=True), borrows=True, pins=False, follows_sleep=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scheduler_config__disable_chunked_mm_input": True}, "leave --disable-chunked-mm-input out"),
        ({"speculative_config": SimpleNamespace(method="medusa")}, "speculative decoding with medusa is not supported"),
        ({"ec_transfer_config": object()}, "leave --ec-transfer-config out"),
        ({"aux_output_config__enabled": True}, "leave --enable-return-routed-experts out"),
        ({"parallel_config__pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"parallel_config__decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"parallel_config__prefill_context_parallel_size": 2}, "prefill context parallelism"),
        ({"model_config__is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_config__runner_type": "pooling"}, "pooling models"),
        ({"model_config__is_diffusion": True}, "diffusion models"),
        ({"model_config__is_attention_free": True}, "models without attention have no KV to swap"),
        ({"cache_config__kv_offloading_size": 4.0}, "leave --kv-offloading-size out"),
        ({"cache_config__cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4 is not supported: use one of auto,"),
        ({"kv_transfer_config": several("NixlConnector", CONNECTOR)}, f"name {CONNECTOR} first"),
        ({"kv_transfer_config": several("NixlConnector")}, f"name {CONNECTOR} first"),
        ({"kv_transfer_config": several()}, f"name {CONNECTOR} first"),
        ({"kv_transfer_config": several(CONNECTOR, "NixlConnector", CONNECTOR)}, f"name {CONNECTOR} first and once"),
        ({"kv_transfer_config": several(CONNECTOR, kv_role="kv_producer")}, 'set "kv_role": "kv_both"'),
        ({"kv_transfer_config": several(CONNECTOR) | {"kv_role": "kv_consumer"}}, 'set "kv_role": "kv_both"'),
        (
            {
                "kv_transfer_config": several(CONNECTOR) | {"kv_connector": NATIVE},
                "cache_config__kv_offloading_size": 1,
            },
            "leave --kv-offloading-size out",
        ),
        ({"kv_transfer_config__kv_connector": "NixlConnector"}, "or with none: name no other kv_connector"),
        (
            {
                "kv_transfer_config": {
                    "kv_connector": NATIVE,
                    "kv_role": "kv_both",
                    "kv_connector_module_path": CONNECTOR_MODULE,
                    "kv_connector_extra_config": {},
                },
                "cache_config__kv_offloading_size": 4.0,
            },
            "leave --kv-offloading-size out",
        ),
        ({"kv_transfer_config__kv_role": "kv_producer"}, 'set "kv_role": "kv_both"'),
        ({"scheduler_config__scheduler_cls": None}, f"pass --scheduler-cls {SCHEDULER}"),
        ({"scheduler_config__scheduler_cls": Stranger}, f"pass --scheduler-cls {SCHEDULER}"),
        ({"scheduler_config__scheduler_cls": "no.such.Thing"}, "--scheduler-cls no.such.Thing is not found"),
        ({"scheduler_config__scheduler_cls": "json.JSONDecoder"}, f"pass --scheduler-cls {SCHEDULER}"),
        ({"model_config__enable_sleep_mode": True}, "leave --enable-sleep-mode out"),
        ({"parallel_config__tensor_parallel_size": 2}, "leave coordinator out, or --tensor-parallel-size"),
        ({"parallel_config__distributed_executor_backend": "mp"}, "leave coordinator out, or pass --distributed-exec"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refusal:
        expect_supported(make_config(**changes), borrows=True, pins=False, follows_sleep=False)
    assert message in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize("connector", [None, NATIVE])
def test_the_scheduler_runs_with_no_connector_or_with_vllms_own(connector: str | None) -> None:
    """vLLM sets its own connector if offloading is configured."""
    transfer = None if connector is None else {"kv_connector": connector, "kv_role": "kv_both"}
    size = None if connector is None else 4.0
    config = make_config(
        kv_transfer_config=transfer and transfer | {"kv_connector_extra_config": {"cpu_bytes_to_use": 2**32}},
        cache_config__kv_offloading_size=size,
    )
    assert names_scheduler(config) and not names_connector(config)
    expect_supported(config, borrows=False, pins=False, follows_sleep=False)
    with pytest.raises(UserError, match="speculative decoding with suffix is not supported: use one of ngram,"):
        config.speculative_config = SimpleNamespace(method="suffix")
        expect_supported(config, borrows=False, pins=False, follows_sleep=False)


def test_a_configuration_that_names_nothing_of_ours_is_none_of_ours() -> None:
    config = make_config(kv_transfer_config=None, scheduler_config__scheduler_cls=None)
    assert not names_scheduler(config) and not names_connector(config)
    inner = {"connectors": [{"kv_connector": CONNECTOR}]}
    many = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=inner)
    assert names_connector(make_config(kv_transfer_config=many))


# -- the cache ---------------------------------------------------------------------------------------------------------


def make_spec(kind: str, **facts: Any) -> Any:
    return type(kind, (), {"block_size": 16, **facts})()


def make_mixed(*specs: Any) -> SimpleNamespace:
    """The spec of a group whose layers have different sizes."""
    return SimpleNamespace(kv_cache_specs={str(number): spec for number, spec in enumerate(specs)}, block_size=16)


def make_cache(*specs: Any) -> SimpleNamespace:
    tensors = [SimpleNamespace(size=24_000)] * 3  # each has all of the memory
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(num_blocks=80, kv_cache_tensors=tensors, kv_cache_groups=groups)


FULL, WINDOW = make_spec("FullAttentionSpec"), make_spec("SlidingWindowSpec", sliding_window=50)


@pytest.mark.parametrize(
    ("specs", "groups"),
    [
        ([FULL], [CacheGroup(16)]),
        ([make_spec("MLAAttentionSpec")], [CacheGroup(16)]),
        ([make_mixed(FULL, FULL)], [CacheGroup(16)]),
        ([WINDOW], [CacheGroup(16, CacheKind.WINDOW, 5)]),
        ([FULL, WINDOW], [CacheGroup(16), CacheGroup(16, CacheKind.WINDOW, 5)]),
        ([make_spec("SlidingWindowSpec", sliding_window=49)], [CacheGroup(16, CacheKind.WINDOW, 4)]),
        (
            [FULL, make_spec("MambaSpec", block_size=512, mamba_cache_mode="none")],
            [CacheGroup(16), CacheGroup(512, CacheKind.STATE, 1)],
        ),
        ([make_spec("MambaSpec", mamba_cache_mode="align")], [CacheGroup(16, CacheKind.STATE, 2)]),
        (
            [make_spec("ChunkedLocalAttentionSpec", attention_chunk_size=32, block_size=8), FULL],
            [CacheGroup(8, CacheKind.WINDOW, 5), CacheGroup(16)],
        ),
        ([make_mixed(WINDOW, make_spec("SlidingWindowSpec", sliding_window=1))], [CacheGroup(16, CacheKind.WINDOW, 5)]),
    ],
)
def test_what_groups_of_layers_keep_is_read_from_vllm(specs: list[Any], groups: list[CacheGroup]) -> None:
    assert find_groups(make_cache(*specs)) == tuple(groups)


@pytest.mark.parametrize(
    "specs",
    [
        [make_spec("RSWASpec")],
        [FULL, make_spec("CrossAttentionSpec")],
        [make_mixed(FULL, make_spec("RSWASpec"))],
        [make_spec("MambaSpec", mamba_cache_mode="all")],
    ],
)
def test_other_kinds_of_cache_are_refused_by_name(specs: list[Any]) -> None:
    with pytest.raises(UserError, match=r"this model keeps .*(RSWA|Cross|Mamba).*: serve it without floodplain"):
        find_groups(make_cache(*specs))


def test_a_block_has_its_part_of_the_memory_that_all_groups_share() -> None:
    assert count_block_bytes(make_cache(FULL, WINDOW)) == 300


# -- how a refusal ends a process --------------------------------------------------------------------------------------


def test_a_refusal_can_be_caught_as_any_error_and_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    caught = None
    try:
        with refusals_in_one_line(), refusals_in_one_line():
            raise UserError("two\nlines")
    except Exception as error:
        caught = error
    assert isinstance(caught, Refusal) and isinstance(caught, UserError) and str(caught) == "two lines"
    assert capsys.readouterr().err == "floodplain: two lines\n"


def test_an_uncaught_refusal_is_one_line_and_status_2() -> None:
    program = (
        "from floodplain.core.errors import UserError\n"
        "from floodplain.plugins.vllm.refusal import refusals_in_one_line\n"
        "with refusals_in_one_line(): raise UserError('leave it out')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S)
    assert (ended.returncode, ended.stderr) == (2, "floodplain: leave it out\n")


PARENT = """
import multiprocessing, sys
from floodplain.plugins.vllm.refusal import end_quietly_after_refusals
end_quietly_after_refusals()
child = multiprocessing.get_context("spawn").Process(target=exec, args=(sys.argv[1], {}))
child.start()
child.join()
if "forget" in sys.argv: end_quietly_after_refusals()
raise RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}")
"""
"""Like vLLM's process that starts engine processes, which has no reason for their end."""

REFUSING = """
from floodplain.core.errors import UserError
from floodplain.plugins.vllm.refusal import end_quietly_after_refusals, refusals_in_one_line
end_quietly_after_refusals()
with refusals_in_one_line(): raise UserError('leave it out')
"""


@pytest.mark.parametrize(
    ("child", "more", "status", "num_traces"),
    [
        (REFUSING, (), 2, 0),
        (REFUSING, ("forget",), 1, 1),
        ("raise SystemExit(2)", (), 1, 1),
        ("raise ValueError('no memory')", (), 1, 2),
    ],
    ids=["refused", "refused before the last start", "ended otherwise", "failed"],
)
def test_a_process_ends_quietly_if_the_one_that_it_started_refused(
    child: str, more: tuple[str, ...], status: int, num_traces: int, tmp_path: Path
) -> None:
    words = [sys.executable, "-c", PARENT, child, *more]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    ended = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert (ended.returncode, ended.stderr.count("Traceback")) == (status, num_traces), ended.stderr
    assert ended.stderr.count("floodplain: leave it out\n") == (child == REFUSING)
    assert not list(tmp_path.iterdir())


def test_a_vllm_that_another_program_starts_ends_quietly_too(tmp_path: Path) -> None:
    """That program may have used the plug-in before: its inherited variable must not affect this vLLM."""
    environment = os.environ | {"TMPDIR": str(tmp_path), "_FLOODPLAIN_REFUSED": str(tmp_path / "another-program")}
    words = [sys.executable, "-c", PARENT, REFUSING]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, env=environment)
    assert (ended.returncode, ended.stderr) == (2, "floodplain: leave it out\n")
    assert not list(tmp_path.iterdir())


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(ValueError, match="a bug"), refusals_in_one_line():
        raise ValueError("a bug")
