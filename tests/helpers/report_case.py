"""Small files for the report's tests: one example of every format, and what it counts."""

import json

CHAT = [{"role": "user", "content": "four"}, {"role": "assistant", "content": "grün"}]  # 4 and 5 bytes
RECORDS = [{"messages": CHAT}, {"prompt": "ab", "completion": "c"}, {"text": "é"}]
LENGTHS = [9, 3, 2]


def write_lines(path, *records):
    """One line per record, strings as they are."""
    path.write_text("".join(r + "\n" if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path
