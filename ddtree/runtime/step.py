"""The decode round, draft to commit, as one function of device tensors.

Nothing here reads a value back to the host, and every shape follows from the `DecodeSpec`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.kernels.sampling import count_tokens
from ddtree.runtime.kv_cache import slots_of
from ddtree.runtime.machine import Machine
from ddtree.runtime.pages import DUMMY_PAGE
from ddtree.runtime.plan import ROW_LENGTH, ROW_RUNNING, ROW_STOPPED, DecodeSpec, Level
from ddtree.runtime.rejection import RejectionSampler
from ddtree.runtime.round_sampler import RoundSampler
from ddtree.runtime.sampler import pack_logprobs
from ddtree.runtime.stats import StageTimer
from ddtree.state import STATE_COLUMNS, Rows, RowState, StepState
from ddtree.tree.build import Tree, build_tree, chain_tree, trim_tree

FAR = 1 << 40


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
    rejects = machine.rejection and spec.mode != "off" and Level.NOISE in spec.level
    sampler = (RejectionSampler if rejects else RoundSampler).make(
        machine, rows, row, slot_ids, spec.level, row.length, spec.path_len
    )
    if spec.mode == "off":
        return _plain_round(machine, rows, row, slot_ids, spec, sampler, timer)
    drafter = machine.drafter
    assert drafter is not None
    block, nodes = drafter.config.block_size, spec.num_nodes
    positions = row.length[:, None] + torch.arange(max(nodes, block), device=slot_ids.device)
    scratch = slots_of(row.block_table, positions, machine.page_size)
    tree = _draft_tree(machine, row, positions[:, :block], scratch[:, :block], spec, sampler, timer)
    threshold = None if rejects else machine.threshold
    if spec.mode == "tree" and threshold is not None:
        tree = trim_tree(tree, threshold)
        nodes = tree.tokens.shape[1]
    timer.mark("build")

    kind = "tree" if spec.mode == "tree" else "causal"
    plan = machine.ops.plan_attention(
        row.block_table,
        row.length,
        nodes,
        machine.page_size,
        machine.target.views(kind),
        words=tree.words if kind == "tree" else None,
    )
    state = StepState(row.length[:, None] + tree.depths, scratch[:, :nodes], plan)
    hidden, features = machine.target(tree.tokens, state, machine.target_kv, machine.taps)
    path, emitted = sampler.verify(hidden, tree, state.positions, chain=spec.mode == "chain")
    timer.mark("verify")

    count, status = _finish(row, emitted, path.count)
    _commit(machine, spec, scratch, positions, path.nodes, count, features)
    told = (tree.tokens, tree.parents, tree.scores.view(torch.int32).long())
    last = emitted.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
    parts = [
        _advance(rows, row, slot_ids, last, count, status, tree.valid.sum(1)),
        emitted,
        path.nodes,
        *(F.pad(part, (0, spec.num_nodes - nodes)) for part in told),
    ]
    _count_and_report(machine, rows, slot_ids, spec, hidden, path.nodes, emitted, count, parts)
    timer.mark("commit")
    return torch.cat(parts, 1)


def _plain_round(
    machine: Machine,
    rows: RowState,
    row: Rows,
    slot_ids: Tensor,
    spec: DecodeSpec,
    sampler: RoundSampler,
    timer: StageTimer,
) -> Tensor:
    """A round without drafts: one token per row."""
    positions = row.length[:, None]
    slots = slots_of(row.block_table, positions, machine.page_size)
    plan = machine.ops.plan_attention(
        row.block_table, row.length, 1, machine.page_size, machine.target.views("causal")
    )
    state = StepState(positions, slots, plan)
    hidden, _ = machine.target(row.anchor[:, None], state, machine.target_kv, ())
    chosen = sampler.choose(hidden, None, positions)
    timer.mark("verify")
    count, status = _finish(row, chosen, None)
    report = _advance(rows, row, slot_ids, chosen[:, 0], count, status, row.anchor)
    parts = [report]
    _count_and_report(machine, rows, slot_ids, spec, hidden, None, chosen, count, parts)
    timer.mark("commit")
    return report if len(parts) == 1 else torch.cat(parts, 1)


def _draft_tree(
    machine: Machine,
    row: Rows,
    positions: Tensor,
    slots: Tensor,
    spec: DecodeSpec,
    sampler: RoundSampler,
    timer: StageTimer,
) -> Tree:
    """Draft a block per row and turn its distributions into the round's tree.

    positions, slots: [B, L + 1] of the block.
    """
    drafter, ops = machine.drafter, machine.ops
    assert drafter is not None and machine.draft_kv is not None
    block = positions.shape[1]
    tokens = torch.full_like(positions, drafter.config.mask_token_id)
    tokens[:, 0] = row.anchor
    plan = ops.plan_attention(row.block_table, row.length, block, machine.page_size, drafter.views)
    state = StepState(positions, slots, plan)
    hidden = drafter(machine.target.embed(tokens), state, machine.draft_kv)
    # A tree of N nodes is at most N - 1 deep: the head has nothing to say about the rest.
    logits = machine.target.draft_logits(hidden[:, 1 : spec.path_len])
    ids, weights = sampler.candidates(logits, chain=spec.mode == "chain")
    timer.mark("draft")
    if spec.mode == "chain":
        return chain_tree(row.anchor, ids[:, :, 0])
    # A chain row keeps the first candidate of each depth, at no cost in score.
    spine = torch.full_like(weights, float("-inf"))
    spine[:, :, 0].fill_(0.0)
    weights = torch.where(row.chain[:, None, None] > 0, spine, weights)
    request = (row.anchor, ids, weights, spec.num_nodes, row.budget)
    return Tree(*ops.build_tree(*request)) if ops.fused else build_tree(*request)


def _finish(row: Rows, emitted: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cut the accepted tokens at the first stop id or the limit, whichever is earlier.

    emitted: [B, D] int64; count: [B] int64, how many are accepted, None for one each.

    Returns the number of tokens to emit `[B]` (0 for a frozen row) and the status `[B]`.
    """
    running = 1 - row.done
    room = row.limit - row.length - 1
    stops = (emitted[:, :, None] == row.stop_ids[:, None]).any(-1)
    if count is None:
        status = torch.where(stops[:, 0], ROW_STOPPED, (room == 1) * ROW_LENGTH)
        return running, status * running
    order = torch.arange(emitted.shape[1], device=emitted.device)
    first_stop = torch.where(stops, order, FAR).amin(1)
    count = torch.minimum(torch.minimum(count, room), first_stop + 1)
    status = torch.where(first_stop < count, ROW_STOPPED, (count == room) * ROW_LENGTH)
    return count * running, status * running


def _advance(
    rows: RowState,
    row: Rows,
    slot_ids: Tensor,
    last: Tensor,
    count: Tensor,
    status: Tensor,
    extra: Tensor,
) -> Tensor:
    """Move the rows on by `count [B]` tokens, of which `last [B]` is the newest.

    Returns the first columns of the report, `extra [B]` being the last of them.
    """
    anchor = torch.where(count > 0, last, row.anchor)
    done = row.done | (status != ROW_RUNNING)
    head = torch.stack((row.length + count, anchor, done, count, status, extra), dim=1)
    rows.integers[:, :STATE_COLUMNS].index_copy_(0, slot_ids, head[:, :STATE_COLUMNS])
    return head


def _count_and_report(
    machine: Machine,
    rows: RowState,
    slot_ids: Tensor,
    spec: DecodeSpec,
    hidden: Tensor,
    path: Tensor | None,
    emitted: Tensor,
    count: Tensor,
    report: list[Tensor],
) -> None:
    """Count the emitted tokens for penalties, and add their logprobs to the report.

    hidden: [B, N, H]; path: [B, D] nodes, None for node 0 alone; emitted: [B, D].
    """
    if Level.PENALTIES in spec.level:
        count_tokens(rows.output_counts, slot_ids, emitted, count, machine.vocab.first)
    if Level.LOGPROBS in spec.level:
        if path is not None:
            hidden = hidden.gather(1, path[:, :, None].expand(-1, -1, hidden.shape[2]))
        report.append(pack_logprobs(machine.vocab, hidden, emitted))


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
