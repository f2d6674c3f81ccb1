"""Layout strings: what they may say, and that they are strings."""

from __future__ import annotations

import itertools
import pickle

import msgspec
import pytest

from kvferry import Layout
from kvferry.errors import KVFerryError, LayoutError

EXAMPLES = ["KBNHD", "KBHND", "BKNHD", "BHNC", "BNHC", "BND", "BLKNHD", "LBHNC", "BKLNHD"]


@pytest.mark.parametrize("text", EXAMPLES)
def test_a_layout_equals_and_hashes_like_its_string(text):
    layout = Layout(text)
    assert layout == text and text == layout and hash(layout) == hash(text)
    assert {text: 1}[layout] == 1
    assert isinstance(layout, str) and str(layout) == text
    assert repr(layout) == f"Layout({text!r})"
    assert Layout(layout) == layout


@pytest.mark.parametrize(("short", "long"), [("NHD", "KBNHD"), ("HND", "KBHND")])
def test_shorthands(short, long):
    assert Layout(short) == long == Layout(long)
    assert hash(Layout(short)) == hash(long)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "B"),
        ("X", "'X'"),
        ("KBNHX", "'X'"),
        ("kbnhd", "'k'"),
        ("KBNHS", "'S'"),
        ("KBNH D", "' '"),
        ("KBNHD\0", "letter"),
        ("KBÑHD", "'Ñ'"),
        ("KBBNHD", "'B' occurs twice"),
        ("NNHD", "'N' occurs twice"),
        ("KNHD", "lacks B"),
        ("KBHD", "lacks N"),
        ("KBNH", "neither D nor C"),
        ("KBNHC", "both K and C"),
        ("BNHDC", "both D and C"),
        ("BNHCD", "both D and C"),
        ("KBNDH", "last"),
        ("DKBNH", "last"),
        ("BCNH", "last"),
        ("N" * 100_000, "twice"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(text, words):
    with pytest.raises(LayoutError, match=words) as caught:
        Layout(text)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, KVFerryError)


def test_every_string_of_letters_is_judged_by_the_rules():
    """A layout needs B, N and one of D and C last, each letter once, and C takes the place of K."""
    for length in range(1, 6):
        for letters in itertools.product("LBKNHDC", repeat=length):
            text = "".join(letters)
            is_legal = text in ("NHD", "HND") or (
                len(set(letters)) == length
                and {"B", "N"} <= set(letters)
                and ("D" in letters) != ("C" in letters)
                and not {"K", "C"} <= set(letters)
                and text[-1] in "DC"
            )
            try:
                Layout(text)
            except LayoutError:
                assert not is_legal, text
            else:
                assert is_legal, text


@pytest.mark.parametrize("given", [None, 5, b"KBNHD", ["K"], float("nan")])
def test_a_layout_is_made_from_a_string(given):
    with pytest.raises((TypeError, ValueError)):
        Layout(given)


def test_a_layout_survives_pickling():
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        copied = pickle.loads(pickle.dumps(Layout("HND"), protocol))
        assert copied == "KBHND" and type(copied) is Layout


def test_a_layout_is_read_from_messages_as_a_string():
    assert msgspec.json.decode(b'"KBNHD"', type=str) == Layout("NHD")
