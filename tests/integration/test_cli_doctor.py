from __future__ import annotations

import json
import re

import pytest

from floodplain.cli.main import main


def test_doctor_shows_the_cost_of_digests_and_speed_of_emulated_links(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "dummy:tiny-llama", "--format", "json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert re.match(r"a plain copy of as many bytes by one thread, too, has [\d.]+ GB/s", memory["proof of each block"])
    assert re.match(r"\d+ times slower", memory["emulated links would be"])
    assert memory["gather + copy + scatter"].endswith("GB/s, digests included")
