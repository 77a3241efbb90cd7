"""lm-eval's log-likelihoods over a local task: of a server, and of its backend ``hf``: lm_eval_client.py URL MODEL.

Prints the largest difference as JSON; fails loudly.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

TASK = """
task: rivers
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
ROWS = [
    {"text": f"The river number {number} flows", "choices": [" to the sea", " up", " into a lake"], "answer": 0}
    for number in range(8)
]
MOST = 1e-3


def main(url: str, model: str) -> None:
    """Score the task by both backends."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "rows.jsonl")
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        Path(folder, "rivers.yaml").write_text(TASK % data)
        manager = TaskManager(include_path=folder, include_defaults=False)
        served = scores(
            manager, "local-completions", f"model={model},base_url={url}/v1/completions,tokenizer_backend=huggingface"
        )
        own = scores(manager, "hf", f"pretrained={model},dtype=float32,device=cpu")
    differences = [abs(a[0] - b[0]) for a, b in zip(served, own, strict=True)]
    assert max(differences) < MOST and [a[1] for a in served] == [b[1] for b in own], (served, own)
    print(json.dumps({"log-likelihoods": len(own), "largest_difference": float(f"{max(differences):.1e}")}))


def scores(manager: TaskManager, backend: str, arguments: str) -> list[tuple[float, bool]]:
    """Return (log-likelihood, whether it is the likeliest text) of each choice of each row."""
    found: Any = simple_evaluate(
        backend, model_args=arguments, tasks=["rivers"], task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    rows = sorted(found["samples"]["rivers"], key=lambda row: row["doc_id"])
    return [(float(one[0][0]), str(one[0][1]) == "True") for row in rows for one in row["resps"]]


if __name__ == "__main__":
    main(*sys.argv[1:])
