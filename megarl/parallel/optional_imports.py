"""Which optional packages Megatron finds when it is imported: what it makes of them depends on their import alone.

`megarl.parallel` installs these finders when it is imported: whatever imports Megatron imports that before it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from megarl.device import DEVICE
from megarl.printable import first_line
from megarl.types import UserError

_PACKAGE = "transformer_engine"
_UNUSED = "the CPU does not use it"


class _NoTrackerInMegatron(MetaPathFinder):
    """Megatron imports wandb for its inference engine, which megarl does not use: a third of a rank's start."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        megatron = sys.modules.get("megatron.core")
        if fullname == "wandb" and getattr(megatron and megatron.__spec__, "_initializing", False):
            raise ModuleNotFoundError("not needed while Megatron is imported", name=fullname)


class TransformerEngineFinder(MetaPathFinder):
    """Imports TransformerEngine whole, or refuses it as a package that is not installed.

    Megatron tries to import it in some thirty modules, and takes an ImportError alone as a sign that it is absent.
    Libraries of another CUDA or cuDNN raise OSError or RuntimeError, which ended also a run that uses other layers; and
    `import transformer_engine` succeeds without its torch part, so that half of Megatron's modules believed in it.

    error: why it cannot be imported; "" while nobody has tried, or where it can. On the CPU it is refused untried.
    """

    def __init__(self, device: str = DEVICE) -> None:
        self.error = "" if device == "cuda" else _UNUSED

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: object = None
    ) -> ModuleSpec | None:
        if fullname == _PACKAGE:
            spec = PathFinder.find_spec(fullname, path)
        else:
            spec = None
        if spec is not None and spec.loader is not None:
            spec.loader = _WholePackageLoader(spec.loader, self)
        return spec


class _WholePackageLoader(Loader):
    """Loads TransformerEngine with its torch part; the finder keeps why that fails, so that it is tried once."""

    def __init__(self, loader: Loader, finder: TransformerEngineFinder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)  # what inspect and importlib.resources ask a loader for

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if self._finder.error:
            raise ModuleNotFoundError(self._finder.error, name=_PACKAGE)
        try:
            self._loader.exec_module(module)
            importlib.import_module(f"{_PACKAGE}.pytorch")
        except Exception as error:  # whatever the loaders of its libraries raise
            for name in [name for name in sys.modules if name.startswith(f"{_PACKAGE}.")]:
                del sys.modules[name]
            self._finder.error = first_line(error)
            raise ModuleNotFoundError(self._finder.error, name=_PACKAGE) from error


TRANSFORMER_ENGINE_FINDER = TransformerEngineFinder()


def transformer_engine_problem() -> str:
    """Why TransformerEngine cannot be imported, in the loader's own words; "" where it can. Takes seconds at first."""
    try:
        importlib.import_module(f"{_PACKAGE}.pytorch")
    except ImportError as error:
        return str(error).partition("\n")[0]
    return ""


def delta_rule_kernel() -> Callable[..., Any] | None:
    """flash-linear-attention's kernel of the gated delta rule, which is for GPUs; None where it is not installed."""
    try:
        rules = importlib.import_module("fla.ops.gated_delta_rule")
    except ImportError:
        return None
    return rules.chunk_gated_delta_rule


def layers_error(
    problem: str, *, local_layers: bool, dtype: str, share_prefixes: bool = False
) -> UserError | None:
    """The error of a recipe whose ranks have no layers on GPUs.

    problem: why TransformerEngine cannot be used there, "" where it can. local_layers, dtype, share_prefixes:
    train.local_layers, model.dtype and train.share_prefixes.
    """
    if problem and not local_layers:
        hint = "install what requirements/gpu.txt names (docs/install.md), or set it to true: Megatron's own layers, "
        hint += "which are slower"
        return UserError(
            "train.local_layers", f"TransformerEngine cannot be used ({problem})", hint
        )
    if not problem and dtype == "float32":
        problem = (
            "float32, and TransformerEngine's attention takes packed rows in 16-bit types alone"
        )
        return UserError("model.dtype", problem, "set it to bfloat16")
    if not problem and share_prefixes:
        problem = "true, but TransformerEngine's attention is not made for it yet"
        return UserError("train.share_prefixes", problem, "set it to false")
    return None


def install() -> None:
    """Put the finders before all others."""
    sys.meta_path[:0] = [_NoTrackerInMegatron(), TRANSFORMER_ENGINE_FINDER]
