"""What a cache key costs, measured on this machine: ``omni-tensor-key bench``."""

from .suite import run
from .upstream import CannotMeasure

__all__ = ["CannotMeasure", "run"]
