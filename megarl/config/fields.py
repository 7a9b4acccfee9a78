"""The types of the recipe's values, and what every branch of it is.

Each number has bounds, which come from float32, NumPy's seeds, file names or clocks: no run can use values beyond.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)
from pydantic_core import CoreSchema

_LONGEST_NAME = 255
_LONGEST_PATH = 4095  # bytes: Linux's NAME_MAX and PATH_MAX
_DAY_S = 86_400.0
_LEAST_START_S = 5
_SERVER = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")


def _path(text: str) -> str:
    """A path that the operating system can be asked for. Raises ValueError with what to write instead."""
    if "\0" in text:
        raise ValueError("write a path without a NUL character")
    if len(text.encode()) > _LONGEST_PATH or any(
        len(name.encode()) > _LONGEST_NAME for name in text.split("/")
    ):
        raise ValueError(
            f"write at most {_LONGEST_NAME} bytes between slashes, and {_LONGEST_PATH} in all"
        )
    return text


def _start(seconds: float) -> float:
    if seconds < _LEAST_START_S:
        raise ValueError(
            f"write {_LEAST_START_S} or more: no engine and no training rank starts within less"
        )
    return seconds


def _report_after(seconds: float) -> float:
    if seconds and seconds < _LEAST_START_S:
        raise ValueError(f"write 0 (never), or {_LEAST_START_S} or more")
    return seconds


def _temperature(value: float) -> float:
    if value and not 0.01 <= value <= 100:
        raise ValueError("write 0 (greedy), or a number from 0.01 to 100")
    return value


def _server(text: str) -> str:
    """The host and the port of a server. Raises ValueError with what to write instead."""
    match = _SERVER.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65_535:
        raise ValueError("write host:port, as 10.0.0.7:30000")
    return text


def _ranks_or_auto(value: object, validate: ValidatorFunctionWrapHandler) -> Any:
    try:
        return validate(value)
    except ValidationError:
        raise ValueError("write auto, or a whole number from 1 to 65536") from None


Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
ParallelSize = Annotated[int, Field(ge=1, le=65_536)]
ContextSize = Annotated[ParallelSize | Literal["auto"], WrapValidator(_ranks_or_auto)]
Slot = Annotated[int, Field(ge=0, le=65_536)]
# NumPy's are below 2**32, and engines and ranks add their numbers
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]
SampleCount = Annotated[int, Field(ge=1, le=65_536)]  # of one prompt
LoraRank = Annotated[int, Field(ge=1, le=4096)]
Bytes = Annotated[int, Field(ge=1, le=2**60)]
Text = Annotated[str, Field(min_length=1)]
FilePath = Annotated[
    str, Field(min_length=1, json_schema_extra={"format": "path"}), AfterValidator(_path)
]
FolderName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
ServerAddress = Annotated[
    str, AfterValidator(_server), WithJsonSchema({"type": "string", "pattern": "^.+:[0-9]{1,5}$"})
]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
NonNegative = Annotated[float, Field(ge=0, le=1e6)]
Positive = Annotated[float, Field(ge=1e-9, le=1e9)]
Speed = Annotated[float, Field(ge=1, le=1e21)]  # bytes or operations a second
Weight = Annotated[float, Field(ge=-1e6, le=1e6)]
Share = Annotated[float, Field(ge=0, le=1)]
LearningRate = Annotated[float, Field(ge=1e-15, le=10)]
Temperature = Annotated[  # 0: greedy
    float,
    Field(ge=0),
    AfterValidator(_temperature),
    WithJsonSchema({"anyOf": [{"const": 0}, {"type": "number", "minimum": 0.01, "maximum": 100}]}),
]
SamplingTemperature = Annotated[float, Field(ge=0.01, le=100)]
TopP = Annotated[float, Field(ge=1e-6, le=1)]
Seconds = Annotated[float, Field(ge=0.01, le=7 * _DAY_S)]
RunSeconds = Annotated[
    float,
    Field(gt=0, le=7 * _DAY_S),
    AfterValidator(_start),
    WithJsonSchema({"type": "number", "minimum": _LEAST_START_S, "maximum": 7 * _DAY_S}),
]
ReportSeconds = Annotated[  # 0: never
    float,
    Field(ge=0, le=7 * _DAY_S),
    AfterValidator(_report_after),
    WithJsonSchema(
        {
            "anyOf": [
                {"const": 0},
                {"type": "number", "minimum": _LEAST_START_S, "maximum": 7 * _DAY_S},
            ]
        }
    ),
]


def attribute_docstrings(kind: type) -> Mapping[str, str]:
    """The strings below the annotated names of a class, by name.

    Empty where the source is not installed.
    """
    return _docstrings_of_module(kind.__module__).get(kind.__name__, {})


@cache
def _docstrings_of_module(name: str) -> dict[str, dict[str, str]]:
    """The same of every class of a module, by the class's name."""
    try:
        source = inspect.getsource(sys.modules[name])
    except (KeyError, OSError, TypeError):
        return {}
    return {
        node.name: _strings_below(node)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _strings_below(definition: ast.ClassDef) -> dict[str, str]:
    return {
        statement.target.id: inspect.cleandoc(below.value.value)
        for statement, below in pairwise(definition.body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(below.value.value, str)
    }


class Branch(BaseModel):
    """One branch of the recipe: frozen, exact types, no key that is not declared.

    The string below a field is the key's meaning.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def meanings(cls) -> dict[str, str]:
        """The meanings of the branch's keys, which are read from the source when they are asked for.

        Pydantic would read them in each process that imports the recipe (use_attribute_docstrings).
        """
        found: dict[str, str] = {}
        for kind in reversed(cls.mro()):
            if issubclass(kind, Branch):
                found |= attribute_docstrings(kind)
        return found

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        reference = handler(core_schema)
        properties = handler.resolve_ref_schema(reference)["properties"]
        meanings = cls.meanings()
        for name in properties.keys() & meanings.keys():
            properties[name]["description"] = meanings[name]
        return reference
