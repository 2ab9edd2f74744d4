"""What the prompt cache will do with the encode_prompt() of a pipeline class, told from the class's source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .class_source import ClassSource, Function, SourceError, read_class
from .encode_path import EncodePath, is_static

__all__ = ["PRECOMPUTED", "Audit", "Parameter", "SourceError", "audit", "show"]

# Upstream's names; a call in which one of them is not None is not cached.
PRECOMPUTED = (
    "prompt_embeds",
    "negative_prompt_embeds",
    "pooled_prompt_embeds",
    "negative_pooled_prompt_embeds",
    "prompt_embeds_mask",
    "negative_prompt_embeds_mask",
)
_TOKENS = re.compile(r"(^|_)(ids?|mask|tokens?|lengths?|lens|positions?|grid)(_|\d|$)")
_FLOATS = re.compile(r"image|pixel|latent|embed|video|audio|hidden|feature|sigma|noise|timestep|waveform")
_IDENTITY = re.compile(r"prompt|text|ids|tokens")
_SCALARS = frozenset({"str", "int", "float", "bool", "bytes", "None", "list", "tuple", "dict", "List", "Tuple", "Dict",
                      "Optional", "Union", "Literal", "Sequence", "torch", "device", "dtype", "typing"})  # fmt: skip
_TENSORS = frozenset({"Tensor", "LongTensor", "IntTensor", "BoolTensor"})
_PASSED_ON = frozenset({"to", "view", "reshape", "contiguous", "expand", "unsqueeze", "squeeze", "detach", "flatten",
                        "long", "int", "bool", "float", "type", "type_as", "cuda", "cpu"})  # fmt: skip


@dataclass
class Parameter:
    """How one parameter enters the key."""

    name: str
    annotation: str
    default: str
    verdict: str  # keyed, bypass (when given), depends
    reason: str


@dataclass
class Audit:
    """The result for one class."""

    target: str
    defined: str  # file and line of encode_prompt(), "" if there is none
    parameters: list[Parameter] = field(default_factory=list)
    aliases: list[str] = field(default_factory=list)
    attributes: dict[str, str] = field(default_factory=dict)  # that the path to the encoder reads: what they are
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def hides_prompt(self) -> bool:
        """Whether calls for different prompts can have equal keys."""
        return bool(self.warnings)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _parameters(function: Function) -> Iterator[tuple[str, ast.arg, ast.expr | None]]:
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    for argument, default in list(zip(plain, defaults, strict=True))[0 if is_static(function) else 1 :]:
        yield "", argument, default
    if arguments.vararg is not None:
        yield "*", arguments.vararg, None
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield "", argument, default
    if arguments.kwarg is not None:
        yield "**", arguments.kwarg, None


def _verdict(name: str, annotation: str) -> tuple[str, str]:
    if name in PRECOMPUTED:
        return "bypass", "the cache leaves calls with precomputed embeddings alone"
    words = set(re.findall(r"\w+", re.sub(r"Literal\[[^]]*\]", "str", annotation)))
    foreign = words - _SCALARS - _TENSORS - {"Any"}
    if foreign:
        return "bypass", f"no key is made of {', '.join(sorted(foreign))}"
    open_ended = not words or "Any" in words or bool(re.search(r"\b(list|tuple|dict)\b(?!\[)", annotation, re.I))
    if not open_ended and not words & _TENSORS:
        return "keyed", "as vLLM-Omni keys it"
    if _FLOATS.search(name) and not words & {"Any", "dict", "Dict"}:
        return "bypass", "images and floating-point tensors have no key"
    if _TOKENS.search(name) and not _FLOATS.search(name):
        return "keyed", "a tensor by its content, if its dtype is integer or bool; a list item by item"
    return "depends", "text, numbers, integer and bool tensors are keyed; images and float tensors are a bypass"


def _passes_on(expression: ast.expr | None, names: set[str]) -> str | None:
    """The parameter whose memory the value of an expression may be."""
    if isinstance(expression, ast.Name):
        return expression.id if expression.id in names else None
    if isinstance(expression, ast.Subscript):
        return _passes_on(expression.value, names)
    if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
        return _passes_on(expression.func.value, names) if expression.func.attr in _PASSED_ON else None
    if isinstance(expression, ast.IfExp):
        return _passes_on(expression.body, names) or _passes_on(expression.orelse, names)
    return None


def _made_anew(function: Function, name: str) -> bool:
    """Whether some statement gives `name` a value of its own, so that a return of it says little."""
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else []
        for target in targets:
            value = node.value if isinstance(node, ast.Assign) else None
            if isinstance(target, ast.Tuple) and any(isinstance(t, ast.Name) and t.id == name for t in target.elts):
                return True
            if isinstance(target, ast.Name) and target.id == name and _passes_on(value, {name}) is None:
                return True
    return False


def _aliases(function: Function, where: str, names: set[str]) -> Iterator[str]:
    """Returns of a method that may be the memory of one of its parameters; of those, the ones called `names`."""
    own = {argument.arg for _, argument, _ in _parameters(function)} & names
    for node in ast.walk(function):
        if not isinstance(node, ast.Return) or node.value is None:
            continue
        for value in node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]:
            name = _passes_on(value, own)
            if name is not None and not _made_anew(function, name):
                yield f"{where}:{node.lineno} returns {ast.unparse(value)}, which may be the memory of {name}"


def _identified(parameters: list[Parameter]) -> bool:
    return any(
        parameter.verdict != "bypass" and _IDENTITY.search(parameter.name) and not parameter.name.startswith("*")
        for parameter in parameters
    )


def audit(target: str) -> Audit:
    """Read the class that `target` names, MODULE:CLASS or FILE.py:CLASS. Raises SourceError."""
    sources, cls = read_class(target)
    order, missing = sources.order(cls)
    owner = next((item for item in order if "encode_prompt" in item.functions), None)
    if owner is None:
        result = Audit(target, "")
        result.notes.append("There is no encode_prompt(), so vLLM-Omni installs no cache on this pipeline.")
        if missing:
            result.notes.append(f"Not read: {', '.join(missing)}.")
        return result
    return _audit(target, order, owner, missing)


def _audit(target: str, order: list[ClassSource], owner: ClassSource, missing: list[str]) -> Audit:
    function = owner.functions["encode_prompt"]
    result = Audit(target, f"{owner.module.path}:{function.lineno}")
    for stars, argument, default in _parameters(function):
        annotation = "" if argument.annotation is None else ast.unparse(argument.annotation).strip("'\"")
        shown = "" if default is None else ast.unparse(default)
        if stars:
            verdict, reason = "depends", "each item enters the key; one without a key makes the call a bypass"
        else:
            verdict, reason = _verdict(argument.arg, annotation)
        result.parameters.append(Parameter(stars + argument.arg, annotation, shown, verdict, reason))
    if any(parameter.name.startswith("*") for parameter in result.parameters):
        result.notes.append("The signature has * or **: its calls are bound by vLLM-Omni's own code, which is slower.")
    path = EncodePath(order)
    tensors = {parameter.name for parameter in result.parameters if "tensor" in parameter.reason}
    for part, method in path.methods:
        result.aliases += _aliases(method, part.module.path.name, tensors)
    if result.aliases:
        result.notes.append("Outputs that share memory with an input are cloned before they are stored.")
    result.attributes = path.attributes()
    risky = [name for name, kind in result.attributes.items() if kind.startswith("state")]
    if risky:
        result.warnings.append(
            f"encode_prompt() reads {', '.join('self.' + name for name in risky)}, which the key does not contain: a"
            " call with the arguments of an earlier one gets that one's result, whatever these attributes are by then."
        )
        if any(parameter.verdict != "bypass" and parameter.name in tensors for parameter in result.parameters):
            result.warnings.append(
                "Its tensor arguments made such calls a bypass so far; with keys for tensors they are cached."
            )
    if not _identified(result.parameters):
        result.warnings.append("No parameter that enters the key tells one prompt from another.")
    if path.unfollowed:
        result.notes.append(f"Not followed, though they get the pipeline: {', '.join(path.unfollowed)}.")
    if missing:
        result.notes.append(f"Bases that were not read: {', '.join(missing)}.")
    return result


_COLORS = {"keyed": "green", "depends": "yellow", "bypass": "cyan"}


def show(result: Audit, console: Console) -> None:
    """Print a result for people."""
    console.print(f"{escape(result.target)}: encode_prompt() in {escape(result.defined)}" if result.defined else "")
    if result.parameters:
        table = Table("parameter", "default", "in the key", "because")
        for item in result.parameters:
            verdict = "bypass, if given" if item.verdict == "bypass" else item.verdict
            cells = (item.name, item.default, f"[{_COLORS[item.verdict]}]{verdict}[/]", item.reason)
            table.add_row(*(cell if cell.startswith("[") else escape(cell) for cell in cells))
        console.print(table)
    if result.attributes:
        table = Table("attribute that it reads", "")
        for name, kind in result.attributes.items():
            table.add_row(escape(name), f"[red]{escape(kind)}[/]" if kind.startswith("state") else escape(kind))
        console.print(table)
    for text in result.aliases:
        console.print(f"alias: {escape(text)}", soft_wrap=True)
    for text in result.notes:
        console.print(f"note: {escape(text)}", soft_wrap=True)
    for text in result.warnings:
        console.print(f"[bold red]warning:[/] {escape(text)}", soft_wrap=True)
