"""The example's adapter, which writes a line to the file ENCODER_RUNS for each run of its text encoder."""

from __future__ import annotations

import os
from typing import Any

from adapter import EarlyTensorPipeline


class CountedPipeline(EarlyTensorPipeline):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.text_encoder.register_forward_hook(self._count)

    @staticmethod
    def _count(*_: Any) -> None:
        with open(os.environ["ENCODER_RUNS"], "a") as file:
            file.write("run\n")
