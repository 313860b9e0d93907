"""The `kvlink` command."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kvlink
from kvlink.bench.command import app as bench_app
from kvlink.demo.command import demo
from kvlink.report import check_path

__all__ = ["app", "main"]

app = typer.Typer(
    name="kvlink",
    help="Hand the KV cache of a prefill to the worker that decodes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.add_typer(bench_app, name="bench", no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(kvlink.__version__)
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Hand the KV cache of a prefill to the worker that decodes."""


@app.command()
def doctor(
    *,
    json: Annotated[
        str,
        typer.Option(metavar="PATH", callback=check_path, help="Write what was found as JSON; - is standard output."),
    ] = "",
) -> None:
    """Say what kvlink finds on this machine: UCX, its transports, and the lanes that work between two processes."""
    from kvlink.doctor import examine, is_healthy, print_findings
    from kvlink.report import write_report

    findings = examine()
    if json:
        write_report(json, findings)
    if json != "-":
        print_findings(findings)
    if not is_healthy(findings):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line. An error of kvlink's or the system's is one line and exit code 1, not a traceback."""
    try:
        app()
    except (kvlink.KvlinkError, OSError, MemoryError) as error:
        typer.echo(f"kvlink: {type(error).__name__}: {error}", err=True)
        sys.exit(1)
