"""Writes what `make bench` has measured into the marked part of docs/RESULTS.md.

    results.py begin FOLDER          notes the load of the machine before anything is measured
    results.py write FOLDER PAGE     replaces the part between the markers by the reports in FOLDER

A report is what ``--json`` wrote. Everything outside the markers is left as it is.
"""

import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path

from kvlink.bench.sizes import format_size

BEGIN = "<!-- make bench: begin. What follows is written by it, up to the end. -->"
END = "<!-- make bench: end -->"
STARTED = "started.json"


def begin(folder):
    """Empty `folder` of reports and note when, and under which load, the next ones begin."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    started = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"), "load": os.getloadavg()[0]}
    (folder / STARTED).write_text(json.dumps(started))


def write(folder, page):
    """Replace the marked part of `page`."""
    text = page.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        sys.exit(f"results: {page} has not both markers, once each")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{part(folder)}\n{END}{after}")


def part(folder):
    """Return the part of the page that tells of the reports in `folder`."""
    started = json.loads((folder / STARTED).read_text())
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.name != STARTED]
    lines = [*machine(reports, started), ""]
    for report in reports:
        lines += ["    " + command(report), "", *table(report["rows"]), ""]
    return "\n".join(lines)


def machine(reports, started):
    """Return where, when and with what it was measured."""
    if not reports:
        sys.exit("results: there is no report")
    facts = reports[0]["machine"]
    abouts = {row["system"]: row["lane_reason"] for report in reports for row in report["rows"] if "ratios" in row}
    peers = [about for name, about in sorted(abouts.items()) if name not in ("kvlink", "memcpy", "socket")]
    memory = f"{facts['memory_bytes'] / (1 << 30):.0f} GiB"
    return [
        f"{facts['cores']} cores of {facts['cpu']}, {memory}, Linux {facts['kernel']}, Python {facts['python']},",
        f"kvlink {reports[0]['kvlink']}{ucx()}; {started['date']}. Load before it began: {started['load']:.1f}.",
        *([] if not peers else ["", "Peers: " + "; ".join(versions(peers)) + "."]),
    ]


def versions(abouts):
    """Return each library with its version, once."""
    return list(dict.fromkeys(about.partition(",")[0] for about in abouts))


def ucx():
    from kvlink.doctor import examine

    found = next((row for row in examine() if row["check"] == "UCX" and row["ok"]), None)
    return f", UCX {found['detail'].split()[0].rstrip(',')}" if found else ""


def command(report):
    """Return the command as one would type it, without where it wrote to."""
    words = iter(report["command"])
    kept = []
    for word in words:
        if word in ("--json", "--report"):
            next(words)
        else:
            kept.append(word)
    return " ".join(kept)


def table(rows):
    """Return the rows as a table of Markdown, in the form that fits their benchmark."""
    first = rows[0]
    if "ratios" in first:
        return transfer(rows)
    columns = {
        "pair": [("pair", str), ("run_bytes", format_size), ("runs", whole), ("ratio_to_memcpy", fraction)]
        + ([("against", str), ("ratio_to_against", fraction)] if first.get("against") else []),
        "regions": [("blocks", whole), ("regions", whole), ("request_to_last_post_us_median", whole)],
        "p50_us": [("blocks", whole), ("concurrent", whole), ("p50_us", whole), ("p99_us", whole), ("gbps", fraction)]
        + [("ratio_to_one_large", fraction)],
        "role": [("role", str), ("peers", whole), ("cpu_percent", fraction), ("rss_bytes_per_peer", whole)],
    }
    chosen = next((wanted for key, wanted in columns.items() if key in first), [])
    return markdown([key for key, _ in chosen], [[form(row[key]) for key, form in chosen] for row in rows])


def transfer(rows):
    """Return a row a system: its ratio to memcpy at each block size, and kvlink's to it where that is not itself."""
    sizes = list(dict.fromkeys(row["block_bytes"] for row in rows))
    lines = []
    for system, lane in dict.fromkeys((row["system"], row["lane"]) for row in rows):
        own = {row["block_bytes"]: row for row in rows if (row["system"], row["lane"]) == (system, lane)}
        cells = [own.get(size) for size in sizes]
        lines.append([f"{system} ({lane}) to memcpy", *(fraction(row and row["ratio_to_memcpy"]) for row in cells)])
        if any(row and "kvlink" in row["ratios"] for row in cells) and system != "memcpy":
            inverse = [row and row["ratios"].get("kvlink") for row in cells]
            lines.append([f"kvlink to {system}", *(fraction(ratio and 1 / ratio) for ratio in inverse)])
        cpu = [row and row["cpu_s_per_gb_source"] + row["cpu_s_per_gb_target"] for row in cells]
        lines.append([f"{system}: CPU s a GB", *(fraction(value) for value in cpu)])
    return markdown(["", *(format_size(size) for size in sizes)], lines)


def markdown(head, lines):
    """Return the lines of a table."""
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)]


def whole(value):
    return f"{value:,.0f}"


def fraction(value):
    return "" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    if sys.argv[1] == "begin":
        begin(Path(sys.argv[2]))
    else:
        write(Path(sys.argv[2]), Path(sys.argv[3]))
