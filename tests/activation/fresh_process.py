"""Processes that have vLLM-Omni imported, but neither its prompt cache nor this package.

Importing vLLM-Omni takes many seconds, so one server process does it once and forks a child for each piece of code.
The file is both the client, which the tests use, and, when it is run as a script, the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

CACHE = "vllm_omni.diffusion.cache.prompt_embed_cache"
TIMEOUT_S = 60


class Result(NamedTuple):
    status: int  # exit status; negative: the signal that ended the process
    output: str  # standard output and standard error

    def lines_with(self, text: str) -> list[str]:
        return [line for line in self.output.splitlines() if text in line]


class FreshProcesses:
    """The client."""

    def __init__(self, folder: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMNI_", "VLLM_"))}
        self._folder = folder
        self._log = open(folder / "server.log", "wb")  # noqa: SIM115 - closed with the server
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=folder,
            env=environment,
            text=True,
        )

    def run(self, code: str, **environment: str) -> Result:
        """Run `code` in a new process with these environment variables added."""
        handle, output = tempfile.mkstemp(dir=self._folder)
        os.close(handle)
        assert self._server.stdin
        assert self._server.stdout
        self._server.stdin.write(json.dumps([code, environment, output]) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, Path(self._folder, "server.log").read_text(errors="replace")
        return Result(int(answer), Path(output).read_text(errors="replace"))

    def check(self, code: str, **environment: str) -> Result:
        """`run`, and the code must end normally."""
        result = self.run(code, **environment)
        assert result.status == 0, result.output
        return result

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._server.communicate(timeout=TIMEOUT_S)
        self._log.close()


def _run_child(code: str, environment: dict[str, str], output: str) -> None:
    signal.alarm(TIMEOUT_S)
    target = os.open(output, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.environ.update(environment)
    exec(compile(code, "<code of the test>", "exec"), {"__name__": "__main__"})


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the imports print is no reply
    import torch  # noqa: F401
    import vllm_omni.diffusion.data  # most of what the cache module needs
    import vllm_omni.plugins  # noqa: F401

    assert CACHE not in sys.modules
    assert "omni_tensor_key" not in sys.modules
    for line in sys.stdin:
        code, environment, output = json.loads(line)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _run_child(code, environment, output)
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, file=replies, flush=True)
    os._exit(0)  # an orderly end takes seconds


if __name__ == "__main__":
    _serve()
