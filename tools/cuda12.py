"""Puts a CUDA 12 toolkit together from package registries, on Debian: python3 tools/cuda12.py <folder>. Libraries built with
it run on drivers from 525 on; those built with CUDA 13 need driver 580 or later.

nvcc, cudafe++, cicc and fatbinary are those of Debian's nvidia-cuda-toolkit 12.4 (non-free); headers, ptxas and the static
runtime are Python packages. ptxas is 12.9's, which knows 10.0 and 12.0: it assembles their machine code from PTX of 9.0, as
a driver would. No part needs to be installed, and nothing outside the folder is written. An official toolkit 12.8 or later
needs none of this: set CUDA_HOME.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DEBIAN = ("nvidia-cuda-toolkit", "trixie")
PACKAGES = {
    "nvidia-cuda-nvcc-cu12": ("12.4.131", "12.9.86"),
    "nvidia-cuda-runtime-cu12": ("12.4.127", "12.9.79"),
    "nvidia-cuda-cccl-cu12": ("12.9.27",),
}
# Those that nvcc 12.4 compiles for; fatbinary adds images of others.
ARCHITECTURES = "50 52 53 60 61 62 70 72 75 80 86 87 89 90 90a"
PROFILE = """\
TOP = $(_HERE_)/..
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH += $(TOP)/nvvm/bin:$(_HERE_):
INCLUDES += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(TOP)/lib64"
"""
# Stands in for fatbinary, which nvcc calls. --assemble=120 adds an image for 12.0, assembled from the newest PTX given.
FATBINARY = """\
#!/bin/bash
set -e
here=$(dirname "$0")
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
others=() archs=() images=()
for argument in "$@"; do
    case $argument in
        --assemble=*) archs+=("${argument#*=}"); continue ;;
        *kind=ptx,*) ptx=${argument##*file=} ;;
    esac
    others+=("$argument")
done
for arch in "${archs[@]}"; do
    "$here/ptxas" -arch="sm_$arch" "$ptx" -o "$made/$arch.cubin"
    images+=("--image3=kind=elf,sm=$arch,file=$made/$arch.cubin")
done
"$here/fatbinary.12.4" "${images[@]}" "${others[@]}"
"""


def run(*command, cwd=None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}")
    return done.stdout


def debian_package(folder: Path) -> Path:
    """Downloads and unpacks the package from apt's mirror. apt's own lists are not touched."""
    name, suite = DEBIAN
    mirrors = [
        line.split()[0] for line in run("apt-get", "indextargets", "--format", "$(REPO_URI) $(CREATED_BY)").splitlines()
    ]
    mirror = next((uri for uri in mirrors if uri.rstrip("/").endswith("/debian")), None)
    if mirror is None:
        sys.exit(
            "tools/cuda12.py: expected a Debian whose apt knows a mirror; elsewhere set CUDA_HOME to a toolkit 12.8 or later"
        )
    for part in ("lists/partial", "cache/archives/partial"):
        (folder / part).mkdir(parents=True)
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (folder / "sources.list").write_text(f"deb [signed-by={keys}] {mirror} {suite} non-free\n")
    own = {
        "Dir::Etc::sourcelist": folder / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": folder / "lists",
        "Dir::Cache": folder / "cache",
        "Dir::State::status": "/dev/null",
        "APT::Sandbox::User": "root",
    }
    options = [f"-o{key}={value}" for key, value in own.items()]
    run("apt-get", *options, "update")
    run("apt-get", *options, "download", name, cwd=folder)
    (package,) = folder.glob("*.deb")
    run("dpkg-deb", "-x", package, folder / "debian")
    return folder / "debian" / "usr"


def python_packages(folder: Path) -> dict[tuple[str, str], Path]:
    """{(last word of its name, version): what it holds}"""
    found = {}
    for package, versions in PACKAGES.items():
        for version in versions:
            target = folder / f"{package}-{version}"
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target)
            run(*pip, f"{package}=={version}")
            kind = package.split("-")[2]
            found[kind, version[:4]] = target / "nvidia" / f"cuda_{kind}"
    return found


def assemble(home: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        debian, packages = debian_package(Path(folder)), python_packages(Path(folder))
        private = debian / "lib" / "nvidia-cuda-toolkit"
        for part in ("bin", "nvvm/bin", "lib64"):
            (home / part).mkdir(parents=True)
        for path in (private / "bin" / "nvcc", debian / "bin" / "cudafe++", debian / "bin" / "nvlink"):
            shutil.copy(path, home / "bin")
        shutil.copy(debian / "bin" / "fatbinary", home / "bin" / "fatbinary.12.4")
        shutil.copytree(private / "bin" / "crt", home / "bin" / "crt")
        shutil.copy(private / "bin" / "cicc", home / "nvvm" / "bin")
        shutil.copytree(private / "libdevice", home / "nvvm" / "libdevice")
        shutil.copy(packages["nvcc", "12.9"] / "bin" / "ptxas", home / "bin")
        for name in ("libcudart_static.a", "libcudadevrt.a"):
            shutil.copy(packages["runtime", "12.9"] / "lib" / name, home / "lib64")
        for package in (("cccl", "12.9"), ("nvcc", "12.4"), ("runtime", "12.4")):
            shutil.copytree(packages[package] / "include", home / "include", dirs_exist_ok=True)
    (home / "bin" / "nvcc.profile").write_text(PROFILE)
    (home / "bin" / "fatbinary").write_text(FATBINARY)
    (home / "bin" / "architectures").write_text(ARCHITECTURES + "\n")
    for path in [*(home / "bin").iterdir(), *(home / "nvvm" / "bin").iterdir()]:
        if path.is_file():
            path.chmod(0o755)


def cuda12(home: Path) -> Path:
    """The toolkit in ``home``, made once."""
    if not home.exists():
        print(f"packing_ops: a CUDA 12 toolkit, from packages: {home}", flush=True)
        partial = home.with_name(home.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        assemble(partial)
        partial.rename(home)
    return home


if __name__ == "__main__":
    cuda12(Path(sys.argv[1]).absolute())
