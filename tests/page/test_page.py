"""The live page in headless Chromium against a real server, a router and a coordinator (``make test-page``).

``make test-page SCREENSHOTS=FOLDER`` keeps pictures of it; those of docs/images are of a slower model
(``PAGE_MODEL=smollm2 PAGE_KV_MEMORY=24MiB``).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from floodplain.coordinator.tokens import TokenRing
from floodplain.core.sequence import Status
from floodplain.core.sizes import parse_size, show_size
from floodplain.engine.async_engine import AsyncEngine
from floodplain.engine.config import EngineConfig
from floodplain.engine.shell import Engine
from floodplain.leases.messages import Join, Offer, Recall, Request
from floodplain.leases.rows import Shard
from floodplain.leases.states import Stamp
from floodplain.lending.client import CoordinatorClient
from floodplain.live import changes
from floodplain.live.changes import Snapshot, encode
from floodplain.live.rows import Row
from floodplain.server.page_burst import NUM_REQUESTS
from tests.fakes.engine import serving as serving_here
from tests.support.coordinators import RunningCoordinator, coordinating, open_store
from tests.support.held_engine import HeldEngine
from tests.support.secret_files import secret_file
from tests.support.swapping import unknown_prices

pytestmark = pytest.mark.slow

CHROMIUM = shutil.which(os.environ.get("CHROMIUM", "chromium"))
SCREENSHOTS = os.environ.get("SCREENSHOTS")
"""Folder in which pictures are kept."""
WAIT_MS = 300_000
MODEL = os.environ.get("PAGE_MODEL", "dummy:tiny-llama")
KV_MEMORY = os.environ.get("PAGE_KV_MEMORY", "768KiB")
FLAGS = (
    f"--kv-memory={KV_MEMORY}", "--swap-memory=64MiB", "--policy=fair", "--max-model-len=512", "--max-num-seqs=64",
)  # fmt: skip
LIVE = "#strip .strip-row:not(.is-finished)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM, "there is no chromium: apt-get install chromium"
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        expect.set_options(timeout=WAIT_MS)
        yield opened
        opened.close()


@contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The address of a server in a process of its own."""
    command = [sys.executable, "-m", "floodplain", "serve", MODEL, *FLAGS, "--port=0", "--format=json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def held() -> Iterator[tuple[str, HeldEngine]]:
    """A server in this process, over a real engine that can be held. Its policy swaps, however fast this machine is."""
    sizes = {"kv_memory": parse_size(KV_MEMORY), "swap_memory": 2**26, "max_model_len": 512, "max_num_seqs": 64}
    with unknown_prices():
        engine = AsyncEngine.from_config(EngineConfig(model=MODEL, policy="fair", **sizes))
        with serving_here(engine) as running, closing(HeldEngine(engine.engine)) as held:
            yield running.url, held


@pytest.fixture(scope="module")
def url(held: tuple[str, HeldEngine]) -> str:
    return held[0]


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    with opened(browser) as page:
        yield page


@contextmanager
def opened(browser: Browser, scheme: Any = "light", height: int = 1000, expected: str | None = None) -> Iterator[Page]:
    """A page whose scripts do not fail; the browser logs errors if and only if some with ``expected`` are."""
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1180, "height": height})
    page, problems = context.new_page(), []
    page.set_default_timeout(WAIT_MS)
    page.on("pageerror", lambda error: problems.append(f"a script: {error}"))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert bool(problems) is (expected is not None), problems
    assert all(expected is not None and expected in one and "a script" not in one for one in problems), problems


def picture(page: Page, name: str) -> None:
    """Keep a screenshot, if they are wanted."""
    if SCREENSHOTS:
        page.screenshot(path=str(Path(SCREENSHOTS) / f"{name}.png"))


def numbers(page: Page, selector: str) -> set[int]:
    return set(page.eval_on_selector_all(selector, "rows => rows.map(row => Number(row.dataset.number))"))


def is_mixed(engine: Engine) -> bool:
    """Whether requests run and wait, and others have been swapped out after their first token."""
    seqs = list(engine.loop.state.sequences.values())
    states = {seq.status for seq in seqs if seq.status is not Status.SWAPPED or seq.lifecycle.token_times_s}
    return states >= {Status.RUNNING, Status.WAITING, Status.SWAPPED}


def has_ended_some(engine: Engine) -> bool:
    """Whether a third of a burst has ended."""
    return len(engine.loop.state.sequences) <= NUM_REQUESTS * 2 // 3


@contextmanager
def burst(page: Page, held: tuple[str, HeldEngine]) -> Iterator[dict[int, str]]:
    """A burst by the button, held while its requests are mixed; their states by number."""
    url, engine = held
    page.goto(url)
    expect(page.locator("#status")).to_have_text("live")
    try:
        engine.hold(is_mixed)
        page.click("#burst")
        engine.wait()
        yield {int(seq_id): seq.status.value for seq_id, seq in engine.engine.loop.state.sequences.items()}
    finally:
        engine.close()
    expect(page.locator(LIVE)).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_burst_is_shown_and_a_click_tells_a_life(browser: Browser, held: tuple[str, HeldEngine], scheme: str) -> None:
    with opened(browser, scheme) as page:
        with burst(page, held) as states:
            for state, count in Counter(states.values()).items():
                expect(page.locator(f"#strip .is-{state}")).to_have_count(count)
            assert numbers(page, LIVE) == states.keys()
            assert len(states) == NUM_REQUESTS
            expect(page.locator("#why")).to_contain_text("Why requests wait")
            page.locator("#strip .is-swapped:has(.lane .swapped):has(.lane .first)").first.click()
            story = page.locator("#life-events")
            expect(story).to_contain_text(re.compile("arrives with .* swapped out: [0-9.]+ [KM]iB", re.S))
            held[1].hold(has_ended_some)
            held[1].wait()
            expect(page.locator(LIVE)).to_have_count(len(held[1].engine.loop.state.sequences))
            expect(page.locator("#strip .is-finished").first).to_be_visible()
            picture(page, f"page-{scheme}")
        expect(story).to_contain_text(re.compile("first token.*ends: length", re.S))
        expect(page.locator("#life-title")).to_contain_text("ended by length")
        assert page.locator(".tile.running b").inner_text() == "0"


def test_rows_and_memory_are_those_of_the_feed(page: Page, held: tuple[str, HeldEngine]) -> None:
    with burst(page, held) as states:
        expect(page.locator("#strip .is-swapped")).to_have_count(Counter(states.values())["swapped"])
        known = page.evaluate("import('/page/feed.js').then(feed => [...feed.state.rows.keys()])")
        assert states.keys() <= numbers(page, "#strip .strip-row") <= set(known)
        memory = page.evaluate("import('/page/feed.js').then(feed => feed.state.head.memory)")
        assert memory["running"] + memory["moving"] + memory["cached"] + memory["free"] == memory["pool"] > 0
        assert memory["running"] > 0 and memory["swapped"] > 0


def test_sizes_read_as_everywhere_else(page: Page, url: str) -> None:
    sizes = [0, 1, 999, 1023, 1024, 1088, 1535, 2**20 - 1, 2**20, 66_584_576, 10**9, 7 * 2**30 + 1, 3 * 2**40, 2**50]
    sizes += [round(1.37**power) for power in range(110)]
    page.goto(url)
    shown = page.evaluate("sizes => import('/page/format.js').then(format => sizes.map(format.bytes))", sizes)
    assert shown == [show_size(size) for size in sizes]


def test_a_key_is_asked_for_once_and_kept_in_the_tab(browser: Browser, tmp_path: Path) -> None:
    keys = secret_file(tmp_path, "alice open-sesame\n")
    with serving(f"--api-key-file={keys}") as url, opened(browser, expected="401") as page:
        page.goto(url)
        page.fill("#key", "\u043a\u043b\u044e\u0447")
        page.click("#key-form button")
        expect(page.locator("#key-problem")).to_contain_text("Latin-1")
        for key, is_right in (("wrong", False), ("open-sesame", True)):
            page.fill("#key", key)
            page.click("#key-form button")
            expect(page.locator("#status")).to_have_text("live" if is_right else "locked")
        page.reload()
        expect(page.locator("#status")).to_have_text("live")
        assert "open-sesame" not in page.content()
        assert page.evaluate("localStorage.length") == 0


def test_a_refusal_that_no_key_mends_is_shown_without_the_form(browser: Browser, url: str) -> None:
    error = {"error": {"message": "this service is not 'elsewhere'", "code": "wrong_host"}}
    with opened(browser, expected="403") as page:
        page.route("**/live", lambda route: route.fulfill(status=403, json=error))
        page.goto(url)
        expect(page.locator("#status")).to_contain_text("not 'elsewhere'")
        expect(page.locator("#key-form")).to_be_hidden()


def test_the_page_works_under_a_path_of_a_proxy(page: Page, url: str) -> None:
    page.route("**/*", lambda route: route.abort())  # another service's
    page.route("**/llm/**", lambda route: route.continue_(url=route.request.url.replace("/llm/", "/")))
    page.goto(f"{url}/llm/")
    expect(page.locator("#status")).to_have_text("live")


def test_a_service_that_is_silent_is_asked_again(page: Page, url: str) -> None:
    page.clock.install()
    page.route("**/live", lambda route: None)  # neither an answer nor an end
    with page.expect_request("**/live"):
        page.goto(url)
    page.clock.fast_forward(9_000)
    assert page.locator("#status").inner_text() == "connecting"
    page.clock.fast_forward(2_000)
    expect(page.locator("#status")).to_have_text("no connection")
    page.unroute("**/live")
    page.clock.fast_forward(2_000)
    expect(page.locator("#status")).to_have_text("live")


ORDERS = """
async (orders) => {
  const { showStrip } = await import("/page/strip.js");
  const strip = document.createElement("div");
  const places = { strip, more: document.createElement("p"), hint: strip.cloneNode(), axis: strip.cloneNode() };
  document.body.append(strip);
  const row = ([number, state]) => [number, { number, state, tokens: 1, blocks: 0, prompt: 1, where: null,
    events: [[0, "arrived", 0]], first_token_s: null, reason: state === "finished" ? "stop" : null }];
  const seen = [];
  for (const order of orders) {
    showStrip(places, { head: { now_s: 1, block_bytes: 1 }, rows: new Map(order.map(row)) }, 20, null, () => 0);
    strip.querySelector("[data-number='3']").focus();
    seen.push([]);
    for (const change of [order.slice(1), order]) {
      showStrip(places, { head: { now_s: 1, block_bytes: 1 }, rows: new Map(change.map(row)) }, 20, null, () => 0);
      seen.at(-1).push([...strip.children].map((line) => Number(line.dataset.number)));
      seen.at(-1).push(Number(document.activeElement.dataset.number));
    }
  }
  return seen;
}
"""


def test_a_row_keeps_the_focus_while_others_come_and_end(page: Page, url: str) -> None:
    page.goto(url)
    orders = [
        [[1, "running"], [2, "running"], [3, "running"], [4, "waiting"]],
        [[1, "finished"], [2, "running"], [3, "running"], [4, "running"]],
        [[1, "running"], [2, "waiting"], [3, "finished"], [4, "running"]],
    ]
    assert page.evaluate(ORDERS, orders) == [
        [[2, 3, 4], 3, [1, 2, 3, 4], 3],
        [[2, 3, 4], 3, [2, 3, 4, 1], 3],
        [[4, 2, 3], 3, [1, 4, 2, 3], 3],
    ]


def whole(arrival_s: float, prompt: int) -> str:
    """The event of a server with one live request, which has the number 1."""
    memory = dict.fromkeys(
        ("pool", "running", "moving", "cached", "free", "swapped", "lent", "borrowed", "expanded", "dropped"), 1
    )
    head = {"service": "server", "model": "m", "can_burst": False, "now_s": 60.0, "block_bytes": 1, "memory": memory,
            "requests": {"running": 1, "waiting": 0, "swapped": 0}, "latency": {}, "leases": [], "why": None,
            "totals": {"generated_tokens": 0, "swap_in_bytes": 0, "swap_out_bytes": 0}}  # fmt: skip
    row = Row(1, 0, 1, "running", prompt, ((arrival_s, "arrived", 0),), None, None)
    return encode(changes.whole(Snapshot(head, {1: row}))).decode()


def test_a_life_is_of_one_request_though_another_gets_its_number(page: Page, url: str) -> None:
    events = [whole(50.0, 11), whole(55.0, 22)]  # the service is started again in between
    page.route("**/live", lambda route: route.fulfill(body=events[0]))
    page.goto(url)
    page.locator("#strip .strip-row").click()
    expect(page.locator("#life-events")).to_contain_text("arrives with 11")
    events.pop(0)
    expect(page.locator("#strip .tokens")).to_have_text("22 + 0")
    expect(page.locator("#life-events")).to_contain_text("arrives with 11")
    page.locator("#strip .strip-row").click()
    expect(page.locator("#life-events")).to_contain_text("arrives with 22")


PRESSED = """
async () => {
  const { showStrip } = await import("/page/strip.js");
  const [strip, ...rest] = ["main", "p", "p", "p"].map((name) => document.createElement(name));
  const [more, hint, axis] = rest;
  strip.id = "pressed";
  document.body.prepend(strip);
  const row = (number, state) => [number, { number, state, tokens: 1, blocks: 0, prompt: 1, where: null,
    events: [[0, "arrived", 0]], first_token_s: null, reason: null }];
  window.clicked = [];
  window.show = (first, second) => showStrip({ strip, more, hint, axis },
    { head: { now_s: 1, block_bytes: 1 }, rows: new Map([row(1, first), row(2, second)]) }, 20, null,
    (number) => window.clicked.push(number));
  window.show("running", "waiting");
}
"""


def test_a_row_stays_under_the_pressed_pointer(page: Page, url: str) -> None:
    page.goto(url)
    page.evaluate(PRESSED)
    page.locator("#pressed [data-number='1']").hover()
    page.mouse.down()
    page.evaluate("window.show('waiting', 'running')")
    page.mouse.up()
    assert page.evaluate("window.clicked") == [1]
    page.evaluate("window.show('waiting', 'running')")
    assert [line.get_attribute("data-number") for line in page.query_selector_all("#pressed button")] == ["2", "1"]


def test_the_burst_button_works_again_after_a_failure(browser: Browser, url: str) -> None:
    with opened(browser, expected="ERR_FAILED") as page:
        page.goto(url)
        page.route("**/live/burst", lambda route: route.abort())
        page.click("#burst")
        expect(page.locator("#status")).to_have_text("no connection")
        expect(page.locator("#burst")).to_be_enabled()


@contextmanager
def loading(url: str, num_clients: int = 8) -> Iterator[None]:
    """Clients of a server that send one long request after another until the context is left."""
    is_over = threading.Event()
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": [7] * 40, "max_tokens": 400, "ignore_eos": True}

    def send() -> None:
        while not is_over.is_set():
            httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_MS / 1e3).raise_for_status()

    with ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(send) for _ in range(num_clients)]
        try:
            yield
        finally:
            is_over.set()
            failures = [client.exception() for client in clients]
    assert not any(failures), failures


def test_a_routers_page_shows_its_instances(browser: Browser) -> None:
    with serving("--instances=2") as url, opened(browser, height=1150) as page, loading(url):
        page.goto(url)
        expect(page.locator("#instances tbody tr")).to_have_count(2)
        expect(page.locator("#strip .is-placed").first).to_be_visible()
        expect(page.locator("#strip .strip-row .number").first).to_contain_text(re.compile("#[0-9]+ on [01]"))
        expect(page.locator("#strip .lane .first").first).to_be_attached()
        picture(page, "page-router")


def test_a_coordinators_page_shows_leases_as_arrows(browser: Browser, tmp_path: Path) -> None:
    tokens = TokenRing.from_file(secret_file(tmp_path, "root\n"))
    with (
        coordinating(open_store(tmp_path), tokens=tokens, ttl_s=3600.0) as running,
        opened(browser, height=620, expected="401") as page,
    ):
        lend(running)
        page.goto(running.url)
        page.fill("#key", "root")
        page.click("#key-form button")
        expect(page.locator(".arrow")).to_have_count(3)
        expect(page.locator("text.recalled").first).to_contain_text(re.compile("recalled, [0-9]+ s left"))
        expect(page.locator("#members tbody tr")).to_have_count(5)
        picture(page, "page-coordinator")


PANELS = """
async () => {
  const { showInstances, showLeases } = await import("/page/panels.js");
  const { drawRiver, showLegend } = await import("/page/river.js");
  const $ = (id) => document.getElementById(id);
  $("name").textContent = "/models/" + "a-name-without-a-blank".repeat(5);
  const row = { epoch: 7, slot: null, state: "leading", host: "h", requests: 3, running: 1, waiting: 1, swapped: 1,
                used_blocks: 5, blocks: 9, generated_tokens: 1234 };
  const group = { number: 2, names: ["0", "e7"], state: "pipelined", layers: [15, 15], own_blocks: 128, blocks: 480,
                  seconds: 3.5 };
  const head = { instances: { instances: [row], without_instance: 2, moved_requests: 1 }, groups: { groups: [group] } };
  showInstances({ instances: $("instances"), groups: $("groups"), hint: $("instance-hint") }, head);
  const lease = (due_in_s) => ({ from: "a", to: "node-of-a-cluster-in-the-cellar-4711-ab12", bytes: 2048, due_in_s });
  showLeases($("leases"), [lease(null), lease(4.2), lease(-3.4)]);
  const part = { running: 4, moving: 1, cached: 2, free: 3, swapped: 5, lent: 2, borrowed: 2, expanded: 1, dropped: 3 };
  const memory = { pool: 10, ...part };
  for (const id of ["main", "lease-card", "instance-card"]) $(id).hidden = false;
  drawRiver($("river"), [0, 1, 2].map((now_s) => ({ now_s, memory })), 20);
  showLegend($("river-legend"), memory);
  $("life").hidden = true;
  const borrower = document.querySelector("text[text-anchor=start]");
  const { x, width } = borrower.getBBox();
  return [
    ...["instances", "groups", "leases", "river-legend"].map((id) => $(id).textContent),
    [borrower.lastChild.data, x + width], document.documentElement.scrollWidth,
  ];
}
"""


def test_panels_draw_what_one_small_server_never_has(page: Page, url: str) -> None:
    """Groups, a recall that is late, memory of every kind, and long names in a narrow window.

    Any error of a script fails the test.
    """
    page.set_viewport_size({"width": 360, "height": 640})
    page.goto(url)
    expect(page.locator("#status")).to_have_text("live")
    instances, groups, leases, legend, (name, right), width = page.evaluate(PANELS)
    assert "e7leadingh" in instances and "0 + e7pipelined15 + 15128 → 480" in groups
    assert "in 3 leases: recalled, 3 s late" in leases
    assert name == "node-of-…lar-4711-ab12" and right <= 800, "the picture is 800 wide"
    assert width <= 360, "nothing is beside a narrow window"
    assert all(word in legend for word in ("lent", "borrowed", "expanded", "dropped layers", "cached"))


def lend(running: RunningCoordinator) -> None:
    """Two lenders, three borrowers, and a recall."""
    gib = 2**30
    with closing(CoordinatorClient(running.url, "root")) as client:
        client.send([Join(name, "i1") for name in ("gpu-0", "gpu-1", "chat-a", "chat-b", "chat-c")])
        client.send([Offer("gpu-0", Stamp(1, 1), 9 * gib), Offer("gpu-1", Stamp(1, 1), 4 * gib)])
        for borrower, lender, size in (("chat-a", "gpu-0", 6), ("chat-b", "gpu-0", 3), ("chat-c", "gpu-1", 2)):
            client.send([Request(borrower, 1, 1, (Shard(size * gib, lender),))])
        client.send([Recall("gpu-0", Stamp(1, 2), 3 * gib, 90.0)])
