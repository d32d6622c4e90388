"""The drawing of a round's tree: valid, complete, without overlaps, whatever the tokens are."""

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.trace import ACCEPTED, ANCHOR, BONUS, OTHER, draw_tree, visible

SVG = "{http://www.w3.org/2000/svg}"


@dataclass
class Round:
    tokens: list
    parents: list
    scores: list
    path: list
    emitted: list


@dataclass
class Tokens:
    """A tokenizer of which token `i` is `texts[i]`."""

    texts: list = field(default_factory=list)

    def decode(self, ids):
        return "".join(self.texts[i] for i in ids)


@dataclass
class Box:
    note: str
    text: str
    left: float
    top: float
    right: float
    bottom: float
    fill: str


def read(drawing):
    """Boxes and edges of a drawing; fails if it is not well-formed XML."""
    root = ET.fromstring(str(drawing))
    assert root.tag == f"{SVG}svg"
    width, height = (float(root.get(name)) for name in ("width", "height"))
    boxes = []
    for group in root.findall(f"{SVG}g"):
        rect = group.find(f"{SVG}rect")
        x, y, w, h = (float(rect.get(name)) for name in ("x", "y", "width", "height"))
        box = Box(
            group.findtext(f"{SVG}title"), group.findtext(f"{SVG}text"), x, y, x + w, y + h,
            rect.get("fill"),
        )  # fmt: skip
        assert box.left >= 0
        assert box.top >= 0
        assert box.right <= width
        assert box.bottom <= height
        boxes.append(box)
    edges = []
    for path in root.findall(f"{SVG}path"):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", path.get("d"))]
        edges.append((numbers[:2], numbers[-2:], path.get("stroke")))
    return boxes, edges


@st.composite
def rounds(draw):
    """Any tree of up to 64 nodes with an accepted path from its root, as the engine traces it."""
    size = draw(st.integers(1, 64))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]
    depth_scores = [0.0]
    for parent in parents[1:]:
        depth_scores.append(depth_scores[parent] - draw(st.floats(0, 20)))
    tokens = list(range(size))
    path = [0]
    while children := [i for i in range(size) if parents[i] == path[-1]]:
        if draw(st.booleans()):
            break
        path.append(draw(st.sampled_from(children)))
    emitted = [tokens[i] for i in path[1:]] + [size]
    texts = [draw(st.text(max_size=20)) for _ in range(size + 1)]
    return Round(tokens, parents, depth_scores, path, emitted), Tokens(texts)


@given(rounds(), st.booleans())
def test_every_node_is_drawn_once_and_none_overlap(case, named):
    trace, tokenizer = case
    boxes, edges = read(draw_tree(trace, tokenizer if named else None))
    size = len(trace.tokens)
    assert [box.note.split(",")[0] for box in boxes] == [
        *(f"node {i}" for i in range(size)), "bonus",
    ]  # fmt: skip
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            assert a.right < b.left or b.right < a.left or a.bottom < b.top or b.bottom < a.top, (
                a,
                b,
            )
    fills = [box.fill for box in boxes]
    assert fills[0] == ANCHOR.fill
    assert fills[size] == BONUS.fill
    for i in range(1, size):
        assert fills[i] == (ACCEPTED if i in trace.path else OTHER).fill

    def ends(parent, child):
        return (
            [boxes[parent].right, (boxes[parent].top + boxes[parent].bottom) / 2],
            [boxes[child].left, (boxes[child].top + boxes[child].bottom) / 2],
        )

    wanted = [(*ends(trace.parents[i], i), i in trace.path) for i in range(1, size)]
    expected = [(a, b, (ACCEPTED if on else OTHER).line) for a, b, on in wanted]
    expected.append((*ends(trace.path[-1], size), BONUS.line))
    close = pytest.approx
    assert len(edges) == len(expected)
    for start, end, line in expected:
        assert any(
            start == close(s, abs=0.11) and end == close(e, abs=0.11) and line == drawn
            for s, e, drawn in edges
        )


@given(rounds())
def test_the_drawing_is_no_taller_than_its_leaves(case):
    trace, _ = case
    boxes, _ = read(draw_tree(trace))
    parents = [*trace.parents, trace.path[-1]]
    leaves = len(parents) - len(set(parents[1:]))
    rows = (max(b.top for b in boxes) - min(b.top for b in boxes)) / 28 + 1
    assert rows <= leaves + 1e-6


def test_siblings_stand_best_first_and_children_to_the_right():
    trace = Round([5, 6, 7, 8], [-1, 0, 0, 1], [0.0, -0.1, -2.3, -0.2], [0, 1], [6, 9])
    boxes, _ = read(draw_tree(trace))
    assert boxes[1].top < boxes[2].top
    assert boxes[0].right < boxes[1].left == boxes[2].left < boxes[3].left
    assert [box.text for box in boxes] == ["5", "6", "7", "8", "9"]


def test_probabilities_are_those_of_the_path():
    trace = Round([1, 2, 3], [-1, 0, 1], [0.0, -0.6931472, -4.6051702], [0], [9])
    drawing = draw_tree(trace)
    assert ">50%<" in drawing
    assert ">1%<" in drawing
    plain = draw_tree(Round([1, 2], [-1, 0], [0.0, 0.0], [0], [9]))
    assert "%" not in plain


def test_a_round_cut_short_shows_its_last_token_in_the_tree():
    trace = Round([5, 6, 7], [-1, 0, 1], [0.0, -0.1, -0.2], [0, 1], [6, 7])
    boxes, _ = read(draw_tree(trace))
    assert len(boxes) == 3
    assert boxes[2].fill == ACCEPTED.fill


def test_a_plain_round_is_an_anchor_and_a_bonus():
    boxes, edges = read(draw_tree(Round([5], [-1], [0.0], [0], [6])))
    assert [box.fill for box in boxes] == [ANCHOR.fill, BONUS.fill]
    assert len(edges) == 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (" the", "·the"),
        ("\n\n\t", "↵↵⇥"),
        ("<&>\"'", "<&>\"'"),
        ("]]>", "]]>"),
        ("\x00\x1b", "\\x00\\x1b"),
        ("\u200d\ufffe\ud800", "\\u200d\\ufffe\\ud800"),
        ("\u3000", "\\u3000"),
        ("\u0301", "◌\u0301"),
        ("🙂日é", "🙂日é"),
    ],
)
def test_tokens_are_made_visible(text, shown):
    assert visible(text) == shown
    trace = Round([0, 1], [-1, 0], [0.0, -1.0], [0, 1], [1, 0])
    boxes, _ = read(draw_tree(trace, Tokens([text, "x"])))
    assert boxes[0].text in (shown, shown[:15] + "…")


def test_the_real_tokenizer_shows_leading_spaces(demo_target):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_target)
    ids = tokenizer.encode("one two\n")
    boxes, _ = read(draw_tree(Round(ids[:2], [-1, 0], [0.0, -1.0], [0, 1], ids[1:]), tokenizer))
    assert [box.text for box in boxes] == ["one", "·two", "↵"]


def test_a_stripped_leading_space_is_shown():
    class Stripping(Tokens):
        def decode(self, ids):
            return super().decode(ids).replace("▁", " ").lstrip(" ")

        def convert_ids_to_tokens(self, token):
            return self.texts[token]

    boxes, _ = read(draw_tree(Round([0], [-1], [0.0], [0], [1]), Stripping(["▁a", "b"])))
    assert [box.text for box in boxes] == ["·a", "b"]


def test_wide_characters_get_wide_boxes():
    trace = Round([0, 1], [-1, 0], [0.0, 0.0], [0, 1], [1, 0])
    boxes, _ = read(draw_tree(trace, Tokens(["日本", "nihon"])))
    widths = [box.right - box.left for box in boxes]
    assert 4 * 7.3 < widths[0] < widths[1]


def test_a_notebook_gets_a_picture():
    drawing = draw_tree(Round([5], [-1], [0.0], [0], [6]))
    assert drawing._repr_svg_() == drawing
    assert drawing.startswith("<svg ")
    assert "<svg" not in repr(drawing)


@pytest.mark.parametrize("wrong", [None, [], "x"])
def test_what_is_no_round_is_named(wrong):
    with pytest.raises(ValueError, match=r"^round_trace: .*trace=True"):
        draw_tree(wrong)
