"""Bad input, small pools, cancellation, failures: a clear answer, and the next request works."""

import functools
import random
import sys

import numpy as np
import pytest
import torch
from fixtures import TINY_MASK, tiny_drafter, tiny_target
from stubs import (
    FULL,
    PARTLY,
    cases,
    check_engines,
    install,
    known,
    tiny_engine,
    tiny_tokenizer,
)

from ddtree import Engine, SamplingParams

GOOD = [5, 6, 7]


@pytest.fixture(autouse=True)
def pages_free():
    """Every test leaves every engine with all its pages."""
    yield
    check_engines()


@functools.cache
def shared():
    """One engine for most tests: TINY without a tokenizer, three rows, a context of 64."""
    return tiny_engine(page_size=4, max_batch_size=3, max_model_len=64, budget=16)


@pytest.fixture
def engine():
    """The shared engine, drafting with MIXED; after the test it must still answer right."""
    install(shared(), known(), PARTLY)
    yield shared()
    assert_works(shared())


def assert_works(engine, count=3):
    """The engine answers some requests right, and holds no page afterwards."""
    chosen = [c for c in cases() if len(c.prompt) + 12 < engine.max_model_len][:count]
    outputs = engine.generate([c.prompt for c in chosen], SamplingParams(max_new_tokens=12))
    assert [o.token_ids for o in outputs] == [c.answer[:12] for c in chosen]
    check_engines()


# -- bad requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts, name",
    [
        ([[]], r"prompts\[0\]: is empty"),
        ([GOOD, []], r"prompts\[1\]: is empty"),
        ([*range(5, 69)], "prompts: has 64 tokens"),
        ([GOOD, [5] * 500], r"prompts\[1\]: has 500 tokens"),
        ([5, 101], "prompts: token id 101 "),
        ([5, -1], "prompts: token id -1 "),
        ([5, 2**70], "prompts: token id"),
        ([GOOD, [101]], r"prompts\[1\]: token id 101 "),
        ([5, True], "prompts: .*True"),
        ([5, 6.0], "prompts: .*6.0"),
        ([5, None], "prompts: .*None"),
        ([GOOD, 5], r"prompts\[1\]: .*5"),
        ([5, GOOD], r"prompts\[0\]: .*5"),
        ([GOOD, [GOOD]], r"prompts\[1\]: "),
        ([GOOD, ["5"]], r"prompts\[1\]: "),
        (None, "prompts: .*NoneType"),
        (5, "prompts: .*int"),
        ({5: 6}, "prompts: .*dict"),
        ({5, 6}, "prompts: .*set"),
        (b"bytes", "prompts: .*bytes"),
        ([b"", GOOD], r"prompts\[0\]: .*b''"),
        ([GOOD, bytearray(b"!!")], r"prompts\[1\]: .*bytearray"),
        (iter([5, 6]), "prompts: "),
        (torch.tensor([5, 6]), "prompts: .*Tensor"),
        (np.array([5, 6]), "prompts: .*ndarray"),
        ("text", "prompts: .*tokenizer"),
        ([GOOD, "text"], r"prompts\[1\]: .*tokenizer"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_prompts(engine, prompts, name):
    """One clear error that names the prompt; nothing runs, not even the good ones beside it."""
    before = engine._loop.scheduler._epoch
    with pytest.raises(ValueError, match=f"^{name}"):
        engine.generate(prompts, SamplingParams(max_new_tokens=4))
    assert engine._loop.scheduler._epoch == before


def test_bad_stream_prompts(engine):
    for prompt in ([], [GOOD], [GOOD, GOOD], ["a", "b"], None, 5, "text", [5, 101]):
        with pytest.raises(ValueError, match=r"^prompts?: "):
            engine.stream(prompt)


@pytest.mark.parametrize("number", [np.int64(6), torch.tensor(6).item()])
def test_integers_of_other_libraries_are_token_ids(engine, number):
    want = engine.generate([5, 6, 7])[0]
    assert engine.generate([5, number, 7])[0].token_ids == want.token_ids
    assert want.prompt_token_ids == [5, 6, 7]


@pytest.mark.parametrize(
    "params, name",
    [
        ({"max_new_tokens": 4}, "params"),
        ("greedy", "params"),
        ([SamplingParams()], "params: .*2 prompts.* 1 "),
        ([SamplingParams()] * 3, "params: .*2 prompts.* 3 "),
        ([SamplingParams(), None], "params"),
        (SamplingParams(budget=17), "budget: .*16.*17"),
        (SamplingParams(stop_token_ids=[101]), "stop_token_ids: 101 "),
        (SamplingParams(stop_token_ids=[*range(31)]), "stop_token_ids: at most 30"),
        (SamplingParams(stop="x"), "stop: .*tokenizer"),
    ],
    ids=str,
)
def test_bad_parameters(engine, params, name):
    with pytest.raises(ValueError, match=f"^{name}"):
        engine.generate([GOOD, GOOD], params)


@pytest.mark.parametrize(
    "field, value",
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 4.0),
        ("max_new_tokens", True),
        ("max_new_tokens", "4"),
        ("budget", -1),
        ("budget", 2.5),
        ("speculation", "trees"),
        ("speculation", None),
        ("stop", ["a", 5]),
        ("stop", ""),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", 5),
        ("stop_token_ids", [True]),
        ("ignore_eos", 1),
        ("trace", None),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("min_new_tokens", 300),
    ],
)
def test_impossible_values(field, value):
    """Refused where they are written, with the field's name first."""
    with pytest.raises(ValueError, match=f"^{field}: "):
        SamplingParams(**{field: value})


def test_unknown_names_are_type_errors():
    with pytest.raises(TypeError):
        SamplingParams(max_tokens=5)
    with pytest.raises(TypeError, match="max_tokens"):
        Engine(str(tiny_target()), max_tokens=5)
    with pytest.raises(TypeError):
        shared().generate(GOOD, max_new_tokens=5)


@pytest.mark.parametrize(
    "option, value",
    [
        ("dtype", "int8"),
        ("dtype", torch.int64),
        ("device", "tpu"),
        ("device", "nonsense"),
        ("budget", -1),
        ("budget", 512),
        ("budget", "many"),
        ("budget", True),
        ("max_batch_size", 0),
        ("max_batch_size", 2.0),
        ("max_model_len", 0),
        ("max_model_len", 513),
        ("page_size", 0),
        ("page_size", 3),
        ("num_pages", 0),
        ("num_pages", -5),
        ("prefill_chunk", 0),
        ("memory_fraction", 0),
        ("memory_fraction", 1.5),
        ("memory_fraction", "all"),
        ("kernels", "cuda"),
        ("kernels", "triton"),
        ("cuda_graphs", "yes"),
        ("local_files_only", 1),
        ("coupling", 1),
        ("verify", "typical"),
        ("process_group", object()),
        ("tokenizer", 5),
        ("tokenizer", "/no/such/folder"),
        ("target", "/no/such/folder"),
        ("draft", "/no/such/folder"),
    ],
)
def test_bad_options(option, value):
    """A value that cannot be honoured, now or ever, is refused with the option's name first."""
    options = {"target": str(tiny_target()), "draft": str(tiny_drafter()), "local_files_only": True}
    with pytest.raises(ValueError, match=f"^{option}"):
        Engine(**{**options, option: value})


# -- obvious right answers -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{}, {"speculation": "chain"}, {"speculation": "off"}], ids=str)
def test_no_tokens_wanted(engine, kind):
    """`max_new_tokens=0` gives none, alone, in a stream and beside others."""
    none = SamplingParams(max_new_tokens=0, **kind)
    output = engine.generate(GOOD, none)[0]
    assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
    assert output.stats.rounds == 0
    (delta,) = engine.stream(GOOD, none)
    assert (delta.token_ids, delta.output.token_ids) == ([], [])
    case = cases()[1]
    outputs = engine.generate([GOOD, case.prompt], [none, SamplingParams(max_new_tokens=5)])
    assert [o.token_ids for o in outputs] == [[], case.answer[:5]]


@pytest.mark.parametrize("kind", [{}, {"speculation": "chain"}, {"speculation": "off"}], ids=str)
def test_the_context_limit_ends_an_output(engine, kind):
    """A request may fill the context to the last token, and then ends by length."""
    for case in cases():
        for size in (len(case.prompt), 62, 63):
            prompt = [*[3] * (size - len(case.prompt)), *case.prompt]
            params = SamplingParams(max_new_tokens=500, ignore_eos=True, **kind)
            output = engine.generate(prompt, params)[0]
            assert len(output.token_ids) == 64 - size and output.finish_reason == "length"
            if size == len(case.prompt):
                count = min(len(case.answer), 64 - size)
                assert output.token_ids[:count] == case.answer[:count]


def test_the_mask_token_is_an_ordinary_token(engine):
    """The drafter's mask id may be part of a prompt."""
    prompt = [TINY_MASK, 5, TINY_MASK]
    params = [SamplingParams(max_new_tokens=8, speculation=s) for s in ("off", "tree")]
    plain, tree = engine.generate([prompt] * 2, params)
    assert plain.token_ids == tree.token_ids


def test_a_folder_without_a_tokenizer(engine):
    """Token prompts work, text is empty, and what needs a tokenizer is refused by name."""
    assert engine.tokenizer is None
    assert engine.generate(GOOD, SamplingParams(max_new_tokens=3))[0].text == ""
    with pytest.raises(ValueError, match=r"^messages: .*tokenizer"):
        engine.chat([{"role": "user", "content": "hi"}])


def test_bad_conversations():
    engine = tiny_engine(tokenizer=tiny_tokenizer())
    for messages in ([], "hi", [{}], [{"role": "user"}, "hi"], None):
        with pytest.raises(ValueError, match=r"^messages"):
            engine.chat(messages)
    with pytest.raises(ValueError, match=r"^tools: "):
        engine.chat([{"role": "user", "content": "hi"}], tools=[{"name": "f"}])
    with pytest.raises(ValueError, match=r"^prompts: is empty"):
        engine.generate("")
    assert engine.chat([{"role": "user", "content": "hi"}], SamplingParams(max_new_tokens=2))


# -- small pools -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("prefill_chunk", [5, 2048])
def test_a_pool_too_small_for_the_batch(page_size, prefill_chunk):
    """Requests wait and are preempted, and every one gets its answer, tree, chain or plain."""
    longest = max(len(c.prompt) + len(c.answer) for c in cases())
    engine = tiny_engine(
        page_size=page_size,
        max_batch_size=4,
        prefill_chunk=prefill_chunk,
        budget=16,
        num_pages=-(-(longest + 17) // page_size) + 30 // page_size,
    )
    install(engine, known(), PARTLY)
    kinds = [{}, {"speculation": "chain"}, {"speculation": "off"}, {"budget": 3}]
    # Short prompts first: they get in together, grow, and push each other out.
    chosen = sorted(cases(), key=lambda c: len(c.prompt))
    outputs = engine.generate(
        [c.prompt for c in chosen],
        [SamplingParams(max_new_tokens=30, **kinds[i % 4]) for i in range(len(chosen))],
    )
    for output, case in zip(outputs, chosen, strict=True):
        assert output.token_ids == case.answer
        assert sum(n * k for n, k in output.stats.acceptance_histogram.items()) + 1 == len(
            output.token_ids
        )
    if page_size < 16:
        assert engine.describe()["preemptions"] > 0
    assert_works(engine)


def test_a_pool_too_small_for_one_request(engine):
    """Refused before anything runs; what fits exactly is served."""
    small = tiny_engine(page_size=4, num_pages=10, max_batch_size=3, budget=7)
    install(small, known(), FULL)
    case = min((c for c in cases() if len(c.answer) == 30), key=lambda c: len(c.prompt))
    # 40 slots hold 39 tokens but the newest, less 8 nodes of scratch: 33 tokens in all.
    fits = 33 - len(case.prompt)
    output = small.generate(case.prompt, SamplingParams(max_new_tokens=fits))[0]
    assert output.token_ids == case.answer[:fits]
    for params in (SamplingParams(max_new_tokens=fits + 1), SamplingParams(max_new_tokens=400)):
        with pytest.raises(ValueError, match=r"^num_pages: "):
            small.generate([GOOD, case.prompt], [SamplingParams(max_new_tokens=2), params])
        with pytest.raises(ValueError, match=r"^num_pages: "):
            small.stream(case.prompt, params)
    assert small._loop.scheduler._epoch == 1, "something ran"
    # Plain decoding needs one slot of scratch, so it may be longer.
    params = SamplingParams(max_new_tokens=fits + 7, speculation="off")
    assert len(small.generate(case.prompt, params)[0].token_ids) == fits + 7


# -- cancellation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_pages", [None, 40], ids=["roomy", "scarce"])
def test_200_requests_half_of_them_cancelled(num_pages):
    """Streams closed at random points, several at a time: the others' answers are right."""
    engine = tiny_engine(page_size=4, max_batch_size=4, num_pages=num_pages, budget=7)
    install(engine, known(), PARTLY)
    chosen = [c for c in cases() if len(c.prompt) + 20 <= 60]
    rng = random.Random(11)
    left, cancelled = list(range(200)), 0
    running = {}
    while left or running:
        while left and len(running) < 7:
            index = left.pop()
            case = chosen[index % len(chosen)]
            count = rng.randint(1, 14)
            kind = rng.choice([{}, {}, {"speculation": "chain"}, {"speculation": "off"}])
            stream = engine.stream(case.prompt, SamplingParams(max_new_tokens=count, **kind))
            patience = rng.randint(0, 4) if index % 2 else None
            running[index] = (stream, case.answer[:count], [], patience)
        index = rng.choice(list(running))
        stream, want, got, patience = running[index]
        if patience is not None and len(got) >= patience:
            stream.close()
            cancelled += 1
            assert got == want[: len(got)]
            del running[index]
            continue
        delta = next(stream, None)
        if delta is None:
            assert got == want
            del running[index]
        else:
            got += delta.token_ids
    assert cancelled >= 70
    assert_works(engine)


def test_a_stream_closed_while_it_waits(engine):
    """More streams than rows: those that never got a row leave nothing behind."""
    case = cases()[1]
    streams = [engine.stream(case.prompt, SamplingParams(max_new_tokens=20)) for _ in range(5)]
    scheduler = engine._loop.scheduler
    heads = [next(stream).token_ids for stream in streams[:3]]
    requests = []
    for stream in streams[3:]:
        # The request is queued by hand: reading the stream would wait until it runs.
        (request,) = stream.gi_frame.f_locals["opened"]
        scheduler.add(request)
        requests.append(request)
    assert scheduler.unfinished == 5
    engine._cancel(requests)
    assert scheduler.unfinished == 3
    for stream, head in zip(streams[:3], heads):
        rest = [token for delta in stream for token in delta.token_ids]
        assert head + rest == case.answer[:20]
    for stream in streams[3:]:
        stream.close()


# -- failures in the middle ------------------------------------------------------------------------

OPS = ["plan_attention", "move_kv", "argmax", "top_candidates"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("op", OPS)
def test_an_op_that_fails(engine, monkeypatch, op, error):
    """In the middle of a round: the caller sees the error, and the engine goes on."""
    case = cases()[1]
    plain = SamplingParams(max_new_tokens=40, speculation="off", ignore_eos=True)
    beside = engine.stream(case.prompt, plain)
    begun = next(beside).token_ids
    ops = engine._loop.runner.machine.ops
    real, calls = getattr(ops, op), []

    def failing(*args, **kwargs):
        calls.append(op)
        if len(calls) == 7:
            raise error("injected")
        return real(*args, **kwargs)

    monkeypatch.setattr(ops, op, failing)
    with pytest.raises(error, match="injected"):
        engine.generate([c.prompt for c in cases()[:5]], SamplingParams(max_new_tokens=20))
    monkeypatch.undo()
    check_engines()
    output = list(beside)[-1].output
    assert output.finish_reason == "abort"
    assert len(begun) < len(output.token_ids) < 30
    assert output.token_ids == case.answer[: len(output.token_ids)]


class Interrupt:
    """Raises KeyboardInterrupt at the n-th traced line of the engine's host code."""

    FILES = ("runtime/scheduler.py", "runtime/request.py", "runtime/pages.py", "runtime/loop.py")

    def __init__(self, after):
        self.left, self.where = after, None

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        if frame.f_code.co_name in ("abort", "abort_all", "reset", "add", "check"):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def test_an_interrupt_at_any_line_of_the_host(engine):
    """Ctrl-C between any two lines of scheduling loses no page, no slot and no later answer."""
    small = tiny_engine(page_size=1, max_batch_size=3, num_pages=110, budget=7)
    install(small, known(), PARTLY)
    chosen = sorted(cases(), key=lambda c: len(c.prompt))[:5]
    prompts = [c.prompt for c in chosen]
    rng, hit = random.Random(4), set()
    for _ in range(60):
        interrupt = Interrupt(rng.randint(1, 1500))
        before = sys.gettrace()
        sys.settrace(interrupt)
        try:
            outputs = small.generate(prompts, SamplingParams(max_new_tokens=20))
            assert [o.token_ids for o in outputs] == [c.answer[:20] for c in chosen]
        except KeyboardInterrupt:
            hit.add(interrupt.where)
        finally:
            sys.settrace(before)
        check_engines()
    assert len(hit) >= 20
    assert_works(small)
