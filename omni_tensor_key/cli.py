"""The command line, ``omni-tensor-key``."""

import dataclasses
import json
import logging
import os
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(no_args_is_help=True, add_completion=False)

# Read by the demo's libraries when they are imported; a value that is already set stays.
_QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@app.callback()
def main() -> None:
    """Let vLLM-Omni's prompt cache key calls that carry token-ID tensors."""


@app.command()
def demo(
    n: Annotated[int, typer.Option("--n", min=1, help="Samples of each prompt.")] = 16,
) -> None:
    """Sample real prompts through the real prompt cache, with the extension off and on.

    The exit code is 1 if an output differs from the uncached one or a count from the expected one, and 2 if what the
    demo runs is not installed.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("torch").setLevel(logging.ERROR)  # torch is imported by now: TORCH_LOGS would come too late
    try:
        from omni_tensor_key import demo as demonstration
    except ImportError as error:
        _fail(
            f"The demo cannot import what it runs ({error}); in a checkout, `make demo` installs it,"
            " and so does `pip install --no-deps -r requirements/vllm-omni-0.30-cpu.txt`.",
            code=2,
        )
    problems = demonstration.run(n, Console())
    if problems:
        _fail(" ".join(problems), code=1)


@app.command()
def bench(
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
    chart: Annotated[str | None, typer.Option(help="Also draw PREFIX.svg and PREFIX.png.", metavar="PREFIX")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Take seconds, for a test: no figures to rely on.")] = False,
) -> None:
    """Measure what a key, a hit, a miss and a bypass cost on this machine, on one core; about a minute.

    The exit code is 2 if there is no prompt cache to measure.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from omni_tensor_key import bench as benchmark

    try:
        benchmark.run(Console(), quick=quick, json_file=json_file, chart=chart)
    except benchmark.CannotMeasure as error:
        _fail(f"Nothing was measured: {error}.", code=2)


_COLORS = {"ok": "green", "note": "yellow", "problem": "red"}


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say whether a call with tensors would be cached in this environment and, if not, what to do.

    The exit code is 0 only if it would be.
    """
    from omni_tensor_key import doctor as physician

    findings = physician.examine()
    healthy = all(finding.state != "problem" for finding in findings)
    if as_json:
        report = {"healthy": healthy, "findings": [dataclasses.asdict(finding) for finding in findings]}
        typer.echo(json.dumps(report, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for finding in findings:
            color = _COLORS[finding.state]
            console.print(f"[{color}]{finding.state:8}[/] {escape(finding.name)}: {escape(finding.seen)}")
            if finding.advice:
                console.print(f"         → {escape(finding.advice)}")
    raise typer.Exit(0 if healthy else 1)


@app.command()
def audit(
    target: Annotated[str, typer.Argument(metavar="MODULE:CLASS|FILE.py:CLASS", help="A pipeline class.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Say what the cache will do with the encode_prompt() of a pipeline class, from its source; nothing is imported.

    The exit code is 2 if the class cannot be read.
    """
    from omni_tensor_key import audit as auditor

    try:
        result = auditor.audit(target)
    except auditor.SourceError as error:
        _fail(str(error), code=2)
    if as_json:
        typer.echo(json.dumps(result.as_dict(), indent=2))
    else:
        auditor.show(result, Console(highlight=False))


def _fail(message: str, code: int) -> NoReturn:
    """Write *message* to standard error and end with *code*."""
    typer.echo(message, err=True)
    raise typer.Exit(code)
