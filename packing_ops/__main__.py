"""python -m packing_ops, or packing-ops, report | invariance | info: arguments and exit codes; packing_ops/report does
the work.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from packing_ops._runtime.library import NOT_LOADED, VERSION
from packing_ops.invariance import table as _invariance_table
from packing_ops.report import make_report, save_json
from packing_ops.report.info import describe_environment
from packing_ops.report.statistics import OVERLONG
from packing_ops.report.tables import printable, show_report

EXIT_CODES = """exit codes:
  0  every example was read
  1  some examples could not be read (corrupt, missing keys, wrong types, images, lists of different length, refused by
     the tokenizer): named on stderr, equal errors once, counted in the report, and the rest is reported
  2  no report, or one that was not saved: wrong arguments, a file that cannot be opened or written, no document in the
     files, a library that is not installed
  130  interrupted"""


FORMATS = """An example is read by the first of these keys that it has:
  input_ids                  tokens
  messages, conversations    a chat: role and content (text or parts of it), or from and value (ShareGPT);
                             tools and chat_template_kwargs go to the tokenizer's chat template
  chosen, rejected           a preference pair, two documents, with or without prompt: text or chats
  prompt, completion         text, or chats
  instruction, output        Alpaca, with input, system and history if present
  text"""


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def column_names(text: str) -> dict[str, str]:
    pairs = [pair.partition("=")[::2] for pair in text.split(",")]
    if not all(key and name for key, name in pairs):
        raise argparse.ArgumentTypeError(f"expected KEY=COLUMN, with commas between, got {text!r}")
    return dict(pairs)


def writable(text: str) -> Path:
    """Return a path whose folder exists. Raises before a million documents are read, not after."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {path.parent}")
    return path


def parse(argv: list[str] | None) -> argparse.Namespace:
    script = Path(sys.argv[0]).name
    parser = argparse.ArgumentParser(prog=script if script == "packing-ops" else "python -m packing_ops")
    parser.add_argument("--version", action="version", version=f"packing_ops {VERSION}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser(
        "info", help="build and environment, for bug reports; exit code 1 where the library does not load"
    )
    report = commands.add_parser(
        "report",
        help="what packing would save on your data",
        description="What packing would save on your data: lengths, padding today, rows, steps, balance, time.\n\n"
        + FORMATS,
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = report.add_argument
    add(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSON lines, a JSON array (both also as a pipe, - for stdin, or .gz), Parquet, or a folder of "
        "save_to_disk",
    )
    add(
        "--tokenizer",
        default="bytes",
        help="bytes (default: UTF-8 bytes of the text), a tokenizer's folder or a model's name",
    )
    add(
        "--columns",
        type=column_names,
        metavar="KEY=COLUMN,...",
        help="names of your columns, e.g. prompt=question,completion=answer; then only this form is read",
    )
    add("--capacity", type=positive, default=4096, help="slots of a packed row (default: %(default)s)")
    add("--batch-size", type=positive, default=8, help="documents per padded batch and rank (default: %(default)s)")
    add("--dp", type=positive, default=1, help="data-parallel ranks (default: %(default)s)")
    add("--overlong", choices=OVERLONG, default="truncate", help="documents over the capacity (default: %(default)s)")
    add("--hidden-size", type=positive, default=4096, help="of the model, to estimate FLOPs (default: %(default)s)")
    add("--prefix-trees", action="store_true", help="also what computing prefixes once would save that documents share")
    add("--group-by", metavar="FIELD", help="the same, among examples with the same value in this column")
    add("--buffer", type=positive, metavar="N", help="also rows of a stream, of which N examples wait at a time")
    add("--plot", type=writable, metavar="PNG", help="also draw the report")
    add("--json", type=writable, metavar="JSON", help="also write every number")
    table = commands.add_parser(
        "invariance",
        help="which layers of a transformers model keep their bits in any pack",
        description="Runs a model of random weights on the same documents in many rows and compares every layer's "
        "bits.",
        epilog=_invariance_table.EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _invariance_table.add_arguments(table)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller: print would write to the other one, or nowhere
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        status = run(argv)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes at its end
        if isinstance(error, BrokenPipeError):  # the reader has seen enough, as head has
            return 0
        print(f"error: {error}", file=sys.stderr)
        return 2
    return status


def show_invariance(json: Path | None, **options: Any) -> int:
    from packing_ops.integrations.transformers import apply_packing_ops

    found = _invariance_table.check(argparse.Namespace(json=json, **options), apply_packing_ops)
    _invariance_table.show(found)
    if json:
        _invariance_table.save(found, json)
    return 0 if found.packs else 1


def show_info() -> int:
    print(describe_environment())
    return 1 if NOT_LOADED else 0


def report(files: list[Path], json: Path | None, plot: Path | None, **options: Any) -> int:
    if plot:
        from packing_ops.report.picture import save_picture
    found = make_report(files, **options)
    show_report(found)
    if json:
        save_json(found, json)
    if plot:
        save_picture(found, plot)
    if found["unreadable"]:
        return 1
    return 0 if found["examples"]["documents"] else 2


def run(argv: list[str] | None = None) -> int:
    arguments = vars(parse(argv))
    commands: dict[str, Callable[..., int]] = {"report": report, "invariance": show_invariance, "info": show_info}
    command = commands[arguments.pop("command")]
    expected = (ImportError, OSError, ValueError, *((RuntimeError,) if command is show_invariance else ()))
    try:
        return command(**arguments)
    except BrokenPipeError:
        raise
    except expected as error:
        print("error: " + "\n".join(map(printable, str(error).split("\n"))), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
