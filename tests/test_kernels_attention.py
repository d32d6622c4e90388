"""Attention over pages, in the interpreter: against float64 and the torch ops, unused slots NaN."""

import contextlib
import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch
from kernel_tools import interpreted

from ddtree.kernels.attention import paged_attention
from ddtree.kernels.paged_plan import Chip, PagedPlan, check_plan, choose_splits, choose_tile
from ddtree.kernels.reference import NULL_PAGE, TorchOps
from ddtree.tree import build_tree

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
CAUSAL, FULL, TREE = ("causal", 0), ("full", 0), ("tree", 0)


@dataclass(frozen=True)
class Case:
    """One launch; a context of -1 is a padding row, whose block table is all dummy page."""

    view: tuple
    contexts: tuple
    tokens: int
    heads: tuple
    """Of queries, of keys."""
    dim: int = 64
    page: int = 16
    dtype: str = "fp32"
    splits: int = 1
    shape: str = "real"

    def __str__(self):
        (kind, window), (q, kv) = self.view, self.heads
        shape = f"-{self.shape}" if kind == "tree" else f"-window{window}" if window else ""
        contexts = ".".join(map(str, self.contexts))
        rest = f"{q}over{kv}-dim{self.dim}-page{self.page}-{self.dtype}-splits{self.splits}"
        return f"{kind}{shape}-{contexts}+{self.tokens}-{rest}"


def parents_of(shape, nodes, rng):
    """A tree as its nodes' parents; each parent comes first."""
    if shape == "real":
        depth = 6
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        weights = torch.randn(1, depth, 40, generator=generator).log_softmax(-1)
        weights = weights.sort(dim=-1, descending=True).values
        ids = torch.arange(40).expand(1, depth, 40)
        return build_tree(torch.zeros(1, dtype=torch.int64), ids, weights, nodes).parents[0]
    parent = {
        "chain": lambda node: node - 1,
        "star": lambda node: 0,
        "comb": lambda node: node - 1 if node % 2 else max(node - 2, 0),
        "random": lambda node: rng.randrange(node),
        # Ancestors on both sides of the words' edges.
        "late": lambda node: 63 if node > 63 else node - 1,
    }[shape]
    return torch.tensor([0] + [parent(node) for node in range(1, nodes)])


def bits_of(parents):
    """Ancestor-or-self words [N, W] of `parents`, by Python's integers."""
    nodes = len(parents)
    paths = []
    for node, parent in enumerate(parents.tolist()):
        paths.append(1 << node | (paths[parent] if node else 0))
    words = [[path >> at & 2**64 - 1 for at in range(0, nodes, 64)] for path in paths]
    return torch.tensor([[w - 2**64 if w >> 63 else w for w in row] for row in words])


def visible_keys(view, context, tokens, words):
    """[T, context + T] bool, by the definition of the views."""
    kind, window = view
    mask = torch.zeros(tokens, context + tokens, dtype=torch.bool)
    for token in range(tokens):
        for key in range(context + tokens):
            own = key - context
            seen = own < 0 or kind == "full" or (kind == "causal" and own <= token)
            if kind == "tree" and own >= 0:
                seen = bool(int(words[token, own // 64]) >> own % 64 & 1)
            mask[token, key] = seen and not (window and key <= context + token - window)
    return mask


def make(case, seed=0):
    """Tensors of a launch, with NaN in every slot that no token of it owns."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dtype, (q_heads, kv_heads) = DTYPES[case.dtype], case.heads
    batch = len(case.contexts)
    width = max(-(-(context + case.tokens) // case.page) for context in case.contexts) + 1
    pages = list(range(2, 2 + batch * width))
    rng.shuffle(pages)
    table = torch.zeros(batch, width, dtype=torch.int64)
    kv = torch.full((case.page * (2 + batch * width), 2, kv_heads, case.dim), math.nan)
    kv = kv.to(dtype)
    slots = []
    for row, context in enumerate(case.contexts):
        if context < 0:
            slots.append(None)
            continue
        length = context + case.tokens
        for at in range(-(-length // case.page)):
            table[row, at] = pages.pop()
        slots.append(
            [int(table[row, at // case.page]) * case.page + at % case.page for at in range(length)]
        )
        kv[slots[-1]] = torch.randn(length, *kv.shape[1:], generator=generator).to(dtype)
    # As the engine hands them over: the first heads of a wider matrix product, and columns of
    # the rows' state.
    wide = torch.randn(batch, case.tokens, q_heads + 2, case.dim, generator=generator)
    q = wide.to(dtype)[:, :, :q_heads]
    lengths = torch.tensor(case.contexts).clamp_min(0)
    state = torch.cat((lengths[:, None], torch.full((batch, 2), 1 << 40), table), 1)
    prefix, table = state[:, 0], state[:, 3:]
    words = None
    if case.view == TREE:
        trees = [bits_of(parents_of(case.shape, case.tokens, rng)) for _ in range(batch)]
        words = torch.stack(trees)
    return q, kv, table, prefix, words, slots


def oracle(case, q, kv, words, slots):
    """Rows `[B, T, Hq, D]` in float64; padding rows are None."""
    group = case.heads[0] // case.heads[1]
    rows = []
    for row, mine in enumerate(slots):
        if mine is None:
            rows.append(None)
            continue
        tree = None if words is None else words[row]
        mask = visible_keys(case.view, case.contexts[row], case.tokens, tree)
        k, v = (kv[mine, i].double().repeat_interleave(group, 1) for i in (0, 1))
        scores = torch.einsum("thd,shd->hts", q[row].double(), k) * case.dim**-0.5
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        rows.append(torch.einsum("hts,shd->thd", weights, v))
    return rows


def run(case, q, kv, table, prefix, words):
    rows = case.tokens * case.heads[0] // case.heads[1]
    tiles = -(-rows // choose_tile(rows, case.dim, q.element_size(), Chip()).rows)
    programs = tiles * len(case.contexts) * case.heads[1] * case.splits
    return paged_attention(
        q, kv, table, prefix, words, case.page, *case.view, case.dim**-0.5, programs
    )


def check(case, seed=0):
    """The kernel's largest error is at most twice that of the torch ops, at the same dtype."""
    q, kv, table, prefix, words, slots = make(case, seed)
    exact = oracle(case, q, kv, words, slots)
    out = run(case, q, kv, table, prefix, words)
    ops = TorchOps(CPU)
    ops.sees_values = False
    clean = kv.nan_to_num(0.0)
    assert not clean[NULL_PAGE * case.page : (NULL_PAGE + 1) * case.page].any()
    plan = ops.plan_attention(table, prefix, case.tokens, case.page, (case.view,), words)
    twin = ops.attention(q, clean, plan, case.view, case.dim**-0.5)
    assert out.shape == twin.shape and out.dtype == twin.dtype and out.is_contiguous()
    for row, truth in enumerate(exact):
        if truth is None:
            continue
        error = (out[row].double() - truth).abs().max()
        allowed = 2 * (twin[row].double() - truth).abs().max()
        # Where torch happens to be exact: the rounding of one number of the result's size.
        allowed += torch.finfo(out.dtype).eps / 2 * truth.abs().max()
        assert error <= allowed, (row, error, allowed)


FEW = [
    Case(CAUSAL, (0,), 1, (1, 1), 64, 1),
    Case(CAUSAL, (15, 0, -1, 33), 3, (4, 2), 128, 16, "fp16", 3),
    Case(CAUSAL, (1, 64), 9, (8, 1), 80, 32, "fp32", 2),
    Case(CAUSAL, (47,), 50, (2, 2), 64, 16, "fp16"),
    Case(("causal", 5), (0, 40), 11, (4, 1), 64, 4, "fp32", 2),
    Case(("causal", 70), (130,), 6, (2, 1), 96, 64, "fp16", 3),
    Case(FULL, (16, -1, 3), 16, (2, 2), 64, 8, "fp32", 4),
    Case(("full", 9), (31, 2), 16, (8, 2), 128, 16, "fp16", 1),
    Case(TREE, (17, 0), 16, (4, 1), 64, 2, "fp32", 3),
    Case(TREE, (48, -1), 70, (2, 1), 128, 16, "fp16", 2, "random"),
    Case(TREE, (5,), 66, (1, 1), 96, 256, "fp32", 1, "late"),
    Case(TREE, (33,), 64, (2, 1), 80, 16, "fp16", 1, "comb"),
    Case(TREE, (2,), 7, (2, 1), 256, 1, "fp16", 2, "star"),
]


@pytest.mark.parametrize("case", FEW, ids=str)
@interpreted
def test_against_float64_and_torch(case):
    check(case)


def many():
    """Settings drawn so that every value of each meets many of the others'."""
    rng = random.Random(6)
    shapes = ("real", "chain", "star", "comb", "random", "late")
    dims, groups, pages = (64, 80, 96, 128, 256), (1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64, 128, 256)
    views = (CAUSAL, ("causal", 3), ("causal", 40), FULL, ("full", 20), TREE, TREE, TREE)
    for index in range(96):
        page = pages[index % len(pages)]
        around = [max(n * page + d, 0) for n in range(4) for d in (-1, 0, 1) if n * page + d < 200]
        contexts = [rng.choice(around) for _ in range(rng.choice((1, 2, 3)))]
        if index % 5 == 0:
            contexts.append(-1)
        kv_heads, group = rng.choice((1, 2)), groups[index % 4]
        yield Case(
            views[index % len(views)],
            tuple(contexts),
            rng.choice((1, 2, 5, 15, 16, 17, 31, 63, 64, 65, 70)),
            (kv_heads * group, kv_heads),
            dims[index % 5],
            page,
            ("fp32", "fp16")[index // 2 % 2],
            rng.choice((1, 1, 2, 5)),
            rng.choice(shapes),
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", many(), ids=str)
@interpreted
def test_against_float64_and_torch_widely(case):
    check(case, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@interpreted
def test_every_number_of_nodes(group):
    for nodes in range(1, 71):
        case = Case(TREE, (nodes % 7,), nodes, (group, 1), 64, 4, "fp32", 1 + nodes % 2, "random")
        check(case, seed=nodes)


@interpreted
def test_a_token_that_sees_nothing_gives_zeros():
    """No view of ours has one; but an empty softmax must not make NaN of a whole tile."""
    case = Case(TREE, (0,), 5, (2, 1), 64, 4)
    for splits in (1, 2):
        q, kv, table, prefix, words, _ = make(case)
        words[0, 2] = 0
        out = run(Case(TREE, (0,), 5, (2, 1), 64, 4, splits=splits), q, kv, table, prefix, words)
        assert not out[0, 2].any() and out[0, [0, 1, 3, 4]].isfinite().all()


@interpreted
def test_padding_rows_change_nothing():
    """Rows of the dummy page, full of NaN, beside others: those are the same bit for bit."""
    alone = Case(CAUSAL, (18,), 4, (4, 2), 64, 8, splits=2)
    q, kv, table, prefix, _, _ = make(alone)
    out = run(alone, q, kv, table, prefix, None)
    padded = Case(CAUSAL, (18, -1, -1), 4, (4, 2), 64, 8, splits=2)
    table = torch.cat((table, torch.zeros(2, table.shape[1], dtype=torch.int64)))
    prefix = torch.cat((prefix, torch.zeros(2, dtype=torch.int64)))
    both = run(padded, torch.cat((q, q, q)), kv, table, prefix, None)
    assert torch.equal(both[:1], out)


@interpreted
def test_a_wide_table_is_read_as_far_as_the_row_goes():
    """Captured rounds get whole tables: entries past the row may be any page, even none of ours."""
    case = Case(CAUSAL, (53, 3), 4, (2, 1), 64, 4, splits=3)
    q, kv, table, prefix, _, _ = make(case)
    narrow = run(case, q, kv, table, prefix, None)
    wide = torch.full((2, 64), 1 << 40)
    for row, context in enumerate(case.contexts):
        used = -(-(context + 4) // 4)
        wide[row, :used] = table[row, :used]
    torch.testing.assert_close(run(case, q, kv, wide, prefix, None), narrow, atol=1e-6, rtol=0)


@contextlib.contextmanager
def counted(pool):
    """How often each slot's key is loaded from `pool`, summed over the key's numbers."""
    from triton.runtime.interpreter import interpreter_builder

    loads = torch.zeros(pool.shape[0], dtype=torch.int64)
    inside = interpreter_builder.create_masked_load

    def load(pointers, mask, *args):
        offsets = torch.tensor(pointers.data[mask.data].astype("int64")) - pool.data_ptr()
        offsets = offsets[(offsets >= 0) & (offsets < pool.numel() * pool.element_size())]
        slots = offsets // (pool.stride(0) * pool.element_size())
        loads.index_add_(0, slots, torch.ones_like(slots))
        return inside(pointers, mask, *args)

    interpreter_builder.create_masked_load = load
    try:
        yield loads
    finally:
        del interpreter_builder.create_masked_load


@pytest.mark.parametrize("splits", [1, 3])
@interpreted
def test_keys_are_read_once_for_all_nodes_of_a_tile(splits):
    """Each key of the row, and no other slot, once per tile: heads of a group share it."""
    case = Case(TREE, (37, 5), 8, (8, 2), 64, 4, splits=splits)
    tiles = 8 * 4 // choose_tile(8 * 4, 64, 4, Chip()).rows
    assert tiles == 2
    q, kv, table, prefix, words, slots = make(case)
    with counted(kv) as loads:
        run(case, q, kv, table, prefix, words)
    expected = torch.zeros_like(loads)
    expected[[slot for mine in slots for slot in mine]] = tiles * kv[0].numel()
    assert torch.equal(loads, expected)


@interpreted
def test_a_window_reads_no_more_than_its_blocks():
    """A sliding window of 20 over 90 keys: at most a block more than tokens and window span."""
    case = Case(("causal", 20), (90,), 4, (1, 1), 64, 4)
    q, kv, table, prefix, words, slots = make(case)
    with counted(kv) as loads:
        run(case, q, kv, table, prefix, words)
    read = loads[slots[0]] // kv[0].numel()
    assert read.max() == 1 and not read[: 90 - 19 - 16].any() and read[90 - 19 :].all()


@interpreted
def test_the_op_s_schema_and_fake():
    case = Case(TREE, (5, 9), 6, (4, 2), 64, 4)
    q, kv, table, prefix, words, _ = make(case)
    args = (q, kv, table, prefix, words, 4, "tree", 0, 0.125, 132)
    torch.library.opcheck(paged_attention, args, test_utils=("test_schema", "test_faketensor"))


BAD = {
    "block_table": {"table": torch.zeros(3, 2, dtype=torch.int64)},
    "block_table, float": {"table": torch.zeros(2, 2)},
    "block_table, short": {"table": torch.zeros(2, 0, dtype=torch.int64)},
    "block_table, strided": {"table": torch.zeros(2, 4, dtype=torch.int64)[:, ::2]},
    "prefix_len": {"prefix": torch.zeros(2)},
    "words": {"kind": "tree", "words": torch.zeros(2, 2, 1, dtype=torch.int64)},
    "words, bool": {"kind": "tree", "words": torch.zeros(2, 3, 1, dtype=torch.bool)},
    "words, none": {"kind": "tree"},
    "page_size": {"page": 12},
    "views": {"window": -1},
    "kv_layer": {"kv": torch.zeros(64, 2, 2, 64, dtype=torch.float16)},
    "q": {"q": torch.zeros(2, 3, 64, 4).transpose(2, 3)},
    "views, kind": {"kind": "sideways"},
}


@pytest.mark.parametrize("name", [*BAD, "heads", "size", "bfloat16"])
def test_what_does_not_fit_is_named(name):
    given = {
        "q": torch.zeros(2, 3, 4, 64),
        "kv": torch.zeros(64, 2, 2, 64),
        "table": torch.zeros(2, 2, dtype=torch.int64),
        "prefix": torch.zeros(2, dtype=torch.int64),
        "words": None,
        "page": 16,
        "kind": "causal",
        "window": 0,
    } | BAD.get(name, {})
    name = name.split(",")[0]
    if name == "heads":
        name, given["kv"] = "kv_layer", torch.zeros(64, 2, 3, 64)
    elif name == "size":
        name, given["q"], given["kv"] = "q", torch.zeros(2, 3, 4, 20), torch.zeros(64, 2, 2, 20)
    elif name == "bfloat16":
        name, given["q"], given["kv"] = "q", given["q"].bfloat16(), given["kv"].bfloat16()
    q, kv, table, prefix, words, *rest = given.values()
    page, kind, window = rest
    with pytest.raises(ValueError, match=f"^{name}: "):
        paged_attention(q, kv, table, prefix, words, page, kind, window, 1.0, 132)


def test_plans_are_checked():
    table, prefix = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    words = torch.zeros(2, 65, 2, dtype=torch.int64)
    check_plan(PagedPlan(table, prefix, words, 65, 16, (CAUSAL, TREE)))
    for name, plan in {
        "block_table": PagedPlan(table[0], prefix, None, 4, 16, (CAUSAL,)),
        "prefix_len": PagedPlan(table, prefix[:1], None, 4, 16, (CAUSAL,)),
        "page_size": PagedPlan(table, prefix, None, 4, 12, (CAUSAL,)),
        "views": PagedPlan(table, prefix, None, 4, 16, (("tree", 4),)),
        "words": PagedPlan(table, prefix, words, 64, 16, (TREE,)),
    }.items():
        with pytest.raises(ValueError, match=f"^{name}: "):
            check_plan(plan)


def test_launches_fill_the_device_whatever_the_context():
    """Splits come from shapes; together they are neither far too few programs nor too many."""
    for batch, tiles, blocks in itertools.product((1, 2, 8, 64), (1, 2, 8, 64), (1, 3, 130, 700)):
        programs = batch * tiles * 8
        splits = choose_splits(programs, batch, blocks, 132)
        assert 1 <= splits <= blocks
        assert splits == 1 or programs * splits <= 2 * 132
        assert programs * (splits + 1) > 132 or splits == blocks
