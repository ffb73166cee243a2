"""The command line: `torch-replay generate`, `audit`, `bench` and `info`."""
