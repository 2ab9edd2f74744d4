"""The three attributes of vLLM-Omni's prompt-embedding cache that this package replaces."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from .contract import check_contract
from .host_copy import to_host
from .key import backend
from .outputs import without_aliases
from .settings import settings


def _guarded_put(put: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    def guarded_put(self: Any, key: Any, value: Any) -> None:
        """Store `value`, with clones in place of tensors that share storage with an input of the call."""
        sources = backend.sources(key)
        put(self, key, without_aliases(value, sources) if sources else value)

    return guarded_put


class Replacement:
    """This package's functions in the place of upstream's, in one module.

    Raises ContractMismatch, and leaves the module as it is, where it differs from what this package relies on.
    """

    def __init__(self, module: types.ModuleType) -> None:
        check_contract(module)
        cache: Any = module.PromptEmbedCache
        names: Any = module
        builder = backend.KeyBuilder(
            names._hashable,
            names._build_key,
            names._NOT_HASHABLE,
            names._PRECOMPUTED_EMBED_ARGS,
            to_host,
            settings().max_bytes,
        )
        targets: list[tuple[Any, str, Any]] = [
            (module, "_hashable", builder.hashable),
            (module, "_build_key", builder.build_key),
            (cache, "put", _guarded_put(cache.put)),
        ]
        # `vars`, not getattr: what is put back must be what was there.
        self._attributes = [(owner, name, vars(owner)[name], new) for owner, name, new in targets]
        for owner, name, _, new in self._attributes:
            setattr(owner, name, new)

    def in_place(self) -> bool:
        """Whether all three attributes are still the ones put there."""
        return all(vars(owner).get(name) is new for owner, name, _, new in self._attributes)

    def restore(self) -> None:
        """Put upstream's own attributes back.

        Raises RuntimeError, and changes nothing, where somebody else has replaced one of them since.
        """
        for owner, name, _, new in self._attributes:
            if vars(owner).get(name) is not new:
                raise RuntimeError(
                    f"{owner.__name__}.{name} was replaced by other code after omni_tensor_key was activated; undo "
                    "that first"
                )
        for owner, name, original, _ in self._attributes:
            setattr(owner, name, original)
