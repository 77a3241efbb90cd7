"""Schemathesis against a served coordinator: no 5xx, and every error matches the schema.

Operations are driven by ``given``: the library's own pytest plugin uses parts of pytest that 9.2 does not have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from floodplain.leases.book import LeaseBook
from tests.support.coordinators import coordinating, open_store
from tests.support.examples import examples
from tests.support.lease_values import MOST

OPERATIONS = [
    ("POST", "/v1/messages"),
    ("GET", "/v1/leases"),
    ("GET", "/v1/changes"),
    ("DELETE", "/v1/members/{name}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
]
NOTHING_TO_GET_WRONG = {"/v1/leases", "/health", "/metrics"}
ASKED_BY_QUERY = {"/v1/changes"}
"""An invalid value may become valid in a query string: an empty list vanishes."""


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    store = open_store(tmp_path_factory.mktemp("store"))
    with coordinating(store) as running:
        yield schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    assert running.failure is None
    members, leases = store.rows()
    LeaseBook(10.0, 0.0, members.values(), leases.values()).rows.check_integrity()


def test_every_operation_of_the_schema_is_driven(schema: Any) -> None:
    paths = schema.raw_schema["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == set(OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_nothing_that_a_client_sends_breaks_the_coordinator(
    schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    if mode is GenerationMode.NEGATIVE and path in NOTHING_TO_GET_WRONG:
        mode = GenerationMode.POSITIVE
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=3 if path in NOTHING_TO_GET_WRONG else examples(60),
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def drive(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body = with_whole_numbers(case.body)
        response = case.call()
        case.validate_response(response)
        statuses[response.status_code] += 1
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    drive()
    assert all(status < 500 for status in statuses)
    if path in ASKED_BY_QUERY:
        assert statuses[200 if mode is GenerationMode.POSITIVE else 400]
    elif path not in NOTHING_TO_GET_WRONG:
        assert (statuses[200] > 0) == (mode is GenerationMode.POSITIVE)


def with_whole_numbers(body: Any) -> Any:
    """Convert whole floats, integers to JSON Schema only, to integers; cap them at ``MOST``, which floats round up."""
    if isinstance(body, dict):
        return {key: with_whole_numbers(value) for key, value in body.items()}
    if isinstance(body, list):
        return [with_whole_numbers(value) for value in body]
    if isinstance(body, float) and body.is_integer():
        body = int(body)
    return min(body, MOST) if type(body) is int else body
