"""What `make bench` writes into docs/RESULTS.md, and what it leaves alone."""

import json

import pytest
from helpers.source_text import ROOT

from benchmarks import results

MACHINE = {"cpu": "A CPU", "cores": 2, "memory_bytes": 24 << 30, "kernel": "6.1", "python": "3.11.7"}


def report(command, rows):
    return json.dumps({"kvlink": "0.1.0", "command": ["UCX_TLS=tcp", *command], "machine": MACHINE, "rows": rows})


def moved(system, block_bytes, **ratios):
    cpu = {"cpu_s_per_gb_source": 0.25, "cpu_s_per_gb_target": 0.5}
    about = {"lane": "staged", "lane_reason": f"{system.upper()} 1.5, as shipped"}
    first = {"system": system, "block_bytes": block_bytes, "ratio_to_memcpy": ratios["memcpy"], "ratios": ratios}
    return first | about | cpu


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ucx", lambda: ", UCX 1.22.0")
    out = tmp_path / "bench"
    out.mkdir()
    (out / "9-old.json").write_text("old")
    results.begin(out)
    rows = [
        *(moved("kvlink", size, memcpy=1.25, nixl=4.0) for size in (16384, 65536)),
        moved("nixl", 16384, memcpy=0.31, kvlink=0.25),
    ]
    command = ["kvlink", "bench", "transfer", "--json", "a.json", "--peers", "kvlink,nixl", "--report", "a.html"]
    (out / "1-transfer.json").write_text(report(command, rows))
    row = {"pair": "tp2-tp4", "run_bytes": 512, "runs": 524288, "ratio_to_memcpy": 1.178}
    (out / "2-layout.json").write_text(report(["kvlink", "bench", "layout"], [row]))
    beside = {**row, "against": "same-64KiB", "ratio_to_against": 0.815}
    (out / "3-layout.json").write_text(report(["kvlink", "bench", "layout"], [beside]))
    return out


def test_the_marked_part_is_replaced_and_the_rest_stays(folder, tmp_path):
    page = tmp_path / "RESULTS.md"
    page.write_text(f"before\n{results.BEGIN}\nstale\n{results.END}\nafter\n")
    for _ in range(2):  # the second time over its own work
        results.write(folder, page)
        text = page.read_text()
        assert text.startswith(f"before\n{results.BEGIN}\n")
        assert text.endswith(f"{results.END}\nafter\n")
        assert "stale" not in text
        assert "2 cores of A CPU, 24 GiB, Linux 6.1," in text
        assert "kvlink 0.1.0, UCX 1.22.0" in text
        assert "Peers: NIXL 1.5." in text
        assert "    UCX_TLS=tcp kvlink bench transfer --peers kvlink,nixl\n" in text
        assert "| | 16KiB | 64KiB |".replace("| |", "|  |") in text
        assert "| kvlink (staged) to memcpy | 1.25 | 1.25 |" in text
        assert "| kvlink to nixl | 4.00 |  |" in text
        assert "| nixl: CPU s a GB | 0.75 |  |" in text
        assert "| tp2-tp4 | 512 | 524,288 | 1.18 |\n" in text
        assert "| tp2-tp4 | 512 | 524,288 | 1.18 | same-64KiB | 0.81 |\n" in text


def test_a_page_without_markers_is_refused_and_left_as_it_is(folder, tmp_path):
    page = tmp_path / "RESULTS.md"
    page.write_text("nothing to replace\n")
    with pytest.raises(SystemExit, match="has not both markers"):
        results.write(folder, page)
    assert page.read_text() == "nothing to replace\n"


def test_the_page_of_the_tree_has_the_markers():
    text = (ROOT / "docs/RESULTS.md").read_text()
    assert (text.count(results.BEGIN), text.count(results.END)) == (1, 1)
