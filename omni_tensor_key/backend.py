"""The implementation that makes keys in this process: the native one unless the environment asks for the reference."""

from typing import TYPE_CHECKING

from .settings import settings

if TYPE_CHECKING or settings().backend == "native":
    from ._core import SIMD_PATHS
    from ._core import KeyBuilder as KeyBuilder
    from ._core import TensorKey as TensorKey
    from ._core import sources as sources
    from ._core import tensor_keys as tensor_keys

    DESCRIPTION = f"native backend, {SIMD_PATHS[0]}"
else:
    from .reference import KeyBuilder as KeyBuilder
    from .reference import TensorKey as TensorKey
    from .reference import sources as sources
    from .reference import tensor_keys as tensor_keys

    DESCRIPTION = "reference backend"
