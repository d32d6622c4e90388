"""The decode round is capturable: replays of its recorded ops, the meta device, planted faults."""

import dataclasses
import functools
import itertools
import random
import typing

import pytest
import torch
from emulator import Emulator, KnownDrafter, NotCapturable
from fixtures import TINY, TINY_EOS, tiny_drafter, tiny_target
from stubs import FULL, PARTLY, SIBLINGS, check_engines, tiny_engine

from ddtree import SamplingParams
from ddtree.config import load_draft_config, load_target_config
from ddtree.kernels import get_ops
from ddtree.kernels.reference import TorchOps
from ddtree.models.dummy import dummy_models
from ddtree.models.llama import Llama
from ddtree.models.registry import build_drafter, build_target
from ddtree.models.traced import TracedLayers
from ddtree.runtime import graphs, step
from ddtree.runtime import loop as loop_module
from ddtree.runtime import plan as plan_module
from ddtree.runtime import runner as runner_module
from ddtree.runtime.graphs import MAX_GRAPHS, GraphKey, StaticBuffers, graph_keys
from ddtree.runtime.kv_cache import allocate_pool
from ddtree.runtime.machine import Machine
from ddtree.runtime.pages import DUMMY_PAGE
from ddtree.runtime.plan import LEVELS, Buckets, DecodeSpec, Level, PageEdit
from ddtree.runtime.request import FINISHED, Request
from ddtree.runtime.runner import Runner
from ddtree.runtime.sampler import TreeWeights
from ddtree.runtime.scheduler import Scheduler, SchedulerConfig
from ddtree.runtime.staging import Ring
from ddtree.runtime.stats import StageTimer
from ddtree.runtime.step import decode_step
from ddtree.state import RowState

CPU, META = torch.device("cpu"), torch.device("meta")
BATCH, BUDGET, BLOCK, PAGE, WIDTH = 4, 16, 6, 4, 40
BUCKETS = Buckets(batch=(1, 2, 4), nodes=(4, 8, 17), widths=(16, WIDTH))


@pytest.fixture(autouse=True)
def no_recordings(monkeypatch):
    """Steps run as on a GPU: no recordings, no values read; and engines end with all pages."""
    monkeypatch.setattr(TracedLayers, "_worth_replaying", lambda *_: False)
    monkeypatch.setattr(TorchOps, "sees_values", property(lambda _: False, lambda *_: None), False)
    yield
    check_engines()


@functools.cache
def prompts():
    generator = torch.Generator().manual_seed(11)
    sizes = torch.randint(2, 20, (8,), generator=generator).tolist()
    return [torch.randint(0, 98, (size,), generator=generator).tolist() for size in sizes]


@functools.cache
def sequences():
    """(prompt length, prompt + 120 tokens of plain decoding) of all prompts."""
    with tiny_engine(draft=None, budget=0) as engine:
        params = SamplingParams(max_new_tokens=120, ignore_eos=True)
        outputs = engine.generate(prompts(), params)
    return [(len(o.prompt_token_ids), o.prompt_token_ids + o.token_ids) for o in outputs]


def make_runner(ranks=FULL, num_pages=BATCH * WIDTH, known=None, tokens=None):
    ops = get_ops("torch", CPU)
    some = {"drafts": True, "draft_tokens": tokens}
    target = build_target(tiny_target(), ops, CPU, torch.float32, **some)
    inner = build_drafter(
        tiny_drafter(), load_target_config(tiny_target()), ops, CPU, torch.float32
    )
    return Runner.build(
        target,
        KnownDrafter(target, inner, known or sequences(), ranks),
        ops,
        max_batch_size=BATCH,
        page_size=PAGE,
        num_pages=num_pages,
        table_width=WIDTH,
        max_nodes=BUDGET + 1,
        num_candidates=BUDGET,
        device=CPU,
    )


def capture(runner, buckets=BUCKETS):
    keys = graph_keys(buckets, BLOCK, PAGE, narrow=True)
    recorder = Emulator()
    runner.capture(buckets, keys, recorder)
    own, smaller = 3 * max(1, len(buckets.levels)), len(buckets.nodes) - 1
    shapes = own + smaller * max(1, len(buckets.levels[:2]))
    assert recorder.recorded == len(keys) == len(buckets.batch) * len(buckets.widths) * shapes
    return recorder


class NoText:
    """A request's stream where there is no text."""

    match = None

    def push(self, ids):
        return "", None

    def finish(self):
        return ""


class Twins:
    """One scheduler, and two runners that carry out each of its plans: eager and captured.

    The eager one runs the rows as they are; the captured one pads them. Before every step the
    captured one's dummy page is filled with NaN.
    """

    def __init__(self, ranks, num_pages=BATCH * WIDTH, buckets=BUCKETS, known=None, tokens=None):
        self.eager = make_runner(ranks, num_pages, known, tokens)
        self.captured = make_runner(ranks, num_pages, known, tokens)
        self.recorder = capture(self.captured, buckets)
        self.scheduler = Scheduler(
            SchedulerConfig(BATCH, PAGE, num_pages, 16, BLOCK, WIDTH, 1, buckets)
        )
        self.shapes = []
        self.requests = []
        self._flight = None

    def add(self, prompt, **options):
        params = SamplingParams(**{"max_new_tokens": 110, "ignore_eos": True, **options})
        limit = len(prompt) + params.max_new_tokens
        request = Request(
            len(self.requests) + 1, prompt, params, limit, BUDGET, tuple(TINY_EOS), NoText()
        )
        self.scheduler.check(request)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def running(self):
        return [r for r in self.scheduler._active if r.status == "running"]

    def step(self):
        """Launch, compare, collect the step before; returns whether anything was launched."""
        plan = self.scheduler.schedule()
        self.poison()
        launched = None
        if plan is not None:
            if plan.spec is not None:
                self.shapes.append((len(plan.rows), plan.spec))
            launched = plan, self.eager.launch(plan), self.captured.launch(plan)
        previous, self._flight = self._flight, launched
        if previous is not None:
            plan, eager, captured = previous
            firsts, reports = self.eager.read(eager)
            other_firsts, other_reports = self.captured.read(captured)
            assert [first[:2] for first in firsts] == [first[:2] for first in other_firsts]
            for one, two in zip(reports, other_reports, strict=True):
                for name in ("status", "num_nodes", "emitted", "path", "tokens", "parents"):
                    assert getattr(one, name) == getattr(two, name), name
                bits = torch.tensor([r.logprobs for r in (one, two)], dtype=torch.int32)
                own = bits[..., :1].contiguous().view(torch.float32)
                torch.testing.assert_close(own[0], own[1], rtol=0, atol=1e-4)
            self.scheduler.collect(plan, firsts, reports, {})
        self.compare()
        return launched is not None

    def poison(self):
        dummy = slice(DUMMY_PAGE * PAGE, (DUMMY_PAGE + 1) * PAGE)
        self.captured.machine.target_kv[:, dummy] = float("nan")
        self.captured.machine.draft_kv[:, dummy] = float("nan")
        self.captured.graphs.buffers.report.fill_(-7)

    def compare(self):
        """Device rows are equal, committed K/V too; the spare row has not moved."""
        one, two = self.eager.rows, self.captured.rows
        for field in dataclasses.fields(RowState):
            assert torch.equal(getattr(one, field.name), getattr(two, field.name)), field.name
        spare = self.captured.spare_slot
        assert two.length[spare] == 0 and two.anchor[spare] == 0 and two.done[spare]
        assert (two.block_table[spare] == DUMMY_PAGE).all()
        for request in self.scheduler._active:
            count = int(one.length[request.slot])
            positions = torch.arange(count)
            pages = one.block_table[request.slot].index_select(0, positions // PAGE)
            slots = pages * PAGE + positions % PAGE
            pools = ["target_kv", "draft_kv"] if request.speculates else ["target_kv"]
            for pool in pools:
                a, b = getattr(self.eager.machine, pool), getattr(self.captured.machine, pool)
                torch.testing.assert_close(a[:, slots], b[:, slots], rtol=1e-4, atol=1e-4)

    def move_page(self, request, index):
        """Give one of a request's pages another number, and its content with it."""
        (new,) = self.scheduler.pages.take(1)
        old, request.pages[index] = request.pages[index], new
        self.scheduler.pages.give_back([old])
        self.scheduler._edits.append(PageEdit(request.slot, index, [new]))
        for runner in (self.eager, self.captured):
            for pool in (runner.machine.target_kv, runner.machine.draft_kv):
                pages = pool.unflatten(1, (-1, PAGE))
                pages[:, new] = pages[:, old]


@pytest.mark.parametrize("ranks", [FULL, SIBLINGS, PARTLY], ids=["oracle", "siblings", "partly"])
def test_replay_equals_eager(ranks):
    """50 rounds: batch 3 in bucket 4, 4, 1, 3; tree, chain and plain; moving pages; joins."""
    twins = Twins(ranks)
    rng = random.Random(5)

    def rounds(count):
        target = len(twins.shapes) + count
        while len(twins.shapes) < target:
            if twins.running() and rng.random() < 0.4:
                request = rng.choice(twins.running())
                twins.move_page(request, rng.randrange(len(request.pages)))
            twins.step()
            assert twins.scheduler.unfinished, "the requests are too short for this test"

    def leave(keep):
        for request in [r for r in twins.requests if r.status != FINISHED][keep:]:
            twins.scheduler.abort(request)

    p = prompts()
    for prompt, budget in zip(p[:3], (16, 3, 9)):
        twins.add(prompt, budget=budget)
    rounds(6)
    twins.add(p[3], speculation="chain")
    rounds(6)
    leave(1)
    rounds(3)
    leave(0)
    for prompt, options in zip(p[4:7], ({"speculation": "off"}, {"budget": 5}, {"budget": 2})):
        twins.add(prompt, **options)
    rounds(9)
    leave(0)
    for prompt in p[:4]:
        twins.add(prompt, speculation="chain", max_new_tokens=60)
    rounds(12)
    leave(0)
    for prompt in p[2:5]:
        twins.add(prompt, speculation="off", max_new_tokens=8)
    rounds(7)
    twins.add(p[5], budget=16, max_new_tokens=30)
    twins.add(p[6], budget=1, max_new_tokens=12)
    while twins.scheduler.unfinished:
        twins.step()
    assert len(twins.shapes) >= 50
    sizes = [size for size, _ in twins.shapes]
    changes = [b for a, b in zip([0, *sizes], sizes) if a != b]
    assert "3, 4, 1, 3" in str(changes), changes
    modes = {(spec.mode, spec.num_nodes) for _, spec in twins.shapes}
    assert {("tree", 17), ("tree", 8), ("chain", BLOCK), ("off", 1)} <= modes
    assert twins.captured.rounds["eager"] == 0
    assert twins.captured.rounds["replayed"] == twins.recorder.replayed == len(twins.shapes)
    for request in twins.requests:
        _, known = next(s for s in sequences() if s[1][: s[0]] == request.prompt)
        start = len(request.prompt)
        assert request.output == known[start : start + len(request.output)]
    if ranks == FULL:
        assert max(max(r.stats.acceptance_histogram, default=0) for r in twins.requests) == BLOCK


def test_replay_equals_eager_under_preemption():
    """Rows that lose their pages and come back find the same graphs."""
    twins = Twins(PARTLY, num_pages=44)
    for prompt in prompts():
        twins.add(prompt, max_new_tokens=60)
    while twins.scheduler.unfinished:
        twins.step()
    assert twins.scheduler.preemptions > 0
    assert all(r.finish_reason == "length" for r in twins.requests)
    assert twins.captured.rounds["eager"] == 0


SAMPLED = {
    "noise": ([{"temperature": 0.7}, {"temperature": 1.2}, {}], Level.NOISE),
    "full": (
        [
            {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
            {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.4},
            {"frequency_penalty": 0.5, "min_new_tokens": 20, "logit_bias": {3: 4.0, 9: -100.0}},
            {"temperature": 1.0},
        ],
        Level.FULL,
    ),
    "logprobs": ([{"logprobs": 3}, {"temperature": 1.0, "logprobs": 0}, {}], LEVELS[-1]),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_replay_equals_eager_with_sampling(name):
    """And both give the tokens of plain rounds, which do no more than their one row asks for."""
    replay_sampled(*SAMPLED[name])


def test_replay_equals_eager_with_a_drafter_of_some_tokens():
    replay_sampled([{"temperature": 1.0}, {}, {}], Level.NOISE, torch.arange(0, 101, 2))


def replay_sampled(kinds, level, tokens=None):
    jobs = [
        (prompt, {"seed": i, "speculation": mode, "budget": 7, **kind})
        for i, (prompt, mode, kind) in enumerate(
            zip(prompts(), ("tree", "chain", "off", "tree") * 2, kinds * 3)
        )
    ]
    with tiny_engine(draft=None, budget=0) as engine:
        params = [
            SamplingParams(max_new_tokens=24, **{**o, "speculation": "off", "budget": None})
            for _, o in jobs
        ]
        outputs = engine.generate([prompt for prompt, _ in jobs], params)
    known = [(len(o.prompt_token_ids), o.prompt_token_ids + o.token_ids) for o in outputs]
    buckets = Buckets((4,), (8,), (WIDTH,), (Level.GREEDY, level))
    twins = Twins(PARTLY, num_pages=60, buckets=buckets, known=known, tokens=tokens)
    for prompt, options in jobs:
        twins.add(prompt, max_new_tokens=24, ignore_eos=False, **options)
    while twins.scheduler.unfinished:
        twins.step()
    assert [r.output for r in twins.requests] == [o.token_ids for o in outputs]
    assert twins.captured.rounds["eager"] == 0
    assert {spec.level for _, spec in twins.shapes} <= {Level.GREEDY, level}
    assert max(max(r.stats.acceptance_histogram) for r in twins.requests) > 2


def emulated_engine(monkeypatch, **options):
    recorders = []

    def make(device):
        recorders.append(Emulator())
        return recorders[-1]

    monkeypatch.setattr(loop_module, "make_recorder", make)
    monkeypatch.setattr(plan_module, "LEVELS", (Level.GREEDY, Level.NOISE))
    return tiny_engine(max_model_len=120, max_batch_size=3, **options), recorders


def test_an_engine_with_graphs(monkeypatch, capsys):
    """Rehearsed, captured under a progress bar, and no round is run eagerly."""
    params = [
        SamplingParams(max_new_tokens=12, **options)
        for options in (
            {},
            {"budget": 2},
            {"speculation": "chain"},
            {"speculation": "off"},
            {"temperature": 1.0, "seed": 5},
        )
    ]
    plain = tiny_engine(max_model_len=120, max_batch_size=3)
    wanted = [o.token_ids for o in plain.generate(prompts()[:5], params)]
    assert plain.describe()["cuda_graphs"] == 0 and plain.describe()["eager_rounds"] > 0
    engine, recorders = emulated_engine(monkeypatch)
    outputs = engine.generate(prompts()[:5], params)
    assert [o.token_ids for o in outputs] == wanted
    about = engine.describe()
    assert about["eager_rounds"] == 0 and about["replayed_rounds"] > 0
    rehearsal, final = recorders[-2:]
    assert about["cuda_graphs"] == rehearsal.recorded == final.recorded
    assert rehearsal.replayed == 0 and final.replayed == about["replayed_rounds"]
    assert "capturing" in capsys.readouterr().err
    assert all(o.stats.stage_seconds == {} for o in outputs)


def test_without_graphs_nothing_is_captured(monkeypatch):
    engine, recorders = emulated_engine(monkeypatch, cuda_graphs=False)
    engine.generate(prompts()[:2], SamplingParams(max_new_tokens=5))
    assert not recorders and engine.describe()["cuda_graphs"] == 0


def test_a_key_outside_the_set_runs_eagerly(monkeypatch):
    """And `describe` says so."""
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 3)
    plain = tiny_engine(max_model_len=120, max_batch_size=3)
    engine, _ = emulated_engine(monkeypatch, num_pages=60)
    params = SamplingParams(max_new_tokens=9, speculation="chain")
    outputs = engine.generate(prompts()[:3], params)
    wanted = plain.generate(prompts()[:3], params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in wanted]
    assert engine.describe()["cuda_graphs"] == 3 and engine.describe()["eager_rounds"] > 0


# -- keys and buffers ------------------------------------------------------------------------------


def test_buckets():
    made = Buckets.make(20, 63, 16, 2560, 16, narrow=True)
    assert made.batch == (1, 2, 4, 8, 16, 20)
    assert made.nodes == (4, 8, 16, 32, 64)
    assert made.widths == (32, 64, 128, 256, 512, 1024, 2560)
    made = Buckets.make(1, 4, 16, 100, 1, narrow=False)
    assert made == Buckets(batch=(1,), nodes=(4, 5, 8, 16), widths=(100,), levels=LEVELS)
    assert made.round_level(Level.GREEDY) == Level.GREEDY
    assert made.round_level(Level.NOISE) == Level.NOISE
    assert made.round_level(Level.TOP_P | Level.NOISE) == Level.FULL
    assert made.round_level(Level.LOGPROBS) == Level.FULL | Level.LOGPROBS
    assert Buckets().round_level(Level.BIAS) == Level.BIAS
    assert Buckets.make(3, 255, 16, 9, 16, narrow=False).nodes == (4, 8, 16, 32, 64, 128, 256)


def test_the_keys_are_bounded():
    """Own tree, chain and plain rounds of every batch come before smaller trees."""
    for batch, narrow in ((1, True), (8, True), (8, False), (64, True), (256, False)):
        buckets = Buckets.make(batch, 255, 16, 2560, 16, narrow)
        keys = graph_keys(buckets, 16, 16, narrow)
        assert len(set(keys)) == len(keys) <= MAX_GRAPHS
        assert DecodeSpec("tree", 256, 16) == keys[0].spec
        if narrow:
            assert max(k.batch * k.table_width * 16 for k in keys) <= graphs.MAX_KEYS
        else:
            assert {k.batch for k in keys if k.spec.mode == "chain"} == set(buckets.batch)
    plain = graph_keys(Buckets.make(4, 0, 1, 32, 16, True), 1, 16, True)
    assert {k.spec for k in plain} == {DecodeSpec("off", 1, 1, level) for level in LEVELS}
    assert len(plain) == 3 * len(LEVELS)


def test_captures_go_from_large_to_small():
    runner = make_runner()
    capture(runner)
    work = [key.work for key in runner.graphs.keys]
    assert work == sorted(work, reverse=True) and len(runner.graphs) == len(work)


@pytest.mark.parametrize("structure", [StaticBuffers, RowState])
def test_what_graphs_read_is_tensors_and_never_none(structure):
    hints = typing.get_type_hints(structure)
    assert hints and set(hints.values()) == {torch.Tensor}


# -- the meta device -------------------------------------------------------------------------------


@functools.cache
def meta_machine(kernels, coupled, some=None):
    ops = get_ops(kernels, META)
    config = load_target_config(tiny_target())
    draft = load_draft_config(tiny_drafter(), config)
    draft = dataclasses.replace(draft, draft_vocab_size=some)
    target, drafter = dummy_models(config, draft, Llama, ops, META, torch.float32)
    assert (None if target.draft_tokens is None else len(target.draft_tokens)) == some

    def pool(model):
        shape = (model.num_layers, model.num_kv_heads, model.head_dim)
        return allocate_pool(*shape, 64, PAGE, torch.float32, META)

    weights = TreeWeights.make(None, BLOCK - 1, META) if coupled else None
    return Machine(target, drafter, ops, pool(config), pool(draft), PAGE, some or BUDGET, weights)


@torch.inference_mode()
def meta_round(spec, kernels="torch", coupled=True, some=None):
    """Run a round on the meta device."""
    machine = meta_machine(kernels, coupled, some)
    rows = RowState.allocate(BATCH, WIDTH, TINY["vocab_size"], META)
    slots = torch.zeros(3, dtype=torch.int64, device=META)
    report = runner_module.decode_step(machine, rows, slots, WIDTH, spec, StageTimer(False))
    assert report.shape == (3, spec.layout.width)


@pytest.mark.parametrize("level", LEVELS, ids=["greedy", "noise", "full", "logprobs"])
@pytest.mark.parametrize("mode, nodes", [("off", 1), ("chain", 6), ("tree", 4), ("tree", 80)])
def test_the_round_runs_on_the_meta_device(mode, nodes, level):
    """A tensor without content: whatever reads a value raises."""
    for kernels, coupled in itertools.product(("torch", "triton"), (False, True)):
        meta_round(DecodeSpec(mode, nodes, min(nodes, BLOCK), level), kernels, coupled)
        if mode != "off" and level in LEVELS[:2]:
            meta_round(DecodeSpec(mode, nodes, min(nodes, BLOCK), level), kernels, coupled, some=9)


# -- planted faults --------------------------------------------------------------------------------

HOST = {"length": 0}
"""What a careless host would know about the round: changes from round to round."""


def in_finish(read):
    """A fault inside the round: `read(count)` in its accept stage."""

    def plant(monkeypatch):
        finish = step._finish

        def faulty(row, emitted, count):
            count, status = finish(row, emitted, count)
            return read(count, row), status

        monkeypatch.setattr(step, "_finish", faulty)

    return plant


def rebound(monkeypatch):
    """New tensors are bound to the row state where the old ones should be written to."""

    def faulty(machine, rows, *rest):
        names = [field.name for field in dataclasses.fields(rows)]
        fresh = RowState(**{name: getattr(rows, name).clone() for name in names})
        report = decode_step(machine, fresh, *rest)
        for name in names:
            setattr(rows, name, getattr(fresh, name))
        return report

    for module in (graphs, runner_module):
        monkeypatch.setattr(module, "decode_step", faulty)


def _item(count, row):
    count.sum().item()
    return count


def _tolist(count, row):
    assert count.tolist() is not None
    return count


def _numpy(count, row):
    assert count.numpy() is not None
    return count


def _branch(count, row):
    return count + 0 if count.sum() > 3 else count


def _boolean_index(count, row):
    return count if count[row.done > 0] is not None else row.length


def _host_integer(count, row):
    return torch.where(row.length < HOST["length"], count, 0)


def _none(count, row):
    torch._foreach_copy_([row.anchor, row.length], [row.anchor, None])
    return count


def _literal(count, row):
    return count * torch.tensor([1], device=count.device)


FAULTS = {
    "item": (in_finish(_item), {"record", "meta"}),
    "tolist": (in_finish(_tolist), {"record", "meta"}),
    "numpy": (in_finish(_numpy), {"record", "meta"}),
    "branch": (in_finish(_branch), {"record", "meta"}),
    "boolean index": (in_finish(_boolean_index), {"record", "meta"}),
    "host integer": (in_finish(_host_integer), {"replay"}),
    "rebound buffer": (rebound, {"replay"}),
    "none in a fused copy": (in_finish(_none), {"record", "meta"}),
    "literal": (in_finish(_literal), {"record"}),
}


def complaints():
    """Where a round fails: on the meta device, when recorded, or when replayed."""
    found = set()
    try:
        meta_round(DecodeSpec("tree", 8, BLOCK))
    except (RuntimeError, TypeError):  # a read of a meta tensor is one or the other
        found.add("meta")
    HOST["length"] = 1_000
    eager, captured = make_runner(), make_runner()
    for runner in (eager, captured):
        for slot in range(2):
            runner.rows.block_table[slot] = torch.arange(WIDTH) + 2 + slot * WIDTH
            runner.rows.limit[slot], runner.rows.budget[slot] = 100, 7
            runner.rows.anchor[slot] = slot
            runner.rows.done[slot] = False
    key = GraphKey(2, WIDTH, DecodeSpec("tree", 8, BLOCK))
    slots = torch.tensor([0, 1])
    try:
        captured.capture(BUCKETS, [key], Emulator())
    except (NotCapturable, RuntimeError, TypeError):
        return found | {"record"}
    for round_ in range(4):
        HOST["length"] = 1_000 if round_ % 2 else 0
        with torch.inference_mode():
            want = runner_module.decode_step(
                eager.machine, eager.rows, slots, WIDTH, key.spec, StageTimer(False)
            )
            got = captured.graphs.replay(key, slots).view_as(want)
        same = torch.equal(want, got) and torch.equal(eager.rows.length, captured.rows.length)
        if not same:
            return found | {"replay"}
    return found


def test_the_round_has_no_faults():
    assert complaints() == set()


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_caught(name, monkeypatch):
    plant, where = FAULTS[name]
    plant(monkeypatch)
    assert complaints() == where


# -- double buffering ------------------------------------------------------------------------------


class PoisonedRing(Ring):
    """A buffer that is handed out again holds nonsense."""

    def take(self):
        slot = super().take()
        slot.buffer.fill_(-(1 << 40))
        return slot


class LateRunner(Runner):
    """A device one step behind: step k is carried out once step k + 1 has been staged."""

    _queue = ()

    def execute(self, *work):
        queue, self._queue = self._queue, work
        if queue:
            super().execute(*queue)

    def read(self, ticket):
        if self._queue and self._queue[0] is ticket:
            queue, self._queue = self._queue, ()
            super().execute(*queue)
        return super().read(ticket)


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
@pytest.mark.parametrize("single", [None, "reports", "staging"])
def test_buffers_in_flight_are_left_alone(late, single):
    """Two buffers each way suffice whether the device is quick or slow; one does not."""
    params = [SamplingParams(max_new_tokens=n) for n in (9, 4, 14, 6, 11, 3, 8)]
    engine = tiny_engine(max_model_len=120, max_batch_size=3)
    wanted = [o.token_ids for o in engine.generate(prompts()[:7], params)]
    runner = engine._loop.runner
    runner.__class__ = LateRunner if late else Runner
    size = len(runner.reports.slots[0].buffer)
    runner.reports = PoisonedRing(size, CPU, 1 if single == "reports" else 2)
    size = len(runner.staging.ring.slots[0].buffer)
    runner.staging.ring = PoisonedRing(size, CPU, 1 if single == "staging" else 2)

    def right():
        try:
            return [o.token_ids for o in engine.generate(prompts()[:7], params)] == wanted
        except (RuntimeError, IndexError, AssertionError):
            return False

    # A quick device overwrites what the host has not read; a slow one is overtaken by the host.
    assert right() == (single is None or single == ("reports" if late else "staging"))


# -- what the host does ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode, nodes", [("off", 1), ("chain", BLOCK), ("tree", 17)])
def test_dispatches_depend_on_neither_batch_nor_context(mode, nodes):
    """The same ops whatever the batch bucket and the block table's width."""
    spec = DecodeSpec(mode, nodes, 1 if mode == "off" else BLOCK)
    runner, recorder = make_runner(), Emulator()
    keys = [GraphKey(batch, width, spec) for batch in (1, 2, 4) for width in (8, 16, WIDTH)]
    runner.capture(BUCKETS, keys, recorder)
    assert len(set(recorder.ops)) == 1 and recorder.ops[0] > 50
