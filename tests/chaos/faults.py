"""The faults, one at a time, and what must hold after each."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from random import Random

from tests.chaos.cluster import Cluster, wait_until
from tests.chaos.engine import DEADLINE_S, POOL_PAGES, TTL_S
from tests.support.fault_proxy import NetworkFaults


def consumer_dies(cluster: Cluster, random: Random) -> None:
    """Its bytes are freed by its death, and are the producer's again a TTL later."""
    cluster.note_totals("consumer")
    cluster.consumer.kill()
    took_s = wait_until(lambda: not cluster.producer.said.get("leases"), "a dead consumer's leases stay", cluster)
    assert took_s < TTL_S + 4.0, f"its leases took {took_s:.1f} s to return"
    cluster.restart_engine("consumer")


def producer_dies(cluster: Cluster, random: Random) -> None:
    """The consumer continues with its allocations; a new producer process observes them."""
    cluster.note_totals("producer")
    cluster.producer.kill()
    before = cluster.consumer.said["checked"]
    wait_until(lambda: cluster.consumer.said["checked"] > before + 5, "the consumer stands still", cluster)
    cluster.restart_engine("producer")


def coordinator_dies(cluster: Cluster, random: Random) -> None:
    """Leases remain, no step waits for the network, and no lease is lost."""
    before = cluster.listing()
    cluster.coordinator.kill()
    checked = cluster.consumer.said["checked"]
    wait_until(lambda: cluster.consumer.said["checked"] > checked + 5, "the consumer stands still", cluster)
    cluster.coordinator = cluster.start_coordinator()
    wait_until(lambda: cluster.listing() is not None, "the coordinator does not lead", cluster)
    after = cluster.listing()
    assert before is not None and after is not None
    lost = {row["lease_id"] for row in before["leases"]} - {row["lease_id"] for row in after["leases"]}
    returned = cluster.consumer.said["num_returned"] + cluster.consumer.said["num_forced"]
    assert len(lost) <= returned + cluster.consumer.said["num_refused"], f"leases are lost: {lost}"
    for role, process in cluster.engines.items():
        assert not process.said["exchanges_in_steps"], f"a step of the {role} waits for the network"


def _stop(cluster: Cluster, role: str, seconds: float) -> None:
    process = cluster.coordinator if role == "coordinator" else cluster.engines[role]
    process.signal(signal.SIGSTOP)
    time.sleep(seconds)  # the fault: it is stopped for this long
    process.signal(signal.SIGCONT)


def consumer_stops(cluster: Cluster, random: Random) -> None:
    """Stopped for longer than a TTL: it counts as dead, frees its bytes when it resumes, and joins anew."""
    _stop(cluster, "consumer", TTL_S * (1.5 + random.random()))


def producer_stops(cluster: Cluster, random: Random) -> None:
    _stop(cluster, "producer", TTL_S * (1.5 + random.random()))


def coordinator_stops(cluster: Cluster, random: Random) -> None:
    """Stopped for longer than its own tenure."""
    _stop(cluster, "coordinator", 1.0 + 3 * random.random())


def _recall(cluster: Cluster) -> None:
    cluster.producer.tell("load 90")  # more than fits into its whole pool


def recall(cluster: Cluster, random: Random) -> None:
    """The producer's load rises during copies: it gets its whole pool back."""
    _recall(cluster)
    blocks = POOL_PAGES * 65536 // 8192
    wait_until(lambda: cluster.producer.said["pool_blocks"] >= blocks - 16, "the pool stays small", cluster)
    cluster.producer.tell("load 1")


def recall_from_one_that_is_stopped(cluster: Cluster, random: Random) -> None:
    """The consumer misses the deadline: the producer serves with its smaller pool, and gets the bytes later."""
    cluster.consumer.signal(signal.SIGSTOP)
    _recall(cluster)
    before = cluster.producer.said["checked"]
    time.sleep(DEADLINE_S + 0.5)  # the deadline passes
    wait_until(lambda: cluster.producer.said["checked"] > before, "the producer waits for its consumer", cluster)
    cluster.consumer.signal(signal.SIGCONT)
    recall(cluster, random)


def recall_while_the_coordinator_is_dead(cluster: Cluster, random: Random) -> None:
    cluster.coordinator.kill()
    _recall(cluster)
    before = cluster.producer.said["checked"]
    wait_until(lambda: cluster.producer.said["checked"] > before + 5, "the producer stands still", cluster)
    cluster.coordinator = cluster.start_coordinator()
    recall(cluster, random)


def network_fails(cluster: Cluster, random: Random) -> None:
    """Messages are lost, doubled, late and reordered for a while; meanwhile memory is recalled and lent again."""
    cluster.proxy.faults = NetworkFaults(lost=0.2, unanswered=0.2, doubled=0.2, delayed=0.3, max_delay_s=0.6)
    recall(cluster, random)
    time.sleep(2 * random.random())
    cluster.proxy.faults = NetworkFaults()


def network_is_cut(cluster: Cluster, random: Random) -> None:
    """Both engines are cut off from the coordinator for longer than a TTL."""
    cluster.proxy.is_cut = True
    time.sleep(TTL_S * (1 + random.random()))
    cluster.proxy.is_cut = False


def clocks_jump(cluster: Cluster, random: Random) -> None:
    """The clock of one engine jumps, by up to a minute, as after a suspension of the machine."""
    random.choice([cluster.consumer, cluster.producer]).tell(f"jump {random.choice([0.5, 3, 60])}")


FAULTS: tuple[Callable[[Cluster, Random], None], ...] = (
    consumer_dies,
    producer_dies,
    coordinator_dies,
    consumer_stops,
    producer_stops,
    coordinator_stops,
    recall,
    recall_from_one_that_is_stopped,
    recall_while_the_coordinator_is_dead,
    network_fails,
    network_is_cut,
    clocks_jump,
)
