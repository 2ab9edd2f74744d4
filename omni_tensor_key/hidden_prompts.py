"""Installed pipelines whose encode_prompt() can get equal arguments for different prompts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from .audit import audit
from .class_source import SourceError
from .findings import Finding, installed_at
from .log import logger

_PLACES = (("vllm_omni", "diffusion/models"), ("verl_omni", "."))


def hidden_prompts(folder: Path) -> Iterator[str]:
    """Name the classes below `folder` that keep what tells one prompt from another where no key contains it.

    Reads source and imports nothing; what cannot be read is passed over.
    """
    for path in sorted(folder.rglob("*.py")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
            classes = ast.parse(text).body if "def encode_prompt" in text else []
            names = [node.name for node in classes if isinstance(node, ast.ClassDef)]
            yield from [name for name in names if audit(f"{path}:{name}").hides_prompt]
        except (OSError, SyntaxError, SourceError, RecursionError, MemoryError) as error:
            logger.debug("omni_tensor_key: %s cannot be audited: %s", path, error)


def pipelines() -> Iterator[Finding]:
    """Doctor's word on them: the cache is wrong there whether this package is installed or not."""
    found: list[str] = []
    for package, inside in _PLACES:
        if folder := installed_at(package):
            found += hidden_prompts(Path(folder, inside))
    if found:
        yield Finding(
            "pipelines",
            "note",
            f"{', '.join(found)}: calls for different prompts can have equal arguments, so vLLM-Omni's cache, with "
            "this package and without it, can give a prompt the embedding of another",
            "Do not enable the cache where one of them is served; docs/verl_omni.md says why.",
        )
