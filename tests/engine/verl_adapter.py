"""verl-omni's adapters by name, from the checkout VERL_OMNI, importable in a worker's process."""

from __future__ import annotations

import os
from pathlib import Path

from conformance.checkout import Checkout


def __getattr__(name: str) -> type:
    checkout = Checkout(Path(os.environ["VERL_OMNI"]))
    for adapter in checkout.adapters():
        if adapter.name == name:
            return checkout.load(adapter)
    raise AttributeError(name)
