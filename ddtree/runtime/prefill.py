"""Prompts into the KV cache, chunk by chunk, and the first token after them."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.sampling import count_tokens, note_prompt
from ddtree.runtime.kv_cache import slots_of
from ddtree.runtime.machine import Machine
from ddtree.runtime.plan import ROW_LENGTH, ROW_RUNNING, ROW_STOPPED, Level
from ddtree.runtime.round_sampler import RoundSampler
from ddtree.runtime.sampler import pack_logprobs
from ddtree.state import RowState, StepState


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
    table = rows.gather(slot, table_width).block_table
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


def note_tokens(
    rows: RowState,
    slot: Tensor,
    tokens: Tensor,
    start: int,
    prompt_len: int,
    first_id: int = 0,
) -> None:
    """Enter prefilled tokens in the accounts that penalties go by.

    slot:     [1] int64 device row.
    tokens:   [1, T] int64 from position `start` on; from `prompt_len` on they are output.
    first_id: token of the accounts' first column.
    """
    cut = min(max(prompt_len - start, 0), tokens.shape[1])
    prompt, output = tokens[:, :cut], tokens[:, cut:]
    note_prompt(rows.prompt_seen, slot, prompt, first_id)
    count_tokens(rows.output_counts, slot, output, torch.full_like(slot, output.shape[1]), first_id)


def start_row(
    machine: Machine,
    rows: RowState,
    slot: Tensor,
    length: int,
    hidden: Tensor,
    level: Level = Level.GREEDY,
) -> Tensor:
    """Choose a request's first token after its prompt of `length` tokens, and start its row.

    Returns int64: the token, the row's status, and with logprobs `LOGPROB_WIDTH` more.
    """
    row = rows.gather(slot, 0)
    last = torch.full_like(slot, length - 1)
    sampler = RoundSampler.make(machine, rows, row, slot, level, last, 1)
    token = sampler.choose(hidden, None, last[:, None])[:, 0]
    stopped = (row.stop_ids == token[:, None]).any(1)
    status = torch.where(stopped, ROW_STOPPED, (row.limit <= length + 1) * ROW_LENGTH)
    rows.length.index_fill_(0, slot, length)
    rows.anchor.index_copy_(0, slot, token)
    rows.done.index_copy_(0, slot, (status != ROW_RUNNING).long())
    if Level.PENALTIES in level:
        ones = torch.ones_like(slot)
        count_tokens(rows.output_counts, slot, token[:, None], ones, machine.vocab.first)
    report = torch.cat((token, status))
    if Level.LOGPROBS in level:
        report = torch.cat((report, pack_logprobs(machine.vocab, hidden, token[:, None])[0]))
    return report


def resume_row(
    rows: RowState,
    slot: Tensor,
    length: int,
    anchor: int,
    level: Level = Level.GREEDY,
    first_id: int = 0,
) -> None:
    """Restart a preempted request's row: `length` committed tokens, newest token `anchor`."""
    rows.length.index_fill_(0, slot, length)
    rows.anchor.index_fill_(0, slot, anchor)
    rows.done.index_fill_(0, slot, 0)
    if Level.PENALTIES in level:
        token = torch.full_like(slot, anchor)
        count_tokens(rows.output_counts, slot, token[:, None], torch.ones_like(slot), first_id)
