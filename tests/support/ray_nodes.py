"""A Ray cluster of several nodes on this machine, in a process of its own: ``python -m tests.support.ray_nodes``.

It prints a line of JSON with its address and the head's raylet, and for each line of input the raylet of a node that it
adds. It exits when its input ends.
"""

from __future__ import annotations

import json
import select
import sys
from typing import Any

NUM_CPUS = 2
"""CPUs of each node: one node has room for both instances."""
REAP_S = 0.05


def main() -> None:
    """Run until the input ends."""
    from ray.cluster_utils import Cluster

    sizes = {"num_cpus": NUM_CPUS, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**sizes, "include_dashboard": False})
    print(json.dumps({"address": cluster.address, "raylet": _raylet(cluster.head_node)}), flush=True)
    while _wait_for_line(cluster):
        print(json.dumps({"raylet": _raylet(cluster.add_node(**sizes))}), flush=True)
    for node in cluster.list_all_nodes():
        node.kill_all_processes(check_alive=False, allow_graceful=False)


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _wait_for_line(cluster: Any) -> bool:
    """Return whether there is a line. Reaps killed raylets: the workers of a zombie raylet keep running."""
    while not select.select([sys.stdin], [], [], REAP_S)[0]:
        for node in cluster.list_all_nodes():
            for info in node.all_processes.get("raylet", []):
                info.process.poll()
    return bool(sys.stdin.readline())


if __name__ == "__main__":
    main()
