"""`omni-tensor-key audit`, on real pipelines and on small ones with one peculiarity each."""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from omni_tensor_key.audit import PRECOMPUTED, Audit, SourceError, audit
from omni_tensor_key.cli import app

_MODELS = "vllm_omni.diffusion.models"
QWEN = f"{_MODELS}.qwen_image.pipeline_qwen_image:QwenImagePipeline"
WAN = f"{_MODELS}.wan2_2.pipeline_wan2_2:Wan22Pipeline"
LTX = f"{_MODELS}.ltx2.pipeline_ltx2:LTX2Pipeline"
MING = f"{_MODELS}.ming_flash_omni.pipeline_ming_imagegen:MingImagePipeline"
EDIT = f"{_MODELS}.qwen_image.pipeline_qwen_image_edit_plus:QwenImageEditPlusPipeline"

pytest.importorskip("vllm_omni")


def _verdicts(result: Audit) -> dict[str, str]:
    return {parameter.name: parameter.verdict for parameter in result.parameters}


@pytest.mark.parametrize("target", [QWEN, WAN, LTX, EDIT])
def test_pipelines_that_keep_no_prompt(target: str) -> None:
    result = audit(target)
    assert result.warnings == []
    assert not [kind for kind in result.attributes.values() if kind.startswith("state")]
    assert "text_encoder" in result.attributes


@pytest.mark.parametrize("target", [QWEN, WAN, LTX, MING, EDIT])
def test_the_signature_is_the_real_one(target: str) -> None:
    module, _, name = target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name).encode_prompt
    except ModuleNotFoundError as error:  # the audit needs no import, the comparison does
        pytest.skip(f"{module} cannot be imported here: {error}")
    _, *parameters = inspect.signature(function).parameters.values()
    stars: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    result = audit(target)
    assert [stars.get(parameter.kind, "") + parameter.name for parameter in parameters] == list(_verdicts(result))
    assert [parameter.default is not inspect.Parameter.empty for parameter in parameters] == [
        parameter.default != "" for parameter in result.parameters
    ]
    file, _, line = result.defined.rpartition(":")
    assert (file, int(line)) == (inspect.getsourcefile(function), inspect.getsourcelines(function)[1])


def test_verdicts_on_real_parameters() -> None:
    assert _verdicts(audit(QWEN)) == {
        "prompt": "keyed",
        "num_images_per_prompt": "keyed",
        "prompt_embeds": "bypass",
        "prompt_embeds_mask": "bypass",
        "max_sequence_length": "keyed",
        "prompt_name": "keyed",
    }
    assert _verdicts(audit(LTX))["prompt_attention_mask"] == "keyed"
    assert _verdicts(audit(EDIT))["image"] == "bypass"


def test_a_prompt_in_an_attribute_is_found() -> None:
    result = audit(MING)
    assert result.attributes["_pending_prompt_embeds"].startswith("state: set by forward")
    assert "self._pending_prompt_embeds" in result.warnings[0]
    assert "No parameter that enters the key tells one prompt from another" in result.warnings[-1]


def test_precomputed_names_are_upstreams() -> None:
    upstream = importlib.import_module("vllm_omni.diffusion.cache.prompt_embed_cache")
    assert upstream._PRECOMPUTED_EMBED_ARGS == PRECOMPUTED


_FILE = """
import torch
from torch import nn
from .base import Base

class Pipeline(Base, nn.Module):
    limit = 3

    def __init__(self):
        self.table = self._load()
        self.template_ids = (1, 2)

    def _load(self):
        self.start = 4
        return None

    def forward(self, request):
        self._step_mask = request.mask
        self.prompt_ids = request.ids
        return self.encode_prompt(request.ids)

    def encode_prompt(self, token_ids: "torch.Tensor", attention_mask=None, image: "Image | None" = None,
                      scale: float = 1.0, *extra, options=None, **rest):
        mask = attention_mask if attention_mask is not None else torch.ones_like(token_ids)
        hidden = super().encode_prompt(token_ids)
        helper(self)
        return hidden * self.limit * scale, attention_mask.to("cpu")

    def unused(self):
        return self.never_read
"""
_BASE = """
class Base:
    def encode_prompt(self, ids):
        self.memo = self.table
        return self._mix(ids) + self.memo + self.start + len(self.template_ids) + getattr(self, "negative_ids", 0)

    @staticmethod
    def _mix(value):
        return value.prompt_ids

    @property
    def steps(self):
        return self._step_mask

    def _more(self):
        return self.steps
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "some_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise ImportError('nothing is imported')")
    (folder / "base.py").write_text(_BASE)
    (folder / "pipe.py").write_text(_FILE)
    return folder


def test_a_file(package: Path) -> None:
    result = audit(f"{package}/pipe.py:Pipeline")
    assert _verdicts(result) == {
        "token_ids": "keyed",
        "attention_mask": "keyed",
        "image": "bypass",
        "scale": "keyed",
        "*extra": "depends",
        "options": "depends",
        "**rest": "depends",
    }
    assert result.attributes == {
        "limit": "set up once",
        "memo": "set by encode_prompt() itself",
        "negative_ids": "state: its name says so, and nothing that was read sets it",
        "start": "set up once",
        "table": "set up once",
        "template_ids": "set up once",
    }
    assert len(result.aliases) == 1
    assert "returns attention_mask.to('cpu'), which may be the memory of attention_mask" in result.aliases[0]
    assert any("bound by vLLM-Omni's own code" in note for note in result.notes)
    assert any("helper()" in note for note in result.notes)
    assert not any("not read" in note for note in result.notes)  # torch.nn.Module is known to have no encode_prompt()


def test_a_property_leads_to_state(package: Path) -> None:
    base = package / "base.py"
    base.write_text(_BASE.replace("self._mix(ids)", "self.steps"))
    result = audit(f"{package}/pipe.py:Pipeline")
    assert result.attributes["_step_mask"] == "state: set by forward()"
    assert any("they are cached" in warning for warning in result.warnings)  # it has tensor arguments, too


def test_no_encode_prompt(package: Path) -> None:
    (package / "none.py").write_text("from elsewhere import Other\nclass Empty(Other): pass")
    result = audit(f"{package}/none.py:Empty")
    assert result.parameters == []
    assert any("installs no cache" in note for note in result.notes)
    assert any("Other" in note for note in result.notes)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("QwenImagePipeline", "names no class"),
        ("no_such_module_anywhere:Class", "no module no_such_module_anywhere"),
        (f"{_MODELS}.qwen_image:NoSuchClass", "has no class NoSuchClass"),
        ("/nonexistent/file.py:Class", "cannot be read"),
    ],
)
def test_a_class_that_cannot_be_read(target: str, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        audit(target)
    run = CliRunner().invoke(app, ["audit", target])
    assert run.exit_code == 2
    assert says in run.stderr
    assert len(run.stderr.strip().splitlines()) == 1


def test_syntax_errors_and_circles(package: Path) -> None:
    (package / "broken.py").write_text("class Pipeline(:")
    with pytest.raises(SourceError, match=r"broken\.py cannot be read"):
        audit(f"{package}/broken.py:Pipeline")
    (package / "one.py").write_text("from .two import Pipeline")
    (package / "two.py").write_text("from .one import Pipeline")
    with pytest.raises(SourceError, match="has no class"):
        audit(f"{package}/one.py:Pipeline")


def test_json_and_text() -> None:
    run = CliRunner().invoke(app, ["audit", MING, "--json"])
    assert run.exit_code == 0
    parsed: dict[str, Any] = json.loads(run.stdout)
    assert parsed == audit(MING).as_dict()
    text = CliRunner().invoke(app, ["audit", MING], env={"COLUMNS": "200"})
    assert text.exit_code == 0
    for expected in ("warning:", "_pending_prompt_embeds", "state: set by forward", "*args", "encode_prompt()"):
        assert expected in text.stdout
