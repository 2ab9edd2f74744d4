"""`python -m omni_tensor_key` is `omni-tensor-key`."""

from .tools.cli import app

app(prog_name="omni-tensor-key")
