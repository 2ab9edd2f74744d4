"""The command line, `omni-tensor-key`."""

import io
import json
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .doctor import examine

app = typer.Typer(no_args_is_help=True, add_completion=False)

_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            typer.echo(version("omni-tensor-key"))
        except PackageNotFoundError:
            typer.echo("unknown: omni-tensor-key is not installed, only its folder is on the path")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Let vLLM-Omni's prompt-embedding cache key calls that carry token-ID and mask tensors."""


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say whether a call with tensors would be cached in this environment and, if not, what to do.

    The exit code is 0 only if it would be.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have letters that the terminal has not
    findings = examine()
    healthy = all(finding.state != "problem" for finding in findings)
    if as_json:
        typer.echo(json.dumps({"healthy": healthy, "findings": [item._asdict() for item in findings]}, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for item in findings:
            console.print(f"[{_COLORS[item.state]}]{item.state:8}[/] {escape(item.name)}: {escape(item.seen)}")
            if item.advice:
                console.print(f"         -> {escape(item.advice)}")
    raise typer.Exit(0 if healthy else 1)
