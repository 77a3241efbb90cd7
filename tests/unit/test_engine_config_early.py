"""What verbs with an engine refuse before torch is imported, as ``sys.modules`` shows."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from floodplain.core.errors import UserError
from floodplain.engine import config
from floodplain.engine.config import EngineConfig, check_early
from floodplain.model.weights.open_model import open_model
from floodplain.model.weights.peek import peek_shape

PROGRAM = """
import contextlib, io, json, sys
from floodplain.cli.main import main

for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = main(argv)
    imported = sorted({"torch", "transformers", "fastapi"} & sys.modules.keys())
    print(json.dumps([status, said.getvalue(), imported]))
"""


def test_flags_that_cannot_be_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    folder, broken, no_header = tmp_path / "folder", tmp_path / "broken", tmp_path / "m.gguf"
    folder.mkdir()
    broken.mkdir()
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    no_header.write_bytes(b"GGML" + bytes(60))
    two_instances, missing = ["dummy:tiny-llama", "--instances", "2"], str(tmp_path / "missing")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        wanted = [
            (["/nowhere"], "there is no model at '/nowhere'"),
            ([""], "there is no model at ''"),
            (["dummy:nothing"], "no model shape is called 'nothing'"),
            ([str(broken)], "config.json is missing"),
            ([str(folder)], "the tokenizer is missing"),
            ([str(no_header)], "cannot be read as a .gguf file"),
            (["dummy:tiny-llama", "--kv-memory", "500TiB"], "--kv-memory 500TiB is more than"),
            (["dummy:tiny-llama", "--swap-memory", "500TiB"], "--swap-memory 500TiB is more than"),
            (["dummy:tiny-llama", "--kv-memory", "10"], "--kv-memory 10B is less than one KV block of 4 KiB"),
            (["dummy:tiny-llama", "--swap-memory", "10"], "--swap-memory 10B is less than one KV block of 4 KiB"),
            (["dummy:tiny-llama", "--dtype", "int8"], "--dtype"),
            (["dummy:tiny-llama", "--hardware", "emulated-string"], "--hardware"),
            (["dummy:tiny-llama", "--api-key-file", str(tmp_path / "keys")], "cannot read the API key file"),
            (["dummy:tiny-llama", "--port", port], port),
            ([*two_instances, "--device-name", "d"], "--device-name d is for one engine"),
            ([*two_instances, "--device", "cuda:1"], "--device cuda:1 is one GPU"),
            ([*two_instances, "--pipeline", "--policy", "cfs"], "--policy cfs does not go with --pipeline"),
            ([*two_instances, "--pipeline", "--step-profile", missing], f"cannot read {missing}"),
            ([*two_instances, "--relief", "drop", "--kv-expansion", "2"], "--kv-expansion 2 does not go with --relief"),
            ([*two_instances, "--instance-token-file", missing], "cannot read the instance token file"),
        ]
        wanted = [(["serve", "--port", "0", *argv], message) for argv, message in wanted]
        for verb in (["bench", "offline"], ["profile", "llm"], ["profile", "step", "--out", str(tmp_path / "out")]):
            wanted.append(([*verb, "/nowhere"], "there is no model at '/nowhere'"))
            wanted.append(
                ([*verb, "dummy:tiny-llama", "--kv-memory", "10"], "--kv-memory 10B is less than one KV block")
            )
        for flag, problem in (("--max-concurrency", "must be at least 1"), ("--num-prompts", "must be between 1 and")):
            wanted.append((["bench", "offline", "dummy:tiny-llama", flag, "0"], f"{flag} {problem}"))
        argvs = json.dumps([argv for argv, _ in wanted])
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, argvs], capture_output=True, text=True, check=True, timeout=60
        )
    for (argv, message), line in zip(wanted, ran.stdout.splitlines(), strict=True):
        status, said, imported = json.loads(line)
        assert (status, imported) == (2, []), (argv, said)
        assert message in said
        assert said.count("\n") == 1


def test_sizes_at_their_bounds_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of this model has 4,096 bytes in bfloat16 and 8,192 in float32."""
    monkeypatch.setattr(config, "available_bytes", lambda: 8192)
    check_early(EngineConfig(model="dummy:tiny-llama", kv_memory=4096, swap_memory=8192))
    check_early(EngineConfig(model="dummy:tiny-llama", kv_memory=2**40, device="cuda"))
    with pytest.raises(UserError, match="is less than one KV block of 8 KiB"):
        check_early(EngineConfig(model="dummy:tiny-llama", kv_memory=4096, dtype="float32"))


@pytest.mark.parametrize("model", ["dummy:tiny-llama", "dummy:tiny-opt", "smollm2"])
def test_the_shape_that_is_peeked_at_is_the_one_that_is_opened(model: str) -> None:
    assert peek_shape(model) == open_model(model).config.shape
