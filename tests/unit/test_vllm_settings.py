"""Settings of the vLLM plug-in: every name sets its field, and every refusal is one line."""

from __future__ import annotations

from typing import Any

import pytest

from floodplain.core.errors import UserError
from floodplain.plugins.vllm.settings import DEFAULT_SWAP_BYTES, PluginSettings, read_settings
from floodplain.policy.base import Policy
from floodplain.policy.gate import GatedPolicy
from floodplain.policy.registry import POLICIES, make_policy
from floodplain.policy.settings import SLICE_STEPS, settings_for


def shape(policy: Policy) -> tuple[type, type | None]:
    """Its class, and that of the policy behind the gate."""
    return type(policy), type(policy._inner) if isinstance(policy, GatedPolicy) else None


def test_the_defaults_are_timely_and_four_gibibytes() -> None:
    settings = read_settings({})
    assert (settings.policy, settings.swap_bytes, settings.seed) == ("timely", DEFAULT_SWAP_BYTES, 0)
    assert DEFAULT_SWAP_BYTES == 4 * 2**30
    assert not settings.sharing and settings.coordinator is None
    assert shape(settings.make_policy()) == shape(make_policy("timely"))
    assert shape(PluginSettings().make_policy()) == shape(make_policy("timely"))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_named(policy: str) -> None:
    settings = read_settings({"policy": policy})
    assert settings.policy == policy
    assert shape(settings.make_policy()) == shape(make_policy(policy))


def test_every_policy_object_is_a_new_one() -> None:
    settings = read_settings({})
    assert settings.make_policy() is not settings.make_policy()


@pytest.mark.parametrize(
    ("memory", "num_bytes"),
    [
        ("256MiB", 256 * 2**20),
        ("4GB", 4 * 10**9),
        ("1048576", 2**20),
        (12345, 12345),
        (0, 0),
    ],
)
def test_swap_memory_is_a_size_or_a_number_of_bytes(memory: str | int, num_bytes: int) -> None:
    assert read_settings({"swap_memory": memory}).swap_bytes == num_bytes


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("slice", 7, "slice_steps"),
        ("ttft_goal", 0.5, "ttft_goal_s"),
        ("line_patience", 2.0, "line_patience"),
        ("max_gap", 3.0, "max_gap_s"),
    ],
)
def test_sharing_is_set_by_the_names_of_the_flags(name: str, value: Any, field: str) -> None:
    settings = read_settings({name: value, "policy": "cfs"})
    assert settings.sharing == {field: value}
    assert getattr(settings_for("cfs", **settings.sharing), field) == value


def test_a_pace_is_a_tpot_goal() -> None:
    settings = read_settings({"pace": 2.5})
    assert settings_for("paced", **(settings.sharing or {})).tpot_goal_s == 0.4


def test_what_is_not_set_is_as_the_policy_has_it() -> None:
    settings = read_settings({"policy": "fair", "pace": 2.0})
    assert settings.sharing == {"pace": 2.0}
    assert settings_for("fair", **settings.sharing).slice_steps == SLICE_STEPS["fair"]


@pytest.mark.parametrize(("told", "max_gap_s"), [({}, None), ({"max_gap": 3.0}, 3.0)])
def test_what_is_not_set_in_seconds_follows_the_step(told: dict[str, Any], max_gap_s: float | None) -> None:
    policy = read_settings(told).make_policy()
    assert isinstance(policy, GatedPolicy)
    assert (policy._inner.settings.max_gap_s, policy._inner.settings.tpot_goal_s) == (max_gap_s, None)


def test_all_names_can_stand_together() -> None:
    told = {
        "policy": "cfs",
        "swap_memory": "1GiB",
        "seed": 3,
        "slice": 4,
        "pace": 1.0,
        "max_gap": 9.0,
        "coordinator": "http://c:1",
        "coordinator_token_file": "token",
        "device_name": "gpu-0",
        "peer_memory": "3GiB",
    }
    sharing = {"slice_steps": 4, "pace": 1.0, "max_gap_s": 9.0}
    borrowing = ("http://c:1", "token", "gpu-0", 3 * 2**30)
    assert read_settings(told) == PluginSettings("cfs", sharing, 2**30, 3, *borrowing)


def test_the_seed_is_a_number() -> None:
    assert read_settings({"seed": 3}).seed == 3


@pytest.mark.parametrize(
    ("told", "line"),
    [
        (
            {"slices": 3},
            "kv_connector_extra_config has 'slices', which is none of policy, swap_memory, pin_sessions, seed, "
            "slice, pace, max_gap, ttft_goal, line_patience, coordinator, coordinator_token_file, device_name, "
            "peer_memory",
        ),
        ({"policy": "lifo"}, "policy must be one of fcfs, cfs, fair, paced, timely, not 'lifo'"),
        ({"policy": None}, "kv_connector_extra_config has a value for 'policy' of the wrong kind: None"),
        ({"seed": "x"}, "kv_connector_extra_config has a value for 'seed' of the wrong kind: 'x'"),
        ({"slice": 2.5}, "kv_connector_extra_config has a value for 'slice' of the wrong kind: 2.5"),
        ({"pace": "fast"}, "kv_connector_extra_config has a value for 'pace' of the wrong kind: 'fast'"),
        ({"swap_memory": True}, "kv_connector_extra_config has a value for 'swap_memory' of the wrong kind: True"),
        ({"swap_memory": 2**60}, f"swap_memory must be between 0 and {2**50} bytes, not {2**60}"),
        ({"swap_memory": -1}, f"swap_memory must be between 0 and {2**50} bytes, not -1"),
        ({"swap_memory": "plenty"}, "'plenty' is no size: write 256MiB, 4GB, or bytes"),
        ({"swap_memory": None}, "kv_connector_extra_config has a value for 'swap_memory' of the wrong kind: None"),
        ({"swap_memory": "1.3B"}, "'1.3B' is not a whole number of bytes"),
        ({"swap_memory": "2000TiB"}, "'2000TiB' is out of range: sizes lie between 1 byte and 1024TiB"),
        ({"slice": 0}, "slice must be between 1 and 10000 steps, not 0"),
        ({"pace": 0}, "pace must be above 0 tokens per second, not 0"),
        ({"max_gap": 0}, "max_gap must be above 0 seconds, not 0"),
        ({"policy": "fcfs", "pace": -1}, "pace must be above 0 tokens per second, not -1"),
        ({"peer_memory": "1GiB"}, "peer_memory needs coordinator: it knows which devices lend memory"),
        ({"device_name": "a"}, "device_name needs coordinator: it knows which devices lend memory"),
        (
            {"coordinator_token_file": "t"},
            "coordinator_token_file needs coordinator: it knows which devices lend memory",
        ),
        ({"pin_sessions": 1}, "kv_connector_extra_config has a value for 'pin_sessions' of the wrong kind: 1"),
        (
            {"pin_sessions": True, "coordinator": "http://c:1"},
            "pin_sessions and coordinator exclude each other: leave one of them out",
        ),
        (
            {"pin_sessions": True, "swap_memory": 0},
            "pin_sessions and swap_memory keep KV in swap space, and there is none",
        ),
        ({"coordinator": 3}, "kv_connector_extra_config has a value for 'coordinator' of the wrong kind: 3"),
        (
            {"coordinator": "http://c:1", "device_name": "a b"},
            "device_name 'a b' must be 1 to 64 letters, digits, '.', '_' or '-'",
        ),
        (
            {"coordinator": "http://c:1", "peer_memory": 2**60},
            f"peer_memory must be between 0 and {2**50} bytes, not {2**60}",
        ),
    ],
)
def test_a_refusal_is_one_line_that_names_the_problem(told: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refusal:
        read_settings(told)
    assert str(refusal.value) == line
