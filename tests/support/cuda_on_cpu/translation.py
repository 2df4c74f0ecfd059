"""Translates a CUDA source, after the preprocessor, to C++: inline assembly becomes calls of `instructions.h`.

Each PTX statement is a call of the function named as its opcode. A register is a variable, a label a label.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

# How an operand that is only read is passed, by its constraint.
READ = {"r": "unsigned", "n": "int", "l": "cuda::u64", "f": "float", "h": "cuda::u16"}
REGISTERS = {"pred": "bool", "b16": "cuda::u16", "b32": "unsigned", "u32": "unsigned", "b64": "cuda::u64"}

_ASSEMBLY = re.compile(r"\basm\b(?: volatile)?\s*\(")
_CLUSTER = r"__cluster_dims__\((\d+), 1, 1\)"
_KERNEL = re.compile(rf'extern "C" __global__ void\s+(?:{_CLUSTER}\s+)?(\w+)\(const\s+(\w+)\s+\w+\)')
_DYNAMIC = re.compile(r"extern __shared__ [^;]*?(\w+) (\w+)\[\];")
_VARIABLES = re.compile(r"__shared__ ([^;]*);")
_PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k\d+\.f32\.(\w+)\.\w+")


def translate(source: str, only: str | None = None) -> str:
    """source: a preprocessed `.cu`, in which only the qualifiers that are used here are left. only: the kernel that can
    be launched; else all can.
    """
    kernels = [each for each in _KERNEL.findall(source) if only in (None, each[1])]
    text = _DYNAMIC.sub(r"\1* \2 = (\1*)cuda::dynamic_shared();", _without_assembly(source))
    if only is not None:
        text = re.sub(rf'extern "C" (?=__global__ void (?:{_CLUSTER} )?(?!{only}\b))', "static ", text)
    text = re.sub(rf"__global__|{_CLUSTER}", "", _VARIABLES.sub(_variables, text))
    launches = "\n".join(f"LAUNCHES({kernel}, {arguments}, {cluster or 1}u)" for cluster, kernel, arguments in kernels)
    return f'#include "launch.h"\n{text}\n{launches}\n'


def _variables(declared: re.Match[str]) -> str:
    """Names of variables in shared memory: those of a structure that each block has."""
    declarators = declared[1] if declared[1].startswith("alignas") else declared[1].split(" ", 1)[1]
    names = [re.findall(r"\w+", each.split("[")[0])[-1] for each in declarators.split(",")]
    kind = f"Shared_{'_'.join(names)}"
    return f"struct {kind} {{ {declared[1]}; }}; auto& [{', '.join(names)}] = cuda::shared_variables<{kind}>();"


def _without_assembly(source: str) -> str:
    made, at = [], 0
    for start in _ASSEMBLY.finditer(source):
        end = _closing(source, start.end())
        made += [source[at : start.start()], _Assembly.parsed(source[start.end() : end]).translated()]
        at = end + 1
    return "".join((*made, source[at:]))


def _closing(text: str, start: int) -> int:
    """Where the parenthesis closes before `start`, outside of strings."""
    depth = 1
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', text[start:]):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if not depth:
            return start + token.start()
    raise ValueError("a parenthesis is not closed")


def _split(text: str, separator: str) -> list[str]:
    """The parts between separators that stand outside of parentheses, brackets, braces and strings."""
    parts, depth = [""], 0
    for token in re.findall(r'"(?:[^"\\]|\\.)*"|.', text, re.DOTALL):
        depth += (token in "([{") - (token in ")]}") if len(token) == 1 else 0
        if token == separator and not depth:
            parts.append("")
        else:
            parts[-1] += token
    return [part.strip() for part in parts]


def _literal(text: str) -> str:
    return "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text)).replace("\\n", "\n")


@dataclass(frozen=True, slots=True)
class _Assembly:
    # PTX; and each operand's constraint with its expression, those that are written first.
    text: str
    operands: list[tuple[str, str]]

    @classmethod
    def parsed(cls, inside: str) -> "_Assembly":
        text, *sections = _split(inside, ":")
        operands = [operand for section in sections[:2] for operand in _split(section, ",") if operand]
        split = (re.fullmatch(r'"([^"]*)"\s*\((.*)\)', operand, re.DOTALL) for operand in operands)
        return cls(_literal(text), [(operand[1], operand[2]) for operand in split if operand])

    def translated(self) -> str:
        """A block without its semicolon. Operands that are read are computed once."""
        read = [
            f"const {READ[kind]} operand_{place} = ({READ[kind]})({expression});"
            for place, (kind, expression) in enumerate(self.operands)
            if kind[0] not in "=+"
        ]
        return " ".join(("{", *read, *self._statements(), "}"))

    def _statements(self) -> Iterator[str]:
        for line in re.split(r"[;\n]", re.sub(r"^\s*\{|\}\s*$", "", self.text)):
            statement = line.strip()
            while label := re.match(r"(\w+):(?!:)\s*", statement):
                yield f"{label[1]}:;"
                statement = statement[label.end() :]
            if statement:
                yield self._statement(statement)

    def _statement(self, statement: str) -> str:
        if predicate := re.match(r"@(\w+)\s+", statement):
            return f"if ({predicate[1]}) {self._statement(statement[predicate.end() :])}"
        opcode, _, rest = statement.partition(" ")
        if opcode == ".reg":
            kind, _, names = rest.strip().partition(" ")
            return f"{REGISTERS[kind[1:]]} {names};"
        if opcode == "bra":
            return f"goto {rest.strip()};"
        operands = ", ".join(self._operand(each) for each in _split(rest, ",") if each not in ("", "_"))
        return f"{_function(opcode)}({operands});"

    def _operand(self, operand: str) -> str:
        if operand[0] in "[{":
            # An address's coordinates stand in braces too.
            within = operand[1:-1] if operand[0] == "{" else operand[1:-1].replace("{", "").replace("}", "")
            inside = ", ".join(self._operand(each) for each in _split(within, ","))
            return f"ptx::vector({inside})" if operand[0] == "{" else inside
        if operand.startswith("%%"):
            return f"ptx::{operand[2:]}()"
        if operand.startswith("%"):
            kind, expression = self.operands[int(operand[1:])]
            return f"({expression})" if kind[0] in "=+" else f"operand_{operand[1:]}"
        if operand.startswith("0f"):
            return f"cuda::bits<float>(0x{operand[2:]}u)"
        return operand


def _function(opcode: str) -> str:
    if product := _PRODUCT.fullmatch(opcode):
        return f"ptx::wgmma<{product[1]}, cuda::{product[2]}>"
    return "ptx::" + re.sub(r"\W+", "_", opcode)
