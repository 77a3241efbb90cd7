"""The token state of a request inside the engine, and the transitions it may make."""

from __future__ import annotations

from enum import Enum

from floodplain.core.backups import Backup
from floodplain.core.errors import InvariantError
from floodplain.core.free_blocks import BlockId
from floodplain.core.hashing import BlockKey, extend_keys
from floodplain.core.lifecycle import Lifecycle
from floodplain.core.request import FinishReason, OrderKey, Request, SeqId
from floodplain.core.served import RequestAccount, weighted_work


class Status(Enum):
    """Where a sequence is.

    It holds blocks while RUNNING, and when FINISHED until no step touches them; while LOADING its transfer holds them.
    """

    WAITING = "waiting"
    SWAPPED = "swapped"
    LOADING = "loading"
    RUNNING = "running"
    FINISHED = "finished"


TRANSITIONS: dict[Status, frozenset[Status]] = {
    # copy of its prefix begins | admitted | aborted
    Status.WAITING: frozenset({Status.LOADING, Status.RUNNING, Status.FINISHED}),
    # copy begins | nothing to copy | its backups were lost: recompute | aborted
    Status.SWAPPED: frozenset({Status.LOADING, Status.RUNNING, Status.WAITING, Status.FINISHED}),
    # copy arrived | copy failed: back to where it came from | aborted
    Status.LOADING: frozenset({Status.RUNNING, Status.SWAPPED, Status.WAITING, Status.FINISHED}),
    # preempted: recompute | preempted: swap | ended
    Status.RUNNING: frozenset({Status.WAITING, Status.SWAPPED, Status.FINISHED}),
    Status.FINISHED: frozenset(),
}
"""The only transitions that a sequence may make."""


class Sequence:
    """Mutable state of one request. The loop owns it; policies see a frozen row of it instead.

    Attributes:
        tokens: Prompt and output tokens that are known.
        num_computed: Leading tokens whose KV is in ``blocks``, by completed steps and copies.
        num_scheduled: The same, counting steps that are still outstanding.
        num_sampling: Output tokens that outstanding steps will sample.
        max_computed: Tokens that were computed when it was last preempted: below it, computing is recomputation.
        backups: Backups of full blocks that are kept for it.
        session: Number of its session; 0 if the loop follows none.
        tail: (backup of its last, partly filled block; leading tokens up to its end). It is released when the sequence
            runs again.
        keys: Content keys of its leading full blocks, as far as they were needed.
        num_sealed: Leading blocks whose keys the ledger has.
        is_decoding: Whether the executor holds its last token and position, so that one token can follow.
        num_arriving: Loading: blocks that it will have.
        num_leaving: Blocks of it that outbound copies still read.
        account: Of its request; the request's choices share it (``core.served``).
        entered_step: The step in which it last entered the device.
        max_total: Prompt and output tokens at which it must end.
    """

    __slots__ = (
        "account", "backups", "blocks", "entered_step", "finish_reason", "is_decoding", "keys", "lifecycle",
        "max_computed", "max_total", "min_total", "num_arriving", "num_computed", "num_leaving",
        "num_outstanding", "num_prompt", "num_sampling", "num_scheduled", "num_sealed", "order_key", "request", "root",
        "seq_id", "session", "status", "stop_ids", "tail", "tokens",
    )  # fmt: skip

    def __init__(
        self, seq_id: SeqId, request: Request, *, root: BlockKey, max_total: int, stop_ids: frozenset[int]
    ) -> None:
        self.seq_id = seq_id
        self.request = request
        self.root = root
        self.tokens = [*request.prompt_token_ids, *request.known_token_ids]
        self.num_prompt = len(request.prompt_token_ids)
        self.max_total = max_total
        self.min_total = self.num_prompt + request.params.min_tokens
        self.stop_ids = stop_ids
        self.order_key: OrderKey = (request.priority, request.arrival_s, seq_id)
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_computed = self.num_scheduled = self.num_sampling = self.max_computed = 0
        self.num_outstanding = self.num_sealed = self.entered_step = 0
        self.num_arriving = self.num_leaving = 0
        self.account: RequestAccount[Sequence] = RequestAccount(seq_id, request.priority, self)
        self.is_decoding = False
        self.blocks: list[BlockId] = []
        self.keys: list[BlockKey] = []
        self.backups: list[Backup] = []
        self.session = 0
        self.tail: tuple[Backup, int] | None = None
        self.lifecycle = Lifecycle(request.arrival_s)

    @property
    def num_expected(self) -> int:
        """Known tokens and those that outstanding steps will sample."""
        return len(self.tokens) + self.num_sampling

    @property
    def num_generated(self) -> int:
        """Its output tokens."""
        return len(self.tokens) - self.num_prompt

    @property
    def key_work(self) -> float:
        """Served work that it adds to its key's account: each token once, and the prompt of several choices once."""
        num_computed = max(self.num_computed, self.max_computed)
        num_prompt = self.num_prompt if self.num_generated else min(self.num_prompt, num_computed)
        is_first = self.account.parent == self.seq_id
        return weighted_work(num_prompt if is_first else 0, self.num_generated, self.request.priority)

    def join(self, account: RequestAccount[Sequence]) -> None:
        """Become a further choice of a live request, with its place in the queue."""
        self.account, first = account, account.choices[0]
        self.order_key = (self.request.priority, first.order_key[1], self.seq_id)
        account.choices.append(self)

    def move_to(self, status: Status) -> None:
        """Make a transition; InvariantError if ``TRANSITIONS`` does not have it."""
        if status not in TRANSITIONS[self.status]:
            raise InvariantError(f"sequence {self.seq_id} cannot go from {self.status.value} to {status.value}")
        self.status = status

    def keys_for(self, num_blocks: int, block_tokens: int) -> list[BlockKey]:
        """Content keys of the first ``num_blocks`` full blocks of its known tokens, computed once."""
        if len(self.keys) < num_blocks:
            extend_keys(self.keys, self.root, self.tokens, num_blocks, block_tokens)
        return self.keys if len(self.keys) == num_blocks else self.keys[:num_blocks]

    def forget_blocks(self) -> None:
        """Clear its block table and what follows from it; the caller has freed the blocks in the ledger."""
        self.blocks = []
        self.num_computed = self.num_scheduled = self.num_sealed = 0
        self.is_decoding = False
