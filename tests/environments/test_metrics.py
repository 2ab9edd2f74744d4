"""The counters that leave the process: through collective_rpc's method on the worker, and through Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from upstream.fresh_process import FreshProcesses

# A worker and a runner of the real classes around a pipeline, without the model that their constructors would load.
WORKER = """
import importlib.util, sys, types
import torch
if importlib.util.find_spec("torchvision") is None:
    # The worker's module takes one function from this one, which imports torchvision through models of other stages.
    stage_init = types.ModuleType("vllm_omni.engine.stage_init_utils")
    stage_init.set_death_signal = lambda *args, **kwargs: None
    sys.modules[stage_init.__name__] = stage_init
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
from vllm_omni.diffusion.cache.prompt_embed_cache import install_prompt_embed_cache

class Pipeline:
    def encode_prompt(self, prompt_ids, image=None):
        return prompt_ids + 1

def make_worker(with_cache=True):
    worker = object.__new__(DiffusionWorker)
    worker.model_runner = object.__new__(DiffusionModelRunner)
    worker.model_runner.pipeline = pipeline = Pipeline()
    worker.model_runner.prompt_embed_cache = install_prompt_embed_cache(pipeline) if with_cache else None
    return worker

def call(worker):
    for prompt_ids, image in ((1, None), (1, None), (2, None), (3, torch.ones(2))):
        worker.model_runner.pipeline.encode_prompt(torch.tensor([prompt_ids]), image=image)
"""

STATS = (
    WORKER
    + """
import omni_tensor_key
worker, bare = make_worker(), make_worker(with_cache=False)
if OWN_METHOD:
    DiffusionWorker.get_prompt_embed_cache_stats = lambda self: "upstream's own"
omni_tensor_key.activate()
call(worker)
print(worker.get_prompt_embed_cache_stats())
if not OWN_METHOD:
    stats = worker.get_prompt_embed_cache_stats()
    assert stats.pop("omni_tensor_key") == omni_tensor_key.stats() != {}
    assert stats == worker.model_runner.get_prompt_embed_cache_stats()
    assert bare.get_prompt_embed_cache_stats() is None
"""
)

METRICS = (
    WORKER
    + """
import prometheus_client
import omni_tensor_key
worker = make_worker()

def ours():
    text = prometheus_client.generate_latest().decode()
    return sorted(line for line in text.splitlines() if line.startswith("omni_tensor_key") and "_created" not in line)

assert ours() == []
for _ in range(3):
    omni_tensor_key.activate()
call(worker)
for line in ours():
    print(line)
omni_tensor_key.deactivate()
assert ours() == []
omni_tensor_key.activate()
call(worker)  # a cache that was there before is found when it is asked
assert len(ours()) == 5, ours()
"""
)

SAMPLES = [
    'omni_tensor_key_prompt_embed_cache_bypass_reasons_total{argument="image",pipeline="Pipeline",reason="dtype"} 1.0',
    'omni_tensor_key_prompt_embed_cache_bypassed_total{pipeline="Pipeline"} 1.0',
    'omni_tensor_key_prompt_embed_cache_entries{pipeline="Pipeline"} 2.0',
    'omni_tensor_key_prompt_embed_cache_hits_total{pipeline="Pipeline"} 1.0',
    'omni_tensor_key_prompt_embed_cache_misses_total{pipeline="Pipeline"} 2.0',
]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshProcesses]:
    processes = FreshProcesses(tmp_path_factory.mktemp("fresh"))
    yield processes
    processes.close()


def test_the_worker_returns_both_counters(fresh: FreshProcesses) -> None:
    fresh.check("OWN_METHOD = False\n" + STATS)


def test_a_method_of_upstreams_own_stays(fresh: FreshProcesses) -> None:
    assert fresh.check("OWN_METHOD = True\n" + STATS).lines_with("upstream's own")


def test_metrics(fresh: FreshProcesses) -> None:
    assert fresh.check(METRICS).lines_with("omni_tensor_key_prompt") == SAMPLES


def test_no_metrics_in_multiprocess_mode(fresh: FreshProcesses, tmp_path: object) -> None:
    code = METRICS.replace("len(ours()) == 5", "len(ours()) == 0")
    assert fresh.check(code, PROMETHEUS_MULTIPROC_DIR=str(tmp_path)).lines_with("omni_tensor_key_prompt") == []


def test_names_that_are_taken(fresh: FreshProcesses) -> None:
    taken = """
import prometheus_client, omni_tensor_key
prometheus_client.Counter("omni_tensor_key_prompt_embed_cache_hits", "")
omni_tensor_key.activate()
assert omni_tensor_key.is_active()
"""
    assert fresh.check(WORKER + taken).lines_with("no metrics for Prometheus")


def test_a_collector_that_somebody_has_unregistered(fresh: FreshProcesses) -> None:
    gone = """
import prometheus_client
import omni_tensor_key
from omni_tensor_key import metrics
omni_tensor_key.activate()
for collector in list(prometheus_client.REGISTRY._collector_to_names):
    if isinstance(collector, metrics.Collector):
        prometheus_client.REGISTRY.unregister(collector)
        print("unregistered")
omni_tensor_key.deactivate()
assert not omni_tensor_key.is_active()
omni_tensor_key.activate()
assert omni_tensor_key.is_active()
"""
    assert fresh.check(WORKER + gone).lines_with("unregistered")


def test_prometheus_is_not_imported(fresh: FreshProcesses) -> None:
    fresh.check(
        "import sys\nsys.modules.pop('prometheus_client', None)\nimport omni_tensor_key.metrics as metrics\n"
        "metrics.register(list)()\nassert 'prometheus_client' not in sys.modules"
    )
