"""``LLM.generate``: a model in the caller's own process and thread, shaped like vLLM's class of that name."""

from __future__ import annotations

import logging
import reprlib
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from floodplain.core.errors import UserError
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.plan import PromptLogprobs, TokenLogprobs
from floodplain.core.request import FinishReason, Request, SeqId
from floodplain.core.sampling import SamplingParams
from floodplain.core.sizes import parse_size
from floodplain.engine.build import build_engine
from floodplain.engine.compute_threads import release_compute_threads
from floodplain.engine.config import EngineConfig
from floodplain.engine.outputs import CompletionOutput, EngineStats, OutputDelta, RequestOutput
from floodplain.engine.shell import Engine

logger = logging.getLogger(__name__)

Prompt = str | Mapping[str, Sequence[int]]
"""Text, or ``{"prompt_token_ids": [...]}``."""


class LLM:
    """A loaded model; as a context manager it frees its memory at exit. Raises UserError if a flag is not usable.

    With a coordinator, a thread handles leases between two calls.

    ``model``: HF folder, ``.gguf`` file, ``smollm2``, or ``dummy:NAME``. ``flags``: the engine flags, with underscores
    (fields of ``EngineConfig``).
    """

    def __init__(self, model: str, **flags: Any) -> None:
        flags.setdefault("max_waiting", sys.maxsize)  # the caller waits for all requests anyway
        known = {item.name for item in fields(EngineConfig)}
        unknown = sorted(flags.keys() - known)
        if unknown:
            near = get_close_matches(unknown[0], known, 1)
            raise UserError(f"unknown engine flag {unknown[0]}" + (f": did you mean {near[0]}?" if near else ""))
        for name in ("kv_memory", "swap_memory", "peer_memory"):
            if isinstance(flags.get(name), str):
                flags[name] = parse_size(flags[name])
        self.engine = build_engine(EngineConfig(model=model, **flags))
        self._num_requests = 0
        self._is_broken = self._is_closed = False
        self._idle = IdleSteps(self.engine)
        self._idle.start()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free all memory; the object cannot be used afterwards."""
        self._is_closed = True
        self._idle.close()
        self.engine.close()

    def stats(self) -> EngineStats:
        """Gauges and counters since the model was loaded."""
        return self.engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for all prompts, batched as memory allows; return one output per prompt, in their order.

        UserError, before anything runs, if a prompt can never be served, the numbers of prompts and parameters differ,
        or this object is closed.
        """
        many = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = self._match_params(sampling_params, len(many))
        return self._run([self._encode(prompt) for prompt in many], params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The same for conversations (one, or a list of them), through the model's chat template."""
        chats: list[Any] = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts: list[tuple[str | None, list[int]]] = [
            (None, self.engine.tokenizer.apply_chat_template(chat)) for chat in chats
        ]
        return self._run(prompts, self._match_params(sampling_params, len(prompts)), use_tqdm)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.engine.tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping):
            raise UserError(f'a prompt is a string or {{"prompt_token_ids": [...]}}, not {reprlib.repr(prompt)}')
        if set(prompt) != {"prompt_token_ids"} or not all(
            isinstance(token, int) for token in prompt["prompt_token_ids"]
        ):
            raise UserError(
                f'a prompt is a string or {{"prompt_token_ids": [whole numbers]}}, not a mapping with {sorted(prompt)}'
            )
        return None, list(prompt["prompt_token_ids"])

    @staticmethod
    def _match_params(
        params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * num_prompts
        if len(params) != num_prompts:
            raise UserError(
                f"{num_prompts} prompts, but {len(params)} sampling_params: give one, or one for each prompt"
            )
        return list(params)

    def _run(
        self, prompts: list[tuple[str | None, list[int]]], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        if self._is_closed:
            raise UserError("this LLM is closed: make a new one")
        requests = [self._make_request(tokens, one) for (_, tokens), one in zip(prompts, params, strict=True)]
        for request in requests:
            self.engine.check(request.choices(1)[0])
        if self._is_broken:
            raise RuntimeError("this LLM was interrupted in the middle of a step: make a new one")
        answers = [[_Collector() for _ in range(one.n)] for one in params]
        with self._idle.driven():
            self._collect(requests, answers, use_tqdm)
        return [
            _output(request, prompt, collectors)
            for request, (prompt, _), collectors in zip(requests, prompts, answers, strict=True)
        ]

    def _collect(self, requests: list[Request], answers: list[list[_Collector]], use_tqdm: bool) -> None:
        """Run requests to their ends; a collector for each choice gets its tokens."""
        collectors: dict[SeqId, _Collector] = {}
        others: dict[SeqId, list[tuple[Request, _Collector]]] = {}
        try:
            for group, (request, (first, *more)) in enumerate(zip(requests, answers, strict=True), 1):
                choices = request.choices(group)
                seq_id = self.engine.add(choices[0])
                collectors[seq_id] = first
                others[seq_id] = list(zip(choices[1:], more, strict=True))
            self._run_to_end(collectors, others, use_tqdm)
        except BaseException:
            self._abandon(collectors)
            raise

    def _abandon(self, collectors: Iterable[SeqId]) -> None:
        """Abort all requests of an interrupted call, so that the next call finds an empty engine."""
        for seq_id in collectors:
            self.engine.finish(seq_id, FinishReason.ABORT)
        self.engine.take_finished()
        if self.engine.is_stepping:  # the step was interrupted and will never end
            self._is_broken = True
            self._idle.end()
            self.engine.close()

    def _make_request(self, tokens: list[int], params: SamplingParams) -> Request:
        self._num_requests += 1
        return Request(
            request_id=str(self._num_requests - 1),
            prompt_token_ids=tuple(tokens),
            params=params,
            arrival_s=time.monotonic(),
        )

    def _run_to_end(
        self,
        collectors: dict[SeqId, _Collector],
        others: dict[SeqId, list[tuple[Request, _Collector]]],
        use_tqdm: bool,
    ) -> None:
        """``others``: further choices of each prompt. They begin with the first token of the first choice."""
        from tqdm import tqdm

        total = len(collectors) + sum(map(len, others.values()))
        with tqdm(total=total, desc="requests", disable=not use_tqdm) as progress:
            while self.engine.has_unfinished:
                for seq_id, delta in list(self.engine.step()):
                    collectors[seq_id].add(delta)
                    progress.update(delta.finish_reason is not None)
                    for request, collector in others.pop(seq_id, ()):
                        collectors[self.engine.add(request)] = collector
                for seq_id, ended in self.engine.take_finished():
                    collectors[seq_id].lifecycle = ended.lifecycle


class _Collector:
    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._last: OutputDelta | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.lifecycle: Lifecycle | None = None

    def add(self, delta: OutputDelta) -> None:
        self._text.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self._last = delta

    @property
    def num_cached_tokens(self) -> int:
        return self._last.num_cached_tokens if self._last else 0

    def completion(self, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text="".join(self._text),
            token_ids=self._token_ids,
            finish_reason=self._last.finish_reason if self._last else None,
            logprobs=self._logprobs or None,
            cumulative_logprob=sum(entry.chosen for entry in self._logprobs) if self._logprobs else None,
        )


def _output(request: Request, prompt: str | None, collectors: Sequence[_Collector]) -> RequestOutput:
    """The output of a request, from the collectors of its choices; all but the choices is the first one's."""
    outputs = [collector.completion(index) for index, collector in enumerate(collectors)]
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=list(request.prompt_token_ids),
        outputs=outputs,
        finished=all(one.finish_reason is not None for one in outputs),
        num_cached_tokens=collectors[0].num_cached_tokens,
        lifecycle=collectors[0].lifecycle,
        prompt_logprobs=collectors[0].prompt_logprobs,
    )


class IdleSteps:
    """A thread that steps an engine with neighbours periodically and on news of leases, while no caller drives it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.RLock()
        self._has_news, self._is_free = threading.Event(), threading.Event()
        self._is_ending = False
        self._failure: BaseException | None = None
        self._is_free.set()
        self._thread = threading.Thread(target=self._run, name="idle-steps", daemon=True)

    def start(self) -> None:
        """Start the thread, if the engine has neighbours."""
        if self._engine.neighbours is not None:
            self._engine.wake_by_leases(self._has_news.set)
            self._thread.start()

    @contextmanager
    def driven(self) -> Generator[None]:
        """Context in which the caller drives the engine alone. Raises RuntimeError if a background step has failed."""
        self._is_free.clear()  # or the thread might take the lock again and again
        try:
            with self._lock:
                if self._failure is not None:
                    raise RuntimeError("this LLM failed between two calls: make a new one") from self._failure
                yield
        finally:
            self._is_free.set()

    def end(self) -> None:
        """Begin no more steps. Callers that do not drive may find a last one under way."""
        self._is_ending = True
        self._has_news.set()

    def close(self) -> None:
        """End, and wait for the thread. Must not be called inside ``driven``. Safe to call twice."""
        self.end()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_ending:
                self._has_news.wait(self._engine.rest_s)
                self._is_free.wait()
                self._has_news.clear()
                with self._lock:
                    self._step()
        except BaseException as error:  # raised again in the next caller
            logger.critical("a step between two calls failed", exc_info=error)
            self._failure = error

    def _step(self) -> None:
        if self._is_ending or self._engine.has_unfinished:
            return
        self._engine.step()
        if self._engine.rest_s > 0:
            release_compute_threads()  # of this thread: the caller's keep spinning
