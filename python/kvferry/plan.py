"""Routes and plans: what moves between two engines for one request, and why it takes so long."""

from __future__ import annotations

import msgspec

from kvferry._core import Descriptors, Loops, Plan, Route, Staged, StagedDescriptors
from kvferry._words import counted, size

__all__ = [
    "Descriptors",
    "Explanation",
    "GroupExplanation",
    "Loops",
    "PairExplanation",
    "Plan",
    "Route",
    "Staged",
    "StagedDescriptors",
    "StretchExplanation",
    "TransferExplanation",
]


class StretchExplanation(msgspec.Struct, frozen=True):
    """Consecutive due tokens that lie in one block on either side.

    Parameters
    ----------
    tokens
        ``[begin, end)`` positions in the request.
    source_block, source_offset
        Block id, and the first token's place in it.
    target_block, target_offset
        The same on the target.
    """

    tokens: tuple[int, int]
    source_block: int
    source_offset: int
    target_block: int
    target_offset: int


class GroupExplanation(msgspec.Struct, frozen=True):
    """Layers that a group of the source and a group of the target have in common.

    Parameters
    ----------
    source_group, target_group
        Indices of the groups in either side's model.
    kind
        ``"attention"``, ``"latent"`` or ``"state"``.
    num_layers
        Layers in both, of all ranks: with pipeline stages, a rank moves some of them (see
        `TransferExplanation`).
    num_tokens
        Tokens that are due: not held already, not in a null block, inside the window. A state
        that moves counts as one.
    num_stretches
        Stretches into which the block boundaries of both sides cut these tokens.
    source_tokens_per_block, target_tokens_per_block
        Tokens of one block; 1 for a state.
    stretches
        The first of them, at most 48.
    """

    source_group: int
    target_group: int
    kind: str
    num_layers: int
    num_tokens: int
    num_stretches: int
    source_tokens_per_block: int
    target_tokens_per_block: int
    stretches: tuple[StretchExplanation, ...]


class TransferExplanation(msgspec.Struct, frozen=True):
    """What one rank reads from another of a group pair, for every due token.

    Parameters
    ----------
    source_rank, target_rank
        The two ends.
    source_group, target_group
        Indices of the groups in either side's model.
    planes
        ``("K", "V")``, ``("latent",)``, or the name of a state part.
    units
        ``[begin, end)`` of the whole model's heads, or of the units of a state part.
    num_layers
        Layers that both ranks hold.
    """

    source_rank: int
    target_rank: int
    source_group: int
    target_group: int
    planes: tuple[str, ...]
    units: tuple[int, int]
    num_layers: int


class PairExplanation(msgspec.Struct, frozen=True):
    """What one rank pair moves.

    Parameters
    ----------
    source_rank, target_rank
        The two ends.
    num_bytes
        Payload.
    num_fragments
        Pieces that are contiguous on both sides: what a transport gets as descriptors.
    num_loops
        Strided loops that stand for them.
    min_bytes, max_bytes
        Smallest and largest fragment.
    staged_descriptors, staged_bytes
        What the first step of `Plan.staged` would move instead.
    staging_pays
        Whether that is worth it on a wire (see `Plan.recommend_staging`).
    """

    source_rank: int
    target_rank: int
    num_bytes: int
    num_fragments: int
    num_loops: int
    min_bytes: int
    max_bytes: int
    staged_descriptors: int
    staged_bytes: int
    staging_pays: bool

    @property
    def mean_bytes(self) -> float:
        """Average fragment, 0 where there is none."""
        return self.num_bytes / self.num_fragments if self.num_fragments else 0.0


class Explanation(msgspec.Struct, frozen=True):
    """A plan in words and numbers; made by `Plan.explain`, prints well.

    Parameters
    ----------
    source, target
        Engine ids.
    end, rank
        The rank that the plan is for, and whether it is a ``"target"`` that reads or a
        ``"source"`` that sends.
    groups
        One entry a pair of groups with layers in common.
    transfers
        Which units each rank reads from which other.
    pairs
        One entry a rank pair that moves bytes.
    notify_only
        Source ranks that are not read, but must hear that the request is done.
    """

    source: str
    target: str
    end: str
    rank: int
    groups: tuple[GroupExplanation, ...]
    transfers: tuple[TransferExplanation, ...]
    pairs: tuple[PairExplanation, ...]
    notify_only: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Payload of all pairs."""
        return sum(pair.num_bytes for pair in self.pairs)

    @property
    def num_fragments(self) -> int:
        """Fragments of all pairs."""
        return sum(pair.num_fragments for pair in self.pairs)

    def __str__(self) -> str:
        total = f"{size(self.num_bytes)} in {counted(self.num_fragments, 'fragment')}"
        if self.end == "target":
            lines = [f"rank {self.rank} of {self.target!r} reads {total} from {self.source!r}"]
        else:
            lines = [f"rank {self.rank} of {self.source!r} sends {total} to {self.target!r}"]
        lines += [_group_line(group) for group in self.groups]
        for pair in self.pairs:
            lines += _pair_lines(pair)
        if self.notify_only:
            ranks = ", ".join(map(str, self.notify_only))
            plural = "" if len(self.notify_only) == 1 else "s"
            lines.append(f"  only notified, holding the same: rank{plural} {ranks}")
        return "\n".join(lines)


def _group_line(group: GroupExplanation) -> str:
    """Say what is due of one pair of groups."""
    if group.kind == "state":
        due = "its state is due" if group.num_tokens else "no state is due"
    else:
        stretches = counted(group.num_stretches, "stretch", "stretches")
        due = f"{counted(group.num_tokens, 'token')} due in {stretches} of blocks"
    return (
        f"  group {group.source_group} -> {group.target_group} ({group.kind}): "
        f"{counted(group.num_layers, 'layer')} in both engines, {due}"
    )


def _pair_lines(pair: PairExplanation) -> list[str]:
    """Say what one pair moves, and what staging would move instead."""
    verdict = "pays on a wire" if pair.staging_pays else "does not pay"
    direct = (
        f"  rank {pair.source_rank} -> {pair.target_rank}: {size(pair.num_bytes)} "
        f"in {counted(pair.num_fragments, 'fragment')} of {size(pair.min_bytes)} "
        f"to {size(pair.max_bytes)}, {size(pair.mean_bytes)} on average "
        f"({counted(pair.num_loops, 'loop')})"
    )
    descriptors = counted(pair.staged_descriptors, "descriptor")
    staged = f"    staged: {size(pair.staged_bytes)} in {descriptors}, which {verdict}"
    return [direct, staged]
