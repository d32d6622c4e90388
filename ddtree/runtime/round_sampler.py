"""What a round samples with: its rows' parameters and noise, for the tree and the target alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ddtree.kernels.sampling import Adjustments, Filters, Penalties
from ddtree.runtime.machine import Machine
from ddtree.runtime.plan import Level
from ddtree.runtime.sampler import Sampling, choose, choose_nodes, path_tokens, scaled_noise
from ddtree.state import FLOATS, Rows, RowState
from ddtree.tree.build import Tree
from ddtree.tree.verify import Path, accept, accept_chain


@dataclass
class RoundSampler:
    """What a round's choices depend on beside the logits; the tree may look at the noise, too."""

    machine: Machine
    level: Level
    depths: int
    sampling: Sampling | None = None
    """None where all rows choose by plain argmax."""
    noise: Tensor | None = None
    """[B, depths, V]; None where all rows are greedy, or the kernels make it from the seeds."""
    seeds: Tensor | None = None
    """[B] int64 where the kernels make the noise."""
    length: Tensor | None = None
    """[B] int64 position of the root; with seeds only."""
    row: Rows | None = None
    """The integers of the rows."""
    matches: ClassVar[bool] = True
    """Whether tokens are chosen with the noise."""

    @classmethod
    def make(
        cls,
        machine: Machine,
        rows: RowState,
        row: Rows,
        slot_ids: Tensor,
        level: Level,
        length: Tensor,
        depths: int,
    ) -> RoundSampler:
        """The sampler of the rows `slot_ids [B]` for nodes at positions from `length [B]` on.

        Args:
            row: the integers of those rows.
            depths: how many depths the nodes have, the root's included.
        """
        level &= ~Level.LOGPROBS
        if not level:
            return cls(machine, level, depths)
        sampler = cls(machine, level, depths, gather_sampling(rows, row, slot_ids, level), row=row)
        assert sampler.sampling is not None
        if Level.NOISE not in level or not cls.matches:
            return sampler
        if machine.ops.fused:
            sampler.seeds, sampler.length = row.seed, length
        else:
            temperature, vocab = sampler.sampling.filters.temperature, machine.vocab
            sampler.noise = scaled_noise(
                row.seed, temperature, length, depths, vocab.size, vocab.first
            )
        return sampler

    def candidates(self, logits: Tensor, chain: bool) -> tuple[Tensor, Tensor]:
        """Candidates of every depth and their weights, [B, L, K] each, from drafting logits.

        For a chain only the ids matter, and K is 1.

        logits: [B, L, V], or [B, L, n] of the tokens that the drafter knows.
        """
        vocab, noise = self.machine.vocab, self.noise
        noise = None if noise is None else noise[:, : logits.shape[1]]
        narrow = vocab.narrow(noise)
        if narrow is None:
            return self.rank(vocab.spread(logits), noise, chain)
        tokens, noise = narrow
        places, weights = self.rank(logits, noise, chain)
        return tokens[places], weights

    def rank(self, logits: Tensor, noise: Tensor | None, chain: bool) -> tuple[Tensor, Tensor]:
        """As `candidates`, of `logits [B, L, n]` with noise alike; ids are columns of these."""
        machine, vocab = self.machine, self.machine.vocab
        count = 1 if chain else machine.num_candidates
        trust = machine.weights
        plain = noise is None and self.seeds is None
        if plain or self.sampling is None or (chain and trust is None):
            if chain:
                ids = vocab.argmax(logits).unsqueeze(2)
                return ids, ids
            ids, log_q = vocab.top_candidates(logits, count)
            return ids, log_q if trust is None else trust.greedy(log_q)
        temperature = self.sampling.filters.temperature
        if trust is None:
            return vocab.rank_candidates(logits, temperature, count)
        depth = logits.shape[1]
        alpha, scale = trust.alpha[:depth], trust.scale[:depth]
        if noise is None:
            assert self.seeds is not None and self.length is not None
            places = self.length[:, None] + torch.arange(1, depth + 1, device=logits.device)
            coupling = (self.seeds, places, alpha, scale)
            ids, weights = vocab.rank_seeded(logits, temperature, count, *coupling)
        elif chain:
            scores = torch.addcmul(noise, logits, alpha[:, None])
            ids = weights = vocab.argmax(scores).unsqueeze(2)
        else:
            ids, weights = vocab.rank_candidates(logits, temperature, count, noise, alpha, scale)
        if chain:
            return ids, ids
        sampled = temperature[:, None, None] > 0
        return ids, torch.where(sampled, trust.sampled(weights), trust.greedy(weights))

    def verify(
        self, hidden: Tensor, tree: Tree, positions: Tensor, chain: bool
    ) -> tuple[Path, Tensor]:
        """The accepted path of every tree, and the token [B, depths] int64 emitted at its nodes.

        hidden: [B, N, H] of the nodes; positions: [B, N] int64 their own.
        """
        chosen = self.choose(hidden, tree, positions)
        path = (accept_chain if chain else accept)(tree, chosen, self.depths - 1)
        return path, chosen.gather(1, path.nodes)

    def choose(self, hidden: Tensor, tree: Tree | None, positions: Tensor) -> Tensor:
        """The target's token after every node of `hidden [B, N, H]` -> `[B, N]` int64.

        tree: None where every row has one node; positions: [B, N] int64 of the nodes themselves.
        """
        machine = self.machine
        if self.sampling is None:
            return choose(machine.vocab, hidden)
        paths, depths = None, torch.zeros_like(positions) if tree is None else tree.depths
        if tree is not None and Level.PENALTIES in self.level:
            paths = path_tokens(tree, self.depths - 1)
        return choose_nodes(
            machine.vocab,
            hidden,
            self.noise,
            self.sampling,
            depths,
            positions + 1,
            paths,
            self.seeds,
        )


def gather_sampling(rows: RowState, row: Rows, slot_ids: Tensor, level: Level) -> Sampling:
    """The parameters that `level` makes use of, for the rows `slot_ids [B]`.

    row: the integers of those rows.
    """
    values = dict(zip(FLOATS, rows.floats.index_select(0, slot_ids).unbind(1), strict=True))
    filters = Filters(
        temperature=values["temperature"],
        top_k=row.top_k if Level.TOP_K in level else None,
        top_p=values["top_p"] if Level.TOP_P in level else None,
        min_p=values["min_p"] if Level.MIN_P in level else None,
    )
    if not level & (Level.BIAS | Level.MIN_TOKENS | Level.PENALTIES):
        return Sampling(filters)
    adjustments = Adjustments()
    if Level.BIAS in level:
        adjustments.bias_ids = rows.bias_ids.index_select(0, slot_ids)
        adjustments.bias_values = rows.bias_values.index_select(0, slot_ids)
    if Level.MIN_TOKENS in level:
        adjustments.stop_ids, adjustments.min_end = row.stop_ids, row.min_end
    if Level.PENALTIES in level:
        adjustments.penalties = Penalties(
            repetition=values["repetition"],
            presence=values["presence"],
            frequency=values["frequency"],
            output_counts=rows.output_counts.index_select(0, slot_ids),
            prompt_seen=rows.prompt_seen.index_select(0, slot_ids),
        )
    return Sampling(filters, adjustments)
