"""What `doctor` says of environment variables: one line for each that is set, and for the two that decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..settings import read_settings
from .findings import NAME, Finding
from .selfcheck import TENSOR_BYTES

_CACHE = "OMNI_DIFFUSION_PROMPT_EMBED_CACHE"
_ENTRIES = "OMNI_DIFFUSION_PROMPT_EMBED_CACHE_SIZE"
_AT_BUILD = "OMNI_TENSOR_KEY_CUDA"
_ID_BYTES = 8  # of an int64 token ID


def _own(environ: Mapping[str, str]) -> Iterator[Finding]:
    """This package's variables."""
    found, problems = read_settings(environ)
    refused = {problem.name: problem for problem in problems}
    tokens = found.max_bytes // _ID_BYTES
    meaning = {
        "OMNI_TENSOR_KEY": "this package is on" if found.enabled else "this package is switched off",
        "OMNI_TENSOR_KEY_MAX_BYTES": f"int64 token IDs of up to {tokens:,} tokens are keyed, longer ones bypass",
        "OMNI_TENSOR_KEY_VERIFY": f"{found.verify:g} of the hits run the encoder again and are compared",
        "OMNI_TENSOR_KEY_CACHE_BYTES": f"each cache holds at most {found.cache_bytes} bytes of tensors",
    }
    harmful = {
        "OMNI_TENSOR_KEY": not found.enabled,
        "OMNI_TENSOR_KEY_MAX_BYTES": found.max_bytes < TENSOR_BYTES,
        "OMNI_TENSOR_KEY_CACHE_BYTES": found.cache_bytes is not None and found.cache_bytes < TENSOR_BYTES,
    }
    for name in sorted(name for name in environ if name == "OMNI_TENSOR_KEY" or name.startswith("OMNI_TENSOR_KEY_")):
        value = environ[name]
        if name in refused:
            problem = refused[name]
            seen = f"{value!r} is not {problem.expected}; the default is used: {problem.default}"
            yield Finding(name, "note", seen, f"Set {name} to {problem.expected}, or unset it.")
        elif name in meaning:
            advice = f"Unset {name}, or set a larger value." if name.endswith("_BYTES") else f"Unset {name}."
            state = "problem" if harmful.get(name) else "ok"
            yield Finding(name, state, f"{value!r}: {meaning[name]}", advice if state == "problem" else "")
        elif name != _AT_BUILD:
            yield Finding(name, "note", f"{value!r}: this release has no such variable", f"Unset {name}.")


def _plugins(environ: Mapping[str, str]) -> Iterator[Finding]:
    allowed = environ.get("VLLM_PLUGINS")
    if allowed is None:
        yield Finding("VLLM_PLUGINS", "ok", "not set: every plugin is loaded")
    elif NAME in allowed.split(","):
        yield Finding("VLLM_PLUGINS", "ok", f"{allowed!r} names {NAME}")
    else:
        seen = f"{allowed!r} does not name {NAME}, so vLLM-Omni does not load it"
        advice = f"Set VLLM_PLUGINS={','.join(filter(None, [allowed, NAME]))}, or unset it."
        yield Finding("VLLM_PLUGINS", "problem", seen, advice)


def _upstreams(environ: Mapping[str, str]) -> Iterator[Finding]:
    """vLLM-Omni's variables of the cache, read as `resolve_prompt_embed_cache_config()` reads them."""
    value = environ.get(_CACHE)
    if value is not None and value.strip().lower() in ("1", "true", "yes", "on"):
        yield Finding(_CACHE, "ok", f"{value!r} enables the prompt-embedding cache")
    else:
        seen = "not set, and the cache is off by default" if value is None else f"{value!r} does not enable the cache"
        advice = (
            f"Set {_CACHE}=1 in every process; with Ray, in runtime_env's env_vars. Where you pass "
            "enable_prompt_embed_cache=True to Omni or AsyncOmni instead, which doctor cannot see, run doctor with "
            f"{_CACHE}=1 to examine the rest."
        )
        yield Finding(_CACHE, "problem", seen, advice)
    if (size := environ.get(_ENTRIES)) is not None:
        try:
            good = int(size) > 0
        except ValueError:
            good = False
        seen = f"{size!r} entries in each cache" if good else f"{size!r} is no number of entries above 0"
        advice = "" if good else f"Set {_ENTRIES} to the number of prompts to keep, or unset it: the default is 32."
        yield Finding(_ENTRIES, "ok" if good else "note", seen, advice)


def examine_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Say what each variable that is set does, and what is missing."""
    yield from _own(environ)
    yield from _plugins(environ)
    yield from _upstreams(environ)
