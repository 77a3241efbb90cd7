"""The engine of a pipeline's leader: FCFS, without swap space, with as many outstanding steps as stages."""

from __future__ import annotations

from pathlib import Path

from floodplain.cluster.pipeline.executor import PipelineExecutor
from floodplain.cluster.wire.plan_codec import PlanLimits
from floodplain.core.blocks import BlockLedger
from floodplain.cost.pipeline import ChunkPrice
from floodplain.cost.step_time import read_cost
from floodplain.engine.shell import Engine
from floodplain.engine.stage_build import StageParts
from floodplain.files.profile import read_profile
from floodplain.policy.fcfs import FcfsPolicy
from floodplain.policy.microbatch import MicrobatchRule
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState


def plan_limits(stage: StageParts, num_blocks: int, max_model_len: int) -> PlanLimits:
    """The bounds of plans in a pipeline with ``num_blocks`` blocks."""
    return PlanLimits(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_batched_tokens=stage.config.max_batched_tokens,
        hidden_size=stage.shape.hidden_size,
        vocab_size=stage.shape.vocab_size,
        dtype=stage.model.dtype,
    )


def read_price(step_profile: Path) -> ChunkPrice:
    """The cost of chunks from a step profile of one engine. The ratios are taken to be those of a stage.

    Raises:
        UserError: The profile cannot be read, or is of another kind.
    """
    return ChunkPrice(read_cost(read_profile(step_profile, "step").result))


def make_engine(
    stage: StageParts,
    ledger: BlockLedger,
    executor: PipelineExecutor,
    limits: PlanLimits,
    num_stages: int,
    rule: MicrobatchRule,
) -> Engine:
    """The engine of a pipeline that was just linked; without requests or cached prefixes.

    Args:
        stage: The parts of the first stage.
        ledger: Of the pipeline's blocks.
        executor: Over all stages; the engine closes it.
        limits: Of the pipeline.
        num_stages: Of the pipeline.
        rule: How work is divided over microbatches.
    """
    config = stage.config
    loop_config = LoopConfig(
        max_model_len=limits.max_model_len,
        max_batched_tokens=config.max_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_waiting=config.max_waiting,
        depth=num_stages,
        eos_token_ids=stage.eos_token_ids,
        fingerprint=stage.fingerprint,
        block_bytes=stage.block_bytes,
    )
    policy = FcfsPolicy(microbatches=rule)
    return Engine(
        Loop(LoopState(loop_config, ledger, policy), policy, config.seed),
        executor,
        stage.tokenizer,
        model_name=config.model,
        config=config,
        block_bytes=stage.block_bytes,
        vocab_size=stage.shape.vocab_size,
        pipeline=executor.facts,
        meter=executor.meter,
    )
