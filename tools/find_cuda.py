"""The CUDA toolkit: where it is, and what its nvcc knows."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

OLDEST_TOOLKIT = (12, 0)  # the first whose nvcc knows C++20
OLDEST_ARCH = (8, 0)
# Names that TORCH_CUDA_ARCH_LIST may hold, as torch reads them.
GENERATIONS = {
    "Pascal": "6.0",
    "Volta": "7.0",
    "Turing": "7.5",
    "Ampere": "8.0;8.6+PTX",
    "Ampere+Tegra": "8.7",
    "Ada": "8.9+PTX",
    "Blackwell+Tegra": "11.0",
}
GENERATIONS |= {"Blackwell": "10.0;10.3;12.0;12.1+PTX"}
# For builds where no GPU is visible (containers, CI, the wheel): machine code for every GPU from 8.0 on. That of 8.6
# runs on
# 8.9, for which nvcc makes the same instructions.
PORTABLE_ARCHS = ["8.0", "8.6", "9.0", "10.0", "12.0"]


def find_cuda_home() -> Path | None:
    """The toolkit's root: CUDA_HOME, CUDA_PATH, or what nvcc itself says (nvcc on PATH may be a wrapper)."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return Path(os.environ[name])
    if not shutil.which("nvcc"):
        return None
    dryrun = subprocess.run(["nvcc", "--dryrun", "x.cu"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", dryrun, re.M)
    return Path(top[1].strip()).resolve() if top else None


def refuse_toolkit(home: Path, got: str) -> NoReturn:
    oldest = ".".join(map(str, OLDEST_TOOLKIT))
    sys.exit(
        f"packing_ops: expected a CUDA toolkit {oldest} or later in {home}, got {got}: set CUDA_HOME to one, or "
        "FORCE_CUDA=0 to build without CUDA"
    )


def nvcc_says(home: Path, option: str) -> str:
    nvcc = home / "bin" / "nvcc"
    try:
        done = subprocess.run([nvcc, option], capture_output=True, text=True)
    except OSError as error:
        refuse_toolkit(home, f"{error.strerror} for {nvcc}")
    if done.returncode:
        refuse_toolkit(home, f"exit code {done.returncode} of {nvcc} {option}")
    return done.stdout


def cuda_version(home: Path) -> str:
    found = re.search(r"release (\d+)\.(\d+)", nvcc_says(home, "--version"))
    if found is None:
        refuse_toolkit(home, "an nvcc that tells no version")
    if tuple(map(int, found.groups())) < OLDEST_TOOLKIT:
        refuse_toolkit(home, ".".join(found.groups()))
    return ".".join(found.groups())


def known_archs(home: Path) -> list[str]:
    """Those of its nvcc, oldest first: ["8.0", "8.6"]"""
    return [f"{arch[:-1]}.{arch[-1]}" for arch in re.findall(r"compute_(\d+)", nvcc_says(home, "--list-gpu-arch"))]


def portable_archs(home: Path) -> str:
    """For TORCH_CUDA_ARCH_LIST: of PORTABLE_ARCHS those that nvcc knows, the newest as PTX too. 10.0 came with 12.8."""
    known = known_archs(home)
    archs = [arch for arch in PORTABLE_ARCHS if arch in known]
    if not archs:
        sys.exit(f"packing_ops: {home}/bin/nvcc: expected one that knows any of {', '.join(PORTABLE_ARCHS)}")
    return ";".join(archs) + "+PTX"


def with_hopper_features(archs: str) -> str:
    """TORCH_CUDA_ARCH_LIST with 9.0a for 9.0, which has Hopper's own instructions. Its PTX would serve no later GPU."""
    names = re.split("[;, ]+", archs)
    replaced = {"9.0": ["9.0a"], "Hopper": ["9.0a"], "9.0+PTX": ["9.0a", "9.0+PTX"], "Hopper+PTX": ["9.0a", "9.0+PTX"]}
    return ";".join(dict.fromkeys(new for name in names for new in replaced.get(name, [name])))


def visible_archs(torch) -> str:
    """Those of the GPUs that torch sees; none where the driver is too old for this torch."""
    try:
        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    except RuntimeError as error:
        print(
            f"packing_ops: torch does not start CUDA, so GPUs are not asked: {str(error).splitlines()[0]}", flush=True
        )
        return ""
    return ";".join(f"{major}.{minor}" for major, minor in sorted(found))


def checked_archs(archs: str, given_by: str, home: Path) -> str:
    """Without those that are too old for the kernels; an error where none is left, or nvcc does not know one."""
    names = [part for arch in re.split("[;, ]+", archs) for part in GENERATIONS.get(arch, arch).split(";") if part]
    numbers = {}
    for arch in names:
        found = re.fullmatch(r"(\d+)\.(\d)[af]?(?:\+PTX)?", "9.0" if arch.startswith("Hopper") else arch)
        if found is None:
            sys.exit(f'packing_ops: {given_by}: expected numbers such as "8.0;9.0;12.0+PTX", got {archs!r}')
        numbers[arch] = tuple(map(int, found.groups()))
    new_enough = [arch for arch in names if numbers[arch] >= OLDEST_ARCH]
    if not new_enough:
        told = "set TORCH_CUDA_ARCH_LIST, or FORCE_CUDA=0 to build without CUDA"
        sys.exit(f"packing_ops: {given_by}: expected compute capability 8.0 or later, got {archs!r}: {told}")
    if left_out := [arch for arch in names if arch not in new_enough]:
        print(f"packing_ops: not built for {', '.join(left_out)}: kernels need 8.0 or later", flush=True)
    known = known_archs(home)
    unknown = [arch for arch in new_enough if known and "{}.{}".format(*numbers[arch]) not in known]
    if unknown:
        older = [arch for arch in known if tuple(map(int, arch.split("."))) < numbers[unknown[0]]]
        told = f"set CUDA_HOME to a newer toolkit, or TORCH_CUDA_ARCH_LIST={(older or known)[-1]}+PTX"
        sys.exit(f"packing_ops: {given_by}: {home}/bin/nvcc does not know {', '.join(unknown)}: {told}")
    return with_hopper_features(";".join(new_enough))


def archs_to_build(torch, home: Path) -> str:
    """TORCH_CUDA_ARCH_LIST, the visible GPUs, or a portable list where none is visible."""
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    if asked not in ("", "native"):
        return checked_archs(asked, "TORCH_CUDA_ARCH_LIST", home)
    if visible := visible_archs(torch):
        return checked_archs(visible, "the GPUs of this machine", home)
    return with_hopper_features(portable_archs(home))


def nvcc_of_each_file(home: Path) -> None:
    """tools/nvcc.py in front of nvcc, or of what stands for nvcc already: each file for the GPUs that call it."""
    own = shlex.join([sys.executable, str(Path(__file__).with_name("nvcc.py"))])
    if not os.environ.get("PYTORCH_NVCC", "").startswith(own):
        nvcc = os.environ.get("PYTORCH_NVCC") or shlex.quote(str(home / "bin" / "nvcc"))
        os.environ["PYTORCH_NVCC"] = f"{own} {nvcc}"
