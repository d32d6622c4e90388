"""Ranks that share a model say what one rank would: shards, plans on the wire, whole engines."""

import itertools

import pytest
import torch
from fixtures import make_drafter, make_target, tiny_target
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_threads
from stubs import Agreement, Stub, cases, check_engines, known, tiny_engine, watch

from ddtree import Engine, SamplingParams
from ddtree.kernels import get_ops
from ddtree.kernels.sampling import rank_candidates, token_logprobs
from ddtree.kernels.shards import (
    chosen_ids,
    chosen_values,
    local_candidates,
    local_logprobs,
    merge_candidates,
    merge_logprobs,
    pack_candidates,
    pack_choices,
)
from ddtree.models.registry import build_target
from ddtree.parallel import SINGLE, Parallel
from ddtree.runtime.plan import (
    DecodeRow,
    DecodeSpec,
    Join,
    Level,
    PageEdit,
    Plan,
    PrefillChunk,
    SamplingRow,
)
from ddtree.runtime.wire import decode_plan, encode_plan
from ddtree.state import FLOATS

CPU = torch.device("cpu")
OPS = get_ops("torch", CPU)


class Rank(Parallel):
    """A rank that has nobody to talk to."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


# -- parts ----------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 16))
def test_parts_cover_a_dimension_once(units, unit, size):
    parts = [Rank(rank, size).part(units * unit, unit) for rank in range(size)]
    assert [i for part in parts for i in range(part.total)[part.slice]] == list(range(units * unit))
    assert all(part.size % unit == 0 for part in parts)
    assert max(part.size for part in parts) - min(part.size for part in parts) <= unit
    assert max(Rank(0, size).part(units).size for _ in "x") <= Rank(0, size).widest(units)


def test_key_value_heads_are_shared_by_the_ranks_whose_queries_need_them():
    for heads, kv_heads, size in (
        (8, 2, 2),
        (8, 2, 4),
        (8, 2, 8),
        (32, 8, 16),
        (9, 3, 3),
        (8, 8, 4),
    ):
        for rank in range(size):
            own = Rank(rank, size)
            queries, keys = own.part(heads * 16, 16), own.kv_part(kv_heads, 16)
            wanted = {q // (heads // kv_heads) for q in range(heads)[slice(*_heads(queries))]}
            assert wanted == set(range(kv_heads)[slice(*_heads(keys))])


def _heads(part):
    return part.start // 16, (part.start + part.size) // 16


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (3, {}, "target: num_attention_heads 8 cannot be divided among 3 ranks"),
        (
            4,
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 48},
            "target: num_key_value_heads 3 cannot be divided among, or shared by, 4 ranks",
        ),
        (8, {"vocab_size": 7, "pad_token_id": 0}, "target: vocab_size 7 is too small for 8 ranks"),
        (8, {"intermediate_size": 4}, "target: intermediate_size 4 is too small for 8 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(size, changes, message):
    folder = make_target(eos=3, **({"eos_token_id": 3} if changes else {}), **changes)
    with pytest.raises(ValueError, match=message):
        build_target(folder, OPS, CPU, torch.float32, parallel=Rank(1, size))


def test_a_drafter_that_cannot_be_divided_is_refused():
    folder = make_drafter(tiny_target(), num_attention_heads=2)
    with pytest.raises(ValueError, match="draft: num_attention_heads 2 cannot be divided among 4"):
        run_threads(4, lambda rank: Engine(str(tiny_target()), str(folder), process_group=rank))


def test_rejection_runs_on_one_rank_only():
    with pytest.raises(ValueError, match='verify: "rejection" runs on one rank only, here are 2'):
        run_threads(2, lambda rank: tiny_engine(process_group=rank, verify="rejection"))


@pytest.mark.parametrize("tokens", [range(0, 101, 7), [3, 4, 9]], ids=["spread", "first"])
def test_drafters_of_some_tokens_run_on_several_ranks(tokens):
    """In the second case only one rank has any of them."""
    draft = str(make_drafter(tiny_target(), draft_tokens=list(tokens)))
    asked = [
        SamplingParams(max_new_tokens=12, trace=True),
        SamplingParams(max_new_tokens=12, trace=True, temperature=0.9, seed=4),
        SamplingParams(max_new_tokens=12, trace=True, speculation="chain", temperature=0.9, seed=4),
    ]

    def answers(**options):
        with tiny_engine(draft=draft, budget=7, **options) as engine:
            outputs = engine.generate([[5, 6, 7]] * 3, asked)
        return [(o.token_ids, [r.tokens for r in o.trace or ()]) for o in outputs]

    alone = answers()
    nodes = {t for _, rounds in alone for r in rounds for t in r[1:]}
    assert nodes <= set(tokens)
    for found in run_threads(2, lambda rank: answers(process_group=rank)):
        assert found == alone


def test_ranks_leave_the_same_nodes_out():
    asked = [
        SamplingParams(max_new_tokens=12, trace=True),
        SamplingParams(max_new_tokens=12, trace=True, temperature=0.9, seed=4),
    ]

    def answers(**options):
        with tiny_engine(budget="auto", max_batch_size=1, **options) as engine:
            outputs = engine.generate([[5, 6, 7], [8, 9]], asked)
        return [(o.token_ids, [r.tokens for r in o.trace]) for o in outputs]

    alone = answers()
    assert len({len(tokens) for _, rounds in alone for tokens in rounds}) > 1
    for found in run_threads(2, lambda rank: answers(process_group=rank)):
        assert found == alone


# -- the vocabulary in shards ---------------------------------------------------------------------


def shards(x, size):
    """(first id, columns) of each shard."""
    parts = [Rank(rank, size).part(x.shape[-1]) for rank in range(size)]
    return [(part.start, x[..., part.slice].contiguous()) for part in parts]


def test_choices_of_shards_are_those_of_the_whole():
    """Ties go to the smallest id, across shards too; -0 ties with +0."""
    generator = torch.Generator().manual_seed(0)
    for case in range(40):
        x = torch.randint(-3, 4, (5, 23), generator=generator).float()
        if case % 4 == 0:
            x = torch.where(x > 0, -0.0, x).where(torch.rand(5, 23, generator=generator) < 0.5, 0.0)
        if case % 4 == 1:
            x[:, 3:] = -torch.inf
        for size in (2, 3, 7):
            packed = torch.stack([OPS.local_choice(part, first) for first, part in shards(x, size)])
            best = packed.amax(0)
            assert torch.equal(chosen_ids(best), x.argmax(-1))
            assert torch.equal(chosen_values(best), x.amax(-1) + 0.0)


def test_packed_choices_sort_by_value_then_by_smallest_id():
    values = torch.tensor([-torch.inf, -2.5, -0.0, 0.0, 1e-30, 3.0, torch.inf])
    ids = torch.tensor([0, 5, 150_000])
    packed = pack_choices(values[:, None].expand(-1, 3), ids.expand(7, -1))
    order = [(float(v), -int(i)) for v in values for i in ids]
    flat = packed.flatten().tolist()
    assert [order[i] for i in sorted(range(21), key=flat.__getitem__)] == sorted(order)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("size", [2, 5])
def test_candidates_of_shards_are_those_of_the_whole(coupled, size):
    generator = torch.Generator().manual_seed(1)
    for vocab, count in ((23, 4), (23, 23), (101, 64), (11, 7)):
        logits = 3 * torch.randn(3, 4, vocab, generator=generator)
        temperature = torch.tensor([0.0, 0.7, 1.3])
        noise = alpha = scale = None
        if coupled:
            noise = torch.randn(3, 4, vocab, generator=generator) * temperature[:, None, None]
            alpha, scale = torch.tensor([1.0, 0.9, 0.8, 1.1]), torch.tensor([2.0, 1.5, 1.0, 3.0])
        want = rank_candidates(logits, temperature, count, noise, alpha, scale)
        width = min(count, Rank(0, size).widest(vocab))
        sent = []
        for first, part in shards(logits, size):
            own = None if noise is None else noise[..., first : first + part.shape[2]]
            found = local_candidates(part, temperature, count, first, own, alpha)
            sent.append(pack_candidates(*found, width))
        ids, weights = merge_candidates(torch.stack(sent), temperature, count, scale)
        assert torch.equal(ids, want[0])
        assert torch.allclose(weights, want[1], atol=2e-6)


def test_logprobs_of_shards_are_those_of_the_whole():
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(2, 6, 23, generator=generator)
    chosen = torch.randint(23, (2, 6), generator=generator)
    for size, count in ((2, 5), (7, 20), (3, 23), (2, 0)):
        width = min(count, Rank(0, size).widest(23))
        sent = [local_logprobs(x, chosen, count, first, width) for first, x in shards(logits, size)]
        found = merge_logprobs(torch.stack(sent), count)
        for got, want in zip(found, token_logprobs(logits, chosen, count), strict=True):
            assert torch.allclose(got.double(), want.double(), atol=2e-6)


# -- plans on the wire ----------------------------------------------------------------------------

numbers = st.integers(0, 2**62)
floats = st.floats(allow_nan=False)
rows = st.builds(
    SamplingRow,
    level=st.builds(Level, st.integers(0, Level(~Level.GREEDY).value)),
    seed=st.integers(-(2**63), 2**63 - 1),
    **dict.fromkeys(FLOATS, floats),
    top_k=numbers,
    min_end=numbers,
    bias=st.lists(st.tuples(numbers, floats), max_size=3).map(tuple),
)
plans = st.builds(
    Plan,
    joins=st.lists(
        st.builds(
            Join,
            slot=numbers,
            limit=numbers,
            budget=numbers,
            chain=st.booleans(),
            stop_ids=st.lists(numbers, max_size=3).map(tuple),
            sampling=rows,
        ),
        max_size=2,
    ),
    edits=st.lists(
        st.builds(PageEdit, slot=numbers, start=numbers, pages=st.lists(numbers, max_size=4)),
        max_size=3,
    ),
    prefills=st.lists(
        st.builds(
            PrefillChunk,
            request_id=numbers,
            epoch=numbers,
            slot=numbers,
            start=numbers,
            tokens=st.lists(numbers, max_size=5),
            context=st.booleans(),
            last=st.booleans(),
            anchor=st.none() | numbers,
            table_width=numbers,
            level=st.sampled_from([Level.GREEDY, Level.FULL, Level.FULL | Level.LOGPROBS]),
            prompt_len=numbers,
        ),
        max_size=2,
    ),
    rows=st.lists(st.builds(DecodeRow, numbers, numbers, numbers), max_size=4),
    spec=st.none()
    | st.builds(
        DecodeSpec,
        mode=st.sampled_from(["off", "chain", "tree"]),
        num_nodes=numbers,
        path_len=numbers,
        level=st.sampled_from([Level.GREEDY, Level.NOISE, Level.FULL]),
    ),
    table_width=numbers,
)


@given(plans)
def test_a_plan_travels_unchanged(plan):
    sent = encode_plan(plan)
    assert all(type(value) is int and -(2**63) <= value < 2**63 for value in sent)
    assert decode_plan(sent) == plan


# -- engines --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def pages_free():
    yield
    check_engines()


SAMPLED = {"temperature": 1.0, "seed": 11, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
EVERYTHING = SAMPLED | {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {3: 2.0, 60: -100.0, 100: 1.5},
    "min_new_tokens": 6,
    "logprobs": 4,
}
PARAMS = [{}, {"temperature": 0.8, "seed": 3}, SAMPLED, EVERYTHING]


def run_all(engine, batch, count=16):
    """Outputs of the first cases in every mode, with all kinds of parameters mixed in a batch."""
    prompts = [case.prompt for case in cases()[:batch]]
    found = []
    for mode, shift in itertools.product(("off", "chain", "tree"), range(1 if batch > 1 else 4)):
        params = [
            SamplingParams(max_new_tokens=count, speculation=mode, **PARAMS[(i + shift) % 4])
            for i in range(batch)
        ]
        found += engine.generate(prompts, params)
    return found


def content(outputs):
    return [(o.token_ids, o.finish_reason, o.seed) for o in outputs]


@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (4, "llama"),
        pytest.param(2, "llama", marks=pytest.mark.slow),
        pytest.param(2, "qwen3", marks=pytest.mark.slow),
        pytest.param(4, "qwen3", marks=pytest.mark.slow),
    ],
)
def test_ranks_say_what_one_says(size, kind):
    """Off, chain, tree; greedy, sampled, everything; batch 1 and 4; a vocabulary of 101."""
    alone = tiny_engine(kind, max_batch_size=4)
    want = [run_all(alone, batch) for batch in (1, 4)]

    def rank(parallel):
        engine = watch(tiny_engine(kind, max_batch_size=4, process_group=parallel))
        assert engine.describe()["tensor_parallel_size"] == size
        heads = engine._target.layers[0].attention
        assert (heads.heads, heads.kv_heads) == (8 // size, 1)
        return [run_all(engine, batch) for batch in (1, 4)]

    agreement = Agreement()
    for found in run_threads(size, rank):
        for got, expected in zip(found, want, strict=True):
            assert content(got) == content(expected)
            for one, other in zip(got, expected, strict=True):
                assert one.stats.rounds == other.stats.rounds
                for a, b in zip(one.logprobs or (), other.logprobs or (), strict=True):
                    assert a.keys() == b.keys()
                    assert all(abs(a[token] - b[token]) < 1e-4 for token in a)
    assert not agreement.ties


def test_drafts_are_accepted_on_two_ranks_as_on_one():
    """ORACLE and MIXED: long paths, sibling acceptance, KV moved on every rank."""

    whole = tiny_engine()._target

    def run(engine, ranks):
        stub = Stub(whole, engine._drafter, known(), ranks)
        object.__setattr__(engine._loop.runner.machine, "drafter", stub)
        prompts = [case.prompt for case in cases()[:3]]
        outputs = engine.generate(prompts, SamplingParams(max_new_tokens=24))
        return [(o.token_ids, o.stats.rounds) for o in outputs]

    for ranks in ((0,), (0, 1, 0, 1, 1)):
        found = run_threads(
            2, lambda parallel, ranks=ranks: run(tiny_engine(process_group=parallel), ranks)
        )
        wants = [case.answer[:24] for case in cases()[:3]]
        for outputs in found:
            assert [tokens for tokens, _ in outputs] == wants
            assert sum(rounds for _, rounds in outputs) < 0.4 * sum(map(len, wants))


def test_streams_chats_and_errors_are_the_same_on_all_ranks():
    prompt = cases()[0].prompt

    def rank(parallel):
        engine = tiny_engine(process_group=parallel, num_pages=24)
        found = []
        one, two = (engine.stream(prompt, SamplingParams(max_new_tokens=n)) for n in (9, 5))
        for first, second in itertools.zip_longest(one, two):
            found.append([d and (d.text, d.token_ids) for d in (first, second)])
        early = engine.stream(prompt, SamplingParams(max_new_tokens=20))
        found.append(next(early).token_ids)
        early.close()
        for bad in ([[3, 500]], [3.5], "text", [[]]):
            with pytest.raises(ValueError) as caught:
                engine.generate(bad)
            found.append(str(caught.value))
        with pytest.raises(ValueError, match="num_pages"):
            engine.generate(prompt, SamplingParams(max_new_tokens=400))
        found.append(content(engine.generate([prompt] * 4, SamplingParams(max_new_tokens=40))))
        # No seed given: rank 0 draws it, and all ranks report it.
        (drawn,) = engine.generate(prompt, SamplingParams(temperature=1.0, max_new_tokens=5))
        found.append((drawn.token_ids, drawn.seed))
        found.append(engine.generate([]))
        engine.close()
        with pytest.raises(RuntimeError, match="closed"):
            engine.generate(prompt)
        return found

    one, two = run_threads(2, rank)
    assert one == two
    assert one[0][0][1] == cases()[0].answer[:1]


# -- ties and perturbations -----------------------------------------------------------------------


def duplicated(folder):
    """TINY whose head has every row of the first half again in the second."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    head = tensors["lm_head.weight"].clone()
    head[51:] = head[:50]
    save_file(tensors | {"lm_head.weight": head}, path, metadata={"format": "pt"})
    return folder


def test_equal_rows_on_two_ranks_give_the_smallest_id():
    """And a rank whose logits are a little off makes no rank wait, and none differ."""
    folder = duplicated(make_target(tie_word_embeddings=False))
    draft = make_drafter(folder)
    prompts = [case.prompt for case in cases()[:3]]

    def run(parallel, off):
        engine = watch(Engine(str(folder), str(draft), budget=16, process_group=parallel))
        if off and parallel.rank == 1:
            logits = engine._target.logits
            engine._target.logits = lambda hidden: logits(hidden) + off
        params = [
            SamplingParams(max_new_tokens=20, ignore_eos=True, speculation=mode, **sampled)
            for mode in ("off", "chain", "tree")
            for sampled in ({}, {"temperature": 0.9, "seed": 4})
        ]
        found = [o.token_ids for p in params for o in engine.generate(prompts, p)]
        found_greedy = found[:3] + found[6:9] + found[12:15]
        return found, found_greedy

    (alone,) = run_threads(1, lambda parallel: run(SINGLE, 0.0))
    exact = run_threads(2, lambda parallel: run(parallel, 0.0))
    assert exact[0] == exact[1] == alone
    assert all(token < 51 for tokens in alone[1] for token in tokens)
    shifted = run_threads(2, lambda parallel: run(parallel, 1e-3))
    assert shifted[0] == shifted[1]
    assert any(token >= 51 for tokens in shifted[0][1] for token in tokens)


# -- collectives ----------------------------------------------------------------------------------


def test_one_sum_per_row_parallel_linear_and_few_others():
    """What a round says to the other ranks, from the code that runs."""

    def rank(parallel):
        engine = tiny_engine(process_group=parallel, coupling=False)
        said = []
        for mode in ("off", "tree"):
            calls = []
            for count in (2, 3):
                params = SamplingParams(max_new_tokens=count, speculation=mode, ignore_eos=True)
                before = len(parallel.calls)
                outputs = engine.generate([5, 6, 7], params)
                calls.append([kind for kind, _ in parallel.calls[before:]])
                assert outputs[0].stats.rounds == count - 1
            said.append(calls[1][len(calls[0]) :])
        return said

    for plain, tree in run_threads(2, rank):
        # The embedding, 4 layers x (attention, MLP), the choice.
        assert plain == ["sum"] * 9 + ["max"]
        # Before that the drafter: the embedding, 2 layers x 2, the candidates; after it, the
        # features.
        assert tree == ["sum"] * 5 + ["gather"] + ["sum"] * 9 + ["max", "sum"]
