"""Stubs of glibc 2.28 to link against: what they link runs on every Linux from Debian 10, Ubuntu 20.04 and RHEL 8 on.

    python3 tools/glibc.py <folder>, then LDFLAGS=-L<folder>

zig (the package ziglang) knows which symbols each glibc has and makes libraries that have these and nothing else.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "2.28"
LIBRARIES = {"m": "libm.so.6", "pthread": "libpthread.so.0", "dl": "libdl.so.2", "rt": "librt.so.1"}
# libstdc++'s headers of a newer glibc ask whether there is one thread only; "perhaps not" is always right.
COMPAT = '__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;\n'


def run(*command, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stderr[-2000:]}")
    return done.stdout


def stubs(folder: Path) -> Path:
    """The folder, with libc.so and the others as the linker looks for them; made once."""
    if (folder / "libc.so").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        cache = Path(name)
        (cache / "empty.c").touch()
        zig = ("env", f"ZIG_GLOBAL_CACHE_DIR={cache}", f"ZIG_LOCAL_CACHE_DIR={cache}", sys.executable, "-m", "ziglang")
        target = ("-target", f"x86_64-linux-gnu.{VERSION}", "-shared", "-o", "empty.so", "empty.c")
        run(*zig, "cc", *target, *(f"-l{library}" for library in LIBRARIES), cwd=cache)
        (made,) = {path.parent for path in cache.rglob("libc.so.6")}
        for path in made.glob("*.so.*"):
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "compat.c").write_text(COMPAT)
    run("cc", "-O2", "-fPIC", "-c", "compat.c", "-o", "compat.o", cwd=folder)
    run("ar", "rcs", "libcompat.a", "compat.o", cwd=folder)
    for library, file in LIBRARIES.items():
        (folder / f"lib{library}.so").write_text(f"INPUT ( {file} )\n")
    nonshared = run("cc", "-print-file-name=libc_nonshared.a", cwd=folder).strip()
    (folder / "libc.so").write_text(f"GROUP ( libc.so.6 libcompat.a {nonshared} AS_NEEDED ( libld.so.2 ) )\n")
    return folder


if __name__ == "__main__":
    stubs(Path(sys.argv[1]).absolute())
