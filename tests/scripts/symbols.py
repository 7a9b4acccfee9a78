"""Whether every shared library under a folder finds the libraries and symbols that it needs, without loading any.

A library that lacks a symbol fails at its import, on a machine with GPUs: the loader binds what it needs by name. Here
that is read from the files with readelf (binutils), so that neither a GPU nor its driver is needed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TAG = re.compile(r"\((NEEDED|SONAME)\).*\[(.+)\]")
# Num: Value Size Type Bind Vis Ndx Name, where the name may have a version: memcpy@GLIBC_2.14, cuInit@@libcuda.so.1
_SYMBOL = re.compile(
    r"^\s*\d+: [0-9a-f]+ +\S+ +\S+ +(\S+) +\S+ +(?:\[.*\] +)?(\S+) (\S+)", re.MULTILINE
)

_DRIVERS = re.compile(r"(cu|nv)[A-Z]|nvml")  # how the symbols of the driver's libraries begin


@dataclass(frozen=True)
class Library:
    """One file: the libraries that it names, the symbols that it offers and those that it must get from others.

    Symbols are names, with the version after an @ where they have one. Weak ones may be absent, and are left out of
    `wanted`.
    """

    path: str
    soname: str
    needed: Sequence[str] = ()
    offered: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Missing:
    """What a library does not find: other libraries by file name, and symbols."""

    library: str
    libraries: Sequence[str] = ()
    symbols: Sequence[str] = ()


def read(paths: Iterable[Path]) -> list[Library]:
    """The libraries among the files; what is no ELF file is left out."""
    libraries = []
    for path in paths:
        command = ["readelf", "--wide", "--dynamic", "--dyn-syms", str(path)]
        english = {**os.environ, "LC_ALL": "C"}
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=english
        )
        if done.returncode == 0 and done.stdout.strip():
            libraries.append(_parsed(path, done.stdout))
    return libraries


def _parsed(path: Path, text: str) -> Library:
    tags = [(match[1], match[2]) for match in _TAG.finditer(text)]
    offered, wanted = set(), set()
    for bind, section, name in _SYMBOL.findall(text):
        if section != "UND":
            offered |= {name.replace("@@", "@"), name.partition("@")[0]}
        elif bind == "GLOBAL":
            wanted.add(name)
    sonames = [name for tag, name in tags if tag == "SONAME"]
    needed = [name for tag, name in tags if tag == "NEEDED"]
    return Library(
        str(path), (sonames or [path.name])[0], needed, frozenset(offered), frozenset(wanted)
    )


def shared_libraries(folder: Path) -> Iterator[Path]:
    """The files under a folder that are named as shared libraries are; links to them are left out."""
    for path in sorted(folder.rglob("*.so*")):
        if re.search(r"\.so(\.\d+)*$", path.name) and path.is_file() and not path.is_symlink():
            yield path


def system_libraries() -> dict[str, Path]:
    """The libraries of the machine by file name, as its loader lists them."""
    listed = subprocess.run(
        ["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True
    ).stdout
    paths: dict[str, Path] = {}
    for name, path in re.findall(r"^\s+(\S+) \(libc6,x86-64.*\) => (\S+)$", listed, re.MULTILINE):
        paths.setdefault(name, Path(path))
    return paths


def missing(
    libraries: Sequence[Library],
    system: Mapping[str, Path],
    loaded_before: Collection[str] = (),
    absent: Collection[str] = (),
) -> list[Missing]:
    """What the libraries do not find: neither in what they name, all that this names in turn, nor in `loaded_before`.

    loaded_before: names of libraries whose symbols are there when any other is loaded, as the program's own. absent:
    names of libraries that this machine lacks and the run's has (the driver's): whoever names one may get from it every
    symbol that begins as the driver's interfaces do.
    """
    known = {library.soname: library for library in libraries}
    known |= {Path(library.path).name: library for library in libraries}
    resolver = _Resolver(known, dict(system), frozenset(absent))
    before = [part for name in loaded_before for part in resolver.closure(name).libraries.values()]
    gaps = []
    for library in libraries:
        closure = resolver.closure(library.soname, start=library)
        places = [*closure.libraries.values(), *before]
        lacking = [
            name for name in library.wanted if not any(name in place.offered for place in places)
        ]
        if closure.absent:
            lacking = [name for name in lacking if not _DRIVERS.match(name)]
        unfound = sorted(set(library.needed) & closure.unfound)
        if lacking or unfound:
            gaps.append(Missing(library.path, tuple(unfound), tuple(sorted(lacking))))
    return gaps


@dataclass
class _Closure:
    """A library with all that it names in turn."""

    libraries: dict[str, Library] = field(default_factory=dict)
    unfound: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)


class _Resolver:
    """Finds libraries by name: first among the given ones, then the machine's, which are read when they are needed."""

    def __init__(
        self, known: dict[str, Library], system: dict[str, Path], absent: frozenset[str]
    ) -> None:
        self._known, self._system, self._absent = known, system, absent

    def closure(self, name: str, start: Library | None = None) -> _Closure:
        reached, open_names = _Closure(), [name]
        if start is not None:
            reached.libraries[name] = start
            open_names = [*start.needed]
        while open_names:
            name = open_names.pop()
            if name in reached.libraries or name in reached.unfound or name in reached.absent:
                continue
            library = self._library(name)
            if library is not None:
                reached.libraries[name] = library
                open_names += library.needed
            elif name in self._absent:
                reached.absent.add(name)
            else:
                reached.unfound.add(name)
        return reached

    def _library(self, name: str) -> Library | None:
        if name not in self._known and name in self._system:
            self._known.update((name, library) for library in read([self._system[name]]))
        return self._known.get(name)
