"""The generated parts of docs/adopt/*.md: the patch, its line counts, and the results in adoption.json.

python tests/adoption/pages.py  # writes them again
"""

import hashlib
import json
import re
from pathlib import Path

import patches
from projects import PROJECTS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "adopt"
RESULTS = ROOT / "benchmarks" / "results" / "adoption.json"
MERGES = RESULTS.with_name("adoption_merges.json")

FIXES = {
    "pydantic": "typing.TypedDict is that of typing_extensions, which pydantic requires before Python 3.12",
    "tokenizer": "AutoTokenizer, which would download one, numbers words as they come",
}


def patch_of(name: str) -> str:
    return (DOCS / f"{name}.patch").read_text()


def digest(patch: str) -> str:
    """What adoption.json says of the patch that was tested."""
    return hashlib.sha1(patch.encode()).hexdigest()[:12]


def sizes(texts: list[str]) -> str:
    rows = ["| file | lines deleted | lines added |", "| --- | --- | --- |"]
    found = [file for text in texts for file in patches.files(text)]
    rows += [f"| {file['path']} | {file['deleted']} | {file['added']} |" for file in found]
    total = [sum(file[key] for file in found) for key in ("deleted", "added")]
    return "\n".join([*rows, f"| together | {total[0]} | {total[1]} |"])


def outcome(name: str, results: dict) -> str:
    result = results.get(name, {})
    project = PROJECTS[name]
    commit = f"[{project.commit[:12]}](https://github.com/{project.repository}/tree/{project.commit})"
    if "passed" not in result:
        return f"Not run yet against {commit}: {result.get('not_run', 'no result')}."
    lines = [
        f"{project.repository} at {commit}, packing_ops at {result['packing_ops'][:12]}, {result['date']}, Python "
        f"{result['python']} on a CPU: "
    ]
    if project.tests:
        counts = f"**{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped**"
        lines[0] += f"{counts}, in {', '.join(result['tests'])}."
    else:
        lines[0] += "there are no unit tests at that commit; the patch applies and what it touches compiles."
    if result["checkout"] != project.commit:
        lines.append(
            f"The checkout was at {result['checkout'][:12]}, where the files that the patch touches are the same."
        )
    if result.get("versions"):
        lines.append(f"With {', '.join(f'{name} {version}' for name, version in result['versions'].items())}.")
    for other, at in result["beside"].items():
        lines.append(f"With {other} at {at[:12]}.")
    if result["stand_ins"]:
        lines.append(
            f"Packages that were not installed, replaced by stand-ins (tests/adoption/stand_ins.py): {', '.join(result['stand_ins'])}."
        )
    for fix in project.fixes:
        lines.append(f"Changed so that it runs: {FIXES[fix]}.")
    if (off := result.get("without_flag")) and project.tests:
        lines.append(
            f"That is with {_flag(project)}. Without it: **{off['passed']} passed, {off['failed']} failed, "
            f"{off['skipped']} skipped**."
        )
    if "losses" in result:
        lines += ["", f"Losses of a tiny model's first steps on a CPU (tests/adoption/{project.training}):", ""]
        steps = max(len(each) for ways in result["losses"].values() for each in ways.values())
        lines += [
            f"| run | | {' | '.join(f'step {1 + step}' for step in range(steps))} |",
            "| --- " * (2 + steps) + "|",
        ]
        for name, ways in result["losses"].items():
            lines += [f"| {name} | {way} | {' | '.join(f'{x:.5f}' for x in each)} |" for way, each in ways.items()]
    if result["failures"]:
        lines += ["", "| test that fails | why |", "| --- | --- |"]
        lines += [f"| {f['test'].split('/')[-1]} | {_cell(f)} |" for f in result["failures"]]
    return "\n".join(lines)


def _flag(project) -> str:
    return " ".join(f"`{name}={value}`" for name, value in project.flag.items())


def _cell(failure: dict) -> str:
    text = failure["why"] if failure["why"] != "open" else f"open: {failure['message']}"
    return text.replace("|", "\\|")


def merges(tried: dict) -> str:
    """The commits that merge.py tried."""
    rows = [
        "| project | commit | of | hunks that merge | that conflict | its tests, with the flag |",
        "| --- " * 6 + "|",
    ]
    for name, commits in tried.items():
        for each in commits:
            at = f"[{each['commit'][:12]}](https://github.com/{PROJECTS[name].repository}/tree/{each['commit']})"
            lines: dict[str, list[str]] = {}
            for hunk in each["conflicts"]:
                path, _, line = hunk.rpartition(":")
                lines.setdefault(path, []).append(line)
            conflicts = (
                "; ".join(f"`{path.split('/')[-1]}` {', '.join(found)}" for path, found in lines.items()) or "none"
            )
            fit = f"{each['hunks'] - len(each['conflicts'])} of {each['hunks']}"
            rows.append(f"| {name} | {at} | {each['committed']} | {fit} | {conflicts} | {of_tests(each)} |")
    return "\n".join(rows)


def of_tests(tried: dict) -> str:
    if "passed" not in tried:
        return "not run"
    parts = [f"{tried['passed']} passed"]
    if old := tried["failed"] - tried["new"] - tried["kept"]:
        parts.append(f"{old} fail without the patches too")
    if tried["kept"]:
        parts.append(f"{tried['kept']} fail by intent")
    return ", ".join([*parts, *([f"{tried['new']} fail"] if tried["new"] else [])])


def page(name: str, text: str, results: dict) -> str:
    texts = {patch: patch_of(patch) for patch in PROJECTS[name].patches}
    parts = {"sizes": sizes(list(texts.values())), "outcome": outcome(name, results)}
    parts |= {f"patch {patch}": f"```diff\n{text}```" for patch, text in texts.items()}
    return filled(text, parts)


def filled(text: str, parts: dict[str, str]) -> str:
    for part, made in parts.items():
        text = re.sub(
            rf"(<!-- {part} -->\n).*?(<!-- end of {part} -->)",
            lambda m, made=made: m[1] + made + "\n" + m[2],
            text,
            flags=re.S,
        )
    return text


def write() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in PROJECTS:
        path = DOCS / f"{name}.md"
        if path.exists():
            path.write_text(page(name, path.read_text(), results))
    path, tried = DOCS / "README.md", json.loads(MERGES.read_text()) if MERGES.exists() else {}
    path.write_text(filled(path.read_text(), {"merges": merges(tried)}))


if __name__ == "__main__":
    write()
