"""What the key of CUDA tensors costs, beside what it cannot cost less than and what others would pay.

    python benchmarks/cuda_key.py [--json FILE] [--check]

The floor is an empty kernel's launch and the wait for its stream, in a loop in C: no method that brings content from a
device to the host gets below it. Every figure is the least and, in the JSON, also the median of several repeats, in one
process, contenders in turn.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from omni_tensor_key import _core
from omni_tensor_key.keys.host_copy import to_host

SIZES = {"64 B": 64, "240 B": 240, "1 KiB": 1 << 10, "8 KiB": 8 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20}
COUNTS = (1, 2, 4, 8, 16)
TYPICAL = "8 KiB"  # [1, 1024] int64
LIMIT = 1 << 20
REPEATS = 15
SECONDS = 0.02  # of one repeat

ROOT = Path(__file__).resolve().parents[1]
FLOOR = ROOT / ".gpu" / "floor.so"  # benchmarks/gpu/build.py makes it

Timed = Callable[[int], float]  # runs so many times; µs for each


def in_python(function: Callable[[], object]) -> Timed:
    def run(count: int) -> float:
        begin = time.perf_counter_ns()
        for _ in range(count):
            function()
        return (time.perf_counter_ns() - begin) / count / 1e3

    return run


def floor(folder: Path) -> Timed | None:
    """The floor, or None without an nvcc to build it where benchmarks/gpu/build.py has not."""
    library = FLOOR
    if not library.exists():
        nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
        if nvcc is None:
            return None
        library = folder / "floor.so"
        command = [nvcc, "-O2", "-arch=native", "-shared", "-Xcompiler", "-fPIC", "-o", library]
        subprocess.run([*command, ROOT / "benchmarks" / "gpu" / "floor.cu"], check=True)
    call = ctypes.CDLL(str(library)).floor_us
    call.restype = ctypes.c_double
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    return lambda count: float(call(stream, count))


def torch_floor() -> None:
    torch.cuda._sleep(0)
    torch.cuda.current_stream().synchronize()


def tensors(nbytes: int, count: int, device: str = "cuda") -> list[torch.Tensor]:
    return [torch.randint(0, 150_000, (1, nbytes // 8), device=device) for _ in range(count)]


def ours(group: list[torch.Tensor]) -> object:
    """By the unit: an error is raised where it cannot read."""
    return _core.tensor_keys(group, to_host, LIMIT, True)


def ours_by_host_copy(group: list[torch.Tensor]) -> object:
    return _core.tensor_keys(group, to_host, LIMIT, False)


def copy_each(group: list[torch.Tensor]) -> object:
    return [tensor.cpu().numpy().tobytes() for tensor in group]


def copy_each_and_hash(group: list[torch.Tensor]) -> object:
    import xxhash

    return [xxhash.xxh3_128_digest(tensor.cpu().numpy()) for tensor in group]


def pack_and_copy(group: list[torch.Tensor]) -> object:
    return torch.cat([tensor.reshape(-1) for tensor in group]).cpu().numpy().tobytes()


def hash_with_torch(group: list[torch.Tensor]) -> object:
    sums = [(tensor.reshape(-1) * torch.arange(1, tensor.numel() + 1, device=tensor.device)).sum() for tensor in group]
    return torch.stack(sums).tolist()


# Name: what it does with two tensors, and what it gives.
CONTENDERS: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "ours, CUDA unit": ours,
    "ours, host copy": ours_by_host_copy,
    ".cpu() each, bytes": copy_each,
    ".cpu() each, xxhash": copy_each_and_hash,
    "torch.cat, .cpu(), bytes": pack_and_copy,
    "weighted sum with torch (a weak hash, no bytes)": hash_with_torch,
}


def measure(contenders: dict[str, Timed]) -> dict[str, list[float]]:
    """The µs of each in every repeat, all in turn."""
    counts = {}
    for name, run in contenders.items():
        run(20)  # warm: first launches, allocations
        counts[name] = max(10, int(SECONDS * 1e6 / run(20)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(REPEATS):
        for name, run in contenders.items():
            times[name].append(run(counts[name]))
    return times


def measure_all(device: str, floors: dict[str, Timed]) -> dict[str, dict[str, list[float]]]:
    """By size: µs of the floors, of every contender with two tensors, and of ours with each count."""
    results = {}
    for label, nbytes in SIZES.items():
        timed = dict(floors)
        pair = tensors(nbytes, 2, device)
        timed |= {name: in_python(lambda f=function, g=pair: f(g)) for name, function in CONTENDERS.items()}  # type: ignore[misc]
        for count in COUNTS:
            group = tensors(nbytes, count, device)
            timed[f"ours, {count}"] = in_python(lambda g=group: ours(g))  # type: ignore[misc]
        results[label] = measure(timed)
    return results


def targets(results: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """The targets of docs/performance.md, at [1, 1024] int64."""
    row = results[TYPICAL]
    lowest = row.get("floor", row["floor through torch"])
    key = row["ours, CUDA unit"]
    found = [
        ("two tensors, times the floor", key / lowest, "at most", 1.3),
        ("two tensors, times faster than copying each", row[".cpu() each, bytes"] / key, "at least", 2.5),
        ("each further tensor up to 16, µs", (row["ours, 16"] - row["ours, 1"]) / 15, "at most", 1.0),
    ]
    return [
        {"target": name, "found": round(value, 3), "asked": f"{kind} {limit}",
         "holds": value <= limit if kind == "at most" else value >= limit}
        for name, value, kind, limit in found
    ]  # fmt: skip


def environment() -> dict[str, str]:
    driver = "unknown"
    if smi := shutil.which("nvidia-smi"):
        query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0] or driver
    return {
        "card": torch.cuda.get_device_name(),
        "driver": driver,
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "omni-tensor-key": version("omni-tensor-key"),
        "unit": str(_core.CUDA_BUILD),
        "Python": platform.python_version(),
        "system": platform.platform(),
        "date": time.strftime("%Y-%m-%d"),
    }


def show(results: dict[str, dict[str, float]], found: list[dict[str, Any]]) -> None:
    names = list(next(iter(results.values())))
    width = max(map(len, names))
    print("\nµs per key of a call, least of", REPEATS, "repeats; two tensors where no number is given")
    print(" " * width, *(f"{label:>9}" for label in results))
    for name in names:
        print(f"{name:{width}}", *(f"{row[name]:9.2f}" for row in results.values()))
    print()
    for target in found:
        verdict = "holds" if target["holds"] else "DOES NOT HOLD"
        print(f"{target['target']}: {target['found']} (asked: {target['asked']}): {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--check", action="store_true", help="end with 1 where a target does not hold")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print(f"This benchmark needs a CUDA GPU, and torch {torch.__version__} sees none.", file=sys.stderr)
        return 2
    if _core.CUDA_BUILD is None:
        print("This omni-tensor-key was built without its CUDA unit: see `omni-tensor-key doctor`.", file=sys.stderr)
        return 2
    about = environment()
    for name, value in about.items():
        print(f"{name}: {value}")
    with tempfile.TemporaryDirectory() as folder:
        floors = {"floor through torch": in_python(torch_floor)}
        if lowest := floor(Path(folder)):
            floors = {"floor": lowest} | floors
        times = measure_all("cuda", floors)
    results = {size: {name: min(found) for name, found in row.items()} for size, row in times.items()}
    found = targets(results)
    show(results, found)
    if arguments.json:
        medians = {size: {name: statistics.median(t) for name, t in row.items()} for size, row in times.items()}
        report = {"environment": about, "least_us": results, "median_us": medians, "targets": found}
        arguments.json.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if arguments.check and not all(target["holds"] for target in found) else 0


if __name__ == "__main__":
    sys.exit(main())
