"""The gateway, ended with its parent: ``python -m tokenspeed.launch.gateway_process PARENT ARGUMENT…``."""

from __future__ import annotations

import importlib
import sys

from tokenspeed.launch.child import die_with


def main() -> None:
    die_with(int(sys.argv[1]))
    importlib.import_module("smg.cli").main(sys.argv[2:])


if __name__ == "__main__":
    main()
