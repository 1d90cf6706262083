"""The command line's options for the tables of memory and speed."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from memeff.bench.cases import HIGHER_MODES, MASKS, MODES
from memeff.bench.extras import NAMES as EXTRA_NAMES
from memeff.bench.implementations import NAMES, is_torch, why_not

UNITS = {"k": 2**10, "M": 2**20}
PICTURES = (".png", ".svg", ".pdf")


def parse(arguments: Sequence[str], description: str | None) -> argparse.Namespace:
    """Return the options with their defaults filled in; a wrong one ends the process."""
    parser = option_parser(description)
    options = parser.parse_args(arguments)
    check_table(parser, options)
    fill_defaults(options)
    check_sizes(parser, options)
    check_implementations(parser, options)
    return options


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = new_parser("", description)
    add = parser.add_argument
    add("table", nargs="?", default="speed", help="speed (default) or memory")
    add(
        "--doctor",
        action="store_true",
        help="check every implementation against float64 on this machine",
    )
    add_size(
        parser,
        "--length",
        "S",
        "keys, in tokens; k and M are 2^10 and 2^20 (default: 1k 2k 4k for speed, 1k 4k 16k 64k "
        "256k 1M for memory)",
        several=True,
    )
    add_size(parser, "--query-length", "T", "queries, at the last positions (default: S)")
    add(
        "--decode",
        action="store_true",
        help="the same as --mode forward --mask causal --query-length 1, each unless given",
    )
    add_size(parser, "--batch", "B", "sequences", 1)
    add_size(parser, "--heads", "N", "query heads", 8)
    add_size(parser, "--kv-heads", "K", "key/value heads (default: N)")
    add_size(parser, "--head-dim", "H", "head size", 64)
    add_dtype(parser, "float32")
    add("--mask", nargs="+", choices=MASKS, help="default: both for speed, causal for memory")
    add(
        "--mode",
        nargs="+",
        choices=MODES + HIGHER_MODES,
        help="default: forward and gradient. gradient is forward + gradient; hvp is a "
        "Hessian-vector product, forward over reverse. Tangents are the arrays themselves",
    )
    add(
        "--with",
        dest="extra",
        nargs="+",
        choices=EXTRA_NAMES,
        default=("plain",),
        help="scores and masks that are added to the calls (default: plain, none)",
    )
    add("--implementation", nargs="+", metavar="NAME", help=NAMES)
    add_size(parser, "--rounds", "N", "samples of each time", 7)
    add_output(parser, "--json", "append a JSON line for each row")
    add_save(parser)
    plot = "draw memory, or FLOP/s, against length; FILE.txt: bars of memory as text"
    add_output(parser, "--plot", plot, plot_file)
    return parser


def new_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser without options for a command of the bench, or "" for its own tables."""
    return argparse.ArgumentParser(
        prog=f"python -m memeff.bench {command}".strip(),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_dtype(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the option for the dtype of all arrays."""
    choices = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=choices, default=default, help=f"default: {default}")


def add_measuring_options(
    parser: argparse.ArgumentParser, names: Sequence[str], rounds: int
) -> None:
    """Add the options of a table whose programs are compiled side by side, with their defaults."""
    parser.add_argument(
        "--implementation",
        nargs="+",
        default=names,
        metavar="NAME",
        help=f"names of the list above (default: {' '.join(names)})",
    )
    add_size(parser, "--rounds", "N", "samples of each time", rounds)
    jobs = "programs compiled at a time; each may take as much of a GPU's memory as its arrays need"
    add_size(parser, "--jobs", "N", jobs, 1)
    add_save(parser)


def add_size(
    parser: argparse.ArgumentParser,
    option: str,
    letter: str,
    meaning: str,
    default: int | list[int] | None = None,
    *,
    several: bool = False,
) -> None:
    """Add an option for a size, or for several where its default is a list.

    Without a default `meaning` says what None stands for.
    """
    help = meaning if default is None else f"{meaning} (default: {str(default).strip('[]')})"
    nargs = "+" if several or isinstance(default, list) else None
    parser.add_argument(option, type=size, nargs=nargs, default=default, metavar=letter, help=help)


def add_save(parser: argparse.ArgumentParser) -> None:
    """Add the option for the file of the results."""
    add_output(parser, "--save", "write the results to FILE, such as docs/benchmarks/NAME.jsonl")


def add_output(
    parser: argparse.ArgumentParser,
    option: str,
    help: str,
    check: Callable[[str], str] | None = None,
) -> None:
    """Add an option for a file that is written, whose name `check` may check."""
    parser.add_argument(option, type=check or output_file, metavar="FILE", help=help)


def size(text: str) -> int:
    """Return the whole number that `text` means, such as 65536 of "64k"."""
    unit = UNITS.get(text[-1:])
    digits = text[:-1] if unit else text
    if not digits.isdecimal() or int(digits) == 0:
        raise argparse.ArgumentTypeError(
            f"expected a whole number above 0, such as 4096 or 64k, got {text!r}"
        )
    return int(digits) * (unit or 1)


def output_file(name: str) -> str:
    """Return the name of a file, whose folder must exist before anything is measured."""
    folder = Path(name).parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {folder}: make it first")
    if Path(name).is_dir():
        raise argparse.ArgumentTypeError(f"{name} is a folder: name a file in it")
    return name


def picture_file(name: str) -> str:
    """Return the name of a file for a picture, in a format that all plots have."""
    if not name.endswith(PICTURES):
        raise argparse.ArgumentTypeError(f"{name!r} must end in {', '.join(PICTURES)}")
    return output_file(name)


def plot_file(name: str) -> str:
    """Return the name of a file for a picture, or for bars as text."""
    return output_file(name) if name.endswith(".txt") else picture_file(name)


def fill_defaults(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on other options."""
    memory = options.table == "memory"
    if options.length is None:
        powers = range(10, 21, 2) if memory else (10, 11, 12)
        options.length = [2**power for power in powers]
    if options.mask is None:
        options.mask = ("causal",) if memory or options.decode else MASKS
    if options.mode is None:
        options.mode = ("forward",) if options.decode else MODES
    if options.decode and not options.query_length:
        options.query_length = 1
    if options.kv_heads is None:
        options.kv_heads = options.heads


def check_table(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse an unknown table, and options that do not fit the table or the doctor."""
    if options.table not in ("speed", "memory"):
        parser.error(
            f"table {options.table!r} is not known: use speed or memory, or begin with hard, "
            "losses, arguments, devices or report. The doctor is --doctor."
        )
    doctor_options = parser.parse_args(["--doctor"])
    doctor_options.implementation = options.implementation
    if options.doctor and options != doctor_options:
        parser.error("--doctor has cases of its own: omit all options but --implementation.")
    draws_text = options.plot is not None and options.plot.endswith(".txt")
    if draws_text and options.table != "memory":
        parser.error("--plot FILE.txt draws memory: use the table memory, or a picture.")
    if options.query_length and set(options.extra) != {"plain"}:
        parser.error("--with needs as many queries as keys: omit --query-length.")


def check_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse sizes that do not fit each other."""
    if options.heads % options.kv_heads:
        parser.error(
            f"--heads {options.heads} must be a multiple of --kv-heads {options.kv_heads}."
        )
    shortest = min(options.length)
    if options.query_length and options.query_length > shortest:
        parser.error(f"--query-length {options.query_length} must be at most --length {shortest}.")


def check_implementations(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse unknown names, and for the table of memory those that have nothing to compile."""
    for name in options.implementation or ():
        try:
            reason = why_not(name, options.dtype)
        except ValueError as error:
            parser.error(str(error))
        if options.table == "memory" and is_torch(name):
            reason = reason or "torch has no compiled memory to tell"
        if options.table == "memory" and reason:
            parser.error(f"--implementation {name}: {reason}.")
