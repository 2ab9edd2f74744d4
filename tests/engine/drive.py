"""Runs scenarios in engines, one after the other in one process, and writes what they gave to a file.

Its own process, because vLLM-Omni chooses its platform once per process. A scenario says which engine to start, whether
the extension is on, which environment variables to set, and what happens then: a list of rollouts, sleeps and calls of
the worker's methods.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "engine"))

import engine  # noqa: E402

engine.prepare_environment()
# The workers of some tests are of classes that lie here.
for folder in (str(HERE), str(HERE.parent)):
    os.environ["PYTHONPATH"] += os.pathsep + folder
    sys.path.append(folder)


async def run(model: str, scenario: dict[str, Any]) -> list[Any]:
    options = {"model": model, "dtype": "float32", "distributed_executor_backend": "uni"} | scenario["engine"]
    if options["distributed_executor_backend"] == "uni":
        from vllm_omni.plugins import load_omni_general_plugins

        import omni_tensor_key

        load_omni_general_plugins()  # once per process; an engine that did it later would activate the extension
        (omni_tensor_key.activate if scenario["on"] else omni_tensor_key.deactivate)()
    else:
        os.environ["OMNI_TENSOR_KEY"] = "1" if scenario["on"] else "0"
    os.environ.update(scenario["env"])
    driven = engine.Engine(**options)
    try:
        await driven.call("count_encoder_runs")
        return [await _happen(driven, *event) for event in scenario["events"]]
    finally:
        driven.close()
        for name in scenario["env"]:
            del os.environ[name]


async def _happen(driven: engine.Engine, event: str, *args: Any) -> Any:
    if event == "rollout":
        rollout = await driven.rollout(*args)
        return {
            "counts": rollout.counts(),
            "samples": [hashlib.sha256(bits).hexdigest() for bits in rollout.bits],
        }
    if event == "sleep":
        return await driven.sleep()
    return await driven.call(event, *args)


if __name__ == "__main__":
    done = {name: asyncio.run(run(sys.argv[1], scenario)) for name, scenario in json.loads(sys.argv[2]).items()}
    Path(sys.argv[3]).write_text(json.dumps(done))
    os._exit(0)  # threads of engines in this process would hold up the end
