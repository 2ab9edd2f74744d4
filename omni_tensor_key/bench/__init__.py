"""What a cache key costs, measured on this machine: ``omni-tensor-key bench``."""

from .run import run
from .upstream import NoUpstream

__all__ = ["NoUpstream", "run"]
