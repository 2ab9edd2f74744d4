"""The command line, `omni-tensor-key`."""

import json
import sys

import click

from .doctor import examine, version_of

_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}


def _print(line: str) -> None:
    encoding = sys.stdout.encoding or "ascii"  # a path may have letters that the terminal has not
    click.echo(line.encode(encoding, "backslashreplace").decode(encoding))


@click.group()
@click.version_option(
    version_of("omni-tensor-key") or "unknown: omni-tensor-key is not installed, only its folder is on the path",
    message="%(version)s",
)
def app() -> None:
    """Let vLLM-Omni's prompt-embedding cache key calls that carry token-ID and mask tensors."""


@app.command()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(as_json: bool) -> None:
    """Say whether a call with tensors would be cached in this environment and, if not, what to do.

    The exit code is 0 only if it would be.
    """
    findings = examine()
    healthy = all(finding.state != "problem" for finding in findings)
    if as_json:
        _print(json.dumps({"healthy": healthy, "findings": [item._asdict() for item in findings]}, indent=2))
    else:
        for item in findings:
            _print(f"{click.style(f'{item.state:8}', _COLORS[item.state])} {item.name}: {item.seen}")
            if item.advice:
                _print(f"         -> {item.advice}")
    raise SystemExit(0 if healthy else 1)
