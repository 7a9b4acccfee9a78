"""Reading a checkpoint's pickled files as data: what they name is looked up in a table, and nothing is imported.

A checkpoint's index (`.metadata`) is a pickle, which torch.distributed.checkpoint reads with `pickle.load`; Megatron
reads `common.pt` with the default of `torch.load`, which an environment variable makes unsafe. Python's unpickler
imports a module that a pickle names before anything can look at the object: a check of the object comes too late.
"""

from __future__ import annotations

import errno
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import EnumType
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import IO, Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import common
from torch.distributed.checkpoint import default_planner, filesystem, planner
from torch.distributed.checkpoint import metadata as index_types
from torch.distributed.checkpoint.api import CheckpointException
from typing_extensions import TypeIs

from megarl.printable import first_line
from megarl.types import UserError

_HINT = "remove this checkpoint, or take one that nobody has changed"
# what the writers of torch and Megatron pickle into an index, besides numbers, text and containers
_UNPICKLED = (
    index_types.Metadata,
    index_types.MetadataIndex,
    index_types.StorageMeta,
    index_types.TensorStorageMetadata,
    index_types.ChunkStorageMetadata,
    index_types.BytesStorageMetadata,
    index_types.TensorProperties,
    index_types._MEM_FORMAT_ENCODING,
    filesystem._StorageInfo,
    filesystem._StoragePrefix,
    planner.SavePlan,
    planner.WriteItem,
    planner.WriteItemType,
    planner.TensorWriteData,
    planner.BytesIOWriteData,
    torch.Size,
    torch.serialization._get_layout,
)
# Of the enums: a pickle cannot make them anew, and gets what all others get.
_MEMBERS = [member for kind in _UNPICKLED if isinstance(kind, EnumType) for member in kind]
_MOST_BYTES = 2**63  # of a file


class _Sealed(type):
    """The class of stand-ins, which make the objects of a class, or call a function, and cannot be changed.

    A pickle may set attributes of everything that it has named: of a class itself, it would be for the whole process.
    """

    _make: Callable[..., Any]

    def __call__(cls, *arguments: Any) -> Any:
        return cls._make(*arguments)

    def __setattr__(cls, name: str, value: object) -> None:
        raise pickle.UnpicklingError(f"it sets {name!r:.80} of {cls.__name__}")


def _stand_in(known: Any) -> _Sealed:
    """For a class or a function. Pickles call it, or its `__new__`."""
    return _Sealed(
        known.__name__,
        (),
        {"__new__": lambda _, *arguments: known.__new__(known, *arguments), "_make": known},
    )


def _enum_member(kind: Any, name: Any) -> Any:
    """A member of a known enum. Python up to 3.11.3, as Debian 12 has it, pickles members as calls of `getattr`."""
    known = kind._make if type(kind) is _Sealed else None
    if not isinstance(known, EnumType) or name not in known.__members__:
        raise pickle.UnpicklingError(_named("builtins.getattr"))
    return known[name]


def _by_name() -> dict[tuple[str, str], Any]:
    """(module, name) as a pickle has them -> what it gets for them."""
    named = {(known.__module__, known.__name__): _stand_in(known) for known in _UNPICKLED}
    for module in ("builtins", "__builtin__"):  # the latter of protocols before 3
        named[module, "getattr"] = _stand_in(_enum_member)
    return named | {
        ("torch", name): dtype
        for name, dtype in vars(torch).items()
        if isinstance(dtype, torch.dtype)
    }


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles only the types of a checkpoint's index; the base class would import what a forged index names."""

    _known: Mapping[tuple[str, str], Any] = _by_name()

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._known[module, name]
        except KeyError:
            raise pickle.UnpicklingError(_named(f"{module}.{name}")) from None


def read_index(file: IO[bytes]) -> index_types.Metadata:
    """The index in an open file, whose tensors lie in files beside it. Raises UserError for a forged or damaged one."""
    try:
        with _members_unchanged():
            index = _IndexUnpickler(file).load()
    except Exception as error:  # what a forged pickle raises is its author's choice
        raise _unreadable(Path(file.name), error) from None
    if (
        not isinstance(index, index_types.Metadata)
        or not isinstance(index.state_dict_metadata, dict)
        or not isinstance(index.storage_data, dict)
    ):
        raise UserError(file.name, "is not a checkpoint's index", _HINT)
    for place in index.storage_data.values():
        if isinstance(place, filesystem._StorageInfo):
            at = vars(place)
        else:
            at = {}
        path, offset, length = (at.get(name) for name in ("relative_path", "offset", "length"))
        if not isinstance(path, str) or path in ("", ".", "..") or "/" in path or "\0" in path:
            raise UserError(file.name, f"names {path!r:.80} as a file of the checkpoint", _HINT)
        if not _is_count(offset) or not _is_count(length) or offset + length >= _MOST_BYTES:
            raise UserError(
                file.name, f"names {length!r:.80} bytes from {offset!r:.80} of {path:.80}", _HINT
            )
    return index


def _is_count(value: object) -> TypeIs[int]:
    return type(value) is int and value >= 0


@contextmanager
def _members_unchanged() -> Iterator[None]:
    """Undo, and refuse, what a pickle sets of an enum's members, which it cannot make anew."""
    before = [dict(vars(member)) for member in _MEMBERS]
    try:
        yield
    finally:
        changed = [
            (member, its)
            for member, its in zip(_MEMBERS, before, strict=True)
            if vars(member) != its
        ]
        for member, its in changed:
            vars(member).clear()
            vars(member).update(its)
    if changed:
        raise pickle.UnpicklingError(f"it sets attributes of {changed[0][0]}")


def _load_weights(*arguments: Any, **options: Any) -> Any:
    """torch.load, whatever its caller asks for, without code."""
    options["weights_only"] = True
    return torch.load(*arguments, **options)


def load_no_code() -> None:
    """Keep torch and Megatron from unpickling code in this process: in an index, and in files of tensors and objects.

    Megatron adds classes of its own to those that torch.load accepts with weights_only; no checkpoint of ours has one.
    """
    filesystem.pickle = SimpleNamespace(dump=pickle.dump, load=read_index)  # type: ignore
    torch.serialization.clear_safe_globals()
    namespace = ModuleType("torch")
    namespace.__dict__.update(torch.__dict__)
    namespace.__dict__["load"] = _load_weights
    default_planner.torch = namespace  # type: ignore[assignment]
    common.torch = namespace  # type: ignore[assignment]


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Read a checkpoint's files inside the block without running code of theirs.

    Raises UserError where a file is not what `save` writes, also for those of another rank's failures.
    """
    load_no_code()
    try:
        yield
    except CheckpointException as error:  # it is no Exception, and has those of all ranks
        with (folder / ".metadata").open("rb") as file:
            # torch puts an assertion of its own in the place of an error in the index
            read_index(file)
        causes = [cause for cause, _ in error.failures.values()]
        raise next(
            (cause for cause in causes if isinstance(cause, UserError)), _failed(folder, causes[0])
        ) from error
    except (pickle.UnpicklingError, EOFError, CheckpointingException) as error:
        raise _unreadable(folder, error) from error


def _failed(folder: Path, cause: BaseException) -> Exception:
    is_disk = isinstance(cause, OSError) and cause.errno in (errno.EIO, errno.ENOENT)
    if (
        isinstance(cause, pickle.UnpicklingError | EOFError | ValueError | TypeError | OSError)
        and not is_disk
    ):
        return _unreadable(folder, cause)
    return RuntimeError(f"{folder} cannot be loaded: {type(cause).__name__}: {first_line(cause)}")


def _unreadable(path: Path, error: BaseException) -> UserError:
    # on a later line of torch's text
    refused = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
    if refused:
        reason = _named(refused[1])
    else:
        reason = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, pickle.UnpicklingError) and not refused:
        reason = first_line(error)
    return UserError(str(path), f"it cannot be loaded as data ({reason})", _HINT)


def _named(name: str) -> str:
    return f"it names {name}, which a checkpoint has no use for"
