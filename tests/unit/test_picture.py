"""Pictures of plans: what they say, and that they are well-formed whatever they are given."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from engines import attention_model, engine_pair, hybrid_model, make_engine
from msgspec.structs import replace

from kvferry import ModelSpec, Route
from kvferry.picture import to_svg
from kvferry.plan import StretchExplanation

SVG = "{http://www.w3.org/2000/svg}"


def parsed(svg: str) -> ET.Element:
    return ET.fromstring(svg)


def texts(svg: str) -> list[str]:
    """Everything that is written, one entry a line of text."""
    return ["".join(text.itertext()) for text in parsed(svg).iter(f"{SVG}text")]


def titles(svg: str) -> list[str]:
    return [title.text or "" for title in parsed(svg).iter(f"{SVG}title")]


def blocks_plan(end: int = 60):
    """24 tokens a block in four ranks meet 16 in two, eight heads."""
    source, target = engine_pair(
        {"tp_size": 4, "tokens": 24, "layout": "KBHND"},
        {"tp_size": 2, "tokens": 16, "layout": "KBNHD"},
        layers=3,
        heads=8,
        dim=64,
    )
    return Route(source, target).plan(0, [[7, 3, 9]], [[5, 2, 1, 8]], tokens=(0, end))


def hybrid_plan():
    source = make_engine("source", hybrid_model(), tokens=16, null_block_id=0)
    target = make_engine("target", hybrid_model(), tokens=32, tp_size=2, null_block_id=0)
    return Route(source, target).plan(1, [[7, 3], [4, 5], [6]], [[5], [8], [9]], tokens=(0, 32))


def empty_plan():
    return Route(*engine_pair({"tp_size": 2})).plan(0, [[]], [[]], tokens=(0, 0))


def push_plan():
    source, target = engine_pair({}, {"tp_size": 4}, heads=4)
    return Route(source, target).plan_push(0, [[7, 3]], [[5, 2]], tokens=(1, 7))


def wide_plan():
    source, target = engine_pair({"tp_size": 64}, heads=64)
    return Route(source, target).plan(0, [range(100)], [range(500, 600)], tokens=(0, 400))


PLANS = [blocks_plan, hybrid_plan, empty_plan, push_plan, wide_plan]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
def test_every_picture_is_well_formed_and_stands_alone(plan):
    svg = plan().to_svg()
    root = parsed(svg)
    assert root.tag == f"{SVG}svg"
    _, _, width, height = map(float, root.get("viewBox", "").split())
    assert (width, height) == (float(root.get("width", 0)), float(root.get("height", 0)))
    explained = plan().explain()
    assert root.findtext(f"{SVG}title") == str(explained).splitlines()[0]
    assert root.findtext(f"{SVG}desc") == str(explained)
    for external in ("href", "url(", "@import", "<script", "<style"):
        assert external not in svg
    assert not re.search(r"nan|inf[^o]|e[-+]\d", svg.partition("</desc>")[2])


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
def test_nothing_leaves_the_page(plan):
    root = parsed(plan().to_svg())
    width, height = float(root.get("width", 0)), float(root.get("height", 0))

    def visit(element, x, y):
        moved = re.fullmatch(r"translate\((\S+) (\S+)\)", element.get("transform", ""))
        if moved:
            x, y = x + float(moved[1]), y + float(moved[2])
        if element.tag == f"{SVG}rect":
            left, top = x + float(element.get("x", 0)), y + float(element.get("y", 0))
            assert left >= 0 and left + float(element.get("width", 0)) <= width
            assert top >= 0 and top + float(element.get("height", 0)) <= height
        for child in element:
            visit(child, x, y)

    visit(root, 0, 0)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
def test_the_same_plan_gives_the_same_picture(plan):
    assert plan().to_svg() == plan().to_svg() == to_svg(plan().explain())


def test_ranks_heads_and_numbers_are_labelled():
    written = texts(blocks_plan().to_svg())
    # Two heads of 128 B, two planes, three layers, 60 tokens: each head of a token is a fragment.
    assert written[0] == "rank 0 of 'target' reads 180 KiB in 1,440 fragments from 'source'"
    assert "heads 0–1 · 90 KiB in 720 fragments" in written
    assert "heads 2–3 · 90 KiB in 720 fragments" in written
    assert {"rank 0", "rank 1", "heads 0–3", "source source", "target target"} <= set(written)
    assert "3 layers, 60 tokens due in 5 stretches of blocks" in written
    assert "2 rank pairs, 128 B a fragment on average; staging pays on a wire" in written


def test_blocks_lie_to_scale_above_each_other():
    svg = blocks_plan().to_svg()
    assert [text for text in texts(svg) if text.startswith("block ")] == [
        "block 7",
        "block 3",
        "block 9",
        "block 5",
        "block 2",
        "block 1",
        "block 8",
    ]
    assert {"24 tokens a block", "16 tokens a block"} <= set(texts(svg))
    assert {"0", "24", "48", "60", "72", "16", "32", "64"} <= set(texts(svg))
    fills = {}
    for rect in parsed(svg).iter(f"{SVG}rect"):
        title = rect.findtext(f"{SVG}title")
        if title:
            fills.setdefault(title, set()).add((rect.get("x"), rect.get("width"), rect.get("fill")))
    assert list(fills) == [
        "tokens [0, 16): block 7 from 0 → block 5 from 0",
        "tokens [16, 24): block 7 from 16 → block 2 from 0",
        "tokens [24, 32): block 3 from 0 → block 2 from 8",
        "tokens [32, 48): block 3 from 8 → block 1 from 0",
        "tokens [48, 60): block 9 from 0 → block 8 from 0",
    ]
    # Both rows and what joins them lie at one place, in one colour, and widths are to scale.
    assert all(len(places) == 1 for places in fills.values())
    widths = [float(next(iter(places))[1]) for places in fills.values()]
    shares = [width / sum(widths) for width in widths]
    assert shares == pytest.approx([16 / 60, 8 / 60, 8 / 60, 16 / 60, 12 / 60], abs=1e-4)


def test_a_block_that_is_shown_in_part_is_open():
    # Of the 24 and 16 tokens, only a few that are not due are drawn.
    written = texts(blocks_plan(end=4).to_svg())
    assert "4" in written and "24" not in written and "16" not in written


def test_engine_ids_are_escaped():
    model = attention_model()
    hostile = make_engine('<a&"b">', model, tp_size=2)
    svg = (
        Route(hostile, make_engine("</svg>\x00\x1b]", model)).plan(0, [[1]], [[2]], (0, 4)).to_svg()
    )
    assert 'source <a&"b">' in texts(svg)
    assert "target </svg>��]" in texts(svg)
    assert len(list(parsed(svg).iter(f"{SVG}svg"))) == 1


def test_long_engine_ids_leave_room_for_the_numbers():
    source, target = engine_pair()
    source = replace(source, engine_id="s" * 5000)
    svg = Route(source, target).plan(0, [[1]], [[2]], tokens=(0, 4)).to_svg()
    assert max(map(len, texts(svg))) < 100
    assert "s" * 5000 in titles(svg)[0]


def test_ranks_that_are_only_notified_are_dashed():
    source, target = engine_pair({"tp_size": 8}, heads=2)
    svg = Route(source, target).plan(0, [[1]], [[2]], tokens=(0, 4)).to_svg()
    written = texts(svg)
    assert "ranks 1–3, 5–7" in written and "hold the same" in written
    assert "only notified when the request is done" in written
    dashed = [element for element in parsed(svg).iter() if element.get("stroke-dasharray")]
    assert [element.tag for element in dashed] == [f"{SVG}rect", f"{SVG}path"]
    assert "stroke-dasharray" not in blocks_plan().to_svg()


def test_an_empty_plan_is_drawn():
    written = texts(empty_plan().to_svg())
    assert "Nothing is due: the plan is empty, and it completes." in written
    assert "ranks 0–1" in written and "1 layer, no tokens are due" in written


def test_engines_without_a_common_layer_are_drawn():
    model = ModelSpec(groups=(replace(attention_model().groups[0], layers=(5,)),))
    route = Route(make_engine(), make_engine("other", model), allow_missing_layers=True)
    assert "reads 0 B" in texts(route.plan(0, [[]], [[]], tokens=(0, 0)).to_svg())[0]


def test_a_push_has_its_source_on_the_left():
    svg = push_plan().to_svg()
    assert texts(svg)[0].startswith("rank 0 of 'source' sends")
    labels = [text for text in texts(svg) if text.startswith("head ") and "·" in text]
    assert [label[:6] for label in labels] == ["head 0", "head 1", "head 2", "head 3"]
    (hub,) = [text for text in parsed(svg).iter(f"{SVG}text") if text.text == "heads 0–3"]
    (spoke,) = [text for text in parsed(svg).iter(f"{SVG}text") if text.text == "rank 3"]
    assert float(hub.get("x", 0)) < 200 < 600 < float(spoke.get("x", 0))


def test_groups_of_every_kind_are_drawn():
    written = texts(hybrid_plan().to_svg())
    headings = ["attention group 0 → 0", "latent group 1 → 1", "state group 2 → 2"]
    assert [text for text in written if text in headings] == headings
    assert "slot 6" in written and "slot 9" in written and "2 layers, one state" in written
    # Half of 64 channels and half of 4 units: two parts, each split on its own.
    assert "conv 32–63" in {text.partition(" ·")[0] for text in written}
    assert "ssm 2–3" in written and "conv 32–63, ssm 2–3" in written
    assert any(text.startswith("latent · ") and text.endswith("in all") for text in written)


def test_a_rank_that_moves_nothing_of_a_group_says_so():
    source = make_engine("source", hybrid_model(), tokens=16, tp_size=2)
    target = make_engine("target", hybrid_model(), tokens=16)
    # Every rank holds the latent, and the target reads that of rank 0.
    plan = Route(source, target).plan_push(1, [[7], [4], [6]], [[5], [8], [9]], tokens=(0, 16))
    assert "This rank moves nothing of this group." in texts(plan.to_svg())


def test_layers_are_named_where_they_are_not_all():
    source, target = engine_pair({"pp_size": 2}, layers=4)
    written = texts(Route(source, target).plan(0, [[1]], [[2]], tokens=(0, 4)).to_svg())
    assert sum(text.startswith("heads 0–1 of 2 layers · ") for text in written) == 2


def test_many_ranks_and_stretches_are_counted():
    svg = wide_plan().to_svg()
    written = texts(svg)
    assert "… 52 more ranks" in written and "heads 0–63" in written
    assert sum(text.startswith("head ") and "·" in text for text in written) == 12
    assert "… 52 more" in written  # of 100 stretches
    assert len({title for title in titles(svg) if title.startswith("tokens [")}) == 48
    assert float(parsed(svg).get("height", 0)) < 1500


def test_many_groups_are_counted():
    model = attention_model(layers=20).regroup([[layer] for layer in range(20)])
    route = Route(make_engine("source", model), make_engine("target", model))
    written = texts(route.plan(0, [[1]] * 20, [[2]] * 20, tokens=(0, 4)).to_svg())
    assert "attention group 7 → 7" in written and "attention group 8 → 8" not in written
    assert written[-1] == "… 12 more pairs of groups"


def test_more_stretches_than_are_shown_are_cut():
    explained = blocks_plan().explain()
    stretches = tuple(StretchExplanation((i, i + 1), i, 0, i, 0) for i in range(100))
    group = replace(
        explained.groups[0],
        stretches=stretches,
        num_stretches=100,
        source_tokens_per_block=1,
        target_tokens_per_block=1,
    )
    svg = to_svg(replace(explained, groups=(group,)))
    assert "… 52 more" in texts(svg)


@pytest.mark.parametrize("first", [0, 2**40, 2**62 - 8], ids=["small", "large", "largest"])
def test_large_positions_and_ids_are_drawn(first):
    source, target = engine_pair({}, {"tokens": 8})
    ids, tokens = [2**40, 2**40 - 7], (first, first + 8)
    plan = Route(source, target).plan(
        0, [ids], [[3]], tokens, source_first_token=first, target_first_token=first
    )
    assert f"tokens [{first}, {first + 4}): block {2**40} from 0 → block 3 from 0" in titles(
        plan.to_svg()
    )


def test_holes_between_due_tokens_are_named_or_left_out():
    source, target = engine_pair({}, {"null_block_id": -1})
    near = Route(source, target).plan(0, [range(3)], [[1, -1, 2]], tokens=(0, 12)).to_svg()
    assert "not due" in texts(near)
    ids = [1, *[-1] * 98, 2]
    far = Route(source, target).plan(0, [range(100)], [ids], tokens=(0, 400)).to_svg()
    assert "not due" not in texts(far) and texts(far).count("4 tokens a block") == 4


def test_kvferry_is_imported_without_pictures():
    code = "import kvferry, sys; sys.exit('kvferry.picture' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
