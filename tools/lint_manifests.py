"""Checks Kubernetes manifests on standard input against the API's schemas; strict: an unknown field is an error.

A LeaderWorkerSet is no kind of the API itself: the pods of its templates are checked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import yaml

VERSION = "1.33"
GROUP_FIELDS = frozenset({"replicas", "rolloutStrategy", "leaderWorkerTemplate", "startupPolicy", "networkConfig"})
TEMPLATE_FIELDS = frozenset({"size", "restartPolicy", "leaderTemplate", "workerTemplate", "subGroupPolicy"})


def main() -> None:
    """Exit with 1 and a line for each fault."""
    source, faults, count = sys.argv[1], [], 0
    for manifest in yaml.safe_load_all(sys.stdin):
        name = f"{source}: {manifest['kind']} {manifest['metadata']['name']}"
        for one in _known(manifest):
            count += 1
            try:
                kubernetes_validate.validate(one, VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                faults.append(f"{name}: {error.message}")
    if faults or not count:
        sys.exit("\n".join(faults) or f"{source}: no manifest")
    print(f"{source}: {count} manifests")


def _known(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if manifest["kind"] != "LeaderWorkerSet":
        yield manifest
        return
    spec = manifest["spec"]
    template = spec["leaderWorkerTemplate"]
    unknown = (set(spec) - GROUP_FIELDS) | (set(template) - TEMPLATE_FIELDS)
    if unknown:
        sys.exit(f"LeaderWorkerSet has no field {', '.join(sorted(unknown))}")
    for role in ("leaderTemplate", "workerTemplate"):
        pod = template[role]
        yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role, **pod["metadata"]}, "spec": pod["spec"]}


if __name__ == "__main__":
    main()
