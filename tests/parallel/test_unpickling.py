"""A checkpoint's pickled files are data: what a forged one names is neither imported nor run, and told in one line."""

from __future__ import annotations

import errno
import os
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import common
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from megarl.parallel import dist_checkpoint, unpickling
from megarl.types import UserError

FACTOR = "model.layers.0.self_attn.o_proj.lora_A.weight"
HINT = "; remove this checkpoint, or take one that nobody has changed"


class Forged:
    """Pickled as a call of a function with arguments."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


def names(module: str, name: str, protocol: int) -> bytes:
    """A pickle of the object with this name, whose module is imported nowhere here."""
    if protocol >= 4:
        strings = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
        return b"\x80\x04" + strings + b"\x93."
    return f"c{module}\n{name}\n.".encode()


def written(folder: Path) -> Path:
    """A whole checkpoint of one tensor, by torch's own writer; like Megatron's, the index has no path objects."""
    save({FACTOR: torch.arange(6.0).reshape(2, 3)}, checkpoint_id=folder, no_dist=True)
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.storage_meta.checkpoint_id = str(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


def place_at(folder: Path, **fields: Any) -> Path:
    """Change where the index of a checkpoint of one tensor says that it is."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    (place,) = index.storage_data.values()
    vars(place).update(fields)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    return folder


def refusal(folder: Path) -> str:
    """The one line in which a checkpoint is refused."""
    with pytest.raises(UserError) as caught:
        dist_checkpoint.read_factors(folder)
    assert str(caught.value).endswith(HINT) and "\n" not in str(caught.value)
    return str(caught.value)


def not_data(path: object, name: str) -> str:
    """What is said of a file that names an object of this name."""
    reason = f"it names {name}, which a checkpoint has no use for"
    return f"{path}: it cannot be loaded as data ({reason}){HINT}"


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the module `runs_x.evil`, in the working folder, writes when it is imported."""
    (tmp_path / "runs_x").mkdir()
    (tmp_path / "runs_x" / "evil.py").write_text(
        f"open({str(tmp_path / 'canary')!r}, 'w').close()\nclass Kind: ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "canary"


@pytest.mark.parametrize("protocol", [0, 4])
@pytest.mark.parametrize("name", ["Kind", "Kind.__init__"])
def test_a_module_that_an_index_names_is_not_imported(
    tmp_path: Path, canary: Path, protocol: int, name: str
) -> None:
    folder = written(tmp_path / "step-000001")
    (folder / ".metadata").write_bytes(names("runs_x.evil", name, protocol))
    assert refusal(folder) == not_data(f"{folder}/.metadata", f"runs_x.evil.{name}")
    assert not canary.exists() and "runs_x.evil" not in sys.modules


@pytest.mark.parametrize(
    "forged",
    [
        Forged(os.system, "touch ran"),
        Forged(eval, "open('ran', 'w')"),
        Forged(filesystem.FileSystem),  # of torch's own modules, but no part of an index
        Forged(OrderedDict),
        Forged(torch.load, "ran"),
        Forged(getattr, torch.serialization._get_layout, "__globals__"),
        Forged(getattr, WriteItemType, "__class__"),
        Forged(getattr, WriteItemType, 1),
        ["no", "index"],
        Metadata(state_dict_metadata=[], storage_data={}),  # type: ignore[arg-type]
        Metadata(
            state_dict_metadata={}, storage_data={0: filesystem._StorageInfo("../../secret", 0, 9)}
        ),  # type: ignore
    ],
    ids=[
        "system",
        "eval",
        "torch's class",
        "another class",
        "torch.load",
        "a function's globals",
        "an enum's class",
        "no name",
        "a list",
        "no names",
        "a file elsewhere",
    ],
)
def test_an_index_that_is_forged_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forged: object
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = written(tmp_path / "step-000001")
    (folder / ".metadata").write_bytes(pickle.dumps(forged))
    assert refusal(folder).startswith(f"{folder}/.metadata: ")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("path", ["", ".", "..", "a/b", "/etc/passwd", "a\0b", None, 3])
def test_an_index_names_files_of_its_folder_alone(tmp_path: Path, path: Any) -> None:
    folder = place_at(written(tmp_path / "step-000001"), relative_path=path)
    assert (
        refusal(folder) == f"{folder}/.metadata: names {path!r} as a file of the checkpoint{HINT}"
    )


@pytest.mark.parametrize("field", ["offset", "length"])
@pytest.mark.parametrize("value", [-1, 1.5, "1", None, True, 2**63])
def test_an_index_names_whole_parts_of_files(tmp_path: Path, field: str, value: Any) -> None:
    folder = place_at(written(tmp_path / "step-000001"), **{field: value})
    assert re.search(f"names {value!r} bytes from|bytes from {value!r} of ", refusal(folder))


@pytest.mark.parametrize(
    ("cause", "is_error"),
    [
        (ValueError("bad offset"), True),
        (TypeError("no int"), True),
        (OSError(errno.EINVAL, "no such place"), True),
        (OSError(errno.EIO, "the disk fails"), False),
        (FileNotFoundError(errno.ENOENT, "a file is missing"), False),
        (KeyError("a tensor"), False),
    ],
)
def test_what_an_unreadable_index_leads_to_is_an_error_of_the_checkpoint(
    tmp_path: Path, cause: BaseException, is_error: bool
) -> None:
    folder = written(tmp_path / "step-000001")
    with (
        pytest.raises(UserError if is_error else RuntimeError, match="cannot be loaded"),
        unpickling.reading(folder),
    ):
        raise CheckpointException("read", {0: (cause, None)})  # type: ignore[dict-item]


# BUILD: sets the attribute `evil` of what is before it
_EVIL = b"N}X\x04\x00\x00\x00evilK\x01s\x86b"


@pytest.mark.parametrize(
    ("named", "kept"),
    [
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\n", Metadata),
        (b"ctorch.distributed.checkpoint.metadata\nMetadata\nq\x000h\x00", Metadata),
        (b"ctorch.serialization\n_get_layout\n", torch.serialization._get_layout),
        (b"ctorch.distributed.checkpoint.planner\nWriteItemType\n", WriteItemType),
        (b"ctorch.distributed.checkpoint.planner\nWriteItemType\nK\x01\x85R", WriteItemType(1)),
    ],
    ids=["a class", "a class from the memo", "a function", "an enum", "an enum's member"],
)
@pytest.mark.parametrize(
    "end", [b".", b"0N.", b"0cos\nsystem\n."], ids=["its own", "dropped", "and fails"]
)
def test_an_index_changes_no_class(tmp_path: Path, named: bytes, kept: object, end: bytes) -> None:
    folder = written(tmp_path / "step-000001")
    (folder / ".metadata").write_bytes(b"\x80\x02" + named + _EVIL + end)
    assert "it cannot be loaded as data" in refusal(folder)
    assert not hasattr(kept, "evil")


@pytest.mark.parametrize("protocol", range(2, 6))
def test_an_index_is_read_as_pickle_reads_it(tmp_path: Path, protocol: int) -> None:
    """In every protocol that is in use, with all that an index may hold."""
    path, folder = tmp_path / "index", written(tmp_path / "step-000001")
    index = pickle.loads((folder / ".metadata").read_bytes())
    index.planner_data = [
        *WriteItemType,
        SavePlan([WriteItem(MetadataIndex("x"), WriteItemType.SHARD)]),
    ]
    path.write_bytes(pickle.dumps(index, protocol))
    with path.open("rb") as file:
        metadata = unpickling.read_index(file)
    assert metadata == index and type(metadata) is Metadata
    assert metadata.planner_data[0] is WriteItemType(1)
    about: Any = metadata.state_dict_metadata[FACTOR]
    assert type(about.size) is torch.Size


@pytest.mark.parametrize("module", [b"builtins", b"__builtin__"])
def test_members_of_enums_are_read_as_older_pythons_write_them(
    tmp_path: Path, module: bytes
) -> None:
    """Up to 3.11.3: as calls of `getattr`, whose module has its older name in older protocols."""
    folder = written(tmp_path / "step-000001")
    index = (folder / ".metadata").read_bytes()
    assert index.endswith(b"b.")
    member = b"ctorch.distributed.checkpoint.planner\nWriteItemType\nX\x05\x00\x00\x00SHARD\x86"
    # BUILD: sets the index's planner_data
    data = b"}X\x0c\x00\x00\x00planner_datac" + module + b"\ngetattr\n" + member + b"Rsb"
    (folder / ".metadata").write_bytes(index[:-1] + data + b".")
    with (folder / ".metadata").open("rb") as file:
        assert unpickling.read_index(file).planner_data is WriteItemType.SHARD


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x05", b"garbage", b"\x80\x04]\x94" + b"(" * 100_000]
)
def test_an_index_that_is_no_pickle_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    folder = written(tmp_path / "step-000001")
    (folder / ".metadata").write_bytes(content)
    assert "it cannot be loaded as data" in refusal(folder)


def test_a_forged_file_of_tensors_is_refused_in_one_line(tmp_path: Path, canary: Path) -> None:
    """Also where torch collects the errors of all ranks in an exception that is no Exception."""
    folder = written(tmp_path / "step-000001")
    (file,) = folder.glob("*.distcp")
    size, forged = file.stat().st_size, names("runs_x.evil", "Kind", 2)
    file.write_bytes(forged + bytes(size - len(forged)))
    assert refusal(folder) == not_data(folder, "runs_x.evil.Kind")
    assert not canary.exists()


def test_an_error_of_the_index_is_told_where_torch_hides_it(tmp_path: Path, canary: Path) -> None:
    """Where ranks read together, torch goes on without an index and fails by an assertion of its own."""
    folder = written(tmp_path / "step-000001")
    (folder / ".metadata").write_bytes(names("runs_x.evil", "Kind", 2))
    with (
        pytest.raises(UserError, match="metadata: it cannot be loaded as data"),
        unpickling.reading(folder),
    ):
        load({}, storage_reader=filesystem.FileSystemReader(folder), no_dist=True)
    assert not canary.exists()


def test_what_was_written_is_read(tmp_path: Path) -> None:
    factors = dist_checkpoint.read_factors(written(tmp_path / "step-000001"))
    assert torch.equal(factors[FACTOR], torch.arange(6.0).reshape(2, 3))


_UNSAFE = """
import sys, pathlib
from megarl.parallel import unpickling
from megatron.core.dist_checkpointing.strategies import common
try:
    with unpickling.reading(pathlib.Path("folder")):
        common.TorchCommonLoadStrategy().load_common(pathlib.Path("folder"))
except Exception as fault:
    print(type(fault).__name__, fault)
"""


@pytest.mark.slow
def test_megatrons_common_file_runs_nothing_either(tmp_path: Path, canary: Path) -> None:
    """torch.load without weights_only obeys a variable that older training scripts set."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "common.pt").write_bytes(names("runs_x.evil", "Kind", 2))
    environment = os.environ | {
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-W", "ignore", "-c", _UNSAFE]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == not_data("UserError folder", "runs_x.evil.Kind"), done.stderr
    assert not canary.exists()


def test_classes_that_megatron_calls_safe_are_not_unpickled(tmp_path: Path) -> None:
    torch.save({"path": Path("x")}, tmp_path / common.COMMON_STATE_FNAME)
    with pytest.raises(UserError, match="it names pathlib.PosixPath"), unpickling.reading(tmp_path):
        common.TorchCommonLoadStrategy().load_common(tmp_path)


def test_a_file_that_was_written_again_is_read_again(tmp_path: Path) -> None:
    unpickling.load_no_code()
    for step in (1, 2):
        torch.save({"step": step}, tmp_path / "common.pt")
        assert common.torch.load(tmp_path / "common.pt") == {"step": step}
