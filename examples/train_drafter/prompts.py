"""Prompts to ask the target: from a file, or composed of templates and topics."""

from __future__ import annotations

import random
from pathlib import Path

TEMPLATES = (
    "What is {}?",
    "Explain {} to a ten-year-old.",
    "Write a short paragraph about {}.",
    "Give me five facts about {}.",
    "List the main advantages and disadvantages of {}.",
    "Why does {} matter?",
    "Write a short story in which {} plays a part.",
    "How would you teach {} in one lesson?",
    "Write a poem about {}.",
    "What are common misunderstandings about {}?",
    "Summarise the history of {}.",
    "Give step-by-step advice to somebody who is new to {}.",
    "Write an email that invites colleagues to a talk on {}.",
    "Compare {} today with fifty years ago.",
    "Which three questions should I ask an expert on {}?",
    "Write a dialogue between two friends who disagree about {}.",
    "Describe {} without using technical terms.",
    "Make a weekly plan for learning more about {}.",
    "What would change if {} did not exist?",
    "Write the introduction of an essay on {}.",
    "Name the most important ideas behind {} and explain each in a sentence.",
    "Write a quiz with four questions and answers about {}.",
    "How does {} affect everyday life?",
    "Write a product description of a book on {}.",
    "What are the risks of {}, and how can they be reduced?",
    "Write a speech of one minute in praise of {}.",
)

TOPICS = """
photosynthesis | gravity | the water cycle | volcanoes | black holes | vaccines | the human heart
sleep | memory | bees | coral reefs | whales | migration of birds | rainforests | deserts
glaciers | earthquakes | tides | lightning | the periodic table | atoms | magnets | electric cars
solar panels | wind turbines | nuclear power | recycling | composting | vegetable gardening
house plants | baking bread | fermented food | coffee | tea | chocolate | olive oil
cheese making | street food | healthy breakfasts | running | swimming | yoga | chess | football
basketball | mountain climbing | cycling to work | camping | photography | oil painting
watercolours | pottery | knitting | woodworking | jazz | classical music | playing the guitar
singing in a choir | film making | theatre | poetry | science fiction | fairy tales
ancient Egypt | the Roman Empire | the Silk Road | the printing press | the Industrial Revolution
the space race | the moon landing | democracy | human rights | taxes | inflation | budgeting
saving for retirement | small businesses | job interviews | remote work | teamwork | leadership
public speaking | negotiation | time management | good habits | stress at work | meditation
friendship | raising children | adopting a dog | caring for cats | learning a language
sign language | libraries | museums | public transport | city planning | bridges | skyscrapers
maps | the metric system | probability | prime numbers | fractions | geometry | algorithms
sorting a list in Python | recursion | databases | spreadsheets | the internet | passwords
open-source software | artificial intelligence | robots | 3D printing | satellites | telescopes
microscopes | antibiotics | first aid | allergies | nutrition labels | clean drinking water
ocean plastic | climate change | wildfires | floods | beekeeping | fishing | forestry
sheep farming | rice growing | spices | fashion design | shoes | perfume | jewellery | clocks
calendars | bicycles | trains | aeroplanes | sailing boats | lighthouses | castles | fireworks
birthday parties | weddings | New Year traditions | travelling by night train | packing light
budget travel | neighbourhood gardens | volunteering | local elections | newspapers | podcasts
advertising | video games | board games | puzzles | magic tricks | dreams | humour | curiosity
kindness | honesty
"""


def compose(count: int, seed: int = 0) -> list[str]:
    """`count` different prompts of templates and topics, in a random order.

    Raises:
        ValueError: more are asked for than there are.
    """
    topics = [topic.strip() for line in TOPICS.splitlines() for topic in line.split("|")]
    topics = [topic for topic in topics if topic]
    every = [template.format(topic) for template in TEMPLATES for topic in topics]
    if not 0 <= count <= len(every):
        raise ValueError(f"compose: {len(every)} prompts can be composed, {count} were asked for")
    return random.Random(seed).sample(every, count)


def read_prompts(path: Path) -> list[str]:
    """One prompt per line; blank lines and lines that begin with `#` are comments.

    Raises:
        ValueError: the file cannot be read, is not UTF-8 text or has no prompts; it is named.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"prompts: {error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"prompts: {path} must be UTF-8 text: {error}") from error
    if "\0" in text:
        raise ValueError(f"prompts: {path} must be UTF-8 text, but has a zero byte")
    lines = [line.strip() for line in text.splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise ValueError(f"prompts: {path} has no prompts")
    return prompts


def overlap(prompt: str, others: list[str]) -> tuple[float, str]:
    """The most similar of `others`, by shared words over all words (Jaccard), and how similar."""
    own = _words(prompt)
    bags = ((text, _words(text)) for text in others)
    scores = [(len(own & words) / max(1, len(own | words)), text) for text, words in bags]
    return max(scores, default=(0.0, ""))


def _words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() else " " for c in text.lower()).split())
