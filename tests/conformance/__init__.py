"""The rollout adapters of a verl-omni checkout, run against the real prompt cache.

`pytest --verl-omni=PATH tests/conformance`, or VERL_OMNI=PATH in the environment. Nothing of verl-omni is in here.
"""
