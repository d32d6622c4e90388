"""The scheduler against a fake device that remembers what every KV slot holds."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.config import SamplingParams
from ddtree.runtime.loop import Loop
from ddtree.runtime.pages import DUMMY_PAGE, RESERVED_PAGES, pages_for
from ddtree.runtime.plan import ROW_LENGTH, ROW_RUNNING, ROW_STOPPED, RowReport
from ddtree.runtime.request import FINISHED, Request
from ddtree.runtime.scheduler import Scheduler, SchedulerConfig
from ddtree.text import StopMatch

SCRATCH = "scratch"
STOP = 0.01
"""Chance that a token is a stop id, and that it completes a stop string (only the host sees)."""


def token_at(request_id, position):
    """The token that a request is to have at a position."""
    return request_id * 1000 + position


class FakeStream:
    """Text that is cut at tokens of the test's choosing, as a stop string would."""

    def __init__(self, stops):
        self.stops, self.match = stops, None

    def push(self, ids):
        for index, token in enumerate(ids):
            if self.match is None and token in self.stops:
                self.match = StopMatch("stop", index + 1)
        return "", self.match

    def finish(self):
        return ""


class FakeTicket:
    def __init__(self, plan, number, result):
        self.plan, self.number, self.result = plan, number, result
        self.stage_seconds, self.busy_seconds = {}, 0.0


class FakeDevice:
    """Carries plans out on a dictionary: slot -> what was written there last.

    Every launch checks that the pages it touches are in its row's block table, within the width
    it was given, and that all that the row has committed still lies where it was put.
    """

    def __init__(self, config, rng, requests):
        self.config, self.rng, self.requests = config, rng, requests
        self.memory = {}
        self.tables = {slot: {} for slot in range(config.max_batch_size)}
        self.rows = {}
        self.launched, self.last_read = 0, -1
        self.scheduler = None

    def launch(self, plan):
        self.check_plan(plan)
        for join in plan.joins:
            self.tables[join.slot] = {}
            self.rows[join.slot] = {"join": join, "length": 0, "done": True}
        for edit in plan.edits:
            for index, page in enumerate(edit.pages):
                assert RESERVED_PAGES <= page < RESERVED_PAGES + self.config.num_pages
                assert edit.start + index not in self.tables[edit.slot], "entry written twice"
                self.tables[edit.slot][edit.start + index] = page
        firsts = [first for chunk in plan.prefills for first in self.prefill(chunk)]
        reports = [self.decode(row, plan) for row in plan.rows]
        self.launched += 1
        return FakeTicket(plan, self.launched - 1, (firsts, reports))

    def read(self, ticket):
        assert ticket.number > self.last_read, "a step is read twice"
        assert self.launched - ticket.number in (1, 2), "a step is read too late"
        self.last_read = ticket.number
        return ticket.result

    def check_plan(self, plan):
        active = {r.slot: r for r in self.scheduler._active}
        owners = [page for request in active.values() for page in request.pages]
        assert len(owners) == len(set(owners)), "a page has two owners"
        free = self.scheduler.pages._free
        everything = range(RESERVED_PAGES, RESERVED_PAGES + self.config.num_pages)
        assert sorted(owners + free) == list(everything)
        assert sorted([*active, *self.scheduler._slots]) == list(range(self.config.max_batch_size))
        names = [(w.request_id, w.epoch) for w in (*plan.rows, *plan.prefills)]
        assert len(names) == len({name for name, _ in names}), "a request twice in one step"
        for work in (*plan.rows, *plan.prefills):
            request = active[work.slot]
            assert (request.id, request.epoch) == (work.request_id, work.epoch)
        assert sum(len(c.tokens) for c in plan.prefills) <= self.config.prefill_chunk
        assert len(plan.rows) <= self.config.max_batch_size

    def cell(self, slot, position, width):
        """The memory cell of a row's position, which must be on a page of its own."""
        entry = position // self.config.page_size
        page = self.tables[slot].get(entry, DUMMY_PAGE)
        assert page != DUMMY_PAGE, f"position {position} has no page"
        assert entry < width, f"position {position} is outside the block table's width {width}"
        owner = next(r for r in self.scheduler._active if r.slot == slot)
        assert owner.pages[entry] == page, "the device's block table is not the host's"
        return page, position % self.config.page_size

    def check_committed(self, slot, request_id, width):
        for position in range(self.rows[slot]["length"]):
            found = self.memory[self.cell(slot, position, width)]
            assert found == token_at(request_id, position), "a committed token was overwritten"

    def prefill(self, chunk):
        row, request = self.rows[chunk.slot], self.requests[chunk.request_id]
        assert row["done"], "prefill of a row that decodes"
        assert row["length"] == chunk.start
        self.check_committed(chunk.slot, chunk.request_id, chunk.table_width)
        for position, token in enumerate(chunk.tokens, start=chunk.start):
            assert token == token_at(chunk.request_id, position)
            self.memory[self.cell(chunk.slot, position, chunk.table_width)] = token
        row["length"] += len(chunk.tokens)
        if not chunk.last:
            return []
        position = row["length"]
        if chunk.anchor is not None:
            assert chunk.anchor == token_at(chunk.request_id, position)
            row["done"] = False
            return []
        token = token_at(chunk.request_id, position)
        status = self.status(request, row, token, position + 1)
        row["done"] = status != ROW_RUNNING
        return [(token, status, [])]

    def status(self, request, row, token, total):
        assert total <= row["join"].limit
        if token in request.stop_ids:
            return ROW_STOPPED
        return ROW_LENGTH if total == row["join"].limit else ROW_RUNNING

    def decode(self, work, plan):
        spec, slot = plan.spec, work.slot
        row, request = self.rows[slot], self.requests[work.request_id]
        length, budget = row["length"], row["join"].budget
        assert budget < spec.num_nodes and (spec.mode != "off" or budget == 0)
        assert spec.mode != "chain" or request.chain
        self.check_committed(slot, work.request_id, plan.table_width)
        reach = spec.num_nodes if spec.mode == "off" else max(spec.num_nodes, spec.path_len)
        for position in range(length, length + reach):
            self.memory[self.cell(slot, position, plan.table_width)] = SCRATCH
        if row["done"]:
            return RowReport(ROW_RUNNING, 1, [])
        most = 1 + min(budget, spec.path_len - 1)
        drafted = self.rng.choice([1, most, self.rng.randint(1, most)])
        emitted, status = [], ROW_RUNNING
        while len(emitted) < drafted and status == ROW_RUNNING:
            position = length + len(emitted) + 1
            emitted.append(token_at(work.request_id, position))
            status = self.status(request, row, emitted[-1], position + 1)
        for position in range(length, length + len(emitted)):
            cell = self.cell(slot, position, plan.table_width)
            self.memory[cell] = token_at(work.request_id, position)
        row["length"] += len(emitted)
        row["done"] = status != ROW_RUNNING
        return RowReport(status, 1 + budget, emitted)


def make_request(index, rng, block, budget, longest):
    """A request with random sizes, kind and ends; ends as a dict (stop id, stop string)."""
    prompt = [token_at(index, p) for p in range(rng.randint(1, rng.choice([4, longest // 2])))]
    room = longest - len(prompt)
    new = rng.choice([0, 1, rng.randint(0, room), room, room, room])
    stop_ids = [token_at(index, len(prompt) + i) for i in range(new) if rng.random() < STOP]
    strings = {token_at(index, len(prompt) + i) for i in range(new) if rng.random() < STOP}
    kind = rng.choice(["tree", "tree", "chain", "off"]) if block > 1 else "off"
    own = None if rng.random() < 0.5 else rng.randint(0, budget)
    params = SamplingParams(
        max_new_tokens=new, speculation=kind, budget=own, stop_token_ids=stop_ids[:8]
    )
    return Request(index, prompt, params, len(prompt) + new, budget, (), FakeStream(strings))


def expected(request):
    """The ids that a request must end with when nobody cancels it."""
    start = len(request.prompt)
    ids = [token_at(request.id, start + i) for i in range(request.params.max_new_tokens)]
    ends = [i + 1 for i, t in enumerate(ids) if t in request.stop_ids or t in request._stream.stops]
    return ids[: min(ends, default=len(ids))]


@settings(max_examples=800)
@given(rng=st.randoms(use_true_random=True))
def test_any_run_keeps_its_pages_and_finishes(rng):
    """Random arrivals, cancels, pools, acceptance and stops: nothing is lost, mixed up or stuck."""
    page_size, block = rng.choice([1, 1, 2, 4, 16]), rng.choice([1, 4, 6])
    batch, count = rng.randint(1, 6), rng.randint(1, 12)
    budget = 0 if block == 1 else rng.choice([0, 1, 3, 9, 20])
    cancels = rng.choice([0.0, 0.0, 0.02, 0.1])
    longest = 40
    nodes = max(1 + budget, block)
    config = SchedulerConfig(
        max_batch_size=batch,
        page_size=page_size,
        num_pages=pages_for(longest - 1 + nodes + rng.choice([0, 10, 25, 50, 100]), page_size),
        prefill_chunk=rng.choice([1, 5, 64]),
        block_size=block,
        table_width=pages_for(longest + nodes, page_size),
        width_step=rng.choice([1, 4]),
    )
    requests = {i: make_request(i, rng, block, budget, longest) for i in range(1, count + 1)}
    scheduler = Scheduler(config)
    device = FakeDevice(config, rng, requests)
    device.scheduler = scheduler
    loop = Loop(scheduler, device)
    to_come, cancelled, started = list(requests.values()), set(), []
    oldest, stuck = None, 0
    while to_come or scheduler.unfinished:
        while to_come and (not scheduler.unfinished or rng.random() < 0.3):
            scheduler.check(to_come[0])
            scheduler.add(to_come.pop(0))
        for request in list(scheduler._by_id.values()):
            if rng.random() < cancels:
                loop.abort([request])
                cancelled.add(request.id)
        if not scheduler.unfinished:
            continue
        unread = any(r.pending for r in scheduler._active)
        preemptions = scheduler.preemptions
        loop.step()
        assert not unread or preemptions == scheduler.preemptions, "preempted with a step unread"
        started += sorted(
            (r for r in scheduler._active if r.id not in started), key=lambda r: r.epoch
        )
        started = [r if isinstance(r, int) else r.id for r in started]
        # No starvation: the oldest request moves in any two steps.
        first = min(scheduler._by_id.values(), key=lambda r: r.id, default=None)
        state = first and (first.id, first.prefilled, len(first.output))
        stuck = stuck + 1 if state == oldest else 0
        assert stuck <= 2, "the oldest request does not get on"
        oldest = state

    assert started == sorted(started), "requests must start in the order of their arrival"
    assert scheduler.pages.free == config.num_pages
    assert sorted(scheduler._slots) == list(range(batch))
    assert not scheduler._active and not scheduler._waiting and not scheduler._edits
    for request in requests.values():
        assert request.status == FINISHED
        want = expected(request)
        if request.id in cancelled:
            assert request.output == want[: len(request.output)]
        else:
            assert request.output == want
            stopped = bool(want) and (
                want[-1] in request.stop_ids or want[-1] in request._stream.stops
            )
            assert request.finish_reason == ("stop" if stopped else "length")


def run(config, requests, rng=None):
    """Run requests that all arrive at once; the scheduler."""
    scheduler = Scheduler(config)
    device = FakeDevice(config, rng or random.Random(0), {r.id: r for r in requests})
    device.scheduler = scheduler
    loop = Loop(scheduler, device)
    for request in requests:
        scheduler.check(request)
        scheduler.add(request)
    while scheduler.unfinished:
        loop.step()
    return scheduler


def plain(index, prompt, new, **params):
    """A request with a prompt of so many tokens."""
    tokens = [token_at(index, p) for p in range(prompt)]
    wants = SamplingParams(max_new_tokens=new, **params)
    return Request(index, tokens, wants, prompt + new, 7, (), FakeStream(set()))


def test_a_small_pool_preempts_the_youngest():
    """Three long requests in a pool for one and a half: some are preempted, all get their ids."""
    config = SchedulerConfig(3, 4, 20, 64, 6, 20, 1)
    requests = [plain(i, 6, 40) for i in (1, 2, 3)]
    scheduler = run(config, requests)
    assert scheduler.preemptions > 0
    assert all(r.output == expected(r) for r in requests)
    assert requests[0].epoch == 1, "the oldest is never preempted"


def test_a_large_pool_preempts_nobody():
    """With room for all there is no preemption."""
    config = SchedulerConfig(3, 4, 60, 64, 6, 20, 1)
    requests = [plain(i, 6, 40) for i in (1, 2, 3)]
    assert run(config, requests).preemptions == 0


def test_the_pool_is_used_to_the_last_slot():
    """`check` lets pass the longest request that fits, and refuses one token more."""
    for page_size in (1, 4, 16):
        for budget, scratch in ((0, 1), (3, 6), (7, 8)):
            pages = pages_for(64, page_size)
            config = SchedulerConfig(1, page_size, pages, 64, 6, pages, 1)
            room = pages * page_size - scratch + 1
            request = plain(1, 10, room - 10, budget=budget)
            for seed in range(5):
                run(config, [plain(1, 10, room - 10, budget=budget)], random.Random(seed))
            assert Scheduler(config).check(request) is None
            longer = plain(1, 10, room - 9, budget=budget)
            try:
                Scheduler(config).check(longer)
            except ValueError as error:
                assert str(error).startswith("num_pages:")
            else:
                raise AssertionError("a request that cannot fit was accepted")


def test_no_round_is_launched_for_nothing():
    """A plain request of n tokens takes n - 1 rounds: its last one is known in advance."""
    scheduler = Scheduler(SchedulerConfig(2, 4, 60, 64, 6, 20, 1))
    request = plain(1, 6, 9, speculation="off")
    device = FakeDevice(scheduler.config, random.Random(0), {1: request})
    device.scheduler = scheduler
    scheduler.add(request)
    loop = Loop(scheduler, device)
    while scheduler.unfinished:
        loop.step()
    assert device.launched == 1 + 8 and request.output == expected(request)
