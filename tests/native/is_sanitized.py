"""Fails unless the extension that is imported here was built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from pathlib import Path

from omni_tensor_key import _core

assert _core.__file__
symbols = Path(_core.__file__).read_bytes()
missing = [name for name in (b"__asan_report_load8", b"__ubsan_handle") if name not in symbols]
if missing:
    raise SystemExit(f"{_core.__file__} was built without {missing}: its tests would prove nothing here.")
print(f"{_core.__file__} is sanitized")
