"""The `kvferry` command: its exit codes and what it prints."""

import json
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest

from kvferry import EngineSpec, KVCache, ModelSpec, cuda
from kvferry.cli import demo, main
from kvferry.cli.calibrate import report

MODELS = Path(__file__).parents[1] / "data/models"


@pytest.fixture
def tiny(tmp_path):
    """Write the config of a two-layer model, so that the whole demo takes moments."""
    config = {
        "num_hidden_layers": 2,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "sliding_window": 40,
    }
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(config))
    return path


def test_every_rank_is_exact(tiny, capsys):
    options = ["--tokens=100", "--source-tp=3", "--source-block=24", "--target-layout=BHNC"]
    assert main(["demo", "--model", str(tiny), *options]) == 0
    printed = capsys.readouterr().out
    assert "tiny: 2 layers; 100 tokens" in printed
    assert printed.count("exact") == 2
    assert "verified all" in printed


def test_a_wrong_byte_is_named_and_fails(tiny, capsys, monkeypatch):
    move = demo.move

    def spoil(route, source, target, rank, arguments):
        moved = move(route, source, target, rank, arguments)
        if rank == 1:
            block = target.blocks[0][1]  # tokens 64 to 99
            target.tensors[1][0][1, block, 3, 0, 0] ^= 1  # [planes, blocks, tokens, heads, dim]
        return moved

    monkeypatch.setattr(demo, "move", spoil)
    assert main(["demo", "--model", str(tiny), "--tokens", "100"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("exact") == 1
    assert printed.count("WRONG") == 1
    assert "first wrong element" in printed
    assert "layer 0" in printed
    assert "token 67" in printed


def test_layers_are_cut_to_fit_and_said_so(tiny, capsys):
    # A layer takes about 50 KiB in both engines.
    assert main(["demo", "--model", str(tiny), "--tokens", "50", "--max-gib", "0.0001"]) == 0
    assert "1 layer of 2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["deepseek-v3", "nemotron-h-8b", "gemma-3-27b"])
def test_models_of_every_kind_are_moved(name, capsys):
    options = ["--tokens=50", "--max-gib=0.05", "--source-tp=2", "--target-tp=4"]
    assert main(["demo", "--model", str(MODELS / f"{name}.json"), *options]) == 0
    assert capsys.readouterr().out.count("exact") == 4


@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("deepseek-v3", ["BND", "BND"]),
        ("nemotron-h-8b", ["BS, KBHND", "BS, KBNHD"]),
        ("llama-3.1-8b", ["KBHND", "KBNHD"]),
    ],
)
def test_the_layouts_shown_are_those_in_effect(name, layouts, capsys):
    options = ["--tokens=10", "--max-gib=0.1", "--source-layout=HND"]
    assert main(["demo", "--model", str(MODELS / f"{name}.json"), *options]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "tokens a block" in line]
    assert [line.split(", ", 2)[2].strip() for line in lines] == layouts


def test_tensors_begin_at_cache_lines_and_lie_apart():
    model = ModelSpec.from_hf_config(MODELS / "nemotron-h-8b.json")
    engine = EngineSpec("source", model, tokens_per_block=16, layout="KBHND", tp_size=4)
    tensors = demo.rank_tensors(engine, 0, tokens=5)
    places = sorted((tensor.ctypes.data, tensor.nbytes) for tensor in tensors)
    assert all(begin % 64 == 0 for begin, _ in places)
    assert all(begin + size <= after for (begin, size), (after, _) in pairwise(places))
    KVCache(engine, 0, tensors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nowhere.json"], "nowhere.json"),
        (["--source-layout", "NHX"], "letter 'X'"),
        (["--max-gib", "0.0000001"], "one layer takes"),
    ],
)
def test_what_cannot_be_done_is_said_with_code_2(tiny, options, message, capsys):
    assert main(["demo", "--model", str(tiny), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--tokens", "--threads", "--seed", "--source-tp", "--target-block"]
)
def test_numbers_are_checked_before_anything_else(option, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", option, "0"])
    assert stopped.value.code == 2
    assert f"argument {option}: 0 is not positive" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"kvferry {version('kvferry')}"


def test_the_table_fits_eighty_columns(tiny, capsys):
    assert (
        main(["demo", "--model", str(tiny), "--source-tp=16", "--target-tp=1", "--tokens=100"]) == 0
    )
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "of memcpy" in printed and "exact" in printed


def test_a_calibration_is_a_table_and_lines_for_a_shell():
    def bus(plain, *speeds):
        return cuda.BusSpeeds(plain, tuple(cuda.FragmentSpeeds(*speed) for speed in speeds))

    upload = bus(55e9, (256, 20e9, 0.25e9), (65536, 21e9, 45.678e9))
    download = bus(50e9, (256, 10e9, 0.2e9), (65536, 11e9, 40e9))
    lines = report(cuda.Calibration(upload, download, 65536, 4096, 16)).splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["256", "B", "20.00", "0.25", "10.00", "0.20"],
        ["64", "KiB", "21.00", "45.68", "11.00", "40.00"],
        ["contiguous", "55.00", "50.00"],
    ]
    assert len({len(line) for line in lines[:4]}) == 1
    assert lines[4:] == [
        "",
        "export KVFERRY_CUDA_UPLOAD_BYTES=65536",
        "export KVFERRY_CUDA_DOWNLOAD_BYTES=4096",
        "export KVFERRY_CUDA_MIN_KERNEL_PIECES=16",
    ]


@pytest.mark.skipif(cuda.available(), reason="there is a device")
def test_a_machine_without_a_gpu_has_nothing_to_calibrate(capsys):
    assert main(["calibrate"]) == 2
    reason = f"CUDA memory cannot be copied: {cuda.unavailable_reason()}"
    assert capsys.readouterr().err == f"kvferry calibrate: {reason}\n"
