"""Ranks in processes of their own, over gloo: equal outputs, and no rank left waiting."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from fixtures import make_target, tiny_drafter, tiny_target
from ranks import results, run_ranks
from test_greedy_real import CHATS
from test_sampled_real import PARAMS

from ddtree import Engine, SamplingParams
from ddtree.models import loader

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
TIMEOUT = 10.0


def make(target, draft, **options):
    return Engine(target, draft, **{"budget": 7, "timeout": TIMEOUT, **options})


def generate(engine, count=12):
    """Greedy and sampled, in every mode."""
    found = []
    for mode in ("off", "chain", "tree"):
        params = [
            SamplingParams(max_new_tokens=count, speculation=mode),
            SamplingParams(max_new_tokens=count, speculation=mode, temperature=0.9, seed=1),
        ]
        found.append([output.token_ids for output in engine.generate(PROMPTS, params)])
    return found


def said(error):
    return f"{type(error).__name__}: {error}"


# -- what all ranks are told ----------------------------------------------------------------------


def well_and_badly(rank, target, draft, other):
    """Outputs of one engine after the other; then what mismatches raise."""
    found = []
    for _ in range(2):
        with make(target, draft) as engine:
            left = engine.stream([5, 6], SamplingParams(max_new_tokens=9))
            next(left)
            found.append(generate(engine))
        with pytest.raises(RuntimeError, match="closed"):
            engine.generate([5])
    assert found[0] == found[1]
    errors = []
    options = [
        {"budget": 3 + rank},
        {"budget": -1 if rank else 3},
        {"coupling": bool(rank)},
        {"target": [target, other][rank]},
    ]
    for each in options:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            make(**{"target": target, "draft": draft, **each})
        errors.append(said(caught.value))
    engine = make(target, draft)
    # An object whose text is another one on every rank is an error like any other.
    with pytest.raises(ValueError) as caught:
        engine.generate(iter(PROMPTS))
    errors.append(said(caught.value))
    with pytest.raises(RuntimeError) as caught:
        engine.generate(PROMPTS[rank])
    errors.append(said(caught.value))
    with pytest.raises(RuntimeError) as caught:
        engine.generate(PROMPTS[0])
    errors.append(said(caught.value))
    # Streams that are read in another order on every rank.
    engine = make(target, draft)
    streams = [engine.stream(p, SamplingParams(max_new_tokens=5)) for p in PROMPTS]
    with pytest.raises(RuntimeError) as caught:
        next(streams[rank])
    errors.append(said(caught.value))
    # The first one to close says so to who goes on.
    engine = make(target, draft)
    if rank == 0:
        engine.close()
        time.sleep(5)
    else:
        with pytest.raises(RuntimeError) as caught:
            engine.generate(PROMPTS[0])
        errors.append(said(caught.value))
    return found[0], errors


def test_two_processes_agree_or_say_where_they_differ():
    target, draft, other = str(tiny_target()), str(tiny_drafter()), str(tiny_target("qwen3"))
    ended = run_ranks(2, well_and_badly, target, draft, other)
    one, two = (end.result for end in ended)
    assert one[0] == two[0] == generate(make(target, draft))
    same = [
        "ValueError: budget: rank 0 has 3, rank 1 has 4",
        "",
        "ValueError: coupling: rank 0 has False, rank 1 has True",
        "ValueError: target: rank 0 has 'checkpoint ",
        "ValueError: prompts: expected a string",
        "RuntimeError: generate: rank 1 gave other arguments than rank 0",
        "RuntimeError: the ranks of this engine have ended: rank ",
        "RuntimeError: next: rank 1 gave other arguments than rank 0",
    ]
    for errors in (one[1], two[1][:-1]):
        assert all(e.startswith(s) for e, s in zip(errors, same, strict=True)), errors
    # What is wrong on one rank is said by the other.
    assert two[1][1].startswith("ValueError: budget: ")
    assert one[1][1].startswith("LostRankError: rank 1 failed: ValueError: budget: ")
    assert two[1][-1] == "LostRankError: rank 0 has closed its engine"
    # Both gave up waiting for the other once.
    assert [end.exit_code for end in ended] == [1, 1]


def with_kernels(rank, target, draft, kernels):
    """Outputs of both pools' kernels on this rank's heads."""
    os.environ["TRITON_INTERPRET"] = "1"
    engine = make(target, draft, kernels=kernels, timeout=120.0, page_size=4)
    return generate(engine, 5)


@pytest.mark.slow
def test_the_triton_kernels_run_on_two_ranks():
    """In the interpreter, and equal to the torch ops on one rank."""
    args = (str(tiny_target()), str(tiny_drafter()), "triton")
    one, two = results(run_ranks(2, with_kernels, *args, limit=900))
    assert one == two == generate(make(*args[:2], page_size=4), 5)


def groups_and_threads(rank, target, draft):
    """Ranks with other numbers of groups; a group for each rank; threads that share an engine."""
    import threading

    mine = [torch.distributed.new_group([r]) for r in range(2)][rank]
    if rank == 0:
        torch.distributed.new_group([0], use_local_synchronization=True)
    both = make(target, draft)
    alone = make(target, draft, process_group=mine)
    assert alone.describe()["tensor_parallel_size"] == 1
    for wrong in (torch.distributed.ProcessGroup, object(), "world", 2):
        with pytest.raises(ValueError, match="process_group: expected"):
            make(target, draft, process_group=wrong)
    found = [generate(both), generate(alone)]
    entered, refused = threading.Event(), []
    step = both._loop.runner.launch

    def slow(plan):
        entered.set()
        time.sleep(0.2)
        return step(plan)

    both._loop.runner.launch = slow
    params = SamplingParams(max_new_tokens=6)
    thread = threading.Thread(target=lambda: found.append(both.generate([5, 6], params)))
    thread.start()
    entered.wait()
    with pytest.raises(RuntimeError, match="generate: another thread is in a call"):
        refused.append(both.generate([7, 8], params))
    thread.join()
    (output,) = found.pop()
    assert output.token_ids == alone.generate([5, 6], params)[0].token_ids
    return found


def test_groups_of_all_kinds():
    target, draft = str(tiny_target()), str(tiny_drafter())
    want = generate(make(target, draft))
    for both, alone in results(run_ranks(2, groups_and_threads, target, draft)):
        assert both == alone == want


# -- failures -------------------------------------------------------------------------------------


def break_rank(rank, target, draft, victim, how):
    """Break one rank in the third step of a call."""
    engine = make(target, draft)
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=4))
    launch, count = engine._loop.runner.launch, 0

    def broken(plan):
        nonlocal count
        count += 1
        if rank == victim and count == 3:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise MemoryError("no room")
        return launch(plan)

    engine._loop.runner.launch = broken
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=40, ignore_eos=True))


BREAKS = [(2, how, victim) for how in ("kill", "raise", "hang") for victim in (0, 1)]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "how", "victim"), [*BREAKS, (4, "kill", 2)])
def test_one_rank_breaks_and_all_end(size, how, victim):
    """Within the timeout, with the cause, and an exit code that says so."""
    args = (str(tiny_target()), str(tiny_drafter()), victim, how)
    ended = run_ranks(size, break_rank, *args, patience=2 * TIMEOUT)
    first = min(end.seconds for end in ended if end.exit_code is not None)
    for rank, end in enumerate(ended):
        assert end.exit_code != 0, end
        assert rank == victim or end.seconds < first + TIMEOUT, ended
        if rank == victim:
            assert end.exit_code == {"kill": -signal.SIGKILL, "raise": 1, "hang": None}[how]
        elif how == "raise":
            assert f"rank {victim} failed: MemoryError: no room" in end.error
        elif how == "kill":
            assert f"no sign of life from rank {victim}" in end.error, ended
        else:
            assert f"no answer within {TIMEOUT:g} s (timeout)" in end.error, ended


def stay_idle(rank, target, draft):
    """Nothing to do for ten timeouts; then one rank comes late by two."""
    engine = make(target, draft, timeout=2.0)
    before = generate(engine, 4)
    time.sleep(20)
    if rank == 0:
        time.sleep(4)
    again = generate(engine, 4)
    if rank == 1:
        time.sleep(4)
    return before, again, generate(engine, 4)


@pytest.mark.slow
def test_an_idle_engine_stays_alive():
    for before, again, late in results(
        run_ranks(2, stay_idle, str(tiny_target()), str(tiny_drafter()))
    ):
        assert before == again == late


def launch(count, *args, **environment):
    """torchrun of `count` ranks; what it printed and its exit code."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    return subprocess.run(
        [*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


def processes_of(mark):
    """Command lines of running processes that name `mark`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().decode(errors="replace")
            if mark in line and int(path.parent.name) != os.getpid():
                found.append(line)
    return found


@pytest.mark.slow
def test_torchrun_ends_with_no_orphan(tmp_path):
    script = tmp_path / "ends_badly.py"
    script.write_text(
        "import os, signal, sys\n"
        "from ddtree import Engine, SamplingParams\n"
        "engine = Engine(*sys.argv[1:], budget=7, timeout=20)\n"
        "for delta in engine.stream([5, 6, 7], SamplingParams(max_new_tokens=60)):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = launch(2, script, tiny_target(), tiny_drafter())
    assert ended.returncode != 0
    assert "Signal 9 (SIGKILL) received" in ended.stderr
    assert processes_of(str(script)) == []


@pytest.mark.slow
def test_the_example_is_the_same_under_python_and_torchrun(demo_target, demo_drafter):
    script = ROOT / "examples" / "generate_tp.py"
    args = (script, "--target", demo_target, "--draft", demo_drafter, "--max-new-tokens", "12")
    alone = subprocess.run(
        [sys.executable, *map(str, args)], capture_output=True, text=True, timeout=300
    )
    three = launch(3, *args)
    assert alone.returncode == three.returncode == 0, three.stderr
    assert alone.stdout.startswith("1 ranks, float32 on cpu")
    assert alone.stdout.replace("1 ranks", "3 ranks", 1) == three.stdout
    two = launch(2, *args)
    assert two.returncode != 0
    assert "num_attention_heads 9 cannot be divided among 2 ranks" in two.stderr


# -- the real pair --------------------------------------------------------------------------------


def real_outputs(rank, target, draft):
    """Greedy and sampled answers in every mode, one at a time and four together."""
    engine = Engine(target, draft, budget=7, max_batch_size=4, max_model_len=256)
    found = []
    for mode in ("off", "chain", "tree"):
        for batch in (1, 4):
            params = [
                SamplingParams(max_new_tokens=32, speculation=mode, seed=i, **sampled)
                for i, sampled in enumerate(({}, *PARAMS[:2], PARAMS[4]))
            ]
            chats = [[{"role": "user", "content": text}] for text in CHATS[:4]]
            for at in range(0, 4, batch):
                part = slice(at, at + batch)
                outputs = engine.chat(chats[part], params[part])
                found += [(mode, batch, o.token_ids, o.stats.rounds) for o in outputs]
    engine.close()
    return found


@pytest.mark.slow
def test_the_real_pair_on_three_ranks(demo_target, demo_drafter):
    """Equal to one rank, token for token; summation order may differ at near-ties only."""
    args = (str(demo_target), str(demo_drafter))
    alone = real_outputs(0, *args)
    ranks = results(run_ranks(3, real_outputs, *args, limit=1500))
    assert ranks[0] == ranks[1] == ranks[2]
    differ = [
        (one, other) for one, other in zip(alone, ranks[0], strict=True) if one[2] != other[2]
    ]
    print(f"\n{len(differ)} of {len(alone)} outputs differ", *differ, sep="\n  ")
    assert not differ


# -- memory ---------------------------------------------------------------------------------------


def memory(rank, target):
    """Peak bytes that an engine adds, and bytes of the checkpoint that were read."""
    from safetensors import safe_open as real

    read = 0

    class Slice:
        def __init__(self, inner):
            self.inner = inner

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def __getitem__(self, index):
            nonlocal read
            tensor = self.inner[index]
            read += tensor.nbytes
            return tensor

    class Opened:
        def __init__(self, *args, **options):
            self.inner = real(*args, **options)

        def __enter__(self):
            self.file = self.inner.__enter__()
            return self

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def get_slice(self, name):
            return Slice(self.file.get_slice(name))

    loader.safe_open = Opened
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")
    before = _kilobytes(status.read_text(), "VmRSS")
    engine = Engine(target, max_batch_size=8, max_model_len=2048, num_pages=1024, page_size=16)
    engine.generate([1, 2, 3], SamplingParams(max_new_tokens=3, ignore_eos=True))
    pool = engine._loop.runner.machine.target_kv
    pool.fill_(1.0)
    peak = _kilobytes(status.read_text(), "VmHWM") - before
    engine.close()
    return 1024 * peak, read


def _kilobytes(status, name):
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


@pytest.mark.slow
def test_a_rank_of_four_holds_and_reads_a_quarter():
    """Weights and KV pool; on one rank they are what the model's own shapes say."""
    shape = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    folder = make_target(dtype=torch.bfloat16, **shape)
    size = (folder / "model.safetensors").stat().st_size
    (one,) = results(run_ranks(1, memory, str(folder)))
    four = results(run_ranks(4, memory, str(folder)))
    pool = 8 * 1024 * 16 * 2 * 4 * 64 * 4
    assert one[0] > 0.9 * (2 * size + pool)
    assert 0.98 * size < one[1] <= size
    print(f"\none rank: {one}, four: {four}")
    for peak, read in four:
        assert peak <= 0.35 * one[0]
        assert read <= 0.27 * one[1]
