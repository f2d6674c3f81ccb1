"""What a step schedules: each request with its new block ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["yield_req_data"]


def yield_req_data(scheduler_output: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield what a step schedules: request id, its new block ids a group, whether they replace.

    Parameters
    ----------
    scheduler_output
        The engine's: `scheduled_new_reqs`, each with `req_id` and `block_ids`, and
        `scheduled_cached_reqs` with the lists `req_ids` and `new_block_ids` and either the set
        `resumed_req_ids` or the list of flags `resumed_from_preemption`.

    Yields
    ------
    tuple
        ``(request_id, new_block_id_groups, preempted)``: new requests first, with `False`, then
        those that go on, with whether they were resumed after a preemption. The ids of a resumed
        request replace all earlier ones, those of others follow them. The groups are passed on as
        they are and may be `None`.

    Raises
    ------
    ValueError
        `req_ids`, `new_block_ids` and the flags differ in length. Nothing has been yielded then.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> new = SimpleNamespace(req_id="a", block_ids=([4, 5], [9]))
    >>> cached = SimpleNamespace(
    ...     req_ids=["b", "c"], new_block_ids=[None, ([2, 3], [7])], resumed_req_ids={"c"}
    ... )
    >>> step = SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=cached)
    >>> for request_id, groups, preempted in yield_req_data(step):
    ...     print(request_id, groups, preempted)
    a ([4, 5], [9]) False
    b None False
    c ([2, 3], [7]) True
    """
    cached = scheduler_output.scheduled_cached_reqs
    request_ids, block_ids = cached.req_ids, cached.new_block_ids
    resumed_ids = getattr(cached, "resumed_req_ids", None)
    if resumed_ids is None:
        resumed = [bool(flag) for flag in cached.resumed_from_preemption]
    else:
        resumed = [request_id in resumed_ids for request_id in request_ids]
    others = {"new_block_ids": block_ids, "resumed_from_preemption": resumed}
    for name, other in others.items():
        if len(other) != len(request_ids):
            raise ValueError(f"{len(request_ids)} req_ids but {len(other)} {name}")
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.block_ids, False
    yield from zip(request_ids, block_ids, resumed, strict=True)
