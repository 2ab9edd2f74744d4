"""A release whose LoRA manager or worker is not as expected: nothing is cached that nobody would clear."""

from __future__ import annotations

import pytest

from .conftest import Fresh

SETUP = """
import importlib.machinery, logging, sys, types
import torch

if importlib.util.find_spec("torchvision") is None:  # the worker's module takes one function from this one
    stub = types.ModuleType("vllm_omni.engine.stage_init_utils")
    stub.set_death_signal = lambda *args, **kwargs: None
    sys.modules[stub.__name__] = stub

LORA, WORKER = "vllm_omni.diffusion.lora.manager", "vllm_omni.diffusion.worker.diffusion_worker"
for name in (LORA, WORKER):
    sys.modules.pop(name, None)  # imported anew, and changed
CHANGES = {"renamed": lambda cls, name: setattr(cls, "new_" + name, cls.__dict__[name]) or delattr(cls, name),
           "no function": lambda cls, name: setattr(cls, name, 3)}
module, cls, method, change = sys.argv[1:] if len(sys.argv) == 5 else ARGUMENTS

class OtherRelease(importlib.machinery.PathFinder):
    "Finds the real module and changes it when it has run, before anybody is told that it is imported."

    @classmethod
    def find_spec(finder, name, path=None, target=None):
        spec = super().find_spec(name, path, target)
        if name == module:
            run = spec.loader.exec_module
            def exec_module(made):
                run(made)
                CHANGES[change](getattr(made, cls), method)
            spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, OtherRelease)
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING:
            lines.append(record.getMessage())
logging.getLogger("vllm_omni.omni_tensor_key").addHandler(Keep())

class Pipeline:
    def encode_prompt(self, prompt_ids):
        return torch.as_tensor(prompt_ids) * 2
"""

CHECK = """
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream
assert not omni_tensor_key.is_active()
(line,) = lines
assert "stands down" in line and f"{cls}.{method}" in line and module in line, line
assert upstream._hashable(torch.tensor([1])) is upstream._NOT_HASHABLE
for name, attribute in vars(upstream.PromptEmbedCache).items():
    assert not str(getattr(attribute, "__module__", "")).startswith("omni_tensor_key"), name
    assert not hasattr(attribute, "__wrapped__"), name
pipeline = Pipeline()
cache = upstream.install_prompt_embed_cache(pipeline)
for _ in range(2):
    pipeline.encode_prompt(torch.tensor([1]))
    pipeline.encode_prompt([1])
assert cache.stats() == {"size": 1, "max_size": 32, "hits": 1, "misses": 1, "bypassed": 2}, cache.stats()
assert sorted(vars(pipeline)) == ["_prompt_embed_cache", "_prompt_embed_cache_original_fn", "encode_prompt"]
for name in (LORA, WORKER):
    for found in vars(sys.modules[name]).values():
        for attribute in vars(found).values() if isinstance(found, type) and found.__module__ == name else ():
            code = getattr(attribute, "__code__", None)
            assert code is None or "omni_tensor_key" not in code.co_filename, (found, attribute)
assert omni_tensor_key.stats() == {}
omni_tensor_key.activate()
assert not omni_tensor_key.is_active() and lines == [line]
omni_tensor_key.deactivate()
"""

BEFORE = "import omni_tensor_key\nomni_tensor_key.activate()\n"
IMPORTS = "import importlib\nimportlib.import_module(LORA), importlib.import_module(WORKER)\n"
METHODS = [
    ("vllm_omni.diffusion.lora.manager", "DiffusionLoRAManager", "set_active_adapter"),
    ("vllm_omni.diffusion.lora.manager", "DiffusionLoRAManager", "remove_adapter"),
    ("vllm_omni.diffusion.lora.manager", "DiffusionLoRAManager", "add_adapter"),
    ("vllm_omni.diffusion.worker.diffusion_worker", "DiffusionWorker", "sleep"),
    ("vllm_omni.diffusion.worker.diffusion_worker", "DiffusionWorker", "wake_up"),
]


@pytest.mark.parametrize("change", ["renamed", "no function"])
@pytest.mark.parametrize(("module", "cls", "method"), METHODS, ids=[method for *_, method in METHODS])
@pytest.mark.parametrize("order", [BEFORE + IMPORTS, IMPORTS + BEFORE], ids=["before", "after"])
def test_everything_stands_down(fresh: Fresh, order: str, module: str, cls: str, method: str, change: str) -> None:
    """Activated before upstream is imported, as by the entry point, and after."""
    fresh.check(f"ARGUMENTS = {(module, cls, method, change)!r}\n{SETUP}{order}{CHECK}")


WRAPPED = """
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream
import omni_tensor_key
omni_tensor_key.activate()
assert omni_tensor_key.is_active()
ours = upstream._build_key
upstream._build_key = lambda *arguments: ours(*arguments)
importlib.import_module(module)
assert not omni_tensor_key.is_active()
(line,) = lines
assert "stands down" in line and f"{cls}.{method}" in line, line
pipeline = Pipeline()
cache = upstream.install_prompt_embed_cache(pipeline)
for _ in range(2):
    pipeline.encode_prompt(torch.tensor([1]))
    pipeline.encode_prompt([1])
assert cache.stats() == {"size": 1, "max_size": 32, "hits": 1, "misses": 1, "bypassed": 2}, cache.stats()
"""


@pytest.mark.parametrize(("module", "cls", "method"), METHODS[::3])
def test_somebody_has_wrapped_a_function_before(fresh: Fresh, module: str, cls: str, method: str) -> None:
    """What is not in this package's hands any more, gives upstream's keys."""
    fresh.check(f"ARGUMENTS = {(module, cls, method, 'renamed')!r}\n{SETUP}{WRAPPED}")


def test_the_module_itself_cannot_be_imported(fresh: Fresh) -> None:
    """A process that never gets as far as a worker or a LoRA manager does not need them."""
    fresh.check(
        BEFORE
        + """
import torch
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream
assert omni_tensor_key.is_active()
assert isinstance(upstream._hashable(torch.tensor([1])), omni_tensor_key.TensorKey)
"""
    )
