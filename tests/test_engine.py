"""The engine as a user sees it: prompts in, outputs, statistics, traces and streams out."""

import functools
import math
import threading

import pytest
import torch
from fixtures import TINY_EOS, tiny_drafter, tiny_target
from stubs import (
    FULL,
    PARTLY,
    SIBLINGS,
    by_anchor,
    cases,
    check_engines,
    install,
    known,
    tiny_engine,
    tiny_tokenizer,
    watch,
)

from ddtree import Engine, SamplingParams

RANKS = {"oracle": FULL, "mixed": PARTLY, "bad": None}
KINDS = [{}, {"speculation": "chain"}, {"speculation": "off"}, {"budget": 0}, {"budget": 3}]


@pytest.fixture(autouse=True)
def pages_free():
    """Every test leaves every engine with all its pages."""
    yield
    check_engines()


@functools.cache
def shared():
    """One engine for most tests: TINY with a tokenizer, four rows, ORACLE."""
    return tiny_engine(page_size=4, max_batch_size=4, tokenizer=tiny_tokenizer())


@pytest.fixture
def engine():
    """The shared engine, drafting with ORACLE."""
    install(shared(), known())
    return shared()


def long_case():
    """A case whose answer has no EOS and whose first six tokens differ from each other."""
    return next(c for c in cases() if len(c.answer) == 30 and len(set(c.answer[:6])) == 6)


def text_of(ids):
    return tiny_tokenizer().decode(ids, skip_special_tokens=True)


def ids_of(deltas):
    return [token for delta in deltas for token in delta.token_ids]


# -- prompts and outputs ---------------------------------------------------------------------------


def test_every_form_of_prompt(engine):
    """A string, a list or tuple of ids, and lists of those; one output each, in order."""
    params = SamplingParams(max_new_tokens=6)
    first, second = cases()[1], cases()[3]
    for prompts in (first.prompt, tuple(first.prompt), [first.prompt], text_of(first.prompt)):
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [first.answer[:6]]
        assert outputs[0].prompt_token_ids == first.prompt
    for prompts in (
        [first.prompt, second.prompt],
        [text_of(first.prompt), second.prompt],
        (tuple(first.prompt), text_of(second.prompt)),
    ):
        outputs = engine.generate(prompts, params)
        assert [o.token_ids for o in outputs] == [first.answer[:6], second.answer[:6]]
    assert engine.generate([]) == []
    assert engine.generate([], []) == []


def test_outputs_come_in_the_order_of_the_prompts(engine):
    """However early or late they end, with one SamplingParams each."""
    limits = [1 + (7 * i) % 11 for i in range(10)]
    outputs = engine.generate(
        [c.prompt for c in cases()], [SamplingParams(max_new_tokens=n) for n in limits], True
    )
    assert [o.token_ids for o in outputs] == [c.answer[:n] for c, n in zip(cases(), limits)]
    assert [o.prompt_token_ids for o in outputs] == [c.prompt for c in cases()]


def test_fields_of_an_output(engine):
    case = long_case()
    output = engine.generate(case.prompt, SamplingParams(max_new_tokens=9))[0]
    assert output.text == text_of(case.answer[:9])
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    assert output.seed is None and output.logprobs is None and output.trace is None


def test_default_parameters(engine):
    """256 tokens, or up to the model's end of sequence."""
    case = next(c for c in cases() if c.answer[-1] in TINY_EOS)
    output = engine.generate(case.prompt)[0]
    assert output.token_ids == case.answer and output.finish_reason == "stop"
    endless = engine.generate(case.prompt, SamplingParams(ignore_eos=True))[0]
    assert len(endless.token_ids) == 256 and endless.finish_reason == "length"
    assert endless.token_ids[: len(case.answer)] == case.answer


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_stop_ids(engine, kind):
    """A stop id ends the output and is part of it; on the last allowed token it still is a stop."""
    case = long_case()
    for at in range(6):
        for room in range(1, 8):
            params = SamplingParams(
                max_new_tokens=room, stop_token_ids=[case.answer[at], 97], **kind
            )
            output = engine.generate(case.prompt, params)[0]
            assert output.token_ids == case.answer[: min(at + 1, room)]
            stopped = at < room
            assert output.finish_reason == ("stop" if stopped else "length")
            assert output.stop_reason == (case.answer[at] if stopped else None)


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_end_of_sequence_ids(engine, kind):
    """Both of the model's EOS ids end an output; `ignore_eos` and a stop id of the same number."""
    for eos in TINY_EOS:
        case = next(c for c in cases() if c.answer[-1] == eos)
        size = len(case.answer)
        for room in (size, size + 5):
            output = engine.generate(case.prompt, SamplingParams(max_new_tokens=room, **kind))[0]
            assert output.token_ids == case.answer
            assert (output.finish_reason, output.stop_reason) == ("stop", None)
            assert output.text == text_of(case.answer[:-1])
        params = SamplingParams(max_new_tokens=size + 3, ignore_eos=True, **kind)
        output = engine.generate(case.prompt, params)[0]
        assert len(output.token_ids) == size + 3 and output.finish_reason == "length"
        assert output.token_ids[:size] == case.answer
        params = SamplingParams(ignore_eos=True, stop_token_ids=[eos], **kind)
        output = engine.generate(case.prompt, params)[0]
        assert output.token_ids == case.answer
        assert (output.finish_reason, output.stop_reason) == ("stop", eos)


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_stop_strings(engine, kind):
    """Over several tokens, in the middle of a path: the ids keep the last one, the text is cut."""
    case = long_case()
    whole = text_of(case.answer)
    for start, end in ((0, 1), (0, 4), (2, 3), (3, 8), (5, 12), (26, 30)):
        stop = whole[start:end]
        assert whole.index(stop) == start
        params = SamplingParams(max_new_tokens=30, stop=[stop, "never"], **kind)
        output = engine.generate(case.prompt, params)[0]
        assert output.token_ids == case.answer[:end]
        assert output.text == whole[:start]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        kept = SamplingParams(max_new_tokens=30, stop=stop, include_stop_str_in_output=True, **kind)
        assert engine.generate(case.prompt, kept)[0].text == whole[:end]
        # One token earlier the output ends by its length, and the text is whole.
        if end > start + 1:
            params = SamplingParams(max_new_tokens=end - 1, stop=stop, **kind)
            output = engine.generate(case.prompt, params)[0]
            assert output.finish_reason == "length" and output.stop_reason is None
            assert output.text == whole[: end - 1]


def test_the_first_of_several_ends_wins(engine):
    """Stop string, stop id, limit: whichever comes first, whatever the round."""
    case = long_case()
    whole = text_of(case.answer)
    for string_at, id_at, room in ((2, 4, 6), (4, 2, 6), (4, 4, 5), (5, 4, 3), (3, 6, 4)):
        params = SamplingParams(
            max_new_tokens=room, stop=whole[string_at], stop_token_ids=[case.answer[id_at]]
        )
        output = engine.generate(case.prompt, params)[0]
        count = min(string_at + 1, id_at + 1, room)
        assert output.token_ids == case.answer[:count]
        reasons = {string_at + 1: whole[string_at]} if string_at <= id_at else {}
        reasons.setdefault(id_at + 1, case.answer[id_at])
        assert output.stop_reason == reasons.get(count)
        assert output.finish_reason == ("stop" if count in reasons else "length")


# -- statistics and trace --------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", list(RANKS))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_statistics_and_trace_agree_with_the_tokens(drafter, kind):
    """The identities of DESIGN section 2, for outputs that end in every way."""
    engine = shared()
    install(engine, known() if RANKS[drafter] else None, RANKS[drafter] or FULL)
    case = long_case()
    ends = [
        {"max_new_tokens": 0},
        {"max_new_tokens": 1},
        {"max_new_tokens": 23},
        {"stop_token_ids": [case.answer[5]]},
        {"stop": text_of(case.answer[3:5])},
        {"stop": text_of(case.answer[8:9])},
    ]
    outputs = engine.generate(
        [case.prompt] * len(ends), [SamplingParams(trace=True, **end, **kind) for end in ends]
    )
    for output in outputs:
        stats, ids = output.stats, output.token_ids
        assert ids == case.answer[: len(ids)]
        assert stats.rounds == len(output.trace) == sum(stats.acceptance_histogram.values())
        if not ids:
            assert stats.rounds == 0 and stats.acceptance_length == 0.0
            continue
        assert sum(n * k for n, k in stats.acceptance_histogram.items()) + 1 == len(ids)
        if stats.rounds:
            assert stats.acceptance_length == (len(ids) - 1) / stats.rounds
            assert stats.tokens_per_second == (len(ids) - 1) / stats.decode_seconds
            assert set(stats.stage_seconds) <= {"draft", "build", "verify", "commit", "host"}
            assert sum(stats.stage_seconds.values()) > 0
        assert stats.draft_nodes == sum(len(r.tokens) - 1 for r in output.trace)
        assert stats.ttft > 0 and stats.decode_seconds >= 0
        _check_trace(output, kind)
    assert [len(o.token_ids) for o in outputs] == [0, 1, 23, 6, 5, 9]


def _check_trace(output, kind):
    emitted = [output.token_ids[0]]
    for index, drawn in enumerate(output.trace):
        assert drawn.tokens[0] == emitted[-1] and drawn.parents[0] == -1
        assert len(drawn.tokens) == len(drawn.parents) == len(drawn.scores)
        assert all(0 <= p < i for i, p in enumerate(drawn.parents) if i)
        assert drawn.scores[0] == 0 and drawn.scores == sorted(drawn.scores, reverse=True)
        assert len(drawn.path) == len(drawn.emitted)
        assert drawn.path[0] == 0 if drawn.emitted else index == len(output.trace) - 1
        for above, node, token in zip(drawn.path, drawn.path[1:], drawn.emitted):
            assert drawn.parents[node] == above and drawn.tokens[node] == token
        if kind.get("speculation") == "chain":
            assert drawn.parents == list(range(-1, 5)) and set(drawn.scores) == {0.0}
        else:
            budget = 0 if kind.get("speculation") == "off" else kind.get("budget", 16)
            assert len(drawn.tokens) == 1 + budget
        emitted += drawn.emitted
    assert emitted == output.token_ids


def test_acceptance_is_what_the_drafter_deserves(engine):
    """ORACLE: six tokens a round; MIXED trees: more than its chains; plain: exactly one."""
    case = long_case()
    want = {"tree": 6.0, "chain": 6.0, "off": 1.0}
    for mode, length in want.items():
        params = SamplingParams(max_new_tokens=25, speculation=mode)
        assert engine.generate(case.prompt, params)[0].stats.acceptance_length == length
    install(engine, known(), SIBLINGS)
    found = {}
    for mode in want:
        params = SamplingParams(max_new_tokens=25, speculation=mode)
        found[mode] = engine.generate(case.prompt, params)[0].stats.acceptance_length
    assert found["tree"] > 2 * found["chain"] > found["off"] == 1.0


# -- streams, chat, threads ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS[:3], ids=str)
def test_a_stream_is_the_output_in_pieces(engine, kind):
    case = long_case()
    params = SamplingParams(max_new_tokens=25, stop=text_of(case.answer[20:22]), **kind)
    deltas = list(engine.stream(case.prompt, params))
    assert all(delta.output is None for delta in deltas[:-1])
    output = deltas[-1].output
    assert ids_of(deltas) == output.token_ids == case.answer[:22]
    assert "".join(d.text for d in deltas) == output.text == text_of(case.answer[:20])
    # Each piece comes as soon as its round is read, not at the end.
    assert len(deltas) >= output.stats.rounds
    assert output.finish_reason == "stop"


def test_a_stream_starts_when_it_is_read(engine):
    """A stream that nobody reads takes no page and blocks nobody."""
    case = long_case()
    unread = engine.stream(case.prompt)
    assert engine.describe()["free_pages"] == engine.describe()["num_pages"]
    assert engine.generate(case.prompt, SamplingParams(max_new_tokens=3))
    unread.close()


def test_streams_share_the_batch_with_generate(engine):
    """While a stream is open, generate runs beside it, and both are right."""
    first, second = cases()[1], cases()[3]
    stream = engine.stream(first.prompt, SamplingParams(max_new_tokens=25, speculation="off"))
    ids = list(next(stream).token_ids)
    output = engine.generate(second.prompt, SamplingParams(max_new_tokens=10))[0]
    assert output.token_ids == second.answer[:10]
    rest = list(stream)
    assert ids + ids_of(rest) == first.answer[:25]


def test_chat_is_generate_on_the_template(engine):
    """The conversation goes through the chat template; lists of conversations are batched."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    params = SamplingParams(max_new_tokens=5)
    want = engine.generate("uhiayoA", params)[0]
    assert engine.chat(messages, params)[0].token_ids == want.token_ids
    outputs = engine.chat([messages, messages[:1]], params)
    assert [o.prompt_token_ids for o in outputs] == [
        tiny_tokenizer().encode("uhiayoA"),
        tiny_tokenizer().encode("uhiA"),
    ]
    assert outputs[0].token_ids == want.token_ids


def test_threads_share_an_engine(engine):
    """Threads that generate and stream at once get their own answers, whoever runs the steps."""
    wrong = []

    def work(index):
        for turn in range(4):
            case = cases()[(index + turn) % len(cases())]
            params = SamplingParams(max_new_tokens=1 + (5 * index + 3 * turn) % 13)
            want = case.answer[: params.max_new_tokens]
            try:
                if turn % 2:
                    ids = ids_of(engine.stream(case.prompt, params))
                else:
                    ids = engine.generate(case.prompt, params)[0].token_ids
            except RuntimeError as error:
                ids = error
            if ids != want:
                wrong.append((index, turn, ids, want))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_thread_may_take_the_last_step(engine, monkeypatch):
    """Between a look at the requests and the next step, another thread's step may finish them."""
    case, real = long_case(), engine._step

    def late(requests):
        while engine._running(requests):
            engine._loop.step()
        real(requests)

    monkeypatch.setattr(engine, "_step", late)
    # Plain rounds are counted in advance, so that none is left in flight to be read.
    params = SamplingParams(max_new_tokens=9, speculation="off")
    assert engine.generate(case.prompt, params)[0].token_ids == case.answer[:9]
    assert ids_of(engine.stream(case.prompt, params)) == case.answer[:9]


# -- one step late ---------------------------------------------------------------------------------


def test_a_step_is_read_after_the_next_is_launched(engine, monkeypatch):
    """Ticket k is read after launch k + 1, in order, and that launch leaves its report alone."""
    loop = engine._loop
    launched, early, reads, idle = [], [], [], []
    launch, read, schedule = loop.runner.launch, loop.runner.read, loop.scheduler.schedule

    def spy_schedule():
        plan = schedule()
        idle[:] = [plan is None]
        return plan

    def spy_launch(plan):
        if launched:
            early.append(read(launched[-1]))
        launched.append(launch(plan))
        return launched[-1]

    def spy_read(ticket):
        number = next(i for i, t in enumerate(launched) if t is ticket)
        reads.append(number)
        assert number == (len(launched) - 1 if idle[0] else len(launched) - 2)
        result = read(ticket)
        assert number == len(early) or result == early[number]
        return result

    monkeypatch.setattr(loop.scheduler, "schedule", spy_schedule)
    monkeypatch.setattr(loop.runner, "launch", spy_launch)
    monkeypatch.setattr(loop.runner, "read", spy_read)
    chosen = cases()[:6]
    outputs = engine.generate([c.prompt for c in chosen], SamplingParams(max_new_tokens=14))
    assert [o.token_ids for o in outputs] == [c.answer[:14] for c in chosen]
    assert len(reads) >= 6 and reads == sorted(set(reads))
    assert len(early) >= len(reads) - 1, "some step was read before the next one was launched"


# -- construction and end of life ------------------------------------------------------------------


def test_describe():
    engine = watch(
        Engine(str(tiny_target()), str(tiny_drafter()), page_size=8, max_batch_size=2, num_pages=40)
    )
    told = engine.describe()
    assert told["linear"]
    want = {
        "target": "LlamaForCausalLM",
        "draft": "DFlashDraftModel",
        "dtype": "float32",
        "device": "cpu",
        "budget": 8,
        "node_threshold": 0.07,
        "draft_vocab_size": None,
        "block_size": 6,
        "max_batch_size": 2,
        "max_model_len": 512,
        "page_size": 8,
        "num_pages": 40,
        "free_pages": 40,
        "prefill_chunk": 2048,
        "preemptions": 0,
        "kernels": "torch",
        "attention": "torch",
    }
    assert {name: told[name] for name in want} == want
    assert engine.tokenizer is None


def test_default_pool_holds_a_full_batch():
    """Without `num_pages` the pool has room for the whole batch at its longest."""
    engine = tiny_engine(page_size=4, max_batch_size=3, max_model_len=100, budget=16)
    assert engine.describe()["num_pages"] == 3 * -(-(100 + 17) // 4)
    assert engine.max_model_len == 100


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16, "float32"])
def test_dtypes(dtype):
    """Other precisions run through the whole round."""
    engine = tiny_engine(dtype=dtype)
    assert engine.describe()["dtype"] == str(dtype).removeprefix("torch.")
    outputs = engine.generate([[1, 2, 3], [4]], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [len(o.token_ids) for o in outputs] == [8, 8]


def test_no_round_runs_for_nothing_on_cpu():
    """A step is read before the next one begins, so none begins after a stop."""
    engine = watch(Engine(str(tiny_target()), str(tiny_drafter())))
    (whole,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=16, ignore_eos=True))
    stop = [whole.token_ids[8]]
    for speculation in ("tree", "chain", "off"):
        before = engine.describe()["eager_rounds"]
        job = SamplingParams(max_new_tokens=16, stop_token_ids=stop, speculation=speculation)
        (output,) = engine.generate([[1, 2, 3]], job)
        assert output.finish_reason == "stop"
        assert engine.describe()["eager_rounds"] - before == output.stats.rounds


def nodes_of(outputs):
    return [len(r.tokens) - 1 for output in outputs for r in output.trace]


def test_the_auto_budget_leaves_unlikely_nodes_out(monkeypatch):
    """On CPU: the same tokens from smaller trees, the likely nodes of each being there."""
    asked = [c.prompt for c in cases()[:4]]
    sampled = {"temperature": 0.9, "seed": 3}
    jobs = [
        SamplingParams(max_new_tokens=16, trace=True),
        SamplingParams(max_new_tokens=16, trace=True, **sampled),
        SamplingParams(max_new_tokens=16, trace=True, budget=3),
        SamplingParams(max_new_tokens=16, trace=True, speculation="chain"),
    ]
    auto, fixed = tiny_engine(budget="auto", max_batch_size=1), tiny_engine(budget=8)
    about = auto.describe()
    assert (about["budget"], about["node_threshold"]) == (8, 0.07)
    assert fixed.describe()["node_threshold"] is None
    assert watch(Engine(str(tiny_target()))).describe()["node_threshold"] is None
    found, want = auto.generate(asked, jobs), fixed.generate(asked, jobs)
    assert [o.token_ids for o in found] == [o.token_ids for o in want]
    (greedy, drawn, three, chain) = found
    assert set(nodes_of(want[:2])) == {8} and set(nodes_of(want[2:3])) == {3}
    assert set(nodes_of([chain])) == {5}
    assert max(nodes_of([three])) <= 3 and min(nodes_of([three])) >= 1
    assert len(set(nodes_of([greedy, drawn]))) > 2
    assert sum(o.stats.draft_nodes for o in found) == sum(nodes_of(found))
    for r in (r for o in found[:3] for r in o.trace):
        assert len(r.tokens) == 2 or min(r.scores) >= math.log(0.07)
    # In a batch, all rows have as many as the one that needs most.
    together = tiny_engine(budget="auto")
    outputs = together.generate(asked, jobs)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in want]
    assert max(nodes_of(outputs)) <= 8
    check_engines()


def test_rejection_uses_its_whole_tree():
    """Its trees have a fixed shape, whose scores are no probabilities."""
    params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=1, trace=True)
    with tiny_engine(budget="auto", verify="rejection") as engine:
        assert set(nodes_of(engine.generate([5, 6, 7], params))) == {8}


def test_without_a_drafter():
    """Plain decoding; tree parameters are fine, a chain is refused."""
    engine = tiny_engine(draft=None, budget="auto")
    assert (engine.describe()["budget"], engine.describe()["draft"]) == (0, None)
    case = long_case()
    output = engine.generate(case.prompt, SamplingParams(max_new_tokens=12))[0]
    assert output.token_ids == case.answer[:12] and output.stats.rounds == 11
    with pytest.raises(ValueError, match=r"^speculation: .*drafter"):
        engine.generate(case.prompt, SamplingParams(speculation="chain"))


def test_close():
    """A closed engine answers nothing, holds nothing, and may be closed again."""
    case = long_case()
    with tiny_engine(max_batch_size=2) as engine:
        install(engine, by_anchor([]))
        stream = engine.stream(case.prompt, SamplingParams(max_new_tokens=20))
        begun = list(next(stream).token_ids)
    rest = list(stream)
    assert rest[-1].output.finish_reason == "abort"
    ids = begun + ids_of(rest)
    assert ids == case.answer[: len(ids)]
    for call in (
        lambda: engine.generate(case.prompt),
        lambda: engine.stream(case.prompt),
        lambda: engine.describe(),
        lambda: engine.generate([]),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    engine.close()
    assert not hasattr(engine, "_loop") and not hasattr(engine, "_target")


def test_the_context_manager_closes_after_an_error():
    with pytest.raises(ZeroDivisionError), tiny_engine() as engine:
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="closed"):
        engine.describe()
