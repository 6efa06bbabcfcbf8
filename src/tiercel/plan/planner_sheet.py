"""A tiny formula language: the text that explains a number is the text that computes it.

A `Sheet` is an ordered list of cells, each a name and an arithmetic expression over inputs and earlier cells.
Python evaluates it here; `to_javascript` prints the same expressions for the page that works without a
server. It never evaluates anything but arithmetic: no attributes, no indexing, no calls except its own.

All values are IEEE doubles and both languages do the same operations in the same order, so they agree bit
for bit. A division by zero gives infinity or NaN in both, never an exception.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Env = dict[str, float]
Thunk = Callable[["Scope", Env], float]

_BINARY: dict[type[ast.operator], tuple[Callable[[float, float], float], str]] = {
    ast.Add: (operator.add, "+"),
    ast.Sub: (operator.sub, "-"),
    ast.Mult: (operator.mul, "*"),
}
_COMPARE: dict[type[ast.cmpop], tuple[Callable[[float, float], bool], str]] = {
    ast.Lt: (operator.lt, "<"),
    ast.LtE: (operator.le, "<="),
    ast.Gt: (operator.gt, ">"),
    ast.GtE: (operator.ge, ">="),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One formula: a value (`params` empty) or a function of `params`, with its unit and its assumption."""

    name: str
    formula: str
    unit: str
    assumption: str = ""
    params: tuple[str, ...] = ()


def divide(a: float, b: float) -> float:
    """`a / b` as IEEE does it: signed infinity for a division by zero, NaN for 0/0."""
    if b != 0.0:
        return a / b
    if a == 0.0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def _round(towards: Callable[[float], int], x: float) -> float:
    if not math.isfinite(x):
        return x
    return math.copysign(float(towards(x)), x)  # keeps the sign of zero, as IEEE and JavaScript do


# min and max are written out because Python's and JavaScript's own differ when one side is NaN.
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": lambda a, b: a if a < b else b,
    "max": lambda a, b: a if a > b else b,
    "floor": lambda x: _round(math.floor, x),
    "ceil": lambda x: _round(math.ceil, x),
}


def least(gain: Callable[[float], float], limit: float) -> float:
    """Smallest whole number in [1, limit] whose `gain` is positive, or infinity.

    `gain` must be convex with gain(0) <= 0, so that it changes sign once at most.
    """
    if not gain(limit) > 0:
        return math.inf
    low, high = 0.0, float(limit)
    while high - low > 1:
        middle = float(math.floor((low + high) / 2))
        if gain(middle) > 0:
            high = middle
        else:
            low = middle
    return high


class Sheet:
    """Cells in order; each may use inputs and cells above it. Raises ValueError for a malformed formula."""

    def __init__(self, inputs: Sequence[str], cells: Sequence[Cell]) -> None:
        self.inputs = tuple(inputs)
        self.cells = {cell.name: cell for cell in cells}
        if len(self.cells) != len(cells):
            raise ValueError("two cells of the sheet have one name")
        self._thunks: dict[str, Thunk] = {}
        self._javascript: list[str] = []
        self.uses: dict[str, frozenset[str]] = {}
        known = set(self.inputs)
        for cell in cells:
            compiler = _Compiler(cell, known, self.cells)
            thunk, text = compiler.compile(ast.parse(cell.formula, mode="eval").body)
            self._thunks[cell.name] = thunk
            head = f"({', '.join(cell.params)}) => " if cell.params else ""
            self._javascript.append(f"const {cell.name} = {head}{text};")
            self.uses[cell.name] = frozenset(compiler.used)
            known.add(cell.name)

    def bind(self, inputs: Mapping[str, float]) -> Scope:
        """A scope in which cells can be read. Inputs not given are missed only when a cell needs them."""
        return Scope(self, {name: float(value) for name, value in inputs.items()})

    def thunk(self, name: str) -> Thunk:
        return self._thunks[name]

    def to_javascript(self, function: str) -> str:
        """A JavaScript function `function(inputs)` that returns every value cell and every function cell."""
        body = "\n  ".join(self._javascript)
        names = ", ".join(self.cells)
        return f"function {function}({{{', '.join(self.inputs)}}}) {{\n  {body}\n  return {{{names}}};\n}}\n"


class Scope:
    """Values of one evaluation, each computed when first asked for."""

    __slots__ = ("_memo", "inputs", "sheet")

    def __init__(self, sheet: Sheet, inputs: Env) -> None:
        self.sheet = sheet
        self.inputs = inputs
        self._memo: Env = {}

    def __getitem__(self, name: str) -> float:
        if name in self._memo:
            return self._memo[name]
        if name in self.sheet.cells:
            value = self.sheet.thunk(name)(self, {})
        else:
            value = self.inputs[name]
        self._memo[name] = value
        return value

    def call(self, name: str, *arguments: float) -> float:
        """Evaluate a function cell."""
        params = self.sheet.cells[name].params
        if len(params) != len(arguments):
            raise TypeError(f"{name} takes {len(params)} arguments, got {len(arguments)}")
        return self.sheet.thunk(name)(self, dict(zip(params, map(float, arguments), strict=True)))


class _Compiler:
    """One formula to a Python closure and to JavaScript text."""

    def __init__(self, cell: Cell, known: set[str], cells: Mapping[str, Cell]) -> None:
        self.cell, self.known, self.cells = cell, known, cells
        self.local = set(cell.params)
        self.used: set[str] = set()

    def fail(self, what: str) -> ValueError:
        return ValueError(f"formula {self.cell.name}: {what} in {self.cell.formula!r}")

    def compile(self, node: ast.expr) -> tuple[Thunk, str]:
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                number = float(value)
                return (lambda scope, env: number), repr(value)
            case ast.Name(id=name):
                return self.name(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner, text = self.compile(operand)
                return (lambda scope, env: -inner(scope, env)), f"(-{text})"
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(left, op, right)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.choice(test, body, orelse)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self.call(name, args)
        raise self.fail(f"{type(node).__name__} is not arithmetic")

    def name(self, name: str) -> tuple[Thunk, str]:
        if name in self.local:
            return (lambda scope, env: env[name]), name
        if name not in self.known:
            raise self.fail(f"{name} is not known here")
        self.used.add(name)
        return (lambda scope, env: scope[name]), name

    def binary(self, left: ast.expr, op: ast.operator, right: ast.expr) -> tuple[Thunk, str]:
        (a, a_text), (b, b_text) = self.compile(left), self.compile(right)
        if isinstance(op, ast.Div):
            return (lambda scope, env: divide(a(scope, env), b(scope, env))), f"({a_text} / {b_text})"
        if type(op) not in _BINARY:
            raise self.fail(f"{type(op).__name__} is not an operator of the sheet")
        apply, sign = _BINARY[type(op)]
        return (lambda scope, env: apply(a(scope, env), b(scope, env))), f"({a_text} {sign} {b_text})"

    def choice(self, test: ast.expr, body: ast.expr, orelse: ast.expr) -> tuple[Thunk, str]:
        if not isinstance(test, ast.Compare) or len(test.ops) != 1 or type(test.ops[0]) not in _COMPARE:
            raise self.fail("a condition is one comparison")
        apply, sign = _COMPARE[type(test.ops[0])]
        (a, a_text), (b, b_text) = self.compile(test.left), self.compile(test.comparators[0])
        (yes, yes_text), (no, no_text) = self.compile(body), self.compile(orelse)

        def thunk(scope: Scope, env: Env) -> float:
            return yes(scope, env) if apply(a(scope, env), b(scope, env)) else no(scope, env)

        return thunk, f"({a_text} {sign} {b_text} ? {yes_text} : {no_text})"

    def call(self, name: str, args: list[ast.expr]) -> tuple[Thunk, str]:
        if name == "least":
            return self.search(args)
        thunks, texts = zip(*map(self.compile, args), strict=True) if args else ((), ())
        joined = f"{name}({', '.join(texts)})"
        if name in _FUNCTIONS:
            function = _FUNCTIONS[name]
            return (lambda scope, env: function(*[t(scope, env) for t in thunks])), joined
        if name not in self.known or not self.cells[name].params:
            raise self.fail(f"{name} is not a function here")
        if len(args) != len(self.cells[name].params):
            raise self.fail(f"{name} takes {len(self.cells[name].params)} arguments")
        self.used.add(name)
        return (lambda scope, env: scope.call(name, *[t(scope, env) for t in thunks])), joined

    def search(self, args: list[ast.expr]) -> tuple[Thunk, str]:
        match args:
            case [ast.Lambda(args=ast.arguments(args=[ast.arg(arg=param)]), body=body), limit]:
                pass
            case _:
                raise self.fail("least takes a function of one number and a limit")
        self.local.add(param)
        (gain, gain_text), (bound, bound_text) = self.compile(body), self.compile(limit)
        self.local.discard(param)

        def thunk(scope: Scope, env: Env) -> float:
            return least(lambda x: gain(scope, {**env, param: x}), bound(scope, env))

        return thunk, f"least(({param}) => {gain_text}, {bound_text})"


JAVASCRIPT_PRELUDE = """\
const min = (a, b) => (a < b ? a : b);
const max = (a, b) => (a > b ? a : b);
const floor = Math.floor;
const ceil = Math.ceil;
function least(gain, limit) {
  if (!(gain(limit) > 0)) return Infinity;
  let low = 0, high = limit;
  while (high - low > 1) {
    const middle = Math.floor((low + high) / 2);
    if (gain(middle) > 0) high = middle; else low = middle;
  }
  return high;
}
"""
