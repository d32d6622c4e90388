"""The decode round by itself: node logits, accepted paths, compacted KV, frozen and odd rows."""

import functools

import pytest
import torch
from fixtures import TINY_TAPS, make_drafter, make_target
from stubs import FULL, PARTLY, SIBLINGS, Stub, by_row, hf_generate, hf_logits, hf_model

from ddtree.config import load_target_config
from ddtree.kernels import get_ops
from ddtree.models.registry import build_drafter, build_target
from ddtree.runtime.pages import NULL_PAGE, RESERVED_PAGES
from ddtree.runtime.plan import ROW_LENGTH, ROW_RUNNING, ROW_STOPPED, DecodeSpec, ReportLayout
from ddtree.runtime.prefill import prefill_step, start_row
from ddtree.runtime.runner import Runner
from ddtree.runtime.stats import StageTimer
from ddtree.runtime.step import decode_step

CPU = torch.device("cpu")
BLOCK = 6
TABLE = 256
"""Tokens that a rig's row has room for."""
PROMPTS = [[5, 17, 60, 2, 33, 9, 71], [88, 4], [*range(20, 43)]]
"""Rows of different lengths."""
FAR = 10_000


@functools.cache
def folder(architecture):
    """TINY with smaller weights: its rounding noise is well below the tolerance of 1e-4."""
    return make_target(architecture, seed=4, initializer_range=0.22)


@functools.cache
def models(architecture):
    ops = get_ops("torch", CPU)
    where = folder(architecture)
    target = build_target(where, ops, CPU, torch.float32)
    draft = make_drafter(where)
    drafter = build_drafter(draft, load_target_config(where), ops, CPU, torch.float32)
    return target, drafter, ops


@functools.cache
def answers(architecture):
    """Prompt + 150 greedy tokens for every prompt, by transformers, past any EOS."""
    return [p + hf_generate(folder(architecture), p, 150, eos_token_id=None) for p in PROMPTS]


class SpyTarget:
    """The target, remembering the hidden states of its last forward."""

    def __init__(self, target):
        self.target = target
        self.hidden = None

    def __getattr__(self, name):
        return getattr(self.target, name)

    def __call__(self, *args):
        self.hidden, features = self.target(*args)
        return self.hidden, features


class Rig:
    """Device rows driven by hand: every row prefilled, its pages shuffled over the pool.

    `drafter` makes the drafter of the round from (target, real drafter); by default ORACLE.
    Row b is in slot b; `spare` is the slot of padding rows.
    """

    def __init__(
        self,
        architecture="llama",
        page_size=4,
        ranks=FULL,
        prompts=PROMPTS,
        nodes=17,
        budgets=None,
        chains=(),
        limits=None,
        stops=None,
    ):
        target, drafter, ops = models(architecture)
        self.architecture, self.prompts, self.page_size = architecture, prompts, page_size
        self.target = SpyTarget(target)
        known = answers(architecture)
        sequences = [next((a for a in known if a[: len(p)] == p), ()) for p in prompts]
        stub = Stub(target, drafter, by_row(sequences) if ranks else None, ranks or FULL)
        batch, width = len(prompts), TABLE // page_size
        runner = Runner.build(
            self.target,
            stub,
            ops,
            max_batch_size=batch,
            page_size=page_size,
            num_pages=batch * width,
            table_width=width,
            max_nodes=nodes,
            num_candidates=min(nodes - 1, 101),
            device=CPU,
        )
        self.machine, self.rows, self.spare = runner.machine, runner.rows, runner.spare_slot
        self.nodes = nodes
        self.active = list(range(batch))
        pages = torch.randperm(batch * width, generator=torch.Generator().manual_seed(5))
        self.rows.block_table[:batch] = pages.view(batch, width) + RESERVED_PAGES
        self.rows.limit[:batch] = torch.tensor(limits or [FAR] * batch)
        self.rows.budget[:batch] = torch.tensor(budgets or [nodes - 1] * batch)
        for row in chains:
            self.rows.chain[row] = True
        for row, stop in enumerate(stops or []):
            self.rows.stop_ids[row, : len(stop)] = torch.tensor(stop)
        self.outputs = [self._prefill(row) for row in range(batch)]

    @torch.inference_mode()
    def _prefill(self, row):
        prompt, slot = self.prompts[row], torch.tensor([row])
        width = TABLE // self.page_size
        hidden = prefill_step(
            self.machine, self.rows, slot, torch.tensor([prompt]), 0, width, context=True
        )
        token, status = start_row(self.machine, self.rows, slot, len(prompt), hidden).tolist()
        assert status == ROW_RUNNING
        return [token]

    @torch.inference_mode()
    def round(self, mode="tree", pad=0):
        """One round of the active rows, with `pad` padding rows behind; their reports."""
        spec = DecodeSpec(
            mode, *{"tree": (self.nodes, BLOCK), "chain": (BLOCK, BLOCK)}.get(mode, (1, 1))
        )
        slots = torch.tensor(self.active + [self.spare] * pad)
        width = TABLE // self.page_size
        timer = StageTimer(True)
        report = decode_step(self.machine, self.rows, slots, width, spec, timer)
        layout = ReportLayout(spec.path_len, spec.num_nodes)
        assert report.shape == (len(slots), layout.width)
        reports = [layout.parse(values) for values in report.tolist()]
        for row, found in zip(self.active, reports):
            self.outputs[row] += found.emitted
        return reports

    def length(self, row):
        return int(self.rows.length[row])

    def slots(self, row, start=0, stop=None):
        """KV slots of a row's positions from `start` up to `stop` (its length)."""
        at = torch.arange(start, self.length(row) if stop is None else stop)
        return self.rows.block_table[row][at // self.page_size] * self.page_size + (
            at % self.page_size
        )

    def poison(self):
        """Write NaN wherever no committed row lies; the null page must stay zero by contract."""
        for kv in (self.machine.target_kv, self.machine.draft_kv):
            keep = torch.zeros(kv.shape[1], dtype=torch.bool)
            keep[NULL_PAGE * self.page_size : (NULL_PAGE + 1) * self.page_size] = True
            for row in self.active:
                keep[self.slots(row)] = True
            kv[:, ~keep] = torch.nan

    def assert_true_outputs(self):
        """Every row's tokens so far are the known greedy continuation."""
        for row in self.active:
            have = self.prompts[row] + self.outputs[row]
            assert have == answers(self.architecture)[row][: len(have)]

    def assert_committed_kv(self):
        """Target and drafter KV of every row equal a plain run's over the same tokens."""
        for row in self.active:
            tokens = (self.prompts[row] + self.outputs[row])[: self.length(row)]
            assert len(tokens) == len(self.prompts[row] + self.outputs[row]) - 1
            with torch.inference_mode():
                cache = hf_model(folder(self.architecture))(
                    torch.tensor([tokens]), use_cache=True
                ).past_key_values
            plain = Rig(self.architecture, 16, prompts=[tokens])
            slots = self.slots(row)
            pairs = [torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers]
            want = torch.stack(pairs).permute(0, 3, 1, 2, 4)
            got = self.machine.target_kv[:, slots]
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
            got = self.machine.draft_kv[:, slots]
            want = plain.machine.draft_kv[:, plain.slots(0)]
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def root_path(report, node):
    """Tokens from the anchor to a node of a report's tree."""
    path = [report.tokens[node]]
    while node:
        node = report.parents[node]
        path.append(report.tokens[node])
    return path[::-1]


def accepted_siblings(report):
    """How many accepted nodes were not their parent's best child."""
    first = {}
    for node in range(1, report.num_nodes):
        first.setdefault(report.parents[node], node)
    return sum(first[report.parents[node]] != node for node in report.path[1:])


def assert_node_logits(rig, reports, before, row):
    """A row's nodes, rejected ones too, have the logits of plain forwards over their root paths.

    `before` are the rows' committed tokens when the round began.
    """
    nodes = range(reports[row].num_nodes)
    sequences = [before[row] + root_path(reports[row], node) for node in nodes]
    want = hf_logits(folder(rig.architecture), sequences)
    got = rig.target.logits(rig.target.hidden[row, : len(nodes)])
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def committed(rig):
    """Tokens committed per row: all but the anchor."""
    return {row: (rig.prompts[row] + rig.outputs[row])[:-1] for row in rig.active}


# -- 20 rounds against plain forwards --------------------------------------------------------------

pages = pytest.mark.parametrize("page_size", [1, 4, 16])
architectures = pytest.mark.parametrize("architecture", ["llama", "qwen3"])
kinds = pytest.mark.parametrize(
    "architecture, page_size", [("llama", 1), ("llama", 4), ("llama", 16), ("qwen3", 4)]
)


@kinds
@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_oracle_accepts_every_draft(architecture, page_size, mode):
    """D = L + 1 in each of 20 rounds, and what is left behind is a plain run's KV."""
    rig = Rig(architecture, page_size)
    for index in range(20):
        before = committed(rig)
        reports = rig.round(mode)
        assert [len(report.emitted) for report in reports] == [BLOCK] * 3
        assert_node_logits(rig, reports, before, index % 3)
    rig.assert_true_outputs()
    rig.assert_committed_kv()


@kinds
@pytest.mark.parametrize("ranks", [SIBLINGS, PARTLY], ids=["siblings", "partly"])
def test_mixed_accepts_siblings(architecture, page_size, ranks):
    """20 rounds of branching trees: logits of all nodes, tokens and KV are a plain run's."""
    rig = Rig(architecture, page_size, ranks)
    siblings, lengths, moved = 0, set(), 0
    for index in range(20):
        before = committed(rig)
        reports = rig.round()
        assert_node_logits(rig, reports, before, index % 3)
        siblings += sum(map(accepted_siblings, reports))
        lengths |= {len(report.emitted) for report in reports}
        moved += sum(node != depth for r in reports for depth, node in enumerate(r.path))
    rig.assert_true_outputs()
    rig.assert_committed_kv()
    assert siblings >= 40 and moved >= 40, "too few siblings were accepted to show anything"
    if ranks is PARTLY:
        assert len(lengths) >= 4, "rounds should end at several depths"


@pages
def test_bad_drafts_are_rejected(page_size):
    """A random drafter's rounds emit the target's own token and leave a plain run's KV."""
    rig = Rig(page_size=page_size, ranks=None)
    for index in range(20):
        before = committed(rig)
        reports = rig.round()
        assert_node_logits(rig, reports, before, index % 3)
    rig.assert_true_outputs()
    rig.assert_committed_kv()


@architectures
def test_a_tree_of_two_mask_words(architecture):
    """More than 64 nodes: ancestor bits in the second word count, too."""
    rig = Rig(architecture, 4, SIBLINGS, nodes=97)
    for row in range(3):
        before = committed(rig)
        reports = rig.round()
        assert {report.num_nodes for report in reports} == {97}
        assert_node_logits(rig, reports, before, row)
    rig.assert_true_outputs()
    rig.assert_committed_kv()


def test_modes_may_alternate():
    """Chain and tree rounds may follow each other for the same rows."""
    rig = Rig(ranks=PARTLY)
    for mode in ("tree", "chain", "chain", "tree", "chain", "tree"):
        rig.round(mode)
    rig.assert_true_outputs()
    rig.assert_committed_kv()


# -- rows of different kinds in one batch ----------------------------------------------------------

KINDS = [*PROMPTS, PROMPTS[0], PROMPTS[2]]


def test_budgets_chain_and_off_rows_share_a_round():
    """Each row keeps its own budget; a plain row advances by one; a chain row is a path."""
    rig = Rig(ranks=None, prompts=KINDS, budgets=[16, 3, 0, 5, 1], chains=[3])
    known = answers("llama")
    follow = [known[0], known[1], known[2], known[0], known[2]]
    rig.machine.drafter.lookup = by_row(follow)
    rig.machine.drafter.ranks = SIBLINGS
    emitted = [0] * 5
    for index in range(20):
        before = committed(rig)
        reports = rig.round()
        assert_node_logits(rig, reports, before, index % 5)
        for row, report in enumerate(reports):
            emitted[row] += len(report.emitted)
        assert [report.num_nodes for report in reports] == [17, 4, 1, 6, 2]
        assert len(reports[2].emitted) == 1
        assert list(reports[3].parents) == [0, 0, 1, 2, 3, 4]
    for row, sequence in enumerate(follow):
        have = KINDS[row] + rig.outputs[row]
        assert have == sequence[: len(have)]
    rig.assert_committed_kv()
    assert emitted[0] > emitted[1] > emitted[4] > emitted[2] == 20


def test_padding_rows_change_nothing():
    """The spare slot's rows emit nothing and move nothing; real rows get the same tokens."""
    plain, padded = Rig(ranks=SIBLINGS), Rig(ranks=SIBLINGS)
    for _ in range(8):
        want = plain.round()
        got = padded.round(pad=3)
        assert [r.emitted for r in got[:3]] == [r.emitted for r in want]
        assert all(not report.emitted and report.status == ROW_RUNNING for report in got[3:])
    padded.assert_committed_kv()
    assert int(padded.rows.length[padded.spare]) == 0 and bool(padded.rows.done[padded.spare])
    null = slice(NULL_PAGE * 4, (NULL_PAGE + 1) * 4)
    assert not padded.machine.target_kv[:, null].any()
    assert not padded.machine.draft_kv[:, null].any()


@pages
@pytest.mark.parametrize("mode", ["off", "chain", "tree"])
def test_unused_slots_are_never_read(page_size, mode):
    """NaN in every slot that holds no committed token: not a bit of the result changes."""
    plain, poisoned = (Rig(page_size=page_size, ranks=SIBLINGS) for _ in range(2))
    for _ in range(8):
        poisoned.poison()
        want, got = plain.round(mode), poisoned.round(mode)
        assert got == want
        assert torch.equal(poisoned.target.hidden, plain.target.hidden)
    poisoned.poison()
    padded = poisoned.round(mode, pad=2)
    assert [r.emitted for r in padded[:3]] == [r.emitted for r in plain.round(mode)]


def test_a_plain_row_needs_no_context():
    """Whatever lies in a plain row's drafter context, its batch and itself go on as before."""
    rig = Rig(ranks=PARTLY, budgets=[16, 0, 16])
    rig.machine.draft_kv[:, rig.slots(1)] = torch.nan
    for _ in range(8):
        rig.round()
    rig.assert_true_outputs()
    assert len(rig.outputs[1]) == 9 and len(rig.outputs[0]) > 18


@pytest.mark.parametrize("mode", ["off", "chain", "tree"])
def test_a_finished_row_is_frozen(mode):
    """A done row emits nothing, keeps its length, anchor and committed KV; others go on."""
    rig = Rig(ranks=PARTLY)
    rig.round("tree")
    rig.rows.done[1] = True
    length, anchor, output = rig.length(1), int(rig.rows.anchor[1]), list(rig.outputs[1])
    slots = rig.slots(1)
    kept = [kv[:, slots].clone() for kv in (rig.machine.target_kv, rig.machine.draft_kv)]
    for _ in range(5):
        reports = rig.round(mode)
        assert reports[1].emitted == [] and reports[1].status == ROW_RUNNING
        assert reports[0].emitted and reports[2].emitted
    assert (rig.length(1), int(rig.rows.anchor[1]), rig.outputs[1]) == (length, anchor, output)
    assert bool(rig.rows.done[1])
    for kv, want in zip((rig.machine.target_kv, rig.machine.draft_kv), kept):
        assert torch.equal(kv[:, slots], want)
    rig.assert_true_outputs()


# -- ends in the middle of an accepted path --------------------------------------------------------


def _fresh_tokens():
    """Per row, indices 1 to 5 of the output whose tokens did not occur before."""
    outputs = [a[len(p) :] for a, p in zip(answers("llama"), PROMPTS)]
    return outputs, [[i for i in range(1, 6) if o.index(o[i]) == i] for o in outputs]


@pytest.mark.parametrize("mode", ["chain", "tree"])
@pytest.mark.parametrize("row", range(3))
def test_the_earliest_end_wins(mode, row):
    """A stop id or the limit inside an accepted path cuts it; on the same token it's a stop."""
    outputs, fresh = _fresh_tokens()
    prompt, output = PROMPTS[row], outputs[row]
    cases = [(at, room) for at in fresh[row] for room in range(1, 8)]
    assert len({at for at, _ in cases}) >= 3
    rig = Rig(
        prompts=[prompt] * len(cases),
        limits=[len(prompt) + 1 + room for _, room in cases],
        stops=[[97, output[at]] for at, _ in cases],
    )
    reports = rig.round(mode)
    for index, ((at, room), report) in enumerate(zip(cases, reports, strict=True)):
        count = min(at, room, BLOCK)
        assert report.emitted == output[1 : 1 + count]
        ends = ROW_LENGTH if room == count else ROW_RUNNING
        assert report.status == (ROW_STOPPED if at == count else ends)
        assert bool(rig.rows.done[index]) == (report.status != ROW_RUNNING)
        assert rig.length(index) == len(prompt) + count
        assert int(rig.rows.anchor[index]) == output[count]
    again = rig.round(mode)
    for first, second in zip(reports, again):
        assert bool(second.emitted) == (first.status == ROW_RUNNING)


def test_rows_end_independently():
    """In one round one row stops, one reaches its limit, and one goes on."""
    outputs, fresh = _fresh_tokens()
    at = fresh[0][1]
    rig = Rig(limits=[FAR, len(PROMPTS[1]) + 3, FAR], stops=[[outputs[0][at]]])
    reports = rig.round()
    assert [r.status for r in reports] == [ROW_STOPPED, ROW_LENGTH, ROW_RUNNING]
    assert [len(r.emitted) for r in reports] == [at, 2, BLOCK]
    again = rig.round()
    assert [len(r.emitted) for r in again] == [0, 0, BLOCK]
    rig.assert_true_outputs()
    rig.assert_committed_kv()


def test_the_first_token_may_end_a_row():
    """A stop id or the limit may be reached by prefill's own token."""
    first = answers("llama")[0][len(PROMPTS[0])]
    for limit, stop, status in (
        (FAR, first, ROW_STOPPED),
        (8, 96, ROW_LENGTH),
        (8, first, ROW_STOPPED),
    ):
        rig = Rig(prompts=PROMPTS[:1])
        rig.rows.limit[0], rig.rows.stop_ids[0, 3] = limit, stop
        hidden = torch.zeros(1, 1, 64)
        with torch.inference_mode():
            hidden = prefill_step(
                rig.machine, rig.rows, torch.tensor([0]), torch.tensor([PROMPTS[0]]), 0, 64, False
            )
            got = start_row(rig.machine, rig.rows, torch.tensor([0]), 7, hidden)
        assert got.tolist() == [first, status] and bool(rig.rows.done[0])


def test_taps_are_the_drafters():
    """The features that feed the drafter's context are those of the layers it names."""
    assert Rig().machine.taps == TINY_TAPS
