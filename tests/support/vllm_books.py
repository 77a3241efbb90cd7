"""A block pool, requests and copies in plain contents, for laws of swap space for vLLM's requests.

Blocks and slots hold the tokens whose KV they would hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from floodplain.core.plan import Transfer, TransferKind
from floodplain.plugins.vllm.tracked import TrackedRequest

BLOCK_TOKENS = 4
Token = tuple[int, int]  # a text, and a position in it
LOST: list[Token | None] = [None] * BLOCK_TOKENS


@dataclass(eq=False)
class Block:
    """A block like vLLM's, with the tokens whose KV it holds."""

    block_id: int
    ref_cnt: int = 0
    is_null: bool = False
    content: list[Token | None] = field(default_factory=LOST.copy)


class Pool:
    """A pool like vLLM's: a free block is found by its content until it is allocated."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.free = list(self.blocks)

    def give(self, num_blocks: int) -> list[Block]:
        given, self.free = self.free[:num_blocks], self.free[num_blocks:]
        assert all(block.ref_cnt == 0 for block in given)
        for block in given:
            block.ref_cnt, block.content = 1, LOST.copy()
        return given

    def find(self, text: int, most: int) -> list[Block]:
        by_content = {tuple(block.content): block for block in self.blocks}
        found: list[Block] = []
        while len(found) < most and (block := by_content.get(tuple(tokens_of(text, len(found))))) is not None:
            found.append(block)
        return found

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                self.free.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Sequence[Block]) -> None:
        for block in ordered_blocks:
            block.ref_cnt -= 1
            assert block.ref_cnt >= 0, "freed more often than taken"
            if not block.ref_cnt:
                self.free.append(block)


@dataclass(eq=False)
class LiveRequest:
    """A request of vLLM: ``on`` the device, ``off`` it, or ``coming`` by copies in flight."""

    tracked: TrackedRequest
    text: int
    num_tokens: int
    blocks: list[Block] = field(default_factory=list)
    num_computed: int = 0
    where: str = "off"
    is_gone: bool = False


@dataclass
class Flight:
    """A copy in flight, and the content of its blocks when it began. A void copy's result is not used."""

    transfer: Transfer
    request: LiveRequest
    blocks: list[Block]
    seen: list[list[Token | None]]
    is_void: bool = False

    @property
    def is_inbound(self) -> bool:
        return self.transfer.kind is TransferKind.SWAP_IN

    @property
    def is_holding(self) -> bool:
        """Whether it holds its blocks: a swap-out until it is void, a swap-in once it is void."""
        return self.is_inbound == self.is_void


def tokens_of(text: int, index: int) -> list[Token | None]:
    return [(text, position) for position in range(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)]


def holds(content: Sequence[Token | None], text: int, index: int, num_tokens: int) -> bool:
    """Return whether block ``index`` has all tokens that it should have of a text's first ``num_tokens``."""
    wanted = tokens_of(text, index)[: max(0, num_tokens - index * BLOCK_TOKENS)]
    return list(content[: len(wanted)]) == wanted
