"""The decode round, draft to commit, as one function of device tensors; and the prefill chunk.

Nothing here reads a value back to the host, and every shape follows from the `DecodeSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ddtree.runtime.kv_cache import slots_of
from ddtree.runtime.pages import DUMMY_PAGE
from ddtree.runtime.plan import ROW_LENGTH, ROW_RUNNING, ROW_STOPPED, DecodeSpec
from ddtree.runtime.sampler import choose
from ddtree.runtime.stats import StageTimer
from ddtree.state import RowState, StepState
from ddtree.tree.build import Tree, build_tree, chain_tree
from ddtree.tree.verify import accept, accept_chain

FAR = 1 << 40


@dataclass(frozen=True)
class Machine:
    """What a step runs on; the same for every step of an engine."""

    target: Any
    drafter: Any | None
    ops: Any
    target_kv: Tensor
    """[layers, slots, 2, Hkv, D]."""
    draft_kv: Tensor | None
    page_size: int
    num_candidates: int
    """K: candidates kept per depth."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose residual streams feed the drafter."""
        return () if self.drafter is None else self.drafter.config.target_layer_ids


def decode_step(
    machine: Machine,
    rows: RowState,
    slot_ids: Tensor,
    table_width: int,
    spec: DecodeSpec,
    timer: StageTimer,
) -> Tensor:
    """Run one round for the rows `slot_ids [B]` and update them in place.

    Returns the report `[B, width]` int64 in the columns of `ReportLayout`.
    """
    row = rows.gather(slot_ids, table_width)
    device = slot_ids.device
    block = spec.path_len
    reach = torch.arange(max(spec.num_nodes, block), device=device)
    scratch_positions = row.length[:, None] + reach
    scratch = slots_of(row.block_table, scratch_positions, machine.page_size)

    tree = _draft_tree(machine, row, scratch_positions, scratch, spec, timer)
    timer.mark("build")

    speculate = spec.mode != "off"
    nodes = spec.num_nodes
    kind = "tree" if spec.mode == "tree" else "causal"
    views = machine.target.views(kind)
    plan = machine.ops.plan_attention(
        row.block_table,
        row.length,
        nodes,
        machine.page_size,
        views,
        words=tree.words if kind == "tree" else None,
    )
    state = StepState(row.length[:, None] + tree.depths, scratch[:, :nodes], plan)
    taps = machine.taps if speculate else ()
    hidden, features = machine.target(tree.tokens, state, machine.target_kv, taps)
    chosen = choose(machine.target, machine.ops, hidden)
    timer.mark("verify")

    path = (accept if spec.mode == "tree" else accept_chain)(tree, chosen, block - 1)
    emitted = chosen.gather(1, path.nodes) if speculate else chosen
    count, status = _finish(row, emitted, path.count)
    if speculate:
        _commit(machine, spec, scratch, scratch_positions, path.nodes, count, features)
    last = emitted.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0] if speculate else chosen[:, 0]
    rows.length.index_copy_(0, slot_ids, row.length + count)
    rows.anchor.index_copy_(0, slot_ids, torch.where(count > 0, last, row.anchor))
    rows.done.index_copy_(0, slot_ids, row.done | (status != ROW_RUNNING))
    report = torch.cat(
        (
            torch.stack((count, status, tree.valid.sum(1)), dim=1),
            emitted,
            path.nodes,
            tree.tokens,
            tree.parents,
            tree.scores.view(torch.int32).long(),
        ),
        dim=1,
    )
    timer.mark("commit")
    return report


def _draft_tree(
    machine: Machine,
    row: RowState,
    positions: Tensor,
    scratch: Tensor,
    spec: DecodeSpec,
    timer: StageTimer,
) -> Tree:
    """Draft a block per row and turn its distributions into the round's tree."""
    if spec.mode == "off":
        return chain_tree(row.anchor, row.anchor.new_empty(row.anchor.shape[0], 0))
    drafter, ops = machine.drafter, machine.ops
    assert drafter is not None and machine.draft_kv is not None
    block = spec.path_len
    tokens = torch.full(
        (row.anchor.shape[0], block), drafter.config.mask_token_id, device=row.anchor.device
    )
    tokens[:, 0] = row.anchor
    plan = ops.plan_attention(row.block_table, row.length, block, machine.page_size, drafter.views)
    state = StepState(positions[:, :block], scratch[:, :block], plan)
    hidden = drafter(machine.target.embed(tokens), state, machine.draft_kv)
    logits = machine.target.logits(hidden[:, 1:])
    if spec.mode == "chain":
        ids = ops.argmax(logits)
        timer.mark("draft")
        return chain_tree(row.anchor, ids)
    ids, weights = ops.top_candidates(logits, machine.num_candidates)
    timer.mark("draft")
    # A chain row keeps the first candidate of each depth, at no cost in score.
    spine = torch.full_like(weights, float("-inf"))
    spine[:, :, 0].fill_(0.0)
    weights = torch.where(row.chain[:, None, None], spine, weights)
    return build_tree(row.anchor, ids, weights, spec.num_nodes, row.budget)


def _finish(row: RowState, emitted: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Cut the accepted tokens at the first stop id or the limit, whichever is earlier.

    Returns the number of tokens to emit `[B]` (0 for a frozen row) and the status `[B]`.
    """
    order = torch.arange(emitted.shape[1], device=emitted.device)
    stops = (emitted[:, :, None] == row.stop_ids[:, None]).any(-1)
    first_stop = torch.where(stops, order, FAR).amin(1)
    room = row.limit - row.length - 1
    count = torch.minimum(torch.minimum(count, room), first_stop + 1)
    status = torch.where(count == room, ROW_LENGTH, ROW_RUNNING)
    status = torch.where(first_stop < count, ROW_STOPPED, status)
    return torch.where(row.done, 0, count), torch.where(row.done, ROW_RUNNING, status)


def _commit(
    machine: Machine,
    spec: DecodeSpec,
    scratch: Tensor,
    positions: Tensor,
    path: Tensor,
    count: Tensor,
    features: Tensor,
) -> None:
    """Move the path's target K/V into place and write the drafter's context rows for it.

    Args:
        scratch, positions: [B, S] slots and positions from the row's length on.
        path: [B, block] accepted nodes by depth, of which `count [B]` are kept.
        features: [B, N, M * H] residual streams of the tapped layers.
    """
    assert machine.drafter is not None
    block = spec.path_len
    dummy = DUMMY_PAGE * machine.page_size
    kept = torch.arange(block, device=path.device) < count[:, None]
    target = torch.where(kept, scratch[:, :block], dummy)
    if spec.mode == "tree":
        # In a chain, and at the root, a node already lies where its depth belongs.
        source = torch.where(kept, scratch.gather(1, path), dummy)
        machine.ops.move_kv(machine.target_kv, source[:, 1:].reshape(-1), target[:, 1:].reshape(-1))
    features = features.gather(1, path[:, :, None].expand(-1, -1, features.shape[2]))
    machine.drafter.write_context(features, positions[:, :block], target, machine.draft_kv)


def prefill_step(
    machine: Machine,
    rows: RowState,
    slot: Tensor,
    tokens: Tensor,
    start: int,
    table_width: int,
    context: bool,
) -> Tensor:
    """Run a chunk of one prompt and write its K/V.

    Args:
        slot: [1] int64 device row.
        tokens: [1, T] int64 prompt tokens from position `start` on.
        context: whether to write the drafter's context rows.

    Returns:
        Hidden state `[1, 1, H]` of the last token.
    """
    device = tokens.device
    count = tokens.shape[1]
    table = rows.block_table.index_select(0, slot)[:, :table_width]
    positions = torch.arange(start, start + count, device=device)[None]
    slots = slots_of(table, positions, machine.page_size)
    prefix = torch.full((1,), start, device=device)
    plan = machine.ops.plan_attention(
        table, prefix, count, machine.page_size, machine.target.views("causal")
    )
    taps = machine.taps if context else ()
    state = StepState(positions, slots, plan)
    hidden, features = machine.target(tokens, state, machine.target_kv, taps)
    if features is not None:
        assert machine.drafter is not None
        machine.drafter.write_context(features, positions, slots, machine.draft_kv)
    return hidden[:, -1:]


def start_row(
    machine: Machine, rows: RowState, slot: Tensor, length: int, hidden: Tensor
) -> Tensor:
    """Choose a request's first token after its prompt of `length` tokens, and start its row.

    Returns `[2]` int64: the token and the row's status.
    """
    token = choose(machine.target, machine.ops, hidden)[:, 0]
    stopped = (rows.stop_ids.index_select(0, slot) == token[:, None]).any(1)
    full = rows.limit.index_select(0, slot) <= length + 1
    status = torch.where(full, ROW_LENGTH, ROW_RUNNING)
    status = torch.where(stopped, ROW_STOPPED, status)
    rows.length.index_fill_(0, slot, length)
    rows.anchor.index_copy_(0, slot, token)
    rows.done.index_copy_(0, slot, status != ROW_RUNNING)
    return torch.cat((token, status))


def resume_row(rows: RowState, slot: Tensor, length: int, anchor: int) -> None:
    """Restart a preempted request's row: `length` committed tokens, newest token `anchor`."""
    rows.length.index_fill_(0, slot, length)
    rows.anchor.index_fill_(0, slot, anchor)
    rows.done.index_fill_(0, slot, False)
