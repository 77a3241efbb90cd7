"""What the size of the KV pool allows: how long a request may be."""

from __future__ import annotations

import logging

from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig
from floodplain.engine.models.config import ModelConfig

logger = logging.getLogger(__name__)


def find_max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """What was asked, or what model and pool allow.

    Raises:
        UserError: What was asked does not fit.
    """
    num_tokens, longest = num_blocks * config.block_tokens, model.shape.max_position
    if config.max_model_len is None:
        if num_tokens < 2:
            raise UserError(f"the KV pool holds {num_tokens} tokens, too few for a request: raise --kv-memory")
        if num_tokens < longest:
            logger.warning(
                "max_model_len is lowered from %d to %d tokens: the KV pool holds no more", longest, num_tokens
            )
        return min(num_tokens, longest)
    if config.max_model_len > longest:
        raise UserError(f"--max-model-len {config.max_model_len} is more than the model's own {longest}")
    if config.max_model_len > num_tokens:
        raise UserError(
            f"--max-model-len {config.max_model_len} does not fit: the KV pool holds {num_tokens} tokens; raise "
            f"--kv-memory, or lower --max-model-len"
        )
    return config.max_model_len
