"""Groups sources that include torch into a few compilation units, and orders what is compiled."""

from pathlib import Path

UNITS = 5  # each compiles no longer than the slowest kernel, so that an edit stays cheap


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


def units(sources: list[str], root: Path, folder: Path) -> list[str]:
    """``sources``, paths in ``root``, with the files that include torch replaced by a few in ``folder`` that #include
    them: torch's headers take longer to compile than what such a file holds.

    Not beside CUDA kernels: there it would save little, and each file shows that it includes what it needs.
    """
    if any(source.endswith(".cu") for source in sources):
        return sources
    together = sorted(filter(includes_torch, sources))
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for i, part in enumerate(parts_of(together, [(root / source).stat().st_size for source in together], UNITS)):
        unit = folder / f"unit_{i + 1}.cpp"
        text = "".join(f'#include "{Path(source).relative_to("csrc")}"\n' for source in part)
        if not unit.exists() or unit.read_text() != text:  # one that stays is not compiled again
            unit.write_text(text)
        made.append(str(unit.relative_to(root) if unit.is_relative_to(root) else unit))
    return made + [source for source in sources if source not in together]


def longest_first(sources: list[str], root: Path) -> list[str]:
    """Slow files first: a slow one at the end would keep the other cores idle."""

    def rank(source: str) -> tuple:
        text = (root / source).read_text()
        unit = text.count(".cpp") > 1  # made by units(): its text is short, what it includes is not
        return source.endswith(".cu"), "PACKING_OPS_MULTIVERSION" in text, unit, len(text)

    return sorted(sources, key=rank, reverse=True)
