"""Content keys of tensors, and the stand-ins for the functions with which vLLM-Omni's cache makes its keys."""

from .._core import KeyBuilder as KeyBuilder
from .._core import TensorKey as TensorKey
from ..errors import UncacheableTensorError as UncacheableTensorError
from .builder import make_key_builder as make_key_builder
from .tensors import explain as explain
from .tensors import tensor_key as tensor_key
from .tensors import tensor_keys as tensor_keys
