"""The step loop in virtual time as a target to profile: step times come from a measured cost, and nothing computes."""

from __future__ import annotations

from dataclasses import replace

from floodplain.cost.step_time import StepCost, StepTimer
from floodplain.engine.config import EngineConfig
from floodplain.model.weights.open_model import ModelSource
from floodplain.policy.registry import make_policy
from floodplain.profiler.goals import Answer
from floodplain.profiler.targets import Load, Seen
from floodplain.profiler.virtual_device import make_device
from floodplain.profiler.virtual_requests import servable, to_request
from floodplain.sim.serving import serve
from floodplain.workload.prompts import PromptTokenizer


class VirtualTarget:
    """A ``Target`` whose tries are computed; a repeated try has the same result.

    Args:
        config: The engine flags; ``kv_memory`` is given.
        source: The model, for its shape and its tokenizer.
        cost: The cost of steps.
        machine: The machine on which that was measured.
        load: The requests.

    Raises:
        UserError: The pool is too small for one request.
    """

    is_virtual = True

    def __init__(self, config: EngineConfig, source: ModelSource, cost: StepCost, machine: str, load: Load) -> None:
        self.machine = machine
        self._config = config
        self._load = load
        self._tokenizer: PromptTokenizer = source.load_tokenizer()
        self._cost = cost
        self._device = make_device(config, source.config, StepTimer(cost).time_s)

    def run(self, rate: float, seed: int, duration_s: float) -> Seen:
        """Serve the requests of one try in virtual time; return what was seen."""
        asked = [to_request(one) for one in self._load.make(self._tokenizer, rate, seed, duration_s)]
        served, error = servable(asked, self._device)
        device = replace(self._device, step_time_s=StepTimer(self._cost).time_s)  # a timer is of one loop
        done = serve(served, make_policy(self._config.policy, self._config.sharing_settings()), device)
        answers = [Answer(sent_s=life.arrival_s, token_times_s=life.token_times_s) for life in done.lifecycles]
        refused = [Answer(sent_s=0.0, token_times_s=(), is_whole=False)] * (len(asked) - len(served))
        block_bytes = self._device.config.block_bytes
        return Seen(
            answers=answers + refused,
            peak_kv_bytes=done.peaks.pool_blocks * block_bytes,
            kv_bytes=self._device.num_blocks * block_bytes,
            error=error,
        )
