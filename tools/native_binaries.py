"""Build the native runtime's libraries that opforge ships, one for each version of torch and each architecture.

    python tools/native_binaries.py [--machine x86_64] TORCH…

TORCH is a wheel of torch, or a folder with torch/include such as site-packages. Only its headers are read, so wheels
for another architecture will do. The libraries go where opforge looks for them and where its wheel takes them from.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import tempfile
import zipfile
from pathlib import Path

from opforge.runtime.native import building, torch_layout

SHIM = Path(__file__).with_name("manylinux.h")
LIMITS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8,)}
"""The newest versions of symbols in the system libraries of manylinux_2_28, for which torch's wheels are."""
SHOW_LAYOUT = """
#include "runtime.cpp"
template <int64_t...> struct Layout;
template <size_t... indices> void show(std::index_sequence<indices...>) { Layout<kLayout[indices]...>::show(); }
template void show(std::make_index_sequence<std::size(kLayout)>);
"""


def main() -> None:
    """Build a library for each torch that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torches", nargs="+", metavar="TORCH", type=Path)
    parser.add_argument("--machine", default=platform.machine(), choices=["aarch64", "x86_64"])
    options = parser.parse_args()
    own = os.environ.get("CXX") or "g++"
    compiler = shlex.split(own) if options.machine == platform.machine() else [f"{options.machine}-linux-gnu-g++"]
    building.PREBUILT.mkdir(exist_ok=True)
    names = {building.prebuilt_name(m, a) for m in torch_layout.KNOWN_LAYOUTS for a in ("aarch64", "x86_64")}
    for path in building.PREBUILT.iterdir():
        if path.name not in names:  # of other sources
            path.unlink()
    for torch in options.torches:
        with tempfile.TemporaryDirectory() as work:
            build(compiler, options.machine, headers(torch, Path(work)), Path(work))


def headers(torch: Path, work: Path) -> Path:
    """Return the folder of torch's headers."""
    if torch.is_dir():
        return torch / "torch" / "include"
    with zipfile.ZipFile(torch) as wheel:
        wheel.extractall(work, [name for name in wheel.namelist() if name.startswith("torch/include/")])
    return work / "torch" / "include"


def build(compiler: list[str], machine: str, include: Path, work: Path) -> None:
    """Build the library for one torch; stop if torch's layout or the library's needs are not as they should be."""
    text = (include / "torch" / "headeronly" / "version.h").read_text(encoding="utf-8")
    major, minor = (re.findall(rf"define TORCH_VERSION_{part} (\d+)", text)[0] for part in ("MAJOR", "MINOR"))
    version = f"{major}.{minor}"
    command = [*compiler, *building.FLAGS, "-D_GLIBCXX_USE_CXX11_ABI=1", "-isystem", str(include)]
    layout = layout_of(command, work)
    if torch_layout.KNOWN_LAYOUTS.get(version) != layout:
        raise SystemExit(f'torch {version} has another layout than torch_layout.py says: "{version}": {layout},')
    for name in ("torch_cpu", "c10"):  # libraries without contents: the names are all that is linked
        stub = ["-shared", "-x", "c++", "/dev/null", f"-Wl,-soname,lib{name}.so", "-o", str(work / f"lib{name}.so")]
        subprocess.run([*compiler, *stub], check=True)
    library = work / building.prebuilt_name(version, machine)
    links = ["-s", "-Wl,--no-as-needed", f"-L{work}", "-ltorch_cpu", "-lc10"]
    source = str(building.SOURCES / "runtime.cpp")
    subprocess.run([*command, "-include", str(SHIM), source, "-o", str(library), *links], check=True)
    needs = check_needs(library)
    contents = library.read_bytes()
    (building.PREBUILT / library.name).write_bytes(contents)
    print(f"{building.PREBUILT / library.name}  {len(contents) / 1000:.0f} kB, needs {needs}")


def layout_of(command: list[str], work: Path) -> tuple[int, ...]:
    """Return torch's layout. The compiler names it in an error: programs for another machine cannot be run."""
    source = work / "layout.cpp"
    source.write_text(SHOW_LAYOUT, encoding="utf-8")
    told = subprocess.run(
        [*command, "-fsyntax-only", f"-I{building.SOURCES}", str(source)], capture_output=True, text=True, check=False
    ).stderr
    numbers = re.search(r"Layout<([\d, ]+)>", told)
    if numbers is None:
        raise SystemExit(f"the compiler failed:\n{told[:2000]}")
    return tuple(int(number) for number in numbers[1].split(","))


def check_needs(library: Path) -> str:
    """Return the newest versions of symbols that a library needs; stop if manylinux_2_28 has no such version."""
    read = ["readelf", "--version-info", "--wide", str(library)]
    text = subprocess.run(read, capture_output=True, text=True, check=True).stdout
    newest: dict[str, tuple[int, ...]] = {}
    for name, number in re.findall(r"Name: ([A-Z]+)_([\d.]+)", text):
        newest[name] = max(newest.get(name, ()), tuple(int(part) for part in number.split(".")))
    for name, number in newest.items():
        if name not in LIMITS or number > LIMITS[name]:
            raise SystemExit(f"{library.name} needs {name} {number}; allowed: {LIMITS}. Extend {SHIM}")
    return ", ".join(f"{name} {'.'.join(map(str, number))}" for name, number in sorted(newest.items()))


if __name__ == "__main__":
    main()
