"""What keeps cached prompt embeddings fresh: the guard of a pipeline, and private copies of outputs."""

from .guard import PipelineGuard
from .module_events import guards
from .outputs import NotStorableError, difference, private_copy, tensor_bytes
from .torch_state import TorchState, call_state

__all__ = [
    "NotStorableError",
    "PipelineGuard",
    "TorchState",
    "call_state",
    "difference",
    "guards",
    "private_copy",
    "tensor_bytes",
]
