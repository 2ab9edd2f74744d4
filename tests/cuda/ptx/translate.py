"""The PTX of one integer kernel as C++ that runs on the host, one CUDA thread at a time from barrier to barrier.

What this translator does not know ends it with an error: nothing is skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

SPECIAL = {
    f"%{name}.{axis}": f"t.{name}[{i}]" for name in ("tid", "ntid", "ctaid", "nctaid") for i, axis in enumerate("xyz")
}
SPACES = ("global", "shared", "const", "param")
INFIX = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
DECLARATION = re.compile(r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d+)\])?(?:\s*=\s*\{(.*)\})?", re.S)


def bits_of(kind: str) -> int:
    """The width of a PTX type; no floats."""
    if kind == "pred":
        return 1
    found = re.fullmatch(r"[busx](8|16|32|64)", kind)
    if found is None:
        raise ValueError(f"type {kind} is not known")
    return int(found[1])


def ctype(kind: str, bits: int | None = None) -> str:
    """The C++ type of a PTX type, or of another width of the same kind."""
    bits = bits or bits_of(kind)
    return "bool" if bits == 1 else f"{'' if kind[0] == 's' else 'u'}int{bits}_t"


class Kernel:
    """`cpp` is the translation; see machine.h for what it needs."""

    def __init__(self, text: str) -> None:
        text = re.sub(r'//[^\n]*|/\*.*?\*/|\.pragma\s+"nounroll";', "", text, flags=re.S)
        parts = re.fullmatch(
            r"\s*\.version [\d.]+\s+\.target sm_\d+\s+\.address_size 64\s+(?P<constants>.*?)(?:\.visible\s+)?\.entry\s+"
            r"(?P<name>[\w$]+)\s*\((?P<parameters>.*?)\)\s*\.maxntid (?P<threads>\d+)(?:, 1, 1)?\s*\{(?P<body>.*)\}\s*",
            text,
            re.S,
        )
        if parts is None or ".entry" in parts["body"] or ".func" in text:
            raise ValueError("this is not the PTX of one kernel")
        self.symbols: dict[str, str] = {}  # the address of each in its own space
        self.registers: dict[str, tuple[str, int]] = {}
        self.sizes = {"param": 0, "shared": 0, "const": 0}
        self.constants: list[str] = []
        self.barriers = 0
        for declared in filter(None, map(str.strip, parts["constants"].split(";"))):
            self.declare("const", declared.removeprefix(".const").strip())
        self.declare("param", parts["parameters"].strip().removeprefix(".param").strip())
        lines = list(self.statements(parts["body"]))
        self.cpp = "\n".join(
            [
                '#include "machine.h"',
                "namespace ptx {",
                f"alignas(64) const uint8_t kConstants[] = {{{', '.join(self.constants)}}};",
                f"const uint64_t kConstSize = {self.sizes['const']}, kSharedSize = {self.sizes['shared']}, "
                f"kParamSize = {self.sizes['param']};",
                f'const char* const kKernel = "{parts["name"]}";',
                f"const uint32_t kMaxThreads = {parts['threads']};",
                "struct Registers : Thread {",
                *(f"  {kind} {name}[{count}];" for name, (kind, count) in self.registers.items()),
                "};",
                "const size_t kThreadSize = sizeof(Registers);",
                "void run_to_barrier(Thread& thread) {",
                "  auto& t = static_cast<Registers&>(thread);",
                "  switch (t.resume) { case 0:;",
                *lines,
                '  } fail(t, "the end without ret");',
                "}",
                "}  // namespace ptx",
            ]
        )

    def statements(self, body: str) -> Iterator[str]:
        for statement in body.split(";"):
            rest = statement.strip()
            while found := re.match(r"[{}](?!\s*%)\s*|(\$?\w+):\s*", rest):
                if found[1]:
                    yield f"{self.label(found[1])}:;"
                rest = rest[found.end() :]
            if found := re.fullmatch(r"\.reg\s+\.(\w+)\s+%?(\w+?)(?:<(\d+)>)?", rest):
                self.registers[found[2]] = (ctype(found[1]), int(found[3] or 1))
            elif rest.startswith(".shared"):
                self.declare("shared", rest.removeprefix(".shared").strip())
            elif found := re.fullmatch(r"(?:@(!?)(%p\w+)\s+)?([\w.]+)\s*(.*)", rest, re.S):
                guard = f"if ({found[1]}{self.value(found[2])}) " if found[2] else ""
                yield f"{guard}{{ {self.instruction(found[3], self.operands(found[4]), bool(guard))} }}"
            elif rest:
                raise ValueError(f"statement is not known: {rest}")

    def declare(self, space: str, text: str) -> None:
        found = DECLARATION.fullmatch(text)
        if found is None:
            raise ValueError(f"declaration is not known: {text}")
        width = bits_of(found[2]) // 8
        align = int(found[1] or width)
        start = -(-self.sizes[space] // align) * align
        self.symbols[found[3]] = f"(k{space.title()}Start + {start})"
        self.sizes[space] = start + width * int(found[4] or 1)
        if space == "const":
            if width != 1 or start != len(self.constants) or found[5] is None:
                raise ValueError(f"only bytes one behind the other are known as constants: {found[3]}")
            self.constants += found[5].split(",")

    @staticmethod
    def label(name: str) -> str:
        return "L" + name.replace("$", "_")

    @staticmethod
    def operands(text: str) -> list[str]:
        return [part.strip() for part in re.split(r",\s*(?![^{]*\})", text)] if text else []

    def value(self, name: str) -> str:
        """A register, an immediate value or the address of a symbol."""
        if name in SPECIAL:
            return SPECIAL[name]
        if (found := re.fullmatch(r"%?([a-z_]+)(\d*)", name)) and found[1] in self.registers:
            return f"t.{found[1]}[{found[2] or 0}]"
        if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", name):
            return f"{int(name, 0) % (1 << 64)}ull"
        if name in self.symbols:
            return self.symbols[name]
        raise ValueError(f"operand {name} is not known")

    def address(self, text: str) -> str:
        found = re.fullmatch(r"\[([%\w$]+)(?:\+(-?\d+))?\]", text)
        if found is None:
            raise ValueError(f"address {text} is not known")
        return f"uint64_t({self.value(found[1])}) + {int(found[2] or 0)}"

    def instruction(self, name: str, operands: list[str], guarded: bool) -> str:
        op, *mods = name.split(".")
        if op == "bra" and mods in ([], ["uni"]):
            return f'if (++t.jumps > kMaxJumps) fail(t, "no end"); goto {self.label(operands[0])};'
        if name == "ret":
            return "t.resume = kDone; return;"
        if name == "bar.sync" and operands == ["0"] and not guarded:
            self.barriers += 1
            return f"t.resume = {self.barriers}; return; case {self.barriers}:;"
        kind = mods.pop()
        if op in ("ld", "st"):
            return self.memory(op, mods, kind, operands)
        to = self.value(operands[0]) if not operands[0].startswith("{") else ""
        if op == "mov" and not mods and "{" in operands[0] + operands[1]:
            return self.move_parts(kind, operands)
        if op == "cvta":
            space = mods[-1]
            sign = "-" if mods[:-1] == ["to"] else "+"
            if mods[:-1] not in ([], ["to"]) or space not in SPACES:
                raise ValueError(f"instruction {name} is not known")
            return f"{to} = {self.value(operands[1])} {sign} k{space.title()}Window;"
        expression = self.expression(op, mods, kind, operands[1:])
        if expression is None:
            raise ValueError(f"instruction {name} {operands} is not known")
        return f"{to} = {expression};"

    def expression(self, op: str, mods: list[str], kind: str, operands: list[str]) -> str | None:
        if op == "cvt" and len(mods) == 1:
            return f"{ctype(mods[0])}({ctype(kind)}({self.value(operands[0])}))"
        unsigned, bits = ctype("u", bits_of(kind)), bits_of(kind)

        def read(i: int) -> str:
            return f"{ctype(kind)}({self.value(operands[i])})"

        def plain(i: int) -> str:
            return f"{unsigned}({self.value(operands[i])})"

        def count(i: int) -> str:
            return f"uint32_t({self.value(operands[i])})"

        if op in ("mul", "mad") and mods in (["lo"], ["hi"], ["wide"]):
            width = 2 * bits if mods == ["wide"] else bits
            product = f"product<{ctype(kind)}>({read(0)}, {read(1)})"
            if mods == ["hi"]:
                product = f"({product} >> {bits})"
            added = f" + {self.value(operands[2])}" if op == "mad" else ""
            return f"{ctype('u', width)}({product}{added})"
        if op == "setp" and len(mods) == 1 and mods[0] in COMPARE:
            return f"{read(0)} {COMPARE[mods[0]]} {read(1)}"
        if op == "shf" and mods in (["l", "wrap"], ["r", "wrap"]):
            return f"shf_{mods[0]}({plain(0)}, {plain(1)}, {count(2)})"
        if mods:
            return None
        if op in INFIX:
            return f"{unsigned}({plain(0)} {INFIX[op]} {plain(1)})"
        if op in ("div", "rem"):
            return f"{read(0)} {'/' if op == 'div' else '%'} nonzero(t, {read(1)})"
        if op in ("shl", "shr"):
            return f"{op}<{ctype(kind)}>({read(0)}, {count(1)})"
        if op == "bfi":
            return f"bfi<{unsigned}>({plain(0)}, {plain(1)}, {count(2)}, {count(3)})"
        if op == "prmt" and kind == "b32":
            return f"prmt({plain(0)}, {plain(1)}, {count(2)})"
        if op == "not":
            return f"!{read(0)}" if kind == "pred" else f"{unsigned}(~{plain(0)})"
        simple = {
            "mov": lambda: read(0),
            "neg": lambda: f"{unsigned}(0 - {plain(0)})",
            "min": lambda: f"std::min({read(0)}, {read(1)})",
            "max": lambda: f"std::max({read(0)}, {read(1)})",
            "selp": lambda: f"{self.value(operands[2])} ? {read(0)} : {read(1)}",
        }
        return simple[op]() if op in simple else None

    def parts(self, text: str) -> list[str]:
        return [self.value(part.strip()) for part in text.strip("{} ").split(",")]

    def move_parts(self, kind: str, operands: list[str]) -> str:
        to, source = map(self.parts, operands)
        width = bits_of(kind) // max(len(to), len(source))
        half = ctype("u", width)
        if len(to) == 1:
            joined = " | ".join(f"uint64_t({half}({part})) << {i * width}" for i, part in enumerate(source))
            return f"{to[0]} = {joined};"
        return " ".join(f"{part} = {half}({source[0]} >> {i * width});" for i, part in enumerate(to))

    def memory(self, op: str, mods: list[str], kind: str, operands: list[str]) -> str:
        space, count = "generic", 1
        for mod in mods:
            if mod in SPACES:
                space = mod
            elif mod in ("v2", "v4"):
                count = int(mod[1])
            else:
                raise ValueError(f"modifier {mod} of {op} is not known")
        where, registers = reversed(operands) if op == "ld" else operands
        size = bits_of(kind) // 8
        write = "true" if op == "st" else "false"
        parts = self.parts(registers)
        if len(parts) != count:
            raise ValueError(f"{op} of {count} has operands {operands}")
        kind = ctype(kind)
        moves = [
            f"put<{kind}>(m + {i * size}, {part});" if op == "st" else f"{part} = get<{kind}>(m + {i * size});"
            for i, part in enumerate(parts)
        ]
        reached = f"reach(t, Space::{space.title()}, {self.address(where)}, {count * size}, {write})"
        return f"auto* m = {reached}; {' '.join(moves)}"
