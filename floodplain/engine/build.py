"""Puts an engine together: model, KV pool, loop, runner."""

from __future__ import annotations

import logging

import torch

from floodplain.core.blocks import BlockLedger
from floodplain.core.errors import UserError
from floodplain.engine.config import EngineConfig
from floodplain.engine.models.config import ModelConfig
from floodplain.engine.models.linear import can_pack
from floodplain.engine.models.load import load_decoder
from floodplain.engine.runner import ModelRunner
from floodplain.engine.sampler import Sampler
from floodplain.engine.shell import Engine
from floodplain.engine.weights.open_model import open_model
from floodplain.policy.registry import make_policy
from floodplain.runtime.loop import Loop
from floodplain.runtime.state import LoopConfig, LoopState

logger = logging.getLogger(__name__)


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Bytes of the keys and values of one token, all layers."""
    return config.shape.kv_bytes_per_token(_torch_dtype(dtype).itemsize)


def build_engine(config: EngineConfig) -> Engine:
    """Load the model, map the KV pool, and put the parts together.

    Raises:
        UserError: The model cannot be read, the device is not there, or memory is too small for one request.
    """
    device, dtype = _torch_device(config.device), _torch_dtype(config.dtype)
    torch.manual_seed(config.seed)
    source = open_model(config.model, config.seed)
    tokenizer = source.load_tokenizer()
    model = load_decoder(
        source.config,
        source,
        dtype=dtype,
        device=device,
        block_tokens=config.block_tokens,
        is_packed=can_pack(dtype, device),
    )
    pool = open_pool(config, source.config, device, dtype)
    try:
        max_model_len = _max_model_len(config, source.config, pool.num_blocks)
        policy = make_policy(config.policy)
        ledger = BlockLedger(
            pool.num_blocks,
            config.block_tokens,
            quantum_blocks=pool.quantum_blocks,
            caches_prefixes=config.enable_prefix_caching,
        )
        loop_config = LoopConfig(
            max_model_len=max_model_len,
            max_batched_tokens=config.max_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_waiting=config.max_waiting,
            eos_token_ids=tokenizer.eos_token_ids,
            fingerprint=f"{source.name}:{config.dtype}:{config.block_tokens}",
        )
        runner = ModelRunner(
            model,
            pool.layers,
            Sampler(tokenizer.eos_token_ids, config.seed),
            block_tokens=config.block_tokens,
            max_model_len=max_model_len,
            on_close=pool.close,
        )
    except BaseException:
        pool.close()
        raise
    return Engine(
        Loop(LoopState(loop_config, ledger, policy), policy, config.seed),
        runner,
        tokenizer,
        model_name=config.model,
        config=config,
        block_bytes=kv_bytes_per_token(source.config, config.dtype) * config.block_tokens,
        vocab_size=source.config.shape.vocab_size,
    )


def _max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """What was asked, or what model and pool allow.

    Raises:
        UserError: What was asked does not fit.
    """
    num_tokens, longest = num_blocks * config.block_tokens, model.shape.max_position
    if config.max_model_len is None:
        if num_tokens < 2:
            raise UserError(f"the KV pool holds {num_tokens} tokens, too few for a request: raise --kv-memory")
        if num_tokens < longest:
            logger.info("max_model_len is lowered from %d to %d tokens: the KV pool holds no more", longest, num_tokens)
        return min(num_tokens, longest)
    if config.max_model_len > longest:
        raise UserError(f"--max-model-len {config.max_model_len} is more than the model's own {longest}")
    if config.max_model_len > num_tokens:
        raise UserError(
            f"--max-model-len {config.max_model_len} does not fit: the KV pool holds {num_tokens} tokens; raise "
            f"--kv-memory, or lower --max-model-len"
        )
    return config.max_model_len


def _torch_dtype(name: str) -> torch.dtype:
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return dtypes[name]


def _torch_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"--device {name} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return device


def open_pool(config, model, device, dtype):  # TEMP
    from types import SimpleNamespace

    per = kv_bytes_per_token(model, config.dtype) * config.block_tokens
    n = max(0, (config.kv_memory or 2**30) // per)
    s = model.shape
    layers = [
        torch.zeros(n, 2, config.block_tokens, s.num_kv_heads, s.head_dim, dtype=dtype, device=device)
        for _ in range(s.num_layers)
    ]
    return SimpleNamespace(num_blocks=n, quantum_blocks=1, layers=layers, close=lambda: None)
