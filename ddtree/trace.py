"""Draws the tree of one decoding round as SVG."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from xml.sax.saxutils import escape

ROW, BOX, GAP, MARGIN = 28, 21, 34, 16
"""Pixels: distance of two rows, height of a node, width between columns, border."""
CHAR, FONT = 7.3, 12
"""Pixels: width of a monospace character, and its font size."""
LONGEST = 16
"""Characters of a token that are shown."""
FAMILY = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Style:
    """How one kind of node is drawn."""

    name: str
    fill: str
    line: str
    text: str
    dash: str = ""
    strong: bool = False


ANCHOR = Style("anchor", "#24292f", "#24292f", "#ffffff", strong=True)
ACCEPTED = Style("accepted", "#dafbe1", "#1a7f37", "#0b4a1c", strong=True)
BONUS = Style("bonus: the target's own", "#fff1d6", "#bc6c00", "#6a3c00", dash="4 3", strong=True)
OTHER = Style("not accepted", "#ffffff", "#c4cad1", "#57606a")


class Round(Protocol):
    """One round of `output.trace`; node 0 is the anchor, its parent -1."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    path: list[int]
    emitted: list[int]


class Drawing(str):
    """SVG text that a notebook shows as a picture."""

    def _repr_svg_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"<SVG drawing, {len(self)} characters>"


@dataclass
class Node:
    """A node as it is drawn."""

    token: int
    depth: int
    style: Style
    label: str
    share: str
    note: str
    children: list[int] = field(default_factory=list)
    parent: int = -1
    y: float = 0.0

    @property
    def width(self) -> float:
        """Pixels of the node's box."""
        return (
            CHAR * (_columns(self.label) + (len(self.share) * 0.85 + 1 if self.share else 0)) + 14
        )


def draw_tree(round_trace: Round, tokenizer: Any = None) -> Drawing:
    """Draw the draft tree of one round, with the accepted path and the bonus token highlighted.

    The tree grows from the anchor at the left; siblings stand best first from the top. The number
    in a node is the drafter's probability of the whole path up to it. A notebook shows the result
    as a picture; elsewhere it is a `str` to write to an .svg file.

    Args:
        round_trace: one round of `output.trace`, e.g. ``output.trace[0]``.
        tokenizer: `engine.tokenizer`, to show text; None: token ids are shown.

    Raises:
        ValueError: this is not a round's trace, or not a tokenizer.
    """
    for name in ("tokens", "parents", "scores", "path", "emitted"):
        if not hasattr(round_trace, name):
            raise ValueError(
                "round_trace: expected one round of output.trace (from "
                f"SamplingParams(trace=True)), got {type(round_trace).__name__}"
            )
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"tokenizer: expected engine.tokenizer or None, got {tokenizer!r}")
    nodes = _nodes(round_trace, tokenizer)
    rows = _tidy(nodes)
    depth = max(node.depth for node in nodes)
    widths = [max(n.width for n in nodes if n.depth == d) for d in range(depth + 1)]
    lefts = [MARGIN + sum(widths[:d]) + GAP * d for d in range(depth + 1)]

    shown = [_label(token, tokenizer) for token in round_trace.emitted]
    accepted = sum(node.style is ACCEPTED for node in nodes)
    title = f"{len(round_trace.tokens)} nodes, {accepted} accepted; emitted: {' '.join(shown)}"
    title = title if len(title) <= 120 else title[:119] + "…"
    top = MARGIN + 30
    legend = top + rows * ROW + 10
    right = max(
        lefts[-1] + widths[-1],
        MARGIN + CHAR * _columns(title),
        MARGIN + sum(CHAR * len(style.name) + 34 for style in (ANCHOR, ACCEPTED, BONUS, OTHER)),
    )
    width, height = math.ceil(right + MARGIN), math.ceil(legend + MARGIN + 8)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="{FAMILY}" font-size="{FONT}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="6" fill="#ffffff"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 10}" fill="#24292f" font-weight="bold">'
        f"{escape(title)}</text>",
    ]

    def middle(node: Node) -> float:
        return top + node.y * ROW + ROW / 2

    # The highlighted edges come last, so that nothing is drawn over them.
    for node in sorted(nodes[1:], key=lambda node: node.style.strong):
        parent = nodes[node.parent]
        x0, y0 = lefts[parent.depth] + parent.width, middle(parent)
        x1, y1 = lefts[node.depth], middle(node)
        bend = x1 - GAP / 2
        parts.append(
            f'<path d="M{x0:.1f} {y0:.1f} H{x1 - GAP:.1f} C{bend:.1f} {y0:.1f} {bend:.1f} '
            f'{y1:.1f} {x1:.1f} {y1:.1f}" fill="none" {_stroke(node.style)}/>'
        )
    parts += [_box(node, lefts[node.depth], middle(node)) for node in nodes]
    parts.append(_legend(legend))
    parts.append("</svg>")
    return Drawing("\n".join(parts))


def _nodes(trace: Round, tokenizer: Any) -> list[Node]:
    """The round's nodes and, as a last node, the bonus token."""
    path = set(trace.path)
    scored = any(trace.scores)
    nodes: list[Node] = []
    for index, (token, parent) in enumerate(zip(trace.tokens, trace.parents, strict=True)):
        style = ANCHOR if index == 0 else ACCEPTED if index in path else OTHER
        share = _percent(trace.scores[index]) if index and scored else ""
        note = f"node {index}, token id {token}, score {trace.scores[index]:.3f}"
        depth = nodes[parent].depth + 1 if index else 0
        nodes.append(Node(token, depth, style, _label(token, tokenizer), share, note))
        if index:
            nodes[index].parent = parent
            nodes[parent].children.append(index)

    last = trace.path[-1] if trace.path else 0
    if len(trace.emitted) < max(1, len(trace.path)):
        return nodes
    token = trace.emitted[-1]
    for child in nodes[last].children:
        if nodes[child].token == token:  # a round cut short: its last token is a node
            nodes[child].style = ACCEPTED
            return nodes
    bonus = Node(token, nodes[last].depth + 1, BONUS, _label(token, tokenizer), "",
                 f"bonus, token id {token}", parent=last)  # fmt: skip
    nodes[last].children.append(len(nodes))
    return [*nodes, bonus]


def _tidy(nodes: list[Node]) -> float:
    """Set every node's `y` in rows, subtrees as close as they fit; returns the rows needed.

    A node stands at the middle of its children, whose subtrees are pushed together until they
    touch at some depth (Reingold and Tilford, Tidier Drawings of Trees, 1981, with the contours
    kept as one pair of bounds per depth).
    """
    shifts = [0.0] * len(nodes)
    contours: list[dict[int, tuple[float, float]]] = [{} for _ in nodes]
    order = sorted(range(len(nodes)), key=lambda i: -nodes[i].depth)
    for index in order:
        node, merged = nodes[index], contours[index]
        for child in node.children:
            own = contours[child]
            shifts[child] = max((merged[d][1] + 1 - own[d][0] for d in own if d in merged),
                                default=0.0)  # fmt: skip
            for d, (low, high) in own.items():
                low, high = low + shifts[child], high + shifts[child]
                merged[d] = (merged[d][0], high) if d in merged else (low, high)
        at = [shifts[child] + nodes[child].y for child in node.children]
        node.y = (at[0] + at[-1]) / 2 if at else 0.0
        merged[node.depth] = (node.y, node.y)
    # Until here `y` is relative to the subtree's own origin.
    offsets = [0.0] * len(nodes)
    for index in reversed(order):
        node = nodes[index]
        offsets[index] = shifts[index] + (offsets[node.parent] if node.parent >= 0 else 0.0)
    for node, offset in zip(nodes, offsets, strict=True):
        node.y += offset
    low = min(node.y for node in nodes)
    for node in nodes:
        node.y -= low
    return max(node.y for node in nodes) + 1


def _box(node: Node, left: float, middle: float) -> str:
    style = node.style
    base = middle + FONT * 0.35
    share = ""
    if node.share:
        share = (
            f'<text x="{left + node.width - 7:.1f}" y="{base:.1f}" text-anchor="end" '
            f'font-size="10" fill="{style.text}" fill-opacity="0.7">{escape(node.share)}</text>'
        )
    weight = ' font-weight="bold"' if style.strong else ""
    return (
        f"<g><title>{escape(node.note)}</title>"
        f'<rect x="{left:.1f}" y="{middle - BOX / 2:.1f}" width="{node.width:.1f}" '
        f'height="{BOX}" rx="5" fill="{style.fill}" {_stroke(style)}/>'
        f'<text x="{left + 7:.1f}" y="{base:.1f}" fill="{style.text}"{weight}>'
        f"{escape(node.label)}</text>{share}</g>"
    )


def _legend(y: float) -> str:
    parts, x = [], float(MARGIN)
    for style in (ANCHOR, ACCEPTED, BONUS, OTHER):
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="14" height="11" rx="3" fill="{style.fill}" '
            f'{_stroke(style)}/><text x="{x + 20:.1f}" y="{y + 10:.1f}" fill="#57606a">'
            f"{escape(style.name)}</text>"
        )
        x += CHAR * len(style.name) + 34
    return "".join(parts)


def _stroke(style: Style) -> str:
    dash = f' stroke-dasharray="{style.dash}"' if style.dash else ""
    return f'stroke="{style.line}" stroke-width="{2 if style.strong else 1}"{dash}'


def _percent(score: float) -> str:
    if not math.isfinite(score):
        return ""
    share = 100 * math.exp(min(score, 0.0))
    return f"{share:.0f}%" if share >= 0.95 else f"{share:.1f}%" if share >= 0.05 else "<.1%"


def _label(token: int, tokenizer: Any) -> str:
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token])
    piece = getattr(tokenizer, "convert_ids_to_tokens", str)(token)
    if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" "):
        text = " " + text  # a decoder that strips the first token's space
    label = visible(text) or f"[{token}]"
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"


def visible(text: str) -> str:
    """`text` with whitespace as signs, and everything else without a glyph as an escape."""
    signs = {" ": "·", "\n": "↵", "\t": "⇥", "\r": "␍"}

    def show(char: str) -> str:
        if char in signs:
            return signs[char]
        if unicodedata.category(char)[0] in "CZ":
            code = ord(char)
            return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
        return char

    shown = "".join(map(show, text))
    return "◌" + shown if shown and unicodedata.combining(shown[0]) else shown


def _columns(text: Sequence[str]) -> int:
    """Width of a text in monospace columns."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
