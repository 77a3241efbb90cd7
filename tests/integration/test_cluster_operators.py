"""Which keys may read the state of a cluster, and which may change it: by route, over a router without instances."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from floodplain.cli.router import key_to_send
from floodplain.cluster.router.engine import ClusterEngine
from floodplain.cluster.router.router import Router
from floodplain.cluster.router.routes import extend_with
from floodplain.server.app import create_app
from floodplain.server.auth import KeyRing
from floodplain.server.settings import ServerConfig
from tests.fakes.engine import FakeEngine
from tests.fakes.slots import FakeSlots

KEYS = "ann secret-of-ann\nadmin ops secret-of-ops\n"
LOOKS = ["/instances", "/groups", "/migrations"]
CHANGES: list[tuple[str, Any]] = [
    ("/v1/cluster/drop", {"instances": ["0", "1"]}),
    ("/v1/cluster/restore", {"instance": "0"}),
    ("/v1/cluster/migrate", {"source": "0", "target": "1"}),
]
JSON = {"Content-Type": "application/json"}
REACHED = (200, 400)
"""Statuses of a reached route; 400: the router has no instances to drop or to move."""


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


def app_with(keys: KeyRing | None) -> FastAPI:
    """A server that listens on ``gpu-host``."""
    router = Router(60.0, {}, FakeSlots(), lambda _: None)
    engine = cast(ClusterEngine, SimpleNamespace(model_name="fake", router=router))
    config = ServerConfig(host="gpu-host", served_model_name=("shown", "other"))
    return create_app(FakeEngine(), keys=keys, config=config, extend=extend_with(engine))


@pytest.fixture(scope="module")
def guarded(key_file: Path) -> FastAPI:
    return app_with(KeyRing.from_file(key_file))


@pytest.fixture(scope="module")
def unguarded() -> FastAPI:
    return app_with(None)


def ask(app: FastAPI, method: str, path: str, body: str | None = None, **headers: str) -> tuple[int, str]:
    """(status, error code)."""

    async def story() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.request(method, path, content=body, headers=sent)

    answer = asyncio.run(story())
    return answer.status_code, "" if answer.status_code == 200 else str(answer.json()["error"]["code"])


ROUTES = [*(("GET", path, None) for path in LOOKS), *(("POST", path, json.dumps(body)) for path, body in CHANGES)]


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_with_keys_any_key_may_look_and_only_an_admins_may_change(
    method: str, path: str, body: str | None, guarded: FastAPI
) -> None:
    for secret in ("", "Bearer wrong"):
        assert ask(guarded, method, path, body, Authorization=secret, **JSON) == (401, "invalid_api_key")
    status, code = ask(guarded, method, path, body, Authorization="Bearer secret-of-ann", **JSON)
    assert status in REACHED if method == "GET" else (status, code) == (403, "forbidden")
    by_proxy = {"Host": "proxy.example", "Authorization": "Bearer secret-of-ops", **JSON}
    assert ask(guarded, method, path, body, **by_proxy)[0] in REACHED


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_without_keys_no_web_page_may_look_or_change(
    method: str, path: str, body: str | None, unguarded: FastAPI
) -> None:
    for host in ("127.0.0.1:8000", "localhost", "[::1]:8000", "gpu-host:8000"):
        assert ask(unguarded, method, path, body, Host=host, **JSON)[0] in REACHED
    assert ask(unguarded, method, path, body, Host="evil.example", **JSON) == (403, "wrong_host")
    assert ask(unguarded, method, path, body, Origin="http://evil.example", **JSON) == (403, "wrong_origin")
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", ""):
        if method == "POST":
            assert ask(unguarded, method, path, body, Content_Type=kind) == (415, "unsupported_media_type")


def test_other_routes_have_any_name_and_no_redirects(unguarded: FastAPI) -> None:
    assert ask(unguarded, "GET", "/v1/models", Host="proxy.example") == (200, "")
    for path in ("/v1/completions/", "/health/"):
        assert ask(unguarded, "GET", path, Host="evil.example")[0] == 404


def test_metrics_of_instances_have_the_name_under_which_the_model_is_served(unguarded: FastAPI) -> None:
    async def scrape() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(unguarded), base_url="http://127.0.0.1") as client:
            return (await client.get("/metrics")).text

    samples = [line for line in asyncio.run(scrape()).splitlines() if line.startswith("floodplain_instances{")]
    assert samples and all('model_name="shown"' in sample for sample in samples)


def test_verbs_send_an_admins_key(key_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    assert key_to_send(key_file) == "secret-of-ops"
    assert key_to_send(None) == "from-the-environment"
    (tmp_path / "keys").write_text("first\nsecond\n")
    (tmp_path / "keys").chmod(0o600)
    assert key_to_send(tmp_path / "keys") == "first"
    monkeypatch.setenv("OPENAI_API_KEY", "")
    assert key_to_send(None) is None
