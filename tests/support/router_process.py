"""``floodplain serve --instances 2`` as real processes, for tests that kill instances under streaming clients."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from floodplain.core.sampling import SamplingParams
from floodplain.engine.llm import LLM
from tests.support import forks
from tests.support.process_tree import is_alive
from tests.support.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
VERB = [sys.executable, "-c", "import sys; from floodplain.cli.main import main; sys.exit(main())"]
PROMPT = list(range(3, 40))
NUM_TOKENS, EARLY = 300, 5
"""Tokens of a stream, and tokens after which ``do`` is called: long before an instance has computed the rest."""
START_TIMEOUT_S = 120.0


class RouterProcess:
    """A router that starts instances; its log is in ``folder``, and ``environment`` are more variables."""

    def __init__(
        self,
        folder: Path,
        model: str,
        flags: Sequence[str],
        num_instances: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.model, self.num_instances = model, num_instances
        self.token_file = folder / "token"
        self.token_file.write_text("outside\n")
        self.token_file.chmod(0o600)
        self.log = folder / "log"
        command = [*VERB, "serve", model, *flags, "--port", "0", "--format", "json"]
        command += ["--instances", str(num_instances), "--instance-token-file", str(self.token_file)]
        variables = {**os.environ, **(environment or {})}
        with self.log.open("w") as log:
            self.process = forks.Popen(command, stdout=-1, stderr=log, text=True, cwd=ROOT, env=variables)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.url = json.loads(line)["url"]
        self.http = httpx.Client(base_url=self.url, timeout=HANG_S)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=HANG_S)

    def listing(self) -> Any:
        return self.http.get("/instances").json()

    def rows(self) -> list[Any]:
        return list(self.listing()["instances"])

    def num_silent(self) -> int:
        """Return how many instances were removed for silence. A busy machine causes some; each moves its requests."""
        return int(self.listing()["ends"].get("silent", 0))

    def wait_full(self) -> list[Any]:
        """Return all instances, once they serve."""
        count = self.num_instances
        found: Any = wait_until(lambda: len(rows := self.rows()) == count and rows, timeout_s=START_TIMEOUT_S)
        return list(found)

    def busy(self) -> Any:
        """Return the only instance that has a request."""
        (row,) = (row for row in self.rows() if row["requests"])
        return row

    def stream(self, prompt: Sequence[int] = PROMPT, do: Callable[[], object] | None = None, **how: Any) -> list[int]:
        """Return the tokens of a streamed completion; calls ``do`` once, after ``EARLY`` of them."""
        tokens: list[int] = []
        extra = {"ignore_eos": True, "return_token_ids": True}
        options = {"temperature": 0.0, "max_tokens": NUM_TOKENS} | how
        chunks = self.client.completions.create(
            model=self.model, prompt=list(prompt), stream=True, extra_body=extra, **options
        )
        for chunk in chunks:
            tokens += chunk.choices[0].token_ids or []  # type: ignore[attr-defined]
            if do is not None and len(tokens) >= EARLY:
                do()
                do = None
        return tokens

    def kill_busy(self) -> None:
        os.kill(self.busy()["pid"], signal.SIGKILL)

    def close(self) -> None:
        """Kill the router. Safe to call twice."""
        self.client.close()
        self.http.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def address(self) -> str:
        """Return the address to which instances connect, from their command line."""
        words = Path(f"/proc/{self.rows()[0]['pid']}/cmdline").read_bytes().decode().split("\0")
        return words[words.index("--join") + 1]

    def refuse(self, *flags: str) -> str:
        """Return the one line with which an instance ends that the router does not take."""
        join = ["--join", self.address(), "--instance-token-file", str(self.token_file)]
        done = forks.run([*VERB, "instance", self.model, *join, *flags, "-q"], START_TIMEOUT_S)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        return done.stderr

    def end(self, pids: Sequence[int]) -> list[int]:
        """Send SIGTERM under a stream, whose tokens are returned; the processes of instances end, too."""
        tokens = self.stream(do=lambda: self.process.send_signal(signal.SIGTERM))
        assert self.process.wait(HANG_S) == 0
        assert not any(is_alive(pid) for pid in pids)
        assert "Traceback" not in self.log.read_text()
        return tokens


@contextmanager
def started(folder: Path, model: str, flags: Sequence[str]) -> Iterator[RouterProcess]:
    """Yield a router that serves; it is killed at the end."""
    router = RouterProcess(folder, model, flags)
    try:
        yield router
    finally:
        router.close()


def one_engine(model: str, prompts: Sequence[Sequence[int]], flags: dict[str, Any], **how: Any) -> list[list[int]]:
    """Return the tokens that one engine without a router generates."""
    params = SamplingParams(ignore_eos=True, **{"temperature": 0.0, "max_tokens": NUM_TOKENS} | how)
    with LLM(model, **flags) as llm:
        outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]
