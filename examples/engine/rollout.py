"""What the extension is worth in vLLM-Omni's own engine: rollouts with it off and on, weight syncs and sleep between.

Without --model it makes a tiny Qwen-Image with random weights and runs it on any machine. With a Qwen-Image model and
your prompts it says what the prompt cache is worth to you:

    python examples/engine/rollout.py --model Qwen/Qwen-Image --prompts FILE --n 16 --size 512 --steps 10

The exit code is 1 if a bit of an image differs or a count is not what it has to be.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import engine
import make_model
import typer
from engine import Engine, Rollout
from PIL import Image, ImageDraw
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

PROMPTS = ["a red cat on a blue chair", "two dogs that run", "a house of glass at night, seen from above", "rain"]
ROLLOUTS = ["first", "transformer sync", "encoder sync", "sleep, wake-up"]
STATES = ("off", "on")


class Reporter:
    """Says how far the run is: a progress bar on a terminal, one line per rollout elsewhere."""

    def __init__(self, console: Console, samples: int) -> None:
        self.console = console
        self.samples = samples
        self.progress = Progress(console=console, transient=True, disable=not console.is_terminal)

    @contextmanager
    def step(self, title: str, total: int | None) -> Iterator[Any]:
        """Show a step; what it yields is to be called after each of the *total* parts."""
        task = self.progress.add_task(title, total=total)
        began = time.perf_counter()
        yield lambda: self.progress.advance(task)
        self.progress.remove_task(task)
        if not self.console.is_terminal:
            self.console.print(f"{title}: {time.perf_counter() - began:.1f} s")


async def run(
    state: str, prompts: list[str], n: int, reporter: Reporter, size: int, steps: int, **arguments: Any
) -> Any:
    """Run all rollouts in a new engine with the extension off or on; return one Rollout for each."""
    os.environ["OMNI_TENSOR_KEY"] = "1" if state == "on" else "0"  # the worker inherits it
    with reporter.step(f"{state}: start of the engine", None):
        model = Engine(**arguments)
    try:
        await model.call("count_encoder_runs")
        between = [
            lambda: asyncio.sleep(0),
            lambda: model.call("sync_weights", "transformer", 1.25),
            lambda: model.call("sync_weights", "text_encoder", 1.25),
            lambda: model.sleep(),
        ]
        done = []
        for name, prepare in zip(ROLLOUTS, between, strict=True):
            with reporter.step(f"{state}: {name}", n * len(prompts)) as advance:
                await prepare()
                done.append(await model.rollout(prompts, n, size, steps, advance))
        return done
    finally:
        model.close()


def table(runs: dict[str, list[Rollout]]) -> Table:
    """Lay the rollouts out, off above on."""
    made = Table(box=box.SIMPLE_HEAD, padding=0)  # narrow enough for a terminal of 80 columns
    for heading in ("rollout", "extension"):
        made.add_column(heading, no_wrap=True)
    for heading in ("encoder runs", "hits", "misses", "bypassed", "encoder seconds", "images bit-equal"):
        made.add_column(heading, justify="right")
    for name, *pair in zip(ROLLOUTS, *runs.values(), strict=True):
        equal = f"{_equal(*pair)} of {len(pair[0].bits)}"
        for state, rollout in zip(STATES, pair, strict=True):
            row = (*map(str, rollout.counts()), f"{rollout.seconds:.2f}")
            made.add_row(*((name, state, *row, "") if state == "off" else ("", state, *row, equal)))
    return made


def problems(runs: dict[str, list[Rollout]], prompts: int, n: int) -> Iterator[str]:
    """Yield a sentence for each bit or count that is off."""
    samples = prompts * n
    wanted = {"off": (samples, 0, 0, samples), "on": (prompts, samples - prompts, prompts, 0)}
    for name, off, on in zip(ROLLOUTS, *runs.values(), strict=True):
        for state, rollout in (("off", off), ("on", on)):
            if rollout.counts() != wanted[state]:
                yield (
                    f"Rollout '{name}', extension {state}: encoder runs, hits, misses and bypassed are"
                    f" {rollout.counts()}, expected {wanted[state]}."
                )
        if _equal(off, on) != samples:
            yield f"Rollout '{name}': {samples - _equal(off, on)} of {samples} images differ."


def _equal(off: Rollout, on: Rollout) -> int:
    return sum(a == b for a, b in zip(off.bits, on.bits, strict=True))


def contact_sheet(runs: dict[str, list[Rollout]], n: int) -> Image.Image:
    """The samples of the first prompt in the first rollout: those without the extension above those with it."""
    cell, label = min(runs["off"][0].images[0].width, 128), 32
    sheet = Image.new("RGB", (label + n * cell, 2 * cell), "white")
    for row, state in enumerate(STATES):
        ImageDraw.Draw(sheet).text((6, row * cell + cell // 2), state, fill="black")
        for column, image in enumerate(runs[state][0].images[:n]):
            sheet.paste(image.resize((cell - 1, cell - 1)), (label + column * cell, row * cell))
    return sheet


@contextmanager
def quiet() -> Iterator[Console]:
    """Send what this process and its workers print to a file; the console that is yielded still writes to stdout."""
    console = Console(file=os.fdopen(os.dup(1), "w"), highlight=False)
    if not console.is_terminal:
        console.width = 120
    with tempfile.NamedTemporaryFile("w+", prefix="rollout-", suffix=".log", delete=False) as log:
        sys.stdout.flush()
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        try:
            yield console
        except Exception as error:
            console.print(f"{type(error).__name__}: {error}\nWhat the engine printed is in {log.name}.", markup=False)
            raise typer.Exit(1) from error
    Path(log.name).unlink()


def main(
    model: Annotated[str, typer.Option(help="A Qwen-Image model; without it a tiny random one is made.")] = "",
    adapter: Annotated[str, typer.Option(help="The pipeline class, as MODULE.CLASS.")] = engine.ADAPTER,
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt a line.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 8,
    size: Annotated[int, typer.Option(help="Height and width of the images.")] = 64,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 2,
    picture: Annotated[Path, typer.Option(help="Where the contact sheet goes.")] = Path("build/rollout.png"),
) -> None:
    """Run rollouts in vLLM-Omni's engine with the extension off and on, and print what each cost."""
    texts = [line for line in prompts.read_text().splitlines() if line.strip()] if prompts else PROMPTS
    engine.prepare_environment()
    with quiet() as console, tempfile.TemporaryDirectory() as folder:
        reporter = Reporter(console, n * len(texts))
        arguments: dict[str, Any] = {"model": model, "adapter": adapter}
        runs = {}
        with reporter.progress:
            if not model:
                arguments |= {"model": folder, "dtype": "float32"}
                with reporter.step("tiny random Qwen-Image", None):
                    make_model.make(Path(folder))
            for state in STATES:
                runs[state] = asyncio.run(run(state, texts, n, reporter, size, steps, **arguments))
        console.print(table(runs))
        picture.parent.mkdir(parents=True, exist_ok=True)
        contact_sheet(runs, n).save(picture)
        versions = f"vllm-omni {version('vllm-omni')}, omni-tensor-key {version('omni-tensor-key')}"
        console.print(f"{len(texts)} prompts, {n} samples each; {versions}; contact sheet: {picture}")
        wrong = list(problems(runs, len(texts), n))
        for sentence in wrong:
            console.print(sentence, style="red")
    raise typer.Exit(1 if wrong else 0)


if __name__ == "__main__":
    typer.run(main)
