"""python tools/families_page.py [--check]

Writes the tables of docs/families.md: what apply_packing_ops does with every family of the transformers that is
installed. --check fails where the page says something else.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent / "tests"), str(Path(__file__).parent.parent)]

import transformers  # noqa: E402
from helpers import hf_families as families  # noqa: E402

START, END = "<!-- families -->\n", "<!-- end -->"


def rewritten() -> str:
    rows = {}
    for kind, found in families.mappings().items():
        for model_type, classes in sorted(found.items()):
            model, _ = families.made(model_type, *classes)
            rows[kind, model_type] = families.row_of(model) if model is not None else families.row_of_module(classes[1])
    before, _, rest = families.PAGE.read_text().partition(START)
    return before + START + families.page_of(rows) + END + rest.partition(END)[2]


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    page = rewritten()
    if "--check" not in sys.argv:
        families.PAGE.write_text(page)
    elif page != families.PAGE.read_text():
        sys.exit("docs/families.md: expected what this transformers has, got another table: make families")
