"""The page of a benchmark: whole in itself, and with every row."""

import json
import re
from html.parser import HTMLParser

import pytest

from kvlink.bench import page, tables
from kvlink.errors import ConfigError

SPEED = {"gbps_median": 2.0, "gbps_min": 1.0, "gbps_max": 3.0, "memcpy_gbps": 4.0, "ratio_to_memcpy": 0.5}
MOVED = {
    **SPEED,
    **{"lane": "mapped", "memory": "kvlink", "threads": 1, "post_us_median": None, "verified": True},
    **{"cpu_s_per_gb_source": 0.1, "cpu_s_per_gb_target": 0.2},
}
PHASES = {"check_us_median": 5.0, "plan_us_median": 6.0, "post_us_median": 29.0}
HANDOFF = {
    **{
        "lane": "mapped",
        "blocks": 1,
        "block_bytes": 32768,
        "concurrent": 1,
        "handoffs": 300,
        "threads": 1,
        "busy": False,
    },
    **{"p50_us": 285.0, "p99_us": 598.0, "gbps": 0.12, "gbps_one_large": 0.12, "ratio_to_one_large": 1.0},
    "percentiles_us": [200.0 + 4 * index for index in range(101)],
}
ROWS = {
    "TRANSFER": [{"system": "kvlink", "block_bytes": size, **MOVED} for size in (4096, 65536)],
    "COMPARED": [
        {"system": system, "block_bytes": size, "ratios": {"kvlink": 0.5} if system == "nixl" else {}, **MOVED}
        for size in (4096, 65536)
        for system in ("kvlink", "memcpy", "nixl")
    ],
    "LAYOUT": [
        {**SPEED, "pair": "<tp2-tp4>", "lane": "mapped", "run_bytes": 512, "runs": 9, "threads": 1}
        | {"ratio_min": 0.4, "ratio_max": 0.7}
    ],
    "PLAN": [
        {"blocks": 128, "regions": 64, "runs": 8192, **PHASES}
        | {f"request_to_last_post_us_{which}": 40.0 for which in ("median", "min", "max")}
    ],
    "HANDOFF": [HANDOFF, {**HANDOFF, "blocks": 128}],
    "IDLE": [
        {"role": "target", "peers": 320, "seconds": 1.0, "cpu_percent": 0.0, "rss_bytes_per_peer": 72000.0}
        | {"descriptors_per_peer": 2.0, "threads": 6}
    ],
}
VOID = {"meta", "path", "use", "rect"}


class Reader(HTMLParser):
    """Notes what a browser would load, ids, and tags that do not match."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.ids, self.wrong, self.pictures = [], [], [], [], 0

    def handle_starttag(self, tag, attributes):
        named = dict(attributes)
        self.loads += [named[key] for key in ("src", "href", "xlink:href") if not named.get(key, "#").startswith("#")]
        self.ids += [named["id"]] if "id" in named else []
        self.pictures += tag == "svg"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in VOID and self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.mark.parametrize("table", ROWS)
def test_a_page_has_every_plot_and_row_and_loads_nothing(tmp_path, table):
    shown: tables.Table = getattr(tables, table)
    page.write_page(str(tmp_path / "page.html"), shown, ROWS[table])
    text = (tmp_path / "page.html").read_text()
    reader = Reader()
    reader.feed(text)
    assert (reader.open, reader.wrong, reader.loads) == ([], [], [])
    assert reader.pictures == len(shown.charts) > 0
    assert len(set(reader.ids)) == len(reader.ids)
    assert "url(http" not in text
    assert "<tp2" not in text
    assert text.count("<tr>") == 1 + len(ROWS[table])
    assert json.loads(re.search(r'id="rows">(.*)</script>', text)[1]) == ROWS[table]
    assert "Some bytes were wrong" not in text


def test_a_page_says_that_bytes_were_wrong(tmp_path):
    page.write_page(str(tmp_path / "page.html"), tables.TRANSFER, [{**ROWS["TRANSFER"][0], "verified": False}])
    assert "Some bytes were wrong." in (tmp_path / "page.html").read_text()


def test_a_page_that_cannot_be_drawn_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    assert page.check_page("") == ""
    with pytest.raises(ConfigError, match="--report: .* cannot be written: No such file or directory"):
        page.check_page(str(tmp_path / "nowhere" / "page.html"))
    monkeypatch.setattr(page.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'kvlink\[bench\]'"):
        page.check_page(str(tmp_path / "page.html"))
