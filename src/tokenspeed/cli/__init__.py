"""The command line: `tokenspeed` and its short name `ts`. Commands only; the work is done below this room."""
