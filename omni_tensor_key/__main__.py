"""`python -m omni_tensor_key` is `omni-tensor-key`."""

from .cli import app

app()
