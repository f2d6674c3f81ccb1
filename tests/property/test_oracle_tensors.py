"""The reference's tensors and places judged by hand: which there are, and where a token lies."""

from __future__ import annotations

import numpy as np
import pytest
from by_hand import dense, engine, group, latent, part, state

from kvferry.testing import Slot, axes_of, fill_reference, slots, tensor_shape
from kvferry.testing.addresses import cp_ranks, places
from kvferry.testing.tensors import plane_rows


class TestSlots:
    def test_planes_and_layers_make_tensors(self):
        layers = group((5, 2), heads=3, v_head_dim=6)
        per_layer = [(slot.layers, slot.planes) for slot in slots(engine(layers, layout="BNHD"), 0)]
        assert per_layer == [((2,), ("K",)), ((2,), ("V",)), ((5,), ("K",)), ((5,), ("V",))]
        spanning = engine(layers, layout="LBHNC")
        (slot,) = slots(spanning, 0)
        assert (slot.layers, slot.planes) == ((2, 5), ("K", "V"))
        assert tensor_shape(spanning, 0, slot, 7) == (2, 7, 3, 4, 2 * (4 + 6))

    def test_half_byte_elements_and_slots_of_several_tokens(self):
        packed = engine(group(dtype="float4_e2m1fn_x2", tokens_per_slot=2), layout="NHD")
        assert tensor_shape(packed, 0, slots(packed, 0)[0], 9) == (2, 9, 2, 2, 2)

    def test_latents_have_their_own_layout(self):
        mixed = engine(group((0,)), latent((1, 2)), layout="KBHND")
        assert [axes_of(mixed, g) for g in (0, 1)] == ["KBHND", "BND"]
        assert slots(mixed, 0)[1:] == [Slot(1, (1,), ("latent",)), Slot(1, (2,), ("latent",))]
        assert tensor_shape(mixed, 0, slots(mixed, 0)[1], 5) == (5, 4, 6)
        spanning = engine(latent((1, 2)), layout=("LBND",))
        assert slots(spanning, 0) == [Slot(0, (1, 2), ("latent",))]
        assert tensor_shape(spanning, 0, slots(spanning, 0)[0], 5) == (2, 5, 4, 6)

    def test_state_parts_are_tensors_of_their_own(self):
        conv, rest = part("conv", (3, 8), axis=1, units=4), part("rest", (5, 2), axis=None)
        hybrid = engine(state(conv, rest, layers=(4, 1)), tp_size=2)
        names = [(slot.layers, slot.planes) for slot in slots(hybrid, 0)]
        assert names == [((1,), ("conv",)), ((1,), ("rest",)), ((4,), ("conv",)), ((4,), ("rest",))]
        shapes = [tensor_shape(hybrid, 1, slot, 7) for slot in slots(hybrid, 1)[:2]]
        assert shapes == [(7, 3, 4), (7, 5, 2)]

    def test_a_stage_has_the_tensors_of_its_layers(self):
        staged = engine(group((0, 5)), latent((1,)), pp_size=2, layout=("LBKNHD", "BND"))
        assert slots(staged, 0) == [Slot(0, (0,), ("K", "V")), Slot(1, (1,), ("latent",))]
        assert slots(staged, 1) == [Slot(0, (5,), ("K", "V"))]
        with pytest.raises(ValueError, match="rank 2"):
            slots(staged, 2)

    def test_blocks_are_shared_out(self):
        shared = engine(tokens_per_block=24, cp_size=2, physical_blocks_per_block=3)
        assert tensor_shape(shared, 0, slots(shared, 0)[0], 5) == (2, 15, 4, 2, 8)
        slotted = engine(group(tokens_per_slot=2), tokens_per_block=24, cp_size=2, cp_interleave=2)
        assert tensor_shape(slotted, 0, slots(slotted, 0)[0], 5) == (2, 5, 6, 2, 8)


class TestPlaces:
    """Tokens of one block, counted from its start."""

    def at(self, tokens, an_engine, block=0):
        ids = np.full(len(tokens), block)
        blocks, entries = places(an_engine, 0, ids, np.array(tokens))
        return cp_ranks(an_engine, np.array(tokens)).tolist(), blocks.tolist(), entries.tolist()

    def test_tokens_take_turns(self):
        two = engine(cp_size=2)
        assert self.at(range(4), two, 7) == ([0, 1, 0, 1], [7] * 4, [0, 0, 1, 1])
        assert self.at([4, 5], two) == ([0, 1], [0, 0], [0, 0])

    def test_some_tokens_stay_together(self):
        pairs = engine(tokens_per_block=8, cp_size=2, cp_interleave=2)
        assert self.at(range(8), pairs) == (
            [0, 0, 1, 1, 0, 0, 1, 1], [0] * 8, [0, 1, 0, 1, 2, 3, 2, 3],
        )  # fmt: skip
        threes = engine(tokens_per_block=12, cp_size=3, cp_interleave=2)
        assert self.at([7, 12 + 7], threes) == ([0, 0], [0, 0], [3, 3])

    def test_a_block_is_several_of_the_tensor(self):
        parts = engine(tokens_per_block=6, physical_blocks_per_block=3)
        assert self.at(range(6), parts, 4)[1:] == ([12, 12, 13, 13, 14, 14], [0, 1] * 3)
        both = engine(tokens_per_block=8, cp_size=2, physical_blocks_per_block=2)
        assert self.at(range(8), both, 1) == (
            [0, 1] * 4, [2, 2, 2, 2, 3, 3, 3, 3], [0, 0, 1, 1, 0, 0, 1, 1],
        )  # fmt: skip

    def test_a_slot_is_several_tokens(self):
        slotted = engine(group(tokens_per_slot=2), tokens_per_block=8, cp_size=2, cp_interleave=2)
        assert self.at([0, 2, 4, 6], slotted) == ([0, 1, 0, 1], [0] * 4, [0, 0, 1, 1])


def test_filling_puts_a_token_where_it_lives():
    split, whole = engine(cp_size=2, physical_blocks_per_block=2), engine()
    reference = dense(whole, 0, 2)
    fill_reference(whole, 0, reference, [[1, 0]])
    for rank in range(2):
        tensors = dense(split, rank, 2)
        fill_reference(split, rank, tensors, [[0, 1]])
        for token in range(rank, 8, 2):
            block, inside = divmod(token, 4)
            found = tensors[0][:, block * 2 + inside // 2, 0]
            assert (found == reference[0][:, 1 - block, inside]).all()


def test_units_of_a_state_are_cut_along_their_axis():
    conv = part("conv", (2, 6), axis=1, units=3)
    whole = engine(state(conv))
    tensor = np.arange(24, dtype=np.uint8).reshape(2, 2, 6)
    rows = plane_rows(whole, slots(whole, 0)[0], tensor, 0, "conv")
    assert rows.shape == (2, 1, 3, 2, 2)
    assert rows[1, 0, 2].tolist() == [[16, 17], [22, 23]]
