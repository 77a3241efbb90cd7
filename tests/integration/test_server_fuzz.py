"""Schemathesis against the application in this process: no 5xx, and every error matches the schema.

One check is left out: ``positive_data_acceptance``. The schema gives types, while ranges depend on each other and on
the model (``max_tokens`` on the prompt, ``model`` on its name): ``SamplingParams`` and the engine refuse those.

Operations are driven by ``given``: the library's own pytest plugin uses parts of pytest that 9.2 does not have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.python.asgi import shutdown_lifespans
from schemathesis.specs.openapi.checks import positive_data_acceptance

from floodplain.server.app import create_app
from tests.fakes.engine import FakeEngine
from tests.support.examples import examples

OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("GET", "/ready"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]
ANSWERED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "fake", "prompt": "a"},
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"model": "fake", "input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
SURE = {path: ({**body, "model": 5}, body) for path, body in ANSWERED.items()}
"""For each path a body that is refused, and one that is answered."""


@pytest.fixture(scope="module")
def schema() -> Iterator[Any]:
    yield schemathesis.openapi.from_asgi("/openapi.json", create_app(FakeEngine()))
    shutdown_lifespans()


def test_every_operation_of_the_schema_is_driven(schema: Any) -> None:
    paths = schema.raw_schema["paths"]
    assert {(method.upper(), path) for path, methods in paths.items() for method in methods} == set(OPERATIONS)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_nothing_that_a_client_sends_breaks_the_server(
    schema: Any, method: str, path: str, mode: GenerationMode
) -> None:
    takes_body = method == "POST"
    if mode is GenerationMode.NEGATIVE and not takes_body:
        mode = GenerationMode.POSITIVE  # no input can be invalid
    statuses: Counter[int] = Counter()
    sure = iter(SURE[path] if takes_body and mode is GenerationMode.POSITIVE else ())

    @settings(
        max_examples=examples(60) if takes_body else 3,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    @given(
        case=schema[path][method].as_strategy(generation_mode=mode), name=st.integers(0, 9), num_kept=st.integers(0, 8)
    )
    def drive(case: schemathesis.Case, name: int, num_kept: int) -> None:
        if (body := next(sure, None)) is not None:  # draws depend on which modules are loaded
            case.body = body
        elif isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and name:
            case.body["model"] = "fake"  # one in ten keeps its own name, which no model has
            if mode is GenerationMode.POSITIVE:
                drop_options(case.body, num_kept)
        response = case.call()
        case.validate_response(response, excluded_checks=[positive_data_acceptance])
        statuses[response.status_code] += 1
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    drive()
    assert all(status < 500 for status in statuses)
    if takes_body:
        assert statuses[400] > 0
        assert (statuses[200] > 0) == (mode is GenerationMode.POSITIVE)


def drop_options(body: dict[str, Any], num_kept: int) -> None:
    """Keep ``num_kept`` options: of twenty, one is nearly always out of its range, and nothing is served."""
    for name in [name for name in body if name not in ("model", "prompt", "messages")][num_kept:]:
        del body[name]


def test_the_schema_describes_the_errors_and_no_422(schema: Any) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        answers = schema.raw_schema["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "429", "500", "503"} <= set(answers)
        assert "422" not in answers
