"""The calibration of draft trees: its file, its fit, and what the round makes of it."""

import dataclasses
import json
import shutil

import pytest
import torch
from fixtures import tiny_drafter, tiny_target
from stubs import check_engines, tiny_engine
from train_drafter.__main__ import main
from train_drafter.batches import Item
from train_drafter.calibrate import TEMPERATURES, Records, _draft, fit
from train_drafter.data import Sequence
from train_drafter.drafter import TrainableDrafter
from train_drafter.features import compute_features
from train_drafter.layout import load_weights, read_config, shorten
from train_drafter.target import load_target_weights

from ddtree import Engine, SamplingParams
from ddtree.config import CALIBRATION_FILE, Calibration
from ddtree.kernels import get_ops
from ddtree.models.registry import build_target
from ddtree.runtime.sampler import TreeWeights
from ddtree.tree.noise import gumbel

CPU = torch.device("cpu")
DEPTH = 5
GOOD = Calibration(
    alpha=(1.0, 1.2, 1.1, 1.0, 0.9),
    scale=(1.5, 1.6, 1.7, 1.8, 1.9),
    hit=(0.9, 0.8, 0.7, 0.6, 0.5),
    greedy_scale=(1.3, 1.2, 1.4, 1.5, 1.6),
    greedy_hit=(0.95, 0.9, 0.8, 0.7, 1.0),
)


@pytest.fixture(autouse=True)
def engines_end_clean():
    yield
    check_engines()


def drafter_with(folder, values):
    """A copy of TINY's drafter with this calibration file (text, or what becomes JSON)."""
    shutil.copytree(tiny_drafter(), folder)
    text = values if isinstance(values, str) else json.dumps(values)
    (folder / CALIBRATION_FILE).write_text(text)
    return folder


def test_the_file_is_read_as_it_was_saved(tmp_path):
    assert read_config(tiny_drafter(), tiny_target()).calibration is None
    folder = drafter_with(tmp_path / "d", "")
    GOOD.save(folder)
    assert read_config(folder, tiny_target()).calibration == GOOD


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"alpha": [1.0] * 4}, "alpha"),
        ({"scale": [1.0, 1.0, 0.0, 1.0, 1.0]}, "scale"),
        ({"hit": [1.0, 1.0, 1.0, 1.0, 1.01]}, "hit"),
        ({"greedy_hit": [1.0, 1.0, -0.5, 1.0, 1.0]}, "greedy_hit"),
        ({"greedy_scale": [1.0, 1.0, "1", 1.0, 1.0]}, "greedy_scale"),
        ({"alpha": [float("nan")] * 5}, "alpha"),
        ({"alpha": [float("inf")] * 5}, "alpha"),
        ({"alpha": 1.0}, "alpha"),
        ({"beta": [1.0] * 5}, "entries"),
    ],
)
def test_a_bad_file_is_named(tmp_path, change, named):
    folder = drafter_with(tmp_path / "d", dataclasses.asdict(GOOD) | change)
    with pytest.raises(ValueError, match=rf"draft: .*{named}") as error:
        read_config(folder, tiny_target())
    assert CALIBRATION_FILE in str(error.value)


def test_a_folder_in_place_of_the_file_is_named(tmp_path):
    folder = drafter_with(tmp_path / "d", "")
    (folder / CALIBRATION_FILE).unlink()
    (folder / CALIBRATION_FILE).mkdir()
    with pytest.raises(ValueError, match=rf"draft: .*{CALIBRATION_FILE}"):
        read_config(folder, tiny_target())


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_a_file_that_is_no_object_is_named(tmp_path, text):
    folder = drafter_with(tmp_path / "d", text)
    with pytest.raises(ValueError, match=CALIBRATION_FILE):
        read_config(folder, tiny_target())


def synthetic(count, trust, heat, hit, noisy, generator):
    """Records whose right candidate is drawn from a multinomial logit of these parameters."""
    shape = (count, DEPTH, 40)
    log_q = (torch.randn(shape, generator=generator) * 2).log_softmax(-1)
    noise = torch.zeros(shape)
    if noisy:
        noise = -torch.empty(shape).exponential_(generator=generator).log()
    law = (trust * log_q + heat * noise).softmax(-1).flatten(0, 1)
    drawn = torch.multinomial(law, 1, generator=generator).view(count, DEPTH)
    right = torch.zeros(shape, dtype=torch.bool).scatter_(2, drawn[..., None], True)
    right &= torch.rand(count, DEPTH, 1, generator=generator) < hit
    return Records(log_q, noise, right, torch.ones(count, DEPTH, dtype=torch.bool))


def test_the_fit_finds_what_made_the_records():
    generator = torch.Generator().manual_seed(2)
    sampled = [synthetic(9000, 0.9, 0.6, 0.8, True, generator) for _ in TEMPERATURES[1:]]
    greedy = synthetic(9000, 0.7, 0.0, 0.9, False, generator)
    found = fit(dict(zip(TEMPERATURES, [greedy, *sampled], strict=True)))
    for depth in range(3):
        assert found.alpha[depth] == pytest.approx(0.9 / 0.6, rel=0.08)
        assert found.scale[depth] == pytest.approx(1 / 0.6, rel=0.08)
        assert found.hit[depth] == pytest.approx(0.8, abs=0.03)
        assert found.greedy_scale[depth] == pytest.approx(1 / 0.7, rel=0.08)
        assert found.greedy_hit[depth] == pytest.approx(0.9, abs=0.03)


def test_depths_with_few_positions_take_the_numbers_above():
    generator = torch.Generator().manual_seed(3)
    records = {t: synthetic(3000, 1.0, 0.7, 0.3, t > 0, generator) for t in TEMPERATURES}
    found = fit(records)
    assert found.alpha[3] == found.alpha[4] and found.hit[3] == found.hit[4]
    assert found.alpha[0] != found.alpha[4]


@torch.inference_mode()
def one_sequence(temperature):
    """Drafter, target weights, and 30 tokens, 8 of them the prompt, with their features."""
    model = TrainableDrafter(read_config(tiny_drafter(), tiny_target()), 256)
    load_weights(model, tiny_drafter())
    weights = load_target_weights(tiny_target())
    tokens = torch.randint(3, 98, (30,), generator=torch.Generator().manual_seed(7)).numpy()
    target = build_target(tiny_target(), get_ops("torch", CPU), CPU, torch.float32, progress=False)
    rows = compute_features(target, [tokens], model.config.target_layer_ids)
    item = Item(Sequence(tokens, 8, temperature), rows, model.config.hidden_size)
    return model, weights, item, rows


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_records_are_the_drafters_candidates_and_the_targets_noise(temperature):
    model, weights, item, rows = one_sequence(temperature)
    tokens = item.sequence.tokens
    found = _draft(model, weights, item, 99)
    assert len(found.known) == 21  # anchors 8 .. 28
    assert found.known[-1].tolist() == [True] + [False] * (DEPTH - 1)
    assert bool((found.right.sum(-1) <= found.known).all())
    features = rows[None, :, : -model.config.hidden_size].float()
    for anchor, depth in ((8, 1), (11, 4), (20, 2)):
        block = torch.full((1, 1, DEPTH + 1), model.config.mask_token_id)
        block[0, 0, 0] = int(tokens[anchor])
        positions = anchor + torch.arange(DEPTH + 1).view(1, 1, -1)
        hidden = model(weights.embedding[block], features, positions)[0, 0, depth]
        log_q = (hidden @ weights.head.t() / (temperature or 1.0)).log_softmax(-1)
        g = gumbel(torch.tensor([99]), torch.tensor([[anchor + depth]]), 0, len(log_q))[0, 0]
        row = anchor - 8
        own = found.log_q[row, depth - 1]
        kept = own.isfinite()
        for value, noise, right in zip(
            own[kept],
            found.noise[row, depth - 1][kept],
            found.right[row, depth - 1][kept],
            strict=True,
        ):
            token = int((log_q - value).abs().argmin())
            assert float((log_q[token] - value).abs()) < 1e-4
            assert float(noise) == (float(g[token]) if temperature else 0.0)
            assert bool(right) == (token == int(tokens[anchor + depth]))
        best = (log_q + g if temperature else log_q).topk(10).indices
        assert all((own - log_q[i]).abs().min() < 1e-4 for i in best)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_records_are_of_the_tokens_that_are_drafted(temperature):
    """Log-probabilities among them; what the target said instead is never right."""
    model, weights, item, _ = one_sequence(temperature)
    tokens = item.sequence.tokens
    some = torch.tensor([int(tokens[12]), int(tokens[20]), 97]).unique()
    found = _draft(model, weights, item, 99, some)
    assert found.log_q.shape[-1] == (3 if temperature == 0 else 9)
    torch.testing.assert_close(found.log_q.exp().sum(-1), torch.ones(21, DEPTH))
    right = found.right[:, 0].any(-1)
    assert right.tolist() == [int(t) in some for t in tokens[9:]]


def test_weights_are_log_probabilities_of_being_right():
    weights = TreeWeights.make(GOOD, DEPTH, CPU)
    log_q = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    log_q[0, 1, 5:] = -torch.inf
    got = weights.greedy(log_q).double().exp()
    scaled = (log_q.double() / torch.tensor(GOOD.greedy_scale[:3])[:, None]).softmax(-1)
    torch.testing.assert_close(got, scaled * torch.tensor(GOOD.greedy_hit[:3]).double()[:, None])
    shares = weights.sampled(log_q).exp().sum(-1)
    torch.testing.assert_close(shares[1], torch.tensor(GOOD.hit[:3]))
    plain = TreeWeights.make(None, DEPTH, CPU)
    assert torch.equal(plain.greedy(log_q), log_q) and torch.equal(plain.sampled(log_q), log_q)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_calibrated_engine_has_other_trees_and_the_same_tokens(tmp_path, temperature):
    draft = drafter_with(tmp_path / "d", dataclasses.asdict(GOOD))
    params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=3, trace=True)
    prompt = [5, 9, 33, 12]
    with tiny_engine() as plain, tiny_engine(draft=str(draft)) as calibrated:
        (want,), (got,) = plain.generate(prompt, params), calibrated.generate(prompt, params)
        assert got.token_ids == want.token_ids
        ours, theirs = got.trace[0], want.trace[0]
        assert ours.scores != theirs.scores
        if not temperature:
            # No node can be likelier than a hit at depth 1.
            assert max(ours.scores[1:]) < torch.tensor(GOOD.greedy_hit[0]).log()
    with tiny_engine(draft=str(draft), coupling=False) as uncoupled:
        (again,) = uncoupled.generate(prompt, params)
        assert again.token_ids == want.token_ids
        if not temperature:
            assert again.trace[0].scores == want.trace[0].scores


class Numbers:
    """A tokenizer of numbers, for a target folder that has none."""

    chat_template = ""

    def encode(self, text):
        return [int(part) for part in text.split()]


def test_the_command_writes_a_file_that_the_engine_reads(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Engine, "tokenizer", Numbers())
    draft = tmp_path / "d"
    shutil.copytree(tiny_drafter(), draft)
    asked = tmp_path / "prompts.txt"
    asked.write_text("\n".join(f"{i} {i + 9} {2 * i + 3}" for i in range(3, 39)))
    options = ["--target", str(tiny_target()), "--draft", str(draft), "--work", str(tmp_path)]
    options += ["--prompts", str(asked), "--max-new-tokens", "30"]
    assert main(["calibrate", *options]) == 0
    assert "temperature 0.7" in capsys.readouterr().out
    whole = read_config(draft, tiny_target()).calibration
    calibration = read_config(draft, tiny_target()).calibration
    assert calibration is not None and len(calibration.alpha) == DEPTH
    with tiny_engine(draft=str(draft)) as engine, tiny_engine() as plain:
        params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=1)
        got, want = (e.generate([5, 6, 7], params)[0].token_ids for e in (engine, plain))
        assert got == want
    # Of a few tokens, the right one is less often among the candidates.
    shorten(draft, torch.tensor([3, 9, 27]))
    assert read_config(draft, tiny_target()).calibration is None
    assert main(["calibrate", *options]) == 0
    few = read_config(draft, tiny_target()).calibration
    assert few.greedy_hit[0] < whole.greedy_hit[0] and few.hit[0] < whole.hit[0]
    asked.write_text("4 5 6")
    assert main(["calibrate", *options]) == 1
    assert "prompts" in capsys.readouterr().err
