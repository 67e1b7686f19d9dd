"""The process in which ``fp8core doctor`` runs code that may crash; not a command for users."""

from __future__ import annotations

import argparse

import torch

from fp8core.dispatch import plugins, process
from fp8core.doctor import collectives, consult, findings
from fp8core.inspection.explain import device_argument


def main() -> None:
    """Write the records of one part of the report to the file that ``--to`` names."""
    parser = argparse.ArgumentParser(prog="python -m fp8core.doctor", description=__doc__)
    parser.add_argument("--to", required=True)
    parts = parser.add_subparsers(dest="part", required=True)
    backend, all_plugins = parts.add_parser("backend"), parts.add_parser("plugins")
    ranks = parts.add_parser("ranks")
    for part in (backend, all_plugins, ranks):
        part.add_argument("--without", nargs="*", default=[])
    backend.add_argument("name")
    backend.add_argument("--device", type=device_argument)
    backend.add_argument("--done", nargs="*", default=[])
    all_plugins.add_argument("--muted", nargs="*", default=[])
    ranks.add_argument("--backend")
    ranks.add_argument("--rank", type=int)
    ranks.add_argument("--size", type=int)
    ranks.add_argument("--device", type=device_argument)
    ranks.add_argument("--folder")
    args = parser.parse_args()
    plugins.set_aside(dict.fromkeys(args.without, "set aside by the doctor"))
    with process.writing(args.to) as put:
        if args.part == "plugins":
            consult.watch_loading(put)
            results = consult.records(args.muted)
        elif args.part == "ranks":
            group = (args.rank, args.size, args.device, args.folder)
            results = collectives.records(args.backend, *group)
        else:
            # On a busy machine a second thread costs small operations many times their work.
            torch.set_num_threads(1)
            results = findings.records(args.name, args.device, args.done)
        for record in results:
            put(record)


if __name__ == "__main__":
    main()
