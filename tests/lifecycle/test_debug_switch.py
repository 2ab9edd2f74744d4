"""`OMNI_TENSOR_KEY_DEBUG=1`: every hit checks that the stored value is as it was when it was stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from . import edits
from .conftest import Fresh

SCRIPT = Path(edits.__file__)

# The element that the message names, where it is not the whole output.
ELEMENTS = {
    "tuple, second": "output[1]",
    "deep inside": "output[1]['a'][1]",
    "namedtuple, first": "output[0]",
    "sign of zero": "output[0]",
    "other tensor": "output[0]",
    "one more": "output[2]",
    "one less": "output[1]",
    "one more in a dict": "output['b']",
}


def report(fresh: Fresh, **environment: str) -> dict[str, Any]:
    (line,) = fresh.check(SCRIPT.read_text(), **environment).lines_with("REPORT ")
    return dict(json.loads(line.removeprefix("REPORT ")))


@pytest.fixture(scope="module")
def checked(fresh: Fresh) -> dict[str, Any]:
    return report(fresh, OMNI_TENSOR_KEY_DEBUG="1")


@pytest.fixture(scope="module")
def unchecked(fresh: Fresh) -> dict[str, Any]:
    return report(fresh)


@pytest.mark.parametrize("kind", ["tensor", "list"])
@pytest.mark.parametrize("edit", edits.EDITS)
def test_an_edited_value_raises_at_the_hit(checked: dict[str, Any], edit: str, kind: str) -> None:
    message = checked[f"edited, {kind}"][edit]
    element = ELEMENTS.get(edit, "output")
    assert f"omni_tensor_key: {element} of Pipeline.encode_prompt() was edited" in message
    key = "TensorKey(" if kind == "tensor" else "('__seq__', (3, 5))"
    assert f"('Pipeline', (('attention_mask', None), ('prompt_ids', {key}" in message
    assert "clone before writing" in message


@pytest.mark.parametrize("kind", ["tensor", "list"])
@pytest.mark.parametrize("output", edits.OUTPUTS)
def test_an_unedited_value_passes(checked: dict[str, Any], output: str, kind: str) -> None:
    assert checked[f"unedited, {kind}"][output] == ""


@pytest.mark.parametrize("kind", ["tensor", "list"])
@pytest.mark.parametrize("edit", edits.HARMLESS)
def test_a_value_that_is_as_it_was_passes(checked: dict[str, Any], edit: str, kind: str) -> None:
    assert checked[f"harmless, {kind}"][edit] == ""


@pytest.mark.parametrize("alias", edits.ALIASES)
def test_an_input_that_is_returned_and_then_reused(
    checked: dict[str, Any], unchecked: dict[str, Any], alias: str
) -> None:
    """What is stored is a clone: the hit has the old value, and nothing was edited."""
    assert checked["reused input"][alias] == ""
    assert unchecked["reused input"][alias] == ""


def test_an_edit_by_the_caller_that_missed(checked: dict[str, Any]) -> None:
    """A miss returns the encoder's own tensor, of which the cache holds an alias."""
    assert "output[0] of Pipeline.encode_prompt() was edited" in checked["edited by the caller of the miss"]


def test_an_edit_of_an_entry_that_only_its_hits_have_kept(checked: dict[str, Any]) -> None:
    assert "output[1] of Pipeline.encode_prompt() was edited" in checked["edited after it was kept by hits"]


def test_what_is_remembered_does_not_grow(checked: dict[str, Any]) -> None:
    assert checked["churn"]["hits"] > 300
    assert 0 < checked["churn"]["most"] <= 4


def test_without_the_switch_nothing_is_checked(unchecked: dict[str, Any]) -> None:
    assert unchecked["churn"]["most"] == 0
    messages = {name: found for name, found in unchecked.items() if name != "churn"}
    for name in ("edited by the caller of the miss", "edited after it was kept by hits"):
        assert messages.pop(name) == ""
    assert {message for found in messages.values() for message in found.values()} == {""}
