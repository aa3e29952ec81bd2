"""Groups sources with the same long headers into a few compilation units, and orders what is compiled."""

from itertools import groupby
from pathlib import Path

from tools.nvcc import callers

UNITS = 5  # each compiles no longer than the slowest kernel, so that an edit stays cheap
INSTANCES = 4  # of attention in a unit, for the same reason


def includes_torch(source: str) -> bool:
    """Kernels do not, by csrc/README.md."""
    path = Path(source)
    return path.stem.endswith("_bind") or path.parts[:-1] in {("csrc",), ("csrc", "host")}


def parts_of(files: list[str], sizes: list[int], count: int) -> list[list[str]]:
    """Splits ``files`` into ``count`` runs of about the same total size."""
    parts, before, total = [[] for _ in range(count)], 0, sum(sizes)
    for file, size in zip(files, sizes, strict=True):
        parts[(before + size // 2) * count // total].append(file)
        before += size
    return [part for part in parts if part]


def is_shared_instance(source: str) -> bool:
    """Instances for one architecture (archs.py) stay separate: ptxas's report names each."""
    return Path(source).parts[-3:-1] == ("sm80", "instances")


def has_long_headers(source: str) -> bool:
    """What attention's kernels share and what all kernels do: their headers take most of the time."""
    return source.endswith(".cu") and Path(source).parts[1:-1] in {("core",), ("ops", "attention", "cuda")}


def unit_of(part: list[str], unit: Path, root: Path) -> str:
    text = "".join(f'#include "{Path(source).relative_to("csrc")}"\n' for source in part)
    unit.parent.mkdir(parents=True, exist_ok=True)
    if not unit.exists() or unit.read_text() != text:  # one that stays is not compiled again
        unit.write_text(text)
    return str(unit.relative_to(root) if unit.is_relative_to(root) else unit)


def units(sources: list[str], root: Path, folder: Path) -> list[str]:
    """``sources``, paths in ``root``, with those that include torch, the sm80 instances of attention and what kernels
    share replaced by a few in ``folder`` that #include them: the headers take longer to compile than what such a file
    holds.

    A unit's instances have the same callers. It has the name of the first, by which tools/nvcc.py finds the callers.
    """
    together = sorted(filter(includes_torch, sources))
    parts = parts_of(together, [(root / source).stat().st_size for source in together], UNITS)
    made = [unit_of(part, folder / f"unit_{i + 1}.cpp", root) for i, part in enumerate(parts)]
    instances = sorted(filter(is_shared_instance, sources), key=lambda source: (callers(source), source))
    for _, same in groupby(instances, callers):
        files = list(same)
        for part in parts_of(files, [(root / file).stat().st_size for file in files], -(-len(files) // INSTANCES)):
            made.append(unit_of(part, folder / "sm80" / "instances" / Path(part[0]).name, root))
    shared = sorted(filter(has_long_headers, sources))
    made += [unit_of(shared, folder / "shared.cu", root)] if shared else []
    return made + [source for source in sources if source not in {*together, *instances, *shared}]


def longest_first(sources: list[str], root: Path) -> list[str]:
    """Slow files first: a slow one at the end would keep the other cores idle."""

    def rank(source: str) -> tuple:
        text = (root / source).read_text()
        unit = text.count('.cpp"') + text.count('.cu"') > 1  # made by units(): its text is short, its includes are not
        return source.endswith(".cu"), "PACKING_OPS_MULTIVERSION" in text, unit, len(text)

    return sorted(sources, key=rank, reverse=True)
