"""The CUDA toolkit: where it is, and what its nvcc knows."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

# For builds where no GPU is visible (containers, CI, the wheel): machine code for every GPU from 8.0 on. That of 8.6 runs on
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


def nvcc_says(home: Path, option: str) -> str:
    return subprocess.run([home / "bin" / "nvcc", option], capture_output=True, text=True, check=True).stdout


def cuda_version(home: Path) -> str:
    return re.search(r"release (\d+\.\d+)", nvcc_says(home, "--version"))[1]


def portable_archs(home: Path) -> str:
    """For TORCH_CUDA_ARCH_LIST: of PORTABLE_ARCHS those that nvcc knows, the newest as PTX too. 10.0 came with 12.8."""
    known = set(re.findall(r"compute_(\d+)", nvcc_says(home, "--list-gpu-arch")))
    archs = [arch for arch in PORTABLE_ARCHS if arch.replace(".", "") in known]
    if not archs:
        sys.exit(f"{home}/bin/nvcc: expected one that knows any of {', '.join(PORTABLE_ARCHS)}")
    return ";".join(archs) + "+PTX"


def with_hopper_features(archs: str) -> str:
    """TORCH_CUDA_ARCH_LIST with 9.0a for 9.0, which has Hopper's own instructions. Its PTX would serve no later GPU."""
    names = [name.strip() for name in re.split("[; ]", archs) if name.strip()]
    replaced = {"9.0": ["9.0a"], "Hopper": ["9.0a"], "9.0+PTX": ["9.0a", "9.0+PTX"], "Hopper+PTX": ["9.0a", "9.0+PTX"]}
    return ";".join(dict.fromkeys(new for name in names for new in replaced.get(name, [name])))


def visible_archs(torch) -> str:
    """Those of the GPUs that torch sees."""
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return ";".join(f"{major}.{minor}" for major, minor in sorted(found))


def nvcc_of_each_file(home: Path) -> None:
    """tools/nvcc.py in front of nvcc, or of what stands for nvcc already: each file for the GPUs that call it."""
    own = shlex.join([sys.executable, str(Path(__file__).with_name("nvcc.py"))])
    if not os.environ.get("PYTORCH_NVCC", "").startswith(own):
        nvcc = os.environ.get("PYTORCH_NVCC") or shlex.quote(str(home / "bin" / "nvcc"))
        os.environ["PYTORCH_NVCC"] = f"{own} {nvcc}"
