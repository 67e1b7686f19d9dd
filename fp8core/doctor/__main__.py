"""The process in which ``fp8core doctor`` examines one backend; not a command for people."""

from __future__ import annotations

import argparse

from fp8core.arguments import device_argument
from fp8core.doctor.findings import write_records


def main() -> None:
    """Write what is found out about one backend to a file, line by line."""
    parser = argparse.ArgumentParser(prog="python -m fp8core.doctor", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--to", required=True)
    parser.add_argument("--device", type=device_argument)
    parser.add_argument("--done", nargs="*", default=[])
    args = parser.parse_args()
    with open(args.to, "a", encoding="utf-8", buffering=1) as stream:
        write_records(stream.write, args.name, args.device, args.done)


if __name__ == "__main__":
    main()
