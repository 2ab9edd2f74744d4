"""`vllm serve --omni`, as a client sees it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from .conftest import EXAMPLE, PROMPTS, SAMPLES, TESTS, N

pytestmark = pytest.mark.slow


def _post(port: int, prompt: str, seed: int) -> str:
    body = {"prompt": prompt, "seed": seed, "size": "64x64", "num_inference_steps": 2, "response_format": "b64_json"}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/images/generations",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["data"][0]["b64_json"])


def _serve(model: Path, folder: Path, on: bool) -> tuple[list[str], int]:
    """The images that a server answers with, and the runs of its text encoder after its own warm-up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runs, log = folder / f"runs-{on}", folder / f"log-{on}"
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (EXAMPLE, EXAMPLE / "cpu", TESTS / "engine"))),
        "OMNI_DIFFUSION_PROMPT_EMBED_CACHE": "1",
        "OMNI_TENSOR_KEY": str(int(on)),
        "OMP_NUM_THREADS": "1",
        "ENCODER_RUNS": str(runs),
    }
    command = [sys.executable, "-m", "vllm_omni.entrypoints.cli.main", "serve", str(model), "--omni", f"--port={port}"]
    command += ["--host=127.0.0.1", "--enforce-eager", "--dtype=float32", "--num-gpus=1"]
    command += ["--custom-pipeline-args", json.dumps({"pipeline_class": "counted.CountedPipeline"})]
    with log.open("w") as output:
        server = subprocess.Popen(
            command,
            cwd=folder,  # not the checkout, whose package has no compiled core
            env=os.environ | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        for _ in range(150):
            assert server.poll() is None, log.read_text()[-5000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                time.sleep(1)
        else:
            pytest.fail(log.read_text()[-5000:])
        warm_up = runs.read_text().count("run")
        images = [_post(port, prompt, seed) for prompt in PROMPTS for seed in range(N)]
        return images, runs.read_text().count("run") - warm_up
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_server_answers_with_the_same_images(model: Path, tmp_path: Path) -> None:
    images, runs = _serve(model, tmp_path, on=False)
    assert runs == SAMPLES
    assert len(set(images)) == SAMPLES
    assert _serve(model, tmp_path, on=True) == (images, len(PROMPTS))
