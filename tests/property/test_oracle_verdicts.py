"""The reference's verdicts judged by hand: good copies pass, and every way to spoil one is seen."""

from __future__ import annotations

import numpy as np
from by_hand import dense, engine, group, latent, part, state

from kvferry.testing import (
    check_reference,
    due_tokens,
    fill_reference,
    poison,
    slots,
    snapshot,
)


def copied(source, target, rank, source_blocks, target_blocks, tokens, **firsts):
    """Copy by the slowest means: fill every token's row by itself, through the due tokens."""
    tensors = dense(target, rank, 40)
    poison(tensors)
    for g in range(len(target.model.groups)):
        due = due_tokens(
            source, target, g, source_blocks, target_blocks, tokens,
            firsts.get("source_first_token", 0), firsts.get("target_first_token", 0),
        )  # fmt: skip
        filled = dense(target, rank, 40)
        fill_reference(
            target, rank, filled, target_blocks, first_token=firsts.get("target_first_token", 0)
        )
        first, tpb = firsts.get("target_first_token", 0), target.tokens_per_block
        for slot, (to, filled_tensor) in enumerate(zip(tensors, filled, strict=True)):
            assert slots(target, rank)[slot].group == g == 0
            for token in due.tolist():
                block, entry = target_blocks[g][(token - first) // tpb], (token - first) % tpb
                to[:, block, entry] = filled_tensor[:, block, entry]
    return tensors


class TestCheck:
    """One request over three blocks of which the ends are partly due, and every way to spoil it."""

    source = engine(group(heads=3), tokens_per_block=8, layout="BHNC")
    target = engine(group(heads=3), tp_size=2)
    request = ([[3, 2]], [[5, 9, 0]], (2, 11))

    def judge(self, tensors, before=None):
        return check_reference(self.source, self.target, 1, tensors, before, *self.request)

    def good(self):
        return copied(self.source, self.target, 1, *self.request)

    def test_a_good_copy_passes(self):
        tensors = self.good()
        assert self.judge(tensors) is None
        before = dense(self.target, 1, 40)
        poison(before)
        assert self.judge(tensors, before) is None

    def test_nothing_copied_is_noticed(self):
        tensors = dense(self.target, 1, 40)
        poison(tensors)
        mismatch = self.judge(tensors)
        assert (mismatch.block, mismatch.token, mismatch.head) == (5, 2, 1)

    def test_every_single_flipped_byte_is_noticed(self):
        tensors = self.good()
        flat = tensors[0].reshape(-1)
        for i in np.random.default_rng(0).permutation(flat.size)[:300].tolist():
            flat[i] ^= 1
            mismatch = self.judge(tensors)
            plane, block, entry, head, byte = np.unravel_index(i, tensors[0].shape)
            assert mismatch.offset_bytes == i
            assert mismatch.expected[0] ^ mismatch.found[0] == 1
            place = ("KV"[plane], block, head + 1, byte // 2)
            assert (mismatch.plane, mismatch.block, mismatch.head, mismatch.dim) == place
            listed = {5: 0, 9: 4, 0: 8}
            token = listed.get(int(block), -100) + int(entry)
            assert mismatch.token == (token if 2 <= token < 11 else None)
            assert f"byte {i}" in str(mismatch)
            flat[i] ^= 1
        assert self.judge(tensors) is None

    def test_swapped_planes_are_noticed(self):
        tensors = self.good()
        tensors[0][:, 9] = tensors[0][::-1, 9].copy()
        assert self.judge(tensors).token == 4

    def test_a_shifted_token_is_noticed(self):
        tensors = self.good()
        tensors[0][:, 9] = np.roll(tensors[0][:, 9], 1, axis=1)
        assert self.judge(tensors).token == 4

    def test_swapped_heads_are_noticed(self):
        tensors = self.good()
        tensors[0][:, 9, 2] = tensors[0][:, 9, 2, ::-1].copy()
        mismatch = self.judge(tensors)
        assert (mismatch.token, mismatch.head) == (6, 1)

    def test_a_swapped_layer_is_noticed(self):
        two = engine(group((3, 4)), layout="LBKNHD")
        tensors = dense(two, 0, 3)
        fill_reference(two, 0, tensors, [[0, 1]])
        before = snapshot(tensors)
        assert check_reference(two, two, 0, tensors, before, [[0, 1]], [[0, 1]], (0, 8)) is None
        tensors[0][:] = tensors[0][::-1].copy()
        mismatch = check_reference(two, two, 0, tensors, before, [[0, 1]], [[0, 1]], (0, 8))
        assert mismatch.layer == 3

    def test_a_byte_too_many_is_noticed(self):
        tensors = self.good()
        tensors[0][0, 9, 0, 0, 1:] = tensors[0][0, 9, 0, 0, :-1].copy()
        assert self.judge(tensors).offset_bytes % 8 == 1


def test_padding_is_poisoned_kept_and_judged():
    plain = engine(group(heads=1))
    memory = np.zeros((2, 3, 4, 1, 12), np.uint8)
    padded = [memory[..., :8]]
    poison(padded)
    assert memory.reshape(-1)[:-4].any() and not memory.reshape(-1)[-4:].any()
    copy = snapshot(padded)
    assert copy[0].strides == padded[0].strides and (copy[0] == padded[0]).all()
    request = ([[]], [[]], (0, 0))
    memory[1, 2, 0, 0, 9] ^= 0xFF
    for before in (None, copy):
        mismatch = check_reference(plain, plain, 0, padded, before, *request)
        assert (mismatch.layer, mismatch.offset_bytes) == (None, (1 * 3 + 2) * 4 * 12 + 9)
        assert "padding" in str(mismatch)
    assert check_reference(plain, plain, 0, padded, [padded[0].copy()], *request) is None


def test_interleaved_tensors_are_judged_as_one_stretch():
    pair = engine(group((0, 1)), layout="BKNHD")
    memory = np.zeros((3, 2, 2, 4, 2, 8), np.uint8)
    tensors = [memory[:, 0], memory[:, 1]]
    poison(tensors)
    before = snapshot(tensors)
    assert (memory != 0).mean() > 0.9
    for expected in (None, before):
        assert check_reference(pair, pair, 0, tensors, expected, [[]], [[]], (0, 0)) is None
    memory[2, 1, 1, 3, 1, 7] ^= 1
    mismatch = check_reference(pair, pair, 0, tensors, before, [[]], [[]], (0, 0))
    place = (mismatch.slot, mismatch.layer, mismatch.plane, mismatch.block, mismatch.head)
    assert place == (1, 1, "V", 2, 1) and mismatch.dim == 3


def test_a_source_block_listed_twice_holds_its_last_place():
    plain = engine()
    source, target = dense(plain, 0, 4), dense(plain, 0, 4)
    fill_reference(plain, 0, source, [[2, 1, 2]])
    target[0][:, [0, 1, 3]] = source[0][:, [2, 1, 2]]
    request = ([[2, 1, 2]], [[0, 1, 3]], (0, 12))
    assert check_reference(plain, plain, 0, target, snapshot(target), *request) is None
    assert (target[0][:, 0] == target[0][:, 3]).all()


def test_marked_ranks_tell_replicas_apart():
    source, target = engine(group(heads=1), tp_size=2), engine(group(heads=1), tp_size=2)
    request = ([[0]], [[0]], (0, 4))
    caches = [dense(source, rank, 1) for rank in range(2)]
    for rank, tensors in enumerate(caches):
        fill_reference(source, rank, tensors, [[0]], mark_rank=True)
    before = snapshot(caches[1])
    judged = [
        check_reference(source, target, 1, tensors, before, *request, mark_rank=True)
        for tensors in caches
    ]
    assert judged[1] is None and judged[0].token == 0


def test_requests_side_by_side_differ():
    plain = engine()
    request = ([[0]], [[0]], (0, 4))
    tensors = dense(plain, 0, 1)
    fill_reference(plain, 0, tensors, [[0]], request=7)
    before = snapshot(tensors)
    assert check_reference(plain, plain, 0, tensors, before, *request, request=7) is None
    assert check_reference(plain, plain, 0, tensors, before, *request, request=8).due


class TestContextParallel:
    """Two source ranks of alternating tokens; the target has all, in blocks of 3."""

    source = engine(cp_size=2, tokens_per_block=4)
    target = engine(tokens_per_block=3)
    request = ([[1, 0]], [[2, 4, 0]], (1, 7))

    def good(self):
        sources = [dense(self.source, rank, 2) for rank in range(2)]
        for rank, tensors in enumerate(sources):
            fill_reference(self.source, rank, tensors, [[1, 0]], mark_rank=True)
        (tensor,) = dense(self.target, 0, 5)
        poison([tensor])
        for token in range(1, 7):
            row = sources[token % 2][0][:, [1, 0][token // 4], token % 4 // 2]
            tensor[:, [2, 4, 0][token // 3], token % 3] = row
        return [tensor]

    def judge(self, tensors):
        return check_reference(
            self.source, self.target, 0, tensors, None, *self.request, mark_rank=True
        )

    def test_a_good_copy_passes(self):
        assert self.judge(self.good()) is None

    def test_a_token_of_the_other_rank_is_noticed(self):
        tensors = self.good()
        tensors[0][:, 4, 1] = tensors[0][:, 4, 0].copy()
        mismatch = self.judge(tensors)
        assert (mismatch.token, mismatch.block, mismatch.due) == (4, 4, True)

    def test_a_rank_keeps_to_its_tokens(self):
        (tensor,) = dense(self.source, 1, 2)
        poison([tensor])
        filled = dense(self.source, 1, 2)
        fill_reference(self.source, 1, filled, [[0, 1]])
        tensor[:, 0, 1] = filled[0][:, 0, 1]  # token 3, the only odd one
        request = ([[2, 4, 0]], [[0, 1]], (2, 5))
        assert check_reference(self.target, self.source, 1, [tensor], None, *request) is None
        tensor[:, 1, 0] = filled[0][:, 1, 0]
        mismatch = check_reference(self.target, self.source, 1, [tensor], None, *request)
        assert (mismatch.token, mismatch.block, mismatch.due) == (None, 1, False)


class TestStates:
    """Units of 2 x 2 elements, of which two ranks hold 2 and 1 between them."""

    group = state(part("conv", (2, 6), axis=1, units=3), part("rest", (3,), axis=None))
    source, target = engine(group), engine(group, tp_size=2, null_block_id=-1)
    request = ([[3]], [[1]], (0, 0))

    def good(self):
        filled = dense(self.source, 0, 4)
        fill_reference(self.source, 0, filled, [[3]])
        tensors = dense(self.target, 1, 2)
        poison(tensors)
        tensors[0][1] = filled[0][3][:, 2:]  # units 1 and 2
        tensors[1][1] = filled[1][3]
        return tensors

    def judge(self, tensors, target_slot=1):
        blocks = ([[3]], [[target_slot]], (0, 0))
        return check_reference(self.source, self.target, 1, tensors, None, *blocks)

    def test_a_good_copy_passes(self):
        assert self.judge(self.good()) is None

    def test_every_flipped_byte_is_noticed(self):
        tensors = self.good()
        for i in range(tensors[0].size):
            tensors[0].reshape(-1)[i] ^= 1
            mismatch = self.judge(tensors)
            slot, row, column = np.unravel_index(i, tensors[0].shape)
            assert mismatch.offset_bytes == i
            assert (mismatch.plane, mismatch.block, mismatch.due) == ("conv", slot, slot == 1)
            place = (1 + column // 2, 2 * row + column % 2)
            assert (mismatch.head, mismatch.dim) == place
            assert mismatch.expected[0] ^ mismatch.found[0] == 1
            tensors[0].reshape(-1)[i] ^= 1
        tensors[1][1, 2] ^= 1
        mismatch = self.judge(tensors)
        assert (mismatch.plane, mismatch.head, mismatch.dim) == ("rest", None, 2)
        assert "the state is due" in str(mismatch)

    def test_swapped_units_are_noticed(self):
        tensors = self.good()
        tensors[0][1] = tensors[0][1][:, [2, 3, 0, 1]].copy()
        assert self.judge(tensors).head == 1

    def test_a_null_slot_is_not_due(self):
        assert self.judge(self.good(), -1).due is False
        tensors = dense(self.target, 1, 2)
        poison(tensors)
        assert self.judge(tensors, -1) is None


def test_latents_are_judged_in_blocks_of_the_engine():
    source, target = engine(latent()), engine(latent(), tp_size=2, physical_blocks_per_block=2)
    tensors = dense(target, 1, 3)
    poison(tensors)
    filled = dense(source, 0, 1)
    fill_reference(source, 0, filled, [[0]])
    for token in range(3):
        tensors[0][2 * 2 + token // 2, token % 2] = filled[0][0, token]
    request = ([[0]], [[2]], (0, 3))
    assert check_reference(source, target, 1, tensors, None, *request) is None
    tensors[0][5, 0, 4] ^= 1
    mismatch = check_reference(source, target, 1, tensors, None, *request)
    found = (mismatch.plane, mismatch.block, mismatch.token, mismatch.head, mismatch.dim)
    assert found == ("latent", 2, 2, None, 4)
    tensors[0][5, 0, 4] ^= 1
    tensors[0][3, 1, 5] ^= 1
    mismatch = check_reference(source, target, 1, tensors, None, *request)
    assert (mismatch.block, mismatch.token, mismatch.dim) == (1, None, 5)
