"""The lives of requests on two engines: arrivals, partial transfers, prefix hits, reuse, hostility.

A machine of hypothesis plays them on all ranks of both engines, with a block pool on each side, and
holds the target's memory against a shadow of it that only verified transfers may change.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from judging import COUNTED_EXAMPLES, EXAMPLES, examples

from kvferry import KVCache, Plan, Route, errors
from kvferry.testing import (
    Side,
    allocate,
    apply_descriptors,
    apply_staged_descriptors,
    check_reference,
    expected_error,
    fill_reference,
    poison,
    snapshot,
)
from kvferry.testing.strategies import engines, models

LIVES = examples(20)
STEPS = 25
MAX_RANKS = 4
MAX_REQUEST_TOKENS = 60
POOL_REQUESTS = 3


# What must have happened for the machine to mean something, and how often it did.
EVENTS = (
    "prefix held",
    "prefix shared",
    "part moved",
    "rest moved",
    "blocks reused",
    "refused",
)
SEEN: Counter[str] = Counter()


@dataclass
class Request:
    """What both engines know of a request."""

    number: int
    num_tokens: int
    source_blocks: list[list[int]]
    target_blocks: list[list[int]]
    target_first: tuple[int, ...]
    done: int  # tokens before it need no transfer any more
    shares: Request | None = None  # whose first target blocks it uses too
    source_is_held: bool = True
    ranges: list[tuple[int, int]] = field(default_factory=list)


class Engine:
    """One engine: memory of all ranks, and a pool of free ids a group."""

    def __init__(self, spec: Any, rng: random.Random, num_blocks_known: bool) -> None:
        groups = range(len(spec.model.groups))
        side = Side(spec, tuple([] for _ in groups))
        sizes = [
            POOL_REQUESTS * (-(-MAX_REQUEST_TOKENS // side.tokens_per_block(g))) + 2
            if side.has_tokens(g)
            else POOL_REQUESTS + 2
            for g in groups
        ]
        if num_blocks_known:
            spec = msgspec.structs.replace(spec, num_blocks=tuple(sizes))
        self.spec = spec
        self.side = replace(side, engine=spec, num_blocks=tuple(sizes))
        self.rng = rng
        self.tensors = [allocate(self.side, rank, rng) for rank in range(spec.num_ranks)]
        for tensors in self.tensors:
            poison(tensors)
        self.caches = [KVCache(spec, rank, held) for rank, held in enumerate(self.tensors)]
        self.free = [[i for i in range(sizes[g]) if i != self.side.null(g)] for g in groups]
        self.users: dict[tuple[int, int], int] = {}
        self.used_before: set[tuple[int, int]] = set()

    def take(self, firsts: tuple[int, ...], num_tokens: int) -> list[list[int]]:
        """Hand out blocks from these positions to the end."""
        counts = [
            max(0, -(-(num_tokens - first) // self.side.tokens_per_block(g)))
            if self.side.has_tokens(g)
            else 1
            for g, first in enumerate(firsts)
        ]
        taken = []
        for free, count in zip(self.free, counts, strict=True):
            taken.append([free.pop(self.rng.randrange(len(free))) for _ in range(count)])
        self.use(taken)
        again = {(g, block) for g, ids in enumerate(taken) for block in ids}
        SEEN["blocks reused"] += bool(again & self.used_before)
        return taken

    def use(self, blocks: list[list[int]]) -> None:
        for g, ids in enumerate(blocks):
            for block in ids:
                self.users[(g, block)] = self.users.get((g, block), 0) + 1

    def give_back(self, blocks: list[list[int]]) -> None:
        for g, ids in enumerate(blocks):
            for block in ids:
                self.users[(g, block)] -= 1
                if not self.users[(g, block)]:
                    self.free[g].append(block)
                    self.used_before.add((g, block))


class Lifecycle(RuleBasedStateMachine):
    """Two engines, their requests, and the target's memory as it must be."""

    @initialize(data=st.data(), seed=st.integers(0, 2**32 - 1), known=st.booleans())
    def start(self, data: st.DataObject, seed: int, known: bool) -> None:
        self.rng = random.Random(seed)
        model = data.draw(models())
        specs = [
            data.draw(engines(model, engine_id=name, max_ranks=MAX_RANKS))
            for name in ("source", "target")
        ]
        self.source, self.target = (Engine(spec, self.rng, known) for spec in specs)
        self.route = Route(self.source.spec, self.target.spec)
        self.slot_tokens = math.lcm(*(getattr(g, "tokens_per_slot", 1) for g in model.groups))
        self.live: list[Request] = []
        self.shadow = [snapshot(tensors) for tensors in self.target.tensors]
        self.arrived = 0

    @precondition(lambda self: len(self.live) < POOL_REQUESTS)
    @rule(data=st.data(), hit=st.sampled_from(["none", "first token", *["shared blocks"] * 2]))
    def arrive(self, data: st.DataObject, hit: str) -> None:
        """Prefill a request at the source, and find room for it at the target."""
        most = MAX_REQUEST_TOKENS // self.slot_tokens
        steps = data.draw(st.one_of(st.integers(1, most), st.just(most)))
        num_tokens = self.slot_tokens * steps
        side = self.target.side
        groups = range(len(side.engine.model.groups))
        firsts, shared, done = tuple(0 for _ in groups), None, 0
        if hit == "first token":
            firsts = tuple(
                side.tokens_per_block(g)
                * data.draw(st.integers(0, num_tokens // side.tokens_per_block(g)))
                if side.has_tokens(g)
                else 0
                for g in groups
            )
        if hit == "shared blocks":
            shared, done = self._shareable(num_tokens)
        starts = tuple(0 for _ in self.source.spec.model.groups)
        source_blocks = self.source.take(starts, num_tokens)
        target_blocks = self.target.take(tuple(done or first for first in firsts), num_tokens)
        if shared is not None:
            heads = [
                shared.target_blocks[g][: done // side.tokens_per_block(g)]
                if side.has_tokens(g)
                else []
                for g in groups
            ]
            self.target.use(heads)
            target_blocks = [a + b for a, b in zip(heads, target_blocks, strict=True)]
        self.arrived += 1
        SEEN["prefix held"] += any(firsts)
        SEEN["prefix shared"] += shared is not None
        for rank, tensors in enumerate(self.source.tensors):
            fill_reference(
                self.source.spec, rank, tensors, source_blocks, mark_rank=True,
                request=self.arrived,
            )  # fmt: skip
        self.live.append(
            Request(self.arrived, num_tokens, source_blocks, target_blocks, firsts, done, shared)
        )

    def _shareable(self, num_tokens: int) -> tuple[Request | None, int]:
        """Return a request with whole blocks from position 0 at the target, and their tokens."""
        side = self.target.side
        groups = range(len(side.engine.model.groups))
        sizes = [side.tokens_per_block(g) for g in groups if side.has_tokens(g)]
        step = math.lcm(*sizes)
        for other in self.live[::-1]:
            tokens = min(other.done, num_tokens) // step * step if sizes else 0
            if tokens and not any(other.target_first):
                return other, tokens
        return None, 0

    @precondition(lambda self: self._unfinished())
    @rule(
        data=st.data(),
        how=st.sampled_from(["pull", "push", "descriptors", "staged"]),
        rest=st.booleans(),
    )
    def transfer(self, data: st.DataObject, how: str, rest: bool) -> None:
        """Move the next tokens of a request, some of them or all the rest."""
        request = data.draw(st.sampled_from(self._unfinished()))
        end = request.num_tokens
        if not rest:
            steps = (request.num_tokens - request.done) // self.slot_tokens
            end = request.done + self.slot_tokens * data.draw(st.integers(0, steps))
        tokens = (request.done, end)
        getattr(self, f"_{how}")(self._arguments(request, tokens))
        for rank, tensors in enumerate(self.target.tensors):
            mismatch = self._check(request, tokens, rank, self.shadow[rank])
            assert mismatch is None, f"{how} of request {request.number}: {mismatch}"
            self.shadow[rank] = snapshot(tensors)
        if end > request.done:
            SEEN["part moved" if end < request.num_tokens else "rest moved"] += 1
        request.done = end
        request.ranges.append(tokens)

    def _pending(self) -> list[Request]:
        return [request for request in self.live if request.source_is_held]

    def _unfinished(self) -> list[Request]:
        return [request for request in self._pending() if request.done < request.num_tokens]

    def _arguments(self, request: Request, tokens: tuple[int, int]) -> dict[str, Any]:
        return {
            "source_blocks": request.source_blocks,
            "target_blocks": request.target_blocks,
            "tokens": tokens,
            "target_first_token": request.target_first,
        }

    def _check(
        self, request: Request, tokens: tuple[int, int], rank: int, before: list[np.ndarray]
    ) -> Any:
        ends = self.source.spec, self.target.spec
        return check_reference(
            *ends, rank, self.target.tensors[rank], before, mark_rank=True,
            request=request.number, **self._arguments(request, tokens),
        )  # fmt: skip

    def _pull(self, arguments: dict[str, Any]) -> None:
        for rank, cache in enumerate(self.target.caches):
            self.route.plan(rank, **arguments).copy(self.source.caches, cache)

    def _push(self, arguments: dict[str, Any]) -> None:
        for rank, cache in enumerate(self.source.caches):
            self.route.plan_push(rank, **arguments).copy(cache, self.target.caches)

    def _descriptors(self, arguments: dict[str, Any]) -> None:
        for source, target, plan in self._pairs(arguments):
            ends = self.source.caches[source].describe(), self.target.caches[target].describe()
            rows = plan.descriptors(*ends)
            apply_descriptors(rows, self.source.tensors[source], self.target.tensors[target])

    def _staged(self, arguments: dict[str, Any]) -> None:
        for source, target, plan in self._pairs(arguments):
            staged = plan.staged(self.source.caches[source], self.target.caches[target])
            scratch = np.zeros(staged.scratch_bytes, np.uint8)
            apply_staged_descriptors(staged.descriptors, self.source.tensors[source], scratch)
            staged.finish(scratch, self.target.caches[target])

    def _pairs(self, arguments: dict[str, Any]) -> list[tuple[int, int, Plan]]:
        plans = [self.route.plan(rank, **arguments) for rank in range(self.target.spec.num_ranks)]
        return [(*pair, plan) for plan in plans for pair in plan.pairs]

    @precondition(lambda self: len(self._pending()) > len(self._unfinished()))
    @rule(data=st.data())
    def source_frees(self, data: st.DataObject) -> None:
        """Let the source be done with a request; its blocks serve others from now on."""
        moved = [request for request in self._pending() if request.done == request.num_tokens]
        request = data.draw(st.sampled_from(moved))
        self.source.give_back(request.source_blocks)
        request.source_is_held = False

    @precondition(lambda self: len(self.live) == POOL_REQUESTS)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """End a request, finished or not: what it alone used is free on both sides."""
        request = data.draw(st.sampled_from(self.live))
        self._judge(request)
        self.live.remove(request)
        if request.source_is_held:
            self.source.give_back(request.source_blocks)
        self.target.give_back(request.target_blocks)

    @precondition(lambda self: self._pending())
    @rule(
        data=st.data(),
        how=st.sampled_from(["too few source ids", "too few target ids", "twice", "negative"]),
    )
    def hostile(self, data: st.DataObject, how: str) -> None:
        """Ask for what must not be served: it changes nothing, wherever it is planned."""
        request = data.draw(st.sampled_from(self._pending()))
        arguments = self._arguments(request, (request.done, request.num_tokens))
        side = "source_blocks" if "source" in how else "target_blocks"
        g = data.draw(st.integers(0, len(arguments[side]) - 1))
        ids = list(arguments[side][g])
        if how.startswith("too few"):
            ids = ids[:-1]
        elif how == "twice":
            ids = ids[-1:] * len(ids)
        elif ids:
            ids[self.rng.randrange(len(ids))] = -77
        arguments[side] = [ids if h == g else same for h, same in enumerate(arguments[side])]
        names = expected_error(
            self.source.spec, self.target.spec, arguments["source_blocks"],
            arguments["target_blocks"], arguments["tokens"], 0, request.target_first,
        )  # fmt: skip
        if not names:
            return
        SEEN["refused"] += 1
        accepted = tuple(getattr(errors, name, ValueError) for name in names)
        before = [snapshot(tensors) for tensors in self.source.tensors]
        with pytest.raises(accepted):
            self._pull(arguments)
        with pytest.raises(accepted):
            self._push(arguments)
        for tensors, then in zip(self.source.tensors, before, strict=True):
            assert all(map(np.array_equal, snapshot(tensors), then))

    @invariant()
    def only_transfers_write(self) -> None:
        """Nothing but verified transfers has changed a byte of the target."""
        for tensors, shadow in zip(self.target.tensors, self.shadow, strict=True):
            assert all(map(np.array_equal, snapshot(tensors), shadow))

    def _judge(self, request: Request) -> None:
        """Assert that all that was ever moved for a request still holds its pattern."""
        for tokens in request.ranges:
            for rank, tensors in enumerate(self.target.tensors):
                mismatch = self._check(request, tokens, rank, tensors)
                assert mismatch is None, f"request {request.number}: {mismatch}"

    def teardown(self) -> None:
        for request in getattr(self, "live", []):
            self._judge(request)


def test_requests_come_and_go_and_leave_each_other_alone() -> None:
    """Whatever happens to a request, its own blocks hold what was moved, and no others change."""
    SEEN.clear()
    run_state_machine_as_test(
        Lifecycle, settings=settings(max_examples=LIVES, stateful_step_count=STEPS)
    )
    print(", ".join(f"{name}: {SEEN[name]}" for name in EVENTS))
    if EXAMPLES >= COUNTED_EXAMPLES:
        for name in EVENTS:
            assert SEEN[name] >= LIVES // 20, f"only {SEEN[name]} times: {name}"
