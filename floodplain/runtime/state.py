"""The state of the step loop, and the operations that change several of its parts together."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from floodplain.core.backups import Backup, BackupTable
from floodplain.core.blocks import BlockLedger
from floodplain.core.changes import ChangeLog
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey
from floodplain.core.idle_backups import Pin
from floodplain.core.lifecycle import EventKind
from floodplain.core.plan import LIMITS, Preemption
from floodplain.core.request import FinishReason, SeqId
from floodplain.core.sequence import Sequence, Status
from floodplain.core.served import KeyAccounts, RequestAccount
from floodplain.core.tiers import Link
from floodplain.core.transfers import TransferLedger
from floodplain.policy.base import Policy
from floodplain.policy.prefixes import least_chance_to_save
from floodplain.runtime.demand import DemandMeter
from floodplain.runtime.prices import Links, StepPrices
from floodplain.runtime.queue import Retries, WaitingQueue
from floodplain.runtime.sessions import SessionBook


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """Limits of the loop, and facts of the model that it needs.

    Attributes:
        max_model_len: Most tokens of a request, prompt and output.
        depth: Most outstanding steps.
        eos_token_ids: Tokens that end a request unless it ignores them.
        fingerprint: Identifies the model in the content keys of blocks.
        block_bytes: Bytes of one KV block over all layers; prices copies.
        pins_sessions: Whether KV of ended requests is pinned in swap space (``runtime.sessions``).
    """

    max_model_len: int
    max_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_waiting: int = 4096
    depth: int = 1
    eos_token_ids: frozenset[int] = frozenset()
    fingerprint: str = ""
    block_bytes: int = 0
    pins_sessions: bool = False

    def __post_init__(self) -> None:
        if min(self.max_model_len, self.max_batched_tokens, self.max_num_seqs, self.max_waiting, self.depth) < 1:
            raise InvariantError(f"every limit of the loop is at least 1: {self}")


@dataclass(slots=True)
class Counters:
    """Totals since the loop began; they only grow.

    ``num_recomputed_tokens`` are tokens computed again after a preemption; ``num_wasted_tokens`` were sampled for a
    sequence that had ended; of ``num_queried_tokens``, the known tokens of requests at their first admission,
    ``num_cached_tokens`` were found on the device, or fetched from swap space;
    ``limited_steps`` are steps whose decision was limited, by reason.
    """

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_wasted_tokens: int = 0
    num_failed_transfers: int = 0
    preemptions: dict[str, int] = field(default_factory=lambda: {"recompute": 0, "swap": 0})
    limited_steps: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in LIMITS})
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0})


@dataclass(frozen=True, slots=True)
class Source:
    """Source of one block of an absent sequence: on the device (``block``) or in swap space (``backup``).

    ``key``: None for the partly filled last block, which is never shared. ``num_tokens``: leading ones up to its end.
    """

    key: BlockKey | None
    block: BlockId | None
    backup: Backup | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence whose KV is swapped in, and its status before (``origin``).

    ``sources`` has the source of each block of its ``table``; the copy fills those that are in ``loading``.
    """

    seq: Sequence
    origin: Status
    sources: tuple[Source, ...]
    table: tuple[BlockId, ...]
    loading: tuple[BlockId, ...]

    def count_leading(self, lost: Seq[int]) -> int:
        """Blocks of the table before the first lost one: ``lost`` are places in ``loading``."""
        missing = {self.loading[place] for place in lost}
        return next((index for index, block in enumerate(self.table) if block in missing), len(self.table))


class LoopState:
    """All sequences by status, the ledgers, and logs of what changed, from which views are updated."""

    def __init__(
        self,
        config: LoopConfig,
        ledger: BlockLedger,
        policy: Policy,
        backups: BackupTable | None = None,
        links: Iterable[Link] = (),
    ) -> None:
        self.config = config
        self.ledger = ledger
        self.backups = backups or BackupTable()
        self.transfers: TransferLedger[Arrival | None] = TransferLedger(self.backups)
        """Copies to and from swap space; only inbound ones are an arrival."""
        self.links = Links(links, config.block_bytes)
        can_pin = config.pins_sessions and ledger.caches_prefixes and bool(self.backups.slots)
        self.sessions = SessionBook(self.backups) if can_pin else None
        """Sessions whose KV is pinned between requests; None if no prefixes are kept in swap space."""
        self.unsaved_pins: list[Pin] = []
        """Pins of requests that ended since the last plan: the next one backs their blocks up."""
        self.sequences: dict[SeqId, Sequence] = {}
        self.waiting = WaitingQueue(policy.waiting_key, policy.waiting_window, policy.num_newest)
        self.running: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.loading: list[Sequence] = []
        self.counters = Counters()
        self.prices = StepPrices()
        self.demand = DemandMeter()
        self.accounts = KeyAccounts()
        self._shared_accounts: dict[int, RequestAccount[Sequence]] = {}  # of requests with several choices, by group
        self.keeps_goals = policy.keeps_goals and (policy.chooses_admissions or bool(self.backups.slots))
        self._retries = Retries() if policy.chooses_admissions else None
        self.num_returning_blocks = 0
        """Blocks that requests cannot use yet, but that will be free or owned: a group's members have them, or KV is
        being copied into them."""
        self.held_tables: dict[object, tuple[BlockId, ...]] = {}
        """References to blocks that another loop copies, by holder (``runtime.handover``)."""
        self.num_incoming_blocks = 0
        """Loading blocks that are filled from another loop."""
        self.row_changes: ChangeLog[SeqId] = ChangeLog()
        """Sequences whose row in a view changed, other than by a token in every step."""
        self.sharing_changes: ChangeLog[SeqId] = ChangeLog()
        """Running sequences whose exclusive blocks changed although ``sharing_version`` did not."""
        self.stale_tables: set[SeqId] = set()
        """Sequences whose whole block table must go into the next plan."""
        self.completion_step = -1
        """The first step planned after the last request ended; -1 if none has ended."""
        self.preempted: list[Preemption] = []
        """Preemptions of plans without work, which were not issued; they go into the next plan."""
        self.released: list[SeqId] = []
        """Ended sequences that no issued plan has reported yet."""

    def trim_logs(self) -> None:
        """Bound the logs of changes."""
        for log in (self.row_changes, self.sharing_changes):
            log.trim()
        for keys in (self.ledger.changed_keys, self.backups.changed_keys):
            keys.trim()

    @property
    def awaits_blocks(self) -> bool:
        """Whether blocks that no sequence holds will become free: until then possibly nothing can run."""
        return bool(self.num_returning_blocks or self.num_incoming_blocks or self.held_tables)

    def expect(self, seq_id: SeqId, *statuses: Status) -> Sequence:
        """The sequence with this id, which must have one of these statuses, else InvariantError."""
        seq = self.sequences.get(seq_id)
        if seq is None or seq.status not in statuses:
            raise InvariantError(f"sequence {seq_id} is not {' or '.join(status.value for status in statuses)}")
        return seq

    def enter(self, seq: Sequence, status: Status) -> None:
        """Move a sequence to ``status`` and to the collection of that status."""
        self._leave(seq)
        if seq.status is Status.WAITING and status is not Status.FINISHED:
            self.accounts.leave_line(seq.account.place)
        seq.move_to(status)
        if status is Status.RUNNING:
            seq.entered_step = self.counters.num_steps
        self.row_changes.add(seq.seq_id)
        if status is Status.WAITING:
            self.waiting.push(seq)
        elif status is not Status.FINISHED:
            insort(self._members(status), seq, key=lambda s: s.order_key)

    def open_account(self, seq: Sequence) -> None:
        """Add a new sequence to the account of its request, and to that of its key."""
        request = seq.request
        active = [*self.running, *self.loading, *self.swapped, *self.waiting.head()]
        self.accounts.arrive(request.client, ((other.request.client, other.key_work) for other in active))
        if request.choice_group in self._shared_accounts:
            seq.join(self._shared_accounts[request.choice_group])
            return
        if request.choice_group:
            self._shared_accounts[request.choice_group] = seq.account
        if self._retries is not None:
            seq.order_key = (request.priority, self._retries.take(request), seq.seq_id)
        accounts = {other.account.parent: other.account for other in active}.values()
        seq.account.credit = min((one.work for one in accounts), default=0.0)
        seq.account.place = self.accounts.take_place(request.client, request.priority)

    def close_account(self, seq: Sequence) -> None:
        """Count the work of an ended sequence to its key, and to its request while that has other choices."""
        self.accounts.depart(seq.request.client, seq.key_work)
        seq.account.remove(seq)
        for other in seq.account.choices:
            self.row_changes.add(other.seq_id)
        if not seq.account.choices:
            self._shared_accounts.pop(seq.request.choice_group, None)

    def arrive(self, seq: Sequence) -> None:
        """Queue a new sequence, at the place of its request or of the one that it repeats, and record the demand."""
        self.open_account(seq)
        if self.sessions is not None:
            self._join_session(self.sessions, seq)
        self.sequences[seq.seq_id] = seq
        self.waiting.push(seq)
        paused = [*self.swapped, *self.loading]
        outputs = [one.num_generated for one in (*self.running, *paused)]
        self.demand.arrive(seq.num_prompt, len(self.waiting), len(paused), outputs)

    def keep_place(self, seq: Sequence, now: float) -> None:
        """If the policy chooses admissions, keep the place of a sequence that was aborted before its first token."""
        is_unserved = seq.finish_reason is FinishReason.ABORT and len(seq.tokens) == seq.num_prompt
        if self._retries is not None and is_unserved:
            self._retries.leave(seq.request, seq.order_key[1], now)

    def note_supply(self, duration_s: float, num_tokens: int, ended: Iterable[SeqId]) -> None:
        """Record a step that generated ``num_tokens``, and the sequences that ended with it."""
        outputs = [self.sequences[seq_id].num_generated for seq_id in ended]
        self.demand.learn(duration_s, num_tokens, outputs, len(self.waiting), len(self.swapped))

    def note_start(self, seq: Sequence, now: float) -> None:
        """Record that a waiting sequence was scheduled; count its prompt and cached tokens once."""
        if seq.lifecycle.first(EventKind.SCHEDULED) is None:
            self.counters.num_prompt_tokens += seq.num_prompt
            self.counters.num_queried_tokens += len(seq.tokens)
            self.counters.num_cached_tokens += seq.num_computed
            seq.lifecycle.num_cached_tokens = seq.num_computed
            if self.sessions is not None:
                self.sessions.start(seq.session, now)
        seq.lifecycle.record(EventKind.SCHEDULED, now)

    def free_blocks(self, seq: Sequence) -> None:
        """Free all blocks of a sequence."""
        self.ledger.free(seq.blocks)
        seq.max_computed = max(seq.max_computed, seq.num_computed)
        seq.forget_blocks()

    def release(self, seq: Sequence, now: float) -> None:
        """Free all that a finished sequence holds, and remove it: no step may touch it. Its session may pin its KV."""
        if self.sessions is not None:
            self._leave_session(self.sessions, seq, now)
        self.free_blocks(seq)
        self.release_backups(seq)
        del self.sequences[seq.seq_id]
        self.row_changes.add(seq.seq_id)
        self.released.append(seq.seq_id)

    def _join_session(self, sessions: SessionBook, seq: Sequence) -> None:
        request = seq.request
        keys = seq.keys_for(seq.num_prompt // self.ledger.block_tokens, self.ledger.block_tokens)
        seq.session = sessions.arrive(request.session, request.client, keys, request.arrival_s)

    def _leave_session(self, sessions: SessionBook, seq: Sequence, now: float) -> None:
        if seq.finish_reason is FinishReason.ABORT:
            sessions.give_up(seq.session)
            return
        tiers, block_tokens = self.links.view_tiers(self.transfers), self.ledger.block_tokens
        least_chance = least_chance_to_save(tiers, self.prices.now, block_tokens)
        pin = sessions.end(seq.session, seq.keys[: seq.num_sealed], now, least_chance)
        if pin is not None:
            self.unsaved_pins.append(pin)

    def keep_backup(self, seq: Sequence, backup: Backup) -> None:
        """Keep a backup of one of its blocks for a sequence."""
        self.backups.keep(backup)
        seq.backups.append(backup)
        self.row_changes.add(seq.seq_id)

    def release_backups(self, seq: Sequence) -> None:
        """Release all backups that are kept for a sequence, the last first: eviction takes a prefix from its end."""
        for backup in reversed(seq.backups):
            self.backups.release(backup)
        seq.backups = []
        self.release_tail(seq)

    def release_tail(self, seq: Sequence) -> None:
        """Release the backup of its partial block, which is out of date when the sequence runs again or ends."""
        if seq.tail is not None:
            self.backups.release(seq.tail[0])
            seq.tail = None

    def find_sources(self, seq: Sequence) -> list[Source]:
        """Sources of the longest run of leading blocks that exist; at least one token is left to compute."""
        block_tokens = self.ledger.block_tokens
        sources: list[Source] = []
        for key in seq.keys_for((len(seq.tokens) - 1) // block_tokens, block_tokens):
            block = self.ledger.find(key)
            backup = None if block is not None else self.backups.find_whole(key)
            if block is None and backup is None:
                break
            sources.append(Source(key, block, backup, (len(sources) + 1) * block_tokens))
        if seq.tail is not None and seq.tail[0].is_whole and seq.tail[1] // block_tokens == len(sources):
            sources.append(Source(None, None, *seq.tail))
        return sources

    def is_on_device(self, backup: Backup) -> bool:
        """Whether the device has a readable block with the same content (``relocations.Keeper``)."""
        return self.ledger.find(backup.key) is not None

    def swapped_backups(self) -> Iterator[list[Backup]]:
        """The kept backups of each swapped sequence, in the order of their keys (``relocations.Keeper``)."""
        for seq in self.swapped:
            yield seq.backups if seq.tail is None else [*seq.backups, seq.tail[0]]

    def drop_lost(self, lost: tuple[Backup, ...]) -> None:
        """Release lost backups; a swapped sequence without any backup left becomes waiting, to be recomputed."""
        gone = set(lost)
        for seq in self.sequences.values():
            for backup in [backup for backup in seq.backups if backup in gone]:
                seq.backups.remove(backup)
                self.backups.release(backup)
                self.row_changes.add(seq.seq_id)
            if seq.tail is not None and seq.tail[0] in gone:
                self.release_tail(seq)
            if seq.status is Status.SWAPPED and not seq.backups and seq.tail is None:
                self.enter(seq, Status.WAITING)

    def block_tables(self) -> list[list[BlockId]]:
        """All references to blocks: tables of sequences, even finished ones in steps, and of holders."""
        return [seq.blocks for seq in self.sequences.values()] + [list(held) for held in self.held_tables.values()]

    def _leave(self, seq: Sequence) -> None:
        if seq.status is Status.WAITING:
            if seq.seq_id in self.waiting:  # a new sequence is not there yet
                self.waiting.remove(seq.seq_id)
        else:
            self._members(seq.status).remove(seq)

    def _members(self, status: Status) -> list[Sequence]:
        members = {Status.RUNNING: self.running, Status.SWAPPED: self.swapped, Status.LOADING: self.loading}
        return members[status]
