"""Greedy output of the real pair is plain decoding's, and transformers', token for token."""

import functools
import gc
import itertools

import pytest
import torch
from stubs import Agreement, check_engines, hf_model, watch

from ddtree import Engine, SamplingParams

TOKENS = 96
CHATS = (
    "Explain why the sky is blue to a curious ten-year-old.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Write a Python function that checks whether a number is prime, with comments.",
    "List ten healthy breakfast ideas, one per line.",
    "What are the main differences between a frog and a toad?",
    "Translate into French: 'Good morning, how are you today? I would like a coffee, please.'",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h? Show each step.",
    "Give me a recipe for vegetable soup with quantities in grams.",
    "Write a polite e-mail asking my landlord to repair the heating before the weekend.",
    "Count from one to forty in words, separated by commas.",
    "Describe how a bill becomes law, in numbered steps.",
    "Write a poem of twelve lines about the sea in winter.",
    "What is the capital of Australia?",
    "Compare renting and buying a home. Make a table with advantages and disadvantages.",
    "Convert this to JSON: name Ada Lovelace, born 1815, fields mathematics and computing.",
    "Explain recursion using the example of Russian dolls.",
    "Who are you, and what can you do for me?",
    "Give a SQL query that finds the three customers with the highest total order value.",
    "Erkläre mir bitte auf Deutsch, was ein Regenbogen ist.",
    "Write a dialogue between a cat and a dog who argue about who is smarter.",
    "What should I pack for a week of hiking in the mountains in autumn?",
    "Repeat the word 'banana' fifty times.",
    "Explain the water cycle. Use headings: evaporation, condensation, precipitation.",
)
BUDGETS, MODES, PAGES, BATCHES = (0, 1, 7, 16, 64), ("tree", "chain"), (1, 4, 16), (1, 3, 8)
CONFIGS = [
    (budget, MODES[(i + j) % 2], page_size, BATCHES[(i + j) % 3])
    for i, budget in enumerate(BUDGETS)
    for j, page_size in enumerate(PAGES)
]
"""Every pair of values of two settings occurs in one of these 15."""
ALL_CONFIGS = [*CONFIGS, ("auto", "tree", 16, 1), ("auto", "tree", 4, 8)]


@pytest.fixture(autouse=True)
def pages_free():
    """Every test leaves every engine with all its pages."""
    yield
    check_engines()


@pytest.fixture(scope="module")
def agreement():
    """Near-ties of the whole module, judged together."""
    agreement = Agreement()
    yield agreement
    agreement.close()


@pytest.fixture(scope="module")
def make_engine(demo_target, demo_drafter):
    """Engine(budget, page size, batch) of the demo pair; the one before is closed."""
    last = []

    def make(budget, page_size, batch):
        for engine in last:
            engine.close()
        last.clear()
        gc.collect()
        last.append(
            watch(
                Engine(
                    str(demo_target),
                    str(demo_drafter),
                    budget=budget,
                    page_size=page_size,
                    max_batch_size=batch,
                    max_model_len=256,
                )
            )
        )
        return last[0]

    yield make
    for engine in last:
        engine.close()


@functools.cache
def reference(folder, count, number):
    """(prompt, answer) of the first `number` chats by transformers generate, eight at a time.

    Left padding and the attention mask are what transformers offers for batches.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = hf_model(folder)
    found = []
    for start in range(0, number, 8):
        chats = [
            [{"role": "user", "content": text}] for text in CHATS[start : min(start + 8, number)]
        ]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(
                **inputs, max_new_tokens=count, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        eos = model.generation_config.eos_token_id
        for ids, mask, row in zip(inputs.input_ids, inputs.attention_mask, out):
            answer = row[len(ids) :].tolist()
            if eos in answer:
                answer = answer[: answer.index(eos) + 1]
            found.append((ids[mask.bool()].tolist(), answer))
    return found


def assert_same(agreement, folder, outputs, wants, label):
    """Prompts are the same, and outputs up to near-ties."""
    for output, (prompt, want) in zip(outputs, wants, strict=True):
        assert output.prompt_token_ids == prompt
        agreement.check(folder, prompt, output.token_ids, want, label)


def chat(engine, chosen, count, mode):
    """The engine's outputs for the chats of these indices."""
    messages = [[{"role": "user", "content": CHATS[i]}] for i in chosen]
    return engine.chat(messages, SamplingParams(max_new_tokens=count, speculation=mode))


def test_the_configurations_cover_all_pairs():
    assert len(CONFIGS) <= 16 and len(set(CHATS)) >= 24
    values = (BUDGETS, MODES, PAGES, BATCHES)
    for one, two in itertools.combinations(range(4), 2):
        met = {(config[one], config[two]) for config in CONFIGS}
        assert met == set(itertools.product(values[one], values[two]))


def test_three_chats(agreement, make_engine, demo_target):
    """Off, chain and tree in one engine, on the start of three answers."""
    engine = make_engine(7, 4, 3)
    wants = reference(demo_target, 24, 3)
    for mode in ("off", "chain", "tree"):
        outputs = chat(engine, range(3), 24, mode)
        assert_same(agreement, demo_target, outputs, wants, mode)
        rounds = sum(output.stats.rounds for output in outputs)
        emitted = sum(len(output.token_ids) - 1 for output in outputs)
        if mode == "off":
            assert rounds == emitted
        else:
            assert rounds < emitted, "the drafter is of no use here"


@pytest.fixture(scope="module")
def plain(agreement, make_engine, demo_target):
    """(prompt, ids) of every chat by plain decoding, equal to transformers'."""
    outputs = chat(make_engine(0, 16, 8), range(len(CHATS)), TOKENS, "off")
    wants = reference(demo_target, TOKENS, len(CHATS))
    assert_same(agreement, demo_target, outputs, wants, "off against transformers")
    assert sum(len(output.token_ids) for output in outputs) > 0.8 * TOKENS * len(CHATS)
    return [(output.prompt_token_ids, output.token_ids) for output in outputs]


SHARE = 3
"""A configuration takes every third chat, so that each chat meets five configurations."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", range(len(ALL_CONFIGS)), ids=lambda i: "-".join(map(str, ALL_CONFIGS[i]))
)
def test_covering_array(agreement, make_engine, plain, demo_target, index):
    """Each configuration's outputs equal plain decoding's, and so transformers'."""
    budget, mode, page_size, batch = ALL_CONFIGS[index]
    engine = make_engine(budget, page_size, batch)
    chosen = range(index % SHARE, len(CHATS), SHARE)
    outputs = chat(engine, chosen, TOKENS, mode)
    wants = [plain[i] for i in chosen]
    assert_same(agreement, demo_target, outputs, wants, str(ALL_CONFIGS[index]))
    if budget or mode == "chain":
        rounds = sum(output.stats.rounds for output in outputs)
        assert rounds < 0.9 * sum(len(output.token_ids) - 1 for output in outputs)
