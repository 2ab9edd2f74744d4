"""Being loaded, or not, and being built: cases 33 to 38."""

from __future__ import annotations

import re
from importlib.metadata import distribution, entry_points
from pathlib import Path

import pytest
from upstream.fresh_process import FreshProcesses

from omni_tensor_key import _core, plugin

LOAD = """
from vllm_omni.plugins import load_omni_general_plugins
import omni_tensor_key
load_omni_general_plugins()
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream
print("active", omni_tensor_key.is_active())
"""


def test_case_33_a_plugin_that_was_not_loaded_is_visible(fresh: FreshProcesses) -> None:
    assert "active True" in fresh.check(LOAD).output
    assert "active True" in fresh.check(LOAD, VLLM_PLUGINS="omni_tensor_key").output
    for other in ("other", "", "omni-tensor-key", "omni_tensor_key2"):
        assert "active False" in fresh.check(LOAD, VLLM_PLUGINS=other).output, other
    assert "active False" in fresh.check(LOAD, OMNI_TENSOR_KEY="0").output
    found = [entry.value for entry in entry_points(group="vllm_omni.general_plugins", name="omni_tensor_key")]
    assert found == ["omni_tensor_key.plugin:register"]


TWICE = """
import threading
from omni_tensor_key import is_active, plugin
threads = [threading.Thread(target=plugin.register) for _ in range(8)]
for thread in threads:
    thread.start()
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream
for thread in threads:
    thread.join()
assert is_active()
before = upstream._hashable, upstream._build_key, upstream.PromptEmbedCache.put
plugin.register()
assert (upstream._hashable, upstream._build_key, upstream.PromptEmbedCache.put) == before
"""


def test_case_34_loaded_many_times(fresh: FreshProcesses) -> None:
    for _ in range(3):
        assert len(fresh.check(TWICE).lines_with("is active")) == 1


def test_case_35_nothing_escapes_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(plugin, "activate", fail)
    plugin.register()


DIFFERENT = """
import sys, wrapt
def change(upstream):
    {change}
wrapt.register_post_import_hook(change, "vllm_omni.diffusion.cache.prompt_embed_cache")
from omni_tensor_key import is_active, plugin
plugin.register()
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream
assert not is_active()
class Pipeline:
    def encode_prompt(self, ids):
        return ids
assert upstream.install_prompt_embed_cache(Pipeline()) is not None
"""
CHANGES = {
    "_hashable": ("upstream._hashable = lambda value, depth: value", "_hashable takes"),
    "_build_key": ("del upstream._build_key", "_build_key is not a function"),
    "sentinel": ("upstream._NOT_HASHABLE = None", "_hashable"),
    "keys tensors itself": ("upstream._hashable.__code__ = (lambda obj: obj).__code__", "keys tensors itself"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_case_36_a_changed_upstream_is_left_alone(fresh: FreshProcesses, name: str) -> None:
    change, difference = CHANGES[name]
    warnings = fresh.check(DIFFERENT.format(change=change)).lines_with("stands down")
    assert len(warnings) == 1
    assert difference in warnings[0]


BEFORE = """
import types, torch
from vllm_omni.diffusion.cache import prompt_embed_cache as upstream
from vllm_omni.diffusion.cache.prompt_embed_cache import _hashable, install_prompt_embed_cache
class Pipeline:
    def encode_prompt(self, ids):
        return torch.zeros(1)
early, late = Pipeline(), Pipeline()
caches = [install_prompt_embed_cache(early)]
import omni_tensor_key
omni_tensor_key.activate()
caches.append(upstream.install_prompt_embed_cache(late))
ids = torch.tensor([1, 2])
for pipeline, cache in zip((early, late), caches):
    pipeline.encode_prompt(ids), pipeline.encode_prompt(ids.clone())
    print({name: cache.stats()[name] for name in ("hits", "misses", "bypassed")})
assert _hashable([1]) == ("__seq__", (1,)) and _hashable(ids) is upstream._NOT_HASHABLE
"""


def test_case_37_what_others_imported_before_works_on(fresh: FreshProcesses) -> None:
    lines = fresh.check(BEFORE).lines_with("'hits'")
    assert lines == ["{'hits': 1, 'misses': 1, 'bypassed': 0}"] * 2


def test_case_38_the_binary_needs_no_torch_and_no_cuda() -> None:
    assert _core.__file__
    assert Path(_core.__file__).name == "_core.abi3.so"
    binary = Path(_core.__file__).read_bytes()
    for foreign in (b"libtorch", b"libc10", b"libcudart.so", b"_ZN3c10", b"_ZN2at", b"_ZN5torch", b"libpython"):
        assert foreign not in binary


def test_case_38_the_wheel_and_the_sdist(root: Path) -> None:
    wheel = distribution("omni-tensor-key").read_text("WHEEL")
    assert wheel
    assert re.findall(r"^Tag: (cp310-abi3)-", wheel, re.MULTILINE) == ["cp310-abi3"]
    manifest = (root / "MANIFEST.in").read_text()
    kinds = {path.suffix for path in (root / "csrc").rglob("*") if path.is_file()} - {".cpp"}
    assert [kind for kind in kinds if f"*{kind}" not in manifest] == []
