"""A request between two engines as data: its lists, its offsets, and the sizes of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .addresses import has_tokens, null_block_id, per_group, tokens_per_block
from .routing import due_tokens

__all__ = ["Scenario", "Side"]


@dataclass(frozen=True)
class Side:
    """One engine of a request, its lists, and the sizes of its tensors.

    Parameters
    ----------
    engine
        An `EngineSpec`, or anything with its attributes.
    blocks
        Block ids a group; of a state group at most one slot id.
    first_token
        The position at which the lists begin, one for all groups or one a group.
    num_blocks
        Ids a group that its tensors have room for.
    aliased
        Groups may share memory: no id occurs in two of the lists.
    """

    engine: Any
    blocks: tuple[list[int], ...]
    first_token: int | tuple[int, ...] = 0
    num_blocks: tuple[int, ...] = ()
    aliased: bool = False

    def first(self, g: int) -> int:
        """Return group `g`'s first token."""
        return int(per_group(self.first_token, g))

    def tokens_per_block(self, g: int) -> int:
        """Return group `g`'s tokens per block."""
        return tokens_per_block(self.engine, g)

    def null(self, g: int) -> int | None:
        """Return group `g`'s null block id."""
        return null_block_id(self.engine, g)

    def has_tokens(self, g: int) -> bool:
        """Say whether group `g` has blocks of tokens, not state slots."""
        return has_tokens(self.engine.model.groups[g])


@dataclass(frozen=True)
class Scenario:
    """A request between two engines.

    Parameters
    ----------
    source, target
        The two ends.
    tokens
        The range that is asked for.
    seed
        For what a test decides at random.
    allow_missing_layers
        Whether one side may lack layers of the other.
    classes
        Names of the properties that make this request hard.
    """

    source: Side
    target: Side
    tokens: tuple[int, int]
    seed: int
    allow_missing_layers: bool = False
    classes: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def engines(self) -> tuple[Any, Any]:
        """Return (source, target)."""
        return self.source.engine, self.target.engine

    @property
    def request(self) -> tuple[Any, Any, tuple[int, int]]:
        """Return the positional arguments that follow the rank in `Route.plan`."""
        return self.source.blocks, self.target.blocks, self.tokens

    @property
    def firsts(self) -> dict[str, Any]:
        """Return the keyword arguments of `Route.plan`."""
        return {
            "source_first_token": self.source.first_token,
            "target_first_token": self.target.first_token,
        }

    def due(self, g: int) -> np.ndarray:
        """Return the tokens of the target's group `g` that are due; none for a state group."""
        return due_tokens(*self.engines, g, *self.request, *self.firsts.values())
