"""Random mapping and unmapping over two arenas: every page keeps its bytes at every address, and none is lost."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from floodplain.memory.arena import Page
from floodplain.memory.host.arena import MappingBudget
from floodplain.memory.host.device import open_private_device
from floodplain.memory.host.device_file import PAGE_BYTES
from tests.support.examples import examples

NUM_PAGES = 24
NUM_PLACES = 16
WHICH = st.integers(0, 1)
PLACES = st.integers(0, NUM_PLACES - 1)


class ArenaMachine(RuleBasedStateMachine):
    """The model tracks the place of each page; a page contains its own number, written at allocation."""

    def __init__(self) -> None:
        super().__init__()
        self.device = open_private_device(NUM_PAGES * PAGE_BYTES)
        self.arenas = [self.device.reserve(NUM_PLACES) for _ in range(2)]
        self.views = [arena.tensor(torch.int64, (NUM_PLACES, PAGE_BYTES // 8)) for arena in self.arenas]
        self.desk = self.device.reserve(6)  # fresh pages are mapped here to get their number
        self.desk_view = self.desk.tensor(torch.int64, (6, PAGE_BYTES // 8))
        self.tables: list[dict[int, Page]] = [{}, {}]
        self.loose: list[Page] = []

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        pages = self.device.allocate(count)
        num_free = NUM_PAGES - len(self.loose) - sum(map(len, self.tables))
        assert (pages is not None) == (count <= num_free)
        if pages is not None:
            self.desk.map(0, pages)
            assert not self.desk_view[:count].any()  # zeroed, whatever their earlier contents
            self.desk_view[:count] = torch.tensor(pages)[:, None]
            self.loose += self.desk.unmap(0, count)

    @rule(which=WHICH, place=PLACES, count=st.integers(1, 8))
    def unmap(self, which: int, place: int, count: int) -> None:
        count = min(count, NUM_PLACES - place)
        if all(p in self.tables[which] for p in range(place, place + count)):
            pages = self.arenas[which].unmap(place, count)
            assert pages == [self.tables[which].pop(p) for p in range(place, place + count)]
            self.loose += pages

    @rule(which=WHICH, place=PLACES, data=st.data())
    def map_loose(self, which: int, place: int, data: st.DataObject) -> None:
        room = next((p for p in range(place, NUM_PLACES) if p in self.tables[which]), NUM_PLACES) - place
        order = data.draw(st.permutations(self.loose))
        pages, self.loose = order[:room], order[room:]
        self.arenas[which].map(place, pages)
        self.tables[which] |= dict(enumerate(pages, place))

    @rule(count=st.integers(0, 8))
    def release(self, count: int) -> None:
        self.device.release(self.loose[:count])
        self.loose = self.loose[count:]

    @invariant()
    def every_page_keeps_its_bytes(self) -> None:
        for view, table in zip(self.views, self.tables, strict=True):
            for place, page in table.items():
                assert (view[place] == page).all()

    @invariant()
    def no_page_is_lost(self) -> None:
        num_owned = len(self.loose) + sum(map(len, self.tables))
        assert self.device.num_owned_pages == num_owned
        assert self.device.num_free_pages() == NUM_PAGES - num_owned

    def teardown(self) -> None:
        budget: MappingBudget = self.device._budget
        self.views.clear()
        self.device.close()
        assert budget.num_mappings == 0


ArenaMachine.TestCase.settings = settings(max_examples=examples(25), stateful_step_count=25, deadline=None)
TestArenaMachine = ArenaMachine.TestCase
